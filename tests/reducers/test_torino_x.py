"""TORINO-X: small examples, a reference implementation with plain loops, and properties of the method."""

from __future__ import annotations

from itertools import pairwise
from math import exp, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import tiny
from tests.support.random_concepts import clustered_images, random_concepts
from torino import SAE, RawEmbedding, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, UnmetBudget
from torino.evaluation.protocol import fixed_settings
from torino.reducers import KeepShare
from torino.reducers.calibration import calibrate_cover
from torino.reducers.torino_x import TIE, TorinoX, apply_locality, code_overlap, greedy_coverage
from torino.testing import check_reducer
from torino.vlm import reduced

RAW = RawEmbedding()


def image(*latents: int, grid: tuple[int, int] | None = None) -> VisualTokens:
    """Return patches with one concept each."""
    patches = torch.eye(9)[list(latents)]
    return VisualTokens(patches, grid or (1, len(latents)))


def without_locality(sae: Any = RAW, **parameters: Any) -> TorinoX:
    """Return a reducer whose overlap depends only on concepts, not on distance."""
    return TorinoX(sae, locality=None, **parameters)


def reference_overlap(concepts: Concepts) -> list[list[float]]:
    codes: list[dict[int, float]] = []
    for index, value in zip(concepts.indices.tolist(), concepts.values.tolist(), strict=True):
        code = {i: v for i, v in zip(index, value, strict=True) if i >= 0}
        norm = sqrt(sum(v * v for v in code.values()))
        codes.append({i: v / norm for i, v in code.items()})
    n = len(codes)
    overlap = [[sum(v * codes[j].get(i, 0.0) for i, v in codes[a].items()) for j in range(n)] for a in range(n)]
    for a in range(n):
        for b in range(n):
            if a == b or (not codes[a] and not codes[b]):
                overlap[a][b] = 1.0
    return overlap


def reference_coverage(
    overlap: list[list[float]], weight: list[float], max_patches: int, min_gain: float
) -> tuple[list[int], list[float]]:
    """Compute f from scratch for every candidate in every step."""
    n = len(overlap)

    def f(subset: list[int]) -> float:
        return sum(weight[j] * max((overlap[i][j] for i in subset), default=0.0) for j in range(n))

    selected: list[int] = []
    gains: list[float] = []
    while len(selected) < max_patches:
        gain = {i: f([*selected, i]) - f(selected) for i in range(n) if i not in selected}
        highest = max(gain.values())
        step_gain = highest if highest > TIE else 0.0
        if selected and step_gain < min_gain - TIE:
            break
        selected.append(min(i for i, value in gain.items() if value >= highest - TIE))
        gains.append(step_gain)
    return selected, gains


@settings(max_examples=150, deadline=None)
@given(random_concepts(), st.sampled_from([0.0, 0.05, 0.4, 1.0, 3.0]), st.integers(1, 14))
def test_selection_equals_reference(concepts: Concepts, min_gain: float, max_patches: int) -> None:
    overlap = code_overlap(concepts)
    expected_overlap = reference_overlap(concepts)
    assert np.allclose(overlap, expected_overlap, atol=1e-6)
    max_patches = min(max_patches, len(concepts))
    weight = TorinoX(RAW).patch_weights(concepts)
    peaks = concepts.peak.tolist()
    if not any(peaks):
        peaks = [1.0] * len(peaks)
    expected_weight = [peak * len(peaks) / sum(peaks) for peak in peaks]
    assert np.allclose(weight, expected_weight, atol=1e-5)
    selected, gains = greedy_coverage(overlap, weight, max_patches, min_gain)
    expected, expected_gains = reference_coverage(expected_overlap, expected_weight, max_patches, min_gain)
    assert selected.tolist() == expected
    assert np.allclose(gains, expected_gains, atol=1e-4)
    assert (np.diff(gains) <= 0).all()
    assert len(set(selected.tolist())) == len(selected)
    uniform = np.ones(len(concepts), np.float32)
    selected, gains = greedy_coverage(overlap, uniform, max_patches, min_gain)
    expected, expected_gains = reference_coverage(expected_overlap, uniform.tolist(), max_patches, min_gain)
    assert selected.tolist() == expected
    assert np.allclose(gains, expected_gains, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.sampled_from([0.05, 0.2, 1.0, 40.0]), st.integers(0, 99))
