"""TORINO in steps: at its defaults it is the paper's method, and each step alone does what its name says."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torino import SAE, BadParameter, RawEmbedding, Reduction, UnmetBudget, VisualTokens, make
from torino.core.concepts import CachedEncoder
from torino.evaluation.protocol import default_methods
from torino.reducers.torino_steps import TorinoSteps
from torino.testing import check_reducer

RAW = RawEmbedding()


def image(latents: list[int], strength: list[float] | None = None, grid: tuple[int, int] | None = None) -> VisualTokens:
    """Patches that have one concept each."""
    patches = torch.eye(9)[latents] * torch.tensor(strength or [1.0] * len(latents))[:, None]
    return VisualTokens(patches, grid or (1, len(latents)))


def same(one: Reduction, two: Reduction) -> None:
    for field in fields(Reduction):
        first, second = getattr(one, field.name), getattr(two, field.name)
        if field.name == "weights":
            assert torch.allclose(first, second, rtol=1e-6)
        elif isinstance(first, torch.Tensor):
            assert torch.equal(first, second), field.name
        elif field.name != "by":
            assert first == second, field.name


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 3),
    data=st.data(),
    budget=st.one_of(st.none(), st.integers(1, 24)),
    order=st.sampled_from(["raster", "native"]),
    ties=st.booleans(),
)
def test_as_it_stands_it_is_torino(seed: int, k: int, data: Any, budget: int | None, order: str, ties: bool) -> None:
    delta = data.draw(st.integers(1, k))
    source = torch.Generator().manual_seed(seed)
    patches = torch.randn(24, 7, generator=source)
    tokens = VisualTokens(patches.round() if ties else patches, (4, 6))
    shared: dict[str, Any] = {"sae": RAW, "k": k, "delta": delta, "budget": budget, "order": order}
    same(make("torino-steps", **shared).plan(tokens), make("torino-m", **shared).plan(tokens))
    same(make("torino-steps", stand="peak", **shared).plan(tokens), make("torino-p", **shared).plan(tokens))
    mean = make("torino-steps", scale="mean", **shared).plan(tokens)
    same(mean, make("torino-m", scale="mean", **shared).plan(tokens))


def test_a_giant_group_is_split_by_place_or_by_a_further_concept() -> None:
    apart = image([0, 0, 1, 0, 0], grid=(1, 5))
    whole = TorinoSteps(RAW, 1, 1, giant=3).plan(apart)
    places = TorinoSteps(RAW, 1, 1, giant=3, split="place").plan(apart)
    assert whole.assigned.tolist() == [0, 0, 1, 0, 0]
    assert places.assigned.tolist() == [0, 0, 1, 2, 2]
    patches = torch.tensor([[3.0, 2.0, 0.0], [3.0, 2.0, 0.0], [3.0, 0.0, 2.0], [3.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    second = TorinoSteps(RAW, 1, 1, giant=3, split="concept").plan(VisualTokens(patches, (1, 5)))
    assert second.assigned.tolist() == [0, 0, 1, 1, 2]
    assert len(TorinoSteps(RAW, 1, 1, giant=4, split="concept").plan(VisualTokens(patches, (1, 5)))) == 2


def test_which_groups_survive() -> None:
    loud = image([0, 0, 0, 1, 1, 2], [1, 1, 1, 1, 1, 9])
    kept = {how: TorinoSteps(RAW, 1, 1, 1, survive=how).plan(loud).anchor.tolist() for how in ("size", "peak", "cover")}
    assert kept == {"size": [0], "peak": [5], "cover": [5]}
    # two halves of one thing: the second adds nothing
    patches = torch.tensor([[1.0, 0.9, 0.0]] * 4 + [[0.9, 1.0, 0.0]] * 4 + [[0.0, 0.0, 1.0]])
    tokens = VisualTokens(patches, (1, 9))
    assert TorinoSteps(RAW, 1, 1, 2).plan(tokens).anchor.tolist() == [0, 4]
    assert TorinoSteps(RAW, 1, 1, 2, survive="cover").plan(tokens).anchor.tolist() == [0, 8]


def test_what_stands_for_a_group() -> None:
    patches = torch.tensor([[4.0, 3.0], [2.0, 0.5], [2.0, 0.4]])
    tokens = VisualTokens(patches, (1, 3))
    peak, medoid = (TorinoSteps(RAW, 1, 1, stand=how).plan(tokens) for how in ("peak", "medoid"))
    assert (peak.anchor.tolist(), medoid.anchor.tolist()) == ([0], [1])
    by_peak = TorinoSteps(RAW, 1, 1, stand="evidence", scale="mean").plan(tokens)
    assert torch.allclose(by_peak.weights, torch.tensor([0.5, 0.25, 0.25]))
    by_decoder = TorinoSteps(RAW, 1, 1, stand="decoder", scale="mean").plan(tokens)  # of coordinates, the same
    assert torch.equal(by_decoder.weights, by_peak.weights)
    length = TorinoSteps(RAW, 1, 1, scale="length").plan(tokens).apply(patches)
    assert torch.allclose(length.norm(), patches.norm(dim=1).mean())


def test_patches_by_the_direction_of_their_concept() -> None:
    # the decoder of the one latent points elsewhere than its encoder
    sae = SAE(torch.tensor([[1.0, 0.0]]), W_dec=torch.tensor([[0.6, 0.8]]), b_dec=torch.tensor([0.0, 1.0]))
    tokens = VisualTokens(torch.tensor([[5.0, 1.0], [5.0, 6.0], [5.0, -9.0]]), (1, 3))
    weights = TorinoSteps(sae, 1, 1, stand="decoder", scale="mean").plan(tokens).weights
    assert torch.allclose(weights, torch.tensor([3.0, 7.0, 0.0]) / 10)
    blind = SAE(sae.W_enc)
    assert TorinoSteps(blind, 1, 1).sae is blind
    with pytest.raises(BadParameter, match="decoder=True"):
        TorinoSteps(blind, 1, 1, stand="decoder")


def test_the_decoder_is_found_behind_a_memory_and_after_normalisation() -> None:
    source = torch.Generator().manual_seed(0)
    sae = SAE(torch.randn(12, 6, generator=source), W_dec=torch.randn(12, 6, generator=source), normalize="layer_norm")
    tokens = VisualTokens(torch.randn(9, 6, generator=source), (3, 3))
    plain = TorinoSteps(sae, 1, 1, stand="decoder").plan(tokens)
    behind = TorinoSteps(CachedEncoder(sae), 1, 1, stand="decoder").plan(tokens)
    assert torch.equal(plain.weights, behind.weights)
    louder = tokens.with_(patches=3 * tokens.patches + 1)  # the same to an SAE that normalises layers
    assert torch.allclose(TorinoSteps(sae, 1, 1, stand="decoder").plan(louder).weights, plain.weights, atol=1e-4)
    with pytest.raises(BadParameter, match="decoder=True"):
        TorinoSteps(CachedEncoder(SAE(sae.W_enc)), 1, 1, stand="decoder")


def test_padding_with_what_is_missing() -> None:
    patches = torch.tensor([[9.0, 0.0, 0.0], [8.0, 0.0, 0.0], [7.0, 0.1, 0.0], [2.0, 0.0, 1.9]])
    tokens = VisualTokens(patches, (1, 4))
    loud = TorinoSteps(RAW, 1, 1, 2, stand="peak").plan(tokens)
    missing = TorinoSteps(RAW, 1, 1, 2, stand="peak", padding="missing").plan(tokens)
    assert loud.anchor.tolist() == [0, 1]
    assert missing.anchor.tolist() == [0, 3]
    assert missing.role == ("primary", "padding")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"split": "place", "giant": 2, "budget": 4},
        {"split": "concept", "giant": 2, "stand": "evidence"},
        {"survive": "cover", "padding": "missing", "budget": 5, "scale": "length"},
        {"stand": "medoid", "budget": 6},
        {"stand": "decoder", "scale": "length", "budget": 6},
    ],
)
def test_contract(given: dict[str, Any]) -> None:
    check_reducer(TorinoSteps(RAW, **given))


def test_it_is_no_rival() -> None:
    assert "torino-steps" not in default_methods()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": 1, "delta": 2}, "delta must be between 1 and k=1"),
        ({"giant": 0}, "giant"),
        ({"split": "half"}, "split"),
        ({"survive": "all"}, "survive"),
        ({"stand": "mean"}, "stand"),
        ({"scale": "sum"}, "scale"),
        ({"padding": "none"}, "padding"),
    ],
)
def test_bad_hyperparameters(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        TorinoSteps(RAW, **given)


def test_a_budget_beyond_the_patches() -> None:
    with pytest.raises(UnmetBudget, match="Lower the budget"):
        TorinoSteps(RAW, 1, 1, 7, stand="peak").plan(image([0, 1, 2]))
