"""LLaVA-Scissor: small examples and a slow transcription of the published rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torino import VisualTokens
from torino.core.errors import BadParameter, UnmetBudget
from torino.reducers.scissor import Scissor


def cosine(a: Tensor, b: Tensor) -> float:
    length = float(a.norm() * b.norm())
    return round(float(a @ b) / length, 9) if length else 0.0


def components(rows: list[Tensor], tau: float) -> list[list[int]]:
    """Return connected components by searching from each row in turn."""
    found: list[list[int]] = []
    for first in range(len(rows)):
        if any(first in group for group in found):
            continue
        group, frontier = [first], [first]
        while frontier:
            here = frontier.pop()
            for other in range(len(rows)):
                if other not in group and cosine(rows[here], rows[other]) > tau:
                    group.append(other)
                    frontier.append(other)
        found.append(sorted(group))
    return found


def reference(patches: Tensor, tau: float) -> list[tuple[list[int], Tensor]]:
    """Return the patches that join each token, and its value, by the first patch of each component."""
    rows = list(patches.double())
    means = [torch.stack([rows[i] for i in group]).mean(0) for group in components(rows, tau)]
    means = [torch.stack([means[i] for i in group]).mean(0) for group in components(means, tau)]
    joined: list[list[int]] = [[] for _ in means]
    for number, row in enumerate(rows):
        cosines = [round(cosine(row, mean), 6) for mean in means]
        joined[cosines.index(max(cosines))].append(number)
    return [
        (members, (mean + sum(rows[i] for i in members)) / (len(members) + 1))
        for members, mean in zip(joined, means, strict=True)
        if members
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tau", [0.3, 0.7, 0.9])
def test_equals_reference(seed: int, tau: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(4, 5, generator=generator)
    patches = centers[torch.randint(4, (21,), generator=generator)] + 0.3 * torch.randn(21, 5, generator=generator)
    expected = reference(patches, tau)
    plan = Scissor(tau=tau, order="native").plan(VisualTokens(patches, (3, 7)))
    assert len(plan) == len(expected)
    for token, (members, value) in enumerate(expected):
        assert (plan.assigned == token).nonzero()[:, 0].tolist() == members
        assert torch.allclose(plan.apply(patches)[token].double(), value, atol=1e-5)


def test_components_are_transitive() -> None:
    angle = torch.linspace(0, 1.2, 7)  # neighbors are similar, the ends are not
    patches = torch.stack([angle.cos(), angle.sin()], 1)
    assert len(Scissor(tau=0.95).plan(VisualTokens(patches, (1, 7)))) == 1
    assert len(Scissor(tau=0.99).plan(VisualTokens(patches, (1, 7)))) == 7


@pytest.mark.parametrize("seed", range(4))
def test_budget_links_the_most_similar_first(seed: int) -> None:
    patches = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed)).double()
    values = sorted((cosine(patches[i], patches[j]) for i in range(16) for j in range(i)), reverse=True)
    for budget in (1, 3, 8, 15, 16):
        plan = Scissor(budget).plan(VisualTokens(patches, (4, 4)))
        assert len(plan) == budget
        thresholds = [tau for tau in values if len(components(list(patches), tau)) == budget]
        if thresholds:  # the members of a component are averaged into one token, beside the patches that joined it
            groups = components(list(patches), thresholds[0])
            means = torch.stack([patches[group].mean(0) for group in groups])
            joined = torch.nn.functional.normalize(patches, dim=1) @ torch.nn.functional.normalize(means, dim=1).T
            counts = joined.argmax(1).bincount(minlength=budget)
            assert sorted(plan.score.tolist()) == sorted(counts.tolist())


def test_degenerate_images() -> None:
    for patches in (torch.zeros(12, 3), torch.ones(12, 3)):
        for budget in (None, 1, 5, 12):
            plan = Scissor(budget).plan(VisualTokens(patches, (3, 4)))
            assert budget is None or len(plan) == budget
            assert len(set(plan.anchor.tolist())) == len(plan)
            assert torch.allclose(plan.apply(patches), patches[: len(plan)], atol=1e-6)


def test_wrong_arguments() -> None:
    with pytest.raises(BadParameter, match="tau"):
        Scissor(tau=1.5)
    with pytest.raises(UnmetBudget):
        Scissor(13).plan(VisualTokens(torch.ones(12, 3), (3, 4)))
