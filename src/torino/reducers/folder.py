"""FOLDER, simplified: fold the sequence by bipartite matching, step after step, down to the budget.

Wang et al., FOLDER: Accelerating Multi-modal Large Language Models with Enhanced Performance, ICCV 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from torino.core.errors import UnmetBudget
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_flag, read_signal, unmet
from torino.reducers._matching import Order, averaged, fold, removals
from torino.reducers.base import Reducer, register

LogSizeScale = Literal["released", "always", "never"]
Metric = Literal["patches", "keys", "head_keys", "projected"]


@register("folder")
@dataclass(frozen=True)
class Folder(Reducer):
    """Fold the sequence onto itself: half of it at most merges into the other half, until the budget is met (FOLDER).

    The authors' simplified form, which they recommend for comparisons. One step deals the tokens alternately into
    sources and targets, gives each source its most similar target by cosine, and merges the r sources of highest
    similarity into theirs (see :mod:`torino.reducers._matching`). While there are tokens to remove, a step takes
    r = min((T − 1)//2, what is left) of T; 576 patches become 192 by 287 + 97, 128 by 287 + 144 + 17, and 64 by
    287 + 144 + 72 + 9. A merged token is the mean of its n patches, and may be multiplied by 1 + ln n. It has the
    place of the target; between steps, and at the end, the tokens stand in their places' order, so native order is
    raster order. Whether a patch is a source depends on its place, so the method is not permutation equivariant.

    Nothing is known in which paper and release differ. Deviations from the release: a budget equal to the number
    of patches gives them back (the release fails), and 1 token from 2 or more patches without a CLS token
    raises ``UnmetBudget`` (the release would never end); tokens of length 0 have cosine 0 with all (there, NaN).
    The optional attention term of the released function is left to ``folder-full``.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N; no CLS token among them.
    metric : {"patches", "keys", "head_keys", "projected"}
        What tokens are compared by: the features themselves as released, or a signal. It is merged as they are.
    class_token : bool
        Whether a CLS token stands in front of the sequence, is protected, and is dropped in the end. It need not be
        given: it shifts the patches by one place, and a step may take half of them (288 + 96 for 192 of 576).
    log_size_scale : {"released", "always", "never"}
        Whether a token of n patches is multiplied by 1 + ln n. As released it is after two steps or more, always;
        after one step that took r of T tokens, only if r < (T − r)//2, which is r below about T/3.
    order : {"raster", "native"}
        The same here.
    """

    budget: int
    metric: Metric = "patches"
    class_token: bool = False
    log_size_scale: LogSizeScale = "released"
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset()
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D)"
    paper: ClassVar[str] = "Wang et al., FOLDER, ICCV 2025"
    original_licence: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_choice("metric", self.metric, Metric)
        check_flag("class_token", self.class_token)
        check_choice("log_size_scale", self.log_size_scale, LogSizeScale)
        check_choice("order", self.order, Order)
        if self.metric != "patches":
            object.__setattr__(self, "needs", frozenset({self.metric}))

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        steps = folds(self.name, len(tokens), self.budget, cls_first=self.class_token)
        folded = fold(self._metric(tokens), steps, cls_first=self.class_token, between="raster")
        return averaged(
            folded,
            tokens.grid,
            self.spec,
            order="raster",
            log_size=self._rescales(len(tokens) + self.class_token, steps),
        )

    def _metric(self, tokens: VisualTokens) -> Tensor:
        if self.metric == "patches":
            return tokens.patches
        return read_signal(tokens, self.metric, self.name, (len(tokens), None))

    def _rescales(self, length: int, steps: list[int]) -> bool:
        if self.log_size_scale != "released":
            return self.log_size_scale == "always"
        return len(steps) > 1 or (len(steps) == 1 and steps[0] < (length - steps[0]) // 2)


def folds(name: str, patches: int, budget: int, *, cls_first: bool, steps: int | None = None) -> list[int]:
    """How many tokens each step removes, see :func:`torino.reducers._matching.removals`, or UnmetBudget."""
    if budget > patches:
        raise unmet(name, budget, patches, f"its {patches} patches")
    taken = removals(patches, budget, cls_first=cls_first, steps=steps)
    if sum(taken) < patches - budget:
        raise UnmetBudget(
            f"{name} cannot give {budget} token for this image: without a CLS token a step takes (T − 1)//2 of T, so "
            "2 tokens stay 2. Give a budget of at least 2, or class_token=True."
        )
    return taken
