"""Videos of Qwen, LLaVA-NeXT-Video and LLaVA-OneVision on tiny models, against the stock models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.support import tiny_qwen, tiny_tiles
from tests.support.tiny import Identity
from torino import RawEmbedding, Reducer, Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, TorinoError
from torino.vlm import VLM, ReducingProcessor, adapter_for, reduced
from torino.vlm.clips import mean_times
from torino.vlm.session import Inputs

QWEN = tiny_qwen.FAMILIES
POOLED = ("llava_next_video", "llava_onevision")
FAMILIES = (*QWEN, *POOLED)
NEW = 4
POOLED_ROWS = ([3], [], [5, 8], [13])


def build(family: str) -> Any:
    return tiny_qwen.make_model(family) if family in QWEN else tiny_tiles.make_model(family)


def make_rows(family: str) -> Any:
    return tiny_qwen.VIDEO_ROWS if family in QWEN else POOLED_ROWS


def make_inputs(family: str, rows: Any, side: str = "left") -> dict[str, Any]:
    if family in QWEN:
        return tiny_qwen.make_video_inputs(family, rows, side=side)
    return tiny_tiles.make_video_inputs(tiny_tiles.make_model(family), rows, side)


def generate(model: Any, inputs: Mapping[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)


def video_token(model: Any) -> int:
    return int(model.config.video_token_id)


@dataclass(frozen=True, repr=False)
class KeepEveryThird(Reducer):
    """Keep every third token of a video."""

    name: ClassVar[str] = "keep-every-third"
    takes_frames: ClassVar[bool] = True

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.pick(torch.arange(1, len(tokens), 3), by="pick", **tokens.layout)


@dataclass(frozen=True, repr=False)
class MergeFrames(Reducer):
    """Merge each place over all frames, at its place in the first frame; the last token has no anchor."""

    name: ClassVar[str] = "merge-frames"
    takes_frames: ClassVar[bool] = True

    def plan(self, tokens: VisualTokens) -> Reduction:
        size = tokens.grid[0] * tokens.grid[1]
        rows = [{f * size + i: 1 / tokens.frames for f in range(tokens.frames)} for i in range(size)]
        plan = Reduction.of([*rows, {len(tokens) - 1: 1.0}], by="merge", **tokens.layout)
        plan.anchor[:-1] = torch.arange(size)
        plan.anchor[-1] = -1
        return plan


class KeepFirst(Reducer):
    """Keep the first token; a method for images."""

    name: ClassVar[str] = "keep-first"

    def plan(self, tokens: VisualTokens) -> Reduction:
        return Reduction.pick(torch.tensor([0]), tokens.grid, "pick")


REDUCERS: dict[str, Reducer] = {
    "third": KeepEveryThird(),
    "merge": MergeFrames(),
    "torino-p": make("torino-p(k=2, delta=1)", sae=RawEmbedding()),
    "torino-m": make("torino-m(k=2, delta=1)", sae=RawEmbedding()),
    "budget": make("torino-m(k=2, delta=1, budget=3)", sae=RawEmbedding()),
    "random": make("random(budget=2)"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return build(family)


# ---------------------------------------------------------------------- identity


@pytest.mark.parametrize("side", ["left", "right"])
def test_identity_is_bitwise_the_stock_model(family: str, model: Any, side: str) -> None:
    inputs = make_inputs(family, make_rows(family), side)
    logits = model(**inputs).logits
    placeholders = int((inputs["input_ids"] == video_token(model)).sum())
    with reduced(model, Identity()) as trace:
        again = model(**inputs).logits
    assert torch.equal(again, logits)
    assert trace.before == trace.after == placeholders > 0
    if side == "right":
        return
    stock = generate(model, inputs)
    with reduced(model, Identity()):
        output = generate(model, inputs)
    assert torch.equal(output.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(output.logits, stock.logits, strict=True))
    assert len(set(stock.sequences[:, -NEW:].flatten().tolist())) > 3


def test_a_video_is_one_unit_of_frames(family: str, model: Any) -> None:
    with reduced(model, Identity()) as trace:
        generate(model, make_inputs(family, make_rows(family)))
    layouts = [(plan.frames, *plan.grid) for plan in trace]
    if family in QWEN:
        assert layouts == [video for row in tiny_qwen.VIDEO_ROWS for video in row]
    else:
        assert layouts == [(3, 2, 2)] * 4
    times = [plan.times for plan in trace]
    assert times[0] == ((0.0, 0.5, 1.0) if family == "qwen2_5_vl" else None)


# ---------------------------------------------------------------------- tokens removed


@pytest.mark.parametrize("name", REDUCERS)
def test_ragged_batch_equals_its_rows(family: str, model: Any, name: str) -> None:
    rows = make_rows(family)
    inputs = make_inputs(family, rows)
    length = inputs["input_ids"].shape[1]
    with reduced(model, REDUCERS[name]) as together:
        output = generate(model, inputs)
    assert torch.equal(output.sequences[:, :length], inputs["input_ids"])
    with reduced(model, REDUCERS[name]) as alone:
        first = 0
        for row, videos in enumerate(rows):
            given = make_inputs(family, [videos])
            if family == "qwen2_5_vl" and videos:  # each video keeps its own rate
                given["second_per_grid_ts"] = inputs["second_per_grid_ts"][first : first + len(videos)]
            first += len(videos)
            single = generate(model, given)
            assert torch.equal(single.sequences[0, -NEW:], output.sequences[row, length:])
            for a, b in zip(single.logits, output.logits, strict=True):
                assert torch.allclose(a[0], b[row], atol=3e-4)
    assert [len(plan) for plan in together] == [len(plan) for plan in alone]
    assert together.after == alone.after < together.before == alone.before
    assert together.calls[0].bytes_saved > 0


@pytest.mark.parametrize("name", REDUCERS)
def test_session_and_processor_equal_the_context(family: str, model: Any, name: str) -> None:
    rows = make_rows(family)[:1]
    inputs, reducer = make_inputs(family, rows), REDUCERS[name]
    length = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [video_token(model)]}
    for positions in ("compact", "original", "median"):
        with reduced(model, reducer, positions=positions):
            expected = model.generate(**inputs, **options)[:, length:]
        vlm, given = VLM(model, _Decoder(), positions=positions), Inputs(dict(inputs), ("",))
        output = vlm.generate(given, [vlm.reduce(vlm.encode(given, [reducer]), reducer)], **options)
        assert torch.equal(output.ids, expected)
        processor = ReducingProcessor(lambda return_tensors: inputs, model, reducer, positions=positions)
        short = processor()
        assert torch.equal(model.generate(**short, **options)[:, short["input_ids"].shape[1] :], expected)


class _Decoder:
    chat_template = None

    @staticmethod
    def batch_decode(rows: Tensor, skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(map(str, row.tolist())) for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("attention", ["proportional", "restore"])
def test_attention_modes_run_on_videos(family: str, model: Any, attention: Any) -> None:
    inputs = make_inputs(family, make_rows(family))
    with reduced(model, Identity(), attention="plain"):
        plain = model(**inputs).logits
    with reduced(model, Identity(), attention=attention if attention == "proportional" else "plain"):
        assert torch.allclose(model(**inputs).logits, plain, atol=1e-4)  # every token is one patch
    with reduced(model, MergeFrames(), attention="plain"):
        merged = model(**inputs).logits
    with reduced(model, MergeFrames(), attention=attention):
        assert not torch.allclose(model(**inputs).logits, merged, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", POOLED, indirect=True)
def test_merged_tokens_are_projected_means_of_pooled_tokens(family: str, model: Any) -> None:
    inputs = make_inputs(family, [[3]])
    adapter = adapter_for(model)
    encoded = adapter.encode(inputs, frozenset())
    (video,) = encoded.tokens
    plans = adapter.plan(MergeFrames(), encoded)
    (item,) = adapter.embed(encoded, plans)
    mean = video.patches.view(3, 4, -1).mean(0)
    assert torch.allclose(item.features[:4], model.model.multi_modal_projector(mean), atol=1e-5)
    stock = model.model.get_video_features(inputs["pixel_values_videos"], return_dict=True).pooler_output[0]
    stock = stock.flatten(0, -2)  # older releases keep an axis of frames
    assert torch.equal(item.features[4], stock[11])
    newline = family == "llava_onevision"
    assert item.slots.tolist() == [0, 1, 2, 3, 11, *([12] if newline else [])]
    assert encoded.full == (12 + newline,)


# ---------------------------------------------------------------------- positions


@pytest.mark.parametrize("family", QWEN, indirect=True)
def test_kept_tokens_have_the_positions_of_the_stock_model(family: str, model: Any) -> None:
    inputs = make_inputs(family, tiny_qwen.VIDEO_ROWS)
    names = ("input_ids", "mm_token_type_ids", "video_grid_thw", "second_per_grid_ts", "attention_mask")
    full, _ = model.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})
    for reducer in (KeepEveryThird(), MergeFrames()):
        short, call = adapter_for(model).reduce_inputs(inputs, reducer, "compact", "left")
        plans = iter(call.reductions)
        for row, videos in enumerate(tiny_qwen.VIDEO_ROWS):
            is_video = inputs["input_ids"][row] == video_token(model)
            mask = inputs["attention_mask"][row].bool()
            placeholders, expected = full[:, row, is_video].split([t * h * w for t, h, w in videos], 1), []
            for places in placeholders:
                plan = next(plans)
                expected.append(places[:, torch.where(plan.anchor < 0, plan.patches - 1, plan.anchor)])
            kept = short["input_ids"][row] == video_token(model)
            own = short["attention_mask"][row].bool()
            assert torch.equal(short["position_ids"][1:, row, kept], torch.cat([full[:, row, :0], *expected], 1))
            text = short["position_ids"][1:, row, own & ~kept]
            assert torch.equal(text, full[:, row, mask & ~is_video])
        times = full[0][inputs["input_ids"] == video_token(model)]
        assert len(times.unique()) > 3, "the temporal positions of this test are all the same"


@pytest.mark.parametrize("family", QWEN, indirect=True)
def test_generated_text_continues_where_the_full_prompt_does(family: str, model: Any) -> None:
    inputs = make_inputs(family, tiny_qwen.VIDEO_ROWS)
    recorded: list[Tensor] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda module, arguments, named: recorded.append(named["position_ids"]), with_kwargs=True
    )
    try:
        generate(model, inputs)
        stock, recorded[:] = list(recorded), []
        with reduced(model, KeepEveryThird()):
            generate(model, inputs)
    finally:
        handle.remove()
    assert len(stock) == len(recorded) == NEW
    assert all(torch.equal(a[1:, :, -1], b[1:, :, -1]) for a, b in zip(stock, recorded, strict=True))


# ---------------------------------------------------------------------- one frame


@torch.no_grad()
def test_a_video_of_one_frame_equals_the_image_where_the_stock_model_does(family: str, model: Any) -> None:
    """In Qwen it does, apart from Qwen3-VL's text; the LLaVA families pool videos and tile images."""
    if family in QWEN:
        image = tiny_qwen.make_inputs([[(3, 2)]])
        token, kinds = image["input_ids"] == tiny_qwen.IMAGE, image["mm_token_type_ids"]
        video: dict[str, Any] = {
            "input_ids": torch.where(token, tiny_qwen.VIDEO, image["input_ids"]),
            "attention_mask": image["attention_mask"],
            "mm_token_type_ids": 2 * kinds,
            "pixel_values_videos": image["pixel_values"],
            "video_grid_thw": image["image_grid_thw"],
        }
        assert torch.equal(model(**image).logits, model(**video).logits)
        for reducer in REDUCERS.values():
            with reduced(model, reducer):
                assert torch.equal(model(**image).logits, model(**video).logits)
        return
    video = tiny_tiles.make_video_inputs(model, [[3]], frames=1)
    encoded = adapter_for(model).encode(video, frozenset())
    assert encoded.tokens[0].frames == 1
    assert len(encoded.tokens[0]) == tiny_tiles.TILE // 4


