"""LLaVA-1.5 and its kin: one tower, patch tokens at one layer, a projector that works token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torino.core.errors import MissingSignal, TorinoError
from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import Origin, VisualTokens
from torino.reducers import InTowerReducer
from torino.vlm.adapters.base import Adapter, EncodedImages, ImageEmbeds
from torino.vlm.hooks import TowerLayout, tap, tower_layout
from torino.vlm.in_tower import run_in_tower


class Llava(Adapter):
    """LLaVA-1.5: tapped at ``vision_feature_layer``, reduced before the projector.

    The projector works on each token alone, so pruning before it gives what pruning after it would; merging
    happens where the paper merges, in the tower's own space. The tower is stopped after the tap block.
    """

    families: ClassVar[tuple[str, ...]] = ("llava",)
    proportional_attention: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    closed: ClassVar[str] = ""

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model if hasattr(self.model, "vision_tower") else self.model.model

    def tap_block(self, parts: TowerLayout, layer: object = None) -> int:
        """Zero-based block whose output the projector reads; hidden state 0 enters block 0."""
        layer = self.config.vision_feature_layer if layer is None else layer
        if not isinstance(layer, int):
            raise TorinoError(
                f"This model reads several tower layers at once ({layer}), which have no single tap. "
                "Torino reduces models that read one layer (vision_feature_layer=-2)."
            )
        states = len(parts.blocks) + 1
        if not -states <= layer < states:
            raise TorinoError(
                f"vision_feature_layer is {layer}, and the tower has hidden states {-states} to {states - 1}."
            )
        return (layer % states) - 1

    def see(self, pixels: Tensor, needs: frozenset[str], **options: Any) -> list[VisualTokens]:
        """Tokens at the tap, one VisualTokens for each picture in ``pixels`` (pictures, 3, height, width)."""
        return self._see(pixels, needs, **options)[0]

    def _see(self, pixels: Tensor, needs: frozenset[str], **options: Any) -> tuple[list[VisualTokens], Tensor]:
        """Tokens at the tap, and the registers of each picture, shape (pictures, registers, D)."""
        tower = self.inner.vision_tower
        parts, block, pixels, grid = self._at(pixels, options)
        seen = tap(tower, parts, block, needs - {"projected"}, lambda: tower(pixels, **options))
        if "projected" in needs:  # the patches as the language model would read them
            with torch.no_grad():
                seen.signals["projected"] = self.inner.multi_modal_projector(seen.states[:, parts.prefix :]).float()
        images = [
            VisualTokens(
                patches=states[parts.prefix :],
                grid=grid,
                origin=Origin(parts.name, block),
                cls=states[0] if parts.has_cls else None,
                cls_attention=seen.of("cls_attention", i),
                keys=seen.of("keys", i),
                signals={name: all_[i] for name, all_ in seen.signals.items() if name not in ("cls_attention", "keys")},
            )
            for i, states in enumerate(seen.states)
        ]
        return images, seen.states[:, int(parts.has_cls) : parts.prefix]

    def _at(self, pixels: Tensor, options: dict[str, Any]) -> tuple[TowerLayout, int, Tensor, tuple[int, int]]:
        """The tower's parts, the block to tap, the pixels as it takes them, their grid; used-up options are gone."""
        tower = self.inner.vision_tower
        parts = tower_layout(tower)
        block = self.tap_block(parts, options.pop("vision_feature_layer", None))
        strategy = options.pop("vision_feature_select_strategy", None) or self.config.vision_feature_select_strategy
        if strategy == "full" and parts.prefix:
            raise TorinoError(
                'This model feeds the CLS token to its language model (vision_feature_select_strategy="full"), which '
                'torino does not reduce. Use "default".'
            )
        if strategy == "default" and not parts.prefix:
            raise TorinoError(
                'vision_feature_select_strategy="default" leaves out the first token of the tower: a CLS token in '
                f'other towers, a patch in {type(tower).__name__}. Use "full", here and in the processor.'
            )
        like = next(parameter for parameter in tower.parameters() if parameter.is_floating_point())
        # weights that are offloaded live nowhere; whoever brings them brings the pixels too
        pixels = pixels.to(like.dtype) if like.is_meta else pixels.to(like)
        side = tower.config.patch_size
        return parts, block, pixels, (pixels.shape[-2] // side, pixels.shape[-1] // side)

    def project(self, tokens: Ragged) -> Ragged:
        """Project the reduced tokens of all images in one go."""
        return Ragged(self.inner.multi_modal_projector(tokens.values), tokens.offsets)

    def look(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Every image is one unit. Registers, where a tower has them, are tokens of the prompt and all stay."""
        tokens, registers = self._see(inputs["pixel_values"], needs, **_options(inputs))
        return EncodedImages(tuple(tokens), tuple(registers.shape[1] + len(image) for image in tokens), registers)

    def encode_in_tower(
        self, inputs: Mapping[str, Any], reducer: InTowerReducer
    ) -> tuple[EncodedImages, ReductionBatch]:
        """The same with a reducer at work in the blocks up to the tap."""
        if self.closed:
            return super().encode_in_tower(inputs, reducer)
        tower, options = self.inner.vision_tower, _options(inputs)
        parts, block, pixels, grid = self._at(inputs["pixel_values"], options)
        passed = run_in_tower(tower, parts, block, reducer, grid, lambda: tower(pixels, **options))
        registers = passed.states[:, int(parts.has_cls) : parts.prefix]
        full = registers.shape[1] + grid[0] * grid[1]
        return EncodedImages(
            (), (full,) * len(pixels), registers, came=tuple(passed.states[:, parts.prefix :])
        ), passed.plans

    def splice(self, sight: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce, project, and place each token where its anchor was; a token of no place takes the last one."""
        registers: Tensor = sight.extra
        first = registers.shape[1]
        cls = [image.cls for image in sight.tokens if image.cls is not None]
        reads_cls = next((plan.by for plan in plans if bool((plan.sources == plan.patches).any())), None)
        if reads_cls and not cls:
            raise MissingSignal(
                f"{reads_cls} keeps the CLS token, and the tower {type(self.inner.vision_tower).__name__} has none. "
                "Choose a reducer that does without, such as torino-m."
            )
        reduced = sight.reduced(plans, cls or None)
        if first:
            reduced = Ragged.of([torch.cat(pair) for pair in zip(registers, reduced, strict=True)])
        return [
            ImageEmbeds(feature, torch.cat([torch.arange(first), first + _places(plan)]))
            for feature, plan in zip(self.project(reduced), plans, strict=True)
        ]

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels."""
        return ("pixel_values", "image_sizes", "vision_feature_layer", "vision_feature_select_strategy")


def _options(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call says about the tower."""
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    return {name: inputs[name] for name in names if inputs.get(name) is not None}


def _places(plan: Reduction) -> Tensor:
    """The patch whose place each token takes; a token of no place, such as CLS, takes the last."""
    last = plan.patches - 1
    return torch.where(plan.anchor < 0, last, plan.anchor).clamp(max=last)
