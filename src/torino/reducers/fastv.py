"""FastV: after the second block of the language model, keep the image tokens that the last token attends to.

Chen et al., An Image is Worth 1/2 Tokens After Layer 2, ECCV 2024 (arXiv 2403.06764).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torino.reducers._checks import check_count
from torino.reducers.base import register
from torino.reducers.in_language_model import LanguageModelReducer, Stage, check_stage, keep_highest, scaled_block


@register("fastv")
@dataclass(frozen=True)
class FastV(LanguageModelReducer):
    """Keep the image tokens that the last prompt token attends to, after block 2 (FastV).

    The score of an image token is the attention that it receives in block ``block`` from the last token of the prompt,
    averaged over heads. The tokens of highest score, ties to the lowest index, are processed by the later blocks at
    their original positions; the others are dropped there and from the key-value cache. Every dropped token is
    represented by the kept one whose hidden state is most similar (cosine). Works only in the language model: see
    :mod:`torino.reducers.in_language_model`.

    Deviations: the budget is the exact number of tokens of each image after the stage; the release takes a ratio and
    one image. Only the last row of the attention map is computed, so the model keeps its attention kernel; the release
    runs the block twice. The published layer is the second of 32 (and of 40); the default scales it to the depth of
    the model.

    Parameters
    ----------
    budget : int
        Exact number of tokens of each image in the blocks after the stage.
    block : int, optional
        Number of blocks that process all tokens; by default 2 in models of 32 blocks, and in proportion elsewhere.
    """

    budget: int
    block: int | None = None

    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    paper: ClassVar[str] = "Chen et al., FastV, ECCV 2024, arXiv 2403.06764"
    cost: ClassVar[str] = "O(N·E²)"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        if self.block is not None:
            check_count("block", self.block)

    def stages(self, tokens: int, blocks: int) -> list[Stage]:
        """Return the only stage."""
        check_stage(self.name, self.budget, tokens, self.block, blocks)
        return [(self.block or scaled_block(2, 32, blocks), self.budget)]

    def select(self, signals: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Keep the tokens of highest attention."""
        return keep_highest(signals["attention"].mean(0), count)
