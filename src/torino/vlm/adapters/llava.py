"""LLaVA-1.5 and similar models: one tower, one feature layer, and a projector that processes each token separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import MissingSignal, TorinoError
from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import Origin, VisualTokens
from torino.reducers import Downsample, InTowerReducer, KeepShare
from torino.vlm.adapters.base import Adapter, EncodedImages, ImageEmbeds
from torino.vlm.downsample import resize
from torino.vlm.hooks import TowerLayout, capture, tower_layout
from torino.vlm.in_tower import run_in_tower


class Llava(Adapter):
    """LLaVA-1.5: features are read at ``vision_feature_layer`` and reduced before the projector.

    The projector processes each token separately, so pruning before it equals pruning after it. Merging happens in the
    feature space of the tower, as in the paper. The tower stops after the block of the feature layer.
    """

    families: ClassVar[tuple[str, ...]] = ("llava",)
    proportional_attention: ClassVar[bool] = True
    projects_patches: ClassVar[bool] = True
    shares_prefix: ClassVar[bool] = True
    separates_images: ClassVar[bool] = True
    joins_frames: ClassVar[bool] = True
    in_tower_refusal: ClassVar[str] = ""
    inside_refusal: ClassVar[str] = ""
    prompt_template: ClassVar[str] = "USER: {images}{question} ASSISTANT:"
    image_suffix: ClassVar[str] = "\n"

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model if hasattr(self.model, "vision_tower") else self.model.model

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return ("pixel_values", "image_sizes", "vision_feature_layer", "vision_feature_select_strategy")

    def feature_block(self, parts: TowerLayout, layer: object = None) -> int:
        """Return the zero-based block whose output the projector reads; −1 is the input of the first block."""
        layer = self.config.vision_feature_layer if layer is None else layer
        if not isinstance(layer, int):
            raise TorinoError(
                f"vision_feature_layer is {layer}: this model reads several tower layers at once. Torino supports "
                "models that read one layer, such as vision_feature_layer=-2."
            )
        states = len(parts.blocks) + 1
        if not -states <= layer < states:
            raise TorinoError(
                f"vision_feature_layer must be from {-states} to {states - 1} for this tower, got {layer}."
            )
        return (layer % states) - 1  # hidden state 0 is the input of block 0

    def visual_tokens(self, pixels: Tensor, needs: frozenset[str], **options: Any) -> list[VisualTokens]:
        """Return the tokens at the feature layer for each image in ``pixels`` (images, 3, height, width)."""
        return self._encode_pixels(pixels, needs, options)[0]

    def project(self, tokens: Ragged) -> Ragged:
        """Project the reduced tokens of all images at once."""
        return Ragged(self.inner.multi_modal_projector(tokens.values), tokens.offsets)

    def encode(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Encode each image as one unit. Registers, if the tower has any, are part of the prompt and are all kept."""
        tokens, registers = self._encode_pixels(inputs["pixel_values"], needs, tower_options(inputs))
        return EncodedImages(tuple(tokens), tuple(registers.shape[1] + len(image) for image in tokens), registers)

    def encode_smaller(
        self, inputs: Mapping[str, Any], reducer: Downsample | KeepShare
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Encode smaller images; CLIP and SigLIP interpolate their position embeddings, DINOv2 always does."""
        if self.tiles:
            return super().encode_smaller(inputs, reducer)
        tower, options = self.inner.vision_tower, tower_options(inputs)
        parts, block, pixels, grid = self._prepare_tower(inputs["pixel_values"], options)
        small, plan = reducer.plan_grid(grid)
        side = int(tower.config.patch_size)
        pixels = resize(pixels, (small[0] * side, small[1] * side))
        if small != grid and not str(tower.config.model_type).startswith("dinov2"):
            options["interpolate_pos_encoding"] = True
        states = capture(tower, parts, block, frozenset(), lambda: tower(pixels, **options)).states
        registers = states[:, int(parts.has_cls) : parts.prefix]
        full = registers.shape[1] + plan.patches
        tokens = tuple(states[:, parts.prefix :])
        encoded = EncodedImages((), (full,) * len(tokens), registers, reduced_tokens=tokens)
        return encoded, ReductionBatch.of([plan] * len(tokens))

    def encode_in_blocks(
        self, inputs: Mapping[str, Any], reducer: InTowerReducer
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Encode the images with a reducer active in the blocks up to the feature layer."""
        if self.in_tower_refusal:
            return super().encode_in_blocks(inputs, reducer)
        tower, options = self.inner.vision_tower, tower_options(inputs)
        parts, block, pixels, grid = self._prepare_tower(inputs["pixel_values"], options)
        output = run_in_tower(tower, parts, block, reducer, grid, lambda: tower(pixels, **options))
        registers = output.states[:, int(parts.has_cls) : parts.prefix]
        full = registers.shape[1] + grid[0] * grid[1]
        encoded = EncodedImages(
            (), (full,) * len(pixels), registers, reduced_tokens=tuple(output.states[:, parts.prefix :])
        )
        return encoded, output.plans

    def embed(self, encoded: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce and project; each token takes the placeholder of its anchor, or the last one if it has no anchor."""
        registers: Tensor = encoded.extra
        count = registers.shape[1]
        reduced = encoded.reduced(plans, self.cls_tokens(encoded, plans))
        if count:
            reduced = Ragged.of([torch.cat(pair) for pair in zip(registers, reduced, strict=True)])
        return [
            ImageEmbeds(
                features,
                torch.cat([torch.arange(count), count + _anchor_slots(plan)]),
                torch.cat([torch.zeros(count, dtype=torch.int64), plan.sizes]),
                plan.patches,
            )
            for features, plan in zip(self.project(reduced), plans, strict=True)
        ]

    def cls_tokens(self, encoded: EncodedImages, plans: ReductionBatch) -> list[Tensor] | None:
        """Return the CLS token of each unit, or None without one; raise MissingSignal if a plan keeps a missing one."""
        cls = [unit.cls for unit in encoded.tokens if unit.cls is not None]
        keeps_cls = next((plan.by for plan in plans if bool((plan.sources == plan.patches).any())), None)
        if keeps_cls and not cls:
            raise MissingSignal(
                f"{keeps_cls} keeps the CLS token, and the tower {type(self.inner.vision_tower).__name__} has none. "
                "Choose a reducer that does not need it, such as torino-m."
            )
        return cls or None

    def _encode_pixels(
        self, pixels: Tensor, needs: frozenset[str], options: dict[str, Any]
    ) -> tuple[list[VisualTokens], Tensor]:
        """Return the tokens at the feature layer and the registers of each image, shape (images, registers, D)."""
        tower = self.inner.vision_tower
        parts, block, pixels, grid = self._prepare_tower(pixels, options)
        captured = capture(tower, parts, block, needs - {"projected"}, lambda: tower(pixels, **options))
        if "projected" in needs:  # the patches in the input space of the language model
            with torch.no_grad():
                projected: Tensor = self.inner.multi_modal_projector(captured.states[:, parts.prefix :])
            captured.signals["projected"] = projected.float()
        named_fields = ("cls_attention", "keys")
        tokens = [
            VisualTokens(
                patches=states[parts.prefix :],
                grid=grid,
                origin=Origin(parts.name, block),
                cls=states[0] if parts.has_cls else None,
                cls_attention=captured.signal("cls_attention", i),
                keys=captured.signal("keys", i),
                signals={name: values[i] for name, values in captured.signals.items() if name not in named_fields},
            )
            for i, states in enumerate(captured.states)
        ]
        return tokens, captured.states[:, int(parts.has_cls) : parts.prefix]

    def _prepare_tower(
        self, pixels: Tensor, options: dict[str, Any]
    ) -> tuple[TowerLayout, int, Tensor, tuple[int, int]]:
        """Return the tower's layout, its feature block, the pixels in its dtype and on its device, and their grid.

        Options that this method consumes are removed from ``options``.
        """
        tower = self.inner.vision_tower
        parts = tower_layout(tower)
        block = self.feature_block(parts, options.pop("vision_feature_layer", None))
        strategy = options.pop("vision_feature_select_strategy", None) or self.config.vision_feature_select_strategy
        if strategy == "full" and parts.prefix:
            raise TorinoError(
                'This model feeds the CLS token to its language model (vision_feature_select_strategy="full"), which '
                'torino does not support. Use "default".'
            )
        if strategy == "default" and not parts.prefix:
            raise TorinoError(
                'vision_feature_select_strategy="default" drops the first token of the tower, which is a CLS token in '
                f'other towers but a patch in {type(tower).__name__}. Use "full" in the model and in the processor.'
            )
        weight = next(parameter for parameter in tower.parameters() if parameter.is_floating_point())
        # Offloaded weights are on the meta device; the library that loads them also moves the pixels.
        pixels = pixels.to(weight.dtype) if weight.is_meta else pixels.to(weight)
        side = tower.config.patch_size
        return parts, block, pixels, (pixels.shape[-2] // side, pixels.shape[-1] // side)


def tower_options(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call that concern the tower."""
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    return {name: inputs[name] for name in names if inputs.get(name) is not None}


def _anchor_slots(plan: Reduction) -> Tensor:
    """Return the patch whose placeholder each token takes; a token without a position, such as CLS, takes the last."""
    last = plan.patches - 1
    return torch.where(plan.anchor < 0, last, plan.anchor).clamp(max=last)
