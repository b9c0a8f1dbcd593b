"""Concepts: the strongest latents of each patch, and its peak score a(i)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.tokens import Origin, check_matrix
from torino.core.topk.exact import SILENT, stable_topk

Rank = Literal["activation", "pre-threshold"]


@dataclass(frozen=True, eq=False)
class Concepts:
    """The top-k concepts A_i of each patch (paper, Eq. 7) and its peak activation a(i) (Eq. 6).

    Attributes
    ----------
    indices : Tensor of shape (N, k), int64
        Latents by falling activation, distinct within a row; ``-1`` marks a *silent* slot, one that no
        active latent fills.
    values : Tensor of shape (N, k), float32
        Their activations; 0 in silent slots.
    peak : Tensor of shape (N,), float32
        a(i), the largest activation of the patch over the whole dictionary; 0 where all is silent.
    """

    indices: Tensor
    values: Tensor
    peak: Tensor

    def __post_init__(self) -> None:
        """Refuse shapes that do not belong together."""
        if (
            self.indices.ndim != 2
            or self.values.shape != self.indices.shape
            or self.peak.shape != self.indices.shape[:1]
        ):
            raise BadParameter(
                "Concepts take indices and values of shape (N, k) and peak of shape (N,), got "
                f"{tuple(self.indices.shape)}, {tuple(self.values.shape)} and {tuple(self.peak.shape)}."
            )

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]], peak: Sequence[float] | None = None) -> Concepts:
        """Make concepts by hand, strongest first, for examples and tests.

        Rows of different length are filled up with silent slots. Without ``peak``, the activations of a row
        are its length, …, 2, 1.

        Examples
        --------
        >>> Concepts.of([[1, 3], [2]]).indices
        tensor([[ 1,  3],
                [ 2, -1]])
        """
        k = max((len(row) for row in sets), default=0)
        indices = torch.tensor([[*row, *[SILENT] * (k - len(row))] for row in sets], dtype=torch.int64)
        values = (torch.arange(k, 0, -1, dtype=torch.float32) * (indices != SILENT)).reshape(indices.shape)
        peaks = values.amax(1) if k else values.new_zeros(len(sets))
        return cls(indices, values, peaks if peak is None else torch.tensor(peak, dtype=torch.float32))

    def __len__(self) -> int:
        """Return the number of patches, N."""
        return len(self.indices)

    @property
    def k(self) -> int:
        """How many concepts are kept per patch."""
        return self.indices.shape[1]

    @property
    def active(self) -> Tensor:
        """How many slots of each patch hold an active latent, shape (N,)."""
        return (self.indices != SILENT).sum(1)

    def first(self, k: int) -> Concepts:
        """Keep the ``k`` strongest of each patch; what the encoder would have given for that k."""
        if not 1 <= k <= self.k:
            raise BadParameter(f"k must be between 1 and {self.k}, the concepts kept per patch; got {k}.")
        return Concepts(self.indices[:, :k], self.values[:, :k], self.peak)

    def literal(self) -> Concepts:
        """Fill silent slots as arg-top-k of a dense vector of zeros does: with the lowest unused latents.

        This is the paper's rule taken to the letter. It links patches by latents that are not active in
        either, so it is not the default.

        Examples
        --------
        >>> Concepts.of([[7, 0, 4], [1]]).literal().indices
        tensor([[7, 0, 4],
                [1, 0, 2]])
        """
        silent = self.indices == SILENT
        low = torch.arange(self.k, device=self.indices.device)  # k - m unused latents are always below k
        used = (self.indices[:, :, None] == low).any(1)
        order = torch.where(used, self.k, low).sort(1).values  # unused ones first, rising
        nth = (silent.cumsum(1) - 1).clamp(min=0)
        return Concepts(torch.where(silent, order.gather(1, nth), self.indices), self.values, self.peak)


@runtime_checkable
class ConceptEncoder(Protocol):
    """Whatever turns tokens into concepts: an SAE, or the raw embedding of the no-SAE ablation."""

    def top(self, x: Tensor, k: int, *, rank: Rank = "activation") -> Concepts:
        """Return the ``k`` strongest concepts of tokens ``x`` of shape (N, D)."""
        ...

    def check_origin(self, origin: Origin, width: int) -> None:
        """Raise :class:`SAEMismatch` if this encoder was made for other tokens."""
        ...


@dataclass(frozen=True)
class RawEmbedding:
    """The paper's "No SAE" ablation: the coordinates of the token itself play the part of latents.

    The pipeline stays the same (top-k coordinates, overlap, components). A coordinate is never silent, and
    a(i) is the largest coordinate, as ``max_j z_ij`` says with z replaced by the embedding.
    """

    def top(self, x: Tensor, k: int, *, rank: Rank = "activation") -> Concepts:
        """Return the ``k`` largest coordinates of each token, ties to the lowest index; both ranks are the same."""
        check_matrix(x, "tokens")
        if not 1 <= k <= x.shape[1]:
            raise BadParameter(f"k must be between 1 and the token width {x.shape[1]}, got {k}.")
        indices, values = stable_topk(x.detach().float(), k)
        return Concepts(indices, values, values[:, 0])

    def check_origin(self, origin: Origin, width: int) -> None:
        """Accept any tokens: nothing was trained."""


class CachedEncoder:
    """An encoder that keeps what it said last, for when many reducers are shown the same picture.

    Concepts come by falling activation, so the ``k`` strongest are the first of any longer list. The tensor asked about
    must be the very same, not one of equal values; pictures of several tiles are packed anew for each reducer, and
    nothing is remembered of them.

    Attributes
    ----------
    saved : float
        Seconds that the answers from memory would have taken, for those who measure.
    """

    def __init__(self, encoder: ConceptEncoder) -> None:
        self.encoder, self.saved = encoder, 0.0
        self._said: tuple[Tensor, int, Rank, Concepts, float] | None = None

    def top(self, x: Tensor, k: int, *, rank: Rank = "activation") -> Concepts:
        """Return the ``k`` strongest concepts, from memory where they are there."""
        version = -1 if x.is_inference() else x._version
        if self._said is not None:
            tensor, was, ranked, said, took = self._said
            if tensor is x and was == version and ranked == rank and 1 <= k <= said.indices.shape[1]:
                self.saved += took
                return Concepts(said.indices[:, :k], said.values[:, :k], said.peak)
        begin = time.perf_counter()
        said = self.encoder.top(x, k, rank=rank)
        self._said = (x, version, rank, said, time.perf_counter() - begin)
        return said

    def check_origin(self, origin: Origin, width: int) -> None:
        """Accept what the encoder accepts."""
        self.encoder.check_origin(origin, width)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the encoder's."""
        if name == "encoder":  # a copy in the making has none yet
            raise AttributeError(name)
        return getattr(self.encoder, name)
