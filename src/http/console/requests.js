// The table of requests that run and wait.

import { ownerColour } from "./colours.js";
import { $, h, say, whole } from "./dom.js";
import { PHASES } from "./engine.js";

const MAX_ROWS = 60;
const EVERY_MS = 250;
/** Who answers comes first, who waits last. */
const ORDER = [4, 1, 0, 2, 3];

export function startRequests(view) {
  const rows = [];
  let lit = null, isDue = false, last = 0;

  const show = () => {
    isDue = false;
    last = performance.now();
    const [running, waiting, swapped] = view.counts;
    say($("requests-figure"), `${whole.format(running)} running, ${whole.format(waiting)} waiting, ${whole.format(swapped)} swapped out`);
    const all = [...view.seqs.values()].sort((one, other) =>
      ORDER[one.phase] - ORDER[other.phase] || one.priority - other.priority || one.request - other.request || one.seq - other.seq);
    const shown = all.slice(0, MAX_ROWS);
    while (rows.length < shown.length) rows.push(makeRow());
    const body = $("rows");
    while (body.children.length > shown.length) body.lastElementChild.remove();
    shown.forEach((seq, place) => {
      fill(rows[place], seq, lit);
      if (body.children[place] !== rows[place].element) body.append(rows[place].element);
    });
    const rest = running + waiting + swapped - shown.length;
    say($("rows-rest"), all.length === 0 ? "No requests." : rest > 0 ? `and ${whole.format(rest)} more` : "");
  };
  const soon = () => {
    if (isDue) return;
    isDue = true;
    setTimeout(show, Math.max(0, EVERY_MS - (performance.now() - last)));
  };
  view.addEventListener("frame", soon);
  return { light: (request) => { lit = request; soon(); } };
}

function makeRow() {
  const cells = ["name", "state", "bar", "tokens", "blocks"].map(() => h("td"));
  const [name, state, bar, tokens, blocks] = cells;
  const swatch = h("span", { class: "swatch", "aria-hidden": "true" }), label = h("span");
  name.append(swatch, label);
  state.className = "state";
  tokens.className = blocks.className = "number";
  const prompt = h("span", { class: "prompt" }), output = h("span", { class: "output" });
  const progress = h("span", { class: "progress", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100" }, prompt, output);
  bar.append(progress);
  return { element: h("tr", {}, ...cells), swatch, label, state, progress, prompt, output, tokens, blocks };
}

function fill(row, seq, lit) {
  say(row.label, seq.sample > 0 ? `${seq.request}.${seq.sample}` : `${seq.request}`);
  row.swatch.style.background = ownerColour(seq.request);
  const again = seq.preemptions > 0 ? `, yielded ${seq.preemptions}×` : "";
  say(row.state, `${PHASES[seq.phase]}${again}`);
  row.state.dataset.phase = seq.phase;
  // The prompt is the first part of the way, as long as it is beside what may come.
  const total = Math.max(1, seq.prompt + seq.most);
  const computed = Math.min(seq.computed, seq.prompt) / total;
  const answered = seq.output > 0 ? (seq.prompt + seq.output) / total : 0;
  row.prompt.style.transform = `scaleX(${(seq.output > 0 ? seq.prompt / total : computed).toFixed(3)})`;
  row.output.style.transform = `scaleX(${answered.toFixed(3)})`;
  row.prompt.style.zIndex = 1;
  const percent = Math.round(100 * Math.max(computed, answered));
  if (row.progress.getAttribute("aria-valuenow") !== String(percent)) row.progress.setAttribute("aria-valuenow", percent);
  row.progress.setAttribute("aria-label", `Request ${seq.request}`);
  say(row.tokens, `${whole.format(seq.prompt)} + ${whole.format(seq.output)} of ${whole.format(seq.most)}`);
  say(row.blocks, `${whole.format(seq.device || seq.swap)}${seq.phase === 4 ? " CPU" : ""}`);
  row.element.classList.toggle("lit", lit === seq.request);
}
