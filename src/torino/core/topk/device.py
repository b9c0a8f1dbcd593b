"""Exact top-k search with fixed shapes and without host synchronization, for any device.

The scores are those of :mod:`torino.core.topk.exact`. A fixed number of candidates per token is scored by the
definition. On CUDA they are found by a fused kernel (:mod:`torino.core.topk.kernel`) if Triton is installed, otherwise
by matrix products. A flag per token tells whether the bound proves that no other latent is in the result. Where it does
not (many near-ties), the caller repeats the search with :func:`torino.core.topk.exact.exact_topk`, which may wait for
the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from torino.core.topk.exact import SILENT, float32_error, stable_topk

SPARE = 8  # candidates beyond k
COLUMNS = 4096  # latents per chunk
PAIR_WORKSPACE = 1 << 22  # float64 elements in memory at once (32 MiB)
Find = Callable[[Tensor, Tensor, Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]]


@torch.no_grad()
def device_topk(
    x: Tensor, weight: Tensor, bias: Tensor, k: int, floor: Tensor, largest_norm: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices and values as :func:`torino.core.topk.exact.exact_topk`, and which tokens are proven, (N,)."""
    slack = float32_error(x, bias, largest_norm)
    find = _fused_candidates() if x.is_cuda else None
    candidates, lowest = (find or find_candidates)(x, weight, bias, min(k + SPARE, len(weight)), floor, slack)
    return rescore(x, weight, bias, k, floor, slack, candidates, lowest)


@cache
def _fused_candidates() -> Find | None:
    """Return the Triton kernel, or None if Triton is not installed."""
    if find_spec("triton") is None:
        return None
    from torino.core.topk.kernel import fused_candidates  # Triton is optional and needs a second to load

    return fused_candidates


def find_candidates(
    x: Tensor, weight: Tensor, bias: Tensor, m: int, floor: Tensor, slack: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the ``m`` latents with the largest float32 scores of each token, and the score that no other exceeds."""
    candidates = torch.full((len(x), m), SILENT, device=x.device)
    rough = x.new_full((len(x), m), -torch.inf)
    for start in range(0, len(weight), COLUMNS):
        stop = min(start + COLUMNS, len(weight))
        scores = torch.addmm(bias[start:stop], x, weight[start:stop].T)
        if floor.ndim == 1:
            scores.masked_fill_(scores + 1.01 * slack.float()[:, None] <= floor[start:stop], -torch.inf)
        values, latent = scores.topk(min(m, stop - start), dim=1)
        rough, order = torch.cat([rough, values], 1).topk(m, dim=1)
        candidates = torch.cat([candidates, latent + start], 1).gather(1, order)
    lowest = rough[:, -1] if m < len(weight) else torch.full_like(rough[:, -1], -torch.inf)
    return candidates.masked_fill(rough == -torch.inf, SILENT), lowest


def rescore(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    floor: Tensor,
    slack: Tensor,
    candidates: Tensor,
    lowest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score candidates (N, m) by the definition; return the best ``k``, their scores, and which tokens are proven.

    ``lowest``, of shape (N,), is a float32 score that no other latent exceeds.
    """
    if candidates.shape[1] < k:
        candidates = torch.nn.functional.pad(candidates, (0, k - candidates.shape[1]), value=SILENT)
    n, m = candidates.shape
    chosen = candidates.clamp(min=0)
    rows = max(1, PAIR_WORKSPACE // (m * x.shape[1]))
    sums: list[Tensor] = []
    for start in range(0, n, rows):
        part = chosen[start : start + rows]
        terms = weight[part].double() * x[start : start + rows, None].double()
        sums.append(terms.view(-1, x.shape[1]).sum(1).view(-1, m))
    scores = (torch.cat(sums) + bias[chosen]).float()
    silent = (candidates == SILENT) | (scores <= (floor if floor.ndim == 0 else floor[chosen]))
    latents, by_latent = candidates.sort(dim=1)
    order, values = stable_topk(scores.masked_fill(silent, -torch.inf).gather(1, by_latent), k)
    indices = latents.gather(1, order)

    limit = lowest.double() + slack
    limit = limit + 2.0**-22 * limit.abs()
    proven = (limit < values[:, -1].double()) | (lowest == -torch.inf)
    if floor.ndim == 0:
        proven = proven | (limit <= floor.double())
    empty = values == -torch.inf
    return indices.masked_fill(empty, SILENT), values.masked_fill(empty, 0.0), proven & slack.isfinite()
