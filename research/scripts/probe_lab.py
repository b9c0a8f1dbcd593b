"""Which block of the lab's tower carries what: linear probes on photos with a small shape and a sign drawn on them.

For each hidden state a ridge classifier reads, from the patches under the shape, its colour and its form; from those
under the sign, in four columns, which word it is; from the mean of all patches, which things the captions speak of. The
first two thirds of the photos are learned from, the rest is tested on. The lab taps the state where all are told well.

Examples
--------
::

    python research/scripts/probe_lab.py --photos train-0.parquet --limit 300
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torino_lab.collages import scale_and_crop
from torino_lab.corpus import read_photos
from torino_lab.facts import read_facts
from torino_lab.pictures import RGB, SIDE
from torino_lab.tower import MEAN, STD, lab_tower

from torino.core.io import write_json
from torino.datasets.images import open_image

ROOT = Path(__file__).resolve().parents[2]
PATCH, GRID = 14, 24
COLOURS = {name: RGB[name] for name in ("red", "green", "blue", "yellow", "white", "black")}
SHAPES = ("circle", "square", "triangle")
WORDS = ("STOP", "EXIT", "CAFE", "TAXI", "BANK", "PARK", "HOTEL", "OPEN")
THINGS = 10  # the most common of the captions
Box = tuple[float, float, float, float]


def draw(image: Image.Image, rng: Random) -> tuple[tuple[str, str, str], Box, Box]:
    """Draw a shape in the upper half and a sign in the lower; what they are, and where."""
    pen = ImageDraw.Draw(image)
    colour, shape, word = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(WORDS)
    size = rng.randrange(32, 56)
    x, y = rng.randrange(10, 326 - size), rng.randrange(10, 170 - size)
    if shape == "circle":
        pen.ellipse([x, y, x + size, y + size], fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle([x, y, x + size, y + size], fill=COLOURS[colour])
    else:
        pen.polygon([(x + size / 2, y), (x, y + size), (x + size, y + size)], fill=COLOURS[colour])
    font = ImageFont.load_default(size=44)
    at = (rng.randrange(18, 158), rng.randrange(198, 278))
    left, top, right, bottom = pen.textbbox(at, word, font=font)
    sign = (left - 8.0, top - 8.0, right + 8.0, bottom + 8.0)
    pen.rectangle(sign, fill=(255, 255, 255))
    pen.text(at, word, font=font, fill=(0, 0, 0))
    return (colour, shape, word), (x, y, x + size, y + size), sign


def under(state: Tensor, box: Box, columns: int = 1) -> Tensor:
    """Mean of the patches under a box, in equal columns one after the other."""
    grid = state.float().reshape(GRID, GRID, -1)
    left, top, right, bottom = (min(max(value, 0), SIDE - 1) for value in box)
    rows = slice(int(top) // PATCH, int(bottom) // PATCH + 1)
    edges = np.linspace(left, right, columns + 1)
    parts = [grid[rows, int(a) // PATCH : int(b) // PATCH + 1].mean((0, 1)) for a, b in itertools.pairwise(edges)]
    return torch.cat(parts)


def probe(x: Tensor, labels: Sequence[str]) -> float:
    """Share of the last third that a ridge classifier learned on the rest tells right."""
    names = sorted(set(labels))
    y = torch.tensor([names.index(label) for label in labels])
    cut = len(x) * 2 // 3
    x = (x - x[:cut].mean(0)) / (x[:cut].std(0) + 1e-6)
    target = torch.nn.functional.one_hot(y, len(names)).float() - 1 / len(names)
    gram = x[:cut] @ x[:cut].T
    weights = torch.linalg.solve(gram + 0.1 * float(gram.diagonal().mean()) * torch.eye(cut), target[:cut])
    said = (x[cut:] @ x[:cut].T @ weights).argmax(1)
    return float((said == y[cut:]).float().mean())


def balanced(x: Tensor, there: Sequence[bool]) -> float:
    """As :func:`probe` for yes and no, the mean of the shares of both that are told right."""
    y = torch.tensor(there)
    cut = len(x) * 2 // 3
    x = (x - x[:cut].mean(0)) / (x[:cut].std(0) + 1e-6)
    target = torch.where(y, 1 / y[:cut].float().mean().clamp(min=0.01), -1 / (~y[:cut]).float().mean().clamp(min=0.01))
    gram = x[:cut] @ x[:cut].T
    weights = torch.linalg.solve(gram + 0.3 * float(gram.diagonal().mean()) * torch.eye(cut), target[:cut])
    said = x[cut:] @ x[:cut].T @ weights > 0
    right = said == y[cut:]
    return float((right[y[cut:]].float().mean() + right[~y[cut:]].float().mean()) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--photos", required=True, help="photos with captions: a parquet file or a quoted pattern of several")
    add("--limit", type=int, default=300, help="photos (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2, help="CPU cores (default: %(default)s)")
    add("--output", type=Path, default=ROOT / "build/lab/probe.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = Random(args.seed)
    photos = read_photos([args.photos])[: args.limit]
    model = lab_tower().model
    mean, deviation = (torch.tensor(one).view(3, 1, 1) for one in (MEAN, STD))
    told: list[tuple[str, str, str]] = []
    pooled: dict[int, dict[str, list[Tensor]]] = {}
    for number, (_, data, _) in enumerate(photos, 1):
        image = scale_and_crop(open_image(data), (SIDE, SIDE))
        what, shape, sign = draw(image, rng)
        told.append(what)
        pixels = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / deviation
        with torch.no_grad():
            states = model(pixels[None], output_hidden_states=True).hidden_states
        for layer in range(4, len(states)):
            state = states[layer][0, 1:]
            kept = pooled.setdefault(layer, {"shape": [], "sign": [], "all": []})
            kept["shape"].append(under(state, shape))
            kept["sign"].append(under(state, sign, 4))
            kept["all"].append(state.mean(0))
        print(f"\r{number}/{len(photos)} photos ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    facts = [read_facts(captions) for _, _, captions in photos]
    often: dict[str, int] = {}
    for one in facts:
        for name in one.things:
            often[name] = often.get(name, 0) + 1
    things = sorted((name for name in often if often[name] <= 0.6 * len(facts)), key=lambda name: -often[name])[:THINGS]
    rows: list[dict[str, float]] = []
    for layer, kept in pooled.items():
        x = {name: torch.stack(values) for name, values in kept.items()}
        rows.append(
            {
                "hidden state": layer,
                "colour": probe(x["shape"], [one[0] for one in told]),
                "shape": probe(x["shape"], [one[1] for one in told]),
                "word": probe(x["sign"], [one[2] for one in told]),
                "things": float(
                    np.mean([balanced(x["all"], [name in one.things for one in facts]) for name in things])
                ),
            }
        )
    print("| hidden state | colour | shape | word | things |\n| ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        cells = " | ".join(f"{row[name]:.2f}" for name in ("colour", "shape", "word", "things"))
        print(f"| {row['hidden state']:.0f} | {cells} |")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    facts_ = {"seed": args.seed, "photos": len(photos), "things": things, "date": datetime.now(UTC).date().isoformat()}
    write_json(args.output, {"rows": rows, "versions": versions, **facts_})


if __name__ == "__main__":
    main()
