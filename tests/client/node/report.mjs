// Opens the file of a report in Chromium, in both themes, and says what is wrong with it: `node report.mjs FILE [SHOTS]`.
// It prints JSON: violations of accessibility, errors, what it asked of the network, and the size of the page as PDF.
import { createRequire } from "node:module";
import fs from "node:fs";
import { pathToFileURL } from "node:url";
import { launch } from "./browser.mjs";

const [file, shots] = process.argv.slice(2);
const axe = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await launch();
const found = { violations: [], errors: [], requests: [], charts: 0, pdfBytes: 0 };
for (const colorScheme of ["light", "dark"]) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, colorScheme });
  const page = await context.newPage();
  page.on("console", (message) => { if (message.type() === "error") found.errors.push(message.text()); });
  page.on("pageerror", (error) => found.errors.push(String(error)));
  page.on("request", (request) => { if (!request.url().startsWith("file:")) found.requests.push(request.url()); });
  await page.goto(pathToFileURL(file).href);
  found.charts = await page.locator("svg").count();
  if (shots) await page.screenshot({ path: `${shots}/report-${colorScheme}.png`, fullPage: true });
  if (colorScheme === "light") found.pdfBytes = (await page.pdf({ format: "A4", landscape: true })).length;
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run());
  found.violations.push(...violations.map(({ id, nodes }) => `${colorScheme} ${id}: ${nodes.slice(0, 3).map(({ html }) => html.slice(0, 160)).join(" ")}`));
  await context.close();
}
await browser.close();
console.log(JSON.stringify(found));
