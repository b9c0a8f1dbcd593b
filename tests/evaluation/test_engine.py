"""The engine: answers under many settings, from one pass of the tower."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.tiny_run import make_image, make_sae
from tests.support.tiny_vlm import build_llava
from torino import SAE, RawEmbedding, TorinoError, make
from torino.core.errors import BadParameter
from torino.evaluation.engine import Engine, EngineAnswer, QuestionToAsk
from torino.vlm import VLM, ask, load_vlm


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> VLM:
    folder = tmp_path_factory.mktemp("engine") / "llava"
    build_llava(folder)
    return load_vlm(folder)


@pytest.fixture(scope="module")
def sae() -> SAE:
    return make_sae()


def with_options(vlm: VLM, **options: Any) -> VLM:
    """The same model with other host options."""
    return VLM(vlm.model, vlm.processor, **options)


def answer_all(
    engine: Engine, questions: Sequence[QuestionToAsk], settings: Iterable[str] | None = None
) -> list[EngineAnswer]:
    wanted = set(engine.reducers if settings is None else settings)
    batches = engine.answers([make_image(1)], questions, lambda key, name: name in wanted)
    return [answer for batch in batches for answer in batch]


class FakeTextQuery:
    """Adds random signals of a question for cdpruner, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def query(self, question: Any) -> FakeTextQuery:
        if self.fails:
            raise RuntimeError("too long")
        return self

    def add(self, adapter: Any, encoded: Any, inputs: Any, needs: Any = ()) -> Any:
        (unit,) = encoded.tokens
        source = torch.Generator().manual_seed(1)
        signals = {"joint": torch.randn(16, 8, generator=source), "text": torch.randn(1, 8, generator=source)}
        return replace(encoded, tokens=(unit.with_(signals={**unit.signals, **signals}),))


@pytest.mark.parametrize(
    ("positions", "attention", "padding"),
    [
        ("auto", "auto", "crop"),
        ("original", "plain", "crop"),
        ("auto", "proportional", "crop"),
        ("auto", "auto", "square"),
    ],
)
def test_answers_equal_those_of_ask(vlm: VLM, sae: SAE, positions: Any, attention: Any, padding: Any) -> None:
    session = with_options(vlm, positions=positions, attention=attention, padding=padding)
    reducers = {
        "full": None,
        "m": make("torino-m(k=2, delta=1)", sae=sae),
        "zip": make("visionzip(budget=6)"),
        "tower": make("tome-tower(budget=7)"),
        "r": make("random(budget=5)"),
        "x": make("torino-x(budget=5)", sae=sae),
        "c": make("torino-x(budget=5, positions='compact')", sae=sae),
        "inside": make("fastv(budget=4)"),
        "joined": make("torino-x(budget=5)+dart(budget=2)", sae=sae),
    }
    questions = [QuestionToAsk(("t", "0"), "what is this ?", 4), QuestionToAsk(("t", "1"), "how many ?", 4)]
    for batch in (1, 8):
        answers = answer_all(Engine(session, reducers, batch=batch, on_error="stop"), questions)
        assert len(answers) == 18
        assert {answer.tokens for answer in answers if answer.setting == "inside"} == {10}  # 16 and 4 in two layers
        for answer in answers:
            question = next(item.text for item in questions if item.key == answer.key)
            reducer = reducers[answer.setting]
            alone = ask(make_image(1), question, model=session, reducer=reducer, max_new_tokens=4)
            assert answer.text == alone.text.strip()
            assert (answer.tokens, answer.before) == (alone.after, 16)


def test_the_tower_runs_once(vlm: VLM) -> None:
    calls: list[int] = []
    handle = vlm.model.model.vision_tower.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        reducers = {name: make(f"{name}(budget=5)") for name in ("random", "divprune", "visionzip", "hired", "scope")}
        engine = Engine(vlm, {"full": None, **reducers}, on_error="stop")
        assert len(answer_all(engine, [QuestionToAsk(("t", str(n)), "what is this ?", 2) for n in range(3)])) == 18
    finally:
        handle.remove()
    assert len(calls) == 1


def test_the_language_model_reads_an_image_once_for_all_questions(vlm: VLM) -> None:
    lengths: list[int] = []
    handle = vlm.model.model.language_model.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["inputs_embeds"].shape[1]), with_kwargs=True
    )
    try:
        engine = Engine(vlm, {"full": None}, on_error="stop")
        questions = [QuestionToAsk(("t", str(n)), f"what is {n} ?", 1) for n in range(3)]
        answer_all(engine, questions)
        together = list(lengths)
        lengths.clear()
        answer_all(engine, questions[:1])
        (alone,) = lengths
    finally:
        handle.remove()
    assert together[0] > 16
    assert len(together) == 4
    assert all(together[0] + length == alone for length in together[1:])


def test_a_budget_that_images_share_is_refused(vlm: VLM) -> None:
    pooled = make("torino-x(budget=3, pooled=True)", sae=RawEmbedding())
    with pytest.raises(BadParameter, match="plans each image alone"):
        Engine(vlm, {"x": pooled})


def test_a_method_that_reads_the_question_needs_a_text_tower(vlm: VLM) -> None:
    with pytest.raises(BadParameter, match="a CLIP text tower must read"):
        Engine(vlm, {"c": make("cdpruner(budget=5)")})
    with pytest.raises(BadParameter, match="batch must be at least 1, got 0"):
        Engine(vlm, {"full": None}, batch=0)


