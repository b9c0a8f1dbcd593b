"""VidCom²: more tokens for frames unlike the rest of the video, and in a frame the tokens unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._cells import share_out
from torino.reducers._checks import (
    budget_error,
    check_choice,
    check_count,
    check_number,
    space_features,
    space_signals,
)
from torino.reducers._similarity import nearest_in_frame, unit_vectors
from torino.reducers.base import AutoSpace, Order, Reducer, register

WIDTHS = tuple(2.0**exponent for exponent in range(-3, 2))


@register("vidcom2")
@dataclass(frozen=True)
class VidCom2(Reducer):
    """Keep patches unlike the means of frame and video, more of unusual frames (VidCom²).

    Only the half of the channels with the least variance over the video is used, and patches are scaled to length 1.
    The similarity to a center c is Σ_α exp(−‖x − c‖²/2α) for α = 1/8, 1/4, 1/2, 1, 2; s is that to the mean of the
    video and t that to the mean of the frame. With p the softmax of −mean(s)/T over frames, a frame of S patches gets
    S·(B/N)·(1 + p − mean(p)) tokens, at most S. In each frame the patches of lowest s + t are kept, ties to the lowest
    index.

    Compares projected tokens, as released, where the model provides them (``space``). Differences from the release:
    numbers of tokens are rounded so that their sum is the budget (vLLM does this too), a frame gets none if there are
    fewer tokens than frames, and computations are in float64.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    temperature : float
        T of the softmax over frames.
    space : {"auto", "features", "projected"}
        Vectors that are compared. ``"auto"``: the projected tokens if there are any, else those of the feature layer.
    order : {"raster", "native"}
        By position, or frame by frame from the least similar patch.
    """

    budget: int
    temperature: float = 0.01
    space: AutoSpace = "auto"
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    for_videos: ClassVar[bool] = True
    paper: ClassVar[str] = "Liu et al., EMNLP 2025, arXiv 2505.14454"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·D)"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("temperature", self.temperature, 1e-6)
        check_choice("space", self.space, AutoSpace)
        check_choice("order", self.order, Order)
        for name, signals in space_signals(self.space).items():  # of this instance, not of the class
            object.__setattr__(self, name, signals)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image or video."""
        n, size = len(tokens), tokens.grid[0] * tokens.grid[1]
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        features = space_features(tokens, self.space, self.name).double().cpu()
        variance = features.var(0, correction=0)
        ranked = (variance / variance.max().clamp(min=1e-300)).round(decimals=12).argsort(stable=True)
        quiet = ranked[: max(1, features.shape[1] // 2)]
        unit = unit_vectors(features[:, quiet]).view(tokens.frames, size, -1)
        to_video = gaussian_similarity(unit, unit.mean((0, 1)))
        score = (to_video + gaussian_similarity(unit, unit.mean(1, keepdim=True))).round(decimals=12)
        share = (-to_video.mean(1) / self.temperature).softmax(0)
        wanted = (size * self.budget / n * (1 + share - share.mean())).clamp(max=size)
        most = torch.full((tokens.frames,), size)
        counts = share_out(wanted.round(decimals=9).numpy(), self.budget, most.numpy())
        lowest = score.argsort(dim=1, stable=True)
        kept = torch.cat([lowest[frame, :count] + frame * size for frame, count in enumerate(counts.tolist())])
        if self.order == "raster":
            kept = kept.sort().values
        assigned = nearest_in_frame(tokens.patches, kept, tokens.frames)
        return Reduction.pick(kept, by=self.spec, score=-score.flatten()[kept], assigned=assigned, **tokens.layout)


def gaussian_similarity(unit: Tensor, center: Tensor) -> Tensor:
    """Return Σ_α exp(−‖x − c‖²/2α) of vectors and a center, which is broadcast, shape (frames, patches)."""
    distance = ((unit - center) ** 2).sum(-1)
    return torch.stack([(-distance / (2 * width)).exp() for width in WIDTHS]).sum(0)
