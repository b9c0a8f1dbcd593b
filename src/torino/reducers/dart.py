"""DART: keep a few pivots and the image tokens that resemble them least.

Wen et al., Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More, EMNLP 2025
(arXiv 2502.11494).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.reducers._checks import check_count
from torino.reducers._similarity import cross_cosines
from torino.reducers.base import register
from torino.reducers.in_language_model import LanguageModelReducer, Stage, check_stage, scaled_block


@register("dart")
@dataclass(frozen=True)
class DART(LanguageModelReducer):
    """Keep pivots and the image tokens least similar to them, after block 2 (DART).

    The image pivots are the image tokens whose keys in block ``block`` have the largest L1 norm; they are kept. The
    text pivots are the tokens after the image chosen likewise; text is always kept. The rest of the budget is divided
    among all pivots, image pivots first and each kind by position. In this order each pivot keeps its share of the
    image tokens that are left, those of lowest cosine to it, measured on the hidden states after the final norm of the
    model. Ties go to the lowest index. The later blocks process the kept tokens at their original positions; the
    others are dropped there and from the key-value cache. Every dropped token is represented by the kept one whose
    hidden state is most similar (cosine). No attention is read. The score of a pivot is its norm; of other tokens, the
    negative cosine to their pivot. Works only in the language model: see :mod:`torino.reducers.in_language_model`.

    Deviations: the budget is met exactly; the release gives every pivot the same rounded share, so the number of
    tokens is near the target. The release visits pivots in the order of a Python set. The published layer is the
    second of 32; the default scales it to the depth of the model.

    Parameters
    ----------
    budget : int
        Exact number of tokens of each image in the blocks after the stage.
    block : int, optional
        Number of blocks that process all tokens; by default 2 in models of 32 blocks, and in proportion elsewhere.
    image_pivots : int
        Image tokens that are pivots, at most the budget.
    text_pivots : int
        Tokens after the image that are pivots; 0 for none.
    """

    budget: int
    block: int | None = None
    image_pivots: int = 4
    text_pivots: int = 4

    reads: ClassVar[frozenset[str]] = frozenset({"hidden", "keys", "text_hidden", "text_keys"})
    paper: ClassVar[str] = "Wen et al., DART, EMNLP 2025, arXiv 2502.11494"
    cost: ClassVar[str] = "O(N·E²)"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_count("image_pivots", self.image_pivots)
        check_count("text_pivots", self.text_pivots, 0)
        if self.block is not None:
            check_count("block", self.block)

    def stages(self, tokens: int, blocks: int) -> list[Stage]:
        """Return the only stage."""
        check_stage(self.name, self.budget, tokens, self.block, blocks)
        return [(self.block or scaled_block(2, 32, blocks), self.budget)]

    def select(self, signals: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Keep the pivots and what resembles them least."""
        hidden, text = signals["hidden"], signals["text_hidden"]
        norms, text_norms = (signals[name].double().abs().sum(1).cpu() for name in ("keys", "text_keys"))
        image_pivots = _largest(norms, min(self.image_pivots, count))
        text_pivots = _largest(text_norms, min(self.text_pivots, len(text_norms)))
        pivots = torch.cat([hidden[image_pivots.to(hidden.device)], text[text_pivots.to(text.device)]])
        cosine = cross_cosines(pivots, hidden).cpu()
        if not bool(torch.isfinite(cosine).all()) or not bool(torch.isfinite(norms).all()):
            raise BadTokens(
                "The hidden states of the language model hold NaN or infinite values. Run it in float32 or bfloat16."
            )
        score = torch.full((len(hidden),), torch.nan)
        score[image_pivots] = norms[image_pivots].float()
        left = torch.ones(len(hidden), dtype=torch.bool).index_fill_(0, image_pivots, False)
        share, rest = divmod(count - len(image_pivots), len(pivots))
        for number, row in enumerate(cosine):
            free = left.nonzero()[:, 0]
            chosen = free[row[free].argsort(stable=True)[: share + (number < rest)]]
            score[chosen] = -row[chosen]
            left[chosen] = False
        kept = (~left).nonzero()[:, 0]
        return kept, score[kept]


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the largest values, ties to the lowest index, in increasing order."""
    return values.argsort(descending=True, stable=True)[:count].sort().values
