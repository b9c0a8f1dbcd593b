"""Division of a patch grid into cells of nearly equal size, shared by the plain baselines."""

from __future__ import annotations

import math

import torch
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
