"""CDPruner: small examples and comparison with a reference implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.reference_cdpruner import Rows, reference_gains, reference_relevance
from torino import VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers.cdpruner import CDPruner, greedy_map
from torino.testing import check_reducer, sample_tokens


def tokens_of(patches: Tensor | Rows, grid: tuple[int, int] | None = None, **signals: Any) -> VisualTokens:
    made = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in signals.items()}
    patches = torch.as_tensor(patches, dtype=torch.float32)
    return VisualTokens(patches, grid or (1, len(patches)), signals=made)


def native(tokens: VisualTokens, **given: Any) -> list[int]:
    return make("cdpruner", order="native", **given).plan(tokens).anchor.tolist()


# ---------------------------------------------------------------------- small examples


def test_identical_patches_are_padded_by_index_or_relevance() -> None:
    plan = make("cdpruner", budget=4, relevance="none", order="native").plan(tokens_of([[3.0, 4.0]] * 6))
    assert plan.anchor.tolist() == [0, 1, 2, 3]
    assert plan.role == ("primary", "padding", "padding", "padding")
    assert plan.score.tolist() == [1.0, 0.0, 0.0, 0.0]
    # cosines with the text are 1, 0.6, 0, 0.8; the least similar patch is the most relevant
    joint = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]]
    with_text = tokens_of([[3.0, 4.0]] * 4, joint=joint, text=[[2.0, 0.0]])
    assert native(with_text, budget=4) == [2, 1, 3, 0]
    assert native(with_text, budget=4, negate=False) == [0, 3, 1, 2]


def test_one_patch_of_each_cluster_is_selected_first() -> None:
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
    # with r = 1, 0.9, 0.7 relevance outweighs diversity: 0.6075 against 0.49
    picks, gains = greedy_map(
        np.array([[1, 0.5, 0], [0.5, 1, half], [0, half, 1]], np.float32), np.array([1, 0.9, 0.7], np.float32), 2
    )
    assert picks.tolist() == [0, 1]
    np.testing.assert_allclose(gains, [1, 0.6075], rtol=1e-6)


def test_small_weights_keep_precision() -> None:
    generator = np.random.default_rng(0)
    unit = generator.standard_normal((12, 6))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    similar = (unit @ unit.T).astype(np.float32)
    plain, _ = greedy_map(similar, np.ones(12, np.float32), 6)
    scaled, gains = greedy_map(similar, np.full(12, 1e-6, np.float32), 6)
    assert scaled.tolist() == plain.tolist()
    assert (gains > 0).all()


def test_theta_by_hand() -> None:
    # alpha = θ/(2(1-θ)): 0 -> r = 1 for all, a plain DPP; 0.5 -> exp(r/2)
    generator = torch.Generator().manual_seed(0)
    tokens = tokens_of(
        torch.randn(10, 5, generator=generator),
        joint=torch.randn(10, 3, generator=generator),
        text=torch.randn(2, 3, generator=generator),
    )
    assert native(tokens, budget=5, theta=0.0) == native(tokens, budget=5, relevance="none")
    r = reference_relevance(tokens.signals["joint"].tolist(), tokens.signals["text"].tolist(), theta=0.5)
    assert max(r) == pytest.approx(math.exp(0.5), rel=1e-5)
    assert min(r) == pytest.approx(1, rel=1e-5)
    assert native(tokens, budget=1, theta=0.5) == [r.index(max(r))]
    assert len(native(tokens, budget=10, theta=0.999)) == 10  # no overflow


def test_budgets_of_all_patches_and_of_one() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = tokens_of(torch.randn(12, 4, generator=generator), (3, 4))
    plan = make("cdpruner", budget=12, relevance="none").plan(tokens)
    assert plan.anchor.tolist() == list(range(12))
    assert plan.is_pruning
    assert plan.role.count("primary") == 4  # the rank
    assert native(tokens, budget=1, relevance="none") == [0]
    assert native(tokens_of([[2.0]]), budget=1, relevance="none") == [0]
    assert native(tokens_of([[2.0]], joint=[[1.0]], text=[[1.0]]), budget=1) == [0]


def test_equal_gains_go_to_the_lowest_index() -> None:
    for seed in range(5):
        patches = torch.randn(100, 33, generator=torch.Generator().manual_seed(seed))
        assert native(tokens_of(patches), budget=1, relevance="none") == [0]


def test_least_relevant_patch_has_a_positive_gain() -> None:
    tokens = tokens_of(torch.eye(2), joint=[[1.0, 0.0], [0.0, 1.0]], text=[[1.0, 0.0]])
    plan = make("cdpruner", budget=2, order="native").plan(tokens)
    assert plan.anchor.tolist() == [1, 0]
    assert plan.role == ("primary", "primary")
    np.testing.assert_allclose(plan.score, [1, 1e-12], rtol=1e-5)


def test_zero_patch_is_selected_last() -> None:
    tokens = tokens_of([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    assert native(tokens, budget=3, relevance="none") == [1, 2, 0]


def test_space() -> None:
    tokens = tokens_of([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], projected=[[1.0, 0.0], [0.0, 1.0], [1.0, 0.2]])
    assert native(tokens, budget=2, relevance="none") == [0, 2]
    assert native(tokens, budget=2, relevance="none", space="projected") == [0, 1]


# ---------------------------------------------------------------------- reference


@pytest.mark.parametrize("kind", ["random", "tied", "flat", "like"])
@pytest.mark.parametrize(("negate", "theta"), [(True, None), (False, None), (True, 0.7)])
def test_equals_reference(kind: str, negate: bool, theta: float | None) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    n, width = 18, 7
    patches = torch.randn(n, width, generator=generator)
    if kind == "tied":  # each patch twice
        patches = patches[: n // 2].repeat(2, 1)
    elif kind == "flat":  # rank 2 only
        patches = patches[:, :2] @ torch.randn(2, width, generator=generator)
    elif kind == "like":
        patches = 0.2 * patches + torch.randn(width, generator=generator)
    tokens = tokens_of(
        patches, joint=torch.randn(n, 5, generator=generator), text=torch.randn(3, 5, generator=generator)
    )
    r = reference_relevance(tokens.signals["joint"].tolist(), tokens.signals["text"].tolist(), negate, theta)
    plan = make("cdpruner", budget=n, negate=negate, theta=theta, order="native").plan(tokens)
    picks, score = plan.anchor.tolist(), plan.score.double()
    scale = 1.0 if theta is None else max(r) ** 2
    real = plan.role.count("primary")
    assert plan.role == ("primary",) * real + ("padding",) * (n - real)
    assert real == min(width, {"flat": 2}.get(kind, n))
    for t in range(real):
        gains = reference_gains(patches.tolist(), r, picks[:t])
        assert picks[t] == gains.index(max(gains))
        assert float(score[t]) * scale == pytest.approx(gains[picks[t]], rel=2e-3)
    assert picks[real:] == sorted(set(range(n)) - set(picks[:real]), key=lambda i: (-r[i], i))
    for budget in (1, 2, 5, real, n - 1):
        assert native(tokens, budget=budget, negate=negate, theta=theta) == picks[:budget]
        raster = make("cdpruner", budget=budget, negate=negate, theta=theta).plan(tokens)
        assert raster.anchor.tolist() == sorted(picks[:budget])
        by_patch = dict(zip(picks, score.tolist(), strict=True))
        assert raster.score.tolist() == [by_patch[i] for i in raster.anchor.tolist()]


def test_equals_float64_elimination_at_full_size() -> None:
    generator = torch.Generator().manual_seed(2)
    centers = torch.randn(30, 64, generator=generator)
    patches = centers[torch.randint(30, (256,), generator=generator)] + 0.5 * torch.randn(256, 64, generator=generator)
    tokens = tokens_of(
        patches, (16, 16), joint=torch.randn(256, 32, generator=generator), text=torch.randn(1, 32, generator=generator)
    )
    picks = native(tokens, budget=48)
    unit = patches.double() / patches.double().norm(dim=1, keepdim=True)
    r = torch.tensor(reference_relevance(tokens.signals["joint"].tolist(), tokens.signals["text"].tolist())).double()
    kernel = r[:, None] * (unit @ unit.T) * r
    for t, pick in enumerate(picks):
        gain = kernel.diagonal().clone()
        gain[picks[:t]] = -1
        assert int(gain.argmax()) == pick
        kernel = kernel - torch.outer(kernel[:, pick], kernel[pick]) / kernel[pick, pick]


# ---------------------------------------------------------------------- symmetry, contract, errors


def test_permutation_equivariance() -> None:
    generator = torch.Generator().manual_seed(4)
    patches, joint = torch.randn(30, 40, generator=generator), torch.randn(30, 6, generator=generator)
    text = torch.randn(2, 6, generator=generator)
    shuffled = torch.randperm(30, generator=generator)
    plain = native(tokens_of(patches, joint=joint, text=text), budget=12)
    moved = native(tokens_of(patches[shuffled], joint=joint[shuffled], text=text), budget=12)
    assert shuffled[moved].tolist() == plain


def test_selection_depends_on_the_question() -> None:
    generator = torch.Generator().manual_seed(5)
    patches, joint = torch.randn(30, 40, generator=generator), torch.randn(30, 6, generator=generator)
    first, second = (native(tokens_of(patches, joint=joint, text=sign * joint[:1]), budget=5) for sign in (1.0, -1.0))
    assert first != second
    assert second[0] == 0  # the negated cosine is highest if the text is the opposite of the patch


def with_signals() -> list[VisualTokens]:
    generator = torch.Generator().manual_seed(6)
    return [
        tokens.with_(
            signals={
                "joint": torch.randn(len(tokens), 8, generator=generator),
                "text": torch.randn(3, 8, generator=generator),
                "projected": torch.randn(len(tokens), 24, generator=generator),
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


def test_needs_depend_on_the_parameters() -> None:
    assert CDPruner.needs == CDPruner(4).needs == {"joint", "text"}
    assert CDPruner(4, relevance="none").needs == frozenset()
    assert CDPruner(4, space="projected").needs == {"joint", "text", "projected"}
    assert CDPruner(4, relevance="none", space="projected").needs == {"projected"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": True}, "budget must be a whole number"),
        ({"relevance": "image"}, "relevance must be one of 'text', 'none', got 'image'"),
        ({"space": "joint"}, "space must be one of 'features', 'projected'"),
        ({"negate": 1}, "negate must be True or False, got 1"),
        ({"theta": 1.0}, "theta must be at least 0 and below 1, got 1.0"),
        ({"theta": -0.5}, "theta must be a finite number of at least 0"),
        ({"theta": 0.5, "relevance": "none"}, "cannot be combined with relevance='none'"),
        ({"order": "other"}, "order must be one of"),
    ],
)
def test_invalid_parameters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("cdpruner", **({"budget": 4} | given))


def test_missing_signals_and_unmet_budgets() -> None:
    tokens = tokens_of(torch.eye(4))
    with pytest.raises(UnmetBudget, match="cdpruner cannot give 5 tokens"):
        make("cdpruner", budget=5, relevance="none").plan(tokens)
    with pytest.raises(MissingSignal, match=r"for a question, and these tokens have none.*relevance='none'"):
        make("cdpruner", budget=2).plan(tokens)
    with pytest.raises(MissingSignal, match="for a question"):
        make("cdpruner", budget=2).plan(tokens.with_(signals={"text": torch.ones(0, 3), "joint": torch.ones(4, 3)}))
    with pytest.raises(MissingSignal, match="cdpruner needs the signal joint"):
        make("cdpruner", budget=2).plan(tokens.with_(signals={"text": torch.ones(1, 3)}))
    with pytest.raises(MissingSignal, match="cdpruner needs the signal projected"):
        make("cdpruner", budget=2, relevance="none", space="projected").plan(tokens)
    for joint, text in ((torch.ones(4, 3), torch.ones(1, 2)), (torch.ones(3, 3), torch.ones(1, 3))):
        with pytest.raises(BadTokens, match="of shape"):
            make("cdpruner", budget=2).plan(tokens.with_(signals={"text": text, "joint": joint}))
    with pytest.raises(BadTokens, match="text holds NaN"):
        make("cdpruner", budget=2).plan(
            tokens.with_(signals={"text": torch.full((1, 3), torch.nan), "joint": torch.ones(4, 3)})
        )
