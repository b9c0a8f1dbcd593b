"""Faults against running servers on loopback: what they answer, and that they live on.

    python benchmarks/serving_faults.py                              # all; writes research/results/serving-faults.json
    python benchmarks/serving_faults.py --only malformed image-bomb  # some; the others stay in the file
    python benchmarks/serving_faults.py --malformed 100 --requests 200 -o /tmp/faults.json    # to see that it runs

The requests of the memory test go to a tiny random LLaVA, because the server is tested and not the model. All others
go to ``--model``. A fault that is not handled as it should be ends the run with code 1.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import socket
import string
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
from PIL import Image
from report import machine
from servers import CHAT, RESULTS, ROOT, Server, log_file, open_results, to_url, versions

from torino.core.io import write_json

FIELDS = ("messages", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "n", "torino", "tools")
DEADLINE = 240.0  # seconds for the recovery of an engine


def main() -> None:
    given = parse()
    run = {"model": given.model, "seed": given.seed}
    empty = {"title": "Faults against torino serve", "command": [], "seed": given.seed, "faults": {}}
    results = open_results(given.output, "docs/guides/serve.md", run, empty)
    results |= {"date": date.today().isoformat(), "hardware": machine(), "versions": versions()}
    results["command"].append(f"python benchmarks/serving_faults.py {' '.join(sys.argv[1:])}".strip())
    failed: list[str] = []
    for name, seen in run_faults(given):
        print(f"{name}: {seen}", flush=True)
        results["faults"][name] = seen
        write_json(given.output, results)
        failed += [] if seen["passed"] else [name]
    if failed:
        sys.exit(f"Not handled as it should be: {', '.join(failed)}.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS, "memory", "engine-killed"], help="default: all")
    parser.add_argument("--malformed", type=int, default=1_000, help="malformed requests")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the memory test")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers", help="behind the front")
    parser.add_argument("--vllm", default="", help="options of vLLM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "serving-faults.json")
    return parser.parse_args()


def run_faults(given: argparse.Namespace) -> Any:
    """Run faults; yield the name of each and what was seen."""
    chosen = given.only or [*FAULTS, "memory", "engine-killed"]
    log, words = log_file("serving-faults"), [given.model, "--engine", "transformers", "--max-tokens", "256"]
    names = [name for name in FAULTS if name in chosen]
    if names:
        server = Server(words, log)
        try:
            server.wait()
            for name in names:
                yield name, FAULTS[name](server, given)
        finally:
            server.stop()
    if "memory" in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            server = Server(tiny_words(Path(temporary)), log)
            try:
                yield "memory", memory(server.wait(), given.requests, given.seed)
            finally:
                server.stop()
    if "engine-killed" in chosen:
        words = [given.model, "--engine", given.engine, "--placement", "front"]
        words += ["--vllm", given.vllm] if given.vllm else []
        front = Server(words, log)
        try:
            name = "engine-killed" if given.engine == "transformers" else "engine-killed-vllm"
            yield name, engine_killed(front.wait())
        finally:
            front.stop()


def tiny_words(folder: Path) -> list[str]:
    """Write the tiny model of the tests; return the words of a server for it."""
    sys.path.insert(0, str(ROOT))
    from tests.support.serving import tiny_words as words_for
    from tests.support.serving import write_home

    return [str(word) for word in words_for(write_home(folder))]


def photo(seed: int) -> str:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return to_url(file.getvalue(), "png")


def chat(seed: int = 0, **fields: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": photo(seed)}}, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


# ---------------------------------------------------------------------- faults


def malformed(server: Server, given: argparse.Namespace) -> dict[str, Any]:
    """Send damaged requests: each must get 4xx with one sentence in OpenAI's format, and the server must live on."""
    count, source, statuses, bad = given.malformed, random.Random(given.seed), Counter[int](), list[str]()
    with httpx2.Client(base_url=server.address, timeout=60) as client:
        for _ in range(count):
            body = damage(source)
            response = client.post(CHAT, content=body)
            statuses[response.status_code] += 1
            try:
                message = response.json()["error"]["message"]
                fine = 400 <= response.status_code < 500 and message and "\n" not in message
            except (ValueError, KeyError, TypeError):
                fine = False
            if not fine:
                bad.append(repr(body[:200]))
        alive = client.post(CHAT, json=chat()).status_code == 200
    seen = {"requests": count, "statuses": dict(statuses), "not 4xx with a sentence": bad[:5], "alive": alive}
    return {"passed": alive and not bad, **seen}


