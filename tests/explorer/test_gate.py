"""What reaches the explorer: hosts, origins, headers, and the page itself."""

from __future__ import annotations

import re
import socket
from importlib.resources import files

import pytest

from tests.support.explorer import ExplorerClient
from torino.explorer.gate import POLICY, is_own_host
from torino.explorer.launch import is_loopback

PAGE = (files("torino.explorer") / "assets" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["/", "/inspect", "/compare", "/atlas", "/runs", "/api"])
def test_every_page_has_the_headers(client: ExplorerClient, path: str) -> None:
    response = client.http.get(path)
    assert response.text == PAGE
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["referrer-policy"] == "no-referrer"


def test_the_policy_allows_nothing_from_elsewhere() -> None:
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_the_page_names_only_files_of_the_explorer(client: ExplorerClient) -> None:
    names = re.findall(r"(?:src|href)=\"([^\"]+)\"", PAGE)
    assert names
    for name in names:
        assert client.http.get(name).status_code == 200
    assert "<style" not in PAGE
    assert not re.search(r"<script(?![^>]*src=)", PAGE)


def test_no_address_of_another_server_is_in_the_build() -> None:
    for name in ("explorer.js", "explorer.css", "index.html"):
        text = (files("torino.explorer") / "assets" / name).read_text(encoding="utf-8")
        found = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert {address for address in found if not address.startswith("http://www.w3.org/")} == set()


@pytest.mark.parametrize("name", ["export.html.j2", "nothing.js", "%2e%2e%2fapp.py"])
def test_other_files_are_not_served(client: ExplorerClient, name: str) -> None:
    assert client.http.get(f"/assets/{name}").status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_sites_are_refused(client: ExplorerClient, headers: dict[str, str]) -> None:
    response = client.http.get("/api/info", headers=headers)
    assert response.status_code == 403
    assert response.headers["content-security-policy"] == POLICY


def test_the_page_itself_is_not_refused(client: ExplorerClient) -> None:
    headers = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    assert client.http.get("/api/info", headers=headers).status_code == 200


def test_hosts() -> None:
    assert is_own_host("box.example:80", "box.example")
    assert not is_own_host("box.example", "127.0.0.1")
    assert not is_loopback("192.168.0.1")


def test_the_api_is_described(client: ExplorerClient) -> None:
    description = client.get("/api/openapi.json")
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    assert len(operations) >= 18
    assert all(operation["description"] for operation in operations)
    assert {"PhotoView", "ReductionView", "TokenView"} <= set(description["components"]["schemas"])


def test_unknown_paths_and_methods_are_one_sentence(client: ExplorerClient) -> None:
    assert client.refused("/api/nothing", 404) == "There is no /api/nothing."
    assert client.http.put("/api/info").status_code == 405
    assert client.http.get("/docs").status_code == 404


def test_an_error_of_the_explorer_tells_nothing(client: ExplorerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(client.explorer.library, "list", fail)
    response = client.http.get("/api/photos")
    assert response.status_code == 500
    assert "secret" not in response.text


def test_the_explorer_connects_to_nothing(client: ExplorerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection to another server")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    client.build_atlas()
    for path in (
        "/",
        "/api/info",
        "/api/photos",
        "/api/photos/photo-0",
        "/api/concepts",
        "/api/concepts/1",
        "/api/runs",
    ):
        assert client.http.get(path).status_code == 200
    assert client.ask("photo-0", question="what is this ?")[-1]["event"] == "done"


def test_a_large_request_is_refused(client: ExplorerClient) -> None:
    response = client.http.post("/api/photos/photo-0/answers", json={"question": "x" * 100_000})
    assert response.status_code == 413


def test_too_many_waiting_requests_get_429(client: ExplorerClient) -> None:
    model = client.explorer.model
    model.waiting = 0
    response = client.http.get("/api/photos/photo-0")
    assert response.status_code == 429
    assert response.headers["retry-after"]
