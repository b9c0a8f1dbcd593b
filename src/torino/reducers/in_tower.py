"""Reducers that work inside a vision tower and remove a few tokens in each block.

The code that runs the tower keeps the tokens before the patches (CLS, registers) separate. For each image it calls
:meth:`TowerReducer.begin` once, with the input of the first block, then :meth:`TowerState.advance` between the
attention and the MLP of every block up to the feature layer, with the signals of that block, and finally
:meth:`TowerState.finish`. Each call returns a new state whose ``step`` is the reduction to apply to the patches at
this point, or None. If ``state.proportional`` is True, ln(``state.sizes``) is added to the attention logits of the
keys in the next block; all other tokens have size 1.

``state.reduction`` composes the steps with :meth:`torino.Reduction.then`: it holds the patches of the image that each
token stands for and their weights, exactly. The blocks between the steps change the values, however, so **applying this
matrix to the tokens of the full tower does not give the tokens of the reduced tower**. Use the output of the reduced
tower itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from torino.core.errors import MissingSignal
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers.base import Order, Reducer

Schedule = Literal["constant", "decreasing", "increasing"]


@dataclass(frozen=True, eq=False)
class TowerState:
    """State of one image between two blocks of a tower. It is immutable; every method returns a new state.

    Attributes
    ----------
    reducer : TowerReducer
        The method.
    removals : tuple of int
        Number of tokens to remove in each block up to the feature layer.
    has_cls : bool
        Whether a CLS token precedes the patches.
    reduction : Reduction
        Composition of all steps so far, on the grid of the image.
    sizes : Tensor of shape (T,), float32
        Size of each token in proportional attention.
    method_state : object
        Data that the method keeps between blocks, for example a graph.
    step : Reduction or None
        Reduction made by the last call, on a grid of (1, T); None if nothing was removed.
    block : int
        Index of the next block.
    """

    reducer: TowerReducer
    removals: tuple[int, ...]
    has_cls: bool
    reduction: Reduction
    sizes: Tensor
    method_state: Any = None
    step: Reduction | None = None
    block: int = 0

    @property
    def num_to_remove(self) -> int:
        """Number of tokens to remove in the next block. If it is 0, :meth:`advance` needs no signals."""
        return self.removals[self.block]

    @property
    def proportional(self) -> bool:
        """Whether the next block uses proportional attention."""
        return self.reducer.proportional and len(self.reduction) < self.reduction.patches

    def advance(self, signals: Mapping[str, Tensor]) -> TowerState:
        """Reduce the tokens in the next block, given the signals that the method ``needs``, without gradients.

        Signals are ``"head_keys"`` (T, d), ``"keys"`` (T, D) and ``"queries"`` (T, D) of the patches, and
        ``"attention"`` (H, P + T, T) of all tokens to the patches. Its rows are queries, the P tokens before the
        patches first, and it includes the effect of the sizes.
        """
        if not self.num_to_remove:
            return replace(self, step=None, block=self.block + 1)
        step, sizes, method_state = self.reducer.reduce(self, signals, self.num_to_remove)
        reduction = self.reduction.then(step)
        return replace(
            self, reduction=reduction, sizes=sizes, method_state=method_state, step=step, block=self.block + 1
        )

    def finish(self) -> TowerState:
        """Sort the tokens into the output order of the method and label the reduction with its spec."""
        reduction = replace(self.reduction, by=self.reducer.spec)
        order = reduction.anchor.argsort()
        if self.reducer.order == "raster" and bool((order.diff() != 1).any()):
            step = Reduction.pick(order, (1, len(reduction)), self.reducer.spec, score=reduction.score[order])
            reduction = replace(reduction.then(step), by=self.reducer.spec)
            return replace(self, reduction=reduction, sizes=self.sizes[order.to(self.sizes.device)], step=step)
        return replace(self, reduction=reduction, step=None)


class TowerReducer(Reducer):
    """Base class of a method that works inside a tower. Its ``needs`` are signals of each block.

    Subclasses are frozen dataclasses. Implement :meth:`removals` and :meth:`reduce`, and :meth:`init_method_state` if
    the method keeps data between blocks.
    """

    in_tower: ClassVar[bool] = True
    proportional: bool
    """Whether ln(size) is added to the attention logits of the keys."""
    order: Order
    """Output order: by position, or as the last block leaves the tokens."""

    @abstractmethod
    def removals(self, patches: int, blocks: int, has_cls: bool) -> Sequence[int]:
        """Return how many tokens to remove in each block up to the feature layer, or raise UnmetBudget."""

    @abstractmethod
    def reduce(self, state: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        """Remove ``r`` > 0 tokens: return the step on a grid of (1, T), the new sizes and the new method state."""

    def init_method_state(self, patches: Tensor, grid: tuple[int, int]) -> Any:
        """Compute the method state from the embedded patches (N, D), the input of the first block."""

    def begin(self, patches: Tensor, grid: tuple[int, int], blocks: int, has_cls: bool) -> TowerState:
        """Start the reduction of one image.

        Parameters
        ----------
        patches : Tensor of shape (N, D)
            Embedded patches, the input of the first block.
        grid : (int, int)
            Patch rows and columns.
        blocks : int
            Number of blocks up to and including the feature layer.
        has_cls : bool
            Whether a CLS token precedes the patches.
        """
        removals = tuple(self.removals(len(patches), blocks, has_cls))
        sizes = torch.ones(len(patches), device=patches.device)
        method_state = self.init_method_state(patches, grid)
        return TowerState(self, removals, has_cls, Reduction.identity(grid, self.spec), sizes, method_state)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Raise MissingSignal: the method cannot plan the output of a tower."""
        raise MissingSignal(
            f"{self.name} works inside the vision tower and cannot reduce the output tokens of a tower. Use it with "
            "torino.vlm.reduced(model, ...) or Tower.reduce, which run the tower, or choose a reducer that works on "
            "output tokens, such as tome or gtp."
        )


