"""Positions and attention in every family, and RESTORE's attention against a slow transcription."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import cos, log
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tiny, tiny_qwen, tiny_tiles
from tests.support.generation import MODES, ROWS, same
from tests.support.generation import generate as ask
from tests.support.tiny import Fixed, Identity
from tests.vlm.test_families import MODELS
from torino import Reduction, VisualTokens, make
from torino.core.errors import BadParameter
from torino.reducers import Reducer
from torino.vlm import ReducingProcessor, reduced
from torino.vlm.adapters.base import adapter_for
from torino.vlm.attention import attention_mode, distance_bias

WINDOWS = ("gemma3",)  # sliding windows
FAMILIES = [family for family in MODELS if family not in WINDOWS]
MERGED = Reduction.of([{0: 1.0}, {**dict.fromkeys(range(1, 9), 0.125)}, {9: 0.5, 10: 0.5}, {15: 1.0}], (4, 4))


@dataclass(frozen=True)
class Pairs(Reducer):
    """Average each two neighbors in raster order, and repeat the average ``copies`` times."""

    copies: int = 1

    def plan(self, tokens: VisualTokens) -> Reduction:
        rows = [{i: 0.5, i + 1: 0.5} for i in range(0, len(tokens) - 1, 2)]
        rows += [{len(tokens) - 1: 1.0}] if len(tokens) % 2 else []
        repeated = [row for row in rows for _ in range(self.copies if len(row) > 1 else 1)]
        return Reduction.of(repeated, tokens.grid, "pairs")


def logits(model: Any, inputs: dict[str, Any], reducer: Reducer, **options: Any) -> tuple[Tensor, Any]:
    with reduced(model, reducer, **options) as trace:
        return model(**inputs).logits[:, -1], trace.calls[0]


@contextmanager
def joint_copies(model: Any, group: Tensor) -> Generator[None]:
    """Let tokens of the same group see each other, in every layer."""
    together = group[:, None] == group[None, :]

    def hook(module: Any, arguments: Any, given: dict[str, Any]) -> Any:
        mask = given["attention_mask"]
        if mask is None:
            mask = (group[:, None] >= group[None, :])[None, None]
        open_value = True if mask.dtype is torch.bool else 0.0
        return arguments, {**given, "attention_mask": torch.where(together, open_value, mask)}

    with ExitStack() as stack:
        for layer in model.get_decoder().layers:
            stack.callback(layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_proportional_attention_equals_copies_of_the_merged_tokens(family: str) -> None:
    model, (inputs, _) = MODELS[family]()
    merged, call = logits(model, inputs, Pairs(), positions="original", attention="proportional")
    adapter = adapter_for(model)
    short, _ = adapter.reduce_inputs(inputs, Pairs(), "original")
    counts = torch.ones(short["input_ids"].shape[1], dtype=torch.int64)
    counts[short["input_ids"][0] == adapter.image_token] = torch.cat(call.sizes).clamp(min=1)
    assert int((counts == 2).sum()) >= 2
    with joint_copies(model, torch.repeat_interleave(torch.arange(len(counts)), counts)):
        copies, _ = logits(model, inputs, Pairs(2), positions="original", attention="plain")
    assert torch.allclose(merged, copies, atol=1e-4)
    plain, _ = logits(model, inputs, Pairs(), positions="original", attention="plain")
    assert not torch.allclose(merged, plain, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_with_proportional_attention_equal_the_stock_model(family: str) -> None:
    model, batches = MODELS[family]()
    options = {"max_new_tokens": 3, "do_sample": False, "suppress_tokens": [int(model.config.image_token_id)]}
    for inputs in batches:
        stock = model.generate(**inputs, **options)
        for positions in ("original", "median"):
            with reduced(model, Identity(), positions=positions, attention="proportional"):
                assert torch.equal(model.generate(**inputs, **options), stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_rows_equal_single_runs(family: str) -> None:
    """The first prompt of both batches is the same; the second one is padded."""
    model, (single, batch) = MODELS[family]()
    rows = [row for row in range(len(batch["input_ids"])) if _same_prompt(single, batch, row)]
    assert rows == [0]
    if family == "llava":
        single["pixel_values"] = batch["pixel_values"][:1]
    options: dict[str, Any] = {"positions": "median", "attention": "restore"}
    generation = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    generation |= {"suppress_tokens": [int(model.config.image_token_id)]}
    with reduced(model, Pairs(), **options):
        alone = model.generate(**single, **generation)
        together = model.generate(**batch, **generation)
        plain_loop = model.generate(**single, **generation, use_cache=False)
    for one, other, uncached in zip(alone.logits, together.logits, plain_loop.logits, strict=True):
        assert torch.allclose(one[0], other[0], atol=1e-4)
        assert torch.allclose(one[0], uncached[0], atol=1e-4)


def _same_prompt(single: dict[str, Any], batch: dict[str, Any], row: int) -> bool:
    kept = batch["input_ids"][row][batch["attention_mask"][row].bool()]
    return torch.equal(kept, single["input_ids"][0][single["attention_mask"][0].bool()])


@pytest.mark.parametrize("attention", ["proportional", "restore"])
def test_sliding_windows_are_refused(attention: Any) -> None:
    model, (inputs, _) = MODELS["gemma3"]()
    with pytest.raises(BadParameter, match="sliding window of"), reduced(model, Identity(), attention=attention):
        pass
    reducer = make("restore(budget=4, pruner='divprune')")
    assert attention_mode("auto", reducer, adapter_for(model)) == "plain"
    with reduced(model, reducer):
        model.generate(**inputs, max_new_tokens=1)


# ---------------------------------------------------------------------- RESTORE


def slow_restore(
    positions: list[int], sizes: list[float], uniform: float, thetas: list[float], layer: int, queries: range, keys: int
) -> list[list[float]]:
    """Return what RESTORE adds for each query and visible key; ``sizes`` is 0 for tokens that are not of an image."""
    prompt, added = len(positions), list[list[float]]()
    for m in queries:
        row: list[float] = []
        for n in range(min(keys, m + 1)):
            size = sizes[n] if n < prompt else 0
            if layer == 0 and size > 0:
                size = uniform
            value = log(size) if size > 0 else 0.0
            if m < prompt and n < prompt:
                distance = abs(positions[m] - positions[n])
                value += log(2 - sum(cos(distance * theta) for theta in thetas) / len(thetas))
            row.append(value)
        added.append(row)
    return added


@contextmanager
def recorded_masks(model: Any) -> Generator[list[tuple[int, Tensor]]]:
    """Record the masks that the attention of each layer receives."""
    seen: list[tuple[int, Tensor]] = []
    with ExitStack() as stack:
        for number, layer in enumerate(model.get_decoder().layers):
            attention = layer.self_attn
            stock = attention.forward

            def forward(*arguments: Any, _stock: Any = stock, _number: int = number, **given: Any) -> Any:
                seen.append((_number, given["attention_mask"].clone()))
                return _stock(*arguments, **given)

            attention.forward = forward
            stack.callback(attention.__dict__.pop, "forward")
        yield seen


@pytest.mark.parametrize("positions", ["compact", "original", "median"])
@pytest.mark.parametrize("mode", ["greedy", "static cache", "no cache"])
def test_masks_equal_the_slow_transcription_of_restore(mode: str, positions: Any) -> None:
    model, inputs = tiny.llava(), tiny.prompt("ab#cd")
    with recorded_masks(model) as seen:
        out = ask(model, inputs, Fixed(MERGED), positions=positions, attention="restore", **MODES[mode])
    places = {"compact": [0, 1, 2, 3, 4, 5, 6, 7], "original": [0, 1, 2, 3, 11, 17, 18, 19]}
    places["median"] = [0, 1, 2, 6, 11, 17, 18, 19]  # the median of patches 1 to 8 is 4, that of 9 and 10 is 9
    thetas = [10000 ** (-2 * j / 16) for j in range(8)]
    pad = int(mode == "no cache" and positions != "compact")  # one token of padding: see run_generate
    numbers = [0] * pad + places[positions]
    sizes = [0.0] * pad + [0, 0, 1, 8, 2, 1, 0, 0]
    checked = 0
    for number, mask in seen:
        assert mask.shape[:2] == (1, 1)
        new = mask.shape[2]
        step = checked // 2
        begin = 0 if step == 0 or mode == "no cache" else 8 + step - 1
        expected = slow_restore(numbers, sizes, 16 / 4, thetas, number, range(begin, begin + new), mask.shape[3])
        for row, values in enumerate(expected):
            got = mask[0, 0, row]
            assert torch.allclose(got[pad : len(values)], torch.tensor(values[pad:]), atol=1e-5)
            assert bool((got[len(values) :] < -1e30).all())
        checked += 1
    assert checked == 2 * 5
    greedy = ask(model, inputs, Fixed(MERGED), positions=positions, attention="restore")
    for one, other in zip(out.logits, greedy.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_distance_of_three_axes(family: str) -> None:
    """Each frequency turns by the coordinate of its own axis; the model's rotary module says which."""
    model = tiny_qwen.make_model(family).eval()
    inputs = tiny_qwen.make_inputs([[(4, 3)]])
    with recorded_masks(model) as seen, reduced(model, Pairs(), attention="restore", positions="median"):
        model.generate(**inputs, max_new_tokens=1)
    short, call = adapter_for(model).reduce_inputs(inputs, Pairs(), "median")
    place = short["position_ids"][1:, 0]
    rotary = model.get_decoder().rotary_emb
    sections, thetas = list(rotary.mrope_section), rotary.inv_freq.tolist()
    if family == "qwen3_vl":  # interleaved: time, row, column, time, ...; what remains is time
        axes = [j % 3 if j % 3 and j < 3 * sections[j % 3] else 0 for j in range(len(thetas))]
    else:
        axes = [axis for axis in range(3) for _ in range(sections[axis])]
    mask = next(mask for number, mask in seen if number == 1)[0, 0]
    sizes = torch.ones(place.shape[1])
    sizes[short["input_ids"][0] == adapter_for(model).image_token] = call.sizes[0].float()
    for m in range(len(mask)):
        for n in range(m + 1):
            turns = [cos(abs(int(place[axis, m] - place[axis, n])) * t) for axis, t in zip(axes, thetas, strict=True)]
            expected = log(float(sizes[n])) + log(2 - sum(turns) / len(turns))
            assert abs(float(mask[m, n]) - expected) < 1e-5


