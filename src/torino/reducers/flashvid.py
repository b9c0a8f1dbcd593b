"""FlashVID's merging: chains of similar patches through time become one token, then similar chains of a frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._cells import share_out
from torino.reducers._checks import budget_error, check_choice, check_count, check_number
from torino.reducers._similarity import round_cosines, unit_vectors
from torino.reducers.base import Order, Reducer, register

Ints = NDArray[np.int64]
NEIGHBORS = 7  # for the density of a token
ROUNDING = 2.0**40  # squared distances are rounded to this fraction of the largest, so that copies tie


@register("flashvid")
@dataclass(frozen=True)
class FlashVid(Reducer):
    """Merge patches that continue over time, then clusters in frames (FlashVID, merging only).

    Segments: The video is cut between frames whose mean patches have a cosine below ``cut``. If this gives fewer than
    ``segments``, the transitions of lowest cosine are cut too.

    Time: Within a segment, each patch is linked to the most similar patch of the previous frame if their cosine exceeds
    τ. Patches that are linked form a tree, and its mean is a token at the place of its first patch.

    Budget: If there are fewer than B trees, only the most similar links are kept, so that there are B. If there are
    more, frames share the budget in proportion to the trees that begin there, and in each frame trees are clustered by
    density peaks: density exp(−mean d²) over the 7 nearest, d the Euclidean distance over √D; the centers have the
    highest product of density and distance to the nearest denser token, and the others join the nearest center. A token
    is the mean of its trees.

    Reads only the patches. The release also keeps a part of each frame by attention and diversity (70 % of the tokens)
    and prunes inside the language model; this is its merging alone (α = 0). Other differences: the budget is exact and
    for the whole video, while the release rounds up in every segment and frame; of equal densities that of the lowest
    index counts as larger, where the release adds noise. If there are fewer tokens than frames, some frames are not
    represented.

    Parameters
    ----------
    budget : int, optional
        Exact number of tokens, at most N. By default every tree is a token, so the number depends on the video.
    tau : float
        Threshold of the cosine of linked patches, between −1 and 1.
    cut : float
        Threshold of the cosine of mean patches between −1 and 1.
    segments : int
        Minimal number of segments, if there are as many frames.
    order : {"raster", "native"}
        By position, or frame by frame in order of the centers.
    """

    budget: int | None = None
    tau: float = 0.8
    cut: float = 0.9
    segments: int = 8
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    for_videos: ClassVar[bool] = True
    paper: ClassVar[str] = "Fan et al., FlashVID, ICLR 2026"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N·S·D)"
    original_license: ClassVar[str] = "MIT"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", 1 if self.budget is None else self.budget)
        for name in ("tau", "cut"):
            check_number(name, getattr(self, name), -1.0)
            if getattr(self, name) > 1:
                raise BadParameter(f"{name} is a cosine and must be between -1 and 1, got {getattr(self, name)!r}.")
        check_count("segments", self.segments)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image or video."""
        n, size, frames = len(tokens), tokens.grid[0] * tokens.grid[1], tokens.frames
        if self.budget is not None and self.budget > n:
            raise budget_error(self.name, self.budget, n)
        x = tokens.patches.detach().double().cpu().view(frames, size, -1)
        root = self._roots(x).reshape(-1)
        trees, tree = np.unique(root, return_inverse=True)  # by their first patches
        label, center = np.arange(len(trees)), np.arange(len(trees))
        if self.budget is not None and self.budget < len(trees):
            total = torch.zeros(len(trees), x.shape[2], dtype=torch.float64)
            total.index_add_(0, torch.from_numpy(tree), x.view(n, -1))
            means = total / torch.from_numpy(np.bincount(tree))[:, None]
            label, center = cluster_frames(means, trees // size, frames, self.budget)
        anchor = trees[center]
        order = anchor.argsort(kind="stable") if self.order == "raster" else np.arange(len(center))
        position = np.full(len(center) + 1, -1)
        position[order] = np.arange(len(center))
        assigned = position[label[tree]]
        sources = assigned.argsort(kind="stable")[(assigned < 0).sum() :]
        trees_of = np.bincount(label[label >= 0], minlength=len(center))
        weight = 1 / (np.bincount(tree)[tree] * trees_of[label[tree]])
        lengths = np.bincount(assigned[sources], minlength=len(center))
        return Reduction(
            sources=torch.from_numpy(sources),
            weights=torch.from_numpy(weight[sources]).float(),
            offsets=offsets_from_lengths(lengths.tolist()),
            anchor=torch.from_numpy(anchor[order]),
            concept=torch.full((len(center),), -1),
            role=("primary",) * len(center),
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(lengths).float(),
            **tokens.layout,
        )

    def _roots(self, x: Tensor) -> Ints:
        """Return the first patch of the tree of each patch, shape (frames, patches)."""
        frames, size, _ = x.shape
        index = np.arange(frames * size).reshape(frames, size)
        previous, nearness = index.copy(), np.full((frames, size), -np.inf)
        unit, first = unit_vectors(x.reshape(frames * size, -1)).view_as(x), segment_starts(x, self.cut, self.segments)
        for frame in range(1, frames):
            if not first[frame]:
                cosine = round_cosines(unit[frame] @ unit[frame - 1].T)
                best = cosine.argmax(1)  # the first of equals
                previous[frame] = (frame - 1) * size + best.numpy()
                nearness[frame] = cosine.gather(1, best[:, None])[:, 0].numpy()
        linked = nearness > self.tau
        if self.budget is not None and frames * size - int(linked.sum()) < self.budget:
            strongest = np.where(linked, -nearness, np.inf).argsort(axis=None, kind="stable")
            linked = np.zeros(frames * size, np.bool_)
            linked[strongest[: frames * size - self.budget]] = True
            linked = linked.reshape(frames, size)
        root = index.copy()
        for frame in range(1, frames):
            root[frame] = np.where(linked[frame], root.reshape(-1)[previous[frame]], index[frame])
        return root


def segment_starts(x: Tensor, cut: float, segments: int) -> NDArray[np.bool_]:
    """Return which frames begin a segment, for patches of shape (frames, patches, D)."""
    unit = unit_vectors(x.mean(1))
    cosine = round_cosines((unit[1:] * unit[:-1]).sum(1)).numpy()
    first = np.concatenate([[True], cosine < cut])
    missing = segments - int(first.sum())
    if missing > 0:
        others = np.where(first[1:], np.inf, cosine).argsort(kind="stable")[:missing]
        first[1 + others] = True
    return first


def cluster_frames(means: Tensor, frame: Ints, frames: int, budget: int) -> tuple[Ints, Ints]:
    """Cluster the trees that begin in the same frame, ``budget`` clusters in all.

    Returns
    -------
    label : array of shape (trees,)
        Cluster of each tree; −1 for those of frames that get no cluster.
    center : array of shape (budget,)
        The tree at the center of each cluster.
    """
    begins = np.bincount(frame, minlength=frames)
    counts = share_out(begins * budget / len(frame), budget, begins)
    label, centers = np.full(len(frame), -1), list[Ints]()
    found = 0
    for number in np.flatnonzero(counts).tolist():
        here = np.flatnonzero(frame == number)
        cluster, center = density_peaks(means[torch.from_numpy(here)], int(counts[number]))
        label[here] = cluster + found
        centers.append(here[center])
        found += len(center)
    return label, np.concatenate(centers)


def density_peaks(x: Tensor, clusters: int) -> tuple[Ints, Ints]:
    """Cluster rows by density peaks; return the cluster of each row, and the centers in order of their scores.

    Examples
    --------
    >>> label, center = density_peaks(torch.tensor([[0.0], [0.3], [5.0], [5.1]]), 2)
    >>> label.tolist(), center.tolist()
    ([1, 1, 0, 0], [2, 0])
    """
    square = (x * x).sum(1)
    distance = (square[:, None] + square - 2 * (x @ x.T)).clamp_(min=0).fill_diagonal_(0).double()
    step = float(distance.max()) / ROUNDING
    distance = ((distance / step).round() * step if step else distance) / x.shape[1]
    nearest = distance.topk(min(clusters, NEIGHBORS, len(x)), largest=False).values
    density = (-nearest.mean(1)).exp().round(decimals=12)
    distance, index = distance.sqrt(), torch.arange(len(x))
    denser = (density[None] > density[:, None]) | ((density[None] == density[:, None]) & (index < index[:, None]))
    apart = distance.masked_fill(~denser, float(distance.max())).amin(1)
    center = (apart * density).argsort(descending=True, stable=True)[:clusters]
    label = distance[:, center].argmin(1)
    label[center] = torch.arange(clusters)
    return label.numpy(), center.numpy()
