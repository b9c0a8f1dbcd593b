"""ToMe and GTP inside towers of stock transformers, block by block: against the published rules with plain loops."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import test_gemma
import test_internvl
import test_llava_next
import test_qwen
import test_towers
import tiny
import torch
from slow_matching import Token, groups, patches_of, step
from test_gtp import slow_graph, slow_step
from torch import Tensor, nn

from torino import BadParameter, BadTokens, MissingSignal, Reduction, TorinoError, UnmetBudget, VisualTokens, make
from torino.reducers import GTPTower, ToMeTower, TowerReducer, TowerState, as_in_tower
from torino.reducers.in_tower import spread
from torino.testing import check_reducer, pretend_tower, same_plan, sample_tokens
from torino.vlm import ReducingProcessor, adapter_for, reduced
from torino.vlm.hooks import tower_layout
from torino.vlm.in_tower import Passed, run_in_tower
from torino.vlm.session import KeepShare
from torino.vlm.towers import Tower

TOWERS = ("clip", "siglip", "dinov2", "registers")
GRID = (4, 4)
TAP = 2


@lru_cache
def tower_of(kind: str, attention: str = "sdpa") -> Any:
    """A tiny tower; layer scales of their own, so that leaving one out would show."""
    tower = tiny.llava(kind, attention=attention).model.vision_tower
    source = torch.Generator().manual_seed(5)
    for name, parameter in tower.named_parameters():
        if "lambda1" in name:
            parameter.data.uniform_(0.5, 1.5, generator=source)
    return tower


@torch.no_grad()
def run(tower: Any, reducer: Any, pixels: Tensor, block: int = TAP, grid: tuple[int, int] = GRID) -> Passed:
    return run_in_tower(tower, tower_layout(tower), block, reducer, grid, lambda: tower(pixels))


@torch.no_grad()
def stock(tower: Any, pixels: Tensor, block: int = TAP) -> Tensor:
    return tower(pixels, output_hidden_states=True).hidden_states[block + 1]


# ---------------------------------------------------------------------- nothing removed


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_removing_nothing_is_the_stock_tower_to_the_bit(kind: str, attention: str, name: str) -> None:
    tower, pixels = tower_of(kind, attention), tiny.pictures(2)
    for block in (-1, 0, TAP):
        passed = run(tower, make(name, budget=16), pixels, block)
        assert torch.equal(passed.states, stock(tower, pixels, block))
        assert all(plan.is_pruning and plan.anchor.tolist() == list(range(16)) for plan in passed.plans)
        assert passed.plans[0].by == f"{name}(budget=16)"


def test_gates_and_dropped_paths_of_dinov2() -> None:
    from transformers import Dinov2Config, Dinov2Model

    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
    torch.manual_seed(0)
    tower = Dinov2Model(Dinov2Config(**shape, use_swiglu_ffn=True, drop_path_rate=0.5)).eval()
    pixels = tiny.pictures(1)
    assert torch.equal(run(tower, ToMeTower(16), pixels).states, stock(tower, pixels))
    assert run(tower, ToMeTower(5), pixels).states.shape == (1, 1 + 5, 32)


# ---------------------------------------------------------------------- the rules with plain loops


def inner(block: Any) -> tuple[Any, ...]:
    """Norm, attention, its output projection, scale, norm, MLP, scale."""
    if hasattr(block, "self_attn"):
        same: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
        return block.layer_norm1, block.self_attn, block.self_attn.out_proj, same, block.layer_norm2, block.mlp, same
    attention = block.attention
    return block.norm1, attention, attention.o_proj, block.layer_scale1, block.norm2, block.mlp, block.layer_scale2


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def attend(attention: Any, x: Tensor, sizes: list[float]) -> tuple[Tensor, list[list[list[float]]], list[list[float]]]:
    """Attention with ln(size) on the key side, one logit at a time: output, maps by head, keys averaged over heads."""
    heads = 4
    query, key, value = (
        part(x).unflatten(1, (heads, -1)).transpose(0, 1).tolist()
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    count, width = len(x), len(key[0][0])
    maps: list[list[list[float]]] = []
    mixed = [[0.0] * (heads * width) for _ in range(count)]
    for head in range(heads):
        rows: list[list[float]] = []
        for q in range(count):
            logits = [dot(query[head][q], key[head][k]) / math.sqrt(width) + math.log(sizes[k]) for k in range(count)]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            rows.append([weight / sum(weights) for weight in weights])
            for d in range(width):
                mixed[q][head * width + d] = sum(rows[q][k] * value[head][k][d] for k in range(count))
        maps.append(rows)
    keys = [[sum(key[head][k][d] for head in range(heads)) / heads for d in range(width)] for k in range(count)]
    return torch.tensor(mixed, dtype=torch.float64), maps, keys


@torch.no_grad()
def slow_tome(tower: Any, pixels: Tensor, removals: list[int], has_cls: bool, prefix: int) -> tuple[Tensor, Any]:
    """The tower with ToMe, one image; CLS is a token of the sequence, registers stand behind it."""
    wide = copy.deepcopy(tower).double()
    x = wide(pixels.double(), output_hidden_states=True).hidden_states[0][0]
    aside = x[int(has_cls) : prefix]
    tokens = [Token(place, [], row, 1.0, 0.0, [place]) for place, row in enumerate(x[prefix:].tolist())]
    if has_cls:
        tokens = [Token(-1, [], x[0].tolist()), *tokens]
    for block, r in zip(tower_layout(wide).blocks, removals, strict=False):
        norm1, attention, project, scale1, norm2, mlp, scale2 = inner(block)
        x = torch.cat([torch.tensor([token.feature for token in tokens], dtype=torch.float64), aside])
        mixed, _, keys = attend(attention, norm1(x), [token.size for token in tokens] + [1.0] * len(aside))
        x = x + scale1(project(mixed))
        for token, key, feature in zip(tokens, keys, x.tolist(), strict=False):
            token.metric, token.feature = key, feature
        aside = x[len(tokens) :]
        tokens = step(tokens, r, in_place_order=False) if r else tokens
        x = torch.cat([torch.tensor([token.feature for token in tokens], dtype=torch.float64), aside])
        x = x + scale2(mlp(norm2(x)))
        for token, feature in zip(tokens, x.tolist(), strict=False):
            token.feature = feature
        aside = x[len(tokens) :]
    cls = torch.tensor([token.feature for token in tokens if token.place < 0], dtype=torch.float64)
    left = sorted(patches_of(tokens), key=lambda token: token.place)
    features = torch.tensor([token.feature for token in left], dtype=torch.float64)
    return torch.cat([cls.reshape(-1, x.shape[1]), aside, features]), left


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize(("budget", "schedule"), [(7, "constant"), (4, "decreasing"), (10, "increasing")])
def test_tome_equals_the_rule_one_token_at_a_time(kind: str, budget: int, schedule: Any) -> None:
    tower, reducer = tower_of(kind), ToMeTower(budget, schedule)
    parts = tower_layout(tower)
    removals = reducer.removals(16, TAP + 1, parts.has_cls)
    for seed in range(2):
        pixels = tiny.pictures(1, seed=seed)
        wanted, left = slow_tome(tower, pixels, removals, parts.has_cls, parts.prefix)
        passed = run(tower, reducer, pixels)
        plan = passed.plans[0]
        torch.testing.assert_close(passed.states[0].double(), wanted, rtol=1e-4, atol=1e-4)
        assert plan.anchor.tolist() == [token.place for token in left]
        for row, token in enumerate(left):
            entries = slice(int(plan.offsets[row]), int(plan.offsets[row + 1]))
            assert plan.sources[entries].tolist() == token.members
            assert plan.weights[entries].tolist() == pytest.approx([1 / token.size] * len(token.members))
            assert (plan.assigned == row).nonzero()[:, 0].tolist() == token.members


@torch.no_grad()
def slow_gtp(tower: Any, pixels: Tensor, removals: list[int], alpha: float, graph: str) -> tuple[Tensor, list[int]]:
    """The tower with GTP, one image; the tokens before the patches stay in front."""
    wide = copy.deepcopy(tower).double()
    prefix = tower_layout(tower).prefix
    x = wide(pixels.double(), output_hidden_states=True).hidden_states[0][0]
    joined = slow_graph(VisualTokens(x[prefix:].float(), GRID), graph, 8)
    places, scales = list(range(16)), [1.0] * 16
    for block, p in zip(tower_layout(wide).blocks, removals, strict=False):
        norm1, attention, project, scale1, norm2, mlp, scale2 = inner(block)
        mixed, maps, _ = attend(attention, norm1(x), [1.0] * prefix + scales)
        x = x + scale1(project(mixed))
        rank = [
            max(rows[i][i] for rows in maps) * max(sum(row[i] for row in rows) for rows in maps)
            for i in range(prefix, len(x))
        ]
        kept, rows = slow_step(joined, rank, p, alpha, 1)
        weights = torch.tensor(rows, dtype=torch.float64)
        x = torch.cat([x[:prefix], weights @ x[prefix:]])
        scales = [dot(row, scales) for row in rows]
        joined, places = [[joined[i][j] for j in kept] for i in kept], [places[i] for i in kept]
        x = x + scale2(mlp(norm2(x)))
    order = sorted(range(len(places)), key=lambda i: places[i])
    return torch.cat([x[:prefix], x[prefix:][order]]), [places[i] for i in order]


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize(("budget", "alpha", "graph"), [(7, 0.1, "mixed"), (3, 0.4, "spatial"), (11, 0.3, "semantic")])
def test_gtp_equals_the_rule_one_token_at_a_time(kind: str, budget: int, alpha: float, graph: Any) -> None:
    tower, reducer = tower_of(kind), GTPTower(budget, alpha, graph)
    removals = reducer.removals(16, TAP + 1, tower_layout(tower).has_cls)
    for seed in range(2):
        pixels = tiny.pictures(1, seed=seed)
        wanted, places = slow_gtp(tower, pixels, removals, alpha, graph)
        passed = run(tower, reducer, pixels)
        assert passed.plans[0].anchor.tolist() == places
        torch.testing.assert_close(passed.states[0].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_sizes_in_the_attention_can_be_left_out(kind: str, name: str) -> None:
    tower, pixels = tower_of(kind), tiny.pictures(1)
    weighed, plain = (run(tower, make(name, budget=6, proportional=p), pixels).states for p in (True, False))
    assert not torch.allclose(weighed, plain, atol=1e-3)


# ---------------------------------------------------------------------- worked cases


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_identical_patches_count_in_attention_as_often_as_they_are(kind: str, attention: str) -> None:
    """Sixteen tokens that are alike, or one that counts sixteen times: nothing else in the tower can tell."""
    tower = copy.deepcopy(tower_of(kind, attention))
    embeddings = tower.embeddings
    with torch.no_grad():
        positions = getattr(embeddings, "position_embedding", None)
        table = positions.weight[None] if positions is not None else embeddings.position_embeddings
        table[:, -16:] = table[:, -1:].clone()
    pixels = torch.ones(1, 3, tiny.SIDE, tiny.SIDE)
    whole = stock(tower, pixels)
    prefix = tower_layout(tower).prefix
    for budget in (3, 5, 9):
        passed = run(tower, ToMeTower(budget), pixels)
        torch.testing.assert_close(passed.states[:, :prefix], whole[:, :prefix], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(passed.states[:, prefix:], whole[:, -budget:], rtol=1e-5, atol=1e-5)
    if prefix:  # where there is nothing but alike tokens, sizes do not matter
        plain = run(tower, ToMeTower(3, proportional=False), pixels).states
        assert not torch.allclose(plain[:, :prefix], whole[:, :prefix], atol=1e-3)


def test_who_merges_with_whom_among_identical_patches() -> None:
    tower = copy.deepcopy(tower_of("clip"))
    with torch.no_grad():
        tower.embeddings.position_embedding.weight[1:] = 0
    pixels = torch.ones(1, 3, tiny.SIDE, tiny.SIDE)
    # behind CLS, patches 1, 3, … are sources and patch 0 the first of all targets that are alike
    plan = run(tower, ToMeTower(12, order="native"), pixels, block=0).plans[0]
    assert groups(plan) == {
        frozenset({0, 1, 3, 5, 7}),
        *(frozenset({i}) for i in (2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15)),
    }
    assert plan.anchor.tolist() == [9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14]
    raster = run(tower, ToMeTower(12), pixels, block=0).plans[0]
    assert raster.anchor.tolist() == sorted(plan.anchor.tolist())
    assert groups(raster) == groups(plan)


def test_one_block_is_the_step_and_its_mlp() -> None:
    tower, pixels = tower_of("dinov2"), tiny.pictures(1)
    block, x = tower.encoder.layer[0], stock(tower, pixels, -1)
    with torch.no_grad():
        x = x + block.layer_scale1(block.attention(block.norm1(x))[0])
        passed = run(tower, GTPTower(9, 0.3), pixels, block=0)
        y = torch.cat([x[0, :1], passed.plans[0].apply(x[0, 1:])])
        y = y + block.layer_scale2(block.mlp(block.norm2(y)))
    torch.testing.assert_close(passed.states[0], y)


# ---------------------------------------------------------------------- budgets and schedules


def test_removals_of_llava() -> None:
    for budget, wanted in ((192, [16] * 7 + [17] * 16), (128, [19] * 12 + [20] * 11), (64, [22] * 17 + [23] * 6)):
        assert ToMeTower(budget).removals(576, 23, True) == wanted
        assert GTPTower(budget).removals(576, 23, True) == wanted
        falling = ToMeTower(budget, "decreasing").removals(576, 23, True)
        assert sum(falling) == 576 - budget
        assert falling[-1] == 0
        assert abs(falling[0] - 2 * (576 - budget) / 23) <= 1
        assert max(b - a for a, b in pairwise(falling)) <= 0
        rising = ToMeTower(budget, "increasing").removals(576, 23, True)
        assert rising[0] == 0
        assert min(b - a for a, b in pairwise(rising)) >= 0


@pytest.mark.parametrize("has_cls", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "decreasing", "increasing"])
def test_a_budget_is_met_if_halving_can_meet_it(has_cls: bool, schedule: Any) -> None:
    for patches in (1, 2, 3, 7, 16, 33):
        for blocks in range(6):
            least = patches
            for _ in range(blocks):
                least -= (least + has_cls - 1) // 2
            for budget in range(1, patches + 1):
                reducer = ToMeTower(budget, schedule)
                if budget < least:
                    with pytest.raises(
                        UnmetBudget, match=f"{blocks} blocks up to the tap.* leave {least} of {patches}"
                    ):
                        reducer.removals(patches, blocks, has_cls)
                    continue
                taken, left = reducer.removals(patches, blocks, has_cls), patches
                assert len(taken) == blocks
                for r in taken:
                    assert 0 <= r <= (left + has_cls - 1) // 2
                    left -= r
                assert left == budget


def test_gtp_meets_every_budget_that_has_a_block() -> None:
    for patches in (1, 2, 9):
        for budget in range(1, patches + 1):
            for blocks in (1, 2, 5):
                taken = GTPTower(budget).removals(patches, blocks, True)
                assert sum(taken) == patches - budget
                assert taken == sorted(taken)
    with pytest.raises(UnmetBudget, match="no block comes before the tap, so all 9 patches stay"):
        GTPTower(3).removals(9, 0, True)


def test_a_block_takes_more_only_where_the_rest_could_not() -> None:
    half: dict[str, Any] = {"most": lambda tokens: tokens // 2, "room": lambda left: 10 << left}
    assert spread(40, 10, 2, schedule="increasing", **half) == [20, 10]
    assert spread(40, 10, 3, schedule="increasing", **half) == [0, 20, 10]
    assert spread(16, 10, 3, schedule="increasing", **half) == [0, 2, 4]


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_budgets_are_exact_and_provenance_is_whole(kind: str, name: str) -> None:
    tower, pixels = tower_of(kind), tiny.pictures(2, seed=3)
    prefix = tower_layout(tower).prefix
    for budget in (3, 4, 7, 11, 15):
        for order in ("raster", "native"):
            passed = run(tower, make(name, budget=budget, order=order), pixels)
            assert passed.states.shape == (2, prefix + budget, tiny.WIDTH)
            for plan in passed.plans:
                assert (len(plan), plan.grid) == (budget, GRID)
                assert len(set(plan.anchor.tolist())) == budget
                assert torch.equal(plan.assigned[plan.anchor], torch.arange(budget))
                if order == "raster":
                    assert bool((plan.anchor.diff() > 0).all())
                if name == "tome-tower":  # every patch is in one token, and each token the mean of its patches
                    assert bool((plan.assigned >= 0).all())
                    sizes = plan.assigned.bincount(minlength=budget)
                    assert torch.equal(plan.offsets.diff(), sizes)
                    assert torch.equal(plan.assigned[plan.sources], plan.rows)
                    torch.testing.assert_close(plan.weights, 1 / sizes[plan.rows])


def test_the_plan_does_not_make_the_tokens_of_the_tower() -> None:
    """What the docstrings warn of: the blocks between the steps have changed the values."""
    tower, pixels = tower_of("clip"), tiny.pictures(1)
    passed = run(tower, ToMeTower(6), pixels)
    made = passed.plans[0].apply(stock(tower, pixels)[0, 1:])
    assert made.shape == passed.states[0, 1:].shape
    assert not torch.allclose(made, passed.states[0, 1:], atol=1e-2)


# ---------------------------------------------------------------------- batches, threads, precision, what stays behind


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_a_batch_is_what_each_image_is_alone(kind: str, name: str) -> None:
    tower, pixels, reducer = tower_of(kind), tiny.pictures(4, seed=8), make(name, budget=6)
    together = run(tower, reducer, pixels)
    for i in range(4):
        alone = run(tower, reducer, pixels[i : i + 1])
        torch.testing.assert_close(together.states[i], alone.states[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(together.plans[i].assigned, alone.plans[0].assigned)
        assert torch.equal(together.plans[i].anchor, alone.plans[0].anchor)


def state_of(tower: nn.Module) -> list[Any]:
    """Everything that a run could have left behind, in all modules."""
    kept: list[Any] = []
    for name, module in tower.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("hooks")]
        kept.append((name, type(module), sorted(vars(module)), module.training, hooks))
    return [*kept, *(value.clone() for value in tower.state_dict().values())]


def same_state(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Breaks(ToMeTower):
    """Fails in its second block."""

    def reduce(self, passage: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        if passage.block == 1:
            raise RuntimeError("broken on purpose")
        return super().reduce(passage, signals, r)


@pytest.mark.parametrize("kind", TOWERS)
def test_the_tower_is_as_it_was_also_after_an_exception(kind: str) -> None:
    tower, pixels = copy.deepcopy(tower_of(kind)), tiny.pictures(1)
    answer = stock(tower, pixels)  # transformers itself places hooks when first asked for hidden states
    before = state_of(tower)
    run(tower, GTPTower(5), pixels)
    assert same_state(before, state_of(tower))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        run(tower, Breaks(5), pixels)
    assert same_state(before, state_of(tower))
    assert torch.equal(stock(tower, pixels), answer)


def test_threads_share_a_tower() -> None:
    tower = tower_of("clip")
    reducers = [ToMeTower(9), GTPTower(5), ToMeTower(3), GTPTower(12)]
    pixels = [tiny.pictures(1, seed=seed) for seed in range(4)]
    wanted = [run(tower, *pair).states for pair in zip(reducers, pixels, strict=True)]
    got: dict[int, list[Tensor]] = {}

    def work(i: int) -> None:
        got[i] = [run(tower, reducers[i], pixels[i]).states for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(states, wanted[i]) for i in range(4) for states in got[i])


@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision_and_autocast(name: str, attention: str) -> None:
    tower, pixels = tower_of("clip", attention), tiny.pictures(2)
    half = copy.deepcopy(tower).bfloat16()
    passed = run(half, make(name, budget=6), pixels.bfloat16())
    assert passed.states.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(tower, make(name, budget=6), pixels)
    for states in (passed.states, cast.states):
        assert states.shape == (2, 7, tiny.WIDTH)
        assert bool(states.isfinite().all())


# ---------------------------------------------------------------------- in models


def logits_of(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_llava_answers_with_what_its_tower_gave(kind: str, name: str) -> None:
    model, reducer = tiny.llava(kind), make(name, budget=6)
    aside = tiny.REGISTERS if kind == "registers" else 0
    inputs = tiny.prompt("ab#c", "#de#f", per_image=16 + aside)
    tower, pixels = model.model.vision_tower, inputs["pixel_values"]
    with reduced(model, reducer) as trace:
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    length = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :length], inputs["input_ids"])
    assert out.shape[1] == length + 4
    assert (trace.before, trace.after, len(trace)) == (3 * (16 + aside), 3 * (6 + aside), 3)
    assert "steps" in trace.seconds
    assert "plan" not in trace.seconds
    passed = run(tower, reducer, pixels)
    assert all(same_plan(one, other) for one, other in zip(trace, passed.plans, strict=True))
    shrunk, _ = adapter_for(model).shrink(inputs, reducer, "compact")
    with torch.no_grad():
        features = model.model.multi_modal_projector(passed.states[:, int(tower_layout(tower).has_cls) :])
    for got, wanted in zip(shrunk["mm_encoder_outputs"]["image"].pooler_output, features, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", TOWERS)
def test_llava_with_nothing_removed_is_the_stock_model(kind: str) -> None:
    model = tiny.llava(kind)
    inputs = tiny.prompt("ab#c", "#de", per_image=16 + (tiny.REGISTERS if kind == "registers" else 0))
    wanted = logits_of(model, inputs)
    with reduced(model, ToMeTower(16)):
        assert torch.equal(logits_of(model, inputs), wanted)
    assert torch.equal(logits_of(model, inputs), wanted)


def test_a_share_instead_of_a_budget() -> None:
    model, inputs = tiny.llava(), tiny.prompt("a#bc")
    with reduced(model, KeepShare(ToMeTower(1), 0.25)) as trace:
        logits_of(model, inputs)
    assert trace[0].by == "tome-tower(budget=4)"
    assert trace.after == 4


def test_positions_processor_and_another_layer() -> None:
    model, inputs = tiny.llava(), tiny.prompt("a#bc")
    with reduced(model, ToMeTower(6), positions="original") as trace:
        model.generate(**inputs, max_new_tokens=2)
        model.generate(**inputs, max_new_tokens=2, vision_feature_layer=-1)
    assert not same_plan(trace[0], trace[1])  # one more block
    processor = ReducingProcessor(tiny.TinyProcessor(), model, GTPTower(6))
    ready = processor(images=tiny.pictures(1), text="a#bc")
    assert int((ready["input_ids"] == tiny.IMAGE).sum()) == 6
    assert model.generate(**ready, max_new_tokens=2).shape[1] == ready["input_ids"].shape[1] + 2


def test_gradients_reach_the_embeddings_of_the_tower() -> None:
    model, inputs = tiny.llava(), tiny.prompt("a#bc")
    with reduced(model, ToMeTower(6)):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert float(model.model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum()) > 0


def test_paligemma() -> None:
    model = test_internvl.scrambled(test_gemma.paligemma({"model_type": "gemma"}))
    ids = torch.tensor([[*[test_internvl.IMAGE] * 16, 5, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    inputs["pixel_values"] = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    wanted = logits_of(model, inputs)
    with reduced(model, ToMeTower(16)):
        torch.testing.assert_close(logits_of(model, inputs), wanted, rtol=1e-5, atol=1e-5)
    with reduced(model, ToMeTower(5)) as trace:
        assert logits_of(model, inputs).shape[1] == 5 + 3
    assert (trace.before, trace.after) == (16, 5)


# ---------------------------------------------------------------------- towers of their own


@pytest.mark.parametrize("kind", ["clip", "whole-clip", "siglip", "dinov2", "dinov2-registers", "llava"])
def test_a_tower_reduces(kind: str) -> None:
    torch.manual_seed(0)
    model, processor = test_towers.KINDS[kind]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tower = Tower(model.eval(), processor, block=1)
    photos = [test_towers.photo(seed=seed) for seed in range(3)]
    seen = tower.look(photos)
    for tokens, (left, plan) in zip(seen, tower.reduce(photos, ToMeTower(len(seen[0]))), strict=True):
        assert torch.equal(left, tokens.patches)
        assert len(plan) == len(tokens)
    inside = tower.reduce(photos, GTPTower(5), batch=2)
    for (left, plan), (alone, same) in zip(
        inside, [tower.reduce(photo, GTPTower(5))[0] for photo in photos], strict=True
    ):
        assert left.shape == (5, tower.width)
        torch.testing.assert_close(left, alone)
        assert torch.equal(plan.anchor, same.anchor)
    at_tap = make("tome", budget=5, class_token=tower.has_cls)
    for tokens, (left, plan) in zip(tower.look(photos, at_tap.needs), tower.reduce(photos, at_tap), strict=True):
        assert same_plan(plan, at_tap.plan(tokens))
        assert torch.equal(left, plan.apply(tokens.patches))


# ---------------------------------------------------------------------- sentences


@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_finished_tokens_come_too_late(name: str) -> None:
    reducer = make(name, budget=4)
    for tokens in sample_tokens(needs=reducer.needs):
        with pytest.raises(MissingSignal, match=f"{name} works inside a vision tower.* have left theirs.*Tower.reduce"):
            reducer.plan(tokens)
    with pytest.raises(MissingSignal, match="such as tome or gtp"):
        reducer.plan_batch(sample_tokens())
    assert as_in_tower(reducer) is reducer
    assert as_in_tower(make("tome", budget=4)) is None


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: test_qwen.tiny("qwen2_5_vl"), "merges 2x2 patches"),
        (lambda: test_llava_next.tiny("llava_next"), "tiles are cut"),
        (lambda: test_llava_next.tiny("llava_onevision"), "tiles are cut"),
        (test_internvl.build, "cells of several patches"),
        (test_gemma.gemma3, "cells of several patches"),
    ],
)
def test_families_that_cannot_say_so(build: Any, reason: str) -> None:
    host = adapter_for(build())
    inputs = {"input_ids": torch.tensor([[host.image_token]]), "pixel_values": torch.zeros(1, 3, 8, 8)}
    with pytest.raises(TorinoError, match=f"works inside the vision tower.*{type(host.model).__name__}: .*{reason}"):
        host.shrink(inputs, ToMeTower(4), "compact")


def test_towers_of_many_shapes_say_so() -> None:
    for kind in ("siglip2", "qwen2"):
        tower = Tower(*test_towers.KINDS[kind](), block=0)
        with pytest.raises(TorinoError, match="images of many shapes together"):
            tower.reduce(test_towers.photo(), ToMeTower(4))


def test_budgets_that_cannot_be_met() -> None:
    tower, pixels = tower_of("clip"), tiny.pictures(1)
    with pytest.raises(UnmetBudget, match=r"tome-tower cannot give 1 tokens.*3 blocks.*leave 2 of 16"):
        run(tower, ToMeTower(1), pixels)
    for name in ("tome-tower", "gtp-tower"):
        with pytest.raises(UnmetBudget, match=f"{name} cannot give 17 tokens for this image: its 16 patches"):
            run(tower, make(name, budget=17), pixels)
    assert run(tower, GTPTower(1), pixels).states.shape == (1, 2, tiny.WIDTH)


def test_attention_without_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tower, pixels = tower_of("clip"), tiny.pictures(1)
    monkeypatch.setattr(tower.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(TorinoError, match=r'flash_attention_2 takes no such mask. Load .*attn_implementation="sdpa"'):
        run(tower, ToMeTower(6), pixels)


def test_unknown_blocks_signals_and_grids() -> None:
    tower, pixels = copy.deepcopy(tower_of("clip")), tiny.pictures(1)
    with pytest.raises(TorinoError, match="CLIPVisionModel made 16 patches of a picture of 4x5"):
        run(tower, ToMeTower(6), pixels, grid=(4, 5))
    curious = type("Curious", (ToMeTower,), {"needs": frozenset({"values"})})(6)
    with pytest.raises(MissingSignal, match="reads values of each block, and inside a tower there are head_keys, keys"):
        run(tower, curious, pixels)
    tower.encoder.layers[1].gate = nn.Identity()
    with pytest.raises(TorinoError, match=r"The blocks of CLIPVisionModel .*gate.* are not known well enough"):
        run(tower, ToMeTower(6), pixels)
    assert run(tower, ToMeTower(8), pixels, block=0).states.shape[1] == 9  # the odd block is never run


def test_a_tower_that_overflows() -> None:
    tower, pixels = copy.deepcopy(tower_of("clip")), tiny.pictures(1)
    tower.encoder.layers[1].self_attn.k_proj.bias.data.fill_(math.nan)
    with pytest.raises(BadTokens, match="The keys of block 1 hold NaN or infinite values"):
        run(tower, ToMeTower(6), pixels)
    with pytest.raises(BadTokens, match="The attention maps of block 1 hold NaN"):
        run(tower, GTPTower(6), pixels)
    with pytest.raises(BadTokens, match="The embedded patches hold NaN"):
        run(tower, GTPTower(6), pixels * math.nan)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("tome-tower", {"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ("tome-tower", {"schedule": "linear"}, "schedule must be one of 'constant', 'decreasing', 'increasing'"),
        ("tome-tower", {"proportional": 1}, "proportional must be True or False, got 1"),
        ("tome-tower", {"order": "x"}, "order must be one of"),
        ("gtp-tower", {"budget": -1}, "budget must be a whole number of at least 1, got -1"),
        ("gtp-tower", {"alpha": math.nan}, "alpha must be a finite number of at least 0, got nan"),
        ("gtp-tower", {"graph": "x"}, "graph must be one of 'mixed', 'spatial', 'semantic', got 'x'"),
        ("gtp-tower", {"neighbours": 0}, "neighbours must be a whole number of at least 1, got 0"),
        ("gtp-tower", {"proportional": None}, "proportional must be True or False, got None"),
        ("gtp-tower", {"order": 0}, "order must be one of"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadParameter, match=sentence):
        make(name, **{"budget": 4, **changes})


# ---------------------------------------------------------------------- the contract of such reducers


@dataclass(frozen=True, repr=False)
class Norms(TowerReducer):
    """Drops the tokens of shortest queries plus keys, or breaks a rule."""

    fault: str = ""
    budget: int = 3
    proportional: bool = True
    order: Any = "raster"

    name = "norms"
    needs: ClassVar[frozenset[str]] = frozenset({"keys", "queries"})

    def removals(self, patches: int, blocks: int, has_cls: bool) -> list[int]:
        if patches < self.budget:
            raise UnmetBudget("too small")
        taken = [0] * (blocks - 1) + [patches - self.budget]
        return taken[1:] if self.fault == "blocks" else taken

    def reduce(self, passage: TowerState, signals: Mapping[str, Tensor], r: int) -> tuple[Reduction, Tensor, Any]:
        length = (signals["keys"] + signals["queries"]).norm(dim=1)
        kept = length.argsort(descending=True)[: len(length) - r + (self.fault == "count")]
        sizes = passage.sizes[kept] * (0 if self.fault == "sizes" else 1)
        step = Reduction.pick(kept, (1, len(length)), self.name)
        return step, sizes[1:] if self.fault == "few sizes" else sizes, None

    def plan(self, tokens: VisualTokens) -> Reduction:
        if self.fault == "plans":
            return Reduction.identity(tokens.grid)
        return super().plan(tokens)


def test_a_reducer_of_ones_own() -> None:
    check_reducer(Norms())
    passed = run(tower_of("clip"), Norms(budget=5), tiny.pictures(2))
    assert passed.states.shape == (2, 6, tiny.WIDTH)
    assert all(plan.is_pruning for plan in passed.plans)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("blocks", "over 5 blocks"),
        ("count", r"left 4 tokens in a block instead of 3"),
        ("sizes", "no logarithm"),
        ("few sizes", "gave 2 sizes for 3 tokens"),
        ("plans", "planned finished tokens"),
    ],
)
def test_the_contract_catches(fault: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_reducer(Norms(fault))


@pytest.mark.parametrize("name", ["tome-tower", "gtp-tower"])
def test_the_contract_with_and_without_cls(name: str) -> None:
    bare = [image.with_(cls=None, cls_attention=None) for image in sample_tokens()]
    check_reducer(make(name, budget=7), bare)
    check_reducer(make(name, budget=16, proportional=False))
    states, plan = pretend_tower(make(name, budget=7), bare[0])  # type: ignore[arg-type]
    assert states.shape == (7, bare[0].width)
    assert len(plan) == 7
