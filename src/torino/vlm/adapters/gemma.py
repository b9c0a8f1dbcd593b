"""PaliGemma and Gemma 3: the output of a SigLIP tower, and bidirectional attention over the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import TorinoError
from torino.core.reduction import ReductionBatch
from torino.core.tokens import Origin, VisualTokens
from torino.reducers import Downsample, InTowerReducer, KeepShare, PositionMode, Reducer
from torino.vlm.adapters.base import EncodedImages
from torino.vlm.adapters.internvl import CellAdapter, make_cells
from torino.vlm.downsample import resize
from torino.vlm.hooks import CapturedFeatures, TowerLayout, capture, tower_layout
from torino.vlm.in_tower import run_in_tower
from torino.vlm.insertion import Side
from torino.vlm.text_query import TextQuery
from torino.vlm.trace import ReducedCall


class SiglipAdapter(CellAdapter):
    """Models that read the output of a SigLIP tower, without its pooling head."""

    inside_refusal: ClassVar[str] = "its image tokens see each other in both directions"

    def tower_output(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> tuple[Tensor, CapturedFeatures, Origin]:
        """Return the patches after the tower's final norm, (images, patches, D), with their signals and origin."""
        (tower, parts), pixels = self.tower(), inputs["pixel_values"]
        blocks = len(parts.blocks)
        captured = capture(tower, parts, blocks - 1, needs, lambda: tower(pixels))
        # Numbered as one block after the last, so that an SAE of the last block itself is not accepted for them.
        return self.norm(captured.states), captured, Origin(parts.name, blocks)

    def tower(self) -> tuple[Any, TowerLayout]:
        """Return the tower and its layout."""
        tower = self.inner.vision_tower
        parts = tower_layout(tower)
        if parts.has_cls:
            raise TorinoError(
                f"Torino supports this family with a SigLIP tower, and this model has a {type(tower).__name__}. "
                "Use a model with a SigLIP tower."
            )
        return tower, parts

    def norm(self, states: Tensor) -> Tensor:
        """Apply the norm after the last block."""
        tower = self.inner.vision_tower
        return getattr(tower, "vision_model", tower).post_layernorm(states)


class PaliGemma(SiglipAdapter):
    """PaliGemma and PaliGemma 2: patches are read at the tower's output and reduced before the linear projector.

    A cell is one patch. Image and question attend in both directions and the answer causally, as ``token_type_ids``
    specify; these are shortened with the prompt. Positions start at 1.
    """

    families: ClassVar[tuple[str, ...]] = ("paligemma",)
    prompt_template: ClassVar[str] = "{images}{question}"
    in_tower_refusal: ClassVar[str] = ""

    def visual_tokens(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Return the patches of every image."""
        return make_cells(*self.tower_output(inputs, needs))

    def encode_smaller(
        self, inputs: Mapping[str, Any], reducer: Downsample | KeepShare
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Encode smaller images with interpolated position embeddings."""
        (tower, parts), pixels = self.tower(), inputs["pixel_values"]
        side = int(tower.config.patch_size)
        grid = (pixels.shape[-2] // side, pixels.shape[-1] // side)
        small, plan = reducer.plan_grid(grid)
        pixels, options = (
            resize(pixels, (small[0] * side, small[1] * side)),
            {"interpolate_pos_encoding": small != grid},
        )
        run = capture(tower, parts, len(parts.blocks) - 1, frozenset(), lambda: tower(pixels, **options))
        tokens = tuple(self.norm(run.states))
        encoded = EncodedImages((), (plan.patches,) * len(tokens), reduced_tokens=tokens)
        return encoded, ReductionBatch.of([plan] * len(tokens))

    def encode_in_blocks(
        self, inputs: Mapping[str, Any], reducer: InTowerReducer
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Encode the images with a reducer active in all blocks."""
        (tower, parts), pixels = self.tower(), inputs["pixel_values"]
        side = tower.config.patch_size
        grid = (pixels.shape[-2] // side, pixels.shape[-1] // side)
        output = run_in_tower(tower, parts, len(parts.blocks) - 1, reducer, grid, lambda: tower(pixels))
        tokens = tuple(self.norm(output.states))
        return EncodedImages((), (grid[0] * grid[1],) * len(tokens), reduced_tokens=tokens), output.plans

    def project(self, tokens: Tensor) -> Tensor:
        """Apply the projector, one linear layer."""
        return self.inner.multi_modal_projector(tokens)

    def reduce_inputs(
        self,
        inputs: Mapping[str, Any],
        reducer: Reducer,
        positions: PositionMode,
        side: Side | None = None,
        text_query: TextQuery | None = None,
    ) -> tuple[dict[str, Any], ReducedCall]:
        """Turn the inputs of a full prompt into those of the reduced one."""
        reduced, call = super().reduce_inputs(inputs, reducer, positions, side, text_query)
        # generate adds 1 to given positions; forward, which does not set the side, does not.
        if side is None and "position_ids" in reduced:
            reduced["position_ids"] = reduced["position_ids"] + 1
        return reduced, call


class Gemma3(SiglipAdapter):
    """Gemma 3: cells are read after average pooling and its norm, and reduced before the projection.

    A cell is the normalized mean of 4×4 patches, in the width of the tower. The projection is one matrix without a
    bias, so merging before it equals merging after it. The tokens of an image attend to each other in both directions,
    as ``token_type_ids`` specify; these are shortened with the prompt. Crops of pan-and-scan are treated as images.
    """

    families: ClassVar[tuple[str, ...]] = ("gemma3",)

    def visual_tokens(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Return the pooled cells of every image and crop."""
        patches, captured, origin = self.tower_output(inputs, needs)
        projector = self.inner.multi_modal_projector
        side = projector.patches_per_image
        plane = patches.transpose(1, 2).unflatten(2, (side, side)).contiguous()
        pooled = projector.avg_pool(plane).flatten(2).transpose(1, 2)
        # Normalized here, with the memory layout of the model's own projector: other layouts sum in another order.
        return make_cells(projector.mm_soft_emb_norm(pooled), captured, origin)

    def project(self, tokens: Tensor) -> Tensor:
        """Apply the projection matrix."""
        return torch.matmul(tokens, self.inner.multi_modal_projector.mm_input_projection_weight).type_as(tokens)
