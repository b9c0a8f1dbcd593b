"""Families whose images are one sequence of tokens can be stored; others are refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import tiny, tiny_qwen
from torino.core.errors import BadParameter
from torino.core.reduction import Reduction, ReductionBatch
from torino.serving.store.prompt import check_model
from torino.serving.store.worker import _check_one_unit, _labelled
from torino.vlm import adapter_for


def reduce_half(model: Any, inputs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Keep every second patch of each unit."""
    adapter = adapter_for(model)
    encoded = adapter.encode(inputs, frozenset())
    plans = [Reduction.pick(torch.arange(0, len(unit), 2), unit.grid, "half") for unit in encoded.tokens]
    batch = ReductionBatch.of(plans)
    return SimpleNamespace(adapter=adapter, model=model), encoded, batch, adapter.embed(encoded, batch)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_qwen_is_stored_with_a_grid_of_its_own_for_each_image(family: str) -> None:
    inputs = tiny_qwen.make_inputs([[(4, 6)], [(6, 4)]])
    vlm, encoded, plans, embeds = reduce_half(tiny_qwen.make_model(family), inputs)
    _check_one_unit(vlm, 2, len(plans), embeds)
    for item, plan, full in zip(embeds, plans, encoded.full, strict=True):
        image = _labelled(item, plan, full)
        assert len(image.tokens) == len(image.anchors) == len(image.masses) == len(plan)
        assert image.grid == plan.grid
        assert image.full == plan.patches
    with pytest.raises(BadParameter, match="needs more than the tokens of an image to place them"):
        check_model(vlm, None, None)  # type: ignore[arg-type]


@torch.no_grad()
def test_features_of_several_layers_are_refused() -> None:
    vlm, _, plans, embeds = reduce_half(tiny_qwen.make_model("qwen3_vl"), tiny_qwen.make_inputs([[(4, 6)]]))
    with pytest.raises(BadParameter, match="features of several layers of the tower"):
        _check_one_unit(vlm, 1, len(plans), embeds)


@torch.no_grad()
def test_registers_stand_for_no_patch() -> None:
    model = tiny.llava("registers")
    inputs = tiny.prompt("#a", per_image=tiny.PATCHES + tiny.REGISTERS)
    _, encoded, plans, embeds = reduce_half(model, inputs)
    image = _labelled(embeds[0], plans[0], encoded.full[0])
    assert image.full == tiny.PATCHES + tiny.REGISTERS
    assert image.anchors.tolist() == [0, 1, *(tiny.REGISTERS + patch for patch in range(0, tiny.PATCHES, 2))]
    assert image.masses.tolist() == [1] * len(image.tokens)
    assert image.concepts.tolist() == [-1] * len(image.tokens)


def test_tiles_are_refused() -> None:
    adapter = SimpleNamespace(tiles=True)
    vlm: Any = SimpleNamespace(adapter=adapter, model=torch.nn.Identity())
    with pytest.raises(BadParameter, match="splits an image into tiles"):
        _check_one_unit(vlm, 1, 1, [])
