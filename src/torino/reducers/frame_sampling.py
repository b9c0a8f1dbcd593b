"""Frame sampling, a plain baseline for videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torino.core.tokens import VisualTokens
from torino.reducers.base import register
from torino.reducers.uniform import Uniform


@register("frames")
@dataclass(frozen=True)
class FrameSampling(Uniform):
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

    for_videos: ClassVar[bool] = True

    def _spans(self, tokens: VisualTokens) -> int:
        return -(-self.budget // (tokens.grid[0] * tokens.grid[1]))
