"""Read the tables of the paper from its LaTeX source into src/torino/data/paper, one JSON file a table.

python scripts/read_paper.py --paper paper.tex

Scores stay the texts that the paper prints, so that nothing is lost to rounding; the marks for best and second best are
kept beside them.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from torino.core.io import write_json

TARGET = Path(__file__).parents[1] / "src" / "torino" / "data" / "paper"
NOTICE = "The paper's own figures, as printed in it; nothing here was measured with this package."
PAPER = "TORINO: Token Reduction via Interpretable Concept Overlap in Vision-Language Models"
COLUMNS = ("GQA", "MMBench_EN", "MMBench_CN", "MME", "POPE", "ScienceQA", "TextVQA", "VizWiz", "MMVet")
# What the paper calls the columns, in its order; the script refuses a table that says otherwise.
PRINTED = ("GQA", "MMB EN", "MMB CN", "MME", "POPE", "SQA I", "VQA T", "VizWiz", "MMVet")
# Label in the paper to the name of the file, and whether the table belongs to the appendix.
TABLES = {
    "tab:results-llava-v1-5-7b-x64-cls-only": ("llava-1.5-7b-x64", False),
    "tab:ablation-nosae": ("no-sae", False),
    "tab:results-llava-v1-5-13b-x64-cls-only": ("llava-1.5-13b-x64", True),
    "tab:results-llava-v1-5-7b-fb-x64-cls-only": ("llava-1.5-7b-x64-fixed", True),
    "tab:results-llava-v1-5-7b-x1-cls-only": ("llava-1.5-7b-x1", True),
    "tab:results-llava-v1-5-7b-x2-cls-only": ("llava-1.5-7b-x2", True),
    "tab:results-llava-v1-5-7b-x4-cls-only": ("llava-1.5-7b-x4", True),
    "tab:results-llava-v1-5-7b-x8-cls-only": ("llava-1.5-7b-x8", True),
    "tab:results-llava-v1-5-7b-x16-cls-only": ("llava-1.5-7b-x16", True),
    "tab:results-llava-v1-5-7b-x64-random-k-2": ("llava-1.5-7b-x64-spatial", True),
}
SYMBOLS = {r"\varepsilon": "ε", r"\sim": "~", r"\downarrow": "↓", r"\uparrow": "↑", r"\pm": "±", r"\%": "%", r"\ ": " "}


def plain(latex: str) -> str:
    """The text that a reader of the paper sees."""
    for symbol, sign in SYMBOLS.items():
        latex = latex.replace(symbol, sign)
    latex = re.sub(r"\\(?:textbf|underline|textit|textrm|mathrm|text)\{([^{}]*)\}", r"\1", latex)
    latex = re.sub(r"\\(?:textbf|underline|textit|textrm|mathrm|text)\{([^{}]*)\}", r"\1", latex)
    latex = re.sub(r"[_^]\{([^{}]*)\}", r" \1", latex)
    latex = re.sub(r"_\{?(\w+)\}?", r" \1", latex).replace("$", "")
    return re.sub(r"\s+", " ", latex).strip()


def mark(latex: str) -> str | None:
    return "best" if r"\textbf{" in latex else "second" if r"\underline{" in latex else None


def argument(text: str, command: str) -> str:
    """What stands in the braces after the first ``command``, braces inside it included."""
    start = text.index(command + "{") + len(command) + 1
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start : end - 1]


def method(latex: str) -> str:
    """``TORINO_FB-P`` and the like, as the names are written in running text."""
    return plain(latex).replace("TORINO FB", "TORINO_FB").replace("Folder", "FOLDER")


def tier(latex: str) -> dict[str, Any]:
    text = plain(latex)
    tokens = re.search(r"~?\s*(\d+) Tokens", text)
    removed = re.search(r"↓\s*(\d+)%", text)
    if not tokens:
        raise SystemExit(f"A tier without a number of tokens: {latex}")
    return {"title": text, "tokens": int(tokens[1]), "removed_percent": int(removed[1]) if removed else 0, "rows": []}


def scores_of(cells: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    names = [*COLUMNS, "Relative"]
    values = {name: plain(cell).rstrip("%") for name, cell in zip(names, cells, strict=True)}
    marks = {name: found for name, cell in zip(names, cells, strict=True) if (found := mark(cell))}
    for value in values.values():
        float(value)
    return values, marks


def results(body: str) -> dict[str, Any]:
    """The rows of one table of scores, tier by tier."""
    tiers: list[dict[str, Any]] = []
    header: list[str] = []
    for line in body.split(r"\\"):
        line = re.sub(r"\\(?:midrule|toprule|bottomrule|rowcolor\{[^}]*\})", "", line).strip()
        if r"\multicolumn" in line:
            tiers.append(tier(argument(line, r"\textit")))
        elif line.count("&") >= 10:
            cells = [cell.strip() for cell in line.split("&")]
            if not header:
                header = [plain(cell) for cell in cells]
                if tuple(header[1:10]) != PRINTED:
                    raise SystemExit(f"Unknown columns: {header}")
                continue
            values, marks = scores_of(cells[1:11])
            row: dict[str, Any] = {"method": method(cells[0]), "scores": values, "marks": marks}
            row["relative"] = row["scores"].pop("Relative")
            if len(cells) > 11:
                time = re.fullmatch(r"([\d.]+) ± ([\d.]+)", plain(cells[11]))
                row["latency_ms"] = None if time is None else {"mean": time[1], "sd": time[2]}
            tiers[-1]["rows"].append(row)
    return {"benchmarks": list(COLUMNS), "baseline": tiers[0]["rows"][0], "tiers": tiers[1:]}


def ablation(body: str) -> dict[str, Any]:
    rows = []
    for line in body.split(r"\\"):
        cells = [cell.strip() for cell in line.split("&")]
        if len(cells) == 2 and "%" in cells[1]:
            name = re.sub(r"\\midrule", "", cells[0])
            rows.append({"method": plain(name), "relative": plain(cells[1]).rstrip("%")})
    return {"tokens": 47, "rows": rows}  # both rows are at the tier that the caption names


def about(caption: str, name: str) -> dict[str, str]:
    model = re.search(r"LLaVA-1\.5-(\d+B)", caption)
    expansion = re.search(r"ε\s*=?\s*(\d+)", caption)
    if model is None or expansion is None:
        raise SystemExit(f"No model or SAE in the caption of {name}: {caption}")
    spatial = "two random spatial tokens" in caption
    return {
        "model": f"LLaVA-1.5-{model[1]}",
        "sae": f"Matryoshka BatchTopK 20, ε={expansion[1]}, "
        + ("trained on two random spatial tokens per image" if spatial else "trained on CLS tokens"),
        "setting": "fixed budget" if "fixed" in name else "dynamic",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", type=Path, required=True, help="LaTeX source of the paper")
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args()
    text = given.paper.read_text(encoding="utf-8")
    count, found = 0, set[str]()
    for table in re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", text, re.DOTALL):
        label = argument(table, r"\label")
        name, appendix = TABLES[label]
        caption = plain(argument(table, r"\caption"))
        body = table[table.index(r"\toprule") :]
        read = ablation(body) if name == "no-sae" else results(body)
        rows = sum(len(one["rows"]) for one in read.get("tiers", [])) or len(read["rows"])
        head = {"notice": NOTICE, "paper": PAPER, "table": label, "appendix": appendix, "caption": caption}
        write_json(given.out / f"{name}.json", {**head, **about(caption, name), **read})
        found.add(label)
        count += rows
        print(f"{name}: {rows} rows")
    if found != set(TABLES):
        raise SystemExit(f"Not in this source: {sorted(set(TABLES) - found)}")
    print(f"{len(found)} tables, {count} rows")


if __name__ == "__main__":
    main()
