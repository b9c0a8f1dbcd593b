r"""Two reports of the same methods, task by task: what the second changes, the mean over methods and how many gain.

Read from the tables that ``torino report`` wrote, such as one with every method's own numbering of what is left and one
with original positions for all. Methods are told apart by label; those in both count, but for ``--without``. A tier
that stands in a file several times is taken from its first table.

Examples
--------
::

    python research/scripts/by_task.py research/reports/lab-table.md research/reports/beyond-tiers.md --tiers 192 64 --without TORINO-X
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from models_lab import TIER

Tasks = dict[str, float]
"""A method's score by task, the relative one last."""


def read_tasks(file: Path) -> dict[int, dict[str, Tasks]]:
    """Scores by tier, label and task."""
    tiers: dict[int, dict[str, Tasks]] = {}
    here: int | None = None
    heads: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(("**", "#")):
            found = TIER.match(line)
            here = int(found[1]) if found and int(found[1]) not in tiers else None
        if here is None or not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-1] == "Relative":
            heads = cells
        elif re.match(r"[*<u>]*\d+\.\d+%", cells[-1]):
            scores = [float(re.sub(r"\*|</?u>|%| ±.*", "", cell)) for cell in cells[2:]]
            tiers.setdefault(here, {})[cells[0]] = dict(zip(heads[2:], scores, strict=True))
    return tiers


def change(before: dict[str, Tasks], after: dict[str, Tasks], without: list[str]) -> dict[str, tuple[float, int, int]]:
    """By task: the mean change over methods, how many gain, and of how many."""
    both = [label for label in before if label in after and label not in without]
    found: dict[str, tuple[float, int, int]] = {}
    for task in before[both[0]] if both else ():
        moved = [after[label][task] - before[label][task] for label in both]
        found[task] = (sum(moved) / len(moved), sum(one > 0 for one in moved), len(moved))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("before", type=Path)
    add("after", type=Path)
    add("--tiers", nargs="+", type=int, default=[192, 64])
    add("--without", nargs="*", default=[], metavar="LABEL", help="methods that do not count")
    args = parser.parse_args()
    for file in (args.before, args.after):
        if not file.is_file():
            parser.error(f"there is no file {file}")
    before, after = read_tasks(args.before), read_tasks(args.after)
    lacking = [tier for tier in args.tiers if tier not in before or tier not in after]
    if lacking:
        parser.error(f"{lacking[0]} tokens are not in both reports, which have {sorted(before)} and {sorted(after)}")
    moved = {tier: change(before[tier], after[tier], args.without) for tier in args.tiers}
    empty = [tier for tier in args.tiers if not moved[tier]]
    if empty:
        parser.error(f"no method is in both tables of {empty[0]} tokens")
    print(f"|  | {' | '.join(f'{tier} tokens: change | gain' for tier in args.tiers)} |")
    print(f"| --- |{' ---: | ---: |' * len(args.tiers)}")
    for task in moved[args.tiers[0]]:
        cells = [
            f"{mean:+.1f} | {gain} of {of}".replace("-", "−")
            for mean, gain, of in (one[task] for one in moved.values())
        ]
        print(f"| {task} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
