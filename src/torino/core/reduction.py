"""Reduction: a sparse matrix that maps patches to output tokens, with labels for each output token.

Symbols used in this package: N patches of an image, D token width, C latents of the SAE, k concepts per patch,
G groups, M output tokens, H attention heads, E width of the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, cast, overload

import numpy as np
import torch
from torch import Tensor

from torino.core.checks import (
    check_choice,
    check_tensor,
    check_type,
    describe_value,
    to_grid,
    to_index,
    to_integer,
    to_list,
)
from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.explanation import Explanation
from torino.core.frames import Layout, locate, to_frames, to_times
from torino.core.io import read_arrays, write_arrays
from torino.core.ragged import Ragged, are_valid_offsets, offsets_from_lengths
from torino.core.reduction_file import FORMAT, pack_reductions, unpack_reductions
from torino.core.sparse import apply_matrix, input_rows

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Reduction:
    """Sparse matrix A with ``reduced = A @ tokens`` for one image or video, and labels that explain each output token.

    All tensors are on the CPU; :meth:`apply` moves them to the device of the values.

    Attributes
    ----------
    sources : Tensor of shape (nnz,), int64
        Patch of each weight; N is the CLS token, for methods that keep it.
    weights : Tensor of shape (nnz,), float32
    offsets : Tensor of shape (M + 1,), int64
        Output token m is the sum of entries ``offsets[m]:offsets[m+1]``.
    anchor : Tensor of shape (M,), int64
        The patch whose position the token takes; −1 for a token without position, such as a global one.
    concept : Tensor of shape (M,), int64
        The latent that most of its patches share; −1 if there is none.
    role : tuple of M str
        ``"primary"``, ``"padding"``, ``"context"``, …
    grid : (int, int)
        Patch grid of a frame; N = frames × rows × columns.
    by : str
        The reducer that planned it, such as ``torino-m(k=2, delta=2)``.
    assigned : Tensor of shape (N,), int64
        The output token that represents each patch; −1 if none does. A pruned patch has no weight but may still be
        represented, by the patch that was kept in its group.
    score : Tensor of shape (M,), float32
        Score that the method ranked the token by, such as the peak activation a(i); NaN if it has none.
    frames : int
        Number of frames of a video; 1 for an image. Patches are numbered frame by frame, see :meth:`locate`.
    times : tuple of float, optional
        Time of each frame in seconds.
    """

    sources: Tensor
    weights: Tensor
    offsets: Tensor
    anchor: Tensor
    concept: Tensor
    role: tuple[str, ...]
    grid: tuple[int, int]
    by: str
    assigned: Tensor
    score: Tensor
    frames: int = 1
    times: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check that matrix and labels are consistent."""
        object.__setattr__(self, "grid", to_grid(self.grid, BadParameter))
        object.__setattr__(self, "frames", to_frames(self.frames, BadParameter))
        object.__setattr__(self, "times", to_times(self.times, self.frames, BadParameter))
        for name in ("sources", "weights", "offsets", "anchor", "concept", "assigned", "score"):
            check_tensor(name, getattr(self, name), BadParameter)
        if self.sources.ndim != 1 or self.offsets.ndim != 1:
            given = f"{tuple(self.sources.shape)} and {tuple(self.offsets.shape)}"
            raise BadParameter(f"sources and offsets must have one dimension, got {given}.")
        check_type("role", self.role, tuple, "a tuple of str")
        check_type("by", self.by, str, "the name of a method")
        m, n, nnz = len(self), self.patches, len(self.sources)
        shapes = {"weights": (nnz,), "anchor": (m,), "concept": (m,), "score": (m,), "assigned": (n,)}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise BadParameter(f"{name} must have shape {shape}, got {tuple(getattr(self, name).shape)}.")
        if len(self.role) != m:
            raise BadParameter(f"role must have one entry for each of the {m} output tokens, got {len(self.role)}.")
        if not are_valid_offsets(self.offsets, nnz):
            raise BadParameter(f"offsets must be non-decreasing from 0 to {nnz}, got {self.offsets.tolist()}.")
        for name, low, high in (("sources", 0, n), ("anchor", -1, n), ("assigned", -1, m - 1)):
            values: Tensor = getattr(self, name)
            if len(values) and not (low <= int(values.min()) and int(values.max()) <= high):
                raise BadParameter(f"{name} must be between {low} and {high}, got {values.unique().tolist()}.")

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[int, float]],
        grid: tuple[int, int],
        by: str = "by hand",
        *,
        frames: int = 1,
        times: Sequence[float] | None = None,
    ) -> Reduction:
        """Create a reduction from one mapping of patch to weight per output token.

        The labels follow from the weights: each token is anchored at the patch with the largest weight and represents
        those of its patches that no earlier token represents.
        """
        rows, grid = to_list("rows", rows, Mapping, "mappings of patch to weight", BadParameter), to_grid(grid)
        rows = [{to_integer("A patch", patch): _weight(row[patch]) for patch in row} for row in rows]
        patches = to_frames(frames, BadParameter) * grid[0] * grid[1]
        _check_patches([patch for row in rows for patch in row], patches)
        assigned = [-1] * (patches + 1)
        for token in reversed(range(len(rows))):
            for patch in rows[token]:
                assigned[patch] = token
        heaviest = [max(row, key=lambda patch: (row[patch], -patch), default=-1) for row in rows]
        return cls(
            sources=torch.tensor([patch for row in rows for patch in row], dtype=torch.int64),
            weights=torch.tensor([weight for row in rows for weight in row.values()], dtype=torch.float32),
            offsets=offsets_from_lengths([len(row) for row in rows]),
            anchor=torch.tensor([-1 if patch == patches else patch for patch in heaviest], dtype=torch.int64),
            concept=torch.full((len(rows),), -1),
            role=("primary",) * len(rows),
            grid=grid,
            by=by,
            assigned=torch.tensor(assigned[:-1]),
            score=torch.full((len(rows),), torch.nan),
            frames=frames,
            times=to_times(times, frames, BadParameter),
        )

    @classmethod
    def identity(
        cls, grid: tuple[int, int], by: str = "identity", *, frames: int = 1, times: Sequence[float] | None = None
    ) -> Reduction:
        """Keep every patch unchanged."""
        grid = to_grid(grid)
        every = torch.arange(to_frames(frames, BadParameter) * grid[0] * grid[1])
        return cls.pick(every, grid, by, frames=frames, times=times)

    @classmethod
    def pick(
        cls,
        kept: Tensor,
        grid: tuple[int, int],
        by: str,
        *,
        role: str = "primary",
        score: Tensor | None = None,
        assigned: Tensor | None = None,
        frames: int = 1,
        times: Sequence[float] | None = None,
    ) -> Reduction:
        """Create a pruning that keeps the patches ``kept``, of shape (M,), in that order.

        ``assigned`` is the output token that represents each patch. By default a kept patch represents only itself.
        """
        grid = to_grid(grid)
        if check_tensor("kept", kept).ndim != 1 or kept.dtype not in INTEGERS:
            raise BadParameter(f"kept must be integers of shape (M,), got {kept.dtype} of shape {tuple(kept.shape)}.")
        kept, m, n = kept.long().cpu(), len(kept), to_frames(frames, BadParameter) * grid[0] * grid[1]
        _check_patches(kept.tolist(), n)
        if assigned is None:
            assigned = kept.new_full((n + 1,), -1)
            assigned[kept] = torch.arange(m)
            assigned = assigned[:-1]  # the CLS token, index N, is not on the grid
        return cls(
            sources=kept,
            weights=torch.ones(m),
            offsets=torch.arange(m + 1),
            anchor=torch.where(kept < n, kept, -1),
            concept=torch.full_like(kept, -1),
            role=(role,) * m,
            grid=grid,
            by=by,
            assigned=check_tensor("assigned", assigned).cpu(),
            score=torch.full((m,), torch.nan) if score is None else check_tensor("score", score).detach().float().cpu(),
            frames=frames,
            times=to_times(times, frames, BadParameter),
        )

    def __len__(self) -> int:
        """Return the number of output tokens, M."""
        return len(self.offsets) - 1

    @property
    def patches(self) -> int:
        """Number of patches N of the image or video."""
        return self.frames * self.grid[0] * self.grid[1]

    @property
    def layout(self) -> Layout:
        """Grid, number of frames and times, as keyword arguments."""
        return {"grid": self.grid, "frames": self.frames, "times": self.times}

    def locate(self, patches: Tensor) -> Tensor:
        """Return frame, row and column of patches such as ``sources`` or ``anchor``, shape (n, 3).

        The CLS token, and −1, are nowhere: all three are −1.
        """
        return locate(patches, self.grid, self.frames)

    @property
    def tokens_per_frame(self) -> Tensor:
        """Number of output tokens anchored in each frame, shape (frames,)."""
        frame = self.locate(self.anchor)[:, 0]
        return frame[frame >= 0].bincount(minlength=self.frames)

    @property
    def is_pruning(self) -> bool:
        """Whether every output token is one unchanged patch."""
        return bool((self.offsets.diff() == 1).all()) and bool((self.weights == 1).all())

    @property
    def sizes(self) -> Tensor:
        """Number of patches that each output token represents, at least 1, shape (M,)."""
        return self.assigned[self.assigned >= 0].bincount(minlength=len(self)).clamp(min=1)

    @cached_property
    def rows(self) -> Tensor:
        """Output token of each entry, shape (nnz,)."""
        return torch.repeat_interleave(self.offsets.diff())

    def __repr__(self) -> str:
        """Return the numbers of input and output tokens, the method and the roles."""
        counts = ", ".join(f"{self.role.count(role)} {role}" for role in dict.fromkeys(self.role))
        return f"Reduction({self.patches} -> {len(self)} tokens by {self.by}: {counts})"

    # ------------------------------------------------------------------ application

    def apply(self, values: Tensor, cls: Tensor | None = None) -> Tensor:
        """Reduce per-patch values of shape (N, ...) to per-token values of shape (M, ...).

        Supports any trailing shape, any float dtype and gradients. Half precision is summed in float32. If the
        method keeps the CLS token, give it as ``cls`` or as row N of ``values``.

        Examples
        --------
        >>> Reduction.of([{0: 0.5, 1: 0.5}], grid=(1, 2)).apply(torch.tensor([[2.0], [4.0]]))
        tensor([[3.]])
        """
        rows = input_rows(values, cls, self.sources, self.patches)
        return apply_matrix(self.sources, self.weights, self.offsets, rows, self.is_pruning)

    def paint(self, per_token: Tensor, over: Literal["sources", "groups"] = "sources") -> Tensor:
        """Map per-token values of shape (M, ...) back to the patches, shape (N, ...), for visualization.

        With ``over="sources"`` a patch gets the mean of the tokens that contain it, weighted by the absolute value of
        its weights. With ``over="groups"`` it gets the value of the token that represents it. Other patches get NaN.
        """
        check_choice("over", over, Literal["sources", "groups"])
        check_tensor("per_token", per_token, BadParameter)
        if per_token.shape[:1] != (len(self),) or per_token.is_complex():
            given = len(per_token) if per_token.ndim and not per_token.is_complex() else describe_value(per_token)
            raise BadParameter(f"paint needs one value for each of the {len(self)} output tokens, got {given}.")
        values = per_token if per_token.is_floating_point() else per_token.float()
        values = values.detach().cpu()
        painted = values.new_full((self.patches, *values.shape[1:]), torch.nan)
        if over == "groups":
            painted[self.assigned >= 0] = values[self.assigned[self.assigned >= 0]]
            return painted
        real = self.sources < self.patches
        sources, weights, rows = self.sources[real], self.weights[real].abs().to(values.dtype), self.rows[real]
        total = values.new_zeros(self.patches).index_add(0, sources, weights)
        spread = weights.view(-1, *[1] * (values.ndim - 1)) * values[rows]
        sums = torch.zeros_like(painted).index_add(0, sources, spread)
        used = total > 0
        painted[used] = sums[used] / total[used].view(-1, *[1] * (values.ndim - 1))
        return painted

    def then(self, after: Reduction) -> Reduction:
        """Compose this reduction with another one planned on its output: the matrix product, with labels.

        ``after`` is a reduction of M patches, on a grid such as (1, M). Its anchors are translated to patches of the
        image. A token without a concept inherits the concept of the token it is anchored at.
        """
        check_type("after", after, Reduction, "a Reduction of the output of this one")
        m, n = len(self), self.patches
        if after.patches != m:
            raise BadParameter(
                f"This reduction outputs {m} tokens, but the next one was planned on {after.patches} patches. "
                "Plan the next one on the output of this one."
            )
        is_cls = after.sources == m  # both reductions refer to the same CLS token
        counts = torch.where(is_cls, 1, self.offsets.diff()[after.sources.clamp(max=m - 1)])
        entry = torch.repeat_interleave(counts)
        first = torch.where(is_cls, 0, self.offsets[after.sources.clamp(max=m - 1)])
        inner = first[entry] + torch.arange(len(entry)) - (counts.cumsum(0) - counts)[entry]
        # an extra entry represents the CLS token, so that an empty matrix can be indexed too
        inner = torch.where(is_cls[entry], len(self.sources), inner)
        sources = torch.cat([self.sources, torch.tensor([n])])[inner]
        weights = after.weights[entry] * torch.cat([self.weights, torch.ones(1)])[inner]
        key, inverse = torch.unique(after.rows[entry] * (n + 1) + sources, return_inverse=True)
        weights = torch.zeros(len(key), dtype=weights.dtype).index_add(0, inverse, weights)
        anchored = (after.anchor >= 0) & (after.anchor < m)
        anchor = torch.where(anchored, self.anchor[after.anchor.clamp(0, m - 1)], -1)
        concept = torch.where(anchored & (after.concept < 0), self.concept[after.anchor.clamp(0, m - 1)], after.concept)
        assigned = torch.where(self.assigned >= 0, after.assigned[self.assigned.clamp(min=0)], -1)
        return Reduction(
            sources=key % (n + 1),
            weights=weights,
            offsets=offsets_from_lengths(torch.bincount(key // (n + 1), minlength=len(after)).tolist()),
            anchor=anchor,
            concept=concept,
            role=after.role,
            by=f"{self.by} > {after.by}",
            assigned=assigned,
            score=after.score,
            **self.layout,
        )

    def explain(self, token: int, names: Mapping[int, str] | None = None) -> Explanation:
        """Return sources, position, concept, role and score of one output token.

        ``names`` maps latents to names, if there are any.
        """
        if not -len(self) <= (token := to_integer("token", token)) < len(self):
            raise BadParameter(f"token must be between 0 and {len(self) - 1}, got {token}.")
        token %= len(self)
        check_type("names", names, (Mapping, type(None)), "a mapping of latents to names")
        entries = slice(int(self.offsets[token]), int(self.offsets[token + 1]))
        concept = int(self.concept[token])
        return Explanation(
            token=token,
            of=len(self),
            role=self.role[token],
            anchor=int(self.anchor[token]),
            frames=self.frames,
            times=self.times,
            grid=self.grid,
            sources=tuple(self.sources[entries].tolist()),
            weights=tuple(self.weights[entries].tolist()),
            stands_for=tuple((self.assigned == token).nonzero()[:, 0].tolist()),
            concept=None if concept < 0 else concept,
            name=(names or {}).get(concept),
            score=float(self.score[token]),
        )

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> Path:
        """Write the reduction to ``.npz`` or ``.safetensors`` (a few kB), atomically."""
        return ReductionBatch.of([self]).save(path)

    @staticmethod
    def load(path: str | Path) -> Reduction:
        """Read a file written by :meth:`save`."""
        batch = ReductionBatch.load(path)
        if len(batch) != 1:
            raise BadFile(f"{path} contains {len(batch)} reductions. Read it with ReductionBatch.load.")
        return batch[0]


@dataclass(frozen=True, eq=False)
class ReductionBatch(Sequence[Reduction]):
    """The reductions of several images, applied together as a block-diagonal matrix.

    Attributes
    ----------
    reductions : tuple of Reduction
        One per image, in order.
    """

    reductions: tuple[Reduction, ...]

    @classmethod
    def of(cls, reductions: Sequence[Reduction]) -> ReductionBatch:
        """Create a batch from the reductions of single images."""
        reductions = to_list("A batch", reductions, Reduction, "Reductions, one for each image")
        if not reductions:
            raise BadTokens("The list of images is empty. Give at least one image.")
        return cls(tuple(reductions))

    @overload
    def __getitem__(self, index: int) -> Reduction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Reduction, ...]: ...
    def __getitem__(self, index: int | slice) -> Reduction | tuple[Reduction, ...]:
        """Return the reduction of an image."""
        if isinstance(index, slice):
            return self.reductions[index]
        return self.reductions[to_index("image", index, len(self))]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.reductions)

    def __iter__(self) -> Iterator[Reduction]:
        """Iterate over the images in order."""
        return iter(self.reductions)

    @property
    def lengths(self) -> Tensor:
        """Number of output tokens of each image, shape (images,)."""
        return torch.tensor([len(reduction) for reduction in self.reductions])

    def __repr__(self) -> str:
        """Return the numbers of images and output tokens, and the method."""
        lengths = self.lengths
        return (
            f"ReductionBatch({len(self)} images -> {int(lengths.sum())} tokens, "
            f"{int(lengths.min())} to {int(lengths.max())} per image, by {self[0].by})"
        )

    def apply(self, values: Ragged | Sequence[Tensor], cls: Sequence[Tensor] | None = None) -> Ragged:
        """Reduce the values of all images at once: (ΣN, ...) in, (ΣM, ...) out, without padding."""
        parts = list(values) if isinstance(values, Ragged) else to_list("apply", values, Tensor, "tensors")
        if len(parts) != len(self):
            raise BadTokens(f"This batch reduces {len(self)} images, but values of {len(parts)} images were given.")
        tokens = [None] * len(self) if cls is None else to_list("cls", cls, Tensor, "tensors, one for each image")
        if len(tokens) != len(self):
            raise BadTokens(f"This batch reduces {len(self)} images, but {len(tokens)} CLS tokens were given.")
        rows = [
            input_rows(part, token, reduction.sources, reduction.patches)
            for part, token, reduction in zip(parts, tokens, self, strict=True)
        ]
        pruning = all(reduction.is_pruning for reduction in self)
        if len(rows) == 1:
            return Ragged(self[0].apply(rows[0]), offsets_from_lengths(self.lengths.tolist()))
        if len({(row.shape[1:], row.device) for row in rows}) > 1:
            raise BadTokens("The values of all images must have the same width and be on the same device.")
        if isinstance(values, Ragged) and all(row is part for row, part in zip(rows, parts, strict=True)):
            stacked = values.values  # already concatenated
        else:
            stacked = torch.cat(rows)
        matrix = self._block_diagonal([len(row) for row in rows])
        return Ragged(apply_matrix(*matrix, stacked, pruning), offsets_from_lengths(self.lengths.tolist()))

    def _block_diagonal(self, heights: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return sources, weights and offsets of the matrix of all images."""
        starts = offsets_from_lengths(heights).tolist()
        ends = offsets_from_lengths([len(reduction.sources) for reduction in self]).tolist()
        return (
            torch.cat([red.sources + start for red, start in zip(self, starts, strict=False)]),
            torch.cat([red.weights for red in self]),
            torch.cat([self[0].offsets[:1], *[red.offsets[1:] + e for red, e in zip(self, ends, strict=False)]]),
        )

    def arrays(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the arrays and texts that are stored in a file."""
        return pack_reductions(self)

    def save(self, path: str | Path, **others: Tensor) -> Path:
        """Write the batch to ``.npz`` or ``.safetensors``, atomically, with ``others`` as additional arrays."""
        arrays, texts = self.arrays()
        return write_arrays(path, {**arrays, **others}, texts)

    @classmethod
    def load(cls, path: str | Path) -> ReductionBatch:
        """Read a file written by :meth:`save`."""
        arrays, texts = read_arrays(path)
        if texts.get("format") != FORMAT:
            raise BadFile(
                f"{path} is not a saved reduction: its format is {texts.get('format', 'missing')!r}, "
                f"not {FORMAT!r}. Give a file written by Reduction.save or torino reduce."
            )
        try:
            return cls.of([Reduction(**fields) for fields in unpack_reductions(arrays, texts)])
        except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise BadFile(f"{path} is damaged: its arrays are inconsistent ({error}). Create it again.") from error


def _weight(weight: object) -> float:
    check_type("A weight", weight, (int, float, np.number), "a number")
    return float(cast(float, weight))


def _check_patches(indices: Sequence[int], patches: int) -> None:
    invalid = [patch for patch in indices if not 0 <= patch <= patches]
    if invalid:
        raise BadParameter(
            f"There is no patch {invalid[0]}: the grid has patches 0 to {patches - 1}, and {patches} is the CLS token."
        )
