"""HoloV: small examples and a slow transcription of the published rule."""

from __future__ import annotations

from math import floor, sqrt

import pytest
import torch
from torch import Tensor

from torino import VisualTokens
from torino.core.errors import BadParameter, MissingSignal, UnmetBudget
from torino.reducers.holov import HoloV


def tokens_of(patches: Tensor, attention: Tensor) -> VisualTokens:
    return VisualTokens(patches, (1, len(patches)), cls_attention=attention.reshape(-1, len(patches)))


def run_score(rows: list[list[float]], attention: list[float], alpha: float) -> float:
    """Score a run with plain loops."""
    scaled = [1000 * value for value in attention]
    n = len(rows)
    if n == 1:
        return scaled[0]
    norms = [sqrt(sum(value * value for value in row)) for row in rows]
    variations = []
    for i in range(n):
        similar = []
        for j in range(n):
            dot = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
            length = norms[i] * norms[j]
            similar.append(0.0 if i == j or not length else dot / length)
        mean = sum(similar) / (n - 1)
        variations.append(sum((value - mean) ** 2 for value in similar) / (n - 1))
    factor = sum(abs(value) for value in scaled) / n / (sum(variations) / n + 1e-6)
    return sum(a + alpha * v * factor for a, v in zip(scaled, variations, strict=True)) / n


def reference(patches: Tensor, attention: Tensor, budget: int, runs: int, alpha: float) -> list[int]:
    """Select patches run by run with plain loops; for budgets that fit into all runs."""
    n = len(patches)
    rows, weights = patches.double().tolist(), attention.double().mean(0).tolist()
    runs = min(runs, n)
    parts, start = [], 0
    for number in range(runs):
        length = n // runs + (number < n % runs)
        parts.append(list(range(start, start + length)))
        start += length
    scores = [run_score([rows[i] for i in part], [weights[i] for i in part], alpha) for part in parts]
    total = sum(scores)
    shares = [floor(score / total * budget) for score in scores]
    best = sorted(range(runs), key=lambda run: -scores[run])
    for run in best[: budget - sum(shares)]:
        shares[run] += 1
    kept = []
    for part, share in zip(parts, shares, strict=True):
        if share > len(part):
            return []  # over-full: the release loses tokens here
        kept += sorted(part, key=lambda i: -weights[i])[:share]
    return kept


@pytest.mark.parametrize("seed", range(8))
def test_equals_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    compared = 0
    for n, runs in ((16, 4), (37, 5), (64, 16), (10, 16)):
        patches = torch.randn(n, 6, generator=generator)
        attention = torch.rand(3, n, generator=generator)
        for budget in (3, n // 3, n // 2):
            expected = reference(patches, attention, budget, runs, 0.09)
            if expected:
                compared += 1
                plan = HoloV(budget, runs=runs, order="native").plan(tokens_of(patches, attention))
                assert plan.sources.tolist() == expected
                raster = HoloV(budget, runs=runs).plan(tokens_of(patches, attention))
                assert raster.sources.tolist() == sorted(expected)
    assert compared >= 8


def test_every_run_gets_its_share() -> None:
    attention = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.03, 0.02])
    plan = HoloV(4, runs=2, order="native").plan(tokens_of(torch.eye(8), attention))
    assert plan.sources.tolist() == [0, 1, 2, 3]  # scores of the runs are 4 : 1, and the better one gets the remainder
    plan = HoloV(5, runs=2, order="native").plan(tokens_of(torch.eye(8), attention))
    assert plan.sources.tolist() == [0, 1, 2, 3, 4]


def test_a_full_run_gives_tokens_to_the_others() -> None:
    attention = torch.tensor([0.5, 0.45, 0.01, 0.01, 0.01, 0.02])
    plan = HoloV(4, runs=3).plan(tokens_of(torch.eye(6), attention))
    assert len(plan) == 4
    assert plan.sources[:2].tolist() == [0, 1]


def test_degenerate_images() -> None:
    for patches in (torch.zeros(12, 3), torch.ones(12, 3)):
        for attention in (torch.zeros(2, 12), torch.full((2, 12), 1 / 12)):
            for budget in (1, 5, 12):
                assert len(HoloV(budget).plan(tokens_of(patches, attention))) == budget


def test_wrong_arguments() -> None:
    with pytest.raises(BadParameter, match="runs"):
        HoloV(4, runs=0)
    with pytest.raises(UnmetBudget):
        HoloV(9).plan(tokens_of(torch.eye(8), torch.rand(8)))
    with pytest.raises(MissingSignal, match="projected"):
        HoloV(4, space="projected").plan(tokens_of(torch.eye(8), torch.rand(8)))
