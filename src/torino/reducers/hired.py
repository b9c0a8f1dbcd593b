"""HiRED: the patches that the CLS token attends to most; and how a high-resolution image shares tokens among tiles.

HiRED: Attention-Guided Token Dropping for Efficient Inference of High-Resolution Vision-Language Models (Arif et al.,
AAAI 2025). On one tile FasterVLM is the same method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import stable_topk
from torino.reducers._checks import check_choice, check_count, check_number, read_signal, unmet
from torino.reducers.base import Reducer, register

Order = Literal["raster", "native"]
Fidelity = Literal["released", "paper"]


@dataclass(frozen=True)
class MostAttended(Reducer):
    """What HiRED and FasterVLM share: the patches of one view that the CLS token attends to most."""

    budget: int
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    emits_cls: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(H·N)"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return _most_attended(tokens, self.budget, self.order, self.name, self.spec)


@register("hired")
@dataclass(frozen=True)
class HiRED(MostAttended):
    """Keep the patches of highest CLS attention, with one budget for all tiles of an image (HiRED).

    With a_i the attention of the CLS token to patch i at the tap block, summed over heads, the ``budget`` patches of
    highest a_i are kept, ties to the lowest index; a_i is their score. Where an image is seen whole and in tiles, as
    in LLaVA-NeXT, the budget is that of the whole image: the base view gets a share ``alpha`` of it, and the tiles
    share the rest by how much of what the CLS token attends to in block 0 of the base view lies in each. A tile may
    get nothing. See :func:`torino.reducers.hired.tile_budgets`.

    Reads ``"cls_attention"`` of shape (H, N), and ``"cls_attention@0"`` of the base view where there are tiles. Prunes.
    As released, except that every image of a batch gets its own patches (the release uses those of the first), that
    the budget is a count, not a rate, and that no token of it is lost to rounding or to tiles that are full.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N; with tiles, at most the patches of all views together.
    order : {"raster", "native"}
        By place as released, or by falling attention.
    alpha : float
        Share of the base view, from 0 to 1; without tiles it has no meaning.
    fidelity : {"released", "paper"}
        Which patches of the base view belong to a tile: runs of consecutive patches, or those that lie where the tile
        lies.
    """

    alpha: float = 0.5
    fidelity: Fidelity = "released"

    view_needs: ClassVar[frozenset[str]] = frozenset({"cls_attention@0"})
    shares_views: ClassVar[bool] = True
    paper: ClassVar[str] = "Arif et al., AAAI 2025, arXiv 2408.10945"
    original_licence: ClassVar[str] = "MIT"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        super().__post_init__()
        _check_alpha(self.alpha)
        check_choice("fidelity", self.fidelity, Fidelity)

    def plan_views(
        self, base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]
    ) -> ReductionBatch:
        """Plan the base view and the tiles of one image under the one budget."""
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
class FasterVLM(MostAttended):
    """Keep the patches of highest CLS attention (FasterVLM): ``hired`` on one tile by another name.

    FasterVLM averages the attention over heads where HiRED sums it, which ranks patches alike. [CLS] Attention is
    All You Need for Training-Free Visual Token Pruning (Zhang et al., 2024), later part of VisPruner. Where an image
    has tiles the budget is that of each.

    Parameters
    ----------
    budget, order
        As for ``hired``.
    """

    paper: ClassVar[str] = "Zhang et al., 2024, arXiv 2412.01818v1"
    original_licence: ClassVar[str] = "Apache-2.0"


def tile_budgets(
    attention: Tensor,
    grid: tuple[int, int],
    tiles: tuple[int, int],
    budget: int,
    *,
    alpha: float = 0.5,
    room: Sequence[int] | None = None,
    fidelity: Fidelity = "released",
    exact: bool = True,
) -> list[int]:
    """Share a budget among the base view and the tiles of one image, by how much content each tile shows (HiRED).

    The base view gets int(B·α) tokens. The int(N·(1 - α)) patches of the base view with the highest CLS attention in
    block 0 are content, and the rest of the budget is shared among the tiles in proportion to the content in each.

    Parameters
    ----------
    attention : Tensor of shape (H, N) or (N,)
        CLS attention of the base view in block 0, ``"cls_attention@0"``; heads are summed.
    grid : (int, int)
        Patch rows and columns of the base view.
    tiles : (int, int)
        Rows and columns of tiles.
    budget : int
        Tokens of the whole image, B.
    alpha : float
        Share of the base view, from 0 to 1.
    room : sequence of int, optional
        Patches that the base view and each tile have, which is the most they can get; N each by default.
    fidelity : {"released", "paper"}
        Which patches of the base view belong to a tile. The release reshapes the row-major map to
        (tile rows, tile columns, -1), so its "tiles" are runs of consecutive patches, horizontal bands of the image
        whatever the layout. ``"paper"`` takes the patches that lie where the tile lies, by their centres; content is
        counted alike in both.
    exact : bool
        Whether the shares sum up to the budget: fractions go to the largest remainders, ties to the first tile, and
        what does not fit into a tile goes to the others in proportion, at last to the base view. Without it fractions
        are cut off and what does not fit is lost, as released.

    Returns
    -------
    list of int
        Tokens of the base view, then of each tile, row by row.

    Examples
    --------
    >>> attention = torch.tensor([[9.0, 8, 1, 1], [7, 6, 1, 1]]).flatten()  # all content is on the left
    >>> tile_budgets(attention, (2, 4), (1, 2), 10, fidelity="paper")
    [5, 5, 0]
    >>> tile_budgets(attention, (2, 4), (1, 2), 10)  # as released, by the upper and the lower half
    [5, 3, 2]
    """
    rows, columns = grid
    down, across = tiles
    n, count = rows * columns, down * across
    if attention.ndim not in (1, 2) or attention.shape[-1] != n:
        raise BadTokens(
            f"attention must have shape (H, {n}) or ({n},) on a {rows}x{columns} grid, got {tuple(attention.shape)}."
        )
    for name, value in (("tiles", down), ("tiles", across), ("budget", budget)):
        check_count(name, value)
    _check_alpha(alpha)
    check_choice("fidelity", fidelity, Fidelity)
    room = [n] * (count + 1) if room is None else list(room)
    if len(room) != count + 1:
        raise BadParameter(
            f"room must say how many patches the base view and each of the {count} tiles have, got {room}."
        )
    if budget > sum(room):
        raise unmet("hired", budget, sum(room), "its base view and tiles")
    summed = _summed(attention)
    content = torch.zeros(n, dtype=torch.int64)
    content[stable_topk(summed, int(n * (1 - alpha)))[0]] = 1
    if fidelity == "released":
        if n % count:
            raise BadParameter(
                f"The released rule cuts {n} patches into {count} equal runs, which leaves {n % count} over. "
                "Take fidelity='paper', which cuts by place."
            )
        found = content.reshape(count, -1).sum(1)
    else:
        row = (2 * torch.arange(rows) + 1) * down // (2 * rows)
        column = (2 * torch.arange(columns) + 1) * across // (2 * columns)
        found = torch.zeros(count, dtype=torch.int64)
        found.index_add_(0, (row[:, None] * across + column).flatten(), content)
    counts: list[int] = found.tolist() if int(found.sum()) else [1] * count  # no content at all: all tiles alike
    base = min(int(budget * alpha), room[0])
    rest = min(budget - base, sum(room[1:]))
    if exact:
        given = _apportion(counts, rest, room[1:])
        return [budget - sum(given), *given]
    return [base, *(min(rest * mine // sum(counts), most) for mine, most in zip(counts, room[1:], strict=True))]


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
    """Plan the base view and all tiles of one high-resolution image together, under one budget (HiRED).

    Each view keeps its patches of highest CLS attention at the tap, as many as :func:`tile_budgets` gives it; that
    may be none.

    Parameters
    ----------
    base : VisualTokens
        The base view, with ``cls_attention`` and the signal ``"cls_attention@0"``, that of block 0.
    tiles : sequence of VisualTokens or None
        The tiles row by row, with ``cls_attention``; None for one that shows nothing of the image, and gets nothing.
    budget : int
        Tokens of the whole image.
    layout : (int, int)
        Rows and columns of tiles.
    alpha, fidelity, exact
        As for :func:`tile_budgets`.
    order : {"raster", "native"}
        Of the tokens of each view.

    Returns
    -------
    ReductionBatch
        The reduction of the base view, then those of the tiles that there are.
    """
    check_choice("order", order, Order)
    if layout[0] * layout[1] != len(tiles):
        raise BadParameter(f"layout {layout[0]}x{layout[1]} holds {layout[0] * layout[1]} tiles, got {len(tiles)}.")
    views = [base, *tiles]
    first = read_signal(base, "cls_attention@0", "hired", (None, len(base)))
    room = [0 if view is None else len(view) for view in views]
    shares = tile_budgets(first, base.grid, layout, budget, alpha=alpha, room=room, fidelity=fidelity, exact=exact)
    return ReductionBatch.of(
        [
            _most_attended(view, share, order, "hired", f"hired(budget={share})")
            for view, share in zip(views, shares, strict=True)
            if view is not None
        ]
    )


def _check_alpha(alpha: float) -> None:
    check_number("alpha", alpha)
    if alpha > 1:
        raise BadParameter(f"alpha must be between 0 and 1, got {alpha!r}.")


def _summed(attention: Tensor) -> Tensor:
    """Attention summed over heads, float32 rounded from float64, so that equal columns tie."""
    wide = attention.detach().double()
    return (wide.sum(0) if wide.ndim == 2 else wide).float().cpu()


def _most_attended(tokens: VisualTokens, budget: int, order: Order, name: str, by: str) -> Reduction:
    attention = _summed(tokens.signal("cls_attention", name))
    if budget > len(tokens):
        raise unmet(name, budget, len(tokens), "its patches")
    kept = stable_topk(attention, budget)[0]
    if order == "raster":
        kept = kept.sort().values
    return Reduction.pick(kept, tokens.grid, by, score=attention[kept])


def _apportion(weights: Sequence[int], total: int, room: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to ``weights`` that sum up to ``total``, none above its ``room``."""
    given, open_ = [0] * len(room), list(range(len(room)))
    while total:
        weight = dict.fromkeys(open_, 1) if not any(weights[t] for t in open_) else {t: weights[t] for t in open_}
        mass = sum(weight.values())
        full = [t for t in open_ if total * weight[t] >= room[t] * mass]
        if not full:
            for t in open_:
                given[t] = total * weight[t] // mass
            by_remainder = sorted(open_, key=lambda t: (-(total * weight[t] % mass), t))
            for t in by_remainder[: total - sum(given[t] for t in open_)]:
                given[t] += 1
            break
        for t in full:  # its share is at least what it can take; the others share what is left
            given[t] = room[t]
            total -= room[t]
            open_.remove(t)
    return given
