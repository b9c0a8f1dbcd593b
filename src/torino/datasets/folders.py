"""Photos that are files in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from torino.datasets.base import Gone, Photo, Photos, as_lines, called, hash_of, limited, printable


class ImageFolder(Photos):
    """Image files below a folder; see :func:`open_photos`."""

    def __init__(self, top: Path, files: Iterable[tuple[str, int]], notes: set[str], limit: int | None) -> None:
        chosen, describe = limited(sorted(files), limit, called(top))
        self._files = [name for name, _ in chosen]
        super().__init__(self._files, hash_of("folder", *chosen), describe)
        self._top, self._notes = top, notes
        parents = {os.path.dirname(name) for name in self._files}  # noqa: PTH120 (a million names)
        self._labelled = len(parents) > 1 and all(parent and "/" not in parent for parent in parents)

    def _photo(self, index: int) -> Photo:
        name = self._files[index]
        path = self._top / name
        if not self._top.is_dir():
            raise Gone(self._top)
        texts: tuple[str, ...] = ()
        if Path(name).with_suffix(".txt").as_posix() in self._notes:
            texts = as_lines(path.with_suffix(".txt").read_bytes())
        elif self._labelled:
            texts = (printable(path.parent.name),)
        return Photo(self._names[index], path, texts)


def walk(top: Path) -> Iterator[tuple[str, int]]:
    """Files below a folder by their relative names, with their sizes; links are followed, but not in circles."""
    seen: set[tuple[int, int]] = set()
    todo = [""]
    while todo:
        inside = todo.pop()
        status = (top / inside).stat()
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(top / inside) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):  # so that circles break where they always do
                name = f"{inside}/{entry.name}" if inside else entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    todo.append(name)
                elif entry.is_file():  # not so for a link into the void
                    yield name, entry.stat().st_size
