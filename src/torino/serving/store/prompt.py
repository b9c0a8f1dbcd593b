"""Model inputs from stored tokens, for :meth:`torino.vlm.VLM.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.reduction import ReductionBatch
from torino.serving.store.format import StoreSettings
from torino.serving.store.worker import hash_vision
from torino.vlm.adapters.base import EncodedImages, ImageEmbeds
from torino.vlm.attention import uses_proportional
from torino.vlm.inputs import Inputs, ReducedImages
from torino.vlm.prompt import check_question, user_turn, write_prompt
from torino.vlm.session import VLM

if TYPE_CHECKING:
    from torino.serving.store.reader import StoredImage


@dataclass(frozen=True, eq=False)
class StoredReduction(ReducedImages):
    """Reduced images from a store, without plans: the number of patches of each token is stored."""

    def __repr__(self) -> str:
        """Return the number of images and of tokens."""
        return f"StoredReduction({len(self.embeds)} images, {self.tokens} tokens, positions={self.positions!r})"


def check_model(vlm: VLM, settings: StoreSettings, folder: Path) -> None:
    """Refuse a model that the tokens were not made for, and families that cannot take tokens without images."""
    if not vlm.adapter.batches_reductions:
        raise BadParameter(
            f"{type(vlm.model).__name__} needs more than the tokens of an image to place them, so it cannot answer "
            "from a store. The LLaVA-1.5 family can; for others give the images to VLM.inputs()."
        )
    if hash_vision(vlm) != settings.model_hash:
        raise BadParameter(
            f"The tokens of {folder} were made for {settings.model} ({settings.family}, vision hash "
            f"{settings.model_hash}), and this model has another tower, projector, data type or image processor. Load "
            "the same model with the same dtype."
        )


def build_prompt(
    vlm: VLM, settings: StoreSettings, images: Sequence[StoredImage], question: str
) -> tuple[Inputs, StoredReduction]:
    """Return the inputs of one question about stored images with all placeholders, and the stored tokens."""
    check_question(question, vlm.processor)
    conversation = [user_turn([None] * len(images), question)]
    text = write_prompt(conversation, vlm.processor, vlm.adapter)
    full = [image.full for image in images]
    ids = _expand(vlm, _tokenize(vlm, text), full)[None].to(vlm.device)
    inputs = Inputs({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, (text,), (conversation,))
    embeds = [ImageEmbeds(image.tokens.to(vlm.device, vlm.dtype), image.anchors, image.masses) for image in images]
    if settings.proportional:
        uses_proportional("proportional", None, vlm.adapter)  # refuses a model that was loaded without support for it
    reduction = StoredReduction(
        plans=ReductionBatch(()),
        encoded=EncodedImages((), tuple(full)),
        embeds=embeds,
        seconds={},
        positions="original" if settings.positions == "original" else "compact",
        proportional=settings.proportional,
    )
    return inputs, reduction


def _tokenize(vlm: VLM, text: str) -> list[int]:
    """Return the token ids of a prompt with one placeholder for each image."""
    tokenizer = vlm.processor.tokenizer
    start = getattr(tokenizer, "bos_token", None)
    written = bool(start) and text.startswith(start)  # the template has written the start token
    return list(tokenizer(text, add_special_tokens=not written)["input_ids"])


def _expand(vlm: VLM, ids: Sequence[int], full: Sequence[int]) -> Tensor:
    """Repeat the placeholder of each image as often as the model's processor does."""
    marker = vlm.adapter.image_token
    if ids.count(marker) != len(full):
        raise BadParameter(
            f"The prompt of {type(vlm.model).__name__} has {ids.count(marker)} placeholders for {len(full)} images, so "
            "it cannot be written without them. Give the images to VLM.inputs()."
        )
    counts = iter(full)
    return torch.tensor([token for item in ids for token in [item] * (next(counts) if item == marker else 1)])
