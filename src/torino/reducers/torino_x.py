"""TORINO-X: select patches that cover all others, by the overlap of sparse codes and by distance.

This method extends the paper. The research reports describe the effect of each design choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.concepts import ConceptEncoder, Concepts
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.grouping import Groups, Ints, shared_concepts
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers._checks import check_choice, check_count, check_encoder, check_flag, check_number
from torino.reducers.base import Order, PositionMode, Reducer, register

Mode = Literal["merge", "prune"]
Floats = NDArray[np.float32]
TIE = 1e-4  # in patches: gains that differ by less count as equal, for any order of summation, and smaller ones as 0


@register("torino-x")
@dataclass(frozen=True)
class TorinoX(Reducer):
    """Select patches one by one so that their concepts cover all other patches (TORINO-X).

    Each patch has a sparse code: its ``concepts`` strongest latents as a vector of length 1. The overlap o(i, j) of two
    patches is the product of their codes times exp(−d²/2r²), where d is their distance in patches and r = ``locality``
    · √N, since the same concept far away belongs to another object. A set S of patches covers
    f(S) = Σ_j w_j · max_{i∈S} o(i, j), at most N, where w_j = a(j) divided by its mean weights a patch by its peak
    activation. The patch that adds most to f is selected, then the next, until the budget is full or the next patch
    would add less than ``min_gain``. A smaller budget selects a prefix of a larger one. Gains never increase, so the
    number of tokens changes gradually with ``min_gain``, and a simple image is covered sooner. Ties go to the lowest
    index.

    The score of a token is its gain. It stands for the patches that overlap more with it than with any other selected
    patch. Its value is the sum of these patches weighted by overlap, scaled to the length of the selected patch, at the
    position of that patch. A patch with (almost) no overlap with any selected patch is not part of any token.

    Reads the patches. In contrast to the paper, codes and their overlap replace the top-k sets and δ, and a budget
    keeps the patches that add most coverage instead of the largest groups.

    Parameters
    ----------
    sae : ConceptEncoder
        An SAE, or ``RawEmbedding()`` for none.
    budget : int, optional
        Exact number of tokens, at most N. By default it depends on the image.
    min_gain : float
        Without a budget: the minimal gain of a token, in patches.
        :func:`torino.reducers.calibration.calibrate_cover` finds it for an average number of tokens.
    pooled : bool
        The budget is an average: images that are planned together share it by gain, and each keeps at least one token.
        Plans then depend on the batch; a single image gets the budget.
    concepts : int
        Number of latents of a code.
    locality : float, optional
        Distance at which overlap decays, as a share of the side of a square image. None: overlap does not depend on
        distance.
    mode : {"merge", "prune"}
        Merge as above, or keep the selected patches unchanged.
    order : {"raster", "native"}
        Output by position, or in order of selection.
    positions : {"original", "compact"}
        Position ids of the tokens in the prompt: those of their patches, which tell the language model where each token
        is, or consecutive as in the paper and most methods. Models with a position for every patch (Qwen) ignore it.
    proportional : bool
        Whether to use proportional attention in the language model, if the model supports it
        (:mod:`torino.vlm.attention`).
    """

    sae: ConceptEncoder
    budget: int | None = None
    min_gain: float = 0.5
    pooled: bool = False
    concepts: int = 8
    locality: float | None = 0.2
    mode: Mode = "merge"
    order: Order = "raster"
    positions: PositionMode = "original"
    proportional: bool = True

    paper: ClassVar[str] = "ours, beyond the TORINO paper"
    always_shown: ClassVar[tuple[str, ...]] = ("locality", "proportional")
    adaptive: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N·D·C + B·N²) at worst"
    original_license: ClassVar[str] = "ours"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", 1 if self.budget is None else self.budget)
        check_count("concepts", self.concepts)
        check_number("min_gain", self.min_gain)
        check_number("locality", 1.0 if self.locality is None else self.locality)
        if self.locality == 0:
            raise BadParameter("locality must be above 0, got 0: no two patches would overlap. Use None for no limit.")
        check_flag("pooled", self.pooled)
        if self.pooled and self.budget is None:
            raise BadParameter("pooled=True shares a budget among images, so it needs budget=..., got None.")
        check_choice("mode", self.mode, Mode)
        check_choice("order", self.order, Order)
        check_choice("positions", self.positions, PositionMode)
        check_flag("proportional", self.proportional)
        check_encoder(self.sae)

    @property
    def position_mode(self) -> PositionMode:
        """Position ids of the tokens in the prompt."""
        return self.positions

    @property
    def proportional_attention(self) -> bool:
        """Whether to use proportional attention."""
        return self.proportional

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share one budget."""
        return self.pooled

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images with one pass of the SAE; then select for each image, twice if they share a budget."""
        concepts = self._encode(images)
        with stage("grouping"):
            limits = self._token_limits(images, concepts)
            return ReductionBatch.of([self._plan(*args) for args in zip(images, concepts, limits, strict=True)])

    def gains(self, images: Sequence[VisualTokens]) -> list[Floats]:
        """Return for each image the gains of all N tokens, descending; ``min_gain`` is compared with them."""
        return [self._all_gains(*args) for args in zip(images, self._encode(images), strict=True)]

    def top_concepts(self, patches: Tensor, count: int) -> Concepts:
        """Return the ``count`` strongest concepts of each patch."""
        return self.sae.top(patches, count)

    def patch_weights(self, concepts: Concepts) -> Floats:
        """Return the weight of each patch in the coverage, 1 on average and 0 for patches without active concepts."""
        return relative_peaks(concepts.peak.double().numpy()).astype(np.float32)

    def select(
        self, image: VisualTokens, concepts: Concepts, overlap: Floats, max_tokens: int, min_gain: float
    ) -> tuple[Ints, Floats]:
        """Return the selected patches in order of selection and their gains."""
        return greedy_coverage(overlap, self.patch_weights(concepts), max_tokens, min_gain)

    def _all_gains(self, image: VisualTokens, concepts: Concepts) -> Floats:
        return self.select(image, concepts, self._overlap(image, concepts), len(concepts), 0.0)[1]

    def _encode(self, images: Sequence[VisualTokens]) -> list[Concepts]:
        packed = ragged_patches(images)
        for tokens in images:
            self.sae.check_origin(tokens.origin, tokens.width)
        with stage("sae"):
            count = min(self.concepts, int(getattr(self.sae, "latents", packed.values.shape[1])))
            concepts = self.top_concepts(packed.values, count)
            lengths = [len(tokens) for tokens in images]
            parts = [part.cpu().split(lengths) for part in (concepts.indices, concepts.values, concepts.peak)]
            return [Concepts(*part) for part in zip(*parts, strict=True)]

    def _overlap(self, image: VisualTokens, concepts: Concepts) -> Floats:
        overlap = code_overlap(concepts)
        return overlap if self.locality is None else apply_locality(overlap, image.grid, self.locality)

    def _token_limits(self, images: Sequence[VisualTokens], concepts: Sequence[Concepts]) -> list[int]:
        """Return the maximal number of tokens of each image; with a budget, the exact number."""
        sizes = [len(image) for image in images]
        if self.budget is None:
            return sizes
        if self.pooled:
            return self._divide_budget(images, concepts, self.budget * len(images), sum(sizes))
        for number, size in enumerate(sizes):
            if self.budget > size:
                raise UnmetBudget(
                    f"{self.name} cannot give {self.budget} tokens for image {number}, which has {size} patches. "
                    "Lower the budget."
                )
        return [self.budget] * len(images)

    def _divide_budget(
        self, images: Sequence[VisualTokens], concepts: Sequence[Concepts], total: int, available: int
    ) -> list[int]:
        """Divide a total number of tokens among images by gain; equal gains are served in turn."""
        if total > available:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens per image: {len(images)} images with a total budget of "
                f"{total} have only {available} patches. Lower the budget."
            )
        gains = [self._all_gains(*args) for args in zip(images, concepts, strict=True)]
        image = np.repeat(np.arange(len(gains)), [len(values) for values in gains])
        rank = np.concatenate([np.arange(len(values)) for values in gains])
        gain = np.where(rank == 0, np.inf, np.concatenate(gains))  # the first token of each image is always kept
        taken = np.lexsort((image, rank, -gain))[:total]
        return np.bincount(image[taken], minlength=len(gains)).tolist()

    def _plan(self, image: VisualTokens, concepts: Concepts, max_tokens: int) -> Reduction:
        overlap = self._overlap(image, concepts)
        min_gain = self.min_gain if self.budget is None else 0.0
        kept, gains = self.select(image, concepts, overlap, max_tokens, min_gain)
        order = np.argsort(kept) if self.order == "raster" else np.arange(len(kept))
        kept, gains = kept[order], gains[order]
        assigned = np.where(overlap[kept].max(0) > TIE, overlap[kept].argmax(0), -1)
        assigned[kept] = np.arange(len(kept))
        sources, row, size = kept, np.arange(len(kept)), np.ones(len(kept), np.int64)
        weight = np.ones(len(kept), np.float32)
        if self.mode == "merge":
            from scipy.sparse import csr_array

            sources = np.lexsort((np.arange(len(assigned)), assigned))[(assigned < 0).sum() :]
            row = assigned[sources]
            size, weight = np.bincount(row, minlength=len(kept)), overlap[kept[row], sources]
            values = image.patches.detach().float().cpu().numpy()
            length = np.linalg.norm(csr_array((weight, (row, sources)), (len(kept), len(values))) @ values, axis=1)
            weight *= (np.linalg.norm(values[kept], axis=1) / np.maximum(length, 1e-12))[row]
        label = torch.from_numpy(np.where(assigned < 0, len(kept), assigned))
        groups = Groups(label, label.bincount(minlength=len(kept) + 1), torch.tensor([0, len(kept) + 1]))
        return Reduction(
            sources=torch.from_numpy(sources),
            weights=torch.from_numpy(weight),
            offsets=offsets_from_lengths(size.tolist()),
            anchor=torch.from_numpy(kept),
            concept=shared_concepts(concepts, groups)[: len(kept)],
            role=("primary",) * len(kept),
            grid=image.grid,
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(gains),
        )


def relative_peaks(peak: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return peak activations divided by their mean, or ones if there is no activation."""
    positive = peak.clip(min=0)
    return positive / positive.mean() if positive.any() else np.ones_like(positive)


