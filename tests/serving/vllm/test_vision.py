"""The vision half alone gives the tokens of the session; without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.vllm.tiny_models import photo, write_llava, write_llava_next, write_qwen
from torino.core.errors import BadFile, TorinoError
from torino.serving.settings import ReductionSettings
from torino.serving.vision import load_vision_half
from torino.vlm import load_vlm
from torino.vlm.attention import log_sizes

X = ReductionSettings("torino-x", sae="none")
IN_TOWER = ReductionSettings("tome-tower", budget=8)


def check_half(folder: Path, settings: ReductionSettings) -> None:
    """Compare tokens, placeholders and sizes with those that the session gives the language model."""
    reducer = settings.build()
    vlm, half = load_vlm(folder), load_vision_half(str(folder), reducer)
    assert half.adapter.model.language_model is None
    inputs = vlm.inputs([photo(0), photo(1, width=64)], "what is this ?")
    expected = vlm.reduce(vlm.encode(inputs, [reducer]), reducer)
    images = half(inputs.tensors)
    assert [image.full for image in images] == list(expected.encoded.full)
    for image, item in zip(images, expected.embeds, strict=True):
        assert torch.equal(image.features, item.features)
        assert torch.equal(image.slots, item.slots)
    if len(expected.plans) == len(images):
        short, _ = vlm.adapter.insert(inputs.tensors, expected.encoded, expected.embeds, "compact")
        counts = [len(item.slots) for item in expected.embeds]
        bias = log_sizes(short, vlm.adapter.image_token, expected.sizes, counts)
        is_image = short["input_ids"] == vlm.adapter.image_token
        assert torch.equal(torch.cat([image.sizes for image in images]).float().log(), bias[is_image])


@pytest.mark.parametrize("settings", [X, IN_TOWER, ReductionSettings("none")], ids=["merge", "in tower", "all"])
@pytest.mark.parametrize("tower", ["clip", "siglip", "dinov2", "registers"])
def test_llava(tower: str, settings: ReductionSettings, tmp_path: Path) -> None:
    check_half(write_llava(tmp_path, tower), settings)


def test_llava_next(tmp_path: Path) -> None:
    check_half(write_llava_next(tmp_path), X)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_qwen(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="the video processor of these families needs torchvision")
    check_half(write_qwen(tmp_path, family), ReductionSettings("random", keep=0.4))


def rename_weights(folder: Path, rename: Any) -> None:
    file = folder / "model.safetensors"
    weights = {new: value for name, value in load_file(file).items() if (new := rename(name)) is not None}
    save_file(weights, file, {"format": "pt"})


def test_checkpoints_of_older_layout(tmp_path: Path) -> None:
    """Checkpoints of the hub name tower and projector without the prefix of the model, and the tower's inner module."""
    folder = write_llava(tmp_path)
    names = set(load_file(folder / "model.safetensors"))
    prefix = "model." if any(name.startswith("model.vision_tower") for name in names) else ""

    def older(name: str) -> str:
        inner = name.removeprefix(prefix)
        if inner.startswith("vision_tower.") and not inner.startswith("vision_tower.vision_model."):
            return inner.replace("vision_tower.", "vision_tower.vision_model.", 1)
        return inner.replace("language_model.", "language_model.model.", 1) if prefix else inner

    rename_weights(folder, older)
    check_half(folder, X)


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = write_llava(tmp_path)
    rename_weights(folder, lambda name: None if "linear_1.weight" in name else name)
    with pytest.raises(BadFile, match=r"no weights for 1 tensors of its vision half, such as .*linear_1"):
        load_vision_half(str(folder), None)


def test_other_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(TorinoError, match="vision half of llama models cannot be loaded alone"):
        load_vision_half(str(tmp_path), None)
