// Tests the console in a browser: node console.mjs JSON-OF-URLS. Prints a JSON object with the result of each test:
// "ok", or what went wrong.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import fs from "node:fs";
import { launch, open, startLoad } from "./browser.mjs";
import { chunk, proxy } from "./proxy.mjs";

const servers = JSON.parse(process.argv[2]);
const axe = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await launch();

const text = (page, selector) => page.locator(selector).textContent();
const figure = async (page, selector) => Number((await text(page, selector)).replaceAll(",", "").match(/\d+/)?.[0] ?? 0);

async function until(what, is, timeout = 20_000) {
  const end = Date.now() + timeout;
  for (;;) {
    const found = await is();
    if (found) return found;
    if (Date.now() > end) assert.fail(`${what}: not within ${timeout} ms`);
    await new Promise((done) => setTimeout(done, 40));
  }
}

async function ask(page, question) {
  await page.fill("#input", question);
  await page.press("#input", "Enter");
}

const answered = (page) => page.locator("#stop").waitFor({ state: "hidden" });

/** The number of pixels of each colour in a map. */
const pixels = (page, id) => page.evaluate((id) => {
  const canvas = document.getElementById(id);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = {};
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] === 255) colours[`${data[at]},${data[at + 1]},${data[at + 2]}`] = (colours[`${data[at]},${data[at + 1]},${data[at + 2]}`] ?? 0) + 1;
  }
  return colours;
}, id);

