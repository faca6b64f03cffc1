// The chats, kept in this browser.

const NAME = "pagetide.chats";
const MAX_CHATS = 50;

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => chat && Array.isArray(chat.messages)) : [];
  } catch { return []; }
}

export const chats = read();

export function newChat(settings = {}) {
  const chat = { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, title: "", messages: [], settings };
  chats.unshift(chat);
  chats.splice(MAX_CHATS);
  return chat;
}

export function remove(chat) {
  chats.splice(chats.indexOf(chat), 1);
  forget(chat);
}

/** It is kept no longer. */
export function forget(chat) {
  write(read().filter(({ id }) => id !== chat.id));
}

/** Keeps a chat that has something in it. Those that other tabs have kept meanwhile stay as they are. */
export function save(chat) {
  if (chat.messages.length === 0) return;
  const kept = read();
  const place = kept.findIndex(({ id }) => id === chat.id);
  if (place < 0) kept.unshift(chat);
  else kept[place] = chat;
  write(kept.slice(0, MAX_CHATS));
}

/** Where there is no room for all, the oldest go. */
function write(kept) {
  while (true) {
    try {
      localStorage.setItem(NAME, JSON.stringify(kept));
      return;
    } catch {
      if (kept.length <= 1) return;
      kept.pop();
    }
  }
}

export const titleOf = (chat) => chat.title || "New chat";
