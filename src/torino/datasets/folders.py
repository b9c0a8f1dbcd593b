"""Photos stored as image files in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from torino.datasets.base import (
    Photo,
    Photos,
    SourceUnavailable,
    escape_surrogates,
    hash_parts,
    parse_lines,
    source_name,
    take_first,
)


class ImageFolder(Photos):
    """Image files below a folder; see :func:`torino.datasets.open_photos`.

    Parameters
    ----------
    root : Path
    files : iterable of (str, int)
        Paths relative to ``root`` and file sizes.
    captions : set of str
        Relative paths of the ``.txt`` files.
    limit : int or None
        Use only the first ``limit`` files.
    """

    def __init__(self, root: Path, files: Iterable[tuple[str, int]], captions: set[str], limit: int | None) -> None:
        selected, describe = take_first(sorted(files), limit, source_name(root))
        self._files = [name for name, _ in selected]
        super().__init__(self._files, hash_parts("folder", *selected), describe)
        self._root, self._captions = root, captions
        parents = {os.path.dirname(name) for name in self._files}  # noqa: PTH120 (fast for a million names)
        self._labelled = len(parents) > 1 and all(parent and "/" not in parent for parent in parents)

    def _photo(self, index: int) -> Photo:
        name = self._files[index]
        path = self._root / name
        if not self._root.is_dir():
            raise SourceUnavailable(self._root)
        texts: tuple[str, ...] = ()
        if Path(name).with_suffix(".txt").as_posix() in self._captions:
            texts = parse_lines(path.with_suffix(".txt").read_bytes())
        elif self._labelled:
            texts = (escape_surrogates(path.parent.name),)
        return Photo(self._names[index], path, texts)


def walk(root: Path) -> Iterator[tuple[str, int]]:
    """Yield the relative path and size of every file below a folder; follow links, but visit each folder once."""
    visited: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        folder = pending.pop()
        status = (root / folder).stat()
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(root / folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):  # makes the result deterministic
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    pending.append(name)
                elif entry.is_file():  # False for a dangling link
                    yield name, entry.stat().st_size
