// Requests to the server, and its event streams. Keys stay in this tab.

const KEY = "pagetide.key";
const WATCH_KEY = "pagetide.watch-key";

function kept(name) {
  try { return sessionStorage.getItem(name) ?? ""; } catch { return ""; }
}

function keep(name, value) {
  try { sessionStorage.setItem(name, value); } catch { /* storage is off: it is asked for again */ }
}

let key = kept(KEY);
let watchKey = kept(WATCH_KEY);

export function setKey(value) { key = value; keep(KEY, value); }
export function setWatchKey(value) { watchKey = value; keep(WATCH_KEY, value); }

/** An answer that says what is wrong. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function send(path, { bearer, ...options }) {
  const headers = { ...options.headers };
  if (bearer) headers.Authorization = `Bearer ${bearer}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server cannot be reached.");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, body.error?.code, body.error?.message ?? `The server answered ${answer.status}.`);
}

export const get = (path, options = {}) => send(path, { bearer: key, ...options });

export const post = (path, body, signal) =>
  send(path, { bearer: key, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

/** The memory's events. Another key may be needed for them than for the rest. */
export const watch = (rate, signal) => send(`console/events?rate=${rate}`, { bearer: watchKey || key, signal });

/** Goes through an event stream: `{event, data}` for each event, `{comment}` for each comment. */
export async function* events(answer) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let rest = "", event = "message", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      let end;
      while ((end = rest.indexOf("\n")) >= 0) {
        const line = rest.slice(0, end);
        rest = rest.slice(end + 1);
        if (line === "") {
          if (data.length > 0) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
