"""Scaling of the rows and initial weights."""

from __future__ import annotations

import pytest
import torch

from tests.support import planted_dictionary as planted
from torino.training.activations.base import InMemory
from torino.training.init import geometric_median
from torino.training.trainer import Trainer

ROWS, _ = planted.make_rows()
ACTIVATIONS = InMemory(ROWS, metadata=planted.METADATA)


@pytest.mark.parametrize("center", [False, True])
def test_scaling_is_folded_back(center: bool) -> None:
    trainer = Trainer(ACTIVATIONS, planted.make_config(kind="batchtopk", center=center))
    for step in range(30):
        trainer.train_step(ACTIVATIONS.batch(step, 256))
    x = ROWS[:100]
    u = trainer.scaling(x)
    assert float(trainer.scaling(ROWS).square().sum(1).mean()) == pytest.approx(1, rel=0.05)
    w = trainer.weights
    z = ((u - w.b_dec) @ w.W_enc.T + w.b_enc).relu()
    z = z * (z > trainer.threshold)
    sae = trainer.to_sae()
    scale = trainer.scaling.scale
    assert scale > 2
    torch.testing.assert_close(sae.encode(x), z * scale, rtol=1e-4, atol=1e-4)
    reconstruction = (z @ w.W_dec + w.b_dec) * scale + trainer.scaling.center
    torch.testing.assert_close(sae.reconstruct(x), reconstruction, rtol=1e-4, atol=1e-4)
    assert sae.W_dec is not None
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(128))


def test_geometric_median_is_robust_to_outliers() -> None:
    points = torch.cat([torch.randn(99, 4, generator=torch.Generator().manual_seed(0)), torch.full((1, 4), 1e4)])
    assert float(geometric_median(points).norm()) < 0.5 < float(points.mean(0).norm())
