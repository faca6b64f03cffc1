// Colours of what is drawn, in both themes.

const night = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : night.matches;
}

const DAY = { free: "#e6eef0", cached: "#a9cbd1", moving: "#e2912f", unknown: "#8aa0a9", retired: "#f6f8f9", mark: "#ffffff", ring: "#11262f" };
const NIGHT = { free: "#1a2f3d", cached: "#2d5663", moving: "#ffc46b", unknown: "#5d7582", retired: "#0b1720", mark: "#06222a", ring: "#e3eef2" };

const owners = {
  day: ["#1b7180", "#b06a2c", "#5a6fb8", "#4a9366", "#8a5fa8", "#2a9d96", "#b3567a", "#7f8f35", "#3a70a8", "#97713f", "#1f5a78", "#a3668f"],
  night: ["#4fb3bf", "#dba36b", "#93a5e6", "#7cc79a", "#b79ae0", "#5fd0c5", "#e193b0", "#b4c774", "#7fb2e6", "#cdb084", "#4f8fb5", "#c99ac0"],
};

export const palette = () => (isDark() ? NIGHT : DAY);

/** One for each request; those that are there together have mostly other ones. */
export function ownerColour(request) {
  const all = isDark() ? owners.night : owners.day;
  return all[request % all.length];
}

/** Calls `listener` when the theme changes. */
export function onTheme(listener) {
  night.addEventListener("change", listener);
  new MutationObserver(listener).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
}
