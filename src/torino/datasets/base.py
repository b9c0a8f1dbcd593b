"""What every source of photos has, and the small things that several of them share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torino.core.errors import BadFile

if TYPE_CHECKING:  # Pillow is only fetched by those who open a photo
    from torino.datasets.images import Picture

T = TypeVar("T")
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
# Columns of a table and fields of a note that say something about a photo; the first that is there counts.
TEXT_COLUMNS = ("captions", "caption", "texts", "text", "label", "labels")


@dataclass(frozen=True)
class Photo:
    """One photo and what is said about it.

    Attributes
    ----------
    name : str
        Its file name or key; no two photos of a source share one.
    data : path, bytes or PIL image
        For :func:`torino.datasets.images.open_image`. It may be broken: nobody has looked inside yet.
    texts : tuple of str
        Captions, or the label; empty if there are none.
    """

    name: str
    data: Picture
    texts: tuple[str, ...] = ()


class Gone(BadFile):
    """The source itself can no longer be read, as when a disk is taken away; not the fault of one photo."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was there when it was opened and is gone now. Is the disk still connected?")


class Photos(ABC):
    """A source of photos. Threads may share it.

    Attributes
    ----------
    fingerprint : str
        Says which photos these are: a hash of their names and sizes, or of what the format keeps about them. It does
        not change when the files are moved, and the pixels themselves are not read for it.
    describe : str
        One line for a card.
    nearby : (int, int)
        How many photos in a row are cheap to read together, and how many such photos are held in memory at once; a
        reader in random order that heeds it spares the disk. (1, 1) where any order is as good.
    """

    def __init__(self, names: Sequence[str], fingerprint: str, describe: str, nearby: tuple[int, int] = (1, 1)) -> None:
        self._names = distinct([printable(name) for name in names])
        self.fingerprint, self.describe, self.nearby = fingerprint, printable(describe), nearby

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self._names)

    def __getitem__(self, index: int) -> Photo:
        """Return photo ``index``, counted from 0."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no photo {index} among {len(self)}.")
        return self._photo(index % len(self))

    def __iter__(self) -> Iterator[Photo]:
        """Go through all photos in order."""
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        """Say what is in here."""
        return f"Photos({self.describe})"

    def names(self) -> list[str]:
        """Names of all photos, in order."""
        return list(self._names)

    @abstractmethod
    def _photo(self, index: int) -> Photo:
        """Read photo ``index``."""


def as_texts(value: Any, classes: Sequence[str] = ()) -> tuple[str, ...]:
    """What a cell of a table says: captions as they are, the number of a class as its name where that is known."""
    if isinstance(value, str):
        return (value.strip(),) if value.strip() else ()
    if isinstance(value, list | tuple):
        return tuple(text for one in cast(Sequence[Any], value) for text in as_texts(one, classes))
    if isinstance(value, int) and not isinstance(value, bool):
        return (classes[value] if 0 <= value < len(classes) else str(value),)
    return ()


def as_lines(data: bytes) -> tuple[str, ...]:
    """The lines of a text file that say something."""
    return tuple(line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip())


def limited(items: list[T], limit: int | None, called: str) -> tuple[list[T], str]:
    """The first ``limit`` of some photos, and a line that says so."""
    if limit is None or limit >= len(items):
        return items, f"{len(items):,} photos of {called}"
    return items[:limit], f"the first {limit:,} photos of {called}"


def called(*paths: Path) -> str:
    """A name for a card: the last part of a path, never where it lies on this machine."""
    first = paths[0].absolute().name
    return first if len(paths) == 1 else f"{first} to {paths[-1].name}"


def hash_of(*parts: object) -> str:
    """A hash of things that print the same everywhere."""
    found = hashlib.sha256()
    for part in parts:
        found.update(repr(part).encode() + b"\n")
    return found.hexdigest()[:32]


def printable(name: str) -> str:
    """A text that any file can hold: bytes of a file name that are no UTF-8 are written out."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def distinct(names: Sequence[str]) -> list[str]:
    """Number names that come again, so that each says one photo."""
    if len(set(names)) == len(names):
        return list(names)
    taken = set(names)
    seen: set[str] = set()
    times: dict[str, int] = {}
    told: list[str] = []
    for name in names:
        new = name
        while new in seen or (new != name and new in taken):
            times[name] = times.get(name, 1) + 1
            new = f"{name}#{times[name]}"
        seen.add(new)
        told.append(new)
    return told


def short(error: Exception) -> str:
    """What an error says, on one line."""
    text = " ".join((str(error).strip() or type(error).__name__).split())
    return text if len(text) < 200 else text[:200] + "…"


def unreadable(path: Path, error: OSError) -> BadFile:
    """Build the sentence for a file or folder that the system does not let us read."""
    where = error.filename or path
    return BadFile(f"Cannot read {where}: {error.strerror or error}. Give photos that this account may read.")