# ---------------------------------------------------------------------- refusals


def test_methods_for_images_are_refused_in_one_sentence(family: str, model: Any) -> None:
    inputs = make_inputs(family, make_rows(family)[:1])
    with (
        reduced(model, KeepFirst()),
        pytest.raises(BadTokens, match="cannot reduce a video of 3 frames"),
    ):
        generate(model, inputs)
    with reduced(model, make("downsample(budget=4)")), pytest.raises(TorinoError, match="not on videos"):
        generate(model, inputs)


def test_images_and_videos_in_one_call_are_refused(family: str, model: Any) -> None:
    inputs = make_inputs(family, make_rows(family)[:1])
    with reduced(model, Identity()), pytest.raises(BadParameter, match="both images and videos"):
        generate(model, inputs | {"pixel_values": torch.zeros(4, 96) if family in QWEN else torch.zeros(1, 3, 32, 32)})


def test_wrong_video_pixels_are_refused(family: str, model: Any) -> None:
    inputs = make_inputs(family, make_rows(family)[:1])
    with reduced(model, Identity()), pytest.raises(BadParameter, match="pixel_values_videos must be"):
        generate(model, inputs | {"pixel_values_videos": inputs["pixel_values_videos"].flatten()})
    if family in QWEN:
        with reduced(model, Identity()), pytest.raises(BadParameter, match="video_grid_thw describes"):
            generate(model, inputs | {"video_grid_thw": 2 * inputs["video_grid_thw"]})


def test_signals_are_pooled_with_the_frames() -> None:
    for family in POOLED:
        model = build(family)
        encoded = adapter_for(model).encode(make_inputs(family, [[3]]), frozenset({"keys"}))
        (video,) = encoded.tokens
        assert video.keys is not None
        assert video.keys.shape[0] == len(video) == 12


def test_times_of_merged_frames() -> None:
    assert mean_times([0.0, 0.5, 1.0, 1.5, 2.0], 3) == (0.25, 1.25, 2.0)
    assert mean_times([3.0], 1) == (3.0,)
