"""Vision-language models: reduce their visual tokens and ask them questions. Needs ``torino[vlm]``."""

from __future__ import annotations

from torino.vlm.adapters.base import Adapter, adapter_for, families, register_adapter
from torino.vlm.context import apply, reduced, remove
from torino.vlm.loading import ModelPackage
from torino.vlm.processor import ReducedInputs, ReducingProcessor
from torino.vlm.session import VLM, Encoded, Inputs, ask, load_vlm
from torino.vlm.text_query import ClipText, TextQuery, load_clip_text
from torino.vlm.towers import Tower, load_tower
from torino.vlm.trace import Answer, ReducedCall, Trace

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
