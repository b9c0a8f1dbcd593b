"""vLLM with the plug-in answers as ``reduced()`` in transformers does: same tokens, log probabilities within 1e-4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; run make vllm-test")

from tests.serving.vllm.engines import CHUNK, Request, Served, serve
from tests.serving.vllm.tiny_models import photo, write_llava, write_llava_next, write_published_llava, write_qwen
from tests.support.lab import needs_weights

SHORT = "what is this ?"
LONG = " ".join(f"word{number}" for number in range(40)) + " ?"
X = {"method": "torino-x", "sae": "none"}
M = {"method": "torino-m", "sae": "none"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "clip processor": ("clip", X),
    "clip engine": ("clip", {**X, "budget": 6, "placement": "engine"}),
    "siglip processor": ("siglip", {**M, "padding": "square"}),
    "siglip engine": ("siglip", {"method": "random", "keep": 0.3, "positions": "original", "placement": "engine"}),
    "dinov2 processor": ("dinov2", {**X, "attention": "plain"}),
    "dinov2 engine": ("dinov2", {**M, "budget": 6, "attention": "proportional", "placement": "engine"}),
    "registers processor": ("registers", X),
    "registers engine": ("registers", {**X, "budget": 6, "placement": "engine"}),
    "llava_next processor": ("llava_next", M),
    "llava_next processor original": ("llava_next", {**M, "positions": "original"}),
    "qwen2_vl processor": ("qwen2_vl", {"method": "random", "keep": 0.3}),
    "qwen2_5_vl processor": ("qwen2_5_vl", {"method": "random", "keep": 0.4}),
}


def write_model(folder: Path, name: str) -> str:
    if name == "published":
        return str(write_published_llava(folder))
    if name == "llava_next":
        return str(write_llava_next(folder))
    return str(write_qwen(folder, name) if name.startswith("qwen") else write_llava(folder, name))


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, settings = CASES[request.param]
    with serve(write_model(tmp_path_factory.mktemp("model"), name), settings) as model:
        yield model


def ask(*seeds: int, question: str = SHORT) -> Request:
    return Request(tuple(photo(seed, width=96 - 8 * (seed % 3)) for seed in seeds), question)


def test_one_image(served: Served) -> None:
    served.check([ask(0)])


def test_several_images(served: Served) -> None:
    served.check([ask(1, 2)])


def test_ragged_batch(served: Served) -> None:
    requests = [ask(3), ask(4, 5, 6), ask(7, question="how many ?"), ask(8, 9)]
    lengths = {result.prompt for result in served.check(requests)}
    assert len(lengths) > 2


def test_chunked_prefill(served: Served) -> None:
    (result,) = served.check([ask(10, 11, question=LONG)])
    assert result.prompt > CHUNK


def test_prefix_cache_hit(served: Served) -> None:
    (first,) = served.check([ask(12, 13, 14, question=f"{LONG} word50")])
    (again,) = served.check([ask(12, 13, 14, question=f"{LONG} word51")])
    assert first.cached == 0
    assert again.cached > 0


@pytest.mark.parametrize("placement", ["processor", "engine"])
@needs_weights
def test_lab(placement: str) -> None:
    from torino.vlm.loading import model_package

    package = model_package("lab")
    assert package is not None
    settings = {"method": "torino-x", "sae": "lab", "placement": placement}
    settings |= {"budget": 32} if placement == "engine" else {}
    question = "Is there a person in the photo?"
    with serve(str(package.folder()), settings, max_num_batched_tokens=128) as served:
        served.check([ask(0, 1, question=question), ask(2, question=question)])


# ---------------------------------------------------------------------- controls


@pytest.mark.parametrize("placement", ["processor", "engine"])
def test_wrong_offsets_or_sizes_are_noticed(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torino.serving.vllm.models import base, processing

    settings = {**X, "placement": placement} | ({"budget": 6} if placement == "engine" else {})
    stock = processing.marked_embeds

    def wrong_offsets(image: Any, resolved: Any, offsets: torch.Tensor) -> torch.Tensor:
        return stock(image, resolved, offsets.flip(0))

    def wrong_sizes(image: Any, resolved: Any, offsets: torch.Tensor) -> torch.Tensor:
        other = type(image)(image.features, image.slots, torch.ones_like(image.sizes), image.full)
        return stock(other, resolved, offsets)

    with serve(write_model(tmp_path, "clip"), settings) as served:
        for seed, wrong in enumerate((wrong_offsets, wrong_sizes)):
            for module in (base, processing):
                monkeypatch.setattr(module, "marked_embeds", wrong)
            with pytest.raises(AssertionError):
                served.check([ask(20 + seed), ask(30 + seed)])
        monkeypatch.undo()
        served.check([ask(40)])
