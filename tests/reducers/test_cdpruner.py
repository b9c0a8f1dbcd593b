"""CDPruner against cases worked by hand and a plain transcription of its rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torino import BadParameter, BadTokens, MissingSignal, UnmetBudget, VisualTokens, make
from torino.reducers.cdpruner import CDPruner, greedy_map
from torino.testing import check_reducer, sample_tokens

Rows = list[list[float]]


def cosine(a: list[float], b: list[float]) -> float:
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def slow_relevance(joint: Rows, text: Rows, negate: bool = True, theta: float | None = None) -> list[float]:
    """The published relevance: negated mean cosine with the text, min-max, optionally exp."""
    r = [sum(cosine(patch, word) for word in text) / len(text) for patch in joint]
    r = [-value for value in r] if negate else r
    low, high = min(r), max(r)
    r = [(value - low + 1e-6) / (high - low) if high - low > 1e-6 else 1.0 for value in r]
    return r if theta is None else [math.exp(theta / (2 * (1 - theta)) * value) for value in r]


def slow_gains(features: Rows, r: list[float], chosen: list[int]) -> list[float]:
    """det K of the chosen and each other patch over det K of the chosen, by elimination on the whole kernel."""
    n = len(features)
    kernel = [[r[i] * cosine(features[i], features[j]) * r[j] for j in range(n)] for i in range(n)]
    for pivot in chosen:
        top = kernel[pivot][pivot]
        row = list(kernel[pivot])
        for i in range(n):
            factor = kernel[i][pivot] / top
            for j in range(n):
                kernel[i][j] -= factor * row[j]
    return [0.0 if i in chosen else kernel[i][i] for i in range(n)]


def tokens_of(patches: Tensor | Rows, grid: tuple[int, int] | None = None, **signals: Any) -> VisualTokens:
    made = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in signals.items()}
    patches = torch.as_tensor(patches, dtype=torch.float32)
    return VisualTokens(patches, grid or (1, len(patches)), signals=made)


def native(tokens: VisualTokens, **given: Any) -> list[int]:
    return make("cdpruner", order="native", **given).plan(tokens).anchor.tolist()


# ---------------------------------------------------------------------- by hand


def test_identical_patches_are_filled_by_index_or_relevance() -> None:
    plan = make("cdpruner", budget=4, relevance="none", order="native").plan(tokens_of([[3.0, 4.0]] * 6))
    assert plan.anchor.tolist() == [0, 1, 2, 3]
    assert plan.role == ("primary", "padding", "padding", "padding")
    assert plan.score.tolist() == [1.0, 0.0, 0.0, 0.0]
    # cosines with the text 1, 0.6, 0, 0.8: the least like it is taken for the most relevant
    joint = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]]
    asked = tokens_of([[3.0, 4.0]] * 4, joint=joint, text=[[2.0, 0.0]])
    assert native(asked, budget=4) == [2, 1, 3, 0]
    assert native(asked, budget=4, negate=False) == [0, 3, 1, 2]


def test_orthogonal_clusters_give_one_patch_each_first() -> None:
    eye = torch.eye(4)
    cluster = [2, 0, 0, 1, 3, 2, 1, 1, 0, 3, 2, 0]
    tokens = tokens_of(eye[cluster] * torch.arange(1.0, 13.0)[:, None], (3, 4))
    plan = make("cdpruner", budget=6, relevance="none", order="native").plan(tokens)
    assert plan.anchor.tolist() == [0, 1, 3, 4, 2, 5]
    assert plan.role == ("primary",) * 4 + ("padding",) * 2
    assert make("cdpruner", budget=6, relevance="none").plan(tokens).anchor.tolist() == [0, 1, 2, 3, 4, 5]


def test_relevance_and_diversity_by_hand() -> None:
    # unit vectors at 0°, 60°, 90°; r = 1, 0.5, 0.5 -> first 0; then δ = sin²(60°) = 3/4 and 1 -> gains 3/16, 1/4
    half = math.sqrt(3) / 2
    picks, gains = greedy_map(
        np.array([[1, 0.5, 0], [0.5, 1, half], [0, half, 1]], np.float32), np.array([1, 0.5, 0.5], np.float32), 2
    )
    assert picks.tolist() == [0, 2]
    np.testing.assert_allclose(gains, [1, 0.25])
    # with r = 1, 0.9, 0.7 diversity no longer makes up for relevance: 0.6075 against 0.49
    picks, gains = greedy_map(
        np.array([[1, 0.5, 0], [0.5, 1, half], [0, half, 1]], np.float32), np.array([1, 0.9, 0.7], np.float32), 2
    )
    assert picks.tolist() == [0, 1]
    np.testing.assert_allclose(gains, [1, 0.6075], rtol=1e-6)


def test_tiny_weights_cost_no_precision() -> None:
    source = np.random.default_rng(0)
    unit = source.standard_normal((12, 6))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    similar = (unit @ unit.T).astype(np.float32)
    plain, _ = greedy_map(similar, np.ones(12, np.float32), 6)
    scaled, gains = greedy_map(similar, np.full(12, 1e-6, np.float32), 6)
    assert scaled.tolist() == plain.tolist()
    assert (gains > 0).all()


def test_theta_by_hand() -> None:
    # alpha = θ/(2(1-θ)): 0 -> r = 1 for all, a plain DPP; 0.5 -> exp(r/2)
    source = torch.Generator().manual_seed(0)
    tokens = tokens_of(
        torch.randn(10, 5, generator=source),
        joint=torch.randn(10, 3, generator=source),
        text=torch.randn(2, 3, generator=source),
    )
    assert native(tokens, budget=5, theta=0.0) == native(tokens, budget=5, relevance="none")
    r = slow_relevance(tokens.signals["joint"].tolist(), tokens.signals["text"].tolist(), theta=0.5)
    assert max(r) == pytest.approx(math.exp(0.5), rel=1e-5)
    assert min(r) == pytest.approx(1, rel=1e-5)
    assert native(tokens, budget=1, theta=0.5) == [r.index(max(r))]
    assert len(native(tokens, budget=10, theta=0.999)) == 10  # no overflow


def test_whole_budget_one_patch_and_one_pick() -> None:
    source = torch.Generator().manual_seed(1)
    tokens = tokens_of(torch.randn(12, 4, generator=source), (3, 4))
    plan = make("cdpruner", budget=12, relevance="none").plan(tokens)
    assert plan.anchor.tolist() == list(range(12))
    assert plan.is_pruning
    assert plan.role.count("primary") == 4  # the rank
    assert native(tokens, budget=1, relevance="none") == [0]
    assert native(tokens_of([[2.0]]), budget=1, relevance="none") == [0]
    assert native(tokens_of([[2.0]], joint=[[1.0]], text=[[1.0]]), budget=1) == [0]


def test_equal_gains_go_to_the_lowest_index_whatever_the_rounding() -> None:
    for seed in range(5):
        patches = torch.randn(100, 33, generator=torch.Generator().manual_seed(seed))
        assert native(tokens_of(patches), budget=1, relevance="none") == [0]


def test_the_least_relevant_patch_still_counts() -> None:
    tokens = tokens_of(torch.eye(2), joint=[[1.0, 0.0], [0.0, 1.0]], text=[[1.0, 0.0]])
    plan = make("cdpruner", budget=2, order="native").plan(tokens)
    assert plan.anchor.tolist() == [1, 0]
    assert plan.role == ("primary", "primary")
    np.testing.assert_allclose(plan.score, [1, 1e-12], rtol=1e-5)


def test_a_patch_of_no_length_comes_last() -> None:
    tokens = tokens_of([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    assert native(tokens, budget=3, relevance="none") == [1, 2, 0]


def test_space() -> None:
    tokens = tokens_of([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], projected=[[1.0, 0.0], [0.0, 1.0], [1.0, 0.2]])
    assert native(tokens, budget=2, relevance="none") == [0, 2]
    assert native(tokens, budget=2, relevance="none", space="projected") == [0, 1]


# ---------------------------------------------------------------------- against the transcription


@pytest.mark.parametrize("kind", ["random", "tied", "flat", "like"])
@pytest.mark.parametrize(("negate", "theta"), [(True, None), (False, None), (True, 0.7)])
def test_same_as_the_transcription(kind: str, negate: bool, theta: float | None) -> None:
    source = torch.Generator().manual_seed(len(kind))
    n, width = 18, 7
    patches = torch.randn(n, width, generator=source)
    if kind == "tied":  # each patch twice
        patches = patches[: n // 2].repeat(2, 1)
    elif kind == "flat":  # rank 2 only
        patches = patches[:, :2] @ torch.randn(2, width, generator=source)
    elif kind == "like":
        patches = 0.2 * patches + torch.randn(width, generator=source)
    tokens = tokens_of(patches, joint=torch.randn(n, 5, generator=source), text=torch.randn(3, 5, generator=source))
    r = slow_relevance(tokens.signals["joint"].tolist(), tokens.signals["text"].tolist(), negate, theta)
    plan = make("cdpruner", budget=n, negate=negate, theta=theta, order="native").plan(tokens)
    picks, score = plan.anchor.tolist(), plan.score.double()
    scale = 1.0 if theta is None else max(r) ** 2
    real = plan.role.count("primary")
    assert plan.role == ("primary",) * real + ("padding",) * (n - real)
    assert real == min(width, {"flat": 2}.get(kind, n))
    for t in range(real):
        gains = slow_gains(patches.tolist(), r, picks[:t])
        assert picks[t] == gains.index(max(gains))
        assert float(score[t]) * scale == pytest.approx(gains[picks[t]], rel=2e-3)
    assert picks[real:] == sorted(set(range(n)) - set(picks[:real]), key=lambda i: (-r[i], i))
    for budget in (1, 2, 5, real, n - 1):
        assert native(tokens, budget=budget, negate=negate, theta=theta) == picks[:budget]
        raster = make("cdpruner", budget=budget, negate=negate, theta=theta).plan(tokens)
        assert raster.anchor.tolist() == sorted(picks[:budget])
        by_patch = dict(zip(picks, score.tolist(), strict=True))
        assert raster.score.tolist() == [by_patch[i] for i in raster.anchor.tolist()]


def test_same_as_an_elimination_in_float64_at_full_size() -> None:
    source = torch.Generator().manual_seed(2)
    centres = torch.randn(30, 64, generator=source)
    patches = centres[torch.randint(30, (256,), generator=source)] + 0.5 * torch.randn(256, 64, generator=source)
    tokens = tokens_of(
        patches, (16, 16), joint=torch.randn(256, 32, generator=source), text=torch.randn(1, 32, generator=source)
    )
    picks = native(tokens, budget=48)
    unit = patches.double() / patches.double().norm(dim=1, keepdim=True)
    r = torch.tensor(slow_relevance(tokens.signals["joint"].tolist(), tokens.signals["text"].tolist())).double()
    kernel = r[:, None] * (unit @ unit.T) * r
    for t, pick in enumerate(picks):
        gain = kernel.diagonal().clone()
        gain[picks[:t]] = -1
        assert int(gain.argmax()) == pick
        kernel = kernel - torch.outer(kernel[:, pick], kernel[pick]) / kernel[pick, pick]


# ---------------------------------------------------------------------- symmetry, contract, errors


def test_permutation_equivariance() -> None:
    source = torch.Generator().manual_seed(4)
    patches, joint = torch.randn(30, 40, generator=source), torch.randn(30, 6, generator=source)
    text = torch.randn(2, 6, generator=source)
    shuffled = torch.randperm(30, generator=source)
    plain = native(tokens_of(patches, joint=joint, text=text), budget=12)
    moved = native(tokens_of(patches[shuffled], joint=joint[shuffled], text=text), budget=12)
    assert shuffled[moved].tolist() == plain


def test_the_question_decides() -> None:
    source = torch.Generator().manual_seed(5)
    patches, joint = torch.randn(30, 40, generator=source), torch.randn(30, 6, generator=source)
    one, two = (native(tokens_of(patches, joint=joint, text=sign * joint[:1]), budget=5) for sign in (1.0, -1.0))
    assert one != two
    assert two[0] == 0  # the negated cosine is highest where the text is the opposite of the patch


def with_signals() -> list[VisualTokens]:
    source = torch.Generator().manual_seed(6)
    return [
        tokens.with_(
            signals={
                "joint": torch.randn(len(tokens), 8, generator=source),
                "text": torch.randn(3, 8, generator=source),
                "projected": torch.randn(len(tokens), 24, generator=source),
            }
        )
        for tokens in sample_tokens()
    ]


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("budget", [1, 6, 15, 16])
@pytest.mark.parametrize(
    "given", [{}, {"relevance": "none"}, {"space": "projected"}, {"theta": 0.5, "negate": False}], ids=str
)
def test_contract(budget: int, order: str, given: dict[str, Any]) -> None:
    check_reducer(make("cdpruner", budget=budget, order=order, **given), with_signals())


def test_needs_follow_the_settings() -> None:
    assert CDPruner.needs == CDPruner(4).needs == {"joint", "text"}
    assert CDPruner(4, relevance="none").needs == frozenset()
    assert CDPruner(4, space="projected").needs == {"joint", "text", "projected"}
    assert CDPruner(4, relevance="none", space="projected").needs == {"projected"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": True}, "budget must be a whole number"),
        ({"relevance": "image"}, "relevance must be one of 'text', 'none', got 'image'"),
        ({"space": "joint"}, "space must be one of 'tap', 'projected'"),
        ({"negate": 1}, "negate must be True or False, got 1"),
        ({"theta": 1.0}, "theta must be at least 0 and below 1, got 1.0"),
        ({"theta": -0.5}, "theta must be a finite number of at least 0"),
        ({"theta": 0.5, "relevance": "none"}, "relevance='none' has none"),
        ({"order": "other"}, "order must be one of"),
    ],
)
def test_bad_parameters(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadParameter, match=sentence):
        make("cdpruner", **({"budget": 4} | given))


def test_what_is_missing_is_named() -> None:
    tokens = tokens_of(torch.eye(4))
    with pytest.raises(UnmetBudget, match="cdpruner cannot give 5 tokens"):
        make("cdpruner", budget=5, relevance="none").plan(tokens)
    with pytest.raises(MissingSignal, match=r"for a question, and these tokens do not carry one.*relevance='none'"):
        make("cdpruner", budget=2).plan(tokens)
    with pytest.raises(MissingSignal, match="for a question"):
        make("cdpruner", budget=2).plan(tokens.with_(signals={"text": torch.ones(0, 3), "joint": torch.ones(4, 3)}))
    with pytest.raises(MissingSignal, match="cdpruner reads joint"):
        make("cdpruner", budget=2).plan(tokens.with_(signals={"text": torch.ones(1, 3)}))
    with pytest.raises(MissingSignal, match="cdpruner reads projected"):
        make("cdpruner", budget=2, relevance="none", space="projected").plan(tokens)
    for joint, text in ((torch.ones(4, 3), torch.ones(1, 2)), (torch.ones(3, 3), torch.ones(1, 3))):
        with pytest.raises(BadTokens, match="of shape"):
            make("cdpruner", budget=2).plan(tokens.with_(signals={"text": text, "joint": joint}))
    with pytest.raises(BadTokens, match="text holds NaN"):
        make("cdpruner", budget=2).plan(
            tokens.with_(signals={"text": torch.full((1, 3), torch.nan), "joint": torch.ones(4, 3)})
        )
