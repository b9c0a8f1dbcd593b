"""Random: uniform draws that depend on the image and the seed, not on the batch."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from itertools import combinations, pairwise
from math import sqrt

import numpy as np
import pytest
import torch

from torino import VisualTokens
from torino.core.errors import BadParameter, UnmetBudget
from torino.reducers import get, make
from torino.reducers.random import Random, fingerprint
from torino.testing import check_reducer, same_plan, sample_tokens


def image(seed: int, n: int = 12, width: int = 16) -> VisualTokens:
    generator = torch.Generator().manual_seed(seed)
    return VisualTokens(torch.randn(n, width, generator=generator), (1, n))


def drawn(patches: list[list[float]], grid: tuple[int, int], seed: int) -> list[int]:
    """The rule in plain Python: what the seed of an image is made of, and the draw in its order."""
    n = len(patches)
    count = min(n, 16)
    codes = []
    for k in range(count):
        row = patches[k * n // count]
        total = sum(value if d % 2 == 0 else -value for d, value in enumerate(row))
        norm = sqrt(sum(value * value for value in row))
        codes.append(round(total / norm * 4) if norm else 0)
    data = f"{seed} {grid}".encode() + b"".join(code.to_bytes(8, "little", signed=True) for code in codes)
    number = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    return torch.randperm(n, generator=torch.Generator().manual_seed(number)).tolist()


@pytest.mark.parametrize("n", [1, 2, 5, 16, 17, 100, 576])
def test_equals_the_plain_rule(n: int) -> None:
    for seed in range(4):
        tokens = image(seed, n)
        expected = drawn(tokens.patches.double().tolist(), tokens.grid, seed)
        for budget in sorted({1, (n + 1) // 2, n}):
            native = Random(budget, seed=seed, order="native").plan(tokens)
            assert native.sources.tolist() == expected[:budget]
            assert Random(budget, seed=seed).plan(tokens).sources.tolist() == sorted(expected[:budget])


def test_every_subset_is_as_likely_as_the_others() -> None:
    kept = Counter(tuple(Random(2).plan(image(seed, 4)).sources.tolist()) for seed in range(1200))
    assert set(kept) == set(combinations(range(4), 2))
    chi_square = sum((count - 200) ** 2 / 200 for count in kept.values())
    assert chi_square < 20.5  # five degrees of freedom: exceeded once in a thousand
    tokens = image(0, 4)
    kept = Counter(tuple(Random(2, seed=seed).plan(tokens).sources.tolist()) for seed in range(1200))
    assert sum((count - 200) ** 2 / 200 for count in kept.values()) < 20.5


def test_smaller_draw_is_a_subset_of_a_larger_one() -> None:
    tokens = image(3, 40)
    draws = [set(Random(budget).plan(tokens).sources.tolist()) for budget in range(1, 41)]
    assert all(small < large for small, large in pairwise(draws))


def test_draw_depends_only_on_image_and_seed() -> None:
    images = [image(seed, 64) for seed in range(6)]
    single = [Random(16).plan(tokens) for tokens in images]
    assert len({tuple(plan.sources.tolist()) for plan in single}) == 6
    for batched, plan in zip(Random(16).plan_batch(images[::-1]), single[::-1], strict=True):
        assert same_plan(batched, plan)
    others = [Random(16, seed=1).plan(tokens) for tokens in images]
    assert all(plan.sources.tolist() != other.sources.tolist() for plan, other in zip(single, others, strict=True))
    on_another_grid = Random(16).plan(images[0].with_(grid=(8, 8)))
    assert on_another_grid.sources.tolist() != single[0].sources.tolist()


def test_rounding_errors_rarely_change_the_draw() -> None:
    same = 0
    for seed in range(100):
        patches = image(seed, 64, 256).patches
        noisy = patches * (1 + 1e-6 * torch.randn(patches.shape, generator=torch.Generator().manual_seed(seed)))
        assert not torch.equal(noisy, patches)
        same += fingerprint(noisy) == fingerprint(patches)
    assert same >= 97


def test_no_permutation_equivariance() -> None:
    tokens = image(1, 64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(9))
    permuted = Random(16).plan(tokens.with_(patches=tokens.patches[order]))
    assert set(order[permuted.sources].tolist()) != set(Random(16).plan(tokens).sources.tolist())


@pytest.mark.parametrize("value", [0.0, 1.0, 1e30, 1e-40, -3.0])
def test_identical_tokens(value: float) -> None:
    plan = Random(5).plan(VisualTokens(torch.full((20, 8), value), (4, 5)))
    assert len(set(plan.sources.tolist())) == 5
    assert plan.score.isnan().all()


def test_budgets_of_all_patches_and_of_one() -> None:
    tokens = image(0, 9)
    assert Random(9).plan(tokens).sources.tolist() == list(range(9))
    assert len(Random(1).plan(tokens)) == 1
    assert Random(1).plan(image(0, 1)).sources.tolist() == [0]


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("budget", [1, 2, 7, 15, 16, 64])
def test_contract(budget: int, order: str) -> None:
    check_reducer(make(f"random(budget={budget}, order={order!r})"))
    check_reducer(make("random", budget=budget, order=order, seed=-5))


def test_accepts_other_dtypes_and_gradients() -> None:
    tokens = sample_tokens()[0]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert len(Random(3).plan(tokens.with_(patches=tokens.patches.to(dtype)))) == 3
    assert len(Random(3).plan(tokens.with_(patches=tokens.patches.clone().requires_grad_()))) == 3


def test_errors() -> None:
    for budget in (0, -1, 2.0, True, None, np.int64(0), np.float64(3)):
        with pytest.raises(BadParameter, match="budget must be a whole number of at least 1, got"):
            Random(budget)  # type: ignore[arg-type]
    for seed in (1.5, None, True):
        with pytest.raises(BadParameter, match="seed must be a whole number, got"):
            Random(3, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="order must be one of 'raster', 'native', got 'spiral'"):
        Random(3, order="spiral")  # type: ignore[arg-type]
    with pytest.raises(UnmetBudget, match="random cannot give 13 tokens: the image has only 12 patches"):
        Random(13).plan(image(0))
    with pytest.raises(BadParameter, match="random needs budget"):
        make("random")


def test_class_attributes() -> None:
    assert get("random") is Random
    assert Random(3, seed=2).spec == "random(budget=3, seed=2)"
    assert (Random.merges, Random.adaptive, Random.emits_cls, Random.needs) == (False, False, False, frozenset())
