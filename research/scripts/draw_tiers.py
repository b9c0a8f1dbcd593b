r"""Draw research/images/beyond-tiers.png: relative score by tokens of all methods, a panel for each lab model.

Read from the tables that ``torino report`` wrote, as ``models_lab.py`` reads them; methods are told apart by label. The
method in the middle is red; of the others those are named that are the best other in some tier of some model.

Examples
--------
::

    python research/scripts/draw_tiers.py --model 'first model' research/reports/lab-table.md research/reports/beyond-tiers.md \
        --model 'second model' research/reports/beyond-table.md --model 'third model' research/reports/beyond-third.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from models_lab import Scores, is_own, read

from torino.evaluation.reporting.figures.style import (
    GRID,
    INK,
    MUTED,
    PAGE_WIDTH,
    RED,
    figure_style,
    method_style,
    new_figure,
    save_figure,
)

ROOT = Path(__file__).resolve().parents[2]


def best_others(models: list[dict[int, Scores]], method: str) -> list[str]:
    """Labels that are the best other somewhere, the most frequent first."""
    firsts: dict[str, int] = {}
    for model in models:
        for scores in model.values():
            best = max((label for label in scores if not is_own(label, method)), key=lambda label: scores[label])
            firsts[best] = firsts.get(best, 0) + 1
    return sorted(firsts, key=lambda label: (-firsts[label], label))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", nargs="+", action="append", required=True, metavar="NAME REPORT", help="a title, then its reports")
    add("--method", default="TORINO-X", help="label in the reports (default: %(default)s)")
    add("--tiers", nargs="+", type=int, default=[217, 192, 129, 128, 64, 47])
    add("--output", type=Path, default=ROOT / "research/images/beyond-tiers.png")
    args = parser.parse_args()
    models: dict[str, dict[int, Scores]] = {}
    for title, *files in args.model:
        for file in files:
            if not Path(file).is_file():
                parser.error(f"there is no file {file}")
        tiers = read([Path(file) for file in files])
        models[title] = {tier: tiers[tier] for tier in args.tiers if args.method in tiers.get(tier, {})}
        if not models[title]:
            parser.error(f"no report of {title!r} has {args.method} at any of {args.tiers} tokens")
    named = best_others(list(models.values()), args.method)
    looks = {label: method_style(label.lower(), False, [one.lower() for one in named]) for label in named}
    with figure_style():
        figure = new_figure(PAGE_WIDTH, 2.9)
        panels = figure.subplots(1, len(models), sharex=True, sharey=True, squeeze=False)[0]
        for axis, (title, tiers) in zip(panels, models.items(), strict=True):
            labels = {label for scores in tiers.values() for label in scores if not is_own(label, args.method)}
            for label in sorted(labels, key=lambda label: label in looks):
                at = sorted(tier for tier in tiers if label in tiers[tier])
                style = looks.get(label, {"color": GRID, "linewidth": 0.7, "zorder": 1})
                axis.plot(at, [tiers[tier][label] for tier in at], **style, label=label if label in looks else None)
            at = sorted(tiers)
            mine = [tiers[tier][args.method] for tier in at]
            axis.plot(at, mine, "o-", color=RED, linewidth=1.8, zorder=6, label=args.method)
            axis.set_xscale("log")
            axis.minorticks_off()
            axis.set_xticks([47, 64, 128, 192], ["47", "64", "128", "192"])
            axis.axhline(100, color=MUTED, linestyle=":", linewidth=0.8)
            axis.set(title=title, xlabel="tokens of 576")
            axis.grid(axis="y")
        panels[0].set_ylabel("per cent of the score with all tokens")
        handles = {}
        for axis in panels:
            drawn, labels = axis.get_legend_handles_labels()
            handles.update(zip(labels, drawn, strict=True))
        handles["all others"] = panels[0].plot([], [], color=GRID)[0]
        order = [args.method, *named, "all others"]
        figure.legend([handles[one] for one in order], order, loc="outside lower center", ncols=6, labelcolor=INK)
        save_figure(figure, args.output.parent, args.output.stem, ("png",))


if __name__ == "__main__":
    main()
