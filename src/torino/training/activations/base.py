"""Interface of activation sources: the rows of any training step, so that a run can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.io import fingerprint_tensors
from torino.core.tokens import check_matrix

Part = tuple[int, int]
"""The part of a batch that a process trains on: (rank, number of processes)."""


class Activations(Protocol):
    """Source of training rows.

    ``batch`` is a pure function of its arguments and of the seed of the object: a run resumed at step 700 asks for step
    700, and processes that share a batch each ask for their part of it.

    Attributes
    ----------
    width : int
        Width D of a row.
    rows : int or None
        Number of different rows; None for an endless stream.
    metadata : mapping
        Fields for the card of an SAE trained on the rows: ``encoder``, ``block``, ``token_kind``, ``data``,
        ``license``.

    If there is a method ``finish``, it turns an SAE of these rows into one of the tokens as the model outputs them.
    """

    @property
    def width(self) -> int: ...  # noqa: D102

    @property
    def rows(self) -> int | None: ...  # noqa: D102

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # noqa: D102

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Return the rows of a step, counted from 0, shape (n, D), float32, as the tower outputs them.

        The parts of a batch, concatenated by rank, are the batch of a single process.
        """
        ...


def part_range(size: int, part: Part) -> range:
    """Return the rows of a batch that belong to one process.

    Examples
    --------
    >>> [list(part_range(5, (rank, 2))) for rank in (0, 1)]
    [[0, 1], [2, 3, 4]]
    """
    rank, processes = part
    return range(rank * size // processes, (rank + 1) * size // processes)


def check_batch(step: int, size: int) -> None:
    """Raise if a step or a batch size is out of range."""
    if size < 1 or step < 0:
        raise BadParameter(f"size must be at least 1 and step at least 0, got size {size} and step {step}.")


class InMemory:
    """Rows in memory; each epoch contains every row once.

    Parameters
    ----------
    tokens : Tensor of shape (N, D)
        In any floating-point type; half precision halves the memory.
    seed : int
        Seed of the row order, which differs in every epoch.
    metadata : mapping, optional
        As for :class:`Activations`.
    """

    def __init__(self, tokens: Tensor, *, seed: int = 0, metadata: Mapping[str, Any] | None = None) -> None:
        check_matrix(tokens, "tokens")
        self.tokens, self.seed, self.metadata = tokens, seed, dict(metadata or {})
        self._epoch_order: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self.tokens.shape[1]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def content(self) -> str:
        """Hash of the rows; a training run is resumed only with the same ones."""
        return fingerprint_tensors({"tokens": self.tokens})

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Return the rows of a step; see :class:`Activations`."""
        check_batch(step, size)
        own = part_range(size, part)
        positions = torch.arange(step * size + own.start, step * size + own.stop)
        epochs = positions // self.rows
        indices = torch.empty_like(positions)
        for epoch in epochs.unique().tolist():
            mask = epochs == epoch
            indices[mask] = self._order_of_epoch(epoch)[positions[mask] % self.rows]
        return self.tokens[indices].float()

    def _order_of_epoch(self, epoch: int) -> Tensor:
        if self._epoch_order[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._epoch_order = (epoch, torch.randperm(self.rows, generator=generator))
        return self._epoch_order[1]
