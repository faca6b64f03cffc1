// Draws the blocks of a tier as cells, and says what is under the pointer. Where cells would be smaller than a few
// pixels, one cell stands for several blocks.

import { ownerColour, palette } from "./colours.js";
import { $, say, whole } from "./dom.js";
import { KIND, PHASES } from "./engine.js";

const LARGEST = 15;
const SMALLEST = 4;
/** Pools up to here are shown whole; of larger ones the part that has been used. */
const WHOLE = 4096;
const LEAST_SHOWN = 1024;
/** What says most about a cell of several blocks. */
const WEIGHT = { [KIND.moving]: 5, [KIND.used]: 4, [KIND.copy]: 3, [KIND.cached]: 2, [KIND.free]: 1, [KIND.retired]: 0 };

export class BlockMap {
  #canvas;
  #context;
  #pool;
  #view;
  #name;
  #most;
  #cursor = null;
  #lit = null;
  #layout = { columns: 1, rows: 1, size: LARGEST, each: 1, shown: 0 };

  /** `most`: pixels that it may be high. `onPick` hears which sequence is pointed at. */
  constructor(name, view, most, onPick) {
    this.#canvas = $(name);
    this.#context = this.#canvas.getContext("2d");
    this.#pool = view[name];
    this.#view = view;
    this.#name = name;
    this.#most = most;
    this.onPick = onPick;
    new ResizeObserver(() => this.draw()).observe(this.#canvas.parentElement);
    const canvas = this.#canvas;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.leave(); });
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Where block `place` is, in the page's pixels from the canvas' corner. */
  spot(place) {
    const { columns, size, each } = this.#layout;
    const cell = Math.floor(place / each);
    return { x: (cell % columns + 0.5) * size, y: (Math.floor(cell / columns) + 0.5) * size, size };
  }

  get canvas() { return this.#canvas; }

  #measure() {
    const pool = this.#pool;
    const width = this.#canvas.parentElement.clientWidth;
    const touched = 2 ** Math.ceil(Math.log2(Math.max(pool.touched, LEAST_SHOWN)));
    const shown = pool.size <= WHOLE ? pool.size : Math.min(pool.size, touched);
    let size = LARGEST;
    const fits = () => Math.ceil(shown / Math.max(1, Math.floor(width / size))) * size <= this.#most;
    while (size > SMALLEST && !fits()) size -= 1;
    const columns = Math.max(1, Math.floor(width / size));
    const mostRows = Math.max(1, Math.floor(this.#most / size));
    const each = Math.max(1, Math.ceil(shown / (columns * mostRows)));
    const rows = Math.max(1, Math.ceil(shown / each / columns));
    const before = this.#layout;
    this.#layout = { columns, rows, size, each, shown, width };
    const isSame = ["columns", "rows", "size", "each", "shown", "width"].every((name) => before[name] === this.#layout[name]);
    const ratio = Math.min(devicePixelRatio || 1, 2);
    if (!isSame || this.ratio !== ratio) {
      this.ratio = ratio;
      this.#canvas.width = Math.max(1, Math.round(width * ratio));
      this.#canvas.height = Math.max(1, Math.round(rows * size * ratio));
      this.#canvas.style.height = `${rows * size}px`;
      const rest = pool.size - shown;
      const note = [each > 1 ? `Each cell stands for ${each} blocks.` : "", rest > 0 ? `${whole.format(rest)} more blocks are free.` : ""];
      const element = $(`${this.#name}-rest`);
      say(element, note.filter(Boolean).join(" "));
      element.hidden = element.textContent === "";
      return true;
    }
    return false;
  }

  /** Draws all, or the places that have changed. */
  draw(changed) {
    const isNew = this.#measure();
    const { each, shown } = this.#layout;
    const context = this.#context;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.colours = palette();
    const last = Math.ceil(shown / each);
    // The cell that was pointed at is elsewhere now.
    if (this.#cursor !== null && (isNew || this.#cursor >= last)) this.leave();
    if (isNew || !changed) {
      context.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
      for (let cell = 0; cell < last; cell += 1) this.#cell(cell);
    } else {
      for (const [from, to] of changed) {
        const end = Math.min(Math.ceil(to / each), last);
        for (let cell = Math.floor(from / each); cell < end; cell += 1) this.#cell(cell);
      }
    }
    if (this.#cursor !== null) this.#explain();
  }

  /** The block that a cell shows. */
  #shownBlock(cell) {
    const { each, shown } = this.#layout;
    const first = cell * each;
    if (each === 1) return first;
    let best = first;
    for (let place = first; place < Math.min(first + each, shown); place += 1) {
      if (WEIGHT[this.#pool.kinds[place]] > WEIGHT[this.#pool.kinds[best]]) best = place;
    }
    return best;
  }

  #cell(cell) {
    const { columns, size } = this.#layout;
    const place = this.#shownBlock(cell);
    const { kinds, references, owners } = this.#pool;
    const context = this.#context, colours = this.colours;
    const gap = size >= 9 ? 2 : 1;
    const x = (cell % columns) * size, y = Math.floor(cell / columns) * size, side = size - gap;
    const kind = kinds[place], owner = owners[place];
    context.clearRect(x, y, size, size);
    context.globalAlpha = this.#lit === null || this.#isLit(owner) ? 1 : 0.28;
    const fill = (colour) => {
      context.fillStyle = colour;
      if (size >= 9) { context.beginPath(); context.roundRect(x, y, side, side, 2.5); context.fill(); }
      else context.fillRect(x, y, side, side);
    };
    switch (kind) {
      case KIND.free: fill(colours.free); break;
      case KIND.retired: fill(colours.retired); break;
      case KIND.cached:
        fill(colours.cached);
        break;
      default: {
        const colour = this.#colour(owner);
        fill(kind === KIND.copy ? colours.free : colour);
        if (kind === KIND.copy) {
          context.strokeStyle = colour;
          context.lineWidth = size >= 9 ? 2 : 1;
          const inset = context.lineWidth / 2;
          context.strokeRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
        } else if (kind === KIND.moving) {
          context.fillStyle = colours.moving;
          context.fillRect(x, y + side / 2, side, side / 2);
        } else if (references[place] > 1) {
          context.fillStyle = colours.mark;
          if (size >= 9) { context.beginPath(); context.arc(x + side / 2, y + side / 2, side / 6, 0, 7); context.fill(); }
          else if (size >= 6) context.fillRect(x + side / 2 - 1, y + side / 2 - 1, 2, 2);
        }
      }
    }
    context.globalAlpha = 1;
    if (this.#cursor === cell) {
      context.strokeStyle = colours.ring;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, side - 2, side - 2);
    }
  }

  #colour(owner) {
    const row = this.#view.seqs.get(owner);
    return owner === 0 ? this.colours.unknown : ownerColour(row ? row.request : owner);
  }

  #isLit(owner) {
    const row = this.#view.seqs.get(owner);
    return row !== undefined && row.request === this.#lit;
  }

  /** Shows the blocks of one request, or of all (null). */
  light(request) {
    if (this.#lit === request) return;
    this.#lit = request;
    this.draw();
  }

  #point(event) {
    const box = this.#canvas.getBoundingClientRect();
    const { columns, size, each, shown } = this.#layout;
    const column = Math.floor((event.clientX - box.left) / size), row = Math.floor((event.clientY - box.top) / size);
    const cell = row * columns + column;
    if (column >= columns || column < 0 || row < 0 || cell >= Math.ceil(shown / each)) this.leave();
    else this.#go(cell, false);
  }

  #key(event) {
    const { columns, shown, each } = this.#layout;
    const last = Math.ceil(shown / each) - 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.leave();
    else if (step !== undefined) {
      event.preventDefault();
      this.#go(Math.max(0, Math.min(last, this.#cursor === null ? 0 : this.#cursor + step)), true);
    }
  }

  #go(cell, isSpoken) {
    const before = this.#cursor;
    this.#cursor = cell;
    if (before !== null && before !== cell) this.#cell(before);
    this.#cell(cell);
    this.#explain();
    if (isSpoken) $("block-spoken").textContent = $("tip").textContent;
  }

  leave() {
    if (this.#cursor === null) return;
    const before = this.#cursor;
    this.#cursor = null;
    this.#cell(before);
    $("tip").hidden = true;
    this.onPick(null);
  }

  /** What the block under the cursor is, beside it. */
  #explain() {
    const { each, shown, size } = this.#layout;
    const place = this.#shownBlock(this.#cursor);
    const { kinds, references, owners } = this.#pool;
    const kind = kinds[place], row = this.#view.seqs.get(owners[place]);
    const first = this.#cursor * each, last = Math.min(first + each, shown) - 1;
    const where = this.#name === "device" ? "device" : "CPU";
    const title = each > 1 && last > first ? `Blocks ${whole.format(first)} to ${whole.format(last)}, ${where}` : `Block ${whole.format(place)}, ${where}`;
    const what = {
      [KIND.free]: "free", [KIND.cached]: "cached prefix: nobody holds it, and it may be found", [KIND.used]: "used",
      [KIND.moving]: "on its way from CPU memory to the device", [KIND.copy]: "copy of a block on the device", [KIND.retired]: "left the pool",
    }[kind];
    const holders = references[place] > 1 ? `, held ${references[place]} times` : references[place] === 1 ? ", held once" : "";
    const lines = [`${what}${holders}`];
    if (row) {
      lines.push(`request ${row.request}${row.sample > 0 ? `, sample ${row.sample}` : ""}: ${PHASES[row.phase]}`);
      lines.push(`${whole.format(row.prompt)} prompt tokens, ${whole.format(row.output)} of at most ${whole.format(row.most)} answered`);
    } else if (kind === KIND.used) lines.push(owners[place] === 0 ? "it is being given back" : "of a request that is not listed");
    const tip = $("tip");
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }), lines.join("\n"));
    tip.style.whiteSpace = "pre-line";
    tip.hidden = false;
    const home = this.#canvas.offsetParent ?? document.body;
    const spot = this.spot(first);
    const left = this.#canvas.offsetLeft + spot.x + size, top = this.#canvas.offsetTop + spot.y + size;
    tip.style.left = `${Math.max(0, Math.min(left, home.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${top}px`;
    this.onPick(row && (kind === KIND.used || kind === KIND.moving || kind === KIND.copy) ? row.request : null);
  }
}
