"""TORINO-X: a few patches that cover all others, by the overlap of whole sparse codes and by place.

Beyond the paper; ``docs/beyond.md`` has what each choice was measured to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.concepts import ConceptEncoder, Concepts, Rank
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.grouping import Groups, Ints, shared_concepts
from torino.core.ragged import offsets_of
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers._checks import check_choice, check_count, check_encoder, check_flag, check_number
from torino.reducers.base import PositionMode, Reducer, register

Order = Literal["raster", "native"]
Pick = Literal["cover", "far", "place"]
Evidence = Literal["peak", "even"]
Form = Literal["merge", "prune"]
Floats = NDArray[np.float32]
TIE = 1e-4  # of a patch: gains this near count as equal, whatever order sums were made in, and smaller ones as none


@register("torino-x")
@dataclass(frozen=True)
class TorinoX(Reducer):
    """Keep the patches whose concepts cover those of all others best, one by one (TORINO-X).

    Each patch has a sparse code, its ``concepts`` strongest latents as a vector of length 1. How much two patches
    overlap, o(i, j), is the product of their codes times exp(−d²/2r²), d patches apart, with r = ``reach`` · √N: the
    same concept far away is another thing. What patches S cover is f(S) = Σ_j w_j · max_{i∈S} o(i, j), at most N, with
    w_j = a(j) over its mean: a patch counts by its peak activation. The patch that adds most to f is kept, then the
    next, until the budget is full or the next would add less than ``least`` patches. A budget keeps the first of
    what a larger one keeps. Gains never rise, so ``least`` moves the length smoothly; an image of few things is
    covered sooner. Ties go to the lowest index. The score of a token is its gain; it stands for the patches that
    overlap more with it than with any other kept one, and is their sum by overlap, brought to the length of the
    kept patch, at its place. A patch that overlaps with no kept one, or hardly, has no token.

    Reads the patches. Beyond the paper: its top-k sets and δ become codes and their overlap, and what survives a budget
    is not the largest groups but what covers most of what is not covered yet.

    Parameters
    ----------
    sae : ConceptEncoder
        An SAE, or ``RawEmbedding()`` for none.
    budget : int, optional
        Exactly this many tokens, at most N. Without it the image decides.
    least : float
        Without a budget: how much of a patch a token must add, see :func:`torino.calibrate_cover`.
    pooled : bool
        The budget is an average: images that are planned together share it, by gain, and each keeps at least one token.
        So plans depend on what else is in the batch; an image alone gets the budget.
    concepts : int
        Latents of a code.
    reach : float, optional
        How far a concept reaches, as a share of the side of a square picture. None: over the whole picture, wherever
        two patches are.
    pick : {"cover", "far", "place"}
        What to keep next: what adds most to the cover; or, as ablations, the patch that overlaps least with any kept,
        or what covers most by place alone, whatever it shows and however loud: patches spread over the picture.
    evidence : {"peak", "even"}
        Whether a patch counts by its peak activation, or all count alike.
    form : {"merge", "prune"}
        Merge as above, or keep the patches as they are.
    order : {"raster", "native"}
        Output by place, or in the order of picking.
    positions : {"original", "compact"}
        Each token is numbered in the prompt by the place of its patch, so that the language model knows where it is;
        or anew, as the paper and most methods do it. Hosts that have a place for every patch (Qwen) ignore it.
    mass : bool
        The language model attends to each token as to all the patches it stands for, where the host can do that
        (:mod:`torino.vlm.attention`); else as to one.
    rank : {"activation", "pre-threshold"}
        Rank concepts by the SAE's activations, or before its threshold silences any.
    """

    sae: ConceptEncoder
    budget: int | None = None
    least: float = 0.5
    pooled: bool = False
    concepts: int = 8
    reach: float | None = 0.2
    pick: Pick = "cover"
    evidence: Evidence = "peak"
    form: Form = "merge"
    order: Order = "raster"
    positions: PositionMode = "original"
    mass: bool = True
    rank: Rank = "activation"

    paper: ClassVar[str] = "ours, docs/beyond.md"
    always_shown: ClassVar[tuple[str, ...]] = ("reach", "mass")  # None and False once: a spec tells which it is
    adaptive: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N·D·C + B·N²) at worst"
    original_licence: ClassVar[str] = "ours"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", 1 if self.budget is None else self.budget)
        check_count("concepts", self.concepts)
        check_number("least", self.least)
        check_number("reach", 1.0 if self.reach is None else self.reach)
        if self.reach == 0:
            raise BadParameter(
                "reach must be more than 0, got 0: no two patches would overlap. Give None for no limit."
            )
        check_flag("pooled", self.pooled)
        if self.pooled and self.budget is None:
            raise BadParameter("pooled images share a budget, and none was given. Give budget=..., or leave it out.")
        check_choice("pick", self.pick, Pick)
        if self.pick == "place" and self.reach is None:
            raise BadParameter("pick='place' covers by place alone, and reach=None leaves that out. Give a reach.")
        check_choice("evidence", self.evidence, Evidence)
        check_choice("form", self.form, Form)
        check_choice("order", self.order, Order)
        check_choice("positions", self.positions, PositionMode)
        check_flag("mass", self.mass)
        check_choice("rank", self.rank, Rank)
        check_encoder(self.sae)

    @property
    def position_mode(self) -> PositionMode:
        """How its tokens are numbered in the prompt."""
        return self.positions

    @property
    def proportional_attention(self) -> bool:
        """Whether its tokens are attended to as all the patches they stand for."""
        return self.mass

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share a budget."""
        return self.pooled

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images: one pass of the SAE, then one walk over each, two where they share a budget."""
        found = self._encode(images)
        with stage("grouping"):
            most = self._most(images, found)
            return ReductionBatch.of([self._plan(*parts) for parts in zip(images, found, most, strict=True)])

    def gains(self, images: Sequence[VisualTokens]) -> list[Floats]:
        """What each further token of an image would add, all N of them, falling: what lengths are decided by."""
        return [self._gains(*one) for one in zip(images, self._encode(images), strict=True)]

    def _gains(self, image: VisualTokens, concepts: Concepts) -> Floats:
        return self._walk(image, concepts, self._overlap(image, concepts), len(concepts), 0.0)[1]

    def _walk(
        self, image: VisualTokens, concepts: Concepts, overlap: Floats, most: int, least: float
    ) -> tuple[Ints, Floats]:
        """The patches to keep, in their order, and what each adds."""
        if self.pick == "place" and self.reach is not None:
            near = fade(np.ones_like(overlap), image.grid, self.reach)
            return cover(near, np.ones(len(near), np.float32), most, least)
        return (far if self.pick == "far" else cover)(overlap, self._weight(concepts), most, least)

    def _encode(self, images: Sequence[VisualTokens]) -> list[Concepts]:
        packed = ragged_patches(images)
        for tokens in images:
            self.sae.check_origin(tokens.origin, tokens.width)
        with stage("sae"):
            count = min(self.concepts, int(getattr(self.sae, "latents", packed.values.shape[1])))
            found = self.sae.top(packed.values, count, rank=self.rank)
            lengths = [len(tokens) for tokens in images]
            parts = [part.cpu().split(lengths) for part in (found.indices, found.values, found.peak)]
            return [Concepts(*one) for one in zip(*parts, strict=True)]

    def _overlap(self, image: VisualTokens, concepts: Concepts) -> Floats:
        """How much two patches overlap, by their codes and by how near they are."""
        overlap = overlaps_of(concepts)
        return overlap if self.reach is None else fade(overlap, image.grid, self.reach)

    def _weight(self, concepts: Concepts) -> Floats:
        """How much each patch counts, 1 on average; of a silent one nothing is known, and it counts nothing."""
        peak = concepts.peak.double().numpy()
        return (np.ones_like(peak) if self.evidence == "even" else share_of(peak)).astype(np.float32)

    def _most(self, images: Sequence[VisualTokens], found: Sequence[Concepts]) -> list[int]:
        """How many tokens each image may keep at most; exactly, where there is a budget."""
        sizes = [len(one) for one in found]
        if self.budget is None:
            return sizes
        if self.pooled:
            return self._shared(images, found, self.budget * len(found), sum(sizes))
        for number, size in enumerate(sizes):
            if self.budget > size:
                raise UnmetBudget(
                    f"{self.name} cannot give {self.budget} tokens for image {number}, which has {size} patches. "
                    "Lower the budget."
                )
        return [self.budget] * len(found)

    def _shared(self, images: Sequence[VisualTokens], found: Sequence[Concepts], wanted: int, most: int) -> list[int]:
        """Cut each walk where the gains of all images together leave the budget; equal ones by turns."""
        if wanted > most:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens an image: {len(found)} images that share {wanted} have "
                f"{most} patches together. Lower the budget."
            )
        gains = [self._gains(*one) for one in zip(images, found, strict=True)]
        image = np.repeat(np.arange(len(gains)), [len(one) for one in gains])
        turn = np.concatenate([np.arange(len(one)) for one in gains])
        gain = np.where(turn == 0, np.inf, np.concatenate(gains))  # the first of each image stays
        taken = np.lexsort((image, turn, -gain))[:wanted]
        return np.bincount(image[taken], minlength=len(gains)).tolist()

    def _plan(self, image: VisualTokens, concepts: Concepts, most: int) -> Reduction:
        overlap = self._overlap(image, concepts)
        least = self.least if self.budget is None else 0.0
        kept, gains = self._walk(image, concepts, overlap, most, least)
        order = np.argsort(kept) if self.order == "raster" else np.arange(len(kept))
        kept, gains = kept[order], gains[order]
        assigned = np.where(overlap[kept].max(0) > TIE, overlap[kept].argmax(0), -1)
        assigned[kept] = np.arange(len(kept))
        member, row, size = kept, np.arange(len(kept)), np.ones(len(kept), np.int64)
        weight = np.ones(len(kept), np.float32)
        if self.form == "merge":
            from scipy.sparse import csr_array

            member = np.lexsort((np.arange(len(assigned)), assigned))[(assigned < 0).sum() :]
            row = assigned[member]
            size, weight = np.bincount(row, minlength=len(kept)), overlap[kept[row], member]
            values = image.patches.detach().float().cpu().numpy()
            length = np.linalg.norm(csr_array((weight, (row, member)), (len(kept), len(values))) @ values, axis=1)
            weight *= (np.linalg.norm(values[kept], axis=1) / np.maximum(length, 1e-12))[row]
        label = torch.from_numpy(np.where(assigned < 0, len(kept), assigned))
        groups = Groups(label, label.bincount(minlength=len(kept) + 1), torch.tensor([0, len(kept) + 1]))
        return Reduction(
            sources=torch.from_numpy(member),
            weights=torch.from_numpy(weight),
            offsets=offsets_of(size.tolist()),
            anchor=torch.from_numpy(kept),
            concept=shared_concepts(concepts, groups)[: len(kept)],
            role=("primary",) * len(kept),
            grid=image.grid,
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(gains),
        )


def share_of(peak: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much each patch counts by its peak, 1 on average; all alike where there is none."""
    loud = peak.clip(min=0)
    return loud / loud.mean() if loud.any() else np.ones_like(loud)


