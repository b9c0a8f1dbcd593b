// Move the sliders of Inspect and print the milliseconds from each move to the new picture, as JSON.
//
//     node tests/latency.mjs ADDRESS PHOTO MOVES

import { chromium } from "playwright-core";

const [, , address, photo, moves] = process.argv;
const args = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args });
const page = await browser.newPage({ viewport: { width: 1280, height: 900 } });
page.setDefaultTimeout(120_000);
await page.goto(`${address}/inspect?photo=${photo}&by=${encodeURIComponent("torino-m(k=2, delta=2)")}`);
await page.waitForFunction(() => document.querySelectorAll(".count b").length === 2);
const measured = () => page.evaluate(() => performance.getEntriesByName("slider-to-picture").length);

async function move(label, value) {
  const before = await measured();
  await page.getByLabel(label, { exact: true }).fill(String(value));
  await page.waitForFunction((count) => performance.getEntriesByName("slider-to-picture").length > count, before);
}

// the same budgets in every run, each once, so that no setting was planned before
const patches = Number(await page.locator(".count b").first().textContent());
const budget = (turn) => 1 + ((turn * 97) % patches);
for (const method of ["torino-m", "torino-p"]) {
  await page.getByLabel("Method").selectOption(method);
  await page.waitForURL((url) => url.href.includes(method));
  for (const k of [3, 4, 5, 6, 7, 8]) await move("k", k);
  for (const delta of [8, 7, 6, 5, 4, 3]) await move("δ", delta);
  await page.getByLabel("Fixed budget").check();
  for (let turn = 0; turn < Number(moves) / 2 - 12; turn++) {
    await move("Budget", budget(turn + 1));
  }
  await page.getByLabel("Fixed budget").uncheck();
}
const values = await page.evaluate(() => performance.getEntriesByName("slider-to-picture").map((entry) => entry.duration));
await browser.close();
console.log(JSON.stringify({ patches, values }));