def code_overlap(concepts: Concepts) -> Floats:
    """Return the product of the normalized codes of all pairs of patches, (N, N): 1 if equal, 0 if disjoint."""
    from scipy.sparse import csr_array  # imported here so that importing torino stays fast

    index, value = concepts.indices.numpy(), concepts.values.numpy()
    active = (index >= 0) & (value > 0)  # raw coordinates may be negative
    value = value[active]
    _, column = np.unique(index[active], return_inverse=True)
    row = np.repeat(np.arange(len(index)), active.sum(1))
    norm = np.sqrt(np.bincount(row, value.astype(np.float64) ** 2, len(index))).astype(np.float32)
    codes = csr_array((value / norm[row], (row, column)), shape=(len(index), int(column.max(initial=0)) + 1))
    overlap: Floats = (codes @ codes.T).toarray()
    silent = np.flatnonzero(~active.any(1))
    overlap[np.ix_(silent, silent)] = 1.0  # patches without active concepts count as equal
    np.fill_diagonal(overlap, 1.0)
    return overlap


def apply_locality(overlap: Floats, grid: tuple[int, int], locality: float) -> Floats:
    """Multiply overlaps by exp(−d²/2r²) at a distance of d patches, with r = locality · √N."""
    # d² is the sum over rows and columns, so the factor is a product of two small ones
    with np.errstate(over="ignore"):  # for an extremely small or large locality
        distances = [np.subtract.outer(np.arange(n), np.arange(n)) / (locality * np.sqrt(len(overlap))) for n in grid]
        rows, columns = (np.exp(-0.5 * distance**2).astype(np.float32) for distance in distances)
    pairs = overlap.reshape(*grid, *grid) * rows[:, None, :, None]
    pairs *= columns[None, :, None, :]
    return pairs.reshape(overlap.shape)