def overlaps_of(concepts: Concepts) -> Floats:
    """How much the codes of two patches overlap, (N, N): 1 for the same, 0 for no concept in common."""
    from scipy.sparse import csr_array  # torino is imported without it

    index, value = concepts.indices.numpy(), concepts.values.numpy()
    active = (index >= 0) & (value > 0)  # raw coordinates may be negative
    value = value[active]
    _, column = np.unique(index[active], return_inverse=True)
    row = np.repeat(np.arange(len(index)), active.sum(1))
    norm = np.sqrt(np.bincount(row, value.astype(np.float64) ** 2, len(index))).astype(np.float32)
    codes = csr_array((value / norm[row], (row, column)), shape=(len(index), int(column.max(initial=0)) + 1))
    overlap: Floats = (codes @ codes.T).toarray()
    silent = np.flatnonzero(~active.any(1))
    overlap[np.ix_(silent, silent)] = 1.0  # alike in that nothing is known of them
    np.fill_diagonal(overlap, 1.0)
    return overlap


def fade(overlap: Floats, grid: tuple[int, int], reach: float) -> Floats:
    """Overlap that fades with distance: times exp(−d²/2r²) at d patches, with r = reach · √N."""
    # d² is that of rows plus that of columns: two factors that are small, in place of one as large as the overlap
    with np.errstate(over="ignore"):  # a reach next to nothing, or without end
        apart = [np.subtract.outer(np.arange(n), np.arange(n)) / (reach * np.sqrt(len(overlap))) for n in grid]
        rows, columns = (np.exp(-0.5 * one**2).astype(np.float32) for one in apart)
    pairs = overlap.reshape(*grid, *grid) * rows[:, None, :, None]
    pairs *= columns[None, :, None, :]
    return pairs.reshape(overlap.shape)


