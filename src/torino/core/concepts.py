"""Concepts: the top-k latents of each patch, and its peak activation a(i)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from torino.core.checks import check_tensor, describe_value, to_integer
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
        Latents by decreasing activation, distinct within a row. ``-1`` marks a *silent* slot: the patch has fewer
        than k active latents.
    values : Tensor of shape (N, k), float32
        Their activations; 0 in silent slots.
    peak : Tensor of shape (N,), float32
        a(i), the largest activation of the patch over the whole dictionary; 0 if no latent is active.
    """

    indices: Tensor
    values: Tensor
    peak: Tensor

    def __post_init__(self) -> None:
        """Check that the shapes are consistent."""
        for name in ("indices", "values", "peak"):
            check_tensor(name, getattr(self, name), BadParameter)
        if (
            self.indices.ndim != 2
            or self.values.shape != self.indices.shape
            or self.peak.shape != self.indices.shape[:1]
        ):
            raise BadParameter(
                "Concepts need indices and values of shape (N, k) and peak of shape (N,), got "
                f"{tuple(self.indices.shape)}, {tuple(self.values.shape)} and {tuple(self.peak.shape)}."
            )

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]], peak: Sequence[float] | None = None) -> Concepts:
        """Create concepts from lists of latents, largest activation first, for examples and tests.

        Shorter rows are padded with silent slots. The activations of a row are k, k − 1, …, where k is the
        length of the longest row. Without ``peak``, the peak is the first activation.

        Examples
        --------
        >>> Concepts.of([[1, 3], [2]]).indices
        tensor([[ 1,  3],
                [ 2, -1]])
        """
        try:
            k = max((len(row) for row in sets), default=0)
            indices = torch.tensor([[*row, *[SILENT] * (k - len(row))] for row in sets], dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadParameter(f"sets must be a list of lists of latents, got {describe_value(sets)}.") from error
        values = (torch.arange(k, 0, -1, dtype=torch.float32) * (indices != SILENT)).reshape(indices.shape)
        peaks = values.amax(1) if k else values.new_zeros(len(sets))
        return cls(indices, values, peaks if peak is None else torch.tensor(peak, dtype=torch.float32))

    def __len__(self) -> int:
        """Return the number of patches, N."""
        return len(self.indices)

    @property
    def k(self) -> int:
        """Number of concepts per patch."""
        return self.indices.shape[1]

    @property
    def active(self) -> Tensor:
        """Number of active latents among the slots of each patch, shape (N,)."""
        return (self.indices != SILENT).sum(1)

    def first(self, k: int) -> Concepts:
        """Keep the first ``k`` concepts of each patch; equals encoding with that ``k``."""
        k = to_integer("k", k, 1, self.k, ", the number of concepts per patch")
        return Concepts(self.indices[:, :k], self.values[:, :k], self.peak)

    def literal(self) -> Concepts:
        """Fill silent slots with the lowest unused latents, as arg-top-k of a dense vector with zeros does.

        This is the literal reading of the paper's rule. It links patches by latents that are active in
        neither of them, so it is not the default.

        Examples
        --------
        >>> Concepts.of([[7, 0, 4], [1]]).literal().indices
        tensor([[7, 0, 4],
                [1, 0, 2]])
        """
        silent = self.indices == SILENT
        low = torch.arange(self.k, device=self.indices.device)  # k - m unused latents are always below k
        used = (self.indices[:, :, None] == low).any(1)
        order = torch.where(used, self.k, low).sort(1).values  # unused latents first, in increasing order
        nth = (silent.cumsum(1) - 1).clamp(min=0)
        return Concepts(torch.where(silent, order.gather(1, nth), self.indices), self.values, self.peak)


@runtime_checkable
class ConceptEncoder(Protocol):
    """Interface of encoders that map tokens to concepts: an SAE, or the raw embedding of the no-SAE ablation."""

    def top(self, x: Tensor, k: int, *, rank: Rank = "activation") -> Concepts:
        """Return the top-k concepts of tokens ``x`` of shape (N, D)."""
        ...

    def check_origin(self, origin: Origin, width: int) -> None:
        """Raise :class:`SAEMismatch` if this encoder does not fit tokens of this origin and width."""
        ...


@dataclass(frozen=True)
class RawEmbedding:
    """The paper's "No SAE" ablation: use the coordinates of the token as latents.

    The rest of the pipeline is unchanged (top-k coordinates, overlap, components). No coordinate is silent, and
    a(i) is the largest coordinate: ``max_j z_ij`` with z replaced by the embedding.
    """

    def top(self, x: Tensor, k: int, *, rank: Rank = "activation") -> Concepts:
        """Return the ``k`` largest coordinates of each token, ties to the lowest index; ``rank`` has no effect."""
        check_matrix(x, "tokens")
        if not 1 <= (k := to_integer("k", k)) <= x.shape[1]:
            raise BadParameter(f"k must be between 1 and the token width {x.shape[1]}, got {k}.")
        indices, values = stable_topk(x.detach().float(), k)
        return Concepts(indices, values, values[:, 0])

    def device_search(self, k: int, *, rank: Rank = "activation") -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return a search without host synchronization: tokens to indices, values and which tokens are proven (all)."""

        def search(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            indices, values = stable_topk(x.detach().float(), k)
            return indices, values, torch.ones(len(x), dtype=torch.bool, device=x.device)

        return search

    def check_origin(self, origin: Origin, width: int) -> None:
        """Accept any tokens, because nothing was trained."""


class CachedEncoder:
    """Cache the last top-k result so that several reducers can share it.

    Concepts are sorted by decreasing activation, so the top k are a prefix of any longer result. The cache is used
    only for the same tensor object, unmodified. Images of several tiles are concatenated again for each reducer and
    therefore never hit the cache.

    Attributes
    ----------
    saved_seconds : float
        Time that cache hits would have taken without the cache.
    """

    def __init__(self, encoder: ConceptEncoder) -> None:
        self.encoder, self.saved_seconds = encoder, 0.0
        self._last: tuple[Tensor, int, Rank, Concepts, float] | None = None

    def top(self, x: Tensor, k: int, *, rank: Rank = "activation") -> Concepts:
        """Return the top-k concepts, from the cache if possible."""
        version = -1 if x.is_inference() else x._version
        if self._last is not None:
            tensor, last_version, last_rank, concepts, seconds = self._last
            if tensor is x and last_version == version and last_rank == rank and 1 <= k <= concepts.k:
                self.saved_seconds += seconds
                return concepts.first(k)
        begin = time.perf_counter()
        concepts = self.encoder.top(x, k, rank=rank)
        self._last = (x, version, rank, concepts, time.perf_counter() - begin)
        return concepts

    def check_origin(self, origin: Origin, width: int) -> None:
        """Raise :class:`SAEMismatch` if the wrapped encoder does not fit these tokens."""
        self.encoder.check_origin(origin, width)

    def __getattr__(self, name: str) -> Any:
        """Delegate all other attributes to the wrapped encoder."""
        if name == "encoder":  # not set yet while the object is being copied
            raise AttributeError(name)
        return getattr(self.encoder, name)
