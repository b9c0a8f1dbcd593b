"""Servers on a tiny LLaVA: in the test's process, or as a command."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image

from tests.support.tiny_vlm import QUESTION, photo, write_files
from torino import SAE, Reducer, make
from torino.serving.server.app import build_app
from torino.serving.server.gate import ServerState
from torino.serving.server.images import ImageSource
from torino.serving.server.local import LocalEngine
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.options import ServerOptions
from torino.vlm import VLM, load_vlm

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT: {% else %}USER: {% endif %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}"
    "{% endfor %}ASSISTANT:"
)
METHOD = "torino-m(k=1, delta=1)"


def write_home(folder: Path) -> Path:
    """Write a model with a chat template of several turns, an SAE with names, and a photo."""
    from transformers import AutoProcessor

    write_files(folder)
    processor = AutoProcessor.from_pretrained(folder / "llava")
    processor.chat_template = TEMPLATE
    processor.save_pretrained(folder / "llava")
    return folder


def open_home(folder: Path) -> tuple[VLM, Reducer]:
    """Return the session and the reducer of a folder."""
    return load_vlm(folder / "llava"), make(METHOD, sae=SAE.load(folder / "sae"))


# ---------------------------------------------------------------------- requests


def to_url(image: Image.Image, form: str = "PNG") -> str:
    """Return an image as a data: URL."""
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def image_part(seed: int = 0) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_url(photo(seed=seed))}}


def text_part(text: str = QUESTION) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat_body(*seeds: int, text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    """Return a request with some photos and a question."""
    content = [*[image_part(seed) for seed in seeds], text_part(text)]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 7, **fields}


def content_of(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def stream_text(lines: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the joined text of server-sent events, and all of them."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    events = [json.loads(item) for item in data[:-1]]
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"]), events


def metric(text: str, name: str) -> float:
    """Return the value of a metric."""
    return float(next(line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == name))


# ---------------------------------------------------------------------- in this process


class AppServer:
    """An application in this process, with a client."""

    def __init__(self, vlm: VLM, reducer: Reducer | None, images: ImageSource | None = None, **options: Any) -> None:
        self.options = replace(ServerOptions(), **{"name": "tiny", "max_tokens": 64, **options})
        self.metrics, self.state = ServerMetrics(), ServerState()
        self.engine = LocalEngine(vlm, reducer, self.options, self.metrics)
        self.app = build_app(self.engine, self.options, self.metrics, self.state, images)
        self.client = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://test")

    async def chat(self, body: Any = None, **options: Any) -> httpx2.Response:
        """Post a request."""
        if isinstance(body, bytes):
            return await self.client.post(CHAT, content=body, **options)
        return await self.client.post(CHAT, json=body, **options)

    async def metric(self, name: str) -> float:
        return metric((await self.client.get("/metrics")).text, name)


@asynccontextmanager
async def app_server(
    vlm: VLM, reducer: Reducer | None, images: ImageSource | None = None, **options: Any
) -> AsyncGenerator[AppServer]:
    """Run an application in this process."""
    server = AppServer(vlm, reducer, images, **options)
    try:
        async with server.client:
            yield server
    finally:
        await server.engine.close()


# ---------------------------------------------------------------------- as a command


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class CommandServer:
    """``torino serve`` in a process of its own; by default it finds its port itself, and logs it."""

    def __init__(self, words: Sequence[str | Path], port: int = 0, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torino", "serve", *map(str, words), "--port", str(port), "--device", "cpu"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        )
        self.lines: list[str] = []
        self.address = f"http://127.0.0.1:{port}" if port else ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if '"listening"' in line and '"part"' not in line:  # not the engine behind a front
                self.address = json.loads(line)["address"]
        self._ready.set()

    def wait(self, seconds: float = 180.0) -> CommandServer:
        """Wait until the server is healthy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if self.address and self.healthy():
                return self
            time.sleep(0.2)
        raise AssertionError("".join(self.lines))

    def healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.address}/health", timeout=5).status_code == 200
        except httpx2.HTTPError:
            return False

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def post(self, body: Any, **options: Any) -> httpx2.Response:
        return httpx2.post(f"{self.address}{CHAT}", json=body, timeout=60, **options)

    def metric(self, name: str) -> float:
        return metric(httpx2.get(f"{self.address}/metrics").text, name)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log lines of an event."""
        parsed = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [line for line in parsed if line["event"] == name]

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Stop the server and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._ready.wait(10)
        return code


@contextmanager
def command_server(*words: str | Path, **environment: str) -> Generator[CommandServer]:
    """Run ``torino serve`` with these words."""
    server = CommandServer(words, **environment)
    try:
        yield server.wait()
    finally:
        server.stop()


def tiny_words(home: Path) -> list[str | Path]:
    """Return the words of ``torino serve`` for a tiny model."""
    return [home / "llava", "--sae", home / "sae", "--method", METHOD, "--engine", "transformers", "--name", "tiny"]


def run_async(work: Any) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(work)
