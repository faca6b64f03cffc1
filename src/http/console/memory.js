// The memory's panel: the blocks of both tiers, what moves between them, and the figures.

import { BlockMap } from "./blocks.js";
import { onTheme, ownerColour, palette } from "./colours.js";
import { $, bytes, lessMotion, say, whole } from "./dom.js";
import { KIND } from "./engine.js";

const FLIGHT_MS = 700;
const MAX_FLIGHTS = 80;
/** The tide's rates are those of so long. */
const RATE_MS = 2000;

export function startMemory(view, onPick) {
  let picked = null;
  const pick = (request) => {
    if (request === picked) return;
    picked = request;
    // After the event that asks: both maps are drawn anew.
    queueMicrotask(() => maps.forEach((map) => map.light(picked)));
    onPick(request);
  };
  const device = new BlockMap("device", view, 250, pick);
  const swap = new BlockMap("swap", view, 170, pick);
  const maps = [device, swap];
  const flights = new Flights(device, swap);
  onTheme(() => maps.forEach((map) => map.draw()));

  let blockBytes = 0;
  const history = [];
  view.addEventListener("hello", ({ detail }) => {
    blockBytes = detail.block_bytes;
    say($("block-size"), `${detail.block_size} tokens, ${bytes(blockBytes)} a block`);
    history.length = 0;
  });
  view.addEventListener("frame", ({ detail }) => {
    device.draw(detail.key ? undefined : detail.changed.device);
    swap.draw(detail.key ? undefined : detail.changed.swap);
    if (!detail.key) flights.add(detail, view);
    figures(view, blockBytes);
    tide(detail, history, blockBytes);
  });
}

function figures(view, blockBytes) {
  const tell = (name, pool, label) => {
    const held = pool.count(KIND.used, KIND.moving, KIND.copy), cached = pool.count(KIND.cached);
    const size = pool.size - pool.count(KIND.retired);
    say($(`${name}-figure`), `${whole.format(held)} of ${whole.format(size)} blocks used, ${whole.format(cached)} cached · ${bytes(size * blockBytes)}`);
    // What has the focus is not named anew all the time: a screen reader would say nothing else.
    if (document.activeElement === $(name)) return;
    $(name).setAttribute("aria-label", `${label}: ${whole.format(held)} of ${whole.format(size)} used, ${whole.format(cached)} cached`);
  };
  tell("device", view.device, "Blocks on the device");
  tell("swap", view.swap, "Blocks in CPU memory");
}

function tide({ time_ms, totals }, history, blockBytes) {
  history.push({ time_ms, out: totals.out, in: totals.in });
  while (history.length > 2 && time_ms - history[0].time_ms > RATE_MS) history.shift();
  const [first] = history;
  const seconds = Math.max(0.2, (time_ms - first.time_ms) / 1000);
  say($("tide-out"), whole.format(Math.round((totals.out - first.out) / seconds)));
  say($("tide-in"), whole.format(Math.round((totals.in - first.in) / seconds)));
  const [swapped, recomputed] = totals.preempted;
  say($("tide-sum"), `${whole.format(totals.out)} out, ${whole.format(totals.in)} back so far · ${whole.format(swapped + recomputed)} preemptions`);
}

/** Blocks on their way, drawn over both maps. */
class Flights {
  #maps;
  #canvas = $("flights");
  #flying = [];
  #isRunning = false;

  constructor(device, swap) { this.#maps = { device, swap }; }

  add({ out, back }, view) {
    if (lessMotion.matches || document.hidden) return;
    const now = performance.now();
    const launch = (pairs, from, to) => {
      for (let at = 0; at < pairs.length && this.#flying.length < MAX_FLIGHTS; at += 2) {
        const [start, end] = [this.#spot(from, pairs[at]), this.#spot(to, pairs[at + 1])];
        const pool = to === "swap" ? view.swap : view.device;
        const row = view.seqs.get(pool.owners[pairs[at + 1]]);
        if (start && end) this.#flying.push({ start, end, began: now + Math.random() * 120, request: row?.request });
      }
    };
    launch(out, "device", "swap");
    launch(back, "swap", "device");
    if (this.#flying.length > 0 && !this.#isRunning) {
      this.#isRunning = true;
      requestAnimationFrame((time) => this.#draw(time));
    }
  }

  #spot(name, place) {
    const map = this.#maps[name], { offsetLeft, offsetTop, offsetHeight } = map.canvas;
    const { x, y } = map.spot(place);
    // Beyond what is shown it leaves the edge.
    return { x: offsetLeft + x, y: offsetTop + Math.min(y, offsetHeight) };
  }

  #draw(now) {
    const canvas = this.#canvas, ratio = Math.min(devicePixelRatio || 1, 2);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.#flying = this.#flying.filter(({ began }) => now - began < FLIGHT_MS);
    const { moving } = palette();
    for (const { start, end, began, request } of this.#flying) {
      const time = Math.max(0, (now - began) / FLIGHT_MS);
      const eased = time * time * (3 - 2 * time);
      // A little sideways, as water goes.
      const sway = Math.sin(time * Math.PI) * 14;
      const x = start.x + (end.x - start.x) * eased + sway, y = start.y + (end.y - start.y) * eased;
      context.globalAlpha = Math.min(1, 4 * (1 - time));
      context.fillStyle = request === undefined ? moving : ownerColour(request);
      context.strokeStyle = moving;
      context.lineWidth = 1;
      context.beginPath();
      context.roundRect(x - 3.5, y - 3.5, 7, 7, 2);
      context.fill();
      context.stroke();
    }
    context.globalAlpha = 1;
    this.#isRunning = this.#flying.length > 0;
    if (this.#isRunning) requestAnimationFrame((time) => this.#draw(time));
  }
}
