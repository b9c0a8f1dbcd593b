"""GTP-ViT in one shot at the tap layer: patches that are let go pass something on to their neighbours in a graph.

Xu et al., GTP-ViT: Efficient Vision Transformers via Graph-based Token Propagation, WACV 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import input_rounding
from torino.reducers._checks import check_choice, check_count, check_number, read_signal, unmet
from torino.reducers._matching import Order, directions, settled
from torino.reducers.base import Reducer, register
from torino.reducers.divprune import products

Graph = Literal["mixed", "spatial", "semantic"]
Select = Literal["attention", "cosine"]


@register("gtp")
@dataclass(frozen=True)
class GTP(Reducer):
    """Keep the important patches; the others are propagated to their neighbours before they go (GTP-ViT, one shot).

    The graph joins patches that touch on the grid (8 neighbours) or are among the most similar to one another:
    each patch with its ``neighbours`` highest cosines, all that tie with the last included; a patch is not its own
    neighbour. With row sums as degrees, Â = D^-½·A·D^-½. Importance is max_h A_ii × max_h Σ_q A_qi, how hard a
    patch is to make from others times how much attention it receives (MixedAttnMax). The N − budget least important
    patches P are propagated to the kept ones K: x_K + alpha·Â_KP·x_P.

    Deviations: GTP takes a few patches in each block of a ViT, with a graph of the embeddings, and adds the log of
    the tokens' scales to later attention logits, which is ``gtp-tower``; this is all of it at the tap, with a graph
    of the patches there, as no later block sees the scales. Sums over queries leave out the CLS token, one of N + 1.
    ``select="cosine"`` and ``hops`` are ours. Attention sparsity has no place here.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N; no CLS token among them.
    alpha : float
        How much is passed on; the authors' searches chose 0.1 to 0.4.
    graph : {"mixed", "spatial", "semantic"}
    neighbours : int
        Most similar patches that each patch is joined with.
    select : {"attention", "cosine"}
        Importance as above, from the patch-to-patch attention; or, without any attention, the lower the sum of
        a patch's cosines with all patches the more important.
    hops : int
        With 1, as released, a patch without a kept neighbour is lost. With more, propagated patches pass on to
        one another first: walks of up to that many edges, each edge weighed by alpha, all but the last among P.
    order : {"raster", "native"}
        By place; or by falling importance, as released.
    """

    budget: int
    alpha: float = 0.1
    graph: Graph = "mixed"
    neighbours: int = 8
    select: Select = "attention"
    hops: int = 1
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D + H·N²)"
    paper: ClassVar[str] = "Xu et al., GTP-ViT, WACV 2024"
    original_licence: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("graph", self.graph, Graph)
        check_count("neighbours", self.neighbours)
        check_choice("select", self.select, Select)
        check_count("hops", self.hops)
        check_choice("order", self.order, Order)
        if self.select == "cosine":
            object.__setattr__(self, "needs", frozenset())

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise unmet(self.name, self.budget, n, f"its {n} patches")
        if self.select == "attention":
            important = importance(read_signal(tokens, "attention", self.name, (None, n, n), check=False))
            if not bool(important.isfinite().all()):
                raise BadTokens("attention holds NaN or infinite values. Run the encoder in float32 or bfloat16.")
        else:
            unit = directions(tokens.patches)
            important = -(unit @ unit.sum(0)).float()
        graph = token_graph(tokens.patches, tokens.grid, self.graph, self.neighbours)
        return gtp_step(
            graph, important, n - self.budget, self.alpha, self.hops, order=self.order, grid=tokens.grid, by=self.spec
        )


def importance(attention: Tensor) -> Tensor:
    """The MixedAttnMax rank of each patch: (H, T, T), rows are queries, to (T,) float32.

    There may be rows of further queries above, such as that of the CLS token, which count as received only.

    Examples
    --------
    >>> importance(torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.0, 1.0]]]))  # 0.25 · 0.75 and 1 · 2.25
    tensor([0.1875, 2.2500])
    """
    attention = attention.detach().float()
    own = attention.diagonal(attention.shape[2] - attention.shape[1], dim1=1, dim2=2).amax(0)
    return own * attention.sum(1).amax(0)


def token_graph(patches: Tensor, grid: tuple[int, int], kind: Graph = "mixed", neighbours: int = 8) -> Tensor:
    """The normalised graph Â of an image, shape (N, N), float32; a patch without neighbours has a row of zeros.

    Examples
    --------
    >>> token_graph(torch.zeros(3, 1), grid=(1, 3), kind="spatial")
    tensor([[0.0000, 0.7071, 0.0000],
            [0.7071, 0.0000, 0.7071],
            [0.0000, 0.7071, 0.0000]])
    """
    n = len(patches)
    joined = patches.new_zeros(n, n, dtype=torch.bool) if kind == "spatial" else _similar(patches, neighbours)
    if kind != "semantic":
        _join_touching(joined, grid)
    joined.fill_diagonal_(False)
    scale = joined.view(torch.uint8).sum(1, dtype=torch.int32).clamp(min=1).float().rsqrt()
    return torch.outer(scale, scale).mul_(joined)


def _join_touching(joined: Tensor, grid: tuple[int, int]) -> None:
    """Join patches that are at most one row and one column apart, in place in ``joined`` (N, N): eight diagonals."""
    columns = grid[1]
    place = torch.arange(len(joined), device=joined.device) % columns
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        apart = down * columns + right
        if 0 < apart < len(joined):
            within = ((place + right >= 0) & (place + right < columns))[:-apart]
            joined.diagonal(apart).logical_or_(within)
            joined.diagonal(-apart).logical_or_(within)


def _similar(patches: Tensor, k: int) -> Tensor:
    """For each patch, those with the k highest cosines and those that tie with the last of them, shape (N, N).

    A cosine is float64 rounded to float32, as in :func:`cosines`. A float32 product tells most of them from the
    k-th; only what lies within its error of that is computed so, or everything if that is much.
    """
    n, width = patches.shape
    if k >= n - 1:
        return torch.ones(n, n, dtype=torch.bool, device=patches.device)
    narrow = _unit_length(patches)
    rough = products(narrow).fill_diagonal_(-torch.inf)
    most, nearest = rough.topk(k + 1, dim=1)
    slack = 2 * ((width + 16) * 2.0**-24 + input_rounding(narrow))
    joined = torch.zeros(n, n, dtype=torch.bool, device=patches.device).scatter_(1, nearest[:, :k], True)
    open_ = (most[:, k] >= most[:, k - 1] - slack).nonzero()[:, 0]
    if len(open_) == 0:
        return joined
    rough, last = rough[open_], most[open_, k - 1, None]
    above = rough > last + slack
    row, column = ((rough >= last - slack) & ~above).nonzero(as_tuple=True)
    if len(row) > 2 * n:
        unit = directions(patches)
        exact = settled(unit @ unit.T).float().fill_diagonal_(-torch.inf)
        return exact >= exact.topk(k, dim=1).values[:, -1:]
    here, there = directions(patches[torch.cat([open_[row], column])]).chunk(2)
    exact = above * 4.0 - 2.0  # beyond any cosine, either way
    exact[row, column] = settled(here.mul_(there).sum(1)).float()
    joined[open_] = exact >= exact.topk(k, dim=1).values[:, -1:]
    return joined


def _unit_length(patches: Tensor) -> Tensor:
    """Patches of unit length in float32, each number within three roundings; those of no length stay zero."""
    size = patches.detach().double().norm(dim=1, keepdim=True)
    if bool(((size > 2.0**-60) & (size < 2.0**60) | (size == 0)).all()):
        return patches.detach().float() / size.clamp(min=2.0**-60).float()
    return directions(patches).float()  # where float32 could lose digits


def gtp_step(
    graph: Tensor,
    important: Tensor,
    propagated: int,
    alpha: float,
    hops: int = 1,
    *,
    order: Order = "native",
    grid: tuple[int, int] | None = None,
    by: str = "gtp-step",
) -> Reduction:
    """Let ``propagated`` of T tokens go, and pass them on to those that stay: one block's step, or all of it at once.

    Inside a tower the CLS token is kept aside, and one starts with ``done = Reduction.identity(grid)``,
    ``graph = token_graph(embedded patches, grid)`` and ``scales`` of ones. In each block, between attention and MLP:
    ``step = gtp_step(graph, importance(attention), p, alpha)``, ``states = step.apply(states)``,
    ``scales = step.apply(scales)``, ``graph = graph[step.anchor][:, step.anchor]``, ``done = done.then(step)``. From
    then on ln(scales) belongs on the key side of the attention logits. ``gtp-tower`` does this.

    Parameters
    ----------
    graph : Tensor of shape (T, T)
        Â, as :func:`token_graph` makes it, rows receive.
    important : Tensor of shape (T,)
        The least important go; of equals, those of the highest position.
    propagated : int
        From 0 to T − 1.
    alpha, hops, order
        As for ``gtp``.
    grid : (int, int), optional
        (1, T) unless given.

    Returns
    -------
    Reduction

    Examples
    --------
    >>> graph = token_graph(torch.zeros(3, 1), grid=(1, 3), kind="spatial")
    >>> gtp_step(graph, torch.tensor([3.0, 1, 2]), 1, alpha=0.5).apply(torch.tensor([10.0, 20, 30]))
    tensor([17.0711, 37.0711])
    """
    n = len(important)
    if graph.shape != (n, n) or important.ndim != 1:
        raise BadTokens(
            f"gtp_step takes a graph of shape (T, T) and importance of shape (T,), got {tuple(graph.shape)} and "
            f"{tuple(important.shape)}. Give one image at a time."
        )
    if not 0 <= propagated < n:
        raise BadParameter(f"propagated must be between 0 and T − 1 = {n - 1}, got {propagated}.")
    rank = important.argsort(descending=True, stable=True)
    kept, gone = rank[: n - propagated], rank[n - propagated :]
    if order == "raster":
        kept = kept.sort().values
    matrix = reach = (alpha * graph[kept]).index_fill_(1, kept, 0.0)
    for _ in range(hops - 1):
        reach = (alpha * (reach @ graph)).index_fill_(1, kept, 0.0)
        matrix = matrix + reach
    kept, gone, matrix = kept.cpu(), gone.cpu(), matrix.detach().float().cpu()

    m = len(kept)
    assigned = torch.full((n,), -1)
    most, receiver = matrix.max(0)  # a patch that goes is stood for by whoever gets most of it
    assigned[gone] = torch.where(most > 0, receiver, -1)[gone]
    assigned[kept] = torch.arange(m)
    matrix[torch.arange(m), kept] = 1.0
    row, column = matrix.nonzero(as_tuple=True)
    return Reduction(
        sources=column,
        weights=matrix[row, column],
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), row.bincount(minlength=m).cumsum(0)]),
        anchor=kept,
        concept=torch.full((m,), -1),
        role=("primary",) * m,
        grid=grid or (1, n),
        by=by,
        assigned=assigned,
        score=important.detach().float().cpu()[kept],
    )
