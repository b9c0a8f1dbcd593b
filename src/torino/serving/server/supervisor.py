"""Start an engine in a process of its own, and start it again whenever it ends."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from torino.core.errors import TorinoError
from torino.core.extras import optional_import
from torino.serving.server.errors import ApiError, unavailable
from torino.serving.server.jobs import AnswerEvent, FinishedAnswer
from torino.serving.server.logs import log
from torino.serving.server.schema import Sampling
from torino.serving.server.transport import pack_request, unpack_event
from torino.vlm.prompt import Turn
from torino.vlm.session import ReducedImages

with optional_import("torino serve needs", "torino[serve]"):
    import httpx2

FIRST_DELAY, LONGEST_DELAY, STABLE = 0.5, 15.0, 60.0  # seconds
SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


class EngineFailed(TorinoError):
    """The engine ended before it was ready."""


class EngineClient(ABC):
    """A running engine that takes reduced images; one object for each start of the engine.

    Parameters
    ----------
    address : str
        Its URL on loopback.
    secret : str
        What it requires of every request.
    """

    def __init__(self, address: str, secret: str) -> None:
        self.http = httpx2.AsyncClient(
            base_url=address,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=httpx2.Timeout(None, connect=5.0),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
        )

    @abstractmethod
    def generate(
        self, conversation: Sequence[Turn], images: Sequence[ReducedImages], sampling: Sampling
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the events of an answer.

        Raises
        ------
        ApiError
            If the engine refuses the request, or ends.
        """

    async def is_healthy(self) -> bool:
        """Return whether the engine answers."""
        try:
            return (await self.http.get("/health", timeout=5.0)).status_code == 200
        except httpx2.HTTPError:
            return False


class TorinoClient(EngineClient):
    """An engine of :mod:`torino.serving.server.engine_process`."""

    async def generate(
        self, conversation: Sequence[Turn], images: Sequence[ReducedImages], sampling: Sampling
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the events of an answer."""
        body = await asyncio.to_thread(pack_request, conversation, images, sampling)
        try:
            async with self.http.stream("POST", "/generate", content=body) as response:
                if response.status_code != 200:
                    raise _refusal(json.loads(await response.aread()).get("error", {}))
                async for line in response.aiter_lines():
                    event = unpack_event(line)
                    if isinstance(event, dict):
                        raise _refusal(event)
                    yield event
                    if isinstance(event, FinishedAnswer):
                        return
        except (httpx2.HTTPError, json.JSONDecodeError) as error:
            raise lost_engine() from error
        raise lost_engine()


def lost_engine() -> ApiError:
    """Build the error of an engine that ended while it answered."""
    return unavailable("The engine ended while it answered; it is being started again. Try again.")


def _refusal(fields: dict[str, Any]) -> ApiError:
    return ApiError(
        int(fields.get("status", 500)),
        str(fields.get("message", "The engine refused the request.")),
        str(fields.get("reason", "failure")),
        fields.get("param"),
        fields.get("retry_after"),
    )


class EngineLauncher(ABC):
    """How an engine is started."""

    @abstractmethod
    async def launch(self) -> tuple[asyncio.subprocess.Process, EngineClient]:
        """Start the engine and wait until it answers.

        Raises
        ------
        EngineFailed
            If it ends before.
        """


class TorinoLauncher(EngineLauncher):
    """Start :mod:`torino.serving.server.engine_process`.

    Parameters
    ----------
    settings : dict
        Of :func:`torino.serving.server.engine_process.engine_settings`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    async def launch(self) -> tuple[asyncio.subprocess.Process, EngineClient]:
        """Start the engine; its errors are in the log."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "torino.serving.server.engine_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(self.settings).encode() + b"\n")
            with suppress(ConnectionError):
                await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                code = await process.wait()
                raise EngineFailed(f"The engine ended with code {code} before it was ready; the log says why.")
        except BaseException:
            await end_process(process)
            raise
        port = int(json.loads(line)["port"])
        return process, TorinoClient(f"http://127.0.0.1:{port}", self.settings["secret"])


class EngineSupervisor:
    """Keep one engine running.

    Parameters
    ----------
    launcher : EngineLauncher
    """

    def __init__(self, launcher: EngineLauncher) -> None:
        self.launcher = launcher
        self.client: EngineClient | None = None
        self.state = "The engine is starting."
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine for the first time and wait until it is ready; later starts happen in the background."""
        await self._launch()
        self._task = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """End the engine."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.client is not None:
            await self.client.http.aclose()
        if self._process is not None:
            await end_process(self._process)

    def ready(self) -> EngineClient:
        """Return the running engine.

        Raises
        ------
        ApiError
            503 if there is none now.
        """
        if self.client is None:
            raise unavailable(self.state)
        return self.client

    @property
    def pid(self) -> int | None:
        """Process of the engine."""
        return None if self._process is None else self._process.pid

    async def _launch(self) -> None:
        self._process, self.client = await self.launcher.launch()
        self.state = "ok"
        log("engine ready", pid=self._process.pid)

    async def _supervise(self) -> None:
        delay = FIRST_DELAY
        while True:
            if self._process is not None:
                begin = time.monotonic()
                code = await self._process.wait()
                client, self.client, self._process = self.client, None, None
                self.state = f"The engine ended with code {code} and is being started again."
                log("engine ended", logging.ERROR, code=code)
                if client is not None:
                    await client.http.aclose()
                if time.monotonic() - begin > STABLE:
                    delay = FIRST_DELAY
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)
            self.restarts += 1
            try:
                await self._launch()
            except (EngineFailed, OSError) as error:
                log(f"engine did not start: {error}", logging.ERROR)


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, whatever kills it; to be called in a new process."""
    if _libc is not None:
        _libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


async def end_process(process: asyncio.subprocess.Process, seconds: float = 10.0) -> None:
    """End a process and those that it started: politely, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
