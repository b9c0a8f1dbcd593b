"""Tiny models on disk with random weights, in sizes that vLLM's CPU kernels accept (heads of 32 channels)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "USER:", "ASSISTANT:", "what", "is", "this", "?", "how", "many"]
WORDS += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS += [f"word{number}" for number in range(111)]
IMAGE, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 4, 13, 14, 15, 16
FIRST_WORD = 17
SIDE, PATCH, PATCHES = 56, 14, 16
POSITIONS = 512
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": len(WORDS),
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}USER: {% if m.content is string %}{{ m.content }} {% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}"
    "{% endif %}{% endfor %}ASSISTANT:"
)
QWEN_TEMPLATE = TEMPLATE.replace("<image> ", "<|vision_start|> <|image_pad|> <|vision_end|> ")


def towers() -> dict[str, Any]:
    """Return the vision configs of the LLaVA-1.5 family."""
    dino = {name: value for name, value in VISION.items() if name != "intermediate_size"}
    return {
        "clip": transformers.CLIPVisionConfig(**VISION),
        "siglip": transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        "dinov2": transformers.Dinov2Config(**dino, mlp_ratio=2),
        "registers": transformers.Dinov2WithRegistersConfig(**dino, mlp_ratio=2, num_register_tokens=2),
    }


def write_llava(folder: Path, tower: str = "clip", positions: int = POSITIONS) -> Path:
    """Write a LLaVA-1.5 with 4 x 4 patches."""
    strategy = "full" if tower == "siglip" else "default"
    vision = towers()[tower]
    vision._name_or_path = f"tiny/{tower}"
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**{**TEXT, "max_position_embeddings": positions}),
        image_token_index=IMAGE,
        vision_feature_select_strategy=strategy,
    )
    save(folder, transformers.LlavaForConditionalGeneration(config))
    size = {"height": SIDE, "width": SIDE}
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size=size, crop_size=size),
        make_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens={"clip": 1, "siglip": 0, "dinov2": 1, "registers": 3}[tower],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def write_published_llava(folder: Path) -> Path:
    """Write a LLaVA-1.5 as published checkpoints are, which vLLM's own model reads: other names, and an end token."""
    write_llava(folder)
    path = folder / "model.safetensors"
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    settings = folder / "generation_config.json"  # vLLM ends answers at the tokenizer's end token
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": 2, "pad_token_id": 0}))
    return folder


def write_llava_next(folder: Path) -> Path:
    """Write a LLaVA-NeXT with tiles of 4 x 4 patches."""
    pinpoints = [[a * SIDE, b * SIDE] for a, b in ((1, 2), (2, 1), (2, 2))]
    config = transformers.LlavaNextConfig(
        vision_config=towers()["clip"],
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_grid_pinpoints=pinpoints,
    )
    save(folder, transformers.LlavaNextForConditionalGeneration(config))
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    transformers.LlavaNextProcessor(
        LlavaNextImageProcessorPil(size=size, crop_size=size, image_grid_pinpoints=pinpoints),
        make_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def write_qwen(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Write a Qwen2-VL, or a Qwen2.5-VL with windows of 2 x 2 tokens."""
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
    vision["hidden_size"] = 64
    if family == "qwen2_vl":
        vision |= {"embed_dim": 64, "mlp_ratio": 2}
    else:
        vision |= {"out_hidden_size": 64, "intermediate_size": 96}
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    name = "Qwen2VL" if family == "qwen2_vl" else "Qwen2_5_VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    save(folder, getattr(transformers, f"{name}ForConditionalGeneration")(config))
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, size={"shortest_edge": 56 * 56, "longest_edge": 112 * 168}
    )
    videos = transformers.Qwen2VLVideoProcessor()
    processor = getattr(transformers, f"{name}Processor")
    processor(images, make_tokenizer(), videos, chat_template=QWEN_TEMPLATE).save_pretrained(folder)
    return folder


def save(folder: Path, model: Any) -> None:
    """Save a model with weights so large that answers depend on the image."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def make_tokenizer() -> Any:
    """Return a tokenizer that splits at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<image>", *WORDS[VISION_START:FIRST_WORD]]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.image_token, tokenizer.video_token = "<image>", "<|video_pad|>"
    return tokenizer


def photo(seed: int = 0, width: int = 96, height: int = 72) -> Image.Image:
    """Return an image of a few flat areas with some noise, so that patches resemble each other."""
    random = np.random.default_rng(seed)
    areas = random.integers(0, 200, (4, 4, 3)).repeat(-(-height // 4), 0).repeat(-(-width // 4), 1)[:height, :width]
    return Image.fromarray((areas + random.integers(0, 40, areas.shape)).astype(np.uint8))
