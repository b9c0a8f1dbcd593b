"""Ablations of TORINO-X: other selection rules, patch weights and concept rankings.

Importing this file registers the reducer ``torino-x-ablations``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from torino.core.concepts import Concepts, Rank
from torino.core.errors import BadParameter
from torino.core.grouping import Ints
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice
from torino.reducers.base import register
from torino.reducers.torino_x import TIE, Floats, TorinoX, apply_locality, greedy_coverage

Selection = Literal["greedy_coverage", "farthest_point", "position"]
Evidence = Literal["peak", "uniform"]


@register("torino-x-ablations")
@dataclass(frozen=True)
class TorinoXAblations(TorinoX):
    """TORINO-X with exchangeable selection, patch weights and concept ranking, for ablations.

    With its defaults it equals ``torino-x``.

    Parameters
    ----------
    sae, budget, min_gain, pooled, concepts, locality, mode, order, positions, proportional
        As for ``torino-x``.
    selection : {"greedy_coverage", "farthest_point", "position"}
        Next patch to select: the one that adds most coverage; the one with the smallest overlap with all selected
        patches; or the one that adds most coverage by position alone, which ignores concepts and activations and gives
        patches spread over the image.
    evidence : {"peak", "uniform"}
        Whether patches are weighted by their peak activation or all equally.
    rank : {"activation", "pre-threshold"}
        Rank concepts by the activations of the SAE, or by their values before its threshold.
    """

    selection: Selection = "greedy_coverage"
    evidence: Evidence = "peak"
    rank: Rank = "activation"

    paper: ClassVar[str] = "ours, ablation"
    ablation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        super().__post_init__()
        check_choice("selection", self.selection, Selection)
        check_choice("evidence", self.evidence, Evidence)
        check_choice("rank", self.rank, Rank)
        if self.selection == "position" and self.locality is None:
            raise BadParameter("selection='position' needs a locality, got None.")

    def top_concepts(self, patches: Tensor, count: int) -> Concepts:
        """Return the ``count`` strongest concepts of each patch, ranked by ``rank``."""
        return self.sae.top(patches, count, rank=self.rank)

    def patch_weights(self, codes: Concepts) -> Floats:
        """Return the weight of each patch in the coverage."""
        return np.ones(len(codes), np.float32) if self.evidence == "uniform" else super().patch_weights(codes)

    def select(
        self, image: VisualTokens, codes: Concepts, overlap: Floats, max_tokens: int, min_gain: float
    ) -> tuple[Ints, Floats]:
        """Return the selected patches in order of selection and their gains."""
        if self.selection == "position":
            assert self.locality is not None
            nearness = apply_locality(np.ones_like(overlap), image.grid, self.locality)
            return greedy_coverage(nearness, np.ones(len(nearness), np.float32), max_tokens, min_gain)
        rule = farthest_point if self.selection == "farthest_point" else greedy_coverage
        return rule(overlap, self.patch_weights(codes), max_tokens, min_gain)


def farthest_point(overlap: Floats, weight: Floats, max_patches: int, min_gain: float) -> tuple[Ints, Floats]:
    """Select the most central patch, then always the one whose largest overlap with the selected ones is smallest."""
    first = int((overlap * weight).sum(1, dtype=np.float64).argmax())
    selected, gains = np.empty(max_patches, np.int64), np.empty(max_patches, np.float32)
    distance = np.ones(len(overlap), np.float32)  # 1 − largest overlap with any selected patch
    for step in range(max_patches):
        highest = float(distance.max())
        step_gain = highest if highest > TIE else 0.0
        if step and step_gain < min_gain - TIE:
            return selected[:step], np.minimum.accumulate(gains[:step])
        best = int((distance >= highest - TIE).argmax()) if step else first
        selected[step], gains[step] = best, step_gain
        distance = np.minimum(distance, 1 - overlap[best])
        distance[selected[: step + 1]] = -np.inf
    return selected, np.minimum.accumulate(gains)
