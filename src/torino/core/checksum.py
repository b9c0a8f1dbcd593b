"""Checksums inside files, so that damage is noticed when a file is read: safetensors, zip, JSON and JSONL.

All of them are CRC-32, which detects any change of a few bytes and is faster than a disk. Files without a checksum, for
example of earlier versions or other libraries, are accepted as they are.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torino.core.errors import BadFile

FIELD = "checksum"
"""Field of a JSON object, and of the metadata of a safetensors file."""
UNSET = "crc32:00000000"
"""Value of the field while the checksum is computed."""
_VALUE = re.compile(r"crc32:[0-9a-f]{8}")
_RECORD = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\s*\Z')
_CHUNK = 1 << 22  # bytes that are read at once
_MAX_HEADER = 100_000_000  # bytes; the limit of safetensors


# ------------------------------------------------------------------ JSON objects


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the checksum of its other fields.

    Examples
    --------
    >>> with_checksum({"k": 20})
    {'k': 20, 'checksum': 'crc32:71c7953a'}
    """
    return {**value, FIELD: _json_checksum(json.loads(json.dumps(value)))}  # as it is read back: all names are texts


def check_object(path: str | Path, value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object without its checksum; raise :class:`BadFile` if the checksum is wrong."""
    stored = value.get(FIELD)
    if not isinstance(stored, str) or not _VALUE.fullmatch(stored):
        return value
    rest = {name: item for name, item in value.items() if name != FIELD}
    try:
        correct = _json_checksum(rest) == stored
    except RecursionError:
        correct = False
    if not correct:
        raise BadFile(
            f"{path} is damaged or was edited: its content does not match its checksum. Restore it from a copy or "
            f'create it again; if you edited it on purpose, remove its field "{FIELD}".'
        )
    return rest


def _json_checksum(value: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"


# ------------------------------------------------------------------ lines of a JSONL file


def encode_record(row: Mapping[str, Any]) -> bytes:
    r"""Return a row as a line of JSON that ends with its checksum.

    Examples
    --------
    >>> encode_record({"n": 1})
    b'{"n": 1, "crc32": "0af73c42"}\n'
    """
    line = json.dumps(row, ensure_ascii=False).encode(errors="replace")  # a lone surrogate becomes a question mark
    return line[:-1] + b', "crc32": "%08x"}\n' % zlib.crc32(line)


def split_record(line: bytes) -> tuple[bytes, bool]:
    """Return a line without its checksum, and whether the checksum is correct; True if there is none."""
    match = _RECORD.search(line)
    if match is None:
        return line, True
    content = line[: match.start()] + b"}"
    return content, zlib.crc32(content) == int(match[1], 16)


# ------------------------------------------------------------------ files of tensors


def seal_safetensors(path: Path) -> None:
    """Sort the metadata of a new file, which makes its bytes reproducible, and fill in its checksum.

    The metadata must contain the field ``checksum`` with the value :data:`UNSET`.
    """
    with path.open("r+b") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        header = json.loads(file.read(length))
        metadata = dict(sorted(header.pop("__metadata__").items()))
        values = {"__metadata__": metadata, **header}
        text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) != length:
            raise OSError("its header cannot be rewritten")
        crc = zlib.crc32(text, zlib.crc32(prefix))
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
        file.seek(8)
        file.write(text.replace(_field(UNSET), _field(f"crc32:{crc:08x}"), 1))


def verify_safetensors(path: Path) -> bool | None:
    """Read a whole file and return whether its checksum is correct; None if it has none.

    A file that is not safetensors has none; its reader reports that.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            text = file.read(length) if length <= _MAX_HEADER else b""
            stored = _stored_checksum(text)
            if stored is None:
                return None
            crc = zlib.crc32(text.replace(_field(stored), _field(UNSET), 1), zlib.crc32(prefix))
            while chunk := file.read(_CHUNK):
                crc = zlib.crc32(chunk, crc)
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    return stored == f"crc32:{crc:08x}"


def stored_checksum(path: Path) -> str:
    """Return the checksum in the header of a safetensors file; empty if there is none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return _stored_checksum(file.read(length) if length <= _MAX_HEADER else b"") or ""
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error


def verify_zip(path: Path) -> bool | None:
    """Read a whole zip archive, such as a torch checkpoint, and return whether its checksums are correct.

    None if it is not an archive, or was written without checksums. torch does not verify them.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(member.CRC for member in archive.infolist()):
                return None
            try:
                return archive.testzip() is None
            except (ValueError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile):  # the header of a member
                return False
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RuntimeError, zipfile.BadZipFile):
        return None


def damaged_file(path: Path) -> BadFile:
    """Build the error for a file whose checksum is wrong."""
    return BadFile(
        f"{path} is damaged: its content does not match its checksum. Restore it from a copy, or create or download "
        "it again."
    )


def _field(value: str) -> bytes:
    return f'"{FIELD}":"{value}"'.encode()


def _stored_checksum(text: bytes) -> str | None:
    """Return the checksum in the header of a safetensors file, or None."""
    try:
        metadata = json.loads(text)["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    stored = cast(dict[str, Any], metadata).get(FIELD) if isinstance(metadata, dict) else None
    if not isinstance(stored, str) or not _VALUE.fullmatch(stored) or _field(stored) not in text:
        return None
    return stored
