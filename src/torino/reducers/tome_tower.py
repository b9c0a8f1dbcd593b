"""ToMe inside a vision tower: merge a few tokens in every block.

Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023 (arXiv 2210.09461).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torino.core.errors import UnmetBudget
from torino.core.reduction import Reduction
from torino.reducers._checks import budget_error, check_choice, check_count, check_finite, check_flag
from torino.reducers.base import Order, register
from torino.reducers.in_tower import Schedule, TowerReducer, TowerState, schedule_removals
from torino.reducers.tome import merged_sizes, tome_step


@register("tome-tower")
@dataclass(frozen=True)
class ToMeTower(TowerReducer):
    """Merge the most similar tokens in every block of the vision tower (ToMe).

    Each block up to and including the feature layer runs one step of bipartite soft matching between its attention and
    its MLP, on its keys averaged over heads, as in ``tome``. Tokens are split alternately into sources and targets; the
    CLS token comes first and is never merged. The r sources of highest similarity are merged into their targets by the
    mean weighted by size. The sequence continues in the released order, sources then targets. From then on ln(size) is
    added to the attention logits of the keys, so later blocks process fewer tokens. A token stands for the patches
    merged into it, but later blocks change its values: see :mod:`torino.reducers.in_tower`. The method works only if
    torino runs the tower.

    Deviations: the release takes r, this class takes the budget and distributes N − budget exactly over the blocks.
    For 192 of 576 tokens the 23 blocks of LLaVA remove 7 × 16 and 16 × 17 tokens. No publication states the schedule
    of the ToMe rows in LLaVA tables. Registers, which ToMe does not have, are kept separate and take no part in the
    matching. The method is not permutation equivariant.

    Parameters
    ----------
    budget : int
        Exact number of tokens at the feature layer, without the CLS token. A block merges at most half of its patches.
    schedule : {"constant", "decreasing", "increasing"}
        The same number in each block; or, as in the faster schedule of the paper, twice the mean in the first block
        and linearly fewer down to none in the last one; or the reverse.
    proportional : bool
        Whether ln(size) is added to the logits. The authors omit it for towers trained as masked autoencoders.
    order : {"raster", "native"}
        Output by position of the target, or as the last block leaves the sequence.
    """

    budget: int
    schedule: Schedule = "constant"
    proportional: bool = True
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"head_keys"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(blocks·N²·D/H)"
    paper: ClassVar[str] = "Bolya et al., ToMe, ICLR 2023, arXiv 2210.09461"
    original_license: ClassVar[str] = "CC BY-NC 4.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("schedule", self.schedule, Schedule)
        check_flag("proportional", self.proportional)
        check_choice("order", self.order, Order)

    def removals(self, patches: int, blocks: int, has_cls: bool) -> list[int]:
        """Return how many tokens to merge in each block."""
        if self.budget > patches:
            raise budget_error(self.name, self.budget, patches)
        # a block can merge half of the patches; without a CLS token the larger half remains
        removals = schedule_removals(
            patches,
            self.budget,
            blocks,
            schedule=self.schedule,
            max_removals=lambda tokens: (tokens + has_cls - 1) // 2,
            max_tokens=lambda left: (self.budget << left) if has_cls else ((self.budget - 1) << left) + 1,
        )
        if sum(removals) < patches - self.budget:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens: the {blocks} blocks up to the feature layer merge at "
                f"most half of their tokens each and leave {patches - sum(removals)} of {patches} patches. Raise the "
                "budget, use a later feature layer, or choose tome, which works on output tokens."
            )
        return removals

    def reduce(self, state: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        """Merge ``r`` tokens by their keys."""
        keys = signals["head_keys"]
        check_finite(keys, f"The keys of block {state.block}")
        step = tome_step(keys, state.sizes, r, class_token=state.has_cls, by=self.name)
        return step, merged_sizes(step, state.sizes), None
