"""HiRED: keep the patches of highest CLS attention, with one budget for all tiles of a high-resolution image.

HiRED: Attention-Guided Token Dropping for Efficient Inference of High-Resolution Vision-Language Models (Arif et al.,
AAAI 2025). On a single tile FasterVLM is the same method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import stable_topk
from torino.reducers._checks import budget_error, check_choice, check_count, check_number, read_signal
from torino.reducers._similarity import nearest_kept
from torino.reducers.base import Fidelity, Order, Reducer, register


@dataclass(frozen=True)
class TopAttention(Reducer):
    """Common part of HiRED and FasterVLM: keep the patches of one view that have the highest CLS attention."""

    budget: int
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    emits_cls: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(H·N)"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return _plan_view(tokens, self.budget, self.order, self.name, self.spec)


@register("hired")
@dataclass(frozen=True)
class HiRED(TopAttention):
    """Keep the patches of highest CLS attention, with one budget for all tiles (HiRED).

    Let a_i be the attention of the CLS token to patch i at the feature layer, summed over heads. The ``budget`` patches
    of highest a_i are kept, ties to the lowest index; a_i is their score. If an image has a base view and tiles, as in
    LLaVA-NeXT, the budget is that of the whole image: the base view gets a share ``alpha`` of it, and the tiles share
    the rest in proportion to the content in each, measured by the CLS attention of the base view in block 0. A tile may
    get nothing. See :func:`torino.reducers.hired.tile_budgets`.

    Reads ``"cls_attention"`` of shape (H, N), and ``"cls_attention@0"`` of the base view if there are tiles. Prunes.
    Differences from the release: every image of a batch has its own patches (the release uses those of the first), the
    budget is a count instead of a rate, and no token of it is lost to rounding or to full tiles.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N; with tiles, at most the number of patches of all views.
    order : {"raster", "native"}
        By position, as released, or by descending attention.
    alpha : float
        Share of the base view, from 0 to 1. Without tiles it has no effect.
    fidelity : {"released", "paper"}
        Which patches of the base view belong to a tile: runs of consecutive patches, or those at the position of the
        tile.
    """

    alpha: float = 0.5
    fidelity: Fidelity = "released"

    view_needs: ClassVar[frozenset[str]] = frozenset({"cls_attention@0"})
    shares_views: ClassVar[bool] = True
    paper: ClassVar[str] = "Arif et al., AAAI 2025, arXiv 2408.10945"
    original_license: ClassVar[str] = "MIT"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        super().__post_init__()
        _check_alpha(self.alpha)
        check_choice("fidelity", self.fidelity, Fidelity)

    def plan_views(
        self, base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]
    ) -> ReductionBatch:
        """Plan the base view and the tiles of one image with a common budget."""
        if not tiles:
            return ReductionBatch.of([self.plan(base)])
        plans = plan_tiles(
            base,
            tiles,
            self.budget,
            layout=layout,
            alpha=self.alpha,
            fidelity=self.fidelity,
            order=self.order,
        )
        return ReductionBatch.of([replace(plan, by=self.spec) for plan in plans])


@register("fastervlm")
@dataclass(frozen=True)
class FasterVLM(TopAttention):
    """Keep the patches of highest CLS attention (FasterVLM); equals ``hired`` on one tile.

    FasterVLM averages the attention over heads and HiRED sums it, which gives the same ranking. [CLS] Attention is All
    You Need for Training-Free Visual Token Pruning (Zhang et al., 2024), later part of VisPruner. If an image has
    tiles, each tile has the full budget.

    Parameters
    ----------
    budget, order
        As for ``hired``.
    """

    paper: ClassVar[str] = "Zhang et al., 2024, arXiv 2412.01818v1"
    original_license: ClassVar[str] = "Apache-2.0"


def tile_budgets(
    attention: Tensor,
    grid: tuple[int, int],
    tiles: tuple[int, int],
    budget: int,
    *,
    alpha: float = 0.5,
    capacity: Sequence[int] | None = None,
    fidelity: Fidelity = "released",
    exact: bool = True,
) -> list[int]:
    """Divide a budget among the base view and the tiles of one image by the content of each tile (HiRED).

    The base view gets int(B·α) tokens. The int(N·(1 - α)) patches of the base view with the highest CLS attention in
    block 0 count as content. The rest of the budget is divided among the tiles in proportion to the content in each.

    Parameters
    ----------
    attention : Tensor of shape (H, N) or (N,)
        CLS attention of the base view in block 0, ``"cls_attention@0"``; heads are summed.
    grid : (int, int)
        Patch rows and columns of the base view.
    tiles : (int, int)
        Rows and columns of tiles.
    budget : int
        Number of tokens of the whole image, B.
    alpha : float
        Share of the base view, from 0 to 1.
    capacity : sequence of int, optional
        Number of patches of the base view and of each tile, the maximum each can get. Defaults to N each.
    fidelity : {"released", "paper"}
        Which patches of the base view belong to a tile. The release reshapes the row-major map to
        (tile rows, tile columns, -1), so its "tiles" are runs of consecutive patches, horizontal bands of the image for
        any layout. ``"paper"`` takes the patches whose centers lie in the tile. Content is counted in the same way.
    exact : bool
        Whether the shares add up to the budget: fractions go to the largest remainders, ties to the first tile, and
        tokens that do not fit into a tile go to the others in proportion, finally to the base view. Without it
        fractions are truncated and tokens that do not fit are lost, as released.

    Returns
    -------
    list of int
        Tokens of the base view, then of each tile in row-major order.

    Examples
    --------
    >>> attention = torch.tensor([[9.0, 8, 1, 1], [7, 6, 1, 1]]).flatten()  # all content is on the left
    >>> tile_budgets(attention, (2, 4), (1, 2), 10, fidelity="paper")
    [5, 5, 0]
    >>> tile_budgets(attention, (2, 4), (1, 2), 10)  # as released, by the upper and the lower half
    [5, 3, 2]
    """
    rows, columns = grid
    tile_rows, tile_columns = tiles
    n, num_tiles = rows * columns, tile_rows * tile_columns
    if attention.ndim not in (1, 2) or attention.shape[-1] != n:
        raise BadTokens(
            f"attention must have shape (H, {n}) or ({n},) on a {rows}x{columns} grid, got {tuple(attention.shape)}."
        )
    for name, value in (("tiles", tile_rows), ("tiles", tile_columns), ("budget", budget)):
        check_count(name, value)
    _check_alpha(alpha)
    check_choice("fidelity", fidelity, Fidelity)
    capacity = [n] * (num_tiles + 1) if capacity is None else list(capacity)
    if len(capacity) != num_tiles + 1:
        raise BadParameter(
            f"capacity must have one entry for the base view and one for each of the {num_tiles} tiles, got {capacity}."
        )
    if budget > sum(capacity):
        raise budget_error("hired", budget, sum(capacity), "patches in its base view and tiles")
    content = torch.zeros(n, dtype=torch.int64)
    content[stable_topk(_sum_heads(attention), int(n * (1 - alpha)))[0]] = 1
    if fidelity == "released":
        if n % num_tiles:
            raise BadParameter(
                f"fidelity='released' cuts the {n} patches of the base view into {num_tiles} equal runs, which leaves "
                f"{n % num_tiles} over. Use fidelity='paper', which cuts by position."
            )
        content_per_tile = content.reshape(num_tiles, -1).sum(1)
    else:
        row = (2 * torch.arange(rows) + 1) * tile_rows // (2 * rows)
        column = (2 * torch.arange(columns) + 1) * tile_columns // (2 * columns)
        content_per_tile = torch.zeros(num_tiles, dtype=torch.int64)
        content_per_tile.index_add_(0, (row[:, None] * tile_columns + column).flatten(), content)
    # without any content all tiles get the same
    weights: list[int] = content_per_tile.tolist() if int(content_per_tile.sum()) else [1] * num_tiles
    base = min(int(budget * alpha), capacity[0])
    rest = min(budget - base, sum(capacity[1:]))
    if exact:
        shares = _apportion(weights, rest, capacity[1:])
        return [budget - sum(shares), *shares]
    truncated = [rest * weight // sum(weights) for weight in weights]
    return [base, *(min(share, maximum) for share, maximum in zip(truncated, capacity[1:], strict=True))]


def plan_tiles(
    base: VisualTokens,
    tiles: Sequence[VisualTokens | None],
    budget: int,
    *,
    layout: tuple[int, int],
    alpha: float = 0.5,
    fidelity: Fidelity = "released",
    exact: bool = True,
    order: Order = "raster",
) -> ReductionBatch:
    """Plan the base view and all tiles of one high-resolution image with a common budget (HiRED).

    Each view keeps its patches of highest CLS attention at the feature layer. :func:`tile_budgets` determines how many,
    which may be none.

    Parameters
    ----------
    base : VisualTokens
        Base view, with ``cls_attention`` and the signal ``"cls_attention@0"`` of block 0.
    tiles : sequence of VisualTokens or None
        Tiles in row-major order, with ``cls_attention``; None for a tile that shows nothing of the image.
    budget : int
        Number of tokens of the whole image.
    layout : (int, int)
        Rows and columns of tiles.
    alpha, fidelity, exact
        As for :func:`tile_budgets`.
    order : {"raster", "native"}
        Order of the tokens of each view.

    Returns
    -------
    ReductionBatch
        Reduction of the base view, followed by those of the tiles that are not None.
    """
    check_choice("order", order, Order)
    if layout[0] * layout[1] != len(tiles):
        raise BadParameter(f"layout {layout[0]}x{layout[1]} has {layout[0] * layout[1]} tiles, got {len(tiles)}.")
    views = [base, *tiles]
    attention = read_signal(base, "cls_attention@0", "hired", (None, len(base)))
    capacity = [0 if view is None else len(view) for view in views]
    budgets = tile_budgets(
        attention, base.grid, layout, budget, alpha=alpha, capacity=capacity, fidelity=fidelity, exact=exact
    )
    return ReductionBatch.of(
        [
            _plan_view(view, view_budget, order, "hired", f"hired(budget={view_budget})")
            for view, view_budget in zip(views, budgets, strict=True)
            if view is not None
        ]
    )


def _check_alpha(alpha: float) -> None:
    check_number("alpha", alpha)
    if alpha > 1:
        raise BadParameter(f"alpha must be between 0 and 1, got {alpha!r}.")


def _sum_heads(attention: Tensor) -> Tensor:
    """Return attention summed over heads, float32 rounded from float64, so that equal columns tie."""
    wide = attention.detach().double()
    return (wide.sum(0) if wide.ndim == 2 else wide).float().cpu()


def _plan_view(tokens: VisualTokens, budget: int, order: Order, name: str, by: str) -> Reduction:
    attention = _sum_heads(tokens.signal("cls_attention", name))
    if budget > len(tokens):
        raise budget_error(name, budget, len(tokens))
    kept = stable_topk(attention, budget)[0]
    if order == "raster":
        kept = kept.sort().values
    assigned = nearest_kept(tokens.patches, kept)
    return Reduction.pick(kept, tokens.grid, by, score=attention[kept], assigned=assigned)


def _apportion(weights: Sequence[int], total: int, capacity: Sequence[int]) -> list[int]:
    """Return whole numbers in proportion to ``weights`` that add up to ``total``, each at most its ``capacity``."""
    shares, open_tiles = [0] * len(capacity), list(range(len(capacity)))
    while total:
        weight = {t: weights[t] for t in open_tiles}
        if not any(weight.values()):
            weight = dict.fromkeys(open_tiles, 1)
        weight_sum = sum(weight.values())
        full = [t for t in open_tiles if total * weight[t] >= capacity[t] * weight_sum]
        if not full:
            for t in open_tiles:
                shares[t] = total * weight[t] // weight_sum
            by_remainder = sorted(open_tiles, key=lambda t: (-(total * weight[t] % weight_sum), t))
            for t in by_remainder[: total - sum(shares[t] for t in open_tiles)]:
                shares[t] += 1
            break
        for t in full:  # filled completely; the remaining tiles share the rest
            shares[t] = capacity[t]
            total -= capacity[t]
            open_tiles.remove(t)
    return shares