def test_median_rows_and_columns_in_qwen() -> None:
    model = tiny_qwen.make_model("qwen2_vl").eval()
    inputs = tiny_qwen.make_inputs([[(4, 3)]])
    patches = {1: 0.25, 3: 0.25, 8: 0.25, 9: 0.25}  # rows 0, 1, 2, 3; columns 1, 0, 2, 0 of a grid of 3 columns
    plan = Reduction.of([{0: 1.0}, patches], (4, 3))
    adapter = adapter_for(model)
    short, _ = adapter.reduce_inputs(inputs, Fixed(plan), "median")
    full, _ = adapter.reduce_inputs(inputs, Identity(), "original")
    is_image = short["input_ids"][0] == adapter.image_token
    place, places = short["position_ids"][1:, 0][:, is_image], full["position_ids"][1:, 0]
    first = places[:, full["input_ids"][0] == adapter.image_token][:, 0]
    assert (place[:, 1] - first).tolist() == [0, 1, 0]


def test_distance_is_a_mean_of_cosines() -> None:
    positions = torch.tensor([[[0, 1, 5]], [[3, 3, 0]]])
    added = distance_bias(positions, torch.tensor([1.0, 0.3, 0.1]), torch.tensor([0, 1, 0])).exp()
    assert torch.allclose(added[0, 0, 2], torch.tensor(2 - (cos(5) + cos(3 * 0.3) + cos(0.5)) / 3))
    assert torch.allclose(added[0], added[0].T)
    assert torch.equal(added[0].diagonal(), torch.ones(3))


