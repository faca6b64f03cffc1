// A load of demonstration requests, through the public API. A browser opens six connections to a host, so the requests
// come as lists of prompts in a few bodies: to the engine each prompt is a request of its own.

import { post } from "./api.js";
import { $, say, whole } from "./dom.js";

/** Bodies at once; one connection watches, and one chats. */
const BODIES = 4;
/** All prompts begin so: its blocks are shared. */
const BEGINNING = "The log of a harbour, kept since the first light was lit on the mole. Every ship that comes in with the tide is " +
  "written down with its name, its cargo and the hour, and when the tide goes out, so is what it has left behind.\n\n";
const SHIPS = ["Albatross", "Beacon", "Curlew", "Dunlin", "Eider", "Fulmar", "Gannet", "Heron", "Ibis", "Jaeger", "Kittiwake", "Lapwing"];
const CARGOES = ["salt", "timber", "lanterns", "letters", "copper", "rope", "barley", "glass", "wool", "charts", "slate", "oranges"];

let aborter = null;

export function startLoad({ onKeyNeeded }) {
  const [slider, button] = [$("load-n"), $("load-start")];
  const count = () => say($("load-count"), whole.format(slider.valueAsNumber));
  slider.addEventListener("input", count);
  count();
  $("load").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (aborter) { aborter.abort(); return; }
    button.textContent = "Stop";
    aborter = new AbortController();
    const outcome = await run(slider.valueAsNumber, Number($("load-length").value), aborter.signal);
    aborter = null;
    button.textContent = "Start";
    say($("load-state"), outcome.text);
    if (outcome.status === 401) onKeyNeeded();
  });
}

async function run(n, most, signal) {
  const started = performance.now();
  say($("load-state"), `${whole.format(n)} requests are under way.`);
  const seed = Date.now() % 1_000_000;
  const prompts = Array.from({ length: n }, (_, place) => prompt(seed + place));
  const bodies = Math.min(BODIES, n);
  const part = (body) => {
    const mine = prompts.filter((_, place) => place % bodies === body);
    // They go on to their most tokens, and not all of them are to end at once.
    const longest = Math.max(8, Math.round(most * (1 - body / (2 * BODIES))));
    return post("v1/completions", {
      prompt: mine, max_tokens: longest, ignore_eos: true, temperature: 1, seed: seed + body, include_kv_usage: true,
    }, signal).then((answer) => answer.json());
  };
  try {
    const answers = await Promise.all(Array.from({ length: bodies }, (_, body) => part(body)));
    const sum = (of) => answers.reduce((all, { usage }) => all + of(usage), 0);
    const seconds = (performance.now() - started) / 1000;
    const tokens = sum((usage) => usage.completion_tokens), yields = sum((usage) => usage.kv?.preemptions ?? 0);
    return { text: `${whole.format(n)} requests and ${whole.format(tokens)} tokens in ${seconds.toFixed(1)} s; ${yields === 0 ? "none had to yield" : `they yielded ${whole.format(yields)} times`}.` };
  } catch (error) {
    aborter?.abort();
    return error.name === "AbortError" ? { text: "Stopped." } : { text: error.message, status: error.status };
  }
}

function prompt(number) {
  const of = (list, salt) => list[Math.abs(Math.imul(number + salt, 2654435761) >> 8) % list.length];
  const lines = Array.from({ length: 3 + (number % 4) }, (_, line) =>
    `Day ${number % 365 + line}. The ${of(SHIPS, line)} came in with ${of(CARGOES, line + 7)} and ${of(CARGOES, line + 31)}.`);
  return `${BEGINNING}${lines.join("\n")}\nThe keeper wrote:`;
}
