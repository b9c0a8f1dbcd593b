"""SCTS: small examples and comparison with a reference implementation on dense latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import oracle
from torino import SAE, RawEmbedding, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, SAEMismatch, UnmetBudget
from torino.core.tokens import Origin
from torino.reducers.scts import SCTS
from torino.testing import check_reducer, sample_tokens

Dense = list[list[float]]


class Planted:
    """A concept encoder that returns the exact top-k of given dense latents; column 0 of a token is its row index."""

    def __init__(self, z: Sequence[Sequence[float]]) -> None:
        self.z = [list(row) for row in z]
        self.calls: list[int] = []

    def top(self, x: Tensor, k: int, *, rank: str = "activation") -> Concepts:
        self.calls.append(len(x))
        indices, values, peak = oracle.top_k([self.z[int(row)] for row in x[:, 0].tolist()], k)
        return Concepts(torch.tensor(indices), torch.tensor(values), torch.tensor(peak))

    def check_origin(self, origin: Origin, width: int) -> None:
        assert width == 2

    def tokens(self, first: int = 0, last: int | None = None) -> VisualTokens:
        rows = torch.arange(first, len(self.z) if last is None else last)
        return VisualTokens(torch.stack([rows, rows * 0 + 0.5], 1), (1, len(rows)))


def plan_of(z: Dense, budget: int, **parameters: Any):
    planted = Planted(z)
    parameters = {"m": len(z[0])} | parameters
    return SCTS(planted, budget, **parameters).plan(planted.tokens())


# ---------------------------------------------------------------------- reference


def reference_scts(
    z: Dense, budget: int, m: int, binary: bool
) -> tuple[list[int], list[float], list[int], list[str], Any]:
    """Return selected patches, gains, concepts and roles, and the patch that covers each patch's strongest concept."""
    peaks = [max(0.0, *row) for row in z]
    strongest = [sorted((j for j, v in enumerate(row) if v > 0), key=lambda j: (-row[j], j))[:m] for row in z]
    sparse = [{j: (1.0 if binary else row[j]) for j in top} for row, top in zip(z, strongest, strict=True)]
    coverage = [0.0] * len(z[0])
    covered_by = [-1] * len(z[0])
    picks: list[int] = []
    gains: list[float] = []
    concepts: list[int] = []
    roles: list[str] = []
    while len(picks) < budget:
        best_patch, best_gain = -1, 0.0
        for i, latents in enumerate(sparse):
            gain = 0.0
            for j, value in latents.items():
                if value > coverage[j]:
                    gain += value - coverage[j]
            if gain > best_gain:
                best_patch, best_gain = i, gain
        if best_patch < 0:
            break
        added = {j: value - coverage[j] for j, value in sparse[best_patch].items() if value > coverage[j]}
        concepts.append(max(added, key=lambda j: (added[j], -strongest[best_patch].index(j))))
        for j in added:
            coverage[j] = sparse[best_patch][j]
            covered_by[j] = best_patch
        picks.append(best_patch)
        gains.append(best_gain)
        roles.append("primary")
    for i in sorted((i for i in range(len(z)) if i not in picks), key=lambda i: (-peaks[i], i))[: budget - len(picks)]:
        picks.append(i)
        gains.append(0.0)
        concepts.append(strongest[i][0] if strongest[i] else -1)
        roles.append("padding")
    assigned = [i if i in picks else covered_by[top[0]] if top else -1 for i, top in enumerate(strongest)]
    return picks, gains, concepts, roles, assigned


def dense(vocabulary: int = 7, most: int = 12) -> st.SearchStrategy[Dense]:
    """Draw activations with many zeros and ties, all exact in float32."""
    number = st.one_of(st.just(0), st.just(0), st.integers(0, 3), st.integers(0, 64)).map(lambda v: v / 8)
    row = st.one_of(st.lists(number, min_size=vocabulary, max_size=vocabulary), st.just([0.0] * vocabulary))
    return st.lists(row, min_size=1, max_size=most)


