"""Reducers that work inside a vision tower, a few tokens in each block: what they are told, and what they say.

Whoever runs the tower keeps the tokens before the patches (CLS, registers) aside, calls :meth:`TowerReducer.begin`
once for each image with what enters the first block, and between attention and MLP of every block up to the tap calls
:meth:`TowerState.advance` with the signals of that block; then :meth:`TowerState.finish`. Each of these leaves in
``passage.step`` the small matrix to apply to the patches there and then, or None. ln(``passage.sizes``) belongs on the
key side of the attention logits of the next block, where ``passage.proportional`` says so; all other tokens count 1.

``passage.done`` composes the steps with :meth:`torino.Reduction.then`: which patches of the image each token stands for
and with which weights they went into it. That is exact. But the blocks between the steps have changed the values, so
**applying this matrix to the tokens of the full tower does not give the tokens of the reduced one**: take those
that the tower itself gave.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor

from torino.core.errors import BadTokens, MissingSignal
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._matching import Order
from torino.reducers.base import Reducer

Schedule = Literal["constant", "decreasing", "increasing"]


@dataclass(frozen=True, eq=False)
class TowerState:
    """One image on its way through the blocks of a tower, after some of them; every call gives a new one.

    Attributes
    ----------
    reducer : TowerReducer
        The method at work.
    removals : tuple of int
        How many tokens go in each block up to the tap.
    has_cls : bool
        Whether a CLS token stands in front of the patches.
    done : Reduction
        What the tokens are made of so far, on the grid of the image.
    sizes : Tensor of shape (T,), float32
        How much each token counts for in attention.
    memory : object
        What the method carries along, such as a graph.
    step : Reduction or None
        What the last call did to the tokens, on a grid of (1, T); None where nothing went.
    block : int
        The block that comes next.
    """

    reducer: TowerReducer
    removals: tuple[int, ...]
    has_cls: bool
    done: Reduction
    sizes: Tensor
    memory: Any = None
    step: Reduction | None = None
    block: int = 0

    @property
    def due(self) -> int:
        """How many tokens go in the block that comes next; the signals of one where none goes are not wanted."""
        return self.removals[self.block]

    @property
    def proportional(self) -> bool:
        """Whether the attention of the block that comes next is to count tokens by their sizes."""
        return self.reducer.proportional and len(self.done) < self.done.patches

    def advance(self, signals: Mapping[str, Tensor]) -> TowerState:
        """Go through a block, of which the method sees what it ``needs``, of this image and without gradients.

        ``"head_keys"`` (T, d), ``"keys"`` and ``"queries"`` (T, D) of the patches; ``"attention"`` (H, P + T, T) that
        all tokens pay to the patches, sizes included, rows being queries: first the P tokens kept aside.
        """
        if not self.due:
            return replace(self, step=None, block=self.block + 1)
        step, sizes, memory = self.reducer.reduce(self, signals, self.due)
        done = self.done.then(step)
        return replace(self, done=done, sizes=sizes, memory=memory, step=step, block=self.block + 1)

    def finish(self) -> TowerState:
        """Bring the tokens into the order that the method promises, and sign what was done."""
        done, step = replace(self.done, by=self.reducer.spec), None
        order = done.anchor.argsort()
        if self.reducer.order == "raster" and bool((order.diff() != 1).any()):
            step = Reduction.pick(order, (1, len(done)), self.reducer.spec, score=done.score[order])
            done = replace(done.then(step), by=self.reducer.spec)
            return replace(self, done=done, sizes=self.sizes[order.to(self.sizes.device)], step=step)
        return replace(self, done=done, step=None)


class TowerReducer(Reducer):
    """A method that works inside a tower: a frozen dataclass of its hyperparameters. ``needs`` are signals of blocks.

    Write :meth:`removals` and :meth:`reduce`, and :meth:`remember` where something is worked out of the embeddings.
    """

    inside: ClassVar[bool] = True
    proportional: bool
    """Whether ln(size) is added to the attention logits of keys."""
    order: Order
    """Order of the tokens that come out: by place, or as the last block leaves them."""

    @abstractmethod
    def removals(self, patches: int, blocks: int, has_cls: bool) -> Sequence[int]:
        """How many tokens go in each of the blocks up to and including the tap, or UnmetBudget."""

    @abstractmethod
    def reduce(self, passage: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        """Let ``r`` > 0 tokens go: the matrix on a grid of (1, T), the sizes after it, and what is carried along."""

    def remember(self, patches: Tensor, grid: tuple[int, int]) -> Any:
        """What to carry along, from the embedded patches (N, D) that enter the first block."""

    def begin(self, patches: Tensor, grid: tuple[int, int], blocks: int, has_cls: bool) -> TowerState:
        """Take up one image, whose embedded patches (N, D) will go through so many blocks up to the tap."""
        removals = tuple(self.removals(len(patches), blocks, has_cls))
        sizes = torch.ones(len(patches), device=patches.device)
        memory = self.remember(patches, grid)
        return TowerState(self, removals, has_cls, Reduction.identity(grid, self.spec), sizes, memory)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Say that finished tokens come too late."""
        raise MissingSignal(
            f"{self.name} works inside a vision tower, block by block, and these tokens have left theirs. Give it to "
            "torino.vlm.reduced(model, ...) or to Tower.reduce, which run the tower; for finished tokens choose a "
            "reducer that works at the tap, such as tome or gtp."
        )


