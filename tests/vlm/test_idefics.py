"""The Idefics3 and SmolVLM adapter on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.cell_contract import CellAdapterContract
from tests.support.tiny_cells import (
    CELLS,
    IMAGE,
    PROMPTS,
    TEXT,
    Family,
    KeepAll,
    KeepSome,
    MergePairs,
    NeedsClsAttention,
    build_idefics,
    generate,
    idefics_pixels,
    logits_by_hand,
    same,
    stock_features,
)
from torino.core.errors import MissingSignal
from torino.vlm import adapter_for, reduced

FAKE, GLOBAL, ROW_1_COL_1, ROW_1_COL_2 = 55, 56, 57, 58


class TestIdefics(CellAdapterContract):
    @pytest.fixture(scope="class", params=["idefics3", "smolvlm"])
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> Family:
        return Family(request.param, lambda: build_idefics(request.param), pixels=idefics_pixels)

    def test_text_around_sub_images_is_kept(self, family: Family, model: Any) -> None:
        prompt = [5, FAKE, ROW_1_COL_1, -1, FAKE, ROW_1_COL_2, -2, 6, FAKE, GLOBAL, -3, FAKE, 7]
        inputs = family.inputs([prompt, [5, FAKE, GLOBAL, -4, FAKE, 8]])
        adapter = adapter_for(model)
        reduced_inputs, call = adapter.reduce_inputs(inputs, KeepSome(), "compact")
        counts = iter(call.after)
        for row, before in zip(reduced_inputs["input_ids"], (prompt, [5, FAKE, GLOBAL, -4, FAKE, 8]), strict=True):
            after = [token for item in before for token in ([IMAGE] * next(counts) if item < 0 else [item])]
            assert row[row != 0].tolist() == after
        assert call.before == (CELLS,) * 4
        assert [len(part) for part in reduced_inputs["mm_encoder_outputs"]["image"].pooler_output] == list(call.after)

    def test_merging_before_the_connector_equals_merging_after_it(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        feature = stock_features(model, inputs)[0]
        merged = [(0.75 * feature[0::2] + 0.25 * feature[1::2]).repeat_interleave(2, 0)]
        with reduced(model, MergePairs()):
            output = model(**inputs).logits
        expected = logits_by_hand(family, model, inputs, merged, [torch.arange(0, CELLS, 2)])
        torch.testing.assert_close(output, expected, atol=2e-4, rtol=1e-4)

    def test_without_a_pixel_mask(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        del inputs["pixel_attention_mask"]
        stock = generate(model, inputs)
        with reduced(model, KeepAll()):
            assert same(stock, generate(model, inputs))

    def test_padding_pixels_are_not_images(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        assert adapter_for(model).has_images(inputs)
        assert not adapter_for(model).has_images({"pixel_values": torch.zeros(2, 1, 3, 32, 32)})

    def test_signals(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        tokens = adapter_for(model).encode(inputs, frozenset({"keys", "queries@0"})).tokens
        assert [(len(image), image.width) for image in tokens] == [(CELLS, TEXT["hidden_size"])] * 5
        assert all(image.keys is not None and image.keys.shape == (CELLS, 16) for image in tokens)
        assert tokens[0].signals["queries@0"].shape == (CELLS, 16)
        with (
            pytest.raises(MissingSignal, match=r"attention of a CLS token.*torino-m"),
            reduced(model, NeedsClsAttention()),
        ):
            model(**inputs)
