"""LLaVA-OneVision: as LLaVA-NeXT, with one image of many tiles resized to a cap, and videos refused.

Tiles, unpadding and newlines are as in :mod:`torino.vlm.adapters.llava_next`. A prompt with several images has one tile for each
(``batch_num_images``), which ends in one newline.

**Resizing.** When the tiles of an image hold more patches than the cap (``vision_aspect_ratio="anyres_max_9"``: nine
tiles), the model projects them all, lays them side by side and resizes the whole bilinearly. What then stands at the
placeholders is no patch but a blend of a few. Such an image has two units: the base view, and the resized canvas with a
grid of its own. The canvas is planned on the tower's tokens, resized by the model's own function in the same way, so an
SAE of the tower reads it; they are blends of neighbours, not tokens it was trained on. A token that a plan keeps as it
is is the model's own resized feature, so pruning and keeping everything give what the stock model would show. A merged
token is merged from the resized tower tokens and then projected, as merging is everywhere else. The projector runs on
all patches of such an image, as it does in the stock model.

On the canvas keys, queries and CLS attention are resized like the tokens; CLS is that of the base view, which saw the
whole image. A reducer with one budget for all views of an image (``shares_views``) takes the canvas for a single tile.

**Videos** are refused: their frames are pooled after the projector and handed over as one tensor of equal lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadTokens, TorinoError
from torino.core.tokens import VisualTokens
from torino.vlm.adapters.base import EncodedImages
from torino.vlm.adapters.llava_next import LlavaNext, Picture, Scene, Unit, per_patch

UNCAPPED = f"anyres_max_{10**9}"


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision: tiles as in LLaVA-NeXT; an image over the tile cap is reduced after resizing; no videos.

    Parameters
    ----------
    model : a Hugging Face LLaVA-OneVision model
    newlines : {"rows", "all", "none"}, optional
        Which newline tokens stay; by default what the class says.
    """

    families: ClassVar[tuple[str, ...]] = ("llava_onevision",)

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return (*super().pixel_names, "batch_num_images", "vision_aspect_ratio")

    def has_images(self, inputs: Mapping[str, Any]) -> bool:
        """Whether there is anything to reduce, or a video to refuse."""
        return super().has_images(inputs) or inputs.get("pixel_values_videos") is not None

    def look(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Every tile is one unit, and the resized canvas of an image over the cap."""
        if inputs.get("pixel_values_videos") is not None:
            raise TorinoError(
                "This prompt has a video. In LLaVA-OneVision torino reduces images only: frames of a video are pooled "
                "after the projector and handed over in equal lengths. Leave the model unreduced for videos, or give "
                "some frames as images."
            )
        return super().look(inputs, needs)

    def count_tiles(self, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]) -> list[int]:
        """Tiles of each image: one where a prompt has several images."""
        from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

        side, pinpoints = self.config.vision_config.image_size, self.config.image_grid_pinpoints
        given = inputs.get("batch_num_images")
        together: list[int] = [1] * len(sizes) if given is None else torch.as_tensor(given).tolist()
        if sum(together) != len(sizes):
            raise BadTokens(
                f"batch_num_images counts {sum(together)} images, and image_sizes has {len(sizes)}. "
                "Pass on both as the processor gave them."
            )
        alone = [number == 1 for number in together for _ in range(number)]
        return [
            image_size_to_num_patches(list(size), pinpoints, side) if is_alone else 1
            for size, is_alone in zip(sizes, alone, strict=True)
        ]

    def pack(
        self, features: Sequence[Tensor], sizes: Sequence[Sequence[int]], newline: Tensor, inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Pack per-patch values (tiles, patches, F) of each image as the model does: (full, F)."""
        cap = inputs.get("vision_aspect_ratio") or self.config.vision_aspect_ratio
        packed, _ = self.inner.pack_image_features(
            list(features), sizes, image_newline=newline, vision_aspect_ratio=cap
        )
        return packed

    def pictures(
        self, counts: Sequence[int], patches: int, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]
    ) -> list[Picture]:
        """Learn how each image is packed; one that is longer without the cap was resized."""
        capped = super().pictures(counts, patches, sizes, inputs)
        whole = super().pictures(counts, patches, sizes, {**inputs, "vision_aspect_ratio": UNCAPPED})
        return [
            picture
            if len(picture) == len(other)
            else replace(picture, patch=torch.where(picture.detail, -1, picture.patch), resized=True)
            for picture, other in zip(capped, whole, strict=True)
        ]

    def units(
        self, picture: Picture, tiles: Sequence[VisualTokens], size: Sequence[int], inputs: Mapping[str, Any]
    ) -> list[Unit]:
        """The tiles of an image; or its base view and the canvas, where that was resized."""
        units = super().units(picture, tiles, size, inputs)
        slots = picture.detail.nonzero()[:, 0]
        if picture.resized and len(slots):
            units.append(Unit(self._canvas(picture, slots, tiles, size, inputs), slots, 1))
        return units

    def layout(self, scene: Scene) -> tuple[int, int]:
        """Rows and columns of an image's tiles; a resized canvas has no tiles any more and counts as one."""
        return (1, 1) if scene.picture.resized else super().layout(scene)

    def _canvas(
        self,
        picture: Picture,
        slots: Tensor,
        tiles: Sequence[VisualTokens],
        size: Sequence[int],
        inputs: Mapping[str, Any],
    ) -> VisualTokens:
        """The tokens of all tiles, resized as the model resizes what it makes of them."""

        def resize(values: Tensor) -> Tensor:
            split = values.reshape(len(tiles), len(tiles[0]), -1)
            return self.pack([split], [size], values.new_zeros(split.shape[2]), inputs)[0][slots.to(values.device)]

        rows = len(picture.row[slots].unique())
        return per_patch(joined(tiles), resize, (rows, len(slots) // rows))


def joined(tiles: Sequence[VisualTokens]) -> VisualTokens:
    """Tiles below each other as one, with the CLS token of the first."""
    first = tiles[0]

    def signal(name: str, values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values), 1 if name.startswith("cls_attention") else 0)

    return first.with_(
        patches=torch.cat([tile.patches for tile in tiles]),
        grid=(first.grid[0] * len(tiles), first.grid[1]),
        **{
            name: signal(name, [getattr(tile, name) for tile in tiles])
            for name in ("cls_attention", "keys")
            if getattr(first, name) is not None
        },
        signals={name: signal(name, [tile.signals[name] for tile in tiles]) for name in first.signals},
    )
