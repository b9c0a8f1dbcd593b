"""GTP-ViT on output tokens: removed patches are propagated to their neighbors in a graph.

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
from torino.reducers._checks import budget_error, check_choice, check_count, check_number, read_signal
from torino.reducers._similarity import gram_matrix, round_cosines, unit_vectors
from torino.reducers.base import Order, Reducer, register

Graph = Literal["mixed", "spatial", "semantic"]
Select = Literal["attention", "cosine"]


@register("gtp")
@dataclass(frozen=True)
class GTP(Reducer):
    """Keep the most important patches and add the others to their graph neighbors (GTP-ViT).

    The graph connects patches that touch on the grid (8 neighbors) or are similar: each patch with the ``neighbors``
    patches of highest cosine, including all ties with the last one. A patch is not its own neighbor. With row sums as
    degrees, Â = D^-½·A·D^-½. The importance is max_h A_ii × max_h Σ_q A_qi: how hard a patch is to reconstruct from the
    others, times the attention it receives (MixedAttnMax). The N − budget least important patches P are propagated to
    the kept ones K: x_K + alpha·Â_KP·x_P.

    Deviations: the original removes a few patches in each block of a ViT, with a graph of the embeddings, and adds the
    log of the token scales to later attention logits; that is ``gtp-tower``. This class does everything on the output
    tokens, with a graph of these tokens, since no later block uses the scales. The sums over queries leave out the CLS
    token, one of N + 1. ``select="cosine"`` and ``hops`` are additions. Attention sparsity does not apply here.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N, without the CLS token.
    alpha : float
        Propagation weight; the authors' searches chose 0.1 to 0.4.
    graph : {"mixed", "spatial", "semantic"}
    neighbors : int
        Number of most similar patches that each patch is connected to.
    select : {"attention", "cosine"}
        Importance as above, from the patch-to-patch attention; or, without attention, the negative sum of the cosines
        of a patch with all patches.
    hops : int
        With 1, as released, a patch without a kept neighbor is lost. With more, removed patches first propagate to one
        another: walks of up to ``hops`` edges, each weighted by alpha, all but the last one within P.
    order : {"raster", "native"}
        By position, or by descending importance, as released.
    """

    budget: int
    alpha: float = 0.1
    graph: Graph = "mixed"
    neighbors: int = 8
    select: Select = "attention"
    hops: int = 1
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D + H·N²)"
    paper: ClassVar[str] = "Xu et al., GTP-ViT, WACV 2024"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("graph", self.graph, Graph)
        check_count("neighbors", self.neighbors)
        check_choice("select", self.select, Select)
        check_count("hops", self.hops)
        check_choice("order", self.order, Order)
        if self.select == "cosine":
            object.__setattr__(self, "needs", frozenset())

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        if self.select == "attention":
            attention = read_signal(tokens, "attention", self.name, (None, n, n), check=False)
            importance = mixed_attention_importance(attention)
            if not bool(importance.isfinite().all()):
                raise BadTokens("attention holds NaN or infinite values. Run the encoder in float32 or bfloat16.")
        else:
            unit = unit_vectors(tokens.patches)
            importance = -(unit @ unit.sum(0)).float()
        graph = build_graph(tokens.patches, tokens.grid, self.graph, self.neighbors)
        return gtp_step(
            graph, importance, n - self.budget, self.alpha, self.hops, order=self.order, grid=tokens.grid, by=self.spec
        )


def mixed_attention_importance(attention: Tensor) -> Tensor:
    """Return the MixedAttnMax importance of each patch: (H, T, T), rows are queries, to (T,) float32.

    Additional queries, such as the CLS token, may precede the T rows; they count only as attention received.

    Examples
    --------
    >>> mixed_attention_importance(torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.0, 1.0]]]))  # 0.25 · 0.75 and 1 · 2.25
    tensor([0.1875, 2.2500])
    """
    attention = attention.detach().float()
    own = attention.diagonal(attention.shape[2] - attention.shape[1], dim1=1, dim2=2).amax(0)
    return own * attention.sum(1).amax(0)


def build_graph(patches: Tensor, grid: tuple[int, int], kind: Graph = "mixed", neighbors: int = 8) -> Tensor:
    """Return the normalized graph Â of an image, shape (N, N), float32. A patch without neighbors has a row of zeros.

    Examples
    --------
    >>> build_graph(torch.zeros(3, 1), grid=(1, 3), kind="spatial")
    tensor([[0.0000, 0.7071, 0.0000],
            [0.7071, 0.0000, 0.7071],
            [0.0000, 0.7071, 0.0000]])
    """
    n = len(patches)
    adjacent = patches.new_zeros(n, n, dtype=torch.bool) if kind == "spatial" else _nearest_mask(patches, neighbors)
    if kind != "semantic":
        _add_grid_edges(adjacent, grid)
    adjacent.fill_diagonal_(False)
    scale = adjacent.view(torch.uint8).sum(1, dtype=torch.int32).clamp(min=1).float().rsqrt()
    return torch.outer(scale, scale).mul_(adjacent)


def _add_grid_edges(adjacent: Tensor, grid: tuple[int, int]) -> None:
    """Connect patches at most one row and one column apart, in place in ``adjacent`` (N, N): eight diagonals."""
    columns = grid[1]
    column = torch.arange(len(adjacent), device=adjacent.device) % columns
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):
        distance = down * columns + right
        if 0 < distance < len(adjacent):
            on_grid = ((column + right >= 0) & (column + right < columns))[:-distance]
            adjacent.diagonal(distance).logical_or_(on_grid)
            adjacent.diagonal(-distance).logical_or_(on_grid)


def _nearest_mask(patches: Tensor, k: int) -> Tensor:
    """Mark for each patch the k patches of highest cosine and all ties with the last one, shape (N, N).

    Cosines are float64 rounded to float32, as in :func:`cross_cosines`. A float32 product separates most of them from
    the k-th; only those within its error are computed in float64, or all of them if there are many.
    """
    n, width = patches.shape
    if k >= n - 1:
        return torch.ones(n, n, dtype=torch.bool, device=patches.device)
    narrow = _float32_unit_vectors(patches)
    approximate = gram_matrix(narrow).fill_diagonal_(-torch.inf)
    highest, nearest = approximate.topk(k + 1, dim=1)
    tolerance = 2 * ((width + 16) * 2.0**-24 + input_rounding(narrow))
    adjacent = torch.zeros(n, n, dtype=torch.bool, device=patches.device).scatter_(1, nearest[:, :k], True)
    uncertain = (highest[:, k] >= highest[:, k - 1] - tolerance).nonzero()[:, 0]
    if len(uncertain) == 0:
        return adjacent
    approximate, kth = approximate[uncertain], highest[uncertain, k - 1, None]
    above = approximate > kth + tolerance
    row, column = ((approximate >= kth - tolerance) & ~above).nonzero(as_tuple=True)
    if len(row) > 2 * n:
        unit = unit_vectors(patches)
        exact = round_cosines(unit @ unit.T).float().fill_diagonal_(-torch.inf)
        return exact >= exact.topk(k, dim=1).values[:, -1:]
    first, second = unit_vectors(patches[torch.cat([uncertain[row], column])]).chunk(2)
    exact = above * 4.0 - 2.0  # 2 or -2, outside the range of cosines
    exact[row, column] = round_cosines(first.mul_(second).sum(1)).float()
    adjacent[uncertain] = exact >= exact.topk(k, dim=1).values[:, -1:]
    return adjacent


def _float32_unit_vectors(patches: Tensor) -> Tensor:
    """Return patches of unit length in float32, each entry within three roundings. Rows of length zero stay zero."""
    size = patches.detach().double().norm(dim=1, keepdim=True)
    if bool(((size > 2.0**-60) & (size < 2.0**60) | (size == 0)).all()):
        return patches.detach().float() / size.clamp(min=2.0**-60).float()
    return unit_vectors(patches).float()  # float32 could lose digits


def gtp_step(
    graph: Tensor,
    importance: Tensor,
    propagated: int,
    alpha: float,
    hops: int = 1,
    *,
    order: Order = "native",
    grid: tuple[int, int] | None = None,
    by: str = "gtp-step",
) -> Reduction:
    """Remove ``propagated`` of T tokens and add them to the kept ones; one block of a tower, or the whole method.

    To run GTP inside a tower, keep the CLS token separate and start with ``total = Reduction.identity(grid)``,
    ``graph = build_graph(embedded patches, grid)`` and ``scales`` of ones. In each block, between attention and MLP,
    compute ``step = gtp_step(graph, mixed_attention_importance(attention), p, alpha)``, then
    ``states = step.apply(states)``, ``scales = step.apply(scales)``, ``graph = graph[step.anchor][:, step.anchor]`` and
    ``total = total.then(step)``. From then on add ln(scales) to the attention logits of the keys. ``gtp-tower`` does
    this.

    Parameters
    ----------
    graph : Tensor of shape (T, T)
        Â from :func:`build_graph`; rows receive.
    importance : Tensor of shape (T,)
        The least important tokens are removed; among equals, those of the highest position.
    propagated : int
        From 0 to T − 1.
    alpha, hops, order
        As for ``gtp``.
    grid : (int, int), optional
        Defaults to (1, T).

    Returns
    -------
    Reduction

    Examples
    --------
    >>> graph = build_graph(torch.zeros(3, 1), grid=(1, 3), kind="spatial")
    >>> gtp_step(graph, torch.tensor([3.0, 1, 2]), 1, alpha=0.5).apply(torch.tensor([10.0, 20, 30]))
    tensor([17.0711, 37.0711])
    """
    n = len(importance)
    if graph.shape != (n, n) or importance.ndim != 1:
        raise BadTokens(
            f"gtp_step takes a graph of shape (T, T) and importance of shape (T,), got {tuple(graph.shape)} and "
            f"{tuple(importance.shape)}. Give one image at a time."
        )
    if not 0 <= propagated < n:
        raise BadParameter(f"propagated must be between 0 and T − 1 = {n - 1}, got {propagated}.")
    rank = importance.argsort(descending=True, stable=True)
    kept, removed = rank[: n - propagated], rank[n - propagated :]
    if order == "raster":
        kept = kept.sort().values
    matrix = walk = (alpha * graph[kept]).index_fill_(1, kept, 0.0)
    for _ in range(hops - 1):
        walk = (alpha * (walk @ graph)).index_fill_(1, kept, 0.0)
        matrix = matrix + walk
    kept, removed, matrix = kept.cpu(), removed.cpu(), matrix.detach().float().cpu()

    m = len(kept)
    assigned = torch.full((n,), -1)
    largest, receiver = matrix.max(0)  # a removed patch is assigned to the token that receives most of it
    assigned[removed] = torch.where(largest > 0, receiver, -1)[removed]
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
        score=importance.detach().float().cpu()[kept],
    )
