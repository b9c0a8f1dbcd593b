"""Every reducer inside a model: the host captures what each needs, and the prompt has as many tokens as it says."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from torino import MissingSignal, RawEmbedding, list_reducers, make
from torino.vlm import reduced

BUDGET = 6


def reducer_of(name: str) -> Any:
    given: dict[str, Any] = {"budget": BUDGET}
    if name.startswith("torino") or name == "scts":
        given["sae"] = RawEmbedding()
    if name == "cdpruner":
        given["relevance"] = "none"
    if name == "hiprune":
        given["object_block"] = 0
    return make(name, **given)


@pytest.mark.parametrize("name", list_reducers())
def test_a_model_answers_with_it(name: str) -> None:
    model = tiny.llava()
    ids = torch.tensor([[1, 5, *[model.config.image_token_id] * 16, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": tiny.pictures(1)}
    with reduced(model, reducer_of(name)) as trace:
        out = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert out.shape == (1, ids.shape[1] + 3)
    assert (trace.before, trace.after) == (16, BUDGET)
    assert trace[0].by.startswith(name)


def test_diversity_after_the_projector() -> None:
    model = tiny.llava()
    ids = torch.tensor([[1, *[model.config.image_token_id] * 16, 7]])
    with reduced(model, make("divprune", budget=BUDGET, space="projected")) as trace:
        model.generate(input_ids=ids, pixel_values=tiny.pictures(1), max_new_tokens=1)
    assert trace.after == BUDGET


def test_relevance_to_a_question_needs_the_question() -> None:
    model = tiny.llava()
    ids = torch.tensor([[1, *[model.config.image_token_id] * 16, 7]])
    with reduced(model, make("cdpruner", budget=BUDGET)), pytest.raises(MissingSignal):
        model.generate(input_ids=ids, pixel_values=tiny.pictures(1), max_new_tokens=1)
