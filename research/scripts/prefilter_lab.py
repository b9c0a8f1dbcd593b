"""See that the int8 prefilter changes no token of the lab's evaluation: every picture, every setting, on and off.

Examples
--------
::

    python lab/scripts/make_lab_benchmarks.py --photos dev.parquet
    python research/scripts/prefilter_lab.py --data build/lab/benchmarks
"""

from __future__ import annotations

import argparse
import base64
import copy
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torino_lab.shipped import lab_sae
from torino_lab.tower import lab_tower

from torino import SAE, make
from torino.core.concepts import CachedEncoder
from torino.datasets.images import open_image
from torino.evaluation.samples import MAX_REFERENCE

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = (192, 128, 64)
# by rising k, so that every k is searched for itself and not cut from a longer answer that is remembered
SPECS = [
    *(f"torino-{form}(k=1, delta=1)" for form in "pm"),
    *(f"torino-{form}(k=2, delta=2)" for form in "pm"),
    *(f"torino-{form}(k=2, delta=2, budget={budget})" for form in "pm" for budget in BUDGETS),
    *(f"torino-{form}(k=3, delta=3)" for form in "pm"),
    *(f"torino-x(budget={budget})" for budget in BUDGETS),
]
LIKE = ("sources", "weights", "offsets", "anchor", "concept", "assigned", "score")
csv.field_size_limit(1 << 30)


def pictures(folder: Path) -> Iterator[bytes]:
    """All pictures of the benchmarks, each once."""
    seen: set[str] = set()
    for file in sorted(folder.glob("*.tsv")):
        with file.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows, delimiter="\t"):
                if len(row["image"]) > MAX_REFERENCE and row["image"] not in seen:
                    seen.add(row["image"])
                    yield base64.b64decode(row["image"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "build/lab/benchmarks", help="folder of the TSVs")
    parser.add_argument("--sae", type=Path, help="(default: the one that ships)")
    parser.add_argument("--limit", type=int, help="pictures to look at, of all")
    args = parser.parse_args()
    sae = lab_sae() if args.sae is None else SAE.load(args.sae)
    tower = lab_tower(sae.card.block if sae.card.block is not None else 7)
    plain, fast = copy.deepcopy(sae), copy.deepcopy(sae)
    plain.prefilter, fast.prefilter = "off", "int8"
    encoders = CachedEncoder(plain), CachedEncoder(fast)
    reducers = [[make(spec, sae=encoder) for encoder in encoders] for spec in SPECS]
    count = different = 0
    for data in pictures(args.data):
        if args.limit is not None and count == args.limit:
            break
        tokens = tower.encode([open_image(data)])
        for both in reducers:
            one, other = (reducer.plan_batch(tokens)[0] for reducer in both)
            different += not all(torch.equal(getattr(one, name), getattr(other, name)) for name in LIKE)
        count += 1
        print(f"\r{count} pictures, {different} plans differ ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{count} pictures × {len(reducers)} settings, tokens with the prefilter on and off: {different} differ")
    if different or not count:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
