"""SCOPE: select patches by coverage of the image, weighted by saliency.

SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs (Deng et al., NeurIPS 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_number
from torino.reducers._similarity import pairwise_cosines
from torino.reducers.base import Order, Reducer, register

UNIT = 1 << 24  # similarities are integers in units of 1/UNIT, the resolution of float32 just below 1
CHUNK_ROWS = 127  # the sum of this many similarities is below 2**31


@register("scope")
@dataclass(frozen=True)
class Scope(Reducer):
    """Keep the patches that add most coverage, weighted by CLS attention (SCOPE).

    Let S be the cosines of the patches, a the CLS attention summed over heads, and c_i = max(0, max_{j selected} S_ij)
    the coverage of patch i. Each step selects

        argmax_j a_j^α · Σ_i max(0, S_ij - c_i)

    among the patches not selected yet, ties to the lowest index. The score of a token is that product at selection. A
    patch is assigned to the selected token that covers it best, or to none if no cosine is positive.

    Reads ``"cls_attention"`` of shape (H, N). Prunes.

    Difference from the release: S is rounded to multiples of 2⁻²⁴. Sums of gains are then exact in any order, so after
    a selection only the rows whose coverage increased are updated, and the result equals a full computation at each
    step.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    alpha : float
        Exponent of the saliency; 0 uses coverage only.
    order : {"raster", "native"}
        By position, as released, or in order of selection.
    """

    budget: int
    alpha: float = 1.0
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    emits_cls: ClassVar[bool] = False
    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "Deng et al., NeurIPS 2025, arXiv 2510.24214"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + B·N²) at worst"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, attention = len(tokens), tokens.signal("cls_attention", self.name)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        saliency = attention.detach().double().sum(0).cpu().numpy() ** self.alpha
        integers = pairwise_cosines(tokens.patches, torch.float64).clamp_(0, 1).mul_(UNIT).round_().int().cpu()
        similarity, gain = integers.numpy(), integers.sum(1).double().numpy()  # far below 2**53: exact
        coverage = np.zeros(n, np.int32)
        kept, score = np.empty(self.budget, np.int64), np.empty(self.budget)
        for step in range(self.budget):
            value = gain * saliency
            selected = value.argmax()
            kept[step], score[step] = selected, value[selected]
            row = similarity[selected]
            increased = (row > coverage).nonzero()[0]
            for start in range(0, len(increased), CHUNK_ROWS):
                chunk = increased[start : start + CHUNK_ROWS]
                before, after = coverage.take(chunk), row.take(chunk)
                # the part of each patch's possible gain that lies between the old and the new coverage is lost
                lost = similarity.take(chunk, 0)
                np.maximum(lost, before[:, None], out=lost)
                np.minimum(lost, after[:, None], out=lost)
                gain -= np.add.reduce(lost, 0, np.int32)
                gain += np.add.reduce(before)
            np.maximum(coverage, row, out=coverage)
            gain[selected], saliency[selected] = -1, 1.0  # below all remaining patches, whose value is at least 0
        assigned = np.where(coverage > 0, similarity[kept].argmax(0), -1)  # the first of equals
        assigned[kept] = np.arange(self.budget)  # a kept patch is assigned to itself
        if self.order == "raster":
            order = np.argsort(kept)
            kept, score = kept[order], score[order]
            assigned = np.append(np.argsort(order), -1)[assigned]
        return Reduction.pick(
            torch.from_numpy(kept),
            by=self.spec,
            score=torch.from_numpy(score / UNIT),
            assigned=torch.from_numpy(assigned),
            **tokens.layout,
        )
