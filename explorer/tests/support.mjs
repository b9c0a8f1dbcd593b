// Start the real server with the lab model, and a browser that notes every error and every request.

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
export const PHOTOS = join(ROOT, "src/torino/data/example/photos");
export const SHOTS = join(ROOT, "explorer/build/screenshots");
const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
const QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

export const DESKTOP = { width: 1280, height: 900 };
export const PHONE = { width: 390, height: 844 };

export async function startAll() {
  const folder = mkdtempSync(join(tmpdir(), "torino-explorer-"));
  mkdirSync(SHOTS, { recursive: true });
  const environment = { ...process.env, HF_HUB_OFFLINE: "1", OMP_NUM_THREADS: process.env.OMP_NUM_THREADS ?? "2" };
  const made = spawnSync(PYTHON, [join(ROOT, "explorer/tests/make_run.py"), folder], { env: environment, encoding: "utf8" });
  assert.equal(made.status, 0, made.stderr);
  cpSync(join(folder, "run"), join(folder, "unfinished"), { recursive: true });
  const sae = join(folder, "sae");
  const found = spawnSync(PYTHON, ["-c", "from torino.vlm.saes import load_encoder; print(load_encoder('lab').folder)"], { env: environment, encoding: "utf8" });
  cpSync(found.stdout.trim(), sae, { recursive: true });
  const words = ["-m", "torino", "explore", "--sae", sae, "--run", join(folder, "run"), "--run", join(folder, "unfinished"), "--port", "0", "--no-browser"];
  const server = spawn(PYTHON, words, { cwd: folder, env: { ...environment, COLUMNS: "200" } });
  let output = "";
  let errors = "";
  server.stderr.on("data", (data) => (errors += data));
  const address = await new Promise((good, bad) => {
    const timer = setTimeout(() => bad(new Error(`The server did not start: ${output}${errors}`)), 240_000);
    server.stdout.on("data", (data) => {
      output += data;
      const match = /http:\/\/localhost:\d+/.exec(output);
      if (match) {
        clearTimeout(timer);
        good(match[0]);
      }
    });
    server.on("exit", () => bad(new Error(`The server ended: ${output}${errors}`)));
  });
  const browser = await chromium.launch({ executablePath: CHROMIUM, args: [...QUIET, "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost"] });
  return {
    address,
    folder,
    sae,
    browser,
    stop: async () => {
      await browser.close();
      const ended = new Promise((done) => server.once("exit", done));
      server.kill("SIGTERM");
      const late = setTimeout(() => server.kill("SIGKILL"), 15_000);
      await ended;
      clearTimeout(late);
      rmSync(folder, { recursive: true, force: true });
      return errors;
    },
  };
}

/** Run a test in a page of its own; no error may be on the console, and no request may leave the machine. */
export async function inPage(all, options, work) {
  const context = await all.browser.newContext({ viewport: DESKTOP, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(150_000);
  const problems = [];
  const requests = [];
  page.on("console", (entry) => ["error", "warning"].includes(entry.type()) && problems.push(entry.text()));
  page.on("pageerror", (error) => problems.push(error.message));
  context.on("request", (request) => requests.push(request.url()));
  page.expectProblem = (pattern) => {
    const rest = problems.filter((text) => !pattern.test(text));
    problems.length = 0;
    problems.push(...rest);
  };
  try {
    await work(page);
    assert.deepEqual(problems, []);
    const outside = requests.filter((url) => !url.startsWith(`${all.address}/`) && !/^(blob|data):/.test(url));
    assert.deepEqual(outside, []);
    assert.ok(requests.length > 3);
  } finally {
    await context.close();
  }
}

/** Fail on serious accessibility problems, once colors have stopped changing. */
export async function checkAxe(page, name) {
  await page.evaluate(() => Promise.allSettled(document.getAnimations().filter((item) => item instanceof CSSTransition).map((item) => item.finished)));
  await page.evaluate(AXE);
  const found = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const serious = found.violations.filter((violation) => ["serious", "critical"].includes(violation.impact));
  const told = serious.map((violation) => `${violation.id}: ${violation.help}: ${violation.nodes.slice(0, 3).map((node) => node.html).join(" | ")}`);
  assert.deepEqual(told, [], `accessibility of ${name}`);
}

export async function shot(page, name, fullPage = false) {
  await page.screenshot({ path: join(SHOTS, `${name}.png`), fullPage });
}

/** The page must not be wider than the window. */
export async function checkWidth(page) {
  const [content, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(content <= window, `the page is ${content} pixels wide in a window of ${window}`);
}
