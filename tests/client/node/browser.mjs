// Runs Debian's Chromium for the console's tests and screenshots.
import { chromium } from "playwright-core";

export const launch = () => chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

/** Opens `url` with an empty profile. `heard` collects errors in the page's console, and requests to other hosts. */
export async function open(browser, url, { width = 1280, height = 860, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, ...options });
  const page = await context.newPage();
  const heard = { errors: [], elsewhere: [], close: () => context.close() };
  page.on("console", (message) => { if (message.type() === "error") heard.errors.push(message.text()); });
  page.on("pageerror", (error) => heard.errors.push(String(error.stack)));
  page.on("request", (request) => { if (new URL(request.url()).origin !== new URL(url).origin) heard.elsewhere.push(request.url()); });
  await page.goto(`${url}/`);
  return [page, heard];
}

export async function startLoad(page, requests, tokens) {
  await page.locator("#load-n").fill(String(requests));
  await page.selectOption("#load-length", String(tokens));
  await page.click("#load-start");
}