@pytest.mark.parametrize("coverage", ["max", "binary"])
@pytest.mark.parametrize("order", ["raster", "native"])
def test_equals_reference(coverage: Any, order: Any) -> None:
    @given(dense(), st.integers(1, 12), st.integers(1, 7))
    def check(z: Dense, budget: int, m: int) -> None:
        budget = min(budget, len(z))
        plan = plan_of(z, budget, m=m, coverage=coverage, order=order)
        picks, gains, concepts, roles, assigned = reference_scts(z, budget, m, coverage == "binary")
        place = sorted(range(budget), key=lambda t: picks[t]) if order == "raster" else list(range(budget))
        assert plan.is_pruning
        assert plan.anchor.tolist() == plan.sources.tolist() == [picks[t] for t in place]
        assert plan.score.tolist() == [gains[t] for t in place]
        assert plan.concept.tolist() == [concepts[t] for t in place]
        assert list(plan.role) == [roles[t] for t in place]
        kept = plan.anchor.tolist()
        assert plan.assigned.tolist() == [kept.index(i) if i >= 0 else -1 for i in assigned]

    check()


def test_equals_reference_with_an_sae() -> None:
    generator = torch.Generator().manual_seed(0)
    for kind, threshold in (("relu", None), ("matryoshka", 0.4)):
        sae = SAE(torch.randn(96, 16, generator=generator) / 4, kind=kind, threshold=threshold)
        for image in sample_tokens(16)[:2]:
            z = sae.encode(image.patches).tolist()
            for budget in (3, 15):
                plan = SCTS(sae, budget, m=20, order="native").plan(image)
                picks, gains, concepts, roles, _ = reference_scts(z, budget, 20, binary=False)
                assert plan.anchor.tolist() == picks
                assert torch.allclose(plan.score, torch.tensor(gains), atol=1e-5)
                assert plan.concept.tolist() == concepts
                assert list(plan.role) == roles


# ---------------------------------------------------------------------- small examples


def test_worked_example() -> None:
    #       dog  cat  sky
    z = [
        [4.0, 0.0, 1.0],  # 0: first, gain 5
        [5.0, 0.0, 0.0],  # 1: only 1 more of dog
        [0.0, 2.0, 0.0],  # 2: second, all of it is new
        [0.0, 1.0, 2.0],  # 3: then 1 more of sky
        [0.0, 0.0, 0.0],
    ]
    plan = plan_of(z, 4, order="native")
    assert plan.anchor.tolist() == [0, 2, 1, 3]  # 1 and 3 both gain 1: the lower index first
    assert plan.score.tolist() == [5.0, 2.0, 1.0, 1.0]
    assert plan.concept.tolist() == [0, 1, 0, 2]
    assert plan.assigned.tolist() == [0, 2, 1, 3, -1]
    fewer = plan_of(z, 2)
    assert fewer.anchor.tolist() == [0, 2]
    assert fewer.assigned.tolist() == [0, 0, 1, 0, -1]  # 0 covers dog and sky; the silent patch is not assigned


def test_binary_coverage_counts_concepts() -> None:
    z = [[9.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 3.0]]
    assert plan_of(z, 2, order="native").anchor.tolist() == [0, 2]
    binary = plan_of(z, 3, coverage="binary", order="native")
    assert binary.anchor.tolist() == [1, 2, 0]
    assert binary.score.tolist() == [2.0, 1.0, 0.0]
    assert binary.role == ("primary", "primary", "padding")
    assert binary.concept.tolist() == [0, 2, 0]


def test_identical_patches_gain_once() -> None:
    plan = plan_of([[1.0, 2.0]] * 6, 3, order="native")
    assert plan.anchor.tolist() == [0, 1, 2]
    assert plan.role == ("primary", "padding", "padding")
    assert plan.score.tolist() == [3.0, 0.0, 0.0]
    assert plan.assigned.tolist() == [0, 1, 2, 0, 0, 0]


def test_one_patch_of_each_cluster_is_selected_first() -> None:
    generator = torch.Generator().manual_seed(3)
    cluster = torch.arange(40) % 4
    patches = torch.eye(4)[cluster] * (1 + torch.rand(40, 1, generator=generator))
    image = VisualTokens(patches, (5, 8))
    kept = SCTS(RawEmbedding(), 4, m=4, order="native").plan(image)
    assert sorted(cluster[kept.anchor].tolist()) == [0, 1, 2, 3]
    for group in range(4):  # the strongest patch of each cluster covers it completely
        assert int(kept.anchor[kept.concept == group]) == int((patches[:, group]).argmax())
        assert (kept.concept[kept.assigned[cluster == group]] == group).all()
    assert SCTS(RawEmbedding(), 9, m=4).plan(image).role.count("padding") == 5


