"""Reducers in models that split an image into tiles: a common budget (HiRED), and a question for every tile."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tiny
from tests.support.reference_hired import reference_shares, reference_top_attention
from tests.support.tiny_tiles import IMAGE, NEW, PINPOINTS, ROWS, SIDE, TILE, generate, make_inputs, make_model
from torino import Reduction, VisualTokens, make
from torino.core.errors import BadParameter, MissingSignal, UnmetBudget
from torino.core.reduction import ReductionBatch
from torino.reducers import KeepShare, Reducer
from torino.reducers.hired import plan_tiles
from torino.vlm import ClipText, adapter_for, reduced
from torino.vlm.adapters.llava_next import LlavaNext

SIZES = [(32, 32), (64, 64), (40, 90), (90, 33), (20, 70), (200, 2), (64, 40)]


def views_of(model: Any, inputs: dict[str, Any], size: tuple[int, int]) -> tuple[list[VisualTokens | None], Any]:
    """Return the views of one image from the adapter, and the tile layout from the model's own function."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    layout = get_anyres_image_grid_shape(size, PINPOINTS, SIDE)
    with torch.no_grad():
        encoded = adapter_for(model).encode(inputs, frozenset({"cls_attention", "cls_attention@0"}))
    views: list[VisualTokens | None] = [None] * (1 + prod(layout))
    for number, tokens in zip(encoded.tilings[0].views, encoded.tokens, strict=True):
        views[number] = tokens
    assert encoded.tilings[0].layout == tuple(layout)
    return views, layout


# ---------------------------------------------------------------------- LLaVA-NeXT


