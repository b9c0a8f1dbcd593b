"""The limits of ``torino serve`` around another server, here an application that repeats what it receives."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from tests.support.serving import CHAT, image_part, run_async, text_part
from torino.core.errors import BadParameter
from torino.serving.server.gate import RequestGate, ServerState
from torino.serving.server.images import ImageSource, read_data_url
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.options import ServerOptions
from torino.serving.vllm.limits import VARIABLE, LimitedServer, RequestCheck, read_limits, write_limits

OPTIONS = ServerOptions(max_tokens=16, max_images=2, max_bytes=100_000, max_pixels=10_000, timeout=1.0)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body; wait first if it says so."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    length = dict(scope["headers"]).get(b"content-length", b"")
    await asyncio.sleep(json.loads(body or b"{}").get("sleep", 0))
    headers = [(b"x-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def limited(options: ServerOptions = OPTIONS, images: ImageSource | None = None) -> httpx2.AsyncClient:
    state = ServerState()

    class Gate(RequestGate):
        covers = LimitedServer.covers

    app = Gate(
        RequestCheck(echo, options, state, images),
        options=options,
        state=state,
        metrics=ServerMetrics(CollectorRegistry()),
    )
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test")


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


def post(given: Any, options: ServerOptions = OPTIONS, path: str = CHAT, **headers: str) -> httpx2.Response:
    async def send() -> httpx2.Response:
        async with limited(options) as client:
            content = given if isinstance(given, bytes) else json.dumps(given).encode()
            return await client.post(path, content=content, headers=headers)

    return run_async(send())


def test_a_request_within_the_limits_is_passed_on_unchanged() -> None:
    given = json.dumps(chat(image_part(), text_part(), logprobs=True, max_tokens=16), indent=2).encode()
    response = post(given)
    assert (response.status_code, response.content) == (200, given)


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[" * 100_000, 400, "not valid JSON"),
        (b"[]", 400, "JSON object"),
        (b" " * 100_001, 413, "bytes"),
        (chat(text_part(), max_tokens=17), 400, "at most 16"),
        (chat(text_part(), max_completion_tokens=17), 400, "at most 16"),
        (chat(text_part(), torino={"explain": True}), 400, "--placement front"),
        (chat(*[image_part()] * 3), 400, "at most 2"),
        (chat({"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}), 400, "data: URL"),
        (chat({"image_url": "http://10.0.0.1/a.png"}), 400, "data: URL"),
        (chat({"type": "image_url", "image_url": {}}), 400, "must hold a url"),
        (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}), 400, "image"),
        (chat({"type": "image_embeds", "image_embeds": "x"}), 400, "Embeddings"),
        (chat({"type": "text", "text": "a", "image_embeds": "x"}), 400, "Embeddings"),
        (chat({"type": "video_url", "video_url": {"url": "http://a"}}), 400, "text or image_url"),
        (chat({"type": "text", "text": "a", "video_url": "file:///etc/passwd"}), 400, "text or image_url"),
    ],
)
def test_refused(given: Any, status: int, words: str) -> None:
    response = post(given)
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert words in message
    assert "\n" not in message


def test_pixels_are_read_from_the_header() -> None:
    given = chat(image_part())
    assert post(given).status_code == 200
    few = post(given, replace(OPTIONS, max_pixels=100))
    assert few.status_code == 400
    assert "pixels" in few.json()["error"]["message"]


def test_other_endpoints_and_keys() -> None:
    assert post({}, path="/v1/responses").status_code == 404
    keyed = replace(OPTIONS, api_keys=("key",))
    assert post({}, keyed, "/tokenize").status_code == 401
    assert post({}, keyed, "/tokenize", authorization="Bearer key").status_code == 200

    async def get(path: str) -> int:
        async with limited(keyed) as client:
            return (await client.get(path)).status_code

    assert run_async(get("/health")) == 200
    assert run_async(get("/v1/models")) == 401


def test_websockets_are_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    check = RequestCheck(echo, OPTIONS, ServerState())
    run_async(check({"type": "websocket", "path": "/v1/realtime"}, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_images_of_allowed_hosts_are_replaced_by_their_content() -> None:
    file = read_data_url(image_part()["image_url"]["url"])

    class Fetched(ImageSource):
        async def _fetch(self, url: str) -> bytes:
            assert url == "https://images.example.org/a.png"
            return file

    options = replace(OPTIONS, allowed_hosts=("images.example.org",))

    async def send() -> httpx2.Response:
        async with limited(options, Fetched(options)) as client:
            part = {"type": "image_url", "image_url": {"url": "https://images.example.org/a.png"}}
            return await client.post(CHAT, json=chat(part, image_part(), text_part()))

    response = run_async(send())
    fetched, given, _ = response.json()["messages"][0]["content"]
    assert read_data_url(fetched["image_url"]["url"]) == file
    assert given == image_part()
    assert response.headers["x-length"] == str(len(response.content))


def test_queue_and_time() -> None:
    options = replace(OPTIONS, batch=1, queue=1, timeout=0.5)

    async def send() -> list[int]:
        async with limited(options) as client:
            sent = [client.post(CHAT, json=chat(text_part(), sleep=0.2)) for _ in range(3)]
            busy = [response.status_code for response in await asyncio.gather(*sent)]
            slow = await client.post(CHAT, json=chat(text_part(), sleep=2))
            return [*sorted(busy), slow.status_code]

    assert run_async(send()) == [200, 200, 429, 504]


def test_settings_reach_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(OPTIONS, api_keys=("a", "b"), allowed_hosts=("images.example.org",))
    assert read_limits(write_limits(options, "text")) == (options, "text")
    monkeypatch.setenv(VARIABLE, '{"options": {"unknown": 1}}')
    with pytest.raises(BadParameter, match=f"{VARIABLE} is set by torino serve"):
        LimitedServer(echo)
