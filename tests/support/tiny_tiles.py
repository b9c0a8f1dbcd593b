"""Tiny LLaVA-NeXT and LLaVA-OneVision models with random weights, and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

PAD, IMAGE, VIDEO, VOCAB = 0, 60, 61, 64
SIDE, PATCH, WIDTH = 32, 8, 32
TILE = (SIDE // PATCH) ** 2
PINPOINTS = [[a * SIDE, b * SIDE] for a, b in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]
NEW = 3
BOTH = ("llava_next", "llava_onevision")
# Sizes (height, width) of the images of each row; empty for text only. LLaVA-OneVision, with a limit of two tiles here,
# resizes the third, and images that share a prompt have one tile each.
ROWS = ([(40, 90)], [], [(64, 60)], [(30, 50), (90, 30)], [(32, 32)])


@cache
def make_model(family: str, tower: str = "", side: int = SIDE, patch: int = PATCH, **options: Any) -> Any:
    """Return a model of a family; the same one for the same arguments."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": side,
        "patch_size": patch,
    }
    is_next = family.startswith("llava_next")
    tower = tower or ("clip" if is_next else "siglip")
    options = {"vision_feature_select_strategy": "default" if tower == "clip" else "full"} | options
    if not is_next:
        options = {"video_token_index": VIDEO, "vision_aspect_ratio": "anyres_max_2"} | options
    kind = {"llava_next": "LlavaNext", "llava_next_video": "LlavaNextVideo", "llava_onevision": "LlavaOnevision"}[
        family
    ]
    if family == "llava_next_video":
        options = {"video_token_index": VIDEO} | options
    config = getattr(transformers, f"{kind}Config")(
        text_config={"model_type": "llama" if is_next else "qwen2", **text},
        vision_config={
            "model_type": tower if "dino" in tower else f"{tower}_vision_model",
            "vision_use_head": False,
            **vision,
        },
        image_token_index=IMAGE,
        **{"image_grid_pinpoints": PINPOINTS} | options,
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def image_processor(family: str) -> Any:
    """Return the image processor of a family."""
    if family.startswith("llava_next"):
        from transformers.models.llava_next.image_processing_pil_llava_next import (
            LlavaNextImageProcessorPil as ImageProcessor,
        )
    else:
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
            LlavaOnevisionImageProcessorPil as ImageProcessor,
        )
    size = {"height": SIDE, "width": SIDE}
    return ImageProcessor(size=size, crop_size=size, image_grid_pinpoints=PINPOINTS)


def photo(size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Return an image of random pixels."""
    return np.random.default_rng(size[0] * 1000 + size[1]).integers(0, 256, (*size, 3), dtype=np.uint8)


def make_inputs(model: Any, rows: Sequence[Sequence[tuple[int, int]]], side: str = "left") -> dict[str, Any]:
    """Return prompts with images; the number of placeholders comes from the model's own features."""
    family = model.config.model_type
    images = [[photo(size) for size in row] for row in rows if row]
    processed: dict[str, Any] = {}
    lengths: list[int] = []
    if images:
        flat = images if family == "llava_onevision" else [image for row in images for image in row]
        processed = dict(image_processor(family)(flat, return_tensors="pt"))
        with torch.no_grad():
            lengths = [len(part) for part in model.model.get_image_features(**processed).pooler_output]
    length = iter(lengths)
    texts = []
    for number, row in enumerate(rows):
        text = [1, 5 + number]
        for _ in row:
            text += [IMAGE] * next(length) + [20 + number]
        texts.append(torch.tensor([*text, 9, 10 + number]))
    longest = max(map(len, texts))
    ids, mask = torch.full((len(texts), longest), PAD), torch.zeros(len(texts), longest, dtype=torch.long)
    for number, text in enumerate(texts):
        at = slice(longest - len(text), None) if side == "left" else slice(0, len(text))
        ids[number, at], mask[number, at] = text, 1
    return {"input_ids": ids, "attention_mask": mask, **processed}


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    """Generate a few tokens greedily."""
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


def make_video_inputs(model: Any, rows: Sequence[Sequence[int]], side: str = "left", frames: int = 3) -> dict[str, Any]:
    """Return prompts with videos of some frames; the number in a row is the seed of a video, 0 frames is none."""
    videos = [
        torch.randn(frames, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        for row in rows
        for seed in row
    ]
    pooled = (SIDE // PATCH // 2) ** 2
    length = frames * pooled + (model.config.model_type == "llava_onevision")
    texts = []
    for row in rows:
        text = [1, 5 + 7 * sum(row) % 40]
        for seed in row:
            text += [VIDEO] * length + [20 + seed % 20]
        texts.append(torch.tensor([*text, 9, 10]))
    longest = max(map(len, texts))
    ids, mask = torch.full((len(texts), longest), PAD), torch.zeros(len(texts), longest, dtype=torch.long)
    for number, text in enumerate(texts):
        at = slice(longest - len(text), None) if side == "left" else slice(0, len(text))
        ids[number, at], mask[number, at] = text, 1
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    return inputs | ({"pixel_values_videos": torch.stack(videos)} if videos else {})
