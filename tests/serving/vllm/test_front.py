"""``torino serve`` with vLLM over HTTP: behind a front, and as the server itself with the plug-in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run make vllm-test")

import httpx2

from tests.serving.vllm.tiny_models import PATCHES, photo, write_llava, write_published_llava
from tests.support.command import run_torino
from tests.support.serving import CHAT, CommandServer, content_of, free_port, metric, stream_text, to_url
from torino import RawEmbedding, make
from torino.serving.server import vllm as vllm_module
from torino.serving.server.options import ServerOptions
from torino.serving.server.plan import ServerPlan
from torino.serving.settings import ReductionSettings
from torino.serving.vllm.limits import MIDDLEWARE, VARIABLE, read_limits
from torino.vlm import VLM, load_vlm

QUESTION = "what is this ?"
ENGINE = "--dtype float32 --enforce-eager --max-model-len 256 --num-gpu-blocks-override 64 --block-size 32"


def body(*seeds: int, **fields: object) -> dict[str, object]:
    parts = [{"type": "image_url", "image_url": {"url": to_url(photo(seed))}} for seed in seeds]
    content = [*parts, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **fields}


def expected(vlm: VLM, *seeds: int, method: str = "torino-m(budget=8)") -> str:
    reducer = make(method, sae=RawEmbedding())
    return vlm.answer(vlm.inputs([photo(seed) for seed in seeds], QUESTION), reducer, max_new_tokens=6).text


def engine_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "TORCHDYNAMO"))}


def all_children(server: CommandServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def assert_ended(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, 60)
    assert not alive, "vLLM outlives the process that started it"


@pytest.fixture
def processes() -> Iterator[list[psutil.Process]]:
    """Processes that are killed after the test, whatever happens in it."""
    started: list[psutil.Process] = []
    yield started
    for process in started:
        if process.is_running():
            process.kill()


def test_a_front_before_vllm(tmp_path: Path, processes: list[psutil.Process]) -> None:
    model = write_published_llava(tmp_path / "llava")
    vlm = load_vlm(model)
    words = [model, "--sae", "none", "--budget", "8", "--engine", "vllm", "--placement", "front", "--vllm", ENGINE]
    server = CommandServer(words, **engine_variables())
    try:
        server.wait(900)
        processes += all_children(server)
        assert httpx2.get(f"{server.address}/health").json()["parts"] == {"vision": "ok", "engine": "ok"}
        for seeds in ((0,), (1, 2), (3,)):
            response = server.post(body(*seeds, torino={"explain": True}))
            assert content_of(response).split() == expected(vlm, *seeds).split()
            assert response.json()["torino"]["tokens"]["after"] == 8 * len(seeds)
        streamed = httpx2.post(f"{server.address}{CHAT}", json=body(1, 2, stream=True), timeout=60)
        assert stream_text(streamed.text.splitlines())[0].split() == expected(vlm, 1, 2).split()
        refused = server.post(
            {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "x"}]}]}
        )
        assert refused.status_code == 400
        long = {"messages": [{"role": "user", "content": "what " * 300}], "max_tokens": 6}
        too_long = server.post(long)  # vLLM refuses it, and the front passes its sentence on
        assert too_long.status_code == 400, too_long.text
        assert "256" in too_long.json()["error"]["message"]
        assert content_of(server.post(body(0))).split() == expected(vlm, 0).split()
        server.process.kill()
        assert_ended(processes)
    finally:
        server.stop()


def test_methods_that_need_more_than_embeddings_are_refused(tmp_path: Path) -> None:
    model = write_llava(tmp_path / "llava")
    words = ["--method", "torino-x", "--sae", "none", "--engine", "vllm", "--placement", "front", "--port", "0"]
    assert "--placement front with vLLM" in run_torino("serve", model, *words, code=2).text


def test_the_command_starts_vllm_with_the_plugin(tmp_path: Path, processes: list[psutil.Process]) -> None:
    """Send what clients send to ``torino serve``, and kill it: vLLM ends with it."""
    model = write_llava(tmp_path / "llava")
    vlm = load_vlm(model)
    vlm.model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    words = [model, "--method", "torino-x", "--sae", "none", "--engine", "vllm", "--vllm", ENGINE, "--name", "tiny"]
    environment = engine_variables() | {"TORINO_API_KEY": "key", "VLLM_PLUGINS": ""}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = CommandServer([*words, "--max-images", "40"], free_port(), **environment)

    def post(given: dict[str, object], **fields: object) -> httpx2.Response:
        headers = {"Authorization": "Bearer key"}
        sent = {**given, "model": "tiny", "temperature": 0, **fields}
        return httpx2.post(f"{server.address}{CHAT}", json=sent, headers=headers, timeout=60)

    try:
        server.wait(900)
        processes += all_children(server)
        assert httpx2.get(f"{server.address}/v1/models").status_code == 401
        for seeds in ((0,), (1, 2)):
            response = post(body(*seeds), ignore_eos=True)
            assert content_of(response).split() == expected(vlm, *seeds, method="torino-x").split()
        many = post(body(*range(32)), max_tokens=1)
        assert many.status_code == 400
        last = 32 * PATCHES + 6
        assert f"With original positions this prompt ends at position {last}" in many.json()["error"]["message"]
        parts = (
            {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}},  # hosts must be allowed
            {"type": "image_embeds", "image_embeds": "eHh4eA=="},
        )
        for part in parts:
            assert post({"messages": [{"role": "user", "content": [part]}]}).status_code == 400
        refused = (
            (body(1, max_tokens=600), 400, "at most 512"),
            (body(1, torino={"explain": True}), 400, "--placement front"),
            (body(*range(41)), 400, "at most 40"),
            ({"messages": "x" * (33 << 20)}, 413, "bytes"),
        )
        for given, status, words_of in refused:
            response = post(given)
            assert response.status_code == status, response.text
            assert words_of in response.json()["error"]["message"]
        elsewhere = httpx2.post(f"{server.address}/v1/responses", json={}, headers={"Authorization": "Bearer key"})
        assert elsewhere.status_code == 404
        assert post(body(1)).status_code == 200
        metrics = httpx2.get(f"{server.address}/metrics").text
        assert metric(metrics, "torino_images_total") >= 3
        assert metric(metrics, "torino_image_tokens_after_total") < metric(metrics, "torino_image_tokens_before_total")
        assert metric(metrics, 'torino_refusals_total{reason="bytes"}') == 1
        server.process.kill()
        assert_ended(processes)
    finally:
        server.stop()


def test_options_of_the_command_reach_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(vllm_module, "run_vllm", lambda *arguments: given.append(arguments) or 0)
    model = str(write_llava(tmp_path / "llava"))
    options = ServerOptions("tiny", api_keys=("key",), max_images=3)
    plan = ServerPlan(model, ReductionSettings("random", budget=8), options, port=8123, vllm=("--max-model-len", "256"))
    assert vllm_module.run_plugin(plan, "engine") == 0
    ((words, environment),) = given
    pairs = dict(pairwise(words))
    assert '"placement": "engine"' in pairs["--hf-overrides"]
    assert (pairs["--port"], pairs["--max-model-len"]) == ("8123", "256")
    assert pairs["--limit-mm-per-prompt"] == '{"image": 3}'
    assert pairs["--allowed-media-domains"].endswith(".invalid")
    assert pairs["--middleware"] == MIDDLEWARE
    assert (pairs["--max-num-seqs"], pairs["--shutdown-timeout"]) == ("8", "30")
    assert pairs["--override-generation-config"] == '{"max_new_tokens": 512}'
    assert read_limits(environment[VARIABLE]) == (options, "json")
    assert "key" not in words
