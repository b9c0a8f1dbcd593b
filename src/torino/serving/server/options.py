"""Settings of the server, besides those of reduction."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from torino.core.checks import to_integer, to_number
from torino.core.errors import BadParameter
from torino.core.safety import max_pixels

KEY_VARIABLE = "TORINO_API_KEY"
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Settings of one server.

    Parameters
    ----------
    name : str
        Name of the model in requests and responses.
    api_keys : tuple of str
        A request must carry one of them; without any, every request is accepted.
    batch : int
        Most requests that are answered together.
    window : float
        Seconds for which an idle server waits for more requests before it starts a batch.
    queue : int
        Most requests that wait; further ones get 429.
    max_tokens : int
        Longest answer, and the length of an answer if the request does not say.
    max_images : int
        Most images of a request.
    max_bytes : int
        Most bytes of a request, and of a fetched image.
    max_pixels : int
        Most pixels of an image.
    timeout : float
        Seconds after which a request is given up.
    read_timeout : float
        Seconds in which a client must have sent its headers, and then its body.
    allowed_hosts : tuple of str
        Hosts from which images are fetched, as ``host`` or ``host:port``; other images must be ``data:`` URLs.
    fetch_timeout : float
        Seconds in which an image must have been fetched.
    cache_bytes : int
        Size of the cache of reduced images; 0 turns it off.
    grace : float
        Seconds that running requests are given when the server is stopped.
    """

    name: str = "torino"
    api_keys: tuple[str, ...] = ()
    batch: int = 8
    window: float = 0.005
    queue: int = 64
    max_tokens: int = 512
    max_images: int = 8
    max_bytes: int = 32 * MEGABYTE
    max_pixels: int = 1 << 25
    timeout: float = 300.0
    read_timeout: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    fetch_timeout: float = 10.0
    cache_bytes: int = 256 * MEGABYTE
    grace: float = 30.0

    def __post_init__(self) -> None:
        """Refuse settings out of range, empty keys, and hosts that are not names."""
        for name in ("batch", "max_tokens", "max_images", "max_bytes", "max_pixels"):
            to_integer(name, getattr(self, name), 1)
        for name in ("queue", "cache_bytes"):
            to_integer(name, getattr(self, name), 0)
        for name in ("timeout", "read_timeout", "fetch_timeout"):
            if not to_number(name, getattr(self, name)) > 0:
                raise BadParameter(f"{name} must be above 0 seconds, got {getattr(self, name)}.")
        for name in ("window", "grace"):
            if not to_number(name, getattr(self, name)) >= 0:
                raise BadParameter(f"{name} must be at least 0 seconds, got {getattr(self, name)}.")
        if self.max_pixels > max_pixels():
            raise BadParameter(
                f"max_pixels is {self.max_pixels:,}, and torino opens images of up to {max_pixels():,} pixels. Choose "
                "fewer, or set the environment variable TORINO_MAX_PIXELS."
            )
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise BadParameter("An API key is empty or not ASCII. Give letters and digits, or omit it.")
        for host in self.allowed_hosts:
            check_host(host)

    @property
    def most_requests(self) -> int:
        """Most requests that are running or waiting."""
        return self.batch + self.queue


def check_host(host: str) -> None:
    """Refuse an entry of ``allowed_hosts`` that is not a public host name, optionally with a port."""
    name, _, port = host.partition(":")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        raise BadParameter(f"--allow-host takes names, got the address {host!r}. Give the name of the host.")
    if not re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", name) or len(name) > 253:
        raise BadParameter(f"--allow-host takes a host such as images.example.org, got {host!r}.")
    if ":" in host and not (re.fullmatch(r"\d{1,5}", port) and 1 <= int(port) <= 65535):
        raise BadParameter(f"--allow-host takes a port from 1 to 65535 after the colon, got {host!r}.")


def api_keys(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given keys, or the one in the environment variable ``TORINO_API_KEY``."""
    if given:
        return given
    variable = os.environ.get(KEY_VARIABLE, "")
    return (variable,) if variable else ()
