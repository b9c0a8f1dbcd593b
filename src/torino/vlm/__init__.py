"""Vision-language models: reduce their visual tokens and ask them questions. Needs ``torino[vlm]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torino.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from torino.vlm.adapters.base import Adapter, adapter_for, families, register_adapter
    from torino.vlm.context import apply, reduced, remove
    from torino.vlm.loading import ModelPackage
    from torino.vlm.processor import ReducedInputs, ReducingProcessor
    from torino.vlm.session import VLM, Encoded, Inputs, ask, load_vlm
    from torino.vlm.text_query import ClipText, TextQuery, WordText, load_clip_text
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
    "WordText",
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

# Loaded on first use: installed model packages are listed and their SAEs loaded without Pillow and transformers.
_NAMES = {
    "adapters.base": ("Adapter", "adapter_for", "families", "register_adapter"),
    "context": ("apply", "reduced", "remove"),
    "loading": ("ModelPackage",),
    "processor": ("ReducedInputs", "ReducingProcessor"),
    "session": ("VLM", "Encoded", "Inputs", "ask", "load_vlm"),
    "text_query": ("ClipText", "TextQuery", "WordText", "load_clip_text"),
    "towers": ("Tower", "load_tower"),
    "trace": ("Answer", "ReducedCall", "Trace"),
}
__getattr__, __dir__ = lazy_attributes(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
)
