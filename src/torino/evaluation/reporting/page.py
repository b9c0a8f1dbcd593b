"""The HTML page of a report: one file, no network, light and dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torino.evaluation.reporting.summary import Document
from torino.evaluation.reporting.tables import RELATIVE, Block, Layout, Line, TableCell

STYLE = """
:root { color-scheme: light; --paper: #fdfdfc; --card: #ffffff; --ink: #1d2126; --muted: #68707a; --line: #dfe2e6;
  --accent: #b94a00; --band: #f4f2ee; --note: #fff6e5; --note-line: #e8b44c; }
:root[data-theme=dark] { color-scheme: dark; --paper: #15171b; --card: #1b1e23; --ink: #e6e8eb; --muted: #98a1ab;
  --line: #31363d; --accent: #ff9d57; --band: #20242a; --note: #2c2618; --note-line: #a57b28; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
header { display: flex; align-items: baseline; gap: 1rem; flex-wrap: wrap; }
h1 { font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: .98rem; margin: 1.6rem 0 .4rem; font-weight: 600; }
p { max-width: 90ch; margin: .4rem 0; } .muted { font-size: .87rem; } .lead, small, .muted { color: var(--muted); }
.tools { margin-left: auto; display: flex; gap: 1rem; align-items: center; font-size: .87rem; }
button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 6px;
  padding: .15rem .6rem; cursor: pointer; }
.note { background: var(--note); border-left: 3px solid var(--note-line); padding: .5rem .9rem; margin: .5rem 0;
  max-width: none; border-radius: 0 4px 4px 0; font-size: .92rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .5rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
thead th { border-bottom: 1px solid var(--line); font-weight: 600; vertical-align: bottom; }
th.sortable { cursor: pointer; user-select: none; } th.sortable:hover { color: var(--accent); }
th[aria-sort]::after { content: " ▾"; color: var(--accent); } th[aria-sort=ascending]::after { content: " ▴"; }
tbody tr + tr td { border-top: 1px solid color-mix(in srgb, var(--line) 55%, transparent); }
tbody tr:hover td { background: var(--band); }
td small { display: none; font-size: .74rem; line-height: 1.2; } .wide td small, td small.sd { display: block; }
td.best { font-weight: 700; } td.second .v { text-decoration: underline; text-underline-offset: 3px; }
tr.paper td { color: var(--muted); font-style: italic; } td.rel { border-left: 1px solid var(--line); }
tr.own td:first-child { color: var(--accent); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; font-size: .92rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0; padding: 1rem; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
figure svg { display: block; width: min(100%, 50rem); height: auto; margin: 0 auto; color: var(--ink); }
figcaption { color: var(--muted); font-size: .88rem; margin-top: .6rem; max-width: 90ch; }
td.text { white-space: normal; } .text { text-align: left; } code { font-size: .85em; }
@media print { .tools { display: none; } .scroll { border: 0; } }
"""
SCRIPT = """
const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
const paint = on => root.dataset.theme = on ? "dark" : "light";
paint(location.hash === "#dark" || (location.hash !== "#light" && dark.matches));
document.getElementById("theme").onclick = () => paint(root.dataset.theme !== "dark");
document.getElementById("wide").onchange = e => document.body.classList.toggle("wide", e.target.checked);
for (const table of document.querySelectorAll("table.sorted")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, place) => {
    head.classList.add("sortable"); head.tabIndex = 0;
    const sort = () => {
      const up = head.getAttribute("aria-sort") === "descending" || (place === 0 && !head.hasAttribute("aria-sort"));
      heads.forEach(one => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => { const v = row.cells[place].dataset.v; return v === "" ? null : isNaN(v) ? v : Number(v); };
      [...body.rows].map(row => [key(row), row]).sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
      }).forEach(([, row]) => body.append(row));
    };
    head.onclick = sort; head.onkeydown = e => { if (e.key === "Enter") sort(); };
  });
}
"""


def page(
    document: Document, table: Layout, facts: Mapping[str, str], statements: Sequence[str], figures: Mapping[str, str]
) -> str:
    """The page: notes, a sortable table for each tier, figures, and what was run."""
    name = escape(str(document["name"]))
    model = escape(str(document["run"]["model"]))
    body = [
        f"<header><h1>{name}</h1><span class='lead'>{model}</span><span class='tools'><label><input type='checkbox' "
        "id='wide'> intervals</label><button id='theme' type='button'>light / dark</button></span></header>",
        *(f"<p class='note'>{_rich(one)}</p>" for one in statements),
        "<h2>Scores</h2>",
        f"<p class='muted'>{_rich(_legend(document))}</p>",
        *(_block(block, table, document) for block in table.blocks),
    ]
    if figures:
        body.append("<h2>Figures</h2>")
        for caption, svg in figures.items():
            body.append(f"<figure>{inline_svg(svg)}<figcaption>{escape(caption)}</figcaption></figure>")
    body += ["<h2>What was run</h2>", "<dl>"]
    body += [f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items() if value]
    body += ["</dl>", _tasks(document)]
    return (
        f"<!doctype html>\n<html lang='en' data-theme='light'>\n<head><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><title>{name} · torino</title>"
        f"<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def inline_svg(text: str) -> str:
    """An SVG for the inside of a page: without its header, and with its ink in the page's colour."""
    return text[text.index("<svg") :]


