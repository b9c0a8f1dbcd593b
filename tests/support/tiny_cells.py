"""Tiny models whose language model reads cells of patches: InternVL, Idefics3, SmolVLM, PaliGemma and Gemma 3.

A prompt is a list of token ids; a negative number −n stands for image number n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torino import Reduction, VisualTokens
from torino.reducers import Reducer

IMAGE, BEGIN_IMAGE, END_IMAGE = 60, 58, 59
CELLS = 16
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TOWER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 4,
}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
# One image, two images, none, and two without text between them.
PROMPTS = ([5, 6, -1, 7, 8, 9], [5, -2, 6, -3, 7], [5, 6, 7], [11, -4, -5, 12])


@dataclass(frozen=True)
class KeepAll(Reducer):
    """Keep every cell."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.identity(tokens.grid)


@dataclass(frozen=True)
class KeepSome(Reducer):
    """Keep the cells whose first value is above the mean: some but not all, depending on the image."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        values = tokens.patches[:, 0].float()
        kept = (values > values.mean()).nonzero()[:, 0]
        return Reduction.pick(kept, tokens.grid, "some")


@dataclass(frozen=True)
class MergePairs(Reducer):
    """Merge each cell with its right neighbor, with unequal weights."""

    def plan(self, tokens: VisualTokens) -> Reduction:
        rows = [{i: 0.75, i + 1: 0.25} for i in range(0, len(tokens), 2)]
        return Reduction.of(rows, tokens.grid, "pairs")


@dataclass(frozen=True)
class NeedsCls(KeepAll):
    """Read the CLS token."""

    needs: ClassVar[frozenset[str]] = frozenset({"cls"})


@dataclass(frozen=True)
class NeedsClsAttention(KeepAll):
    """Read the attention of the CLS token."""

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})


@dataclass(frozen=True)
class Family:
    """A tiny model, and the inputs that its processor would return for a batch of prompts."""

    name: str
    build: Callable[[], Any]
    size: int = 32
    pixels: Callable[[list[list[Tensor]]], dict[str, Tensor]] = field(
        default=lambda rows: {"pixel_values": torch.stack([image for row in rows for image in row])}
    )
    types: Callable[[Tensor], dict[str, Tensor]] = field(default=lambda ids: {})
    first: int = 0
    """Position of the first token in ``forward``."""
    static: bool = True
    """Whether the stock model can use a static cache."""

    def inputs(self, prompts: Sequence[Sequence[int]], side: str = "left") -> dict[str, Any]:
        rows = [[token for item in prompt for token in ([IMAGE] * CELLS if item < 0 else [item])] for prompt in prompts]
        length = max(map(len, rows))
        pads = [[0] * (length - len(row)) for row in rows]
        ids = [pad + row if side == "left" else row + pad for pad, row in zip(pads, rows, strict=True)]
        input_ids = torch.tensor(ids)
        images = [[self.image(-item) for item in prompt if item < 0] for prompt in prompts]
        pixels = self.pixels(images) if any(images) else {}
        return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), **pixels, **self.types(input_ids)}

    def image(self, number: int) -> Tensor:
        return torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(number))


def randomize(model: nn.Module) -> Any:
    """Set random weights that give varied answers; with the initial ones every answer is the same token."""
    source = torch.Generator().manual_seed(7)
    gemma = "Gemma" in type(model).__name__  # its norms add 1 to their weights
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            is_norm = weight.ndim == 1 and name.endswith("weight")
            scale = 0.3 if weight.ndim == 1 else 1.5 * weight.shape[-1] ** -0.5
            base = 1.0 if is_norm and (not gemma or "vision" in name) else 0.0
            weight.copy_(base + scale * torch.randn(weight.shape, generator=source))
    return model.eval()


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    arguments: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    # Untrained models may generate the placeholder, which would count as an image without a cache.
    arguments |= {"output_logits": True, "suppress_tokens": [IMAGE], **options}
    return model.generate(**inputs, **arguments)


def same(first: Any, second: Any) -> bool:
    steps = zip(first.logits, second.logits, strict=True)
    return torch.equal(first.sequences, second.sequences) and all(torch.equal(a, b) for a, b in steps)


def stock_features(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the features of the stock model; each entry holds one or more images."""
    names = ("pixel_values", "pixel_attention_mask")
    return list(model.get_image_features(**{n: inputs[n] for n in names if n in inputs}).pooler_output)


