"""ApET: small examples and a slow transcription of the published rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torino import VisualTokens
from torino.core.errors import BadParameter, UnmetBudget
from torino.reducers.apet import ApET, farthest_points
from torino.reducers.random import image_seed


def reference(patches: Tensor, basis_size: int, budget: int, start: int) -> tuple[list[int], list[list[int]]]:
    """Return the kept patches (basis first, then by error) and what is merged into each."""
    x = patches.double()
    n = len(x)
    basis = [start]
    while len(basis) < min(basis_size, budget):
        distances = [min(float(((x[i] - x[b]) ** 2).sum()) for b in basis) for i in range(n)]
        best = max(range(n), key=lambda i: (distances[i], -i))
        if distances[best] == 0:
            break
        basis.append(best)
    stacked = torch.cat([x[basis].T, 1e-5**0.5 * torch.eye(len(basis), dtype=torch.float64)])
    errors = []
    for i in range(n):
        target = torch.cat([x[i], torch.zeros(len(basis), dtype=torch.float64)])
        w = torch.linalg.lstsq(stacked, target[:, None], driver="gelsd").solution[:, 0]
        errors.append(round(float((x[i] - x[basis].T @ w).norm()), 9))
    others = sorted((i for i in range(n) if i not in basis), key=lambda i: (-errors[i], i))
    kept = basis + others[: budget - len(basis)]
    merged: list[list[int]] = [[patch] for patch in kept]
    for i in range(n):
        if i not in kept:
            cosines = [round(float(torch.cosine_similarity(x[i], x[k], dim=0, eps=1e-300)), 9) for k in kept]
            merged[cosines.index(max(cosines))].append(i)
    return kept, merged


@pytest.mark.parametrize("seed", range(5))
def test_equals_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for n, width, basis, budget in ((12, 6, 3, 5), (20, 8, 10, 12), (9, 30, 4, 2), (15, 4, 2, 15)):
        patches = torch.randn(n, width, generator=generator)
        tokens = VisualTokens(patches, (1, n))
        start = image_seed(f"{seed} (1, {n})", patches) % n
        kept, merged = reference(patches, basis, budget, start)
        plan = ApET(budget, basis=basis, seed=seed, order="native").plan(tokens)
        assert plan.anchor.tolist() == kept
        for token, members in enumerate(merged):
            assert (plan.assigned == token).nonzero()[:, 0].tolist() == sorted(members)
            assert torch.allclose(plan.apply(patches)[token], patches[members].mean(0), atol=1e-6)
        assert plan.role.count("basis") == min(basis, budget)


def test_repeated_patches_shorten_the_basis() -> None:
    assert farthest_points(torch.ones(5, 2).double().numpy(), 3, 2).tolist() == [2]
    plan = ApET(4).plan(VisualTokens(torch.ones(6, 2), (2, 3)))
    assert len(plan) == 4
    assert plan.role.count("basis") == 1


def test_patches_outside_the_span_are_kept() -> None:
    patches = torch.cat([torch.eye(2, 4).repeat(4, 1), torch.tensor([[0.0, 0.0, 3.0, 0.0]])])
    plan = ApET(3, basis=1).plan(VisualTokens(patches, (3, 3)))
    assert 8 in plan.anchor.tolist()


def test_zeros_and_wrong_arguments() -> None:
    assert len(ApET(3).plan(VisualTokens(torch.zeros(6, 2), (2, 3)))) == 3
    with pytest.raises(UnmetBudget):
        ApET(7).plan(VisualTokens(torch.zeros(6, 2), (2, 3)))
    with pytest.raises(BadParameter, match="basis"):
        ApET(3, basis=0)
