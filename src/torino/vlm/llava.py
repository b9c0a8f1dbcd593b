"""LLaVA-1.5 and its kin: one tower, patch tokens at one layer, a projector that works token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.errors import TorinoError
from torino.packed import Packed
from torino.reduction import ReductionBatch
from torino.tokens import Origin, VisualTokens
from torino.vlm.host import Host, Sight, Splice
from torino.vlm.tap import Anatomy, anatomy, tap


class Llava(Host):
    """LLaVA-1.5: tapped at ``vision_feature_layer``, reduced before the projector.

    The projector works on each token alone, so pruning before it gives what pruning after it would; merging
    happens where the paper merges, in the tower's own space. The tower is stopped after the tap block.
    """

    families: ClassVar[tuple[str, ...]] = ("llava",)

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model.model  # type: ignore[union-attr]

    def tap_block(self, parts: Anatomy, layer: object = None) -> int:
        """Zero-based block whose output the projector reads; hidden state 0 enters block 0."""
        layer = self.config.vision_feature_layer if layer is None else layer
        if not isinstance(layer, int):
            raise TorinoError(
                f"This model reads several tower layers at once ({layer}), which have no single tap. "
                "Torino reduces models that read one layer."
            )
        states = len(parts.blocks) + 1
        return (layer % states) - 1

    def see(self, pixels: Tensor, needs: frozenset[str], **options: Any) -> list[VisualTokens]:
        """Tokens at the tap, one VisualTokens for each picture in ``pixels`` (pictures, 3, height, width)."""
        tower = self.inner.vision_tower
        parts = anatomy(tower)
        block = self.tap_block(parts, options.pop("vision_feature_layer", None))
        strategy = options.pop("vision_feature_select_strategy", None) or self.config.vision_feature_select_strategy
        if strategy == "full" and parts.prefix:
            raise TorinoError(
                'This model feeds the CLS token to its language model (vision_feature_select_strategy="full"), which '
                'torino does not reduce. Use "default".'
            )
        dtype = next(tower.parameters()).dtype
        seen = tap(tower, parts, block, needs, lambda: tower(pixels.to(dtype), **options))
        side = tower.config.patch_size
        grid = (pixels.shape[-2] // side, pixels.shape[-1] // side)
        return [
            VisualTokens(
                patches=states[parts.prefix :],
                grid=grid,
                origin=Origin(parts.name, block),
                cls=states[0] if parts.has_cls else None,
                cls_attention=seen.of("cls_attention", i),
                keys=seen.of("keys", i),
                signals={name: values[i] for name, values in seen.signals.items() if "@" in name},
            )
            for i, states in enumerate(seen.states)
        ]

    def project(self, tokens: Packed) -> Packed:
        """Project the reduced tokens of all images in one go."""
        return Packed(self.inner.multi_modal_projector(tokens.values), tokens.offsets)

    def look(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> Sight:
        """Every image is one unit."""
        options = {
            name: inputs[name]
            for name in ("vision_feature_layer", "vision_feature_select_strategy")
            if inputs.get(name) is not None
        }
        tokens = self.see(inputs["pixel_values"], needs, **options)
        return Sight(tuple(tokens), tuple(len(image) for image in tokens))

    def splice(self, sight: Sight, plans: ReductionBatch) -> list[Splice]:
        """Reduce, project, and place each token where its anchor was; a token of no place comes last."""
        reduced = plans.apply(
            [image.patches for image in sight.tokens],
            [image.cls if image.cls is not None else image.patches[0] for image in sight.tokens],
        )
        features = self.project(reduced)
        return [
            Splice(feature, torch.where(plan.anchor < 0, plan.patches - 1, plan.anchor))
            for feature, plan in zip(features, plans, strict=True)
        ]

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return ("pixel_values", "image_sizes", "vision_feature_layer", "vision_feature_select_strategy")
