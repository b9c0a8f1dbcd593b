"""HiPrune: patches that a middle block attends to, their neighbours, and patches that a deep block attends to.

HiPrune: Hierarchical Attention for Efficient Token Pruning in Vision-Language Models (Liu, Zhu, Du et al., ACL
Findings 2026, arXiv 2508.00553). Written from descriptions of the method and of the released code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_number, read_signal, unmet
from torino.reducers.base import Reducer, register

Order = Literal["raster", "native"]
Fidelity = Literal["released", "paper"]


@register("hiprune")
@dataclass(frozen=True)
class HiPrune(Reducer):
    """Keep anchors of a middle block, the patches beside them, and registers of the tap block (HiPrune).

    The score of a patch in a block is the attention it receives there, the mean over heads and queries, so no CLS
    token is needed. Of the budget B,

    1. *anchors* are the A = round(B·α/5) patches of highest score in the object block;
    2. *buffers* are the patches left, right, above and below an anchor;
    3. *registers* are the B − |anchors ∪ buffers| other patches of highest score in the tap block.

    With α = 0.1, budgets of 192, 128 and 64 have 4, 3 and 1 anchors. Ties go to the lowest index.

    Parameters
    ----------
    budget : int
        Exactly this many patches are kept; at most N. No CLS token is emitted.
    alpha : float
        Share of the budget for anchors and buffers, from 0 to 1.
    object_block : int
        Zero-based block whose attention finds the anchors; 8 for CLIP ViT-L/14, the authors' "layer 9".
    fidelity : {"released", "paper"}
        The released code takes the buffers from the flat sequence, i ± 1 and i ± columns, clamped to it: a neighbour
        wraps to the row before or after, and above the first row patch 0 steps in, below the last one patch N − 1.
        The paper means the neighbours on the grid, and an anchor at the edge has fewer.
    order : {"raster", "native"}
        By place, as the released code does, or in order of choice: anchors and registers by falling score, buffers
        between them by place.

    Notes
    -----
    Reads ``received_attention`` of the tap block and ``received_attention@8`` of the object block. The prompt-aware
    HiPrune++ is not part of it. At most budget // 5 anchors are taken, so that an α near 1 cannot overrun the budget,
    which the released code leaves unchecked; for α ≤ 0.5 this changes nothing. The released code also divides its
    budget by the number of crops; here a budget is that of one image.
    """

    budget: int
    alpha: float = 0.1
    object_block: int = 8
    fidelity: Fidelity = "released"
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"received_attention", "received_attention@8"})
    paper: ClassVar[str] = "Liu et al., 2025, arXiv 2508.00553"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·log N)"
    original_licence: ClassVar[str] = "MIT"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        if self.alpha > 1:
            raise BadParameter(f"alpha must be between 0 and 1, got {self.alpha!r}: it is a share of the budget.")
        check_count("object_block", self.object_block, least=0)
        check_choice("fidelity", self.fidelity, Fidelity)
        check_choice("order", self.order, Order)
        needs = frozenset({"received_attention", f"received_attention@{self.object_block}"})
        object.__setattr__(self, "needs", needs)  # what this very reducer reads

    @property
    def anchors(self) -> int:
        """How many anchors there are."""
        return min(round(self.budget * self.alpha / 5), self.budget // 5)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise unmet(self.name, self.budget, n, "its patches")
        middle = read_signal(tokens, f"received_attention@{self.object_block}", self.name, (n,)).detach().float().cpu()
        deep = read_signal(tokens, "received_attention", self.name, (n,)).detach().float().cpu()

        anchors = _falling(middle)[: self.anchors]
        free = torch.ones(n, dtype=torch.bool)
        free[anchors] = False
        beside = self._beside(anchors, tokens.grid).unique()
        buffers = beside[free[beside]]
        free[buffers] = False
        ranked = _falling(deep)
        registers = ranked[free[ranked]][: self.budget - len(anchors) - len(buffers)]

        kept = torch.cat([anchors, buffers, registers])
        role = ("anchor",) * len(anchors) + ("buffer",) * len(buffers) + ("register",) * len(registers)
        score = torch.cat([middle[anchors], middle[buffers], deep[registers]])
        if self.order == "raster":
            kept, order = kept.sort()
            role, score = tuple(role[i] for i in order.tolist()), score[order]
        return replace(Reduction.pick(kept, tokens.grid, self.spec, score=score), role=role)

    def _beside(self, anchors: Tensor, grid: tuple[int, int]) -> Tensor:
        """The patches beside the anchors, on the grid or along the flat sequence."""
        rows, columns = grid
        if self.fidelity == "released":
            step = torch.tensor([-1, 1, -columns, columns])
            return (anchors[:, None] + step).clamp(0, rows * columns - 1).flatten()
        row = anchors[:, None] // columns + torch.tensor([0, 0, -1, 1])
        column = anchors[:, None] % columns + torch.tensor([-1, 1, 0, 0])
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        return (row * columns + column)[inside]


def _falling(score: Tensor) -> Tensor:
    """Patches by falling score, ties by rising index."""
    return score.argsort(descending=True, stable=True)
