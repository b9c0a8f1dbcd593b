"""Every registered reducer in a model: its signals are captured, and the prompt has as many tokens as its budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import tiny
from torino import RawEmbedding, list_reducers, make
from torino.core.errors import MissingSignal
from torino.reducers import get
from torino.vlm import WordText, reduced

BUDGET = 6


def make_reducer(name: str) -> Any:
    options: dict[str, Any] = {"budget": BUDGET}
    if name.startswith("torino") or name == "scts":
        options["sae"] = RawEmbedding()
    if name == "cdpruner":
        options["relevance"] = "none"
    return make(name, **options)


@pytest.mark.parametrize("name", list_reducers())
def test_model_answers_with_every_reducer(name: str) -> None:
    model = tiny.llava()
    ids = torch.tensor([[1, 5, *[model.config.image_token_id] * 16, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": tiny.pixels(1)}
    query = WordText(lambda text, **options: {"input_ids": [5, 7]}).query("?") if name == "mmtok" else None
    with reduced(model, make_reducer(name), text_query=query) as trace:
        out = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert out.shape == (1, ids.shape[1] + 3)
    assert (trace.before, len(trace[0])) == (16, BUDGET)
    assert trace.after == (16 if get(name).in_language_model else BUDGET)  # what the first layer reads
    assert trace[0].by.startswith(name)


def test_divprune_in_the_projected_space() -> None:
    model = tiny.llava()
    ids = torch.tensor([[1, *[model.config.image_token_id] * 16, 7]])
    with reduced(model, make("divprune", budget=BUDGET, space="projected")) as trace:
        model.generate(input_ids=ids, pixel_values=tiny.pixels(1), max_new_tokens=1)
    assert trace.after == BUDGET


def test_cdpruner_without_a_question_is_refused() -> None:
    model = tiny.llava()
    ids = torch.tensor([[1, *[model.config.image_token_id] * 16, 7]])
    with reduced(model, make("cdpruner", budget=BUDGET)), pytest.raises(MissingSignal):
        model.generate(input_ids=ids, pixel_values=tiny.pixels(1), max_new_tokens=1)
