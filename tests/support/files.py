"""Comparison and protection of folders, and damage to files."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.utime"}
_protected: list[str] = []
_hooks: list[object] = []


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder and its subfolders, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flip_byte(path: Path, position: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@contextmanager
def read_only(*folders: Path) -> Generator[None]:
    """Refuse all changes of folders within this process, as a read-only file system does, also to root.

    Audit hooks see every file that Python opens, makes, renames or removes. Content changed by other means is found by
    comparing the folders afterwards.
    """
    before = [read_folder(folder) for folder in folders]
    access = os.access
    if not _hooks:
        sys.addaudithook(_refuse_changes)
        _hooks.append(_refuse_changes)
    _protected[:] = [str(folder.resolve()) for folder in folders]

    def deny(path: Any, mode: int, **options: Any) -> bool:
        return not (mode & os.W_OK and _is_protected(path)) and access(path, mode, **options)

    os.access = deny
    try:
        yield
    finally:
        _protected.clear()
        os.access = access
    assert [read_folder(folder) for folder in folders] == before, "a folder was changed"


def _refuse_changes(event: str, arguments: tuple[Any, ...]) -> None:
    if not _protected:
        return
    if event == "open":
        path, mode, flags = arguments
        changes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & WRITING)
        paths = [path] if changes else []
    else:
        paths = [item for item in arguments if isinstance(item, str | bytes | os.PathLike)] if event in CHANGES else []
    for path in paths:
        if _is_protected(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))


def _is_protected(path: Any) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):  # a file descriptor
        return False
    text = os.path.realpath(os.fsdecode(path))
    return any(text == folder or text.startswith(folder + os.sep) for folder in _protected)
