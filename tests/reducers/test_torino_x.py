"""TORINO-X: cases by hand, its rule transcribed as it is written, and what follows from it."""

from __future__ import annotations

from itertools import pairwise
from math import exp, sqrt
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torino import (
    SAE,
    BadParameter,
    Concepts,
    RawEmbedding,
    UnmetBudget,
    VisualTokens,
    calibrate_cover,
    make,
)
from torino.evaluation.protocol import fixed_settings
from torino.reducers.torino_x import TIE, TorinoX, cover, fade, far, overlaps_of
from torino.testing import check_reducer
from torino.vlm import reduced
from torino.vlm.session import KeepShare

RAW = RawEmbedding()


def image(*latents: int, grid: tuple[int, int] | None = None) -> VisualTokens:
    """Patches that have one concept each."""
    patches = torch.eye(9)[list(latents)]
    return VisualTokens(patches, grid or (1, len(latents)))


def wide(sae: Any = RAW, **given: Any) -> TorinoX:
    """One for which a concept reaches over the whole picture, so that cases are about concepts alone."""
    return TorinoX(sae, reach=None, **given)


def slow_overlaps(concepts: Concepts) -> list[list[float]]:
    codes: list[dict[int, float]] = []
    for index, value in zip(concepts.indices.tolist(), concepts.values.tolist(), strict=True):
        code = {i: v for i, v in zip(index, value, strict=True) if i >= 0}
        norm = sqrt(sum(v * v for v in code.values()))
        codes.append({i: v / norm for i, v in code.items()})
    n = len(codes)
    table = [[sum(v * codes[j].get(i, 0.0) for i, v in codes[a].items()) for j in range(n)] for a in range(n)]
    for a in range(n):
        for b in range(n):
            if a == b or (not codes[a] and not codes[b]):
                table[a][b] = 1.0
    return table


def slow_cover(table: list[list[float]], weight: list[float], most: int, least: float) -> tuple[list[int], list[float]]:
    """All of f anew for every candidate."""
    n = len(table)

    def f(some: list[int]) -> float:
        return sum(weight[j] * max((table[i][j] for i in some), default=0.0) for j in range(n))

    picked: list[int] = []
    gains: list[float] = []
    while len(picked) < most:
        gain = {i: f([*picked, i]) - f(picked) for i in range(n) if i not in picked}
        top = max(gain.values())
        worth = top if top > TIE else 0.0
        if picked and worth < least - TIE:
            break
        picked.append(min(i for i, value in gain.items() if value >= top - TIE))
        gains.append(worth)
    return picked, gains


@st.composite
def some_concepts(draw: Any) -> Concepts:
    """Few latents and few strengths, so that many patches tie; silent ones among them."""
    n, k, latents = draw(st.integers(1, 14)), draw(st.integers(1, 4)), draw(st.integers(4, 9))
    seed = draw(st.integers(0, 10_000))
    source = np.random.default_rng(seed)
    index = np.stack([source.permutation(latents)[:k] for _ in range(n)])
    levels = source.integers(1, draw(st.sampled_from([2, 4, 1000])) + 1, (n, k)).astype(np.float32)
    value = -np.sort(-levels, 1)
    silent = np.arange(k) >= source.integers(0, k + 1, n)[:, None]
    return Concepts(
        torch.from_numpy(np.where(silent, -1, index)),
        torch.from_numpy(np.where(silent, 0, value).astype(np.float32)),
        torch.from_numpy(np.where(silent[:, 0], 0, value[:, 0]).astype(np.float32)),
    )


@settings(max_examples=150, deadline=None)
@given(
    some_concepts(), st.sampled_from([0.0, 0.05, 0.4, 1.0, 3.0]), st.integers(1, 14), st.sampled_from(["peak", "even"])
)
def test_the_walk_is_the_rule(concepts: Concepts, least: float, most: int, evidence: Any) -> None:
    table = overlaps_of(concepts)
    wanted = slow_overlaps(concepts)
    assert np.allclose(table, wanted, atol=1e-6)
    most = min(most, len(concepts))
    weight = TorinoX(RAW, evidence=evidence)._weight(concepts)
    peaks = concepts.peak.tolist()
    if evidence == "even" or not any(peaks):
        peaks = [1.0] * len(peaks)
    slow_weight = [one * len(peaks) / sum(peaks) for one in peaks]
    assert np.allclose(weight, slow_weight, atol=1e-5)
    picked, gains = cover(table, weight, most, least)
    slow_picked, slow_gains = slow_cover(wanted, slow_weight, most, least)
    assert picked.tolist() == slow_picked
    assert np.allclose(gains, slow_gains, atol=1e-4)
    assert (np.diff(gains) <= 0).all()
    assert len(set(picked.tolist())) == len(picked)


