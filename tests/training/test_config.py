"""Training configuration: defaults and checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import planted_dictionary as planted
from torino.core.errors import BadParameter
from torino.training.config import TrainConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": 2}, "at most the number of latents, 2, got 3"),
        ({"latents": 8}, "8 latents are too few for the groups"),
        ({"kind": "sparse"}, "kind must be one of matryoshka, batchtopk, topk, relu"),
        ({"fractions": (0.5, 0.4)}, "sum to 1"),
        ({"weights": (1.0, 2.0)}, "4 numbers, one per level"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"k_start": 2}, "k_start must be at least k=3"),
        ({"decay_from": 100}, "at most the number of steps, 60"),
        ({"threshold_beta": 1.0}, "below 1"),
        ({"precision": "int8"}, "precision must be one of"),
        ({"fractions": (float("nan"), 1.0)}, "fractions must be positive"),
        ({"weights": (float("inf"), 1.0, 1.0, 1.0)}, "weights must be finite.*inf"),
        ({"kind": "relu", "latents": None, "expansion": 0.001}, "gives no latents"),
    ],
)
def test_invalid_settings_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=message):
        planted.run_training(str(tmp_path), **changes)
    assert not (tmp_path / "card.json").exists()


def test_defaults_depend_on_the_width() -> None:
    config = TrainConfig().resolve(1024)
    assert config.latents == 16384
    assert config.lr == pytest.approx(16 / (125 * 128))
    assert config.group_sizes() == (1024, 2048, 4096, 9216)
    assert config.resolve(1024) == config
    assert config.aux_k == 512
    assert [TrainConfig(k_start=100, anneal=10).k_at(step) for step in (0, 5, 10, 11)] == [100, 60, 20, 20]
    relu = replace(config, kind="relu", l1=0.5)
    assert (relu.l1_at(0), relu.l1_at(249), relu.l1_at(4000)) == pytest.approx((0.002, 0.5, 0.5))
