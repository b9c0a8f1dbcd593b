"""Adapter models: the only room that knows them. Needs transformers (``pip install "torino[vlm]"``)."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from torino.vlm.adapters.base import Adapter, adapter_for, families, serve
from torino.vlm.context import ReducedInputs, ReducingProcessor, apply, reduced, remove
from torino.vlm.text_query import ClipText, TextQuery, load_clip_text
from torino.vlm.trace import Look, Trace

__all__ = [
    "Adapter",
    "ClipText",
    "Look",
    "ReducedInputs",
    "ReducingProcessor",
    "TextQuery",
    "Trace",
    "adapter_for",
    "apply",
    "families",
    "load_clip_text",
    "reduced",
    "remove",
    "serve",
]

# Which module and class serves which families; it is imported when a model of one is opened.
_HOSTS = {
    ("llava",): "llava.Llava",
    ("llava_next",): "llava_next.LlavaNext",
    ("llava_onevision",): "llava_onevision.LlavaOnevision",
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"): "qwen.Qwen",
    ("internvl",): "internvl.InternVL",
    ("idefics3", "smolvlm"): "idefics.Idefics",
    ("paligemma",): "gemma.PaliGemma",
    ("gemma3",): "gemma.Gemma3",
}


def _load(place: str) -> type[Adapter]:
    module, name = place.split(".")
    return getattr(import_module(f"torino.vlm.adapters.{module}"), name)


for _families, _place in _HOSTS.items():
    serve(*_families)(partial(_load, _place))