def test_overlap_decays_with_distance(grid: tuple[int, int], locality: float, seed: int) -> None:
    rows, columns = grid
    n = rows * columns
    overlap = np.random.default_rng(seed).random((n, n), dtype=np.float32)
    local = apply_locality(overlap, grid, locality)
    for i in range(n):
        for j in range(n):
            squared_distance = (i // columns - j // columns) ** 2 + (i % columns - j % columns) ** 2
            expected = overlap[i, j] * exp(-squared_distance / (2 * (locality * sqrt(n)) ** 2))
            assert local[i, j] == pytest.approx(expected, rel=1e-5, abs=1e-30)


def test_distant_patches_of_the_same_concept_get_separate_tokens() -> None:
    tokens = image(0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0)
    assert without_locality(concepts=1).plan(tokens).assigned.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    local = TorinoX(RAW, budget=3, locality=0.5, concepts=1).plan(tokens)
    assert local.anchor.tolist() == [1, 5, 9]
    assert local.assigned.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    # a locality much larger than the image has no effect
    large = TorinoX(RAW, budget=2, locality=1e4, concepts=1).plan(tokens)
    assert torch.equal(large.assigned, without_locality(budget=2, concepts=1).plan(tokens).assigned)


def test_distances_follow_the_grid() -> None:
    # four areas of 2 × 2 patches in a row; the first and the third have the same concept
    row = [0, 0, 1, 1, 0, 0, 2, 2]
    plan = TorinoX(RAW, budget=4, concepts=1).plan(image(*row, *row, grid=(2, 8)))
    assert [sorted(np.flatnonzero(plan.assigned == token) % 8) for token in range(4)] == [
        [a, a, b, b] for a, b in ((0, 1), (2, 3), (4, 5), (6, 7))
    ]
    tall = TorinoX(RAW, budget=4, concepts=1).plan(image(*[latent for latent in row for _ in range(2)], grid=(8, 2)))
    assert [sorted(np.flatnonzero(tall.assigned == token) // 2) for token in range(4)] == [
        [a, a, b, b] for a, b in ((0, 1), (2, 3), (4, 5), (6, 7))
    ]


def test_spec_includes_locality_and_proportional_attention() -> None:
    assert TorinoX(RAW, budget=9).spec == "torino-x(budget=9, locality=0.2, proportional=True)"
    assert without_locality(budget=9).spec == "torino-x(budget=9, locality=None, proportional=True)"
    reducer = TorinoX(RAW, min_gain=np.float64(0.3), locality=np.float64(0.1))
    assert make(reducer.spec, sae=RAW) == reducer
    specs = [setting.spec for setting in fixed_settings(["torino-x", "torino-m"], [64], ["sae"], 1)]
    assert specs == ["torino-x(budget=64, locality=0.2, proportional=True)", "torino-m(k=2, delta=2, budget=64)"]


def test_proportional_attention_is_a_parameter() -> None:
    assert TorinoX(RAW).attention_mode == "proportional"
    assert TorinoX(RAW, proportional=False).attention_mode == "plain"
    assert make("torino-m", sae=RAW).attention_mode == "plain"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("locality", [1e-200, 1e-3, 1e300])
def test_extreme_locality(locality: float) -> None:
    plan = TorinoX(RAW, budget=3, locality=locality, concepts=1).plan(image(0, 0, 1, 0, 2, 1, grid=(2, 3)))
    assert torch.isfinite(plan.weights).all()
    assert len(plan) == 3
    if locality < 1:  # no two patches overlap, so each token stands for its own patch only
        assert sorted(plan.assigned.tolist()) == [-1, -1, -1, 0, 1, 2]
    else:
        assert torch.equal(plan.assigned, without_locality(budget=3, concepts=1).plan(image(0, 0, 1, 0, 2, 1)).assigned)


def test_locality_is_relative_to_the_image_side() -> None:
    coarse = apply_locality(np.ones((36, 36), np.float32), (6, 6), 0.2)
    fine = apply_locality(np.ones((144, 144), np.float32), (12, 12), 0.2)
    assert fine[0, 4 * 12 + 2] == pytest.approx(coarse[0, 2 * 6 + 1])
    assert coarse[0, 2 * 6 + 1] == pytest.approx(exp(-5 / (2 * 1.2**2)))


def test_one_token_per_concept() -> None:
    plan = without_locality(min_gain=0.5, concepts=1).plan(image(0, 0, 1, 0, 2, 1))
    assert plan.anchor.tolist() == [0, 2, 4]
    assert plan.assigned.tolist() == [0, 0, 1, 0, 2, 1]
    assert plan.score.tolist() == [3, 2, 1]
    assert plan.concept.tolist() == [0, 1, 2]
    assert plan.offsets.diff().tolist() == [3, 2, 1]
    assert without_locality(min_gain=0.5, concepts=1, mode="prune").plan(image(0, 0, 1)).is_pruning


def test_patches_are_weighted_by_peak_activation() -> None:
    patches = torch.eye(3)[[0, 0, 0, 1, 2]] * torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0])[:, None]
    tokens = VisualTokens(patches, (1, 5))
    assert without_locality(budget=1, concepts=1).plan(tokens).anchor.tolist() == [4]


