"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const root = document.documentElement;

function createElement(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function formatShare(share) {
  if (share >= 0.1) return (100 * share).toFixed(0) + " %";
  return share >= 0.0001 ? (100 * share).toFixed(2) + " %" : "< 0.01 %";
}

// ---------------------------------------------------------------- theme

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const drawnTiles = new Map(); // canvas -> tile

function setTheme(theme) {
  root.dataset.theme = theme;
  for (const [canvas, tile] of drawnTiles) drawTile(canvas, tile, true);
}

prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));
document.getElementById("theme").onclick = () => setTheme(root.dataset.theme === "dark" ? "light" : "dark");
setTheme(prefersDark.matches ? "dark" : "light");

// ---------------------------------------------------------------- photos

const images = new Map();

function loadPhoto(id) {
  if (!images.has(id)) {
    images.set(id, new Promise(resolve => {
      const image = new Image();
      image.onload = () => resolve(image);
      image.src = "data:image/jpeg;base64," + data.photos[id].jpeg;
    }));
  }
  return images.get(id);
}

// Returns the visibility (0 to 1) of each patch. A map has three bytes per active patch: the patch number, low byte
// first, and the activation, where 255 is the largest activation of the latent.
function decodeMap(map, patches) {
  const visibility = new Float32Array(patches);
  const bytes = Uint8Array.from(atob(map), character => character.charCodeAt(0));
  for (let i = 0; i < bytes.length; i += 3) {
    visibility[bytes[i] + 256 * bytes[i + 1]] = Math.min(1, 0.25 + 1.5 * bytes[i + 2] / 255);
  }
  return visibility;
}

// Draws a photo. If highlight is true, patches on which the latent is active are in color, all others gray and faded.
async function drawTile(canvas, tile, highlight) {
  const image = await loadPhoto(tile.photo);
  const [rows, columns] = data.photos[tile.photo].grid;
  const width = canvas.width = image.naturalWidth;
  const height = canvas.height = image.naturalHeight;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  if (!highlight) return;
  const visibility = decodeMap(tile.map, rows * columns);
  const pixels = context.getImageData(0, 0, width, height);
  const values = pixels.data;
  const background = root.dataset.theme === "dark" ? 24 : 255;
  for (let y = 0, i = 0; y < height; y++) {
    for (let x = 0; x < width; x++, i += 4) {
      const visible = visibility[Math.floor(y * rows / height) * columns + Math.floor(x * columns / width)];
      const faded = 0.32 * (values[i] + values[i + 1] + values[i + 2]) / 3 + 0.68 * background;
      for (let c = i; c < i + 3; c++) values[c] = faded + (values[c] - faded) * visible;
    }
  }
  context.putImageData(pixels, 0, 0);
}

function createTile(tile) {
  const caption = data.photos[tile.photo].text;
  const canvas = createElement("canvas", { width: 8, height: 8, title: caption });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", caption || "photo " + tile.photo);
  canvas.onpointerenter = () => drawTile(canvas, tile, false);
  canvas.onpointerleave = () => drawTile(canvas, tile, true);
  drawnTiles.set(canvas, tile);
  drawTile(canvas, tile, true);
  return canvas;
}

// ---------------------------------------------------------------- cards

const shownLatents = new Set(data.concepts.map(concept => concept.latent));
const maxUsage = Math.max(...data.concepts.map(concept => concept.usage));

function createFigure(name, value, share) {
  const bar = createElement("i");
  bar.style.setProperty("--at", (100 * Math.max(0, Math.min(1, share))).toFixed(1) + "%");
  return createElement("div", {},
    createElement("span", { textContent: name }), createElement("b", { textContent: value }), bar);
}

function createNeighbor([latent, cosine, name]) {
  const text = (name ? name + " " : "") + "#" + latent + " " + cosine.toFixed(2);
  return shownLatents.has(latent) ? createElement("a", { textContent: text, href: "#c" + latent })
    : createElement("b", { textContent: text });
}

function createCard(concept) {
  const title = concept.name ? createElement("h2", { textContent: concept.name, title: concept.name })
    : createElement("h2", { textContent: "unnamed", className: "none" });
  const words = concept.words.map(([word, lift]) => word + " ×" + lift.toFixed(1)).join(", ");
  const score = concept.monosemanticity === null ? "–" : concept.monosemanticity.toFixed(3);
  const photos = createElement("div", { className: "photos" });
  const card = createElement("article", { id: "c" + concept.latent },
    createElement("header", {}, title,
      createElement("a", { className: "number", textContent: "#" + concept.latent, href: "#c" + concept.latent })),
    createElement("div", { className: "words", textContent: words, title: words }),
    createElement("div", { className: "figures" },
      createFigure("of patches", formatShare(concept.usage), concept.usage / maxUsage),
      createFigure("of photos", formatShare(concept.photo_share), concept.photo_share),
      createFigure("monosemanticity", score, concept.chance_adjusted),
      createFigure("mean, max", concept.mean.toFixed(1) + ", " + concept.max.toFixed(1), concept.mean / concept.max)),
    photos,
    concept.neighbors.length
      ? createElement("div", { className: "near" }, "similar", ...concept.neighbors.map(createNeighbor)) : "");
  card.fill = () => photos.append(...concept.tiles.map(createTile));
  return card;
}

// Photos are drawn when their card comes close to the visible part of the page.
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    observer.unobserve(entry.target);
    entry.target.fill();
  }
}, { rootMargin: "600px" });
const cards = new Map(data.concepts.map(concept => [concept.latent, createCard(concept)]));
for (const card of cards.values()) observer.observe(card);

// ---------------------------------------------------------------- filter and sort

const comparators = {
  usage: (a, b) => b.usage - a.usage,
  monosemanticity: (a, b) => (b.monosemanticity ?? -9) - (a.monosemanticity ?? -9),
  lift: (a, b) => b.lift - a.lift,
  name: (a, b) => !a.name - !b.name || a.name.localeCompare(b.name),
  latent: (a, b) => a.latent - b.latent,
};
const filter = document.getElementById("filter");
const sort = document.getElementById("sort");

function matches(concept, query) {
  return !query || "#" + concept.latent === query || String(concept.latent) === query
    || concept.words.some(([word]) => word.includes(query)) || concept.name.includes(query);
}

function update() {
  const query = filter.value.trim().toLowerCase();
  const selected = data.concepts.filter(concept => matches(concept, query))
    .sort((a, b) => comparators[sort.value](a, b) || a.latent - b.latent);
  main.replaceChildren(...selected.map(concept => cards.get(concept.latent)));
  if (!selected.length) main.append(createElement("p", { id: "nothing", textContent: "No concept has this word." }));
  document.getElementById("count").textContent = selected.length + " of " + data.concepts.length + " concepts";
}

filter.oninput = sort.onchange = update;
sort.value = data.sort;
update();
if (location.hash && document.querySelector(location.hash)) document.querySelector(location.hash).scrollIntoView();
