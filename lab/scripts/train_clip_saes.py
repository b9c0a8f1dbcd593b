r"""Train SAEs on CLIP's features of the lab's training photos: several expansions and token kinds.

Every SAE is a Matryoshka BatchTopK SAE at the feature layer of the lab's model: of all patches, of two random patches
per photo, or of the CLS token. The photos are all training photos, generated images, and crops and flips. All SAEs are
measured on all patches of dev photos. A killed run resumes where it stopped.

Examples
--------
::

    python lab/scripts/train_clip_saes.py --data DATA --work build/train
    python lab/scripts/train_clip_saes.py --data DATA --work build/train --kinds all --expansions 4 16 --steps 3000
    python lab/scripts/train_clip_saes.py --data DATA --work build/train --kinds all --expansions 4 \
        --sources flickr8k-train-0 cocovqa-train
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torino_lab.training.__main__ import GENERATED, LAYER, SIZE, TOWER, TRAIN
from torino_lab.training.features import Features, clip_encoder, fill_all
from torino_lab.training.precision import best_dtype
from torino_lab.training.rows import DESCRIPTIONS, FeatureRows
from torino_lab.training.views import write_views
from torino_lab.weights import clip_folder

from torino.core.io import write_json
from torino.training.config import TrainConfig
from torino.training.sweep import sweep

ENCODER, BLOCK = "openai/clip-vit-base-patch16", 10
VIEWS = "views-train"
SOURCES = [*TRAIN, "imagenet-samples", VIEWS]
HELDOUT = "flickr8k-dev"
PHOTOS = {
    "flickr8k": "Flickr8k",
    "coco": "COCO",
    "daquar": "NYU indoor",
    "scenetext": "ICDAR 2015",
    "imagenet": "ImageNet",
    "generated": "generated images",
    "views": "crops and flips of these",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the parquet files")
    add("--work", type=Path, required=True, help="folder of python -m torino_lab.training")
    add("--cache", type=Path, help="folder of converted weights (default: WORK/weights)")
    add("--kinds", nargs="+", choices=list(DESCRIPTIONS), default=list(DESCRIPTIONS))
    add("--expansions", type=float, nargs="+", default=[4, 16, 64])
    add("--sources", nargs="+", default=SOURCES, help="parquet files, without their ending (default: all)")
    add("--views", type=int, default=6000, help="crops and flips (default: %(default)s)")
    add("--steps", type=int, default=3000, help="of 2,048 rows, on all patches (default: %(default)s)")
    add("--heldout", type=int, default=200, help="dev photos to measure on (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    made = (GENERATED, VIEWS)
    files = {name: (args.work if name in made else args.data) / f"{name}.parquet" for name in (*args.sources, HELDOUT)}
    if VIEWS in files and not files[VIEWS].exists():
        photos = [args.data / f"{name}.parquet" for name in TRAIN if name != GENERATED]
        write_views(photos, files[VIEWS], args.seed, args.views)
    encode = clip_encoder(clip_folder(args.cache or args.work / "weights"), LAYER, SIZE)
    features = {name: Features(args.work / "features", file, (197, 768), TOWER, encode) for name, file in files.items()}
    fill_all([features[name] for name in args.sources], encode, logging.info)
    heldout = features[HELDOUT][list(range(args.heldout))][:, 1:]
    precision = "bfloat16" if best_dtype() == torch.bfloat16 else "float32"
    results: list[dict[str, Any]] = []
    for kind in args.kinds:
        sources = [features[name] for name in args.sources]
        rows = FeatureRows(
            sources, kind, args.seed, {"encoder": ENCODER, "block": BLOCK, "data": describe(args.sources)}
        )
        logging.info("%s: %s rows", DESCRIPTIONS[kind], f"{rows.rows:,}")
        for expansion in args.expansions:
            steps = args.steps if kind == "all" else args.steps // 2
            config = TrainConfig(kind="matryoshka", k=20, steps=steps, batch=2048, seed=args.seed, precision=precision)
            (row,) = sweep(
                rows,
                config,
                [expansion],
                args.work / "saes" / kind,
                heldout=lambda: _photos(heldout),
                heldout_name=f"{HELDOUT}:{args.heldout}",
            )
            results.append({"kind": DESCRIPTIONS[kind], "steps": steps, "rows": rows.rows, **row})
            write_json(args.work / "saes" / "saes.json", {"saes": results, "seed": args.seed})
            logging.info("%s x%g: FVU %.3f, L0 %.1f, groups %s", kind, expansion, row["fvu"], row["l0"], row["groups"])


def describe(sources: list[str]) -> str:
    """Name the photos of some sources for the card of an SAE."""
    return ", ".join(text for start, text in PHOTOS.items() if any(name.startswith(start) for name in sources))


def _photos(values: Tensor) -> Iterator[Tensor]:
    for photo in values:
        yield photo.float()


if __name__ == "__main__":
    main()
