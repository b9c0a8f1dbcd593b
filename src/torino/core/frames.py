"""The time axis of visual tokens: a video has several frames of the same patch grid, an image is one frame.

Patches are numbered frame by frame, and row by row within a frame: patch (f, r, c) is f·rows·columns + r·columns + c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from torino.core.checks import check_tensor, describe_value, is_integer
from torino.core.errors import BadParameter, BadTokens, TorinoError


class Layout(TypedDict):
    """Grid, number of frames and times of an image or video, as keyword arguments of Reduction and VisualTokens."""

    grid: tuple[int, int]
    frames: int
    times: tuple[float, ...] | None


def sequence_layout(count: int) -> Layout:
    """Return the layout of ``count`` tokens in one row."""
    return {"grid": (1, count), "frames": 1, "times": None}


def to_frames(frames: object, error: type[TorinoError] = BadTokens) -> int:
    """Return a number of frames as int; raise an error unless it is a whole number of at least 1."""
    if not is_integer(frames) or cast(int, frames) < 1:
        raise error(f"frames must be a whole number of at least 1, got {describe_value(frames)}; an image is 1 frame.")
    return int(cast(int, frames))


def to_times(times: object, frames: int, error: type[TorinoError] = BadTokens) -> tuple[float, ...] | None:
    """Return the times of the frames as a tuple of float; raise an error unless they are one finite number per frame.

    Examples
    --------
    >>> to_times([0, 0.5], frames=2)
    (0.0, 0.5)
    """
    if times is None:
        return None
    if isinstance(times, Tensor | np.ndarray):
        times = times.tolist()
    if not isinstance(times, Sequence) or isinstance(times, str | bytes):
        raise error(f"times must be seconds, one number per frame, or None; got {describe_value(times)}.")
    given = list(cast(Sequence[object], times))
    numbers = (int, float, np.integer, np.floating)
    for number, value in enumerate(given):
        if isinstance(value, bool) or not isinstance(value, numbers) or not isfinite(value):
            raise error(
                f"times must be finite numbers of seconds, got {describe_value(value)} for frame {number}; "
                "use None for unknown times."
            )
    seconds = tuple(float(cast(float, value)) for value in given)
    if len(seconds) != frames:
        raise error(f"times must have one number for each of the {frames} frames, got {len(seconds)}.")
    late = next((number for number in range(1, frames) if seconds[number] < seconds[number - 1]), None)
    if late is not None:
        raise error(
            f"times must not decrease, but frame {late} is at {seconds[late]:g} s, after {seconds[late - 1]:g} s; "
            "sort the frames by time."
        )
    return seconds


def locate(patches: Tensor, grid: tuple[int, int], frames: int = 1) -> Tensor:
    """Return frame, row and column of patches, shape (n, 3); −1 for indices outside, such as the CLS token.

    Examples
    --------
    >>> locate(torch.tensor([0, 7, -1]), grid=(2, 3), frames=2).tolist()
    [[0, 0, 0], [1, 0, 1], [-1, -1, -1]]
    """
    rows, columns = grid
    check_tensor("patches", patches, BadParameter)
    place = torch.stack([patches // (rows * columns), patches // columns % rows, patches % columns], -1)
    outside = (patches < 0) | (patches >= frames * rows * columns)
    return place.masked_fill(outside[..., None], -1)


def pack_layouts(layouts: Sequence[Layout]) -> dict[str, Tensor]:
    """Return the arrays that store layouts in a file; images without times need only ``grids``."""
    arrays = {"grids": torch.tensor([layout["grid"] for layout in layouts])}
    if any(layout["frames"] > 1 or layout["times"] is not None for layout in layouts):
        arrays["frames"] = torch.tensor([layout["frames"] for layout in layouts])
        seconds = [layout["times"] or (torch.nan,) * layout["frames"] for layout in layouts]
        arrays["times"] = torch.tensor([value for times in seconds for value in times], dtype=torch.float64)
    return arrays


def unpack_layouts(arrays: Mapping[str, Tensor], grids: Sequence[tuple[int, int]]) -> list[Layout]:
    """Return the layouts stored by :func:`pack_layouts`; raise ``ValueError`` if the arrays do not fit together."""
    frames, times = unpack_frames(arrays, len(grids))
    return [
        {"grid": grid, "frames": count, "times": seconds}
        for grid, count, seconds in zip(grids, frames, times, strict=True)
    ]


def unpack_frames(arrays: Mapping[str, Tensor], count: int) -> tuple[list[int], list[tuple[float, ...] | None]]:
    """Return numbers of frames and times of ``count`` images from the arrays ``frames`` and ``times``, if any."""
    if "frames" not in arrays:
        if "times" in arrays:
            raise ValueError("there are times but no frames")
        return [1] * count, [None] * count
    stored = arrays["frames"].reshape(-1) if arrays["frames"].ndim == 0 else arrays["frames"]
    if stored.is_floating_point() or stored.is_complex() or stored.shape != (count,):
        raise ValueError(f"frames is {stored.dtype} of shape {tuple(stored.shape)}, not integers of shape ({count},)")
    frames: list[int] = stored.long().tolist()
    if min(frames) < 1:
        raise ValueError(f"a number of frames is {min(frames)}, not at least 1")
    if "times" not in arrays:
        return frames, [None] * count
    seconds = arrays["times"]
    if not seconds.is_floating_point() or seconds.shape != (sum(frames),):
        raise ValueError(
            f"times is {seconds.dtype} of shape {tuple(seconds.shape)}, not floats of shape ({sum(frames)},)"
        )
    parts = seconds.double().split(frames)
    return frames, [None if bool(part.isnan().all()) else to_times(part, len(part)) for part in parts]
