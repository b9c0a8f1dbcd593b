"""Idefics3 and SmolVLM: sub-images, and a connector that folds patches into cells, one token each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from torino.core.tokens import Origin, VisualTokens
from torino.vlm.adapters.base import Adapter, EncodedImages, ImageEmbeds
from torino.vlm.adapters.internvl import CellAdapter, make_cells
from torino.vlm.hooks import TowerLayout, capture


class Idefics(CellAdapter):
    """Idefics3 and SmolVLM: cells are read and reduced after the connector, sub-image by sub-image.

    The connector is a pixel shuffle and one linear layer without a bias, so merging after it equals merging before it,
    at a width for which an SAE can be trained (before it, a cell is 9 to 16 patches wide). Sub-images and video frames
    are treated as images; the text around them, such as ``<row_1_col_2>``, is kept.
    """

    families: ClassVar[tuple[str, ...]] = ("idefics3", "smolvlm")
    inside_refusal: ClassVar[str] = ""

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return ("pixel_values", "pixel_attention_mask")

    def has_images(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the pixels hold a sub-image; those of a text-only batch may be padding, which is zero."""
        pixels = inputs.get("pixel_values")
        return pixels is not None and bool((pixels != 0).any())

    def visual_tokens(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Return the cells of every sub-image; the model itself drops those that pad the batch."""
        inner = self.inner
        tower = inner.vision_model
        parts = _tower_layout(tower)
        pixels, mask = inputs["pixel_values"], inputs.get("pixel_attention_mask")
        # The model's own code drops padding and masks patches; capturing stops it after the last block.
        captured = capture(tower, parts, len(parts.blocks) - 1, needs, lambda: inner.get_image_features(pixels, mask))
        cells = inner.connector(tower.post_layernorm(captured.states))
        return make_cells(cells, captured, Origin(parts.name))

    def project(self, tokens: Tensor) -> Tensor:
        """Return the tokens unchanged: the connector has already projected them."""
        return tokens

    def outputs(self, encoded: EncodedImages, embeds: Sequence[ImageEmbeds]) -> Any:
        """Return a list with one entry for each sub-image, which these models concatenate and beam search splits."""
        return Adapter.outputs(self, encoded, embeds)


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
