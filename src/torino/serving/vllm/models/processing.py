"""vLLM's multimodal processing with reduced tokens: what all families share."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import PromptReplacement

from torino.core.errors import BadTokens
from torino.datasets.images import mean_color, open_image, prepare
from torino.serving.vision import ServedImage, VisionHalf, load_vision_half
from torino.serving.vllm.hook import resolved_of, settings_of
from torino.serving.vllm.marks import attach
from torino.serving.vllm.monitor import server_metrics
from torino.serving.vllm.positions import check_length
from torino.serving.vllm.settings import PluginSettings
from torino.serving.vllm.startup import Resolved
from torino.vlm.limits import context_length
from torino.vlm.loading import pin_image_backend

_halves: dict[tuple[str, ...], VisionHalf] = {}
_lock = threading.Lock()


def vision_half(model_config: Any) -> VisionHalf:
    """Return tower, reducer and projector of a server's processor, loaded on first use."""
    settings, resolved = settings_of(model_config.hf_config), resolved_of(model_config.hf_config)
    key = (str(model_config.model), str(model_config.revision), settings.device, resolved.salt)
    with _lock:
        if key not in _halves:
            _halves[key] = load_vision_half(
                str(model_config.model),
                settings.reduction.build(settings.device),
                device=settings.device,
                dtype=None if settings.device == "cpu" else model_config.dtype,
                revision=model_config.revision,
            )
        return _halves[key]


def marked_embeds(image: ServedImage, resolved: Resolved, offsets: Tensor) -> Tensor:
    """Return the embeddings of an image; where they are needed, with offsets (n, coordinates) and sizes."""
    if not resolved.marked:
        return image.features
    integers = torch.cat([offsets, image.sizes[:, None]], 1) if resolved.proportional else offsets
    return attach(image.features, integers.to(image.features.device))


class ReducedInfo(ABC):
    """Processing information of a family, with the settings of torino; to be mixed into vLLM's own class."""

    ctx: Any

    @cached_property
    def settings(self) -> PluginSettings:
        """Settings of the server."""
        return settings_of(self.ctx.get_hf_config())

    @cached_property
    def resolved(self) -> Resolved:
        """What follows from the settings and the model."""
        return resolved_of(self.ctx.get_hf_config())

    @property
    def model_id(self) -> str:
        """Identity of the model in caches, with everything that determines its tokens."""
        return f"{super().model_id}:{self.resolved.salt}"  # type: ignore[misc]

    @property
    def in_engine(self) -> bool:
        """Whether the tower runs in the worker."""
        return self.settings.placement == "engine"

    def get_hf_processor(self, **kwargs: object) -> Any:
        """Return the processor of transformers with the image backend that torino uses."""
        processor: Any = super().get_hf_processor(**kwargs)  # type: ignore[misc]
        return pin_image_backend(processor, str(self.ctx.model_config.model), self.ctx.model_config.revision)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Accept images only."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the largest number of tokens of an image, so that vLLM need not process one to find out."""
        return {"image": self.most_tokens()}

    @abstractmethod
    def most_tokens(self) -> int:
        """Return the largest number of tokens of an image."""

    @abstractmethod
    def occupied_positions(self, images: Any, index: int, options: Mapping[str, object]) -> int:
        """Return the positions that an image of a request takes in the full prompt.

        Parameters
        ----------
        images : vllm.multimodal.parse.ImageProcessorItems
        index : int
        options : mapping
            Options of the image processor in the request.
        """

    def prepared_size(self, images: Any, index: int) -> tuple[int, int]:
        """Return width and height of an image of a request after padding.

        An image that a client only names has no size; the largest one is assumed.
        """
        if images.get(index) is None:
            return tuple(self.get_image_size_with_most_features())  # type: ignore[attr-defined, no-any-return]
        size = images.get_image_size(index)
        if self.settings.reduction.padding == "square":
            return (max(size.width, size.height),) * 2
        return size.width, size.height


