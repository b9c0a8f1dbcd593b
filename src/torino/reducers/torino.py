"""TORINO: patches that share concepts become one token, by pruning (P) or merging (M).

TORINO: Token Reduction via Interpretable Concept Overlap in Vision-Language Models (Renzulli et al.), Section 3
and Algorithms 1 and 2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.concepts import ConceptEncoder, Concepts, Rank
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.grouping import Groups, Ints, Silent, group_by_overlap, shared_concepts
from torino.core.ragged import offsets_of
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers._checks import check_choice, check_count, check_encoder
from torino.reducers.base import Reducer, register

Order = Literal["raster", "native"]
Scale = Literal["log", "mean", "sqrt", "sum"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Torino(Reducer):
    """What TORINO-P and TORINO-M share: concepts, groups, and the fixed budget of Algorithm 2."""

    sae: ConceptEncoder
    k: int = 2
    delta: int = 2
    budget: int | None = None
    order: Order = "raster"
    silent: Silent = "group"
    rank: Rank = "activation"

    always_shown: ClassVar[tuple[str, ...]] = ("k", "delta")
    paper: ClassVar[str] = "Renzulli et al., TORINO, WACV 2027"
    adaptive: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N·D·C), the SAE"
    original_licence: ClassVar[str] = "no code found"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("k", self.k)
        check_count("delta", self.delta)
        check_count("budget", 1 if self.budget is None else self.budget)
        if self.budget is not None and self.budget > 2**31:
            raise BadParameter(f"budget must be a number of tokens that fits into memory, got {self.budget}.")
        if self.delta > self.k:
            raise BadParameter(
                f"delta must be between 1 and k={self.k}, got {self.delta}: "
                "patches cannot share more concepts than each one keeps."
            )
        check_choice("order", self.order, Order)
        check_choice("silent", self.silent, Silent)
        check_choice("rank", self.rank, Rank)
        check_encoder(self.sae)

    @abstractmethod
    def pool(self, representative: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which patches padding may draw from (Eq. 12), given which ones represent a group."""

    @abstractmethod
    def weigh(self, size: Ints) -> Floats | None:
        """Weight of each member of groups of that size; None where only the representative is kept."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images at once: one pass of the SAE, one grouping."""
        packed = ragged_patches(images)
        for tokens in images:
            self.sae.check_origin(tokens.origin, tokens.width)
        with stage("sae"):
            concepts = self.sae.top(packed.values, self.k, rank=self.rank)
            concepts = Concepts(concepts.indices.cpu(), concepts.values.cpu(), concepts.peak.cpu())
        with stage("grouping"):
            groups = group_by_overlap(concepts, self.delta, silent=self.silent, offsets=packed.offsets)
            return self.reduce_groups(concepts, groups, [tokens.grid for tokens in images])

    def reduce_groups(self, concepts: Concepts, groups: Groups, grids: Sequence[tuple[int, int]]) -> ReductionBatch:
        """Turn groups into output tokens (Algorithm 1, lines 9-16; Algorithm 2 where there is a budget)."""
        label, size, peak = groups.label.numpy(), groups.sizes.numpy(), concepts.peak.double().numpy()
        lengths = np.array([rows * columns for rows, columns in grids])
        start = np.concatenate([[0], lengths.cumsum()])
        group_image = np.repeat(np.arange(len(grids)), groups.counts.numpy())
        patch_image = np.repeat(np.arange(len(grids)), lengths)

        members = np.lexsort((-peak, label))  # stable: within a group by falling peak, ties by rising patch
        first = size.cumsum() - size
        leader = members[first]  # i*_g, Eq. 9
        kept = self._keep(size, group_image)
        padding = self._pad(peak, leader, patch_image, groups.counts.numpy())

        # One row per output token, then the order the language model will see them in.
        anchor = np.concatenate([leader[kept], padding])
        is_pad = np.arange(len(anchor)) >= len(kept)
        # "native" is as Algorithm 2 writes them, image by image: groups, then padding by falling peak
        order = np.lexsort((is_pad, anchor if self.order == "raster" else patch_image[anchor]))
        anchor, is_pad = anchor[order], is_pad[order]
        group = np.concatenate([kept, label[padding]])[order]
        image = patch_image[anchor]

        weight = self.weigh(size)
        merged = ~is_pad & (weight is not None)
        count = np.where(merged, size[group], 1)
        offsets = np.concatenate([[0], count.cumsum()])
        row = np.repeat(np.arange(len(anchor)), count)
        if weight is None:
            sources, weights = anchor, np.ones(len(anchor))
        else:
            rising = np.lexsort((np.arange(len(label)), label))  # members of a group in raster order
            within = np.arange(len(row)) - offsets[:-1][row]
            entry = np.minimum(first[group[row]] + within, len(rising) - 1)
            sources = np.where(merged[row], rising[entry], anchor[row])
            weights = np.where(merged[row], weight[group[row]], 1.0)

        token_of_group = np.full(len(size), -1)
        token_of_group[group[~is_pad]] = np.flatnonzero(~is_pad)
        assigned = token_of_group[label]
        if weight is None:
            assigned[anchor] = np.arange(len(anchor))  # a padded patch is kept, so it stands for itself
        shared = shared_concepts(concepts, groups).numpy()
        concept = np.where(is_pad, concepts.indices[:, 0].numpy()[anchor], shared[group])

        row_split = np.searchsorted(image, np.arange(len(grids) + 1))
        reductions: list[Reduction] = []
        for i, grid in enumerate(grids):
            rows = slice(row_split[i], row_split[i + 1])
            entries = slice(offsets[row_split[i]], offsets[row_split[i + 1]])
            mine = assigned[start[i] : start[i + 1]]
            reductions.append(
                Reduction(
                    sources=torch.from_numpy(sources[entries] - start[i]),
                    weights=torch.from_numpy(weights[entries]).float(),
                    offsets=offsets_of(count[rows].tolist()),
                    anchor=torch.from_numpy(anchor[rows] - start[i]),
                    concept=torch.from_numpy(concept[rows]),
                    role=tuple(np.where(is_pad[rows], "padding", "primary").tolist()),
                    grid=grid,
                    by=self.spec,
                    assigned=torch.from_numpy(np.where(mine >= 0, mine - row_split[i], -1)),
                    score=torch.from_numpy(peak[anchor[rows]]).float(),
                )
            )
        return ReductionBatch.of(reductions)

    def _keep(self, size: Ints, image: Ints) -> Ints:
        """Truncation: the ``budget`` largest groups of each image, ties to the first (Eq. 11)."""
        if self.budget is None:
            return np.arange(len(size))
        order = np.lexsort((-size, image))
        kept = order[_rank(image[order]) < self.budget]
        return np.sort(kept)

    def _pad(self, peak: Floats, leader: Ints, image: Ints, groups: Ints) -> Ints:
        """Padding: the patches of the pool with the highest peaks, as many as each image lacks."""
        if self.budget is None:
            return np.empty(0, np.int64)
        is_leader = np.zeros(len(peak), np.bool_)
        is_leader[leader] = True
        pool = np.flatnonzero(self.pool(is_leader))
        lacks = np.maximum(self.budget - groups, 0)
        supply = np.bincount(image[pool], minlength=len(groups))
        if (lacks > supply).any():
            i = int(np.flatnonzero(lacks > supply)[0])
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens for image {i}: its {int(groups[i])} groups and "
                f"{int(supply[i])} patches to pad with make {int(groups[i] + supply[i])} at most. Lower the budget."
            )
        order = pool[np.lexsort((-peak[pool], image[pool]))]
        return order[_rank(image[order]) < lacks[image[order]]]


