"""Sparse codes: the active latents of a batch, and the sparse matrix products that training needs.

About k of the C latents of a row are active, so decoding and all gradients are sums over B·k entries. The entries are
sorted by row, for the decoder; a permutation sorts them by latent, for the gradients of the weights.
"""

from __future__ import annotations

import math
import warnings
from functools import cache

import torch
from torch import Tensor

LANE = 32  # neighboring scores whose maximum is computed first


class SparseCode:
    """A sparse matrix of latents of shape (B, C), whose columns are divided into L nested levels.

    A *bag* is the part of a row that belongs to one level; there are B·L bags, in row order.

    Parameters
    ----------
    positions : Tensor of shape (n,), int64
        In ascending order; entry (b, j) has position b·C + j.
    values : Tensor of shape (n,)
    rows, latents : int
        B and C.
    starts : Tensor of shape (L,), int64
        First latent of each level.
    """

    def __init__(self, positions: Tensor, values: Tensor, rows: int, latents: int, starts: Tensor) -> None:
        device, levels = positions.device, len(starts)
        self.values, self.num_rows, self.num_latents = values, rows, latents
        self.row, self.latent = positions // latents, positions % latents
        begin = torch.arange(rows, device=device)[:, None] * latents + starts
        end = torch.tensor([rows * latents], device=device)
        self.bag_offsets = torch.searchsorted(positions, torch.cat([begin.reshape(-1), end]))
        self.bag = torch.repeat_interleave(torch.arange(rows * levels, device=device), self.bag_offsets.diff())
        self.by_latent = self.latent.argsort(stable=True)
        self.counts = torch.bincount(self.latent, minlength=latents)
        self.latent_offsets = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0))

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.values)

    def decode(self, weight: Tensor, out: Tensor) -> Tensor:
        """Compute Σ z_j W_j over the entries of each bag, shape (B·L, D), into ``out``."""
        matrix = _csr(self.bag_offsets, self.latent, self.values, (len(out), self.num_latents))
        return _matmul(matrix, weight, out)

    def dots(self, left: Tensor, weight: Tensor) -> Tensor:
        """Compute ⟨left of the bag (or row), weight of the latent⟩ for each entry, shape (n,)."""
        offsets = self.bag_offsets[:: (len(self.bag_offsets) - 1) // len(left)]
        return sampled_dots(offsets, self.latent, left, weight)

    def accumulate(self, values: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """Compute Σ value · right of the bag (or row) over the entries of each latent, shape (C, D), into ``out``."""
        index = self.row if len(right) == self.num_rows else self.bag
        matrix = _csr(
            self.latent_offsets, index[self.by_latent], values[self.by_latent], (self.num_latents, len(right))
        )
        return _matmul(matrix, right, out)

    def sum_by_latent(self, values: Tensor) -> Tensor:
        """Sum the values of the entries of each latent, shape (C,)."""
        return values.new_zeros(self.num_latents).index_add_(0, self.latent, values)


def sampled_dots(offsets: Tensor, columns: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute ⟨left[i], right[j]⟩ for the entries (i, j) of a sparse pattern in CSR format."""
    if not len(columns):
        return left.new_zeros(0)
    pattern = _csr(offsets, columns, left.new_zeros(len(columns)), (len(left), len(right)))
    return torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0).values()


def find_above(scores: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """Return the positions, in ascending order, and the values of all scores above ``cutoff``.

    Very few scores are. So the maximum of each lane of 32 neighboring scores, one fast pass, selects the lanes to
    search.

    Examples
    --------
    >>> find_above(torch.tensor([[0.0, 3.0], [2.0, 1.0]]), 1.5)
    (tensor([1, 2]), tensor([3., 2.]))
    """
    depth = math.gcd(scores.numel(), LANE)
    lanes = scores.view(-1, depth)
    selected = (lanes.amax(1) > cutoff).nonzero()[:, 0]
    candidates = lanes[selected]
    inside = (candidates > cutoff).view(-1).nonzero()[:, 0]
    return selected[inside // depth] * depth + inside % depth, candidates.view(-1)[inside]


def _matmul(matrix: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return torch.addmm(out, matrix, right, beta=0, out=out)


def _csr(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    _discard_beta_warning()
    return torch.sparse_csr_tensor(offsets, columns, values, shape, check_invariants=False)


@cache
def _discard_beta_warning() -> None:
    """Trigger and discard torch's one-time beta warning for sparse CSR tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1))
