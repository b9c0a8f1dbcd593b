"""Screen: the strongest latents, exactly, at a fraction of the cost of the float32 product.

A product of 8-bit whole numbers finds candidates, a bound proves that no other latent can be among the strongest, and
only the candidates are scored as :mod:`torino.core.topk.exact` defines it. ``docs/fast.md`` has the mathematics.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torino.core.topk.prefilter.backends import LARGEST, Backend, Product, backend_for, product_of, zero_for
from torino.core.topk.prefilter.quantization import Quantised, forget, quantise, quantised_of
from torino.core.topk.prefilter.search import LEAST, SearchStats, prefiltered_topk

__all__ = [
    "Backend",
    "PrefilterCache",
    "Product",
    "Quantised",
    "Screen",
    "SearchStats",
    "backend_for",
    "forget",
    "prefiltered_topk",
    "product_of",
    "quantise",
    "quantised_of",
    "zero_for",
]

Screen = Literal["auto", "int8", "off"]

PAYS_FROM = 1 << 23  # encoder weights below which the plain product is as fast
PAYS_TOKENS = 16  # tokens at once below which it is
PAYS_MANY = (1 << 21, 4096)  # the same of weights where there are that many tokens at once
PAYS_THREADS = 2  # threads of the plain product that one of the screen's, which has LEAST tokens or more, makes up for
WIDEST = (2**31 - 1) // LARGEST**2 - 64  # channels, beyond which sums of whole numbers could leave 32 bits
MAKES_AFTER = 4096  # tokens after which the whole numbers have paid for their making


class PrefilterCache:
    """Keeps the whole numbers of one SAE, and makes them anew when its weights have changed."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._state: object = None
        self._held: tuple[Quantised, Product] | None = None
        self._seen = self._changes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PrefilterCache], tuple[()]]:
        """A copy of an SAE makes its own."""
        return PrefilterCache, ()

    def ready(
        self, weight: Tensor, bias: Tensor, state: object, screen: Screen, tokens: int, home: Path | None
    ) -> tuple[Quantised, Product] | None:
        """What the screen needs, or None where the plain search is to be taken.

        Parameters
        ----------
        weight, bias : Tensor
            The encoder.
        state : object
            Equal to what it was as long as the weights are.
        screen : {"auto", "int8", "off"}
            "auto" takes the screen where it pays: a fast product, enough weights and tokens, and enough tokens read
            with these weights to make up for the making of the whole numbers.
        tokens : int
            How many there are this time.
        home : Path, optional
            Folder of the SAE, see :func:`quantised_of`; not for weights that were changed since.
        """
        if screen == "off" or weight.shape[1] > WIDEST:
            return None
        with self._lock:
            return self._ready(weight, bias, state, screen, tokens, home)

    def _ready(
        self, weight: Tensor, bias: Tensor, state: object, screen: Screen, tokens: int, home: Path | None
    ) -> tuple[Quantised, Product] | None:
        if self._of is None or self._of() is not weight or self._state != state:
            self._changes += self._of is not None
            self._of, self._state, self._held, self._seen = weakref.ref(weight), state, None, 0
        self._seen += tokens
        if screen == "auto" and not pays(weight, tokens, self._seen, self._held is not None):
            return None
        backend = backend_for(weight.device)
        if backend is None:
            return None
        if self._held is None:
            held = quantised_of(weight, bias, None if self._changes else home, zero_for(backend, weight.device))
            product = product_of(backend, held.levels, int(held.zero))
            self._held = replace(held, levels=held.levels[:0].clone()), product  # which has them in its own form
        return self._held


def pays(weight: Tensor, tokens: int, seen: int, made: bool) -> bool:
    """Tell whether the screen is faster: ``tokens`` this time, ``seen`` in all, ``made`` already."""
    device = weight.device.type
    fewest = PAYS_MANY[0] if tokens >= PAYS_MANY[1] else PAYS_FROM
    if weight.numel() < fewest or tokens < PAYS_TOKENS or device not in ("cpu", "cuda"):
        return False
    if device == "cpu" and torch.get_num_threads() > PAYS_THREADS * max(1, tokens // LEAST):
        return False
    return made or seen >= MAKES_AFTER
