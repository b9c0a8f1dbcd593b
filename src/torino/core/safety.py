"""Handle files from others safely: limits and paths.

Limits keep a small crafted file from filling the memory. Two environment variables raise them: ``TORINO_MAX_PIXELS``
for images, ``TORINO_MAX_BYTES`` for other data.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torino.core.errors import BadFile, BadParameter

PIXELS_VARIABLE, BYTES_VARIABLE = "TORINO_MAX_PIXELS", "TORINO_MAX_BYTES"
MAX_PIXELS = 2**26  # 67 megapixels, more than nearly all cameras; an opened image takes about 8 bytes per pixel
MAX_BYTES = 2**28
MAX_RATIO = 10  # larger data is accepted up to this many times its size on disk


# ---------------------------------------------------------------------- limits


def max_pixels() -> int:
    """Return the largest number of pixels of an image: ``TORINO_MAX_PIXELS``, or 67 million."""
    return _limit(PIXELS_VARIABLE, MAX_PIXELS)


def max_bytes() -> int:
    """Return how many bytes data may take in memory, however small its file is: ``TORINO_MAX_BYTES``, or 256 MiB."""
    return _limit(BYTES_VARIABLE, MAX_BYTES)


def check_expansion(what: str, stored: int, expanded: int) -> None:
    """Refuse data that is small on disk and large in memory, before it is read.

    Parameters
    ----------
    what : str
        Names the data in the error message.
    stored, expanded : int
        Bytes on disk, and bytes in memory as the file declares them. Up to :func:`max_bytes`, or 10 times the size on
        disk, are accepted.
    """
    limit = expansion_limit(stored)
    if expanded > limit:
        raise BadFile(
            f"{what} takes {stored:,} bytes on disk and {expanded:,} in memory; torino accepts up to {limit:,}. If you "
            f"trust the file, set the environment variable {BYTES_VARIABLE} to a larger number."
        )


def expansion_limit(stored: int) -> int:
    """Return the number of bytes in memory up to which :func:`check_expansion` accepts data."""
    return max(max_bytes(), MAX_RATIO * stored)


def check_size(what: str, size: int, share: int = 1) -> None:
    """Refuse data larger than ``1 / share`` of :func:`max_bytes`, before it is read."""
    limit = max_bytes() // share
    if size > limit:
        raise BadFile(
            f"{what} has {size:,} bytes; torino accepts up to {limit:,}. If you trust the file, set the environment "
            f"variable {BYTES_VARIABLE} to at least {size * share}."
        )


def _limit(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text) or not int(text):
        raise BadParameter(f"The environment variable {variable} must be a whole number above 0, got {text!r}.")
    return int(text)


# ---------------------------------------------------------------------- paths


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file is below a folder, after symbolic links and ``..`` are resolved."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a name that no file can have
        return False
