"""HoloV: divide the budget among runs of patches, and keep the patches of highest CLS attention in each.

Don't Just Chase "Highlighted Tokens" in MLLMs: Revisiting Visual Holistic Context Retention (Zou et al., NeurIPS 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_number, read_signal
from torino.reducers._similarity import nearest_kept, pairwise_cosines
from torino.reducers.base import AutoSpace, Order, Reducer, register

SCALE = 1000  # of the attention
TINY = 1e-6


@register("holov")
@dataclass(frozen=True)
class HoloV(Reducer):
    """Keep patches of high CLS attention in every part of the image (HoloV).

    The patches are cut into ``runs`` runs of consecutive indices, which are bands of the image. Let a_i be the CLS
    attention of patch i, averaged over heads, S the cosines of the patches of a run with zeros on the diagonal, and m_i
    and v_i the mean and the mean squared deviation of row i of S over the other patches of the run. The score of a run
    is the mean of 1000·a_i + α·v_i·mean(1000·a)/mean(v). The budget is divided among the runs in proportion to their
    scores, rounded down; the remaining tokens go one by one to the runs of highest score. Each run keeps its patches of
    highest a_i, ties to the lowest index; a_i is the score of a token.

    The means over the run leave α with the effect of a factor 1 + α for all runs alike, unless the attention or the
    similarities of a run are zero. The rule is kept as released.

    Reads ``"cls_attention"`` and the signal ``"projected"`` of shape (N, E), which models provide, or the patches.
    Prunes.

    Differences from the release: tokens that a run has no patches for go to the other runs, by the same rule, instead
    of being lost and replaced by zeros. The zero on the diagonal of S adds m_i² to the sum of squared deviations, as
    released. A run of one patch has the score 1000·a_i instead of a_i.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    runs : int
        Number of runs; at most one per patch is used.
    alpha : float
        Weight of the variation of similarities.
    space : {"auto", "features", "projected"}
        Where similarities are measured: after the projector, as released, or at the feature layer. ``"auto"`` is after
        the projector where the tokens have this signal, which all models provide.
    order : {"raster", "native"}
        By position, or as released: run by run, by descending attention.
    """

    budget: int
    runs: int = 16
    alpha: float = 0.09
    space: AutoSpace = "auto"
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    paper: ClassVar[str] = "Zou et al., NeurIPS 2025"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D/16)"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_count("runs", self.runs)
        check_number("alpha", self.alpha)
        check_choice("space", self.space, AutoSpace)
        check_choice("order", self.order, Order)
        if self.space == "projected":  # needs of this instance, not of the class
            object.__setattr__(self, "needs", frozenset({"cls_attention", "projected"}))
        elif self.space == "auto":
            object.__setattr__(self, "optional", frozenset({"projected"}))

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, features = len(tokens), tokens.patches
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        attention = read_signal(tokens, "cls_attention", self.name, (None, n)).double().mean(0).cpu().numpy()
        if self.space == "projected" or (self.space == "auto" and "projected" in tokens.signals):
            features = read_signal(tokens, "projected", self.name, (n, None))
        parts = np.array_split(np.arange(n), min(self.runs, n))
        scores = np.array(
            [self._score(features[torch.from_numpy(part).to(features.device)], attention[part]) for part in parts]
        )
        shares = divide(scores, self.budget, [len(part) for part in parts])
        kept = np.concatenate(
            [
                part[np.argsort(-attention[part], kind="stable")[:share]]
                for part, share in zip(parts, shares, strict=True)
            ]
        )
        if self.order == "raster":
            kept.sort()
        chosen = torch.from_numpy(kept)
        return Reduction.pick(
            chosen,
            tokens.grid,
            self.spec,
            score=torch.from_numpy(attention[kept]),
            assigned=nearest_kept(tokens.patches, chosen),
        )

    def _score(self, features: torch.Tensor, attention: NDArray[np.float64]) -> float:
        scaled = SCALE * attention
        others = len(scaled) - 1
        if not others:
            return float(scaled[0])
        cosine = pairwise_cosines(features, torch.float64).fill_diagonal_(0).cpu().numpy()
        mean = cosine.sum(1) / others
        variation = ((cosine - mean[:, None]) ** 2).sum(1) / others
        factor = np.abs(scaled).mean() / (np.abs(variation).mean() + TINY)
        return float((scaled + self.alpha * variation * factor).mean())


def divide(scores: NDArray[np.float64], budget: int, capacity: list[int]) -> list[int]:
    """Divide a budget in proportion to scores, each share at most its capacity.

    Shares are rounded down, and what remains goes one by one to the highest scores, ties to the first. Tokens that
    exceed a capacity are divided again among the others.

    Examples
    --------
    >>> divide(np.array([3.0, 1.0]), 4, [9, 9]), divide(np.array([3.0, 1.0]), 4, [2, 9])
    ([3, 1], [2, 2])
    """
    shares = [0] * len(capacity)
    while (left := budget - sum(shares)) > 0:
        open_runs = [run for run in range(len(capacity)) if shares[run] < capacity[run]]
        weights = scores[open_runs] if scores[open_runs].sum() > 0 else np.ones(len(open_runs))
        grants = np.floor(weights / weights.sum() * left).astype(int)
        for run in np.argsort(-weights, kind="stable")[: left - int(grants.sum())]:
            grants[run] += 1
        for run, grant in zip(open_runs, grants.tolist(), strict=True):
            shares[run] = min(capacity[run], shares[run] + grant)
    return shares
