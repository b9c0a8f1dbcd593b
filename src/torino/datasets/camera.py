"""Make clips from photos: a camera that holds still, pans or zooms, and cuts between shots. Needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torino.core.checks import check_type
from torino.core.errors import BadParameter
from torino.core.extras import optional_import
from torino.datasets.images import Picture, open_image
from torino.datasets.video import Video

with optional_import("Making clips needs", "torino[vlm]"):
    from PIL import Image

Window = tuple[float, float, float]
"""What the camera sees of a photo: the center, from 0 to 1 of width and height, and the share of the longest square."""
WHOLE: Window = (0.5, 0.5, 1.0)


@dataclass(frozen=True)
class Shot:
    """One shot of a clip: the camera moves over a photo at constant speed.

    Attributes
    ----------
    photo : path, bytes or PIL image
    seconds : float
    start, end : (float, float, float)
        What the camera sees first and last: the center, from 0 to 1 of width and height, and the side of the square as
        a share of the shorter side of the photo. The square is moved inside the photo if it reaches over the border.
        Equal windows hold the camera still.
    """

    photo: Picture
    seconds: float
    start: Window = WHOLE
    end: Window | None = None

    def __post_init__(self) -> None:
        """Check the windows."""
        for x, y, share in (self.start, self.end or self.start):
            if not (0 <= x <= 1 and 0 <= y <= 1 and 0 < share <= 1):
                raise BadParameter(
                    f"A window has a center from 0 to 1 and a share above 0 and up to 1, got {(x, y, share)}."
                )
        if not self.seconds > 0:
            raise BadParameter(f"A shot must last more than 0 seconds, got {self.seconds}.")


def make_clip(shots: Sequence[Shot], *, fps: float = 10.0, side: int = 224) -> Video:
    """Film some shots one after another, with a cut between them.

    Parameters
    ----------
    shots : sequence of Shot
    fps : float
        Frames per second.
    side : int
        Width and height of a frame in pixels.

    Examples
    --------
    >>> photo = Image.linear_gradient("L")
    >>> make_clip([Shot(photo, 1.0), Shot(photo, 0.5, (0, 0, 0.5), (1, 1, 0.5))], fps=4, side=8)
    Video(6 frames of 8x8 pixels, 0 to 1.25 of 1.5 seconds)
    """
    if not shots:
        raise BadParameter("A clip needs at least one shot.")
    frames: list[Image.Image] = []
    for shot in shots:
        check_type("A shot", shot, Shot, "a Shot")
        photo, count = open_image(shot.photo), max(1, round(shot.seconds * fps))
        still = shot.end is None or shot.end == shot.start
        last = None
        for i in range(count):
            if last is None or not still:
                last = _film(photo, shot, i / max(count - 1, 1), side)
            frames.append(last)
    return Video(tuple(frames), tuple(i / fps for i in range(len(frames))), len(frames) / fps, "The clip")


def _film(photo: Image.Image, shot: Shot, progress: float, side: int) -> Image.Image:
    """Return what the camera sees after a share of the shot."""
    end = shot.end or shot.start
    x, y, share = ((1 - progress) * a + progress * b for a, b in zip(shot.start, end, strict=True))
    width, height = photo.size
    square = max(share * min(width, height), 1.0)
    left = min(max(x * width - square / 2, 0.0), width - square)
    top = min(max(y * height - square / 2, 0.0), height - square)
    return photo.resize((side, side), Image.Resampling.BICUBIC, (left, top, left + square, top + square))
