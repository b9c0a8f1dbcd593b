"""Run an application with uvicorn: an orderly end, and no connection that only waits."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from types import FrameType
from typing import Any

from torino.core.errors import BadParameter
from torino.core.extras import optional_import
from torino.serving.server.gate import ServerState
from torino.serving.server.logs import log
from torino.serving.server.options import ServerOptions

with optional_import("torino serve needs", "torino[serve]"):
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 256
IDLE_CONNECTIONS = 64  # besides those of running and waiting requests and as many that are being read


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens; 0 is any free port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadParameter(f"Cannot listen on {host}:{port}: {reason}. Choose another --host or --port.") from error
    listener.listen(BACKLOG)
    listener.set_inheritable(False)
    return listener


def timed_protocol(seconds: float) -> type[H11Protocol]:
    """Return the HTTP protocol of uvicorn, which also closes a connection that does not finish its headers in time."""

    class TimedProtocol(H11Protocol):
        """Close a connection whose headers do not arrive in time."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            self._wait()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
                self._stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _wait(self) -> None:
            busy = self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
            if self._timer is None and not busy:
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return TimedProtocol


class DrainingServer(uvicorn.Server):
    """A server that on SIGTERM or SIGINT first refuses new requests with 503 and finishes those that run.

    A second signal ends it at once. ``stopped_by`` is the signal.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, grace: float) -> None:
        super().__init__(config)
        self.state, self.grace = state, grace
        self.stopped_by: int | None = None
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; called by the signal."""
        if self.state.draining:
            self.should_exit = self.force_exit = True
            return
        self.stopped_by = sig
        if not self.started:
            raise KeyboardInterrupt  # the engine is starting, and nobody waits for an answer
        self.state.draining = True
        self._deadline = time.monotonic() + self.grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where the server listens."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            log("listening", address=f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Stop when no request runs any more, or the time is over."""
        if self.state.draining and not self.should_exit:
            late = time.monotonic() > self._deadline
            if self.state.running == 0 or late:
                self.force_exit, self.should_exit = late, True
        return await super().on_tick(counter)


def run_app(app: Any, listener: socket.socket, options: ServerOptions, state: ServerState) -> int | None:
    """Serve until a signal; return the signal, or None if the application ended by itself."""
    config = uvicorn.Config(
        app,
        http=timed_protocol(options.read_timeout),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=2 * options.most_requests + IDLE_CONNECTIONS,
        timeout_keep_alive=int(max(options.read_timeout, 1)),
        timeout_graceful_shutdown=1,
    )
    server = DrainingServer(config, state, options.grace)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        if server.stopped_by is None:
            raise
    finally:
        listener.close()
    log("stopped", signal=signal.Signals(server.stopped_by).name if server.stopped_by else None)
    return server.stopped_by
