"""DivPrune: the patches that lie farthest apart.

DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models (Alvar et al., CVPR 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, read_signal, unmet
from torino.reducers._matching import settled
from torino.reducers.base import Reducer, register

Order = Literal["raster", "native"]
Space = Literal["tap", "projected"]
LARGE = 400  # rows from which on three quarters of a product are faster than the whole


@register("divprune")
@dataclass(frozen=True)
class DivPrune(Reducer):
    """Keep the patches that lie farthest apart: greedy max-min distance (DivPrune).

    With d(i, j) = 1 - cos(x_i, x_j), the first pick is the patch whose nearest neighbour is farthest,
    argmax_i min_{j≠i} d(i, j); every further pick is the patch farthest from what is picked,
    argmax_i min_{j picked} d(i, j). Ties go to the lowest index. The score of a token is its distance when it was
    picked: to its nearest neighbour for the first one, to the nearest picked token for the others.

    Reads the patches, or the signal ``"projected"`` of shape (N, E) with ``space="projected"``. Prunes.

    As published, with these differences. The nearest picked token is kept as a running minimum, O(B·N), where the
    release searches all picked tokens anew at each step. Similarities are float32, not half. A picked patch is never
    picked again, also where duplicates leave nothing but distance 0; and a patch of no length has distance 1 to all.
    The release measures after the projector (``space="projected"``); ours is before it by default, so that the
    projector need only run on what is kept.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N.
    space : {"tap", "projected"}
        Where distances are measured: the patches at the tap layer, or after the projector as released.
    order : {"raster", "native"}
        By place, as the code does now; or in the order of picking, as for the numbers in the paper.
    """

    budget: int
    space: Space = "tap"
    order: Order = "raster"

    emits_cls: ClassVar[bool] = False
    paper: ClassVar[str] = "Alvar et al., CVPR 2025, arXiv 2503.02175"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + B·N)"
    original_licence: ClassVar[str] = "CC BY-NC 4.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_choice("space", self.space, Space)
        check_choice("order", self.order, Order)
        if self.space == "projected":  # what this one needs, not every DivPrune
            object.__setattr__(self, "needs", frozenset({"projected"}))

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, features = len(tokens), tokens.patches
        if self.budget > n:
            raise unmet(self.name, self.budget, n, "its patches")
        if self.space == "projected":
            features = read_signal(tokens, "projected", self.name, (n, None), check=False)
        cosine = cosines(features).cpu()
        if bool(cosine.diagonal().isnan().any()):  # patches were looked at when the tokens were made
            raise BadTokens("projected holds NaN or infinite values. Run the projector in float32 or bfloat16.")
        neighbour = cosine.fill_diagonal_(-torch.inf).amax(1).numpy()
        similar = cosine.numpy()
        closest = np.full(n, -np.inf, np.float32)  # similarity to the nearest picked patch; +inf once picked
        kept, score = np.empty(self.budget, np.int64), np.empty(self.budget, np.float32)
        pick, rank_by = neighbour.argmin(), neighbour
        for step in range(self.budget):
            kept[step], score[step] = pick, rank_by[pick]
            np.maximum(closest, similar[pick], out=closest)
            closest[pick] = np.inf
            pick, rank_by = closest.argmin(), closest
        score = 1 - score
        score[np.isinf(score)] = np.nan  # a patch alone has no neighbour
        order = np.argsort(kept) if self.order == "raster" else np.arange(self.budget)
        return Reduction.pick(
            torch.from_numpy(kept[order]), tokens.grid, self.spec, score=torch.from_numpy(score[order])
        )


def cosines(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Cosine of every pair of rows, (N, D) to (N, N); 0 with a row of no length.

    Rows that are the same bit for bit have cosine 1 in float64, exactly; in float32 on processors whose products carry
    the same rounding error wherever a row stands.
    """
    wide = x.detach().to(dtype)
    if x.dtype == torch.float64 or dtype != torch.float64:  # no square overflows; those of float32 do not in float64
        largest = torch.maximum(wide.amax(1, keepdim=True), -wide.amin(1, keepdim=True))
        wide = wide / largest.clamp_(min=torch.finfo(dtype).tiny)
    # quarters of a float32 product may round otherwise than the whole, which would move picks
    gram = products(wide) if dtype == torch.float64 else wide @ wide.T
    square = gram.diagonal()
    square = square.where(square > 0, 1)
    cosine = gram.div_(torch.outer(square, square).sqrt_()).clamp_(-1, 1)
    return settled(cosine) if dtype == torch.float64 else cosine


def products(x: Tensor) -> Tensor:
    """Inner product of every pair of rows, (N, D) to (N, N); of equal rows the same, but for rounding.

    The matrix is symmetric, so of its four quarters one is copied where that is worth it. All three products are of one
    shape, odd rows in the middle being in both halves, and so sum in nearly the same order.
    """
    n, half = len(x), (len(x) + 1) // 2
    if n < LARGE:
        return x @ x.T
    gram, one, two = x.new_empty(n, n), slice(0, half), slice(n - half, n)
    for rows, columns in ((one, one), (two, two), (one, two)):
        torch.mm(x[rows], x[columns].T, out=gram[rows, columns])
    gram[two, one] = gram[one, two].T
    return gram
