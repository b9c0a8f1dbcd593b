"""What the lab's model gets right by looking: its scores beside those without the picture, and of one answer for all.

Each benchmark is asked three times with all tokens: about its own pictures, about a grey one, and about the picture of
another question. The fourth column is the score of the one answer that pays best, without a model; then comes the share
of questions answered rightly about their own pictures. A task that the model has not learned measures nothing, and has
no place in a table. It counts as *learned* where looking adds at least five points to the share of right answers: the
lower end of the 95 % interval of the difference between its own picture and another's (pictures drawn anew), and the
difference to the one answer that is most often right. The last column tells; it is to be read before any method is
scored.

Examples
--------
::

    python lab/scripts/make_lab_benchmarks.py --photos dev.parquet
    python research/scripts/blind_lab.py --data build/lab/benchmarks
    python research/scripts/blind_lab.py --data build/lab/benchmarks --run build/lab/run --shard 1/2  # 2/2, then without it
    python research/scripts/blind_lab.py --model labs/third --work build/lab3/blind --no-grey
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torino_lab.catalog import BENCHMARKS

from torino.core.io import write_atomic, write_json
from torino.evaluation.results import open_run
from torino.evaluation.runner import RunPlan, evaluate
from torino.evaluation.samples import MAX_REFERENCE
from torino.evaluation.tasks import Task, open_task
from torino.version import __version__
from torino.vlm.session import load_vlm

ROOT = Path(__file__).resolve().parents[2]
LEARNED, DRAWS = 5.0, 10_000
GREY = (124, 116, 104)  # the mean colour of the tower's training pictures
csv.field_size_limit(1 << 30)


def rewrite(source: Path, target: Path, swap: Callable[[list[str]], list[str]]) -> None:
    """Copy a TSV with other pictures; rows that share a picture go on sharing one."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    held = [row for row in rows if len(row["image"]) > MAX_REFERENCE]
    for row, picture in zip(held, swap([row["image"] for row in held]), strict=True):
        row["image"] = picture
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter="\t", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(target, lambda path: path.write_text(text.getvalue(), encoding="utf-8") and None)


def grey(pictures: list[str]) -> list[str]:
    """One grey picture for all, of sizes that differ by a pixel, so that each stays one of its own."""
    found: list[str] = []
    for number in range(len(pictures)):
        file = io.BytesIO()
        Image.new("RGB", (336, 336 + number), GREY).save(file, "PNG")
        found.append(base64.b64encode(file.getvalue()).decode())
    return found


def moved(pictures: list[str]) -> list[str]:
    """Each question gets a picture from half the file away."""
    turn = len(pictures) // 2
    return pictures[turn:] + pictures[:turn]


def guesses(task: Task) -> list[str]:
    """Answers that may be given to all questions: the right ones, the most frequent first, and yes, no and letters.

    Of a key of words, as MM-Vet's are, the first way to say each.
    """
    said = Counter(answer for sample in task for answer in {*sample.answers})
    words = [" ".join(part.split("<OR>")[0] for part in text.split("<AND>")) for text, _ in said.most_common()]
    return list(dict.fromkeys([*words, "yes", "no", *"ABCD"]))


def always(task: Task, text: str) -> list[dict[str, str]]:
    """One answer to all questions."""
    return [{"index": sample.index, "prediction": text} for sample in task]


def best_guess(task: Task) -> float:
    """The score of the one answer that pays best, always given."""
    return max(task.score(always(task, text)).value for text in guesses(task))


