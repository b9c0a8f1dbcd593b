"""PruMerge: keep the patches that the CLS token attends to unusually much, and add their neighbours to them.

LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models (Shang et al., ICCV 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from torino.errors import BadParameter, BadTokens, UnmetBudget
from torino.packed import offsets_of
from torino.reducers.base import Reducer, register
from torino.reduction import Reduction
from torino.strongest import stable_top
from torino.tokens import VisualTokens

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
        for name, value, least in (
            ("budget", 1 if self.budget is None else self.budget, 1),
            ("neighbours", self.neighbours, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BadParameter(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if not isinstance(self.extra_token, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadParameter(f"extra_token must be True or False, got {self.extra_token!r}.")
        if self.order not in get_args(Order):
            raise BadParameter(f"order must be one of {', '.join(map(repr, get_args(Order)))}, got {self.order!r}.")

    @torch.no_grad()
    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        attention, keys = tokens.signal(ATTENTION, self.name), tokens.signal(KEYS, self.name)
        if attention.shape != (n,) or keys.ndim != 2 or len(keys) != n:
            raise BadTokens(
                f"{self.name} reads {ATTENTION} of shape ({n},) and {KEYS} of shape ({n}, Dk), "
                f"got {tuple(attention.shape)} and {tuple(keys.shape)}."
            )
        if not bool(torch.isfinite(attention).all()) or not bool(torch.isfinite(keys).all()):
            raise BadTokens(f"{ATTENTION} or {KEYS} holds NaN or infinite values. Run the encoder in float32.")
        if self.budget is not None and self.budget > n:
            raise UnmetBudget(
                f"{self.name} cannot give {self.budget} tokens for an image of {n} patches: each centre is another "
                "patch, and the extra token needs a patch that is no centre. Lower the budget."
            )
        attention = attention.float().cpu()
        centres, roles = self.choose(attention, stable_top(attention, n)[0])
        return self._merge(tokens, attention, keys.float(), centres, roles)

    def choose(self, attention: Tensor, ranked: Tensor) -> tuple[Tensor, list[str]]:
        """Return the centres in native order and a role for each, given patches ``ranked`` by falling attention."""
        if self.budget is not None:
            k = self.budget - self.extra_token
        else:
            k = max(outliers(attention), 1 - self.extra_token)
        return ranked[:k], ["primary"] * k

    def _merge(
        self, tokens: VisualTokens, attention: Tensor, keys: Tensor, centres: Tensor, roles: list[str]
    ) -> Reduction:
        n, k = len(tokens), len(centres)
        if self.order == "raster":
            centres, place = centres.sort()
            roles = [roles[i] for i in place.tolist()]
        keys = torch.nn.functional.normalize(keys, dim=1)
        at = centres.to(keys.device)
        similarity = (keys[at] @ keys.T).scatter_(1, at[:, None], -torch.inf)  # no centre is its own neighbour
        near, cosine = (part.cpu() for part in stable_top(similarity, min(self.neighbours, n - 1)))

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
            grid=tokens.grid,
            by=self.spec,
            assigned=_nearest(near, cosine, n, k if extra else -1).scatter_(0, centres, torch.arange(k)),
            score=torch.cat([attention[centres], torch.full((extra,), torch.nan)]),
        )


def outliers(attention: Tensor) -> int:
    """How many values lie above Q3 + 1.5 (Q3 - Q1); never more than a quarter of them."""
    values = attention.double()
    low, high = values.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    return int((values > high + 1.5 * (high - low)).sum())


def _nearest(near: Tensor, cosine: Tensor, n: int, otherwise: int) -> Tensor:
    """For each patch the row of ``near`` that holds it with the highest cosine, ties to the first row."""
    row = torch.arange(len(near))[:, None].expand_as(near).reshape(-1)
    order = cosine.reshape(-1).sort(stable=True, descending=True).indices.flip(0)  # the best one is written last
    nearest = torch.full((n,), otherwise).numpy()
    nearest[near.reshape(-1)[order].numpy()] = row[order].numpy()  # numpy keeps the last of several writes
    return torch.from_numpy(nearest)
