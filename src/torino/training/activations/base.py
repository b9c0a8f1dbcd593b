"""Activations: rows to train an SAE on, by step, so that a run can stop and go on anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.tokens import check_matrix

Part = tuple[int, int]
"""Which part of a batch a process wants: (rank, world)."""


class Activations(Protocol):
    """Where a trainer gets its rows.

    ``batch`` is a pure function of its arguments and of the seed that the object holds: a run resumed at step 700
    asks for step 700, and processes that share a batch each ask for their own part of it.

    Attributes
    ----------
    width : int
        Width D of a row.
    rows : int or None
        How many different rows there are; None where they come from an endless stream.
    facts : mapping
        What the card of an SAE trained on them says: ``encoder``, ``block``, ``token_kind``, ``data``, ``license``.
    """

    @property
    def width(self) -> int: ...  # noqa: D102

    @property
    def rows(self) -> int | None: ...  # noqa: D102

    @property
    def facts(self) -> Mapping[str, Any]: ...  # noqa: D102

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Rows of a step, counted from 0, shape (n, D), float32, as the tower gave them.

        The parts of a batch, put together in the order of their ranks, are the batch of one process.
        """
        ...


def part_of(size: int, part: Part) -> range:
    """Rows of a batch that belong to one process.

    Examples
    --------
    >>> [list(part_of(5, (rank, 2))) for rank in (0, 1)]
    [[0, 1], [2, 3, 4]]
    """
    rank, world = part
    return range(rank * size // world, (rank + 1) * size // world)


class InMemory:
    """Rows that fit into memory, each seen once before any is seen twice.

    Parameters
    ----------
    tokens : Tensor of shape (N, D)
        In any floating-point type; half precision halves the memory.
    seed : int
        Of the order, which is drawn anew in every pass.
    facts : mapping, optional
        As for :class:`Activations`.
    """

    def __init__(self, tokens: Tensor, *, seed: int = 0, facts: Mapping[str, Any] | None = None) -> None:
        check_matrix(tokens, "tokens")
        self.tokens, self.seed, self.facts = tokens, seed, dict(facts or {})
        self._order: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self.tokens.shape[1]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.tokens)

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Rows of a step; see :class:`Activations`."""
        if size < 1 or step < 0:
            raise BadParameter(f"A batch needs a size of at least 1 and a step from 0, got {size} and {step}.")
        mine = part_of(size, part)
        places = torch.arange(step * size + mine.start, step * size + mine.stop)
        passes = places // self.rows
        chosen = torch.empty_like(places)
        for number in passes.unique().tolist():
            here = passes == number
            chosen[here] = self._shuffled(number)[places[here] % self.rows]
        return self.tokens[chosen].float()

    def _shuffled(self, number: int) -> Tensor:
        if self._order[0] != number:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)
            self._order = (number, torch.randperm(self.rows, generator=generator))
        return self._order[1]
