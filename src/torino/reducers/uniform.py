"""A uniform grid of patches, a plain baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._cells import video_cells
from torino.reducers._checks import budget_error, check_choice, check_count
from torino.reducers.base import Order, Reducer, register


@register("uniform")
@dataclass(frozen=True)
class Uniform(Reducer):
    """Keep the patches of a uniform grid, whatever the image shows.

    The patch grid is divided into B rectangular cells of nearly equal size, as square as possible, and the patch at the
    center of each cell is kept. It represents the patches of its cell. Reads no signal and not even the patches.

    Video: Frames share the budget equally. With fewer tokens than frames, spans of frames have one each.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    order : {"raster", "native"}
        By position, or cell by cell in bands of rows.
    """

    budget: int
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "none, a plain baseline"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N)"
    original_license: ClassVar[str] = "no original"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        if self.budget > len(tokens):
            raise budget_error(self.name, self.budget, len(tokens))
        cell, center = video_cells(tokens.frames, tokens.grid, self.budget, self._spans(tokens))
        order = torch.tensor(center).argsort() if self.order == "raster" else torch.arange(self.budget)
        position = order.argsort()
        return Reduction.pick(torch.tensor(center)[order], by=self.spec, assigned=position[cell], **tokens.layout)

    def _spans(self, tokens: VisualTokens) -> int:
        """Return into how many spans of frames a video is divided."""
        return min(tokens.frames, self.budget)
