"""What the prefilter is measured on: images and an SAE, real, lifted to a larger size, or without any structure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torino import SAE, VisualTokens, make
from torino.core.concepts import Concepts, Rank
from torino.core.tokens import Origin
from torino.core.topk.prefilter import Backend, backend_for, make_product, quantize, zero_point_for
from torino.core.topk.prefilter.search import ROWS
from torino.datasets.bundled import example_tokens

K, DELTA = 3, 3  # the paper's finest setting, and its most costly


@dataclass
class Known:
    """An encoder that has been asked before."""

    said: Concepts

    def top(self, x: Tensor, k: int, *, rank: Rank = "activation") -> Concepts:
        """What was said."""
        return self.said

    def check_origin(self, origin: Origin, width: int) -> None:
        """Any will do."""


@dataclass
class Batch:
    """Some images, and the SAE that reads them."""

    name: str
    images: list[VisualTokens]
    sae: SAE

    @property
    def packed(self) -> Tensor:
        """All patches."""
        return torch.cat([image.patches for image in self.images])

    def first(self, count: int) -> Batch:
        """That many images; the same ones again where there are fewer."""
        images = [self.images[i % len(self.images)] for i in range(count)]
        return Batch(f"{self.name}, {_images(count)}", images, self.sae)

    def rest(self) -> Callable[[], object]:
        """Grouping and reduction alone, the concepts being known."""
        reducer = make(f"torino-m(k={K}, delta={DELTA})", sae=Known(self.sae.top(self.packed, K, prefilter="off")))
        patches = [image.patches for image in self.images]
        return lambda: reducer.plan_batch(self.images).apply(patches)

    def lone_int8(self) -> Callable[[], object]:
        """The whole numbers' product alone, in the prefilter's tiles, chunks and threads, and nothing done with it."""
        backend = prefilter_backend()
        held = quantize(self.sae.W_enc, self.sae.b_enc, zero_point_for(backend))
        product = make_product(backend, held.levels, int(held.zero_point))
        x, threads = self.packed, torch.get_num_threads()
        levels = torch.randint(-127, 128, (len(x), held.levels.shape[1]), dtype=torch.int8)
        tiles = [product.prepare(tile) for tile in levels.split(min(ROWS, -(-len(x) // threads)))]

        def multiply(tile: Tensor) -> None:
            place = torch.empty(len(tile) * min(product.rows, product.chunk), dtype=torch.int32)
            for start in range(0, product.rows, product.chunk):
                width = min(product.chunk, product.rows - start)
                product.scores(tile, start, place[: len(tile) * width].view(len(tile), width))

        def run() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(multiply, tiles))

        return run

    def whole(self, prefilter: str) -> Callable[[], object]:
        """Tokens to reduced tokens."""
        reducer = make(f"torino-m(k={K}, delta={DELTA})", sae=self.sae)
        patches = [image.patches for image in self.images]

        def run() -> object:
            self.sae.prefilter = prefilter  # type: ignore[assignment]
            return reducer.plan_batch(self.images).apply(patches)

        return run


def prefilter_backend() -> Backend:
    """Who multiplies whole numbers here; without any there is nothing to measure."""
    backend = backend_for(torch.device("cpu"))
    if backend is None:
        raise SystemExit("The prefilter needs onnxruntime: pip install torino[fast].")
    return backend


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def real_photos(paths: list[Path]) -> list[Tensor]:
    """Patch tokens of photos, (N, D) each: of the files, or the four bundled ones."""
    if not paths:
        return [tokens.patches.float() for tokens in example_tokens()]
    photos: list[Tensor] = []
    for path in sorted(paths):
        array = np.load(path, mmap_mode="r")
        photos += [torch.from_numpy(np.asarray(one, dtype=np.float32)) for one in array[: 40 - len(photos)]]
    return photos


def as_images(photos: list[Tensor]) -> list[VisualTokens]:
    return [VisualTokens(one, (round(len(one) ** 0.5), len(one) // round(len(one) ** 0.5))) for one in photos]


def lifted(photos: list[Tensor], d: int, c: int, seed: int) -> Batch:
    """Real tokens in a wider space, by an orthonormal map; latents are unit differences of pairs of such tokens.

    Of other photos, if there are any: with the tokens themselves in the latents more of them are close.
    """
    random = torch.Generator().manual_seed(seed)
    rows = torch.cat(photos[8:] or photos)
    lift = torch.linalg.qr(torch.randn(d, d, generator=random))[0][: rows.shape[1]]
    one, other = (rows[torch.randint(len(rows), (c,), generator=random)] for _ in range(2))
    weight = torch.nn.functional.normalize(
        (one - other + 1e-3 * torch.randn(c, rows.shape[1], generator=random)) @ lift
    )
    sae = SAE(weight, b_dec=rows.mean(0) @ lift, kind="relu")
    return Batch(f"real tokens lifted to {d:,} × {c:,}", as_images([one @ lift for one in photos[:8]]), sae)


def isotropic(n: int, d: int, c: int, seed: int) -> Batch:
    """Tokens and latents without any structure."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.nn.functional.normalize(torch.randn(c, d, generator=random))
    photos = [torch.randn(n, d, generator=random) for _ in range(8)]
    return Batch(f"isotropic noise, {d:,} × {c:,}", as_images(photos), SAE(weight, kind="relu"))


def own_size(photos: list[Tensor], sae: SAE) -> Batch:
    """Real tokens and an SAE that was trained on such tokens."""
    return Batch(f"real tokens and SAE, {sae.width:,} × {sae.latents:,}", as_images(photos[:8]), sae)
