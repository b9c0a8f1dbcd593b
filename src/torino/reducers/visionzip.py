"""VisionZip: keep what the CLS token attends to, and merge the rest into a few contextual tokens.

Yang et al., VisionZip: Longer is Better but Not Necessary in Vision Language Models, CVPR 2025 (arXiv 2412.04467).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import stable_topk
from torino.reducers._checks import check_choice, check_count, read_signal, unmet
from torino.reducers._matching import Order, cosines
from torino.reducers.base import Reducer, register

Fidelity = Literal["released", "paper"]


@register("visionzip")
@dataclass(frozen=True)
class VisionZip(Reducer):
    """Keep CLS and the patches it attends to most, and merge all others into a few contextual tokens (VisionZip).

    Of a budget of B tokens, M are contextual and D = B − M dominant: the CLS token and the D − 1 patches of highest
    CLS attention, summed over heads. Of the R patches left, in raster order, every (R//M)-th is a target, M of them
    from the first on; each other one goes to the target whose key, averaged over heads, has the highest cosine with
    its own. The authors' splits of 192, 128 and 64 are 162 + 30, 108 + 20 and 54 + 10, so M = 5/32·B, rounded.

    As released, a contextual token is its target *plus* the mean of the patches that go to it, with weights that
    sum to 2 (1 if none goes there), so about twice as long as a patch; merged as the word is commonly meant, it would
    be the mean of them all. It takes the place of its target. The CLS token is part of the output and of the
    budget. Not permutation equivariant: targets are picked by place. Ties go to the lowest index, which the release
    leaves open.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, CLS included: at least 3, at most N + 1.
    contextual : int, optional
        How many of them are contextual, from 1 to budget − 2; 5/32 of the budget unless given.
    fidelity : {"released", "paper"}
        Target plus mean, or the plain mean of the target and all that go to it (our reading of "merge").
    order : {"raster", "native"}
        By place, CLS last; or as released: CLS, dominant by place, contextual by place of the target.
    """

    budget: int
    contextual: int | None = None
    fidelity: Fidelity = "released"
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls", "cls_attention", "head_keys"})
    emits_cls: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(B·N·D/H)"
    paper: ClassVar[str] = "Yang et al., VisionZip, CVPR 2025, arXiv 2412.04467"
    original_licence: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget, 3)
        check_count("contextual", 1 if self.contextual is None else self.contextual)
        check_choice("fidelity", self.fidelity, Fidelity)
        check_choice("order", self.order, Order)
        if self.split[0] < 2:
            raise BadParameter(
                f"contextual must be between 1 and budget − 2 = {self.budget - 2}, got {self.contextual}: "
                "the CLS token and at least one patch are dominant."
            )

    @property
    def split(self) -> tuple[int, int]:
        """Dominant tokens, CLS included, and contextual ones.

        Examples
        --------
        >>> [VisionZip(budget).split for budget in (192, 128, 64)]
        [(162, 30), (108, 20), (54, 10)]
        """
        contextual = max(1, (5 * self.budget + 16) // 32) if self.contextual is None else self.contextual
        return self.budget - contextual, contextual

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, (dominant, contextual) = len(tokens), self.split
        tokens.signal("cls", self.name)
        attention = read_signal(tokens, "cls_attention", self.name, (None, n)).detach()
        keys = read_signal(tokens, "head_keys", self.name, (n, None))
        if self.budget > n + 1:
            raise unmet(self.name, self.budget, n + 1, f"its {n} patches and the CLS token")
        attention = attention.sum(0, dtype=torch.float64).float().cpu()
        kept = stable_topk(attention, dominant - 1)[0].sort().values
        is_left = torch.ones(n, dtype=torch.bool)
        is_left[kept] = False
        left = is_left.nonzero()[:, 0]
        position = torch.arange(contextual) * (len(left) // contextual)
        targets = left[position]
        is_left[targets] = False
        others = is_left.nonzero()[:, 0]
        device = keys.device
        nearest = cosines(keys[others.to(device)], keys[targets.to(device)]).argmax(1).cpu()  # the first of equals

        count = nearest.bincount(minlength=contextual)
        released = self.fidelity == "released"
        first = torch.ones(contextual) if released else 1 / (1 + count)
        rest = 1 / (count if released else 1 + count)  # infinite where there is no other, and then not used

        # one row per output token in native order: CLS, dominant, contextual; then the order asked for
        start = dominant + torch.arange(contextual)
        row = torch.cat([torch.arange(dominant), start, dominant + nearest])
        sources = torch.cat([torch.tensor([n]), kept, targets, others])
        weights = torch.cat([torch.ones(dominant), first, rest[nearest]])
        anchor = torch.cat([torch.tensor([-1]), kept, targets])
        score = torch.cat([torch.tensor([torch.nan]), attention[kept], torch.full((contextual,), torch.nan)])
        role = ["cls", *["primary"] * (dominant - 1), *["context"] * contextual]
        order = torch.arange(self.budget)
        if self.order == "raster":
            order = torch.where(anchor < 0, n, anchor).argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(self.budget)
        row = place[row]
        by_row = row.argsort(stable=True)
        assigned = torch.full((n + 1,), -1)
        assigned[sources] = row
        return Reduction(
            sources=sources[by_row],
            weights=weights[by_row],
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), row.bincount(minlength=self.budget).cumsum(0)]),
            anchor=anchor[order],
            concept=torch.full((self.budget,), -1),
            role=tuple(role[token] for token in order.tolist()),
            grid=tokens.grid,
            by=self.spec,
            assigned=assigned[:-1],
            score=score[order],
        )
