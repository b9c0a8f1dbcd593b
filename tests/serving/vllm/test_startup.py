"""What the plug-in resolves and refuses before a server starts; without vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers

from tests.serving.vllm.tiny_models import TEXT, VISION, towers
from torino import make
from torino.core.errors import BadParameter, TorinoError
from torino.serving.settings import ReductionSettings
from torino.serving.vllm.launch import engine_arguments, engine_environment
from torino.serving.vllm.names import ARCHITECTURES, CLASSES
from torino.serving.vllm.plugin import ConfigHook, register
from torino.serving.vllm.settings import PluginSettings
from torino.serving.vllm.startup import REFUSED, Resolved, check_server, check_version, exact_tokens, resolve
from torino.vlm import families


def llava(text: dict[str, Any] | None = None, tower: str = "clip") -> Any:
    text_config = text or {"model_type": "llama", **TEXT}
    return transformers.LlavaConfig(vision_config=towers()[tower], text_config=text_config, image_token_index=4)


def settings(**given: Any) -> PluginSettings:
    return PluginSettings.from_dict(given)


def test_auto_follows_the_reducer() -> None:
    x = resolve(settings(method="torino-x", sae="none"), llava(), "model")
    assert (x.positions, x.proportional, x.marked) == ("original", True, True)
    m = resolve(settings(method="torino-m", sae="none"), llava(), "model")
    assert (m.positions, m.proportional, m.marked) == ("compact", False, False)
    plain = resolve(settings(method="torino-x", sae="none", attention="plain", positions="compact"), llava(), "model")
    assert (plain.positions, plain.proportional) == ("compact", False)


def test_salt_depends_on_everything_that_changes_tokens() -> None:
    def salt(model: str = "model", revision: str | None = None, **given: Any) -> str:
        return resolve(settings(**{"method": "random", "budget": 8, **given}), llava(), model, revision).salt

    assert salt() == salt()
    others = [salt("other"), salt(revision="a1"), salt(budget=9), salt(method="torino-m", sae="none")]
    others += [salt(positions="original"), salt(padding="square"), salt(placement="engine")]
    assert len({salt(), *others}) == len(others) + 1


def test_every_family_is_served_or_refused_with_a_reason() -> None:
    assert set(ARCHITECTURES) | set(REFUSED) == set(families())
    assert not set(ARCHITECTURES) & set(REFUSED)
    assert {name for _, name in ARCHITECTURES.values()} == set(CLASSES)
    for family, reason in REFUSED.items():
        with pytest.raises(TorinoError, match=re.escape(reason)):
            resolve(settings(method="random", budget=8), SimpleNamespace(model_type=family), "model")
    with pytest.raises(TorinoError, match="no adapter"):
        resolve(settings(method="random", budget=8), SimpleNamespace(model_type="bert"), "model")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "cdpruner", "budget": 8}, "by the question"),
        ({"method": "torino-x", "sae": "none", "placement": "engine"}, "lets each image decide"),
        ({"method": "prumerge", "placement": "engine"}, "lets each image decide"),
    ],
)
def test_reducers_that_cannot_be_served_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        resolve(settings(**given), llava(), "model")


def test_towers_and_language_models_are_checked() -> None:
    pixtral = transformers.LlavaConfig(
        vision_config={"model_type": "pixtral", "hidden_size": 64, "num_attention_heads": 4},
        text_config={"model_type": "llama", **TEXT},
    )
    with pytest.raises(TorinoError, match="tower of type pixtral"):
        resolve(settings(method="random", budget=8), pixtral, "model")
    qwen = llava({**TEXT, "model_type": "qwen2"})
    with pytest.raises(BadParameter, match="needs a language model of type llama, and this one is qwen2"):
        resolve(settings(method="torino-x", sae="none"), qwen, "model")
    assert not resolve(settings(method="torino-x", sae="none", attention="plain"), qwen, "model").proportional


def test_engine_needs_images_of_equal_size() -> None:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config={"model_type": "llama", **TEXT}
    )
    with pytest.raises(BadParameter, match="llava_next models differ in size"):
        resolve(settings(method="random", budget=8, placement="engine"), config, "model")
    assert resolve(settings(method="random", budget=8), config, "model").positions == "compact"


def test_exact_tokens() -> None:
    assert exact_tokens(None, 576) == 576
    assert exact_tokens(make("random(budget=64)"), 576) == 64
    assert exact_tokens(ReductionSettings("random", keep=0.25).build(), 576) == 144
    assert exact_tokens(ReductionSettings("torino-m(budget=9)", sae="none").build(), 576) == 9
    with pytest.raises(BadParameter, match="lets each image decide"):
        exact_tokens(make("prumerge"), 576)


# ---------------------------------------------------------------------- options of the server


def server(**changes: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changes.get("pipeline", 1), use_ubatching=changes.get("micro", False)
        ),
        speculative_config=changes.get("speculative"),
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(enable_mm_embeds=changes.get("embeds", False))),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache", "auto")),
        ec_transfer_config=changes.get("transfer"),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": 2}, "pipeline parallelism, got --pipeline-parallel-size 2"),
        ({"micro": True}, "micro-batches"),
        ({"speculative": object()}, "speculative decoding"),
        ({"embeds": True}, "embeddings from clients"),
        ({"transfer": object()}, "separate encoder process"),
        ({"cache": "fp8"}, "--kv-cache-dtype fp8 is too coarse"),
    ],
)
def test_options_of_the_server_are_refused(changes: dict[str, Any], message: str) -> None:
    proportional = Resolved("original", True, "salt")
    check_server(server(), proportional)
    with pytest.raises(BadParameter, match=message):
        check_server(server(**changes), proportional)


def test_plain_attention_allows_a_quantized_cache() -> None:
    check_server(server(cache="fp8"), Resolved("original", False, "salt"))
    check_server(server(micro=True), Resolved("compact", False, "salt"))


def test_untested_releases_of_vllm_are_refused() -> None:
    check_version("0.32.1")
    with pytest.raises(TorinoError, match=r"tested with vLLM 0.32.\*, and vLLM 0.33.0"):
        check_version("0.33.0")


def test_without_settings_the_hook_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORINO_VLLM", raising=False)
    calls: list[str] = []
    inner = SimpleNamespace(
        verify_and_update_model_config=lambda config: calls.append("model"),
        verify_and_update_config=lambda config: calls.append("server"),
    )
    model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Stock"]))
    hook = ConfigHook(inner)
    hook.verify_and_update_model_config(model_config)
    hook.verify_and_update_config(SimpleNamespace(model_config=model_config))
    assert vars(model_config.hf_config) == {"architectures": ["Stock"]}
    assert calls == ["model", "server"]


def test_another_release_of_vllm_still_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # without the names that the plug-in needs
    monkeypatch.delenv("TORINO_VLLM", raising=False)
    register()
    assert "does not fit this release of vLLM" in caplog.text
    monkeypatch.setenv("TORINO_VLLM", "{}")
    with pytest.raises(TorinoError, match="does not fit this release of vLLM"):
        register()


# ---------------------------------------------------------------------- command line


def test_engine_arguments_carry_the_settings(tmp_path: Any) -> None:
    llava().save_pretrained(tmp_path)
    reduction = ReductionSettings("random", budget=8)
    arguments = engine_arguments(str(tmp_path), reduction, "engine", port=8001, extra=["--max-model-len", "512"])
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert pairs["--model"] == pairs["--served-model-name"] == str(tmp_path)
    assert (pairs["--port"], pairs["--max-model-len"]) == ("8001", "512")
    given = json.loads(pairs["--hf-overrides"])["torino"]
    assert PluginSettings.from_dict(given) == PluginSettings(reduction, "engine")
    with pytest.raises(BadParameter, match="lets each image decide"):
        engine_arguments(str(tmp_path), ReductionSettings("prumerge"), "engine")


def test_environment_lets_vllm_load_the_plugin() -> None:
    assert engine_environment({"A": "b"}) == {"A": "b"}
    assert engine_environment({"VLLM_PLUGINS": "other"})["VLLM_PLUGINS"] == "other,torino"
    assert engine_environment({"VLLM_PLUGINS": "torino"})["VLLM_PLUGINS"] == "torino"


def test_the_entry_point_imports_little() -> None:
    code = "import sys, torino.serving.vllm.plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "vllm", "numpy"} & set(loaded)
