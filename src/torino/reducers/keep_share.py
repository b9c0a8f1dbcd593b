"""Wrap a reducer so that its budget is a share of the patches of each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

from torch import Tensor

from torino.core.checks import check_type, to_number
from torino.core.errors import BadParameter
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.reducers.base import AttentionMode, PositionMode, Reducer
from torino.reducers.in_language_model import Stage
from torino.reducers.in_tower import TowerState


@dataclass(frozen=True)
class KeepShare(Reducer):
    """Run another reducer with a budget that is a share of the patches of each image.

    Parameters
    ----------
    inner : Reducer
        A reducer with a parameter ``budget``.
    share : float
        Share of the patches to keep, above 0 and at most 1.
    """

    inner: Reducer
    share: float
    name = "keep-share"

    @property
    def spec(self) -> str:
        """The wrapped reducer and the share."""
        inner = replace(cast(Any, self.inner), budget=None) if self._budget_is_optional else self.inner
        name = inner.spec if self._budget_is_optional else self.inner.name
        return f"{name} with a budget of {100 * self.share:.4g}% of the patches"

    @property
    def _budget_is_optional(self) -> bool:
        budget = next(field for field in fields(cast(Any, self.inner)) if field.name == "budget")
        return budget.default is None

    def __post_init__(self) -> None:
        """Raise BadParameter if the reducer has no budget or the share is out of range."""
        check_type("inner", self.inner, Reducer, "a reducer with a budget")
        if not is_dataclass(self.inner) or "budget" not in {field.name for field in fields(self.inner)}:
            raise BadParameter(f"{self.inner.name} takes no budget, so it cannot keep a share of the tokens.")
        if not 0 < to_number("share", self.share) <= 1:
            raise BadParameter(f"share must be above 0 and at most 1, got {self.share}.")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Signals that the wrapped reducer reads."""
        return self.inner.needs

    @property
    def optional(self) -> frozenset[str]:  # type: ignore[override]
        """Signals that the wrapped reducer reads if there are any."""
        return self.inner.optional

    @property
    def view_needs(self) -> frozenset[str]:  # type: ignore[override]
        """Additional signals that it reads when the image has tiles."""
        return self.inner.view_needs

    @property
    def shares_views(self) -> bool:  # type: ignore[override]
        """Whether all views of an image share one budget."""
        return self.inner.shares_views

    @property
    def takes_frames(self) -> bool:  # type: ignore[override]
        """Whether the wrapped reducer can reduce videos."""
        return self.inner.takes_frames

    @property
    def position_mode(self) -> PositionMode:
        """Position mode of the wrapped reducer."""
        return self.inner.position_mode

    @property
    def attention_mode(self) -> AttentionMode:
        """Attention of the wrapped reducer."""
        return self.inner.attention_mode

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share one budget."""
        return self.inner.shares_batch

    @property
    def in_tower(self) -> bool:  # type: ignore[override]
        """Whether the wrapped reducer works inside a vision tower."""
        return self.inner.in_tower

    @property
    def on_pixels(self) -> bool:  # type: ignore[override]
        """Whether the wrapped reducer changes the image before the tower."""
        return self.inner.on_pixels

    @property
    def in_language_model(self) -> bool:  # type: ignore[override]
        """Whether the wrapped reducer works inside the language model."""
        return self.inner.in_language_model

    @property
    def reads(self) -> frozenset[str]:
        """Signals of the language model that the wrapped reducer reads."""
        return cast(Any, self.inner).reads

    def stages(self, tokens: int, blocks: int) -> list[Stage]:
        """Return the stages of a reducer inside the language model."""
        return self._with_budget(tokens).stages(tokens, blocks)

    def select(self, signals: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Choose the tokens of one image that remain at a stage inside the language model."""
        return cast(Any, self.inner).select(signals, count)

    def plan_grid(self, grid: tuple[int, int]) -> tuple[tuple[int, int], Reduction]:
        """Return the smaller grid of a reducer that changes the image, and what its patches cover."""
        return self._with_budget(grid[0] * grid[1]).plan_grid(grid)

    def begin(self, patches: Tensor, grid: tuple[int, int], blocks: int, has_cls: bool) -> TowerState:
        """Start the reduction of one image inside a tower."""
        return self._with_budget(len(patches)).begin(patches, grid, blocks, has_cls)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images at once if they have the same size or share a budget, otherwise one by one."""
        if len({len(image) for image in images}) > 1 and not self.shares_batch:
            return ReductionBatch.of([self.plan(image) for image in images])
        return self._with_budget(sum(len(image) for image in images) / len(images)).plan_batch(images)

    def plan_views(
        self, base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]
    ) -> ReductionBatch:
        """Plan the views of one image; where they share a budget, it is a share of all their patches."""
        if not self.shares_views:
            return super().plan_views(base, tiles, layout)
        patches = len(base) + sum(len(tile) for tile in tiles if tile is not None)
        return self._with_budget(patches).plan_views(base, tiles, layout)

    def _with_budget(self, patches: float) -> Any:
        """Return the wrapped reducer with its share of ``patches`` as the budget, at least 1."""
        return replace(cast(Any, self.inner), budget=max(1, round(self.share * patches)))
