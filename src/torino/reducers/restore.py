"""RESTORE: prune one half of the budget and merge the rest into distinctive anchors, for the other half.

RESTORE (ICML 2026, arXiv 2606.01711). Its calibrated attention is the option ``attention="restore"`` of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count
from torino.reducers._matching import MergedSequence, mean_reduction
from torino.reducers._similarity import cross_cosines, pairwise_cosines
from torino.reducers.base import AttentionMode, Order, PositionMode, Reducer, get, make, parse_spec, register


@register("restore")
@dataclass(frozen=True)
class Restore(Reducer):
    """Keep patches by another pruner and merge the others into distinctive anchors (RESTORE).

    Half of the budget, rounded down, is spent by ``pruner``. Among the remaining patches, with cosines C, the density
    of patch i is R_i = Σ_j C_ij, and its score R_i·(1 − max C_ij) with the maximum over the patches of larger density
    (R_i for the densest). The patches of highest score, ties to the lowest index, are the anchors for the other half;
    every other patch is averaged into the most similar anchor. The score of an anchor is this one; that of a pruned
    token is the pruner's.

    Published together with original positions, a merged token at the median position of its patches, and calibrated
    attention: ``positions="median"`` and ``attention="restore"`` of a model, which ``"auto"`` chooses for this method.

    Reads what the pruner reads. Differences from the release: similarities are measured and tokens merged at the
    feature layer, before the projector instead of after it.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    pruner : str
        Name or spec of a pruning method without its budget; ``holov`` in the paper's ablation.
    order : {"raster", "native"}
        By position of the pruned patch or anchor, or by the first patch of each token, as released.
    """

    budget: int
    pruner: str = "holov"
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    paper: ClassVar[str] = "RESTORE, ICML 2026, arXiv 2606.01711"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D)"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("order", self.order, Order)
        name, options = parse_spec(self.pruner)
        kind = get(name)
        if kind.merges or kind.in_tower or kind.emits_cls or "budget" in options or name == self.name:
            raise BadParameter(
                f"pruner must be a method that keeps patches as they are, without its budget, such as 'holov' or "
                f"'divprune', got {self.pruner!r}."
            )
        object.__setattr__(self, "needs", self._inner.needs)  # needs of this instance, not of the class
        object.__setattr__(self, "optional", self._inner.optional)
        object.__setattr__(self, "takes_frames", kind.takes_frames)

    @property
    def position_mode(self) -> PositionMode:
        """The median position of the patches of each token."""
        return "median"

    @property
    def attention_mode(self) -> AttentionMode:
        """Attention calibrated by size and distance."""
        return "restore"

    @property
    def _inner(self) -> Reducer:
        return make(self.pruner, budget=max(1, self.budget // 2))

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        pruned = self._inner.plan(tokens)
        count = self.budget // 2  # none of one token
        kept = pruned.anchor[:count]
        rest = torch.ones(n, dtype=torch.bool).index_fill_(0, kept, False).nonzero()[:, 0]
        patches = tokens.patches[rest.to(tokens.patches.device)]
        score = anchor_scores(pairwise_cosines(patches, torch.float64).cpu())
        chosen = score.argsort(descending=True, stable=True)[: self.budget - len(kept)].sort().values
        others = torch.ones(len(rest), dtype=torch.bool).index_fill_(0, chosen, False).nonzero()[:, 0]
        label = torch.empty(n, dtype=torch.int64)
        label[kept] = torch.arange(len(kept))
        label[rest[chosen]] = len(kept) + torch.arange(len(chosen))
        if len(others):
            rows, columns = (patches[index.to(patches.device)] for index in (others, chosen))
            label[rest[others]] = len(kept) + cross_cosines(rows, columns).argmax(1).cpu()
        anchor = torch.cat([kept, rest[chosen]])
        scores = torch.cat([pruned.score[:count], score[chosen].float()])
        role = ("primary",) * len(kept) + ("anchor",) * len(chosen)
        first = torch.full((self.budget,), n).scatter_reduce_(0, label, torch.arange(n), "amin")
        order = (anchor if self.order == "raster" else first).argsort()
        label, anchor, scores = order.argsort()[label], anchor[order], scores[order]
        role = tuple(role[token] for token in order.tolist())
        merged = mean_reduction(MergedSequence(label, anchor), tokens.layout, self.spec, order="native")
        return replace(merged, role=role, score=scores)


def anchor_scores(cosine: Tensor) -> Tensor:
    """Return density times distance to the most similar patch of larger density, shape (N,).

    Examples
    --------
    >>> anchor_scores(torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]])).tolist()
    [1.5, 1.5, 1.0]
    """
    density = cosine.sum(1)
    denser = density[None] > density[:, None]
    nearest = cosine.masked_fill(~denser, -torch.inf).amax(1)
    return density * (1 - nearest.where(denser.any(1), torch.zeros_like(nearest)))
