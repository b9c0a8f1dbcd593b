"""What the lab's model gets right by looking: its scores beside those without the picture, and of one answer for all.

Each benchmark is asked three times with all tokens: about its own pictures, about a grey one, and about the picture of
another question. The fourth column is the score of the one answer that pays best, without a model; the last one the
share of questions answered rightly about their own pictures. A task whose first column does not clearly lead measures
nothing, and has no place in a table.

Examples
--------
::

    python scripts/make_lab_benchmarks.py --photos dev.parquet
    python scripts/blind_lab.py --data build/lab/benchmarks
    python scripts/blind_lab.py --data build/lab/benchmarks --run build/lab/run --shard 1/2  # 2/2, then without it
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

import torch
import transformers
from PIL import Image

from torino.ask import open_vlm
from torino.evaluate.benchmarks import LAB_BENCHMARKS
from torino.evaluate.results import open_run
from torino.evaluate.run import Plan, evaluate
from torino.evaluate.samples import REFERENCE
from torino.evaluate.tasks import Task, open_task
from torino.files import write_json, write_whole
from torino.lab.model import lab_folder
from torino.version import __version__

ROOT = Path(__file__).resolve().parents[1]
RIGHT = "its picture, right"
GREY = (124, 116, 104)  # the mean colour of the tower's training pictures
csv.field_size_limit(1 << 30)


def rewrite(source: Path, target: Path, swap: Callable[[list[str]], list[str]]) -> None:
    """Copy a TSV with other pictures; rows that share a picture go on sharing one."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    held = [row for row in rows if len(row["image"]) > REFERENCE]
    for row, picture in zip(held, swap([row["image"] for row in held]), strict=True):
        row["image"] = picture
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter="\t", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(target, lambda path: path.write_text(text.getvalue(), encoding="utf-8") and None)


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


def best_guess(task: Task) -> float:
    """The score of the one answer that pays best, always given."""
    said = Counter(answer for sample in task for answer in {*sample.answers})
    tried = [" ".join(part.split("<OR>")[0] for part in text.split("<AND>")) for text, _ in said.most_common(40)]
    rows = [[{"index": sample.index, "prediction": text} for sample in task] for text in tried]
    return max(task.score(one).value for one in rows)


def right(task: Task, rows: Iterable[Mapping[str, Any]]) -> float:
    """The share of questions answered rightly: F1 of yes is high where all is yes, and this is not."""
    values = list(task.score(list(rows)).per_sample.values())
    return 100 * sum(values) / len(values) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, default=ROOT / "build/lab/benchmarks", help="folder of the benchmarks")
    add("--model", type=Path, help="folder of the model; by default the lab's")
    add("--work", type=Path, default=ROOT / "build/lab/blind", help="folder for the altered files and the runs")
    add("--limit", type=int, help="questions of each task")
    add("--run", type=Path, help="run of torino eval over the same files, whose answers with all tokens are taken")
    add("--shard", default="1/1", help="i/n: do the i-th of n parts of the work; then once more without it")
    add("--threads", type=int, default=2, help="CPU cores (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    known = None if args.run is None else open_run(args.run)
    names = [name for name in LAB_BENCHMARKS if (args.data / f"{name}.tsv").is_file()]
    names = names if known is None else [name for name in names if name in known.tasks]
    part, parts = (int(one) for one in args.shard.split("/"))
    folders = {"its picture": args.data, "grey": args.work / "grey", "another's": args.work / "moved"}
    for folder, swap in ((folders["grey"], grey), (folders["another's"], moved)):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (folder / f"{name}.tsv").is_file():
                rewrite(args.data / f"{name}.tsv", folder / f"{name}.tsv", swap)
    model, processor = open_vlm(args.model or lab_folder())
    scores: dict[str, dict[str, float]] = {name: {} for name in names}
    for how, folder in folders.items():
        tasks = [open_task(name, folder) for name in names]
        tasks = tasks if args.limit is None else [task.take(args.limit, seed=0) for task in tasks]
        if how == "its picture" and known is not None:
            for task in tasks:
                given = {sample.index for sample in task}
                rows = [row for row in known.rows(task.name, "full") if row["index"] in given]
                scores[task.name] = {
                    how: task.score(rows).value,
                    "one answer": best_guess(task),
                    RIGHT: right(task, rows),
                }
            continue
        run = evaluate(
            args.work / f"run-{'own' if how == 'its picture' else folder.name}",
            model=model,
            processor=processor,
            tasks=tasks,
            plan=Plan([], dynamic=(), fixed=()),
            saes={},
            limit=args.limit,
            shard=(part - 1, parts),
            lengths=dict.fromkeys(names, 24),
            progress=lambda _, done, of, how=how: print(f"\r{how}: {done}/{of} ", end="", file=sys.stderr, flush=True),
        )
        print(file=sys.stderr)
        for task in tasks:
            scores[task.name][how] = task.score(run.rows(task.name, "full")).value
            if how == "its picture":
                scores[task.name]["one answer"] = best_guess(task)
                scores[task.name][RIGHT] = right(task, run.rows(task.name, "full"))
    if parts > 1:
        return
    order = [*folders, "one answer", RIGHT]
    print(f"| task | {' | '.join(order)} |\n| --- |{' ---: |' * len(order)}")
    for name in names:
        print(f"| {name} | {' | '.join(f'{scores[name][how]:.1f}' for how in order)} |")
    versions = {"torino": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    date = datetime.now(UTC).date().isoformat()
    told = {"scores": scores, "versions": {"python": platform.python_version(), **versions}, "date": date}
    write_json(args.work / "blind.json", told)


if __name__ == "__main__":
    main()
