"""Get the files of the images of a request: ``data:`` URLs, and URLs of allowed hosts.

A fetched URL must not reach machines that only the server can reach. The name is resolved once, all its addresses must
be public, and the connection is made to one of these addresses, so that a second answer of the name server cannot
replace it. Redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence

from torino.core.extras import optional_import
from torino.datasets.images import image_size
from torino.serving.server.errors import ApiError, bad_request
from torino.serving.server.options import ServerOptions

with optional_import("torino serve needs", "torino[serve]"):
    import httpx2

PORTS = {"http": 80, "https": 443}
_DATA = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<parameters>(;[\w.+-]+=[^;,]*)*)(?P<base64>;base64)?,", re.A)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class ImageSource:
    """Turn the URLs of a request into the bytes of its images.

    Parameters
    ----------
    options : ServerOptions
    resolve : callable, optional
        Returns the addresses of a host and a port; by default the resolver of the system.
    is_public : callable, optional
        Whether a connection to an address is allowed; by default :func:`is_public_address`.
    """

    def __init__(
        self, options: ServerOptions, resolve: Resolve | None = None, is_public: Callable[[str], bool] | None = None
    ) -> None:
        self.options = options
        self.allowed = {host.lower() for host in options.allowed_hosts}
        self._resolve = resolve or resolve_host
        self._is_public = is_public or is_public_address
        self._client: httpx2.AsyncClient | None = None

    async def load(self, urls: Sequence[str]) -> list[bytes]:
        """Return the file of each URL."""
        if len(urls) > self.options.max_images:
            raise bad_request(
                f"The request has {len(urls)} images; this server accepts at most {self.options.max_images}.",
                "messages",
                "images",
            )
        return [await self._load(url) for url in urls]

    async def close(self) -> None:
        """Close open connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _load(self, url: str) -> bytes:
        if url[:5].lower() == "data:":
            return read_data_url(url)
        return await self._fetch(url)

    # ------------------------------------------------------------------ fetching

    async def _fetch(self, url: str) -> bytes:
        target, host, port = self._check(url)
        try:
            async with asyncio.timeout(self.options.fetch_timeout):
                addresses = await self._resolve(host, port)
                refused = [address for address in addresses if not self._is_public(address)]
                if refused or not addresses:
                    raise _refused(f"The host {host} has no public address, so its images are not fetched.")
                return await self._download(target, host, port, addresses[0])
        except TimeoutError as error:
            limit = self.options.fetch_timeout
            raise _refused(f"{host} did not send the image within {limit:g} seconds.") from error
        except (httpx2.HTTPError, OSError, UnicodeError) as error:
            raise _refused(f"The image could not be fetched from {host}: {type(error).__name__}.") from error

    def _check(self, url: str) -> tuple[httpx2.URL, str, int]:
        only = "Send the image as a data: URL; this server fetches nothing."
        if not self.allowed:
            raise _refused(only)
        try:
            target = httpx2.URL(url)
        except Exception as error:  # any text can be given
            raise _refused("The URL of an image cannot be read.") from error
        host, port = target.host.lower(), target.port or PORTS.get(target.scheme, 0)
        if target.scheme not in PORTS or not host or target.userinfo:
            raise _refused("The URL of an image must start with https://, http:// or data:, without a user name.")
        standard = port == PORTS[target.scheme]
        if f"{host}:{port}" not in self.allowed and not (standard and host in self.allowed):
            raise _refused(f"This server does not fetch images from {host}. Send the image as a data: URL.")
        return target, host, port

    async def _download(self, url: httpx2.URL, host: str, port: int, address: str) -> bytes:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                follow_redirects=False,
                trust_env=False,
                timeout=self.options.fetch_timeout,
                limits=httpx2.Limits(max_keepalive_connections=0),
            )
        name = host if port == PORTS[url.scheme] else f"{host}:{port}"
        request = self._client.build_request(
            "GET",
            url.copy_with(host=address, port=port),
            headers={"Host": name, "Accept": "image/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": host},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise _refused(f"{host} answered {response.status_code} instead of an image; redirects are not used.")
            data, limit = bytearray(), self.options.max_bytes
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > limit:
                    raise ApiError(413, f"The image at {host} has more than {limit:,} bytes.", "bytes", "image_url")
            return bytes(data)
        finally:
            await response.aclose()


def read_data_url(url: str) -> bytes:
    """Return the content of a ``data:`` URL in base64."""
    match = _DATA.match(url, 0, 200)
    if match is None or not match["base64"]:
        raise _refused("The data: URL of an image must look like data:image/jpeg;base64,….")
    if match["type"] and not match["type"].lower().startswith(("image/", "application/octet-stream")):
        raise _refused(f"A data: URL must hold an image, got {match['type'][:60]}.")
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused("The data: URL of an image is not valid base64.") from error
    if not data:
        raise _refused("The data: URL of an image is empty.")
    return data


def write_data_url(data: bytes) -> str:
    """Return a file as a ``data:`` URL; what it is follows from its content."""
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode("ascii")


def check_pixels(data: bytes, most: int) -> None:
    """Refuse an image file with more than ``most`` pixels, read from its header."""
    width, height = image_size(data)
    if width * height > most:
        raise bad_request(
            f"The image has {width}x{height} pixels; this server accepts up to {most:,}.", "image_url", "pixels"
        )


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public_address(text: str) -> bool:
    """Return whether an address belongs to the public internet; addresses that embed another one are not trusted.

    Examples
    --------
    >>> [is_public_address(text) for text in ("93.184.216.34", "127.0.0.1", "10.0.0.1", "169.254.169.254", "::1")]
    [True, False, False, False, False]
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or address.teredo
        nat64 = address in ipaddress.ip_network("64:ff9b::/96") or address in ipaddress.ip_network("64:ff9b:1::/48")
        if embedded is not None or nat64:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _refused(message: str) -> ApiError:
    return bad_request(message, "image_url", "url")
