// Four figures with their last minute.

import { $, compact, duration, h, say } from "./dom.js";

const SAMPLES = 60;
const EVERY_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";

const FIGURES = [
  { name: "Tokens a second", value: ({ now, before, seconds }) => (now.generated - before.generated) / seconds, text: compact, unit: "", rest: 0 },
  { name: "Time to first token", value: ({ now, before }) => mean(now.first, before.first), text: duration, unit: "mean" },
  { name: "Between tokens", value: ({ now, before }) => mean(now.inter, before.inter), text: duration, unit: "mean" },
  { name: "Prompt found in cache", value: ({ now, before }) => share(now.cached - before.cached, now.prompt - before.prompt), text: (part) => `${Math.round(100 * part)} %`, unit: "", most: 1 },
];

const mean = ([count, seconds], [countBefore, secondsBefore]) => (count > countBefore ? (seconds - secondsBefore) / (count - countBefore) : null);
const share = (part, all) => (all > 0 ? part / all : null);

export function startSparks(view) {
  const sparks = FIGURES.map(makeSpark);
  $("sparks").append(...sparks.map(({ element }) => element));
  let before = null;
  view.addEventListener("hello", () => { before = null; });
  view.addEventListener("frame", ({ detail: { time_ms, totals } }) => {
    if (before === null) { before = { time_ms, totals }; return; }
    const passed = time_ms - before.time_ms;
    if (passed < EVERY_MS) return;
    const figures = { now: totals, before: before.totals, seconds: passed / 1000 };
    FIGURES.forEach(({ value, rest = null }, place) => sparks[place].push(value(figures) ?? rest));
    before = { time_ms, totals };
  });
}

function makeSpark({ name, text, unit, most }) {
  const value = h("p", { class: "value" }, "–");
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 100 26");
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("aria-hidden", "true");
  const [area, line] = ["area", "line"].map((kind) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    drawing.append(path);
    return path;
  });
  const samples = [];
  /** `null`: nothing happened that could be measured; the last value stays. */
  const push = (sample) => {
    samples.push(sample);
    if (samples.length > SAMPLES) samples.shift();
    const known = samples.filter((one) => one !== null);
    const last = known.at(-1);
    value.replaceChildren(last === undefined ? "–" : text(last), unit && last !== undefined ? h("small", {}, ` ${unit}`) : "");
    const top = most ?? Math.max(...known, 1e-9) * 1.05;
    const points = [];
    samples.forEach((one, place) => {
      if (one !== null) points.push([100 - (samples.length - 1 - place) * (100 / (SAMPLES - 1)), 25 - 23 * Math.min(1, one / top)]);
    });
    const path = points.map(([x, y], place) => `${place === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    line.setAttribute("d", path);
    area.setAttribute("d", points.length > 1 ? `${path}L${points.at(-1)[0].toFixed(1)} 26L${points[0][0].toFixed(1)} 26Z` : "");
  };
  return { element: h("div", { class: "spark" }, h("p", { class: "name", title: name }, name), value, drawing), push };
}
