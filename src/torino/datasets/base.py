"""Base class of photo sources and helpers that several sources share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from torino.core.errors import BadFile

if TYPE_CHECKING:  # listing photos does not need Pillow
    from torino.datasets.images import Picture

T = TypeVar("T")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
SAMPLE = 8  # photos whose contents identify a source
TEXT_COLUMNS = ("captions", "caption", "texts", "text", "label", "labels")  # the first one that exists is used


@dataclass(frozen=True)
class Photo:
    """A photo and its captions.

    Attributes
    ----------
    name : str
        File name or key, unique within its source.
    data : path, bytes or PIL image
        Input of :func:`torino.datasets.images.open_image`. It is not decoded yet, so it may be broken.
    texts : tuple of str
        Captions or the label; empty if there are none.
    """

    name: str
    data: Picture
    texts: tuple[str, ...] = ()


class SourceUnavailable(BadFile):
    """Raised when the whole source can no longer be read, for example after a disk was disconnected."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} existed when it was opened but cannot be found now. Is the disk still connected?")
        self.path = path

    def __reduce__(self) -> tuple[type[SourceUnavailable], tuple[Path]]:
        """Rebuild the error from its path in another process."""
        return type(self), (self.path,)


class Photos(ABC):
    """Base class of an indexable source of photos. Threads may share it.

    Attributes
    ----------
    fingerprint : str
        Identifies the photos: a hash of their names and sizes, or of the metadata that the format stores. It does not
        change if the files are moved. Computing it does not read any pixels.
    describe : str
        One-line description for a card.
    locality : (int, int)
        Number of consecutive photos that are cheap to read together, and number of such photos that are cached in
        memory. Reading in a random order that respects it saves disk accesses. (1, 1) if the order does not matter.
    """

    def __init__(
        self, names: Sequence[str], fingerprint: str, describe: str, locality: tuple[int, int] = (1, 1)
    ) -> None:
        self._names = make_unique([escape_surrogates(name) for name in names])
        self.fingerprint, self.describe, self.locality = fingerprint, escape_surrogates(describe), locality

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self._names)

    def __getitem__(self, index: int) -> Photo:
        """Return photo ``index``, counted from 0."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"Photo index {index} is out of range for {len(self)} photos.")
        return self._photo(index % len(self))

    def __iter__(self) -> Iterator[Photo]:
        """Iterate over all photos in order."""
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        """Return a short description."""
        return f"Photos({self.describe})"

    def names(self) -> list[str]:
        """Return the names of all photos, in order."""
        return list(self._names)

    @abstractmethod
    def _photo(self, index: int) -> Photo:
        """Read photo ``index``."""


def parse_texts(value: Any, class_names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the captions in a table cell. A class index becomes its class name if that is known."""
    if isinstance(value, str):
        return (value.strip(),) if value.strip() else ()
    if isinstance(value, list | tuple):
        return tuple(text for item in cast(Sequence[Any], value) for text in parse_texts(item, class_names))
    if isinstance(value, int) and not isinstance(value, bool):
        return (class_names[value] if 0 <= value < len(class_names) else str(value),)
    return ()


def parse_lines(data: bytes) -> tuple[str, ...]:
    """Return the non-empty lines of a text file."""
    return tuple(line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip())


def take_first(items: list[T], limit: int | None, source: str) -> tuple[list[T], str]:
    """Return the first ``limit`` items and a one-line description of the selection."""
    if limit is None or limit >= len(items):
        return items, f"{len(items):,} photos of {source}"
    return items[:limit], f"the first {limit:,} photos of {source}"


def source_name(*paths: Path) -> str:
    """Return a name for a card: the last part of the path, without the directories of this machine."""
    first = paths[0].absolute().name
    return first if len(paths) == 1 else f"{first} to {paths[-1].name}"


def hash_parts(*parts: object) -> str:
    """Return a hash of the ``repr`` of all parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()[:32]


class _IndexedPhotos(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def hash_sample(photos: _IndexedPhotos) -> str:
    """Return a hash of the contents of up to 8 photos, spread evenly over the source.

    It notices photos that were replaced by others of the same names and sizes, which do not change the fingerprint.
    """
    digest, count = hashlib.sha256(), min(SAMPLE, len(photos))
    for number in range(count):
        try:
            data = photos[number * len(photos) // count].data
            content = Path(data).read_bytes() if isinstance(data, str | Path) else data
            digest.update(content if isinstance(content, bytes) else content.tobytes())
        except SourceUnavailable:
            raise
        except (BadFile, OSError):  # a photo that cannot be used is skipped and reported later
            digest.update(b"unreadable")
    return digest.hexdigest()[:32]


def escape_surrogates(name: str) -> str:
    """Return text that can be encoded as UTF-8; bytes of a file name that are not UTF-8 become escape sequences."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def make_unique(names: Sequence[str]) -> list[str]:
    """Append a number to repeated names so that every name is unique."""
    if len(set(names)) == len(names):
        return list(names)
    given = set(names)
    used: set[str] = set()
    counts: dict[str, int] = {}
    unique: list[str] = []
    for name in names:
        candidate = name
        while candidate in used or (candidate != name and candidate in given):
            counts[name] = counts.get(name, 1) + 1
            candidate = f"{name}#{counts[name]}"
        used.add(candidate)
        unique.append(candidate)
    return unique


def format_error(error: Exception) -> str:
    """Return the message of an error on one line of at most 200 characters."""
    text = " ".join((str(error).strip() or type(error).__name__).split())
    return text if len(text) < 200 else text[:200] + "…"


def unreadable_error(path: Path, error: OSError) -> BadFile:
    """Return the error for a file or folder that the operating system refuses to read."""
    return BadFile(f"Cannot read {error.filename or path}: {error.strerror or error}. Check its permissions.")
