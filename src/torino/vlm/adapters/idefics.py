"""Idefics3 and SmolVLM: sub-images, a connector that folds patches into cells, and one token for each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from torino.core.tokens import Origin, VisualTokens
from torino.vlm.adapters.base import Adapter, EncodedImages, ImageEmbeds
from torino.vlm.adapters.internvl import CellAdapter, cells_of
from torino.vlm.hooks import TowerLayout, tap


class Idefics(CellAdapter):
    """Idefics3 and SmolVLM: tapped and reduced after the connector, sub-image by sub-image.

    The connector is a pixel shuffle and one linear layer without a bias, so merging after it gives what merging before
    it would, at a width that an SAE can be trained on (before it, a cell is 9 to 16 patches wide). Sub-images and
    video frames are pictures like any other; the text around them, such as ``<row_1_col_2>``, stays.
    """

    families: ClassVar[tuple[str, ...]] = ("idefics3", "smolvlm")

    def see(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Cells of every real sub-image; those that only pad the batch are left out by the model itself."""
        inner = self.inner
        tower = inner.vision_model
        parts = _tower_layout(tower)
        pixels, mask = inputs["pixel_values"], inputs.get("pixel_attention_mask")
        # the model's own code drops padding and masks patches; the tap stops it after the last block
        seen = tap(tower, parts, len(parts.blocks) - 1, needs, lambda: inner.get_image_features(pixels, mask))
        cells = inner.connector(tower.post_layernorm(seen.states))
        return cells_of(cells, seen, Origin(parts.name))

    def project(self, tokens: Tensor) -> Tensor:
        """Nothing is left to do after the connector."""
        return tokens

    def outputs(self, sight: EncodedImages, splices: Sequence[ImageEmbeds]) -> Any:
        """A list, one entry for each sub-image: these models lay it end to end, and beam search parts it by prompt."""
        return Adapter.outputs(self, sight, splices)

    def has_images(self, inputs: Mapping[str, Any]) -> bool:
        """Whether any sub-image is real; a batch of text may carry pixels that are all padding, which is zeros."""
        pixels = inputs.get("pixel_values")
        return pixels is not None and bool((pixels != 0).any())

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return ("pixel_values", "pixel_attention_mask")


def _tower_layout(tower: Any) -> TowerLayout:
    return TowerLayout(
        blocks=tower.encoder.layers,
        prefix=0,
        has_cls=False,
        heads=int(tower.config.num_attention_heads),
        query=lambda block: block.self_attn.q_proj,  # type: ignore[union-attr, return-value]
        key=lambda block: block.self_attn.k_proj,  # type: ignore[union-attr, return-value]
        name=str(getattr(tower.config, "_name_or_path", "") or ""),
    )
