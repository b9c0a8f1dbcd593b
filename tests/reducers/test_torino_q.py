"""TORINO-Q: worked cases, a slow transcription of the rule, the limit without a question, and the bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reducers.test_torino_x import reference_overlap
from torino import SAE, RawEmbedding, Reduction, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens, MissingSignal
from torino.reducers.torino_q import TorinoQ
from torino.reducers.torino_x import TIE, TorinoX
from torino.testing import same_plan, sample_tokens

RAW = RawEmbedding()
WIDTH = 12
SPARSE = SAE(torch.eye(WIDTH), torch.zeros(WIDTH), kind="relu")
TENSORS = ("sources", "weights", "offsets", "anchor", "concept", "score")


def with_question(image: VisualTokens, projected: Tensor, words: Tensor, generic: Tensor, *names: str) -> VisualTokens:
    signals = {"projected": projected, "words": words, "generic_words": generic}
    return image.with_(signals=signals, question_words=names)


def random_case(seed: int, kind: str) -> VisualTokens:
    """Return an image whose question stands out for some patches."""
    source = torch.Generator().manual_seed(seed)
    grid = ((3, 4), (1, 5), (4, 4), (1, 1), (2, 7))[seed % 5]
    n, m = grid[0] * grid[1], 1 + seed % 3
    patches = torch.randn(n, WIDTH, generator=source)
    if kind == "tied":
        patches = patches.round()
    if kind == "silent":
        patches[:: 1 + seed % 3] = -patches[:: 1 + seed % 3].abs()  # no positive latent
    if kind == "degenerate":
        patches = torch.zeros(n, WIDTH)
    projected, words = torch.randn(n, 8, generator=source), torch.randn(m, 8, generator=source)
    generic = torch.randn(6, 8, generator=source)
    if kind == "tied":
        projected = projected.round()
    if kind == "degenerate":
        projected = projected * (torch.arange(n) % 2)[:, None]
    if seed % 4 == 0:
        words[0] = 3 * generic[2]  # a word of generic questions
    return with_question(VisualTokens(patches, grid), projected, words, generic, *"abc"[:m])


# ---------------------------------------------------------------------- a slow transcription


def slow_evidence(image: VisualTokens) -> tuple[list[str], list[list[float]]]:
    def cosine(a: list[float], b: list[float]) -> float:
        lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
        return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0

    patches, words, generic = (image.signals[name].tolist() for name in ("projected", "words", "generic_words"))
    names, rows = list[str](), list[list[float]]()
    for name, word in zip(image.question_words, words, strict=True):
        if any(cosine(word, other) > 1 - 1e-6 for other in generic):
            continue
        names.append(name)
        row = list[float]()
        for patch in patches:
            common = [cosine(patch, other) for other in generic]
            mean = sum(common) / len(common)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in common) / len(common))
            row.append((cosine(patch, word) - mean) / deviation if deviation > 1e-6 else 0.0)
        rows.append(row)
    return names, rows


def slow_plan(reducer: TorinoQ, image: VisualTokens, codes: Concepts) -> tuple[list[int], list[str], list[list[str]]]:
    """Return the selected patches in order, their roles and words, one patch at a time."""
    n, columns = len(image), image.grid[1]
    overlap = reference_overlap(codes)
    if reducer.locality is not None:
        radius = reducer.locality * math.sqrt(n)
        for i in range(n):
            for j in range(n):
                squared = (i // columns - j // columns) ** 2 + (i % columns - j % columns) ** 2
                overlap[i][j] *= math.exp(-squared / (2 * radius**2))
    peaks = [max(0.0, peak) for peak in codes.peak.tolist()]
    weight = [peak * n / sum(peaks) for peak in peaks] if any(peaks) else [1.0] * n
    names, evidence = slow_evidence(image)
    relevance = list[list[float]]()
    for row in evidence:
        peak, half = max(row), reducer.threshold / 2
        own = [max(0.0, z - half) / (peak - half) if peak >= reducer.threshold else 0.0 for z in row]
        relevance.append([max(overlap[i][j] * own[i] for i in range(n)) for j in range(n)])
    rho = [max((row[j] for row in relevance), default=0.0) for j in range(n)]
    focused = [w * (1 - reducer.query + reducer.query * r) for w, r in zip(weight, rho, strict=True)]
    stands_out = any(rho) and any(focused)
    if stands_out:
        focused = [value * sum(weight) / sum(focused) for value in focused]

    kept, roles = list[int](), list[str]()

    def add(weights: list[float], count: int, least: float, role: str) -> None:
        def f(subset: list[int]) -> float:
            return sum(weights[j] * max((overlap[i][j] for i in subset), default=0.0) for j in range(n))

        while len(kept) < count:
            gain = {i: f([*kept, i]) - f(kept) for i in range(n) if i not in kept}
            highest = max(gain.values())
            if kept and (highest if highest > TIE else 0.0) < least - TIE:
                return
            kept.append(min(i for i, value in gain.items() if value >= highest - TIE))
            roles.append(role)

    least = reducer.min_gain if reducer.budget is None else 0.0
    total = n if reducer.budget is None else reducer.budget
    if not stands_out:
        add(weight, total, least, "primary")
    else:
        add(weight, total, least, "primary")
        first = math.ceil(reducer.floor * len(kept))
        del kept[first:], roles[first:]
        add(focused, total, least or 2 * TIE, "question")
        if reducer.budget is not None:
            add(weight, total, 0.0, "primary")
    words = [
        [names[t] for t in sorted(range(len(names)), key=lambda t: (-relevance[t][j], t)) if relevance[t][j] >= 0.5]
        for j in kept
    ]
    return kept, roles, words


@pytest.mark.parametrize("kind", ["random", "tied", "silent", "degenerate"])
@pytest.mark.parametrize("parameters", [{"budget": 2}, {"budget": 5}, {}, {"budget": 5, "floor": 0.0, "query": 0.6}])
def test_equals_the_slow_transcription(kind: str, parameters: dict[str, Any]) -> None:
    asked = 0
    for seed in range(40):
        image = random_case(seed, kind)
        if len(image) < parameters.get("budget", 1):
            continue
        reducer = TorinoQ(SPARSE, threshold=1.5, concepts=3, order="native", **parameters)
        plan = reducer.plan(image)
        kept, roles, words = slow_plan(reducer, image, SPARSE.top(image.patches, 3))
        assert plan.anchor.tolist() == kept, seed
        assert list(plan.role) == roles
        assert [list(row) for row in plan.words] == words
        assert int(plan.assigned.min()) >= 0  # every patch is represented
        raster = replace(reducer, order="raster").plan(image)
        assert raster.anchor.tolist() == sorted(kept)
        assert raster.role == tuple(role for _, role in sorted(zip(kept, roles, strict=True)))
        asked += "question" in roles
    assert asked > (5 if kind == "random" else 0)


# ---------------------------------------------------------------------- the limits


@pytest.mark.parametrize(
    "parameters", [{"budget": 4}, {}, {"budget": 4, "mode": "prune"}, {"pooled": True, "budget": 3}]
)
def test_without_influence_it_equals_its_parent(parameters: dict[str, Any]) -> None:
    reducer = TorinoQ(RAW, query=0.0, concepts=3, **parameters)
    assert reducer.needs == frozenset()
    assert "words" in TorinoQ.needs
    images = [random_case(seed, "random") for seed in (0, 2, 4)]
    expected = TorinoX(RAW, concepts=3, **parameters).plan_batch(images)
    for plan, parent in zip(reducer.plan_batch(images), expected, strict=True):
        assert same_plan(replace(plan, by=parent.by), parent)
        assert plan.words == ()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([{"budget": 5}, {"budget": 30}, {}]), st.floats(0.01, 1))
def test_an_unrelated_question_keeps_the_tokens_of_the_parent(
    seed: int, parameters: dict[str, Any], query: float
) -> None:
    source = torch.Generator().manual_seed(seed)
    image = sample_tokens(WIDTH, seed=seed)[0]
    projected, words, generic = (torch.randn(count, 64, generator=source) for count in (64, 6, 80))
    image = with_question(image, projected, words, generic)
    # with 80 generic words, 384 cosines of random directions do not reach 6 standard deviations
    plan = TorinoQ(RAW, query=query, threshold=6.0, **parameters).plan(image)
    parent = TorinoX(RAW, **parameters).plan(image)
    assert all(torch.equal(getattr(plan, name), getattr(parent, name)) for name in TENSORS)
    assert set(plan.role) == {"primary"}
    assert not any(plan.words)
    known = parent.assigned >= 0
    assert torch.equal(plan.assigned[known], parent.assigned[known])
    assert int(plan.assigned.min()) >= 0


def test_words_of_generic_questions_have_no_influence() -> None:
    image = random_case(1, "random")
    generic = image.signals["generic_words"]
    image = image.with_(signals={**image.signals, "words": 2 * generic}, question_words=tuple("abcdef"))
    plan = TorinoQ(RAW, budget=2, threshold=0.1).plan(image)
    assert torch.equal(plan.anchor, TorinoX(RAW, budget=2).plan(image).anchor)


# ---------------------------------------------------------------------- the bound


def coverage(overlap: np.ndarray, weight: np.ndarray, kept: Tensor) -> float:
    return float((overlap[kept.numpy()].max(0) * weight).sum(dtype=np.float64))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.floats(-30, 30), min_size=1, max_size=15),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 1.0]),
    st.sampled_from([None, 1, 2, 5, 20, 50]),
    st.sampled_from([0.05, 0.5, 2.0]),
)
def test_an_adversarial_question_loses_at_most_the_stated_bound(
    seed: int, adversary: list[float], floor: float, budget: int | None, min_gain: float
) -> None:
    """Give the patches that the parent selects last, and any others, whatever evidence an adversary wants."""
    image = sample_tokens(WIDTH, seed=seed)[0]
    parent = TorinoX(RAW, budget=budget, min_gain=min_gain, order="native", concepts=4)
    last = TorinoX(RAW, budget=len(image), order="native", concepts=4).plan(image).anchor.flip(0)
    evidence = torch.zeros(len(image))
    evidence[last[: len(adversary)]] = torch.tensor(adversary)

    class Adversary(TorinoQ):
        def _evidence(self, image: VisualTokens) -> Any:
            return ("word",), evidence[None].numpy()

    reducer = Adversary(RAW, budget=budget, min_gain=min_gain, order="native", concepts=4, floor=floor)
    plan, expected = reducer.plan(image), parent.plan(image)
    codes = RAW.top(image.patches, 4)
    overlap, weight = parent._overlap(image, codes), parent.patch_weights(codes)
    reached, of = coverage(overlap, weight, plan.anchor), coverage(overlap, weight, expected.anchor)
    assert reached >= floor * of - len(expected) * TIE
    assert budget is None or len(plan) == budget
    first = math.ceil(floor * len(expected))
    assert set(expected.anchor[:first].tolist()) <= set(plan.anchor.tolist())
    if floor == 1.0:
        assert set(expected.anchor.tolist()) <= set(plan.anchor.tolist())


# ---------------------------------------------------------------------- what a user sees


def two_objects() -> VisualTokens:
    """Return a dog on the left and a car on the right of a background; each patch of an object is different."""
    patches = torch.zeros(24, 32)
    patches[:, 0] = 1.0
    for column, latent in ((1, 1), (4, 2)):
        for row in range(4):
            patches[6 * row + column, 0] = 0.0
            patches[6 * row + column, latent] = 0.5
            patches[6 * row + column, 4 + 4 * latent + row] = 0.5
    generic = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    return with_question(VisualTokens(patches, (4, 6)), patches, torch.eye(32)[1:2], generic, "dog")


def test_relevant_groups_are_fine_and_others_coarse() -> None:
    dog = two_objects()
    car = dog.with_(signals={**dog.signals, "words": torch.eye(32)[2:3]}, question_words=("car",))
    reducer = TorinoQ(RAW, budget=8, concepts=2, threshold=2.0, locality=1.0)
    left, right = [1, 7, 13, 19], [4, 10, 16, 22]
    plans = {name: reducer.plan(image) for name, image in (("dog", dog), ("car", car))}
    assert set(left) <= set(plans["dog"].anchor.tolist())
    assert set(right) <= set(plans["car"].anchor.tolist())
    assert not set(right) <= set(plans["dog"].anchor.tolist())
    for name, plan in plans.items():
        assert int(plan.assigned.min()) >= 0
        assert plan.role.count("question") >= 2
        token = plan.role.index("question")
        explanation = plan.explain(token)
        assert explanation.words == (name,)
        assert f'Relevant to "{name}" in the question.' in str(explanation)
    assert "question" in repr(plans["dog"])


def test_words_are_saved_and_follow_their_tokens(tmp_path: Any) -> None:
    plan = TorinoQ(RAW, budget=8, concepts=2, threshold=2.0, locality=1.0).plan(two_objects())
    loaded = Reduction.load(plan.save(tmp_path / "plan.npz"))
    assert loaded.words == plan.words
    assert any(plan.words)
    identity = Reduction.pick(torch.arange(8), (1, 8), "second")
    assert plan.then(identity).words == ()
    with pytest.raises(BadParameter, match="words must have one entry for each of the 8 output tokens, got 1"):
        replace(plan, words=(("dog",),))


def test_wrong_input_is_refused() -> None:
    image = two_objects()
    with pytest.raises(MissingSignal, match="keeps finer tokens where a question asks, and these tokens have none"):
        make("torino-q", sae=RAW).plan(image.with_(signals={"projected": image.patches}))
    with pytest.raises(MissingSignal, match="have none"):
        make("torino-q", sae=RAW).plan(image.with_(signals={**image.signals, "words": torch.zeros(0, 32)}))
    with pytest.raises(BadTokens, match="torino-q needs words of shape"):
        make("torino-q", sae=RAW).plan(image.with_(signals={**image.signals, "words": torch.ones(1, 5)}))
    for name in ("query", "floor"):
        with pytest.raises(BadParameter, match=f"{name} must be between 0 and 1, got 1.5"):
            TorinoQ(RAW, **{name: 1.5})
    with pytest.raises(BadParameter, match="threshold must be above 0, got 0"):
        TorinoQ(RAW, threshold=0.0)
