"""FOLDER inside the tower: the plan of folder-full, applied before the MLP of the last block."""

from __future__ import annotations

import pytest
import torch

from tests.support import tiny
from torino import VisualTokens, make
from torino.core.errors import MissingSignal, UnmetBudget
from torino.reducers import FolderTower
from torino.vlm.hooks import capture, tower_layout
from torino.vlm.in_tower import run_in_tower

GRID, BLOCK = (4, 4), 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", [2, 7, 12])
@torch.no_grad()
def test_merges_between_attention_and_mlp(attention: str, budget: int) -> None:
    tower = tiny.llava("clip", attention=attention).model.vision_tower
    pixels, layout = tiny.pixels(1), tower_layout(tower)
    output = run_in_tower(tower, layout, BLOCK, make("folder-tower", budget=budget), GRID, lambda: tower(pixels))

    captured = capture(tower, layout, BLOCK, frozenset({"head_keys", "cls_attention"}), lambda: tower(pixels))
    signals = {name: value[0] for name, value in captured.signals.items()}
    attention_of_cls = signals.pop("cls_attention")
    tokens = VisualTokens(captured.states[0, 1:], GRID, cls_attention=attention_of_cls, signals=signals)
    plan = make("folder-full", budget=budget).plan(tokens)
    assert output.plans[0].anchor.tolist() == plan.anchor.tolist()
    assert output.plans[0].assigned.tolist() == plan.assigned.tolist()

    block = layout.blocks[BLOCK]
    before = tower(pixels, output_hidden_states=True).hidden_states[BLOCK]
    attended = before + block.self_attn(block.layer_norm1(before))[0]
    merged = plan.apply(attended[0, 1:])
    expected = merged + block.mlp(block.layer_norm2(merged))
    torch.testing.assert_close(output.states[0, 1:], expected, rtol=1e-4, atol=1e-5)
    after = plan.apply(captured.states[0, 1:])  # merging after the MLP is something else
    assert not torch.allclose(output.states[0, 1:], after, atol=1e-4)


def test_towers_without_cls_are_refused() -> None:
    with pytest.raises(MissingSignal, match="no CLS token"):
        FolderTower(4).removals(16, 3, has_cls=False)


def test_impossible_budgets() -> None:
    with pytest.raises(UnmetBudget):
        FolderTower(17).removals(16, 3, has_cls=True)
    assert FolderTower(16).removals(16, 3, has_cls=True) == [0, 0, 0]
