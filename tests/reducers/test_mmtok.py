"""MMTok: a worked case and a slow transcription of the rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torino import VisualTokens, make
from torino.core.errors import BadParameter, MissingSignal


def slow_cosine(a: list[float], b: list[float]) -> float:
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def slow_softmax(values: list[float], temperature: float) -> list[float]:
    powers = [math.exp((value - max(values)) / temperature) for value in values]
    return [power / sum(powers) for power in powers]


def slow_mmtok(patches: Tensor, projected: Tensor, words: Tensor, budget: int) -> list[int]:
    """Greedy facility location over the rows of P and of half of Q, one value at a time."""
    x, p, t = patches.tolist(), projected.tolist(), words.tolist()
    rows = [[value / len(t) for value in slow_softmax([slow_cosine(word, q) for q in p], 0.02)] for word in t]
    rows += [[0.5 * value / len(x) for value in slow_softmax([slow_cosine(a, b) for b in x], 0.2)] for a in x]
    kept: list[int] = []
    best = [0.0] * len(rows)
    while len(kept) < budget:
        gains = [
            -1.0 if j in kept else sum(max(0.0, row[j] - now) for row, now in zip(rows, best, strict=True))
            for j in range(len(x))
        ]
        kept.append(gains.index(max(gains)))
        best = [max(now, row[kept[-1]]) for row, now in zip(rows, best, strict=True)]
    return kept


def tokens(patches: Tensor, projected: Tensor, words: Tensor) -> VisualTokens:
    return VisualTokens(patches, (1, len(patches)), signals={"projected": projected, "words": words})


def test_equals_the_slow_transcription() -> None:
    for seed in range(30):
        source = torch.Generator().manual_seed(seed)
        n, m = 5 + seed % 9, 1 + seed % 4
        patches, projected, words = (torch.randn(k, d, generator=source) for k, d in ((n, 6), (n, 4), (m, 4)))
        budget = 1 + seed % n
        plan = make("mmtok", budget=budget, order="native").plan(tokens(patches, projected, words))
        assert plan.anchor.tolist() == slow_mmtok(patches, projected, words, budget)
        raster = make("mmtok", budget=budget).plan(tokens(patches, projected, words))
        assert raster.anchor.tolist() == sorted(plan.anchor.tolist())


def test_ties_go_to_the_lowest_index() -> None:
    same = torch.ones(6, 3)
    plan = make("mmtok", budget=4, order="native").plan(tokens(same, same, torch.ones(2, 3)))
    assert plan.anchor.tolist() == [0, 1, 2, 3]
    zero = torch.zeros(6, 3)
    assert make("mmtok", budget=6).plan(tokens(same, zero, zero)).anchor.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_word_selects_the_patch_it_names() -> None:
    patches = torch.eye(8)
    for patch in range(8):
        plan = make("mmtok", budget=1).plan(tokens(patches, patches, patches[patch : patch + 1]))
        assert plan.anchor.tolist() == [patch]


def test_wrong_input_is_refused() -> None:
    patches = torch.eye(4)
    with pytest.raises(MissingSignal, match="selects patches for a question, and these tokens have none"):
        make("mmtok", budget=2).plan(VisualTokens(patches, (2, 2), signals={"projected": patches}))
    with pytest.raises(MissingSignal, match="have none"):
        make("mmtok", budget=2).plan(tokens(patches, patches, patches[:0]))
    with pytest.raises(BadParameter, match="text_temperature must be above 0, got 0"):
        make("mmtok", budget=2, text_temperature=0)
