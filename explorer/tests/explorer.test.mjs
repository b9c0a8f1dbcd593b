// Every flow of the explorer against the real server and the lab model, at desktop and phone width and by keyboard.

import assert from "node:assert/strict";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { DESKTOP, PHONE, PHOTOS, checkAxe, checkWidth, inPage, shot, startAll } from "./support.mjs";

const SIZES = [
  ["desktop", { viewport: DESKTOP, colorScheme: "light" }],
  ["phone", { viewport: PHONE, colorScheme: "dark", hasTouch: true, isMobile: true }],
];
const TIME = { timeout: 400_000 };
let all;

before(async () => {
  all = await startAll();
}, { timeout: 400_000 });

after(async () => {
  if (!all) return;
  const errors = await all.stop();
  assert.ok(!errors.includes("Traceback"), errors);
});

const picture = (page) => page.locator(".picture.interactive");
const count = async (page) => (await page.locator(".count b").nth(1).textContent()).trim();
const open = async (page, path) => {
  await page.goto(all.address + path);
};

for (const [size, options] of SIZES) {
  test(`inspect, ${size}`, TIME, () =>
    inPage(all, options, async (page) => {
      await open(page, "/");
      await page.getByRole("button", { name: "coffee", exact: true }).click();
      await page.waitForURL(/photo=bundled-coffee/);
      await picture(page).waitFor();
      await page.waitForFunction(() => document.querySelectorAll(".count b").length === 2);
      const box = await picture(page).boundingBox();
      if (size === "desktop") {
        await page.mouse.move(box.x + box.width * 0.5, box.y + box.height * 0.35);
        await page.getByRole("heading", { name: /Patch, row 5, column 8/ }).waitFor();
        assert.ok((await page.locator(".strengths li").count()) > 2);
      }
      await picture(page).click({ position: { x: box.width * 0.5, y: box.height * 0.35 } });
      await page.waitForURL(/token=\d+/);
      await page.getByText(/^Token \d+ of \d+ \(primary\)/).waitFor();
      await page.getByRole("heading", { name: "Where else it fires" }).waitFor();
      await checkAxe(page, "inspect");
      await checkWidth(page);
      await shot(page, `inspect-${size}`);
      await page.getByRole("button", { name: /Fires on \d+ patch/ }).click();
      await page.waitForURL(/concept=\d+/);
      await page.getByRole("button", { name: "Groups" }).click();

      const first = await count(page);
      await page.getByLabel("k", { exact: true }).fill("4");
      await page.waitForURL(/k%3D4/);
      await page.waitForFunction((old) => document.querySelectorAll(".count b")[1].textContent !== old, first);
      await page.getByLabel("Fixed budget").check();
      await page.getByLabel("Budget", { exact: true }).fill("20");
      await page.waitForFunction(() => document.querySelectorAll(".count b")[1].textContent === "20");
      await page.getByLabel("Method").selectOption("visionzip");
      await page.waitForURL(/visionzip/);
      await page.getByRole("button", { name: "Kept patches" }).click();
      await page.waitForURL(/view=kept/);
      await page.waitForFunction(() => document.querySelectorAll(".count b")[1].textContent === "20");

      // the address is the whole state
      const shared = page.url();
      await open(page, new URL(shared).pathname + new URL(shared).search);
      await page.waitForFunction(() => document.querySelectorAll(".count b")[1]?.textContent === "20");
      assert.equal(await page.getByLabel("Method").inputValue(), "visionzip");
      assert.equal(await page.getByRole("button", { name: "Kept patches" }).getAttribute("aria-pressed"), "true");
      for (const kind of ["PNG", "HTML"]) {
        const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("link", { name: kind }).click()]);
        assert.equal(download.suggestedFilename(), `torino-coffee.${kind.toLowerCase()}`);
        if (kind === "HTML") {
          const text = readFileSync(await download.path(), "utf8");
          assert.ok(!text.includes("<script") && text.includes("data:image/jpeg;base64,"));
        }
      }
    }));

  test(`compare, ${size}`, TIME, () =>
    inPage(all, options, async (page) => {
      await open(page, "/compare?photo=bundled-chelsea&budget=24&methods=torino-p,random");
      await page.getByRole("button", { name: "chelsea" }).waitFor();
      await page.getByLabel("Add a method").selectOption("visionzip");
      await page.getByRole("button", { name: "Remove Random" }).click();
      await page.getByLabel("Question").fill("What animal is this?");
      const ask = page.getByRole("button", { name: "Ask", exact: true });
      await page.waitForFunction(() => !document.querySelector("button.primary").disabled);
      await ask.click();
      await page.waitForFunction(() => document.querySelectorAll(".cards .badge").length === 2);
      assert.deepEqual(await page.locator(".cards h2").allTextContents(), ["All tokens", "TORINO-P", "VisionZip"]);
      assert.equal(await page.locator(".cards .answer").first().textContent(), "cat");
      assert.match(await page.locator(".cards dd").first().textContent(), /196 of 196/);
      await checkAxe(page, "compare");
      await checkWidth(page);
      await shot(page, `compare-${size}`, true);
      const shared = new URL(page.url());
      assert.equal(shared.searchParams.get("question"), "What animal is this?");
      await open(page, shared.pathname + shared.search); // asks again
      await page.waitForFunction(() => document.querySelectorAll(".cards .badge").length === 2);
    }));

  test(`concept atlas, ${size}`, TIME, () =>
    inPage(all, options, async (page) => {
      await open(page, "/atlas");
      await page.getByText(/never fire there/).waitFor({ timeout: 120_000 });
      await page.getByLabel("Search concepts").fill("coffee");
      await page.waitForFunction(() => [...document.querySelectorAll("ul.concepts .grow")].every((item) => item.textContent.includes("coffee")));
      await page.locator("ul.concepts button").first().click();
      await page.waitForURL(/concept=\d+/);
      await page.getByRole("heading", { name: "Top photos" }).waitFor();
      for (const name of ["Activations", "Nearest concepts", "Fires together with"]) await page.getByRole("heading", { name }).waitFor();
      assert.match(await page.locator(".facts").first().textContent(), /Monosemanticity/);
      await checkAxe(page, "atlas");
      await checkWidth(page);
      await shot(page, `atlas-${size}`);

      // a name is text, whatever is in it, and stays after a reload
      const hostile = `<img src=x onerror=alert(1)> ${size}`;
      await page.getByLabel("Name", { exact: true }).fill(hostile);
      await page.getByRole("button", { name: "Rename" }).click();
      await page.getByText("Saved beside the SAE.").waitFor();
      await page.reload();
      await page.getByRole("heading", { name: hostile }).waitFor();
      assert.ok(readFileSync(join(all.sae, "names.json"), "utf8").includes(JSON.stringify(hostile)));
      await page.getByRole("button", { name: "Automatic name" }).click();
      await page.getByText("The automatic name is back.").waitFor();

      await page.getByRole("combobox", { name: "Photo" }).selectOption("bundled-coffee");
      await page.getByLabel("Question").fill("What is in the cup?");
      await page.getByRole("button", { name: "Ask twice" }).click();
      await page.locator(".answers .badge").waitFor();
      assert.equal(await page.locator(".answers dd").first().textContent(), "coffee");

      await open(page, "/atlas?list=tree");
      await page.locator("ul.tree button.toggle").first().click();
      await page.locator("ul.tree ul li").first().waitFor();
      await checkAxe(page, "tree");
      await shot(page, `tree-${size}`);
      await page.locator("ul.tree ul a.concept").first().click();
      await page.waitForURL(/concept=\d+/);
    }));

  test(`runs, ${size}`, TIME, () =>
    inPage(all, options, async (page) => {
      await open(page, "/runs");
      await page.getByRole("heading", { name: "6 samples" }).waitFor();
      const settings = await page.getByLabel("Lost by").locator("option").evaluateAll((found) => found.map((item) => item.value).filter(Boolean));
      const random = settings.find((id) => id.startsWith("random"));
      await page.getByLabel("Lost by").selectOption(random);
      await page.getByLabel("but kept by").selectOption("full");
      await page.waitForURL(/lost=.*kept=full/);
      await page.getByLabel("Lost by").selectOption("");
      await page.getByLabel("but kept by").selectOption("");
      await page.getByLabel("Search", { exact: true }).fill("dog");
      await page.getByRole("heading", { name: "1 sample", exact: true }).waitFor();
      await page.locator("ul.samples button").first().click();
      await page.waitForURL(/sample=1/);
      await page.getByText("Is there a <b>dog</b> in the photo?").first().waitFor(); // shown as text
      assert.equal(await page.locator(".question b").count(), 0);
      await checkAxe(page, "runs");
      await checkWidth(page);
      await shot(page, `runs-${size}`);
      await page.reload();
      await page.getByRole("link", { name: "Inspect the photo" }).click();
      await page.waitForURL(/inspect\?photo=run0-/);
      await picture(page).waitFor();
    }));
}

