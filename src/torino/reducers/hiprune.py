"""HiPrune: keep patches attended to in a middle block, their neighbors, and patches attended to in a deep block.

HiPrune: Hierarchical Attention for Efficient Token Pruning in Vision-Language Models (Liu, Zhu, Du et al., ACL
Findings 2026, arXiv 2508.00553). Implemented from descriptions of the method and of the released code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_number, read_signal
from torino.reducers._similarity import nearest_kept
from torino.reducers.base import Fidelity, Order, Reducer, register


@register("hiprune")
@dataclass(frozen=True)
class HiPrune(Reducer):
    """Keep anchors of a middle block, their neighbors, and registers of a deep block (HiPrune).

    The score of a patch in a block is the attention it receives there, averaged over heads and queries, so no CLS token
    is needed. Of the budget B,

    1. *anchors* are the A = round(B·α/5) patches of highest score in the object block;
    2. *buffers* are the patches left, right, above and below an anchor;
    3. *registers* are the B − |anchors ∪ buffers| other patches of highest score in the feature layer.

    With α = 0.1, budgets of 192, 128 and 64 have 4, 3 and 1 anchors. Ties go to the lowest index.

    Parameters
    ----------
    budget : int
        Exact number of patches, at most N. The CLS token is not part of the output.
    alpha : float
        Share of the budget for anchors and buffers, from 0 to 1.
    object_block : int, optional
        Zero-based block whose attention selects the anchors. By default the one that corresponds to the authors' "layer
        9" of the 24 of CLIP ViT-L/14: block 8 there, block 4 in a tower of 12 blocks.
    fidelity : {"released", "paper"}
        The released code takes the buffers from the flat sequence, i ± 1 and i ± columns, clamped to it: a neighbor
        wraps to the previous or next row, and outside the first and last row patches 0 and N − 1 are used. In the paper
        the buffers are the neighbors on the grid, and an anchor at the edge has fewer.
    order : {"raster", "native"}
        By position, as released, or in order of selection: anchors by descending score, buffers by position, registers
        by descending score.

    Notes
    -----
    Reads ``received_attention`` of the feature layer and ``received_attention@9/24`` of the object block. The
    prompt-aware HiPrune++ is not included. At most budget // 5 anchors are taken, so that an α near 1 cannot exceed the
    budget; the released code does not check this, and for α ≤ 0.5 it changes nothing. The released code also divides
    its budget by the number of crops; here the budget is that of one image.
    """

    budget: int
    alpha: float = 0.1
    object_block: int | None = None
    fidelity: Fidelity = "released"
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"received_attention", "received_attention@9/24"})
    paper: ClassVar[str] = "Liu et al., 2025, arXiv 2508.00553"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·log N)"
    original_license: ClassVar[str] = "MIT"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        if self.alpha > 1:
            raise BadParameter(f"alpha is a share of the budget and must be between 0 and 1, got {self.alpha!r}.")
        if self.object_block is not None:
            check_count("object_block", self.object_block, minimum=0)
        check_choice("fidelity", self.fidelity, Fidelity)
        check_choice("order", self.order, Order)
        # needs of this instance, not of the class
        object.__setattr__(self, "needs", frozenset({"received_attention", self._object_signal}))

    @property
    def _object_signal(self) -> str:
        return f"received_attention@{'9/24' if self.object_block is None else self.object_block}"

    @property
    def num_anchors(self) -> int:
        """Number of anchors."""
        return min(round(self.budget * self.alpha / 5), self.budget // 5)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        middle = read_signal(tokens, self._object_signal, self.name, (n,)).float().cpu()
        deep = read_signal(tokens, "received_attention", self.name, (n,)).float().cpu()

        anchors = _rank_descending(middle)[: self.num_anchors]
        free = torch.ones(n, dtype=torch.bool)
        free[anchors] = False
        neighbors = self._neighbors(anchors, tokens.grid).unique()
        buffers = neighbors[free[neighbors]]
        free[buffers] = False
        ranked = _rank_descending(deep)
        registers = ranked[free[ranked]][: self.budget - len(anchors) - len(buffers)]

        kept = torch.cat([anchors, buffers, registers])
        role = ("anchor",) * len(anchors) + ("buffer",) * len(buffers) + ("register",) * len(registers)
        score = torch.cat([middle[anchors], middle[buffers], deep[registers]])
        if self.order == "raster":
            kept, order = kept.sort()
            role, score = tuple(role[i] for i in order.tolist()), score[order]
        assigned = nearest_kept(tokens.patches, kept)
        return replace(Reduction.pick(kept, tokens.grid, self.spec, score=score, assigned=assigned), role=role)

    def _neighbors(self, anchors: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the patches next to the anchors, on the grid or in the flat sequence."""
        rows, columns = grid
        if self.fidelity == "released":
            step = torch.tensor([-1, 1, -columns, columns])
            return (anchors[:, None] + step).clamp(0, rows * columns - 1).flatten()
        row = anchors[:, None] // columns + torch.tensor([0, 0, -1, 1])
        column = anchors[:, None] % columns + torch.tensor([-1, 1, 0, 0])
        on_grid = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        return (row * columns + column)[on_grid]


def _rank_descending(score: Tensor) -> Tensor:
    """Return patches by descending score, ties by ascending index."""
    return score.argsort(descending=True, stable=True)
