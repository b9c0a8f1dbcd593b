"""Words of the question in the space of the language model, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vlm.test_families import MODELS
from torino import make
from torino.core.errors import BadParameter, MissingSignal
from torino.vlm import VLM, ReducingProcessor, WordText, reduced
from torino.vlm.adapters.base import adapter_for
from torino.vlm.session import Inputs


class Letters:
    """A tokenizer whose tokens are the numbers in a text."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*([1] if add_special_tokens else []), *map(int, text.split())]}

    @staticmethod
    def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))

    @staticmethod
    def batch_decode(rows: Tensor, skip_special_tokens: bool = True) -> list[str]:
        return [Letters.decode(row.tolist()) for row in rows]


def conversation(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


@pytest.mark.parametrize("family", MODELS)
def test_session_equals_reduced(family: str) -> None:
    model, (single, batch) = MODELS[family]()
    reducer, generation = make("mmtok(budget=2)"), {"max_new_tokens": 3, "do_sample": False}
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
