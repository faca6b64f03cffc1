// Makes the pictures of the console in docs/: node scripts/console-screenshots.mjs URL. The server at URL has to serve the
// demo model and have no other clients. Needs Chromium (Debian's package; or CHROMIUM names the program) and npm ci in
// tests/client/node.
import path from "node:path";
import { fileURLToPath } from "node:url";
import { launch, open, startLoad } from "../tests/client/node/browser.mjs";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const docs = path.join(path.dirname(fileURLToPath(import.meta.url)), "..", "docs");
const browser = await launch();

async function chat(page) {
  await page.click("#show-settings");
  await page.fill("#set-temperature", "0");
  await page.click("#show-settings");
  for (const question of ["What is Pagetide?", "How do I limit the KV cache?"]) {
    await page.fill("#input", question);
    await page.press("#input", "Enter");
    await page.locator("#stop").waitFor({ state: "hidden" });
  }
}

/** In the middle of a load, with blocks on their way. */
async function underLoad(page) {
  await startLoad(page, 160, 512);
  const isMoving = () => Number(document.getElementById("tide-out").textContent) > 40
    && Number(/(\d+) swapped/.exec(document.getElementById("requests-figure").textContent)?.[1]) > 8;
  await page.waitForFunction(isMoving, null, { timeout: 120_000 });
  await page.waitForTimeout(300);
}

const pictures = [
  ["console-light", { colorScheme: "light" }],
  ["console-dark", { colorScheme: "dark" }],
  ["console-phone", { colorScheme: "light", width: 360, height: 740 }],
];
for (const [name, options] of pictures) {
  const [page, heard] = await open(browser, url, { width: 1240, height: 860, ...options });
  await chat(page);
  if (options.width) await page.click("#tab-memory");
  await underLoad(page);
  await page.screenshot({ path: path.join(docs, `${name}.png`) });
  await page.click("#load-start");
  await page.locator("#load-state >> text=Stopped").waitFor();
  await heard.close();
}
await browser.close();