def _legend(document: Document) -> str:
    level = f"{document['level']:.0%}"
    return (
        "Best of a tier **bold**, second underlined. Relative: macro-average of per-benchmark ratios to the full-token "
        f"baseline. MME in points, others in per cent; ± over seeds. Intervals are {level}, by bootstrap. Click a "
        "heading to sort."
    )


def _block(block: Block, table: Layout, document: Document) -> str:
    compared = bool(block.versus)
    counted = block.tier != "full"
    heads = ["Method", "Tokens", *table.columns.values()]
    if compared:
        heads += ["Δ Rel.", "p"]
    heads += ["Failed", "Unparsed"] + (["Plan, ms"] if counted else [])
    rows = [_line(line, table, compared, counted, document["level"]) for line in block.lines]
    head = "".join(f"<th scope='col'>{escape(one)}</th>" for one in heads)
    told = f"Δ Rel. is the difference of relative scores to {block.versus}, p how likely so large a one is by chance."
    note = f"<p class='muted'>{escape(told)}</p>" if compared else ""
    return (
        f"<h3>{escape(block.heading)}</h3>{note}<div class='scroll'><table class='sorted'>"
        f"<thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _line(line: Line, table: Layout, compared: bool, counted: bool, level: float) -> str:
    row = line.row
    label = escape(line.label) + ("" if line.ours else ", the paper")
    spec = escape(str(row["spec"] or row["label"]), quote=True) if row is not None else "printed in the paper"
    own = row is not None and row["method"].startswith("torino-")
    cells = [f"<td data-v='{escape(line.label, quote=True)}' title='{spec}'>{label}</td>"]
    cells.append(_tokens(line))
    cells += [_cell(line.cells[name], name, level) for name in table.columns]
    if compared:
        cells += _difference(row)
    for name in ("failed", "unparsed"):
        count = "" if row is None else sum(one["counts"].get(name, 0) for one in row["scores"].values())
        cells.append(f"<td data-v='{count}'>{count or ('0' if count == 0 else '')}</td>")
    if counted:
        time = None if row is None else row["plan_ms"]
        cells.append(f"<td data-v='{'' if time is None else time}'>{'' if time is None else f'{time:.1f}'}</td>")
    return f"<tr class='{'paper' if row is None else 'own' if own else ''}'>{''.join(cells)}</tr>"


def _tokens(line: Line) -> str:
    row = line.row
    if row is None or not row["tokens_by_task"]:
        return f"<td data-v='{line.tokens.strip('~–')}'>{line.tokens}</td>"
    tasks = row["tokens_by_task"]
    low, high = min(one["min"] for one in tasks.values()), max(one["max"] for one in tasks.values())
    each = "\n".join(f"{name}: {one['mean']:.1f} ({one['min']:.0f} to {one['max']:.0f})" for name, one in tasks.items())
    small = f"<small>{low:.0f}–{high:.0f}</small>" if low < high else "<small>each</small>"
    value = row["tokens"]
    return f"<td data-v='{value}' title='{escape(each, quote=True)}'>{line.tokens}{small}</td>"


def _cell(cell: TableCell, name: str, level: float) -> str:
    kinds = " ".join(filter(None, [cell.mark, "rel" if name == RELATIVE else ""]))
    value = "" if cell.value is None else f"{cell.value:.6f}"
    small = title = ""
    if cell.low is not None and cell.high is not None:
        title = f" title='{level:.0%} interval {cell.low:.2f} to {cell.high:.2f}'"
        small = f"<small>{cell.low:.1f}–{cell.high:.1f}</small>"
    text, apart, sd = cell.text.partition(" ± ")
    if apart:  # below the figure, so that the table stays narrow
        small = f"<small class='sd'>± {escape(sd)}</small>{small}"
    return f"<td class='{kinds}' data-v='{value}'{title}><span class='v'>{escape(text)}</span>{small}</td>"


def _difference(row: Mapping[str, Any] | None) -> list[str]:
    apart = None if row is None else row["versus"]
    if apart is None:
        return ["<td data-v=''></td>"] * 2
    small = f"<small>{apart['low']:+.2f} to {apart['high']:+.2f}</small>"
    p = "&lt;0.001" if apart["p"] < 0.001 else f"{apart['p']:.3f}"
    return [f"<td data-v='{apart['value']}'>{apart['value']:+.2f}{small}</td>", f"<td data-v='{apart['p']}'>{p}</td>"]


def _tasks(document: Document) -> str:
    names = ("Task", "File", "Samples", "Skipped", "Metric", "Prompt")
    words = ("File", "Metric", "Prompt")
    heads = "".join(f"<th scope='col'{' class=text' if one in words else ''}>{one}</th>" for one in names)
    rows: list[str] = []
    for task in document["run"]["tasks"]:
        prompt = escape(str(task["prompt"])).replace("\n", "<br>")
        rows.append(
            f"<tr><td>{escape(str(task['task']))}</td><td class='text'>{escape(str(task['file']))}<br><code>"
            f"{escape(str(task['fingerprint'])[:16])}</code></td><td>{task['samples']:,}</td>"
            f"<td>{task.get('skipped_rows', 0):,}</td><td class='text'>{escape(str(task['metric']))}</td>"
            f"<td class='text'>{prompt}</td></tr>"
        )
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _rich(text: str) -> str:
    """Escaped, with ``**bold**`` and ``*slanted*`` of our own sentences."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"(?<![\w*])\*([^*\s][^*]*?)\*(?![\w*])", r"<em>\1</em>", bold)
