"""A tiny LLaVA checkpoint on disk, with its processor, and a photo to ask it about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from torino import SAE
from torino.sae import SAECard

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "USER:", "ASSISTANT:", "what", "is", "this", "?", "how", "many"]
WORDS += [f"word{number}" for number in range(50)]
SIDE, PATCHES = 56, 16
QUESTION = "what is this ?"
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}USER: {% for c in m.content %}"
    "{% if c.type == 'image' %}<image> {% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)


def build_llava(folder: Path, *, has_cls: bool = True) -> None:
    """Write a LLaVA of 4 x 4 patches with a CLIP tower, or with a SigLIP tower, which has no CLS token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        SiglipVisionConfig,
    )

    torch.manual_seed(0)
    vision = (CLIPVisionConfig if has_cls else SiglipVisionConfig)(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=14,
    )
    vision._name_or_path = "tiny/clip"
    text = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    strategy = "default" if has_cls else "full"
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=4, vision_feature_select_strategy=strategy
        )
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)  # large enough for answers to depend on the image
    model.generation_config.eos_token_id = None  # answers have the length asked for
    model.generation_config.suppress_tokens = [0, 1, 2, 3, 4]  # special tokens are not decoded
    model.save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int(has_cls),
    ).save_pretrained(folder)


def photo(width: int = 96, height: int = SIDE, seed: int = 0) -> Image.Image:
    """Return an image of a few flat areas with some noise, so that patches resemble each other."""
    rng = np.random.default_rng(seed)
    areas = rng.integers(0, 200, (height // 28, width // 24, 3)).repeat(28, 0).repeat(24, 1)
    return Image.fromarray((areas + rng.integers(0, 40, areas.shape)).astype(np.uint8))


def write_files(folder: Path) -> Path:
    """Write a model, an SAE that reads its feature layer, and a photo."""
    build_llava(folder / "llava")
    torch.manual_seed(1)
    sae = SAE(torch.randn(24, 32), W_dec=torch.randn(24, 32), card=SAECard(encoder="tiny/clip", block=1))
    sae.save(folder / "sae")
    photo().save(folder / "photo.png")
    return folder


def generate_by_hand(vlm: Any, image: Any, prompt: str, **options: Any) -> str:
    """Answer with the stock processor and ``model.generate``."""
    inputs = vlm.processor(images=image, text=prompt, return_tensors="pt")
    out = vlm.model.generate(**inputs, do_sample=False, **options)
    return vlm.processor.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)[0]


def write_clip(folder: Path, vlm: Any) -> Path:
    """Write a CLIP with the vision tower of this model, whose text tower reads questions."""
    from tests.support import tiny

    model, tokenizer = tiny.clip(vlm.model.model.vision_tower)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
