"""TORINO with exchangeable steps, to measure the effect of each step.

Importing this file registers the reducer ``torino-steps``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import label as label_components
from torch import Tensor

from torino.core.concepts import ConceptEncoder, Concepts
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.grouping import Groups, Ints, group_by_overlap, shared_concepts
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction
from torino.core.timing import stage
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import SILENT
from torino.reducers._checks import check_choice, check_count, check_encoder
from torino.reducers.base import Order, PositionMode, Reducer, register
from torino.reducers.torino_x import code_overlap, relative_peaks

Floats = NDArray[np.float64]
Scale = Literal["log", "mean", "length"]
Split = Literal["never", "concept", "connected"]
Representative = Literal["merge", "evidence", "decoder", "peak", "medoid"]
Truncation = Literal["size", "peak", "greedy_coverage"]
Padding = Literal["peak", "greedy_coverage"]
CODE_SIZE = 16  # latents of a code, for overlaps
MAX_EXTRA_CONCEPTS = 8  # additional concepts by which a large group is split


@register("torino-steps")
@dataclass(frozen=True)
class TorinoSteps(Reducer):
    """TORINO with exchangeable steps, for ablations; with its defaults it equals ``torino-m``.

    Groups are those of ``torino-m``. Codes and coverage are those of ``torino-x``, with 16 concepts and without
    locality.

    Parameters
    ----------
    sae, k, delta, budget
        As for ``torino-m``.
    split : {"never", "concept", "connected"}
        How groups of more than ``max_group_size`` patches are split: not at all; members must share one more concept,
        and again one more, until the groups are small enough; or into the connected areas of the grid.
    max_group_size : int
    truncation : {"size", "peak", "greedy_coverage"}
        Which groups are kept if there are more than the budget: the largest, those with the highest peaks, or greedily
        those whose best patches add most coverage.
    representative : {"merge", "evidence", "decoder", "peak", "medoid"}
        Token of a group: its sum; its sum weighted by the peaks of its patches; its sum weighted by the projection of
        each patch on the decoder direction of the shared concept; its patch with the highest peak, as in ``torino-p``;
        or the patch with the largest total overlap with the others.
    scale : {"log", "mean", "length"}
        Scale of a sum of n patches: (1 + ln n) times their mean; their mean; or their average length.
    padding : {"peak", "greedy_coverage"}
        Patches that fill a budget larger than the number of groups: those with the highest peaks, or those that add
        most coverage.
    order : {"raster", "native"}
    positions : {"compact", "original"}
    """

    sae: ConceptEncoder
    k: int = 2
    delta: int = 2
    budget: int | None = None
    split: Split = "never"
    max_group_size: int = 32
    truncation: Truncation = "size"
    representative: Representative = "merge"
    scale: Scale = "log"
    padding: Padding = "peak"
    order: Order = "raster"
    positions: PositionMode = "compact"

    always_shown: ClassVar[tuple[str, ...]] = ("k", "delta")
    paper: ClassVar[str] = "ours, ablation"
    adaptive: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    ablation: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N·D·C + B·N²) at worst"
    original_license: ClassVar[str] = "ours"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        for name in ("k", "delta", "max_group_size"):
            check_count(name, getattr(self, name))
        check_count("budget", 1 if self.budget is None else self.budget)
        if self.delta > self.k:
            raise BadParameter(f"delta must be between 1 and k={self.k}, got {self.delta}.")
        choices = {
            "split": Split,
            "truncation": Truncation,
            "representative": Representative,
            "scale": Scale,
            "padding": Padding,
            "order": Order,
            "positions": PositionMode,
        }
        for name, kind in choices.items():
            check_choice(name, getattr(self, name), kind)
        check_encoder(self.sae)
        no_decoder = hasattr(self.sae, "decoder_projection") and getattr(self.sae, "W_dec", None) is None
        if self.representative == "decoder" and no_decoder:
            raise BadParameter("representative='decoder' needs the decoder of the SAE. Load it with decoder=True.")

    @property
    def position_mode(self) -> PositionMode:
        """Position ids of the tokens in the prompt."""
        return self.positions

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        self.sae.check_origin(tokens.origin, tokens.width)
        with stage("sae"):
            latents = int(getattr(self.sae, "latents", tokens.width))
            count = min(max(self.k + MAX_EXTRA_CONCEPTS, CODE_SIZE), max(latents, self.k))
            concepts = self.sae.top(tokens.patches, count)
            concepts = Concepts(concepts.indices.cpu(), concepts.values.cpu(), concepts.peak.cpu())
        with stage("grouping"):
            groups = self._groups(concepts, tokens.grid)
            return self._reduce(tokens, concepts, groups)

    # ------------------------------------------------------------------ the steps

    def _groups(self, concepts: Concepts, grid: tuple[int, int]) -> Groups:
        groups = group_by_overlap(_truncate(concepts, self.k), self.delta)
        if self.split == "never":
            return groups
        label = groups.label.numpy().copy()
        for group in np.flatnonzero(groups.sizes.numpy() > self.max_group_size):
            members = np.flatnonzero(label == group)
            if self.split == "concept":
                parts = self._split_by_concepts(members, concepts, 1)
            else:
                parts = _connected_areas(members, grid)
            label[members] = label.max() + 1 + parts
        _, first, label = np.unique(label, return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))  # numbered by first appearance, as in torino-m
        label = rank[label.reshape(-1)]
        sizes = torch.from_numpy(np.bincount(label))
        return Groups(torch.from_numpy(label), sizes, torch.tensor([0, len(sizes)]))

    def _split_by_concepts(self, members: Ints, concepts: Concepts, extra: int) -> Ints:
        """Return the part of each member if ``extra`` more concepts are required; split large parts recursively."""
        if extra > MAX_EXTRA_CONCEPTS or self.k + extra > concepts.k or len(members) <= self.max_group_size:
            return np.zeros(len(members), np.int64)
        at = torch.from_numpy(members)
        subset = Concepts(concepts.indices[at], concepts.values[at], concepts.peak[at])
        part = group_by_overlap(_truncate(subset, self.k + extra), self.delta + extra).label.numpy().copy()
        for large in np.flatnonzero(np.bincount(part) > self.max_group_size):
            inner = np.flatnonzero(part == large)
            part[inner] = part.max() + 1 + self._split_by_concepts(members[inner], concepts, extra + 1)
        return np.unique(part, return_inverse=True)[1].reshape(-1)

    def _kept_groups(self, size: Ints, anchors: Ints, peak: Floats, overlap: Floats | None) -> Ints:
        if self.budget is None or len(size) <= self.budget:
            return np.arange(len(size))
        if self.truncation == "greedy_coverage":
            assert overlap is not None
            return np.sort(_cover_rows(overlap[anchors], relative_peaks(peak), self.budget, np.zeros(len(peak))))
        score = size.astype(np.float64) if self.truncation == "size" else peak[anchors]
        return np.sort(np.argsort(-score, kind="stable")[: self.budget])

    def _padding_patches(self, num_groups: int, anchors: Ints, peak: Floats, overlap: Floats | None) -> Ints:
        missing = 0 if self.budget is None else self.budget - num_groups
        if missing <= 0:
            return np.empty(0, np.int64)
        pool = np.arange(len(peak))
        if self.representative in ("peak", "medoid"):
            pool = np.setdiff1d(pool, anchors)
        if missing > len(pool):
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens: the image has {num_groups} groups and {len(pool)} "
                f"patches for padding, {num_groups + len(pool)} in total. Lower the budget."
            )
        if self.padding == "peak":
            return pool[np.argsort(-peak[pool], kind="stable")[:missing]]
        assert overlap is not None
        return pool[_cover_rows(overlap[pool], relative_peaks(peak), missing, overlap[anchors].max(0))]

    def _projection(self, patches: Tensor, concept: int) -> Floats:
        """Return the projection of patches on the direction of a concept; without an SAE this is a coordinate."""
        if concept == SILENT:
            return np.zeros(len(patches))
        along: Callable[[Tensor, int], Tensor] | None = getattr(self.sae, "decoder_projection", None)
        return (patches[:, concept] if along is None else along(patches, concept)).detach().double().cpu().numpy()

    def _member_weights(self, members: Ints, concept: int, peak: Floats, tokens: Tensor, patches: Floats) -> Floats:
        """Return the weights of the sum that represents a group."""
        n = len(members)
        evidence = self._projection(tokens[members], concept) if self.representative == "decoder" else peak[members]
        evidence = evidence.clip(min=0)
        uniform = self.representative == "merge" or not evidence.any()
        weight = np.full(n, 1 / n) if uniform else evidence / evidence.sum()
        if self.scale == "log":
            return weight * (1 + np.log(n))
        if self.scale == "length":
            length = np.linalg.norm(weight @ patches[members])
            return weight * np.linalg.norm(patches[members], axis=1).mean() / max(float(length), 1e-12)
        return weight

    # ------------------------------------------------------------------ the whole method

    def _reduce(self, tokens: VisualTokens, concepts: Concepts, groups: Groups) -> Reduction:
        label, size = groups.label.numpy(), groups.sizes.numpy()
        peak = concepts.peak.double().numpy()
        uses_overlap = "greedy_coverage" in (self.truncation, self.padding) or self.representative == "medoid"
        overlap = code_overlap(_truncate(concepts, CODE_SIZE)).astype(np.float64) if uses_overlap else None
        patches: Floats = tokens.patches.detach().double().cpu().numpy()
        members = np.split(np.lexsort((np.arange(len(label)), label)), size.cumsum()[:-1])
        anchors = np.array([group[peak[group].argmax()] for group in members])
        kept = self._kept_groups(size, anchors, peak, overlap)
        if self.representative == "medoid":
            assert overlap is not None
            anchors = np.array([group[overlap[np.ix_(group, group)].sum(1).argmax()] for group in members])
        padding = self._padding_patches(len(kept), anchors[kept], peak, overlap)

        anchor = np.concatenate([anchors[kept], padding])
        is_pad = np.arange(len(anchor)) >= len(kept)
        order = np.lexsort((is_pad, anchor)) if self.order == "raster" else np.arange(len(anchor))
        anchor, is_pad = anchor[order], is_pad[order]
        group = np.concatenate([kept, label[padding]])[order]
        shared = shared_concepts(_truncate(concepts, self.k), groups).numpy()
        merges = self.representative in ("merge", "evidence", "decoder")
        sources, weights = list[Ints](), list[Floats]()
        for position, index, pad in zip(anchor, group, is_pad, strict=True):
            if pad or not merges:
                sources.append(np.array([position]))
                weights.append(np.ones(1))
            else:
                sources.append(members[index])
                concept = int(shared[index])
                weights.append(self._member_weights(members[index], concept, peak, tokens.patches, patches))
        token = np.full(len(size), -1)
        token[group[~is_pad]] = np.flatnonzero(~is_pad)
        assigned = token[label]
        if not merges:
            assigned[anchor] = np.arange(len(anchor))
        return Reduction(
            sources=torch.from_numpy(np.concatenate(sources)),
            weights=torch.from_numpy(np.concatenate(weights)).float(),
            offsets=offsets_from_lengths([len(entries) for entries in sources]),
            anchor=torch.from_numpy(anchor),
            concept=torch.from_numpy(np.where(is_pad, concepts.indices[:, 0].numpy()[anchor], shared[group])),
            role=tuple(np.where(is_pad, "padding", "primary").tolist()),
            grid=tokens.grid,
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(peak[anchor]).float(),
        )


def _truncate(concepts: Concepts, k: int) -> Concepts:
    """Return at most the ``k`` strongest concepts of each patch."""
    return Concepts(concepts.indices[:, :k], concepts.values[:, :k], concepts.peak)


def _cover_rows(overlap: Floats, weight: Floats, count: int, coverage: Floats) -> Ints:
    """Select rows one by one that add most to the coverage of the columns; ties go to the first."""
    is_free, selected = np.ones(len(overlap), np.bool_), np.empty(count, np.int64)
    for step in range(count):
        gain = np.where(is_free, np.maximum(overlap - coverage, 0) @ weight, -1.0)
        selected[step] = best = int((gain >= gain.max() - 1e-9).argmax())
        is_free[best] = False
        coverage = np.maximum(coverage, overlap[best])
    return selected


def _connected_areas(members: Ints, grid: tuple[int, int]) -> Ints:
    """Return the index of the connected area of the grid that contains each member."""
    mask = np.zeros(grid, np.bool_)
    mask.reshape(-1)[members] = True
    areas = np.asarray(cast(Any, label_components(mask))[0], np.int64)
    return areas.reshape(-1)[members] - 1
