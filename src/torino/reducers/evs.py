"""EVS: keep the patches of a video that differ from those at the same place in the frame before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._cells import grid_cells
from torino.reducers._checks import (
    budget_error,
    check_choice,
    check_count,
    space_features,
    space_signals,
)
from torino.reducers._similarity import round_cosines, unit_vectors
from torino.reducers.base import AutoSpace, Order, Reducer, register

FIRST_FRAME = 255.0  # score of the patches of the first frame; 1 − cosine is at most 2


@register("evs")
@dataclass(frozen=True)
class EVS(Reducer):
    """Keep the patches that changed most since the previous frame (Efficient Video Sampling).

    The score of a patch is 1 − cos(x, x'), with x' the patch at the same place in the previous frame. Patches of the
    first frame have the score 255, so that they are kept. The B patches of highest score are kept, ties to the lowest
    index. A dropped patch is represented by the patch last kept at its place.

    Compares projected tokens, as released, where the model provides them (``space``). Differences from the release
    (vLLM, SGLang): it raises a budget below one frame to a frame; here the budget is exact, and one that is smaller
    keeps a uniform grid of the first frame. Frames are those of the tower: in Qwen a token covers two of the video.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    space : {"auto", "features", "projected"}
        Vectors that are compared. ``"auto"``: the projected tokens if there are any, else those of the feature layer.
    order : {"raster", "native"}
        By position, or by descending score.
    """

    budget: int
    space: AutoSpace = "auto"
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    for_videos: ClassVar[bool] = True
    paper: ClassVar[str] = "Bagrov et al., 2025, arXiv 2510.14624"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·D)"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("space", self.space, AutoSpace)
        check_choice("order", self.order, Order)
        for name, signals in space_signals(self.space).items():  # of this instance, not of the class
            object.__setattr__(self, name, signals)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image or video."""
        n, size = len(tokens), tokens.grid[0] * tokens.grid[1]
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        unit = unit_vectors(space_features(tokens, self.space, self.name)).view(tokens.frames, size, -1)
        score = torch.full((tokens.frames, size), FIRST_FRAME, dtype=torch.float64)
        score[1:] = 1 - round_cosines((unit[1:] * unit[:-1]).sum(2)).cpu()
        place = torch.arange(size)  # the patch of the first frame that represents each place
        if self.budget < size:
            cell, center = grid_cells(tokens.grid, self.budget)
            place, kept = torch.tensor(center)[cell], torch.tensor(center)
        else:
            kept = score.flatten().argsort(descending=True, stable=True)[: self.budget]
        if self.order == "raster":
            kept = kept.sort().values
        last = torch.where(torch.zeros(n, dtype=torch.bool).index_fill_(0, kept, True), torch.arange(n), -1)
        last = last.view(tokens.frames, size)
        last[0] = torch.where(last[0] < 0, place, last[0])
        token = torch.full((n,), -1).scatter_(0, kept, torch.arange(self.budget))
        assigned = token[last.cummax(0).values].flatten()
        return Reduction.pick(kept, by=self.spec, score=score.flatten()[kept], assigned=assigned, **tokens.layout)
