"""Synthetic clips of concepts with known content: still scenes, pans, cuts and objects that appear."""

from __future__ import annotations

import torch
from torch import Tensor

from torino import VisualTokens

WIDTH = 64


def scene(grid: tuple[int, int], seed: int, first: int = 0, concepts: int = 8) -> Tensor:
    """Return the patches of a scene of rectangular regions, one concept each, shape (rows, columns, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    picture = torch.zeros(grid, dtype=torch.int64)
    for concept in range(concepts):
        top, left = (int(torch.randint(size, (), generator=generator)) for size in grid)
        picture[top : top + 1 + grid[0] // 2, left : left + 1 + grid[1] // 2] = concept
    return torch.eye(WIDTH)[first + picture]


def still(frames: int, grid: tuple[int, int] = (6, 6), seed: int = 0) -> VisualTokens:
    """Return a scene that does not change."""
    return clip([scene(grid, seed)] * frames)


def cuts(frames: int, every: int = 1, grid: tuple[int, int] = (6, 6)) -> VisualTokens:
    """Return a clip with a cut to another scene, of other concepts, after every ``every`` frames."""
    shots = [scene(grid, number, first=number * 8 % WIDTH) for number in range(-(-frames // every))]
    return clip([shots[frame // every] for frame in range(frames)])


def pan(frames: int, grid: tuple[int, int] = (6, 6), seed: int = 0) -> VisualTokens:
    """Return a window that moves over a wide scene, by one column a frame."""
    wide = scene((grid[0], grid[1] + frames), seed)
    return clip([wide[:, frame : frame + grid[1]] for frame in range(frames)])


def clip(pictures: list[Tensor], times: tuple[float, ...] | None = None) -> VisualTokens:
    """Return a video of pictures of shape (rows, columns, D)."""
    rows, columns, width = pictures[0].shape
    patches = torch.stack(pictures).reshape(-1, width)
    return VisualTokens(patches, (rows, columns), frames=len(pictures), times=times)
