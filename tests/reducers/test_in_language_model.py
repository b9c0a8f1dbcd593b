"""FastV, PyramidDrop and DART: their rules by hand, their stages, and methods joined by ``+``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torino import RawEmbedding, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnknownName, UnmetBudget
from torino.evaluation.protocol import own_settings, split_specs
from torino.reducers import Composed, KeepShare, TorinoX, split_reducer
from torino.reducers.in_language_model import LanguageModelReducer, layer_averaged, tokens_by_block
from torino.serving.settings import ReductionSettings, check_servable

METHODS = ("fastv", "pyramiddrop", "dart")


def build(spec: str) -> LanguageModelReducer:
    reducer = make(spec)
    assert isinstance(reducer, LanguageModelReducer)
    return reducer


def select(spec: str, count: int, **signals: Tensor) -> tuple[list[int], list[float]]:
    kept, score = build(spec).select(signals, count)
    return kept.tolist(), score.tolist()


# ---------------------------------------------------------------------- rules


@pytest.mark.parametrize(("method", "signal"), [("fastv", "attention"), ("pyramiddrop", "next_attention")])
def test_highest_mean_attention(method: str, signal: str) -> None:
    attention = torch.tensor([[0.4, 0.0, 0.1, 0.2], [0.0, 0.1, 0.4, 0.2]])  # means 0.2, 0.05, 0.25, 0.2
    assert build(f"{method}(budget=1)").reads == {signal}
    kept, score = select(f"{method}(budget=1)", 1, **{signal: attention})
    assert (kept, score) == ([2], [0.25])
    kept, score = select(f"{method}(budget=2)", 2, **{signal: attention})
    assert kept == [0, 2]  # a tie of tokens 0 and 3 goes to the first
    assert score == pytest.approx([0.2, 0.25])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_attention_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(BadTokens, match="NaN or infinite"):
        select("fastv(budget=1)", 1, attention=torch.tensor([[0.1, value]]))


def test_dart_by_hand() -> None:
    """The pivot is token 1; the text pivot is the second word. They choose one token each."""
    signals = {
        "keys": torch.tensor([[1.0, 0.0], [-3.0, 1.0], [0.0, 2.0], [2.0, 0.0], [1.0, 1.0]]),
        "text_keys": torch.tensor([[1.0, 0.0], [0.0, -5.0]]),
        "hidden": torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]]),
        "text_hidden": torch.tensor([[9.0, 9.0], [0.0, 1.0]]),
    }
    spec = "dart(budget=3, image_pivots=1, text_pivots=1)"
    # token 4 is least like the pivot (cosine -0.71); of the others, token 0 is least like the text pivot (0)
    kept, score = select(spec, 3, **signals)
    assert kept == [0, 1, 4]
    assert score == pytest.approx([0.0, 4.0, 0.5**0.5])
    assert select("dart(budget=2, image_pivots=1, text_pivots=1)", 2, **signals)[0] == [1, 4]  # pivots share the rest
    assert select("dart(budget=2, image_pivots=9)", 2, **signals)[0] == [1, 2]  # ties of the norm go to the first


@pytest.mark.parametrize("text", [0, 1, 9])
def test_dart_is_exact_with_any_number_of_words(text: int) -> None:
    generator = torch.Generator().manual_seed(text)
    signals = {
        "keys": torch.randn(20, 6, generator=generator),
        "hidden": torch.randn(20, 5, generator=generator),
        "text_keys": torch.randn(text, 6, generator=generator),
        "text_hidden": torch.randn(text, 5, generator=generator),
    }
    for count in range(1, 20):
        kept, score = select("dart(budget=1)", count, **signals)
        assert len(set(kept)) == count
        assert kept == sorted(kept)
        assert all(value == value for value in score)


def test_dart_on_equal_tokens() -> None:
    same = {name: torch.ones(6, 4) for name in ("keys", "hidden", "text_keys", "text_hidden")}
    assert select("dart(budget=5)", 5, **same)[0] == [0, 1, 2, 3, 4]
    zeros = {name: torch.zeros(6, 4) for name in same}
    assert select("dart(budget=5)", 5, **zeros)[0] == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- stages


def test_published_stages() -> None:
    for method in ("fastv", "dart"):
        assert build(f"{method}(budget=64)").stages(576, 32) == [(2, 64)]
        assert build(f"{method}(budget=64)").stages(576, 40) == [(2, 64)]  # as published for 13B
        assert build(f"{method}(budget=64, block=3)").stages(576, 32) == [(3, 64)]
    halved = build("pyramiddrop(budget=72)").stages(576, 32)
    assert halved == [(8, 288), (16, 144), (24, 72)]
    counts = tokens_by_block(576, halved, 32)
    assert counts == (576,) * 8 + (288,) * 8 + (144,) * 8 + (72,) * 8
    assert layer_averaged(counts) == 270
    assert layer_averaged(tokens_by_block(576, [(2, 64)], 32)) == (576 * 2 + 64 * 30) / 32  # the usual formula


@pytest.mark.parametrize("blocks", [2, 3, 4, 7, 24, 28, 32, 40, 80])
@pytest.mark.parametrize("method", METHODS)
def test_stages_of_any_depth(method: str, blocks: int) -> None:
    for tokens in (1, 2, 5, 100, 576):
        for budget in {1, 2, tokens // 2, tokens - 1, tokens}:
            if not 1 <= budget <= tokens:
                continue
            stages = build(f"{method}(budget={budget})").stages(tokens, blocks)
            depths, counts = [block for block, _ in stages], [tokens, *(count for _, count in stages)]
            assert depths == sorted(set(depths))
            assert 1 <= depths[0] <= depths[-1] < blocks
            assert counts == sorted(counts, reverse=True)
            assert counts[-1] == budget


def test_what_cannot_be_met() -> None:
    for method in METHODS:
        with pytest.raises(UnmetBudget, match="only 3 tokens in the language model"):
            build(f"{method}(budget=4)").stages(3, 8)
        with pytest.raises(BadParameter, match="has 1"):
            build(f"{method}(budget=2)").stages(3, 1)
        for wrong in ("0", "-1", "1.5", "None", "'a'"):
            with pytest.raises(BadParameter):
                make(f"{method}(budget={wrong})")
    for wrong in ("fastv(budget=1, block=0)", "dart(budget=1, image_pivots=0)", "dart(budget=1, text_pivots=-1)"):
        with pytest.raises(BadParameter):
            make(wrong)


# ---------------------------------------------------------------------- joined methods


def test_joined_methods() -> None:
    reducer = make(" torino-x(budget=64) + fastv(budget=32) ", sae=RawEmbedding())
    assert isinstance(reducer, Composed)
    assert isinstance(reducer.first, TorinoX)
    assert reducer.spec == repr(reducer) == f"{reducer.first.spec}+fastv(budget=32)"
    assert reducer.budget == 32
    assert make(reducer.spec, sae=RawEmbedding()) == reducer
    first, inside = split_reducer(reducer)
    assert first is reducer.first
    assert inside is reducer.inside
    assert (reducer.needs, reducer.position_mode) == (first.needs, first.position_mode)
    assert split_reducer(make("random(budget=3)"))[1] is None
    assert split_reducer(make("fastv(budget=3)"))[0] is None
    assert split_reducer(KeepShare(make("fastv(budget=3)"), 0.5))[0] is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fastv(budget=3)+random(budget=2)", "works before the language model, so it cannot follow fastv"),
        ("fastv(budget=3)+dart(budget=2)", "already works inside the language model"),
        ("random(budget=3)+tome(budget=2)", "fastv, pyramiddrop or dart"),
        ("torino-m(k=2) + torino-p(k=3)", "fastv, pyramiddrop or dart"),
        ("random(budget=3)+fastv(budget=2)+dart(budget=1)", "At most two methods"),
        ("random(budget=3)+fastv", "fastv needs budget"),
        ("random(budget=3)+", "Cannot read the reducer"),
        ("+fastv(budget=3)", "Cannot read the reducer"),
    ],
)
def test_what_cannot_be_joined(spec: str, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make(spec)


def test_what_cannot_be_composed() -> None:
    before, inside = make("random(budget=3)"), make("fastv(budget=2)")
    with pytest.raises(BadParameter, match="already works inside the language model"):
        Composed(inside, inside)
    with pytest.raises(BadParameter, match="already works inside the language model"):
        Composed(Composed(before, inside), inside)
    with pytest.raises(BadParameter, match="fastv, pyramiddrop or dart"):
        Composed(before, before)


def test_unknown_names_and_ambiguous_budgets() -> None:
    with pytest.raises(UnknownName):
        make("random(budget=3)+fastvv(budget=2)")
    with pytest.raises(BadParameter, match="ambiguous"):
        make("random+fastv(budget=2)", budget=3)
    composed: Any = make("random(budget=3)+fastv(budget=2)")
    with pytest.raises(BadParameter, match="takes no budget"):
        KeepShare(composed, 0.5)


def test_they_plan_nothing_without_a_language_model() -> None:
    tokens = VisualTokens(torch.randn(4, 8), grid=(2, 2))
    for spec in (*(f"{method}(budget=2)" for method in METHODS), "random(budget=3)+fastv(budget=2)"):
        for reducer in (make(spec), *([] if "+" in spec else [KeepShare(make(spec), 0.5)])):
            with pytest.raises(MissingSignal, match="which does not run here"):
                reducer.plan(tokens)


def test_servers_and_stores_refuse_them() -> None:
    for spec in ("fastv(budget=2)", "random(budget=3)+dart(budget=2)"):
        with pytest.raises(BadParameter, match="servers and token stores"):
            check_servable(ReductionSettings(method=spec).build())


def test_settings_of_a_run() -> None:
    words = ["fastv", "dart(block=3)", "random(budget=4)+fastv(budget=2)", "torino-x+dart(budget=2)"]
    assert split_specs(words) == (words[:2], words[2:])
    joined, with_sae = own_settings(words[2:], ["none"])
    assert (joined.method, joined.spec, joined.budget, joined.tier) == ("random", words[2], 2, "2")
    assert with_sae.sae == "none"
    built = with_sae.reducer({})
    assert built is not None
    assert built.spec == f"{make('torino-x', sae=RawEmbedding()).spec}+dart(budget=2)"
