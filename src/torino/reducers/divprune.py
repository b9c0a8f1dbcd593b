"""DivPrune: keep the patches that are farthest apart.

DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models (Alvar et al., CVPR 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from torino.core.errors import BadTokens
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, read_signal
from torino.reducers._similarity import nearest_kept, pairwise_cosines
from torino.reducers.base import AutoSpace, Order, Reducer, register


@register("divprune")
@dataclass(frozen=True)
class DivPrune(Reducer):
    """Keep the most diverse patches by greedy max-min distance (DivPrune).

    With d(i, j) = 1 - cos(x_i, x_j), the first selected patch is the one whose nearest neighbor is farthest,
    argmax_i min_{j≠i} d(i, j). Every further one is the patch farthest from the selected ones,
    argmax_i min_{j selected} d(i, j). Ties go to the lowest index. The score of a token is its distance at selection:
    to its nearest neighbor for the first one, to the nearest selected token for the others.

    Reads the signal ``"projected"`` of shape (N, E), which models provide, or the patches. Prunes.

    Differences from the release: the distance to the nearest selected token is a running minimum, O(B·N), while the
    release searches all selected tokens at each step. Similarities are float32, not half precision. A selected patch is
    never selected again, even if only duplicates at distance 0 remain. A patch of length zero has distance 1 to all
    others. Tokens without the signal ``"projected"`` are compared at the feature layer.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    space : {"auto", "features", "projected"}
        Where distances are measured: after the projector, as released, or at the feature layer, so that the projector
        processes only the kept patches. ``"auto"`` is after the projector where the tokens have this signal, which all
        models provide.
    order : {"raster", "native"}
        By position, as in the current release, or in order of selection, as for the numbers in the paper.
    """

    budget: int
    space: AutoSpace = "auto"
    order: Order = "raster"

    emits_cls: ClassVar[bool] = False
    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "Alvar et al., CVPR 2025, arXiv 2503.02175"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + B·N)"
    original_license: ClassVar[str] = "CC BY-NC 4.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("space", self.space, AutoSpace)
        check_choice("order", self.order, Order)
        if self.space == "projected":  # needs of this instance, not of the class
            object.__setattr__(self, "needs", frozenset({"projected"}))
        elif self.space == "auto":
            object.__setattr__(self, "optional", frozenset({"projected"}))

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, features = len(tokens), tokens.patches
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        if self.space == "projected" or (self.space == "auto" and "projected" in tokens.signals):
            features = read_signal(tokens, "projected", self.name, (n, None), check=False)
        cosine = pairwise_cosines(features).cpu()
        if bool(cosine.diagonal().isnan().any()):  # VisualTokens has checked the patches already
            raise BadTokens("projected holds NaN or infinite values. Run the projector in float32 or bfloat16.")
        neighbor = cosine.fill_diagonal_(-torch.inf).amax(1).numpy()
        similarity = cosine.numpy()
        closest = np.full(n, -np.inf, np.float32)  # similarity to the nearest selected patch; +inf once selected
        kept, score = np.empty(self.budget, np.int64), np.empty(self.budget, np.float32)
        selected, ranking = neighbor.argmin(), neighbor
        for step in range(self.budget):
            kept[step], score[step] = selected, ranking[selected]
            np.maximum(closest, similarity[selected], out=closest)
            closest[selected] = np.inf
            selected, ranking = closest.argmin(), closest
        score = 1 - score
        score[np.isinf(score)] = np.nan  # a single patch has no neighbor
        order = np.argsort(kept) if self.order == "raster" else np.arange(self.budget)
        chosen = torch.from_numpy(kept[order])
        assigned = nearest_kept(tokens.patches, chosen)
        return Reduction.pick(
            chosen, by=self.spec, score=torch.from_numpy(score[order]), assigned=assigned, **tokens.layout
        )