test("a run that is still being written is followed", TIME, () =>
  inPage(all, {}, async (page) => {
    const folder = join(all.folder, "unfinished/answers");
    const file = join(folder, readdirSync(folder).find((name) => name.endsWith(".jsonl")));
    const lines = readFileSync(file, "utf8").split("\n").filter(Boolean);
    writeFileSync(file, lines.slice(0, 4).join("\n") + "\n" + lines[4].slice(0, 30));
    await open(page, "/runs?run=1");
    await page.getByText(`4 of ${lines.length} answers. The run is still being written`).waitFor();
    await shot(page, "runs-unfinished");
    writeFileSync(file, lines.join("\n") + "\n");
    await page.getByText(`${lines.length} of ${lines.length} answers.`, { exact: false }).waitFor();
    assert.equal(await page.locator("progress").count(), 0);
  }));

test("photos are picked, dropped and pasted, and not stored without consent", TIME, () =>
  inPage(all, {}, async (page) => {
    await open(page, "/");
    await picture(page).waitFor();
    await page.getByLabel("Choose a photo file").setInputFiles(join(PHOTOS, "rocket.jpg"));
    await page.waitForURL(/photo=upload-/);
    await page.getByText("only in the memory of this computer").waitFor();
    const first = page.url();
    await page.getByRole("button", { name: "Store it so that links keep working" }).click();
    await page.getByText("stored in torino's cache folder").waitFor();
    await page.getByRole("button", { name: "Forget it" }).click();
    await page.waitForURL(/photo=bundled-/);

    const bytes = [...readFileSync(join(PHOTOS, "coffee.jpg"))];
    for (const kind of ["drop", "paste"]) {
      await page.evaluate(([event, data]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(data)], "photo.jpg", { type: "image/jpeg" }));
        const made = event === "drop" ? new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }) : new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true });
        document.body.dispatchEvent(made);
      }, [kind, bytes]);
      await page.waitForURL((url) => url.href.includes("photo=upload-") && url.href !== first);
      await page.getByRole("button", { name: "Forget it" }).click();
      await page.waitForURL(/photo=bundled-/);
    }

    await page.getByLabel("Choose a photo file").setInputFiles({ name: "x.jpg", mimeType: "image/jpeg", buffer: Buffer.from("not a photo") });
    await page.getByRole("alert").getByText("not an image in a known format").waitFor();
    page.expectProblem(/400/); // the browser reports a refused upload on its console
    await open(page, new URL(first).pathname + new URL(first).search);
    await page.getByRole("alert").getByText("no longer in memory").waitFor();
    page.expectProblem(/404/);
  }));

