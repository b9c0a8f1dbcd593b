"""The PaliGemma, PaliGemma 2 and Gemma 3 adapters on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.cell_contract import CellAdapterContract
from tests.support.tiny_cells import (
    BEGIN_IMAGE,
    CELLS,
    END_IMAGE,
    GEMMA_FAMILIES,
    PROMPTS,
    TOWER,
    Family,
    KeepAll,
    KeepSome,
    MergePairs,
    NeedsClsAttention,
    build_paligemma,
    generate,
    logits_by_hand,
    randomize,
    same,
    stock_features,
)
from torino import TorinoError
from torino.core.errors import MissingSignal
from torino.vlm import adapter_for, reduced


class TestGemma(CellAdapterContract):
    @pytest.fixture(scope="class", params=GEMMA_FAMILIES)
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> Family:
        return GEMMA_FAMILIES[request.param]()

    def test_token_types_are_shortened_and_used(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        reduced_inputs, _ = adapter_for(model).reduce_inputs(inputs, KeepSome(), "compact")
        expected = family.types(reduced_inputs["input_ids"])["token_type_ids"]
        assert torch.equal(reduced_inputs["token_type_ids"], expected)
        causal_inputs = {name: value for name, value in inputs.items() if name != "token_type_ids"}
        with reduced(model, KeepSome()):
            both_ways, causal = model(**inputs).logits, model(**causal_inputs).logits
        assert not torch.allclose(both_ways, causal, atol=1e-2)

    def test_without_token_types(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        del inputs["token_type_ids"]
        stock, logits = generate(model, inputs), model(**inputs).logits
        with reduced(model, KeepAll()):
            assert same(stock, generate(model, inputs))
            assert torch.equal(model(**inputs).logits, logits)

    def test_signals(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        tokens = adapter_for(model).encode(inputs, frozenset({"keys"})).tokens
        assert all(image.keys is not None and image.keys.shape == (CELLS, 16) for image in tokens)
        # one more than the last block: these are states after the tower's final norm
        assert {(image.width, image.origin.block) for image in tokens} == {(16, 2)}
        with (
            pytest.raises(MissingSignal, match=r"attention of a CLS token.*torino-m"),
            reduced(model, NeedsClsAttention()),
        ):
            model(**inputs)

    def test_merging_before_the_projection_equals_merging_after_it(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        feature = stock_features(model, inputs)[0]
        merged = 0.75 * feature[0::2] + 0.25 * feature[1::2]
        with reduced(model, MergePairs()):
            output = model(**inputs).logits
        expected = logits_by_hand(family, model, inputs, [merged.repeat_interleave(2, 0)], [torch.arange(0, CELLS, 2)])
        torch.testing.assert_close(output, expected, atol=2e-4, rtol=1e-4)


class TestPaliGemmaSuffix:
    """Training: a causal answer after the prompt, with labels."""

    def test_prefix_and_suffix(self) -> None:
        family = GEMMA_FAMILIES["paligemma"]()
        model = randomize(family.build())
        inputs = family.inputs([[-1, 1, 5, 6, 7, 8], [-2, -3, 1, 9, 10]], "right")
        types = torch.zeros_like(inputs["input_ids"])
        types[0, CELLS + 3 : CELLS + 5] = 1
        types[1, 2 * CELLS + 1 :] = 1
        labels = inputs["input_ids"].masked_fill(types == 0, -100)
        inputs |= {"token_type_ids": types, "labels": labels}
        stock = model(**inputs)
        with reduced(model, KeepAll()):
            output = model(**inputs)
        assert torch.equal(stock.logits, output.logits)
        assert torch.equal(stock.loss, output.loss)
        reduced_inputs, call = adapter_for(model).reduce_inputs(inputs, KeepSome(), "compact")
        first = sum(call.after[:1])
        second = sum(call.after[1:])
        assert reduced_inputs["token_type_ids"][0, : first + 5].tolist() == [0] * (first + 3) + [1, 1]
        assert reduced_inputs["token_type_ids"][1, : second + 3].tolist() == [0] * (second + 1) + [1, 1]
        assert (reduced_inputs["labels"][reduced_inputs["token_type_ids"] == 0] == -100).all()
        assert int((reduced_inputs["labels"] >= 0).sum()) == 4


def test_crops_of_pan_and_scan_are_separate_blocks() -> None:
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    family = GEMMA_FAMILIES["gemma3"]()
    model = randomize(family.build())
    inputs = family.inputs(
        [
            [5, BEGIN_IMAGE, -1, END_IMAGE, 6, BEGIN_IMAGE, -2, END_IMAGE, BEGIN_IMAGE, -3, END_IMAGE, 7],
            [5, BEGIN_IMAGE, -4, END_IMAGE, 8],
        ]
    )
    reduced_inputs, call = adapter_for(model).reduce_inputs(inputs, KeepSome(), "compact")
    blocks = get_block_sequence_ids_for_mask(reduced_inputs["token_type_ids"])
    sizes = [int((row == number).sum()) for row in blocks for number in range(int(row.max()) + 1)]
    assert sizes == list(call.after)


def test_other_towers_are_refused() -> None:
    tower = {"model_type": "clip_vision_model", **TOWER, "image_size": 16}
    model = build_paligemma({"model_type": "gemma"}, tower)
    with pytest.raises(TorinoError, match=r"with a SigLIP tower.*CLIPVisionModel"), reduced(model, KeepAll()):
        model(**GEMMA_FAMILIES["paligemma"]().inputs(PROMPTS[:1]))
