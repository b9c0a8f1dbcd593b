"""VisionZip: keep the patches of highest CLS attention and merge the rest into a few contextual tokens.

Yang et al., VisionZip: Longer is Better but Not Necessary in Vision Language Models, CVPR 2025 (arXiv 2412.04467).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.core.topk.exact import stable_topk
from torino.reducers._checks import budget_error, check_choice, check_count, read_signal
from torino.reducers._similarity import cross_cosines
from torino.reducers.base import Fidelity, Order, Reducer, register


@register("visionzip")
@dataclass(frozen=True)
class VisionZip(Reducer):
    """Keep CLS and its most attended patches; merge the rest into context tokens (VisionZip).

    Of a budget of B tokens, M are contextual and D = B − M dominant. Dominant are the CLS token and the D − 1 patches
    of highest CLS attention, summed over heads. Of the R remaining patches, in raster order, every (R//M)-th is a
    target, M in total, starting with the first. Each other patch is merged into the target whose key, averaged over
    heads, has the highest cosine with its own. The authors' splits of 192, 128 and 64 are 162 + 30, 108 + 20 and
    54 + 10, so M = 5/32·B, rounded.

    As released, a contextual token is its target *plus* the mean of the patches merged into it. Its weights sum to 2 (1
    if no patch is merged), so it is about twice as long as a patch; a usual merge would be the mean of all of them. It
    has the position of its target. The CLS token is part of the output and of the budget. The method is not
    permutation equivariant, since targets are chosen by position. Ties go to the lowest index, which the release does
    not specify.

    Parameters
    ----------
    budget : int
        Exact number of tokens, CLS included: at least 3, at most N + 1.
    contextual : int, optional
        Number of contextual tokens, from 1 to budget − 2. Defaults to 5/32 of the budget.
    fidelity : {"released", "paper"}
        Target plus mean, or the mean of the target and the patches merged into it (our reading of "merge").
    order : {"raster", "native"}
        By position, CLS last; or as released: CLS, dominant by position, contextual by position of the target.
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
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget, 3)
        check_count("contextual", 1 if self.contextual is None else self.contextual)
        check_choice("fidelity", self.fidelity, Fidelity)
        check_choice("order", self.order, Order)
        if self.split[0] < 2:
            raise BadParameter(
                f"contextual must be between 1 and budget − 2 = {self.budget - 2}, got {self.contextual}: "
                "the CLS token and at least one patch are always kept."
            )

    @property
    def split(self) -> tuple[int, int]:
        """Number of dominant tokens, CLS included, and of contextual tokens.

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
        attention = read_signal(tokens, "cls_attention", self.name, (None, n))
        keys = read_signal(tokens, "head_keys", self.name, (n, None))
        if self.budget > n + 1:
            raise budget_error(self.name, self.budget, n + 1, "tokens (patches and the CLS token)")
        attention = attention.sum(0, dtype=torch.float64).float().cpu()
        kept = stable_topk(attention, dominant - 1)[0].sort().values
        is_remaining = torch.ones(n, dtype=torch.bool)
        is_remaining[kept] = False
        remaining = is_remaining.nonzero()[:, 0]
        targets = remaining[torch.arange(contextual) * (len(remaining) // contextual)]
        is_remaining[targets] = False
        others = is_remaining.nonzero()[:, 0]
        device = keys.device
        cosine = cross_cosines(keys[others.to(device)], keys[targets.to(device)])
        nearest = cosine.argmax(1).cpu()  # the first of equals

        count = nearest.bincount(minlength=contextual)
        released = self.fidelity == "released"
        target_weight = torch.ones(contextual) if released else 1 / (1 + count)
        other_weight = 1 / (count if released else 1 + count)  # infinite, and not used, if no patch is merged

        # one row per output token in native order (CLS, dominant, contextual), then the requested order
        row = torch.cat([torch.arange(dominant), dominant + torch.arange(contextual), dominant + nearest])
        sources = torch.cat([torch.tensor([n]), kept, targets, others])
        weights = torch.cat([torch.ones(dominant), target_weight, other_weight[nearest]])
        anchor = torch.cat([torch.tensor([-1]), kept, targets])
        score = torch.cat([torch.tensor([torch.nan]), attention[kept], torch.full((contextual,), torch.nan)])
        role = ["cls", *["primary"] * (dominant - 1), *["context"] * contextual]
        order = torch.arange(self.budget)
        if self.order == "raster":
            order = torch.where(anchor < 0, n, anchor).argsort()
        position = torch.empty_like(order)
        position[order] = torch.arange(self.budget)
        row = position[row]
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
