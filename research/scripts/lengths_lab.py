"""How many tokens dynamic TORINO leaves of one photo, of collages of two to nine, and of a few shapes on plain ground.

Examples
--------
::

    python research/scripts/lengths_lab.py --photos dev.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image
from torino_lab.collages import make_grid_image
from torino_lab.corpus import read_photos
from torino_lab.pictures import shape_scene
from torino_lab.shipped import lab_sae
from torino_lab.tower import lab_tower

from torino import make
from torino.core.concepts import CachedEncoder
from torino.datasets.images import open_image

GRIDS = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3))
PAIRS = (3, 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, help="photos that nothing was trained on")
    parser.add_argument("--each", type=int, default=40, help="pictures of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    photos = [data for _, data, _ in read_photos([args.photos])]
    sae = lab_sae()
    tower = lab_tower(sae.card.block if sae.card.block is not None else 7)
    encoder = CachedEncoder(sae)
    reducers = [make(f"torino-p(k={k}, delta={k})", sae=encoder) for k in PAIRS]
    rng = Random(args.seed)

    def collage(grid: tuple[int, int]) -> Image.Image:
        some = rng.sample(photos, grid[0] * grid[1])
        opened = [open_image(one) for one in some]
        return make_grid_image(opened, *grid, rng)

    kinds: dict[str, Callable[[], Image.Image]] = {"shapes on plain ground": lambda: shape_scene(rng)[0]}
    for grid in GRIDS:
        count = grid[0] * grid[1]
        kinds["1 photo" if count == 1 else f"{count} photos"] = lambda grid=grid: collage(grid)
    print("| | " + " | ".join(f"({k}, {k})" for k in PAIRS) + " |")
    print("| --- |" + " ---: |" * len(PAIRS))
    for kind, draw in kinds.items():
        lengths: list[list[int]] = []
        for number in range(args.each):
            tokens = tower.encode([draw()])
            lengths.append([len(reducer.plan_batch(tokens)[0].anchor) for reducer in reducers])
            print(f"\r{kind} {number + 1}/{args.each} ", end="", file=sys.stderr, flush=True)
        values = np.array(lengths)
        cells = [
            f"{mean:.0f} ({low:.0f}–{high:.0f})"
            for mean, low, high in zip(values.mean(0), *np.quantile(values, (0.1, 0.9), axis=0), strict=True)
        ]
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
