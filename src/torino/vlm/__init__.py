"""Host models: the only room that knows them. Needs transformers (``pip install "torino[vlm]"``)."""

from __future__ import annotations

from torino.vlm.door import ReducedInputs, ReducingProcessor, apply, reduced, remove
from torino.vlm.host import Host, families, host_of, serve
from torino.vlm.trace import Look, Trace

__all__ = [
    "Host",
    "Look",
    "ReducedInputs",
    "ReducingProcessor",
    "Trace",
    "apply",
    "families",
    "host_of",
    "reduced",
    "remove",
    "serve",
]


@serve("llava")
def _llava() -> type[Host]:
    from torino.vlm.llava import Llava

    return Llava


@serve("internvl")
def _internvl() -> type[Host]:
    from torino.vlm.internvl import InternVL

    return InternVL


@serve("idefics3", "smolvlm")
def _idefics() -> type[Host]:
    from torino.vlm.idefics import Idefics

    return Idefics


@serve("paligemma")
def _paligemma() -> type[Host]:
    from torino.vlm.gemma import PaliGemma

    return PaliGemma


@serve("gemma3")
def _gemma3() -> type[Host]:
    from torino.vlm.gemma import Gemma3

    return Gemma3


@serve("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
def _qwen() -> type[Host]:
    from torino.vlm.qwen import Qwen

    return Qwen


@serve("llava_next")
def _llava_next() -> type[Host]:
    from torino.vlm.llava_next import LlavaNext

    return LlavaNext


@serve("llava_onevision")
def _llava_onevision() -> type[Host]:
    from torino.vlm.llava_onevision import LlavaOnevision

    return LlavaOnevision