def logits_by_hand(
    family: Family, model: Any, inputs: dict[str, Any], features: list[Tensor], kept: Sequence[Tensor]
) -> Tensor:
    """Return the logits of one prompt with some features of each image, inserted into the embedded text."""
    ids = inputs["input_ids"][0]
    text = model.get_input_embeddings()(ids.masked_fill(ids == IMAGE, 0))
    places = (ids == IMAGE).nonzero()[:, 0].split(CELLS)
    rows, kept_positions = text.clone(), [(ids != IMAGE).nonzero()[:, 0]]
    for place, feature, chosen in zip(places, features, kept, strict=True):
        rows[place] = feature
        kept_positions.append(place[chosen])
    order = torch.cat(kept_positions).sort().values
    return model(inputs_embeds=rows[order][None], **family.types(ids[order][None])).logits


# ---------------------------------------------------------------------- models


def build_internvl(**tower: Any) -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    return InternVLForConditionalGeneration(
        InternVLConfig(
            vision_config={**TOWER, "num_hidden_layers": 3, **tower},
            text_config={"model_type": "qwen2", **TEXT},
            image_token_id=IMAGE,
            image_seq_length=CELLS,
        )
    )


def build_idefics(name: str) -> Any:
    import transformers

    prefix = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[name]
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=TOWER, text_config={"model_type": "llama", **TEXT}, image_token_id=IMAGE, scale_factor=2
    )
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


def build_paligemma(text: dict[str, Any], tower: dict[str, Any] | None = None) -> Any:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=tower or {**SIGLIP, "image_size": 16, "vision_use_head": False},
            text_config={**TEXT, "head_dim": 8, **text},
            image_token_index=IMAGE,
            projection_dim=TEXT["hidden_size"],
            hidden_size=TEXT["hidden_size"],
        )
    )


def build_gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=SIGLIP,
            text_config={
                **TEXT,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": 12,
                "layer_types": layers,
            },
            mm_tokens_per_image=CELLS,
            image_token_index=IMAGE,
            boi_token_index=BEGIN_IMAGE,
            eoi_token_index=END_IMAGE,
        )
    )


def idefics_pixels(rows: list[list[Tensor]]) -> dict[str, Tensor]:
    """Return the sub-images of every prompt, padded with zeros to the largest number, and their pixel mask."""
    count = max(map(len, rows))
    pixels = torch.zeros(len(rows), count, 3, 32, 32)
    mask = torch.zeros(len(rows), count, 32, 32, dtype=torch.bool)
    for number, row in enumerate(rows):
        for index, image in enumerate(row):
            pixels[number, index] = image
            mask[number, index] = True
            mask[number, index, :, 24:] = index != 1  # one image is narrower, padded on its right
    return {"pixel_values": pixels * mask[:, :, None], "pixel_attention_mask": mask}


def prefix_types(ids: Tensor) -> dict[str, Tensor]:
    """Return the types of PaliGemma's processor without a suffix: the whole prompt attends in both directions."""
    return {"token_type_ids": torch.zeros_like(ids)}


def image_types(ids: Tensor) -> dict[str, Tensor]:
    """Return the types of Gemma 3's processor: 1 for image tokens."""
    return {"token_type_ids": (ids == IMAGE).long()}


GEMMA_FAMILIES: dict[str, Callable[[], Family]] = {
    "paligemma": lambda: Family(
        "paligemma", lambda: build_paligemma({"model_type": "gemma"}), 16, types=prefix_types, first=1
    ),
    "paligemma2": lambda: Family(
        "paligemma",
        lambda: build_paligemma({"model_type": "gemma2", "sliding_window": 12, "query_pre_attn_scalar": 8}),
        16,
        types=prefix_types,
        first=1,
        static=False,
    ),
    "gemma3": lambda: Family("gemma3", build_gemma3, types=image_types),
}