def rights(task: Task, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """How right each answer is, in per cent: F1 of yes is high where all is yes, and the mean of these is not."""
    return {index: 100 * value for index, value in task.score(list(rows)).per_sample.items()}


def mean(values: Mapping[str, float]) -> float:
    """Of all questions."""
    return sum(values.values()) / len(values) if values else float("nan")


def most_right(task: Task) -> float:
    """The largest share of questions that one answer for all has right."""
    return max(mean(rights(task, always(task, text))) for text in guesses(task))


def gained(task: Task, own: Mapping[str, float], other: Mapping[str, float]) -> tuple[float, float]:
    """The 95 % interval of what its own picture adds to the share of right answers, pictures drawn anew."""
    where = {sample.index: sample.image.key for sample in task}
    pictures = {key: number for number, key in enumerate(dict.fromkeys(where.values()))}
    apart, count = np.zeros(len(pictures)), np.zeros(len(pictures))
    for index in own.keys() & other.keys():
        apart[pictures[where[index]]] += own[index] - other[index]
        count[pictures[where[index]]] += 1
    drawn = np.random.default_rng(0).integers(0, len(pictures), (DRAWS, len(pictures)))
    low, high = np.quantile(apart[drawn].sum(1) / np.maximum(count[drawn].sum(1), 1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, default=ROOT / "build/lab/benchmarks", help="folder of the benchmarks")
    add("--model", default="lab", help="as torino eval takes it (default: %(default)s)")
    add("--work", type=Path, default=ROOT / "build/lab/blind", help="folder for the altered files and the runs")
    add("--limit", type=int, help="questions of each task")
    add("--run", type=Path, help="run of torino eval over the same files, whose answers with all tokens are taken")
    add("--shard", default="1/1", help="i/n: do the i-th of n parts of the work; then once more without it")
    add("--threads", type=int, default=2, help="CPU cores (default: %(default)s)")
    add("--no-grey", action="store_true", help="without the grey picture, which no verdict rests on: a third less work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    known = None if args.run is None else open_run(args.run)
    names = [name for name in BENCHMARKS if (args.data / f"{name}.tsv").is_file()]
    names = names if known is None else [name for name in names if name in known.tasks]
    part, parts = (int(one) for one in args.shard.split("/"))
    swaps = {"another's": moved} if args.no_grey else {"grey": grey, "another's": moved}
    folders = {"its picture": args.data, **{how: args.work / swap.__name__ for how, swap in swaps.items()}}
    for how, swap in swaps.items():
        folders[how].mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (folders[how] / f"{name}.tsv").is_file():
                rewrite(args.data / f"{name}.tsv", folders[how] / f"{name}.tsv", swap)
    vlm = load_vlm(args.model)
    scores: dict[str, dict[str, float]] = {name: {} for name in names}
    share: dict[tuple[str, str], dict[str, float]] = {}
    tasks: list[Task] = []
    for how, folder in folders.items():
        tasks = [open_task(name, folder) for name in names]
        tasks = tasks if args.limit is None else [task.take(args.limit, seed=0) for task in tasks]
        run = known
        if how != "its picture" or known is None:
            run = evaluate(
                args.work / f"run-{'own' if how == 'its picture' else folder.name}",
                vlm=vlm,
                tasks=tasks,
                plan=RunPlan([], dynamic=(), fixed=()),
                saes={},
                limit=args.limit,
                shard=(part - 1, parts),
                max_new_tokens=dict.fromkeys(names, 24),
                progress=lambda _, n, of, how=how: print(f"\r{how}: {n}/{of} ", end="", file=sys.stderr, flush=True),
            )
            print(file=sys.stderr)
        assert run is not None
        for task in tasks:
            given = {sample.index for sample in task}
            rows = [row for row in run.rows(task.name, "full") if row["index"] in given]
            scores[task.name][how] = task.score(rows).value
            share[task.name, how] = rights(task, rows)
    if parts > 1:
        return
    told: dict[str, Any] = {}
    order = [*folders, "one answer"]
    heads = [*order, "its picture, right", "another's, right", "one answer, right", "looking adds", "learned"]
    print(f"| task | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}")
    for task in tasks:
        name, own, other = task.name, share[task.name, "its picture"], share[task.name, "another's"]
        scores[name]["one answer"], guess = best_guess(task), most_right(task)
        low, high = gained(task, own, other)
        learned = low >= LEARNED and mean(own) - guess >= LEARNED
        cells = [f"{scores[name][how]:.1f}" for how in order] + [f"{x:.1f}" for x in (mean(own), mean(other), guess)]
        print(f"| {name} | {' | '.join(cells)} | [{low:.1f}, {high:.1f}] | {'yes' if learned else '**no**'} |")
        told[name] = scores[name] | {
            "right": {how: mean(share[name, how]) for how in folders} | {"one answer": guess},
            "looking adds": [low, high],
            "learned": learned,
        }
    versions = {"torino": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    date = datetime.now(UTC).date().isoformat()
    versions = {"python": platform.python_version(), **versions}
    write_json(args.work / "blind.json", {"scores": told, "versions": versions, "date": date})


if __name__ == "__main__":
    main()
