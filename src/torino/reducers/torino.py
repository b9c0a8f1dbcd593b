"""TORINO: reduce patches that share concepts to one token, by pruning (P) or merging (M).

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
from torch import Tensor

from torino.core.concepts import ConceptEncoder, Concepts, Rank
from torino.core.device_grouping import device_groups, device_shared_concepts
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.frames import Layout
from torino.core.grouping import Groups, Ints, Silent, group_by_overlap, shared_concepts
from torino.core.placement import Place, place_merged
from torino.core.planner import plans_with_torch
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers._checks import check_choice, check_count, check_encoder
from torino.reducers.base import Order, Reducer, register
from torino.reducers.device import DevicePlan, group_plan, plan_on_device

Scale = Literal["log", "mean", "sqrt", "sum"]
Floats = NDArray[np.float64]
MAX_BUDGET = 2**31


@dataclass(frozen=True)
class TorinoBase(Reducer):
    """Common part of TORINO-P and TORINO-M: concepts, groups, and the fixed budget of Algorithm 2."""

    sae: ConceptEncoder
    k: int = 2
    delta: int = 2
    budget: int | None = None
    order: Order = "raster"
    silent: Silent = "group"
    rank: Rank = "activation"

    always_shown: ClassVar[tuple[str, ...]] = ("k", "delta")
    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "Renzulli et al., TORINO, WACV 2027"
    adaptive: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N·D·C), the SAE"
    original_license: ClassVar[str] = "no code found"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("k", self.k)
        check_count("delta", self.delta)
        check_count("budget", 1 if self.budget is None else self.budget)
        if self.budget is not None and self.budget > MAX_BUDGET:
            raise BadParameter(f"budget must be at most {MAX_BUDGET} tokens, got {self.budget}.")
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
    def padding_pool(self, is_representative: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which patches can be used for padding (Eq. 12)."""

    @abstractmethod
    def member_weights(self, size: Ints) -> Floats | None:
        """Return the weight of each member of groups of the given sizes; None if only the representative is kept."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images at once, with one pass of the SAE and one grouping."""
        packed = ragged_patches(images)
        for tokens in images:
            self.sae.check_origin(tokens.origin, tokens.width)
        if plans_with_torch(packed.values.device):
            with stage("sae"):  # encoding and grouping are one sequence of operations on the device
                batch = plan_on_device(self, images)
            if batch is not None:
                return batch
        with stage("sae"):
            concepts = self.sae.top(packed.values, self.k, rank=self.rank)
            concepts = Concepts(concepts.indices.cpu(), concepts.values.cpu(), concepts.peak.cpu())
        with stage("grouping"):
            groups = group_by_overlap(concepts, self.delta, silent=self.silent, offsets=packed.offsets)
            return self.reduce_groups(concepts, groups, [tokens.layout for tokens in images])

    def device_rule(self, grid: tuple[int, int], latents: int, device: torch.device) -> tuple[int, Rank, Any] | None:
        """Return the number of concepts, their rank and the rule for planning on a device; None if unsupported."""
        patches = grid[0] * grid[1]
        if self.budget is not None and self.budget > patches:
            return None
        weights = self.member_weights(np.arange(1, patches + 1))
        table = None if weights is None else torch.from_numpy(np.concatenate([[0.0], weights])).float().to(device)

        def rule(_: Tensor, indices: Tensor, values: Tensor, exact: Tensor) -> DevicePlan:
            images, n, k = indices.shape
            sets = indices
            if self.silent == "literal":
                flat = values.view(-1, k)
                sets = Concepts(indices.view(-1, k), flat, flat[:, 0]).literal().indices.view(images, n, k)
            label = device_groups(sets, self.delta, max(latents, self.k), self.silent)
            shared = device_shared_concepts(indices, values, label, latents)
            return group_plan(indices, values, exact, label, shared, table, self.budget, self.order)

        return self.k, self.rank, rule

    def reduce_groups(self, concepts: Concepts, groups: Groups, layouts: Sequence[Layout]) -> ReductionBatch:
        """Turn groups into output tokens (Algorithm 1, lines 9-16; Algorithm 2 if there is a budget)."""
        label, size, peak = groups.label.numpy(), groups.sizes.numpy(), concepts.peak.double().numpy()
        lengths = np.array([layout["frames"] * layout["grid"][0] * layout["grid"][1] for layout in layouts])
        start = np.concatenate([[0], lengths.cumsum()])
        group_image = np.repeat(np.arange(len(layouts)), groups.counts.numpy())
        patch_image = np.repeat(np.arange(len(layouts)), lengths)

        members = np.lexsort((-peak, label))  # stable: within a group by descending peak, ties by ascending index
        first = size.cumsum() - size
        representative = members[first]  # i*_g, Eq. 9
        kept = self._largest_groups(size, group_image)
        padding = self._padding(peak, representative, patch_image, groups.counts.numpy())

        # One row per output token, then sorted into the output order.
        anchor = np.concatenate([representative[kept], padding])
        is_pad = np.arange(len(anchor)) >= len(kept)
        # "native" is the order of Algorithm 2, image by image: groups, then padding by descending peak
        order = np.lexsort((is_pad, anchor if self.order == "raster" else patch_image[anchor]))
        anchor, is_pad = anchor[order], is_pad[order]
        group = np.concatenate([kept, label[padding]])[order]
        image = patch_image[anchor]

        weight = self.member_weights(size)
        merged = ~is_pad & (weight is not None)
        count = np.where(merged, size[group], 1)
        offsets = np.concatenate([[0], count.cumsum()])
        row = np.repeat(np.arange(len(anchor)), count)
        if weight is None:
            sources, weights = anchor, np.ones(len(anchor))
        else:
            in_raster_order = np.lexsort((np.arange(len(label)), label))  # members group by group
            index_in_group = np.arange(len(row)) - offsets[:-1][row]
            entry = np.minimum(first[group[row]] + index_in_group, len(in_raster_order) - 1)
            sources = np.where(merged[row], in_raster_order[entry], anchor[row])
            weights = np.where(merged[row], weight[group[row]], 1.0)

        token_of_group = np.full(len(size), -1)
        token_of_group[group[~is_pad]] = np.flatnonzero(~is_pad)
        assigned = token_of_group[label]
        if weight is None:
            assigned[anchor] = np.arange(len(anchor))  # padding patches are kept, so they are assigned to themselves
        shared = shared_concepts(concepts, groups).numpy()
        concept = np.where(is_pad, concepts.indices[:, 0].numpy()[anchor], shared[group])

        row_split = np.searchsorted(image, np.arange(len(layouts) + 1))
        reductions: list[Reduction] = []
        for i, layout in enumerate(layouts):
            rows = slice(row_split[i], row_split[i + 1])
            entries = slice(offsets[row_split[i]], offsets[row_split[i + 1]])
            assigned_row = assigned[start[i] : start[i + 1]]
            reductions.append(
                Reduction(
                    sources=torch.from_numpy(sources[entries] - start[i]),
                    weights=torch.from_numpy(weights[entries]).float(),
                    offsets=offsets_from_lengths(count[rows].tolist()),
                    anchor=torch.from_numpy(anchor[rows] - start[i]),
                    concept=torch.from_numpy(concept[rows]),
                    role=tuple(np.where(is_pad[rows], "padding", "primary").tolist()),
                    by=self.spec,
                    assigned=torch.from_numpy(np.where(assigned_row >= 0, assigned_row - row_split[i], -1)),
                    score=torch.from_numpy(peak[anchor[rows]]).float(),
                    **layout,
                )
            )
        return ReductionBatch.of(reductions)

    def _largest_groups(self, size: Ints, image: Ints) -> Ints:
        """Return the ``budget`` largest groups of each image, ties to the first (truncation, Eq. 11)."""
        if self.budget is None:
            return np.arange(len(size))
        order = np.lexsort((-size, image))
        kept = order[_rank_among_equals(image[order]) < self.budget]
        return np.sort(kept)

    def _padding(self, peak: Floats, representative: Ints, image: Ints, num_groups: Ints) -> Ints:
        """Return the patches of the pool with the highest peaks, as many as each image needs to meet the budget."""
        if self.budget is None:
            return np.empty(0, np.int64)
        is_representative = np.zeros(len(peak), np.bool_)
        is_representative[representative] = True
        pool = np.flatnonzero(self.padding_pool(is_representative))
        missing = np.maximum(self.budget - num_groups, 0)
        supply = np.bincount(image[pool], minlength=len(num_groups))
        if (missing > supply).any():
            i = int(np.flatnonzero(missing > supply)[0])
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens for image {i}: it has {int(num_groups[i])} groups and "
                f"{int(supply[i])} patches for padding, {int(num_groups[i] + supply[i])} in total. Lower the budget."
            )
        order = pool[np.lexsort((-peak[pool], image[pool]))]
        return order[_rank_among_equals(image[order]) < missing[image[order]]]


