"""ToMe as it was meant: a few tokens merged in every block of a vision tower.

Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023 (arXiv 2210.09461).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torino.core.errors import UnmetBudget
from torino.core.reduction import Reduction
from torino.reducers._checks import check_choice, check_count, check_flag, unmet
from torino.reducers._matching import Order
from torino.reducers.base import register
from torino.reducers.in_tower import Schedule, TowerReducer, TowerState, check_finite, spread
from torino.reducers.tome import merged_sizes, tome_step


@register("tome-tower")
@dataclass(frozen=True)
class ToMeTower(TowerReducer):
    """Merge the most similar tokens in each block of the tower, so that later blocks work on fewer (ToMe).

    Between attention and MLP of every block up to and including the tap, one step of :mod:`torino.reducers._matching`
    on the keys of that block, averaged over heads, as in ``tome``: tokens are dealt alternately, CLS first and never
    merged, and the r sources of highest similarity go into their targets, by the mean weighted by size. The sequence
    goes on as released, sources left and then targets. From then on ln(size) is added to the attention logits of keys.
    A token stands for the patches that went into it, but later blocks have changed its values: see
    :mod:`torino.reducers.in_tower`. Works only where torino runs the tower.

    Deviations: the release is given r, this the budget; N − budget is spread over the blocks exactly. 384 of 576
    tokens go in LLaVA's 23 blocks as 7 × 16 and 16 × 17. Nobody states which schedule gave the ToMe rows of LLaVA
    tables. Registers, which ToMe does not know, are kept aside and not dealt. Not permutation equivariant.

    Parameters
    ----------
    budget : int
        Exactly this many tokens at the tap; no CLS token among them. A block merges half of its patches at most.
    schedule : {"constant", "decreasing", "increasing"}
        The same number in each block; or, as in the paper's faster schedule, twice the mean in the first block, falling
        in a straight line to none in the last; or the other way round.
    proportional : bool
        Whether ln(size) is added to the logits; the authors leave it out for towers trained as masked autoencoders.
    order : {"raster", "native"}
        Output by place of the target; or as the last block leaves the sequence.
    """

    budget: int
    schedule: Schedule = "constant"
    proportional: bool = True
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"head_keys"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(blocks·N²·D/H)"
    paper: ClassVar[str] = "Bolya et al., ToMe, ICLR 2023, arXiv 2210.09461"
    original_licence: ClassVar[str] = "CC BY-NC 4.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_choice("schedule", self.schedule, Schedule)
        check_flag("proportional", self.proportional)
        check_choice("order", self.order, Order)

    def removals(self, patches: int, blocks: int, has_cls: bool) -> list[int]:
        """How many tokens go in each block."""
        if self.budget > patches:
            raise unmet(self.name, self.budget, patches, f"its {patches} patches")
        # a block takes half of the patches, and without a CLS token the larger half stays
        taken = spread(
            patches,
            self.budget,
            blocks,
            schedule=self.schedule,
            most=lambda tokens: (tokens + has_cls - 1) // 2,
            room=lambda left: (self.budget << left) if has_cls else ((self.budget - 1) << left) + 1,
        )
        if sum(taken) < patches - self.budget:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens for this image: {blocks} blocks up to the tap, each of "
                f"which merges half of its tokens at most, leave {patches - sum(taken)} of {patches} patches. Raise "
                "the budget, tap a later block, or choose tome, which works at the tap."
            )
        return taken

    def reduce(self, passage: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        """Merge ``r`` tokens by their keys."""
        keys = signals["head_keys"]
        check_finite(keys, f"The keys of block {passage.block}")
        step = tome_step(keys, passage.sizes, r, class_token=passage.has_cls, by=self.name)
        return step, merged_sizes(step, passage.sizes), None
