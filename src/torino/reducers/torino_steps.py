"""TORINO in steps that can be exchanged one at a time, to see which of them costs what; see ``docs/beyond.md``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.concepts import ConceptEncoder, Concepts
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.grouping import Groups, Ints, group_by_overlap, shared_concepts
from torino.core.ragged import offsets_of
from torino.core.reduction import Reduction
from torino.core.timing import stage
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import SILENT
from torino.reducers._checks import check_choice, check_count, check_encoder
from torino.reducers.base import PositionMode, Reducer, register
from torino.reducers.torino_x import overlaps_of, share_of

Floats = NDArray[np.float64]
Order = Literal["raster", "native"]
Scale = Literal["log", "mean", "length"]
Split = Literal["never", "concept", "place"]
Stand = Literal["merge", "evidence", "decoder", "peak", "medoid"]
Survive = Literal["size", "peak", "cover"]
Padding = Literal["peak", "missing"]
CODE = 16  # latents of a code, where overlaps of codes are wanted
DEEPER = 8  # further concepts that a giant group is split by, at most


@register("torino-steps")
@dataclass(frozen=True)
class TorinoSteps(Reducer):
    """TORINO whose steps can be exchanged one at a time, for ablations; as it stands it is torino-m.

    Groups are those of ``torino-m``. Codes and what they cover are those of ``torino-x``, with 16
    concepts, wherever patches are.

    Parameters
    ----------
    sae, k, delta, budget
        As for ``torino-m``.
    split : {"never", "concept", "place"}
        What becomes of groups of more than ``giant`` patches: nothing; members must share one more concept, and one
        more, until they are not giant; or each connected area of the grid is a group of its own.
    giant : int
    survive : {"size", "peak", "cover"}
        Which groups stay where there are more than the budget: the largest, those with the highest peaks, or those
        whose best patches cover most, one by one.
    stand : {"merge", "evidence", "decoder", "peak", "medoid"}
        What stands for a group: its sum; its sum by the peaks of its patches; its sum by how far each patch goes along
        the decoder's direction of the concept they share; its patch with the highest peak, as in ``torino-p``; or the
        one that overlaps most with the others.
    scale : {"log", "mean", "length"}
        Length of a sum of n patches: (1 + ln n) times their mean; their mean; or as long as they are on average.
    padding : {"peak", "missing"}
        What fills a budget that the groups do not: patches with the highest peaks, or those that add most to what is
        covered.
    order : {"raster", "native"}
    positions : {"compact", "original"}
    """

    sae: ConceptEncoder
    k: int = 2
    delta: int = 2
    budget: int | None = None
    split: Split = "never"
    giant: int = 32
    survive: Survive = "size"
    stand: Stand = "merge"
    scale: Scale = "log"
    padding: Padding = "peak"
    order: Order = "raster"
    positions: PositionMode = "compact"

    always_shown: ClassVar[tuple[str, ...]] = ("k", "delta")
    paper: ClassVar[str] = "ours, docs/beyond.md"
    adaptive: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    ablation: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N·D·C + B·N²) at worst"
    original_licence: ClassVar[str] = "ours"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        for name in ("k", "delta", "giant"):
            check_count(name, getattr(self, name))
        check_count("budget", 1 if self.budget is None else self.budget)
        if self.delta > self.k:
            raise BadParameter(f"delta must be between 1 and k={self.k}, got {self.delta}.")
        choices = {"split": Split, "survive": Survive, "stand": Stand, "scale": Scale, "padding": Padding}
        for name, kind in {**choices, "order": Order, "positions": PositionMode}.items():
            check_choice(name, getattr(self, name), kind)
        check_encoder(self.sae)
        if self.stand == "decoder" and hasattr(self.sae, "along") and getattr(self.sae, "W_dec", None) is None:
            raise BadParameter('stand="decoder" needs the decoder of the SAE. Load it with decoder=True.')

    @property
    def position_mode(self) -> PositionMode:
        """How its tokens are numbered in the prompt."""
        return self.positions

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        self.sae.check_origin(tokens.origin, tokens.width)
        with stage("sae"):
            most = int(getattr(self.sae, "latents", tokens.width))
            found = self.sae.top(tokens.patches, min(max(self.k + DEEPER, CODE), max(most, self.k)))
            found = Concepts(found.indices.cpu(), found.values.cpu(), found.peak.cpu())
        with stage("grouping"):
            groups = self._groups(found, tokens.grid)
            return self._reduce(tokens, found, groups)

    # ------------------------------------------------------------------ the steps

    def _groups(self, found: Concepts, grid: tuple[int, int]) -> Groups:
        groups = group_by_overlap(_first(found, self.k), self.delta)
        if self.split == "never":
            return groups
        label = groups.label.numpy().copy()
        for group in np.flatnonzero(groups.sizes.numpy() > self.giant):
            members = np.flatnonzero(label == group)
            parts = self._apart(members, found, 1) if self.split == "concept" else _areas(members, grid)
            label[members] = label.max() + 1 + parts
        _, first, label = np.unique(label, return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))  # numbered by first appearance, as before
        label = rank[label.reshape(-1)]
        sizes = torch.from_numpy(np.bincount(label))
        return Groups(torch.from_numpy(label), sizes, torch.tensor([0, len(sizes)]))

    def _apart(self, members: Ints, found: Concepts, more: int) -> Ints:
        """Part of each member, when ``more`` concepts than usual are asked for, and more where it is still giant."""
        if more > DEEPER or self.k + more > found.k or len(members) <= self.giant:
            return np.zeros(len(members), np.int64)
        at = torch.from_numpy(members)
        mine = Concepts(found.indices[at], found.values[at], found.peak[at])
        part = group_by_overlap(_first(mine, self.k + more), self.delta + more).label.numpy().copy()
        for one in np.flatnonzero(np.bincount(part) > self.giant):
            inner = np.flatnonzero(part == one)
            part[inner] = part.max() + 1 + self._apart(members[inner], found, more + 1)
        return np.unique(part, return_inverse=True)[1].reshape(-1)

    def _kept(self, size: Ints, leader: Ints, peak: Floats, codes: Floats | None) -> Ints:
        if self.budget is None or len(size) <= self.budget:
            return np.arange(len(size))
        if self.survive == "cover":
            assert codes is not None
            return np.sort(_walk(codes[leader], share_of(peak), self.budget, np.zeros(len(peak))))
        worth = size.astype(np.float64) if self.survive == "size" else peak[leader]
        return np.sort(np.argsort(-worth, kind="stable")[: self.budget])

    def _padded(self, kept: int, anchors: Ints, peak: Floats, codes: Floats | None) -> Ints:
        lacks = 0 if self.budget is None else self.budget - kept
        if lacks <= 0:
            return np.empty(0, np.int64)
        pool = np.arange(len(peak))
        if self.stand in ("peak", "medoid"):
            pool = np.setdiff1d(pool, anchors)
        if lacks > len(pool):
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens: its {kept} groups and {len(pool)} patches to pad with "
                f"make {kept + len(pool)} at most. Lower the budget."
            )
        if self.padding == "peak":
            return pool[np.argsort(-peak[pool], kind="stable")[:lacks]]
        assert codes is not None
        return pool[_walk(codes[pool], share_of(peak), lacks, codes[anchors].max(0))]

    def _along(self, patches: Tensor, concept: int) -> Floats:
        """How far patches go along the direction of a concept; without an SAE that is a coordinate."""
        if concept == SILENT:
            return np.zeros(len(patches))
        along: Callable[[Tensor, int], Tensor] | None = getattr(self.sae, "along", None)
        return (patches[:, concept] if along is None else along(patches, concept)).detach().double().cpu().numpy()

    def _weights(self, members: Ints, concept: int, peak: Floats, tokens: Tensor, patches: Floats) -> Floats:
        """Weights of the sum that stands for a group."""
        n = len(members)
        loud = self._along(tokens[members], concept) if self.stand == "decoder" else peak[members]
        loud = loud.clip(min=0)
        even = self.stand == "merge" or not loud.any()
        weight = np.full(n, 1 / n) if even else loud / loud.sum()
        if self.scale == "log":
            return weight * (1 + np.log(n))
        if self.scale == "length":
            length = np.linalg.norm(weight @ patches[members])
            return weight * np.linalg.norm(patches[members], axis=1).mean() / max(float(length), 1e-12)
        return weight

    # ------------------------------------------------------------------ all of it

    def _reduce(self, tokens: VisualTokens, found: Concepts, groups: Groups) -> Reduction:
        label, size = groups.label.numpy(), groups.sizes.numpy()
        peak = found.peak.double().numpy()
        wanted = self.survive == "cover" or self.padding == "missing" or self.stand == "medoid"
        codes = overlaps_of(_first(found, CODE)).astype(np.float64) if wanted else None
        patches: Floats = tokens.patches.detach().double().cpu().numpy()
        members = np.split(np.lexsort((np.arange(len(label)), label)), size.cumsum()[:-1])
        anchors = np.array([one[peak[one].argmax()] for one in members])
        kept = self._kept(size, anchors, peak, codes)
        if self.stand == "medoid":
            assert codes is not None
            anchors = np.array([one[codes[np.ix_(one, one)].sum(1).argmax()] for one in members])
        padding = self._padded(len(kept), anchors[kept], peak, codes)

        anchor = np.concatenate([anchors[kept], padding])
        is_pad = np.arange(len(anchor)) >= len(kept)
        order = np.lexsort((is_pad, anchor)) if self.order == "raster" else np.arange(len(anchor))
        anchor, is_pad = anchor[order], is_pad[order]
        group = np.concatenate([kept, label[padding]])[order]
        shared = shared_concepts(_first(found, self.k), groups).numpy()
        sums = self.stand in ("merge", "evidence", "decoder")
        sources, weights = list[Ints](), list[Floats]()
        for place, one, pad in zip(anchor, group, is_pad, strict=True):
            alone = pad or not sums
            sources.append(np.array([place]) if alone else members[one])
            given = (members[one], int(shared[one]), peak, tokens.patches, patches)
            weights.append(np.ones(1) if alone else self._weights(*given))
        token = np.full(len(size), -1)
        token[group[~is_pad]] = np.flatnonzero(~is_pad)
        assigned = token[label]
        if not sums:
            assigned[anchor] = np.arange(len(anchor))
        return Reduction(
            sources=torch.from_numpy(np.concatenate(sources)),
            weights=torch.from_numpy(np.concatenate(weights)).float(),
            offsets=offsets_of([len(one) for one in sources]),
            anchor=torch.from_numpy(anchor),
            concept=torch.from_numpy(np.where(is_pad, found.indices[:, 0].numpy()[anchor], shared[group])),
            role=tuple(np.where(is_pad, "padding", "primary").tolist()),
            grid=tokens.grid,
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(peak[anchor]).float(),
        )


def _first(concepts: Concepts, k: int) -> Concepts:
    """The ``k`` strongest of more."""
    return Concepts(concepts.indices[:, :k], concepts.values[:, :k], concepts.peak)


def _walk(table: Floats, weight: Floats, most: int, held: Floats) -> Ints:
    """Rows that add most to what is held of each column, one by one; ties to the first."""
    left, picked = np.ones(len(table), np.bool_), np.empty(most, np.int64)
    for step in range(most):
        gain = np.where(left, np.maximum(table - held, 0) @ weight, -1.0)
        picked[step] = best = int((gain >= gain.max() - 1e-9).argmax())
        left[best] = False
        held = np.maximum(held, table[best])
    return picked


def _areas(members: Ints, grid: tuple[int, int]) -> Ints:
    """Connected area of the grid that each member lies in."""
    from scipy.ndimage import label

    mask = np.zeros(grid, np.bool_)
    mask.reshape(-1)[members] = True
    areas = np.asarray(cast(Any, label(mask))[0], np.int64)
    return areas.reshape(-1)[members] - 1
