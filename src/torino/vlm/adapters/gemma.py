"""PaliGemma and Gemma 3: a SigLIP tower read after its last norm, and attention that runs both ways over the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import TorinoError
from torino.core.reduction import ReductionBatch
from torino.core.tokens import Origin, VisualTokens
from torino.reducers import InTowerReducer, PositionMode, Reducer
from torino.vlm.adapters.base import EncodedImages
from torino.vlm.adapters.internvl import CellAdapter, cells_of
from torino.vlm.hooks import CapturedFeatures, TowerLayout, tap, tower_layout
from torino.vlm.in_tower import run_in_tower
from torino.vlm.insertion import Side
from torino.vlm.text_query import TextQuery
from torino.vlm.trace import Look


class _Siglip(CellAdapter):
    """What both share: the tower's own output, without the pooling head that neither reads."""

    def output(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> tuple[Tensor, CapturedFeatures, Origin]:
        """Patches after the tower's last norm, shape (pictures, patches, D), and where they come from."""
        (tower, parts), pixels = self.tower(), inputs["pixel_values"]
        blocks = len(parts.blocks)
        seen = tap(tower, parts, blocks - 1, needs, lambda: tower(pixels))
        # numbered as a block after the last, so that an SAE of the last block itself is not taken for one of these
        return self.norm(seen.states), seen, Origin(parts.name, blocks)

    def tower(self) -> tuple[Any, TowerLayout]:
        """The tower and its parts."""
        tower = self.inner.vision_tower
        parts = tower_layout(tower)
        if parts.has_cls:
            raise TorinoError(
                f"Models of this family read a SigLIP tower, and this one has a {type(tower).__name__}, whose output "
                "torino does not know how to place. Use a model with a SigLIP tower."
            )
        return tower, parts

    def norm(self, states: Tensor) -> Tensor:
        """The norm after the last block."""
        tower = self.inner.vision_tower
        return getattr(tower, "vision_model", tower).post_layernorm(states)


class PaliGemma(_Siglip):
    """PaliGemma and PaliGemma 2: tapped at the tower's output, reduced before the linear projector.

    A cell is one patch. Image and question attend both ways and the answer one way, which ``token_type_ids`` say;
    they shrink with the prompt. Positions count from 1.
    """

    families: ClassVar[tuple[str, ...]] = ("paligemma",)
    closed: ClassVar[str] = ""

    def see(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Patches of every image."""
        return cells_of(*self.output(inputs, needs))

    def encode_in_tower(
        self, inputs: Mapping[str, Any], reducer: InTowerReducer
    ) -> tuple[EncodedImages, ReductionBatch]:
        """The same with a reducer at work in all blocks."""
        (tower, parts), pixels = self.tower(), inputs["pixel_values"]
        side = tower.config.patch_size
        grid = (pixels.shape[-2] // side, pixels.shape[-1] // side)
        passed = run_in_tower(tower, parts, len(parts.blocks) - 1, reducer, grid, lambda: tower(pixels))
        came = tuple(self.norm(passed.states))
        return EncodedImages((), (grid[0] * grid[1],) * len(came), came=came), passed.plans

    def project(self, tokens: Tensor) -> Tensor:
        """One linear layer."""
        return self.inner.multi_modal_projector(tokens)

    def shrink(
        self,
        inputs: Mapping[str, Any],
        reducer: Reducer,
        positions: PositionMode,
        side: Side | None = None,
        asking: TextQuery | None = None,
    ) -> tuple[dict[str, Any], Look]:
        """Turn the inputs of a full prompt into those of the reduced one."""
        shrunk, look = super().shrink(inputs, reducer, positions, side, asking)
        # generate adds the 1 itself to positions that it is given; forward, which leaves the side open, does not
        if side is None and "position_ids" in shrunk:
            shrunk["position_ids"] = shrunk["position_ids"] + 1
        return shrunk, look


class Gemma3(_Siglip):
    """Gemma 3: tapped after the average pool and its norm, reduced before the projection.

    A cell is the mean of 4×4 patches, normed, in the tower's own width. The projection is one matrix without a bias,
    so merging before it gives what merging after it would. The tokens of an image attend to each other both ways,
    which ``token_type_ids`` say; they shrink with the prompt. Crops of pan and scan are pictures like any other.
    """

    families: ClassVar[tuple[str, ...]] = ("gemma3",)

    def see(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Pooled cells of every image and crop."""
        patches, seen, origin = self.output(inputs, needs)
        projector = self.inner.multi_modal_projector
        side = projector.patches_per_image
        plane = patches.transpose(1, 2).unflatten(2, (side, side)).contiguous()
        pooled = projector.avg_pool(plane).flatten(2).transpose(1, 2)
        # normed here, whole and laid out as in the model's own projector: other layouts sum in another order
        return cells_of(projector.mm_soft_emb_norm(pooled), seen, origin)

    def project(self, tokens: Tensor) -> Tensor:
        """One matrix."""
        return torch.matmul(tokens, self.inner.multi_modal_projector.mm_input_projection_weight).type_as(tokens)
