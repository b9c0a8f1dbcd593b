"""Ablations of TORINO-X: selection rules, patch weights and concept ranking."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torino_x_ablations import TorinoXAblations, farthest_point

from tests.support.random_concepts import clustered_images, random_concepts
from torino import SAE, RawEmbedding, Reduction, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter
from torino.evaluation.protocol import default_methods
from torino.reducers.calibration import calibrate_cover
from torino.reducers.torino_x import TIE, code_overlap
from torino.testing import check_reducer, sample_tokens

RAW = RawEmbedding()


def image(*latents: int, grid: tuple[int, int] | None = None) -> VisualTokens:
    """Return patches with one concept each."""
    return VisualTokens(torch.eye(9)[list(latents)], grid or (1, len(latents)))


@pytest.mark.parametrize("parameters", [{}, {"budget": 5}, {"min_gain": 0.2, "mode": "prune"}, {"locality": None}])
def test_defaults_equal_torino_x(parameters: dict[str, Any]) -> None:
    for tokens in sample_tokens():
        if len(tokens) >= parameters.get("budget", 1):
            plan = make("torino-x-ablations", sae=RAW, **parameters).plan(tokens)
            expected = make("torino-x", sae=RAW, **parameters).plan(tokens)
            for field in fields(Reduction):
                value, other = getattr(plan, field.name), getattr(expected, field.name)
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, other), field.name
                elif field.name != "by":
                    assert value == other, field.name


@settings(max_examples=60, deadline=None)
@given(random_concepts())
def test_farthest_point_selection(concepts: Concepts) -> None:
    overlap = code_overlap(concepts)
    selected, gains = farthest_point(overlap, np.ones(len(overlap), np.float32), len(overlap), 0.0)
    assert sorted(selected.tolist()) == list(range(len(overlap)))
    for step in range(1, len(selected)):
        distance = 1 - overlap[selected[:step]].max(0)
        distance[selected[:step]] = -1
        assert distance[selected[step]] >= distance.max() - 2 * TIE
        assert gains[step] == pytest.approx(max(distance[selected[step]], 0), abs=2 * TIE)
    assert (np.diff(gains[1:]) <= 0).all()


@settings(max_examples=60, deadline=None)
@given(random_concepts())
def test_uniform_weights(concepts: Concepts) -> None:
    assert TorinoXAblations(RAW, evidence="uniform").patch_weights(concepts).tolist() == [1.0] * len(concepts)


def test_uniform_weights_change_the_selection() -> None:
    patches = torch.eye(3)[[0, 0, 0, 1, 2]] * torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0])[:, None]
    tokens = VisualTokens(patches, (1, 5))
    parameters: dict[str, Any] = {"budget": 1, "concepts": 1, "locality": None}
    assert TorinoXAblations(RAW, **parameters).plan(tokens).anchor.tolist() == [4]
    assert TorinoXAblations(RAW, evidence="uniform", **parameters).plan(tokens).anchor.tolist() == [0]


def test_selection_by_position_ignores_concepts_and_activations() -> None:
    increasing = torch.linspace(1, 9, 16)[:, None]
    reducer = TorinoXAblations(RAW, budget=4, selection="position", concepts=1)
    plans = [
        reducer.plan(VisualTokens(torch.eye(9)[latents] * strength, (4, 4)))
        for latents in ([0] * 16, [0] * 8 + [1] * 8, list(range(8)) * 2)
        for strength in (1.0, increasing, increasing.flip(0))
    ]
    assert all(torch.equal(plan.anchor, plans[0].anchor) for plan in plans)
    quarters = {(int(patch) // 4 // 2, int(patch) % 4 // 2) for patch in plans[0].anchor}
    assert len(quarters) == 4
    upper, lower = plans[3].assigned[:8], plans[3].assigned[8:]
    assert not set(upper.tolist()) & set(lower.tolist())  # patches are still assigned by concepts


def test_selection_by_position_spreads_patches() -> None:
    row = [0, 0, 1, 1, 0, 0, 2, 2]
    tokens = image(*row, *row, grid=(2, 8))
    plan = TorinoXAblations(RAW, budget=2, selection="position", concepts=1).plan(tokens)
    assert abs(int(plan.anchor[0]) % 8 - int(plan.anchor[1]) % 8) >= 3


def test_rank_is_passed_to_the_encoder() -> None:
    sae = SAE(torch.eye(2), kind="jumprelu", threshold=0.5)
    tokens = VisualTokens(torch.tensor([[1.0, 0.0], [0.1, 0.2], [0.0, 2.0]]), (1, 3))
    parameters: dict[str, Any] = {"budget": 2, "concepts": 2, "locality": None}
    silent = TorinoXAblations(sae, **parameters).plan(tokens)
    assert silent.assigned.tolist() == [0, -1, 1]
    ranked = TorinoXAblations(sae, rank="pre-threshold", **parameters).plan(tokens)
    assert ranked.assigned.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "parameters",
    [
        {"selection": "farthest_point", "min_gain": 0.3},
        {"selection": "position", "budget": 5},
        {"evidence": "uniform", "budget": 5},
        {"rank": "pre-threshold"},
    ],
)
@pytest.mark.parametrize("encoder", ["raw", "sae"])
def test_contract(parameters: dict[str, Any], encoder: str) -> None:
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(3))
    sae: Any = RAW if encoder == "raw" else SAE(weight, kind="jumprelu", threshold=0.5)
    check_reducer(TorinoXAblations(sae, **parameters))


@pytest.mark.parametrize("selection", ["farthest_point", "position"])
@pytest.mark.parametrize("noise", [0.3, 1e-3, 1e-5])  # gains of near-duplicates differ by less than the tolerance
def test_calibrate_cover(selection: Any, noise: float) -> None:
    images = clustered_images(noise)
    reducer = TorinoXAblations(RAW, concepts=8, selection=selection)
    for target in (1, 4, 9.5, 20, 36):
        calibration = calibrate_cover(images, target, reducer=reducer)
        calibrated = TorinoXAblations(RAW, concepts=8, selection=selection, min_gain=calibration.min_gain)
        assert calibrated.plan_batch(images).lengths.tolist() == calibration.counts.tolist()
        # a selection by position gives all images the same number of tokens
        assert abs(calibration.mean - target) < 0.4 or noise < 0.3 or selection == "position"


def test_ablations_are_not_compared_by_default() -> None:
    assert "torino-x-ablations" not in default_methods()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"selection": "near"}, "selection must be one of"),
        ({"selection": "position", "locality": None}, "selection='position' needs a locality"),
        ({"evidence": "none"}, "evidence must be one of 'peak', 'uniform'"),
        ({"rank": "size"}, "rank must be one of"),
        ({"concepts": 0}, "concepts must be"),
    ],
)
def test_invalid_hyperparameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        TorinoXAblations(RAW, **parameters)
