"""Proportional attention against a slow oracle in which a token of n patches is repeated n times."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tiny
from tests.support.generation import MODES, ROWS, same
from tests.support.generation import generate as ask
from tests.support.generation import torino_reducer as of_torino
from tests.support.tiny import Fixed, Identity
from torino import Reduction, make
from torino.core.errors import BadParameter
from torino.vlm import apply, reduced, remove
from torino.vlm.adapters.base import adapter_for
from torino.vlm.attention import AttentionBias, attention_bias, log_sizes, uses_proportional

MERGED = Reduction.of([{0: 1.0}, {**dict.fromkeys(range(1, 9), 0.125)}, {9: 0.5, 10: 0.5}, {15: 1.0}], (4, 4))


def proportional(model: Any, inputs: dict[str, Any], reducer: Any, positions: Any = "compact", **options: Any) -> Any:
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True} | options
    torch.manual_seed(0)
    with reduced(model, reducer, positions=positions, attention="proportional"):
        return model.generate(**inputs, **options)


def hooks(model: Any) -> int:
    return sum(len(block.self_attn._forward_pre_hooks) for block in model.get_decoder().layers)


def with_repeats(model: Any, states: Tensor, counts: list[int]) -> Tensor:
    """Return logits with each token repeated ``counts`` times at one position, its copies attending to each other."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    seen = owner[:, None] >= owner[None, :]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    out = model.model.language_model(
        inputs_embeds=states[:, owner], attention_mask=mask[None, None], position_ids=owner[None], use_cache=False
    )
    last = torch.tensor(counts).cumsum(0) - 1
    return model.lm_head(out.last_hidden_state[:, last])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_equals_repeated_tokens(attention: str) -> None:
    model = tiny.llava(attention=attention)
    states = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1))
    counts = [1, 3, 1, 17, 2, 1]
    with attention_bias(model, AttentionBias(torch.tensor([counts]).float().log())):
        got = model.lm_head(model.model.language_model(inputs_embeds=states).last_hidden_state)
        assert hooks(model) == 2
    assert hooks(model) == 0
    plain = model.lm_head(model.model.language_model(inputs_embeds=states).last_hidden_state)
    assert torch.allclose(got, with_repeats(model, states, counts), atol=1e-5)
    assert torch.allclose(plain, with_repeats(model, states, [1] * 6), atol=1e-5)
    assert not torch.allclose(got, plain, atol=1e-2)


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("mode", ["greedy", "static cache", "no cache"])
@torch.no_grad()
def test_lasts_for_the_whole_answer(mode: str, positions: Any) -> None:
    model, inputs = tiny.llava(), tiny.prompt("ab#cd")
    out = proportional(model, inputs, Fixed(MERGED), positions, **MODES[mode])
    plain = ask(model, inputs, Fixed(MERGED), positions=positions, **MODES[mode])
    assert not torch.allclose(out.logits[0], plain.logits[0], atol=1e-2)
    if positions == "original":
        return  # the oracle numbers anew
    with reduced(model, Fixed(MERGED)) as trace:
        shrunk, _ = adapter_for(model).reduce_inputs(inputs, Fixed(MERGED), "compact")
    assert not trace.calls
    states = model.get_input_embeddings()(shrunk["input_ids"])
    features = shrunk["mm_encoder_outputs"]["image"].pooler_output[0]
    states[shrunk["input_ids"] == tiny.IMAGE] = features
    counts = [1, 1, 1, 8, 2, 1, 1, 1]
    for step, logits in enumerate(out.logits):
        want = with_repeats(model, states, counts + [1] * step)[0, -1]
        assert torch.allclose(logits[0], want, atol=1e-4)
        new = out.sequences[:, inputs["input_ids"].shape[1] + step]
        states = torch.cat([states, model.get_input_embeddings()(new)[:, None]], 1)


@pytest.mark.parametrize("mode", MODES)
def test_no_effect_on_tokens_of_one_patch(mode: str) -> None:
    model, inputs = tiny.llava(), tiny.prompt(*ROWS)
    assert same(proportional(model, inputs, Identity(), **MODES[mode]), ask(model, inputs, **MODES[mode]))
    reducer = Fixed(Reduction.pick(torch.tensor([0, 3, 5]), (4, 4), "by hand"))
    assert same(proportional(model, inputs, reducer, **MODES[mode]), ask(model, inputs, reducer, **MODES[mode]))


def test_effect_on_tokens_that_represent_dropped_patches() -> None:
    model, inputs, reducer = tiny.llava(), tiny.prompt(*ROWS), make("divprune(budget=5)")
    assert not same(proportional(model, inputs, reducer), ask(model, inputs, reducer))


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_batch_rows_equal_single_runs(positions: Any) -> None:
    model, inputs, reducer = tiny.llava(), tiny.prompt(*ROWS), of_torino(k=2, delta=1)
    out = proportional(model, inputs, reducer, positions)
    for row, single in enumerate(tiny.one_by_one(ROWS, inputs)):
        alone = proportional(model, single, reducer, positions)
        for one, other in zip(out.logits, alone.logits, strict=True):
            assert torch.allclose(one[row], other[0], atol=1e-4)


