// Chatting: the messages of the chat that is open, and the answer that comes.

import { ApiError, events, post } from "./api.js";
import { $, copy, duration, h, say, whole } from "./dom.js";
import { render } from "./markdown.js";
import { chats, forget, newChat, remove, save, titleOf } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty"];
const IDEAS = ["What is Pagetide?", "How do I limit the KV cache?", "Tell me a story about a lighthouse."];
const SPEAK_EVERY_MS = 2500;

let open = chats[0] ?? newChat();
/** The answer under way: `{chat, message, stop}`. */
let answering = null;
/** Called where the server asks for a key. */
let askKey = () => {};

export function startChat({ onKeyNeeded }) {
  askKey = onKeyNeeded;
  $("ideas").append(...IDEAS.map((idea) =>
    h("li", {}, h("button", { type: "button", onclick: () => { $("input").value = idea; submit(); } }, idea))));
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("stop").addEventListener("click", () => answering?.stop());
  $("new-chat").addEventListener("click", () => {
    show(open.messages.length > 0 ? newChat({ ...open.settings }) : open);
    $("input").focus();
  });
  disclose("show-chats", "chats");
  disclose("show-settings", "settings");
  const input = $("input");
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  input.addEventListener("input", grow);
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").addEventListener("input", readSettings);
  addEventListener("pagehide", () => {
    if (!answering) return;
    answering.message.stopped = true;
    save(answering.chat);
  });
  show(open);
}

function disclose(button, drawer) {
  $(button).addEventListener("click", () => {
    const opens = $(drawer).hidden;
    for (const [other, its] of [["show-chats", "chats"], ["show-settings", "settings"]]) {
      const isOpen = other === button && opens;
      $(its).hidden = !isOpen;
      $(other).setAttribute("aria-expanded", String(isOpen));
    }
  });
}

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function readSettings() {
  const settings = {};
  if ($("set-system").value.trim()) settings.system = $("set-system").value;
  for (const name of NUMBERS) {
    const field = $(`set-${name}`);
    if (field.value !== "" && field.validity.valid) settings[name] = Number(field.value);
  }
  open.settings = settings;
  save(open);
}

function show(chat) {
  open = chat;
  for (const name of ["system", ...NUMBERS]) $(`set-${name}`).value = chat.settings?.[name] ?? "";
  $("log").replaceChildren(...chat.messages.map((message, place) => element(message, place)));
  showAround();
  showList();
  if (answering?.chat === chat) update(answering);
  $("log-wrap").scrollTop = $("log-wrap").scrollHeight;
}

function showAround() {
  say($("chat-title"), titleOf(open));
  $("empty").hidden = open.messages.length > 0;
  $("send").hidden = answering !== null;
  $("stop").hidden = answering === null;
}

function showList() {
  $("chat-list").replaceChildren(...chats.map((chat) => {
    const button = h("button", { type: "button", class: "open", onclick: () => show(chat) }, titleOf(chat));
    if (chat === open) button.setAttribute("aria-current", "true");
    const forget = h("button", { type: "button", class: "quiet", "aria-label": `Delete chat: ${titleOf(chat)}`, onclick: () => {
      if (answering?.chat === chat) answering.stop();
      remove(chat);
      show(chat === open ? chats[0] ?? newChat() : open);
    } }, "Delete");
    return h("li", {}, button, forget);
  }));
}

/** A message with its foot: what it cost, and what can be done with it. */
function element(message, place) {
  const isUser = message.role === "user";
  const text = h("div", { class: "text" });
  const made = h("li", { class: `message ${message.role}` },
    h("p", { class: "who" }, isUser ? "You" : "Model"));
  if (!isUser) made.append(reasoningOf(message));
  made.append(text);
  if (isUser) text.textContent = message.content;
  else render(text, message.content);
  if (message.error) made.append(h("p", { class: "error" }, message.error));
  const foot = h("div", { class: "foot" });
  made.append(foot);
  if (!isUser && message !== answering?.message) {
    foot.append(...figures(message).map((figure) => h("span", {}, figure)));
    if (message.content) foot.append(h("button", { type: "button", class: "quiet", onclick: () => copy(message.content) }, "Copy"));
    if (place === open.messages.length - 1) {
      foot.append(h("button", { type: "button", class: "quiet", onclick: regenerate }, "Regenerate"));
    }
  }
  return made;
}

function reasoningOf(message) {
  const text = h("div");
  text.textContent = message.reasoning ?? "";
  return h("details", { class: "reasoning", hidden: !message.reasoning }, h("summary", {}, "Reasoning"), text);
}

/** What an answer took, in words. */
function figures({ usage, seconds, first, finish, stopped, pauses }) {
  const found = [];
  if (stopped) found.push("stopped");
  if (finish === "length") found.push("cut at the most tokens");
  if (usage) {
    found.push(`${whole.format(usage.prompt_tokens)} + ${whole.format(usage.completion_tokens)} tokens in ${duration(seconds)}`);
    const { kv } = usage;
    const cached = kv ? kv.cached_tokens.device + kv.cached_tokens.cpu : 0;
    if (cached > 0) found.push(`${whole.format(cached)} cached${kv.cached_tokens.cpu > 0 ? `, ${whole.format(kv.cached_tokens.cpu)} of them from CPU memory` : ""}`);
    if (kv?.preemptions > 0) found.push(`paused ${kv.preemptions === 1 ? "once" : `${kv.preemptions} times`}, ${duration(kv.paused_ms / 1000)}`);
    if (kv?.recomputed_tokens > 0) found.push(`${whole.format(kv.recomputed_tokens)} tokens computed again`);
  } else if (pauses > 0) found.push(`paused ${pauses === 1 ? "once" : `${pauses} times`}`);
  if (first !== undefined) found.push(`first token after ${duration(first)}`);
  return found;
}

