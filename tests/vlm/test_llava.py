"""The LLaVA-1.5 adapter on tiny models: positions, features, signals, towers and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tests.support import tiny
from tests.support.generation import NEW, all_equal, generate, same, torino_reducer
from tests.support.tiny import Fixed, Identity, Ragged, Recorder
from torino import Reduction, TorinoError, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, SAEMismatch
from torino.reducers import Reducer
from torino.vlm import adapter_for, reduced

# ---------------------------------------------------------------------- positions


def record_positions(model: Any, inputs: dict[str, Any], reducer: Reducer | None, **options: Any) -> list[Tensor]:
    recorded: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, arguments, named: recorded.append(named["position_ids"]), with_kwargs=True
    )
    generate(model, inputs, reducer, **options)
    hook.remove()
    return recorded


def test_positions_that_reach_the_language_model(model: Any) -> None:
    inputs = tiny.prompt("ab#cd", "#")
    kept = Fixed(Reduction.pick(torch.tensor([0, 3, 15]), (4, 4), "by hand"))
    first, *later = record_positions(model, inputs, kept)
    assert first.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1, 2]]
    assert [step.tolist() for step in later] == [[[7 + i], [3 + i]] for i in range(NEW - 1)]
    first, *later = record_positions(model, inputs, kept, positions="original")
    assert first.tolist() == [[0, 1, 2, 5, 17, 18, 19], [0, 0, 0, 0, 0, 3, 15]]
    assert [step.tolist() for step in later] == [[[20 + i], [16 + i]] for i in range(NEW - 1)]
    for mode in ("compact", "original"):
        stock = record_positions(model, inputs, None)
        assert all_equal(record_positions(model, inputs, Identity(), positions=mode), stock)


def test_given_position_ids(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    position_ids = torch.arange(20)[None]
    kept = Fixed(Reduction.pick(torch.tensor([0, 3, 15]), (4, 4), "by hand"))
    plain = generate(model, inputs, kept)
    assert same(generate(model, inputs | {"position_ids": position_ids}, kept), plain)
    with reduced(model, kept), pytest.raises(BadParameter, match="do not simply count the tokens"):
        model(**inputs, position_ids=position_ids * 2)
    first, *_ = record_positions(model, inputs | {"position_ids": position_ids * 2}, kept, positions="original")
    assert first.tolist() == [[0, 2, 4, 10, 34, 36, 38]]


# ---------------------------------------------------------------------- features and signals


def test_cls_tokens_and_repeated_tokens(model: Any) -> None:
    """The features of the language model, computed by hand from the stock tower."""
    inputs = tiny.prompt("a#b")
    mixed = Reduction.of([{16: 1.0}, {1: 0.5, 6: 0.25}, {6: 1.0}, {6: 1.0}], (4, 4))
    everything = Reduction.of([dict.fromkeys(range(16), 1 / 16)], (4, 4))
    mean = copy.copy(everything)
    object.__setattr__(mean, "anchor", torch.tensor([-1]))
    states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][0]
    expected: dict[Reduction, list[Tensor]] = {
        mixed: [states[0], 0.5 * states[2] + 0.25 * states[7], states[7], states[7]],
        mean: [states[1:].mean(0)],
        Reduction.of([{3: 1.0}, {16: 1.0}], (4, 4)): [states[4], states[0]],
    }
    for plan, rows in expected.items():
        with reduced(model, Fixed(plan)):
            out = model(**inputs)
        assert torch.allclose(out.image_hidden_states, model.model.multi_modal_projector(torch.stack(rows)), atol=1e-4)
        assert out.logits.shape[1] == 2 + len(rows)
        for mode in ("compact", "original"):
            assert len(generate(model, inputs, Fixed(plan), positions=mode, num_beams=2).sequences) == 1
    cls_anchor = Reduction.of([{16: 1.0}], (4, 4))
    object.__setattr__(cls_anchor, "anchor", torch.tensor([16]))  # the index of CLS, which has no position either
    for plan in (cls_anchor, mean):
        assert record_positions(model, inputs, Fixed(plan), positions="original")[0].tolist() == [[0, 16, 17]]
    first, *_ = record_positions(model, inputs, Fixed(mixed), positions="original")
    assert first.tolist() == [[0, 16, 2, 7, 7, 17]]  # a token without a position takes the last one of its image


def test_budget_larger_than_the_number_of_patches(model: Any, inputs: dict[str, Any]) -> None:
    with reduced(model, torino_reducer(budget=20)) as trace:
        model.generate(**inputs, max_new_tokens=1)
    assert trace.calls[0].after == (20,) * 4
    assert trace.bytes_saved < 0


def test_reducer_gets_its_signals(model: Any, inputs: dict[str, Any]) -> None:
    reducer = Recorder.needing("cls", "cls_attention", "keys", "queries", "keys@+1", "cls_attention@0")
    calls: list[int] = []
    hooks = [
        block.register_forward_hook(lambda _, a, o, number=number: calls.append(number))
        for number, block in enumerate(model.model.vision_tower.encoder.layers)
    ]
    with reduced(model, reducer) as trace:
        model(**inputs)
    [hook.remove() for hook in hooks]
    assert calls == [0, 1, 2]  # of 4 blocks; the last one starts, for its keys, but does not finish
    image = reducer.recorded[0]
    assert image.origin.block == 2
    assert image.origin.encoder == tiny.NAME
    for name in ("cls", "cls_attention", "keys", "queries", "keys@+1", "cls_attention@0"):
        assert image.signal(name, "this test") is not None
    assert set(image.signals) == {"queries", "keys@+1", "cls_attention@0"}
    assert set(trace.seconds) == {"tower", "signals", "plan", "projector"}
    plain = Recorder.needing()
    with reduced(model, plain):
        model(**inputs)
    assert plain.recorded[0].keys is None
    assert plain.recorded[0].cls_attention is None


def test_outputs_of_other_encoders_are_kept(model: Any, inputs: dict[str, Any]) -> None:
    video = object()
    given_inputs = inputs | {"mm_encoder_outputs": {"video": video, "image": None}}
    reduced_inputs, _ = adapter_for(model).reduce_inputs(given_inputs, Ragged(), "compact")
    assert set(reduced_inputs["mm_encoder_outputs"]) == {"image", "video"}
    assert reduced_inputs["mm_encoder_outputs"]["video"] is video
    assert given_inputs["mm_encoder_outputs"]["image"] is None


@pytest.mark.parametrize("layer", [-1, -2, 1, 0])
def test_other_feature_layers(layer: int) -> None:
    model, inputs = tiny.llava(vision_feature_layer=layer), tiny.prompt("a#b")
    stock = tiny.llava(vision_feature_layer=layer or -5)  # transformers 5.23 treats 0 as not set
    assert same(generate(model, inputs, Identity()), generate(stock, inputs))
    reducer = Recorder.needing()
    with reduced(model, reducer):
        model(**inputs)
        model(**inputs, vision_feature_layer=-3)
    assert [image.origin.block for image in reducer.recorded] == [layer % 5 - 1, 1]


# ---------------------------------------------------------------------- other towers


@pytest.mark.parametrize(("tower", "per_image"), [("siglip", 16), ("dinov2", 16), ("registers", 16 + tiny.REGISTERS)])
def test_other_towers(tower: str, per_image: int) -> None:
    model = tiny.llava(tower)
    inputs = tiny.prompt("ab#cd", "#e#f", "k", per_image=per_image)
    assert same(generate(model, inputs, Identity()), generate(model, inputs))
    assert same(generate(model, inputs, Identity(), num_beams=2), generate(model, inputs, num_beams=2))
    with reduced(model, torino_reducer()) as trace:
        model.generate(**inputs, max_new_tokens=2)
        logits = model(**inputs).logits
    extra = per_image - 16
    assert [len(plan) + extra for plan in trace][:3] == list(trace.calls[0].after)
    assert trace.calls[0].before == (per_image,) * 3
    assert logits.shape[1] == 2 + sum(trace.calls[0].after[1:])  # row "#e#f"
    if tower == "registers":
        pick = Fixed(Reduction.pick(torch.tensor([5]), (4, 4), ""))
        recorded = record_positions(model, inputs, pick, positions="original")
        assert recorded[0][0, -7:].tolist() == [0, 1, 2, 3, 2 + 2 + 5, 20, 21]  # registers come first


@pytest.mark.parametrize("need", ["cls", "cls_attention"])
def test_tower_without_a_cls_token(need: str) -> None:
    model, inputs = tiny.llava("siglip"), tiny.prompt("a#")
    with reduced(model, Recorder.needing(need)), pytest.raises(MissingSignal, match="tower of this model has none"):
        model.generate(**inputs)
    keep_cls = Fixed(Reduction.of([{16: 1.0}], (4, 4), "keep-cls"))
    with (
        reduced(model, keep_cls),
        pytest.raises(MissingSignal, match=r"keep-cls keeps the CLS token, and the tower Siglip.* none"),
    ):
        model.generate(**inputs)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, "feeds the CLS token to its language model"),
        ({"vision_feature_layer": (-2, -1)}, r"layer is \[-2, -1\]: this model reads several tower layers at once"),
        ({"vision_feature_layer": 7}, "vision_feature_layer must be from -5 to 4 for this tower, got 7"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str) -> None:
    model = tiny.llava(**change)
    with reduced(model, Ragged()), pytest.raises(TorinoError, match=message):
        model.generate(**tiny.prompt("a#"))


def test_default_strategy_without_a_cls_token_is_refused() -> None:
    model = tiny.llava("siglip", vision_feature_select_strategy="default")
    with reduced(model, Ragged()), pytest.raises(TorinoError, match=r"a patch in SiglipVisionModel. Use .full."):
        model(**tiny.prompt("a#", per_image=15))


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("method", ["__call__", "generate"])
def test_inconsistent_inputs_are_refused(model: Any, method: str) -> None:
    inputs, hooks = tiny.prompt("ab#cd", "#e"), count_hooks(model)
    images = inputs["pixel_values"]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"pixel_values": images[:1]},
            BadTokens,
            r"1 image was given \(16 placeholders\), and row 1 of the prompt has 16",
        ),
        (
            {"pixel_values": torch.cat([images, images])},
            BadTokens,
            "4 images were given, and the prompt has placeholders for 2",
        ),
        (
            {n: v[:, :-8] for n, v in inputs.items() if v.ndim == 2},
            BadTokens,
            "does not match its images .*tokenizer may have truncated",
        ),
        ({"inputs_embeds": torch.zeros(2, 20, 64)}, BadParameter, "embeddings cannot be shortened"),
        ({"input_ids": None}, BadParameter, "Reduction needs input_ids with image placeholders"),
        ({"attention_mask": torch.ones(2, 25)}, BadParameter, "attention_mask must have the shape of input_ids"),
        ({"mm_encoder_outputs": {"image": object()}}, BadParameter, "Both pixel values and mm_encoder_outputs"),
        ({"past_key_values": _make_cache(model)}, BadParameter, "past_key_values already holds 3 tokens"),
    ]
    for change, error, message in wrong:
        with reduced(model, Ragged()) as trace, pytest.raises(error, match=message):
            getattr(model, method)(**(inputs | change))
        assert len(trace) == 0
    assert count_hooks(model) == hooks


def test_failing_tower_leaves_no_hooks(model: Any) -> None:
    inputs, before = tiny.prompt("a#"), count_hooks(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.vision_tower.encoder.layers[1].register_forward_hook(fail)
    with reduced(model, Recorder.needing("cls_attention")) as trace, pytest.raises(RuntimeError, match="out of memory"):
        model.generate(**inputs)
    handle.remove()
    assert count_hooks(model) == before
    assert len(trace) == 0


def _make_cache(model: Any) -> DynamicCache:
    return model(input_ids=torch.tensor([[4, 5, 6], [4, 5, 6]]), use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("make_sae", "message"),
    [
        (
            lambda: tiny.sae(32),
            "This SAE reads tokens of width 32 from an unnamed encoder.*width 64 and come from tiny/clip, block 2",
        ),
        (lambda: tiny.sae(block=1), "an unnamed encoder, block 1, but .* block 2. Choose an SAE"),
        (lambda: tiny.sae(encoder="openai/clip-vit-large-patch14-336"), "clip-vit-large-patch14-336, block unknown"),
    ],
)
def test_sae_for_other_tokens_is_refused(model: Any, make_sae: Any, message: str) -> None:
    with reduced(model, make("torino-m", sae=make_sae())), pytest.raises(SAEMismatch, match=message):
        model.generate(**tiny.prompt("a#"))
    with reduced(model, make("torino-m", sae=tiny.sae(encoder="other/CLIP", block=2))):
        model.generate(**tiny.prompt("a#"), max_new_tokens=1)
