"""PruMerge: keep the patches of unusually high CLS attention and merge their nearest neighbors into them.

LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models (Shang et al., ICCV 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import stable_topk
from torino.reducers._checks import budget_error, check_choice, check_count, check_flag, read_signal
from torino.reducers.base import Order, Reducer, register

ATTENTION, KEYS = "cls_attention_joint@+1", "keys@+1"


@register("prumerge")
@dataclass(frozen=True)
class PruMerge(Reducer):
    """Merge into each strongly attended patch its 32 nearest neighbors by key (LLaVA-PruMerge).

    Let a be the attention of the CLS token to the patches in the block after the feature layer, computed as one head of
    full width.

    1. Centers are the outliers of a, the patches with a > Q3 + 1.5 (Q3 - Q1), quartiles by linear interpolation;
       with a ``budget``, the patches of highest a.
    2. Center i becomes x_i + Σ_j a_j x_j over the ``neighbors`` other patches, which may be centers, whose keys have
       the highest cosine with its key. The weights are not normalized, and every sum uses the original patches.
    3. One extra token is Σ_j a_j x_j over all patches that are not centers; its norm is small.

    Reads ``"cls_attention_joint@+1"`` of shape (N,) and ``"keys@+1"`` of shape (N, Dk). The score is the attention. A
    patch that is not a center is assigned to the most similar center that merges it, otherwise to the extra token.

    Differences from the release: quartiles are those of the image, not of the whole batch. Images of at most 32 patches
    use all other patches as neighbors. k is the number of outliers, not ``int(N * (k / N))`` (the same for 576
    patches). Without outliers the output is the extra token alone, as k + 1 implies, or without it the patch of highest
    attention. An extra token without patches is left out. The fixed budget is an addition: the release has a ratio.

    Parameters
    ----------
    budget : int, optional
        Exact number of tokens, at most N: ``budget - 1`` centers and the extra token, or ``budget`` centers without
        it. By default the number depends on the image.
    extra_token : bool
        Whether to add the token of step 3.
    neighbors : int
        Number of patches merged into each center; 0 merges none.
    order : {"raster", "native"}
        By position of the center with the extra token last, or by descending attention and then the extra token.
    """

    budget: int | None = None
    extra_token: bool = True
    neighbors: int = 32
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION, KEYS})
    paper: ClassVar[str] = "Shang et al., LLaVA-PruMerge, ICCV 2025, arXiv 2403.15388"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(B·N·D)"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        if self.budget is not None:
            check_count("budget", self.budget)
        check_count("neighbors", self.neighbors, minimum=0)
        check_flag("extra_token", self.extra_token)
        check_choice("order", self.order, Order)

    @torch.no_grad()
    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        attention = read_signal(tokens, ATTENTION, self.name, (n,)).float().cpu()
        keys = read_signal(tokens, KEYS, self.name, (n, None), check=False).float()
        if self.budget is not None and self.budget > n:
            raise budget_error(self.name, self.budget, n)
        centers, roles = self.choose_centers(attention, stable_topk(attention, n)[0])
        neighbors, cosine = nearest_neighbors(keys, centers, min(self.neighbors, n - 1))
        assigned = _assign_to_centers(neighbors, cosine, n).scatter_(0, centers, torch.arange(len(centers)))
        if self.order == "raster":
            centers, order = centers.sort()
            neighbors, roles = neighbors[order], [roles[i] for i in order.tolist()]
            assigned = torch.cat([order.argsort(), torch.tensor([-1])])[assigned]  # index -1, the last, stays -1
        return self._merge(tokens.grid, attention, centers, neighbors, assigned, roles)

    def choose_centers(self, attention: Tensor, ranked: Tensor) -> tuple[Tensor, list[str]]:
        """Return the centers in native order and their roles, given the patches by descending attention."""
        if self.budget is not None:
            k = self.budget - self.extra_token
        else:
            k = max(count_outliers(attention), 1 - self.extra_token)
        return ranked[:k], ["primary"] * k

    def _merge(
        self,
        grid: tuple[int, int],
        attention: Tensor,
        centers: Tensor,
        neighbors: Tensor,
        assigned: Tensor,
        roles: list[str],
    ) -> Reduction:
        n, k = len(attention), len(centers)
        is_center = torch.zeros(n, dtype=torch.bool).index_fill_(0, centers, True)
        others = (~is_center).nonzero()[:, 0]
        rest = others if self.extra_token else others[:0]
        extra = min(len(rest), 1)  # no extra token if there is no other patch
        sources = torch.cat([torch.cat([centers[:, None], neighbors], 1).reshape(-1), rest])
        weights = torch.cat([torch.ones(k, 1), attention[neighbors]], 1).reshape(-1)
        return Reduction(
            sources=sources,
            weights=torch.cat([weights, attention[rest]]),
            offsets=offsets_from_lengths([1 + neighbors.shape[1]] * k + [len(rest)] * extra),
            anchor=torch.cat([centers, torch.full((extra,), -1)]),
            concept=torch.full((k + extra,), -1),
            role=(*roles, *["extra"] * extra),
            grid=grid,
            by=self.spec,
            assigned=assigned.masked_fill(assigned < 0, k if extra else -1),
            score=torch.cat([attention[centers], torch.full((extra,), torch.nan)]),
        )


def count_outliers(attention: Tensor) -> int:
    """Return how many values exceed Q3 + 1.5 (Q3 - Q1), which is at most a quarter of them."""
    values = attention.double()
    low, high = values.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    return int((values > high + 1.5 * (high - low)).sum())


def nearest_neighbors(keys: Tensor, centers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` other patches of highest cosine with each center, by index, and their cosines.

    Both results have shape (k, count).
    """
    at = centers.to(keys.device)
    length = torch.linalg.vector_norm(keys, dim=1)
    if not bool(torch.isfinite(length).all()):  # detects NaN at a fraction of the cost of testing all keys
        if not bool(torch.isfinite(keys).all()):
            raise BadTokens(f"{KEYS} holds NaN or infinite values. Run the encoder in float32 or bfloat16.")
        keys = keys / keys.abs().max()
        length = torch.linalg.vector_norm(keys, dim=1)
    inverse = 1 / length.clamp(min=1e-12)
    cosine = (keys[at] @ keys.T).mul_(inverse).mul_(inverse[at, None])
    cosine.scatter_(1, at[:, None], -torch.inf)  # a center is not its own neighbor
    values, nearest = cosine.topk(count + 1, dim=1)
    nearest = nearest[:, :count]
    tied = values[:, count] == values[:, max(count - 1, 0)]
    if bool(tied.any()):  # topk chooses among equals arbitrarily
        nearest[tied] = stable_topk(cosine[tied], count)[0]
    nearest = nearest.sort(1).values
    return nearest.cpu(), cosine.gather(1, nearest).cpu()


def _assign_to_centers(neighbors: Tensor, cosine: Tensor, n: int) -> Tensor:
    """Return for each patch the first row of ``neighbors`` that holds it with the highest cosine, or -1."""
    row = torch.arange(len(neighbors))[:, None].expand_as(neighbors).reshape(-1)
    order = cosine.reshape(-1).sort(stable=True, descending=True).indices.flip(0)  # the best one is written last
    assigned = torch.full((n,), -1).numpy()
    assigned[neighbors.reshape(-1)[order].numpy()] = row[order].numpy()  # numpy keeps the last of several writes
    return torch.from_numpy(assigned)
