"""PaliGemma, PaliGemma 2 and Gemma 3 on tiny models built from configs."""

from __future__ import annotations

from collections.abc import Callable
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
    scrambled,
    stock_features,
)
from torch import Tensor

from torino import MissingSignal, TorinoError
from torino.vlm import adapter_for, reduced
from torino.vlm.adapters.base import families, serve
from torino.vlm.adapters.gemma import Gemma3, PaliGemma

for host in (PaliGemma, Gemma3):
    for name in host.families:
        if name not in families():
            serve(name)(lambda host=host: host)

BEGIN, END = 58, 59
HEADS = {"head_dim": 8, "query_pre_attn_scalar": 8}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}


def paligemma(text: dict[str, Any], tower: dict[str, Any] | None = None) -> Any:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=tower or {**SIGLIP, "image_size": 16, "vision_use_head": False},
            text_config={**TEXT, "head_dim": 8, **text},
            image_token_index=IMAGE,
            projection_dim=TEXT["hidden_size"],
            hidden_size=TEXT["hidden_size"],
        )
    )


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=SIGLIP,
            text_config={
                **TEXT,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": 12,
                "layer_types": layers,
            },
            mm_tokens_per_image=CELLS,
            image_token_index=IMAGE,
            boi_token_index=BEGIN,
            eoi_token_index=END,
        )
    )


def prefix(ids: Tensor) -> dict[str, Tensor]:
    """As PaliGemma's processor does without a suffix: all of the prompt attends both ways."""
    return {"token_type_ids": torch.zeros_like(ids)}


def pictures(ids: Tensor) -> dict[str, Tensor]:
    """As Gemma 3's processor does: 1 where an image is."""
    return {"token_type_ids": (ids == IMAGE).long()}


FAMILIES: dict[str, Callable[[], Family]] = {
    "paligemma": lambda: Family("paligemma", lambda: paligemma({"model_type": "gemma"}), 16, types=prefix, first=1),
    "paligemma2": lambda: Family(
        "paligemma",
        lambda: paligemma({"model_type": "gemma2", "sliding_window": 12, "query_pre_attn_scalar": 8}),
        16,
        types=prefix,
        first=1,
        static=False,
    ),
    "gemma3": lambda: Family("gemma3", gemma3, types=pictures),
}


class TestGemma(Contract):
    @pytest.fixture(scope="class", params=FAMILIES)
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> Family:
        return FAMILIES[request.param]()

    def test_token_types_shrink_and_matter(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        shrunk, _ = adapter_for(model).shrink(inputs, Some(), "compact")
        expected = family.types(shrunk["input_ids"])["token_type_ids"]
        assert torch.equal(shrunk["token_type_ids"], expected)
        one_way = {name: value for name, value in inputs.items() if name != "token_type_ids"}
        with reduced(model, Some()):
            both_ways, causal = model(**inputs).logits, model(**one_way).logits
        assert not torch.allclose(both_ways, causal, atol=1e-2)

    def test_without_token_types(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        del inputs["token_type_ids"]
        stock, logits = generate(model, inputs), model(**inputs).logits
        with reduced(model, Every()):
            assert same(stock, generate(model, inputs))
            assert torch.equal(model(**inputs).logits, logits)

    def test_keys_are_there_and_cls_attention_is_not(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        tokens = adapter_for(model).look(inputs, frozenset({"keys"})).tokens
        assert all(picture.keys is not None and picture.keys.shape == (CELLS, 16) for picture in tokens)
        # numbered past the last block: these are states after the tower's last norm
        assert {(picture.width, picture.origin.block) for picture in tokens} == {(16, 2)}
        with pytest.raises(MissingSignal, match=r"attention of a CLS token.*torino-m"), reduced(model, Watching()):
            model(**inputs)

    def test_merging_gives_the_same_before_and_after_the_projection(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        feature = stock_features(model, inputs)[0]
        merged = 0.75 * feature[0::2] + 0.25 * feature[1::2]
        with reduced(model, Pairs()):
            ours = model(**inputs).logits
        expected = by_hand(family, model, inputs, [merged.repeat_interleave(2, 0)], [torch.arange(0, CELLS, 2)])
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=1e-4)


class TestPaliGemmaSuffix:
    """Training: an answer after the prompt, one way, with labels of its own."""

    def test_prefix_and_suffix(self) -> None:
        family = FAMILIES["paligemma"]()
        model = scrambled(family.build())
        inputs = family.inputs([[-1, 1, 5, 6, 7, 8], [-2, -3, 1, 9, 10]], "right")
        types = torch.zeros_like(inputs["input_ids"])
        types[0, CELLS + 3 : CELLS + 5] = 1
        types[1, 2 * CELLS + 1 :] = 1
        labels = inputs["input_ids"].masked_fill(types == 0, -100)
        inputs |= {"token_type_ids": types, "labels": labels}
        stock = model(**inputs)
        with reduced(model, Every()):
            ours = model(**inputs)
        assert torch.equal(stock.logits, ours.logits)
        assert torch.equal(stock.loss, ours.loss)
        shrunk, look = adapter_for(model).shrink(inputs, Some(), "compact")
        first = sum(look.after[:1])
        second = sum(look.after[1:])
        assert shrunk["token_type_ids"][0, : first + 5].tolist() == [0] * (first + 3) + [1, 1]
        assert shrunk["token_type_ids"][1, : second + 3].tolist() == [0] * (second + 1) + [1, 1]
        assert (shrunk["labels"][shrunk["token_type_ids"] == 0] == -100).all()
        assert int((shrunk["labels"] >= 0).sum()) == 4


def test_crops_of_pan_and_scan_stay_blocks_of_their_own() -> None:
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    family = FAMILIES["gemma3"]()
    model = scrambled(family.build())
    inputs = family.inputs([[5, BEGIN, -1, END, 6, BEGIN, -2, END, BEGIN, -3, END, 7], [5, BEGIN, -4, END, 8]])
    shrunk, look = adapter_for(model).shrink(inputs, Some(), "compact")
    blocks = get_block_sequence_ids_for_mask(shrunk["token_type_ids"])
    sizes = [int((row == number).sum()) for row in blocks for number in range(int(row.max()) + 1)]
    assert sizes == list(look.after)


def test_a_tower_that_is_not_siglip_is_refused() -> None:
    tower = {"model_type": "clip_vision_model", **TOWER, "image_size": 16}
    model = paligemma({"model_type": "gemma"}, tower)
    with pytest.raises(TorinoError, match=r"read a SigLIP tower.*CLIPVisionModel"), reduced(model, Every()):
        model(**FAMILIES["paligemma"]().inputs(PROMPTS[:1]))
