"""LLaVA-NeXT: an image is a base view and tiles, packed into rows that end in newline tokens.

**Units.** Each view (the base view and every tile) is one unit, so a budget counts tokens per view. A reducer with one
budget for all views of an image (``shares_views``, as HiRED has) receives them together with their layout, and may
leave views without tokens, but not the image. The tower encodes all tiles of a call as one batch and stops after the
block of the feature layer. Tokens are reduced before the projector, as in LLaVA-1.5.

**Packing.** The patch at each placeholder is found by running the model's own ``pack_image_features`` on patch indices,
so its packing rules are not repeated here. A reduced token takes the placeholder of its anchor; a token without an
anchor takes the last one of its tile. Rows of the image run across tiles, so the tokens of an image are sorted by
placeholder.

**Unpadding.** The model removes the patches that show only the bars added to fit the image into its tiles. They are
removed before planning too: a unit is the visible part of a tile, which is always a rectangle. No token is spent on
bars or blended with them, and a tile that shows only padding is not a unit.

**Newlines.** ``LlavaNext.newlines`` selects which newline tokens are kept:

========  =================================================================
``rows``  those of rows that still have a token (the default)
``all``   all of them, so that the language model can still count the rows
``none``  none of them
========  =================================================================

Newlines are not part of any ``Reduction``; the trace counts them among the tokens of an image, before and after. To use
another rule, register a subclass::

    class AllNewlines(LlavaNext):
        newlines = "all"

    register_adapter("llava_next")(AllNewlines)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter, BadTokens, TorinoError
from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.vlm.adapters.encoded import EncodedImages, ImageEmbeds, Tiling
from torino.vlm.adapters.llava import Llava, tower_options
from torino.vlm.hooks import tower_layout

Newlines = Literal["rows", "all", "none"]
NEWLINE = float("nan")  # marks a newline among patch indices


@dataclass(frozen=True, eq=False)
class PackedImage:
    """The content of each placeholder of one image.

    Attributes
    ----------
    patch : Tensor of shape (full,), int64
        Index of the patch, counted through the tiles of the image; −1 where there is no unchanged patch.
    newline : Tensor of shape (full,), bool
        Whether the placeholder is a newline.
    detail : Tensor of shape (full,), bool
        Whether the placeholder belongs to a tile, not to the base view or a newline.
    resized : bool
        Whether the tiles are resized after the projector, so that their placeholders hold no patches.
    """

    patch: Tensor
    newline: Tensor
    detail: Tensor
    resized: bool = False

    def __len__(self) -> int:
        """Return the number of placeholders."""
        return len(self.patch)

    @cached_property
    def row(self) -> Tensor:
        """Row of each placeholder, counted by newlines; −1 in the base view of an image with tiles, which has none."""
        row = self.newline.long().cumsum(0) - self.newline.long()
        is_base = ~self.newline & ~self.detail
        return torch.where(is_base, -1, row) if bool(self.detail.any()) else row


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit to plan: its tokens, the placeholder of each of its patches, and the index of its view."""

    tokens: VisualTokens
    slots: Tensor
    view: int

    def anchor_slots(self, anchor: Tensor) -> Tensor:
        """Return the placeholders of anchors; a token without an anchor takes the last one of the unit."""
        has_anchor = (anchor >= 0) & (anchor < len(self.slots))
        return self.slots[torch.where(has_anchor, anchor, len(self.slots) - 1)]


@dataclass(frozen=True, eq=False)
class TiledImage:
    """One image: its packing, its units, the complete tokens of all its tiles, and its size in pixels."""

    packing: PackedImage
    units: tuple[Unit, ...]
    tiles: tuple[VisualTokens, ...]
    size: Sequence[int]


