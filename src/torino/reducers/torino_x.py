"""TORINO-X: select patches that cover all others, by the overlap of sparse codes and by distance.

This method extends the paper. The research reports describe the effect of each design choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from torino.core.concepts import ConceptEncoder, Concepts, Rank
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.grouping import Groups, Ints, shared_concepts
from torino.core.placement import Place, place_merged
from torino.core.planner import plans_with_torch
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers._checks import check_choice, check_count, check_encoder, check_flag, check_number
from torino.reducers._device_coverage import coverage_plan
from torino.reducers._sparse_coverage import TIE, CodeIndex, Decay, Floats, sparse_coverage, time_factors
from torino.reducers.base import AttentionMode, Order, PositionMode, Reducer, register
from torino.reducers.device import plan_on_device

Mode = Literal["merge", "prune"]


@register("torino-x")
@dataclass(frozen=True)
class TorinoX(Reducer):
    """Select patches one by one so that their concepts cover all other patches (TORINO-X).

    Overlap: Each patch has a sparse code, its ``concepts`` strongest latents as a vector of length 1. The overlap
    o(i, j) of two patches is the dot product of their codes times exp(−d²/2r²). Here d is their distance in patches and
    r = ``locality`` · √N. The factor is there because the same concept far away belongs to another object.

    Coverage: A set S of patches covers f(S) = Σ_j w_j · max_{i∈S} o(i, j), at most N. The weight w_j is the peak
    activation a(j) of patch j, divided by the mean peak activation of the image.

    Selection: The gain of a patch is what it adds to f. The patch with the largest gain is selected, then the next one,
    until the budget is full or the next gain is below ``min_gain``. Ties go to the lowest index. A smaller budget
    selects a prefix of a larger one. Gains never increase, so the number of tokens changes gradually with ``min_gain``,
    and a simple image is covered sooner.

    Tokens: Each selected patch becomes a token, and the score of the token is its gain. Every other patch is assigned
    to the selected patch with which it overlaps most. A patch with (almost) no overlap with any selected patch is not
    part of any token. The value of a token is the sum of its patches weighted by overlap, scaled to the length of the
    selected patch. The token has the position of the selected patch.

    Related work: Original positions for reduced tokens are those of GAP (arXiv 2506.21873), proportional attention that
    of ToMe (inside a vision transformer), and RESTORE (arXiv 2606.01711) combines both in the language model with a
    calibration by distance. LLaVA-Scissor (arXiv 2506.21862, ``scissor``) also covers an image by groups of similar
    patches, without an SAE.

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
    time_locality : float, optional
        In a video, the number of frames over which overlap decays. None: overlap does not depend on time, and the cost
        grows with the square of the number of frames.
    mode : {"merge", "prune"}
        Merge as above, or keep the selected patches unchanged.
    order : {"raster", "native"}
        Output by position, or in order of selection.
    positions : {"original", "compact", "median"}
        Position ids of the tokens in the prompt: those of their patches, which tell the language model where each token
        is, consecutive as in the paper and most methods, or the median of their patches. Models with a position for
        every patch (Qwen) do not distinguish the first two.
    proportional : bool
        Whether to use proportional attention in the language model, if the model supports it
        (:mod:`torino.vlm.attention`).
    place : {"anchor", "median", "first"}
        Where a merged token is: at its selected patch, at the median frame, row and column of its patches, or at the
        median row and column of those in its first frame.
    """

    sae: ConceptEncoder
    budget: int | None = None
    min_gain: float = 0.5
    pooled: bool = False
    concepts: int = 8
    locality: float | None = 0.2
    time_locality: float | None = 4.0
    mode: Mode = "merge"
    order: Order = "raster"
    positions: PositionMode = "original"
    proportional: bool = True
    place: Place = "anchor"

    paper: ClassVar[str] = "ours, beyond the TORINO paper"
    always_shown: ClassVar[tuple[str, ...]] = ("locality", "proportional")
    adaptive: ClassVar[bool] = True
    takes_frames: ClassVar[bool] = True
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
        check_number("time_locality", 1.0 if self.time_locality is None else self.time_locality)
        if self.time_locality == 0:
            raise BadParameter(
                "time_locality must be above 0, got 0: no two frames would overlap. Use None for no limit."
            )
        check_flag("pooled", self.pooled)
        if self.pooled and self.budget is None:
            raise BadParameter("pooled=True shares a budget among images, so it needs budget=..., got None.")
        check_choice("mode", self.mode, Mode)
        check_choice("order", self.order, Order)
        check_choice("positions", self.positions, PositionMode)
        check_flag("proportional", self.proportional)
        check_choice("place", self.place, Place)
        check_encoder(self.sae)

    @property
    def position_mode(self) -> PositionMode:
        """Position ids of the tokens in the prompt."""
        return self.positions

    @property
    def attention_mode(self) -> AttentionMode:
        """Proportional attention, unless it is switched off."""
        return "proportional" if self.proportional else "plain"

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share one budget."""
        return self.pooled

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images with one pass of the SAE; then select for each image, twice if they share a budget."""
        if plans_with_torch(images[0].patches.device):
            ragged_patches(images)  # raises if the images do not fit together
            for tokens in images:
                self.sae.check_origin(tokens.origin, tokens.width)
            with stage("sae"):  # encoding and selection are one sequence of operations on the device
                batch = plan_on_device(self, images)
            if batch is not None:
                return place_merged(batch, self.place)
        codes = self._encode(images)
        with stage("grouping"):
            limits = self._token_limits(images, codes)
            batch = ReductionBatch.of([self._plan(*args) for args in zip(images, codes, limits, strict=True)])
            return place_merged(batch, self.place)

    def device_rule(self, grid: tuple[int, int], latents: int, device: torch.device) -> tuple[int, Rank, Any] | None:
        """Return the number of concepts, their rank and the rule for planning on a device; None if unsupported."""
        patches = grid[0] * grid[1]
        if self.pooled or type(self) is not TorinoX or (self.budget or 1) > patches:
            return None
        locality = None
        if self.locality is not None:
            rows, columns = locality_factors(grid, self.locality)
            locality = (torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device))
        rule = partial(
            coverage_plan,
            locality=locality,
            latents=latents,
            tokens=patches if self.budget is None else self.budget,
            min_gain=self.min_gain if self.budget is None else 0.0,
            tie=TIE,
            merge=self.mode == "merge",
            raster=self.order == "raster",
        )
        return min(self.concepts, latents), "activation", rule

    def gains(self, images: Sequence[VisualTokens]) -> list[Floats]:
        """Return for each image the gains of all N tokens, descending; ``min_gain`` is compared with them."""
        return [self._all_gains(*args) for args in zip(images, self._encode(images), strict=True)]

    def top_concepts(self, patches: Tensor, count: int) -> Concepts:
        """Return the ``count`` strongest concepts of each patch."""
        return self.sae.top(patches, count)

    def patch_weights(self, codes: Concepts) -> Floats:
        """Return the weight of each patch in the coverage, 1 on average and 0 for patches without active concepts."""
        return relative_peaks(codes.peak.double().numpy()).astype(np.float32)

    def select(
        self, image: VisualTokens, codes: Concepts, overlap: Floats, max_tokens: int, min_gain: float
    ) -> tuple[Ints, Floats]:
        """Return the selected patches in order of selection and their gains."""
        return greedy_coverage(overlap, self.patch_weights(codes), max_tokens, min_gain)

    def _all_gains(self, image: VisualTokens, codes: Concepts) -> Floats:
        if self._is_sparse(image):
            return self.cover_sparsely(image, codes, len(codes), 0.0)[1]
        return self.select(image, codes, self._overlap(image, codes), len(codes), 0.0)[1]

    def _encode(self, images: Sequence[VisualTokens]) -> list[Concepts]:
        packed = ragged_patches(images)
        for tokens in images:
            self.sae.check_origin(tokens.origin, tokens.width)
        with stage("sae"):
            count = min(self.concepts, int(getattr(self.sae, "latents", packed.values.shape[1])))
            codes = self.top_concepts(packed.values, count)
            lengths = [len(tokens) for tokens in images]
            parts = [part.cpu().split(lengths) for part in (codes.indices, codes.values, codes.peak)]
            return [Concepts(*part) for part in zip(*parts, strict=True)]

    def _overlap(self, image: VisualTokens, codes: Concepts) -> Floats:
        overlap = code_overlap(codes)
        if image.frames > 1:
            overlap = apply_time_locality(overlap, image.frames, self.time_locality)
        return overlap if self.locality is None else apply_locality(overlap, image.grid, self.locality)

    def _is_sparse(self, image: VisualTokens) -> bool:
        """Return whether overlaps are computed on demand; ablations can change the dense rule."""
        return image.frames > 1 and type(self) is TorinoX

    def cover_sparsely(
        self, image: VisualTokens, codes: Concepts, max_tokens: int, min_gain: float
    ) -> tuple[Ints, Floats, Ints, Floats]:
        """Select patches of a video; see :func:`torino.reducers._sparse_coverage.sparse_coverage`."""
        if self.locality is None:
            factors = [np.ones((n, n), np.float32) for n in image.grid]
        else:
            factors = list(locality_factors(image.grid, self.locality))
        decay = Decay(factors[0], factors[1], time_factors(image.frames, self.time_locality))
        index, raster = CodeIndex(unit_codes(codes, silent_column=True), decay), self.order == "raster"
        return sparse_coverage(index, self.patch_weights(codes), max_tokens, min_gain, lowest_first=raster)

    def _token_limits(self, images: Sequence[VisualTokens], codes: Sequence[Concepts]) -> list[int]:
        """Return the maximal number of tokens of each image; with a budget, the exact number."""
        sizes = [len(image) for image in images]
        if self.budget is None:
            return sizes
        if self.pooled:
            return self._divide_budget(images, codes, self.budget * len(images), sum(sizes))
        for number, size in enumerate(sizes):
            if self.budget > size:
                raise UnmetBudget(
                    f"{self.name} cannot give {self.budget} tokens for image {number}, which has {size} patches. "
                    "Lower the budget."
                )
        return [self.budget] * len(images)

    def _divide_budget(
        self, images: Sequence[VisualTokens], codes: Sequence[Concepts], total: int, available: int
    ) -> list[int]:
        """Divide a total number of tokens among images by gain; equal gains are served in turn."""
        if total > available:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens per image: {len(images)} images with a total budget of "
                f"{total} have only {available} patches. Lower the budget."
            )
        gains = [self._all_gains(*args) for args in zip(images, codes, strict=True)]
        image = np.repeat(np.arange(len(gains)), [len(values) for values in gains])
        rank = np.concatenate([np.arange(len(values)) for values in gains])
        gain = np.where(rank == 0, np.inf, np.concatenate(gains))  # the first token of each image is always kept
        taken = np.lexsort((image, rank, -gain))[:total]
        return np.bincount(image[taken], minlength=len(gains)).tolist()

    def _plan(self, image: VisualTokens, codes: Concepts, max_tokens: int) -> Reduction:
        kept, gains, assigned, share = self._cover(image, codes, max_tokens)
        if self.mode == "merge":
            sources, token, weight = _merge_patches(image.patches, share, kept, assigned)
        else:
            sources, token, weight = kept, np.arange(len(kept)), np.ones(len(kept), np.float32)
        return Reduction(
            sources=torch.from_numpy(sources),
            weights=torch.from_numpy(weight),
            offsets=offsets_from_lengths(np.bincount(token, minlength=len(kept)).tolist()),
            anchor=torch.from_numpy(kept),
            concept=_token_concepts(codes, assigned, len(kept)),
            role=("primary",) * len(kept),
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(gains),
            **image.layout,
        )

    def _cover(self, image: VisualTokens, codes: Concepts, max_tokens: int) -> tuple[Ints, Floats, Ints, Floats]:
        """Return the selected patches in output order, their gains, the token of each patch and the overlap with it."""
        min_gain = self.min_gain if self.budget is None else 0.0
        if self._is_sparse(image):
            kept, gains, owner, share = self.cover_sparsely(image, codes, max_tokens, min_gain)
            order = self._output_order(kept)
            token = np.full(len(image) + 1, -1)
            token[kept[order]] = np.arange(len(kept))
            return kept[order], gains[order], token[owner], share
        overlap = self._overlap(image, codes)
        kept, gains = self.select(image, codes, overlap, max_tokens, min_gain)
        order = self._output_order(kept)
        assigned = _assign_patches(overlap, kept[order])
        return kept[order], gains[order], assigned, overlap[kept[order][assigned], np.arange(len(assigned))]

    def _output_order(self, kept: Ints) -> Ints:
        return np.argsort(kept) if self.order == "raster" else np.arange(len(kept))


def _assign_patches(overlap: Floats, kept: Ints) -> Ints:
    """Return the token of each patch, the one with the largest overlap; −1 if the patch overlaps with none."""
    assigned = np.where(overlap[kept].max(0) > TIE, overlap[kept].argmax(0), -1)
    assigned[kept] = np.arange(len(kept))
    return assigned


def _merge_patches(patches: Tensor, share: Floats, kept: Ints, assigned: Ints) -> tuple[Ints, Ints, Floats]:
    """Return the patches that are merged, sorted by token, with the token and the weight of each.

    Weights are proportional to ``share``, the overlap of each patch with its selected patch. They are scaled so that
    the weighted sum has the length of the selected patch.
    """
    unassigned = (assigned < 0).sum()  # these come first in the sorted order
    sources = np.lexsort((np.arange(len(assigned)), assigned))[unassigned:]
    token = assigned[sources]
    weight = share[sources]
    values = patches.detach().float().cpu().numpy()
    length = np.linalg.norm(csr_array((weight, (token, sources)), (len(kept), len(values))) @ values, axis=1)
    weight *= (np.linalg.norm(values[kept], axis=1) / np.maximum(length, 1e-12))[token]
    return sources, token, weight


def _token_concepts(codes: Concepts, assigned: Ints, tokens: int) -> Tensor:
    """Return the concept that most patches of each token share, shape (tokens,)."""
    # Groups has no label for "no group", so unassigned patches form a dummy group, the last one, which is cut off.
    label = torch.from_numpy(np.where(assigned < 0, tokens, assigned))
    groups = Groups(label, label.bincount(minlength=tokens + 1), torch.tensor([0, tokens + 1]))
    return shared_concepts(codes, groups)[:tokens]


def relative_peaks(peak: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return peak activations divided by their mean, or ones if there is no activation."""
    positive = peak.clip(min=0)
    return positive / positive.mean() if positive.any() else np.ones_like(positive)


