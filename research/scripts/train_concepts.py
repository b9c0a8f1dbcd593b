r"""Train Matryoshka SAEs on the lab's tower for the three token kinds of the paper, measure them, and write the page.

The tower (DINOv2 ViT-S/14, 336 px, 576 tokens of width 384) looks at every photo once; what it says is kept, so that
the three stores, the judging and a second run cost nothing more. Every stage goes on where it was stopped.

Examples
--------
::

    python research/scripts/train_concepts.py --photos 'train-*.parquet' --dev dev.parquet --write research/reports/concepts.md
    python research/scripts/train_concepts.py --photos train-0.parquet --dev dev.parquet --images 60 --heldout 30 --steps 60
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from report import machine, table, write_section  # noqa: E402
from torino_lab.tower import BLOCK, CachedTower  # noqa: E402

from torino.core.io import read_json, write_json  # noqa: E402
from torino.datasets import open_photos  # noqa: E402
from torino.datasets.bundled import example_folder  # noqa: E402
from torino.datasets.images import open_image  # noqa: E402
from torino.interpret.naming import name_concepts, save_names  # noqa: E402
from torino.interpret.photos import PhotoReader  # noqa: E402
from torino.interpret.sheet import draw_concept_sheet, select_concepts  # noqa: E402
from torino.interpret.top_activations import collect_top_activations  # noqa: E402
from torino.sae.model import SAE  # noqa: E402
from torino.training.activations.cache import cache_activations  # noqa: E402
from torino.training.activations.store import Store  # noqa: E402
from torino.training.config import TrainConfig  # noqa: E402
from torino.training.sweep import sweep  # noqa: E402
from torino.viz.draw import save_picture  # noqa: E402

JUDGE = 10  # of its blocks, the one whose CLS token followed captions best
KINDS = {"all": "all patches", "random:2": "2 random patches", "cls": "CLS"}


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def heldout_photos(store: Store) -> Iterator[Tensor]:
    for photo in range(len(store.names)):
        yield store.photo_rows(photo)


def recipe_for(kind: str, args: argparse.Namespace) -> TrainConfig:
    """The same recipe for all; stores of few rows get fewer steps, and still see each row many times."""
    few = kind != "all"
    return TrainConfig(
        kind="matryoshka", k=20, steps=args.steps // 2 if few else args.steps, batch=2048, seed=args.seed
    )


def make(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Cache activations, train and judge; a row for each SAE."""
    tower = CachedTower(args.work / "tokens", args.block)
    judge = CachedTower(args.work / "tokens-judge", JUDGE)
    photos = open_photos(args.photos, limit=args.images)
    dev = open_photos(str(args.dev), limit=args.heldout)
    rows: list[dict[str, Any]] = []

    def progress(what: str) -> Any:
        return lambda done, *_: say(f"\r{what} {done}   ", end="")

    held = cache_activations(tower, dev, args.work / "dev-all", tokens="all", batch=8, progress=progress("held out"))
    for kind, words in KINDS.items():
        store = cache_activations(
            tower,
            photos,
            args.work / f"train-{kind.replace(':', '')}",
            tokens=kind,
            batch=8,
            progress=progress(f"{words}: photo"),
        )
        folder = args.work / "saes" / kind.replace(":", "")
        say(f"\n{words}: {store.rows:,} rows")
        found = sweep(store, recipe_for(kind, args), args.expansions, folder, heldout=lambda: heldout_photos(held))
        for row in found:
            place = folder / f"x{row['expansion']:g}"
            judged = place / "judged.json"
            if not judged.exists():
                sae = SAE.load(place)
                activations = collect_top_activations(
                    sae, PhotoReader(dev, tower, judge), keep=16, output=place, progress=progress("judging photo")
                )
                scores = activations.monosemanticity
                write_json(
                    judged,
                    {
                        "mean": scores.mean,
                        "median": scores.median,
                        "chance": scores.chance,
                        "judged": len(scores.defined),
                        "silent": scores.dead,
                    },
                )
            rows.append(row | {"kind": words, "rows trained": store.rows, "ms": read_json(judged)})
            say(f"\n{words} x{row['expansion']:g}: FVU {row['fvu']:.3f}, L0 {row['l0']:.1f}, groups {row['groups']}")
    return rows


