"""Qwen2-VL and Qwen2.5-VL in vLLM: images of any shape, whose tokens keep their three coordinates."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.model_executor.models.utils import init_vllm_registered_model
from vllm.multimodal import MULTIMODAL_REGISTRY

from torino.serving.vision import ServedImage
from torino.serving.vllm.models.base import ReducedModel
from torino.serving.vllm.models.processing import ReducedInfo, ReducedProcessor


class ReducedQwenInfo(ReducedInfo):
    """Processing information of both families; to be mixed into vLLM's own classes, which have these methods."""

    get_hf_config: Any
    get_image_processor: Any
    get_max_image_tokens: Any
    _get_vision_info: Any

    def most_tokens(self) -> int:
        """Return the number of tokens of the largest image."""
        return int(self.get_max_image_tokens())

    def occupied_positions(self, images: Any, index: int, options: Mapping[str, object]) -> int:
        """Return the positions that an image takes: its longer side in tokens."""
        width, height = self.prepared_size(images, index)
        size, _ = self._get_vision_info(
            image_width=width, image_height=height, image_processor=self.get_image_processor(), mm_kwargs=options
        )
        vision = self.get_hf_config().vision_config
        return max(size.width, size.height) // (int(vision.patch_size) * int(vision.spatial_merge_size))


class ReducedQwenProcessor(ReducedProcessor):
    """Multimodal processing of both families."""

    def split_images(self, processed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the patches and the grid of each image."""
        grids = torch.as_tensor(processed["image_grid_thw"])
        patches = torch.as_tensor(processed["pixel_values"]).split(grids.prod(1).tolist())
        prompt = torch.zeros(1, 1, dtype=torch.int64)  # the adapter checks that there is one
        return [
            {"pixel_values": image, "image_grid_thw": grid[None], "input_ids": prompt, "mm_token_type_ids": prompt}
            for image, grid in zip(patches, grids, strict=True)
        ]

    def offsets(self, image: ServedImage, inputs: Mapping[str, Any]) -> Tensor:
        """Return time, row and column of each token."""
        rows, columns = self._grid(inputs)
        return torch.stack([image.slots // (rows * columns), image.slots // columns % rows, image.slots % columns], 1)

    def occupied(self, image: ServedImage, inputs: Mapping[str, Any]) -> int:
        """Return the positions that an image takes: its longer side in tokens."""
        return max(self._grid(inputs))

    def _grid(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        side = int(self.info.get_hf_config().vision_config.spatial_merge_size)
        _, rows, columns = inputs["image_grid_thw"][0].tolist()
        return rows // side, columns // side


class ReducedQwen2VLInfo(ReducedQwenInfo, Qwen2VLProcessingInfo):
    """Processing information of Qwen2-VL."""


class ReducedQwen25VLInfo(ReducedQwenInfo, Qwen2_5_VLProcessingInfo):
    """Processing information of Qwen2.5-VL."""


class ReducedQwen2VLProcessor(ReducedQwenProcessor, Qwen2VLMultiModalProcessor):
    """Multimodal processing of Qwen2-VL."""


class ReducedQwen25VLProcessor(ReducedQwenProcessor, Qwen2_5_VLMultiModalProcessor):
    """Multimodal processing of Qwen2.5-VL."""


class ReducedQwen(ReducedModel):
    """A language model whose positions have three coordinates."""

    coordinates: ClassVar[int] = 3

    def build_language_model(self, vllm_config: Any, prefix: str) -> nn.Module:
        """Build the language model as vLLM does; its table of positions is longer than it needs."""
        return init_vllm_registered_model(vllm_config=vllm_config, prefix=prefix, architectures=["Qwen2ForCausalLM"])


@MULTIMODAL_REGISTRY.register_processor(
    ReducedQwen2VLProcessor, info=ReducedQwen2VLInfo, dummy_inputs=Qwen2VLDummyInputsBuilder
)
class ReducedQwen2VL(ReducedQwen):
    """Qwen2-VL with reduced tokens."""

    stock: ClassVar[Any] = Qwen2VLForConditionalGeneration


@MULTIMODAL_REGISTRY.register_processor(
    ReducedQwen25VLProcessor, info=ReducedQwen25VLInfo, dummy_inputs=Qwen2_5_VLDummyInputsBuilder
)
class ReducedQwen25VL(ReducedQwen):
    """Qwen2.5-VL with reduced tokens."""

    stock: ClassVar[Any] = Qwen2_5_VLForConditionalGeneration
