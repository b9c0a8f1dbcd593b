"""Remember which files were verified, so that the checksum of a large file is computed once and not at every use."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torino.core.io import cache_dir, read_json, write_json

MIN_BYTES = 1 << 20  # a smaller file is verified at every use
SETTLED = 2.0  # seconds; a file that changed later than this before its verification may change again unnoticed


class VerifiedFiles:
    """The files of a folder that were verified and did not change since.

    A file counts as unchanged if its size, time of modification, time of change and inode are the same. This is
    recorded in torino's cache folder, never in the folder itself. Without a usable cache folder, files are verified at
    every use.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._record: Path | None = None
        self._folder = ""
        self._states: dict[str, Any] = {}
        self._changed = False
        with suppress(ValueError, OSError, RuntimeError):  # an odd name or record, or the user has no home folder
            self._folder = str(folder.resolve())
            name = hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:32]
            self._record = cache_dir() / "verified" / f"{name}.json"
            states = read_json(self._record).get("files") if self._record.is_file() else None
            self._states = dict(states) if isinstance(states, dict) else {}  # pyright: ignore[reportUnknownArgumentType]

    def check(self, path: Path, verify: Callable[[], object], *, again: bool = False) -> None:
        """Call ``verify``, which raises if the file is damaged, unless the file was verified before.

        Parameters
        ----------
        path : Path
            A file of the folder.
        verify : callable
        again : bool
            Verify in any case.
        """
        try:
            status = path.stat()
        except OSError:
            verify()
            return
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if not again and self._states.get(path.name) == state:
            return
        verify()
        if status.st_size >= MIN_BYTES and time.time_ns() - max(state[1:3]) > SETTLED * 1e9:
            self._states[path.name] = state
            self._changed = True

    def save(self) -> None:
        """Record what was verified; nothing happens if the cache folder cannot be written."""
        if self._changed and self._record is not None:
            with suppress(ValueError, OSError):  # TorinoError is a ValueError
                write_json(self._record, {"folder": self._folder, "files": self._states})