class ReducedProcessor(ABC):
    """Multimodal processing of a family with reduced tokens; to be mixed into vLLM's own class."""

    info: Any

    # ------------------------------------------------------------------ defined by each family

    def image_token(self) -> int:
        """Return the id of the placeholder."""
        return int(self.info.get_hf_config().image_token_id)

    @abstractmethod
    def split_images(self, processed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the outputs of the image processor for each image alone."""

    def offsets(self, image: ServedImage, inputs: Mapping[str, Any]) -> Tensor:
        """Return the offset of each token from the first position of its image, shape (n, coordinates)."""
        return image.slots[:, None]

    def occupied(self, image: ServedImage, inputs: Mapping[str, Any]) -> int:
        """Return the positions that an image takes in the full prompt."""
        return image.full

    # ------------------------------------------------------------------ hooks of vLLM

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Mapping[str, Any]:
        return {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            "image_embeds": MultiModalFieldConfig.batched("image"),
            "image_positions": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_hf_mm_inputs(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        """Prepare images as ``VLM.open`` does."""
        inputs = super()._get_hf_mm_inputs(mm_items, hf_kwargs)  # type: ignore[misc]
        images = inputs.hf_data.get("images")
        if images is not None:
            color = mean_color(self.info.get_hf_processor())
            inputs.hf_data["images"] = [
                image
                if isinstance(image, np.ndarray | Tensor)  # of a caller in Python, who has prepared it
                else prepare(open_image(image), self.info.settings.reduction.padding, color)
                for image in images
            ]
        return inputs

    def _postprocess_hf_mm_data(
        self, mm_inputs: Mapping[str, object], hf_processor_mm_kwargs: Mapping[str, object], processed_data: Any
    ) -> Any:
        """Replace pixels by reduced tokens."""
        if processed_data.get("pixel_values") is None:
            return processed_data
        inputs = self._checked_images(processed_data)
        half, dtype = vision_half(self.info.ctx.model_config), self.info.ctx.model_config.dtype
        embeds: list[Tensor] = []
        occupied: list[int] = []
        metrics = server_metrics()
        for image_inputs in inputs:  # one by one, so that cached tokens do not depend on the other images of a request
            begin = time.perf_counter()
            (image,) = half(image_inputs)
            metrics.observe_stages({"reduce": time.perf_counter() - begin})
            metrics.images.inc()
            metrics.tokens_before.inc(image.full)
            metrics.tokens_after.inc(len(image.features))
            marked = marked_embeds(image, self.info.resolved, self.offsets(image, image_inputs))
            embeds.append(marked.to(dtype).cpu())
            occupied.append(self.occupied(image, image_inputs))
        return type(processed_data)({"image_embeds": embeds, "image_positions": torch.tensor(occupied)})

    def _checked_images(self, processed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the outputs of the image processor for each image alone; refuse pixels that are not finite."""
        inputs = self.split_images(processed)
        for image in inputs:
            if not bool(torch.isfinite(image["pixel_values"]).all()):
                raise BadTokens("The pixels of an image are not finite. Check the options of the image processor.")
        return inputs

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        token = self.image_token()

        def replacement(index: int) -> list[int]:
            item = out_mm_kwargs["image"][index]
            count = len(item["image_embeds"].data) if "image_embeds" in item else self.info.most_tokens()
            return [token] * count

        return [PromptReplacement(modality="image", target=[token], replacement=replacement)]

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        """Salt all identities, including those that clients give."""
        hashes: Mapping[str, list[str]] = super()._get_mm_hashes(inputs)  # type: ignore[misc]
        return {name: [f"{self.info.resolved.salt}-{value}" for value in values] for name, values in hashes.items()}

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process a request; refuse one whose positions in the full prompt exceed those of the model.

        This happens before vLLM's processor cache records the images: the engine never receives those of a refused
        request, and the two caches would differ.
        """
        images = inputs.mm_data_items.get("image")
        if self.info.resolved.positions == "original" and images is not None:
            given = inputs.hf_processor_mm_kwargs
            occupied = [self.info.occupied_positions(images, index, given) for index in range(len(images))]
            check_length(len(inputs.prompt), [1] * len(images), occupied, context_length(self.info.get_hf_config()))
        return super().apply(inputs, timing_ctx)  # type: ignore[misc]
