"""The LLM judge against a local HTTP server."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("openai")

from tests.support.files import read_only
from torino.core.errors import BadParameter, TorinoError, Unreachable
from torino.evaluation import ImageRef, Judge, Sample, Task
from torino.evaluation.benchmarks import BENCHMARKS
from torino.evaluation.judge import MAX_REPLY_BYTES, parse_grade


class Server:
    """A chat server that sends the given replies in order, and repeats the last one.

    A reply is the content of a completion, a status code, raw bytes, or a function of the request handler.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.replies: list[Any] = ["0.5"]
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body | {"path": self.path})
                server.keys.append(self.headers.get("Authorization"))
                server.headers.append(dict(self.headers))
                reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                if callable(reply):
                    reply = reply(self, body["messages"][0]["content"])
                if reply is None:
                    return
                self.send_response(reply if isinstance(reply, int) else 200)
                self.end_headers()
                if isinstance(reply, str):
                    self.wfile.write(completion(reply))
                elif isinstance(reply, bytes):
                    self.wfile.write(reply)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def completion(content: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}}]}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)


def make_sample(index: str, answer: str, category: str) -> Sample:
    image = ImageRef(Path("none.tsv"), index)
    return Sample(index, "?", (answer,), (image,), group=index, meta={"category": category})


def make_task() -> Task:
    samples = (make_sample("1", "3<AND>4", "ocr,math"), make_sample("2", "cat", "rec"))
    return Task("MMVet", "judge", samples, Path("none.tsv"), "0", BENCHMARKS["MMVet"])


ROWS = [{"index": "1", "prediction": "It is {answer} 3"}, {"index": "2", "prediction": "a cat"}]


def test_without_a_judge_the_task_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORINO_JUDGE_URL", "TORINO_JUDGE_MODEL", "TORINO_JUDGE_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    judge = Judge.from_environment()
    assert judge is None
    score = make_task().score(ROWS, judge)
    assert math.isnan(score.value)
    assert score.to_dict()["value"] is None
    assert score.note.startswith("MMVet: Not scored: its answers are graded by a language model")
    assert "TORINO_JUDGE_URL" in score.note


def test_each_answer_is_graded_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_JUDGE_URL", server.url)
    monkeypatch.setenv("TORINO_JUDGE_MODEL", "grader")
    monkeypatch.setenv("TORINO_JUDGE_KEY", "sesame")
    server.replies = [lambda _, text: "0.5" if "{answer} 3" in text else "Correctness: 1.0"]
    cache = tmp_path / "grades.jsonl"
    judge = Judge.from_environment(cache=cache)
    assert judge is not None
    score = make_task().score(ROWS, judge)
    assert score.value == pytest.approx(75)
    assert score.parts == pytest.approx({"ocr": 50, "math": 50, "rec": 100})
    assert score.note == "judged by grader, torino's MM-Vet prompt"
    assert server.requests[0]["path"] == "/v1/chat/completions"
    assert server.requests[0]["model"] == "grader"
    texts = [request["messages"][0]["content"] for request in server.requests]
    first = next(text for text in texts if "{answer} 3" in text)
    assert "Ground truth: 3 <AND> 4\nPrediction: It is {answer} 3\nCorrectness:" in first
    assert set(server.keys) == {"Bearer sesame"}
    assert "sesame" not in cache.read_text(encoding="utf-8")
    assert "sesame" not in repr(judge)
    # a new judge reads the grades, also from a file whose last line is cut short
    with cache.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut sh')
    again = Judge.from_environment(cache=cache)
    assert make_task().score(ROWS, again).value == score.value
    assert len(server.requests) == 2
    # another answer is graded, and its grade is not appended to the cut line
    assert make_task().score([*ROWS, {"index": "2", "prediction": "puma"}], again).value == pytest.approx(75)
    fresh = Judge.from_environment(cache=cache)
    assert make_task().score([{"index": "2", "prediction": "puma"}], fresh).value == 50
    assert len(server.requests) == 3


def test_a_damaged_grade_is_requested_again(server: Server, tmp_path: Path) -> None:
    cache = tmp_path / "grades.jsonl"
    server.replies = ["0.5"]
    assert make_task().score(ROWS[:1], Judge(server.url, "grader", cache=cache)).per_sample["1"] == 0.5
    cache.write_bytes(cache.read_bytes().replace(b'"grade": 0.5', b'"grade": 0.9'))
    with pytest.warns(UserWarning, match=r"grades\.jsonl, line 1 is damaged: .* Its answer is graded again"):
        judge = Judge(server.url, "grader", cache=cache)
    assert make_task().score(ROWS[:1], judge).per_sample["1"] == 0.5
    assert len(server.requests) == 2


