"""Write the lab's benchmarks as TSV files in VLMEvalKit's layout, from photos that the lab's model was not trained on.

Examples
--------
::

    python lab/scripts/make_tasks.py --data DATA
    python lab/scripts/make_tasks.py --data DATA --only Lab-POPE Lab-VQAv2 --output build/lab/tasks
    python lab/scripts/make_tasks.py --data DATA --blank --output build/lab/blank   # the same questions without photos
    python lab/scripts/make_tasks.py --data DATA --half report --photos 120 --output build/lab/report
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

from PIL import Image
from torino_lab.tasks import SEED, TASKS, Half, TaskBuilder
from torino_lab.tsv import fingerprint, write_tsv

from torino.core.io import write_json

ROOT = Path(__file__).resolve().parents[2]
GRAY = Image.new("RGB", (224, 224), (122, 117, 104))  # the mean color that CLIP's processor subtracts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the parquet files of dev photos")
    add("--output", type=Path, default=ROOT / "build/lab/tasks", help="folder to write to")
    add("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="by default all")
    add("--blank", action="store_true", help="replace every image by plain gray: what can be guessed without looking")
    add("--scale", type=float, default=1.0, help="number of generated questions, relative to the default")
    add("--half", choices=get_args(Half), help="photos for choosing settings, or those for reporting (default: all)")
    add("--photos", type=int, help="photos of each real benchmark, drawn at random (default: all)")
    add("--seed", type=int, default=SEED, help="of the generated questions (default: %(default)s)")
    args = parser.parse_args()
    builder = TaskBuilder(args.data, seed=args.seed, scale=args.scale, half=args.half, photos=args.photos)
    args.output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {}
    for name in args.only:
        items = builder.make(name)
        if args.blank:
            items = [replace(item, image=GRAY) for item in items]
        write_tsv(args.output / f"{name}.tsv", items)
        summary[name] = {
            "kind": TASKS[name].kind,
            "questions": len(items),
            "photos": len({id(item.image) for item in items}),
            "categories": dict(Counter(item.category for item in items)),
            "fingerprint": fingerprint(items),
        }
        print(f"{name}: {len(items)} questions, {fingerprint(items)}", file=sys.stderr, flush=True)
    write_json(args.output / "tasks.json", summary)


if __name__ == "__main__":
    main()