def greedy_coverage(overlap: Floats, weight: Floats, max_patches: int, min_gain: float) -> tuple[Ints, Floats]:
    """Select patches one by one, each of which adds most to Σ_j weight(j) · max over selected i of overlap(i, j).

    Parameters
    ----------
    overlap : array of shape (N, N)
        Symmetric.
    weight : array of shape (N,)
    max_patches : int
    min_gain : float
        Stop before a gain below this value; the first patch is always selected.

    Returns
    -------
    selected, gains : arrays of shape (M,)
        M is at most ``max_patches``.
    """
    gain = (overlap * weight).sum(1, dtype=np.float64)
    coverage = np.zeros(len(overlap), np.float32)
    selected, gains = np.empty(max_patches, np.int64), np.empty(max_patches, np.float32)
    for step in range(max_patches):
        highest = gain.max()
        step_gain = highest if highest > TIE else 0.0
        if step and step_gain < min_gain - TIE:
            return selected[:step], np.minimum.accumulate(gains[:step])
        best = int((gain >= highest - TIE).argmax())
        selected[step], gains[step] = best, step_gain
        best_overlap = overlap[best]
        improved = np.flatnonzero(best_overlap > coverage)
        # Only the coverage of these patches increases. The part of each possible gain that lies between the old and the
        # new coverage is lost. The overlap is symmetric, so rows can be used instead of columns.
        lost, old_coverage = overlap[improved], coverage[improved, None]
        np.maximum(lost, old_coverage, out=lost)
        np.minimum(lost, best_overlap[improved, None], out=lost)
        lost -= old_coverage
        lost *= weight[improved, None]
        gain -= lost.sum(0, dtype=np.float64)
        coverage[improved] = best_overlap[improved]
        gain[best] = -np.inf
    return selected, np.minimum.accumulate(gains)