def test_small_concept_is_kept_although_larger_groups_would_fill_the_budget() -> None:
    # top-1 sets see two groups of four patches; their codes overlap
    patches = torch.tensor([[1.0, 0.9, 0.0]] * 4 + [[0.9, 1.0, 0.0]] * 4 + [[0.0, 0.0, 1.0]])
    tokens = VisualTokens(patches, (1, 9))
    assert make("torino-p", sae=RAW, k=1, delta=1, budget=2).plan(tokens).anchor.tolist() == [0, 4]
    assert without_locality(budget=2, concepts=2).plan(tokens).anchor.tolist() == [0, 8]


def test_smaller_budget_is_prefix_and_length_decreases_with_min_gain() -> None:
    tokens = VisualTokens(torch.randn(36, 16, generator=torch.Generator().manual_seed(1)), (6, 6))
    sae = SAE(torch.randn(64, tokens.width, generator=torch.Generator().manual_seed(0)))
    selections = [TorinoX(sae, budget=b, order="native").plan(tokens).anchor.tolist() for b in range(1, 37)]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(selections))
    lengths = [len(TorinoX(sae, min_gain=min_gain).plan(tokens)) for min_gain in np.linspace(0, 4, 40)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 8


def test_pooled_budget_is_shared_by_gain() -> None:
    rich, plain = image(*range(8)), image(0, 0, 0, 0, 1, 1, 1, 2)
    plans = without_locality(budget=4, pooled=True, concepts=1).plan_batch([rich, plain])
    assert plans.lengths.sum() == 8
    assert len(plans[0]) > len(plans[1]) >= 1
    with pytest.raises(
        UnmetBudget, match="9 tokens per image: 2 images with a total budget of 18 have only 16 patches"
    ):
        without_locality(budget=9, pooled=True, concepts=1).plan_batch([rich, plain])


def test_pooled_budget_with_equal_gains_is_divided_equally() -> None:
    flat = image(0, 0, 0, 0, 0, 0, 0)
    assert without_locality(budget=3, pooled=True, concepts=1).plan_batch([flat] * 3).lengths.tolist() == [3, 3, 3]


def test_pooled_budget_with_images_of_different_size() -> None:
    plans = without_locality(budget=3, pooled=True, concepts=1).plan_batch([image(*range(6)), image(0, 1), image(2)])
    assert plans.lengths.tolist() == [6, 2, 1]
    alone = without_locality(budget=3, concepts=1).plan(image(0, 0, 1, 0, 2, 1))
    pooled = without_locality(budget=3, pooled=True, concepts=1).plan(image(0, 0, 1, 0, 2, 1))
    assert torch.equal(alone.anchor, pooled.anchor)


def test_keep_share_with_pooled_budget() -> None:
    inner = without_locality(budget=1, pooled=True, concepts=1)
    plans = KeepShare(inner, 0.6).plan_batch([image(*range(6)), image(0, 0, 0, 0)])  # six of ten
    assert plans.lengths.tolist() == [5, 1]


def test_patch_without_overlap_is_not_assigned() -> None:
    plan = without_locality(budget=2, concepts=1).plan(image(1, 0, 0, 2, 3, 3))
    assert plan.assigned.tolist() == [-1, 0, 0, -1, 1, 1]
    assert plan.sources.tolist() == [1, 2, 4, 5]
    assert plan.concept.tolist() == [0, 3]
    assert "It stands for 2 patches, 33 % of the image." in str(plan.explain(0)).replace("33%", "33 %")
    # one patch is silent: its weight is 0, and it does not overlap with the others
    sae = SAE(torch.eye(2), kind="jumprelu", threshold=0.5)
    tokens = VisualTokens(torch.tensor([[1.0, 0.0], [0.1, 0.0], [1.0, 0.0], [0.0, 2.0]]), (1, 4))
    assert without_locality(sae, budget=2, concepts=2).plan(tokens).assigned.tolist() == [0, -1, 0, 1]


def test_concept_of_a_token_is_shared_by_its_patches() -> None:
    # the strongest latent of the kept patch is 0, but all three patches share latent 1
    patches = torch.tensor([[1.1, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.4]])
    plan = without_locality(budget=1, concepts=3).plan(VisualTokens(patches, (1, 3)))
    assert plan.concept.tolist() == [1]


def test_merged_token_has_the_length_of_the_kept_patch() -> None:
    patches = torch.tensor([[3.0, 0.0, 0.1], [2.0, 0.0, 0.5], [0.0, 5.0, 0.0]])
    tokens = VisualTokens(patches, (1, 3))
    plan = without_locality(budget=2, concepts=3).plan(tokens)
    merged = plan.apply(patches)
    assert plan.offsets.diff().tolist() == [2, 1]
    assert torch.allclose(merged.norm(dim=1), patches[plan.anchor].norm(dim=1))
    assert torch.allclose(merged[1], patches[2])


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"budget": 5},
        {"mode": "prune", "budget": 7},
        {"min_gain": 0.3, "order": "native"},
        {"budget": 6, "pooled": True},
        {"budget": 5, "locality": None},
    ],
)
@pytest.mark.parametrize("encoder", ["raw", "sae"])
def test_contract(parameters: dict[str, Any], encoder: str) -> None:
    width = 24
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(40, width, generator=generator)
    sae: Any = RAW if encoder == "raw" else SAE(weight, kind="jumprelu", threshold=0.5)
    check_reducer(TorinoX(sae, **parameters))


