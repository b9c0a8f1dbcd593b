"""VisPruner: keep the patches of highest CLS attention, and others after removing duplicates.

Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs (Zhang et al., ICCV 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_number
from torino.reducers._similarity import nearest_kept, pairwise_cosines
from torino.reducers.base import Order, Reducer, register

DROPPED_PER_ROUND = 8


@register("vispruner")
@dataclass(frozen=True)
class VisPruner(Reducer):
    """Keep the most attended patches, plus others that are not duplicates (VisPruner).

    1. The int(B·r) patches of highest CLS attention are important, where r is ``important_ratio``.
    2. The others, by descending attention, are split alternately into an even and an odd set. Even patches are ranked
       by the cosine with their most similar odd patch, and the 8 highest are dropped, or fewer in the last round. The
       remaining even patches, by descending similarity, followed by the odd ones are split again, until B - int(B·r)
       are left.

    Reads ``"cls_attention"`` of shape (H, N), summed over heads. Prunes; roles are ``"primary"`` (important) and
    ``"diverse"``. The score is the attention. A dropped patch is assigned to the odd patch it was most similar to, or
    to the patch that one is assigned to.

    Differences from the release: the release fails if the number of others is odd; here the even set then has one
    more patch. Cosines are float64: if two even patches swap ranks, all patches between them change sets in the next
    round, so rounding to float32 or half precision is enough to change most of the diverse patches. Ties go to the
    first patch.

    Positions matter only through ties of the attention: without ties, a permuted image gives permuted tokens.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N; it may be odd.
    important_ratio : float
        Share r of important tokens, from 0 to 1; the authors also use 0.75 for small budgets. With 1 the method equals
        ``fastervlm``.
    order : {"raster", "native"}
        By position, as released; or important ones by descending attention, then the diverse ones in the order of the
        last round.
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
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("important_ratio", self.important_ratio)
        if self.important_ratio > 1:
            raise BadParameter(f"important_ratio must be between 0 and 1, got {self.important_ratio!r}.")
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, attention = len(tokens), tokens.signal("cls_attention", self.name)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        summed = attention.detach().double().sum(0).float()
        ranked = summed.sort(descending=True, stable=True).indices
        num_important = int(self.budget * self.important_ratio)
        others = ranked[num_important:]
        diverse, representative = np.empty(0, np.int64), np.full(len(others), -1)
        if self.budget > num_important:
            features = tokens.patches[others.to(tokens.patches.device)]
            similarity = pairwise_cosines(features, torch.float64).cpu().numpy()
            diverse, representative = _drop_duplicates(similarity, self.budget - num_important)
        ranked, others = ranked.cpu(), others.cpu()
        kept = torch.cat([ranked[:num_important], others[torch.from_numpy(diverse)]])
        if self.order == "raster":
            kept = kept.sort().values
        assigned = torch.full((n,), -1).index_put((kept,), torch.arange(self.budget))
        is_important = torch.zeros(n, dtype=torch.bool).index_fill(0, ranked[:num_important], True)
        if self.budget > num_important:
            assigned[others] = assigned[others[torch.from_numpy(representative)]]
        else:
            assigned = nearest_kept(tokens.patches, kept)
        plan = Reduction.pick(kept, tokens.grid, self.spec, score=summed.cpu()[kept], assigned=assigned)
        return replace(plan, role=tuple("primary" if flag else "diverse" for flag in is_important[kept].tolist()))


def _drop_duplicates(similarity: NDArray[np.float64], target: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drop duplicates until ``target`` ≥ 1 patches are left; return these, and the representative of each patch."""
    rounded = similarity.astype(np.float32)  # half the memory traffic
    remaining, representative = np.arange(len(similarity)), np.arange(len(similarity))
    while len(remaining) > target:
        even, odd = remaining[::2], remaining[1::2]
        nearest = rounded[odd].max(0)[even]  # contiguous rows of the odd set, since the matrix is symmetric
        order = np.argsort(-nearest, kind="stable")
        equal = np.diff(nearest[order]) == 0
        if equal.any():  # rounding preserves the order of all others
            tied = order[np.append(equal, False) | np.append(False, equal)]
            exact = nearest.astype(np.float64)
            exact[tied] = similarity[even[tied]][:, odd].max(1)
            order = np.argsort(-exact, kind="stable")
        ranked, num_dropped = even[order], min(DROPPED_PER_ROUND, len(remaining) - target)
        dropped = ranked[:num_dropped]
        representative[dropped] = odd[similarity.take(dropped, 0).take(odd, 1).argmax(1)]
        remaining = np.concatenate([ranked[num_dropped:], odd])
    while not np.array_equal(representative, representative[representative]):
        representative = representative[representative]
    return remaining, representative
