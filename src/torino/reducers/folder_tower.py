"""FOLDER inside the vision tower, as released for LLaVA.

Wang et al., FOLDER: Accelerating Multi-modal Large Language Models with Enhanced Performance, ICCV 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torino.core.errors import MissingSignal
from torino.core.frames import sequence_layout
from torino.core.reduction import Reduction
from torino.reducers._checks import check_choice, check_count, check_finite, check_number
from torino.reducers._matching import mean_reduction, merge_in_steps
from torino.reducers.base import Order, register
from torino.reducers.folder import plan_removals
from torino.reducers.in_tower import TowerReducer, TowerState


@register("folder-tower")
@dataclass(frozen=True)
class FolderTower(TowerReducer):
    """Merge in the tower's last block by keys and CLS attention (FOLDER, full, as released).

    The rule is that of ``folder-full``, applied where the release applies it: between the attention and the MLP of the
    block of the feature layer, so that the MLP processes the merged tokens. The method works only if torino runs the
    tower.

    Parameters
    ----------
    budget : int
        Exact number of tokens, without the CLS token.
    alpha : float
        Weight of the attention, which is multiplied by 100·alpha. With 0 only the keys matter.
    order : {"raster", "native"}
        By position of the target, or as the last step leaves them, as released.
    """

    budget: int
    alpha: float = 5.0
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"head_keys", "attention"})
    proportional = False
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D/H)"
    paper: ClassVar[str] = "Wang et al., FOLDER, ICCV 2025"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("order", self.order, Order)

    def removals(self, patches: int, blocks: int, has_cls: bool) -> list[int]:
        """Return how many tokens to merge in each block: all of them in the last one."""
        if not has_cls:
            raise MissingSignal(
                f"{self.name} protects patches of high CLS attention, and this tower has no CLS token. Choose folder, "
                "which needs none."
            )
        return [0] * (blocks - 1) + [sum(plan_removals(self.name, patches, self.budget, cls_first=True))]

    def reduce(self, state: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        """Merge ``r`` tokens by their keys, in steps that remove at most half of them."""
        keys, attention = signals["head_keys"], signals["attention"][:, 0].double().mean(0)
        check_finite(keys, f"The keys of block {state.block}")
        check_finite(attention, f"The attention of block {state.block}")
        tokens = len(keys)
        steps = plan_removals(self.name, tokens, tokens - r, cls_first=True)
        merged = merge_in_steps(
            keys, steps, cls_first=True, step_order="native", penalty=100 * self.alpha * attention.to(keys.device)
        )
        step = mean_reduction(merged, sequence_layout(tokens), self.name, order="native")
        return step, step.sizes.to(state.sizes), None
