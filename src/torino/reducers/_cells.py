"""Division of a patch grid, and of a video, into cells of nearly equal size, shared by the plain baselines."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def grid_cells(grid: tuple[int, int], count: int) -> tuple[Tensor, list[int]]:
    """Divide a grid into exactly ``count`` rectangular cells that are as square as possible.

    The grid is cut into bands of rows, and each band into cells; bands differ by at most one cell, and cells of a band
    by at most one column. If the grid can be divided evenly, all cells are equal.

    Parameters
    ----------
    grid : (int, int)
        Rows and columns of patches.
    count : int
        Number of cells, at most the number of patches.

    Returns
    -------
    cell : Tensor of shape (N,), int64
        The cell of each patch. Cells are numbered in raster order.
    center : list of int
        The patch at the center of each cell; of several, the first.

    Examples
    --------
    >>> grid_cells((4, 4), 4)[0].reshape(4, 4).tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    >>> grid_cells((2, 3), 5)
    (tensor([0, 1, 1, 2, 3, 4]), [0, 1, 3, 4, 5])
    """
    rows, columns = grid
    # a band needs at most as many cells as there are columns, and at least one row
    possible = range(math.ceil(count / columns), min(rows, count) + 1)
    bands = min(possible, key=lambda n: (abs(math.log(rows / n) - math.log(columns * n / count)), n))
    cell = torch.empty(grid, dtype=torch.int64)
    center: list[int] = []
    for band in range(bands):
        top, bottom = rows * band // bands, rows * (band + 1) // bands
        first, last = count * band // bands, count * (band + 1) // bands
        for number in range(first, last):
            left = columns * (number - first) // (last - first)
            right = columns * (number - first + 1) // (last - first)
            cell[top:bottom, left:right] = number
            center.append((top + (bottom - top - 1) // 2) * columns + left + (right - left - 1) // 2)
    return cell.flatten(), center


def video_cells(frames: int, grid: tuple[int, int], count: int, spans: int) -> tuple[Tensor, list[int]]:
    """Divide a video into exactly ``count`` cells: spans of frames of nearly equal length, and each into grid cells.

    The numbers of cells of two spans differ by at most one. With one frame this is :func:`grid_cells`.

    Parameters
    ----------
    frames : int
    grid : (int, int)
        Rows and columns of patches of a frame.
    count : int
        Number of cells, at least ``spans`` and at most ``spans`` times the number of patches of a frame.
    spans : int
        Number of spans, at most ``frames``.

    Returns
    -------
    cell : Tensor of shape (N,), int64
        The cell of each patch. Cells are numbered span by span, and in raster order within a span.
    center : list of int
        The patch at the center of each cell, in the middle frame of its span; of several, the first.

    Examples
    --------
    >>> video_cells(frames=4, grid=(1, 2), count=3, spans=2)
    (tensor([0, 0, 0, 0, 1, 2, 1, 2]), [0, 4, 5])
    """
    divide = lru_cache(maxsize=2)(grid_cells)  # at most two numbers of cells occur
    parts: list[Tensor] = []
    center: list[int] = []
    size = grid[0] * grid[1]
    for span in range(spans):
        first, last = frames * span // spans, frames * (span + 1) // spans
        cell, centers = divide(grid, count * (span + 1) // spans - count * span // spans)
        parts.append((cell + len(center)).repeat(last - first))
        middle = first + (last - first - 1) // 2
        center += [middle * size + patch for patch in centers]
    return torch.cat(parts), center


def share_out(wanted: NDArray[np.float64], total: int, most: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return whole numbers that add up to ``total``, as close to the wanted ones as their limits allow.

    Numbers are rounded down, and the largest remainders are rounded up, ties to the first. None exceeds ``most``, and
    each is at least 1 where ``most`` is, if the total suffices.

    Examples
    --------
    >>> share_out(np.array([2.5, 0.2, 1.3]), 4, np.array([9, 9, 9])).tolist()
    [2, 1, 1]
    """
    least = np.minimum(most, 1) if total >= (most > 0).sum() else np.zeros_like(most)
    counts = np.clip(np.floor(wanted).astype(np.int64), least, most)
    while counts.sum() < total:
        left = np.where(counts < most, wanted - counts, -np.inf)
        order = np.argsort(-left, kind="stable")[: total - counts.sum()]
        counts[order[np.isfinite(left[order])]] += 1
    while counts.sum() > total:
        left = np.where(counts > least, wanted - counts, np.inf)
        order = np.argsort(left, kind="stable")[: counts.sum() - total]
        counts[order[np.isfinite(left[order])]] -= 1
    return counts
