"""Average pooling over a grid of cells, a plain baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._cells import video_cells
from torino.reducers._checks import budget_error, check_choice, check_count, check_flag
from torino.reducers.base import Order, Reducer, register

CANCELLED = 1e-6  # length of a mean, relative to that of its patches, below which it has no direction


@register("pool")
@dataclass(frozen=True)
class Pool(Reducer):
    """Average the patches of each cell of a uniform grid, whatever the image shows.

    The patch grid is divided into B rectangular cells of nearly equal size, as square as possible; each becomes the
    mean of its patches. Where the grid can be divided evenly this is adaptive average pooling; elsewhere cells do not
    overlap, so every patch counts once. The mean of n different patches is shorter than they are. With
    ``keep_norm=True`` it is scaled to their mean length.

    Video: Frames share the budget equally. With fewer tokens than frames, each token averages a span of frames.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    keep_norm : bool
        Whether to scale each mean to the mean length of its patches. A mean of patches that cancel each other stays as
        it is.
    order : {"raster", "native"}
        By the central patch of each cell, or cell by cell in bands of rows.
    """

    budget: int
    keep_norm: bool = False
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "none, a plain baseline"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·D)"
    original_license: ClassVar[str] = "no original"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_flag("keep_norm", self.keep_norm)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        if self.budget > len(tokens):
            raise budget_error(self.name, self.budget, len(tokens))
        cell, center = video_cells(tokens.frames, tokens.grid, self.budget, min(tokens.frames, self.budget))
        order = torch.tensor(center).argsort() if self.order == "raster" else torch.arange(self.budget)
        label = order.argsort()[cell]
        sizes = label.bincount(minlength=self.budget)
        weight = 1 / sizes.double()
        if self.keep_norm:
            patches = tokens.patches.detach().double().cpu()
            zeros = torch.zeros(self.budget, patches.shape[1], dtype=torch.float64)
            mean = zeros.index_add(0, label, patches) * weight[:, None]
            norms = torch.zeros(self.budget, dtype=torch.float64).index_add(0, label, patches.norm(dim=1)) * weight
            length = mean.norm(dim=1)
            cancelled = length <= CANCELLED * norms  # the direction of such a mean is a rounding error
            weight = weight * torch.where(cancelled, 1.0, norms / length.where(~cancelled, 1.0))
        sources = label.argsort(stable=True)
        return Reduction(
            sources=sources,
            weights=weight[label[sources]].float(),
            offsets=offsets_from_lengths(sizes.tolist()),
            anchor=torch.tensor(center)[order],
            concept=torch.full((self.budget,), -1),
            role=("primary",) * self.budget,
            by=self.spec,
            assigned=label,
            score=torch.full((self.budget,), torch.nan),
            **tokens.layout,
        )
