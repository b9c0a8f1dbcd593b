"""Reducers that drop image tokens inside the language model, after some of its decoder blocks.

The code that runs the language model asks :meth:`LanguageModelReducer.stages` once for every image after how many
blocks it loses tokens and how many remain. While it reads the prompt it calls :meth:`LanguageModelReducer.select` at
each of these blocks, with the signals that the method ``reads``. The remaining tokens keep their positions; text is
never dropped. Blocks before the first stage process and cache all tokens, so the cost of such a method is that of
the mean over the blocks, :func:`layer_averaged`, and not that of its budget.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens, MissingSignal
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error
from torino.reducers.base import Reducer

Stage = tuple[int, int]
"""Number of decoder blocks after which tokens are dropped, and number of tokens that remain."""


class LanguageModelReducer(Reducer):
    """Base class of a method that drops image tokens inside the language model.

    Subclasses are frozen dataclasses with the field ``budget``, the number of tokens after the last stage. Implement
    :meth:`stages` and :meth:`select`.
    """

    in_language_model: ClassVar[bool] = True
    takes_frames: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset()
    """Signals of the language model that :meth:`select` reads."""
    budget: int

    @abstractmethod
    def stages(self, tokens: int, blocks: int) -> list[Stage]:
        """Return the stages for an image of some tokens in a language model of some decoder blocks.

        Each stage is at least one block after the one before it, the last one at least one block before the end, and
        the last number of tokens is the budget.

        Raises
        ------
        UnmetBudget
            If the image has fewer tokens than the budget.
        BadParameter
            If the language model has too few blocks.
        """

    @abstractmethod
    def select(self, signals: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Choose the tokens of one image that remain at a stage.

        Parameters
        ----------
        signals : mapping
            For the T tokens that the image has before this stage, as far as the method ``reads`` them:
            ``"attention"`` (H, T), the attention of the last token of the prompt to them in the last block that ran,
            and ``"next_attention"`` (H, T), the same by the queries and keys of the next block; the rows are parts of
            a softmax over the whole prompt. ``"keys"`` (T, W) of the last block that ran, with their rotary embedding,
            and ``"hidden"`` (T, E), its output after the final norm of the model. ``"text_keys"`` (P, W) and
            ``"text_hidden"`` (P, E) of the P tokens of text after the image. All are float32.
        count : int
            Tokens to keep, from 1 to T − 1.

        Returns
        -------
        kept : Tensor of shape (count,), int64
            Increasing.
        score : Tensor of shape (count,)
            The score by which each of them was kept.
        """

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Raise MissingSignal: the method reads the language model."""
        raise inside_error(self.spec)


class InLanguageModelReducer(Protocol):
    """Interface of a reducer as seen by the code that runs the language model."""

    @property
    def reads(self) -> frozenset[str]:
        """Signals of the language model that the method reads."""
        ...

    @property
    def spec(self) -> str:
        """Name and hyperparameters."""
        ...

    def stages(self, tokens: int, blocks: int) -> list[Stage]:
        """Return after how many blocks tokens are dropped, and how many remain."""
        ...

    def select(self, signals: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor]:
        """Choose the tokens of one image that remain at a stage."""
        ...


def as_in_language_model(reducer: Reducer) -> InLanguageModelReducer | None:
    """Return the reducer if it works inside the language model only, otherwise None."""
    return cast(InLanguageModelReducer, reducer) if reducer.in_language_model else None


def inside_error(spec: str) -> MissingSignal:
    """Return the error for a method that is used where no language model runs."""
    return MissingSignal(
        f"{spec} drops tokens inside the language model, which does not run here. Use it where one answers: torino "
        "ask, compare, eval and bench --model, VLM.answer or reduced(model, ...); or choose a method that works on the "
        "tower's output, such as torino-x."
    )


def scaled_block(published: int, depth: int, blocks: int) -> int:
    """Return the number of blocks that corresponds to ``published`` of ``depth``, at least 1 and less than ``blocks``.

    It is rounded to the nearest number, halves down.

    Examples
    --------
    >>> [scaled_block(2, 32, blocks) for blocks in (32, 40, 24, 4)]
    [2, 2, 1, 1]
    >>> [scaled_block(16, 32, blocks) for blocks in (32, 40, 24, 4)]
    [16, 20, 12, 2]
    """
    return min(max(1, ceil(Fraction(published * blocks, depth) - Fraction(1, 2))), blocks - 1)


def check_stage(name: str, budget: int, tokens: int, block: int | None, blocks: int) -> None:
    """Refuse a budget above the number of tokens, and a block after which no other block follows."""
    if budget > tokens:
        raise budget_error(name, budget, tokens, "tokens in the language model")
    if blocks < 2 or (block is not None and block >= blocks):
        given = "it" if block is None else f"block={block}"
        raise BadParameter(
            f"{name} drops tokens between two blocks of the language model, and this one has {blocks}, so {given} "
            f"leaves no block with fewer tokens. {'Give a smaller block.' if blocks > 1 else 'Choose another method.'}"
        )


def tokens_by_block(tokens: int, stages: Sequence[Stage], blocks: int) -> tuple[int, ...]:
    """Return how many tokens of an image each block processes.

    Examples
    --------
    >>> tokens_by_block(16, [(1, 8), (3, 4)], 4)
    (16, 8, 8, 4)
    """
    remaining = dict(stages)
    counts: list[int] = []
    for block in range(blocks):
        tokens = remaining.get(block, tokens)
        counts.append(tokens)
    return tuple(counts)


def layer_averaged(counts: Sequence[int]) -> float:
    """Return the mean number of tokens over the blocks.

    Examples
    --------
    >>> layer_averaged(tokens_by_block(576, [(2, 64)], 32))
    96.0
    """
    return sum(counts) / len(counts)


def keep_highest(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of highest score in order of their position, ties to the lowest index, and their scores."""
    if not bool(torch.isfinite(score).all()):
        raise BadTokens(
            "The attention of the language model holds NaN or infinite values. Run it in float32 or bfloat16."
        )
    kept = score.argsort(descending=True, stable=True)[:count].sort().values
    return kept, score[kept]
