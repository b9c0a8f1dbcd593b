"""FOLDER, complete: fold by keys, and let patches the CLS token attends to resist.

Wang et al., FOLDER: Accelerating Multi-modal Large Language Models with Enhanced Performance, ICCV 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_number, read_signal
from torino.reducers._matching import Order, averaged, fold
from torino.reducers.base import Reducer, register
from torino.reducers.folder import folds


@register("folder-full")
@dataclass(frozen=True)
class FolderFull(Reducer):
    """Fold the sequence by attention keys, where what the CLS token attends to resists merging (FOLDER for LLaVA).

    The released LLaVA form of FOLDER. Sources and targets are matched as in ``folder``, a CLS token in front, by
    cos(key_a, key_b) with keys averaged over heads; sources are ranked by that similarity less 100·alpha·s_a,
    where s is the CLS token's attention, averaged over heads. A step takes half of the patches at most:
    576 become 192 by 288 + 96. Merged tokens are plain means of their patches (sizes weigh, no 1 + ln n), their keys
    too; the attention of a merged token is the mean over the tokens that met in the step. From one step to the next
    the sequence is [sources left, by place; targets], which is its native output order.

    Deviations from the release: it merges inside block 22, between attention and MLP, and this plan is made for
    the output of that block, so the MLP has seen all patches; it skips sequences shorter than 40 (and then fails),
    here the budget is met. How it merges keys is not described; they are merged like the features.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N; no CLS token among them.
    alpha : float
        Weight of the attention; 100·alpha multiplies it. 0 leaves the keys alone to decide.
    order : {"raster", "native"}
        By place of the target; or sources left, then targets, as the last step leaves them.
    """

    budget: int
    alpha: float = 5.0
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"head_keys", "cls_attention"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D/H)"
    paper: ClassVar[str] = "Wang et al., FOLDER, ICCV 2025"
    original_licence: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_number("alpha", self.alpha)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        keys = read_signal(tokens, "head_keys", self.name, (n, None))
        attention = read_signal(tokens, "cls_attention", self.name, (None, n)).detach().double().mean(0)
        steps = folds(self.name, n, self.budget, cls_first=True)
        penalty = 100 * self.alpha * attention.to(keys.device)
        folded = fold(keys, steps, cls_first=True, between="native", penalty=penalty)
        return averaged(folded, tokens.grid, self.spec, order=self.order)
