"""RESTORE: small examples and a slow transcription of the published rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torino import VisualTokens
from torino.core.errors import BadParameter, UnmetBudget
from torino.reducers import make
from torino.reducers.restore import Restore


def reference(patches: Tensor, kept: list[int], count: int) -> dict[int, list[int]]:
    """Return the anchors among the patches that are not kept, with the patches merged into each."""
    x = patches.double()
    rest = [i for i in range(len(x)) if i not in kept]

    def cosine(i: int, j: int) -> float:
        length = float(x[i].norm() * x[j].norm())
        return round(float(x[i] @ x[j]) / length, 10) if length else float(i == j)

    density = {i: sum(cosine(i, j) for j in rest) for i in rest}
    score = {}
    for i in rest:
        denser = [cosine(i, j) for j in rest if density[j] > density[i] + 1e-12]
        score[i] = density[i] * (1 - max(denser)) if denser else density[i]
    anchors = sorted(sorted(rest, key=lambda i: (-round(score[i], 8), i))[:count])
    merged = {anchor: [anchor] for anchor in anchors}
    for i in rest:
        if i not in anchors:
            cosines = [cosine(i, anchor) for anchor in anchors]
            merged[anchors[cosines.index(max(cosines))]].append(i)
    return merged


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pruner", ["random", "divprune"])
def test_equals_reference(seed: int, pruner: str) -> None:
    patches = torch.randn(20, 7, generator=torch.Generator().manual_seed(seed))
    tokens = VisualTokens(patches, (4, 5))
    for budget in (2, 5, 12, 20):
        kept = make(pruner, budget=budget // 2).plan(tokens).sources.tolist()
        merged = reference(patches, kept, budget - budget // 2)
        plan = Restore(budget, pruner=pruner).plan(tokens)
        assert plan.anchor.tolist() == sorted([*kept, *merged])
        for token, anchor in enumerate(plan.anchor.tolist()):
            members = sorted(merged.get(anchor, [anchor]))
            assert (plan.assigned == token).nonzero()[:, 0].tolist() == members
            assert torch.allclose(plan.apply(patches)[token], patches[members].mean(0), atol=1e-6)
        native = Restore(budget, pruner=pruner, order="native").plan(tokens)
        first = [int((native.assigned == token).nonzero()[0]) for token in range(budget)]
        assert first == sorted(first)


def test_one_token_is_the_mean() -> None:
    patches = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    plan = Restore(1, pruner="random").plan(VisualTokens(patches, (2, 3)))
    assert torch.allclose(plan.apply(patches)[0], patches.mean(0), atol=1e-6)


def test_degenerate_images() -> None:
    for patches in (torch.zeros(12, 3), torch.ones(12, 3)):
        for budget in (1, 2, 7, 12):
            assert len(Restore(budget, pruner="divprune").plan(VisualTokens(patches, (3, 4)))) == budget


def test_needs_are_those_of_the_pruner() -> None:
    assert Restore(4).needs == {"cls_attention"}
    assert Restore(4, pruner="divprune").needs == frozenset()


@pytest.mark.parametrize("pruner", ["tome", "restore", "random(budget=3)", "tome-tower", "prunesid"])
def test_only_pruners(pruner: str) -> None:
    with pytest.raises(BadParameter, match="keeps patches as they are"):
        Restore(4, pruner=pruner)


def test_too_many_tokens() -> None:
    with pytest.raises(UnmetBudget):
        Restore(13, pruner="random").plan(VisualTokens(torch.ones(12, 3), (3, 4)))
