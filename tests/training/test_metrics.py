"""Metrics of a trained SAE."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import planted_dictionary as planted
from torino import SAE, VisualTokens, make
from torino.core.errors import BadTokens
from torino.training.activations.base import InMemory
from torino.training.metrics import compute_metrics, count_groups
from torino.training.trainer import train

ROWS, _ = planted.make_rows()
ACTIVATIONS = InMemory(ROWS, metadata=planted.METADATA)


def train_sae(folder: Path) -> SAE:
    train(ACTIVATIONS, planted.make_config(kind="matryoshka", steps=250), folder)
    return SAE.load(folder)


def test_metrics(tmp_path: Path) -> None:
    sae, x = train_sae(tmp_path), ROWS[:500]
    metrics = compute_metrics(sae, [x[:300], x[300:]])
    assert metrics.fvu == pytest.approx(float((x - sae.reconstruct(x)).square().sum() / (x - x.mean(0)).square().sum()))
    first = sae.first(1)
    reconstruction = first.reconstruct(x)
    assert metrics.levels[0] == pytest.approx(
        float((x - reconstruction).square().sum() / (x - x.mean(0)).square().sum())
    )
    assert len(metrics.levels) == 4
    z = sae.encode(x) > 0
    assert metrics.l0 == pytest.approx(float(z.sum(1).double().mean()))
    assert metrics.top_frequency == pytest.approx(float(z.double().mean(0).max()))
    assert metrics.dead == pytest.approx(float((~z.any(0)).double().mean()))
    assert list(metrics.levels) == sorted(metrics.levels, reverse=True)
    assert compute_metrics(sae, [x[:300], x[:0], x[300:]]) == metrics, "a skipped photo has no rows"
    with pytest.raises(BadTokens, match="no rows"):
        compute_metrics(sae, [x[:0]])


def test_group_counts_match_the_reducer(tmp_path: Path) -> None:
    sae = train_sae(tmp_path)
    photos = [ROWS[:16], ROWS[16:32], ROWS[:0]]
    counts = count_groups(sae, photos)
    for k in (1, 2, 3):
        plans = [make("torino-m", sae=sae, k=k, delta=k).plan(VisualTokens(rows, (4, 4))) for rows in photos[:2]]
        assert counts[f"({k},{k})"] == sum(len(plan) for plan in plans) / 2
