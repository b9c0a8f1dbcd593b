"""LLaVA-NeXT: an image is a base view and tiles, packed into rows that end in newline tokens.

**Units.** What is planned is a tile: the base view and every sub-tile are a unit each, so a budget counts tokens per
tile; unless the reducer says that its budget is one for all views of an image (``shares_views``, as HiRED does), when
it is told how they lie, and may leave any of them without a token, though not the image. The tower sees all tiles of a
call as one batch and is stopped after the tap block; reduction comes before the projector, as in LLaVA-1.5.

**Packing.** Which patch stands at which placeholder is learned by running the model's own ``pack_image_features`` on
the numbers of the patches, so no rule of packing is repeated here. A reduced token takes the placeholder of its anchor
(a token of no place the last one of its tile). Rows of the picture run across tiles, so the tokens of an image are put
in the order of their placeholders whatever order the reducer gave them.

**Unpadding.** The model cuts away the patches that only show the bars added to fit the image into its tiles. They are
cut away before planning too: a unit is the part of a tile that the model would show, always a rectangle. So no token is
spent on bars, none is blended with them, and a tile that is nothing but bar is no unit at all.

**Newlines.** The host's ``newlines`` says what becomes of the token that ends each row:

========  ==========================================================================================
``rows``  it goes when its row has lost all its tokens, and stays otherwise (the default)
``all``   every newline stays, so the language model can still count the rows
``none``  none stays
========  ==========================================================================================

Newlines are not in any ``Reduction``; the trace counts them among an image's tokens, before and after. For another
rule, serve a subclass::

    class AllNewlines(LlavaNext):
        newlines = "all"

    serve("llava_next")(lambda: AllNewlines)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter, BadTokens, MissingSignal, TorinoError
from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.vlm.adapters.base import EncodedImages, ImageEmbeds, Tiling
from torino.vlm.adapters.llava import Llava
from torino.vlm.hooks import tower_layout

Newlines = Literal["rows", "all", "none"]
NEWLINE = float("nan")  # the number of the newline among the numbers of patches


@dataclass(frozen=True, eq=False)
class Picture:
    """What stands at each placeholder of one image.

    Attributes
    ----------
    patch : Tensor of shape (full,), int64
        The patch, counted through the tiles of the image; −1 where no patch stands unchanged.
    newline : Tensor of shape (full,), bool
        Where a row ends.
    detail : Tensor of shape (full,), bool
        Where a sub-tile is shown, rather than the base view or a newline.
    resized : bool
        Whether the sub-tiles were resized after the projector, so that their placeholders hold no patch.
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
        """The row of each placeholder, counted by the newlines; −1 for a base view with sub-tiles, which has none."""
        row = self.newline.long().cumsum(0) - self.newline.long()
        is_base = ~self.newline & ~self.detail
        return torch.where(is_base, -1, row) if bool(self.detail.any()) else row


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit to plan: its tokens, the placeholder of each of its patches, and which view of the image it is."""

    tokens: VisualTokens
    slots: Tensor
    view: int

    def slot_of(self, anchor: Tensor) -> Tensor:
        """Placeholders of anchors; the last one of the unit for a token of no place."""
        position_mode = (anchor >= 0) & (anchor < len(self.slots))
        return self.slots[torch.where(position_mode, anchor, len(self.slots) - 1)]


@dataclass(frozen=True, eq=False)
class Scene:
    """One image: how it is packed, its units, and all that its tiles were at the tap."""

    picture: Picture
    units: tuple[Unit, ...]
    tiles: tuple[VisualTokens, ...]
    size: Sequence[int]


class LlavaNext(Llava):
    """LLaVA-NeXT: tiles are planned one by one, packed as the model packs them; see the module for newlines.

    Parameters
    ----------
    model : a Hugging Face LLaVA-NeXT model
    newlines : {"rows", "all", "none"}, optional
        Which newline tokens stay; by default what the class says.
    """

    families: ClassVar[tuple[str, ...]] = ("llava_next",)
    proportional_attention: ClassVar[bool] = False  # newlines stand for no patch
    resumes: ClassVar[bool] = False  # tried with LLaVA-1.5 alone
    tiles: ClassVar[bool] = True
    closed: ClassVar[str] = "its tiles are cut to what shows the image only behind the tower, too late to unmerge"
    newlines: Newlines = "rows"

    def __init__(self, model: nn.Module, newlines: Newlines | None = None) -> None:
        super().__init__(model)
        self.newlines = newlines or self.newlines
        if self.newlines not in get_args(Newlines):
            known = ", ".join(map(repr, get_args(Newlines)))
            raise BadParameter(f"newlines must be one of {known}, got {self.newlines!r}.")

    # ------------------------------------------------------------------ what the model does with an image

    def count_tiles(self, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]) -> list[int]:
        """Tiles of each image, the base view included."""
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        side = self.config.vision_config.image_size
        return [image_size_to_num_patches(list(size), self.config.image_grid_pinpoints, side) for size in sizes]

    def layout(self, scene: Scene) -> tuple[int, int]:
        """Rows and columns of an image's tiles."""
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        if len(scene.tiles) == 1:
            return (0, 0)  # the base view is all there is
        side, pinpoints = self.config.vision_config.image_size, self.config.image_grid_pinpoints
        down, across = get_anyres_image_grid_shape(list(scene.size), pinpoints, side)
        return int(down), int(across)

    def pack(
        self, features: Sequence[Tensor], sizes: Sequence[Sequence[int]], newline: Tensor, inputs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Pack per-patch values (tiles, patches, F) of each image as the model does: (full, F)."""
        packed, _ = self.inner.pack_image_features(
            list(features), sizes, vision_feature_select_strategy=self._strategy(inputs), image_newline=newline
        )
        return packed

    def pictures(
        self, counts: Sequence[int], patches: int, sizes: Sequence[Sequence[int]], inputs: Mapping[str, Any]
    ) -> list[Picture]:
        """Learn how each image is packed, by packing the numbers of its patches instead of their features."""
        numbered: list[Tensor] = []
        for count in counts:
            # doubles hold every whole number that matters, and run through any arithmetic the model may do
            number = torch.arange(count * patches, dtype=torch.float64).view(count, patches)
            numbered.append(torch.stack([number, (number >= patches).double()], 2))
        packed = self.pack(numbered, sizes, torch.full((2,), NEWLINE, dtype=torch.float64), inputs)
        found: list[Picture] = []
        for number, is_detail in (values.T for values in packed):
            newline = number.isnan()
            found.append(Picture(number.nan_to_num(nan=-1).long(), newline, is_detail.nan_to_num() > 0.5))
        return found

    def units(
        self, picture: Picture, tiles: Sequence[VisualTokens], size: Sequence[int], inputs: Mapping[str, Any]
    ) -> list[Unit]:
        """The tiles of an image, each cut to what the model shows of it."""
        found: list[Unit] = []
        for number, tile in enumerate(tiles):
            slots = (picture.patch // len(tile) == number).nonzero()[:, 0]
            if len(slots):
                visible, order = (picture.patch[slots] - number * len(tile)).sort()
                found.append(Unit(cut(tile, visible), slots[order], number))
        return found

    # ------------------------------------------------------------------ what a host does

    def look(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Every tile is one unit, cut to what the model shows of it."""
        self._check_strategy(inputs)
        if inputs.get("image_sizes") is None:
            raise BadTokens(
                "image_sizes is missing: without it nobody knows how the tiles lie. Pass on what the processor gave."
            )
        sizes: list[list[int]] = torch.as_tensor(inputs["image_sizes"]).tolist()
        counts = self.count_tiles(sizes, inputs)
        pixels = all_tiles(inputs["pixel_values"], counts)
        options = {
            name: inputs[name]
            for name in ("vision_feature_layer", "vision_feature_select_strategy")
            if inputs.get(name) is not None
        }
        tiles = iter(self.see(pixels, needs, **options))
        mine = [tuple(next(tiles) for _ in range(count)) for count in counts]
        pictures = self.pictures(counts, len(mine[0][0]), sizes, inputs)
        scenes = [
            Scene(picture, tuple(self.units(picture, seen, size, inputs)), seen, size)
            for picture, seen, size in zip(pictures, mine, sizes, strict=True)
        ]
        tokens = tuple(unit.tokens for scene in scenes for unit in scene.units)
        tilings = tuple(Tiling(tuple(unit.view for unit in scene.units), self.layout(scene)) for scene in scenes)
        return EncodedImages(tokens, tuple(len(picture) for picture in pictures), (scenes, inputs), tilings)

    def splice(self, sight: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce, project, place each token where its anchor was, and end the rows with their newlines."""
        scenes: list[Scene] = sight.extra[0]
        each = iter(plans)
        parts = [[(unit, next(each)) for unit in scene.units] for scene in scenes]
        counts = [sum(len(plan) for _, plan in part) for part in parts]
        if 0 in counts:
            raise TorinoError(
                f"{plans[0].by} left no token of image {counts.index(0)}, and a model needs one of each image. "
                "Choose a reducer that keeps at least one token of an image."
            )
        table, row = self._table(sight, plans, parts)
        splices: list[ImageEmbeds] = []
        for scene, part, mine in zip(scenes, parts, row.split(counts), strict=True):
            slots = torch.cat([unit.slot_of(plan.anchor) for unit, plan in part])
            ends = self._ends(scene.picture, slots)
            slots, mine = torch.cat([slots, ends]), torch.cat([mine, torch.zeros_like(ends)])
            order = slots.argsort(stable=True)
            splices.append(ImageEmbeds(table.index_select(0, mine[order].to(table.device)), slots[order]))
        return splices

    # ------------------------------------------------------------------ parts of it

    def _table(
        self, sight: EncodedImages, plans: ReductionBatch, parts: Sequence[Sequence[tuple[Unit, Reduction]]]
    ) -> tuple[Tensor, Tensor]:
        """One table of all that can stand in the prompt, the newline first, and the row of each planned token."""
        cls = [unit.cls for unit in sight.tokens if unit.cls is not None]
        reads_cls = next((plan.by for plan in plans if bool((plan.sources == plan.patches).any())), None)
        if reads_cls and not cls:
            raise MissingSignal(
                f"{reads_cls} keeps the CLS token, and the tower {type(self.inner.vision_tower).__name__} has none. "
                "Choose a reducer that does without, such as torino-m."
            )
        reduced = plans.apply([unit.patches for unit in sight.tokens], cls or None).values
        # What the model itself would hand over is wanted where placeholders hold no patches, and for an image that
        # keeps everything: a matrix product of other height may round otherwise, and that image is the stock one.
        wanted = {
            image: scene
            for image, scene in enumerate(sight.extra[0])
            if scene.picture.resized or all(is_identity(plan) for _, plan in parts[image])
        }
        stock = self._packed(wanted, sight.extra[1])
        begin, height = dict[int, int](), 1
        for image, features in stock.items():
            begin[image], height = height, height + len(features)
        row = torch.cat(
            [
                torch.where(unchanged(plan), begin[image] + unit.slot_of(leader(plan)), -1)
                if image in begin
                else torch.full((len(plan),), -1)
                for image, part in enumerate(parts)
                for unit, plan in part
            ]
        )
        made = (row < 0).nonzero()[:, 0]
        row[made] = torch.arange(height, height + len(made))
        table = list(stock.values())
        if len(made):
            table.append(self.project(Ragged.of([reduced.index_select(0, made.to(reduced.device))])).values)
        return torch.cat([self.inner.image_newline[None].to(table[0]), *table]), row

    def _packed(self, scenes: Mapping[int, Scene], inputs: Mapping[str, Any]) -> dict[int, Tensor]:
        """The features that the model itself would hand over for some images."""
        if not scenes:
            return {}
        states = torch.stack([tile.patches for scene in scenes.values() for tile in scene.tiles])
        features: Tensor = self.inner.multi_modal_projector(states)
        split = features.split([len(scene.tiles) for scene in scenes.values()])
        sizes = [scene.size for scene in scenes.values()]
        return dict(zip(scenes, self.pack(split, sizes, self.inner.image_newline, inputs), strict=True))

    def _ends(self, picture: Picture, slots: Tensor) -> Tensor:
        """Placeholders of the newlines that stay, when tokens stand at ``slots``."""
        if self.newlines == "none":
            return slots[:0]
        stays = picture.newline
        if self.newlines == "rows":
            had = torch.isin(picture.row, picture.row[~picture.newline])
            has = torch.isin(picture.row, picture.row[slots])
            stays = stays & (has | ~had)  # a row that never had a patch has lost none
        return stays.nonzero()[:, 0]

    def _strategy(self, inputs: Mapping[str, Any]) -> str:
        return inputs.get("vision_feature_select_strategy") or self.config.vision_feature_select_strategy

    def _check_strategy(self, inputs: Mapping[str, Any]) -> None:
        """Refuse towers with registers, which the model would take for patches; ``see`` refuses other misfits."""
        prefix = tower_layout(self.inner.vision_tower).prefix
        if prefix > 1 and self._strategy(inputs) == "default":
            raise TorinoError(
                f'vision_feature_select_strategy="default" leaves out one token, and this tower has {prefix} before '
                "its patches, so what is left forms no grid of tiles. Use a tower with no registers."
            )


def all_tiles(pixels: object, counts: Sequence[int]) -> Tensor:
    """The tiles of all images end to end, without those that only fill up a batch.

    Parameters
    ----------
    pixels : Tensor of shape (images, most tiles, 3, height, width) or (tiles, 3, height, width)
    counts : sequence of int
        Tiles of each image.
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
            f"By image_sizes there are {len(counts)} images of {', '.join(map(str, counts))} tiles, and pixel_values "
            f"of shape {tuple(pixels.shape)} does not hold them. Pass on both as the processor gave them."
        )
    return pixels


def cut(tile: VisualTokens, visible: Tensor) -> VisualTokens:
    """Cut a tile to some of its patches, which form a rectangle; signals of patches are cut alike."""
    if len(visible) == len(tile):
        return tile
    columns = tile.grid[1]
    grid = (len((visible // columns).unique()), len((visible % columns).unique()))
    at = visible.to(tile.patches.device)
    return per_patch(tile, lambda values: values.index_select(0, at), grid)


def per_patch(tile: VisualTokens, change: Callable[[Tensor], Tensor], grid: tuple[int, int]) -> VisualTokens:
    """Change everything that tokens carry for each patch, given as (N, F); the CLS token stays."""

    def signal(name: str, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        # attention has a row for each head, all else a row for each patch
        return change(values.T).T if name.startswith("cls_attention") else change(values)

    return tile.with_(
        patches=change(tile.patches),
        grid=grid,
        cls_attention=signal("cls_attention", tile.cls_attention),
        keys=signal("keys", tile.keys),
        signals={name: signal(name, values) for name, values in tile.signals.items()},
    )


def leader(plan: Reduction) -> Tensor:
    """First source of each token."""
    return plan.sources[plan.offsets[:-1].clamp(max=max(len(plan.sources) - 1, 0))]


def unchanged(plan: Reduction) -> Tensor:
    """Whether each token is one patch as it was, shape (M,)."""
    weight = plan.weights[plan.offsets[:-1].clamp(max=max(len(plan.sources) - 1, 0))]
    return (plan.offsets.diff() == 1) & (weight == 1) & (leader(plan) < plan.patches)


def is_identity(plan: Reduction) -> bool:
    """Whether a plan keeps every patch as it was, where it was."""
    every = torch.arange(plan.patches)
    return plan.is_pruning and torch.equal(plan.sources, every) and torch.equal(plan.anchor, every)
