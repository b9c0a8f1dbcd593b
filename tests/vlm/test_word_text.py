"""Words of the question in the space of the language model, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vlm.test_families import MODELS
from torino import RawEmbedding, Reduction, make
from torino.core.errors import BadParameter, MissingSignal
from torino.testing import same_plan
from torino.vlm import VLM, ReducingProcessor, WordText, reduced
from torino.vlm.adapters.base import adapter_for
from torino.vlm.session import Encoded, Inputs
from torino.vlm.trace import ReducedCall, Trace


class Letters:
    """A tokenizer whose tokens are the numbers in a text."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        numbers = [int(word) if word.isdecimal() else len(word) for word in text.split()]
        return {"input_ids": [*([1] if add_special_tokens else []), *numbers]}

    @staticmethod
    def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))

    @staticmethod
    def batch_decode(rows: Tensor, skip_special_tokens: bool = True) -> list[str]:
        return [Letters.decode(row.tolist()) for row in rows]


def conversation(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


@pytest.mark.parametrize("method", ["mmtok(budget=2)", "torino-q(budget=2, threshold=0.5, mode='prune')"])
@pytest.mark.parametrize("family", MODELS)
def test_session_equals_reduced(family: str, method: str) -> None:
    model, (single, batch) = MODELS[family]()
    encoder = {"sae": RawEmbedding()} if method.startswith("torino") else {}
    reducer, generation = make(method, **encoder), {"max_new_tokens": 3, "do_sample": False}
    generation["suppress_tokens"] = [int(model.config.image_token_id)]
    for inputs in (single, batch):
        questions = [f"{5 + row} {9 + row}" for row in range(len(inputs["input_ids"]))]
        vlm = VLM(model, Letters())
        given = Inputs(dict(inputs), ("",) * len(questions), tuple(map(conversation, questions)))
        reduction = vlm.reduce(vlm.encode(given, [reducer]), reducer)
        output = vlm.generate(given, [reduction], **generation)
        with reduced(model, reducer, text_query=WordText(Letters()).query(questions)) as trace:
            expected = model.generate(**inputs, **generation)[:, inputs["input_ids"].shape[1] :]
        assert torch.equal(output.ids, expected)
        assert all(len(plan) == 2 for plan in trace)
    assert torch.equal(reduction.encoded.tokens[0].signals["words"], model.get_input_embeddings()(torch.tensor([5, 9])))


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_projected_patches_are_what_the_language_model_reads(family: str) -> None:
    model, (inputs, _) = MODELS[family]()
    adapter = adapter_for(model)
    encoded = adapter.encode(inputs, frozenset({"projected"}))
    plans = adapter.plan(make("uniform(budget=1)"), encoded)
    embeds = adapter.embed(encoded, plans)
    rows = [unit.signals["projected"][int(plan.anchor[0])] for unit, plan in zip(encoded.tokens, plans, strict=True)]
    tokens = torch.cat([item.features[item.sizes > 0] for item in embeds])  # type: ignore[operator]
    matches = torch.cdist(torch.stack(rows), tokens.float()).amin(1)
    assert float(matches.max()) < 1e-4


def test_the_question_is_read_from_the_prompt_or_refused() -> None:
    model, (inputs, _) = MODELS["llava"]()
    reducer = make("mmtok(budget=2)")
    with pytest.raises(MissingSignal, match=r"received none.*WordText\(processor\)"), reduced(model, reducer):
        model.generate(**inputs, max_new_tokens=1)
    with reduced(model, reducer, text_query=WordText(Letters())) as trace:  # all words of the prompt
        model.generate(**inputs, max_new_tokens=1)
    assert len(trace[0]) == 2
    with (
        pytest.raises(MissingSignal, match="The question is empty"),
        reduced(model, reducer, text_query=WordText(Letters()).query(" ")),
    ):
        model.generate(**inputs, max_new_tokens=1)
    with pytest.raises(BadParameter, match="WordText needs the tokenizer"):
        WordText(3)
    with pytest.raises(BadParameter, match="a ClipText, a WordText"):
        ReducingProcessor(Letters(), model, reducer, text_query="what")  # type: ignore[arg-type]


@torch.no_grad()
def test_a_second_question_about_the_same_image_is_planned_again() -> None:
    model, (inputs, _) = MODELS["llava"]()
    vlm, reducer = VLM(model, Letters()), make("torino-q(budget=6, threshold=1.5, floor=0.0)", sae=RawEmbedding())
    patches = adapter_for(model).encode(inputs, frozenset({"projected"})).tokens[0].signals["projected"]
    embeddings = model.get_input_embeddings().weight
    embeddings.data[40], embeddings.data[41] = patches[1], patches[14]  # the words name two patches
    plans = dict[str, Reduction]()
    encoded: Encoded | None = None
    for question in ("40", "41", "40"):
        given = Inputs(dict(inputs), ("",), (conversation(question),))
        if encoded is None:
            encoded = vlm.encode(given, [reducer])
        else:  # as Encoded.with_question does, whose prompt needs a chat template
            runs, encoded = encoded._runs, vlm.encode(given, [reducer])
            encoded._runs = runs
        plan = vlm.reduce(encoded, reducer).plans[0]
        assert question not in plans or same_plan(plan, plans[question])
        plans[question] = plan
        assert len(encoded._runs) == 1  # the tower ran once
    first, second = plans["40"], plans["41"]
    assert not torch.equal(first.anchor, second.anchor)
    for plan, patch, word in ((first, 1, "40"), (second, 14, "41")):
        token = plan.anchor.tolist().index(patch)
        assert plan.words[token] == (word,)
        assert plan.role[token] == "question"
    trace = Trace([ReducedCall((plan,), (16,), (6,), {}) for plan in (first, second)])
    assert '"40"' in trace.summary()
    assert '"41"' in trace.summary()


def test_words_of_subword_tokens() -> None:
    class Fast(Letters):
        is_fast = True

        def __call__(self, text: str, add_special_tokens: bool = True, **options: bool) -> dict[str, Any]:
            return {"input_ids": [7, 8, 9, 10], "offset_mapping": [(0, 1), (1, 7), (7, 12), (12, 13)]}

    assert WordText(Fast()).words("A skateboard?") == ("A", "skateboard", "skateboard", "?")
    assert WordText(Letters()).words("5 7") == ("5", "7")
