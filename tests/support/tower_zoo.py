"""One tiny model with random weights for each supported vision tower, and its image processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

DEPTH, SIDE = 3, 56
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _clip(whole: bool = False) -> tuple[nn.Module, Any]:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPVisionConfig, CLIPVisionModel

    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    if whole:
        return CLIPModel(CLIPConfig(vision_config=VISION, text_config=TEXT)), processor
    return CLIPVisionModel(CLIPVisionConfig(**VISION)), processor


def _siglip() -> tuple[nn.Module, Any]:
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel

    processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return SiglipModel(SiglipConfig(vision_config=VISION, text_config=TEXT)), processor


def _siglip2() -> tuple[nn.Module, Any]:
    from transformers import Siglip2ImageProcessorPil, Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(**{**VISION, "num_patches": 16})
    return Siglip2VisionModel(config), Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)


def _dinov2(registers: bool = False) -> tuple[nn.Module, Any]:
    from transformers import (
        BitImageProcessorPil,
        Dinov2Config,
        Dinov2Model,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
    )

    processor = BitImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    if registers:
        return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**VISION, num_register_tokens=3)), processor
    return Dinov2Model(Dinov2Config(**VISION)), processor


def _qwen2() -> tuple[nn.Module, Any]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 32, "hidden_size": 24, "depth": DEPTH, "num_heads": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return Qwen2VLForConditionalGeneration(config), _qwen_processor()


def _qwen25() -> tuple[nn.Module, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"hidden_size": 32, "out_hidden_size": 24, "depth": DEPTH, "num_heads": 4, "intermediate_size": 48}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_processor()


def _qwen3() -> tuple[nn.Module, Any]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {"hidden_size": 32, "out_hidden_size": 24, "depth": DEPTH, "num_heads": 4, "intermediate_size": 48}
    vision |= {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(vision_config=vision, text_config={**TEXT, "head_dim": 12, "rope_parameters": ROPE})
    return Qwen3VLForConditionalGeneration(config), _qwen_processor()


def _qwen_processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64})


def _llava() -> tuple[nn.Module, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TEXT))
    return LlavaForConditionalGeneration(config), _clip()[1]


KINDS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "clip": _clip,
    "whole-clip": lambda: _clip(whole=True),
    "siglip": _siglip,
    "siglip2": _siglip2,
    "dinov2": _dinov2,
    "dinov2-registers": lambda: _dinov2(registers=True),
    "qwen2": _qwen2,
    "qwen2.5": _qwen25,
    "qwen3": _qwen3,
    "llava": _llava,
}
QWEN = ("qwen2", "qwen2.5", "qwen3")


def photo(width: int = SIDE, height: int = SIDE, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
