"""Encode a smaller image, a plain baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from torino.core.errors import MissingSignal
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count
from torino.reducers.base import Order, Reducer, register


@register("downsample")
@dataclass(frozen=True)
class Downsample(Reducer):
    """Shrink the image before the vision tower, so that it has fewer patches.

    The pixels that the processor returns are resized (bicubic, antialiased) to the largest grid of at most B patches
    that has nearly the shape of the full one: with s = √(B/N), ⌊s·rows⌋ rows and ⌊s·columns⌋ columns, at least one
    each, plus one column, or else one row, if the budget allows it. The tower encodes the smaller image. A token
    represents the patches of the full grid that its patch covers, and takes the position of the one at their center.

    The tower must accept other sizes: CLIP, SigLIP and DINOv2 towers by interpolating their position embeddings
    (LLaVA-1.5 and PaliGemma), and the towers of Qwen-VL as they are. VTC-Bench (ACL 2026) uses this baseline to find
    the questions on which methods differ.

    Parameters
    ----------
    budget : int
        Largest number of tokens, at most N. The number is smaller if no grid of this shape has as many patches: 182
        for a budget of 192, 121 for 128, and 64 for 64, of 24×24 patches.
    order : {"raster", "native"}
        Row by row in both cases.
    """

    budget: int
    order: Order = "raster"

    in_tower: ClassVar[bool] = True
    on_pixels: ClassVar[bool] = True
    paper: ClassVar[str] = "none, a plain baseline"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "less than nothing: a smaller tower input"
    original_license: ClassVar[str] = "no original"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("order", self.order, Order)

    def plan_grid(self, grid: tuple[int, int]) -> tuple[tuple[int, int], Reduction]:
        """Return the smaller grid for a full one, and the patches that each of its patches covers."""
        small = shrink_grid(grid, self.budget, self.name)
        return small, cover_grid(grid, small, self.spec)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Raise MissingSignal: the method needs the image, not its tokens."""
        raise _needs_image()

    def begin(self, *arguments: Any) -> NoReturn:
        """Raise MissingSignal: the method needs the image, not the patches of a running tower."""
        raise _needs_image()


def _needs_image() -> MissingSignal:
    return MissingSignal(
        "downsample shrinks the image itself and cannot reduce the tokens of a tower. Use it with a model: VLM.answer, "
        "torino.vlm.reduced(model, ...) or torino ask; or choose pool, which averages tokens."
    )


def shrink_grid(grid: tuple[int, int], budget: int, name: str = "downsample") -> tuple[int, int]:
    """Return the grid of at most ``budget`` patches that has nearly the shape of a larger one.

    Examples
    --------
    >>> shrink_grid((24, 24), 192), shrink_grid((24, 24), 64), shrink_grid((3, 40), 30), shrink_grid((2, 2), 4)
    ((13, 14), (8, 8), (1, 21), (2, 2))
    """
    if budget > math.prod(grid):
        raise budget_error(name, budget, math.prod(grid))
    scale = math.sqrt(budget / math.prod(grid))
    rows, columns = (max(1, min(side, math.floor(side * scale + 1e-9))) for side in grid)
    if rows * columns > budget:  # one side is 1
        return (1, budget) if rows == 1 else (budget, 1)
    if columns < grid[1] and rows * (columns + 1) <= budget:
        return rows, columns + 1
    if rows < grid[0] and (rows + 1) * columns <= budget:
        return rows + 1, columns
    return rows, columns


def cover_grid(grid: tuple[int, int], small: tuple[int, int], by: str) -> Reduction:
    """Return which patches of a grid each patch of a smaller one covers; a patch belongs to the cell of its center."""
    row, column = (torch.arange(full) * 2 + 1 for full in grid)
    row, column = row * small[0] // (2 * grid[0]), column * small[1] // (2 * grid[1])
    label = (row[:, None] * small[1] + column[None, :]).flatten()
    rows, columns = (side.bincount() for side in (row, column))
    middle = [count.cumsum(0) - count + (count - 1) // 2 for count in (rows, columns)]
    sizes, count = label.bincount(), math.prod(small)
    sources = label.argsort(stable=True)
    return Reduction(
        sources=sources,
        weights=(1 / sizes.double())[label[sources]].float(),
        offsets=offsets_from_lengths(sizes.tolist()),
        anchor=(middle[0][:, None] * grid[1] + middle[1][None, :]).flatten(),
        concept=torch.full((count,), -1),
        role=("primary",) * count,
        grid=grid,
        by=by,
        assigned=label,
        score=torch.full((count,), torch.nan),
    )
