"""LLaVA-Scissor: connected components of similar patches.

LLaVA-Scissor: Token Compression with Semantic Connected Components for Video LLMs (Sun et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from torino.core.errors import BadParameter
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_number
from torino.reducers._similarity import cross_cosines, pairwise_cosines
from torino.reducers.base import Order, Reducer, register

Ints = NDArray[np.int64]


@register("scissor")
@dataclass(frozen=True)
class Scissor(Reducer):
    """Turn each connected component of similar patches into one token (LLaVA-Scissor).

    Two patches are linked if their cosine exceeds τ. The mean of each connected component represents it. The same is
    done once more with these means (in a video, with those of all frames). Finally every patch joins the most similar
    representative: a token is (m + Σ x)/(n + 1), with its representative m and the n patches x that joined it. It has
    the structure of TORINO, with cosines of patches in place of shared concepts.

    With a ``budget`` the threshold depends on the image: patches are linked in order of descending cosine until exactly
    B components are left, and the second step is skipped. This variant is ours; the release has none.

    Reads only the patches. Differences from the release: components are exact for any number of patches, and all
    members of a component count in its mean, while the release misses those that its union-find reaches only through
    two others. A representative that no patch joins is dropped; with a budget it stays as it is.

    Parameters
    ----------
    budget : int, optional
        Exact number of tokens, at most N. By default the image determines the number.
    tau : float
        Threshold of the cosine, between −1 and 1. Not used with a budget.
    order : {"raster", "native"}
        By position of the patch that is most similar to the token's representative, or by the first patch of each
        component.
    """

    budget: int | None = None
    tau: float = 0.9
    order: Order = "raster"

    paper: ClassVar[str] = "Sun et al., 2025, arXiv 2506.21862"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D)"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        if self.budget is not None:
            check_count("budget", self.budget)
        check_number("tau", self.tau, -1.0)
        if self.tau > 1:
            raise BadParameter(f"tau is a cosine and must be between -1 and 1, got {self.tau!r}.")
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, x = len(tokens), tokens.patches.detach().double().cpu()
        if self.budget is not None and self.budget > n:
            raise budget_error(self.name, self.budget, n)
        cosine = pairwise_cosines(x, torch.float64).numpy()
        if self.budget is None:
            label = components(cosine > self.tau)
            means = _averaging(label) @ x.numpy()
            again = components(pairwise_cosines(torch.from_numpy(means), torch.float64).numpy() > self.tau)
            representative = _averaging(again) @ _averaging(label)
        else:
            representative = _averaging(link_until(cosine, self.budget))
        means = torch.from_numpy(representative @ x.numpy())
        nearness = cross_cosines(x, means).numpy()
        joined = nearness.argmax(1)  # the first of equals
        size = np.bincount(joined, minlength=len(means))
        kept = np.arange(len(means)) if self.budget is not None else np.flatnonzero(size)
        weight = representative[kept]
        weight[np.searchsorted(kept, joined), np.arange(n)] += 1
        weight /= (size[kept] + 1)[:, None]
        mine = joined[None] == kept[:, None]
        anchor = np.where(mine, nearness.T[kept], -2).argmax(1)
        for token in np.flatnonzero(size[kept] == 0):  # no patch has joined: at a patch of its component that is free
            free = np.setdiff1d(np.arange(n), np.delete(anchor, token))
            anchor[token] = free[(representative[kept[token]][free] > 0).argmax()]
        order = np.argsort(anchor, kind="stable") if self.order == "raster" else np.arange(len(kept))
        position = np.empty(len(means), np.int64)
        position[kept[order]] = np.arange(len(kept))
        rows, sources = weight[order].nonzero()
        return Reduction(
            sources=torch.from_numpy(sources),
            weights=torch.from_numpy(weight[order][rows, sources]).float(),
            offsets=offsets_from_lengths(np.bincount(rows, minlength=len(kept)).tolist()),
            anchor=torch.from_numpy(anchor[order]),
            concept=torch.full((len(kept),), -1),
            role=("primary",) * len(kept),
            grid=tokens.grid,
            by=self.spec,
            assigned=torch.from_numpy(position[joined]),
            score=torch.from_numpy(size[kept][order]).float(),
        )


def components(linked: NDArray[np.bool_]) -> Ints:
    """Return the connected component of each node, numbered by their first nodes."""
    label: Ints = connected_components(csr_array(linked), directed=False)[1].astype(np.int64)
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse]


def link_until(cosine: NDArray[np.float64], count: int) -> Ints:
    """Link pairs in order of descending cosine until ``count`` components are left (single linkage)."""
    n = len(cosine)
    if n == count:
        return np.arange(n)
    merges = linkage(1 - cosine[np.triu_indices(n, 1)], "single")[: n - count, :2].astype(np.int64)
    label = np.concatenate([np.arange(n), np.zeros(len(merges), np.int64)])
    for number, (a, b) in enumerate(merges):  # cluster n + number joins the clusters a and b
        label[n + number] = min(label[a], label[b])
        label[: n + number][np.isin(label[: n + number], [label[a], label[b]])] = label[n + number]
    return np.unique(label[:n], return_inverse=True)[1]


def _averaging(label: Ints) -> NDArray[np.float64]:
    """Return the matrix that averages the members of each component."""
    matrix = (label[None] == np.arange(label.max() + 1)[:, None]).astype(np.float64)
    return matrix / matrix.sum(1, keepdims=True)
