"""InternVL, and the base class of families whose language model reads one token for each cell of a grid.

A cell is a small square of patches that the model folds into one token before the language model. Cells are reduced,
not patches, because a cell cannot lose some of its patches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import MissingSignal, TorinoError
from torino.core.ragged import Ragged
from torino.core.reduction import ReductionBatch
from torino.core.tokens import Origin, VisualTokens
from torino.vlm.adapters.base import Adapter, EncodedImages, ImageEmbeds
from torino.vlm.hooks import CapturedFeatures, TowerLayout, capture


class CellAdapter(Adapter):
    """Models that read one token for each cell of a square grid and project each cell separately.

    A family defines how its cells are computed and projected.
    """

    proportional_attention: ClassVar[bool] = True
    projects_patches: ClassVar[bool] = True
    in_tower_refusal: ClassVar[str] = (
        "its language model reads cells of several patches, and the tower must output all of them"
    )

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model.model  # type: ignore[union-attr]

    @abstractmethod
    def visual_tokens(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Return the cells of every image, tile, crop or frame, in the order of the prompt."""

    @abstractmethod
    def project(self, tokens: Tensor) -> Tensor:
        """Project reduced cells of shape (n, D) to the width of the language model, (n, E)."""

    def encode(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Encode each image, tile, crop or frame as one unit with one placeholder for each cell."""
        tokens = self.visual_tokens(inputs, needs - {"projected"})
        if "projected" in needs:
            with torch.no_grad():
                tokens = [
                    image.with_(signals={**image.signals, "projected": self.project(image.patches).float()})
                    for image in tokens
                ]
        return EncodedImages(tuple(tokens), tuple(len(image) for image in tokens))

    def embed(self, encoded: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce and project; each token takes the placeholder of its anchor, or the last one if it has no anchor."""
        reduced = encoded.reduced(plans)
        projected = Ragged(self.project(reduced.values), reduced.offsets)
        return [
            ImageEmbeds(features, torch.where(plan.anchor < 0, plan.patches - 1, plan.anchor), plan.sizes, plan.patches)
            for features, plan in zip(projected, plans, strict=True)
        ]

    def outputs(self, encoded: EncodedImages, embeds: Sequence[ImageEmbeds]) -> Any:
        """Return all tokens as one tensor of shape (tokens, 1, E), because these models do not accept a list.

        Each token is passed as an image of length one. Beam search can then split them by prompt, however many tokens
        each image has; a tensor of two dimensions would be split in the wrong places.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features = torch.cat([item.features for item in embeds])
        return BaseModelOutputWithPooling(pooler_output=features[:, None])  # type: ignore[arg-type]


def make_cells(cells: Tensor, captured: CapturedFeatures, origin: Origin) -> list[VisualTokens]:
    """Make VisualTokens of cells, shape (images, cells, D), with the signals captured for their patches.

    The CLS attention of a cell is the sum over its patches; its key (or query) is the mean.
    """
    side = isqrt(cells.shape[1])
    if side * side != cells.shape[1]:
        raise TorinoError(
            f"This image has {cells.shape[1]} cells, which do not form a square, and models of this family support "
            "square images only. Use the model's own processor, which makes them square."
        )
    signals = {name: _fold_signal(name, values, side) for name, values in captured.signals.items()}
    folded = CapturedFeatures(captured.states, signals)
    return [
        VisualTokens(
            patches=image,
            grid=(side, side),
            origin=origin,
            cls_attention=folded.signal("cls_attention", i),
            keys=folded.signal("keys", i),
            signals={name: values[i] for name, values in signals.items() if name not in ("cls_attention", "keys")},
        )
        for i, image in enumerate(cells)
    ]


def _fold_signal(name: str, values: Tensor, side: int) -> Tensor:
    """Fold a signal of patches, shape (images, heads, patches) or (images, patches, width), into cells."""
    is_attention = name.startswith("cls_attention")
    dimension = 2 if is_attention else 1
    patches = isqrt(values.shape[dimension]) // side
    parts = values.unflatten(dimension, (side, patches, side, patches))
    if is_attention:
        return parts.sum((3, 5)).flatten(2)
    return parts.mean((2, 4)).flatten(1, 2)


class InternVL(CellAdapter):
    """InternVL: cells are read after the pixel shuffle and reduced before the projector, tile by tile.

    The pixel shuffle concatenates 2×2 patches, so a cell is four times as wide as the tower. The projector processes
    each cell separately; merging happens before it, as in the paper. Tiles, thumbnails and video frames are treated as
    images. The tower stops after the block that ``vision_feature_layer`` selects.
    """

    families: ClassVar[tuple[str, ...]] = ("internvl",)
    inside_refusal: ClassVar[str] = ""

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return ("pixel_values", "image_sizes", "vision_feature_layer", "vision_feature_select_strategy")

    def visual_tokens(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Return the cells of every tile."""
        if "cls" in needs:
            raise MissingSignal(
                "This reducer reads the CLS token, and in InternVL a token is a cell of several patches, which a CLS "
                "token of one patch's width does not match. Choose a reducer that does not need it, such as torino-m."
            )
        tower, pixels = self.inner.vision_tower, inputs["pixel_values"]
        self._check_strategy(inputs)
        parts = _tower_layout(tower)
        block, is_output = self._feature_block(inputs, len(parts.blocks))
        captured = capture(tower, parts, block, needs, lambda: tower(pixel_values=pixels.to(self.inner.dtype)))
        states = tower.layernorm(captured.states) if is_output else captured.states
        patches = states[:, parts.prefix :]
        side = isqrt(patches.shape[1])
        shuffled = self.inner.pixel_shuffle(
            patches.reshape(len(patches), side, side, -1), scale_factor=self.config.downsample_ratio
        )
        # States after the final norm are numbered as one block later, unless the norm is an identity.
        is_normed = is_output and not isinstance(tower.layernorm, torch.nn.Identity)
        return make_cells(shuffled.flatten(1, 2), captured, Origin(parts.name, block + is_normed))

    def project(self, tokens: Tensor) -> Tensor:
        """Apply the projector: a norm and two linear layers."""
        return self.inner.multi_modal_projector(tokens)

    def _feature_block(self, inputs: Mapping[str, Any], blocks: int) -> tuple[int, bool]:
        """Return the zero-based block of the feature layer, and whether the tower's final norm follows it."""
        given = inputs.get("vision_feature_layer")
        layer: object = self.config.vision_feature_layer if given is None else given
        if not isinstance(layer, int):
            raise TorinoError(
                f"vision_feature_layer is {layer}: this model reads several tower layers at once. Torino supports "
                "models that read one layer."
            )
        # −1 is the tower's output; every other number is a hidden state, and hidden state 0 is the input of block 0.
        return (blocks - 1, True) if layer == -1 else ((layer % (blocks + 1)) - 1, False)

    def _check_strategy(self, inputs: Mapping[str, Any]) -> None:
        strategy = inputs.get("vision_feature_select_strategy") or self.config.vision_feature_select_strategy
        if strategy != "default":
            raise TorinoError(
                f"vision_feature_select_strategy is {strategy!r}, which leaves the CLS token among the patches, and a "
                'CLS token cannot be folded into cells. Use "default".'
            )


def _tower_layout(tower: Any) -> TowerLayout:
    return TowerLayout(
        blocks=tower.encoder.layer,
        prefix=1,
        has_cls=True,
        heads=int(tower.config.num_attention_heads),
        # After the norms of queries and keys, which are identities in models without them.
        query=lambda block: block.attention.q_norm,  # type: ignore[union-attr, return-value]
        key=lambda block: block.attention.k_norm,  # type: ignore[union-attr, return-value]
        name=str(getattr(tower.config, "_name_or_path", "") or ""),
    )
