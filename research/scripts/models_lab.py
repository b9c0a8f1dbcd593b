r"""One method's place over several models: means of relative scores, read from the tables that ``torino report`` wrote.

Models are told apart by ``--model``, each with its report files; what stands in several files of a model, or several
times in one, is taken from the first. A method must be in the tier's table of every model. Means are plain, and have no
intervals: the models were asked the same questions about the same pictures, so their errors are not independent.

Examples
--------
::

    python research/scripts/models_lab.py --model research/reports/lab-table.md research/reports/beyond-tiers.md --model research/reports/beyond-table.md \
        --model research/reports/beyond-third.md --tiers 217 192 129 128 64 47
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

TIER = re.compile(r"\*\*Retain (\d+) tokens \(")
Scores = dict[str, float]
"""Relative score by label."""


def read(files: list[Path]) -> dict[int, Scores]:
    """Relative scores by tier and label, of one model: from the first file that has them, and its first table."""
    tiers: dict[int, Scores] = {}
    for file in files:
        here: int | None = None
        seen = set[int]()
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(("**", "#")):
                found = TIER.match(line)
                here = int(found[1]) if found and int(found[1]) not in seen else None
                seen |= {here} if here is not None else set()
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            score = re.match(r"[*<u>]*(\d+\.\d+)%", cells[-1])
            if here is not None and line.startswith("|") and score:
                tiers.setdefault(here, {}).setdefault(cells[0], float(score[1]))
    return tiers


def is_own(label: str, method: str) -> bool:
    """Whether a label is the method's, also with hyperparameters that were written out."""
    return label == method or label.lower().startswith(f"{method.lower()}(")


def line(tier: int, models: list[Scores], method: str) -> list[str]:
    """One row: the method's mean and place, the best other by the mean, and the same on each model."""
    shared = [one for one in models[0] if all(one in scores for scores in models)]
    shared = [one for one in shared if one == method or not is_own(one, method)]
    mean = {label: sum(scores[label] for scores in models) / len(models) for label in shared}
    if method not in mean:
        raise SystemExit(f"{method} is not in every table of {tier} tokens; there are {', '.join(sorted(mean))}.")
    best = max((label for label in shared if label != method), key=lambda label: mean[label])
    place = 1 + sum(value > mean[method] for value in mean.values())
    places = [1 + sum(scores[label] > scores[method] for label in shared) for scores in models]
    ahead = [f"{scores[method] - scores[best]:+.1f}".replace("-", "−") for scores in models]
    apart = f"{mean[method] - mean[best]:+.1f}".replace("-", "−")
    return [
        str(tier),
        f"{mean[method]:.1f}",
        str(place),
        ", ".join(map(str, places)),
        f"{best} {mean[best]:.1f}",
        apart,
        ", ".join(ahead),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", nargs="+", type=Path, action="append", required=True, metavar="REPORT", help="reports of one model")
    add("--method", default="TORINO-X", help="label in the reports (default: %(default)s)")
    add("--tiers", nargs="+", type=int, default=[217, 192, 129, 128, 64, 47])
    args = parser.parse_args()
    missing = [file for files in args.model for file in files if not file.is_file()]
    if missing:
        parser.error(f"there is no file {missing[0]}")
    models = [read(files) for files in args.model]
    tiers = [tier for tier in args.tiers if all(tier in model for model in models)]
    if not tiers:
        there = "; ".join(", ".join(map(str, sorted(model))) or "none" for model in models)
        parser.error(f"no tier of {args.tiers} is in the reports of every model, which have: {there}")
    heads = ["tokens", args.method, "place", "on each", "best other by the mean", "ahead by", "on each"]
    print(f"| {' | '.join(heads)} |\n| ---: | ---: | ---: | ---: | --- | ---: | ---: |")
    for tier in tiers:
        print(f"| {' | '.join(line(tier, [model[tier] for model in models], args.method))} |")


if __name__ == "__main__":
    main()
