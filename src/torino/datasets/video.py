"""Read frames of a video, uniformly in time, from a file (PyAV) or from a folder of images."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torino.core.checks import check_type, to_integer, to_number
from torino.core.errors import BadFile, BadParameter
from torino.core.extras import optional_import
from torino.core.safety import PIXELS_VARIABLE, max_pixels
from torino.datasets.images import image_size, open_image

with optional_import("Reading videos needs", "torino[vlm]"):
    from PIL import Image

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

DEFAULT_FRAMES = 8
MAX_FRAMES = 4096
MIN_FPS, MAX_FPS = 1e-5, 1000.0
FRAMES_PIXELS = 8  # all frames together may have this many times the pixels of an image
FOLDER_RATE = 1.0  # frames per second of a folder that does not say it
SEEK_SECONDS = 2.0  # a frame further ahead is reached by seeking, not by decoding everything before it
FRAME_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".flv", ".ogv")
# Demuxers that read nothing but the given file; a playlist, for example, could name other files and hosts.
FORMATS = "mov,mp4,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,ogg,asf,gif,h264,hevc,ivf,m4v,apng,nut,dv,mxf"

_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video with their times.

    Attributes
    ----------
    frames : tuple of PIL images
        In mode RGB, upright, all of one size.
    times : tuple of float
        Seconds from the beginning of the video at which each frame is shown; increasing.
    duration : float
        Length of the video in seconds; 0 if it is a single frame of unknown length.
    name : str
        What it was read from.

    Examples
    --------
    >>> Video((Image.new("RGB", (4, 3)),) * 3, (0.0, 0.5, 1.0), 1.5)
    Video(3 frames of 4x3 pixels, 0 to 1 of 1.5 seconds)
    """

    frames: tuple[Image.Image, ...] = field(repr=False)
    times: tuple[float, ...]
    duration: float = 0.0
    name: str = "The video"

    def __post_init__(self) -> None:
        """Check that there is one increasing time for each frame, and one size for all."""
        if not self.frames or len(self.frames) != len(self.times):
            raise BadParameter(
                f"A video has one time for each of its frames, at least one; got {len(self.frames)} frames and "
                f"{len(self.times)} times."
            )
        for frame in self.frames:
            check_type("A frame", frame, Image.Image, "a PIL image")
        if any(later <= earlier for earlier, later in zip(self.times, self.times[1:], strict=False)):
            raise BadParameter(f"The times of the frames of a video must increase, got {list(self.times)}.")
        sizes = {frame.size for frame in self.frames}
        if len(sizes) > 1:
            given = ", ".join(f"{width}x{height}" for width, height in sorted(sizes))
            raise BadFile(f"{self.name} has frames of different sizes: {given}. Scale them to one size.")

    def __len__(self) -> int:
        """Return the number of frames."""
        return len(self.frames)

    def __repr__(self) -> str:
        """Return the numbers of frames and pixels, and the times."""
        width, height = self.frames[0].size
        frames = "1 frame" if len(self) == 1 else f"{len(self)} frames"
        return (
            f"Video({frames} of {width}x{height} pixels, {self.times[0]:.4g} to {self.times[-1]:.4g} of "
            f"{self.duration:.4g} seconds)"
        )

    @property
    def rate(self) -> float:
        """Frames per second of these frames: the mean over their times, or 1 for a single frame.

        Models that do not take a time for each frame read their times from this rate.
        """
        if len(self) > 1:
            return (len(self) - 1) / (self.times[-1] - self.times[0])
        return 1.0


Clip = str | os.PathLike[str] | Video
"""Input of :func:`open_video`: a video file, a folder of frames, or an opened video."""