def damage(source: random.Random) -> bytes:
    """Return a request that is wrong in one of several ways."""
    body: dict[str, Any] = chat(source.randint(0, 5))
    kind = source.randrange(6)
    if kind == 0:  # other bytes
        return bytes(source.randrange(256) for _ in range(source.randrange(200)))
    if kind == 1:  # cut off
        text = json.dumps(body).encode()
        return text[: source.randrange(len(text) - 1)]
    if kind == 2:  # a field of the wrong type
        body[source.choice(FIELDS)] = {"x": [source.random()]}
    elif kind == 3:  # a field that is unknown
        body["".join(source.choices(string.ascii_lowercase, k=12))] = 1
    elif kind == 4:  # a damaged image
        url = photo(0)
        body["messages"][0]["content"][0]["image_url"]["url"] = url[: source.randrange(10, len(url) // 2)]
    else:  # a part that does not exist
        body["messages"][0]["content"].append({"type": source.choice(["image_embeds", "video_url", "", 3])})
    return json.dumps(body).encode()


def image_bomb(server: Server, _: argparse.Namespace) -> dict[str, Any]:
    """Send a small PNG of 60,000 x 60,000 pixels; it must be refused, and the memory of the server must not rise."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(b"\0" * 50_000_000, 9)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    file += chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    body = chat()
    body["messages"][0]["content"][0]["image_url"]["url"] = to_url(file, "png")
    statuses = [httpx2.post(server.address + CHAT, json=body, timeout=60).status_code for _ in range(20)]
    grown = (process.memory_info().rss - before) / 2**20
    seen = {"requests": len(statuses), "bytes": len(file), "statuses": dict(Counter(statuses)), "MiB": round(grown, 1)}
    return {"passed": set(statuses) == {400} and grown < 100, **seen}


def disconnects(server: Server, _: argparse.Namespace) -> dict[str, Any]:
    """Leave in the middle of streams; the server must be free again at once."""
    count = 20
    host, port = server.address.removeprefix("http://").split(":")
    data = json.dumps(chat(max_tokens=256, stream=True)).encode()
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            client.recv(200)
    begin = time.perf_counter()
    answered = httpx2.post(server.address + CHAT, json=chat(), timeout=120).status_code
    seconds = time.perf_counter() - begin
    time.sleep(1)
    running = server.metrics()["torino_requests_running"]
    seen = {"streams": count, "next request": answered, "seconds": round(seconds, 2), "running after": running}
    return {"passed": answered == 200 and not running, **seen}


def slow_clients(server: Server, _: argparse.Namespace) -> dict[str, Any]:
    """Send headers and bodies byte by byte; other clients must be answered as without them."""
    count = 50
    alone = _time_requests(server, [])
    host, port = server.address.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=60) for _ in range(count)]
    for index, client in enumerate(slow):
        end = "X-Slow: " if index % 2 else "Content-Length: 1000\r\n\r\n{"
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{end}".encode())
    beside = _time_requests(server, slow)
    for client in slow:
        client.close()
    seen = {"slow": count, "answered": len(beside), "longest seconds": round(max(beside), 2)}
    passed = max(beside) < 3 * max(alone) + 1
    return {"passed": passed, **seen, "longest seconds without them": round(max(alone), 2)}


def _time_requests(server: Server, slow: list[socket.socket]) -> list[float]:
    """Return the seconds of some requests; before each, slow clients send one more byte."""
    times: list[float] = []
    for _ in range(10):
        for client in slow:
            with suppress(OSError):  # the server closes connections that are slow for too long
                client.sendall(b" ")
        begin = time.perf_counter()
        httpx2.post(server.address + CHAT, json=chat(), timeout=60).raise_for_status()
        times.append(time.perf_counter() - begin)
    return times


def memory(server: Server, count: int, seed: int) -> dict[str, Any]:
    """Send many requests of all kinds; the resident memory must not grow."""
    process, source = psutil.Process(server.process.pid), random.Random(seed)
    kinds = [source.randrange(4) for _ in range(count)]
    samples: list[float] = []
    with httpx2.Client(base_url=server.address, timeout=120) as client, ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> int:
            kind = kinds[number]
            if kind == 2:
                return client.post(CHAT, content=damage(random.Random(number))).status_code
            return client.post(CHAT, json=chat(number % 50, max_tokens=1, stream=kind == 1)).status_code

        statuses = Counter[int]()
        for begin in range(0, count, max(count // 20, 1)):
            statuses.update(pool.map(ask, range(begin, min(begin + max(count // 20, 1), count))))
            samples.append(round(process.memory_info().rss / 2**20, 1))
    settled = samples[len(samples) // 4 :]  # the first quarter fills caches and pools
    growth = round(settled[-1] - settled[0], 1)
    passed = growth < 20 and set(statuses) <= {200, 400, 422}
    return {"passed": passed, "requests": count, "statuses": dict(statuses), "MiB": samples, "growth": growth}


def engine_killed(front: Server) -> dict[str, Any]:
    """Kill the engine of a front under load: requests must get 503 until it is back, and answers afterwards."""
    statuses, stop = list[tuple[float, int]](), threading.Event()
    end = time.perf_counter() + DEADLINE

    def load(seed: int) -> None:
        while not stop.is_set():
            status = httpx2.post(front.address + CHAT, json=chat(seed, max_tokens=16), timeout=120).status_code
            statuses.append((time.perf_counter(), status))
            if status == 503:
                time.sleep(0.5)

    def wait(check: Callable[[], bool]) -> bool:
        while not check() and time.perf_counter() < end:
            time.sleep(0.05)
        return check()

    with ThreadPoolExecutor(8) as pool:
        try:
            for seed in range(8):
                pool.submit(load, seed)
            answered = wait(lambda: sum(status == 200 for _, status in statuses) >= 16)
            (engine,) = psutil.Process(front.process.pid).children()
            killed = time.perf_counter()
            engine.kill()
            refused = wait(lambda: any(when > killed and status == 503 for when, status in statuses))
            ill = httpx2.get(f"{front.address}/health", timeout=30).status_code
            back = wait(lambda: any(when > killed + 1 and status == 200 for when, status in statuses))
            seconds = time.perf_counter() - killed
        finally:
            stop.set()
    counts = Counter(status for _, status in statuses)
    passed = answered and refused and back and ill == 503 and set(counts) == {200, 503}
    return {
        "passed": passed,
        "statuses": dict(counts),
        "health meanwhile": ill,
        "seconds until answers": round(seconds, 1),
    }


FAULTS: dict[str, Callable[[Server, argparse.Namespace], dict[str, Any]]] = {
    "malformed": malformed,
    "image-bomb": image_bomb,
    "disconnects": disconnects,
    "slow-clients": slow_clients,
}


if __name__ == "__main__":
    main()
