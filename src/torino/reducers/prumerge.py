"""PruMerge: keep the patches that the CLS token attends to unusually much, and add their neighbours to them.

LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models (Shang et al., ICCV 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torino.core.errors import BadTokens, UnmetBudget
from torino.core.ragged import offsets_of
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import stable_topk
from torino.reducers._checks import check_choice, check_count, check_flag, read_signal
from torino.reducers.base import Reducer, register

Order = Literal["raster", "native"]
ATTENTION, KEYS = "cls_attention_joint@+1", "keys@+1"


@register("prumerge")
@dataclass(frozen=True)
class PruMerge(Reducer):
    """Merge into each strongly attended patch its 32 nearest neighbours by key (LLaVA-PruMerge).

    With a the attention of the CLS token to the patches, in the block after the tap and as one head of full width:

    1. Centres are the outliers of a, the patches with a > Q3 + 1.5 (Q3 - Q1), quartiles by linear interpolation;
       with a ``budget``, the patches of highest a.
    2. Centre i becomes x_i + Σ_j a_j x_j over the ``neighbours`` other patches, centres among them, whose keys have
       the highest cosine with its own. The weights are not normalised, and every sum reads the patches as they were.
    3. One extra token is Σ_j a_j x_j over all patches that are no centres; its norm is small.

    Reads ``"cls_attention_joint@+1"`` of shape (N,) and ``"keys@+1"`` of shape (N, Dk). Attention is the score; a
    patch that is no centre is stood for by the nearest centre that takes it in, or else by the extra token.

    As released, with these differences. Quartiles are those of the image, not of the whole batch. Images of 32 patches
    or fewer use all other patches as neighbours. k is the whole number of outliers, not ``int(N * (k / N))`` (the same
    for 576 patches). Without outliers the extra token comes alone, as k + 1 says, and without it the patch of highest
    attention. An extra token made of no patch is left out. The fixed budget is ours: the release knows a ratio only.

    Parameters
    ----------
    budget : int, optional
        Exactly this many tokens, at most N: ``budget - 1`` centres and the extra token, or ``budget`` centres without
        it. By default the image decides.
    extra_token : bool
        Whether to add the token of step 3.
    neighbours : int
        Patches merged into each centre; 0 merges none.
    order : {"raster", "native"}
        By place of the centre with the extra token last, or by falling attention and then the extra token.
    """

    budget: int | None = None
    extra_token: bool = True
    neighbours: int = 32
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({ATTENTION, KEYS})
    paper: ClassVar[str] = "Shang et al., LLaVA-PruMerge, ICCV 2025, arXiv 2403.15388"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = True
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(B·N·D)"
    original_licence: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        if self.budget is not None:
            check_count("budget", self.budget)
        check_count("neighbours", self.neighbours, least=0)
        check_flag("extra_token", self.extra_token)
        check_choice("order", self.order, Order)

    @torch.no_grad()
    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        attention = read_signal(tokens, ATTENTION, self.name, (n,)).float().cpu()
        keys = read_signal(tokens, KEYS, self.name, (n, None), check=False).float()
        if self.budget is not None and self.budget > n:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens for an image of {n} patches: each centre is another "
                "patch, and the extra token needs a patch that is no centre. Lower the budget."
            )
        centres, roles = self.choose(attention, stable_topk(attention, n)[0])
        near, cosine = nearest(keys, centres, min(self.neighbours, n - 1))
        stands = _stand_in(near, cosine, n).scatter_(0, centres, torch.arange(len(centres)))
        if self.order == "raster":
            centres, place = centres.sort()
            near, roles = near[place], [roles[i] for i in place.tolist()]
            stands = torch.cat([place.argsort(), torch.tensor([-1])])[stands]  # -1, the last, stays -1
        return self._merge(tokens.grid, attention, centres, near, stands, roles)

    def choose(self, attention: Tensor, ranked: Tensor) -> tuple[Tensor, list[str]]:
        """Return the centres in native order and a role for each, given patches ``ranked`` by falling attention."""
        if self.budget is not None:
            k = self.budget - self.extra_token
        else:
            k = max(outliers(attention), 1 - self.extra_token)
        return ranked[:k], ["primary"] * k

    def _merge(
        self, grid: tuple[int, int], attention: Tensor, centres: Tensor, near: Tensor, stands: Tensor, roles: list[str]
    ) -> Reduction:
        n, k = len(attention), len(centres)
        is_centre = torch.zeros(n, dtype=torch.bool).index_fill_(0, centres, True)
        others = (~is_centre).nonzero()[:, 0]
        rest = others if self.extra_token else others[:0]
        extra = min(len(rest), 1)  # a token made of no patch is no token
        sources = torch.cat([torch.cat([centres[:, None], near], 1).reshape(-1), rest])
        weights = torch.cat([torch.ones(k, 1), attention[near]], 1).reshape(-1)
        nothing = torch.full((extra,), -1)
        return Reduction(
            sources=sources,
            weights=torch.cat([weights, attention[rest]]),
            offsets=offsets_of([1 + near.shape[1]] * k + [len(rest)] * extra),
            anchor=torch.cat([centres, nothing]),
            concept=torch.full((k + extra,), -1),
            role=(*roles, *["extra"] * extra),
            grid=grid,
            by=self.spec,
            assigned=stands.masked_fill(stands < 0, k if extra else -1),
            score=torch.cat([attention[centres], torch.full((extra,), torch.nan)]),
        )


def outliers(attention: Tensor) -> int:
    """How many values lie above Q3 + 1.5 (Q3 - Q1); never more than a quarter of them."""
    values = attention.double()
    low, high = values.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    return int((values > high + 1.5 * (high - low)).sum())


def nearest(keys: Tensor, centres: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` other patches of highest cosine with each centre, by place, and their cosines; both (k, count)."""
    at = centres.to(keys.device)
    length = torch.linalg.vector_norm(keys, dim=1)
    if not bool(torch.isfinite(length).all()):  # this looks for NaN at a fraction of the cost of looking at all keys
        if not bool(torch.isfinite(keys).all()):
            raise BadTokens(f"{KEYS} holds NaN or infinite values. Run the encoder in float32 or bfloat16.")
        keys = keys / keys.abs().max()
        length = torch.linalg.vector_norm(keys, dim=1)
    inverse = 1 / length.clamp(min=1e-12)
    cosine = (keys[at] @ keys.T).mul_(inverse).mul_(inverse[at, None])
    cosine.scatter_(1, at[:, None], -torch.inf)  # no centre is its own neighbour
    values, near = cosine.topk(count + 1, dim=1)
    near = near[:, :count]
    tied = values[:, count] == values[:, max(count - 1, 0)]
    if bool(tied.any()):  # only then does it matter which of equals topk took
        near[tied] = stable_topk(cosine[tied], count)[0]
    near = near.sort(1).values
    return near.cpu(), cosine.gather(1, near).cpu()


def _stand_in(near: Tensor, cosine: Tensor, n: int) -> Tensor:
    """For each patch the first row of ``near`` that holds it with the highest cosine; -1 where none does."""
    row = torch.arange(len(near))[:, None].expand_as(near).reshape(-1)
    order = cosine.reshape(-1).sort(stable=True, descending=True).indices.flip(0)  # the best one is written last
    stand_in = torch.full((n,), -1).numpy()
    stand_in[near.reshape(-1)[order].numpy()] = row[order].numpy()  # numpy keeps the last of several writes
    return torch.from_numpy(stand_in)