def draw(args: argparse.Namespace) -> None:
    """What the named concepts of the largest SAE on all patches see in photos that may be shown.

    The names come from the captions of the held-out photos; the pictures are the bundled free photos and parts of them.
    """
    place = args.work / "saes" / "all" / f"x{args.expansions[-1]:g}"
    dev = open_photos(str(args.dev), limit=args.heldout)
    tower = CachedTower(args.work / "tokens", args.block)
    judged = PhotoReader(dev, tower, CachedTower(args.work / "tokens-judge", JUDGE))
    sae = SAE.load(place)
    activations = collect_top_activations(sae, judged, keep=16, output=place)
    names = name_concepts(activations, judged.get_texts())
    save_names(place, names, activations)
    say(f"{len(names):,} of {sae.latents:,} concepts have names")
    reader = PhotoReader(open_photos(free_photos(args.work / "free")), tower)
    free = collect_top_activations(sae, reader, keep=6)
    shown = [
        concept
        for concept in select_concepts(free, names)
        if concept.name and 3 <= int(free.active_photos[concept.latent]) <= 14
    ]
    title = f"Concepts of a Matryoshka SAE with {sae.latents:,} latents, named from captions of other photos"
    save_picture(draw_concept_sheet(free, shown[:12], reader.get_picture, photos=6, title=title), args.sheet)


def free_photos(folder: Path) -> Path:
    """The bundled photos, and five parts of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((example_folder() / "photos").glob("*.jpg")):
        photo = open_image(file)
        width, height = photo.size
        cut = min(width, height) * 6 // 10
        corners = [(0, 0), (width - cut, 0), (0, height - cut), (width - cut, height - cut)]
        corners.append(((width - cut) // 2, (height - cut) // 2))
        photo.save(folder / f"{file.stem}.png")
        for number, (left, top) in enumerate(corners):
            photo.crop((left, top, left + cut, top + cut)).save(folder / f"{file.stem}-{number}.png")
    return folder


def section(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    heads = ["trained on", "ε", "latents", "rows", "FVU", "L0", "dead", "busiest", "MS", "above chance", "judged"]
    heads += ["(1,1)", "(2,2)", "(3,3)"]
    lines = [
        [
            row["kind"],
            f"{row['expansion']:g}",
            f"{row['latents']:,}",
            f"{row['rows trained']:,}",
            f"{row['fvu']:.3f}",
            f"{row['l0']:.1f}",
            f"{row['dead']:.1%}",
            f"{row['top_frequency']:.0%}",
            f"{row['ms']['mean']:.3f}",
            f"{(row['ms']['mean'] - row['ms']['chance']) / (1 - row['ms']['chance']):.1%}",
            f"{row['ms']['judged']:,}",
            *[f"{count:.0f}" for count in row["groups"].values()],
        ]
        for row in rows
    ]
    chance = rows[0]["ms"]["chance"]
    told = (
        f"{args.images:,} photos to train on, {args.heldout} others to measure on (all their patches, whatever an SAE "
        f"was trained on); k = 20, {args.steps:,} steps of 2,048 rows for all patches and half as many for the others, "
        f"seed {args.seed}, block {args.block}. FVU: share of the variance of held-out patches left "
        "unexplained. L0: active latents a patch. Dead: silent on all held-out photos. Busiest: share of patches that "
        f"fire the most frequent latent. MS: mean monosemanticity, judged by the CLS token of the "
        f"tower after block {JUDGE}, {chance:.3f} by chance, over the latents judged. Last columns: mean "
        "groups out of 576 at (k, δ)."
    )
    return f"{table(heads, lines)}\n\n{told}\n\n{machine()}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--photos", required=True, help="photos to train on: a parquet file or a quoted pattern of several")
    add("--dev", type=Path, required=True, metavar="PARQUET", help="photos to measure on")
    add("--images", type=int, default=1500, help="how many of --photos (default: %(default)s)")
    add("--heldout", type=int, default=200, help="how many of --dev (default: %(default)s)")
    add("--steps", type=int, default=2000, help="training steps on all patches (default: %(default)s)")
    add("--expansions", type=float, nargs="+", default=[4, 16], help="(default: %(default)s)")
    add("--block", type=int, default=BLOCK, help="tap, zero-based (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    add("--work", type=Path, default=ROOT / "build/concepts", help="folder for stores and SAEs")
    add("--sheet", type=Path, help="picture of the strongest named concepts")
    add("--write", type=Path, help="page whose section 'concepts' is rewritten")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = section(make(args), args)
    print(text)
    if args.sheet:
        draw(args)
    if args.write:
        write_section(args.write, "concepts", text)


if __name__ == "__main__":
    main()
