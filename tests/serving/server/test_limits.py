"""Limits, keys, malformed requests and images: each gets a status and one sentence, and the worker goes on."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.serving import (
    CHAT,
    AppServer,
    CommandServer,
    app_server,
    chat_body,
    content_of,
    image_part,
    run_async,
    text_part,
    to_url,
)
from tests.support.tiny_vlm import photo
from torino.core.errors import BadParameter
from torino.reducers import Reducer
from torino.serving.server.images import ImageSource, is_public_address
from torino.serving.server.options import ServerOptions
from torino.vlm import VLM


def check_error(response: httpx2.Response, status: int, *words: str) -> dict[str, Any]:
    """Check that a response is an error of OpenAI's format with one sentence or two."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert message
    assert "\n" not in message
    assert len(message) <= 400
    assert "Traceback" not in message
    for word in words:
        assert word in message, message
    return body["error"]


def with_image(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}, text_part()]}]}


def png_header(width: int, height: int) -> bytes:
    """Return a small PNG that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ---------------------------------------------------------------------- limits


def test_number_of_images(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, max_images=2) as server:
            assert (await server.chat(chat_body(1, 2))).status_code == 200
            check_error(await server.chat(chat_body(1, 2, 3)), 400, "3 images", "at most 2")
            assert await server.metric('torino_refusals_total{reason="images"}') == 1

    run_async(run())


def test_bytes(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, max_bytes=20_000) as server:
            assert (await server.chat(chat_body(1))).status_code == 200
            check_error(await server.chat(b"x" * 20_001), 413, "20,000 bytes")

            async def pieces() -> Any:
                for _ in range(100):
                    yield b"x" * 1000

            check_error(await server.client.post(CHAT, content=pieces()), 413, "20,000 bytes")
            assert await server.metric('torino_refusals_total{reason="bytes"}') == 2

    run_async(run())


def test_pixels_are_counted_before_they_are_decoded(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, max_pixels=10_000) as server:
            assert (await server.chat(with_image({"url": to_url(Image.new("RGB", (100, 100)))}))).status_code == 200
            check_error(await server.chat(with_image({"url": to_url(Image.new("RGB", (101, 100)))})), 400, "101x100")
            for side in (20_000, 60_000, 2**31 - 1):
                response = await server.chat(with_image({"url": data_url(png_header(side, side))}))
                check_error(response, 400, "pixels" if side < 2**31 - 1 else "")
            refusals = [
                await server.metric(f'torino_refusals_total{{reason="{name}"}}') for name in ("pixels", "image")
            ]
            assert sum(refusals) == 4
            assert content_of(await server.chat(chat_body(1)))

    run_async(run())


def test_length_of_an_answer(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, max_tokens=9) as server:
            assert (await server.chat(chat_body(1, max_tokens=9))).status_code == 200
            check_error(await server.chat(chat_body(1, max_tokens=10)), 400, "at most 9", "got 10")
            body = chat_body(1)
            del body["max_tokens"]
            assert (await server.chat(body)).json()["usage"]["completion_tokens"] == 9

    run_async(run())


def test_a_full_queue_is_429_with_retry_after(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, batch=1, queue=2) as server:
            responses = await asyncio.gather(*[server.chat(chat_body(1, max_tokens=40)) for _ in range(8)])
            refused = [response for response in responses if response.status_code == 429]
            assert len(refused) == 5
            for response in refused:
                assert check_error(response, 429, "busy")["type"] == "rate_limit_error"
                assert int(response.headers["retry-after"]) >= 1
            assert sum(response.status_code == 200 for response in responses) == 3
            assert await server.metric('torino_refusals_total{reason="queue"}') == 5
            assert (await server.chat(chat_body(1))).status_code == 200

    run_async(run())


def test_time_of_a_request(vlm: VLM, reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, timeout=0.4, max_tokens=2000) as server:
            monkeypatch.setattr(vlm.adapter.config.get_text_config(), "max_position_embeddings", 100_000)
            server.engine.language.context = 100_000
            slow = await server.chat(chat_body(1, max_tokens=2000))
            check_error(slow, 504, "0.4 seconds")
            end = asyncio.get_running_loop().time() + 5
            while (await server.chat(chat_body(1, max_tokens=1))).status_code != 200:
                assert asyncio.get_running_loop().time() < end, "the given-up request still occupies the worker"
            assert await server.metric('torino_refusals_total{reason="time"}') >= 1

    run_async(run())


def test_a_body_must_arrive_in_time(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, read_timeout=0.3) as server:
            sent: list[Any] = []
            pieces = iter([{"type": "http.request", "body": b"{", "more_body": True}])

            async def receive() -> Any:
                for piece in pieces:
                    return piece
                await asyncio.sleep(30)
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
            async with asyncio.timeout(5):
                await server.app({**scope, "root_path": "", "scheme": "http", "server": ("x", 1)}, receive, send)
            assert sent[0]["status"] == 408
            assert "0.3 seconds" in json.loads(sent[1]["body"])["error"]["message"]

    run_async(run())


# ---------------------------------------------------------------------- keys


def test_api_keys(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer, api_keys=("secret", "other")) as server:
            for header in (
                None,
                "",
                "Bearer",
                "Bearer wrong",
                "Bearer secre",
                "Bearer secret2",
                "Basic secret",
                "secret",
            ):
                headers = {} if header is None else {"Authorization": header}
                response = await server.chat(chat_body(1), headers=headers)
                assert check_error(response, 401, "API key")["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
                assert (await server.client.get("/v1/models", headers=headers)).status_code == 401
            for key in ("secret", "other"):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await server.chat(chat_body(1), headers=headers)).status_code == 200
                assert (await server.client.get("/v1/models", headers=headers)).status_code == 200
            assert (await server.client.get("/health")).status_code == 200
            assert (await server.client.get("/metrics")).status_code == 200

    run_async(run())


def test_options_are_checked() -> None:
    for wrong in (
        {"api_keys": ("",)},
        {"api_keys": ("schlüssel",)},
        {"allowed_hosts": ("http://example.org",)},
        {"allowed_hosts": ("127.0.0.1",)},
        {"allowed_hosts": ("example.org:0",)},
        {"batch": 0},
        {"timeout": 0},
        {"max_pixels": 1 << 40},
        {"window": -1},
    ):
        with pytest.raises(BadParameter):
            ServerOptions(**wrong)


# ---------------------------------------------------------------------- malformed requests

TEXT = {"role": "user", "content": "what ?"}
MALFORMED: list[tuple[Any, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"\xff\xfe{}", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
    ([], "object"),
    ("x", "object"),
    ({}, "messages is missing"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [TEXT] * 257}, "messages"),
    ({"messages": ["x"]}, "messages.0"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": None}]}, "content"),
    ({"messages": [{"role": "user", "content": []}]}, "empty"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "text"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "message of the user"),
    ({"messages": [{"role": "assistant", "content": [image_part()]}, TEXT]}, "images belong"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "x"}]}]},
        "Embeddings are not",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "audio_embeds"}]}]}, "Embeddings are not"),
    ({"messages": [TEXT], "n": 2}, "n is wrong"),
    ({"messages": [TEXT], "temperature": -1}, "temperature"),
    ({"messages": [TEXT], "temperature": 2.1}, "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
    ({"messages": [TEXT], "top_p": 0}, "top_p"),
    ({"messages": [TEXT], "max_tokens": 0}, "max_tokens"),
    ({"messages": [TEXT], "max_tokens": 1.5}, "max_tokens"),
    ({"messages": [TEXT], "max_tokens": "7"}, "max_tokens"),
    ({"messages": [TEXT], "max_tokens": 10**30}, "max_tokens"),
    ({"messages": [TEXT], "stop": [""]}, "stop"),
    ({"messages": [TEXT], "stop": ["a"] * 5}, "stop"),
    ({"messages": [TEXT], "seed": 2**64}, "seed"),
    ({"messages": [TEXT], "stream": "yes"}, "stream"),
    ({"messages": [TEXT], "logprobs": True}, "logprobs"),
    ({"messages": [TEXT], "frequency_penalty": 0.5}, "frequency_penalty"),
    ({"messages": [TEXT], "tools": []}, "tools is not supported"),
    ({"messages": [TEXT], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [TEXT], "torino": {"explain": 1}}, "torino.explain"),
    ({"messages": [TEXT], "torino": {"budget": 1}}, "torino.budget is not supported"),
    ({"messages": [TEXT], "image_embeds": "x"}, "not supported"),
    (with_image(3), "image_url"),
    (with_image({"url": ""}), "data: URL"),
    (with_image({"url": "data:image/png;base64,"}), "empty"),
    (with_image({"url": "data:image/png;base64,!!!"}), "base64"),
    (with_image({"url": "data:image/png,abc"}), "data:image/jpeg;base64"),
    (with_image({"url": "data:text/html;base64,AAAA"}), "must hold an image"),
    (with_image({"url": data_url(b"no image")}), "known format"),
    (with_image({"url": data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n")}), "known format"),
    (with_image({"url": to_url(photo())[:400]}), ""),
    (with_image({"url": to_url(Image.new("RGB", (900, 2)))}), "one side"),
    (with_image({"url": "file:///etc/passwd"}), "data: URL"),
    (with_image({"url": "http://127.0.0.1/x.png"}), "data: URL"),
    (with_image({"url": "x", "detail": "huge"}), "detail"),
]


def test_malformed_requests_get_one_sentence(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            for body, words in MALFORMED:
                error = check_error(await server.chat(body), 400, words)
                assert error["type"] == "invalid_request_error"
            assert await server.metric('torino_requests_total{status="400"}') == len(MALFORMED)
            check_error(await server.chat({**chat_body(1), "model": "gpt"}), 404, "'gpt'", "'tiny'")
            check_error(await server.client.get("/v1/nothing"), 404, "/v1/nothing")
            check_error(await server.client.get(CHAT), 405, "GET")
            check_error(await server.client.get("/v1/models/other"), 404, "other")
            assert (await server.client.get("/v1/models/tiny")).json()["id"] == "tiny"
            assert content_of(await server.chat(chat_body(1)))

    run_async(run())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "messages",
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "stream",
        "n",
        "torino",
        "user",
        "tools",
    ]
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "image_embeds", "video"])},
    optional={"text": JSON, "image_url": JSON | st.fixed_dictionaries({"url": st.text(max_size=30)})},
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "system", "x"]) | JSON, "content": JSON | st.lists(PART, max_size=3)}
)
REQUEST = st.dictionaries(FIELDS, JSON, max_size=4).flatmap(
    lambda fields: st.fixed_dictionaries({}, optional={"messages": JSON | st.lists(MESSAGE, max_size=3)}).map(
        lambda messages: {**fields, **messages}
    )
)


def test_generated_requests_never_fail_the_server(vlm: VLM, reducer: Reducer) -> None:
    loop = asyncio.new_event_loop()
    server = AppServer(vlm, reducer, max_tokens=3)

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(REQUEST | st.binary(max_size=200))
    def check(body: Any) -> None:
        response = loop.run_until_complete(server.chat(body))
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
        if response.status_code != 200:
            check_error(response, response.status_code)

    try:
        check()
        assert content_of(loop.run_until_complete(server.chat({**chat_body(1), "max_tokens": 3})))
    finally:
        loop.run_until_complete(server.engine.close())
        loop.close()


# ---------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fc00::1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "not an address",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public_address(address)


def test_public_addresses() -> None:
    assert is_public_address("93.184.216.34")
    assert is_public_address("2606:2800:220:1:248:1893:25c8:1946")


def fetch(url: str, addresses: list[str], *, trust: bool = False, **options: Any) -> bytes:
    """Fetch one URL with a resolver that gives these addresses."""

    async def resolve(host: str, port: int) -> list[str]:
        return addresses

    async def run() -> bytes:
        hosts = {"allowed_hosts": ("images.example.org", "other.example.org:8080"), **options}
        source = ImageSource(ServerOptions(**hosts), resolve, (lambda _: True) if trust else None)
        try:
            return (await source.load([url]))[0]
        finally:
            await source.close()

    return run_async(run())


@pytest.mark.parametrize(
    ("url", "addresses", "words"),
    [
        ("http://images.example.org/a.png", ["127.0.0.1"], "no public address"),
        ("http://images.example.org/a.png", ["93.184.216.34", "10.0.0.1"], "no public address"),
        ("http://images.example.org/a.png", ["169.254.169.254"], "no public address"),
        ("http://images.example.org/a.png", [], "no public address"),
        ("http://images.example.org:81/a.png", ["93.184.216.34"], "does not fetch images"),
        ("http://evil.org/a.png", ["93.184.216.34"], "does not fetch images"),
        ("http://images.example.org.evil.org/a.png", ["93.184.216.34"], "does not fetch images"),
        ("http://images.example.org@evil.org/a.png", ["93.184.216.34"], "user name"),
        ("http://127.0.0.1/a.png", ["127.0.0.1"], "does not fetch images"),
        ("http://2130706433/a.png", ["127.0.0.1"], "does not fetch images"),
        ("ftp://images.example.org/a.png", ["93.184.216.34"], "https://"),
        ("http:///a.png", [], "https://"),
        ("http://[::1/a.png", [], "cannot be read"),
    ],
)
def test_urls_that_are_refused(url: str, addresses: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fetch(url, addresses)


@pytest.fixture
def web() -> Any:
    """A web server on loopback, which answers by the path."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Host"]))
            if self.path == "/redirect":
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.1/secret")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            if self.path == "/slow":
                for _ in range(100):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    __import__("time").sleep(0.1)
            self.wfile.write(b"x" * (5000 if self.path == "/large" else 10))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, seen
    server.shutdown()


