"""Reduction: a small sparse matrix that makes the output tokens, with the labels that explain each of them.

Letters, here and everywhere: N patches of an image, D width of a token, C concepts in the dictionary,
k concepts kept per patch, G groups, M output tokens, H attention heads, E width of the language model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.explanation import Explanation
from torino.core.io import read_arrays, write_arrays
from torino.core.ragged import Ragged, fits, offsets_of

FORMAT = "torino-reduction/1"


@dataclass(frozen=True, eq=False)
class Reduction:
    """``reduced = A @ tokens``: which patches, with which weights, make each output token of one image, and why.

    All tensors live on the CPU; :meth:`apply` takes them to wherever the values are.

    Attributes
    ----------
    sources : Tensor of shape (nnz,), int64
        Patch of each weight; N stands for the CLS token where a method keeps it.
    weights : Tensor of shape (nnz,), float32
    offsets : Tensor of shape (M + 1,), int64
        Output token m is made of entries ``offsets[m]:offsets[m+1]``.
    anchor : Tensor of shape (M,), int64
        The patch whose place the token takes; −1 for a token of no place, such as a global one.
    concept : Tensor of shape (M,), int64
        The latent that most of its patches share; −1 where there is none.
    role : tuple of M str
        ``"primary"``, ``"padding"``, ``"context"``, …
    grid : (int, int)
        Patch grid of the image; N = rows × columns.
    by : str
        The reducer that planned it, such as ``torino-m(k=2, delta=2)``.
    assigned : Tensor of shape (N,), int64
        The output token that stands for each patch, −1 where none does. A pruned patch has no weight but may
        still be stood for, by the patch that was kept in its group.
    score : Tensor of shape (M,), float32
        What the method ranked the token by, such as the peak activation a(i); NaN where it has no score.
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

    def __post_init__(self) -> None:
        """Refuse labels that do not fit the matrix."""
        m, n, nnz = len(self), self.patches, len(self.sources)
        shapes = {"weights": (nnz,), "anchor": (m,), "concept": (m,), "score": (m,), "assigned": (n,)}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise BadParameter(f"{name} must have shape {shape}, got {tuple(getattr(self, name).shape)}.")
        if len(self.role) != m:
            raise BadParameter(f"role must name one role for each of the {m} output tokens, got {len(self.role)}.")
        if not fits(self.offsets, nnz):
            raise BadParameter(f"offsets must rise from 0 to the {nnz} entries, got {self.offsets.tolist()}.")
        for name, low, high in (("sources", 0, n), ("anchor", -1, n), ("assigned", -1, m - 1)):
            values: Tensor = getattr(self, name)
            if len(values) and not (low <= int(values.min()) and int(values.max()) <= high):
                raise BadParameter(f"{name} must lie between {low} and {high}, got {values.unique().tolist()}.")

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float]], grid: tuple[int, int], by: str = "by hand") -> Reduction:
        """Make a reduction by hand, one mapping of patch to weight per output token; labels follow from it.

        Each token is anchored at its heaviest patch and stands for those of its patches that no earlier token
        stands for.
        """
        patches = grid[0] * grid[1]
        _check_patches([patch for row in rows for patch in row], patches)
        assigned = [-1] * (patches + 1)
        for token in reversed(range(len(rows))):
            for patch in rows[token]:
                assigned[patch] = token
        heaviest = [max(row, key=lambda patch: (row[patch], -patch), default=-1) for row in rows]
        return cls(
            sources=torch.tensor([patch for row in rows for patch in row], dtype=torch.int64),
            weights=torch.tensor([weight for row in rows for weight in row.values()], dtype=torch.float32),
            offsets=offsets_of([len(row) for row in rows]),
            anchor=torch.tensor([-1 if patch == patches else patch for patch in heaviest], dtype=torch.int64),
            concept=torch.full((len(rows),), -1),
            role=("primary",) * len(rows),
            grid=grid,
            by=by,
            assigned=torch.tensor(assigned[:-1]),
            score=torch.full((len(rows),), torch.nan),
        )

    @classmethod
    def identity(cls, grid: tuple[int, int], by: str = "identity") -> Reduction:
        """Keep every patch as it is."""
        every = torch.arange(grid[0] * grid[1])
        return cls.pick(every, grid, by)

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
    ) -> Reduction:
        """Keep the patches ``kept``, of shape (M,), in that order: what a pruning method needs to say.

        ``assigned`` tells which kept patch stands for each patch; by default each kept patch for itself alone.
        """
        kept, m = kept.cpu(), len(kept)
        _check_patches(kept.tolist(), grid[0] * grid[1])
        if assigned is None:
            assigned = kept.new_full((grid[0] * grid[1] + 1,), -1)
            assigned[kept] = torch.arange(m)
            assigned = assigned[:-1]  # the CLS token, index N, takes no place on the grid
        return cls(
            sources=kept,
            weights=torch.ones(m),
            offsets=torch.arange(m + 1),
            anchor=torch.where(kept < grid[0] * grid[1], kept, -1),
            concept=torch.full_like(kept, -1),
            role=(role,) * m,
            grid=grid,
            by=by,
            assigned=assigned.cpu(),
            score=torch.full((m,), torch.nan) if score is None else score.detach().float().cpu(),
        )

    def __len__(self) -> int:
        """Return the number of output tokens, M."""
        return len(self.offsets) - 1

    @property
    def patches(self) -> int:
        """Number of patches N of the image."""
        return self.grid[0] * self.grid[1]

    @property
    def is_pruning(self) -> bool:
        """Whether every output token is one unchanged patch."""
        return bool((self.offsets.diff() == 1).all()) and bool((self.weights == 1).all())

    @property
    def mass(self) -> Tensor:
        """How many patches each output token stands for, at least 1, shape (M,)."""
        return self.assigned[self.assigned >= 0].bincount(minlength=len(self)).clamp(min=1)

    @cached_property
    def rows(self) -> Tensor:
        """Output token of each entry, shape (nnz,)."""
        return torch.repeat_interleave(self.offsets.diff())

    def __repr__(self) -> str:
        """Tell how many tokens became how many."""
        kinds = ", ".join(f"{self.role.count(role)} {role}" for role in dict.fromkeys(self.role))
        return f"Reduction({self.patches} -> {len(self)} tokens by {self.by}: {kinds})"

    # ------------------------------------------------------------------ using it

    def apply(self, values: Tensor, cls: Tensor | None = None) -> Tensor:
        """Reduce per-patch values of shape (N, ...) to per-token values of shape (M, ...).

        Works for any trailing shape and any float dtype, and gradients flow through it. Half precision is
        summed in float32. Where the method keeps the CLS token, give it as ``cls`` (or values of N + 1 rows).

        Examples
        --------
        >>> Reduction.of([{0: 0.5, 1: 0.5}], grid=(1, 2)).apply(torch.tensor([[2.0], [4.0]]))
        tensor([[3.]])
        """
        return _apply(self, _rows_of(values, cls, self), self.is_pruning)

    def paint(self, per_token: Tensor, over: Literal["sources", "groups"] = "sources") -> Tensor:
        """Spread per-token values of shape (M, ...) back over the patches, shape (N, ...), for drawing.

        Over ``"sources"`` a patch gets the mean of the tokens it is part of, weighted as it is part of them;
        over ``"groups"`` it gets the value of the token that stands for it. Patches of no token get NaN.
        """
        if over not in ("sources", "groups"):
            raise BadParameter(f"over must be 'sources' or 'groups', got {over!r}.")
        values = per_token if per_token.is_floating_point() else per_token.float()
        if len(values) != len(self):
            raise BadParameter(f"paint takes one value for each of the {len(self)} output tokens, got {len(values)}.")
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
        """Follow this reduction by another one planned on its output: the matrix product, labels included.

        ``after`` sees M patches, on a grid of M places such as (1, M). Its anchors are translated to patches of
        the image; a token without a concept of its own keeps the one of the token it is anchored at.
        """
        m, n = len(self), self.patches
        if after.patches != m:
            raise BadParameter(
                f"This reduction gives {m} tokens, and the next one was planned on {after.patches} patches. "
                "Plan it on the output of this one."
            )
        is_cls = after.sources == m  # the CLS token of the second reduction is that of the image
        counts = torch.where(is_cls, 1, self.offsets.diff()[after.sources.clamp(max=m - 1)])
        entry = torch.repeat_interleave(counts)
        first = torch.where(is_cls, 0, self.offsets[after.sources.clamp(max=m - 1)])
        inner = first[entry] + torch.arange(len(entry)) - (counts.cumsum(0) - counts)[entry]
        # one more entry stands for the CLS token itself, so that nothing is indexed out of an empty matrix
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
            offsets=offsets_of(torch.bincount(key // (n + 1), minlength=len(after)).tolist()),
            anchor=anchor,
            concept=concept,
            role=after.role,
            grid=self.grid,
            by=f"{self.by} > {after.by}",
            assigned=assigned,
            score=after.score,
        )

    def explain(self, token: int, names: Mapping[int, str] | None = None) -> Explanation:
        """Tell what output token ``token`` is made of, where it sits, which concept it carries, and why it is there.

        ``names`` maps latents to words, where someone has named them.
        """
        if not -len(self) <= token < len(self):
            raise BadParameter(f"There are {len(self)} output tokens, numbered from 0; got {token}.")
        token %= len(self)
        entries = slice(int(self.offsets[token]), int(self.offsets[token + 1]))
        concept = int(self.concept[token])
        return Explanation(
            token=token,
            of=len(self),
            role=self.role[token],
            anchor=int(self.anchor[token]),
            grid=self.grid,
            sources=tuple(self.sources[entries].tolist()),
            weights=tuple(self.weights[entries].tolist()),
            stands_for=tuple((self.assigned == token).nonzero()[:, 0].tolist()),
            concept=None if concept < 0 else concept,
            name=(names or {}).get(concept),
            score=float(self.score[token]),
        )

    # ------------------------------------------------------------------ on disk

    def save(self, path: str | Path) -> Path:
        """Write one ``.npz`` (or ``.safetensors``) of a few kB, whole or not at all."""
        return ReductionBatch.of([self]).save(path)

    @staticmethod
    def load(path: str | Path) -> Reduction:
        """Read what :meth:`save` wrote."""
        batch = ReductionBatch.load(path)
        if len(batch) != 1:
            raise BadFile(f"{path} holds {len(batch)} reductions. Read it with ReductionBatch.load.")
        return batch[0]


@dataclass(frozen=True, eq=False)
class ReductionBatch(Sequence[Reduction]):
    """The reductions of several images, applied in one go: a block-diagonal matrix.

    Attributes
    ----------
    reductions : tuple of Reduction
        One per image, in order.
    """

    reductions: tuple[Reduction, ...]

    @classmethod
    def of(cls, reductions: Sequence[Reduction]) -> ReductionBatch:
        """Put reductions of one image each side by side."""
        if not reductions:
            raise BadTokens("An empty list of images was given. Give at least one.")
        return cls(tuple(reductions))

    @overload
    def __getitem__(self, index: int) -> Reduction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Reduction, ...]: ...
    def __getitem__(self, index: int | slice) -> Reduction | tuple[Reduction, ...]:
        """Return the reduction of an image."""
        return self.reductions[index]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.reductions)

    def __iter__(self) -> Iterator[Reduction]:
        """Go through the images in order."""
        return iter(self.reductions)

    @property
    def lengths(self) -> Tensor:
        """Output tokens of each image, shape (images,)."""
        return torch.tensor([len(reduction) for reduction in self.reductions])

    def __repr__(self) -> str:
        """Tell how many tokens the images became."""
        lengths = self.lengths
        return (
            f"ReductionBatch({len(self)} images -> {int(lengths.sum())} tokens, "
            f"{int(lengths.min())} to {int(lengths.max())} an image, by {self[0].by})"
        )

    def apply(self, values: Ragged | Sequence[Tensor], cls: Sequence[Tensor] | None = None) -> Ragged:
        """Reduce the values of all images at once: (ΣN, ...) in, (ΣM, ...) out, with offsets, no padding."""
        parts = list(values)
        if len(parts) != len(self):
            raise BadTokens(f"This batch reduces {len(self)} images, and values of {len(parts)} were given.")
        tokens = list(cls) if cls is not None else [None] * len(self)
        if len(tokens) != len(self):
            raise BadTokens(f"This batch reduces {len(self)} images, and CLS tokens of {len(tokens)} were given.")
        rows = [_rows_of(part, token, red) for part, token, red in zip(parts, tokens, self, strict=True)]
        pruning = all(reduction.is_pruning for reduction in self)
        if len(rows) == 1:
            return Ragged(_apply(self[0], rows[0], pruning), offsets_of(self.lengths.tolist()))
        whole = isinstance(values, Ragged) and all(row is part for row, part in zip(rows, parts, strict=True))
        stacked = values.values if whole and isinstance(values, Ragged) else torch.cat(rows)
        return Ragged(
            _apply(self._joined([len(row) for row in rows]), stacked, pruning), offsets_of(self.lengths.tolist())
        )

    def _joined(self, heights: Sequence[int]) -> _Matrix:
        starts = offsets_of(heights).tolist()
        ends = offsets_of([len(reduction.sources) for reduction in self]).tolist()
        return _Matrix(
            sources=torch.cat([red.sources + start for red, start in zip(self, starts, strict=False)]),
            weights=torch.cat([red.weights for red in self]),
            offsets=torch.cat(
                [self[0].offsets[:1], *[red.offsets[1:] + e for red, e in zip(self, ends, strict=False)]]
            ),
        )

    def arrays(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return everything needed to rebuild the batch, as named arrays and texts."""
        roles = sorted({role for reduction in self for role in reduction.role})
        code = {role: index for index, role in enumerate(roles)}
        arrays = {
            name: torch.cat([getattr(reduction, name) for reduction in self])
            for name in ("sources", "weights", "anchor", "concept", "score", "assigned")
        }
        arrays["role"] = torch.tensor([code[role] for reduction in self for role in reduction.role], dtype=torch.int8)
        arrays["row_lengths"] = torch.cat([reduction.offsets.diff() for reduction in self])
        arrays["lengths"] = self.lengths
        arrays["grids"] = torch.tensor([reduction.grid for reduction in self])
        texts = {"format": FORMAT, "roles": json.dumps(roles), "by": json.dumps([reduction.by for reduction in self])}
        return arrays, texts

    def save(self, path: str | Path, **others: Tensor) -> Path:
        """Write the batch to ``.npz`` or ``.safetensors``, whole or not at all; ``others`` ride along."""
        arrays, texts = self.arrays()
        return write_arrays(path, {**arrays, **others}, texts)

    @classmethod
    def load(cls, path: str | Path) -> ReductionBatch:
        """Read what :meth:`save` wrote."""
        arrays, texts = read_arrays(path)
        if texts.get("format") != FORMAT:
            raise BadFile(
                f"{path} is not a saved reduction: its format is {texts.get('format', 'not named')!r}, "
                f"not {FORMAT!r}. Give a file written by Reduction.save or torino reduce."
            )
        try:
            return cls.of(_rebuild(arrays, texts))
        except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise BadFile(f"{path} is damaged: its parts do not fit together ({error}). Make it again.") from error


@dataclass(frozen=True)
class _Matrix:
    """The bare matrix, without labels: what applying needs."""

    sources: Tensor
    weights: Tensor
    offsets: Tensor


def _check_patches(given: Sequence[int], patches: int) -> None:
    wrong = [patch for patch in given if not 0 <= patch <= patches]
    if wrong:
        raise BadParameter(
            f"There is no patch {wrong[0]}: the grid has patches 0 to {patches - 1}, and {patches} is the CLS token."
        )


def _rebuild(arrays: dict[str, Tensor], texts: dict[str, str]) -> list[Reduction]:
    lengths: list[int] = arrays["lengths"].tolist()
    grids: list[list[int]] = arrays["grids"].tolist()
    roles, names = json.loads(texts["roles"]), json.loads(texts["by"])
    if min(min(grid) for grid in grids) < 1:
        raise ValueError("a grid has no patches")
    per_token = {name: arrays[name].split(lengths) for name in ("anchor", "concept", "score", "role", "row_lengths")}
    entries = [int(rows.sum()) for rows in per_token["row_lengths"]]
    per_entry = {name: arrays[name].split(entries) for name in ("sources", "weights")}
    assigned = arrays["assigned"].split([rows * columns for rows, columns in grids])
    return [
        Reduction(
            sources=per_entry["sources"][i],
            weights=per_entry["weights"][i],
            offsets=offsets_of(per_token["row_lengths"][i].tolist()),
            anchor=per_token["anchor"][i],
            concept=per_token["concept"][i],
            role=tuple(roles[code] for code in per_token["role"][i].tolist()),
            grid=(rows, columns),
            by=names[i],
            assigned=assigned[i],
            score=per_token["score"][i],
        )
        for i, (rows, columns) in enumerate(grids)
    ]


def _rows_of(values: Tensor, cls: Tensor | None, reduction: Reduction) -> Tensor:
    """The rows a reduction reads: N, or N + 1 with the CLS token last."""
    if not values.is_floating_point():
        raise BadTokens(f"apply takes floating-point values, got {values.dtype}. Convert them with .float().")
    n = reduction.patches
    reads_cls = bool((reduction.sources == n).any())
    if len(values) == n and cls is not None and reads_cls:
        values = torch.cat([values, cls.to(values)[None]])
    wanted = (n, n + 1) if not reads_cls else (n + 1,)
    if len(values) not in wanted:
        extra = " and a CLS token (give cls=...)" if reads_cls else ""
        raise BadTokens(f"This reduction reads {n} patches{extra}, and {len(values)} rows of values were given.")
    return values


def _apply(matrix: Reduction | _Matrix, values: Tensor, pruning: bool) -> Tensor:
    sources = matrix.sources.to(values.device)
    if pruning:
        return values.index_select(0, sources)
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    table = wide.flatten(1) if wide.ndim > 1 else wide[:, None]
    # a sum over each run of rows, in a fixed order on every device, unlike index_add
    sums = torch.nn.functional.embedding_bag(
        sources,
        table,
        matrix.offsets.to(values.device),
        mode="sum",
        per_sample_weights=matrix.weights.to(table),
        include_last_offset=True,
    )
    return sums.reshape(-1, *values.shape[1:]).to(values.dtype)
