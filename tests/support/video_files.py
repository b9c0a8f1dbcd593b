"""Small video files, written with PyAV: each frame has one gray value, which tells its number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

av = pytest.importorskip("av")
GRAY = 9  # difference between the gray values of two frames


def write_clip(
    path: Path,
    frames: int = 20,
    fps: float = 10.0,
    *,
    size: tuple[int, int] = (48, 32),
    codec: str = "mpeg4",
    gap: int = 5,
    times: Sequence[float] | None = None,
    turn: float = 0.0,
    cut: int | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    """Write a clip whose frame i is gray value ``GRAY * (i % 26)``, brighter at the left edge.

    Parameters
    ----------
    gap : int
        Frames from one key frame to the next.
    times : sequence of float, optional
        Seconds of each frame, for a variable rate.
    turn : float
        Rotation in the file, counterclockwise.
    cut : int, optional
        Bytes to keep of the file.
    """
    width, height = size
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.gop_size = gap
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if turn:
            stream.set_display_rotation(turn)
        for i in range(frames):
            pixels = np.full((height, width, 3), GRAY * (i % 26), np.uint8)
            pixels[:, : width // 4] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(1000 * times[i]), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if cut is not None:
        path.write_bytes(path.read_bytes()[:cut])
    return path


def frame_number(image: object) -> int:
    """Return the number of a frame of :func:`write_clip`, read from the middle of its right half."""
    values = np.asarray(image)
    height, width = values.shape[:2]
    return round(float(values[height // 2 - 4 : height // 2 + 4, -width // 4 - 4 : -width // 4 + 4].mean()) / GRAY)
