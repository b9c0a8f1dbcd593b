"""Draw the training curves of the lab's model from its log.

Dev photos: each question with its own photo, with another photo, and with none. A model that reads the photo is better
with its own.

Examples
--------
::

    python lab/scripts/draw_training.py -o docs/images/lab-training.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
PANELS = (
    ("caption", "nats", "captions: nats per token"),
    ("open", "exact", "open questions: exact answers"),
    ("yesno", "exact", "yes/no questions: exact answers"),
    ("presence", "exact", "is it in the photo? exact answers"),
    ("number", "exact", "how many? exact answers"),
    ("text", "nats", "scene text: nats per token"),
)
LINES = {"own": ("#1f77b4", "own photo"), "other": ("#d62728", "another photo"), "none": ("#7f7f7f", "no photo")}
PHOTOS_PER_STEP = 16


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the measurements on dev photos during the second stage, in order."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    by_step = {row["step"]: row for row in rows if row.get("watch") == "tune"}  # a resumed run measures a step again
    return [by_step[step] for step in sorted(by_step)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=ROOT / "research" / "results" / "lab-training.jsonl")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    rows = read_log(args.log)
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.2), layout="constrained")
    for axis, (kind, measure, title) in zip(axes.flat, PANELS, strict=True):
        for name, (color, label) in LINES.items():
            points = [(row["step"] * PHOTOS_PER_STEP / 1000, row[measure][kind][name]) for row in rows]
            axis.plot(*zip(*points, strict=True), color=color, label=label, marker="o", markersize=3)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        if measure == "exact":
            axis.set_ylim(0, 1)
    for axis in axes[1]:
        axis.set_xlabel("thousand photos seen")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
