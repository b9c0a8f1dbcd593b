"""Videos through the stock processors of each family: placeholders, timestamps and times of frames."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.support import tiny_qwen, tiny_tiles
from torino import RawEmbedding, make
from torino.core.errors import BadParameter
from torino.datasets.video import Video
from torino.vlm import VLM, ask

pytest.importorskip("torchvision", reason="the stock video processors need torchvision")

FAMILIES = (*tiny_qwen.FAMILIES, "llava_next_video", "llava_onevision")
SPECIAL = {
    "qwen": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "llava": ("<image>", "<video>"),
}
TEMPLATE = """{% for turn in messages %}{% for part in turn['content'] %}{% if part['type'] == 'text' %}
{{- part['text'] }}
{%- else %}MARK{{ part['type'] }}MARK {% endif %}{% endfor %}{% endfor %}"""


def make_tokenizer(family: str) -> Any:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    kind = family.partition("_")[0].rstrip("23")
    special = SPECIAL["qwen" if kind.startswith("qwen") else "llava"]
    words = list(dict.fromkeys(["<pad>", "<s>", *"0123456789.<> seconds?What"]))
    words += [f"w{i}" for i in range(60 - len(words))] + list(special)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="w0",
        padding_side="left",
        additional_special_tokens=list(special),
    )


def make_session(family: str) -> VLM:
    tokenizer = make_tokenizer(family)
    images = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
    if not family.startswith("qwen"):
        images = ("<image>", "<video>")
    template = TEMPLATE.replace(
        "MARK{{ part['type'] }}MARK", f"{{{{ '{images[0]}' if part['type'] == 'image' else '{images[1]}' }}}}"
    )
    if family.startswith("qwen"):
        size = {"shortest_edge": 16, "longest_edge": 16 * 16 * 16}
        options = {"patch_size": tiny_qwen.PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": size}
        kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
        video = getattr(transformers, "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor")
        processor = getattr(transformers, f"{kind}Processor")(
            transformers.Qwen2VLImageProcessor(**options), tokenizer, video(**options), chat_template=template
        )
        return VLM(tiny_qwen.make_model(family), processor)
    model = tiny_tiles.make_model(family)
    side = {"height": tiny_tiles.SIDE, "width": tiny_tiles.SIDE}
    if family == "llava_next_video":
        video = transformers.LlavaNextVideoVideoProcessor(size=side, crop_size=side)
        processor = transformers.LlavaNextVideoProcessor(
            video, tiny_tiles.image_processor("llava_next"), tokenizer, template, patch_size=tiny_tiles.PATCH
        )
    else:
        video = transformers.LlavaOnevisionVideoProcessor(size=side)
        processor = transformers.LlavaOnevisionProcessor(
            tiny_tiles.image_processor(family),
            tokenizer,
            video,
            num_image_tokens=tiny_tiles.TILE,
            vision_feature_select_strategy="full",
            chat_template=template,
        )
    return VLM(model, processor)


def make_video(frames: int = 5, rate: float = 2.0, size: tuple[int, int] = (40, 32)) -> Video:
    rng = np.random.default_rng(frames)
    images = tuple(Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)) for _ in range(frames))
    return Video(images, tuple(0.25 + i / rate for i in range(frames)), frames / rate)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def vlm(family: str) -> VLM:
    return make_session(family)


def test_session_answers_about_a_video(family: str, vlm: VLM) -> None:
    video = make_video()
    inputs = vlm.inputs(video, "What?")
    assert inputs.videos == [video]
    assert len(inputs.images) == 5
    placeholders = int((inputs.tensors["input_ids"] == vlm.adapter.video_token).sum())
    full = vlm.answer(inputs, max_new_tokens=3)
    assert full.before == full.after == placeholders
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    stock = vlm.model.generate(**inputs.tensors, **options)[:, inputs.tensors["input_ids"].shape[1] :]  # type: ignore[operator]
    assert full.text == vlm.processor.batch_decode(stock, skip_special_tokens=True)[0]
    reducer = make("torino-m(k=2, delta=1, budget=3)", sae=RawEmbedding())
    answer = ask(video, "What?", model=vlm, reducer=reducer, max_new_tokens=3)
    assert answer.after == 3 + (family == "llava_onevision")
    assert answer.reduction.frames == (3 if family.startswith("qwen") else 5)


def test_times_of_frames_reach_the_tokens(family: str, vlm: VLM) -> None:
    video = make_video()
    (tokens,) = vlm.encode(video).run(None)[0].tokens
    expected = (0.5, 1.5, 2.25) if family.startswith("qwen") else video.times
    assert tokens.times == pytest.approx(expected)


def test_prompts_have_the_times_of_the_stock_processor(family: str, vlm: VLM) -> None:
    inputs = vlm.inputs(make_video(), "What?")
    text = vlm.processor.tokenizer.decode(inputs.tensors["input_ids"][0])
    if family == "qwen3_vl":
        times = [
            float(time)
            for time in re.findall(r"<\s*([\d. ]+?)\s*seconds", text.replace(" ", "").replace("seconds", " seconds"))
        ]
        assert times == pytest.approx([0.5, 1.5, 2.2], abs=0.06)  # the last frame is repeated
    if family == "qwen2_5_vl":
        assert inputs.tensors["second_per_grid_ts"][0] == pytest.approx(1.0, abs=1e-3)  # two frames of half a second


def test_another_question_about_the_same_video(vlm: VLM) -> None:
    reducer = make("random(budget=2)")
    video = make_video()
    first = vlm.encode(video, [reducer], "What?")
    again = first.with_question("Who?")
    assert torch.equal(again.inputs.tensors["pixel_values_videos"], first.inputs.tensors["pixel_values_videos"])
    expected = vlm.answer(vlm.inputs(video, "Who?"), reducer, max_new_tokens=3)
    assert vlm.answer(again, reducer, max_new_tokens=3).text == expected.text


def test_images_and_videos_together_are_refused(vlm: VLM) -> None:
    with pytest.raises(BadParameter, match="images and videos, and torino reduces one"):
        vlm.inputs([make_video(), make_video().frames[0]], "What?")
    with pytest.raises(BadParameter, match="marks a video"):
        vlm.inputs(make_video(), f"What? {vlm.processor.video_token}")
