"""ToMe and GTP inside stock vision towers, compared with reference implementations."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.support import tiny, tiny_cells, tiny_qwen, tiny_tiles, tower_zoo
from tests.support.reference_in_tower import reference_gtp_in_tower, reference_tome_in_tower
from tests.support.reference_matching import groups
from torino import Reduction, TorinoError, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers import GTPTower, KeepShare, ToMeTower, TowerReducer, TowerState, as_in_tower
from torino.reducers.in_tower import schedule_removals
from torino.testing import check_reducer, same_plan, sample_tokens, simulate_tower
from torino.vlm import ReducingProcessor, adapter_for, reduced
from torino.vlm.hooks import tower_layout
from torino.vlm.in_tower import InTowerOutput, run_in_tower
from torino.vlm.towers import Tower

TOWERS = ("clip", "siglip", "dinov2", "registers")
GRID = (4, 4)
BLOCK = 2


@lru_cache
def make_tower(kind: str, attention: str = "sdpa") -> Any:
    """Return a tiny tower with random layer scales, so that omitting one changes the result."""
    tower = tiny.llava(kind, attention=attention).model.vision_tower
    source = torch.Generator().manual_seed(5)
    for name, parameter in tower.named_parameters():
        if "lambda1" in name:
            parameter.data.uniform_(0.5, 1.5, generator=source)
    return tower


@torch.no_grad()
def run(tower: Any, reducer: Any, pixels: Tensor, block: int = BLOCK, grid: tuple[int, int] = GRID) -> InTowerOutput:
    return run_in_tower(tower, tower_layout(tower), block, reducer, grid, lambda: tower(pixels))


@torch.no_grad()
def stock(tower: Any, pixels: Tensor, block: int = BLOCK) -> Tensor:
    return tower(pixels, output_hidden_states=True).hidden_states[block + 1]


# ---------------------------------------------------------------------- identity


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_identity_is_bitwise_the_stock_tower(kind: str, attention: str, name: str) -> None:
    tower, pixels = make_tower(kind, attention), tiny.pixels(2)
    for block in (-1, 0, BLOCK):
        output = run(tower, make(name, budget=16), pixels, block)
        assert torch.equal(output.states, stock(tower, pixels, block))
        assert all(plan.is_pruning and plan.anchor.tolist() == list(range(16)) for plan in output.plans)
        assert output.plans[0].by == f"{name}(budget=16)"


def test_swiglu_and_drop_path_of_dinov2() -> None:
    from transformers import Dinov2Config, Dinov2Model

    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
    torch.manual_seed(0)
    tower = Dinov2Model(Dinov2Config(**shape, use_swiglu_ffn=True, drop_path_rate=0.5)).eval()
    pixels = tiny.pixels(1)
    assert torch.equal(run(tower, ToMeTower(16), pixels).states, stock(tower, pixels))
    assert run(tower, ToMeTower(5), pixels).states.shape == (1, 1 + 5, 32)


# ---------------------------------------------------------------------- reference implementations


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize(("budget", "schedule"), [(7, "constant"), (4, "decreasing"), (10, "increasing")])
def test_tome_equals_the_reference(kind: str, budget: int, schedule: Any) -> None:
    tower, reducer = make_tower(kind), ToMeTower(budget, schedule)
    parts = tower_layout(tower)
    removals = reducer.removals(16, BLOCK + 1, parts.has_cls)
    for seed in range(2):
        pixels = tiny.pixels(1, seed=seed)
        expected, tokens = reference_tome_in_tower(tower, pixels, removals, parts.has_cls, parts.prefix)
        output = run(tower, reducer, pixels)
        plan = output.plans[0]
        torch.testing.assert_close(output.states[0].double(), expected, rtol=1e-4, atol=1e-4)
        assert plan.anchor.tolist() == [token.place for token in tokens]
        for row, token in enumerate(tokens):
            entries = slice(int(plan.offsets[row]), int(plan.offsets[row + 1]))
            assert plan.sources[entries].tolist() == token.members
            assert plan.weights[entries].tolist() == pytest.approx([1 / token.size] * len(token.members))
            assert (plan.assigned == row).nonzero()[:, 0].tolist() == token.members


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize(("budget", "alpha", "graph"), [(7, 0.1, "mixed"), (3, 0.4, "spatial"), (11, 0.3, "semantic")])
def test_gtp_equals_the_reference(kind: str, budget: int, alpha: float, graph: Any) -> None:
    tower, reducer = make_tower(kind), GTPTower(budget, alpha, graph)
    removals = reducer.removals(16, BLOCK + 1, tower_layout(tower).has_cls)
    for seed in range(2):
        pixels = tiny.pixels(1, seed=seed)
        expected, places = reference_gtp_in_tower(tower, pixels, removals, alpha, graph)
        output = run(tower, reducer, pixels)
        assert output.plans[0].anchor.tolist() == places
        torch.testing.assert_close(output.states[0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_proportional_attention_can_be_disabled(kind: str, name: str) -> None:
    tower, pixels = make_tower(kind), tiny.pixels(1)
    proportional, plain = (run(tower, make(name, budget=6, proportional=p), pixels).states for p in (True, False))
    assert not torch.allclose(proportional, plain, atol=1e-3)


# ---------------------------------------------------------------------- simple cases


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_merging_identical_patches_changes_nothing(kind: str, attention: str) -> None:
    """With proportional attention, one token of size 16 has the same effect as sixteen equal tokens."""
    tower = copy.deepcopy(make_tower(kind, attention))
    embeddings = tower.embeddings
    with torch.no_grad():
        positions = getattr(embeddings, "position_embedding", None)
        table = positions.weight[None] if positions is not None else embeddings.position_embeddings
        table[:, -16:] = table[:, -1:].clone()
    pixels = torch.ones(1, 3, tiny.SIDE, tiny.SIDE)
    full = stock(tower, pixels)
    prefix = tower_layout(tower).prefix
    for budget in (3, 5, 9):
        output = run(tower, ToMeTower(budget), pixels)
        torch.testing.assert_close(output.states[:, :prefix], full[:, :prefix], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.states[:, prefix:], full[:, -budget:], rtol=1e-5, atol=1e-5)
    if prefix:  # if all tokens are equal, sizes do not matter
        plain = run(tower, ToMeTower(3, proportional=False), pixels).states
        assert not torch.allclose(plain[:, :prefix], full[:, :prefix], atol=1e-3)


def test_merges_of_identical_patches() -> None:
    tower = copy.deepcopy(make_tower("clip"))
    with torch.no_grad():
        tower.embeddings.position_embedding.weight[1:] = 0
    pixels = torch.ones(1, 3, tiny.SIDE, tiny.SIDE)
    # After CLS, patches 1, 3, … are sources, and patch 0 is the first of the equal targets.
    plan = run(tower, ToMeTower(12, order="native"), pixels, block=0).plans[0]
    assert groups(plan) == {
        frozenset({0, 1, 3, 5, 7}),
        *(frozenset({i}) for i in (2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15)),
    }
    assert plan.anchor.tolist() == [9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14]
    raster = run(tower, ToMeTower(12), pixels, block=0).plans[0]
    assert raster.anchor.tolist() == sorted(plan.anchor.tolist())
    assert groups(raster) == groups(plan)


def test_one_block() -> None:
    tower, pixels = make_tower("dinov2"), tiny.pixels(1)
    block, x = tower.encoder.layer[0], stock(tower, pixels, -1)
    with torch.no_grad():
        x = x + block.layer_scale1(block.attention(block.norm1(x))[0])
        output = run(tower, GTPTower(9, 0.3), pixels, block=0)
        y = torch.cat([x[0, :1], output.plans[0].apply(x[0, 1:])])
        y = y + block.layer_scale2(block.mlp(block.norm2(y)))
    torch.testing.assert_close(output.states[0], y)


# ---------------------------------------------------------------------- budgets and schedules


def test_removals_for_llava() -> None:
    for budget, expected in ((192, [16] * 7 + [17] * 16), (128, [19] * 12 + [20] * 11), (64, [22] * 17 + [23] * 6)):
        assert ToMeTower(budget).removals(576, 23, True) == expected
        assert GTPTower(budget).removals(576, 23, True) == expected
        decreasing = ToMeTower(budget, "decreasing").removals(576, 23, True)
        assert sum(decreasing) == 576 - budget
        assert decreasing[-1] == 0
        assert abs(decreasing[0] - 2 * (576 - budget) / 23) <= 1
        assert max(b - a for a, b in pairwise(decreasing)) <= 0
        increasing = ToMeTower(budget, "increasing").removals(576, 23, True)
        assert increasing[0] == 0
        assert min(b - a for a, b in pairwise(increasing)) >= 0


@pytest.mark.parametrize("has_cls", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "decreasing", "increasing"])
def test_tome_meets_every_budget_that_halving_can_meet(has_cls: bool, schedule: Any) -> None:
    for patches in (1, 2, 3, 7, 16, 33):
        for blocks in range(6):
            minimum = patches
            for _ in range(blocks):
                minimum -= (minimum + has_cls - 1) // 2
            for budget in range(1, patches + 1):
                reducer = ToMeTower(budget, schedule)
                if budget < minimum:
                    with pytest.raises(
                        UnmetBudget, match=f"{blocks} blocks up to the feature layer.* leave {minimum} of {patches}"
                    ):
                        reducer.removals(patches, blocks, has_cls)
                    continue
                removals, remaining = reducer.removals(patches, blocks, has_cls), patches
                assert len(removals) == blocks
                for r in removals:
                    assert 0 <= r <= (remaining + has_cls - 1) // 2
                    remaining -= r
                assert remaining == budget


def test_gtp_meets_every_budget() -> None:
    for patches in (1, 2, 9):
        for budget in range(1, patches + 1):
            for blocks in (1, 2, 5):
                removals = GTPTower(budget).removals(patches, blocks, True)
                assert sum(removals) == patches - budget
                assert removals == sorted(removals)
    with pytest.raises(UnmetBudget, match="there is no block up to the feature layer, so all 9 patches remain"):
        GTPTower(3).removals(9, 0, True)


def test_block_removes_more_only_if_later_blocks_cannot() -> None:
    half: dict[str, Any] = {"max_removals": lambda tokens: tokens // 2, "max_tokens": lambda left: 10 << left}
    assert schedule_removals(40, 10, 2, schedule="increasing", **half) == [20, 10]
    assert schedule_removals(40, 10, 3, schedule="increasing", **half) == [0, 20, 10]
    assert schedule_removals(16, 10, 3, schedule="increasing", **half) == [0, 2, 4]


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_budgets_are_exact_and_plans_are_complete(kind: str, name: str) -> None:
    tower, pixels = make_tower(kind), tiny.pixels(2, seed=3)
    prefix = tower_layout(tower).prefix
    for budget in (3, 4, 7, 11, 15):
        for order in ("raster", "native"):
            output = run(tower, make(name, budget=budget, order=order), pixels)
            assert output.states.shape == (2, prefix + budget, tiny.WIDTH)
            for plan in output.plans:
                assert (len(plan), plan.grid) == (budget, GRID)
                assert len(set(plan.anchor.tolist())) == budget
                assert torch.equal(plan.assigned[plan.anchor], torch.arange(budget))
                if order == "raster":
                    assert bool((plan.anchor.diff() > 0).all())
                if name == "tome-tower":  # every patch is in one token, which is the mean of its patches
                    assert bool((plan.assigned >= 0).all())
                    sizes = plan.assigned.bincount(minlength=budget)
                    assert torch.equal(plan.offsets.diff(), sizes)
                    assert torch.equal(plan.assigned[plan.sources], plan.rows)
                    torch.testing.assert_close(plan.weights, 1 / sizes[plan.rows])


def test_plan_applied_to_the_full_tower_gives_other_tokens() -> None:
    """The blocks between the steps change the values, as the docstrings say."""
    tower, pixels = make_tower("clip"), tiny.pixels(1)
    output = run(tower, ToMeTower(6), pixels)
    applied = output.plans[0].apply(stock(tower, pixels)[0, 1:])
    assert applied.shape == output.states[0, 1:].shape
    assert not torch.allclose(applied, output.states[0, 1:], atol=1e-2)


# ---------------------------------------------------------------------- batches, threads, precision, unchanged towers


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_batch_equals_single_images(kind: str, name: str) -> None:
    tower, pixels, reducer = make_tower(kind), tiny.pixels(4, seed=8), make(name, budget=6)
    together = run(tower, reducer, pixels)
    for i in range(4):
        alone = run(tower, reducer, pixels[i : i + 1])
        torch.testing.assert_close(together.states[i], alone.states[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(together.plans[i].assigned, alone.plans[0].assigned)
        assert torch.equal(together.plans[i].anchor, alone.plans[0].anchor)


def snapshot(tower: nn.Module) -> list[Any]:
    """Return everything that a run could change in a tower."""
    kept: list[Any] = []
    for name, module in tower.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("hooks")]
        kept.append((name, type(module), sorted(vars(module)), module.training, hooks))
    return [*kept, *(value.clone() for value in tower.state_dict().values())]


def same_snapshot(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(first, second, strict=True))


@dataclass(frozen=True)
class FailsInSecondBlock(ToMeTower):
    """Fail in the second block."""

    def reduce(self, state: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        if state.block == 1:
            raise RuntimeError("broken on purpose")
        return super().reduce(state, signals, r)


@pytest.mark.parametrize("kind", TOWERS)
def test_tower_is_unchanged_even_after_an_exception(kind: str) -> None:
    tower, pixels = copy.deepcopy(make_tower(kind)), tiny.pixels(1)
    answer = stock(tower, pixels)  # transformers registers its own hooks when hidden states are first requested
    before = snapshot(tower)
    run(tower, GTPTower(5), pixels)
    assert same_snapshot(before, snapshot(tower))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        run(tower, FailsInSecondBlock(5), pixels)
    assert same_snapshot(before, snapshot(tower))
    assert torch.equal(stock(tower, pixels), answer)


def test_threads_share_a_tower() -> None:
    tower = make_tower("clip")
    reducers = [ToMeTower(9), GTPTower(5), ToMeTower(3), GTPTower(12)]
    pixels = [tiny.pixels(1, seed=seed) for seed in range(4)]
    expected = [run(tower, *pair).states for pair in zip(reducers, pixels, strict=True)]
    results: dict[int, list[Tensor]] = {}

    def work(i: int) -> None:
        results[i] = [run(tower, reducers[i], pixels[i]).states for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(states, expected[i]) for i in range(4) for states in results[i])


@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision_and_autocast(name: str, attention: str) -> None:
    tower, pixels = make_tower("clip", attention), tiny.pixels(2)
    half = copy.deepcopy(tower).bfloat16()
    output = run(half, make(name, budget=6), pixels.bfloat16())
    assert output.states.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        autocast = run(tower, make(name, budget=6), pixels)
    for states in (output.states, autocast.states):
        assert states.shape == (2, 7, tiny.WIDTH)
        assert bool(states.isfinite().all())


# ---------------------------------------------------------------------- in models


def get_logits(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_llava_uses_the_output_of_the_tower(kind: str, name: str) -> None:
    model, reducer = tiny.llava(kind), make(name, budget=6)
    registers = tiny.REGISTERS if kind == "registers" else 0
    inputs = tiny.prompt("ab#c", "#de#f", per_image=16 + registers)
    tower, pixels = model.model.vision_tower, inputs["pixel_values"]
    with reduced(model, reducer) as trace:
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    length = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :length], inputs["input_ids"])
    assert out.shape[1] == length + 4
    assert (trace.before, trace.after, len(trace)) == (3 * (16 + registers), 3 * (6 + registers), 3)
    assert "steps" in trace.seconds
    assert "plan" not in trace.seconds
    output = run(tower, reducer, pixels)
    assert all(same_plan(a, b) for a, b in zip(trace, output.plans, strict=True))
    reduced_inputs, _ = adapter_for(model).reduce_inputs(inputs, reducer, "compact")
    with torch.no_grad():
        features = model.model.multi_modal_projector(output.states[:, int(tower_layout(tower).has_cls) :])
    for actual, expected in zip(reduced_inputs["mm_encoder_outputs"]["image"].pooler_output, features, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", TOWERS)
def test_llava_identity_is_the_stock_model(kind: str) -> None:
    model = tiny.llava(kind)
    inputs = tiny.prompt("ab#c", "#de", per_image=16 + (tiny.REGISTERS if kind == "registers" else 0))
    expected = get_logits(model, inputs)
    with reduced(model, ToMeTower(16)):
        assert torch.equal(get_logits(model, inputs), expected)
    assert torch.equal(get_logits(model, inputs), expected)


def test_share_of_tokens() -> None:
    model, inputs = tiny.llava(), tiny.prompt("a#bc")
    with reduced(model, KeepShare(ToMeTower(1), 0.25)) as trace:
        get_logits(model, inputs)
    assert trace[0].by == "tome-tower(budget=4)"
    assert trace.after == 4


def test_positions_processor_and_another_layer() -> None:
    model, inputs = tiny.llava(), tiny.prompt("a#bc")
    with reduced(model, ToMeTower(6), positions="original") as trace:
        model.generate(**inputs, max_new_tokens=2)
        model.generate(**inputs, max_new_tokens=2, vision_feature_layer=-1)
    assert not same_plan(trace[0], trace[1])  # one more block
    processor = ReducingProcessor(tiny.TinyProcessor(), model, GTPTower(6))
    ready = processor(images=tiny.pixels(1), text="a#bc")
    assert int((ready["input_ids"] == tiny.IMAGE).sum()) == 6
    assert model.generate(**ready, max_new_tokens=2).shape[1] == ready["input_ids"].shape[1] + 2


def test_gradients_reach_the_patch_embedding() -> None:
    model, inputs = tiny.llava(), tiny.prompt("a#bc")
    with reduced(model, ToMeTower(6)):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert float(model.model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum()) > 0


def test_paligemma() -> None:
    model = tiny_cells.randomize(tiny_cells.build_paligemma({"model_type": "gemma"}))
    ids = torch.tensor([[*[tiny_cells.IMAGE] * 16, 5, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    inputs["pixel_values"] = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = get_logits(model, inputs)
    with reduced(model, ToMeTower(16)):
        torch.testing.assert_close(get_logits(model, inputs), expected, rtol=1e-5, atol=1e-5)
    with reduced(model, ToMeTower(5)) as trace:
        assert get_logits(model, inputs).shape[1] == 5 + 3
    assert (trace.before, trace.after) == (16, 5)


# ---------------------------------------------------------------------- Tower.reduce


@pytest.mark.parametrize("kind", ["clip", "whole-clip", "siglip", "dinov2", "dinov2-registers", "llava"])
def test_tower_reduce(kind: str) -> None:
    torch.manual_seed(0)
    model, processor = tower_zoo.KINDS[kind]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tower = Tower(model.eval(), processor, block=1)
    photos = [tower_zoo.photo(seed=seed) for seed in range(3)]
    full = tower.encode(photos)
    for tokens, (reduced_tokens, plan) in zip(full, tower.reduce(photos, ToMeTower(len(full[0]))), strict=True):
        assert torch.equal(reduced_tokens, tokens.patches)
        assert len(plan) == len(tokens)
    in_tower = tower.reduce(photos, GTPTower(5), batch=2)
    for (reduced_tokens, plan), (single_tokens, single_plan) in zip(
        in_tower, [tower.reduce(photo, GTPTower(5))[0] for photo in photos], strict=True
    ):
        assert reduced_tokens.shape == (5, tower.width)
        torch.testing.assert_close(reduced_tokens, single_tokens)
        assert torch.equal(plan.anchor, single_plan.anchor)
    on_output = make("tome", budget=5, class_token=tower.has_cls)
    for tokens, (reduced_tokens, plan) in zip(
        tower.encode(photos, on_output.needs), tower.reduce(photos, on_output), strict=True
    ):
        assert same_plan(plan, on_output.plan(tokens))
        assert torch.equal(reduced_tokens, plan.apply(tokens.patches))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_output_tokens_are_refused(name: str) -> None:
    reducer = make(name, budget=4)
    for tokens in sample_tokens(needs=reducer.needs):
        with pytest.raises(
            MissingSignal, match=f"{name} works inside the vision tower.*output tokens of a tower.*Tower.reduce"
        ):
            reducer.plan(tokens)
    with pytest.raises(MissingSignal, match="such as tome or gtp"):
        reducer.plan_batch(sample_tokens())
    assert as_in_tower(reducer) is reducer
    assert as_in_tower(make("tome", budget=4)) is None


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: tiny_qwen.make_model("qwen2_5_vl"), "merges 2x2 patches"),
        (lambda: tiny_tiles.make_model("llava_next"), "tiles are cropped"),
        (lambda: tiny_tiles.make_model("llava_onevision"), "tiles are cropped"),
        (tiny_cells.build_internvl, "cells of several patches"),
        (tiny_cells.build_gemma3, "cells of several patches"),
    ],
)
def test_families_that_do_not_support_it(build: Any, reason: str) -> None:
    adapter = adapter_for(build())
    pixels = torch.zeros(8, 8) if adapter.pixel_ndims == (2,) else torch.zeros(1, 3, 8, 8)
    inputs = {"input_ids": torch.tensor([[adapter.image_token]]), "pixel_values": pixels}
    with pytest.raises(
        TorinoError, match=f"inside the vision tower.*{type(adapter.model).__name__} does not allow: .*{reason}"
    ):
        adapter.reduce_inputs(inputs, ToMeTower(4), "compact")


def test_towers_for_images_of_different_shapes_are_refused() -> None:
    for kind in ("siglip2", "qwen2"):
        tower = Tower(*tower_zoo.KINDS[kind](), block=0)
        with pytest.raises(TorinoError, match="images of different shapes in one batch"):
            tower.reduce(tower_zoo.photo(), ToMeTower(4))


def test_budgets_that_cannot_be_met_are_refused() -> None:
    tower, pixels = make_tower("clip"), tiny.pixels(1)
    with pytest.raises(UnmetBudget, match=r"tome-tower cannot give 1 tokens.*3 blocks.*leave 2 of 16"):
        run(tower, ToMeTower(1), pixels)
    for name in ("tome-tower", "gtp-tower"):
        with pytest.raises(UnmetBudget, match=f"{name} cannot give 17 tokens: the image has only 16 patches"):
            run(tower, make(name, budget=17), pixels)
    assert run(tower, GTPTower(1), pixels).states.shape == (1, 2, tiny.WIDTH)


def test_attention_without_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, pixels = make_tower("clip"), tiny.pixels(1)
    monkeypatch.setattr(tower.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(TorinoError, match=r'flash_attention_2 does not take one. Load .*attn_implementation="sdpa"'):
        run(tower, ToMeTower(6), pixels)


def test_unknown_blocks_signals_and_grids_are_refused() -> None:
    tower, pixels = copy.deepcopy(make_tower("clip")), tiny.pixels(1)
    with pytest.raises(TorinoError, match="CLIPVisionModel made 16 patches of an image with a grid of 4x5"):
        run(tower, ToMeTower(6), pixels, grid=(4, 5))
    needs_values = type("NeedsValues", (ToMeTower,), {"needs": frozenset({"values"})})(6)
    with pytest.raises(
        MissingSignal, match="reads values of each block; inside a tower the available signals are head_keys, keys"
    ):
        run(tower, needs_values, pixels)
    tower.encoder.layers[1].gate = nn.Identity()
    with pytest.raises(TorinoError, match=r"cannot run a reducer inside the blocks of CLIPVisionModel .*gate"):
        run(tower, ToMeTower(6), pixels)
    assert run(tower, ToMeTower(8), pixels, block=0).states.shape[1] == 9  # the unknown block never runs


def test_non_finite_values_are_refused() -> None:
    tower, pixels = copy.deepcopy(make_tower("clip")), tiny.pixels(1)
    tower.encoder.layers[1].self_attn.k_proj.bias.data.fill_(math.nan)
    with pytest.raises(BadTokens, match="The keys of block 1 hold NaN or infinite values"):
        run(tower, ToMeTower(6), pixels)
    with pytest.raises(BadTokens, match="The attention maps of block 1 hold NaN"):
        run(tower, GTPTower(6), pixels)
    with pytest.raises(BadTokens, match="The embedded patches hold NaN"):
        run(tower, GTPTower(6), pixels * math.nan)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tome-tower", {"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ("tome-tower", {"schedule": "linear"}, "schedule must be one of 'constant', 'decreasing', 'increasing'"),
        ("tome-tower", {"proportional": 1}, "proportional must be True or False, got 1"),
        ("tome-tower", {"order": "x"}, "order must be one of"),
        ("gtp-tower", {"budget": -1}, "budget must be a whole number of at least 1, got -1"),
        ("gtp-tower", {"alpha": math.nan}, "alpha must be a finite number of at least 0, got nan"),
        ("gtp-tower", {"graph": "x"}, "graph must be one of 'mixed', 'spatial', 'semantic', got 'x'"),
        ("gtp-tower", {"neighbors": 0}, "neighbors must be a whole number of at least 1, got 0"),
        ("gtp-tower", {"proportional": None}, "proportional must be True or False, got None"),
        ("gtp-tower", {"order": 0}, "order must be one of"),
    ],
)
def test_wrong_parameters_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make(name, **{"budget": 4, **changes})


# ---------------------------------------------------------------------- check_reducer for in-tower reducers


@dataclass(frozen=True, repr=False)
class Norms(TowerReducer):
    """Drop the tokens with the smallest norm of queries plus keys, or violate a rule on purpose."""

    fault: str = ""
    budget: int = 3
    proportional: bool = True
    order: Any = "raster"

    name = "norms"
    needs: ClassVar[frozenset[str]] = frozenset({"keys", "queries"})

    def removals(self, patches: int, blocks: int, has_cls: bool) -> list[int]:
        if patches < self.budget:
            raise UnmetBudget("too small")
        removals = [0] * (blocks - 1) + [patches - self.budget]
        return removals[1:] if self.fault == "blocks" else removals

    def reduce(self, state: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        length = (signals["keys"] + signals["queries"]).norm(dim=1)
        kept = length.argsort(descending=True)[: len(length) - r + (self.fault == "count")]
        sizes = state.sizes[kept] * (0 if self.fault == "sizes" else 1)
        step = Reduction.pick(kept, (1, len(length)), self.name)
        return step, sizes[1:] if self.fault == "few sizes" else sizes, None

    def plan(self, tokens: VisualTokens) -> Reduction:
        if self.fault == "plans":
            return Reduction.identity(tokens.grid)
        return super().plan(tokens)


def test_custom_reducer() -> None:
    check_reducer(Norms())
    output = run(make_tower("clip"), Norms(budget=5), tiny.pixels(2))
    assert output.states.shape == (2, 6, tiny.WIDTH)
    assert all(plan.is_pruning for plan in output.plans)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("blocks", "removals for 5 of 6 blocks"),
        ("count", r"kept 4 tokens in a block instead of 3"),
        ("sizes", "sizes that are not positive"),
        ("few sizes", "gave 2 sizes for 3 tokens"),
        ("plans", "planned output tokens"),
    ],
)
def test_check_reducer_finds_violations(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_reducer(Norms(fault))


@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_check_reducer_with_and_without_cls(name: str) -> None:
    bare = [image.with_(cls=None, cls_attention=None) for image in sample_tokens()]
    check_reducer(make(name, budget=7), bare)
    check_reducer(make(name, budget=16, proportional=False))
    states, plan = simulate_tower(make(name, budget=7), bare[0])  # type: ignore[arg-type]
    assert states.shape == (7, bare[0].width)
    assert len(plan) == 7
