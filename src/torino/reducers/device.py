"""Plans on the device of the tokens, with fixed shapes and without host synchronization.

A :class:`DevicePlanner` is prepared once for a reducer and a grid. Its plans are padded tensors, so a planner with a
fixed budget, and the application of its plans, can be captured in a CUDA graph. ``plan`` and ``plan_batch`` of
``torino-p``, ``torino-m`` and ``torino-x`` use it for CUDA tensors (:func:`torino.core.planner.use_planner`). It has
not been run on a GPU; tests run it on a CPU and forbid synchronizing operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torino.core.concepts import ConceptEncoder, Rank
from torino.core.errors import BadParameter, BadTokens
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens

Search = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """Padded plans of images of the same grid; all tensors are on the device of the tokens.

    Attributes
    ----------
    matrix : Tensor of shape (images, T, N), float32
        Weights of the patches; rows from ``length`` on are 0.
    is_source : Tensor of shape (images, T, N), bool
        Which patches belong to the matrix; a weight may be 0.
    anchor, concept : Tensor of shape (images, T), int64
        As in :class:`~torino.core.reduction.Reduction`; −1 in rows from ``length`` on.
    is_padding : Tensor of shape (images, T), bool
        Which tokens are padding.
    score : Tensor of shape (images, T), float32
    assigned : Tensor of shape (images, N), int64
    length : Tensor of shape (images,), int64
        Number of output tokens.
    exact : Tensor of shape (images,), bool
        Whether the concepts of all patches are proven to be exact. ``plan_batch`` plans again if they are not.
    """

    matrix: Tensor
    is_source: Tensor
    anchor: Tensor
    concept: Tensor
    is_padding: Tensor
    score: Tensor
    assigned: Tensor
    length: Tensor
    exact: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Reduce values of shape (images, N, D) to (images, T, D); half precision is summed in float32."""
        if values.ndim != 3 or values.shape[:2] != (self.matrix.shape[0], self.matrix.shape[2]):
            raise BadTokens(
                f"apply needs values of shape ({self.matrix.shape[0]}, {self.matrix.shape[2]}, D), "
                f"got {tuple(values.shape)}."
            )
        wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
        return torch.bmm(self.matrix.to(wide.dtype), wide).to(values.dtype)

    def to_batch(self, grid: tuple[int, int], by: str) -> ReductionBatch:
        """Copy the plans to the host and remove the padding."""
        host = {name: value.cpu() for name, value in vars(self).items()}
        reductions: list[Reduction] = []
        for i, length in enumerate(host["length"].tolist()):
            is_source = host["is_source"][i, :length]
            row, sources = is_source.nonzero(as_tuple=True)
            counts = is_source.sum(1)
            reductions.append(
                Reduction(
                    sources=sources,
                    weights=host["matrix"][i, row, sources],
                    offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
                    anchor=host["anchor"][i, :length].clone(),
                    concept=host["concept"][i, :length].clone(),
                    role=tuple("padding" if pad else "primary" for pad in host["is_padding"][i, :length].tolist()),
                    grid=grid,
                    by=by,
                    assigned=host["assigned"][i].clone(),
                    score=host["score"][i, :length].clone(),
                )
            )
        return ReductionBatch.of(reductions)


class DeviceReducer(Protocol):
    """A reducer that can plan on a device."""

    sae: ConceptEncoder
    budget: int | None

    @property
    def spec(self) -> str:
        """Name and hyperparameters."""
        ...

    def device_rule(self, grid: tuple[int, int], latents: int, device: torch.device) -> tuple[int, Rank, Any] | None:
        """Return the number of concepts, their rank, and the rule; None if the settings are not supported."""
        ...


