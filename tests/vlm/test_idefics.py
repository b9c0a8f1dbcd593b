"""Idefics3 and SmolVLM on tiny models built from configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_internvl import (
    CELLS,
    IMAGE,
    PROMPTS,
    TEXT,
    TOWER,
    Contract,
    Every,
    Family,
    Pairs,
    Some,
    Watching,
    by_hand,
    generate,
    same,
    stock_features,
)
from torch import Tensor

from torino import MissingSignal
from torino.vlm import adapter_for, reduced
from torino.vlm.adapters.base import families, serve
from torino.vlm.adapters.idefics import Idefics

for name in Idefics.families:
    if name not in families():
        serve(name)(lambda: Idefics)

FAKE, GLOBAL, ROW_1_COL_1, ROW_1_COL_2 = 55, 56, 57, 58


def build(name: str) -> Any:
    import transformers

    prefix = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[name]
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=TOWER, text_config={"model_type": "llama", **TEXT}, image_token_id=IMAGE, scale_factor=2
    )
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


def padded(rows: list[list[Tensor]]) -> dict[str, Tensor]:
    """Sub-images of every prompt, filled up with zeros to as many as the richest prompt has, and a mask of pixels."""
    most = max(map(len, rows))
    pixels = torch.zeros(len(rows), most, 3, 32, 32)
    mask = torch.zeros(len(rows), most, 32, 32, dtype=torch.bool)
    for number, row in enumerate(rows):
        for place, picture in enumerate(row):
            pixels[number, place] = picture
            mask[number, place] = True
            mask[number, place, :, 24:] = place != 1  # a picture narrower than the rest, padded on its right
    return {"pixel_values": pixels * mask[:, :, None], "pixel_attention_mask": mask}


class TestIdefics(Contract):
    @pytest.fixture(scope="class", params=["idefics3", "smolvlm"])
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> Family:
        return Family(request.param, lambda: build(request.param), pixels=padded)

    def test_the_text_around_sub_images_stays(self, family: Family, model: Any) -> None:
        prompt = [5, FAKE, ROW_1_COL_1, -1, FAKE, ROW_1_COL_2, -2, 6, FAKE, GLOBAL, -3, FAKE, 7]
        inputs = family.inputs([prompt, [5, FAKE, GLOBAL, -4, FAKE, 8]])
        host = adapter_for(model)
        shrunk, look = host.shrink(inputs, Some(), "compact")
        counts = iter(look.after)
        for row, before in zip(shrunk["input_ids"], (prompt, [5, FAKE, GLOBAL, -4, FAKE, 8]), strict=True):
            after = [token for item in before for token in ([IMAGE] * next(counts) if item < 0 else [item])]
            assert row[row != 0].tolist() == after
        assert look.before == (CELLS,) * 4
        assert [len(part) for part in shrunk["mm_encoder_outputs"]["image"].pooler_output] == list(look.after)

    def test_merging_gives_the_same_before_and_after_the_connector(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        feature = stock_features(model, inputs)[0]
        merged = [(0.75 * feature[0::2] + 0.25 * feature[1::2]).repeat_interleave(2, 0)]
        with reduced(model, Pairs()):
            ours = model(**inputs).logits
        expected = by_hand(family, model, inputs, merged, [torch.arange(0, CELLS, 2)])
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-4)

    def test_without_a_mask_of_pixels(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        del inputs["pixel_attention_mask"]
        stock = generate(model, inputs)
        with reduced(model, Every()):
            assert same(stock, generate(model, inputs))

    def test_pixels_that_only_pad_are_no_images(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        assert adapter_for(model).has_images(inputs)
        assert not adapter_for(model).has_images({"pixel_values": torch.zeros(2, 1, 3, 32, 32)})

    def test_keys_are_means_over_cells_and_there_is_no_cls_attention(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        tokens = adapter_for(model).look(inputs, frozenset({"keys", "queries@0"})).tokens
        assert [(len(picture), picture.width) for picture in tokens] == [(CELLS, TEXT["hidden_size"])] * 5
        assert all(picture.keys is not None and picture.keys.shape == (CELLS, 16) for picture in tokens)
        assert tokens[0].signals["queries@0"].shape == (CELLS, 16)
        with pytest.raises(MissingSignal, match=r"attention of a CLS token.*torino-m"), reduced(model, Watching()):
            model(**inputs)