class InTowerReducer(Protocol):
    """Interface of a reducer as seen by the code that runs a tower."""

    @property
    def needs(self) -> frozenset[str]:
        """Signals of each block that the method reads."""
        ...

    @property
    def spec(self) -> str:
        """Name and hyperparameters."""
        ...

    @property
    def on_pixels(self) -> bool:
        """Whether the method changes the image before the tower; then it has ``plan_grid`` instead of ``begin``."""
        ...

    def begin(self, patches: Tensor, grid: tuple[int, int], blocks: int, has_cls: bool) -> TowerState:
        """Start the reduction of one image."""
        ...


def as_in_tower(reducer: Reducer) -> InTowerReducer | None:
    """Return the reducer if it works inside a tower, otherwise None."""
    return cast(InTowerReducer, reducer) if reducer.in_tower else None


def schedule_removals(
    patches: int,
    budget: int,
    blocks: int,
    *,
    schedule: Schedule = "constant",
    max_removals: Callable[[int], int],
    max_tokens: Callable[[int], int],
) -> list[int]:
    """Return how many tokens to remove in each block to get from ``patches`` to exactly ``budget``.

    If r is the mean number per block, a constant schedule removes r in each block, a decreasing one 2r in the first
    block and linearly fewer down to 0 in the last one, and an increasing one the reverse. Shares are rounded down and
    the remainder is carried to the next block. A block removes more than its share only if the later blocks could not
    remove the rest, and less only if it cannot remove its share. The sum is less than ``patches − budget`` only if no
    schedule can meet the budget.

    Parameters
    ----------
    patches, budget, blocks : int
    schedule : {"constant", "decreasing", "increasing"}
    max_removals : callable
        Maximal number of tokens that one block can remove from T tokens.
    max_tokens : callable
        Maximal number of tokens from which a given number of remaining blocks can still reach the budget.

    Examples
    --------
    >>> halving = {"max_removals": lambda tokens: tokens // 2, "max_tokens": lambda left: 192 << left}
    >>> schedule_removals(576, 192, 23, **halving) == [16] * 7 + [17] * 16
    True
    >>> schedule_removals(576, 192, 5, schedule="decreasing", **halving), schedule_removals(576, 192, 2, **halving)
    ([153, 115, 77, 39, 0], [192, 192])
    """
    descending = range(blocks - 1, -1, -1)
    weights = {
        "constant": [1] * blocks,
        "decreasing": list(descending),
        "increasing": list(reversed(descending)),
    }[schedule]
    removals: list[int] = []
    for block, weight in enumerate(weights):
        excess, remaining_weight = patches - budget, sum(weights[block:])
        share = excess * weight // remaining_weight if remaining_weight else excess
        r = min(max(share, patches - max_tokens(blocks - 1 - block)), max_removals(patches))
        removals.append(r)
        patches -= r
    return removals
