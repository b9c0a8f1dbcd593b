"""Resize the pixels of images before a vision tower, for the baseline ``downsample``."""

from __future__ import annotations

import torch
from torch import Tensor


def resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images (n, channels, height, width), bicubic and antialiased; images of this size stay as they are."""
    if tuple(pixels.shape[-2:]) == tuple(size):
        return pixels
    wide = torch.nn.functional.interpolate(pixels.float(), size=size, mode="bicubic", antialias=True)
    return wide.to(pixels.dtype)


def resize_packed(
    patches: Tensor, grid: tuple[int, int, int], small: tuple[int, int], merge: int, patch: int, frames: int
) -> Tensor:
    """Resize one image that Qwen's processor has cut into patches.

    Parameters
    ----------
    patches : Tensor of shape (times·rows·columns, channels·frames·patch²)
        In the order of the tower: groups of ``merge``×``merge`` patches, row by row.
    grid : (int, int, int)
        Times, rows and columns of patches.
    small : (int, int)
        Rows and columns of patches afterwards.
    merge, patch, frames : int
        Patches that merge on each axis, pixels of a patch on each axis, and frames of a patch.

    Returns
    -------
    Tensor of shape (times·rows·columns, channels·frames·patch²)
        For the smaller grid.
    """
    times, rows, columns = grid
    parts = patches.reshape(times, rows // merge, columns // merge, merge, merge, -1, frames, patch, patch)
    # times, frames, channels, then the three parts of the height and of the width
    image = parts.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(times * frames, -1, rows * patch, columns * patch)
    image = resize(image, (small[0] * patch, small[1] * patch))
    parts = image.reshape(times, frames, -1, small[0] // merge, merge, patch, small[1] // merge, merge, patch)
    return parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * small[0] * small[1], -1)
