"""Vision-language models: reduce their visual tokens and ask them questions. Needs ``torino[vlm]``."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from torino.vlm.adapters.base import Adapter, adapter_for, families, register_adapter
from torino.vlm.answer import Answer
from torino.vlm.context import apply, reduced, remove
from torino.vlm.loading import ModelPackage
from torino.vlm.processor import ReducedInputs, ReducingProcessor
from torino.vlm.session import VLM, Encoded, Inputs, ask, load_vlm
from torino.vlm.text_query import ClipText, TextQuery, load_clip_text
from torino.vlm.towers import Tower, load_tower
from torino.vlm.trace import ReducedCall, Trace

__all__ = [
    "VLM",
    "Adapter",
    "Answer",
    "ClipText",
    "Encoded",
    "Inputs",
    "ModelPackage",
    "ReducedCall",
    "ReducedInputs",
    "ReducingProcessor",
    "TextQuery",
    "Tower",
    "Trace",
    "adapter_for",
    "apply",
    "ask",
    "families",
    "load_clip_text",
    "load_tower",
    "load_vlm",
    "reduced",
    "register_adapter",
    "remove",
]

# Module and class of the adapter of each family; imported when a model of that family is used.
_ADAPTERS = {
    ("llava",): "llava.Llava",
    ("llava_next",): "llava_next.LlavaNext",
    ("llava_onevision",): "llava_onevision.LlavaOnevision",
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"): "qwen.Qwen",
    ("internvl",): "internvl.InternVL",
    ("idefics3", "smolvlm"): "idefics.Idefics",
    ("paligemma",): "gemma.PaliGemma",
    ("gemma3",): "gemma.Gemma3",
}


def _load(target: str) -> type[Adapter]:
    module, name = target.split(".")
    return getattr(import_module(f"torino.vlm.adapters.{module}"), name)


for _families, _target in _ADAPTERS.items():
    register_adapter(*_families)(partial(_load, _target))
