"""Frame sampling, a plain baseline for videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._cells import video_cells
from torino.reducers._checks import budget_error, check_choice, check_count
from torino.reducers.base import Order, Reducer, register


@register("frames")
@dataclass(frozen=True)
class FrameSampling(Reducer):
    """Keep all patches of as many frames as fit, at equal distances, whatever they show.

    The video is divided into ⌈B/S⌉ spans of frames, for S patches per frame, and the middle frame of each is kept. If B
    is not a multiple of S, all kept frames lose the same number of patches, as with ``uniform``. A kept patch
    represents its place, or its cell, in all frames of its span. Reads no signal and not even the patches.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    order : {"raster", "native"}
        By position, or frame by frame and cell by cell.
    """

    budget: int
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    for_videos: ClassVar[bool] = True
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
        """Plan one image or video."""
        if self.budget > len(tokens):
            raise budget_error(self.name, self.budget, len(tokens))
        spans = -(-self.budget // (tokens.grid[0] * tokens.grid[1]))
        cell, center = video_cells(tokens.frames, tokens.grid, self.budget, spans)
        order = torch.tensor(center).argsort() if self.order == "raster" else torch.arange(self.budget)
        return Reduction.pick(
            torch.tensor(center)[order], by=self.spec, assigned=order.argsort()[cell], **tokens.layout
        )