def open_video(
    source: Clip,
    *,
    fps: float | None = None,
    frames: int | None = None,
    between: tuple[float, float] | None = None,
) -> Video:
    """Read some frames of a video, uniformly in time.

    Only the wanted frames are decoded, with those before them up to the last key frame. Frames are turned as the file
    says (phones record sideways). A damaged part is skipped with a warning. Nothing is downloaded, and formats that
    refer to other files are refused.

    Parameters
    ----------
    source : path or Video
        A video file, or a folder of images in natural order (``2.jpg`` before ``10.jpg``). A ``Video`` is returned
        unchanged, if neither ``fps`` nor ``frames`` is given.
    fps : float, optional
        Frames per second: those shown at 0, 1/fps, 2/fps … seconds. A video with fewer frames gives each once. For a
        folder, the rate of its images (1 by default); all of them are read unless ``frames`` is given.
    frames : int, optional
        Number of frames: those shown in the middle of as many equal parts. A video with fewer frames gives each once.
        For a file, the default is 8 frames, and only one of ``fps`` and ``frames`` can be given.
    between : (float, float), optional
        Read only this part, from and to these seconds.

    Returns
    -------
    Video

    Raises
    ------
    BadFile
        If the source is missing, empty, not a video, too damaged or too large: a frame may have as many pixels as an
        image, and all frames together 8 times as many.
    """
    if fps is not None:
        fps = to_number("fps", fps, MIN_FPS, MAX_FPS)
    count = None if frames is None else to_integer("frames", frames, 1)
    if count is not None and count > MAX_FRAMES:
        raise BadParameter(f"frames must be at most {MAX_FRAMES:,}, got {count:,}.")
    if isinstance(source, Video):
        if fps is not None or count is not None:
            raise BadParameter("This video has been read already. Give fps and frames where it is opened.")
        return source
    if not isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check
        raise BadFile(f"A video must be a path or a Video, got {type(source).__name__}.")
    path = _check_path(os.fspath(source))
    if path.is_dir():
        return _read_folder(path, FOLDER_RATE if fps is None else fps, count, between)
    if fps is not None and count is not None:
        raise BadParameter("Give fps or frames, not both: each of them says how many frames are read.")
    return _read_file(path, fps, count, between)