def unit_codes(codes: Concepts, *, silent_column: bool = False) -> csr_array:
    """Return the codes as rows of length 1, with one column for each latent that occurs.

    Rows of patches without active concepts are empty, or with ``silent_column`` share another column.
    """
    index, value = codes.indices.numpy(), codes.values.numpy()
    active = (index >= 0) & (value > 0)  # raw coordinates may be negative
    value = value[active]
    _, column = np.unique(index[active], return_inverse=True)
    row = np.repeat(np.arange(len(index)), active.sum(1))
    norm = np.sqrt(np.bincount(row, value.astype(np.float64) ** 2, len(index))).astype(np.float32)
    value, columns = value / norm[row], int(column.max(initial=0)) + 1
    if silent_column:
        silent = np.flatnonzero(~active.any(1))
        row, column = np.concatenate([row, silent]), np.concatenate([column, np.full(len(silent), columns)])
        value = np.concatenate([value, np.ones(len(silent), value.dtype)])
    return csr_array((value, (row, column)), shape=(len(index), columns + silent_column))


def code_overlap(codes: Concepts) -> Floats:
    """Return the product of the normalized codes of all pairs of patches, (N, N): 1 if equal, 0 if disjoint."""
    normalized = unit_codes(codes)
    overlap: Floats = (normalized @ normalized.T).toarray()
    silent = np.flatnonzero(np.diff(cast(Any, normalized).indptr) == 0)
    overlap[np.ix_(silent, silent)] = 1.0  # patches without active concepts count as equal
    np.fill_diagonal(overlap, 1.0)
    return overlap


