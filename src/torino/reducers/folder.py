"""FOLDER (simplified form): merge the sequence by bipartite matching in as few steps as possible.

Wang et al., FOLDER: Accelerating Multi-modal Large Language Models with Enhanced Performance, ICCV 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from torino.core.errors import UnmetBudget
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_flag, read_signal
from torino.reducers._matching import mean_reduction, merge_in_steps, removals_per_step
from torino.reducers.base import Order, Reducer, register

LogSizeScale = Literal["released", "always", "never"]
Metric = Literal["patches", "keys", "head_keys", "projected"]


@register("folder")
@dataclass(frozen=True)
class Folder(Reducer):
    """Merge up to half of the tokens into the other half until the budget is met (FOLDER).

    This is the authors' simplified form, which they recommend for comparisons. A step splits the tokens alternately
    into sources and targets, matches each source with its most similar target by cosine, and merges the r sources of
    highest similarity into their targets (see :mod:`torino.reducers._matching`). A step removes
    r = min((T − 1)//2, remaining removals) of T tokens; 576 patches become 192 by 287 + 97, 128 by 287 + 144 + 17, and
    64 by 287 + 144 + 72 + 9. A merged token is the mean of its n patches, optionally multiplied by 1 + ln n, at the
    position of the target. Between steps and in the output the tokens are sorted by position, so native order is raster
    order. Whether a patch is a source depends on its position, so the method is not permutation equivariant.

    No difference between paper and release is known. Deviations from the release: a budget equal to the number of
    patches returns the patches (the release fails); 1 token from 2 or more patches without a CLS token raises
    ``UnmetBudget`` (the release would not terminate); tokens of length 0 have cosine 0 with all others (NaN in the
    release). The optional attention term of the released function is part of ``folder-full``.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N, without the CLS token.
    metric : {"patches", "keys", "head_keys", "projected"}
        Vectors to compare: the features as released, or a signal. They are merged like the features.
    class_token : bool
        Whether a CLS token precedes the sequence, is protected, and is dropped from the output. It need not be given:
        it shifts the patches by one position, and a step may remove half of them (288 + 96 for 192 of 576).
    log_size_scale : {"released", "always", "never"}
        Whether a token of n patches is multiplied by 1 + ln n. The release does so after two or more steps, and after
        one step that removed r of T tokens only if r < (T − r)//2, which is r below about T/3.
    order : {"raster", "native"}
        Both are the same here.
    """

    budget: int
    metric: Metric = "patches"
    class_token: bool = False
    log_size_scale: LogSizeScale = "released"
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset()
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D)"
    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "Wang et al., FOLDER, ICCV 2025"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("metric", self.metric, Metric)
        check_flag("class_token", self.class_token)
        check_choice("log_size_scale", self.log_size_scale, LogSizeScale)
        check_choice("order", self.order, Order)
        if self.metric != "patches":
            object.__setattr__(self, "needs", frozenset({self.metric}))

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        removals = plan_removals(self.name, len(tokens), self.budget, cls_first=self.class_token)
        merged = merge_in_steps(self._metric(tokens), removals, cls_first=self.class_token, step_order="raster")
        log_size = self._uses_log_size(len(tokens) + self.class_token, removals)
        return mean_reduction(merged, tokens.layout, self.spec, order="raster", log_size=log_size)

    def _metric(self, tokens: VisualTokens) -> Tensor:
        if self.metric == "patches":
            return tokens.patches
        return read_signal(tokens, self.metric, self.name, (len(tokens), None))

    def _uses_log_size(self, length: int, removals: list[int]) -> bool:
        if self.log_size_scale != "released":
            return self.log_size_scale == "always"
        return len(removals) > 1 or (len(removals) == 1 and removals[0] < (length - removals[0]) // 2)


def plan_removals(name: str, patches: int, budget: int, *, cls_first: bool, steps: int | None = None) -> list[int]:
    """Return how many tokens each step removes, or raise UnmetBudget if the budget cannot be met.

    See :func:`torino.reducers._matching.removals_per_step`.
    """
    if budget > patches:
        raise budget_error(name, budget, patches)
    removals = removals_per_step(patches, budget, cls_first=cls_first, steps=steps)
    if sum(removals) < patches - budget:
        raise UnmetBudget(
            f"{name} cannot give {budget} token: without a CLS token a step removes (T − 1)//2 of T tokens, so 2 "
            "tokens stay 2. Use a budget of at least 2 or class_token=True."
        )
    return removals
