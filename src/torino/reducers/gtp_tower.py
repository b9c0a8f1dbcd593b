"""GTP-ViT inside a vision tower: propagate a few tokens to their neighbors in every block.

Xu et al., GTP-ViT: Efficient Vision Transformers via Graph-based Token Propagation, WACV 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torino.core.errors import UnmetBudget
from torino.core.reduction import Reduction
from torino.reducers._checks import budget_error, check_choice, check_count, check_finite, check_flag, check_number
from torino.reducers.base import Order, register
from torino.reducers.gtp import Graph, build_graph, gtp_step, mixed_attention_importance
from torino.reducers.in_tower import TowerReducer, TowerState, schedule_removals


@register("gtp-tower")
@dataclass(frozen=True)
class GTPTower(TowerReducer):
    """Propagate the least important tokens to their neighbors in every tower block (GTP-ViT).

    The graph Â of ``gtp`` is built once, from the input of the first block. In every block up to and including the
    feature layer, between attention and MLP, the P tokens of lowest max_h A_ii × max_h Σ_q A_qi are propagated to the
    kept ones, x_K + alpha·Â_KP·x_P, and Â becomes Â_KK. A is the attention of that block from all tokens, CLS included.
    The scales s of the tokens start at 1 and become s_K + alpha·Â_KP·s_P, while that of CLS stays 1; ln(s) is added to
    the attention logits of the keys. The sequence continues by descending importance, as released. A removed token is
    assigned to the token that received most of it. Later blocks change the values of the kept tokens: see
    :mod:`torino.reducers.in_tower`. The method works only if torino runs the tower.

    Deviations: the release takes P, this class takes the budget and distributes N − budget evenly over the blocks,
    smaller shares first. A patch whose neighbors were removed before it is lost. Attention sparsity, an option of the
    release that saves no work, is left out. Registers, which the release does not have, are kept separate like CLS.

    Parameters
    ----------
    budget : int
        Exact number of tokens at the feature layer, without the CLS token.
    alpha : float
        Propagation weight; the authors' searches chose 0.1 to 0.4.
    graph : {"mixed", "spatial", "semantic"}
    neighbors : int
        Number of most similar patches that each patch is connected to.
    proportional : bool
        Whether ln(s) is added to the logits, an option of the release that its best results use.
    order : {"raster", "native"}
        Output by position, or by descending importance in the last block.
    """

    budget: int
    alpha: float = 0.1
    graph: Graph = "mixed"
    neighbors: int = 8
    proportional: bool = True
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D + blocks·N²·D)"
    paper: ClassVar[str] = "Xu et al., GTP-ViT, WACV 2024"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("graph", self.graph, Graph)
        check_count("neighbors", self.neighbors)
        check_flag("proportional", self.proportional)
        check_choice("order", self.order, Order)

    def removals(self, patches: int, blocks: int, has_cls: bool) -> list[int]:
        """Return how many tokens to propagate in each block."""
        if self.budget > patches:
            raise budget_error(self.name, self.budget, patches)
        removals = schedule_removals(
            patches,
            self.budget,
            blocks,
            max_removals=lambda tokens: tokens - 1,
            max_tokens=lambda left: patches if left else self.budget,
        )
        if sum(removals) < patches - self.budget:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens: there is no block up to the feature layer, so all "
                f"{patches} patches remain. Use a later feature layer or choose gtp, which works on output tokens."
            )
        return removals

    def init_method_state(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Build the graph of the embedded patches."""
        check_finite(patches, "The embedded patches")
        return build_graph(patches, grid, self.graph, self.neighbors)

    def reduce(self, state: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        """Propagate the ``r`` least important tokens."""
        graph: Tensor = state.method_state
        importance = mixed_attention_importance(signals["attention"])
        check_finite(importance, f"The attention maps of block {state.block}")
        step = gtp_step(graph, importance.to(graph.device), r, self.alpha, by=self.name)
        kept = step.anchor.to(graph.device)
        return step, step.apply(state.sizes), graph[kept][:, kept]
