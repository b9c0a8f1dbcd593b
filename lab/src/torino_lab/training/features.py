"""Cache of the tower's features: each training image goes through the frozen tower once.

The cache is one float16 array per source, (rows, tokens, width), and one byte per row that says whether the row is
there. A row is marked after its features are on disk, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torino.core.extras import optional_import
from torino.datasets.images import open_image

Encode = Callable[[Sequence[Image.Image]], Tensor]
BATCH = 8
FLUSH = 25  # batches between two writes to disk


class Features:
    """Features of the images of one parquet file.

    Parameters
    ----------
    folder : Path
        Where caches are kept.
    file : Path
        The parquet file, with a column ``image`` of encoded images.
    shape : tuple of int
        Tokens (with CLS) and width of one image.
    tower : str
        Identifies the tower and its layer; a cache made with another one is refused.
    encode : callable, optional
        From images to features. With it, rows that are read before :meth:`fill` reached them are computed then.
    """

    def __init__(
        self, folder: Path, file: Path, shape: tuple[int, int], tower: str, encode: Encode | None = None
    ) -> None:
        with optional_import("Parquet files need", "torino[lab]"):
            import pyarrow.parquet as pq

        self.file, self.encode = file, encode
        self._images: Any = None
        self.rows = pq.read_metadata(file).num_rows
        folder.mkdir(parents=True, exist_ok=True)
        card = {"tower": tower, "shape": [self.rows, *shape], "source": file.name, "bytes": file.stat().st_size}
        path = folder / f"{file.stem}.json"
        if path.exists() and json.loads(path.read_text()) != card:
            raise ValueError(f"{path} describes other features than {card}. Delete the cache or use another folder.")
        path.write_text(json.dumps(card))
        mode = "r+" if (folder / f"{file.stem}.f16").exists() else "w+"
        full = (self.rows, *shape)
        self.values = np.memmap(folder / f"{file.stem}.f16", dtype=np.float16, mode=mode, shape=full)
        mode = "r+" if (folder / f"{file.stem}.done").exists() else "w+"
        self.done = np.memmap(folder / f"{file.stem}.done", dtype=np.uint8, mode=mode, shape=(self.rows,))

    def missing(self) -> list[int]:
        """Rows whose features are not there yet."""
        return np.flatnonzero(self.done == 0).tolist()

    def images(self, rows: Sequence[int]) -> list[Image.Image]:
        """Open the images of some rows."""
        with optional_import("Parquet files need", "torino[lab]"):
            import pyarrow.parquet as pq

        if self._images is None:
            self._images = pq.read_table(self.file, columns=["image"]).column("image")
        return [open_image(self._images[row].as_py()) for row in rows]

    def fill(self, encode: Encode) -> Iterator[int]:
        """Compute what is missing; yields the number of rows that are done."""
        missing = self.missing()
        written: list[int] = []
        for number, start in enumerate(range(0, len(missing), BATCH), 1):
            rows = missing[start : start + BATCH]
            self.values[rows] = encode(self.images(rows)).to(torch.float16).numpy()
            written += rows
            if number % FLUSH == 0 or start + BATCH >= len(missing):
                self.values.flush()
                self.done[written] = 1
                self.done.flush()
                written.clear()
            yield self.rows - len(missing) + start + len(rows)

    def __getitem__(self, rows: Sequence[int]) -> Tensor:
        missing = sorted({row for row in rows if not self.done[row]})
        if missing and self.encode is None:
            raise KeyError(f"{self.file.stem} has no features of row {missing[0]}; call fill() first.")
        for start in range(0, len(missing), BATCH):
            some = missing[start : start + BATCH]
            self.values[some] = self.encode(self.images(some)).to(torch.float16).numpy()
            self.done[some] = 1
        return torch.from_numpy(self.values[rows])


def clip_encoder(folder: Path, layer: int, size: int) -> Encode:
    """Return a function from images to hidden states of CLIP at ``layer``, CLS first.

    Images are squashed to ``size`` × ``size`` pixels; position embeddings are interpolated where that is not CLIP's
    own size. Matrix products run in bfloat16 where that is faster here.
    """
    from transformers import CLIPVisionModel

    from torino_lab.training.precision import best_dtype
    from torino_lab.weights import CLIP_MEAN, CLIP_STD

    model = CLIPVisionModel.from_pretrained(folder).eval()
    dtype = best_dtype()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))

    def encode(images: Sequence[Image.Image]) -> Tensor:
        arrays = [np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)) for image in images]
        pixels = torch.stack([torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]) / 255
        lower = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
        with torch.inference_mode(), lower:
            out = model(
                (pixels - mean) / std, output_hidden_states=True, interpolate_pos_encoding=size != 224
            ).hidden_states
        return out[layer].float()

    return encode


def fill_all(caches: Sequence[Features], encode: Encode, log: Callable) -> None:
    """Fill several caches, reporting progress every half minute."""
    for cache in caches:
        begun, first, said = time.monotonic(), len(cache.missing()), 0.0
        for done in cache.fill(encode):
            now = time.monotonic()
            if now - said > 30 or done == cache.rows:
                rate = (now - begun) / max(1, first - (cache.rows - done))
                log(f"features {cache.file.stem}: {done}/{cache.rows}, {rate:.2f} s an image")
                said = now