@settings(max_examples=60, deadline=None)
@given(some_concepts())
def test_the_ablation_takes_what_is_farthest(concepts: Concepts) -> None:
    table = overlaps_of(concepts)
    picked, gains = far(table, np.ones(len(table), np.float32), len(table), 0.0)
    assert sorted(picked.tolist()) == list(range(len(table)))
    for step in range(1, len(picked)):
        lack = 1 - table[picked[:step]].max(0)
        lack[picked[:step]] = -1
        assert lack[picked[step]] >= lack.max() - 2 * TIE
        assert gains[step] == pytest.approx(max(lack[picked[step]], 0), abs=2 * TIE)
    assert (np.diff(gains[1:]) <= 0).all()


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.sampled_from([0.05, 0.2, 1.0, 40.0]), st.integers(0, 99))
def test_overlap_fades_with_distance(grid: tuple[int, int], reach: float, seed: int) -> None:
    rows, columns = grid
    n = rows * columns
    table = np.random.default_rng(seed).random((n, n), dtype=np.float32)
    faded = fade(table, grid, reach)
    for i in range(n):
        for j in range(n):
            apart = (i // columns - j // columns) ** 2 + (i % columns - j % columns) ** 2
            wanted = table[i, j] * exp(-apart / (2 * (reach * sqrt(n)) ** 2))
            assert faded[i, j] == pytest.approx(wanted, rel=1e-5, abs=1e-30)


def test_the_same_concept_far_away_is_another_thing() -> None:
    two = image(0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0)
    assert wide(concepts=1).plan(two).assigned.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    near = TorinoX(RAW, budget=3, reach=0.5, concepts=1).plan(two)
    assert near.anchor.tolist() == [1, 5, 9]
    assert near.assigned.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    # where concepts reach far beyond the picture, place says nothing
    far_reaching = TorinoX(RAW, budget=2, reach=1e4, concepts=1).plan(two)
    assert torch.equal(far_reaching.assigned, wide(budget=2, concepts=1).plan(two).assigned)


def test_rows_and_columns_are_those_of_the_grid() -> None:
    # four things of 2 × 2 patches in a row, the first and the third of one concept, below and beside each other in no
    # other grid of 16
    row = [0, 0, 1, 1, 0, 0, 2, 2]
    plan = TorinoX(RAW, budget=4, concepts=1).plan(image(*row, *row, grid=(2, 8)))
    assert [sorted(np.flatnonzero(plan.assigned == one) % 8) for one in range(4)] == [
        [a, a, b, b] for a, b in ((0, 1), (2, 3), (4, 5), (6, 7))
    ]
    tall = TorinoX(RAW, budget=4, concepts=1).plan(image(*[one for one in row for _ in range(2)], grid=(8, 2)))
    assert [sorted(np.flatnonzero(tall.assigned == one) // 2) for one in range(4)] == [
        [a, a, b, b] for a, b in ((0, 1), (2, 3), (4, 5), (6, 7))
    ]
    spread = TorinoX(RAW, budget=2, pick="place", concepts=1).plan(image(*row, *row, grid=(2, 8)))
    assert abs(int(spread.anchor[0]) % 8 - int(spread.anchor[1]) % 8) >= 3


def test_a_spec_tells_the_reach() -> None:
    assert TorinoX(RAW, budget=9).spec == "torino-x(budget=9, reach=0.2, mass=True)"
    assert wide(budget=9).spec == "torino-x(budget=9, reach=None, mass=True)"
    reducer = TorinoX(RAW, least=np.float64(0.3), reach=np.float64(0.1))
    assert make(reducer.spec, sae=RAW) == reducer
    said = [one.spec for one in fixed_settings(["torino-x", "torino-m"], [64], ["sae"], 1)]
    assert said == ["torino-x(budget=64, reach=0.2, mass=True)", "torino-m(k=2, delta=2, budget=64)"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reach", [1e-200, 1e-3, 1e300])
def test_a_reach_next_to_nothing_or_without_end(reach: float) -> None:
    plan = TorinoX(RAW, budget=3, reach=reach, concepts=1).plan(image(0, 0, 1, 0, 2, 1, grid=(2, 3)))
    assert torch.isfinite(plan.weights).all()
    assert len(plan) == 3
    if reach < 1:  # no patch is like another, and each token stands for itself
        assert sorted(plan.assigned.tolist()) == [-1, -1, -1, 0, 1, 2]
    else:
        assert torch.equal(plan.assigned, wide(budget=3, concepts=1).plan(image(0, 0, 1, 0, 2, 1)).assigned)


def test_by_place_alone_patches_are_spread_whatever_they_show() -> None:
    loud = torch.linspace(1, 9, 16)[:, None]
    plans = [
        TorinoX(RAW, budget=4, pick="place", concepts=1).plan(VisualTokens(torch.eye(9)[what] * strength, (4, 4)))
        for what in ([0] * 16, [0] * 8 + [1] * 8, list(range(8)) * 2)
        for strength in (1.0, loud, loud.flip(0))
    ]
    assert all(torch.equal(plan.anchor, plans[0].anchor) for plan in plans)
    corners = {(int(one) // 4 // 2, int(one) % 4 // 2) for one in plans[0].anchor}
    assert len(corners) == 4  # one in each quarter
    above, below = plans[3].assigned[:8], plans[3].assigned[8:]
    assert not set(above.tolist()) & set(below.tolist())  # what a token stands for is still told by concepts


def test_reach_is_a_share_of_the_side_whatever_the_resolution() -> None:
    coarse = fade(np.ones((36, 36), np.float32), (6, 6), 0.2)
    fine = fade(np.ones((144, 144), np.float32), (12, 12), 0.2)
    assert fine[0, 4 * 12 + 2] == pytest.approx(coarse[0, 2 * 6 + 1])
    assert coarse[0, 2 * 6 + 1] == pytest.approx(exp(-5 / (2 * 1.2**2)))


def test_one_token_for_each_thing_then_nothing_more_to_cover() -> None:
    plan = wide(least=0.5, concepts=1).plan(image(0, 0, 1, 0, 2, 1))
    assert plan.anchor.tolist() == [0, 2, 4]
    assert plan.assigned.tolist() == [0, 0, 1, 0, 2, 1]
    assert plan.score.tolist() == [3, 2, 1]
    assert plan.concept.tolist() == [0, 1, 2]
    assert plan.offsets.diff().tolist() == [3, 2, 1]
    assert wide(least=0.5, concepts=1, form="prune").plan(image(0, 0, 1)).is_pruning


def test_a_patch_counts_by_its_evidence() -> None:
    patches = torch.eye(3)[[0, 0, 0, 1, 2]] * torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0])[:, None]
    tokens = VisualTokens(patches, (1, 5))
    assert wide(budget=1, concepts=1).plan(tokens).anchor.tolist() == [4]
    assert wide(budget=1, concepts=1, evidence="even").plan(tokens).anchor.tolist() == [0]


def test_a_small_thing_survives_where_the_largest_groups_would_fill_the_budget() -> None:
    # two halves of one thing in the eyes of top-1 sets; codes know that they overlap
    patches = torch.tensor([[1.0, 0.9, 0.0]] * 4 + [[0.9, 1.0, 0.0]] * 4 + [[0.0, 0.0, 1.0]])
    tokens = VisualTokens(patches, (1, 9))
    assert make("torino-p", sae=RAW, k=1, delta=1, budget=2).plan(tokens).anchor.tolist() == [0, 4]
    assert wide(budget=2, concepts=2).plan(tokens).anchor.tolist() == [0, 8]


def test_every_budget_begins_a_larger_one_and_least_moves_smoothly() -> None:
    tokens = VisualTokens(torch.randn(36, 16, generator=torch.Generator().manual_seed(1)), (6, 6))
    sae = SAE(torch.randn(64, tokens.width, generator=torch.Generator().manual_seed(0)))
    walks = [TorinoX(sae, budget=b, order="native").plan(tokens).anchor.tolist() for b in range(1, 37)]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(walks))
    lengths = [len(TorinoX(sae, least=least).plan(tokens)) for least in np.linspace(0, 4, 40)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 8


def test_images_share_a_pooled_budget() -> None:
    rich, plain = image(*range(8)), image(0, 0, 0, 0, 1, 1, 1, 2)
    plans = wide(budget=4, pooled=True, concepts=1).plan_batch([rich, plain])
    assert plans.lengths.sum() == 8
    assert len(plans[0]) > len(plans[1]) >= 1
    with pytest.raises(UnmetBudget, match="9 tokens an image: 2 images that share 18 have 16 patches"):
        wide(budget=9, pooled=True, concepts=1).plan_batch([rich, plain])


def test_equal_gains_of_a_pooled_budget_go_round() -> None:
    flat = image(0, 0, 0, 0, 0, 0, 0)
    assert wide(budget=3, pooled=True, concepts=1).plan_batch([flat] * 3).lengths.tolist() == [3, 3, 3]


def test_a_pooled_budget_for_images_of_different_size() -> None:
    plans = wide(budget=3, pooled=True, concepts=1).plan_batch([image(*range(6)), image(0, 1), image(2)])
    assert plans.lengths.tolist() == [6, 2, 1]
    alone = wide(budget=3, concepts=1).plan(image(0, 0, 1, 0, 2, 1))
    pooled = wide(budget=3, pooled=True, concepts=1).plan(image(0, 0, 1, 0, 2, 1))
    assert torch.equal(alone.anchor, pooled.anchor)


def test_a_share_of_the_patches_is_pooled_too() -> None:
    inner = wide(budget=1, pooled=True, concepts=1)
    plans = KeepShare(inner, 0.6).plan_batch([image(*range(6)), image(0, 0, 0, 0)])  # six of ten
    assert plans.lengths.tolist() == [5, 1]


def test_a_patch_that_overlaps_with_no_token_has_none() -> None:
    plan = wide(budget=2, concepts=1).plan(image(1, 0, 0, 2, 3, 3))
    assert plan.assigned.tolist() == [-1, 0, 0, -1, 1, 1]
    assert plan.sources.tolist() == [1, 2, 4, 5]
    assert plan.concept.tolist() == [0, 3]
    assert "It stands for 2 patches, 33 % of the image." in str(plan.explain(0)).replace("33%", "33 %")
    # one is silent: its evidence is none, and the others have nothing in common with it
    sae = SAE(torch.eye(2), kind="jumprelu", threshold=0.5)
    tokens = VisualTokens(torch.tensor([[1.0, 0.0], [0.1, 0.0], [1.0, 0.0], [0.0, 2.0]]), (1, 4))
    assert wide(sae, budget=2, concepts=2).plan(tokens).assigned.tolist() == [0, -1, 0, 1]


def test_the_concept_of_a_token_is_what_its_patches_share() -> None:
    # the kept patch is loudest in latent 0, and what all three have is latent 1
    patches = torch.tensor([[1.1, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.4]])
    plan = wide(budget=1, concepts=3).plan(VisualTokens(patches, (1, 3)))
    assert plan.concept.tolist() == [1]


def test_merging_adds_what_a_token_stands_for_and_keeps_its_length() -> None:
    patches = torch.tensor([[3.0, 0.0, 0.1], [2.0, 0.0, 0.5], [0.0, 5.0, 0.0]])
    tokens = VisualTokens(patches, (1, 3))
    plan = wide(budget=2, concepts=3).plan(tokens)
    merged = plan.apply(patches)
    assert plan.offsets.diff().tolist() == [2, 1]
    assert torch.allclose(merged.norm(dim=1), patches[plan.anchor].norm(dim=1))
    assert torch.allclose(merged[1], patches[2])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"budget": 5},
        {"form": "prune", "budget": 7},
        {"pick": "far", "least": 0.3},
        {"budget": 6, "pooled": True},
        {"budget": 5, "reach": None},
        {"budget": 5, "pick": "place"},
    ],
)
@pytest.mark.parametrize("reader", ["raw", "sae"])
def test_contract(given: dict[str, Any], reader: str) -> None:
    width = 24
    source = torch.Generator().manual_seed(3)
    sae: Any = RAW if reader == "raw" else SAE(torch.randn(40, width, generator=source), kind="jumprelu", threshold=0.5)
    check_reducer(TorinoX(sae, **given))


