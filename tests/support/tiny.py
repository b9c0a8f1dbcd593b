"""Tiny LLaVA-1.5 models with random weights, and prompts, reducers, processors and a CLIP for them.

In the prompts, a letter is one token of text and ``#`` is one image with all its placeholders.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.feature_extraction_utils import BatchFeature

from torino import SAE, Reduction, VisualTokens
from torino.reducers import Reducer
from torino.sae import SAECard

PAD, BOS, EOS, IMAGE = 0, 1, 2, 99
WIDTH, SIDE, PATCH, PATCHES, BLOCKS = 64, 56, 14, 16, 4
REGISTERS = 2
NAME = "tiny/clip"

_SHAPE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_TOWERS: dict[str, Any] = {
    "clip": lambda: CLIPVisionConfig(**_SHAPE, intermediate_size=128),
    "siglip": lambda: SiglipVisionConfig(**_SHAPE, intermediate_size=128),
    "dinov2": lambda: Dinov2Config(**_SHAPE, mlp_ratio=2),
    "registers": lambda: Dinov2WithRegistersConfig(**_SHAPE, mlp_ratio=2, num_register_tokens=REGISTERS),
}


def llava(tower: str = "clip", *, attention: str = "sdpa", seed: int = 0, layers: int = 2, **changes: Any) -> Any:
    """Return a new LLaVA with a tower of 4 blocks on 4 x 4 patches and a Llama of a few layers, both 64 wide."""
    return copy.deepcopy(_llava(tower, attention, seed, layers, tuple(sorted(changes.items()))))


@lru_cache
def _llava(tower: str, attention: str, seed: int, layers: int, changes: tuple[tuple[str, Any], ...]) -> Any:
    vision = _TOWERS[tower]()
    vision._name_or_path = NAME if tower == "clip" else ""
    text = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=512,
        initializer_range=0.15,  # wide enough that answers depend on every token of the prompt
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    strategy = "full" if tower == "siglip" else "default"
    options = {"vision_feature_select_strategy": strategy, **{name: _as_list(value) for name, value in changes}}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, **options)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]:
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    # A random end token would shorten answers; tests that need one set it themselves.
    model.generation_config.eos_token_id = None
    return model


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def pixels(count: int, *, seed: int = 0) -> Tensor:
    """Return pixels of images with a few flat areas each, so that patches resemble each other."""
    source = torch.Generator().manual_seed(seed)
    areas = torch.randn(count, 3, 2, 2, generator=source).repeat_interleave(28, 2).repeat_interleave(28, 3)
    return areas + 0.15 * torch.randn(count, 3, SIDE, SIDE, generator=source)


def encode_row(row: str, per_image: int = PATCHES) -> list[int]:
    """Return the token ids of one row."""
    return [token for char in row for token in ([IMAGE] * per_image if char == "#" else [ord(char) - ord("a") + 4])]


def prompt(*rows: str, side: str = "left", per_image: int = PATCHES, seed: int = 0) -> dict[str, Any]:
    """Return model inputs for some rows, with pixels for each ``#``."""
    images = sum(row.count("#") for row in rows)
    inputs = padded([encode_row(row, per_image) for row in rows], side)
    return inputs | ({"pixel_values": pixels(images, seed=seed)} if images else {})


def padded(rows: Sequence[Sequence[int]], side: str = "left") -> dict[str, Tensor]:
    """Return rows of token ids as ``input_ids`` and ``attention_mask``."""
    length = max(map(len, rows))
    gaps = [[PAD] * (length - len(row)) for row in rows]
    ids = [[*gap, *row] if side == "left" else [*row, *gap] for row, gap in zip(rows, gaps, strict=True)]
    mask = [[token != PAD for token in row] for row in ids]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask).long()}


