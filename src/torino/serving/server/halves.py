"""Run the vision half of a model without its language model, and the reverse."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from torino.core.errors import BadParameter
from torino.vlm.batching import check_separable
from torino.vlm.session import VLM


def keep_vision(vlm: VLM) -> VLM:
    """Free the weights of the language model; images can still be reduced and projected."""
    check_separable(vlm)
    model = cast(Any, vlm.model)
    _free(model.get_decoder(), getattr(model, "lm_head", None))
    return vlm


def keep_language(vlm: VLM) -> VLM:
    """Free the weights of the vision tower and the projector; prompts with reduced images can still be answered."""
    check_separable(vlm)
    inner = cast(Any, vlm.adapter).inner
    _free(inner.vision_tower, inner.multi_modal_projector)
    return vlm


def check_front(vlm: VLM) -> None:
    """Refuse a model whose images cannot be encoded apart from the prompt."""
    if not vlm.adapter.separates_images:
        raise BadParameter(
            f"--placement front encodes images without their prompt, which {type(vlm.model).__name__} does not allow. "
            "It supports the LLaVA-1.5 family. Omit --placement front."
        )


def _free(*modules: nn.Module | None) -> None:
    for module in modules:
        if module is not None:
            module.to("meta")
