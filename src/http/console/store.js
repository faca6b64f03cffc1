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
  save();
}

/** Keeps all chats that have something in them; where there is no room, all but the oldest. */
export function save() {
  const kept = chats.filter((chat) => chat.messages.length > 0);
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
