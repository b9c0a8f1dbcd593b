"""``torino serve``: options that are refused, and the lab behind an OpenAI client."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.command import run_torino
from tests.support.lab import needs_weights
from tests.support.tiny_vlm import write_files

pytest.importorskip("fastapi")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("serve"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--placement", "engine", "--engine", "transformers"], "--placement engine says where vLLM"),
        (["--vllm", "--max-model-len 9", "--engine", "transformers"], "--vllm has options of vLLM"),
        (["--vllm", "'", "--engine", "vllm"], "cannot be split"),
        (["--budget", "4", "--keep", "25%"], "exclude each other"),
        (["--keep", "150%"], "--keep must be a share"),
        (["--method", "nothing"], "nothing"),
        (["--method", "none", "--sae", "none"], "no effect"),
        (["--sae", "none", "--allow-host", "http//x"], "--allow-host takes a host"),
        (["--sae", "none", "--api-key", ""], "API key"),
        (["--sae", "none", "--method", "cdpruner"], ""),
    ],
)
def test_wrong_options_are_one_sentence(home: Path, words: list[str], message: str) -> None:
    failed = run_torino("serve", home / "llava", *words, "--port", "0", code=2)
    assert message in failed.text
    assert "listening" not in failed.err


def test_a_method_that_needs_an_sae_says_so(home: Path) -> None:
    assert "needs an SAE" in run_torino("serve", home / "llava", code=2).text


def test_a_method_that_plans_images_together_is_refused(home: Path) -> None:
    words = ["--method", "torino-m(pooled=True)", "--sae", "none", "--engine", "transformers"]
    failed = run_torino("serve", home / "llava", *words, "--port", "0", code=2)
    assert "pooled" in failed.text


def test_a_taken_port_is_one_sentence(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["--sae", "none", "--engine", "transformers", "--port", port]
        assert f"Cannot listen on 127.0.0.1:{port}" in run_torino("serve", home / "llava", *words, code=2).text


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_message_names_it(home: Path) -> None:
    failed = run_torino("serve", home / "llava", "--sae", "none", "--engine", "vllm", code=2)
    assert "--engine vllm needs vLLM, which is not installed" in failed.text


@needs_weights
def test_the_lab_answers_an_openai_client() -> None:
    import openai

    from tests.support.serving import command_server, to_url
    from torino.core.defaults import DEFAULT_METHOD
    from torino.datasets.bundled import example_folder
    from torino.datasets.images import open_image
    from torino.serving.settings import ReductionSettings
    from torino.vlm import load_vlm

    photos = [open_image(example_folder() / "photos" / f"{name}.jpg") for name in ("astronaut", "coffee")]
    question = "Is there a person in the photo?"
    vlm, reducer = load_vlm("lab"), ReductionSettings(DEFAULT_METHOD, "lab").build()
    with command_server("--engine", "transformers", "--max-tokens", "16") as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        for shown in (photos[:1], photos):
            parts = [{"type": "image_url", "image_url": {"url": to_url(photo)}} for photo in shown]
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
            answer = vlm.answer(vlm.inputs(shown, question), reducer, max_new_tokens=16)
            stream = client.chat.completions.create(model="lab", messages=messages, stream=True)  # type: ignore[call-overload]
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert "".join(pieces) == answer.text
            options = {"extra_body": {"torino": {"explain": True}}}
            whole = client.chat.completions.create(model="lab", messages=messages, **options)  # type: ignore[call-overload]
            assert whole.choices[0].message.content == answer.text
            told = whole.model_extra["torino"]
            assert told["tokens"] == {"before": 196 * len(shown), "after": answer.after}
            assert any(concept["name"] for concept in told["images"][0]["concepts"])
