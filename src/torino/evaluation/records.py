"""Crash-safe append-only JSONL; each line ends with a checksum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from filelock import FileLock, Timeout

from torino.core.checksum import encode_record, split_record
from torino.core.errors import BadFile
from torino.core.schema import Count, Positive, parse_json


class AnswerRow(TypedDict):
    """An answer of a run."""

    task: str
    index: str
    setting: str
    image: str
    prediction: str
    tokens: Count
    before: Positive
    seconds: NotRequired[dict[str, float]]


class FailedRow(TypedDict):
    """A question of a run that could not be answered."""

    task: str
    index: str
    setting: str
    error: str
    seconds: NotRequired[dict[str, float]]


class AnswerLog:
    """A file that grows by whole lines.

    Opening it truncates a last line that a crash left unfinished, and locks the file against other writers with
    ``.<name>.lock`` beside it. The system releases the lock when the process ends, however it ends.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        try:
            self._file = path.open("ab")
            end = _last_line_end(path)
            if end < path.stat().st_size:
                self._file.truncate(end)
        except OSError as error:
            self._lock.release()
            raise BadFile(f"Cannot write {path}: {error.strerror or error}. Choose a writable folder.") from error

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows and flush them; after an error the file ends with the last complete line before it."""
        text = b"".join(map(encode_record, rows))
        end = self._file.tell()
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._truncate(end)
            raise BadFile(
                f"Cannot write {self.path}: {error.strerror or error}. Earlier answers are kept: free some disk space "
                "and run the same command again."
            ) from error

    def _truncate(self, end: int) -> None:
        """Remove an incomplete line if the disk allows it; otherwise the next opening does."""
        try:
            self._file = self.path.open("ab")
            self._file.truncate(end)
        except OSError:
            pass

    def close(self) -> None:
        """Sync the file to disk and release the lock."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise BadFile(f"Cannot write {self.path}: {error.strerror or error}.") from error
        finally:
            self._lock.release()


def read_records(paths: Iterable[Path], kind: Any = dict) -> Iterator[dict[str, Any]]:
    """Yield the rows of the files; skip a last line cut short by a crash, and raise for any other bad line.

    ``kind`` describes the fields of a row; see :func:`torino.core.schema.check_schema`. A line without a checksum, as
    earlier versions wrote it, is accepted.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    yield _parse_row(path, number, line, kind)
        except OSError as error:
            raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error


def read_answer_rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the answers and failures in the files of a run; see :func:`read_records`."""
    return read_records(paths, FailedRow | AnswerRow)


def _parse_row(path: Path, number: int, line: bytes, kind: Any) -> dict[str, Any]:
    content, correct = split_record(line)
    if not correct:
        raise BadFile(
            f"{path}, line {number} is damaged: it does not match its checksum. Remove that line; its question is "
            "asked again."
        )
    try:
        return parse_json(content, kind)
    except ValueError as error:
        raise BadFile(
            f"{path}, line {number} cannot be used: {error}. Remove that line; its question is asked again."
        ) from error


def _lock(path: Path) -> FileLock:
    """Lock a file against other writers, which would ask the same questions."""
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise BadFile(
            f"Another process is writing {path}. Wait until it finishes, or give each process its own --shard."
        ) from error
    except (OSError, NotImplementedError):  # some network file systems do not support locks
        pass
    return lock


def _last_line_end(path: Path) -> int:
    """Return the number of bytes up to the end of the last complete line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = size
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            position = file.read(end - start).rfind(b"\n")
            if position >= 0:
                return start + position + 1
            end = start
    return 0