class InTowerReducer(Protocol):
    """What running a tower asks of a reducer that works inside it."""

    @property
    def needs(self) -> frozenset[str]:
        """Signals of each block."""
        ...

    @property
    def spec(self) -> str:
        """Name and hyperparameters."""
        ...

    def begin(self, patches: Tensor, grid: tuple[int, int], blocks: int, has_cls: bool) -> TowerState:
        """Take up one image."""
        ...


def as_in_tower(reducer: Reducer) -> InTowerReducer | None:
    """The same reducer if it works inside a tower, and cannot plan finished tokens; otherwise None."""
    return cast(InTowerReducer, reducer) if reducer.inside else None


def spread(
    patches: int,
    budget: int,
    blocks: int,
    *,
    schedule: Schedule = "constant",
    most: Callable[[int], int],
    room: Callable[[int], int],
) -> list[int]:
    """How many tokens go in each block, to come from ``patches`` to ``budget`` exactly.

    With a mean of r tokens a block, a constant schedule takes r in each, a decreasing one 2r in the first, falling
    in a straight line to none in the last, and an increasing one the other way round; rounded down, what is over
    going on to the next. A block takes more than that only if the rest could not be done in those behind it, and less
    only if it cannot; so the sum falls short of ``patches − budget`` only where no schedule can get there.

    Parameters
    ----------
    patches, budget, blocks : int
    schedule : {"constant", "decreasing", "increasing"}
    most : callable
        How many of T tokens one block can take.
    room : callable
        How many tokens there may be at most when so many blocks are left, for these to come down to the budget.

    Examples
    --------
    >>> half = {"most": lambda tokens: tokens // 2, "room": lambda left: 192 << left}
    >>> spread(576, 192, 23, **half) == [16] * 7 + [17] * 16
    True
    >>> spread(576, 192, 5, schedule="decreasing", **half), spread(576, 192, 2, **half)
    ([153, 115, 77, 39, 0], [192, 192])
    """
    falling = range(blocks - 1, -1, -1)
    weights = {"constant": [1] * blocks, "decreasing": list(falling), "increasing": list(reversed(falling))}[schedule]
    taken: list[int] = []
    for number, weight in enumerate(weights):
        excess, ahead = patches - budget, sum(weights[number:])
        share = excess * weight // ahead if ahead else excess
        r = min(max(share, patches - room(blocks - 1 - number)), most(patches))
        taken.append(r)
        patches -= r
    return taken


def check_finite(values: Tensor, what: str) -> None:
    """Refuse what a tower that has overflowed gives."""
    if not bool(torch.isfinite(values).all()):
        raise BadTokens(f"{what} hold NaN or infinite values. Run the tower in float32 or bfloat16.")
