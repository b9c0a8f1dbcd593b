"""InternVL, and what it shares with other families whose language model reads one token for each cell of a grid.

A cell is a small square of patches that the model folds into one token before its language model sees it. Reduction
happens on cells: pruning patches inside one would leave it incomplete.
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
from torino.vlm.hooks import CapturedFeatures, TowerLayout, tap


class CellAdapter(Adapter):
    """Models that read one token for each cell of a square grid, and project each of them alone.

    A family says how it sees its cells and how it projects them; the rest is here.
    """

    closed: ClassVar[str] = "its language model reads cells of several patches, which must all come out of the tower"

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model.model  # type: ignore[union-attr]

    @abstractmethod
    def see(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Cells of every picture, in the order of the prompt: of an image, a tile, a crop or a frame."""

    @abstractmethod
    def project(self, tokens: Tensor) -> Tensor:
        """Take reduced cells of shape (n, D) to the language model's width, (n, E)."""

    def look(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Every picture is one unit, with as many placeholders as it has cells."""
        tokens = self.see(inputs, needs)
        return EncodedImages(tuple(tokens), tuple(len(picture) for picture in tokens))

    def splice(self, sight: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce, project all pictures in one go, and place each token where its anchor was; one of no place last."""
        reduced = sight.reduced(plans)
        features = Ragged(self.project(reduced.values), reduced.offsets)
        return [
            ImageEmbeds(feature, torch.where(plan.anchor < 0, plan.patches - 1, plan.anchor))
            for feature, plan in zip(features, plans, strict=True)
        ]

    def outputs(self, sight: EncodedImages, splices: Sequence[ImageEmbeds]) -> Any:
        """All tokens as one tensor of shape (tokens, 1, E): these models take no list.

        Each token poses as a picture of length one. That is how beam search can part them by prompt however many
        tokens each picture has left; a tensor of two dimensions would be cut in the wrong places.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features = torch.cat([splice.features for splice in splices])
        return BaseModelOutputWithPooling(pooler_output=features[:, None])  # type: ignore[arg-type]


def cells_of(cells: Tensor, seen: CapturedFeatures, origin: Origin) -> list[VisualTokens]:
    """Make VisualTokens of cells, shape (pictures, cells, D), with what was tapped in the patches inside them.

    A cell's share of the CLS token's attention is the sum over its patches, its key (or query) their mean.
    """
    side = isqrt(cells.shape[1])
    if side * side != cells.shape[1]:
        raise TorinoError(
            f"A picture of {cells.shape[1]} cells is not square, and models of this family fold square pictures only. "
            "Use the model's own processor, which makes them square."
        )
    signals = {name: _fold(name, values, side) for name, values in seen.signals.items()}
    folded = CapturedFeatures(seen.states, signals)
    return [
        VisualTokens(
            patches=picture,
            grid=(side, side),
            origin=origin,
            cls_attention=folded.of("cls_attention", i),
            keys=folded.of("keys", i),
            signals={name: values[i] for name, values in signals.items() if name not in ("cls_attention", "keys")},
        )
        for i, picture in enumerate(cells)
    ]


def _fold(name: str, values: Tensor, side: int) -> Tensor:
    """Take a signal of patches to cells: (pictures, heads, patches) or (pictures, patches, width) in."""
    is_share = name.startswith("cls_attention")
    dimension = 2 if is_share else 1
    inside = isqrt(values.shape[dimension]) // side
    parts = values.unflatten(dimension, (side, inside, side, inside))
    # a share of attention adds up; a key stands for itself
    if is_share:
        return parts.sum((3, 5)).flatten(2)
    return parts.mean((2, 4)).flatten(1, 2)


class InternVL(CellAdapter):
    """InternVL: tapped after the pixel shuffle, reduced before the projector, tile by tile.

    The pixel shuffle lays 2×2 patches side by side, so a cell is four times as wide as the tower. The projector works
    on each cell alone; merging happens before it, as in the paper. Tiles, thumbnails and video frames are pictures
    like any other. The tower is stopped after the block that ``vision_feature_layer`` names.
    """

    families: ClassVar[tuple[str, ...]] = ("internvl",)

    def see(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> list[VisualTokens]:
        """Cells of every tile."""
        if "cls" in needs:
            raise MissingSignal(
                "This reducer reads the CLS token, and here a token is a cell of several patches side by side, among "
                "which a CLS token of one patch's width has no place. Choose a reducer that does without, such as "
                "torino-m."
            )
        tower, pixels = self.inner.vision_tower, inputs["pixel_values"]
        self._refuse_whole_sequence(inputs)
        parts = _tower_layout(tower)
        block, ends = self._tap_block(inputs, len(parts.blocks))
        seen = tap(tower, parts, block, needs, lambda: tower(pixel_values=pixels.to(self.inner.dtype)))
        states = tower.layernorm(seen.states) if ends else seen.states
        patches = states[:, parts.prefix :]
        side = isqrt(patches.shape[1])
        shuffled = self.inner.pixel_shuffle(
            patches.reshape(len(patches), side, side, -1), scale_factor=self.config.downsample_ratio
        )
        # the norm after the last block is one step more than the block itself, unless it does nothing
        normed = ends and not isinstance(tower.layernorm, torch.nn.Identity)
        return cells_of(shuffled.flatten(1, 2), seen, Origin(parts.name, block + normed))

    def project(self, tokens: Tensor) -> Tensor:
        """Norm and two layers, cell by cell."""
        return self.inner.multi_modal_projector(tokens)

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return ("pixel_values", "image_sizes", "vision_feature_layer", "vision_feature_select_strategy")

    def _tap_block(self, inputs: Mapping[str, Any], blocks: int) -> tuple[int, bool]:
        """Zero-based block to tap, and whether the tower's last norm comes after it."""
        given = inputs.get("vision_feature_layer")
        layer: object = self.config.vision_feature_layer if given is None else given
        if not isinstance(layer, int):
            raise TorinoError(
                f"This model reads several tower layers at once ({layer}), which have no single tap. "
                "Torino reduces models that read one layer."
            )
        # -1 is the tower's own output here, and every other number a hidden state; state 0 enters block 0
        return (blocks - 1, True) if layer == -1 else ((layer % (blocks + 1)) - 1, False)

    def _refuse_whole_sequence(self, inputs: Mapping[str, Any]) -> None:
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
        # after the norms of queries and keys, which pass everything on where a model has none
        query=lambda block: block.attention.q_norm,  # type: ignore[union-attr, return-value]
        key=lambda block: block.attention.k_norm,  # type: ignore[union-attr, return-value]
        name=str(getattr(tower.config, "_name_or_path", "") or ""),
    )
