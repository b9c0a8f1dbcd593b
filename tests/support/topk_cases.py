"""Inputs and references for the tests of the top-k search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torino.core.topk.exact import SILENT

ZERO = torch.tensor(0.0)


def reference_topk(x: Tensor, w: Tensor, b: Tensor, k: int, floor: Tensor) -> tuple[Tensor, Tensor]:
    """The definition with a dense matrix: float32 of the float64 sums, decreasing, ties to the lowest latent."""
    scores = (x.double() @ w.double().T + b.double()).float()
    scores = scores.masked_fill(scores <= floor, -math.inf)
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    silent = values[:, :k] == -math.inf
    return indices[:, :k].masked_fill(silent, SILENT), values[:, :k].masked_fill(silent, 0.0)


def assert_equal_result(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert got[0].dtype == torch.int64
    assert got[1].dtype == torch.float32
    assert torch.equal(got[0], want[0]), f"indices {got[0].tolist()} != {want[0].tolist()}"
    assert torch.equal(got[1], want[1]), f"values {got[1].tolist()} != {want[1].tolist()}"


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def assert_same_bits(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    assert torch.equal(bits(got[1]), bits(want[1]))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Small integers as float32: sums of products are exact in any order, and exact ties are common."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cancelling(n: int, c: int, *, d: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and latents whose large parts cancel, so that float32 scores are mostly rounding error.

    All entries are short binary fractions, so float64 sums are exact in any order.
    """
    fine = (normal(n, d // 2, seed=seed) * 256).round().clamp(-1024, 1024) / 256
    x = fine.repeat_interleave(2, dim=1)
    big = (normal(c, d // 2, seed=seed + 1) * 1000).round().clamp(-2000, 2000)
    rare = random_integers(-1, 1, c, d, seed=seed + 2) * (random_integers(0, 7, c, d, seed=seed + 3) == 0)
    w = torch.stack([big, -big], 2).reshape(c, d) + rare / 4096
    apart = torch.randperm(d, generator=torch.Generator().manual_seed(seed))  # adjacent terms would cancel exactly
    return x[:, apart], w[:, apart], torch.zeros(c)


def topk_inputs() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    g = normal
    base = random_integers(-2, 2, 9, 6, seed=3)
    return {
        "random": (g(17, 13), g(301, 13, seed=1), g(301, seed=2)),
        "random, lanes": (g(9, 8), g(256, 8, seed=1), g(256, seed=2)),
        "ties everywhere": (
            random_integers(-2, 2, 20, 4),
            random_integers(-2, 2, 203, 4, seed=1),
            random_integers(-1, 1, 203, seed=2),
        ),
        "ties, lanes": (random_integers(-2, 2, 20, 3), random_integers(-2, 2, 320, 3, seed=1), torch.zeros(320)),
        "duplicate latents": (random_integers(-3, 3, 12, 6), base.repeat(25, 1), torch.zeros(225)),
        "duplicate tokens": (base.repeat(4, 1), random_integers(-3, 3, 130, 6, seed=5), torch.zeros(130)),
        "zero tokens": (torch.zeros(4, 5), g(100, 5), random_integers(-2, 2, 100, seed=1)),
        "zero latents": (g(6, 5), torch.zeros(96, 5), torch.zeros(96)),
        "all zero but bias": (torch.zeros(3, 2), torch.zeros(64, 2), g(64)),
        "all below": (g(5, 4).abs(), -g(70, 4, seed=1).abs(), torch.zeros(70)),
        "huge channel": (
            g(10, 16).index_fill(1, torch.tensor([3]), 1e4),
            g(150, 16, seed=1) * torch.tensor([1.0] * 3 + [1e-3] + [1.0] * 12),
            g(150, seed=2),
        ),
        "huge channel, both": (
            random_integers(-4, 4, 10, 8).index_fill(1, torch.tensor([0]), 10000.0),
            random_integers(-4, 4, 150, 8, seed=1).index_fill(1, torch.tensor([0]), 10000.0),
            torch.zeros(150),
        ),
        "tiny": (g(8, 7) * 1e-18, g(90, 7, seed=1) * 1e-18, torch.zeros(90)),
        "denormal products": (g(8, 7) * 1e-21, g(90, 7, seed=1) * 1e-22, torch.zeros(90)),
        "denormal tokens": (g(8, 7) * 1e-41, g(90, 7, seed=1), torch.zeros(90)),
        "denormal latents and bias": (g(8, 7), g(90, 7, seed=1) * 1e-42, g(90, seed=2) * 1e-43),
        "cancelling": cancelling(8, 250),
        "few latents": (random_integers(-2, 2, 10, 3), random_integers(-2, 2, 5, 3, seed=1), torch.zeros(5)),
        "one latent": (g(5, 3), g(1, 3, seed=1), torch.zeros(1)),
        "one channel": (g(7, 1), g(33, 1, seed=1), g(33, seed=2)),
        "one token": (g(1, 9), g(97, 9, seed=1), torch.zeros(97)),
    }


INPUT_NAMES = list(topk_inputs())


def order_sensitive() -> tuple[Tensor, Tensor, Tensor]:
    """Products of ±2^60 and of 1, so that the rounded sum depends on the order of summation."""
    n, d, c = 40, 67, 96
    x, w = normal(n, d), normal(c, d, seed=1)
    big = torch.randint(0, d, (n, 12), generator=torch.Generator().manual_seed(2))
    x = x.scatter(1, big, 2.0**30 * random_integers(-1, 1, n, 12, seed=3))
    w[:, ::3] *= 2.0**30
    return x, w, torch.zeros(c)


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor returned by any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.numel() * leaf.element_size() > self.bytes:
                self.bytes, self.by = leaf.numel() * leaf.element_size(), str(func)
        return out


def assert_same_concepts(got: Any, want: Any) -> None:
    assert_same_bits((got.indices, got.values), (want.indices, want.values))
    assert torch.equal(got.peak, want.peak)
