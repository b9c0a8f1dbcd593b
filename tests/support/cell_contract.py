"""Tests that every adapter of cells must pass."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.support.tiny_cells import (
    CELLS,
    IMAGE,
    PROMPTS,
    Family,
    KeepAll,
    KeepSome,
    MergePairs,
    NeedsCls,
    generate,
    logits_by_hand,
    randomize,
    same,
    stock_features,
)
from torino import RawEmbedding, make
from torino.core.errors import BadTokens, MissingSignal
from torino.reducers import Reducer
from torino.vlm import ReducingProcessor, adapter_for, reduced


class CellAdapterContract:
    """Tests that every cell adapter must pass; a subclass defines the fixture ``family``."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, family: Family) -> Any:
        torch.manual_seed(0)
        return randomize(family.build())

    @pytest.mark.parametrize(
        "options", [{}, {"use_cache": False}, {"num_beams": 3, "num_return_sequences": 2}], ids=str
    )
    def test_identity_generates_the_same_as_the_stock_model(
        self, family: Family, model: Any, options: dict[str, Any]
    ) -> None:
        inputs = family.inputs(PROMPTS)
        stock = generate(model, inputs, **options)
        with reduced(model, KeepAll()) as trace:
            output = generate(model, inputs, **options)
        assert same(stock, output)
        assert len(stock.sequences.unique()) > 8, "the answers vary too little to prove anything"
        assert (trace.before, trace.after, len(trace)) == (5 * CELLS, 5 * CELLS, 5)
        assert same(stock, generate(model, inputs, **options)), "the model was changed"

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_identity_gives_the_logits_and_loss_of_the_stock_model(self, family: Family, model: Any, side: str) -> None:
        inputs = family.inputs(PROMPTS, side)
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["input_ids"] % IMAGE == 0, -100)
        stock = model(**inputs)
        with reduced(model, KeepAll()):
            output = model(**inputs)
        assert torch.equal(stock.logits, output.logits)
        assert torch.equal(stock.loss, output.loss)
        with reduced(model, KeepSome()):
            fewer = model(**inputs)
        assert fewer.logits.shape[1] < stock.logits.shape[1]
        assert bool(torch.isfinite(fewer.loss))

    def test_identity_keeps_original_positions(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        alone = family.inputs(PROMPTS[:1])
        with reduced(model, KeepAll(), positions="original"):
            output, logits = generate(model, inputs), model(**alone).logits
        assert same(generate(model, inputs), output)
        assert torch.equal(model(**alone).logits, logits)

    def test_identity_in_half_precision(self, family: Family, model: Any) -> None:
        half = deepcopy(model).to(torch.bfloat16)
        inputs = family.inputs(PROMPTS)
        stock = half(**inputs).logits
        with reduced(half, KeepAll()):
            assert torch.equal(half(**inputs).logits, stock)
        with reduced(half, make("torino-m", sae=RawEmbedding())):
            assert half(**inputs).logits.dtype == torch.bfloat16

    @pytest.mark.parametrize("positions", ["compact", "original"])
    @pytest.mark.parametrize("reducer", [KeepSome(), MergePairs()], ids=["prune", "merge"])
    def test_ragged_batch_equals_its_rows(self, family: Family, model: Any, reducer: Reducer, positions: Any) -> None:
        with reduced(model, reducer, positions=positions) as trace:
            batch = generate(model, family.inputs(PROMPTS))
            alone = [generate(model, family.inputs([prompt])) for prompt in PROMPTS]
        if isinstance(reducer, KeepSome):
            assert len(set(map(len, trace.calls[0].reductions))) > 1, "the batch is not ragged"
        for row, single in enumerate(alone):
            assert torch.equal(batch.sequences[row, -4:], single.sequences[0, -4:])
            for a, b in zip(batch.logits, single.logits, strict=True):
                torch.testing.assert_close(a[row], b[0], atol=2e-4, rtol=1e-4)

    def test_beam_search_on_a_ragged_batch(self, family: Family, model: Any) -> None:
        options = {"num_beams": 3, "num_return_sequences": 2}
        with reduced(model, KeepSome()):
            batch = generate(model, family.inputs(PROMPTS), **options).sequences
            for row, prompt in enumerate(PROMPTS):
                alone = generate(model, family.inputs([prompt]), **options).sequences
                assert torch.equal(batch[2 * row : 2 * row + 2, -4:], alone[:, -4:])

    @pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str)
    def test_other_caches_give_the_same_answers(self, family: Family, model: Any, options: dict[str, Any]) -> None:
        if "cache_implementation" in options and not family.static:
            pytest.skip("the stock model fails with this cache in transformers 5.22.2")
        inputs = family.inputs(PROMPTS)
        with reduced(model, KeepSome()):
            dynamic, other = generate(model, inputs), generate(model, inputs, **options)
        assert torch.equal(dynamic.sequences, other.sequences)
        for a, b in zip(dynamic.logits, other.logits, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)

    @pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1], PROMPTS[3]], ids=str)
    def test_pruning_is_what_one_would_do_logits_by_hand(self, family: Family, model: Any, prompt: list[int]) -> None:
        inputs = family.inputs([prompt])
        with reduced(model, KeepSome()) as trace:
            output = model(**inputs).logits
        features = [row for image in stock_features(model, inputs) for row in image.split(CELLS)]
        kept = [plan.anchor for plan in trace]
        torch.testing.assert_close(output, logits_by_hand(family, model, inputs, features, kept), atol=2e-4, rtol=1e-4)

    @pytest.mark.parametrize("name", ["torino-p", "torino-m"])
    def test_torino_counts_the_remaining_tokens(self, family: Family, model: Any, name: str) -> None:
        reducer = make(name, sae=RawEmbedding(), k=2, delta=1)
        inputs = family.inputs(PROMPTS)
        reduced_inputs, call = adapter_for(model).reduce_inputs(inputs, reducer, "compact", side="left")
        with reduced(model, reducer) as trace:
            answer = generate(model, inputs).sequences
        assert torch.equal(answer[:, :-4], inputs["input_ids"])
        assert int((reduced_inputs["input_ids"] == IMAGE).sum()) == sum(call.after) == trace.after
        assert trace.before == 5 * CELLS
        assert 5 <= trace.after < trace.before
        assert len(trace) == 5
        assert "pixel_values" not in reduced_inputs

    def test_processor_equals_context_manager(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        with reduced(model, KeepSome()):
            wrapped = generate(model, inputs)
        ready = ReducingProcessor(lambda **_: inputs, model, KeepSome())()
        plain = generate(model, dict(ready.items()) | {"mm_encoder_outputs": ready["mm_encoder_outputs"]})
        assert torch.equal(wrapped.sequences[:, -4:], plain.sequences[:, -4:])
        assert plain.sequences.shape[1] < wrapped.sequences.shape[1]
        # Twice, because beam search modifies its inputs.
        beams = [generate(model, {name: ready[name] for name in ready}, num_beams=2).sequences for _ in range(2)]
        assert torch.equal(*beams)

    def test_original_positions_are_those_of_the_full_prompt(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        adapter = adapter_for(model)
        reduced_inputs, call = adapter.reduce_inputs(inputs, KeepSome(), "original")
        anchors = call.reductions[0].anchor
        expected = torch.cat([torch.arange(2), 2 + anchors, torch.arange(2 + CELLS, 5 + CELLS)])
        assert reduced_inputs["position_ids"].tolist() == [(expected + family.first).tolist()]
        # generate counts from 0, and the model adds its offset
        for_generate, _ = adapter.reduce_inputs(inputs, KeepSome(), "original", side="left")
        assert for_generate["position_ids"].tolist() == [expected.tolist()]
        with reduced(model, KeepSome(), positions="original"):
            torch.testing.assert_close(model(**inputs).logits[:, -1], generate(model, inputs).logits[0])

    def test_text_only_prompts_are_unchanged(self, family: Family, model: Any) -> None:
        inputs = family.inputs([[5, 6, 7], [8, 9]])
        with reduced(model, KeepSome()) as trace:
            output = generate(model, inputs)
        assert same(generate(model, inputs), output)
        assert not trace.calls

    def test_model_is_unchanged_after_a_failure(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        stock = model(**inputs).logits
        truncated = {
            **inputs,
            "input_ids": inputs["input_ids"][:, :-8],
            "attention_mask": inputs["attention_mask"][:, :-8],
        }
        with pytest.raises(BadTokens, match="placeholders"), reduced(model, KeepAll()):
            model(**{name: truncated[name] for name in truncated if not name.endswith("type_ids")})
        assert "forward" not in model.__dict__
        assert torch.equal(model(**inputs).logits, stock)

    def test_cls_token_is_refused(self, family: Family, model: Any) -> None:
        with pytest.raises(MissingSignal, match=r"the CLS token, and.*torino-m"), reduced(model, NeedsCls()):
            model(**family.inputs(PROMPTS[:1]))