def cover(overlap: Floats, weight: Floats, most: int, least: float) -> tuple[Ints, Floats]:
    """Pick what adds most to Σ_j weight(j) · max over picked i of overlap(i, j), again and again.

    Returns
    -------
    picked, gains : arrays of shape (M,)
        At most ``most``; what would add less than ``least`` is left out, but for the first.
    """
    gain = (overlap * weight).sum(1, dtype=np.float64)
    held = np.zeros(len(overlap), np.float32)
    picked, gains = np.empty(most, np.int64), np.empty(most, np.float32)
    for step in range(most):
        top = gain.max()
        worth = top if top > TIE else 0.0
        if step and worth < least - TIE:
            return picked[:step], np.minimum.accumulate(gains[:step])
        best = int((gain >= top - TIE).argmax())
        picked[step], gains[step] = best, worth
        mine = overlap[best]
        better = np.flatnonzero(mine > held)
        # Only these patches are covered better than before (symmetric, so rows), and what others no longer add to them
        # lies between what they had and what they have.
        lost, low = overlap[better], held[better, None]
        np.maximum(lost, low, out=lost)
        np.minimum(lost, mine[better, None], out=lost)
        lost -= low
        lost *= weight[better, None]
        gain -= lost.sum(0, dtype=np.float64)
        held[better] = mine[better]
        gain[best] = -np.inf
    return picked, np.minimum.accumulate(gains)


def far(overlap: Floats, weight: Floats, most: int, least: float) -> tuple[Ints, Floats]:
    """Pick the most central patch, then always the one whose largest overlap with any picked is smallest."""
    first = int((overlap * weight).sum(1, dtype=np.float64).argmax())
    picked, gains = np.empty(most, np.int64), np.empty(most, np.float32)
    lack = np.ones(len(overlap), np.float32)
    for step in range(most):
        top = float(lack.max())
        worth = top if top > TIE else 0.0
        if step and worth < least - TIE:
            return picked[:step], np.minimum.accumulate(gains[:step])
        best = int((lack >= top - TIE).argmax()) if step else first
        picked[step], gains[step] = best, worth
        lack = np.minimum(lack, 1 - overlap[best])
        lack[picked[: step + 1]] = -np.inf
    return picked, np.minimum.accumulate(gains)