def sample_times(duration: float, *, fps: float | None = None, frames: int | None = None) -> list[float]:
    """Return the times to sample in a video of ``duration`` seconds; see :func:`open_video`.

    Examples
    --------
    >>> sample_times(4.0, frames=2), sample_times(2.5, fps=1.0), sample_times(0.0, fps=1.0)
    ([1.0, 3.0], [0.0, 1.0, 2.0], [0.0])
    """
    if fps is None:
        count = DEFAULT_FRAMES if frames is None else frames
        return [(i + 0.5) * duration / count for i in range(count)]
    count = max(1, -int(-duration * fps // 1))
    if count > MAX_FRAMES:
        raise BadParameter(
            f"{fps:g} frames per second of a video of {duration:,.0f} seconds are {count:,} frames, more than "
            f"{MAX_FRAMES:,}. Give a lower rate (fps), or the number of frames."
        )
    return [i / fps for i in range(count)]


def is_video(source: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder or has the suffix of a video file."""
    path = Path(source)
    return path.suffix.lower() in VIDEO_SUFFIXES or path.is_dir()


def check_pixels(name: str, size: tuple[int, int], count: int) -> None:
    """Refuse frames that are larger than an image may be, or take too much memory together."""
    width, height = size
    if width * height > max_pixels():
        raise BadFile(
            f"{name} has frames of {width}x{height} pixels; torino accepts up to {max_pixels():,} pixels. Scale it "
            f"down, or set the environment variable {PIXELS_VARIABLE} to a larger number."
        )
    limit = FRAMES_PIXELS * max_pixels()
    if width * height * count > limit:
        raise BadFile(
            f"{count:,} frames of {width}x{height} pixels of {name} take too much memory: torino reads up to "
            f"{limit // (width * height):,} of this size at once. Read fewer (frames, fps), or set the environment "
            f"variable {PIXELS_VARIABLE} to a larger number."
        )


# ------------------------------------------------------------------ folders


def _check_path(text: str) -> Path:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise BadFile(f"{text[:100]} is a URL, and torino does not download videos. Download it and give the file.")
    try:
        if "\0" in text:
            raise ValueError("a name has no NUL characters")
        path = Path(text).expanduser()
        if not path.is_dir() and not path.is_file():
            raise BadFile(f"There is no file or folder {text[:120]}. Give the path of a video or a folder of frames.")
        if path.is_file() and not path.stat().st_size:
            raise BadFile(f"{text[:120]} is empty (0 bytes). Download or copy it again.")
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, ~ of no user, or a NUL character
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"Cannot read {text[:120]!r}: {getattr(error, 'strerror', None) or error}.") from error
    return path


def _part(name: object, duration: float, between: tuple[float, float] | None) -> tuple[float, float]:
    """Return the beginning and the length of the part to read."""
    if between is None:
        return 0.0, duration
    start, end = max(to_number("between", between[0]), 0.0), min(to_number("between", between[1]), duration)
    if start >= end:
        raise BadFile(f"{name} has {duration:.4g} seconds, and none between {between[0]:g} and {between[1]:g}.")
    return start, end - start


def _read_folder(folder: Path, rate: float, frames: int | None, between: tuple[float, float] | None) -> Video:
    files = sorted((file for file in folder.iterdir() if file.suffix.lower() in FRAME_SUFFIXES), key=_natural_order)
    if not files:
        raise BadFile(
            f"{folder} has no images. Give a video file, or a folder with the frames of a video as "
            f"{', '.join(suffix[1:] for suffix in FRAME_SUFFIXES)}."
        )
    start, length = _part(folder, len(files) / rate, between)
    first = min(round(start * rate), len(files) - 1)
    chosen: Sequence[int] = range(first, max(first + 1, min(round((start + length) * rate), len(files))))
    if frames is not None and frames < len(chosen):
        chosen = [first + int(time) for time in sample_times(len(chosen), frames=frames)]
    elif len(chosen) > MAX_FRAMES:
        raise BadFile(f"{folder} has {len(files):,} frames; torino reads up to {MAX_FRAMES:,}. Give frames=N.")
    check_pixels(str(folder), image_size(files[chosen[0]]), len(chosen))
    images = tuple(open_image(files[i]) for i in chosen)
    return Video(images, tuple(i / rate for i in chosen), len(files) / rate, str(folder))


def _natural_order(file: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort numbers in names by their value."""
    parts = re.findall(r"[0-9]+|[^0-9]+", file.stem)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts], file.name


# ------------------------------------------------------------------ files


def _read_file(path: Path, fps: float | None, frames: int | None, between: tuple[float, float] | None) -> Video:
    def choose(duration: float) -> list[float]:
        start, length = _part(path, duration, between)
        return [start + time for time in sample_times(length, fps=fps, frames=frames)]

    with _opened(path) as reader:
        times = choose(reader.duration)
        check_pixels(reader.name, reader.size, len(times))
        found = reader.read(times)
        if reader.end is not None and times[-1] > reader.end:  # shorter than its header says
            warnings.warn(f"{path} ends after {reader.end:.4g} of {reader.duration:.4g} seconds.", stacklevel=3)
            reader.duration = reader.end
            found = reader.read(choose(reader.duration))
        if reader.damaged:
            warnings.warn(f"{path} is damaged; {reader.damaged} packets could not be decoded.", stacklevel=3)
        times, images = zip(*found, strict=True)
        if {image.size for image in images} != {images[0].size}:  # the resolution of a stream may change
            images = tuple(image.resize(images[0].size, Image.Resampling.BICUBIC) for image in images)
        return Video(images, times, reader.duration, str(path))


@contextmanager
def _opened(path: Path) -> Generator[_Reader]:
    with optional_import("Reading video files needs", "torino[video]"):
        import av
        import av.error
        import av.logging
    av.logging.set_level(None)  # what FFmpeg says of a damaged file goes into our own sentence
    try:
        # Playlists, which name other files, are not in the list of formats.
        with path.open("rb") as file, av.open(file, "r", options={"format_whitelist": FORMATS}) as container:
            yield _Reader(container, str(path))
    except (BadFile, BadParameter):
        raise
    except (av.error.FFmpegError, ValueError, OSError, ArithmeticError) as error:
        raise _broken(str(path), error) from error


def _broken(name: str, error: Exception | None = None) -> BadFile:
    reason = "" if error is None else f" ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
    return BadFile(
        f"{name} cannot be read as a video{reason}. It may be damaged, cut off, or of an unknown format: give an MP4, "
        "MOV, MKV, WebM or AVI file, or a folder of frames."
    )


class _Reader:
    """Reads frames of an open container at given times.

    Attributes
    ----------
    duration : float
        Seconds, as the file says, or as its packets say.
    end : float or None
        Time of the end of the last frame, once the reader has reached it.
    damaged : int
        Number of packets that could not be decoded.
    """

    def __init__(self, container: InputContainer, name: str) -> None:
        self.name, self.damaged = name, 0
        self.end: float | None = None
        self._container = container
        streams = [s for s in container.streams.video if "attached_pic" not in str(s.disposition).lower()]
        if not streams:
            raise BadFile(f"{name} has no video, only sound or other data. Give a file with a video stream.")
        self._stream: VideoStream = streams[0]
        if self._stream.codec_context is None:  # pyright: ignore[reportUnnecessaryComparison]: of an unknown codec
            raise _broken(name)
        self._stream.thread_type = "AUTO"
        self.size = (self._stream.codec_context.width, self._stream.codec_context.height)
        check_pixels(name, self.size, 1)
        self._unit = float(self._stream.time_base or 0) or 1e-6
        self._start = int(self._stream.start_time or 0)
        rate = self._stream.average_rate or self._stream.guessed_rate
        self._step = 1 / float(rate) if rate else 0.0
        self._can_seek = True
        self._reach = SEEK_SECONDS
        self.duration = self._find_duration()

    def read(self, times: Sequence[float]) -> list[tuple[float, Image.Image]]:
        """Return time and image of the frames shown at increasing times, each frame once."""
        import av
        import av.error

        found: list[tuple[float, Image.Image]] = []
        current: VideoFrame | None = None
        self._rewind()
        frames = self._decode()
        upcoming = next(frames, None)
        if upcoming is None:
            raise _broken(self.name)
        for target in times:
            position = self._time(upcoming if upcoming is not None else current)
            if self._can_seek and upcoming is not None and target - position > self._reach:
                frames = self._seek(target)
                landed = next(frames, None)
                if landed is None or self._time(landed) > target:  # past the target, or behind the end of the file
                    self._can_seek = False
                    self._rewind()
                    frames = self._decode()
                    landed = next(frames, None)
                elif self._time(landed) <= position:  # key frames are further apart
                    self._reach = 2 * (target - position)
                current, upcoming = None, landed
            while upcoming is not None and (current is None or self._time(upcoming) <= target + self._unit / 2):
                current, upcoming = upcoming, next(frames, None)
            if upcoming is None and current is not None:
                self.end = self._time(current) + self._frame_seconds(current)
            if current is not None:
                shown = max(self._time(current), 0.0)
                if not found or shown > found[-1][0]:
                    try:
                        found.append((shown, _upright(current)))
                    except (av.error.FFmpegError, ValueError) as error:
                        raise _broken(self.name, error) from error
        if not found:
            raise _broken(self.name)
        return found

    def _time(self, frame: VideoFrame | None) -> float:
        if frame is None or frame.pts is None:
            return 0.0
        return (frame.pts - self._start) * self._unit

    def _frame_seconds(self, frame: VideoFrame) -> float:
        length = int(frame.duration or 0) * self._unit
        return length or self._step

    def _find_duration(self) -> float:
        if self._stream.duration:
            return int(self._stream.duration) * self._unit
        if self._container.duration:
            return self._container.duration / 1e6
        last = 0.0  # the header does not say it: read the times of all packets, without decoding them
        try:
            for packet in self._container.demux(self._stream):
                if packet.pts is not None:
                    last = max(last, (packet.pts + int(packet.duration or 0) - self._start) * self._unit)
        except (ValueError, OSError):
            self.damaged += 1
        return last

    def _rewind(self) -> None:
        self._container.seek(self._start, stream=self._stream, backward=True)

    def _seek(self, target: float) -> Iterator[VideoFrame]:
        import av
        import av.error

        try:
            self._container.seek(self._start + int(target / self._unit), stream=self._stream, backward=True)
        except (av.error.FFmpegError, OSError):
            return iter(())
        return self._decode()

    def _decode(self) -> Iterator[VideoFrame]:
        """Decode from the current position; packets that cannot be decoded are counted and skipped."""
        import av
        import av.error

        number = 0
        try:
            for packet in self._container.demux(self._stream):
                try:
                    frames: list[Any] = packet.decode()
                except (av.error.InvalidDataError, ValueError):
                    self.damaged += 1
                    continue
                for frame in frames:
                    if frame.pts is None:  # raw streams have no times
                        frame.pts = self._start + round(number * self._step / self._unit)
                    number += 1
                    if self._time(frame) >= 0:
                        yield frame
        except (av.error.FFmpegError, OSError):
            self.damaged += 1


def _upright(frame: VideoFrame) -> Image.Image:
    image = frame.to_image().convert("RGB")
    angle = round(frame.rotation) % 360
    if angle in _TURNS:
        return image.transpose(_TURNS[angle])
    return image.rotate(angle, Image.Resampling.BICUBIC, expand=True) if angle else image