def test_other_caches_are_only_read(server: Server, tmp_path: Path) -> None:
    server.replies = ["0.5"]
    (tmp_path / "run").mkdir()
    make_task().score(ROWS[:1], Judge(server.url, "grader", cache=tmp_path / "run" / "grades.jsonl"))
    with read_only(tmp_path / "run"):
        judge = Judge(
            server.url, "grader", cache=tmp_path / "new.jsonl", other_caches=[tmp_path / "run" / "grades.jsonl"]
        )
        assert make_task().score(ROWS, judge).counts["answered"] == 2
    assert len(server.requests) == 2
    assert len((tmp_path / "new.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_settings_of_the_openai_package_are_not_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    make_task().score(ROWS, Judge(server.url, "grader"))
    assert "secret" not in str(server.headers)


def test_single_grade(server: Server) -> None:
    assert Judge(server.url, "grader").grade(make_sample("1", "cat", "rec"), "a cat") == 0.5


def test_busy_server_and_reply_without_a_grade_are_retried(server: Server) -> None:
    server.replies = [503, 429, "Well, it depends.", "0.3"]
    judge = Judge(server.url, "grader", concurrency=1)
    assert make_task().score(ROWS[:1], judge).per_sample["1"] == 0.3
    assert [request["temperature"] for request in server.requests] == [0, 0, 0, 0.5]
    assert server.keys == [None] * 4


def test_judge_that_never_gives_a_grade(server: Server, tmp_path: Path) -> None:
    server.replies = ["I would rather not."]
    score = make_task().score(ROWS[:1], Judge(server.url, "grader", max_retries=1, cache=tmp_path / "g.jsonl"))
    assert score.value == 0
    assert score.counts["unparsed"] == 1
    assert len(server.requests) == 2
    server.replies = ["1"]
    assert make_task().score(ROWS[:1], Judge(server.url, "grader", cache=tmp_path / "g.jsonl")).value == 50


DEEP = b'{"choices": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (401, "it answered 401"),
        (b"{}", "no choices"),
        (b'{"choices": []}', "no choices"),
        (b"[1]", "no choices"),
        (b"<html>", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe\xfd", "not JSON"),
        (DEEP, "not JSON"),
        (completion(None), "NoneType instead of a text"),
        (completion([{"text": "1"}]), "list instead of a text"),
        (completion(1), "int instead of a text"),
        (completion("0.5 \ud800"), "not valid Unicode"),
    ],
)
def test_unusable_replies_raise_a_plain_error(server: Server, reply: Any, message: str) -> None:
    server.replies = [reply]
    with pytest.raises(Unreachable, match=f"The request to the judge grader at .* failed: .*{message}"):
        make_task().score(ROWS, Judge(server.url, "grader", api_key="sesame"))


def test_predictions_with_lone_surrogates_are_sent(server: Server) -> None:
    rows = [{"index": "1", "prediction": "odd \ud800"}]
    assert make_task().score(rows, Judge(server.url, "grader")).per_sample["1"] == 0.5
    assert "Prediction: odd ?" in server.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_refused(server: Server, status: int) -> None:
    other = Server()

    def redirect(handler: BaseHTTPRequestHandler, text: str) -> None:
        handler.send_response(status)
        handler.send_header("Location", f"{other.url}/chat/completions")
        handler.end_headers()

    server.replies = [redirect]
    with pytest.raises(Unreachable, match=rf"{status} .*redirect to .*not followed"):
        make_task().score(ROWS[:1], Judge(server.url, "grader", api_key="sesame"))
    other.close()
    assert other.requests == []
    assert len(server.requests) == 1


def test_large_replies_are_refused(server: Server) -> None:
    sent = 0

    def flood(handler: BaseHTTPRequestHandler, text: str) -> None:
        nonlocal sent
        handler.send_response(200)
        handler.end_headers()
        for _ in range(2000):
            try:
                handler.wfile.write(b" " * 100_000)
            except OSError:
                return
            sent += 100_000

    server.replies = [flood]
    with pytest.raises(Unreachable, match="larger than 1,000,000 bytes"):
        make_task().score(ROWS[:1], Judge(server.url, "grader"))
    assert sent < 100 * MAX_REPLY_BYTES  # the connection is closed long before the end


def test_compressed_replies_are_refused(server: Server) -> None:
    def compressed(handler: BaseHTTPRequestHandler, text: str) -> None:
        assert handler.headers["Accept-Encoding"] == "identity"
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()

    server.replies = [compressed]
    with pytest.raises(Unreachable, match="compressed"):
        make_task().score(ROWS[:1], Judge(server.url, "grader"))


@pytest.mark.parametrize("part", ["headers", "body"])
def test_timeout_covers_the_whole_request(server: Server, part: str) -> None:
    def trickle(handler: BaseHTTPRequestHandler, text: str) -> None:
        text_bytes = b"HTTP/1.1 200 OK\r\nX-Slow: " if part == "headers" else b"HTTP/1.1 200 OK\r\n\r\n"
        try:
            handler.wfile.write(text_bytes)
            for _ in range(100):
                handler.wfile.write(b" ")
                handler.wfile.flush()
                time.sleep(0.1)
        except OSError:
            pass

    server.replies = [trickle]
    start = time.monotonic()
    with pytest.raises(Unreachable, match=r"within 0\.5 s"):
        make_task().score(ROWS[:1], Judge(server.url, "grader", timeout=0.5, max_retries=0))
    assert time.monotonic() - start < 4  # the whole reply would take 10 s
    assert len(server.requests) == 1


def hang(handler: BaseHTTPRequestHandler, text: str) -> None:
    time.sleep(10)


def answer_late(handler: BaseHTTPRequestHandler, text: str) -> str:
    time.sleep(0.3)
    return "I would rather not."


def be_busy(handler: BaseHTTPRequestHandler, text: str) -> None:
    handler.send_response(503)
    handler.send_header("Retry-After", "5")
    handler.end_headers()


@pytest.mark.parametrize("reply", [hang, answer_late, be_busy])
def test_timeout_covers_all_retries(server: Server, reply: Any) -> None:
    server.replies = [reply]
    start = time.monotonic()
    with pytest.raises(Unreachable, match="it gave no grade within 1 s, with all retries"):
        make_task().score(ROWS[:1], Judge(server.url, "grader", timeout=1, max_retries=20))
    assert time.monotonic() - start < 2.5  # without a limit: 20 times the time of a request or of a pause


def test_request_that_hangs_is_sent_again(server: Server) -> None:
    server.replies = [hang, "0.3"]
    assert make_task().score(ROWS[:1], Judge(server.url, "grader", timeout=1)).per_sample["1"] == 0.3
    assert len(server.requests) == 2


def test_reply_that_breaks_off_is_retried(server: Server) -> None:
    def cut(handler: BaseHTTPRequestHandler, text: str) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b"{")

    server.replies = [cut, "0.3"]
    assert make_task().score(ROWS[:1], Judge(server.url, "grader")).per_sample["1"] == 0.3
    server.replies = [cut]
    with pytest.raises(Unreachable, match="failed: "):
        make_task().score(ROWS[1:], Judge(server.url, "grader", max_retries=1))


