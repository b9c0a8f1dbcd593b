// One color for each concept, the same as in pictures that torino draws (torino.viz.draw.token_color).

const GOLDEN_RATIO = 0.6180339887;

export type Rgb = [red: number, green: number, blue: number];

export function conceptColor(concept: number): Rgb {
  const hue = (concept * GOLDEN_RATIO) % 1;
  const saturation = 0.5 + (0.4 * (concept % 3)) / 2;
  const value = 0.7 + 0.25 * (concept % 2);
  const sector = Math.floor(hue * 6);
  const rest = hue * 6 - sector;
  const p = value * (1 - saturation);
  const q = value * (1 - saturation * rest);
  const t = value * (1 - saturation * (1 - rest));
  const table: Rgb[] = [
    [value, t, p],
    [q, value, p],
    [p, value, t],
    [p, q, value],
    [t, p, value],
    [value, p, q],
  ];
  return table[sector % 6]!.map((part) => Math.round(part * 255)) as Rgb;
}

/** Tokens without a concept are told apart by their number. */
export function tokenColor(concept: number, token: number): Rgb {
  return conceptColor(concept >= 0 ? concept : token);
}

export function css([red, green, blue]: Rgb, alpha = 1): string {
  return `rgb(${red} ${green} ${blue} / ${alpha})`;
}