@pytest.mark.parametrize("fidelity", ["released", "paper"])
@pytest.mark.parametrize("size", SIZES)
def test_views_share_one_budget(size: tuple[int, int], fidelity: Any) -> None:
    model = make_model("llava_next")
    inputs = make_inputs(model, [[size]])
    views, layout = views_of(model, inputs, size)
    base, *tiles = views
    assert base is not None
    room = sum(len(view) for view in views if view is not None)
    if fidelity == "released" and TILE % prod(layout):
        with (
            reduced(model, make("hired", budget=6)),
            pytest.raises(BadParameter, match=r"into 3 equal runs.*fidelity='paper'"),
        ):
            generate(model, inputs)
        return
    for budget in {1, min(9, room), room // 2, room}:
        reducer = make("hired", budget=budget, fidelity=fidelity)
        expected = plan_tiles(base, tiles, budget, layout=layout, fidelity=fidelity)
        with reduced(model, reducer) as trace:
            out = generate(model, inputs)
        assert [plan.sources.tolist() for plan in trace] == [plan.sources.tolist() for plan in expected]
        assert sum(len(plan) for plan in trace) == budget
        assert {plan.by for plan in trace} == {reducer.spec}
        newlines = trace.after - budget
        assert 0 <= newlines <= trace.before - room
        assert out.shape == (1, inputs["input_ids"].shape[1] + NEW)
    with (
        reduced(model, make("hired", budget=room + 1, fidelity="paper")),
        pytest.raises(UnmetBudget, match=f"has only {room} patches in its base view and tiles"),
    ):
        generate(model, inputs)


@pytest.mark.parametrize("fidelity", ["released", "paper"])
def test_shares_use_block_0_and_patches_use_the_feature_layer(fidelity: Any) -> None:
    """Compare with the reference implementation on the attention maps of the tower."""
    model = make_model("llava_next")
    size, budget = (64, 64), 30
    inputs = make_inputs(model, [[size]])
    tower = model.model.vision_tower
    tower.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            maps = tower(inputs["pixel_values"][0], output_attentions=True).attentions
    finally:
        tower.set_attn_implementation("sdpa")
    first, tap = maps[0][:, :, 0, 1:], maps[-2][:, :, 0, 1:]
    found, _ = reference_shares(first[0], (4, 4), (2, 2), budget, 0.5, fidelity)
    rest = budget - budget // 2
    parts = [count * rest / sum(found) for count in found]
    shares = [int(part) for part in parts]
    for tile in sorted(range(4), key=lambda t: (shares[t] - parts[t], t))[: rest - sum(shares)]:
        shares[tile] += 1
    with reduced(model, make("hired", budget=budget, fidelity=fidelity)) as trace:
        generate(model, inputs)
    assert [len(plan) for plan in trace] == [budget // 2, *shares]
    assert len(set(shares)) > 1, "all tiles are alike, so this shows nothing"
    for plan, attention in zip(trace, tap, strict=True):
        assert plan.sources.tolist() == sorted(reference_top_attention(attention, len(plan)))


@pytest.mark.parametrize("newlines", ["rows", "all", "none"])
def test_views_without_a_token(newlines: Any) -> None:
    """The newline of a row of tiles follows the last token of the row, in any tile."""
    model = make_model("llava_next")
    adapter = LlavaNext(model, newlines=newlines)
    inputs = make_inputs(model, [[(64, 64)]])
    rows = 2 * SIDE // 8
    with torch.no_grad():
        _, look = adapter.reduce_inputs(inputs, make("hired", budget=8, alpha=1.0), "compact")
    assert [len(plan) for plan in look.reductions] == [8, 0, 0, 0, 0]
    assert look.after == (8 + (rows if newlines == "all" else 0),)
    with torch.no_grad():
        shrunk, look = adapter.reduce_inputs(inputs, make("hired", budget=8, alpha=0.0), "compact")
    lengths = [len(plan) for plan in look.reductions]
    assert lengths[0] == 0
    assert sum(lengths) == 8
    kept = {(tile // 2, int(at) // 4) for tile, plan in enumerate(look.reductions[1:]) for at in plan.anchor}
    assert look.after == (8 + {"rows": len(kept), "all": rows, "none": 0}[newlines],)
    assert int((shrunk["input_ids"] == IMAGE).sum()) == look.after[0]


def test_views_without_a_token_are_drawn() -> None:
    from torino.viz.draw import draw_sheet

    model = make_model("llava_next")
    with reduced(model, make("hired", budget=8, alpha=1.0)) as trace:
        out = generate(model, make_inputs(model, [[(64, 64)]]))
    assert out.shape[0] == 1
    pictures: Any = {f"view {number}": (None, [("hired", plan)]) for number, plan in enumerate(trace)}
    for style in ("groups", "kept"):
        assert draw_sheet(pictures, style=style).size[0] > 100  # type: ignore[arg-type]


def test_ragged_batch_is_its_rows_one_by_one() -> None:
    model = make_model("llava_next")
    rows = [[(40, 90)], [], [(64, 60)], [(30, 50), (90, 40)]]
    reducer = make("hired", budget=11, fidelity="paper")
    inputs = make_inputs(model, rows)
    with reduced(model, reducer) as trace:
        together = generate(model, inputs)
        for number, row in enumerate(rows):
            alone = make_inputs(model, [row])
            alone["input_ids"] = inputs["input_ids"][number : number + 1, -alone["input_ids"].shape[1] :]
            assert torch.equal(generate(model, alone)[0, -NEW:], together[number, -NEW:])
    first, *rest = trace.calls
    assert [plan.sources.tolist() for plan in first.reductions] == [
        plan.sources.tolist() for look in rest for plan in look.reductions
    ]
    assert sum(len(plan) for plan in first.reductions) == 4 * 11


def test_others_count_by_tile() -> None:
    model = make_model("llava_next")
    inputs = make_inputs(model, [[(64, 64)]])
    with reduced(model, make("fastervlm", budget=3)) as trace:
        generate(model, inputs)
    assert [len(plan) for plan in trace] == [3] * 5
    single = make("hired", budget=3)
    tokens = VisualTokens(torch.ones(4, 2), (2, 2), cls_attention=torch.rand(2, 4))
    assert single.plan_views(tokens, [], (0, 0))[0].sources.tolist() == single.plan(tokens).sources.tolist()


def test_a_share_is_that_of_all_views() -> None:
    model = make_model("llava_next")
    inputs = make_inputs(model, [[(64, 64)], [(32, 64)]])
    with reduced(model, KeepShare(make("hired", budget=1), 0.25)) as trace:
        generate(model, inputs)
    lengths = [len(plan) for plan in trace]
    assert [sum(lengths[:5]), sum(lengths[5:])] == [5 * TILE // 4, 3 * TILE // 4]
    assert trace[0].by == f"hired(budget={5 * TILE // 4})"
    with reduced(model, KeepShare(make("fastervlm", budget=1), 0.25)) as trace:
        generate(model, inputs)
    assert {len(plan) for plan in trace} == {TILE // 4}
    views = [VisualTokens(torch.ones(4, 2), (2, 2), cls_attention=torch.ones(1, 4)) for _ in range(2)]
    keep = KeepShare(make("fastervlm", budget=1), 0.5)
    assert [len(plan) for plan in keep.plan_views(views[0], [None, views[1]], (1, 2))] == [2, 2]


# ---------------------------------------------------------------------- LLaVA-OneVision


def test_onevision() -> None:
    """A canvas is one tile, an image among several is a base view alone; and SigLIP has no CLS token to ask."""
    model = make_model("llava_onevision", "clip")
    inputs = make_inputs(model, [[(32, 64)], *ROWS[1:]])
    adapter = adapter_for(model)
    with torch.no_grad():
        encoded = adapter.encode(inputs, frozenset({"cls_attention", "cls_attention@0"}))
        resized = [image.packing.resized for image in encoded.extra[0]]
    assert resized == [False, True, False, False, False]
    shapes = [(tiling.views, tiling.layout) for tiling in encoded.tilings]
    # in turn: wide, over the cap, two in one prompt, and a square that fits one tile
    assert shapes == [((0, 1, 2), (1, 2)), ((0, 1), (1, 1)), ((0,), (0, 0)), ((0,), (0, 0)), ((0, 1), (1, 1))]
    with reduced(model, make("hired", budget=9, fidelity="paper")) as trace:
        generate(model, inputs)
    plans = iter(trace)
    counts = [sum(len(next(plans)) for _ in tiling.views) for tiling in encoded.tilings]
    assert counts == [9] * 5
    canvas = plan_tiles(encoded.tokens[3], [encoded.tokens[4]], 9, layout=(1, 1))
    assert [plan.sources.tolist() for plan in canvas] == [trace[3].sources.tolist(), trace[4].sources.tolist()]
    siglip = make_model("llava_onevision")
    with reduced(siglip, make("hired", budget=9)), pytest.raises(MissingSignal, match="attention of a CLS token"):
        generate(siglip, make_inputs(siglip, ROWS))


# ---------------------------------------------------------------------- a question for every tile


@dataclass(frozen=True)
class Reader(Reducer):
    """Plans all views together and records their tokens."""

    shown: list[VisualTokens]
    name = "reader"
    needs = frozenset({"joint", "text"})
    shares_views = True

    def plan(self, tokens: VisualTokens) -> Reduction:
        self.shown.append(tokens)
        return Reduction.identity(tokens.grid, self.spec)

    def plan_views(self, base: VisualTokens, tiles: Any, layout: tuple[int, int]) -> ReductionBatch:
        assert len(tiles) == prod(layout)
        return super().plan_views(base, tiles, layout)


def test_every_tile_gets_the_question_of_its_prompt() -> None:
    model = make_model("llava_next")
    clip = ClipText(*tiny.clip(model.model.vision_tower))
    rows = [[(40, 90)], [], [(64, 60)], [(30, 50), (90, 30)]]
    questions = ["what is this ?", "red", "how many cups", "is that on the table"]
    inputs = make_inputs(model, rows)
    reader = Reader([])
    with reduced(model, reader, text_query=clip.query(questions)), torch.no_grad():
        reduced_logits: Tensor = model(**inputs).logits
    assert torch.equal(reduced_logits, model(**inputs).logits)
    units = [len(tiling.views) for tiling in adapter_for(model).encode(inputs, frozenset()).tilings]
    asked: list[str] = []
    for number, count in zip((0, 2, 3, 3), units, strict=True):
        asked += [questions[number]] * count
    assert len(reader.shown) == len(asked) > 8
    for tokens, question in zip(reader.shown, asked, strict=True):
        assert torch.equal(tokens.signals["text"], clip.text(question))
        assert torch.equal(tokens.signals["joint"], clip.joint(tokens.patches))
    with reduced(model, make("cdpruner", budget=3, space="projected"), text_query=clip.query(questions)) as trace:
        generate(model, inputs)
    assert {len(plan) for plan in trace} == {3}
