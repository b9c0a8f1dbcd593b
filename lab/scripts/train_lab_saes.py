r"""Train SAEs of several expansions and token kinds on the features that ``lab/scripts/train_lab.py`` has cached.

Every SAE is a Matryoshka BatchTopK SAE of the lab's training images (photos, collages, shapes, signs) at the feature
layer: of all patches, of two random patches per image, or of the CLS token. All are evaluated on all patches of images
made from the dev photos. The default SAE gets names from the captions of training photos and is written to the package
in half precision. A killed run resumes where it stopped.

Examples
--------
::

    python lab/scripts/train_lab_saes.py --work build/lab --photos 'train-*.parquet' --dev dev.parquet
    python lab/scripts/train_lab_saes.py ... --kinds all --expansions 4 16 --steps 500
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torino_lab.corpus import Corpus, check_disjoint, read_photos
from torino_lab.tower import BLOCK, CachedTower, lab_tower

from torino.core.io import write_atomic, write_json
from torino.datasets import open_photos
from torino.interpret.naming import name_concepts, save_names
from torino.interpret.photos import PhotoReader
from torino.interpret.top_activations import collect_top_activations
from torino.sae.model import SAE
from torino.training.activations.base import InMemory
from torino.training.config import TrainConfig
from torino.training.sweep import sweep

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"all": "all patches", "random2": "2 random patches a picture", "cls": "CLS"}


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def rows_of(args: argparse.Namespace, kind: str, encoder: str) -> InMemory:
    """Tokens of one kind, in half precision as they were kept."""
    files = sorted((args.work / ("cls" if kind == "cls" else "features")).glob("*.npy"))
    if not files:
        raise SystemExit(f"There are no features in {args.work}. Run lab/scripts/train_lab.py --stages features first.")
    random = np.random.default_rng(args.seed)
    parts: list[Tensor] = []
    count = 0
    for file in files:
        array = np.load(file, mmap_mode="r")
        if kind == "all":
            if count >= args.pictures:
                break
            array = array[: args.pictures - count]
            parts.append(torch.from_numpy(np.array(array)).flatten(0, 1))
        elif kind == "cls":
            parts.append(torch.from_numpy(np.array(array)))
        else:
            places = np.stack([random.choice(array.shape[1], 2, replace=False) for _ in range(len(array))])
            parts.append(
                torch.from_numpy(np.stack([one[at] for one, at in zip(array, places, strict=True)])).flatten(0, 1)
            )
        count += len(array)
    metadata = {
        "encoder": encoder,
        "block": args.block,
        "token_kind": KINDS[kind],
        "data": f"{count:,} training pictures of the torino lab, made of Flickr8k photos",
    }
    return InMemory(torch.cat(parts), seed=args.seed, metadata=metadata)


def held_out(args: argparse.Namespace) -> Path:
    """Patches of pictures made from the dev photos, looked at once."""
    file = args.work / "heldout.npy"
    if not file.exists():
        dev = read_photos([args.dev])
        check_disjoint(read_photos([args.photos]), dev)
        corpus = Corpus(dev, seed=args.seed + 1, length=args.heldout)
        tower = lab_tower(args.block)
        seen: list[np.ndarray] = []
        for number in range(len(corpus)):
            seen.append(tower.encode([corpus[number].image])[0].patches.half().numpy())
            say(f"\rheld out {number + 1}/{len(corpus)} ", end="")
        say("")
        write_atomic(file, lambda target: _save(target, np.stack(seen)))
    return file


def _save(target: Path, array: np.ndarray) -> None:
    with target.open("wb") as file:
        np.save(file, array)


def photos_of(file: Path) -> Iterator[Tensor]:
    for one in np.load(file, mmap_mode="r"):
        yield torch.from_numpy(np.array(one)).float()


def steps_of(args: argparse.Namespace, kind: str, expansion: float) -> int:
    """Few rows are seen often enough with fewer steps; the largest dictionary gets half of them."""
    steps = args.steps if kind == "all" else args.steps // 2
    return steps // 2 if expansion > 16 else steps


def give_names(args: argparse.Namespace, place: Path) -> None:
    """Name the concepts of an SAE by the captions of photos, beside it."""
    sae = SAE.load(place)
    reader = PhotoReader(open_photos(args.photos, limit=args.named_by), CachedTower(args.work / "tokens", args.block))
    activations = collect_top_activations(
        sae, reader, keep=16, progress=lambda done, *_: say(f"\rnaming: photo {done} ", end="")
    )
    names = name_concepts(activations, reader.get_texts())
    save_names(place, names, activations)
    say(f"\n{len(names):,} of {sae.latents:,} concepts have names")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, default=ROOT / "build/lab", help="folder of lab/scripts/train_lab.py")
    add("--photos", required=True, help="training photos with captions, for the names")
    add("--dev", type=Path, required=True, metavar="PARQUET", help="photos to measure on")
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--expansions", type=float, nargs="+", default=[1, 4, 16, 64])
    add("--pictures", type=int, default=4000, help="whose patches are all trained on (default: %(default)s)")
    add("--heldout", type=int, default=200, help="pictures to measure on (default: %(default)s)")
    add("--steps", type=int, default=2000, help="of 2,048 rows, on all patches (default: %(default)s)")
    add("--name", default="all/x16", help="SAE that gets names and goes into the package (default: %(default)s)")
    add(
        "--named-by",
        type=int,
        default=800,
        help="photos whose captions name concepts; 0: no names (default: %(default)s)",
    )
    add("--output", type=Path, default=ROOT / "lab/src/torino_lab/data/lab/sae", help="where the default SAE goes")
    add("--block", type=int, default=BLOCK)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    held = held_out(args)
    encoder = lab_tower(args.block).origin.encoder
    told: list[dict[str, Any]] = []
    for kind in args.kinds:
        rows = rows_of(args, kind, encoder)
        say(f"{KINDS[kind]}: {rows.rows:,} rows")
        for expansion in args.expansions:
            recipe = TrainConfig(
                kind="matryoshka", k=20, steps=steps_of(args, kind, expansion), batch=2048, seed=args.seed
            )
            folder = args.work / "saes" / kind
            (row,) = sweep(rows, recipe, [expansion], folder, heldout=lambda: photos_of(held), heldout_name=str(held))
            told.append({"kind": KINDS[kind], "steps": recipe.steps, "rows": rows.rows, **row})
            write_json(args.work / "saes" / "saes.json", {"saes": told, "seed": args.seed})
            say(f"{KINDS[kind]} x{expansion:g}: FVU {row['fvu']:.3f}, L0 {row['l0']:.1f}, groups {row['groups']}")
    place = args.work / "saes" / args.name
    if place.is_dir():
        if args.named_by:
            give_names(args, place)
        SAE.load(place).save(args.output, dtype=torch.float16)
        say(f"saved to {args.output}")


if __name__ == "__main__":
    main()