class LlavaNext(Llava):
    """LLaVA-NeXT: tiles are planned separately and packed as the model packs them; see the module for newlines.

    Parameters
    ----------
    model : a Hugging Face LLaVA-NeXT model
    newlines : {"rows", "all", "none"}, optional
        The newline tokens to keep; the class attribute by default.
    """

    families: ClassVar[tuple[str, ...]] = ("llava_next",)
    inside_refusal: ClassVar[str] = "its images are arranged in tiles, which have a budget each"
    shares_prefix: ClassVar[bool] = False  # tested with LLaVA-1.5 only
    joins_frames: ClassVar[bool] = False
    separates_images: ClassVar[bool] = False  # the tiles of an image can depend on the others
    tiles: ClassVar[bool] = True
    prompt_template: ClassVar[str] = ""  # it depends on the language model
    in_tower_refusal: ClassVar[str] = "its tiles are cropped after the tower, and merged tokens cannot be cropped"
    newlines: Newlines = "rows"

    def __init__(self, model: nn.Module, newlines: Newlines | None = None) -> None:
        super().__init__(model)
        self.newlines = newlines or self.newlines
        if self.newlines not in get_args(Newlines):
            known = ", ".join(map(repr, get_args(Newlines)))
            raise BadParameter(f"newlines must be one of {known}, got {self.newlines!r}.")

    # ------------------------------------------------------------------ the model's own handling of an image

    def count_tiles(self, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]) -> list[int]:
        """Return the number of tiles of each image, including the base view."""
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        side = self.config.vision_config.image_size
        return [image_size_to_num_patches(list(size), self.config.image_grid_pinpoints, side) for size in sizes]

    def tile_layout(self, image: TiledImage) -> tuple[int, int]:
        """Return the rows and columns of an image's tiles; (0, 0) for an image that has only a base view."""
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        if len(image.tiles) == 1:
            return (0, 0)
        side, pinpoints = self.config.vision_config.image_size, self.config.image_grid_pinpoints
        rows, columns = get_anyres_image_grid_shape(list(image.size), pinpoints, side)
        return int(rows), int(columns)

    def pack(
        self, features: Sequence[Tensor], sizes: Sequence[Sequence[int]], newline: Tensor, inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Pack the features (tiles, patches, F) of each image as the model does; return (full, F) for each image."""
        packed, _ = self.inner.pack_image_features(
            list(features), sizes, vision_feature_select_strategy=self._strategy(inputs), image_newline=newline
        )
        return packed

    def find_packing(
        self, counts: Sequence[int], patches: int, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]
    ) -> list[PackedImage]:
        """Find how each image is packed, by packing the indices of its patches instead of their features."""
        numbered: list[Tensor] = []
        for count in counts:
            # float64 represents all these indices exactly and passes through any arithmetic of the model.
            number = torch.arange(count * patches, dtype=torch.float64).view(count, patches)
            numbered.append(torch.stack([number, (number >= patches).double()], 2))
        packed = self.pack(numbered, sizes, torch.full((2,), NEWLINE, dtype=torch.float64), inputs)
        return [
            PackedImage(number.nan_to_num(nan=-1).long(), number.isnan(), is_detail.nan_to_num() > 0.5)
            for number, is_detail in (values.T for values in packed)
        ]

    def make_units(
        self, packing: PackedImage, tiles: Sequence[VisualTokens], size: Sequence[int], inputs: Mapping[str, Any]
    ) -> list[Unit]:
        """Return the tiles of an image, each cropped to its visible part."""
        units: list[Unit] = []
        for number, tile in enumerate(tiles):
            slots = (packing.patch // len(tile) == number).nonzero()[:, 0]
            if len(slots):
                visible, order = (packing.patch[slots] - number * len(tile)).sort()
                units.append(Unit(crop_tile(tile, visible), slots[order], number))
        return units

    # ------------------------------------------------------------------ the adapter interface

    def encode(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Encode each tile as one unit, cropped to its visible part."""
        self._check_strategy(inputs)
        if inputs.get("image_sizes") is None:
            raise BadTokens(
                "image_sizes is missing, and the arrangement of the tiles depends on it. Pass all outputs of the "
                "processor."
            )
        sizes: list[list[int]] = torch.as_tensor(inputs["image_sizes"]).tolist()
        counts = self.count_tiles(sizes, inputs)
        pixels = flatten_tiles(inputs["pixel_values"], counts)
        all_tiles = iter(self.visual_tokens(pixels, needs, **tower_options(inputs)))
        tiles = [tuple(next(all_tiles) for _ in range(count)) for count in counts]
        packings = self.find_packing(counts, len(tiles[0][0]), sizes, inputs)
        images = [
            TiledImage(packing, tuple(self.make_units(packing, image_tiles, size, inputs)), image_tiles, size)
            for packing, image_tiles, size in zip(packings, tiles, sizes, strict=True)
        ]
        tokens = tuple(unit.tokens for image in images for unit in image.units)
        tilings = tuple(Tiling(tuple(unit.view for unit in image.units), self.tile_layout(image)) for image in images)
        return EncodedImages(tokens, tuple(len(packing) for packing in packings), (images, inputs), tilings)

    def embed(self, encoded: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce and project; each token takes the placeholder of its anchor, and rows end in their newlines."""
        images: list[TiledImage] = encoded.extra[0]
        remaining = iter(plans)
        planned = [[(unit, next(remaining)) for unit in image.units] for image in images]
        counts = [sum(len(plan) for _, plan in units) for units in planned]
        if 0 in counts:
            raise TorinoError(
                f"{plans[0].by} kept no token of image {counts.index(0)}, and the model needs at least one of each "
                "image. Choose a reducer that keeps at least one token of an image."
            )
        table, rows = self._feature_table(encoded, plans, planned)
        embeds: list[ImageEmbeds] = []
        for image, units, image_rows in zip(images, planned, rows.split(counts), strict=True):
            slots = torch.cat([unit.anchor_slots(plan.anchor) for unit, plan in units])
            newlines = self._kept_newlines(image.packing, slots)
            slots, image_rows = torch.cat([slots, newlines]), torch.cat([image_rows, torch.zeros_like(newlines)])
            sizes = torch.cat([*(plan.sizes for _, plan in units), torch.zeros_like(newlines)])
            order = slots.argsort(stable=True)
            features = table.index_select(0, image_rows[order].to(table.device))
            patches = sum(plan.patches for _, plan in units)
            embeds.append(ImageEmbeds(features, slots[order], sizes[order], patches))
        return embeds

    # ------------------------------------------------------------------ helpers

    def _feature_table(
        self, encoded: EncodedImages, plans: ReductionBatch, planned: Sequence[Sequence[tuple[Unit, Reduction]]]
    ) -> tuple[Tensor, Tensor]:
        """Return a table of features, with the newline in row 0, and the row of each planned token."""
        reduced = plans.apply([unit.patches for unit in encoded.tokens], self.cls_tokens(encoded, plans)).values
        # The model's own features are used where placeholders hold no patches, and for an image that keeps all tokens.
        # The result then equals the stock model exactly; a matrix product with fewer rows may round differently.
        stock_images = {
            number: image
            for number, image in enumerate(encoded.extra[0])
            if image.packing.resized or all(is_identity(plan) for _, plan in planned[number])
        }
        stock = self._stock_features(stock_images, encoded.extra[1])
        begin, height = dict[int, int](), 1
        for number, features in stock.items():
            begin[number], height = height, height + len(features)
        rows = torch.cat(
            [
                torch.where(is_single_patch(plan), begin[number] + unit.anchor_slots(first_source(plan)), -1)
                if number in begin
                else torch.full((len(plan),), -1)
                for number, units in enumerate(planned)
                for unit, plan in units
            ]
        )
        projected = (rows < 0).nonzero()[:, 0]
        rows[projected] = torch.arange(height, height + len(projected))
        table = list(stock.values())
        if len(projected):
            table.append(self.project(Ragged.of([reduced.index_select(0, projected.to(reduced.device))])).values)
        return torch.cat([self.inner.image_newline[None].to(table[0]), *table]), rows

    def _stock_features(self, images: Mapping[int, TiledImage], inputs: Mapping[str, Any]) -> dict[int, Tensor]:
        """Return the features that the unreduced model computes for some images."""
        if not images:
            return {}
        states = torch.stack([tile.patches for image in images.values() for tile in image.tiles])
        features: Tensor = self.inner.multi_modal_projector(states)
        split = features.split([len(image.tiles) for image in images.values()])
        sizes = [image.size for image in images.values()]
        return dict(zip(images, self.pack(split, sizes, self.inner.image_newline, inputs), strict=True))

    def _kept_newlines(self, packing: PackedImage, slots: Tensor) -> Tensor:
        """Return the placeholders of the newlines to keep, given the placeholders of the tokens."""
        if self.newlines == "none":
            return slots[:0]
        kept = packing.newline
        if self.newlines == "rows":
            had_patches = torch.isin(packing.row, packing.row[~packing.newline])
            has_tokens = torch.isin(packing.row, packing.row[slots])
            kept = kept & (has_tokens | ~had_patches)  # a row that never had a patch keeps its newline
        return kept.nonzero()[:, 0]

    def _strategy(self, inputs: Mapping[str, Any]) -> str:
        return inputs.get("vision_feature_select_strategy") or self.config.vision_feature_select_strategy

    def _check_strategy(self, inputs: Mapping[str, Any]) -> None:
        """Refuse towers with registers, which the model would treat as patches; encoding refuses other conflicts."""
        prefix = tower_layout(self.inner.vision_tower).prefix
        if prefix > 1 and self._strategy(inputs) == "default":
            raise TorinoError(
                f'vision_feature_select_strategy="default" drops one token, and this tower has {prefix} before its '
                "patches, so the remaining tokens do not form the grid of a tile. Use a tower without registers."
            )


def flatten_tiles(pixels: object, counts: Sequence[int]) -> Tensor:
    """Concatenate the tiles of all images and drop those that only pad the batch.

    Parameters
    ----------
    pixels : Tensor of shape (images, most tiles, 3, height, width) or (tiles, 3, height, width)
    counts : sequence of int
        Number of tiles of each image.
    """
    if not isinstance(pixels, Tensor) or pixels.ndim not in (4, 5):
        got = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise BadTokens(
            "pixel_values must be a tensor of shape (tiles, 3, height, width) or (images, tiles, 3, height, width), "
            f"got {got}."
        )
    if pixels.ndim == 5 and len(pixels) == len(counts):
        pixels = torch.cat([tiles[:count] for tiles, count in zip(pixels, counts, strict=True)])
    if pixels.ndim == 5 or len(pixels) != sum(counts):
        raise BadTokens(
            f"image_sizes describes {len(counts)} images of {', '.join(map(str, counts))} tiles, and pixel_values has "
            f"shape {tuple(pixels.shape)}, which does not match. Pass both as the processor returned them."
        )
    return pixels


def crop_tile(tile: VisualTokens, visible: Tensor) -> VisualTokens:
    """Crop a tile and its signals to the given patches, which form a rectangle."""
    if len(visible) == len(tile):
        return tile
    columns = tile.grid[1]
    grid = (len((visible // columns).unique()), len((visible % columns).unique()))
    index = visible.to(tile.patches.device)
    return map_patches(tile, lambda values: values.index_select(0, index), grid)


def map_patches(tile: VisualTokens, transform: Callable[[Tensor], Tensor], grid: tuple[int, int]) -> VisualTokens:
    """Apply a function of (N, F) tensors to the patches and to each signal per patch; the CLS token is unchanged."""

    def map_signal(name: str, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        # CLS attention has one row for each head; all other signals have one row for each patch.
        return transform(values.T).T if name.startswith("cls_attention") else transform(values)

    return tile.with_(
        patches=transform(tile.patches),
        grid=grid,
        cls_attention=map_signal("cls_attention", tile.cls_attention),
        keys=map_signal("keys", tile.keys),
        signals={name: map_signal(name, values) for name, values in tile.signals.items()},
    )


def first_source(plan: Reduction) -> Tensor:
    """Return the first source of each token."""
    return plan.sources[plan.offsets[:-1].clamp(max=max(len(plan.sources) - 1, 0))]


def is_single_patch(plan: Reduction) -> Tensor:
    """Return whether each token is one unchanged patch, shape (M,)."""
    weight = plan.weights[plan.offsets[:-1].clamp(max=max(len(plan.sources) - 1, 0))]
    return (plan.offsets.diff() == 1) & (weight == 1) & (first_source(plan) < plan.patches)


def is_identity(plan: Reduction) -> bool:
    """Return whether a plan keeps every patch unchanged at its own position."""
    every = torch.arange(plan.patches)
    return plan.is_pruning and torch.equal(plan.sources, every) and torch.equal(plan.anchor, every)
