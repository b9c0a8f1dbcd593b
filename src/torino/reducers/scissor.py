"""LLaVA-Scissor: connected components of similar patches.

LLaVA-Scissor: Token Compression with Semantic Connected Components for Video LLMs (Sun et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from torino.core.errors import BadParameter, UnmetBudget
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_number
from torino.reducers._similarity import most_similar, pairwise_cosines, round_cosines, unit_vectors
from torino.reducers.base import Order, Reducer, register

Ints = NDArray[np.int64]
BLOCK = 2048  # rows that are compared with all others at once
MAX_LINKED = 10_000  # patches for single linkage, which needs all pairs


@register("scissor")
@dataclass(frozen=True)
class Scissor(Reducer):
    """Turn each connected component of similar patches into one token (LLaVA-Scissor).

    Two patches are linked if their cosine exceeds τ. The mean of each connected component represents it. The same is
    done once more with these means. In a video, the first step finds the components of each frame, and the second joins
    the means of all frames. Finally every patch joins the most similar representative: a token is (m + Σ x)/(n + 1),
    with its representative m and the n patches x that joined it. It has the structure of TORINO, with cosines of
    patches in place of shared concepts.

    With a ``budget`` the threshold depends on the image: patches are linked in order of descending cosine until exactly
    B components are left, and the second step is skipped. This variant is ours; the release has none. In a video it
    links patches of all frames, at most 10,000.

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

    takes_frames: ClassVar[bool] = True
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
        """Plan one image or video."""
        n, x = len(tokens), tokens.patches.detach().double().cpu()
        if self.budget is not None and self.budget > n:
            raise budget_error(self.name, self.budget, n)
        share, component = self._representatives(x, tokens.frames)
        count = int(component.max()) + 1
        means = torch.from_numpy(csr_array((share, (component, np.arange(n))), shape=(count, n)) @ x.numpy())
        joined = most_similar(x, means).numpy()
        nearness = (unit_vectors(x) * unit_vectors(means)[torch.from_numpy(joined)]).sum(1)
        nearness = round_cosines(nearness).float().numpy()
        size = np.bincount(joined, minlength=count)
        kept = np.arange(count) if self.budget is not None else np.flatnonzero(size)
        token = np.full(count, -1)
        token[kept] = np.arange(len(kept))
        anchor = self._anchors(token[joined], nearness, token[component], len(kept))
        order = np.argsort(anchor, kind="stable") if self.order == "raster" else np.arange(len(kept))
        token[kept[order]] = np.arange(len(kept))
        # a patch counts in the mean of its component, and once more in the token that it joins
        of_mean = token[component] >= 0
        rows = np.concatenate([token[component][of_mean], token[joined]])
        columns = np.concatenate([np.flatnonzero(of_mean), np.arange(n)])
        weight: Any = csr_array((np.concatenate([share[of_mean], np.ones(n)]), (rows, columns)), shape=(len(kept), n))
        lengths = np.diff(weight.indptr)
        return Reduction(
            sources=torch.from_numpy(weight.indices.astype(np.int64)),
            weights=torch.from_numpy(weight.data / np.repeat(size[kept][order] + 1, lengths)).float(),
            offsets=offsets_from_lengths(lengths.tolist()),
            anchor=torch.from_numpy(anchor[order]),
            concept=torch.full((len(kept),), -1),
            role=("primary",) * len(kept),
            by=self.spec,
            assigned=torch.from_numpy(token[joined]),
            score=torch.from_numpy(size[kept][order]).float(),
            **tokens.layout,
        )

    def _representatives(self, x: Tensor, frames: int) -> tuple[NDArray[np.float64], Ints]:
        """Return the weight of each patch in its representative, and which one it is, by their first patches."""
        n = len(x)
        if self.budget is not None:
            if n > MAX_LINKED:
                raise UnmetBudget(
                    f"scissor with a budget compares all pairs of at most {MAX_LINKED} patches, got {n}; "
                    "use tau=... without a budget, or fewer frames."
                )
            label = link_until(pairwise_cosines(x, torch.float64).numpy(), self.budget)
            return 1 / np.bincount(label)[label], label
        label, found = np.empty(n, np.int64), 0
        for frame in np.arange(n).reshape(frames, -1):
            part = similar_components(x[torch.from_numpy(frame)], self.tau)
            label[frame] = part + found
            found += int(part.max()) + 1
        size = np.bincount(label)
        means = torch.from_numpy(csr_array((1 / size[label], (label, np.arange(n))), shape=(found, n)) @ x.numpy())
        again = similar_components(means, self.tau)
        return 1 / (size * np.bincount(again)[again])[label], again[label]

    @staticmethod
    def _anchors(joined: Ints, nearness: NDArray[np.float32], component: Ints, count: int) -> Ints:
        """Return the patch nearest to each representative among those that joined it, the first of equals."""
        ranked = np.lexsort((np.arange(len(joined)), -nearness, joined))
        found, first = np.unique(joined[ranked], return_index=True)
        anchor = np.full(count, -1)
        anchor[found] = ranked[first]
        for token in np.flatnonzero(anchor < 0):  # no patch has joined: at a patch of its component that is free
            anchor[token] = np.setdiff1d(np.flatnonzero(component == token), anchor)[0]
        return anchor


def similar_components(x: Tensor, tau: float) -> Ints:
    """Return the components of rows whose cosine exceeds a threshold, without the matrix of all pairs of many rows."""
    if len(x) <= BLOCK:
        return components(pairwise_cosines(x, torch.float64).numpy() > tau)
    unit, label = unit_vectors(x), np.arange(len(x))
    for start in range(0, len(x), BLOCK):
        linked = (round_cosines(unit[start : start + BLOCK] @ unit[start:].T) > tau).numpy()
        row, column = linked.nonzero()
        rows = np.concatenate([row + start, np.arange(len(x))])
        columns = np.concatenate([column + start, first_members(label)])  # the links of the blocks so far
        graph = csr_array((np.ones(len(rows), np.bool_), (rows, columns)), shape=(len(x), len(x)))
        label = components(graph)
    return label


def first_members(label: Ints) -> Ints:
    """Return the first member of the component of each node."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return first[inverse]


def components(linked: NDArray[np.bool_] | csr_array) -> Ints:
    """Return the connected component of each node, numbered by their first nodes."""
    label: Ints = connected_components(csr_array(linked), directed=False)[1].astype(np.int64)
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse]


def link_until(cosine: NDArray[np.float64], count: int) -> Ints:
    """Link pairs in order of descending cosine until ``count`` components are left (single linkage)."""
    from scipy.cluster.hierarchy import linkage  # takes 0.3 s to import, and only this variant needs it

    n = len(cosine)
    if n == count:
        return np.arange(n)
    merges = linkage(1 - cosine[np.triu_indices(n, 1)], "single")[: n - count, :2].astype(np.int64)
    label = np.concatenate([np.arange(n), np.zeros(len(merges), np.int64)])
    for number, (a, b) in enumerate(merges):  # cluster n + number joins the clusters a and b
        label[n + number] = min(label[a], label[b])
        label[: n + number][np.isin(label[: n + number], [label[a], label[b]])] = label[n + number]
    return np.unique(label[:n], return_inverse=True)[1]
