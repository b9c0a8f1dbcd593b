"""Folders of stores, their locks, and atomic text files."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from torino.core.errors import BadFile
from torino.core.io import write_atomic
from torino.core.shards import SHARDS

LOCK_FILE = ".lock"


def prepare_folder(folder: Path, files: Sequence[str], kind: str) -> None:
    """Create the folder of a store and that of its shards.

    Parameters
    ----------
    folder : Path
    files : sequence of str
        Files that the store may contain beside its shards; the first one identifies it.
    kind : str
        What the store is, for the error message.

    Raises
    ------
    BadFile
        If the folder contains other files and no store, or cannot be written.
    """
    known = (*files, SHARDS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [path.name for path in folder.iterdir() if path.name not in known and not path.name.startswith(".")]
        if others and not (folder / files[0]).is_file():
            raise BadFile(
                f"{folder} contains other files, such as {others[0]}, and no {kind}. Use a new or empty folder."
            )
        (folder / SHARDS).mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


@contextmanager
def lock_folder(folder: Path, in_use: str, name: str = LOCK_FILE) -> Generator[None]:
    """Hold the lock of a folder; the operating system releases it when the process dies.

    Parameters
    ----------
    folder : Path
        An existing folder; it gets the lock file.
    in_use : str
        Message of the error if another run holds the lock.
    name : str
        Name of the lock file.

    Raises
    ------
    BadFile
        If another run holds the lock, or the lock file cannot be written.
    """
    lock = FileLock(folder / name, timeout=0)
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