def test_a_failing_text_query_fails_only_its_method(vlm: VLM) -> None:
    questions = [QuestionToAsk(("t", "0"), "what is this ?", 2)]
    reducers = {"full": None, "c": make("cdpruner(budget=5)")}
    session = with_options(vlm, text_query=FakeTextQuery(fails=True))
    answers = answer_all(Engine(session, reducers), questions)
    assert {answer.setting: answer.error for answer in answers} == {"full": "", "c": "RuntimeError: too long"}
    with pytest.raises(TorinoError, match="failed with RuntimeError: too long"):
        answer_all(Engine(session, reducers, on_error="stop"), questions)


def test_a_question_that_cannot_be_asked_fails_alone(vlm: VLM) -> None:
    reducers = {"full": None, "r": make("random(budget=5)"), "c": make("cdpruner(budget=5)")}
    session = with_options(vlm, text_query=FakeTextQuery())
    good = "what is this ?"
    for texts in ((good, "<image> what ?", good), (" ", good, good)):
        questions = [QuestionToAsk(number, text, 2) for number, text in enumerate(texts)]
        answers = answer_all(Engine(session, reducers), questions)
        assert len(answers) == 9
        assert {answer.key for answer in answers if answer.error} == {
            texts.index(text) for text in texts if text != good
        }
        assert sum(bool(answer.error) for answer in answers) == 3
        with pytest.raises(BadParameter, match="question"):
            answer_all(Engine(session, reducers, on_error="stop"), questions)


def test_an_image_that_cannot_be_opened_fails_all_its_questions(vlm: VLM) -> None:
    engine = Engine(vlm, {"full": None, "r": make("random(budget=5)")})
    questions = [QuestionToAsk(number, "what is this ?", 2) for number in range(2)]
    batches = engine.answers([make_image(1)[:60]], questions, lambda key, name: True)
    answers = [answer for batch in batches for answer in batch]
    assert sorted((answer.key, answer.setting) for answer in answers) == [
        (0, "full"),
        (0, "r"),
        (1, "full"),
        (1, "r"),
    ]
    assert all(answer.error.startswith("BadFile: ") and answer.text is None for answer in answers)


def test_a_text_query_is_used_and_timed(vlm: VLM) -> None:
    session = with_options(vlm, text_query=FakeTextQuery())
    reducers = {"full": None, "c": make("cdpruner(budget=5)")}
    full, chosen = answer_all(Engine(session, reducers, on_error="stop"), [QuestionToAsk(0, "what is this ?", 2)])
    assert (full.tokens, chosen.tokens) == (16, 5)
    assert chosen.seconds["question"] > 0
    assert "question" not in full.seconds


def test_batches_do_not_depend_on_missing_answers(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    reducers = {
        "full": None,
        "c": make("cdpruner(budget=5)"),
        "r": make("random(budget=6)"),
        "s": make("scope(budget=7)"),
    }
    session = with_options(vlm, text_query=FakeTextQuery())
    engine = Engine(session, reducers, batch=2, on_error="stop")
    names = {id(reducer): name for name, reducer in reducers.items()}
    together: list[int] = []
    reduced: list[str] = []
    generate, reduce = session.generate, session.reduce

    def counted(inputs: Any, reductions: Any, **options: Any) -> Any:
        together.append(len(reductions))
        return generate(inputs, reductions, **options)

    def noted(encoded: Any, reducer: Any) -> Any:
        reduced.append(names[id(reducer)])
        return reduce(encoded, reducer)

    monkeypatch.setattr(session, "generate", counted)
    monkeypatch.setattr(session, "reduce", noted)
    questions = [QuestionToAsk(("t", "0"), "what is this ?", 2)]
    first = answer_all(engine, questions)
    assert reduced == [answer.setting for answer in first] == ["r", "s", "full", "c"]
    assert together == [2, 1, 1]
    together.clear()
    reduced.clear()
    (again,) = answer_all(engine, questions, ["r"])  # as after a crash
    assert together == [2]
    assert reduced == ["r", "s"], "finished batches are not reduced again"
    assert again.text == first[0].text


def test_batches_are_of_one_tier_and_even(vlm: VLM) -> None:
    reducers = {f"{tier}{i}": make(f"random(budget={tier})") for tier in (5, 6) for i in range(5)}
    engine = Engine(vlm, {**reducers, "full": None}, batch=4, tiers={name: name[0] for name in reducers})
    assert engine._shared == [["50", "51"], ["52", "53", "54"], ["60", "61"], ["62", "63", "64"], ["full"]]


def test_batches_agree_in_positions_and_attention(vlm: VLM, sae: SAE) -> None:
    reducers = {
        "x": make("torino-x(budget=5)", sae=sae),  # original positions, proportional attention
        "c": make("torino-x(budget=5, positions='compact')", sae=sae),
        "r": make("random(budget=5)"),
        "d": make("divprune(budget=5)"),
    }
    assert Engine(vlm, reducers)._shared == [["d", "r"], ["c"], ["x"]]
    session = with_options(vlm, positions="original", attention="plain")
    assert Engine(session, reducers)._shared == [["c", "d", "r", "x"]]
