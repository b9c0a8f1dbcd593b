"""LLaVA-OneVision: as LLaVA-NeXT, but an image with many tiles is resized to a maximal size, and there are videos.

Tiles, unpadding and newlines are those of :mod:`torino.vlm.adapters.llava_next`. In a prompt with several images
(``batch_num_images``), each image has one tile, which ends in one newline.

**Resizing.** If the tiles of an image have more patches than the limit (``vision_aspect_ratio="anyres_max_9"``: nine
tiles), the model projects all of them, joins them into one canvas and resizes the canvas bilinearly. Its placeholders
then hold blends of a few patches. Such an image has two units: the base view, and the resized canvas with its own grid.
The canvas is planned on the tower's tokens, resized in the same way by the model's own function, so an SAE of the tower
can read it; these tokens are blends of neighbors, not tokens the SAE was trained on. A token that a plan keeps
unchanged is the model's own resized feature, so pruning and keeping everything agree with the stock model. A merged
token is merged from the resized tower tokens and then projected, as in the other families. The projector runs on all
patches of such an image, as in the stock model.

On the canvas, keys, queries and CLS attention are resized like the tokens. Its CLS token is that of the base view,
which shows the whole image. A reducer with one budget for all views of an image (``shares_views``) receives the canvas
as a single tile.

**Videos** have frames of one tile each, pooled after the projector, and one newline after the last frame; see
:mod:`torino.vlm.adapters.pooled_video`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.core.tokens import VisualTokens
from torino.vlm.adapters.llava_next import PackedImage, TiledImage, Unit, map_patches
from torino.vlm.adapters.pooled_video import PooledVideo

UNLIMITED = f"anyres_max_{10**9}"


class LlavaOnevision(PooledVideo):
    """LLaVA-OneVision: tiles as in LLaVA-NeXT; an image over the tile limit is reduced after resizing; videos.

    Parameters
    ----------
    model : a Hugging Face LLaVA-OneVision model
    newlines : {"rows", "all", "none"}, optional
        The newline tokens to keep; the class attribute by default.
    """

    families: ClassVar[tuple[str, ...]] = ("llava_onevision",)
    joins_videos: ClassVar[bool] = True
    video_newline: ClassVar[bool] = True

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return (*super().pixel_names, "batch_num_images", "vision_aspect_ratio")

    def pool(self, values: Tensor) -> Tensor:
        """Resize each frame to half its height and width with the model's own function."""
        return self.inner.apply_pooling(values)

    def stock_videos(self, states: Tensor) -> Tensor:
        """Project and pool."""
        return self.inner.apply_pooling(self.inner.multi_modal_projector(states))

    def count_tiles(self, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]) -> list[int]:
        """Return the number of tiles of each image, which is one if its prompt has several images."""
        from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

        side, pinpoints = self.config.vision_config.image_size, self.config.image_grid_pinpoints
        batch_num_images = inputs.get("batch_num_images")
        per_prompt: list[int] = (
            [1] * len(sizes) if batch_num_images is None else torch.as_tensor(batch_num_images).tolist()
        )
        if sum(per_prompt) != len(sizes):
            raise BadTokens(
                f"batch_num_images counts {sum(per_prompt)} images, and image_sizes has {len(sizes)}. "
                "Pass both as the processor returned them."
            )
        is_single = [number == 1 for number in per_prompt for _ in range(number)]
        return [
            image_size_to_num_patches(list(size), pinpoints, side) if single else 1
            for size, single in zip(sizes, is_single, strict=True)
        ]

    def pack(
        self, features: Sequence[Tensor], sizes: Sequence[Sequence[int]], newline: Tensor, inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Pack the features (tiles, patches, F) of each image as the model does; return (full, F) for each image."""
        limit = inputs.get("vision_aspect_ratio") or self.config.vision_aspect_ratio
        packed, _ = self.inner.pack_image_features(
            list(features), sizes, image_newline=newline, vision_aspect_ratio=limit
        )
        return packed

    def find_packing(
        self, counts: Sequence[int], patches: int, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]
    ) -> list[PackedImage]:
        """Find how each image is packed; an image that is longer without the limit is resized."""
        limited = super().find_packing(counts, patches, sizes, inputs)
        unlimited = super().find_packing(counts, patches, sizes, {**inputs, "vision_aspect_ratio": UNLIMITED})
        return [
            packing
            if len(packing) == len(full)
            else replace(packing, patch=torch.where(packing.detail, -1, packing.patch), resized=True)
            for packing, full in zip(limited, unlimited, strict=True)
        ]

    def make_units(
        self, packing: PackedImage, tiles: Sequence[VisualTokens], size: Sequence[int], inputs: Mapping[str, Any]
    ) -> list[Unit]:
        """Return the tiles of an image, or its base view and its canvas if it is resized."""
        units = super().make_units(packing, tiles, size, inputs)
        slots = packing.detail.nonzero()[:, 0]
        if packing.resized and len(slots):
            units.append(Unit(self._make_canvas(packing, slots, tiles, size, inputs), slots, 1))
        return units

    def tile_layout(self, image: TiledImage) -> tuple[int, int]:
        """Return the rows and columns of an image's tiles; a resized canvas counts as one tile."""
        return (1, 1) if image.packing.resized else super().tile_layout(image)

    def _make_canvas(
        self,
        packing: PackedImage,
        slots: Tensor,
        tiles: Sequence[VisualTokens],
        size: Sequence[int],
        inputs: Mapping[str, Any],
    ) -> VisualTokens:
        """Join the tokens of all tiles and resize them as the model resizes its features."""

        def resize(values: Tensor) -> Tensor:
            split = values.reshape(len(tiles), len(tiles[0]), -1)
            return self.pack([split], [size], values.new_zeros(split.shape[2]), inputs)[0][slots.to(values.device)]

        rows = len(packing.row[slots].unique())
        return map_patches(join_tiles(tiles), resize, (rows, len(slots) // rows))


def join_tiles(tiles: Sequence[VisualTokens]) -> VisualTokens:
    """Stack tiles vertically into one, with the CLS token of the first."""
    first = tiles[0]

    def join_signal(name: str, values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values), 1 if name.startswith("cls_attention") else 0)

    return first.with_(
        patches=torch.cat([tile.patches for tile in tiles]),
        grid=(first.grid[0] * len(tiles), first.grid[1]),
        **{
            name: join_signal(name, [getattr(tile, name) for tile in tiles])
            for name in ("cls_attention", "keys")
            if getattr(first, name) is not None
        },
        signals={name: join_signal(name, [tile.signals[name] for tile in tiles]) for name in first.signals},
    )
