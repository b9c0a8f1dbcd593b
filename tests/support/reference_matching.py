"""Reference implementation of bipartite soft matching with plain loops and an explicit CLS token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torino import Reduction, VisualTokens
from torino.testing import sample_tokens

Vector = list[float]


def f32(value: float) -> float:
    return float(np.float32(value))


def cosine(a: Vector, b: Vector) -> float:
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return f32(sum(x * y for x, y in zip(a, b, strict=True)) / lengths) if lengths else 0.0


@dataclass
class Token:
    """One token of the sequence: its position on the grid (-1 for CLS), its patches and its values."""

    place: int
    metric: Vector
    feature: Vector
    size: float = 1.0
    attention: float = 0.0
    members: list[int] = field(default_factory=list)


def sequence(metric: Any, features: Any, cls: bool, attention: Any = None) -> list[Token]:
    """Return the tokens of an image, CLS first if there is one. Its values must not matter, so they are arbitrary."""
    shares = [0.0] * len(metric) if attention is None else attention.tolist()
    rows = zip(metric.tolist(), features.tolist(), shares, strict=True)
    tokens = [Token(place, m, f, 1.0, a, [place]) for place, (m, f, a) in enumerate(rows)]
    return [Token(-1, [7.0] * len(tokens[0].metric), [99.0] * len(tokens[0].feature)), *tokens] if cls else tokens


def average(values: list[Vector], weights: list[float]) -> Vector:
    return [sum(w * v[i] for v, w in zip(values, weights, strict=True)) / sum(weights) for i in range(len(values[0]))]


def step(tokens: list[Token], r: int, *, in_place_order: bool, penalty: float = 0.0) -> list[Token]:
    """Run one bipartite matching step that removes r tokens."""
    has_cls = tokens[0].place == -1
    evens, odds = range(0, len(tokens), 2), range(1, len(tokens), 2)
    matches: list[tuple[float, int, int]] = []  # negative score, source, target
    for a in evens:
        best, target = -math.inf, -1
        for b in odds:
            similarity = cosine(tokens[a].metric, tokens[b].metric)
            if similarity > best:
                best, target = similarity, b
        score = f32(best - penalty * tokens[a].attention)
        if has_cls and a == 0:
            score = -math.inf
        matches.append((-score, a, target))
    matches.sort()
    merged = {a: b for _, a, b in matches[:r]}
    assert not has_cls or 0 not in merged

    after: dict[int, Token] = {}
    for position, token in enumerate(tokens):
        if position in merged:
            continue
        group = [token, *[tokens[a] for a, b in merged.items() if b == position]]
        sizes = [t.size for t in group]
        after[position] = Token(
            token.place,
            average([t.metric for t in group], sizes),
            average([t.feature for t in group], sizes),
            sum(sizes),
            sum(t.attention for t in group) / len(group),
            sorted(patch for t in group for patch in t.members),
        )
    if in_place_order:
        return list(after.values())
    left = [a for _, a, _ in matches[r:]]
    return [after[position] for position in [*(sorted(left) if has_cls else left), *odds]]


def drop_cls(tokens: list[Token]) -> list[Token]:
    return [token for token in tokens if token.place >= 0]


def assert_same_tokens(plan: Reduction, expected: list[Token], tokens: VisualTokens, scale: bool = False) -> None:
    """Assert that a plan has the given tokens in this order, with the same members, weights and features."""
    assert plan.anchor.tolist() == [token.place for token in expected]
    for row, token in enumerate(expected):
        entries = slice(int(plan.offsets[row]), int(plan.offsets[row + 1]))
        factor = 1 + math.log(token.size) if scale else 1.0
        assert plan.sources[entries].tolist() == token.members
        assert plan.weights[entries].tolist() == [f32(factor / token.size)] * len(token.members)
        assert all(int(plan.assigned[patch]) == row for patch in token.members)
        feature = factor * torch.tensor(token.feature)
        torch.testing.assert_close(plan.apply(tokens.patches)[row], feature, rtol=1e-4, atol=1e-5)


def random_tokens(seed: int, grid: tuple[int, int], kind: str, width: int = 6) -> VisualTokens:
    """Return tokens with all signals of the merging methods: random, tied (few distinct vectors) or degenerate."""
    generator = torch.Generator().manual_seed(seed)
    n = grid[0] * grid[1]

    def make(*shape: int) -> torch.Tensor:
        if kind == "random":
            return torch.randn(*shape, generator=generator)
        few = torch.randint(-1, 2, (4, shape[-1]), generator=generator).float()
        if kind == "degenerate":
            few[:] = few[0]
            few[2:] = 0
        return few[torch.randint(4, shape[:-1], generator=generator)]

    def share(*shape: int) -> torch.Tensor:
        if kind == "random":
            return torch.randn(*shape, generator=generator).softmax(-1)
        # powers of two, so that sums in any order are the same and equal values tie
        return 2.0 ** -torch.randint(3, 6 if kind == "tied" else 4, shape, generator=generator).float()

    return VisualTokens(
        make(n, width),
        grid,
        cls=make(1, width)[0],
        cls_attention=share(2, n),
        keys=make(n, 8),
        signals={"head_keys": make(n, 4), "attention": share(2, n, n), "projected": make(n, 10)},
    )


def contract_images() -> list[VisualTokens]:
    """Return the images of sample_tokens with the signals of the merging methods."""
    generator = torch.Generator().manual_seed(3)
    return [
        image.with_(
            signals={
                "head_keys": torch.randn(len(image), 4, generator=generator),
                "projected": torch.randn(len(image), 12, generator=generator),
                "attention": torch.randn(2, len(image), len(image), generator=generator).softmax(-1),
            }
        )
        for image in sample_tokens()
    ]


def groups(plan: Reduction) -> set[frozenset[int]]:
    """Return the sets of patches that became one token, independent of the order of the tokens."""
    return {frozenset((plan.assigned == row).nonzero()[:, 0].tolist()) for row in range(len(plan))}
