"""LLaVA-1.5 and similar models in vLLM."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
    LlavaProcessor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import ImageSize

from torino.core.errors import BadParameter, BadTokens
from torino.serving.vllm.models.base import ReducedModel
from torino.serving.vllm.models.processing import ReducedInfo, ReducedProcessor
from torino.serving.vllm.startup import exact_tokens


class _LlavaProcessorInfo(LlavaProcessingInfo):
    """vLLM's information, for towers that it does not know too."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        processor: Any = self.ctx.get_hf_processor(LlavaProcessor, **kwargs)
        if processor.patch_size is None:  # older processors leave counting their placeholders to the model
            processor.patch_size = self.get_hf_config().vision_config.patch_size
        return processor


class ReducedLlavaInfo(ReducedInfo, _LlavaProcessorInfo):
    """Processing information of LLaVA: every image has the same number of patches."""

    @cached_property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape (3, height, width) of every image after the image processor."""
        blank = np.zeros((64, 64, 3), np.uint8)
        processed = self.get_hf_processor().image_processor(images=[blank], return_tensors="pt")
        return tuple(processed["pixel_values"].shape[1:])

    @property
    def patches(self) -> int:
        """Patches of every image."""
        side = int(self.get_hf_config().vision_config.patch_size)
        _, height, width = self.pixel_shape
        return (height // side) * (width // side)

    @property
    def full(self) -> int:
        """Placeholders of every image in the full prompt: its patches, and the registers of the tower."""
        return self.patches + self.registers

    @property
    def registers(self) -> int:
        """Registers of the tower, which are part of the prompt."""
        return int(getattr(self.get_hf_config().vision_config, "num_register_tokens", 0) or 0)

    @cached_property
    def reserved(self) -> int:
        """Tokens of every image in the engine placement."""
        count = exact_tokens(self.settings.reduction.build(), self.patches)
        if count > self.patches:
            raise BadParameter(f"The budget is {count} tokens, and an image has {self.patches} patches. Reduce it.")
        return count + self.registers

    def most_tokens(self) -> int:
        """Return the largest number of tokens of an image."""
        return self.reserved if self.in_engine else self.full

    def occupied_positions(self, images: Any, index: int, options: Mapping[str, object]) -> int:
        """Return the positions that an image takes in the full prompt."""
        return self.full

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Return the largest number of tokens of an image."""
        return self.most_tokens()

    def get_image_size_with_most_features(self) -> Any:
        """Return a size for profiling; all images give the same number of patches."""
        return ImageSize(width=self.pixel_shape[2], height=self.pixel_shape[1])


class ReducedLlavaProcessor(ReducedProcessor, LlavaMultiModalProcessor):
    """Multimodal processing of LLaVA."""

    def split_images(self, processed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the pixels of each image."""
        pixels = torch.as_tensor(processed["pixel_values"])
        if tuple(pixels.shape[1:]) != self.info.pixel_shape:
            raise BadTokens(
                f"Images must have {self.info.pixel_shape} values after the image processor, got "
                f"{tuple(pixels.shape[1:])}. Omit mm_processor_kwargs."
            )
        return [{"pixel_values": image[None]} for image in pixels]

    def _postprocess_hf_mm_data(
        self, mm_inputs: Mapping[str, object], hf_processor_mm_kwargs: Mapping[str, object], processed_data: Any
    ) -> Any:
        """Replace pixels by reduced tokens; in the engine placement, only check them."""
        if not self.info.in_engine or processed_data.get("pixel_values") is None:
            return super()._postprocess_hf_mm_data(mm_inputs, hf_processor_mm_kwargs, processed_data)
        pixels = torch.cat([image["pixel_values"] for image in self._checked_images(processed_data)])
        positions = torch.full((len(pixels),), self.info.full)
        return type(processed_data)({"pixel_values": pixels, "image_positions": positions})


@MULTIMODAL_REGISTRY.register_processor(
    ReducedLlavaProcessor, info=ReducedLlavaInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class ReducedLlava(ReducedModel):
    """LLaVA-1.5 with reduced tokens."""

    stock: ClassVar[Any] = LlavaForConditionalGeneration
