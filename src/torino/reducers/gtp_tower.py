"""GTP-ViT as it was meant: a few tokens propagated to their neighbours in every block of a vision tower.

Xu et al., GTP-ViT: Efficient Vision Transformers via Graph-based Token Propagation, WACV 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torino.core.errors import UnmetBudget
from torino.core.reduction import Reduction
from torino.reducers._checks import check_choice, check_count, check_flag, check_number, unmet
from torino.reducers._matching import Order
from torino.reducers.base import register
from torino.reducers.gtp import Graph, gtp_step, importance, token_graph
from torino.reducers.in_tower import TowerReducer, TowerState, check_finite, spread


@register("gtp-tower")
@dataclass(frozen=True)
class GTPTower(TowerReducer):
    """Propagate the least important tokens of each block to their neighbours, so that later blocks work on fewer (GTP).

    The graph Â of ``gtp`` is made once, of the patches that enter the first block. Between attention and MLP of every
    block up to and including the tap, the P tokens of lowest max_h A_ii × max_h Σ_q A_qi are propagated to the
    kept ones, x_K + alpha·Â_KP·x_P, and Â goes on as Â_KK. A is the attention of that block, paid by all
    tokens, CLS included. The scales s of tokens start at 1, CLS stays at 1, and s_K + alpha·Â_KP·s_P go on; ln(s) is
    added to the attention logits of keys. The sequence goes on by falling importance, as released. A token that goes is
    stood for by whoever got most of it. Later blocks have changed the values of what stays: see
    :mod:`torino.reducers.in_tower`. Works only where torino runs the tower.

    Deviations: the release is given P, this the budget; N − budget is spread evenly over the blocks, smaller shares
    first. A patch whose neighbours went before it is lost. Attention sparsity, an option of the release that
    saves no work, is left out; registers, which it does not know, are kept aside as CLS is.

    Parameters
    ----------
    budget : int
        Exactly this many tokens at the tap; no CLS token among them.
    alpha : float
        How much is passed on; the authors' searches chose 0.1 to 0.4.
    graph : {"mixed", "spatial", "semantic"}
    neighbours : int
        Most similar patches that each patch is joined with.
    proportional : bool
        Whether ln(s) is added to the logits, an option of the release that its best results use.
    order : {"raster", "native"}
        Output by place; or by falling importance in the last block.
    """

    budget: int
    alpha: float = 0.1
    graph: Graph = "mixed"
    neighbours: int = 8
    proportional: bool = True
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D + blocks·N²·D)"
    paper: ClassVar[str] = "Xu et al., GTP-ViT, WACV 2024"
    original_licence: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("graph", self.graph, Graph)
        check_count("neighbours", self.neighbours)
        check_flag("proportional", self.proportional)
        check_choice("order", self.order, Order)

    def removals(self, patches: int, blocks: int, has_cls: bool) -> list[int]:
        """How many tokens go in each block."""
        if self.budget > patches:
            raise unmet(self.name, self.budget, patches, f"its {patches} patches")
        taken = spread(
            patches,
            self.budget,
            blocks,
            most=lambda tokens: tokens - 1,
            room=lambda left: patches if left else self.budget,
        )
        if sum(taken) < patches - self.budget:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens for this image: no block comes before the tap, so all "
                f"{patches} patches stay. Tap a later block, or choose gtp, which works at the tap."
            )
        return taken

    def remember(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """The graph of the embedded patches."""
        check_finite(patches, "The embedded patches")
        return token_graph(patches, grid, self.graph, self.neighbours)

    def reduce(self, passage: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        """Propagate the ``r`` least important tokens."""
        graph: Tensor = passage.memory
        important = importance(signals["attention"])
        check_finite(important, f"The attention maps of block {passage.block}")
        step = gtp_step(graph, important.to(graph.device), r, self.alpha, by=self.name)
        kept = step.anchor.to(graph.device)
        return step, step.apply(passage.sizes), graph[kept][:, kept]
