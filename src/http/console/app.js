// Puts the page together.

import { get, setKey, setWatchKey } from "./api.js";
import { startChat } from "./chat.js";
import { isDark, onTheme } from "./colours.js";
import { $, say } from "./dom.js";
import { EngineView } from "./engine.js";
import { startLoad } from "./load.js";
import { startMemory } from "./memory.js";
import { startRequests } from "./requests.js";
import { startSparks } from "./sparks.js";

/** A page that is hidden for so long watches no more. */
const REST_AFTER_MS = 5000;
const view = new EngineView();

// The theme: the system's, until somebody chooses.
function startTheme() {
  try {
    const chosen = localStorage.getItem("pagetide.theme");
    if (chosen) document.documentElement.dataset.theme = chosen;
  } catch { /* not kept */ }
  const button = $("theme");
  const show = () => {
    const other = isDark() ? "Light" : "Dark";
    say(button, other);
    button.setAttribute("aria-label", `${other} theme`);
  };
  button.addEventListener("click", () => {
    const chosen = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = chosen;
    try { localStorage.setItem("pagetide.theme", chosen); } catch { /* not kept */ }
  });
  onTheme(show);
  show();
}

// On a narrow screen one panel is shown at a time.
const narrow = matchMedia("(max-width: 880px)");
let shown = "chat";

function startTabs() {
  const tabs = ["chat", "memory"];
  const show = (name, isFocused) => {
    shown = name;
    for (const other of tabs) {
      const tab = $(`tab-${other}`), isShown = other === name;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
      $(other).dataset.shown = String(isShown);
      if (isShown && isFocused) tab.focus();
    }
    watchOrRest();
  };
  for (const name of tabs) {
    $(`tab-${name}`).addEventListener("click", () => show(name, false));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") show(tabs[1 - tabs.indexOf(name)], true);
    });
  }
  const roles = () => tabs.forEach((name) => {
    const panel = $(name);
    if (narrow.matches) panel.setAttribute("role", "tabpanel");
    else panel.removeAttribute("role");
    panel.setAttribute("aria-labelledby", narrow.matches ? `tab-${name}` : `${name}-title`);
  });
  narrow.addEventListener("change", () => { roles(); watchOrRest(); });
  roles();
  show("chat", false);
}

let resting = 0;

/** Watches while somebody can see it. */
function watchOrRest() {
  clearTimeout(resting);
  const isSeen = !document.hidden && (!narrow.matches || shown === "memory");
  if (isSeen) view.start();
  else resting = setTimeout(() => view.rest(), document.hidden ? REST_AFTER_MS : 0);
}

const STATES = {
  live: "live", lost: "no connection", full: "others watch", forbidden: "key needed", off: "not served", resting: "resting",
};

function startState() {
  view.addEventListener("state", ({ detail: { state, error } }) => {
    $("link-state").dataset.state = state;
    say($("link-text"), STATES[state]);
    const isAsked = error?.code === "invalid_metrics_key";
    $("watch-ask").hidden = !isAsked;
    const isRefused = isAsked && $("watch-key").value !== "";
    say($("watch-hint"), isRefused ? "That is neither server.metrics_key nor server.admin_key." : "server.metrics_key or server.admin_key. It is kept in this tab until it is closed.");
    // Nobody may, for there is no such key: one that was kept is of no use any more.
    const isClosed = error?.code === "metrics_closed";
    if (isClosed) setWatchKey("");
    $("watch-notice").hidden = !isClosed && !["full", "off"].includes(state);
    say($("watch-notice"), error?.message ?? "");
  });
}

function askKey(isFocused = true) {
  $("key-ask").hidden = false;
  if (isFocused) $("key").focus();
}

function startKeys() {
  $("key-ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    setKey($("key").value.trim());
    if (await meet()) {
      $("key-ask").hidden = true;
      view.rest();
      watchOrRest();
      $("input").focus();
    }
  });
  $("watch-ask").addEventListener("submit", (event) => {
    event.preventDefault();
    setWatchKey($("watch-key").value.trim());
    view.rest();
    watchOrRest();
  });
}

/** Asks what is served; whether the server answers us. */
async function meet() {
  try {
    const { data: [model] } = await (await get("v1/models")).json();
    say($("model"), model.id);
    $("model").title = model.id;
    document.title = `${model.id} · Pagetide`;
    say($("key-hint"), "It is kept in this tab until it is closed.");
    return true;
  } catch (error) {
    if (error.status === 401) {
      if ($("key").value) say($("key-hint"), "That is not a key of this server.");
      askKey();
    }
    say($("model"), "?");
    return false;
  }
}

startTheme();
const requests = startRequests(view);
startMemory(view, (request) => requests.light(request));
startSparks(view);
startState();
startKeys();
startChat({ onKeyNeeded: () => askKey() });
startLoad({ onKeyNeeded: () => askKey() });
startTabs();
document.addEventListener("visibilitychange", watchOrRest);
await meet();
