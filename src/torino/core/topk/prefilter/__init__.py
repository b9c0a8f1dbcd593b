"""Exact top-k search with an int8 prefilter, at a fraction of the cost of the float32 product.

An integer product of 8-bit tokens and weights selects candidates, a bound proves that no other latent can be among the
top k, and only the candidates are scored as defined in :mod:`torino.core.topk.exact`. The mathematics is explained in
``research/reports/fast.md``.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torino.core.topk.prefilter.backends import (
    MAX_LEVEL,
    Backend,
    Int8Product,
    backend_for,
    make_product,
    zero_point_for,
)
from torino.core.topk.prefilter.quantization import QuantizedEncoder, delete_cached, load_or_quantize, quantize
from torino.core.topk.prefilter.search import MIN_ROWS, SearchStats, prefiltered_topk

__all__ = [
    "Backend",
    "Int8Product",
    "Prefilter",
    "PrefilterCache",
    "QuantizedEncoder",
    "SearchStats",
    "backend_for",
    "delete_cached",
    "load_or_quantize",
    "make_product",
    "prefiltered_topk",
    "quantize",
    "zero_point_for",
]

Prefilter = Literal["auto", "int8", "bf16", "off"]

MIN_WEIGHTS = 1 << 23  # with fewer encoder weights the exact search is as fast
MIN_TOKENS = 16  # with fewer tokens per call the exact search is as fast
MIN_WEIGHTS_MANY_TOKENS = 1 << 21  # replaces MIN_WEIGHTS for calls with at least MANY_TOKENS tokens
MANY_TOKENS = 4096
THREAD_RATIO = 2  # the exact search may use at most this many threads per thread of the prefilter
MAX_WIDTH = (2**31 - 1) // MAX_LEVEL**2 - 64  # for wider tokens the integer sums could exceed 32 bits
QUANTIZE_AFTER = 4096  # number of tokens after which the time for quantization is recovered


class PrefilterCache:
    """Quantized encoder and product of one SAE, recomputed when its weights change."""

    def __init__(self) -> None:
        self._weight: weakref.ref[Tensor] | None = None
        self._state: object = None
        self._cached: tuple[QuantizedEncoder, Int8Product] | None = None
        self._token_count = self._changes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PrefilterCache], tuple[()]]:
        """Copy and pickle as an empty cache."""
        return PrefilterCache, ()

    def get(
        self, weight: Tensor, bias: Tensor, state: object, prefilter: Prefilter, tokens: int, folder: Path | None
    ) -> tuple[QuantizedEncoder, Int8Product] | None:
        """Return quantized encoder and product, or None if the exact search should be used.

        Parameters
        ----------
        weight, bias : Tensor
            The encoder.
        state : object
            A value that changes when the weights change.
        prefilter : {"auto", "int8", "bf16", "off"}
            "auto" uses the prefilter if it is faster: with a fast product, enough weights and tokens, and enough
            tokens so far to recover the time for quantization.
        tokens : int
            Number of tokens of this call.
        folder : Path, optional
            Folder of the SAE, see :func:`load_or_quantize`; None for an SAE in memory, which is not cached on disk.
            Weights that were changed after loading are not cached either.
        """
        if prefilter in ("off", "bf16") or weight.shape[1] > MAX_WIDTH:
            return None
        with self._lock:
            return self._get(weight, bias, state, prefilter, tokens, folder)

    def _get(
        self, weight: Tensor, bias: Tensor, state: object, prefilter: Prefilter, tokens: int, folder: Path | None
    ) -> tuple[QuantizedEncoder, Int8Product] | None:
        if self._weight is None or self._weight() is not weight or self._state != state:
            self._changes += self._weight is not None
            self._weight, self._state, self._cached, self._token_count = weakref.ref(weight), state, None, 0
        self._token_count += tokens
        if prefilter == "auto" and not is_faster(weight, tokens, self._token_count, self._cached is not None):
            return None
        backend = backend_for(weight.device)
        if backend is None:
            return None
        if self._cached is None:
            zero_point = zero_point_for(backend, weight.device)
            quantized = load_or_quantize(weight, bias, None if self._changes else folder, zero_point)
            product = make_product(backend, quantized.levels, zero_point)
            # the product has its own copy of the levels
            self._cached = replace(quantized, levels=quantized.levels[:0].clone()), product
        return self._cached


def is_faster(weight: Tensor, tokens: int, token_count: int, quantized: bool) -> bool:
    """Return whether the prefilter is faster than the exact search.

    Parameters
    ----------
    weight : Tensor
        The encoder.
    tokens, token_count : int
        Number of tokens of this call, and of all calls with these weights.
    quantized : bool
        Whether the encoder is quantized already.
    """
    device = weight.device.type
    min_weights = MIN_WEIGHTS_MANY_TOKENS if tokens >= MANY_TOKENS else MIN_WEIGHTS
    if weight.numel() < min_weights or tokens < MIN_TOKENS or device not in ("cpu", "cuda"):
        return False
    if device == "cpu" and torch.get_num_threads() > THREAD_RATIO * max(1, tokens // MIN_ROWS):
        return False
    return quantized or token_count >= QUANTIZE_AFTER
