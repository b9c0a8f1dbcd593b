r"""Draw relative score against tokens with confidence bands, one panel for each headline table of the factorial.

python research/scripts/factorial_figure.py research/results/factorial-lab.json -o docs/images/factorial-lab.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torino.evaluation.reporting.figures.style import figure_style, method_style, new_figure

ALWAYS = ("torino-x", "torino-m", "random", "pool", "uniform", "downsample")
OTHERS = 3  # the best other methods of any panel
TITLES = {
    "as published": "Each method as published",
    "same setting": "The same setting for all",
    "own best": "Each method at its own best setting",
}


def mean(row: dict[str, Any]) -> float:
    """Return the mean relative score of a row over budgets."""
    values = [cell["value"] for cell in row["scores"].values()]
    return sum(values) / len(values)


def shown_methods(data: dict[str, Any]) -> list[str]:
    """Return the methods to draw: TORINO, plain baselines, and the best others of each table."""
    shown = list(ALWAYS)
    for rows in data["tables"].values():
        others = [row["method"] for row in sorted(rows, key=mean, reverse=True) if row["method"] not in ALWAYS]
        shown += [method for method in others[:OTHERS] if method not in shown]
    present = {row["method"] for rows in data["tables"].values() for row in rows}
    return [method for method in shown if method in present]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="result file of factorial_tables.py")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write")
    args = parser.parse_args()
    data = json.loads(args.results.read_text(encoding="utf-8"))
    methods = shown_methods(data)
    with figure_style():
        figure = new_figure(9.6, 3.6)
        panels = figure.subplots(1, len(data["tables"]), sharey=True)
        for axes, (name, rows) in zip(panels, data["tables"].items(), strict=True):
            by_method = {row["method"]: row for row in rows}
            for method in methods:
                if method not in by_method:
                    continue
                row, style = by_method[method], method_style(method, False, methods)
                cells = sorted((int(budget), cell) for budget, cell in row["scores"].items())
                x = [budget for budget, _ in cells]
                axes.plot(x, [cell["value"] for _, cell in cells], label=row["label"], **style)
                low, high = ([cell[end] for _, cell in cells] for end in ("low", "high"))
                axes.fill_between(x, low, high, color=style["color"], alpha=0.08, linewidth=0)
            axes.set_xscale("log")
            budgets = sorted(map(int, data["budgets"]))
            axes.set_xticks(budgets, [str(budget) for budget in budgets])
            axes.minorticks_off()
            axes.grid(axis="y")
            axes.set_title(TITLES[name] + (f" ({data['same setting']})" if name == "same setting" else ""))
            axes.set_xlabel("visual tokens of 196")
        panels[0].set_ylabel("score, % of all tokens")
        handles: dict[str, Any] = {}
        for axes in panels:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(handles.values(), handles, loc="outside right center")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.output, dpi=160)


if __name__ == "__main__":
    main()
