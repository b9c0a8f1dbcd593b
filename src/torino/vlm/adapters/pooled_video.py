"""Videos of LLaVA-NeXT-Video and LLaVA-OneVision: all frames have one size, and each is pooled.

A video is one unit of several frames. Its tokens are those of the tower, pooled as the model pools (2x2 patches to one,
before the projector in LLaVA-NeXT-Video and bilinearly after it in LLaVA-OneVision), so an SAE of the tower can read
them; they are means of neighbors, not tokens that the SAE was trained on. Keys, queries and CLS attention are pooled
alike. A token that a plan keeps unchanged is the model's own feature, so pruning and keeping everything agree with the
stock model; a merged token is merged from the pooled tokens and then projected.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.ragged import Ragged
from torino.core.reduction import ReductionBatch
from torino.core.tokens import VisualTokens, stack_frames
from torino.vlm.adapters.encoded import EncodedImages, ImageEmbeds
from torino.vlm.adapters.llava import tower_options
from torino.vlm.adapters.llava_next import LlavaNext, first_source, is_single_patch, map_patches


class PooledVideo(LlavaNext):
    """A family of LLaVA-NeXT that also takes videos, whose frames are pooled."""

    takes_videos: ClassVar[bool] = True
    video_newline: ClassVar[bool] = False
    """Whether a newline follows the last frame of a video."""

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return (*super().pixel_names, "pixel_values_videos")

    @abstractmethod
    def pool(self, values: Tensor) -> Tensor:
        """Pool values (frames, patches, F) as the model pools the patches of a frame."""

    @abstractmethod
    def stock_videos(self, states: Tensor) -> Tensor:
        """Return the features (frames, pooled, E) that the unreduced model computes from the tower's tokens."""

    def encode(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Encode tiles of images as in LLaVA-NeXT, or each video as one unit of several frames."""
        if not self.has_videos(inputs):
            return super().encode(inputs, needs)
        self._check_strategy(inputs)
        pixels: Tensor = inputs["pixel_values_videos"]
        if pixels.ndim != 5:
            raise BadParameter(
                f"pixel_values_videos must have shape (videos, frames, 3, height, width), got {tuple(pixels.shape)}."
            )
        videos, frames = pixels.shape[:2]
        tiles = self.visual_tokens(pixels.flatten(0, 1), needs - {"projected"}, **tower_options(inputs))
        states = torch.stack([tile.patches for tile in tiles])
        pooled = self.pool(states)
        grid = (-(-tiles[0].grid[0] // 2), -(-tiles[0].grid[1] // 2))
        if grid[0] * grid[1] != pooled.shape[1]:  # an odd side, of which average pooling drops the last row
            grid = (tiles[0].grid[0] // 2, tiles[0].grid[1] // 2)
        small = [
            map_patches(tile, lambda values: self.pool(values[None].float())[0], grid).with_(patches=patches)
            for tile, patches in zip((_without_patches(tile) for tile in tiles), pooled, strict=True)
        ]
        tokens = tuple(stack_frames(small[i * frames : (i + 1) * frames]) for i in range(videos))
        full = tuple(len(video) + self.video_newline for video in tokens)
        return EncodedImages(tokens, full, states, modality="video")

    def embed(self, encoded: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce and project; a token of a video takes the placeholder of its anchor."""
        if encoded.modality != "video":
            return super().embed(encoded, plans)
        stock = self.stock_videos(encoded.extra).flatten(0, 1)
        starts = torch.tensor([0, *(len(video) for video in encoded.tokens)]).cumsum(0)[:-1].tolist()
        rows = torch.cat(
            [
                torch.where(is_single_patch(plan), start + first_source(plan), -1)
                for plan, start in zip(plans, starts, strict=True)
            ]
        )
        table, merged = [stock], (rows < 0).nonzero()[:, 0]
        if len(merged):
            reduced = plans.apply([video.patches for video in encoded.tokens]).values
            table.append(self.project(Ragged.of([reduced.index_select(0, merged.to(reduced.device))])).values)
            rows[merged] = torch.arange(len(stock), len(stock) + len(merged))
        features = torch.cat(table).index_select(0, rows.to(stock.device)).split([len(plan) for plan in plans])
        embeds = [
            ImageEmbeds(values, torch.where(plan.anchor < 0, plan.patches - 1, plan.anchor), plan.sizes, plan.patches)
            for values, plan in zip(features, plans, strict=True)
        ]
        return [self._with_newline(item) for item in embeds] if self.video_newline else embeds

    def _with_newline(self, item: ImageEmbeds) -> ImageEmbeds:
        """Add the newline after the last frame, unless newlines are left out."""
        if self.newlines == "none":
            return item
        newline = self.inner.image_newline[None].to(item.features)
        sizes = None if item.sizes is None else torch.cat([item.sizes, item.sizes.new_zeros(1)])
        slots = torch.cat([item.slots, item.slots.new_full((1,), item.patches)])
        return replace(item, features=torch.cat([item.features, newline]), slots=slots, sizes=sizes)


def _without_patches(tile: VisualTokens) -> VisualTokens:
    """Return a tile whose patches are a placeholder of width 1; all patches are pooled in one batch instead."""
    return tile.with_(patches=tile.patches[:, :1], cls=None)
