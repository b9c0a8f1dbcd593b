"""PyramidDrop: drop image tokens at three depths of the language model, the same share each time.

Xing et al., PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy Reduction,
CVPR 2025 (arXiv 2410.17247).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torino.reducers._checks import check_count
from torino.reducers.base import register
from torino.reducers.in_language_model import LanguageModelReducer, Stage, check_stage, keep_highest, scaled_block

PUBLISHED = (8, 16, 24)
DEPTH = 32


@register("pyramiddrop")
@dataclass(frozen=True)
class PyramidDrop(LanguageModelReducer):
    """Drop the same share of image tokens after blocks 8, 16 and 24 of 32 (PyramidDrop).

    At each stage the query of the last token of the prompt and the keys of the image tokens, both of the next block,
    give the attention to each image token, averaged over heads. The tokens of highest attention, ties to the lowest
    index, are processed by the later blocks at their original positions; the others are dropped there and from the
    key-value cache. After stage s of 3, N·(budget/N)^(s/3) of N tokens remain, rounded. Every dropped token is
    represented by the kept one whose hidden state is most similar (cosine). Works only in the language model: see
    :mod:`torino.reducers.in_language_model`.

    Deviations: the release halves the tokens at each stage, which is a budget of N/8; here any budget is met exactly
    with equal shares. The published blocks are 8, 16 and 24 of 32; they are scaled to the depth of the model, and
    stages of a shallow model that fall on the same block are one. The release renumbers the tokens of a padded batch;
    here they keep their positions. The last token of the prompt is the last one of the chat template, as in the
    release.

    Parameters
    ----------
    budget : int
        Exact number of tokens of each image in the blocks after the last stage.
    """

    budget: int

    reads: ClassVar[frozenset[str]] = frozenset({"next_attention"})
    paper: ClassVar[str] = "Xing et al., PyramidDrop, CVPR 2025, arXiv 2410.17247"
    cost: ClassVar[str] = "O(N·E²)"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)

    def stages(self, tokens: int, blocks: int) -> list[Stage]:
        """Return the stages, one for each block at which tokens are dropped."""
        check_stage(self.name, self.budget, tokens, None, blocks)
        share = self.budget / tokens
        last = len(PUBLISHED)
        stages: dict[int, int] = {}
        for number, published in enumerate(PUBLISHED, 1):
            remaining = self.budget if number == last else round(tokens * share ** (number / last))
            stages[scaled_block(published, DEPTH, blocks)] = remaining
        return list(stages.items())

    def select(self, signals: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Keep the tokens of highest attention."""
        return keep_highest(signals["next_attention"].mean(0), count)
