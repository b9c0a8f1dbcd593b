"""The frame of the concept page: one HTML file with style and script of its own, filled by :mod:`torino.interpret.dashboard`."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
:root {
  color-scheme: light;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1b1d21; --muted: #6a7079; --line: #e3e6ea; --accent: #1668b8;
  --chip: #eef1f4; --bar: #cfe0f1; --shadow: 0 1px 2px rgba(20, 25, 35, .06);
}
:root[data-theme="dark"] {
  color-scheme: dark;
  --paper: #131519; --card: #1c1f24; --ink: #e9ebee; --muted: #979ea8; --line: #2c3037; --accent: #79b6f2;
  --chip: #282c33; --bar: #274766; --shadow: none;
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
header { padding: 28px 28px 8px; max-width: 1840px; margin: auto; }
h1 { margin: 0 0 4px; font-size: 24px; font-weight: 650; letter-spacing: -.01em; }
.lead { color: var(--muted); margin: 0 0 14px; max-width: 100ch; }
.facts { display: flex; flex-wrap: wrap; gap: 10px 34px; margin: 0; }
.facts div { min-width: 0; }
.facts dt { color: var(--muted); font-size: 12px; }
.facts dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
nav { position: sticky; top: 0; z-index: 2; background: var(--paper); border-bottom: 1px solid var(--line); }
nav > div { display: flex; flex-wrap: wrap; gap: 10px 16px; align-items: center; padding: 12px 28px;
  max-width: 1840px; margin: auto; }
input, select, button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 6px 10px; }
input[type=search] { width: min(320px, 100%); }
button { cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
#count { color: var(--muted); font-variant-numeric: tabular-nums; margin-right: auto; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(410px, 100%), 1fr)); gap: 16px;
  padding: 18px 28px 60px; max-width: 1840px; margin: auto; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 14px 12px;
  box-shadow: var(--shadow); scroll-margin-top: 76px; min-width: 0; }
article:target { border-color: var(--accent); }
article header { display: flex; align-items: baseline; gap: 8px; padding: 0; margin: 0; max-width: none; }
h2 { font-size: 17px; font-weight: 650; margin: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
h2.none { color: var(--muted); font-weight: 500; }
.number { color: var(--accent); font-variant-numeric: tabular-nums; text-decoration: none; margin-left: auto; }
.words { color: var(--muted); font-size: 12.5px; min-height: 1.45em; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.figures { display: grid; grid-template-columns: 1fr 1fr 1.3fr 1.1fr; gap: 10px; margin: 8px 0 10px; }
.figures span { display: block; color: var(--muted); font-size: 11.5px; white-space: nowrap; }
.figures b { font-weight: 600; font-variant-numeric: tabular-nums; }
.figures i { display: block; height: 3px; border-radius: 2px; margin-top: 3px; background: var(--chip); }
.figures i::after { content: ""; display: block; height: 3px; border-radius: 2px; width: var(--at, 0%);
  background: var(--accent); }
.photos { display: grid; grid-template-columns: repeat(4, 1fr); gap: 5px; }
canvas { width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 5px; display: block;
  background: var(--chip); }
.near { display: flex; flex-wrap: wrap; gap: 5px; margin-top: 10px; align-items: center; font-size: 12px;
  color: var(--muted); }
.near a, .near b { background: var(--chip); border-radius: 999px; padding: 1px 9px; color: inherit; font-weight: 400;
  text-decoration: none; font-variant-numeric: tabular-nums; }
.near a { color: var(--accent); }
.near a:hover { text-decoration: underline; }
#nothing { grid-column: 1 / -1; color: var(--muted); padding: 40px 0; text-align: center; }
@media (max-width: 560px) { header, nav > div, main { padding-left: 14px; padding-right: 14px; } }
</style>
</head>
<body>
<header>
<h1>%TITLE%</h1>
<p class="lead">%LEAD%</p>
<dl class="facts">%FACTS%</dl>
</header>
<nav><div>
<input type="search" id="filter" placeholder="Filter by word or number" aria-label="Filter by word or number">
<label>Sort by <select id="sort">
<option value="usage">usage</option>
<option value="ms">monosemanticity</option>
<option value="lift">lift of the name</option>
<option value="name">name</option>
<option value="latent">number</option>
</select></label>
<span id="count" role="status"></span>
<button id="theme" type="button" aria-label="Light or dark">Light / dark</button>
</div></nav>
<main></main>
<script type="application/json" id="data">%DATA%</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main"), root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const drawn = new Map();
function paint(theme) {
  root.dataset.theme = theme;
  for (const [canvas, one] of drawn) draw(canvas, one, false);
}
dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
document.getElementById("theme").onclick = () => paint(root.dataset.theme === "dark" ? "light" : "dark");
paint(dark.matches ? "dark" : "light");

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
const percent = x => x >= 0.1 ? (100 * x).toFixed(0) + " %" : x >= 0.0001 ? (100 * x).toFixed(2) + " %" : "< 0.01 %";
const onPage = new Set(data.concepts.map(c => c.latent));
const mostUsed = Math.max(...data.concepts.map(c => c.usage));

const loaded = new Map();
function photo(id) {
  if (!loaded.has(id)) loaded.set(id, new Promise(done => {
    const image = new Image();
    image.onload = () => done(image);
    image.src = "data:image/jpeg;base64," + data.photos[id].jpeg;
  }));
  return loaded.get(id);
}

// In colour where patches fire, the more the stronger, and grey and faded elsewhere; pointed at, the photo as it is.
async function draw(canvas, tile, bare) {
  const image = await photo(tile.photo), [rows, columns] = data.photos[tile.photo].grid;
  const width = canvas.width = image.naturalWidth, height = canvas.height = image.naturalHeight;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.drawImage(image, 0, 0);
  if (bare) return;
  const light = new Float32Array(rows * columns), bytes = Uint8Array.from(atob(tile.map), c => c.charCodeAt(0));
  for (let k = 0; k < bytes.length; k += 3) {
    light[bytes[k] + 256 * bytes[k + 1]] = Math.min(1, 0.25 + 1.5 * bytes[k + 2] / 255);
  }
  const pixels = pen.getImageData(0, 0, width, height), values = pixels.data;
  const paper = root.dataset.theme === "dark" ? 24 : 255;
  for (let y = 0, k = 0; y < height; y++) for (let x = 0; x < width; x++, k += 4) {
    const l = light[Math.floor(y * rows / height) * columns + Math.floor(x * columns / width)];
    const pale = 0.32 * (values[k] + values[k + 1] + values[k + 2]) / 3 + 0.68 * paper;
    for (let c = k; c < k + 3; c++) values[c] = pale + (values[c] - pale) * l;
  }
  pen.putImageData(pixels, 0, 0);
}

function tile(one) {
  const canvas = element("canvas", { width: 8, height: 8, title: data.photos[one.photo].text });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", data.photos[one.photo].text || "photo " + one.photo);
  canvas.onpointerenter = () => draw(canvas, one, true);
  canvas.onpointerleave = () => draw(canvas, one, false);
  drawn.set(canvas, one);
  draw(canvas, one, false);
  return canvas;
}

function figure(name, value, share) {
  const bar = element("i");
  if (share !== undefined) bar.style.setProperty("--at", (100 * Math.max(0, Math.min(1, share))).toFixed(1) + "%");
  return element("div", {}, element("span", { textContent: name }), element("b", { textContent: value }), bar);
}

function card(c) {
  const title = c.name ? element("h2", { textContent: c.name, title: c.name })
    : element("h2", { textContent: "unnamed", className: "none" });
  const words = c.words.map(([word, lift]) => word + " ×" + lift.toFixed(1)).join(", ");
  const near = c.near.map(([latent, cosine, name]) => {
    const text = (name ? name + " " : "") + "#" + latent + " " + cosine.toFixed(2);
    return onPage.has(latent) ? element("a", { textContent: text, href: "#c" + latent })
      : element("b", { textContent: text });
  });
  const photos = element("div", { className: "photos" });
  const made = element("article", { id: "c" + c.latent },
    element("header", {}, title,
      element("a", { className: "number", textContent: "#" + c.latent, href: "#c" + c.latent })),
    element("div", { className: "words", textContent: words, title: words }),
    element("div", { className: "figures" },
      figure("of patches", percent(c.usage), c.usage / mostUsed),
      figure("of photos", percent(c.share), c.share),
      figure("monosemanticity", c.ms === null ? "–" : c.ms.toFixed(3), c.above),
      figure("mean, peak", c.mean.toFixed(1) + ", " + c.peak.toFixed(1), c.mean / c.peak)),
    photos,
    c.near.length ? element("div", { className: "near" }, "near", ...near) : "");
  made.fill = () => { made.fill = () => {}; photos.append(...c.tiles.map(tile)); };
  return made;
}

const watch = new IntersectionObserver(seen => {
  for (const one of seen) if (one.isIntersecting) { one.target.fill(); watch.unobserve(one.target); }
}, { rootMargin: "600px" });
const cards = new Map(data.concepts.map(c => [c.latent, card(c)]));
for (const made of cards.values()) watch.observe(made);

const orders = {
  usage: (a, b) => b.usage - a.usage,
  ms: (a, b) => (b.ms ?? -9) - (a.ms ?? -9),
  lift: (a, b) => b.lift - a.lift,
  name: (a, b) => !a.name - !b.name || a.name.localeCompare(b.name),
  latent: (a, b) => a.latent - b.latent,
};
const filter = document.getElementById("filter"), sort = document.getElementById("sort");
function show() {
  const wanted = filter.value.trim().toLowerCase();
  const fits = c => !wanted || "#" + c.latent === wanted || String(c.latent) === wanted
    || c.words.some(([word]) => word.includes(wanted)) || c.name.includes(wanted);
  const chosen = data.concepts.filter(fits).sort((a, b) => orders[sort.value](a, b) || a.latent - b.latent);
  main.replaceChildren(...chosen.map(c => cards.get(c.latent)));
  if (!chosen.length) main.append(element("p", { id: "nothing", textContent: "No concept has this word." }));
  document.getElementById("count").textContent = chosen.length + " of " + data.concepts.length + " concepts";
}
filter.oninput = sort.onchange = show;
sort.value = data.sort;
show();
if (location.hash && document.querySelector(location.hash)) document.querySelector(location.hash).scrollIntoView();
</script>
</body>
</html>
"""
