"""The InternVL adapter on tiny models."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cell_contract import CellAdapterContract
from tests.support.tiny_cells import (
    CELLS,
    PROMPTS,
    Family,
    KeepAll,
    MergePairs,
    NeedsClsAttention,
    build_internvl,
    generate,
    logits_by_hand,
    same,
)
from torino import TorinoError
from torino.vlm import adapter_for, reduced


class TestInternVL(CellAdapterContract):
    @pytest.fixture(
        scope="class",
        params=[{}, {"use_mean_pooling": False, "use_qk_norm": True, "norm_type": "rms_norm"}],
        ids=["plain", "norms"],
    )
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> Family:
        return Family("internvl", lambda: build_internvl(**request.param))

    def test_merging_happens_before_the_projector(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:1])
        cells: list[Tensor] = []
        hook = model.model.multi_modal_projector.register_forward_pre_hook(
            lambda _, arguments: cells.append(arguments[0][0])
        )
        model.get_image_features(inputs["pixel_values"])
        hook.remove()
        halves = 0.75 * cells[0][0::2] + 0.25 * cells[0][1::2]
        with reduced(model, MergePairs()):
            output = model(**inputs).logits
        merged = [model.model.multi_modal_projector(halves).repeat_interleave(2, 0)]
        expected = logits_by_hand(family, model, inputs, merged, [torch.arange(0, CELLS, 2)])
        torch.testing.assert_close(output, expected, atol=2e-4, rtol=1e-4)

    def test_other_feature_layers(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS)
        for layer, block in ((-2, 1), (1, 0), (3, 2), (0, -1)):
            # transformers 5.23 treats 0 as not set
            stock = generate(model, inputs, vision_feature_layer=layer or -4)
            with reduced(model, KeepAll()):
                assert same(stock, generate(model, inputs, vision_feature_layer=layer))
            encoded = adapter_for(model).encode({**inputs, "vision_feature_layer": layer}, frozenset())
            assert encoded.tokens[0].origin.block == block

    def test_tower_stops_at_the_feature_layer(self, family: Family, model: Any) -> None:
        ran: list[int] = []
        hooks = [
            block.register_forward_hook(lambda *_, number=number: ran.append(number))
            for number, block in enumerate(model.model.vision_tower.encoder.layer)
        ]
        adapter_for(model).encode({**family.inputs(PROMPTS), "vision_feature_layer": -3}, frozenset())
        for hook in hooks:
            hook.remove()
        assert ran == [0]

    def test_cls_attention_is_summed_over_cells(self, family: Family, model: Any) -> None:
        inputs = family.inputs(PROMPTS[:2])
        needs = frozenset({"cls_attention", "keys", "keys@-1"})
        tokens = adapter_for(model).encode(inputs, needs).tokens
        tower = deepcopy(model.model.vision_tower)
        tower.set_attn_implementation("eager")
        keys: list[Tensor] = []
        tower.encoder.layer[2].attention.k_norm.register_forward_hook(lambda _, __, output: keys.append(output))
        attention = tower(inputs["pixel_values"], output_attentions=True).attentions[-1]
        shares = attention[:, :, 0, 1:].reshape(3, 2, 4, 2, 4, 2).sum((3, 5)).reshape(3, 2, CELLS)
        means = keys[0][:, 1:].reshape(3, 4, 2, 4, 2, 16).mean((2, 4)).reshape(3, CELLS, 16)
        for number, image in enumerate(tokens):
            assert image.grid == (4, 4)
            assert image.width == 64
            assert image.cls_attention is not None
            assert image.keys is not None
            torch.testing.assert_close(image.cls_attention, shares[number], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(image.keys, means[number], atol=1e-5, rtol=1e-4)
            assert image.signals["keys@-1"].shape == (CELLS, 16)
        with reduced(model, NeedsClsAttention()):
            generate(model, inputs)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"vision_feature_layer": [1, 2]}, "several tower layers"),
            ({"vision_feature_select_strategy": "full"}, "CLS token among the patches"),
        ],
        ids=["layers", "strategy"],
    )
    def test_unsupported_features_are_refused(
        self, family: Family, model: Any, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TorinoError, match=message), reduced(model, KeepAll()):
            model(**family.inputs(PROMPTS), **options)