@register("torino-p")
@dataclass(frozen=True)
class TorinoPrune(TorinoBase):
    """Keep the patch with the highest peak activation of each concept group (TORINO-P).

    Patches that share at least ``delta`` of their ``k`` strongest concepts are linked. Of each connected group the
    patch with the highest a(i) is kept unchanged (Eq. 9; ties to the lowest index).

    Parameters
    ----------
    sae : ConceptEncoder
        An SAE, or ``RawEmbedding()`` for the paper's no-SAE ablation.
    k, delta : int
        Number of concepts per patch, and how many of them linked patches share; 1 ≤ delta ≤ k.
    budget : int, optional
        Exact number of tokens, at most N (Algorithm 2). If there are more groups, the largest are kept. If there are
        fewer, the patches of highest a(i) that are not kept yet are added as padding. By default the number of tokens
        depends on the image.
    order : {"raster", "native"}
        Output by position of the kept patch, or groups in order of appearance, then padding by descending a(i). The
        paper does not specify the order; raster is the order in which the language model was trained.
    silent : {"group", "keep", "literal"}
        Treatment of patches with fewer than k active concepts, see :func:`torino.core.grouping.group_by_overlap`.
    rank : {"activation", "pre-threshold"}
        Rank concepts by the activations of the SAE, or by their values before its threshold.
    """

    def padding_pool(self, is_representative: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return all patches that are not kept yet."""
        return ~is_representative

    def member_weights(self, size: Ints) -> Floats | None:
        """Return None, since only the representative is kept."""
        return None


@register("torino-m")
@dataclass(frozen=True)
class TorinoMerge(TorinoBase):
    """Merge each concept group into one token, its mean scaled by 1 + ln(size) (TORINO-M).

    Patches that share at least ``delta`` of their ``k`` strongest concepts are linked. Each connected group G becomes
    (1 + ln|G|)/|G| times the sum of its patches (Eq. 10), at the position of its patch with the highest a(i).

    Parameters
    ----------
    sae, k, delta, order, silent, rank
        As for ``torino-p``.
    budget : int, optional
        Exact number of tokens (Algorithm 2). Merged tokens are virtual, so padding can use every patch, and up to
        G + N tokens are possible.
    scale : {"log", "mean", "sqrt", "sum"}
        Factor on the sum of a group of n patches: (1 + ln n)/n as in the paper, 1/n, 1/√n, or 1.
    place : {"anchor", "median", "first"}
        Where a merged token is: at its patch with the highest a(i) as in the paper, at the median frame, row and column
        of its patches, or at the median row and column of those in its first frame.
    """

    scale: Scale = "log"
    place: Place = "anchor"
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        super().__post_init__()
        check_choice("scale", self.scale, Scale)
        check_choice("place", self.place, Place)

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images at once, with one pass of the SAE and one grouping."""
        return place_merged(super().plan_batch(images), self.place)

    def padding_pool(self, is_representative: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return all patches."""
        return np.ones_like(is_representative)

    def member_weights(self, size: Ints) -> Floats | None:
        """Return the weight of each member, which depends on the size of its group."""
        n = size.astype(np.float64)
        factors: dict[str, Any] = {"log": (1 + np.log(n)) / n, "mean": 1 / n, "sqrt": n**-0.5, "sum": np.ones_like(n)}
        return factors[self.scale]


def _rank_among_equals(sorted_keys: Ints) -> Ints:
    """Return the index of each entry among the entries with the same key. Equal keys must be adjacent."""
    positions = np.arange(len(sorted_keys))
    starts = np.searchsorted(sorted_keys, sorted_keys)
    return positions - starts
