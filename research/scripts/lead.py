"""How far one method leads in every tier of a run: itself, the best of the others, and the paired difference.

The report must have been made with that method in the middle: ``torino report RUN --by image --versus torino-x``; the
row that it compares all others with is the method's. "Best other" is picked by the same scores, in its favour.
"Clear over" counts those that it is significantly ahead of, each by its own interval. The method with
hyperparameters that were written out (``torino-x(budget=64, locality=None)``) is not another, and has no line; with a
length of its own where the row has a budget, it is.

    python research/scripts/lead.py build/lab/run                        # Markdown
    python research/scripts/lead.py build/lab/run build/lab2/run --method torino-x
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

OWN = ("torino-p", "torino-m")


def name_of(row: dict[str, Any]) -> str:
    """A row's label; TORINO without a budget is called dynamic."""
    return f"dynamic {row['label']}" if row["dynamic"] else row["label"]


def lead(tier: dict[str, Any], method: str) -> list[str]:
    """One line of the table."""
    # the one that the report compares all others with
    mine = next(row for row in tier["rows"] if row["method"] == method and row.get("versus") is None)
    others = [row for row in tier["rows"] if row is not mine and not row["label"].lower().startswith(f"{method}(")]
    others.sort(key=lambda row: -row["relative"]["value"])
    best, versus = others[0], others[0]["versus"]
    low, high, p = -versus["high"], -versus["low"], versus["p"]
    bold = "**" if low > 0 or high < 0 else ""
    difference = f"{bold}{-versus['value']:+.1f} [{low:.1f}, {high:.1f}]{bold}".replace("-", "−")
    place = 1 + sum(row["relative"]["value"] > mine["relative"]["value"] for row in others)
    fixed = [row for name in OWN for row in others if row["method"] == name and not row["dynamic"]]
    second = f"{name_of(others[1])} {others[1]['relative']['value']:.1f}" if len(others) > 1 else ""
    return [
        str(tier["tokens"]),
        f"{mine['relative']['value']:.1f}",
        str(place),
        f"{name_of(best)} {best['relative']['value']:.1f}",
        difference,
        "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}",
        f"{sum(row['versus']['high'] < 0 for row in others)} of {len(others)}",
        second,
        ", ".join(f"{row['relative']['value']:.1f}" for row in fixed),
    ]


def table(run: Path, method: str) -> str:
    """The leads in all tiers of a run, most tokens first."""
    path = run / "scores.json"
    if not path.exists():
        raise SystemExit(f"There is no {path}. Make it with: torino report {run} --by image --versus {method}")
    scores = json.loads(path.read_text())
    if scores["versus"] != method:
        raise SystemExit(
            f"{path} compares all with {scores['versus']}. Make it anew with: "
            f"torino report {run} --by image --versus {method}"
        )
    headings = [
        "tokens",
        f"`{method}`",
        "place",
        "best other",
        "difference",
        "p",
        "clear over",
        "next",
        "`torino-p`, `torino-m`",
    ]
    lines = [headings, ["---:", "---:", "---:", "---", "---:", "---:", "---:", "---", "---:"]]
    there = [tier for tier in scores["tiers"] if any(row["method"] == method for row in tier["rows"])]
    lines += [lead(tier, method) for tier in sorted(there, key=lambda tier: -tier["tokens"])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--method", default="torino-x")
    given = parser.parse_args()
    for run in given.runs:
        print(f"{run}\n\n{table(run, given.method)}\n")


if __name__ == "__main__":
    main()