def test_beams_and_samples_run_and_leave_nothing_behind() -> None:
    model, inputs, reducer = tiny.llava(), tiny.prompt("ab#cd", "#e"), Fixed(MERGED)
    beams = proportional(model, inputs, reducer, num_beams=3, output_scores=True)
    one = proportional(model, tiny.prompt("ab#cd", "#e"), reducer, num_beams=3)
    assert torch.equal(beams.sequences, one.sequences)
    assert not torch.equal(
        beams.sequences_scores, ask(model, inputs, reducer, num_beams=3, output_scores=True).sequences_scores
    )
    three = proportional(model, inputs, reducer, num_return_sequences=3, do_sample=True, temperature=1e-3)
    greedy = proportional(model, inputs, reducer)
    assert torch.equal(three.sequences, greedy.sequences.repeat_interleave(3, 0))
    assert hooks(model) == 0
    with pytest.raises(ValueError, match="nonsense"), reduced(model, reducer, attention="proportional"):
        model.generate(**inputs, max_new_tokens=2, nonsense=1)
    assert hooks(model) == 0
    trace = apply(model, reducer, attention="proportional")
    everywhere = model.generate(**inputs, max_new_tokens=5)
    remove(model)
    assert torch.equal(everywhere, greedy.sequences)
    assert trace.after == 8


def test_other_threads_are_not_affected() -> None:
    model, inputs = tiny.llava(), tiny.prompt("ab#cd", "#e")
    stock = model.generate(**inputs, max_new_tokens=5)
    seen: list[Tensor] = []
    other = threading.Thread(target=lambda: seen.append(model.generate(**inputs, max_new_tokens=5)))
    with attention_bias(model, AttentionBias(torch.full((1, 9), 3.0))):
        other.start()
        other.join()
    assert torch.equal(seen[0], stock)


@torch.no_grad()
def test_forward() -> None:
    model, inputs = tiny.llava(), tiny.prompt("ab#cd")
    with reduced(model, Fixed(MERGED), attention="proportional"):
        logits = model(**inputs).logits
    assert torch.allclose(logits[0, -1], proportional(model, inputs, Fixed(MERGED)).logits[0][0], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = tiny.llava().to(dtype)
    out = proportional(model, tiny.prompt(*ROWS), Fixed(MERGED))
    assert all(bool(logits.isfinite().all()) for logits in out.logits)


def test_sizes_of_a_plan() -> None:
    assert MERGED.sizes.tolist() == [1, 8, 2, 1]
    assert Reduction.identity((2, 2)).sizes.tolist() == [1, 1, 1, 1]
    apart = Reduction.pick(torch.tensor([0, 3]), (2, 2), assigned=torch.tensor([0, 0, 0, -1]), by="by hand")
    assert apart.sizes.tolist() == [3, 1]  # what stands for nothing is still there once


def test_unsupported_attention_is_refused() -> None:
    model = tiny.llava()
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
    with (
        pytest.raises(BadParameter, match="flash_attention_2 does not take"),
        reduced(model, Identity(), attention="proportional"),
    ):
        pass
    model.config.get_text_config().sliding_window = 64
    with (
        pytest.raises(BadParameter, match="sliding window of 64"),
        reduced(model, Identity(), attention="proportional"),
    ):
        pass


def test_registers_represent_no_patch() -> None:
    ids = torch.tensor([[5, *[tiny.IMAGE] * 6, 6]])
    added = log_sizes({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tiny.IMAGE, [MERGED.sizes], [6])
    assert torch.allclose(added.exp(), torch.tensor([[1.0, 1, 1, 1, 8, 2, 1, 1]]))


def test_auto_follows_the_reducer() -> None:
    from tests.support.tiny_tiles import make_model as tiles
    from torino.reducers import KeepShare

    adapter, on, off = (
        adapter_for(tiny.llava()),
        of_torino("torino-x", budget=4),
        of_torino("torino-x", budget=4, proportional=False),
    )
    reducers = (on, off, of_torino(), KeepShare(on, 0.5), None)
    assert [uses_proportional("auto", reducer, adapter) for reducer in reducers] == [1, 0, 0, 1, 0]
    for reducer in (on, off):
        assert uses_proportional("proportional", reducer, adapter)
        assert not uses_proportional("plain", reducer, adapter)
    assert uses_proportional("auto", on, adapter_for(tiles("llava_next")))
    with pytest.raises(BadParameter, match="auto, plain, proportional or restore"):
        uses_proportional("heavy", on, adapter)  # type: ignore[arg-type]
    model, inputs = tiny.llava(), tiny.prompt("ab#cd")
    own = ask(model, inputs, on, positions="auto")
    assert same(own, proportional(model, inputs, off, "auto"))
    assert not torch.allclose(own.logits[0], ask(model, inputs, off, positions="auto").logits[0], atol=1e-3)