def test_silent_patches_overlap_with_each_other() -> None:
    silent = Concepts.of([[], [1], []])
    assert code_overlap(silent).tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("noise", [0.3, 1e-3, 1e-5])  # gains of near-duplicates differ by less than the tolerance
def test_calibrate_cover(noise: float) -> None:
    images = clustered_images(noise)
    reducer = TorinoX(RAW, concepts=8)
    for target in (1, 4, 9.5, 20, 36):
        calibration = calibrate_cover(images, target, reducer=reducer)
        plans = TorinoX(RAW, concepts=8, min_gain=calibration.min_gain).plan_batch(images)
        assert plans.lengths.tolist() == calibration.counts.tolist()
        assert abs(calibration.mean - target) < 0.4 or noise < 0.3
    with pytest.raises(BadParameter, match="at least 1 token"):
        calibrate_cover(images, 0, reducer=reducer)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"budget": 0}, "budget"),
        ({"concepts": 0}, "concepts"),
        ({"min_gain": -1.0}, "min_gain must be a finite number"),
        ({"min_gain": "0.5"}, "min_gain must be a finite number"),
        ({"min_gain": True}, "min_gain"),
        ({"pooled": "no", "budget": 4}, "pooled must be True or False"),
        ({"min_gain": float("nan")}, "min_gain"),
        ({"pooled": True}, "pooled=True shares a budget among images, so it needs budget"),
        ({"locality": 0}, "locality must be above 0"),
        ({"locality": -0.1}, "locality must be a finite number"),
        ({"locality": "near"}, "locality"),
        ({"locality": 10**400}, "locality must be a finite number"),
        ({"mode": "sum"}, "mode must be one of 'merge', 'prune'"),
        ({"positions": "own"}, "positions"),
        ({"proportional": 1}, "proportional must be True or False"),
        ({"order": "up"}, "order"),
    ],
)
def test_invalid_hyperparameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        TorinoX(RAW, **parameters)


def test_budget_above_the_number_of_patches() -> None:
    with pytest.raises(UnmetBudget, match="cannot give 7 tokens for image 1, which has 3 patches"):
        TorinoX(RAW, budget=7, concepts=1).plan_batch([image(*range(8)), image(0, 1, 2)])


def test_tokens_keep_their_original_positions() -> None:
    model, inputs = tiny.llava(), tiny.prompt("ab#cd")
    reducer = make("torino-x(budget=3)", sae=tiny.sae())
    assert reducer.position_mode == "original"
    assert make("torino-x(positions='compact')", sae=tiny.sae()).position_mode == "compact"
    assert make("torino-m", sae=tiny.sae()).position_mode == "compact"
    position_ids: list[list[int]] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: position_ids.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    try:
        for positions in ("auto", "compact", "original"):
            with reduced(model, reducer, positions=positions) as trace:
                model.generate(**inputs, max_new_tokens=1, do_sample=False)
    finally:
        handle.remove()
    automatic, compact, original = position_ids
    assert automatic == original
    assert compact == list(range(len(compact)))
    (plan,) = trace
    assert automatic == [0, 1, *(2 + plan.anchor).tolist(), 18, 19]
