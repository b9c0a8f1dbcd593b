"""Write the lab's nine small benchmarks as TSV files, from photos that the lab's model was not trained on.

Examples
--------
::

    python lab/scripts/make_lab_benchmarks.py --photos dev.parquet --trained train-0.parquet train-1.parquet train-2.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from torino_lab.benchmarks import BENCHMARKS, SEED, BenchmarkBuilder
from torino_lab.corpus import check_disjoint, read_photos
from torino_lab.tables import blind_accuracy, fingerprint, write_tsv

from torino.core.io import write_json

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--photos", nargs="+", type=Path, required=True, metavar="PARQUET", help="photos with captions, not trained on")
    add(
        "--trained",
        nargs="*",
        type=Path,
        default=[],
        metavar="PARQUET",
        help="training photos, which must be different",
    )
    add("--output", type=Path, default=ROOT / "build/lab/benchmarks", help="folder to write to")
    add("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), help="by default all nine")
    add("--scale", type=float, default=1.0, help="number of questions, relative to the default")
    add("--seed", type=int, default=SEED, help="(default: %(default)s)")
    args = parser.parse_args()
    photos = read_photos(args.photos)
    check_disjoint(read_photos(args.trained), photos)
    builder = BenchmarkBuilder(photos, seed=args.seed, scale=args.scale)
    args.output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {}
    for name in args.only:
        items = builder.make(name)
        write_tsv(args.output / f"{name}.tsv", items)
        guessed = blind_accuracy(items)
        summary[name] = {
            "kind": BENCHMARKS[name].kind,
            "questions": len(items),
            "pictures": len({id(item.image) for item in items}),
            "categories": dict(Counter(item.category for item in items)),
            "blind": {how: round(value, 1) for how, value in guessed.items()},
            "fingerprint": fingerprint(items),
        }
        print(
            f"{name}: {len(items)} questions, blind {guessed['constant']:.1f} % by one answer, "
            f"{guessed['by category']:.1f} % by one a category, {fingerprint(items)}",
            file=sys.stderr,
            flush=True,
        )
    write_json(args.output / "benchmarks.json", summary)


if __name__ == "__main__":
    main()
