"""Draw research/images/lab-curves.png: how the lab's model learned, loss and the share of dev questions it answers.

python research/scripts/draw_lab.py --work build/lab
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torino.evaluation.reporting.figures.style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PAGE_WIDTH,
    RED,
    figure_style,
    new_figure,
    save_figure,
)

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "is it there?": ["presence", "action", "cell-presence"],
    "which, where, who?": ["cell", "which-cell", "kind", "who", "scene", "doing", "cell-scene"],
    "drawn: shapes, bars": ["relation", "shape", "shape-colour", "shape-count", "shape-presence", "bar", "bar-order"],
    "signs to read": ["text", "text-presence", "sign-kind", "sign-colour", "sign-place"],
    "multiple choice": ["choice", "choice-zh", "choice-hint"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build/lab", help="folder of lab/scripts/train_lab.py")
    parser.add_argument("--output", type=Path, default=ROOT / "research/images/lab-curves.png")
    args = parser.parse_args()
    log = [json.loads(line) for line in (args.work / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    held = {one["step"]: one["loss"] for one in log}  # steps that were made again after a stop count once
    checks = sorted(
        (json.loads(file.read_text(encoding="utf-8")) for file in args.work.glob("check-*.json")),
        key=lambda one: one["step"],
    )
    with figure_style():
        figure = new_figure(PAGE_WIDTH, 2.5)
        left, right = figure.subplots(1, 2)
        steps = sorted(held)
        left.plot(steps, [held[step] for step in steps], color=BLUE, linewidth=0.9)
        left.set(xlabel="step, 4 pictures each", ylabel="loss a question (nats a token)", ylim=(0, 2))
        for (name, kinds), colour in zip(GROUPS.items(), (BLUE, ORANGE, GREEN, RED, MUTED), strict=True):
            shares = []
            for one in checks:
                there = [one["kinds"][kind] for kind in kinds if kind in one["kinds"]]
                shares.append(100 * sum(k["right"] * k["of"] for k in there) / sum(k["of"] for k in there))
            right.plot([one["step"] for one in checks], shares, marker=".", color=colour, label=name)
        right.set(xlabel="step", ylabel="dev questions right (%)", ylim=(0, 100))
        right.legend(loc="lower right", fontsize=7)
        save_figure(figure, args.output.parent, args.output.stem, ("png",))
    print(f"Drew {args.output.name} of {len(log)} lines and {len(checks)} checks.")


if __name__ == "__main__":
    main()
