"""The LLaVA-OneVision adapter on tiny models: resized images, CLS tokens and refusals."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_tiles import TILE, WIDTH, make_inputs, make_model
from torino import Reduction
from torino.core.errors import MissingSignal
from torino.core.reduction import ReductionBatch
from torino.vlm import adapter_for


def test_image_over_the_limit_has_a_base_view_and_a_canvas() -> None:
    model = make_model("llava_onevision")
    inputs = make_inputs(model, [[(64, 60)], [(32, 60)]])
    adapter = adapter_for(model)
    with torch.no_grad():
        over, under = (image.packing for image in adapter.encode(inputs, frozenset()).extra[0])
        encoded = adapter.encode(inputs, frozenset())
    assert (over.resized, under.resized) == (True, False)
    rows = int(over.newline.sum())
    assert [unit.grid for unit in encoded.tokens[:2]] == [(4, 4), (rows, (len(over) - TILE - rows) // rows)]
    assert [unit.grid for unit in encoded.tokens[2:]] == [(4, 4)] * 3
    assert {unit.width for unit in encoded.tokens} == {WIDTH}
    assert len({unit.origin for unit in encoded.tokens}) == 1


def test_canvas_merges_tower_tokens_and_keeps_stock_features() -> None:
    """Resizing commutes with a linear projector, so a merged token is a sum of stock features plus the bias."""
    model = make_model("llava_onevision", projector_hidden_act="linear")
    inputs = make_inputs(model, [[(64, 60)]])
    adapter = adapter_for(model)
    with torch.no_grad():
        stock = model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output[0]
        encoded = adapter.encode(inputs, frozenset())
        base, canvas = encoded.tokens
        plans = ReductionBatch.of(
            [
                Reduction.identity(base.grid),
                Reduction.of([{0: 1.0}, {1: 0.5, 2: 0.25, 7: 0.25}, {9: 1.0}, {3: 0.5}], canvas.grid),
            ]
        )
        plans[1].anchor[2] = 8  # the token takes the slot of a neighbor
        (item,) = adapter.embed(encoded, plans)
        bias = model.model.multi_modal_projector(torch.zeros(WIDTH))
    columns = canvas.grid[1]

    def slot_of(patch: int) -> int:
        return TILE + patch + patch // columns  # a newline follows each row

    newlines = [TILE + columns, TILE + 2 * columns + 1]
    assert item.slots.tolist() == sorted([*range(TILE), slot_of(0), slot_of(1), slot_of(3), slot_of(8), *newlines])
    merged = {
        slot_of(1): 0.5 * stock[slot_of(1)] + 0.25 * stock[slot_of(2)] + 0.25 * stock[slot_of(7)],
        slot_of(3): 0.5 * stock[slot_of(3)] + 0.5 * bias,
    }
    kept = {slot_of(8): stock[slot_of(9)]}
    for slot, feature in zip(item.slots.tolist(), item.features, strict=True):
        if slot in merged:
            assert torch.allclose(feature, merged[slot], atol=1e-4)
        else:
            assert torch.equal(feature, kept.get(slot, stock[slot]))


def test_limit_of_the_call_overrides_the_config() -> None:
    model = make_model("llava_onevision")
    inputs = make_inputs(model, [[(64, 60)]])
    adapter = adapter_for(model)
    with torch.no_grad():
        wide = adapter.encode({**inputs, "vision_aspect_ratio": "anyres_max_9"}, frozenset())
    assert not wide.extra[0][0].packing.resized
    assert len(wide.tokens) == 5


def test_plan_that_keeps_a_missing_cls_token_is_refused() -> None:
    model = make_model("llava_onevision")
    adapter = adapter_for(model)
    encoded = adapter.encode(make_inputs(model, [[(32, 32)]]), frozenset())
    plans = ReductionBatch.of([Reduction.pick(torch.tensor([0, TILE]), unit.grid, "hand") for unit in encoded.tokens])
    with pytest.raises(MissingSignal, match="hand keeps the CLS token, and the tower SiglipVisionModel has none"):
        adapter.embed(encoded, plans)


def test_plan_that_keeps_the_cls_token() -> None:
    model = make_model("llava_onevision", "clip")
    adapter = adapter_for(model)
    inputs = make_inputs(model, [[(64, 60)]])  # resized, so that stock and projected features are mixed
    with torch.no_grad():
        encoded = adapter.encode(inputs, frozenset())
        plans = [Reduction.pick(torch.tensor([0, len(unit)]), unit.grid, "hand") for unit in encoded.tokens]
        (item,) = adapter.embed(encoded, ReductionBatch.of(plans))
        cls = model.model.multi_modal_projector(encoded.tokens[0].cls)
    assert item.slots.tolist()[:3] == [0, TILE - 1, TILE]
    assert torch.allclose(item.features[1], cls, atol=1e-5)


def test_siglip_has_no_cls_attention() -> None:
    model = make_model("llava_onevision")
    with pytest.raises(MissingSignal, match="attention of a CLS token"):
        adapter_for(model).encode(make_inputs(model, [[(32, 32)]]), frozenset({"cls_attention"}))
