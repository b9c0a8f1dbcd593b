"""``ReducingProcessor`` on a tiny LLaVA: its prompts give the answers of the context manager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.support import tiny
from tests.support.generation import MODES, NEW, ROWS, all_equal, generate, same
from tests.support.tiny import Identity, Ragged
from torino.core.errors import BadParameter
from torino.vlm import ReducedInputs, ReducingProcessor, reduced


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_processor_equals_context_manager(model: Any, side: str, positions: Any) -> None:
    processor = ReducingProcessor(tiny.TinyProcessor(side), model, Ragged(), positions=positions)
    inputs = processor(images=tiny.pixels(4), text=list(ROWS))
    assert "pixel_values" not in inputs
    length = inputs.input_ids.shape[1]
    # Beams are tried twice, because inputs can be reused.
    for options in (MODES["beams"], MODES["greedy"], MODES["beams"], MODES["sampling"]):
        expected = generate(model, tiny.prompt(*ROWS), Ragged(), positions=positions, **options)
        output = generate(model, inputs, **options)
        assert torch.equal(output.sequences[:, length:], expected.sequences[:, -NEW:])
        assert all_equal(output.logits, expected.logits)
    assert torch.equal(output.sequences[:, :length], inputs["input_ids"])
    with reduced(model, Ragged(1)) as trace:  # a prompt of its final length is not reduced again
        assert same(generate(model, inputs, **MODES["sampling"]), output)
    assert len(trace) == 0
    assert processor.trace.after == sum(map(len, processor.trace))


def test_processor_output_and_attributes(model: Any) -> None:
    inner = tiny.TinyProcessor()
    processor = ReducingProcessor(inner, model, Identity())
    text = processor(text=["ab", "c"])
    assert set(text) == {"input_ids", "attention_mask"}
    assert len(processor.trace) == 0
    assert processor.batch_decode(torch.tensor([[4, 5]])) == ["ab"]
    assert processor.side == "left"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = processor.nothing
    inputs = processor(images=tiny.pixels(1), text="a#")
    assert not any(value.requires_grad for value in inputs["mm_encoder_outputs"]["image"].pooler_output)
    assert torch.equal(model(**inputs).logits, model(**tiny.prompt("a#")).logits)
    assert inputs["mm_encoder_outputs"]["image"] is not inputs["mm_encoder_outputs"]["image"]
    assert isinstance(copy.deepcopy(inputs), ReducedInputs)
    moved = inputs.to("cpu", torch.bfloat16).to(dtype=torch.float16).to(device="cpu")
    assert moved.input_ids.dtype == torch.int64
    assert torch.equal(moved.input_ids, inputs.input_ids)
    with pytest.raises(AttributeError):
        _ = inputs.pixel_values


def test_chat_template(model: Any) -> None:
    processor = ReducingProcessor(tiny.TinyProcessor(), model, Ragged())
    turns = ["ab#cd"]
    assert processor.apply_chat_template(turns) == "ab#cd"
    inputs = processor.apply_chat_template(turns, images=tiny.pixels(1), return_dict=True)
    assert isinstance(inputs, ReducedInputs)
    direct = processor(images=tiny.pixels(1), text="ab#cd")
    assert torch.equal(generate(model, inputs).sequences, generate(model, direct).sequences)
    with pytest.raises(
        BadParameter, match=r"returned input_ids as list; reduction needs tensors. Pass return_tensors="
    ):
        processor.apply_chat_template(turns, images=tiny.pixels(1), return_dict=True, return_tensors=None)


@pytest.mark.parametrize("square", [False, True])
def test_processor_of_transformers(model: Any, square: bool) -> None:
    processor = tiny.processor(square)
    images = tiny.photos(3)
    text = ["<image> a b", "c <image> <image> d e"]
    full = processor(images=images, text=text, padding=True, return_tensors="pt")
    assert (full["input_ids"] == tiny.IMAGE).sum() == 3 * tiny.PATCHES
    wrapped = ReducingProcessor(processor, model, Ragged())
    inputs = wrapped(images=images, text=text, padding=True)
    expected, output = generate(model, full, Ragged()), generate(model, inputs)
    assert torch.equal(output.sequences[:, -NEW:], expected.sequences[:, -NEW:])
    assert same(generate(model, full, Identity()), generate(model, full))
    assert wrapped.trace.calls[0].padding == ("square" if square else "crop")
    content = [{"type": "image", "image": images[0]}, {"type": "text", "text": "a"}]
    written = wrapped.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, add_generation_prompt=True
    )
    assert isinstance(written, ReducedInputs)
    assert written.input_ids.shape[1] == 2 + len(wrapped.trace[-1])
    assert len(processor.batch_decode(generate(model, written).sequences)) == 1


def test_padding_in_the_trace(model: Any) -> None:
    inner = tiny.TinyProcessor()
    processor = ReducingProcessor(inner, model, Identity())
    inner.image_processor = type("LlavaImageProcessorPil", (), {"do_pad": True, "do_center_crop": True})()  # type: ignore[attr-defined]
    processor(images=tiny.pixels(1), text="a#")
    inner.image_processor = type("CLIPImageProcessor", (), {"do_center_crop": True})()  # type: ignore[attr-defined]
    processor(images=tiny.pixels(1), text="a#")
    inner.image_processor = None  # type: ignore[attr-defined]
    processor(images=tiny.pixels(1), text="a#")
    assert [call.padding for call in processor.trace.calls] == ["square", "crop", ""]


def test_several_turns(model: Any) -> None:
    """The tokens are the same with and without a cache, so the lengths are right."""
    first = ReducingProcessor(tiny.TinyProcessor(), model, Ragged())(images=tiny.pixels(1), text="ab#cd")
    answer = model.generate(**first, max_new_tokens=3, return_dict_in_generate=True)
    longer = torch.cat([answer.sequences, torch.tensor([[5, 6]])], 1)
    cached = model.generate(input_ids=longer, past_key_values=answer.past_key_values, max_new_tokens=3)
    encoded = first["mm_encoder_outputs"]
    assert torch.equal(cached, model.generate(input_ids=longer, mm_encoder_outputs=encoded, max_new_tokens=3))