test("everything works by keyboard", TIME, () =>
  inPage(all, {}, async (page) => {
    const press = (key) => page.keyboard.press(key);
    const focused = () => page.evaluate(() => document.activeElement.getAttribute("aria-label") ?? document.activeElement.textContent);
    const tabTo = async (wanted) => {
      for (let step = 0; step < 60; step++) {
        if (wanted.test((await focused()) ?? "")) return;
        await press("Tab");
      }
      assert.fail(`the keyboard does not reach ${wanted}; last: ${await focused()}`);
    };
    await open(page, "/inspect?photo=bundled-coffee");
    await page.waitForFunction(() => document.querySelectorAll(".count b").length === 2);
    await press("Tab");
    assert.equal(await focused(), "Skip to the content");
    await tabTo(/Arrow keys move between 14 rows/);
    const live = page.locator(".patches [role=status]").first();
    await page.waitForFunction(() => /^Row 8, column 8: /.test(document.querySelector(".patches [role=status]").textContent));
    await press("ArrowUp");
    await press("ArrowLeft");
    await page.waitForFunction(() => /^Row 7, column 7: .+ \d/.test(document.querySelector(".patches [role=status]").textContent));
    assert.match(await live.textContent(), /Token \d+ of \d+ patches/);
    await shot(page, "keyboard");
    await press("Enter");
    await page.waitForURL(/token=\d+/);
    await page.getByText(/^Token \d+ of/).first().waitFor();
    await page.getByLabel("k", { exact: true }).focus();
    await press("ArrowRight");
    await page.waitForURL(/k%3D3/);

    await page.locator("body").click({ position: { x: 2, y: 2 } });
    await tabTo(/^Compare$/);
    await press("Enter");
    await page.waitForURL(/compare/);
    await page.getByLabel("Question").focus();
    await page.keyboard.type(" Be brief.");
    await page.waitForFunction(() => !document.querySelector("button.primary").disabled);
    await press("Enter");
    await page.locator(".cards .answer").first().getByText(/\w+/).waitFor();

    await open(page, "/atlas");
    await page.getByLabel("Search concepts").focus();
    await page.keyboard.type("hair");
    await page.waitForFunction(() => /hair/.test(document.querySelector("ul.concepts .grow")?.textContent ?? ""));
    await page.locator("ul.concepts button").first().focus();
    await press("Enter");
    await page.getByRole("heading", { name: "Nearest concepts" }).waitFor();

    await open(page, "/runs");
    await page.locator("ul.samples button").first().focus();
    await press("Enter");
    await page.waitForURL(/sample=/);
  }));

test("the API page, both themes, and back", TIME, () =>
  inPage(all, {}, async (page) => {
    await open(page, "/api");
    await page.getByRole("heading", { name: "GET /api/photos/{photo}/reduction" }).waitFor();
    await checkAxe(page, "api");
    for (const theme of ["light", "dark"]) {
      await page.getByRole("button", { name: /^Theme/ }).click();
      await page.waitForFunction((name) => getComputedStyle(document.documentElement).colorScheme === name, theme);
      await checkAxe(page, `api, ${theme}`);
    }
    await shot(page, "api");
    await page.getByRole("link", { name: "Inspect" }).click();
    await picture(page).waitFor();
    await checkAxe(page, "inspect, dark");
    await page.goBack();
    await page.getByRole("heading", { name: "API" }).waitFor();
  }));
