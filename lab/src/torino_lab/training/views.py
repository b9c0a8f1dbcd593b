"""Crops and flips of training photos, as a parquet file, so that an SAE sees more than one view of each photo."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

from PIL import Image

from torino.core.extras import optional_import
from torino.core.io import write_atomic

SMALLEST = 0.25  # share of the photo's area that a crop keeps at least
QUALITY = 92


def write_views(files: Sequence[Path], file: Path, seed: int, count: int) -> None:
    """Write ``count`` random crops, half of them flipped, each of another photo.

    Parameters
    ----------
    files : sequence of Path
        Parquet files with a column ``image``.
    file : Path
    seed, count : int
    """
    with optional_import("Parquet files need", "torino[lab]"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    rng = Random(f"{seed}:views")
    photos = [image for source in files for image in pq.read_table(source, columns=["image"]).column("image")]
    chosen = rng.sample(range(len(photos)), min(count, len(photos)))
    rows: dict[str, list[object]] = {"file": [], "image": []}
    for number in chosen:
        with Image.open(io.BytesIO(photos[number].as_py()), formats=("JPEG", "PNG")) as opened:
            view = crop(opened.convert("RGB"), rng)
        data = io.BytesIO()
        view.save(data, "JPEG", quality=QUALITY)
        rows["file"].append(f"views/{number}.jpg")
        rows["image"].append(data.getvalue())

    def write(target: Path) -> None:
        pq.write_table(pa.table(rows), target)

    write_atomic(file, write)


def crop(photo: Image.Image, rng: Random) -> Image.Image:
    """Return a random part of a photo with at least a quarter of its area, flipped with a chance of one half."""
    share = rng.uniform(SMALLEST, 1.0) ** 0.5
    width, height = max(1, round(photo.width * share)), max(1, round(photo.height * share))
    left, top = rng.randint(0, photo.width - width), rng.randint(0, photo.height - height)
    view = photo.crop((left, top, left + width, top + height))
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else view