@register("torino-p")
@dataclass(frozen=True)
class TorinoPrune(Torino):
    """Keep the patch with the highest peak activation of each concept group (TORINO-P).

    Patches that share at least ``delta`` of their ``k`` strongest concepts are linked; of each connected
    group the patch with the highest a(i) is kept unchanged (Eq. 9; ties to the lowest index).

    Parameters
    ----------
    sae : ConceptEncoder
        An SAE, or ``RawEmbedding()`` for the paper's no-SAE ablation.
    k, delta : int
        Concepts kept per patch, and how many of them linked patches share; 1 ≤ delta ≤ k.
    budget : int, optional
        Exactly this many tokens (Algorithm 2): the largest groups if there are more, padding with the
        patches of highest a(i) that are not kept already if there are fewer. At most N. Without it the image
        decides.
    order : {"raster", "native"}
        Output by place of the kept patch, or groups in order of appearance, then padding by falling a(i).
        The paper leaves the order open; raster keeps the reading order the language model was trained on.
    silent : {"group", "keep", "literal"}
        What becomes of patches with fewer than k active concepts, see :func:`torino.group_by_overlap`.
    rank : {"activation", "pre-threshold"}
        Rank concepts by the SAE's activations, or before its threshold silences any.
    """

    def pool(self, representative: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Every patch that is not kept already."""
        return ~representative

    def weigh(self, size: Ints) -> Floats | None:
        """Keep the representative alone."""
        return None


@register("torino-m")
@dataclass(frozen=True)
class TorinoMerge(Torino):
    """Merge each concept group into one token, its log-size-rescaled mean (TORINO-M).

    Patches that share at least ``delta`` of their ``k`` strongest concepts are linked; each connected group
    G becomes (1 + ln|G|)/|G| times the sum of its patches (Eq. 10), in the place of its patch with the highest
    a(i).

    Parameters
    ----------
    sae, k, delta, order, silent, rank
        As for ``torino-p``.
    budget : int, optional
        Exactly this many tokens (Algorithm 2). Merged tokens are virtual, so padding may draw on every patch,
        and up to G + N tokens can be had.
    scale : {"log", "mean", "sqrt", "sum"}
        Factor on the sum of a group of n patches: (1 + ln n)/n as in the paper, 1/n, 1/√n, or 1.
    """

    scale: Scale = "log"
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        super().__post_init__()
        check_choice("scale", self.scale, Scale)

    def pool(self, representative: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Every patch."""
        return np.ones_like(representative)

    def weigh(self, size: Ints) -> Floats | None:
        """Weight of each member, by the size of its group."""
        n = size.astype(np.float64)
        factors: dict[str, Any] = {"log": (1 + np.log(n)) / n, "mean": 1 / n, "sqrt": n**-0.5, "sum": np.ones_like(n)}
        return factors[self.scale]


def _rank(sorted_keys: Ints) -> Ints:
    """Position of each entry among those with the same key; equal keys stand together."""
    positions = np.arange(len(sorted_keys))
    starts = np.searchsorted(sorted_keys, sorted_keys)
    return positions - starts
