// What the server shows of its engine, kept up to date from the changes that it sends.

import { events, watch } from "./api.js";

/** What a block is. */
export const KIND = { free: 0, cached: 1, used: 2, moving: 3, copy: 4, retired: 5 };
export const PHASES = ["waiting", "prompt", "answering", "coming back", "swapped out"];
const ROW = ["seq", "request", "sample", "phase", "priority", "prompt", "computed", "output", "most", "cached", "preemptions", "device", "swap", "arrived"];
const RETRY_MS = [500, 1000, 2000, 5000];

/** The blocks of a tier. */
class Pool {
  constructor() { this.resize(0); }

  resize(size) {
    const grown = (old, Type) => { const made = new Type(size); if (old) made.set(old.subarray(0, size)); return made; };
    this.kinds = grown(this.kinds, Uint8Array);
    this.references = grown(this.references, Uint16Array);
    this.owners = grown(this.owners, Float64Array);
    this.size = size;
    this.touched = Math.min(this.touched ?? 0, size);
  }

  clear() { this.touched = 0; this.kinds = this.references = this.owners = null; this.resize(0); }

  /** Reads changes, as src/http/console/encode.rs writes them. Returns the places that have changed, [from, to) each. */
  apply([size, text]) {
    if (size !== this.size) this.resize(size);
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const changed = [];
    let at = 0, place = 0, owner = 0;
    const number = () => {
      let value = 0, scale = 1, byte;
      do { byte = bytes[at++]; value += (byte & 0x7f) * scale; scale *= 128; } while (byte >= 0x80);
      return value;
    };
    while (at < bytes.length) {
      const head = bytes[at++];
      if (head & 8) place += number();
      const length = head & 16 ? number() : 1;
      const given = head & 32 ? number() : -1;
      if (head & 64) {
        const difference = number();
        owner += difference % 2 ? -(difference + 1) / 2 : difference / 2;
      }
      const end = place + length;
      this.kinds.fill(head & 7, place, end);
      this.references.fill(given < 0 ? Number(owner !== 0) : given, place, end);
      this.owners.fill(owner, place, end);
      changed.push([place, end]);
      place = end;
    }
    this.touched = Math.max(this.touched, place);
    return changed;
  }

  count(...kinds) {
    let found = 0;
    for (const kind of this.kinds) if (kinds.includes(kind)) found += 1;
    return found;
  }
}

/** Events: `hello` (facts), `frame` (what has changed), `state` (live, lost, full, forbidden, off, resting). */
export class EngineView extends EventTarget {
  device = new Pool();
  swap = new Pool();
  /** Sequences by their number. */
  seqs = new Map();
  counts = [0, 0, 0];
  state = "resting";
  #aborter = null;
  #failures = 0;

  /** Begins to watch, if it does not yet. */
  start() {
    if (this.#aborter) return;
    this.#aborter = new AbortController();
    this.#run(this.#aborter.signal);
  }

  /** Nobody looks: the server takes no snapshots for us. */
  rest() {
    this.#aborter?.abort();
    this.#aborter = null;
    this.#tell("resting");
  }

  #tell(state, error) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: { state, error } }));
  }

  async #run(signal) {
    while (!signal.aborted) {
      try {
        const answer = await watch(10, signal);
        this.#failures = 0;
        this.#tell("live");
        for await (const { event, data } of events(answer)) {
          if (event === "hello") this.dispatchEvent(new CustomEvent("hello", { detail: JSON.parse(data) }));
          else if (event === "frame") this.#take(JSON.parse(data), data.length);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403) return this.#tell("forbidden", error);
        if (error.status === 404) return this.#tell("off", error);
        if (error.status === 429) this.#tell("full", error);
      }
      if (signal.aborted) return;
      if (this.state !== "full" && (this.state === "live" || this.#failures > 0)) this.#tell("lost");
      const wait = this.state === "full" ? 10_000 : RETRY_MS[Math.min(this.#failures, RETRY_MS.length - 1)];
      this.#failures += 1;
      await new Promise((done) => setTimeout(done, wait));
    }
  }

  #take(frame, size) {
    if (frame.key) {
      this.device.clear();
      this.swap.clear();
      this.seqs.clear();
    }
    for (const seq of frame.gone) this.seqs.delete(seq);
    for (const values of frame.seqs) {
      const row = Object.fromEntries(ROW.map((name, place) => [name, values[place]]));
      this.seqs.set(row.seq, row);
    }
    this.counts = frame.counts;
    const changed = { device: this.device.apply(frame.device), swap: this.swap.apply(frame.swap) };
    this.dispatchEvent(new CustomEvent("frame", { detail: { ...frame, changed, size } }));
  }
}
