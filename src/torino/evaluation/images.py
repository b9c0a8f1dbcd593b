"""Images of benchmark samples, which are read on demand."""

from __future__ import annotations

import binascii
import zlib
from dataclasses import dataclass
from pathlib import Path

from torino.core.errors import BadFile
from torino.core.safety import check_size


@dataclass(frozen=True)
class ImageRef:
    """Location of an image: base64 text within a larger file, or a file of its own.

    Attributes
    ----------
    path : Path
    key : str
        Equal for equal images of a task, so that results computed for an image serve all questions about it.
    start, length : int
        Byte range of the base64 text in ``path``; length 0 means that the whole file is the image.
    """

    path: Path
    key: str
    start: int = 0
    length: int = 0

    def read(self) -> bytes:
        """Return the bytes of the image file (JPEG, PNG, …)."""
        try:
            if not self.length:
                check_size(str(self.path), self.path.stat().st_size)
                return self.path.read_bytes()
            check_size(f"An image in {self.path}", self.length)
            with self.path.open("rb") as file:
                file.seek(self.start)
                return decode_base64(file.read(self.length))
        except BadFile:
            raise
        except (OSError, ValueError) as error:
            raise BadFile(f"Cannot read an image from {self.path}: {error}. Did the file change?") from error

    def checksum(self) -> str:
        """Return a checksum of the image file."""
        return f"{zlib.crc32(self.read()):08x}"


def decode_base64(text: bytes) -> bytes:
    """Decode base64, with or without a ``data:`` header; anything else raises ``ValueError``."""
    if text.startswith(b"data:"):
        text = text.partition(b",")[2]
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        return binascii.a2b_base64(b"".join(text.split()), strict_mode=True)  # base64 wrapped into lines
