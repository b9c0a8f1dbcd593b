"""Faults of clients, of the engine and of the machine; each against a server in a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil

from tests.support.serving import (
    CHAT,
    CommandServer,
    chat_body,
    command_server,
    content_of,
    stream_text,
    tiny_words,
)
from tests.support.tiny_vlm import QUESTION, photo
from torino.reducers import Reducer
from torino.vlm import VLM

LONG = 900


def wait_for(check: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def raw_request(server: CommandServer, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


# ---------------------------------------------------------------------- clients


def test_a_client_that_leaves_mid_stream_frees_the_worker(server: CommandServer) -> None:
    before = server.metric("torino_generated_tokens_total")
    with server.connect() as client:
        client.sendall(raw_request(server, chat_body(1, max_tokens=LONG, stream=True)))
        received = b""
        while b'"content": "word' not in received:
            received += client.recv(4096)
        assert server.metric("torino_requests_running") == 1
    begin = time.monotonic()
    assert content_of(server.post(chat_body(2, max_tokens=2)))
    taken = time.monotonic() - begin
    wait_for(lambda: server.metric("torino_requests_running") == 0)
    # the abandoned answer is not finished: it is not counted, and the next request did not wait for it
    assert server.metric("torino_generated_tokens_total") == before + 2
    begin = time.monotonic()
    server.post(chat_body(1, max_tokens=LONG))
    assert taken < 0.7 * (time.monotonic() - begin) + 0.2


def test_a_client_that_leaves_while_it_waits_frees_the_worker(server: CommandServer) -> None:
    gone = 'torino_refusals_total{reason="disconnected"}'
    server.post(chat_body(1, max_tokens=1))
    with server.connect() as client:
        client.sendall(raw_request(server, chat_body(1, max_tokens=LONG)))
        wait_for(lambda: server.metric("torino_requests_running") == 1)
    wait_for(lambda: server.metric("torino_requests_running") == 0, 5)
    assert server.metric(gone) >= 1


def test_slow_clients_do_not_block_others(server: CommandServer) -> None:
    slow = [server.connect() for _ in range(20)]
    for client in slow[:10]:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Slow: ".encode())  # headers that never end
    for client in slow[10:]:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
    begin = time.monotonic()
    for number in range(5):
        for client in slow:
            client.sendall(b" ")
        assert content_of(server.post(chat_body(number, max_tokens=2)))
    assert time.monotonic() - begin < 20
    for client in slow:
        client.close()


def test_a_slow_reader_does_not_block_others(server: CommandServer) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        client.sendall(raw_request(server, chat_body(1, max_tokens=LONG, stream=True)))
        client.recv(100)
        for number in range(3):
            assert content_of(server.post(chat_body(number, max_tokens=2)))


def test_headers_must_arrive_in_time(home: Path) -> None:
    import asyncio

    from torino.serving.server.http import timed_protocol

    async def run() -> None:
        import uvicorn

        async def app(scope: object, receive: object, send: Callable[..., object]) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})  # type: ignore[misc]
            await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[misc]

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=timed_protocol(0.5), lifespan="off", log_config=None, timeout_keep_alive=60)
        running = uvicorn.Server(config)
        running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(running.serve([listener]))
        try:
            while not running.started:
                await asyncio.sleep(0.01)
            port = listener.getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
            async with asyncio.timeout(3):
                assert await reader.read() == b"", "headers that do not end are cut off"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):  # the same connection, each request in time, longer than the limit together
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200 OK" in await reader.readuntil(b"ok")
                await asyncio.sleep(0.3)
            writer.write(b"GET / HT")
            async with asyncio.timeout(3):
                assert await reader.read() == b""
        finally:
            running.should_exit = True
            await task

    asyncio.run(run())


# ---------------------------------------------------------------------- the end


def test_sigterm_finishes_running_requests_and_refuses_new_ones(home: Path) -> None:
    running = CommandServer([*tiny_words(home), "--max-tokens", "900"]).wait()
    try:
        lines: list[str] = []
        started = threading.Event()

        def read() -> None:
            body = chat_body(1, max_tokens=LONG, stream=True)
            with httpx2.stream("POST", f"{running.address}{CHAT}", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    if len(lines) > 6:
                        started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(30)
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx2.get(f"{running.address}/health").status_code == 503, 5)
        refused = running.post(chat_body(2))
        assert refused.status_code == 503
        assert "stopping" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        reader.join(60)
        text, events = stream_text(lines)
        assert len(text.split()) > 100
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(30) == 143
    finally:
        running.stop()
    assert running.lines[-1] == "Stopped. Running requests were finished.\n"
    assert running.events("stopped")


def test_an_idle_server_stops_at_once(home: Path) -> None:
    with command_server(*tiny_words(home)) as running:
        begin = time.monotonic()
        assert running.stop(signal.SIGINT) == 130
        assert time.monotonic() - begin < 10


# ---------------------------------------------------------------------- memory


def test_memory_does_not_grow(server: CommandServer) -> None:
    process = psutil.Process(server.process.pid)
    with httpx2.Client(base_url=server.address, timeout=60) as client, ThreadPoolExecutor(4) as pool:

        def ask(number: int) -> int:
            kind = number % 4
            body = chat_body(number % 20, max_tokens=1, stream=kind == 1)
            if kind == 2:
                body["temperature"] = "hot"
            return client.post(CHAT, json=body).status_code

        for _ in pool.map(ask, range(200)):
            pass
        before = process.memory_info().rss
        statuses = list(pool.map(ask, range(600)))
        after = process.memory_info().rss
    assert {statuses.count(200), statuses.count(400)} == {450, 150}
    assert after - before < 20 * 2**20, f"{(after - before) / 2**20:.1f} MiB more after 600 requests"
    assert server.metric("torino_requests_running") == 0


# ---------------------------------------------------------------------- a front


def test_a_front_survives_its_engine(home: Path, vlm: VLM, reducer: Reducer) -> None:
    expected = [vlm.answer(vlm.inputs(photo(seed=s), QUESTION), reducer, max_new_tokens=7).text for s in range(4)]
    with command_server(*tiny_words(home), "--placement", "front", "--max-tokens", "900") as front:
        assert httpx2.get(f"{front.address}/health").json()["parts"] == {"vision": "ok", "engine": "ok"}
        for seed in range(4):
            response = front.post(chat_body(seed, torino={"explain": True}))
            assert content_of(response) == expected[seed]
            assert response.json()["torino"]["tokens"]["before"] == 16
        both = vlm.answer(vlm.inputs([photo(seed=1), photo(seed=2)], QUESTION), reducer, max_new_tokens=7).text
        assert content_of(front.post(chat_body(1, 2))) == both
        assert content_of(front.post(chat_body(text=QUESTION)))
        assert front.post(chat_body(1, text="what " * 3000)).status_code == 400
        body = chat_body(1, stream=True)
        assert stream_text(httpx2.post(f"{front.address}{CHAT}", json=body).text.splitlines())[0] == expected[1]

        (ready,) = front.events("engine ready")
        engine = psutil.Process(ready["pid"])
        addresses = {connection.laddr.ip for connection in engine.net_connections() if connection.status == "LISTEN"}
        assert addresses == {"127.0.0.1"}
        port = next(c.laddr.port for c in engine.net_connections() if c.status == "LISTEN")
        assert httpx2.post(f"http://127.0.0.1:{port}/generate").status_code == 401
        assert httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 401
        assert not any("secret" in word or len(word) == 43 for word in engine.cmdline())

        stop = threading.Event()
        statuses: list[int] = []

        def load(seed: int) -> None:
            while not stop.is_set():
                statuses.append(front.post(chat_body(seed, max_tokens=40)).status_code)

        with ThreadPoolExecutor(4) as pool:
            for seed in range(4):
                pool.submit(load, seed)
            wait_for(lambda: statuses.count(200) > 3)
            engine.kill()
            wait_for(lambda: 503 in statuses)
            assert httpx2.get(f"{front.address}/health").status_code == 503
            wait_for(front.healthy, 90)
            good = statuses.count(200)
            wait_for(lambda: statuses.count(200) > good + 3)
            stop.set()
        assert set(statuses) == {200, 503}
        assert content_of(front.post(chat_body(2))) == expected[2]
        assert front.metric("torino_engine_restarts") == 1
        pid = front.events("engine ready")[-1]["pid"]
        front.process.kill()  # the engine does not outlive its front
        wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 20)


def test_an_engine_that_cannot_start_is_an_error(home: Path, monkeypatch: object) -> None:
    import asyncio

    import pytest

    from torino.serving.server.engine_process import engine_settings
    from torino.serving.server.options import ServerOptions
    from torino.serving.server.supervisor import EngineFailed, EngineSupervisor, TorinoLauncher
    from torino.serving.settings import ReductionSettings

    settings = engine_settings(str(home / "nothing"), ReductionSettings("none"), ServerOptions(), "secret")
    with pytest.raises(EngineFailed, match="ended with code 2"):
        asyncio.run(EngineSupervisor(TorinoLauncher(settings)).start())
