"""VisPruner: the patches that the CLS token attends to most, and of the others the ones that are no duplicates.

Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs (Zhang et al., ICCV 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_number, unmet
from torino.reducers.base import Reducer, register
from torino.reducers.divprune import cosines

Order = Literal["raster", "native"]
AT_ONCE = 8  # duplicates dropped a round


@register("vispruner")
@dataclass(frozen=True)
class VisPruner(Reducer):
    """Keep the most attended patches, and of the others those left when duplicates are dropped (VisPruner).

    1. The int(B·r) patches of highest CLS attention, r being ``important_ratio``, are important.
    2. The others, by falling attention, are dealt alternately into evens and odds. Evens are ranked by their cosine
       with their most similar odd, and the 8 highest are dropped, or as many as there are too many. The evens left,
       by falling similarity, and then the odds are dealt again, until there are B - int(B·r).

    Reads ``"cls_attention"`` of shape (H, N), summed over heads. Prunes; roles are ``"primary"`` (important) and
    ``"diverse"``. The score is the attention; a dropped patch is stood for by the odd it resembled most, or by
    whatever stands for that one.

    As released, with two differences. The release fails where the number of others is odd; here the evens are then one
    more than the odds, and everything else is as it says. And cosines are float64: two evens that swap ranks move all
    between them from one hand to the other, and so on from round to round, so that rounding to float32 or half is
    enough to change most of the diverse patches. Ties go to whatever came first.

    Positions matter only through attention: where no two patches tie in it, a permuted image gives permuted tokens.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N; odd ones too.
    important_ratio : float
        Share r of important tokens, from 0 to 1; the authors also show 0.75 for small budgets. With 1 this is
        ``fastervlm``.
    order : {"raster", "native"}
        By place as released; or important ones by falling attention, then the diverse ones as the last round left
        them.
    """

    budget: int
    important_ratio: float = 0.5
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    emits_cls: ClassVar[bool] = False
    paper: ClassVar[str] = "Zhang et al., ICCV 2025, arXiv 2412.01818"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + N³)"
    original_licence: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_number("important_ratio", self.important_ratio)
        if self.important_ratio > 1:
            raise BadParameter(f"important_ratio must be between 0 and 1, got {self.important_ratio!r}.")
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, attention = len(tokens), tokens.signal("cls_attention", self.name)
        if self.budget > n:
            raise unmet(self.name, self.budget, n, "its patches")
        summed = attention.detach().double().sum(0).float()
        ranked = summed.sort(descending=True, stable=True).indices
        important = int(self.budget * self.important_ratio)
        others = ranked[important:]
        left, stands = np.empty(0, np.int64), np.full(len(others), -1)
        if self.budget > important:
            similar = cosines(tokens.patches[others.to(tokens.patches.device)], torch.float64).cpu().numpy()
            left, stands = _without_duplicates(similar, self.budget - important)
        ranked, others = ranked.cpu(), others.cpu()
        kept = torch.cat([ranked[:important], others[torch.from_numpy(left)]])
        if self.order == "raster":
            kept = kept.sort().values
        token = torch.full((n,), -1).index_put((kept,), torch.arange(self.budget))
        is_important = torch.zeros(n, dtype=torch.bool).index_fill(0, ranked[:important], True)
        if self.budget > important:
            token[others] = token[others[torch.from_numpy(stands)]]
        plan = Reduction.pick(kept, tokens.grid, self.spec, score=summed.cpu()[kept], assigned=token)
        return replace(plan, role=tuple("primary" if mine else "diverse" for mine in is_important[kept].tolist()))


def _without_duplicates(similar: NDArray[np.float64], wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drop duplicates until ``wanted`` are left, at least one; say what is left, and what stands for each."""
    rounded = similar.astype(np.float32)  # half as much to read
    left, stands = np.arange(len(similar)), np.arange(len(similar))
    while len(left) > wanted:
        even, odd = left[::2], left[1::2]
        nearest = rounded[odd].max(0)[even]  # rows of the odds in one piece, as similar is symmetric
        order = np.argsort(-nearest, kind="stable")
        same = np.diff(nearest[order]) == 0
        if same.any():  # rounding keeps the order of all but these
            tied = order[np.append(same, False) | np.append(False, same)]
            exact = nearest.astype(np.float64)
            exact[tied] = similar[even[tied]][:, odd].max(1)
            order = np.argsort(-exact, kind="stable")
        ranked, drop = even[order], min(AT_ONCE, len(left) - wanted)
        gone = ranked[:drop]
        stands[gone] = odd[similar.take(gone, 0).take(odd, 1).argmax(1)]
        left = np.concatenate([ranked[drop:], odd])
    while not np.array_equal(stands, stands[stands]):
        stands = stands[stands]
    return left, stands