def apply_locality(overlap: Floats, grid: tuple[int, int], locality: float) -> Floats:
    """Multiply overlaps by exp(−d²/2r²) at a distance of d patches, with r = locality · √N; N patches are a frame."""
    rows, columns = locality_factors(grid, locality)
    frames = len(overlap) // (grid[0] * grid[1])
    pairs = overlap.reshape(frames, *grid, frames, *grid) * rows[:, None, None, :, None]
    pairs *= columns[None, :, None, None, :]
    return pairs.reshape(overlap.shape)


def apply_time_locality(overlap: Floats, frames: int, time_locality: float | None) -> Floats:
    """Multiply overlaps by the factors of :func:`torino.reducers._sparse_coverage.time_factors`."""
    distance = np.abs(np.subtract.outer(np.arange(frames), np.arange(frames)))
    factors = time_factors(frames, time_locality)[distance]
    size = len(overlap) // frames
    pairs = overlap.reshape(frames, size, frames, size) * factors[:, None, :, None]
    return pairs.reshape(overlap.shape)


def locality_factors(grid: tuple[int, int], locality: float) -> tuple[Floats, Floats]:
    """Return exp(−d²/2r²) for distances between rows and between columns; their product is the factor."""
    with np.errstate(over="ignore"):  # for an extremely small or large locality
        radius = locality * np.sqrt(grid[0] * grid[1])
        distances = [np.subtract.outer(np.arange(n), np.arange(n)) / radius for n in grid]
        rows, columns = (np.exp(-0.5 * distance**2).astype(np.float32) for distance in distances)
    return rows, columns


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