@pytest.mark.parametrize("mode", MODES)
def test_restore_in_batches_beams_and_samples(mode: str) -> None:
    model, inputs, reducer = tiny.llava(), tiny.prompt(*ROWS), make("folder(budget=5)")
    options: dict[str, Any] = {"positions": "median", "attention": "restore", **MODES[mode]}
    out = ask(model, inputs, reducer, **options)
    assert same(out, ask(model, inputs, reducer, **options))
    assert not same(out, ask(model, inputs, reducer, **{**options, "attention": "proportional"}))
    if mode in ("greedy", "static cache", "no cache"):
        for row, single in enumerate(tiny.one_by_one(ROWS, inputs)):
            alone = ask(model, single, reducer, **options)
            for one, other in zip(out.logits, alone.logits, strict=True):
                assert torch.allclose(one[row], other[0], atol=1e-4)


def test_method_restore_chooses_its_own_options() -> None:
    model, inputs, reducer = tiny.llava(), tiny.prompt("ab#cd"), make("restore(budget=6)")
    own = ask(model, inputs, reducer, positions="auto", attention="auto")
    assert same(own, ask(model, inputs, reducer, positions="median", attention="restore"))
    assert not same(own, ask(model, inputs, reducer, positions="compact", attention="plain"))


def test_registers_and_newlines_represent_no_patch() -> None:
    model = tiny.llava("registers")
    inputs = tiny.prompt("a#b", per_image=tiny.PATCHES + tiny.REGISTERS)
    with reduced(model, Fixed(MERGED)) as trace:
        model.generate(**inputs, max_new_tokens=1)
    assert trace.calls[0].sizes[0].tolist() == [0, 0, 1, 8, 2, 1]
    assert trace.calls[0].patches == (16,)
    tiles = tiny_tiles.make_model("llava_next")
    with reduced(tiles, Identity()) as trace:
        tiles.generate(**tiny_tiles.make_inputs(tiles, [[(40, 90)]]), max_new_tokens=1)
    sizes, plans = trace.calls[0].sizes[0], trace.calls[0].reductions
    assert int((sizes == 1).sum()) == sum(plan.patches for plan in plans) == trace.calls[0].patches[0]
    assert int((sizes == 0).sum()) == len(sizes) - trace.calls[0].patches[0] > 0


def test_wrong_options_are_refused_in_one_sentence() -> None:
    model = tiny.llava()
    with pytest.raises(BadParameter, match="must be auto, compact, original or median"):
        ask(model, tiny.prompt("#"), Identity(), positions="middle")
    with pytest.raises(BadParameter, match="must be auto, plain, proportional or restore"):
        ask(model, tiny.prompt("#"), Identity(), attention="heavy")
    for attention in ("proportional", "restore"):
        with pytest.raises(BadParameter, match="cannot be part of inputs for the unchanged model"):
            ReducingProcessor(tiny.processor(), model, Identity(), attention=attention)
    model.get_decoder().rotary_emb = torch.nn.Identity()
    with pytest.raises(BadParameter, match="no single set of rotary frequencies"):
        ask(model, tiny.prompt("#"), Identity(), attention="restore")
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
    with pytest.raises(BadParameter, match='"restore" adds to the attention mask, which flash_attention_2'):
        ask(model, tiny.prompt("#"), Identity(), attention="restore")