def test_padding_is_by_peak() -> None:
    z = [[1.0, 0.0], [3.0, 2.0], [2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]
    plan = plan_of(z, 4, order="native")
    assert plan.anchor.tolist() == [1, 2, 3, 0]
    assert plan.role == ("primary", "padding", "padding", "padding")
    assert plan.concept.tolist() == [0, 0, 1, 0]


def test_all_silent() -> None:
    plan = plan_of([[0.0, 0.0]] * 4, 3)
    assert plan.anchor.tolist() == [0, 1, 2]
    assert plan.role == ("padding",) * 3
    assert plan.concept.tolist() == [-1] * 3
    assert plan.assigned.tolist() == [0, 1, 2, -1]


def test_negative_coordinates_are_inactive() -> None:
    patches = torch.tensor([[-1.0, -2.0], [-3.0, 1.0], [-1.0, -1.0]])
    plan = SCTS(RawEmbedding(), 2, m=2, order="native").plan(VisualTokens(patches, (1, 3)))
    assert plan.anchor.tolist() == [1, 0]
    assert plan.score.tolist() == [1.0, 0.0]
    assert plan.assigned.tolist() == [1, 0, -1]


def test_budget_of_all_patches_is_the_identity() -> None:
    for image in sample_tokens(16):
        plan = SCTS(RawEmbedding(), len(image), m=8).plan(image)
        assert torch.equal(plan.apply(image.patches), image.patches)
        assert plan.assigned.tolist() == list(range(len(image)))


def test_m_limits_the_number_of_latents() -> None:
    z = [[3.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 2.5, 0.0]]
    assert plan_of(z, 1, m=3).anchor.tolist() == [0]
    assert plan_of(z, 2, m=1, order="native").score.tolist() == [3.0, 2.5]


def test_permutation_equivariance() -> None:
    generator = torch.Generator().manual_seed(4)
    patches = torch.randn(60, 16, generator=generator)
    shuffle = torch.randperm(60, generator=generator)
    reducer = SCTS(RawEmbedding(), 25, m=6, order="native")
    first = reducer.plan(VisualTokens(patches, (6, 10)))
    second = reducer.plan(VisualTokens(patches[shuffle], (6, 10)))
    assert shuffle[second.anchor].tolist() == first.anchor.tolist()
    assert second.concept.tolist() == first.concept.tolist()


def test_gains_decrease() -> None:
    image = sample_tokens(16)[0]
    score = SCTS(RawEmbedding(), 40, m=8, order="native").plan(image).score
    assert (score.diff() <= 1e-6).all()


# ---------------------------------------------------------------------- contract and errors


def test_batch_is_encoded_once() -> None:
    planted = Planted([[float(i % 3), float(i % 5)] for i in range(12)])
    reducer = SCTS(planted, 3, m=2)
    batch = reducer.plan_batch([planted.tokens(0, 5), planted.tokens(5, 12)])
    assert planted.calls == [12]
    assert batch[1].anchor.tolist() == reducer.plan(planted.tokens(5, 12)).anchor.tolist()


@pytest.mark.parametrize(
    "setting",
    [
        {"budget": 5},
        {"budget": 1},
        {"budget": 15, "order": "native"},
        {"budget": 64},
        {"budget": 7, "coverage": "binary"},
    ],
    ids=str,
)
@pytest.mark.parametrize("encoder", ["sae", "raw"])
def test_contract(encoder: str, setting: dict[str, Any]) -> None:
    weight = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
    sae = SAE(weight, kind="jumprelu", threshold=3.0) if encoder == "sae" else RawEmbedding()
    check_reducer(make("scts", sae=sae, m=12, **setting))


def test_errors() -> None:
    raw: Any = RawEmbedding()
    for arguments, words in (
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": 2, "m": 0}, "m must be a whole number of at least 1, got 0"),
        ({"budget": 2, "coverage": "sum"}, "coverage must be one of 'max', 'binary', got 'sum'"),
        ({"budget": 2, "order": "snake"}, "order must be one of 'raster', 'native'"),
        ({"budget": 2, "sae": RawEmbedding}, r"sae must be an SAE or RawEmbedding\(\)"),
    ):
        with pytest.raises(BadParameter, match=words):
            SCTS(**{"sae": raw, **arguments})
    with pytest.raises(BadParameter, match="scts needs sae"):
        make("scts", budget=3)
    image = VisualTokens(torch.ones(4, 2), (2, 2))
    with pytest.raises(UnmetBudget, match="scts cannot give 5 tokens: the image has only 4 patches"):
        SCTS(raw, 5, m=1).plan(image)
    with pytest.raises(BadParameter, match="between 1 and the token width 2, got 20"):
        SCTS(raw, 2).plan(image)
    with pytest.raises(SAEMismatch):
        SCTS(SAE(torch.ones(4, 3)), 2).plan(image)
