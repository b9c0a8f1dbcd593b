"""Limits of the explorer, and how it turns requests into errors."""

from __future__ import annotations

from dataclasses import dataclass

from torino.core.checks import to_integer
from torino.core.errors import BadParameter
from torino.core.safety import max_pixels
from torino.serving.server.options import MEGABYTE


@dataclass(frozen=True)
class ExplorerOptions:
    """Limits and permissions of one explorer.

    Parameters
    ----------
    host : str
        Address that the explorer listens on; requests must name it, an IP address or ``localhost``.
    max_bytes, max_pixels : int
        Largest photo that is accepted, as a file and decoded.
    uploads : int
        Photos of visitors that are kept in memory; the oldest is forgotten first.
    encoded : int
        Photos whose tower output is kept in memory.
    max_tokens : int
        Longest answer.
    waiting : int
        Most requests that wait for the model; further ones get 429.
    edits : bool
        Whether visitors may rename concepts and store photos.
    """

    host: str = "127.0.0.1"
    max_bytes: int = 32 * MEGABYTE
    max_pixels: int = 1 << 25
    uploads: int = 32
    encoded: int = 12
    max_tokens: int = 128
    waiting: int = 24
    edits: bool = True

    def __post_init__(self) -> None:
        """Refuse limits out of range."""
        for name in ("max_bytes", "max_pixels", "uploads", "encoded", "max_tokens", "waiting"):
            to_integer(name, getattr(self, name), 1)
        if self.max_pixels > max_pixels():
            raise BadParameter(
                f"max_pixels is {self.max_pixels:,}, and torino opens images of up to {max_pixels():,} pixels. Choose "
                "fewer, or set the environment variable TORINO_MAX_PIXELS."
            )
