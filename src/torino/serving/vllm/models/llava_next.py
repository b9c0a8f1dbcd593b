"""LLaVA-NeXT in vLLM: images are a base view and tiles, so their lengths differ and only the processor can reduce."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from vllm.model_executor.models.llava import LlavaDummyInputsBuilder
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from torino.serving.vllm.models.base import ReducedModel
from torino.serving.vllm.models.processing import ReducedInfo, ReducedProcessor


class ReducedLlavaNextInfo(ReducedInfo, LlavaNextProcessingInfo):
    """Processing information of LLaVA-NeXT."""

    def most_tokens(self) -> int:
        """Return the number of tokens of the image with the most tiles."""
        return int(self.get_max_image_tokens())

    def occupied_positions(self, images: Any, index: int, options: Mapping[str, object]) -> int:
        """Return the positions that an image takes in the full prompt."""
        width, height = self.prepared_size(images, index)
        return int(self.get_num_image_tokens(image_width=width, image_height=height))


class ReducedLlavaNextProcessor(ReducedProcessor, LlavaNextMultiModalProcessor):
    """Multimodal processing of LLaVA-NeXT."""

    def split_images(self, processed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the tiles and the size of each image."""
        sizes = torch.as_tensor(processed["image_sizes"])
        pixels: Any = processed["pixel_values"]
        return [
            {"pixel_values": tiles[None], "image_sizes": size[None]} for tiles, size in zip(pixels, sizes, strict=True)
        ]


@MULTIMODAL_REGISTRY.register_processor(
    ReducedLlavaNextProcessor, info=ReducedLlavaNextInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class ReducedLlavaNext(ReducedModel):
    """LLaVA-NeXT with reduced tokens."""

    stock: ClassVar[Any] = LlavaNextForConditionalGeneration
