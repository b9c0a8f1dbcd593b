"""Download files over HTTP with resume and checksum."""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout

from torino.core.errors import BadFile, Unreachable
from torino.version import __version__

Progress = Callable[[int, int], None]
"""Called with the bytes so far and the size of the file, 0 if unknown."""
CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without data
ATTEMPTS = 5
LOCK_SECONDS = 1.0
REMOVE = "Remove it to download it again."
ADVICE = "Download it by other means, and give its folder with --data."


def md5_of(path: Path) -> str:
    """Return the MD5 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def download(
    url: str,
    path: Path,
    *,
    md5: str,
    size: int | None = None,
    progress: Progress | None = None,
    pause: float = 1.0,
) -> Path:
    """Download a file, unless it is there already; an interrupted download resumes.

    The data is written to ``path`` with the ending ``.part``, which is renamed when its checksum is right.

    Parameters
    ----------
    url : str
    path : Path
    md5 : str
        Checksum of the file. A file with another one is refused.
    size : int, optional
        Its exact size.
    progress : callable, optional
        Called with the bytes so far.
    pause : float
        Seconds before the second attempt after a broken connection; doubled for each further one.

    Raises
    ------
    Unreachable
        If the server cannot be reached or refuses.
    BadFile
        If the content is wrong, or cannot be written.
    """
    if path.is_file():
        return check_file(path, md5, REMOVE)
    if urlsplit(url).scheme not in ("http", "https"):
        raise BadFile(f"{url} is not an address of the web: it must begin with https://. Fix the recipe.")
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{part}.lock", timeout=LOCK_SECONDS):
            if not path.is_file():
                _fetch(url, part, size, progress, pause)
                try:
                    check_file(part, md5, "It was removed; run the same command again to download it anew.")
                except BadFile:
                    part.unlink()
                    raise
                part.replace(path)
    except Timeout as error:
        raise BadFile(f"Another process is downloading {path}. Wait until it has finished.") from error
    except OSError as error:
        raise BadFile(f"Cannot write {part}: {error.strerror or error}. Free some space, or use another folder.") from (
            error
        )
    return path


def check_file(path: Path, md5: str, fix: str) -> Path:
    """Raise :class:`BadFile` if the MD5 of a file is another one."""
    found = md5_of(path)
    if found != md5:
        raise BadFile(f"{path} has the MD5 {found}, expected {md5}: it is damaged or another version. {fix}")
    return path


def _fetch(
    url: str,
    part: Path,
    size: int | None,
    progress: Progress | None,
    pause: float,
) -> None:
    """Write the content of an address to ``part``, from where it ends; try again after a broken connection."""
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            if _append(url, part, size, progress):
                return
            reason = "the connection ended early"
        except HTTPError as error:
            if error.code < 500:
                raise Unreachable(f"{url} cannot be downloaded: the server answers {error.code}. {ADVICE}") from error
            reason = f"the server answers {error.code}"
        except URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                host, problem = urlsplit(url).netloc, error.reason.strerror or error.reason
                raise Unreachable(
                    f"{url} was not downloaded: the certificate of {host} is not valid ({problem}). {ADVICE}"
                ) from error
            reason = str(error.reason)
        except (HTTPException, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
    raise Unreachable(
        f"{url} could not be downloaded in {ATTEMPTS} attempts: {reason}. Check the connection and run the same "
        f"command again, which continues. {ADVICE}"
    )


def _append(url: str, part: Path, size: int | None, progress: Progress | None) -> bool:
    """Request the rest of a file and append it; return whether the file is complete."""
    start = part.stat().st_size if part.is_file() else 0
    if size is not None and start >= size:
        return True
    headers = {"User-Agent": f"torino/{__version__}"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = cast(HTTPResponse, urlopen(Request(url, headers=headers), timeout=TIMEOUT))
    except HTTPError as error:
        if error.code == 416:  # nothing is left, or the file is another one: the checksum tells
            return True
        raise
    with response:
        resumed = response.status == 206
        start = start if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None and length.isdecimal() else size or 0
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                start += len(chunk)
                if progress is not None:
                    progress(start, total)
            file.flush()
            os.fsync(file.fileno())
    return start >= total
