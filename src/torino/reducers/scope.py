"""SCOPE: the patches that cover the image best, salient ones first.

SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodal LLMs (Deng et al., NeurIPS 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_number, unmet
from torino.reducers.base import Reducer, register
from torino.reducers.divprune import cosines

Order = Literal["raster", "native"]
UNIT = 1 << 24  # similarities are whole numbers of 1/UNIT, the step of float32 just below 1
ROWS = 127  # this many of them add up to less than 2**31


@register("scope")
@dataclass(frozen=True)
class Scope(Reducer):
    """Keep the patches that add most coverage, weighted by CLS attention (SCOPE).

    With S the cosines of the patches, a the CLS attention summed over heads, and c_i = max(0, max_{j picked} S_ij)
    how well patch i is covered, each step picks

        argmax_j a_j^α · Σ_i max(0, S_ij - c_i)

    among the patches not picked yet, ties to the lowest index. The score of a token is that product when it was
    picked, and a patch is stood for by the picked token that covers it best, or by none where no cosine is positive.

    Reads ``"cls_attention"`` of shape (H, N). Prunes.

    As released, with one difference: S is rounded to whole numbers of 2⁻²⁴. Sums of gains are then exact in any
    order, so after a pick only the rows whose coverage rose need to be looked at again, and the result is that of
    summing anew at each step.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N.
    alpha : float
        Weight of saliency; 0 is coverage alone.
    order : {"raster", "native"}
        By place as released, or in the order of picking.
    """

    budget: int
    alpha: float = 1.0
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    emits_cls: ClassVar[bool] = False
    paper: ClassVar[str] = "Deng et al., NeurIPS 2025, arXiv 2510.24214"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + B·N²) at worst"
    original_licence: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, attention = len(tokens), tokens.signal("cls_attention", self.name)
        if self.budget > n:
            raise unmet(self.name, self.budget, n, "its patches")
        saliency = attention.detach().double().sum(0).cpu().numpy() ** self.alpha
        whole = cosines(tokens.patches, torch.float64).clamp_(0, 1).mul_(UNIT).round_().int().cpu()
        similar, gain = whole.numpy(), whole.sum(1).double().numpy()  # far below 2**53: exact
        covered = np.zeros(n, np.int32)
        kept, score = np.empty(self.budget, np.int64), np.empty(self.budget)
        for step in range(self.budget):
            worth = gain * saliency
            pick = worth.argmax()
            kept[step], score[step] = pick, worth[pick]
            row = similar[pick]
            rose = (row > covered).nonzero()[0]
            for start in range(0, len(rose), ROWS):
                some = rose[start : start + ROWS]
                before, after = covered.take(some), row.take(some)
                lost = similar.take(some, 0)  # of what each patch could add there, the part from before to after
                np.maximum(lost, before[:, None], out=lost)
                np.minimum(lost, after[:, None], out=lost)
                gain -= np.add.reduce(lost, 0, np.int32)
                gain += np.add.reduce(before)
            np.maximum(covered, row, out=covered)
            gain[pick], saliency[pick] = -1, 1.0  # below every patch that is left, as these have at least 0
        covers = np.where(covered > 0, similar[kept].argmax(0), -1)  # the first that covers it best
        covers[kept] = np.arange(self.budget)  # a kept patch stands for itself
        if self.order == "raster":
            order = np.argsort(kept)
            kept, score = kept[order], score[order]
            covers = np.append(np.argsort(order), -1)[covers]
        return Reduction.pick(
            torch.from_numpy(kept),
            tokens.grid,
            self.spec,
            score=torch.from_numpy(score / UNIT),
            assigned=torch.from_numpy(covers),
        )
