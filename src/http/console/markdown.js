// Markdown as elements: headings, lists, quotes, code, tables, bold, italic, strikethrough, links. Nothing in it is
// ever parsed as HTML, and nothing is loaded: pictures are links.

import { copy, h } from "./dom.js";

// Each line is tried against these with every piece of an answer that comes: none may take longer than in proportion to
// it.
const FENCE = /^ {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ROW_LINE = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const MAX_DEPTH = 8;

/** Cuts a text into blocks, each of which stands by itself: `{kind, source}`. */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  const take = (kind, from, to) => found.push({ kind, source: lines.slice(from, to).join("\n") });
  while (at < lines.length) {
    const line = lines[at], start = at;
    if (line.trim() === "") { at += 1; continue; }
    const fence = fenceOf(line);
    if (fence) {
      at += 1;
      while (at < lines.length && !fence.isClosedBy(lines[at])) at += 1;
      at += 1;
      take("code", start, at);
    } else if (HEADING.test(line)) { at += 1; take("heading", start, at); }
    else if (RULE.test(line)) { at += 1; take("rule", start, at); }
    else if (/^ {0,3}>/.test(line)) {
      while (at < lines.length && /^ {0,3}>/.test(lines[at])) at += 1;
      take("quote", start, at);
    } else if (ITEM.test(line)) {
      const inList = () => ITEM.test(lines[at]) || /^\s{2,}\S/.test(lines[at]) || isGap(lines, at);
      while (at < lines.length && inList()) at += 1;
      take("list", start, at);
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && ROW_LINE.test(lines[at + 1].trim())) {
      while (at < lines.length && lines[at].includes("|")) at += 1;
      take("table", start, at);
    } else {
      while (at < lines.length && lines[at].trim() !== "" && (at === start || !begins(lines[at]))) at += 1;
      take("text", start, at);
    }
  }
  return found;
}

/** The beginning of code, or null. */
function fenceOf(line) {
  const found = FENCE.exec(line);
  if (!found) return null;
  const [, ticks, ticksInfo, tildes, tildesInfo] = found;
  const marks = ticks ?? tildes;
  const isClosedBy = (other) => other.trim().startsWith(marks) && other.trim().replaceAll(marks[0], "") === "";
  return { language: (ticksInfo ?? tildesInfo).trim().split(/\s/, 1)[0], isClosedBy };
}

/** An empty line that an item, or more of the last one, follows. */
function isGap(lines, at) {
  const next = lines[at + 1];
  return lines[at].trim() === "" && next !== undefined && (ITEM.test(next) || /^\s{2,}\S/.test(next));
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);
}

/** Shows `text` in `element`. Called again with more of it, it leaves alone what has not changed. */
export function render(element, text) {
  const wanted = blocks(text);
  element.shown ??= [];
  let same = 0;
  while (same < wanted.length && element.shown[same] === wanted[same].source) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of wanted.slice(same)) element.append(made(block, 0));
  element.shown = wanted.map((block) => block.source);
}

function made({ kind, source }, depth) {
  const lines = source.split("\n");
  switch (kind) {
    case "code": return code(lines);
    case "rule": return h("hr");
    case "heading": {
      const [, marks, text = ""] = HEADING.exec(source);
      // Signs may close it.
      const words = text.trim().replace(/(?:^|\s)#+$/, "").trim();
      // The page has two levels of its own.
      return h(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(words));
    }
    case "quote": return nested(h("blockquote"), lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n"), depth);
    case "list": return list(lines, depth);
    case "table": return table(lines);
    default: return h("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n")));
  }
}

function nested(element, text, depth) {
  if (depth >= MAX_DEPTH) element.append(text);
  else for (const block of blocks(text)) element.append(made(block, depth + 1));
  return element;
}

function code(lines) {
  const { language, isClosedBy } = fenceOf(lines[0]);
  const isClosed = lines.length > 1 && isClosedBy(lines.at(-1));
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const button = h("button", { type: "button", class: "quiet", onclick: async () => {
    await copy(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  button.setAttribute("aria-label", `Copy code${language ? `, ${language}` : ""}`);
  return h("div", { class: "code" },
    h("div", { class: "head" }, h("span", {}, language || "code"), button),
    h("pre", { tabIndex: 0 }, h("code", {}, text)));
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const isNumbered = /\d/.test(mark);
  const element = h(isNumbered ? "ol" : "ul");
  if (isNumbered) element.start = Number.parseInt(mark, 10);
  let item = null;
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) { item = [found[3]]; items.push(item); }
    else item.push(line.replace(/^ {1,4}/, ""));
  }
  for (const content of items) {
    const [first, ...rest] = content;
    const made = h("li", {}, ...inline(first));
    if (rest.some((line) => line.trim() !== "")) nested(made, rest.join("\n"), depth);
    element.append(made);
  }
  return element;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table([head, , ...rows]) {
  const names = cells(head);
  const body = rows.map((row) => h("tr", {}, ...names.map((_, place) => h("td", {}, ...inline(cells(row)[place] ?? "")))));
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" }, h("table", {},
    h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, ...inline(name))))),
    h("tbody", {}, ...body)));
}

// In the order in which they are looked for at a place.
const INLINE = [
  [/^\\([\\`*_{}[\]()#+\-.!|>~])/, ([, sign]) => sign],
  [/^(`+)(?!`)([\s\S]*?[^`])\1(?!`)/, ([, , text]) => h("code", {}, text.replace(/^ (.*) $/, "$1"))],
  [/^!?\[((?:[^\[\]\\]|\\.)*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"')]*["')])?\s*\)/,
    ([all, text, target], depth) => link(target, inline(text || target, depth + 1), all)],
  [/^<(https?:\/\/[^\s<>]+)>/, ([all, target]) => link(target, [target], all)],
  [/^https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?*_~]/, ([target]) => link(target, [target], target)],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)/, ([, text], depth) => h("strong", {}, ...inline(text, depth + 1))],
  [/^__(?=\S)([\s\S]*?\S)__(?!_)/, ([, text], depth) => h("strong", {}, ...inline(text, depth + 1))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, ([, text], depth) => h("del", {}, ...inline(text, depth + 1))],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, ([, text], depth) => h("em", {}, ...inline(text, depth + 1))],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?![\w_])/, ([, text], depth) => h("em", {}, ...inline(text, depth + 1))],
  [/^(?: {2,}|\\)\n/, () => h("br")],
];

/** Text and elements of a line of text. */
export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const parts = [];
  let plain = "", at = 0;
  while (at < text.length) {
    const rest = text.slice(at, at + 4096);
    const isInWord = at > 0 && /\w/.test(text[at - 1]);
    const found = /[\\`![<h*_~ ]/.test(text[at]) && !(isInWord && /[_h]/.test(text[at])) ? match(rest, depth) : null;
    if (!found) {
      // What does not begin at the first of several does not begin at the others.
      const run = /^(?:`+| +)/.exec(rest)?.[0] ?? text[at];
      plain += run;
      at += run.length;
      continue;
    }
    if (plain) { parts.push(plain); plain = ""; }
    parts.push(found.made);
    at += found.length;
  }
  if (plain) parts.push(plain);
  return parts;
}

function match(text, depth) {
  for (const [pattern, make] of INLINE) {
    const found = pattern.exec(text);
    if (found) return { made: make(found, depth), length: found[0].length };
  }
  return null;
}

/** Only to the web, and by mail; anything else stays the text that it is. */
function link(target, children, source) {
  let url;
  try { url = new URL(target); } catch { return source; }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return source;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