def test_an_allowed_host_is_fetched_from_the_resolved_address(web: Any) -> None:
    port, seen = web
    hosts = {"allowed_hosts": (f"photos.example.org:{port}",)}
    url = f"http://photos.example.org:{port}"
    assert fetch(f"{url}/a.png", ["127.0.0.1"], trust=True, **hosts) == b"x" * 10
    assert seen == [("/a.png", f"photos.example.org:{port}")]
    with pytest.raises(ValueError, match="answered 302"):
        fetch(f"{url}/redirect", ["127.0.0.1"], trust=True, **hosts)
    assert len(seen) == 2, "the redirect was followed"
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        fetch(f"{url}/large", ["127.0.0.1"], trust=True, max_bytes=1000, **hosts)
    with pytest.raises(ValueError, match=r"within 0\.5 seconds"):
        fetch(f"{url}/slow", ["127.0.0.1"], trust=True, fetch_timeout=0.5, **hosts)
    with pytest.raises(ValueError, match="could not be fetched"):
        fetch(f"{url}/a.png", ["127.0.0.2"], trust=True, fetch_timeout=2, allowed_hosts=hosts["allowed_hosts"])


# ---------------------------------------------------------------------- health and metrics


def test_health_and_metrics(vlm: VLM, reducer: Reducer) -> None:
    answer = vlm.answer(vlm.inputs([photo(seed=1), photo(seed=2)], "what is this ?"), reducer, max_new_tokens=7)

    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            health = await server.client.get("/health")
            assert health.json()["parts"] == {"model": "ok"}
            response = await server.chat(chat_body(1, 2))
            await server.chat(chat_body(1, stream=True))
            text = (await server.client.get("/metrics")).text
            values = {
                "torino_images_total": 3,
                "torino_image_tokens_before_total": 48,
                "torino_image_tokens_after_total": answer.after + len(answer.reductions[0]),
                "torino_generated_tokens_total": 14,
                'torino_requests_total{status="200"}': 2,
                "torino_image_cache_hits_total": 1,
                "torino_image_cache_misses_total": 2,
                "torino_requests_running": 0,
                "torino_first_token_seconds_count": 1,
                "torino_request_seconds_count": 2,
                'torino_stage_seconds_count{stage="tower"}': 1,
                'torino_stage_seconds_count{stage="prefill"}': 2,
            }
            for name, value in values.items():
                assert f"{name} {float(value)}\n" in text, name
            tokens = response.json()["usage"]["total_tokens"]
            first = vlm.adapter.cache_bytes(tokens)
            assert await server.metric("torino_kv_cache_bytes_total") > first > 0
            server.state.draining = True
            assert (await server.client.get("/health")).status_code == 503
            check_error(await server.chat(chat_body(1)), 503, "stopping")

    run_async(run())


def test_log_lines_have_no_content(server: CommandServer) -> None:
    secret = "word41 word42"
    identifier = server.post(chat_body(1, text=secret)).headers["x-request-id"]
    for _ in range(50):
        lines = [line for line in server.events("request") if line["id"] == identifier]
        if lines:
            break
        __import__("time").sleep(0.1)
    (line,) = lines
    assert line["status"] == 200
    assert line["images"] == 1
    assert line["tokens_before"] == 16
    assert secret not in "".join(server.lines)
    assert json.loads(json.dumps(line)) == line