function submit() {
  const content = $("input").value.trim();
  if (answering || !content) return;
  $("input").value = "";
  grow();
  if (!open.title) open.title = content.length > 60 ? `${content.slice(0, 57)}…` : content;
  open.messages.push({ role: "user", content });
  save(open);
  answer(open);
}

function regenerate() {
  if (answering || open.messages.at(-1)?.role !== "assistant") return;
  answer(open, open.messages.pop());
}

function request(chat) {
  const { system, ...numbers } = chat.settings ?? {};
  // A question that got no answer is left out: the templates of some models want turns that alternate.
  const counts = ({ role, content }, place, all) =>
    content && (role !== "user" || place === all.length - 1 || all[place + 1].content);
  const said = chat.messages.filter(counts).map(({ role, content }) => ({ role, content }));
  return {
    messages: system ? [{ role: "system", content: system }, ...said] : said,
    ...numbers,
    stream: true,
    stream_options: { include_usage: true },
    include_kv_usage: true,
    pause_comments: true,
  };
}

/** `before`: the answer that this one takes the place of, once there is something of it. */
async function answer(chat, before) {
  const body = request(chat);
  const message = { role: "assistant", content: "" };
  chat.messages.push(message);
  const aborter = new AbortController();
  const started = performance.now();
  const mine = answering = { chat, message, paused: false, stop: () => { message.stopped = true; aborter.abort(); } };
  show(chat);
  speak("The model answers.");
  const since = () => (performance.now() - started) / 1000;
  let needsKey = false;
  try {
    for await (const { event, data, comment } of events(await post("v1/chat/completions", body, aborter.signal))) {
      if (comment !== undefined) hear(mine, comment);
      else if (data === "[DONE]") break;
      else if (event === "message") take(message, JSON.parse(data), since);
      update(mine);
    }
    if (message.finish === undefined && !message.error) message.error = "The stream broke off.";
  } catch (error) {
    if (error.name !== "AbortError") message.error = error instanceof ApiError ? error.message : "The stream broke off.";
    needsKey = error.status === 401;
  }
  message.seconds = since();
  answering = null;
  const isInPlace = before && message.error && !message.content;
  if (isInPlace) chat.messages[chat.messages.length - 1] = { ...before, error: message.error };
  if (needsKey && !isInPlace) {
    // The question waits for the key.
    chat.messages.splice(-1);
    $("input").value = chat.messages.pop().content;
    grow();
  }
  if (chat.messages.length > 0) save(chat);
  else forget(chat);
  if (needsKey) {
    show(chat);
    return askKey();
  }
  if (open === chat) show(chat);
  else { showAround(); showList(); }
  speakRest(message);
}

function hear(mine, comment) {
  mine.paused = comment.startsWith("paused");
  if (mine.paused) mine.message.pauses = (mine.message.pauses ?? 0) + 1;
  const resumed = /^resumed after (\d+) ms/.exec(comment);
  mine.note = resumed ? `went on after ${duration(Number(resumed[1]) / 1000)}` : "";
}

function take(message, chunk, since) {
  if (chunk.error) { message.error = chunk.error.message; return; }
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if ((content || reasoning || calls) && message.first === undefined) message.first = since();
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) {
    if (call.function?.name) message.content += `\n\nTool call: \`${call.function.name}\` `;
    message.content += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

let isDue = false;

/** Shows what has come, at most once a frame. */
function update(mine) {
  if (isDue || open !== mine.chat) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const { chat, message, paused, note } = mine;
    const last = $("log").lastElementChild;
    if (open !== chat || answering !== mine || !last) return;
    const wrap = $("log-wrap");
    const isAtEnd = wrap.scrollHeight - wrap.scrollTop - wrap.clientHeight < 60;
    const reasoning = last.querySelector(".reasoning");
    reasoning.hidden = !message.reasoning;
    if (message.reasoning) say(reasoning.lastChild, message.reasoning);
    const text = last.querySelector(".text");
    render(text, message.content);
    text.classList.toggle("waiting", !message.content && !paused);
    const foot = last.querySelector(".foot");
    const said = paused ? "Paused: its memory is lent to others" : note ?? "";
    if (foot.textContent !== said) foot.replaceChildren(...(said ? [h("span", { class: "pause", role: "status" }, said)] : []));
    if (isAtEnd) wrap.scrollTop = wrap.scrollHeight;
    speakPart(message);
  });
}

// What a screen reader hears: whole sentences, now and then, and the rest at the end.
let spoken = { message: null, length: 0, at: 0 };

function speak(text) { $("spoken").textContent = text; }

function speakPart(message) {
  if (spoken.message !== message) spoken = { message, length: 0, at: performance.now() };
  if (performance.now() - spoken.at < SPEAK_EVERY_MS) return;
  const fresh = message.content.slice(spoken.length);
  const end = Math.max(fresh.lastIndexOf(". "), fresh.lastIndexOf("\n"), fresh.lastIndexOf("? "), fresh.lastIndexOf("! "));
  if (end < 0) return;
  speak(fresh.slice(0, end + 1));
  spoken = { message, length: spoken.length + end + 1, at: performance.now() };
}

function speakRest(message) {
  const from = spoken.message === message ? spoken.length : 0;
  speak(message.error ?? (message.content.slice(from) || "The answer is empty."));
}
