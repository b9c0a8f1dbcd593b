"""Sparse codes: the active latents of a batch, and the three products with them that training needs.

Of B × C latents some k a row are active, so decoding and all gradients are sums over B·k entries. The code keeps these
sorted by row, for the decoder, and knows their order by latent, for the gradients of the weights.
"""

from __future__ import annotations

import math
import warnings
from functools import cache

import torch
from torch import Tensor

LANE = 32  # neighbouring scores whose maximum is looked at first


class Code:
    """The entries of a sparse matrix of latents, B × C, whose columns are cut into L nested levels.

    A *bag* is the part of a row that belongs to one level; there are B·L of them, row by row.

    Parameters
    ----------
    places : Tensor of shape (n,), int64
        Rising; entry (b, j) has place b·C + j.
    values : Tensor of shape (n,)
    rows, latents : int
        B and C.
    starts : Tensor of shape (L,), int64
        First latent of each level.
    """

    def __init__(self, places: Tensor, values: Tensor, rows: int, latents: int, starts: Tensor) -> None:
        device, levels = places.device, len(starts)
        self.values, self.rows_, self.latents_ = values, rows, latents
        self.row, self.latent = places // latents, places % latents
        begin = torch.arange(rows, device=device)[:, None] * latents + starts
        end = torch.tensor([rows * latents], device=device)
        self.bag_offsets = torch.searchsorted(places, torch.cat([begin.reshape(-1), end]))
        self.bag = torch.repeat_interleave(torch.arange(rows * levels, device=device), self.bag_offsets.diff())
        self.order = self.latent.argsort(stable=True)
        self.counts = torch.bincount(self.latent, minlength=latents)
        self.latent_offsets = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0))

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.values)

    def decode(self, weight: Tensor, out: Tensor) -> Tensor:
        """What each bag contributes to the output, Σ z_j W_j over its entries: shape (B·L, D), into ``out``."""
        matrix = _csr(self.bag_offsets, self.latent, self.values, (len(out), self.latents_))
        return _product(matrix, weight, out)

    def dots(self, left: Tensor, weight: Tensor) -> Tensor:
        """⟨left of its bag (or row), weight of its latent⟩ for each entry, shape (n,)."""
        offsets = self.bag_offsets[:: (len(self.bag_offsets) - 1) // len(left)]
        return pair_dots(offsets, self.latent, left, weight)

    def pull(self, values: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """Σ value · right of its bag (or row) over the entries of each latent: shape (C, D), into ``out``."""
        index = self.row if len(right) == self.rows_ else self.bag
        matrix = _csr(self.latent_offsets, index[self.order], values[self.order], (self.latents_, len(right)))
        return _product(matrix, right, out)

    def by_latent(self, values: Tensor) -> Tensor:
        """Sum of the values of each latent's entries, shape (C,)."""
        return values.new_zeros(self.latents_).index_add_(0, self.latent, values)


def pair_dots(offsets: Tensor, columns: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """⟨left[i], right[j]⟩ for the entries (i, j) of a sparse pattern, given by row."""
    if not len(columns):
        return left.new_zeros(0)
    pattern = _csr(offsets, columns, left.new_zeros(len(columns)), (len(left), len(right)))
    return torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0).values()


def above(scores: Tensor, bar: float) -> tuple[Tensor, Tensor]:
    """Places, rising, and values of the scores above ``bar``.

    Hardly any score passes. So the maximum of each lane of 32 neighbours, one fast pass, says where to look.

    Examples
    --------
    >>> above(torch.tensor([[0.0, 3.0], [2.0, 1.0]]), 1.5)
    (tensor([1, 2]), tensor([3., 2.]))
    """
    depth = math.gcd(scores.numel(), LANE)
    lanes = scores.view(-1, depth)
    lane = (lanes.amax(1) > bar).nonzero()[:, 0]
    picked = lanes[lane]
    inside = (picked > bar).view(-1).nonzero()[:, 0]
    return lane[inside // depth] * depth + inside % depth, picked.view(-1)[inside]


def _product(matrix: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return torch.addmm(out, matrix, right, beta=0, out=out)


def _csr(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    _hush()
    return torch.sparse_csr_tensor(offsets, columns, values, shape, check_invariants=False)


@cache
def _hush() -> None:
    """Let torch say once, to nobody, that its CSR tensors are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1))