def one_by_one(rows: Sequence[str], inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of each row alone, without padding, with its own images."""
    singles: list[dict[str, Any]] = []
    first = 0
    for row in rows:
        single: dict[str, Any] = padded([encode_row(row)])
        if images := row.count("#"):
            single["pixel_values"] = inputs["pixel_values"][first : first + images]
        singles.append(single)
        first += images
    return singles


def sae(width: int = WIDTH, *, latents: int = 24, seed: int = 0, **card: Any) -> SAE:
    """Return a small random SAE without a threshold."""
    source = torch.Generator().manual_seed(seed)
    return SAE(torch.randn(latents, width, generator=source), card=SAECard(**card))


# ---------------------------------------------------------------------- reducers


@dataclass(frozen=True)
class Identity(Reducer):
    """Keep every patch."""

    name = "identity"
    takes_frames = True

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.identity(by=self.spec, **tokens.layout)


@dataclass(frozen=True)
class Ragged(Reducer):
    """Keep a number of patches that depends on the image, from 1 to most of them, spread over the grid."""

    seed: int = 0
    name = "ragged"

    def plan(self, tokens: VisualTokens) -> Reduction:
        n = len(tokens)
        # the mean of many values, so that rounding cannot change the count
        kept = 1 + (int(tokens.patches.double().mean().abs() * 1e4) * 7 + self.seed * 5) % (n - 2)
        return Reduction.pick(torch.linspace(0, n - 1, kept).long().unique(), tokens.grid, self.spec)


@dataclass(frozen=True)
class Recorder(Reducer):
    """Keep every patch and record the tokens."""

    recorded: list[VisualTokens]
    name = "recorder"

    @classmethod
    def needing(cls, *needs: str) -> Recorder:
        return type("Recorder", (cls,), {"needs": frozenset(needs)})([])

    def plan(self, tokens: VisualTokens) -> Reduction:
        self.recorded.append(tokens)
        return Reduction.identity(tokens.grid, self.spec)


@dataclass(frozen=True)
class Fixed(Reducer):
    """Return the same plan for every image."""

    given: Reduction
    name = "fixed"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return self.given


# ---------------------------------------------------------------------- processors


class TinyProcessor:
    """A minimal LLaVA processor: token ids, placeholders, padding, pixels."""

    def __init__(self, side: str = "left") -> None:
        self.side = side

    def __call__(self, images: Any = None, text: str | Sequence[str] = "", return_tensors: str | None = None) -> Any:
        rows = [text] if isinstance(text, str) else list(text)
        inputs: dict[str, Any] = padded([encode_row(row) for row in rows], self.side)
        if images is not None:
            inputs["pixel_values"] = torch.stack(list(images))
        return BatchFeature(
            inputs if return_tensors == "pt" else {name: value.tolist() for name, value in inputs.items()}
        )

    def apply_chat_template(self, turns: Sequence[str], return_dict: bool = False, **others: Any) -> Any:
        return self(text="".join(turns), **others) if return_dict else "".join(turns)

    def batch_decode(self, rows: Tensor) -> list[str]:
        return ["".join(chr(max(token, 4) - 4 + ord("a")) for token in row) for row in rows.tolist()]


def processor(square: bool = False) -> Any:
    """Return the processor of transformers, with a vocabulary of words w0, w1, … and the letters of the prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "USER:": 3, "<image>": IMAGE}
    words |= {chr(ord("a") + i): 4 + i for i in range(26)}
    words |= {f"w{i}": i for i in range(100) if i not in words.values()}
    inner = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    kind = LlavaImageProcessor if square else CLIPImageProcessor
    size = {"height": SIDE, "width": SIDE}
    images = kind(size={"shortest_edge": SIDE}, crop_size=size, **({"do_pad": True} if square else {}))
    template = (
        "{% for message in messages %}USER: {% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def photos(count: int, *, seed: int = 0) -> list[Any]:
    """Return PIL images that are wider than high."""
    from PIL import Image

    source = torch.Generator().manual_seed(seed)
    areas = torch.randint(0, 255, (count, 3, 4, 3), generator=source, dtype=torch.uint8)
    return [Image.fromarray(area.numpy()).resize((90, 60), Image.Resampling.NEAREST) for area in areas]


# ---------------------------------------------------------------------- CLIP

WORDS = ["pad", "what", "is", "this", "that", "on", "the", "table", "how", "many", "cups", "red", "blue", "?", "USER:"]
WORDS += [*"abcdefghijklmnopqrstuvwxyz", *[f"word{number}" for number in range(55)], "<start>", "<end>"]


def clip(tower: Any, *, seed: int = 0, **text: Any) -> tuple[Any, Any]:
    """Return a CLIP with this vision tower and 16 joint dimensions, and a tokenizer whose end token is the last id."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    last = len(WORDS) - 1
    ends = {"bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": last}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {**shape, **ends, "vocab_size": len(WORDS), "max_position_embeddings": 77, "projection_dim": 16, **text}
    config = CLIPConfig(text_config=words, vision_config=tower.config.to_dict(), projection_dim=16)
    torch.manual_seed(seed)
    model = CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    model.vision_model.load_state_dict(tower.state_dict())
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="pad"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", last - 1), ("<end>", last)]
    )
    named = {"bos_token": "<start>", "eos_token": "<end>", "pad_token": "<end>", "unk_token": "pad"}
    return model, PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=77, **named)
