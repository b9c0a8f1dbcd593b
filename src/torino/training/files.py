"""Folder locks and atomic text files."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from torino.core.errors import BadFile
from torino.core.io import write_atomic

LOCK_FILE = ".lock"


@contextmanager
def lock_folder(folder: Path, in_use: str) -> Generator[None]:
    """Hold the lock of a folder; the operating system releases it when the process dies.

    Parameters
    ----------
    folder : Path
        An existing folder; it gets the file ``.lock``.
    in_use : str
        Message of the error if another run holds the lock.

    Raises
    ------
    BadFile
        If another run holds the lock, or the lock file cannot be written.
    """
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:  # an OSError as well, so it is caught first
        raise BadFile(in_use) from error
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def cannot_write(folder: Path, error: OSError) -> BadFile:
    """Build the error for a folder that cannot be written to."""
    return BadFile(f"Cannot write to {folder}: {error.strerror or error}. Choose a writable folder.")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    write_atomic(path, write)
