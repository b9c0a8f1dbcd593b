"""vLLM with the plug-in: what it refuses, settings from the environment, identities in caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run make vllm-test")

from tests.serving.vllm.engines import Request, preload, serve
from tests.serving.vllm.tiny_models import PATCHES, photo, write_llava, write_qwen

RANDOM = {"method": "random", "budget": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llava(tmp_path_factory.mktemp("llava")))


def engine_config(model: str, settings: dict[str, Any] | None, **options: Any) -> Any:
    """Return vLLM's configuration of a server, as it is before the engine starts."""
    from vllm import EngineArgs

    preload()

    overrides = {} if settings is None else {"torino": settings}
    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, **options}
    return EngineArgs(model, hf_overrides=overrides, **given).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (RANDOM, {"pipeline_parallel_size": 2}, "[Pp]ipeline parallelism"),
        (
            RANDOM,
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding",
        ),
        (RANDOM, {"enable_mm_embeds": True}, "embeddings from clients"),
        ({"method": "cdpruner", "budget": 8}, {}, "by the question"),
        ({"method": "torino-x", "sae": "none", "placement": "engine"}, {}, "lets each image decide"),
        ({"method": "random"}, {}, "needs budget"),
        ({**RANDOM, "bugdet": 8}, {}, "no field 'bugdet'"),
    ],
)
def test_refused_at_startup(model: str, settings: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(model, settings, **options)


def test_models_without_support_are_refused_not_served_unreduced(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM as ServedLlama

    from tests.serving.vllm.tiny_models import TEXT, make_tokenizer

    ModelRegistry.register_model("LlamaForCausalLM", ServedLlama)  # vLLM would start a process to inspect it
    LlamaForCausalLM(LlamaConfig(**TEXT)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert engine_config(str(tmp_path), None).model_config.architecture == "LlamaForCausalLM"
    with pytest.raises(ValueError, match="torino does not reduce llama models in vLLM"):
        engine_config(str(tmp_path), RANDOM)


def test_without_settings_vllm_runs_its_own_model(model: str) -> None:
    config = engine_config(model, None).model_config
    assert config.architecture == "LlavaForConditionalGeneration"
    assert not config.uses_mrope


def test_settings_from_the_environment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_VLLM", json.dumps({**RANDOM, "positions": "original"}))
    config = engine_config(model, None).model_config
    assert config.architecture == "TorinoLlavaForConditionalGeneration"
    assert config.uses_mrope
    assert config.hf_config.torino["budget"] == RANDOM["budget"]
    with pytest.raises(ValueError, match="different settings"):
        engine_config(model, RANDOM)


def hashes(model: str, settings: dict[str, Any], **given: Any) -> list[str]:
    """Return the identities that vLLM gives an image."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = engine_config(model, settings).model_config
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    items = processor.info.parse_mm_data({"image": [photo(0)]})
    output = processor([4], items, **given)
    assert len(output["prompt_token_ids"]) == settings["budget"]
    return output["mm_hashes"]["image"]


def test_two_reducers_never_share_cache_entries(model: str) -> None:
    found = hashes(model, RANDOM)
    assert hashes(model, RANDOM) == found
    assert hashes(model, {**RANDOM, "budget": 9}) != found
    assert hashes(model, {"method": "torino-m", "sae": "none", "budget": 8}) != found
    named = {"mm_uuid_items": {"image": ["a name of the client"]}}
    assert hashes(model, RANDOM, **named) != hashes(model, {**RANDOM, "budget": 9}, **named)


def test_pixels_are_those_of_torino(tmp_path: Path) -> None:
    """vLLM installs torchvision, whose image processors resize differently and would be preferred."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from torino.vlm import load_vlm

    for write in (write_llava, write_qwen):
        folder = str(write(tmp_path / write.__name__))
        config = engine_config(folder, RANDOM | {"budget": 4, "padding": "square"}).model_config
        processor = MULTIMODAL_REGISTRY.create_processor(config).info.get_hf_processor()
        vlm = load_vlm(folder, padding="square")
        assert type(processor.image_processor) is type(vlm.processor.image_processor)
        assert type(processor.image_processor).__name__.endswith("Pil")


def test_positions_beyond_the_model_are_refused_and_the_engine_lives(tmp_path: Path) -> None:
    limit = 3 * PATCHES
    folder = str(write_llava(tmp_path, positions=limit))
    settings = {"method": "torino-x", "sae": "none"}
    with serve(folder, settings, max_model_len=limit) as served:
        many = Request(tuple(photo(seed) for seed in range(3)), "what is this ?")
        with pytest.raises(ValueError, match=r"ends at position 54 .* has 48 positions"):
            served.answer([many])
        near = Request(many.images[:2], "what is this ?")
        served.check([near])


def test_options_of_a_request_cannot_stop_the_worker(model: str) -> None:
    with serve(model, {**RANDOM, "placement": "engine"}) as served:
        request = Request((photo(0),), "what is this ?")
        prompt = {"prompt_token_ids": served.prompt_ids(request), "multi_modal_data": {"image": [photo(1)]}}
        size = {"height": 28, "width": 28}
        for options in ({"size": size, "crop_size": size}, {"rescale_factor": float("nan")}):
            with pytest.raises(ValueError, match=r"after the image processor|not finite"):
                served.llm.generate({**prompt, "mm_processor_kwargs": options}, use_tqdm=False)
        served.check([request])