const tests = {
  async chat_streams_and_chats_are_kept(heard) {
    const [page, its] = await open(browser, servers.open);
    heard.push(its);
    await until("the model's name", async () => (await text(page, "#model")) === "demo");
    await page.click("#show-settings");
    await page.fill("#set-temperature", "0");
    await page.fill("#set-max_tokens", "60");
    await ask(page, "What is Pagetide?");
    await page.locator(".message.assistant .foot >> text=tokens").waitFor();
    const first = await page.locator(".message.assistant .text").textContent();
    assert.match(first, /^Pagetide is a server/);
    assert.match(await text(page, ".message.assistant .foot"), /\d+ \+ \d+ tokens/);
    assert.match(await text(page, "#spoken"), /\w/);
    await page.click("text=Regenerate");
    await answered(page);
    assert.equal(await page.locator(".message.assistant").count(), 1);
    assert.equal(await page.locator(".message.assistant .text").textContent(), first, "at temperature 0");
    await page.click("#new-chat");
    await ask(page, "Tell me a story about a lighthouse.");
    await page.locator(".message.assistant .text >> text=/\\w{3}/").waitFor();
    await page.click("#stop", { timeout: 1000 }).catch(() => {});
    await answered(page);
    await page.reload();
    await page.click("#show-chats");
    const titles = () => page.locator("#chat-list .open").allTextContents();
    assert.deepEqual(await titles(), ["Tell me a story about a lighthouse.", "What is Pagetide?"]);
    await page.click("#chat-list .open >> nth=1");
    assert.equal(await page.locator(".message.assistant .text").textContent(), first);
    assert.equal(await page.inputValue("#set-max_tokens"), "60");
    await page.click("#chat-list button[aria-label^=Delete] >> nth=0");
    assert.deepEqual(await titles(), ["What is Pagetide?"]);
  },

  async what_a_model_writes_is_never_html(heard) {
    const evil = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script>";
    const answer = [
      `# A *title* ${evil}\n\n`, `Some **bold**, _italic_ and \`code ${evil}\`.\n\n`, "- one\n- two\n  1. deep\n\n",
      "| a | b |\n|---|---|\n| 1 | <b>2</b> |\n\n", `\`\`\`js\n${evil}\n\`\`\`\n\n`,
      "[good](https://example.org/a) [bad](javascript:window.hacked=1) ![pic](https://example.org/x.png) <https://example.org/b>\n\n",
      `> quoted ${evil}\n`,
    ];
    const pieces = ["It ", 1000, "comes ", 1000, "piece by piece.\n\n", 1000, ...answer].map((part) => typeof part === "number" ? part : chunk(part));
    const front = await proxy(servers.open, [": paused\n\n", 2500, ": resumed after 321 ms\n\n", 1500, ...pieces, chunk("", { finish_reason: "stop" })]);
    try {
      const [page, its] = await open(browser, front.url);
      heard.push(its);
      await ask(page, evil);
      await page.locator(".pause >> text=Paused: its memory is lent to others").waitFor();
      await page.locator(".pause >> text=went on after 321 ms").waitFor();
      await page.locator(".message.assistant .text", { hasText: /^It\s*(comes\s*)?$/ }).waitFor();
      await answered(page);
      const shown = page.locator("#log");
      assert.equal(await shown.locator("img, script, iframe, b").count(), 0);
      assert.equal(await page.evaluate(() => window.hacked), undefined);
      assert.ok((await page.locator(".message.user .text").textContent()) === evil);
      const said = page.locator(".message.assistant .text");
      for (const [selector, expected] of [["h3", `A title ${evil}`], ["strong", "bold"], ["h3 em", "title"], ["p > code", `code ${evil}`],
        ["ul > li", "one"], ["ul ol > li", "deep"], ["td >> nth=1", "<b>2</b>"], ["pre", evil], ["blockquote", `quoted ${evil}`]]) {
        assert.equal(await said.locator(selector).first().textContent(), expected, selector);
      }
      const links = await said.locator("a").evaluateAll((all) => all.map((link) => [link.href, link.rel]));
      assert.deepEqual(links.map(([href]) => href), ["https://example.org/a", "https://example.org/x.png", "https://example.org/b"]);
      assert.ok(links.every(([, rel]) => rel.includes("noopener")));
      await said.locator(".code button").click();
      await said.locator(".code button >> text=Copied").waitFor();
    } finally { front.close(); }
  },

  async nothing_that_was_said_is_lost(heard) {
    const front = await proxy(servers.open, [chunk("half an answer"), 60_000]);
    try {
      const [page, its] = await open(browser, front.url);
      const said = async (selector) => (await page.locator(selector).allTextContents()).join("|");
      // The page is reloaded in the middle of an answer.
      await ask(page, "First question");
      await page.locator(".message.assistant .text >> text=half an answer").waitFor();
      await page.reload();
      assert.equal(await said(".message .text"), "First question|half an answer");
      assert.match(await text(page, ".message.assistant .foot"), /stopped/);
      // Another tab starts its own chat. Then this tab changes a setting, which must not overwrite that chat.
      const other = await page.context().newPage();
      await other.goto(`${front.url}/`);
      await other.click("#new-chat");
      await ask(other, "Asked elsewhere");
      await other.locator(".message.assistant .text >> text=half").waitFor();
      await other.close({ runBeforeUnload: true });
      await page.click("#show-settings");
      await page.fill("#set-temperature", "0.5");
      await page.reload();
      await page.click("#show-chats");
      assert.equal(await said("#chat-list .open"), "Asked elsewhere|First question");
      await page.click("#chat-list .open >> nth=1");
      // If an answer is regenerated and the request fails, the old answer stays.
      await page.route("**/v1/chat/completions", (route) => route.abort());
      await page.click("text=Regenerate");
      await page.locator(".message .error >> text=cannot be reached").waitFor();
      assert.equal(await said(".message.assistant .text"), "half an answer");
      // A question without an answer is left out of later requests, so that turns alternate.
      await ask(page, "Second question");
      await page.locator(".message .error >> nth=1").waitFor();
      const sent = page.waitForRequest("**/v1/chat/completions");
      await ask(page, "Third question");
      const turns = (await sent).postDataJSON().messages.map(({ role, content }) => `${role}: ${content}`);
      assert.deepEqual(turns, ["user: First question", "assistant: half an answer", "user: Third question"]);
      await page.click("#chat-list button[aria-label='Delete chat: First question']");
      await page.reload();
      await page.click("#show-chats");
      assert.equal(await said("#chat-list .open"), "Asked elsewhere");
      its.errors = its.errors.filter((error) => !error.includes("ERR_FAILED"));
      heard.push(its);
    } finally { front.close(); }
  },

  async any_text_is_rendered_in_time(heard) {
    const [page, its] = await open(browser, servers.open);
    heard.push(its);
    const shown = await page.evaluate(async () => {
      const { render } = await import("/console/markdown.js");
      const made = (text) => { const element = document.createElement("div"); render(element, text); return element; };
      const many = (text, count) => text.repeat(count);
      // A regular expression that backtracks would need seconds or hours for each of these texts.
      const lengths = ["x " + many("`", 20_000), "```" + many("a", 20_000) + "`", "``` " + many(" ", 20_000) + "`", "a | b\n---" + many(" ", 20_000) + "x",
        "# a" + many(" ", 20_000) + "b", "# " + many("#", 20_000) + "b", "x " + many("*", 20_000), many("**a ", 3_000), many("[", 5_000), many("a ", 10_000) + many(" ", 10_000),
        many("~~a ", 3_000), "- " + many(" ", 20_000) + "x", many("> ", 5_000)].map((text) => made(text).textContent.length);
      return { lengths, html: ["***x***", "**a** and __b__", "``a ` b`` c", "# Title ##", "~~~js\na`b\n~~~", "```js\nx\n```"].map((text) => made(text).innerHTML) };
    });
    assert.ok(shown.lengths.every((length) => length > 0), shown.lengths.join());
    assert.deepEqual(shown.html.slice(0, 4), ["<p><strong><em>x</em></strong></p>", "<p><strong>a</strong> and <strong>b</strong></p>",
      "<p><code>a ` b</code> c</p>", "<h3>Title</h3>"]);
    assert.match(shown.html[4], /<span>js<\/span>.*<code>a`b<\/code>/);
    assert.match(shown.html[5], /<span>js<\/span>.*<code>x<\/code>/);
  },

  async who_comes_when_the_seats_are_taken_is_told_so_and_waits(heard) {
    const impatient = () => {
      const later = window.setTimeout;
      window.setTimeout = (call, ms, ...more) => later(call, ms >= 10_000 ? 100 : ms, ...more);
    };
    const [first] = await open(browser, servers.single);
    await first.locator("#link-text >> text=live").waitFor();
    const [page, its] = await open(browser, servers.single);
    await page.context().addInitScript(impatient);
    await page.reload();
    let refused = 0;
    const states = [];
    page.on("response", (response) => { if (response.status() === 429) refused += 1; });
    await until("it has been refused a few times", async () => { states.push(await text(page, "#link-text")); return refused >= 4; });
    assert.ok(!states.includes("no connection"), states.join());
    assert.match(await text(page, "#watch-notice"), /\w/);
    await first.context().close();
    await page.locator("#link-text >> text=live").waitFor();
    assert.ok(await page.locator("#watch-notice").isHidden());
    its.errors = its.errors.filter((error) => !error.includes("429"));
    heard.push(its);
  },

  async blocks_fill_and_say_whose_they_are(heard) {
    const [page, its] = await open(browser, servers.small);
    heard.push(its);
    await page.locator("#link-text >> text=live").waitFor();
    const before = await pixels(page, "device");
    const stop = new AbortController();
    const body = JSON.stringify({ prompt: "The lighthouse", max_tokens: 1200, ignore_eos: true });
    const running = (async () => {
      // Repeated, because a fast machine finishes one request before the test has seen everything.
      while (!stop.signal.aborted) await fetch(`${servers.small}/v1/completions`, { method: "POST", body, signal: stop.signal }).catch(() => {});
    })();
    const used = await until("blocks are used", () => figure(page, "#device-figure"));
    await until("more are", async () => (await figure(page, "#device-figure")) > used);
    const now = await pixels(page, "device");
    assert.ok(Object.keys(now).some((colour) => !(colour in before)), "no new colour has appeared");
    await page.locator("#rows .state >> text=answering").waitFor();
    // Blocks are allocated from the first one on, so one of the first is the request's.
    await page.locator("#device").focus();
    const spoken = await until("a block of a request", async () => {
      await page.keyboard.press("ArrowRight");
      const said = await text(page, "#block-spoken");
      return /request \d+/.test(said) && said;
    });
    assert.match(spoken, /Block [\d,]+, device.*used, held once.*request \d+: (answering|prompt).*prompt tokens, [\d,]+ of at most 1,200/s);
    await page.locator("#rows tr.lit").waitFor();
    await page.keyboard.press("Escape");
    assert.ok(await page.locator("#tip").isHidden());
    await page.locator("#device").hover({ position: { x: 5, y: 5 } });
    await page.locator("#tip >> text=Block 0, device").waitFor();
    stop.abort();
    await running;
    await until("they are given back", async () => (await figure(page, "#device-figure")) === 0);
    assert.match(await text(page, "#device-figure"), /[1-9]\d* cached/);
  },

  async a_load_makes_the_tide_move(heard) {
    const [page, its] = await open(browser, servers.small);
    heard.push(its);
    await page.locator("#link-text >> text=live").waitFor();
    const free = await pixels(page, "swap");
    // The load needs more than ten times the pool, so it lasts until it is stopped, even on a fast machine.
    await startLoad(page, 64, 1024);
    await until("blocks go out", async () => (await figure(page, "#tide-sum")) > 0);
    // Each condition holds only for a moment, because swapped sequences come back within a few steps.
    await until("a sequence is swapped out", async () => (await page.locator("#rows .state >> text=swapped out").count()) > 0, 60_000);
    await until("the swap pool holds blocks", async () => (await figure(page, "#swap-figure")) > 0, 60_000);
    await until("it shows them", async () => Object.keys(await pixels(page, "swap")).some((colour) => !(colour in free)), 60_000);
    await until("blocks come back", async () => Number((await text(page, "#tide-sum")).match(/([\d,]+) back/)[1].replace(",", "")) > 0, 30_000);
    await page.click("#load-start");
    await page.locator("#load-state >> text=Stopped.").waitFor();
    await until("all is over", async () => (await text(page, "#requests-figure")).startsWith("0 running, 0 waiting, 0 swapped"));
    await startLoad(page, 4, 64);
    await page.locator("#load-state >> text=/4 requests and \\d+ tokens in/").waitFor({ timeout: 30_000 });
    await until("all figures are there", async () => (await page.locator(".spark .value").allTextContents()).every((value) => /\d/.test(value)));
  },

  async a_key_is_asked_for_and_kept_in_the_tab(heard) {
    const [page, its] = await open(browser, servers.locked);
    await page.locator("#key-ask").waitFor();
    await page.fill("#key", "wrong");
    await page.press("#key", "Enter");
    await page.locator("#key-hint >> text=not a key").waitFor();
    await page.fill("#key", "a-client");
    await page.press("#key", "Enter");
    await until("the model's name", async () => (await text(page, "#model")) === "demo");
    await page.locator("#watch-ask").waitFor();
    await page.fill("#watch-key", "the-admin");
    await page.press("#watch-key", "Enter");
    await page.locator("#link-text >> text=live").waitFor();
    assert.ok(await page.locator("#watch-ask").isHidden());
    await ask(page, "Hello");
    await until("an answer", async () => (await page.locator(".message.assistant .foot").textContent().catch(() => "")).includes("tokens"));
    const kept = await page.evaluate(() => [JSON.stringify(localStorage), JSON.stringify(sessionStorage)]);
    assert.ok(!kept[0].includes("a-client") && !kept[0].includes("the-admin"));
    assert.ok(kept[1].includes("a-client") && kept[1].includes("the-admin"));
    // The browser logs the 401 answers to the wrong keys. Other errors count.
    its.errors = its.errors.filter((error) => !error.includes("401"));
    heard.push(its);
  },

  async it_fits_a_phone(heard) {
    const [page, its] = await open(browser, servers.open, { width: 360, height: 700, hasTouch: true, isMobile: true });
    heard.push(its);
    const width = () => page.evaluate(() => Math.max(document.documentElement.scrollWidth, document.body.scrollWidth));
    assert.ok(await page.locator("#memory").isHidden());
    await ask(page, "How do I limit the KV cache?");
    await answered(page);
    await page.click("#show-settings");
    assert.ok((await width()) <= 360);
    assert.notEqual(await text(page, "#link-text"), "live", "a hidden map must not be updated");
    await page.tap("#tab-memory");
    await page.locator("#memory").waitFor();
    await until("it watches", async () => (await text(page, "#link-text")) === "live");
    await page.locator("#rows-rest").waitFor();
    assert.ok((await width()) <= 360);
    await page.locator("#device").tap({ position: { x: 8, y: 8 } });
    await page.locator("#tip >> text=Block").waitFor();
    assert.ok((await width()) <= 360);
  },

  async it_is_accessible_in_both_themes(heard) {
    for (const options of [{ colorScheme: "light" }, { colorScheme: "dark" }, { colorScheme: "dark", width: 360, height: 700 }]) {
      const [page, its] = await open(browser, servers.open, options);
      heard.push(its);
      await ask(page, "What is Pagetide?");
      await answered(page);
      await page.click("#show-settings");
      const running = startLoad(page, 3, 64).catch(() => {});
      if (options.width) await page.click("#tab-memory");
      await page.locator("#rows-rest").waitFor();
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => window.axe.run());
      assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html.slice(0, 120)).join(" ")}`), [], JSON.stringify(options));
      await running;
    }
    const [page] = await open(browser, servers.open, { colorScheme: "light" });
    const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const day = await background();
    await page.click("#theme");
    const night = await background();
    assert.notEqual(day, night);
    await page.reload();
    assert.equal(await background(), night, "the choice is kept");
    // The Tab key moves from the header through the chat to the memory maps.
    const order = [];
    for (let step = 0; step < 40; step += 1) {
      await page.keyboard.press("Tab");
      order.push(await page.evaluate(() => document.activeElement.id));
    }
    const places = ["theme", "show-settings", "input", "send", "load-n", "load-start", "device", "swap"].map((id) => order.indexOf(id));
    assert.ok(places.every((place, at) => place >= 0 && (at === 0 || place > places[at - 1])), order.join());
  },
};

const results = {};
for (const [name, test] of Object.entries(tests)) {
  const heard = [], began = Date.now();
  try {
    await test(heard);
    assert.deepEqual(heard.flatMap(({ errors }) => errors), [], "the browser's console");
    assert.deepEqual(heard.flatMap(({ elsewhere }) => elsewhere), [], "requests to other hosts");
    results[name] = "ok";
  } catch (error) {
    results[name] = `${error.stack}\nafter ${Date.now() - began} ms; the browser's console: ${heard.flatMap(({ errors }) => errors).join("\n")}`;
  }
  for (const context of browser.contexts()) await context.close();
}
await browser.close();
console.log(JSON.stringify(results));
