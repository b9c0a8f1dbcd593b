"""The rule of ``torino-x`` with fixed shapes and without host synchronization, see :mod:`torino.reducers.device`."""

from __future__ import annotations

import torch
from torch import Tensor

from torino.core.device_grouping import device_shared_concepts
from torino.reducers.device import DevicePlan


def coverage_plan(
    patches: Tensor,
    indices: Tensor,
    values: Tensor,
    exact: Tensor,
    *,
    locality: tuple[Tensor, Tensor] | None,
    latents: int,
    tokens: int,
    min_gain: float,
    tie: float,
    merge: bool,
    raster: bool,
) -> DevicePlan:
    """Select at most ``tokens`` patches by coverage and assign the others to them.

    Parameters
    ----------
    patches : Tensor of shape (images, N, D)
    indices, values, exact
        Concepts of shape (images, N, k), and whether they are exact.
    locality : pair of Tensors of shapes (rows, rows) and (columns, columns), optional
        Factors on the overlap of patches by row and by column.
    latents : int
        Number of latents of the encoder.
    tokens, min_gain, tie, merge, raster
        Settings of the reducer; ``tokens`` is the number of rows of the plan.
    """
    overlap = _overlap(indices, values, locality)
    images, n = overlap.shape[:2]
    kept, gains, valid = _greedy_coverage(overlap, _weights(values[:, :, 0]), tokens, min_gain, tie)
    if raster:
        order = torch.where(valid, kept, n).sort(dim=1, stable=True).indices
        kept, gains, valid = kept.gather(1, order), gains.gather(1, order), valid.gather(1, order)

    token = torch.arange(tokens, device=kept.device).expand(images, tokens)
    rows = overlap.gather(1, kept[:, :, None].expand(images, tokens, n))
    shown = rows.masked_fill(~valid[:, :, None], -torch.inf)
    largest = shown.amax(1)
    first = torch.where(shown == largest[:, None], token[:, :, None], tokens).amin(1)
    assigned = torch.where(largest > tie, first, -1)
    spare = torch.cat([assigned, assigned[:, :1]], 1)  # one more entry for empty rows
    assigned = spare.scatter(1, torch.where(valid, kept, n), token)[:, :n]

    place = torch.arange(n, device=kept.device)
    if merge:
        is_source = valid[:, :, None] & (assigned[:, None] == token[:, :, None])
        weight = torch.where(is_source, rows, 0.0)
        values32 = patches.float()
        norm = torch.linalg.vector_norm(values32, dim=2).gather(1, kept)
        length = torch.linalg.vector_norm(torch.bmm(weight, values32), dim=2).clamp(min=1e-12)
        matrix = weight * (norm / length)[:, :, None]
    else:
        is_source = valid[:, :, None] & (kept[:, :, None] == place)
        matrix = is_source.float()
    concept = device_shared_concepts(indices, values, assigned, latents)[:, :tokens]
    return DevicePlan(
        matrix=matrix,
        is_source=is_source,
        anchor=torch.where(valid, kept, -1),
        concept=torch.where(valid, concept, -1),
        is_padding=torch.zeros_like(valid),
        score=gains,
        assigned=assigned,
        length=valid.sum(1),
        exact=exact,
    )


def _overlap(indices: Tensor, values: Tensor, locality: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the overlap of all pairs of patches, shape (images, N, N)."""
    images, n, k = indices.shape
    active = (indices >= 0) & (values > 0)
    value = torch.where(active, values, 0.0)
    norm = value.double().square().sum(2, keepdim=True).sqrt().float()
    code = torch.where(active, value / norm, 0.0)
    overlap = values.new_zeros(images, n, n)
    for one in range(k):
        for two in range(k):
            same = indices[:, :, None, one] == indices[:, None, :, two]
            overlap += torch.where(same, code[:, :, None, one] * code[:, None, :, two], 0.0)
    silent = ~active.any(2)
    equal = (silent[:, :, None] & silent[:, None]) | torch.eye(n, dtype=torch.bool, device=indices.device)
    overlap = overlap.masked_fill(equal, 1.0)
    if locality is None:
        return overlap
    rows, columns = locality
    grid = (len(rows), len(columns))
    local = overlap.view(images, *grid, *grid) * rows[:, None, :, None] * columns[None, :, None, :]
    return local.view(images, n, n)


def _weights(peak: Tensor) -> Tensor:
    """Return peak activations divided by their mean, or ones if there is no activation, shape (images, N)."""
    positive = peak.double().clamp(min=0)
    mean = positive.mean(1, keepdim=True)
    return torch.where(mean > 0, positive / mean.clamp(min=1e-300), 1.0).float()


def _greedy_coverage(
    overlap: Tensor, weight: Tensor, tokens: int, min_gain: float, tie: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return selected patches in order of selection, their gains, and which of the rows are used; (images, tokens)."""
    images, n = weight.shape
    place = torch.arange(n, device=weight.device)
    coverage = torch.zeros_like(weight)
    taken = torch.zeros_like(weight, dtype=torch.bool)
    running = torch.ones(images, dtype=torch.bool, device=weight.device)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(tokens):
        gain = ((overlap - coverage[:, None]).clamp_(min=0) * weight[:, None]).sum(2, dtype=torch.float64)
        gain = gain.masked_fill(taken, -torch.inf)
        highest = gain.amax(1)
        step_gain = torch.where(highest > tie, highest, 0.0)
        if step:
            running = running & (step_gain >= min_gain - tie)
        best = torch.where(gain >= highest[:, None] - tie, place, n).amin(1)
        steps.append((best, step_gain.float(), running))
        row = overlap.gather(1, best[:, None, None].expand(images, 1, n))[:, 0]
        coverage = torch.maximum(coverage, row)
        taken = taken | (place == best[:, None])
    kept, gains, valid = (torch.stack(part, 1) for part in zip(*steps, strict=True))
    return kept, gains.cummin(1).values, valid
