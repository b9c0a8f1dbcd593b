"""TORINO with exchangeable steps: the defaults equal the paper's method, and each step has its documented effect."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torino_steps import TorinoSteps

from torino import SAE, RawEmbedding, Reduction, VisualTokens, make
from torino.core.concepts import CachedEncoder
from torino.core.errors import BadParameter, UnmetBudget
from torino.evaluation.protocol import default_methods
from torino.testing import check_reducer

RAW = RawEmbedding()


def image(latents: list[int], strength: list[float] | None = None, grid: tuple[int, int] | None = None) -> VisualTokens:
    """Return patches with one concept each."""
    patches = torch.eye(9)[latents] * torch.tensor(strength or [1.0] * len(latents))[:, None]
    return VisualTokens(patches, grid or (1, len(latents)))


def assert_same(plan: Reduction, expected: Reduction) -> None:
    for field in fields(Reduction):
        value, other = getattr(plan, field.name), getattr(expected, field.name)
        if field.name == "weights":
            assert torch.allclose(value, other, rtol=1e-6)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other), field.name
        elif field.name != "by":
            assert value == other, field.name


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 3),
    data=st.data(),
    budget=st.one_of(st.none(), st.integers(1, 24)),
    order=st.sampled_from(["raster", "native"]),
    ties=st.booleans(),
)
def test_defaults_equal_torino(seed: int, k: int, data: Any, budget: int | None, order: str, ties: bool) -> None:
    delta = data.draw(st.integers(1, k))
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(24, 7, generator=generator)
    tokens = VisualTokens(patches.round() if ties else patches, (4, 6))
    shared: dict[str, Any] = {"sae": RAW, "k": k, "delta": delta, "budget": budget, "order": order}
    assert_same(make("torino-steps", **shared).plan(tokens), make("torino-m", **shared).plan(tokens))
    assert_same(
        make("torino-steps", representative="peak", **shared).plan(tokens), make("torino-p", **shared).plan(tokens)
    )
    mean = make("torino-steps", scale="mean", **shared).plan(tokens)
    assert_same(mean, make("torino-m", scale="mean", **shared).plan(tokens))


def test_large_groups_are_split_by_connected_area_or_by_concept() -> None:
    tokens = image([0, 0, 1, 0, 0], grid=(1, 5))
    unsplit = TorinoSteps(RAW, 1, 1, max_group_size=3).plan(tokens)
    connected = TorinoSteps(RAW, 1, 1, max_group_size=3, split="connected").plan(tokens)
    assert unsplit.assigned.tolist() == [0, 0, 1, 0, 0]
    assert connected.assigned.tolist() == [0, 0, 1, 2, 2]
    patches = torch.tensor([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0], [3.0, 0.0, 2.0], [3.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    by_concept = TorinoSteps(RAW, 1, 1, max_group_size=3, split="concept").plan(VisualTokens(patches, (1, 5)))
    assert by_concept.assigned.tolist() == [0, 0, 1, 1, 2]
    assert len(TorinoSteps(RAW, 1, 1, max_group_size=4, split="concept").plan(VisualTokens(patches, (1, 5)))) == 2


def test_truncation() -> None:
    tokens = image([0, 0, 0, 1, 1, 2], [1, 1, 1, 1, 1, 9])
    rules = ("size", "peak", "greedy_coverage")
    kept = {rule: TorinoSteps(RAW, 1, 1, 1, truncation=rule).plan(tokens).anchor.tolist() for rule in rules}
    assert kept == {"size": [0], "peak": [5], "greedy_coverage": [5]}
    # the codes of the first two groups overlap, so the second adds almost no coverage
    patches = torch.tensor([[1.0, 0.9, 0.0]] * 4 + [[0.9, 1.0, 0.0]] * 4 + [[0.0, 0.0, 1.0]])
    tokens = VisualTokens(patches, (1, 9))
    assert TorinoSteps(RAW, 1, 1, 2).plan(tokens).anchor.tolist() == [0, 4]
    assert TorinoSteps(RAW, 1, 1, 2, truncation="greedy_coverage").plan(tokens).anchor.tolist() == [0, 8]


def test_representatives() -> None:
    patches = torch.tensor([[4.0, 3.0], [2.0, 0.5], [2.0, 0.4]])
    tokens = VisualTokens(patches, (1, 3))
    peak, medoid = (TorinoSteps(RAW, 1, 1, representative=rule).plan(tokens) for rule in ("peak", "medoid"))
    assert (peak.anchor.tolist(), medoid.anchor.tolist()) == ([0], [1])
    by_peak = TorinoSteps(RAW, 1, 1, representative="evidence", scale="mean").plan(tokens)
    assert torch.allclose(by_peak.weights, torch.tensor([0.5, 0.25, 0.25]))
    by_decoder = TorinoSteps(RAW, 1, 1, representative="decoder", scale="mean").plan(tokens)  # the same for coordinates
    assert torch.equal(by_decoder.weights, by_peak.weights)
    length = TorinoSteps(RAW, 1, 1, scale="length").plan(tokens).apply(patches)
    assert torch.allclose(length.norm(), patches.norm(dim=1).mean())


def test_weights_by_decoder_direction() -> None:
    # encoder and decoder of the latent have different directions
    sae = SAE(torch.tensor([[1.0, 0.0]]), W_dec=torch.tensor([[0.6, 0.8]]), b_dec=torch.tensor([0.0, 1.0]))
    tokens = VisualTokens(torch.tensor([[5.0, 1.0], [5.0, 6.0], [5.0, -9.0]]), (1, 3))
    weights = TorinoSteps(sae, 1, 1, representative="decoder", scale="mean").plan(tokens).weights
    assert torch.allclose(weights, torch.tensor([3.0, 7.0, 0.0]) / 10)
    without_decoder = SAE(sae.W_enc)
    assert TorinoSteps(without_decoder, 1, 1).sae is without_decoder
    with pytest.raises(BadParameter, match="decoder=True"):
        TorinoSteps(without_decoder, 1, 1, representative="decoder")


def test_decoder_direction_with_cached_encoder_and_normalization() -> None:
    generator = torch.Generator().manual_seed(0)
    sae = SAE(
        torch.randn(12, 6, generator=generator), W_dec=torch.randn(12, 6, generator=generator), normalize="layer_norm"
    )
    tokens = VisualTokens(torch.randn(9, 6, generator=generator), (3, 3))
    plain = TorinoSteps(sae, 1, 1, representative="decoder").plan(tokens)
    cached = TorinoSteps(CachedEncoder(sae), 1, 1, representative="decoder").plan(tokens)
    assert torch.equal(plain.weights, cached.weights)
    rescaled = tokens.with_(patches=3 * tokens.patches + 1)  # layer norm removes scale and shift
    assert torch.allclose(
        TorinoSteps(sae, 1, 1, representative="decoder").plan(rescaled).weights, plain.weights, atol=1e-4
    )
    with pytest.raises(BadParameter, match="decoder=True"):
        TorinoSteps(CachedEncoder(SAE(sae.W_enc)), 1, 1, representative="decoder")


def test_padding_by_greedy_coverage() -> None:
    patches = torch.tensor([[9.0, 0.0, 0.0], [8.0, 0.0, 0.0], [7.0, 0.1, 0.0], [2.0, 0.0, 1.9]])
    tokens = VisualTokens(patches, (1, 4))
    by_peak = TorinoSteps(RAW, 1, 1, 2, representative="peak").plan(tokens)
    by_coverage = TorinoSteps(RAW, 1, 1, 2, representative="peak", padding="greedy_coverage").plan(tokens)
    assert by_peak.anchor.tolist() == [0, 1]
    assert by_coverage.anchor.tolist() == [0, 3]
    assert by_coverage.role == ("primary", "padding")


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"split": "connected", "max_group_size": 2, "budget": 4},
        {"split": "concept", "max_group_size": 2, "representative": "evidence"},
        {"truncation": "greedy_coverage", "padding": "greedy_coverage", "budget": 5, "scale": "length"},
        {"representative": "medoid", "budget": 6},
        {"representative": "decoder", "scale": "length", "budget": 6},
    ],
)
def test_contract(parameters: dict[str, Any]) -> None:
    check_reducer(TorinoSteps(RAW, **parameters))


def test_ablations_are_not_compared_by_default() -> None:
    assert "torino-steps" not in default_methods()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"k": 1, "delta": 2}, "delta must be between 1 and k=1"),
        ({"max_group_size": 0}, "max_group_size"),
        ({"split": "half"}, "split"),
        ({"truncation": "all"}, "truncation"),
        ({"representative": "mean"}, "representative"),
        ({"scale": "sum"}, "scale"),
        ({"padding": "none"}, "padding"),
    ],
)
def test_invalid_hyperparameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        TorinoSteps(RAW, **parameters)


def test_budget_above_the_number_of_patches() -> None:
    with pytest.raises(UnmetBudget, match="Lower the budget"):
        TorinoSteps(RAW, 1, 1, 7, representative="peak").plan(image([0, 1, 2]))