def test_unreachable_server() -> None:
    judge = Judge("http://127.0.0.1:9", "grader", max_retries=1, timeout=1)
    with pytest.raises(Unreachable, match="failed: "):
        make_task().score(ROWS, judge)


def test_grades_before_an_error_are_kept(server: Server, tmp_path: Path) -> None:
    server.replies = ["0.5", 401]
    with pytest.raises(Unreachable, match="Grades received so far are kept"):
        make_task().score(ROWS, Judge(server.url, "grader", concurrency=1, cache=tmp_path / "g.jsonl"))
    server.replies = ["1.0"]
    score = make_task().score(ROWS, Judge(server.url, "grader", cache=tmp_path / "g.jsonl"))
    assert score.value == pytest.approx(75)
    assert len(server.requests) == 3


def test_judge_within_a_running_event_loop(server: Server) -> None:
    async def notebook_cell() -> float:
        return make_task().score(ROWS[:1], Judge(server.url, "grader")).value

    assert asyncio.run(notebook_cell()) == 25


def test_invalid_parameters() -> None:
    with pytest.raises(BadParameter, match="must begin with http"):
        Judge("localhost", "m")
    with pytest.raises(BadParameter, match=r"must contain \{answer\}"):
        Judge("http://x", "m", prompt="{question} {prediction}")
    with pytest.raises(BadParameter, match="max_retries must be at least 0, got -1"):
        Judge("http://x", "m", max_retries=-1)
    with pytest.raises(BadParameter, match="timeout must be greater than 0"):
        Judge("http://x", "m", timeout=0)
    assert Judge("http://x", "m", prompt="{question} {answer} {prediction}").name.startswith("m, prompt ")


def test_missing_package_is_reported(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(TorinoError, match=r"pip install \"torino\[judge\]\""):
        make_task().score(ROWS, Judge(server.url, "grader"))


def test_extra_body(server: Server) -> None:
    body = {"max_tokens": None, "max_completion_tokens": 64}
    make_task().score(ROWS[:1], Judge(server.url, "grader", extra_body=body, prompt="{question}{answer}{prediction}"))
    assert "max_tokens" not in server.requests[0]
    assert server.requests[0]["max_completion_tokens"] == 64
    assert server.requests[0]["messages"][0]["content"] == "?3 <AND> 4It is {answer} 3"


def test_parse_grade() -> None:
    assert parse_grade("0.7") == parse_grade(" .7 ") == parse_grade("Score: 0.7.") == 0.7
    assert parse_grade("1") == parse_grade("1.0") == 1
    assert parse_grade("0") == 0
    assert all(parse_grade(text) is None for text in ("", "2", "1.5", "10", "0.4 0.5", "none"))
