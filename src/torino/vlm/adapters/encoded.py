"""Images as the tower encodes them and as the language model receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

from torch import Tensor

from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.reducers import Reducer


@dataclass(frozen=True)
class Tiling:
    """The arrangement of the units of one image.

    Attributes
    ----------
    views : tuple of int
        The view that each unit shows: 0 is the whole image, then the tiles row by row. A tile that shows only padding
        has no unit.
    layout : (int, int)
        Rows and columns of tiles.
    """

    views: tuple[int, ...]
    layout: tuple[int, int]


@dataclass(frozen=True)
class EncodedImages:
    """The tower's output for the images, or the videos, of one call.

    Attributes
    ----------
    tokens : tuple of VisualTokens
        The units to plan, in order: images, or tiles of images.
    full : tuple of int
        Placeholders of each image in the prompt.
    extra : object
        Whatever the adapter needs again in :meth:`Adapter.embed`.
    tilings : tuple of Tiling
        The arrangement of the units of each image, where an image is encoded whole and in tiles; otherwise empty.
    reduced_tokens : tuple of Tensor of shape (M, D)
        Output of a tower in which a reducer was active; ``tokens`` is empty then.
    modality : {"image", "video"}
        What the model takes them for. Frames that are shown to a model as several images are images.
    """

    tokens: tuple[VisualTokens, ...]
    full: tuple[int, ...]
    extra: Any = None
    tilings: tuple[Tiling, ...] = ()
    reduced_tokens: tuple[Tensor, ...] = ()
    modality: Literal["image", "video"] = "image"

    def reduced(self, plans: ReductionBatch, cls: Sequence[Tensor] | None = None) -> Ragged:
        """Return the reduced tokens of each unit: the plans applied, or what the tower already reduced."""
        if self.reduced_tokens:
            return Ragged.of(self.reduced_tokens)
        return plans.apply([unit.patches for unit in self.tokens], cls)

    @property
    def units(self) -> list[int]:
        """Number of units of each image."""
        return [len(tiling.views) for tiling in self.tilings] or [1] * len(self.full)


@dataclass(frozen=True)
class ImageEmbeds:
    """What replaces the placeholders of one image.

    Attributes
    ----------
    features : Tensor of shape (n, E)
        Its tokens in the input space of the language model.
    slots : Tensor of shape (n,), int64
        The placeholder of the image, counted from 0, that each token replaces; increasing.
    sizes : Tensor of shape (n,), int64, optional
        Number of patches that each token represents; 0 for a separator or a register.
    patches : int
        Patches of the image before reduction.
    """

    features: Tensor
    slots: Tensor
    sizes: Tensor | None = None
    patches: int = 0


def plan_units(reducer: Reducer, encoded: EncodedImages) -> ReductionBatch:
    """Plan every unit; units of one image that share a budget are planned together."""
    tokens = [_detached(unit) for unit in encoded.tokens]
    if not reducer.shares_views or not encoded.tilings:
        return reducer.plan_batch(tokens)
    plans, units = list[Reduction](), iter(tokens)
    for tiling in encoded.tilings:
        views: list[VisualTokens | None] = [None] * (1 + prod(tiling.layout))
        for view in tiling.views:
            views[view] = next(units)
        base, *tiles = views
        plans.extend(reducer.plan_views(cast(VisualTokens, base), tiles, tiling.layout))
    return ReductionBatch.of(plans)


def _detached(tokens: VisualTokens) -> VisualTokens:
    """Drop the gradient: planning is discrete, and a reducer may use numpy."""
    if not tokens.patches.requires_grad:
        return tokens
    return tokens.with_(patches=tokens.patches.detach(), cls=None if tokens.cls is None else tokens.cls.detach())
