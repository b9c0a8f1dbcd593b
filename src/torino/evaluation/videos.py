"""Rows of video benchmarks in VLMEvalKit's layouts: Video-MME, MVBench and LongVideoBench, with local video files.

==============  ==========================================================================================
Video-MME       ``video_path`` (or ``video``, a name in the folder ``video``), ``candidates`` such as
                ``['A. Apples.', …]``, and the letter in ``answer``
MVBench         ``prefix`` and ``video``, ``candidates`` as texts, and the text of one in ``answer``; ``start`` and
                ``end`` in seconds where ``bound`` is True; frames of a folder (``data_type`` is ``frame``) are 3 per
                second
LongVideoBench  ``video_path``, ``candidates`` as texts, and the number of one in ``correct_choice``
==============  ==========================================================================================

The frames of a video are those shown in the middle of equal parts, as in VLMEvalKit's MVBench. For the other two,
VLMEvalKit takes the frames at i / (n + 1) of the video. Subtitles are not read, as in its default.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, cast

from torino.core.errors import BadFile
from torino.evaluation.images import ImageRef

if TYPE_CHECKING:
    from torino.datasets.video import Video

DEFAULT_FRAMES = 8
FRAME_RATE = 3.0  # of the folders of frames in MVBench
MAX_CANDIDATES = 100_000  # characters of a list
COLUMNS = ("video", "video_path")


@dataclass(frozen=True)
class VideoRef(ImageRef):
    """Location of a video, and the frames to read of it.

    Attributes
    ----------
    between : (float, float), optional
        The part that the question is about, in seconds.
    frames : int
        Number of frames to read.
    """

    between: tuple[float, float] | None = None
    frames: int = DEFAULT_FRAMES

    def read(self) -> Video:  # type: ignore[override]
        """Read the frames."""
        from torino.datasets.video import open_video

        rate = FRAME_RATE if self.path.is_dir() else None
        return open_video(self.path, fps=rate, frames=self.frames, between=self.between)

    def checksum(self) -> str:
        """Return the size of the file; videos are too large to be read for a checksum."""
        try:
            return str(self.path.stat().st_size)
        except OSError as error:
            raise BadFile(f"Cannot read {self.path}: {error.strerror or error}.") from error


def video_names(cells: Mapping[str, str]) -> tuple[str, ...]:
    """Return the file names to try for the video of a row.

    Examples
    --------
    >>> video_names({"video": "a", "video_path": "./video/a.mp4"})
    ('./video/a.mp4', 'a', 'a.mp4', 'video/a.mp4')
    >>> video_names({"video": "b.webm", "prefix": "video/ssv2_video/"})
    ('video/ssv2_video/b.webm', 'b.webm', 'video/b.webm')
    """
    path, video, prefix = (cells.get(name, "").strip() for name in ("video_path", "video", "prefix"))
    names = [path, f"{prefix.rstrip('/')}/{video}" if prefix and video else "", video]
    if video:
        file = video if re.search(r"\.\w{2,4}$", video) else f"{video}.mp4"
        names += [file, f"video/{file}"]
    return tuple(dict.fromkeys(name for name in names if name))


def video_part(cells: Mapping[str, str]) -> tuple[float, float] | None:
    """Return the seconds that the question is about, where the row says it."""
    if cells.get("bound", "").strip().lower() not in ("true", "1"):
        return None
    try:
        return float(cells["start"]), float(cells["end"])
    except (KeyError, ValueError):
        return None


def add_options(cells: dict[str, str]) -> str:
    """Replace the list of candidates by the columns A, B, … and the number of the right one by its letter.

    Returns
    -------
    str
        Why the row cannot be used; empty if it can.
    """
    text = cells.get("candidates", "")
    if not text:
        return ""
    try:
        candidates: Any = ast.literal_eval(text) if len(text) <= MAX_CANDIDATES else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # cells hold arbitrary text
        candidates = None
    if not isinstance(candidates, list | tuple) or not 2 <= len(cast(list[Any], candidates)) <= len(ascii_uppercase):
        return "candidates is not a list of two or more options"
    options = dict(zip(ascii_uppercase, map(str, cast(list[Any], candidates)), strict=False))
    if all(option.startswith(f"{letter}.") for letter, option in options.items()):
        options = {letter: option[2:].strip() for letter, option in options.items()}
    del cells["candidates"]
    cells |= options
    choice = cells.pop("correct_choice", "")
    if choice:
        if not re.fullmatch(r"[0-9]{1,2}", choice.strip()) or int(choice) >= len(options):
            return f"correct_choice is {choice!r}, not the number of a candidate"
        cells["answer"] = ascii_uppercase[int(choice)]
    return ""