class DevicePlanner:
    """Plan images of one grid on one device.

    Preparation reads the weights of the SAE and waits for the device. Planning does not.

    Parameters
    ----------
    reducer : Reducer
        A ``torino-p``, ``torino-m`` or ``torino-x``, not pooled, with a budget of at most N.
    grid : (int, int)
        Rows and columns of patches.
    width : int
        Width D of the tokens.
    device : torch.device

    Examples
    --------
    >>> from torino import RawEmbedding, make
    >>> planner = DevicePlanner(make("torino-m", sae=RawEmbedding(), budget=2), (2, 2), 4, torch.device("cpu"))
    >>> tokens = torch.eye(4)[None]
    >>> planner.plan(tokens).apply(tokens).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, reducer: DeviceReducer, grid: tuple[int, int], width: int, device: torch.device) -> None:
        latents = int(getattr(reducer.sae, "latents", width))
        settings = None
        if hasattr(reducer, "device_rule"):
            settings = reducer.device_rule(grid, latents, device)
        if settings is None:
            raise BadParameter(
                f"{reducer.spec} cannot be planned on a device for a grid of {grid[0]}x{grid[1]}. Use torino-p, "
                "torino-m or torino-x, not pooled, with a budget of at most the number of patches."
            )
        k, rank, self._rule = settings
        self.grid, self._search = grid, _search(reducer.sae, k, rank)

    @torch.no_grad()
    def plan(self, patches: Tensor) -> DevicePlan:
        """Plan patches of shape (images, N, D)."""
        images, n, width = patches.shape
        indices, values, proven = self._search(patches.reshape(images * n, width))
        parts = (indices.view(images, n, -1), values.view(images, n, -1), proven.view(images, n).all(1))
        return self._rule(patches, *parts)


def _search(encoder: ConceptEncoder, k: int, rank: Rank) -> Search:
    prepare = getattr(encoder, "device_search", None)
    if prepare is not None:
        return prepare(k, rank=rank)

    def search(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        concepts = encoder.top(x, k, rank=rank)
        return concepts.indices, concepts.values, torch.ones(len(x), dtype=torch.bool, device=x.device)

    return search


def plan_on_device(reducer: Any, images: Sequence[VisualTokens]) -> ReductionBatch | None:
    """Plan images with torch; None if the settings are not supported or some concepts are not proven to be exact.

    The padded matrix of a video would be too large, so videos are not supported.
    """
    if any(image.frames > 1 for image in images):
        return None
    plans: dict[int, Reduction] = {}
    by_grid: dict[tuple[int, int], list[int]] = {}
    for number, image in enumerate(images):
        by_grid.setdefault(image.grid, []).append(number)
    for grid, numbers in by_grid.items():
        first = images[numbers[0]].patches
        latents = int(getattr(reducer.sae, "latents", first.shape[1]))
        if reducer.device_rule(grid, latents, first.device) is None:
            return None
        patches = torch.stack([images[number].patches.detach() for number in numbers])
        plan = DevicePlanner(reducer, grid, first.shape[1], first.device).plan(patches)
        if not bool(plan.exact.all()):
            return None
        planned = plan.to_batch(grid, reducer.spec)
        plans |= {
            number: replace(reduction, times=images[number].times)
            for number, reduction in zip(numbers, planned, strict=True)
        }
    return ReductionBatch.of([plans[number] for number in range(len(images))])


Order = Literal["raster", "native"]


def group_plan(
    indices: Tensor,
    values: Tensor,
    exact: Tensor,
    label: Tensor,
    shared: Tensor,
    member_weight: Tensor | None,
    budget: int | None,
    order: Order,
) -> DevicePlan:
    """Turn groups into output tokens (Algorithms 1 and 2), as ``torino-p`` and ``torino-m`` do.

    Parameters
    ----------
    indices, values, exact
        Concepts of shape (images, N, k), and whether they are exact.
    label : Tensor of shape (images, N)
        Group of each patch.
    shared : Tensor of shape (images, N)
        Concept of each group.
    member_weight : Tensor of shape (N + 1,), optional
        Weight of the members of a group of each size; None if only the representative is kept.
    budget, order
        As in the reducer.
    """
    images, n = label.shape
    rows = n if budget is None else budget
    peak = values[:, :, 0]
    place = torch.arange(n, device=label.device).expand(images, n)
    size = torch.zeros_like(label).scatter_add(1, label, torch.ones_like(label))
    count = label.amax(1) + 1
    by_peak = (peak + 0.0).sort(dim=1, descending=True, stable=True).indices  # ties by index
    members = by_peak.gather(1, label.gather(1, by_peak).sort(dim=1, stable=True).indices)
    is_group = place < count[:, None]
    representative = members.gather(1, (size.cumsum(1) - size).clamp(max=n - 1))  # i*_g, Eq. 9

    kept = is_group
    pad_rank = torch.full_like(label, n)
    if budget is not None:
        by_size = torch.where(is_group, size, -1).sort(dim=1, descending=True, stable=True).indices
        kept = kept & (_inverse(by_size) < budget)  # Eq. 11
        pool = torch.ones_like(is_group)
        if member_weight is None:  # Eq. 12: a patch that is kept already is no padding
            taken = torch.zeros(images, n + 1, dtype=torch.bool, device=label.device)
            pool = ~taken.scatter(1, torch.where(is_group, representative, n), True)[:, :n]
        first_pool = (~pool).gather(1, by_peak).long().sort(dim=1, stable=True).indices
        pad_rank = torch.where(pool, _inverse(by_peak.gather(1, first_pool)), n)
    is_pad = pad_rank < (rows - count).clamp(min=0)[:, None] if budget is not None else torch.zeros_like(is_group)

    # group slots and padding slots, sorted into the output order; empty slots last
    anchor = torch.cat([representative, place], 1)
    used = torch.cat([kept, is_pad], 1)
    padding = torch.cat([torch.zeros_like(kept), torch.ones_like(is_pad)], 1)
    key = 2 * anchor + padding if order == "raster" else torch.cat([place, n + pad_rank], 1)
    slot = torch.where(used, key, 4 * n + 4).sort(dim=1, stable=True).indices[:, :rows]
    used, padding, anchor = used.gather(1, slot), padding.gather(1, slot), anchor.gather(1, slot)
    padding = padding & used
    group = torch.where(padding, label.gather(1, anchor), slot.clamp(max=n - 1))
    primary = used & ~padding
    concept = torch.where(padding, indices[:, :, 0].gather(1, anchor), shared.gather(1, group))

    token = torch.arange(rows, device=label.device).expand(images, rows)
    token_of_group = torch.full((images, n + 1), -1, device=label.device)
    token_of_group = token_of_group.scatter(1, torch.where(primary, group, n), token)[:, :n]
    assigned = token_of_group.gather(1, label)
    is_anchor = used[:, :, None] & (anchor[:, :, None] == place[:, None])
    if member_weight is None:
        spare = torch.cat([assigned, assigned[:, :1]], 1)  # one more entry for empty rows
        assigned = spare.scatter(1, torch.where(used, anchor, n), token)[:, :n]
        is_source, matrix = is_anchor, is_anchor.float()
    else:
        is_member = primary[:, :, None] & (label[:, None] == group[:, :, None])
        is_source = is_member | (is_anchor & padding[:, :, None])
        weight = torch.where(padding, 1.0, member_weight[size.gather(1, group)])
        matrix = torch.where(is_source, weight[:, :, None], 0.0)
    return DevicePlan(
        matrix=matrix,
        is_source=is_source,
        anchor=torch.where(used, anchor, -1),
        concept=torch.where(used, concept, -1),
        is_padding=padding,
        score=peak.gather(1, anchor),
        assigned=assigned,
        length=used.sum(1),
        exact=exact,
    )


def _inverse(order: Tensor) -> Tensor:
    """Return the rank of each entry, given the order of the entries of each row."""
    rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, rank)
