"""Records: answers in append-only files, one JSON object a line, that any number of crashes leave readable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from torino.core.errors import BadFile


class AnswerLog:
    """A file that grows by whole lines.

    Opening it cuts off a last line that a crash left unfinished. Lines given together go to the disk together.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = path.open("ab")
            _alone(self._file, path)
            whole = _whole(path)
            if whole < path.stat().st_size:
                self._file.truncate(whole)
        except OSError as error:
            raise BadFile(f"Cannot write {path}: {error.strerror or error}. Choose a writable folder.") from error

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; either all of them are readable afterwards, or the file ends before the first that is not."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        end = self._file.tell()
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._undo(end)
            raise BadFile(
                f"Cannot write {self.path}: {error.strerror or error}. What was answered before is kept: see to the "
                "disk and run the same command again."
            ) from error

    def _undo(self, end: int) -> None:
        """Take back half a line, as far as the disk allows; opening the file again would do the same."""
        try:
            self._file = self.path.open("ab")
            self._file.truncate(end)
        except OSError:
            pass

    def close(self) -> None:
        """See everything onto the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise BadFile(f"Cannot write {self.path}: {error.strerror or error}.") from error


def read_records(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Rows of files in order; what a crash left of a last line is passed over, any other bad line is an error."""
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    yield _row(path, number, line)
        except OSError as error:
            raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadFile(
            f"{path}, line {number} is not JSON ({error}). Remove that line; its answer is asked anew."
        ) from error
    if not isinstance(row, dict):
        raise BadFile(f"{path}, line {number} is no JSON object. Remove that line; its answer is asked anew.")
    return cast(dict[str, Any], row)


def _alone(file: IO[bytes], path: Path) -> None:
    """Refuse a file that another process is adding to; both would ask the same questions."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # Windows
        return
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BadFile(
            f"Another process is adding to {path}. Wait until it is done, or give each process a part of its own."
        ) from error
    except OSError:  # some network disks know no locks
        return


def _whole(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = size
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                return start + place + 1
            end = start
    return 0
