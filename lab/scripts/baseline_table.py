r"""Compare the lab's model with guessing: every task with the photo, without it, and with one answer to all questions.

Reads two runs of ``torino eval --methods none``, one on the tasks of ``make_tasks.py`` and one on those of
``make_tasks.py --blank``, and writes a result file. A task counts as learned if the interval of the difference between
the two scores, bootstrapped over images, is above zero, and the score is above that of one answer to all questions.

Examples
--------
::

    python lab/scripts/baseline_table.py runs/lab runs/blank --data build/lab/tasks -o research/results/lab-tasks.json
    python lab/scripts/baseline_table.py runs/signs runs/signs-blank --data build/lab/tasks \
        --keep research/results/lab-tasks.json -o research/results/lab-tasks.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torino_lab.catalog import TASKS
from torino_lab.tsv import majority_score

from torino.core.io import write_json
from torino.evaluation.results import open_run

SETTING = "full"
RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path, help="run with the photos")
    add("blank", type=Path, help="run without them")
    add("--data", type=Path, required=True, help="folder with the TSV files of make_tasks.py")
    add("-o", "--output", type=Path, required=True, help="result file")
    add("--keep", type=Path, help="earlier result file, whose tasks are kept if they are not in the runs")
    add("--seed", type=int, default=0, help="of the bootstrap (default: %(default)s)")
    args = parser.parse_args()
    run, blank = open_run(args.run), open_run(args.blank)
    if run.metadata.get("limit") != blank.metadata.get("limit"):
        raise SystemExit("The two runs have another number of questions. Evaluate both with the same --limit.")
    with_photo, without = run.scores(args.data), blank.scores()
    tasks = run.open_tasks(args.data)
    rows: list[dict[str, Any]] = []
    earlier = {} if args.keep is None else json.loads(args.keep.read_text(encoding="utf-8"))
    kept = {row["task"]: row for row in earlier.get("rows", [])}
    for name in TASKS:
        if name not in with_photo or name not in without:
            print(f"{name}: not in both runs, {'kept' if name in kept else 'left out'}", file=sys.stderr)
            rows += [kept[name]] if name in kept else []
            continue
        seen, guessed = with_photo[name][SETTING], without[name][SETTING]
        low, high = difference(seen.by_image(), guessed, seen.images, args.seed)
        constant, answer = majority_score(tasks[name])
        learned = low > 0 and seen.value > constant
        rows.append(
            {
                "task": name,
                "metric": seen.metric,
                "questions": seen.counts["samples"],
                "photo": round(seen.value, 2),
                "no photo": round(guessed.value, 2),
                "difference": [round(low, 2), round(high, 2)],
                "one answer": round(constant, 2),
                "answer": answer,
                "learned": bool(learned),
                "parts": {part: round(value, 2) for part, value in seen.parts.items()},
                "parts without photo": {part: round(value, 2) for part, value in guessed.parts.items()},
            }
        )
        print(
            f"{name}: {seen.value:.1f} with, {guessed.value:.1f} without, {constant:.1f} always {answer!r}", flush=True
        )
    write_json(
        args.output,
        {
            "format": "torino-results/1",
            "name": args.output.stem,
            "title": "The lab's model against guessing, on dev photos",
            "report": None,
            "command": [
                *_list(earlier.get("command")),
                " ".join(["python lab/scripts/baseline_table.py", *sys.argv[1:]]),
            ],
            "seed": args.seed,
            "date": date.today().isoformat(),
            "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
            "notes": ["difference: 95 % bootstrap interval over images of the score with the photo minus without it."],
            "rows": rows,
        },
    )


def _list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def difference(seen: Any, blank: Any, images: tuple[str, ...], seed: int) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the difference of two scores of the same questions, over images."""
    other = blank.stats.merge(images)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(len(seen.units), np.full(len(seen.units), 1 / len(seen.units)), size=RESAMPLES)
    draws = seen.formula(counts @ seen.sums) - other.formula(counts @ other.sums)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
