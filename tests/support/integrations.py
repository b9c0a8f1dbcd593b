"""Helpers for tests of the integrations: conversations, answers by hand, and stand-ins for evaluation kits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.tiny_vlm import QUESTION, photo
from torino.integrations import ChatModel

SOURCE = Path(__file__).parents[2] / "src" / "torino" / "integrations"
PROMPT = f"USER: <image> {QUESTION} ASSISTANT:"
MERGING = "torino-m(k=1;delta=1)"


def user_asks(seed: int | None = 0, text: str = QUESTION) -> list[dict[str, Any]]:
    """Return a conversation about the photo of a seed, or without an image."""
    images = [] if seed is None else [{"type": "image", "image": photo(seed=seed)}]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def generate(chat: ChatModel, prompt: str, image: Any = None, length: int = 4) -> str:
    """Answer with the stock processor and ``model.generate``."""
    images = {} if image is None else {"images": image}
    inputs = chat.vlm.processor(text=prompt, return_tensors="pt", **images)
    output = chat.vlm.model.generate(**inputs, do_sample=False, max_new_tokens=length)
    return chat.vlm.processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def load_integration(monkeypatch: pytest.MonkeyPatch, name: str, **stand_ins: Any) -> Any:
    """Execute a module of torino.integrations again, with stand-ins for what it imports from its kit."""
    for module_name, contents in stand_ins.items():
        stand_in = ModuleType(module_name.replace("__", "."))
        stand_in.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module_name.replace("__", "."), stand_in)
    spec = importlib.util.spec_from_file_location(f"integration_{name}", SOURCE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
