"""FOLDER (complete form): merge by attention keys and protect patches of high CLS attention.

Wang et al., FOLDER: Accelerating Multi-modal Large Language Models with Enhanced Performance, ICCV 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_number, read_signal
from torino.reducers._matching import mean_reduction, merge_in_steps
from torino.reducers.base import Order, Reducer, register
from torino.reducers.folder import plan_removals


@register("folder-full")
@dataclass(frozen=True)
class FolderFull(Reducer):
    """Merge by keys and protect patches of high CLS attention, after the tower (FOLDER, full).

    FOLDER was released in two forms: the simple one is ``folder``, and the full one for LLaVA is this rule, which the
    release applies inside the tower (``folder-tower``). Here it is applied to the tower's output. Sources and targets
    are matched as in ``folder``, with a CLS token in front, by cos(key_a, key_b) of the keys averaged over heads.
    Sources are ranked by that similarity minus 100·alpha·s_a, where s is the CLS attention averaged over heads. A step
    removes at most half of the patches: 576 become 192 by 288 + 96. A merged token is the plain mean of its patches
    (weighted by size, without 1 + ln n), and so is its key; its attention is the mean over the tokens that were merged
    in the step. Between two steps the sequence is [remaining sources by position; targets], which is also the native
    output order.

    Deviations from the release: the release merges inside block 22, between attention and MLP; this plan applies to the
    output of that block, so the MLP has processed all patches. Compare with ``folder-tower`` in tables. The
    release skips sequences shorter than 40 (and then fails); here the budget is met. The release does not describe how
    keys are merged; here they are merged like the features.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N, without the CLS token.
    alpha : float
        Weight of the attention, which is multiplied by 100·alpha. With 0 only the keys matter.
    order : {"raster", "native"}
        By position of the target, or remaining sources then targets, as the last step leaves them.
    """

    budget: int
    alpha: float = 5.0
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"head_keys", "cls_attention"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D/H)"
    paper: ClassVar[str] = "Wang et al., FOLDER, ICCV 2025"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        keys = read_signal(tokens, "head_keys", self.name, (n, None))
        attention = read_signal(tokens, "cls_attention", self.name, (None, n)).double().mean(0)
        removals = plan_removals(self.name, n, self.budget, cls_first=True)
        penalty = 100 * self.alpha * attention.to(keys.device)
        merged = merge_in_steps(keys, removals, cls_first=True, step_order="native", penalty=penalty)
        return mean_reduction(merged, tokens.layout, self.spec, order=self.order)
