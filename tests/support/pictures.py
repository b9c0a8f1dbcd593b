"""Synthetic pictures for drawing tests."""

from __future__ import annotations

import numpy as np
from PIL import Image


def make_numbered_photo(rows: int = 3, columns: int = 4, cell: int = 10) -> Image.Image:
    """A picture in which patch p has the color (20 p, 0, 100)."""
    value = (20 * np.arange(rows * columns)).reshape(rows, columns).repeat(cell, 0).repeat(cell, 1)
    return Image.fromarray(np.stack([value, 0 * value, 0 * value + 100], -1).astype(np.uint8))