def test_silent_patches_are_alike() -> None:
    silent = Concepts.of([[], [1], []])
    assert overlaps_of(silent).tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("pick", ["cover", "far", "place"])
@pytest.mark.parametrize("noise", [0.3, 1e-3, 1e-5])  # near-duplicates have gains within ties
def test_a_threshold_for_a_wanted_average(pick: Any, noise: float) -> None:
    source = torch.Generator().manual_seed(0)
    images = [
        VisualTokens(torch.randn(6, 20, generator=source)[torch.randint(n, (36,), generator=source)], (6, 6))
        for n in (2, 4, 6)
    ]
    images = [one.with_(patches=one.patches + noise * torch.randn(36, 20, generator=source)) for one in images]
    reducer = TorinoX(RAW, concepts=8, pick=pick)
    for target in (1, 4, 9.5, 20, 36):
        found = calibrate_cover(images, target, reducer=reducer)
        plans = TorinoX(RAW, concepts=8, pick=pick, least=found.least).plan_batch(images)
        assert plans.lengths.tolist() == found.counts.tolist()
        # by place alone all images are of one length
        assert abs(found.mean - target) < 0.4 or noise < 0.3 or pick == "place"
    with pytest.raises(BadParameter, match="at least 1 token"):
        calibrate_cover(images, 0, reducer=reducer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": 0}, "budget"),
        ({"concepts": 0}, "concepts"),
        ({"least": -1.0}, "least must be a finite number"),
        ({"least": "0.5"}, "least must be a finite number"),
        ({"least": True}, "least"),
        ({"pooled": "no", "budget": 4}, "pooled must be True or False"),
        ({"least": float("nan")}, "least"),
        ({"pooled": True}, "pooled images share a budget"),
        ({"reach": 0}, "reach must be more than 0"),
        ({"reach": -0.1}, "reach must be a finite number"),
        ({"reach": "near"}, "reach"),
        ({"reach": 10**400}, "reach must be a finite number"),
        ({"pick": "near"}, "pick"),
        ({"pick": "place", "reach": None}, "pick='place' covers by place alone"),
        ({"form": "sum"}, "form"),
        ({"evidence": "none"}, "evidence"),
        ({"positions": "own"}, "positions"),
        ({"order": "up"}, "order"),
    ],
)
def test_bad_hyperparameters(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        TorinoX(RAW, **given)


def test_a_budget_beyond_the_patches() -> None:
    with pytest.raises(UnmetBudget, match="cannot give 7 tokens for image 1, which has 3 patches"):
        TorinoX(RAW, budget=7, concepts=1).plan_batch([image(*range(8)), image(0, 1, 2)])


def test_its_tokens_keep_their_places() -> None:
    model, inputs = tiny.llava(), tiny.prompt("ab#cd")
    reducer = make("torino-x(budget=3)", sae=tiny.sae())
    assert reducer.position_mode == "original"
    assert make("torino-x(positions='compact')", sae=tiny.sae()).position_mode == "compact"
    assert make("torino-m", sae=tiny.sae()).position_mode == "compact"
    seen: list[list[int]] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["position_ids"][0].tolist()), with_kwargs=True
    )
    try:
        for positions in ("own", "compact", "original"):
            with reduced(model, reducer, positions=positions) as trace:
                model.generate(**inputs, max_new_tokens=1, do_sample=False)
    finally:
        handle.remove()
    own, compact, original = seen
    assert own == original
    assert compact == list(range(len(compact)))
    (look,) = trace.looks
    assert own == [0, 1, *(2 + look.reductions[0].anchor).tolist(), 18, 19]
