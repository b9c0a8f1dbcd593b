"""Choosing patches by a question: a tiny LLaVA and the text tower of the CLIP that its vision tower belongs to."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tiny
from tests.support.reference_cdpruner import reference_gains, reference_relevance
from torino import Reduction, TorinoError, make
from torino.core.errors import BadFile, BadParameter, BadTokens, MissingSignal, Unreachable
from torino.core.tokens import VisualTokens
from torino.reducers import Reducer
from torino.vlm import (
    VLM,
    ClipText,
    ReducingProcessor,
    adapter_for,
    apply,
    load_clip_text,
    load_vlm,
    reduced,
    remove,
)
from torino.vlm.text_query import last_user_messages
from torino.vlm.towers import Tower

BUDGET = 6
SHORT, OTHER = "what is on the table ?", "how many red cups"
LONG = " ".join(f"word{number % 55}" for number in range(90))  # 92 tokens with start and end
LONGER = " ".join(f"word{(7 * number) % 55}" for number in range(160))


def make_models(tower: str = "clip", **text: Any) -> tuple[Any, Any, Any]:
    """Return a LLaVA, and the CLIP of its vision tower with a tokenizer."""
    model = tiny.llava(tower)
    return model, *tiny.clip(model.model.vision_tower, **text)


def reference_text(model: Any, tokenizer: Any, question: str) -> Tensor:
    """Embed a question as the released code does: pad to a multiple of 77 and embed each run of 77 as a text."""
    from transformers import CLIPTextModelWithProjection

    encoder = CLIPTextModelWithProjection(model.config.text_config).eval()
    encoder.text_model.load_state_dict(model.text_model.state_dict())
    encoder.text_projection.load_state_dict(model.text_projection.state_dict())
    ids: list[int] = tokenizer(question)["input_ids"]
    mask = [1] * len(ids)
    while len(ids) % 77:
        ids, mask = [*ids, 0], [*mask, 0]
    rows = []
    for start in range(0, len(ids), 77):
        run = slice(start, start + 77)
        inputs = {"input_ids": torch.tensor([ids[run]]), "attention_mask": torch.tensor([mask[run]])}
        rows.append(encoder(**inputs).text_embeds[0])
    return torch.stack(rows)


def reference_joint(model: Any, pixels: Tensor) -> Tensor:
    """Project patches as the released code does: second-to-last hidden state, final norm, projection."""
    states = model.vision_model(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
    return model.visual_projection(model.vision_model.post_layernorm(states))


@dataclass(frozen=True)
class QueryRecorder(Reducer):
    """Read the question, keep every patch and record the tokens."""

    recorded: list[VisualTokens]
    name = "query-recorder"
    needs = frozenset({"joint", "text"})

    def plan(self, tokens: VisualTokens) -> Reduction:
        self.recorded.append(tokens)
        return Reduction.identity(tokens.grid, self.spec)


# ---------------------------------------------------------------------- the two signals


@pytest.mark.parametrize("end", [len(tiny.WORDS) - 1, 2])  # by its id, or by the highest id as in older configs
@pytest.mark.parametrize("question", [SHORT, LONG, LONGER, "?", " ".join(["red"] * 75), " ".join(["red"] * 76)])
@torch.no_grad()
def test_text_equals_the_released_code(question: str, end: int) -> None:
    _, model, tokenizer = make_models(eos_token_id=end)
    text = ClipText(model, tokenizer).text(question)
    expected = reference_text(model, tokenizer, question)
    tokens = len(question.split()) + 2
    assert text.shape == ((tokens - 1) // 77 + 1, 16) == expected.shape
    assert text.dtype == torch.float32
    torch.testing.assert_close(text, expected, atol=1e-5, rtol=1e-4)


def test_long_questions_in_closed_segments() -> None:
    _, model, tokenizer = make_models()
    released, closed = ClipText(model, tokenizer), ClipText(model, tokenizer, segments="closed")
    assert torch.equal(released.text(SHORT), closed.text(SHORT))
    words = LONGER.split()
    parts = [" ".join(words[at : at + 75]) for at in (0, 75, 150)]
    # Each part is embedded like a question; padded rows sum in another order.
    torch.testing.assert_close(closed.text(LONGER), torch.cat([closed.text(part) for part in parts]))
    # In contrast, the first released segment does not depend on the question.
    torch.testing.assert_close(released.text(LONG)[0], released.text(LONGER)[0])
    assert not torch.allclose(closed.text(LONG)[0], closed.text(LONGER)[0], atol=0.1)
    with pytest.raises(BadParameter, match="segments must be one of 'released', 'closed', got 'open'"):
        ClipText(model, tokenizer, segments="open")  # type: ignore[arg-type]


@torch.no_grad()
def test_joint_equals_the_released_code() -> None:
    llava, model, tokenizer = make_models()
    pixels = tiny.pixels(2)
    encoded = adapter_for(llava).encode({"pixel_values": pixels}, frozenset())
    clip = ClipText(model, tokenizer)
    for tokens, expected in zip(encoded.tokens, reference_joint(model, pixels), strict=True):
        torch.testing.assert_close(clip.joint(tokens.patches), expected, atol=1e-5, rtol=1e-4)
        both = clip.signals(tokens, SHORT).signals
        assert torch.equal(both["text"], clip.text(SHORT))
        assert torch.equal(both["joint"], clip.joint(tokens.patches))
    assert "hidden_size" not in repr(clip)
    assert repr(clip) == "ClipText(patches of width 64 and questions, both to width 16)"


def test_half_precision_gives_float32_signals() -> None:
    llava, model, tokenizer = make_models()
    tokens = Tower(llava, None).model(tiny.pixels(1)).last_hidden_state[0, 1:]
    exact = ClipText(model, tokenizer).joint(tokens)
    half = ClipText(model.to(torch.bfloat16), tokenizer).joint(tokens.to(torch.bfloat16))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, atol=0.1, rtol=0.1)


# ---------------------------------------------------------------------- in a model


@torch.no_grad()
@pytest.mark.parametrize("question", [SHORT, LONG])
@pytest.mark.parametrize("space", ["features", "projected"])
def test_cdpruner_equals_the_reference(question: str, space: Any) -> None:
    """All of CDPruner, from pixels and words to patches, compared with a reference implementation."""
    llava, model, tokenizer = make_models()
    clip = ClipText(model, tokenizer)
    inputs = tiny.prompt("ab#c")
    reducer = make("cdpruner", budget=BUDGET, order="native", space=space)
    with reduced(llava, reducer, text_query=clip.query(question)) as trace:
        llava.generate(**inputs, max_new_tokens=2)
    joint = reference_joint(model, inputs["pixel_values"])[0]
    r = reference_relevance(joint.tolist(), reference_text(model, tokenizer, question).tolist())
    states = model.vision_model(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
    features = (states if space == "features" else llava.model.multi_modal_projector(states))[0].tolist()
    picks: list[int] = []
    while len(picks) < BUDGET:
        gains = reference_gains(features, r, picks)
        picks.append(gains.index(max(gains)))
    assert trace[0].anchor.tolist() == picks
    assert (trace.before, trace.after) == (tiny.PATCHES, BUDGET)
    assert list(trace.seconds)[:2] == ["tower", "question"]
    assert "question" in trace.summary()


def test_each_prompt_has_its_own_question() -> None:
    """Several rows, one with two images and one without; each row gives the same result alone."""
    llava, model, tokenizer = make_models()
    clip = ClipText(model, tokenizer)
    rows, questions = ["a#b", "cd", "#e#", "f#"], [SHORT, "is this red ?", LONG, OTHER]
    inputs = tiny.prompt(*rows)
    recorder = QueryRecorder([])
    with reduced(llava, recorder, text_query=clip.query(questions)):
        llava(**inputs)
    expected = [SHORT, LONG, LONG, OTHER]
    assert [len(tokens.signals["text"]) for tokens in recorder.recorded] == [1, 2, 2, 1]
    for tokens, question in zip(recorder.recorded, expected, strict=True):
        assert torch.equal(tokens.signals["text"], clip.text(question))
    reducer = make("cdpruner", budget=BUDGET)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with reduced(llava, reducer, text_query=clip.query(questions)) as trace:
        together = llava.generate(**inputs, **options)
    kept = [plan.anchor.tolist() for plan in trace]
    alone: list[list[int]] = []
    for number, (single, question) in enumerate(zip(tiny.one_by_one(rows, inputs), questions, strict=True)):
        with reduced(llava, reducer, text_query=clip.query(question)) as trace:
            out = llava.generate(**single, **options)
        assert torch.equal(out[0, -4:], together[number, -4:])
        alone += [plan.anchor.tolist() for plan in trace]
    assert kept == alone
    with reduced(llava, reducer, text_query=clip.query(SHORT)) as trace:  # one question for all rows
        llava(**inputs)
    assert trace[0].anchor.tolist() == kept[0]
    assert [plan.anchor.tolist() for plan in trace][1:] != kept[1:]


def test_processor_reads_the_prompt() -> None:
    llava, model, tokenizer = make_models()
    clip, inner = ClipText(model, tokenizer), tiny.processor()
    recorder = QueryRecorder([])
    processor = ReducingProcessor(inner, llava, recorder, text_query=clip)
    photos, prompts = tiny.photos(2), ["USER: <image> a b", "USER: c <image> d e"]

    def texts_for(*arguments: Any, **named: Any) -> list[Tensor]:
        recorder.recorded.clear()
        processor(*arguments, padding=True, **named)
        return [tokens.signals["text"] for tokens in recorder.recorded]

    # All words of the prompt, without placeholders, padding and special tokens.
    for text, question in zip(texts_for(images=photos, text=prompts), ["USER: a b", "USER: c d e"], strict=True):
        assert torch.equal(text, clip.text(question))
    for text, question in zip(
        texts_for(images=photos, text=prompts, question=[SHORT, OTHER]), [SHORT, OTHER], strict=True
    ):
        assert torch.equal(text, clip.text(question))
    for text in texts_for(images=photos, text=prompts, question=SHORT):
        assert torch.equal(text, clip.text(SHORT))
    # A question given at construction is used unless a call gives another.
    processor = ReducingProcessor(inner, llava, recorder, text_query=clip.query(OTHER))
    assert torch.equal(texts_for(images=photos[0], text=prompts[0])[0], clip.text(OTHER))
    assert torch.equal(texts_for(images=photos[0], text=prompts[0], question=SHORT)[0], clip.text(SHORT))
    # The context manager reads prompts if it has a processor.
    inputs = inner(images=photos[0], text=prompts[0], return_tensors="pt")
    recorder.recorded.clear()
    with reduced(llava, recorder, text_query=clip.query(prompts=inner)):
        llava(**inputs)
    assert torch.equal(recorder.recorded[0].signals["text"], clip.text("USER: a b"))


def test_conversation_uses_the_last_user_message() -> None:
    llava, model, tokenizer = make_models()
    clip, recorder = ClipText(model, tokenizer), QueryRecorder([])
    processor = ReducingProcessor(tiny.processor(), llava, recorder, text_query=clip)
    photo = tiny.photos(1)[0]
    first = {"role": "user", "content": [{"type": "image", "image": photo}, {"type": "text", "text": "a b"}]}
    turns = [
        first,
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "user", "content": [{"type": "text", "text": "d e"}]},
    ]
    options: dict[str, Any] = {"tokenize": True, "return_dict": True}
    processor.apply_chat_template(turns, **options)
    processor.apply_chat_template(conversation=[first], **options)
    processor.apply_chat_template(turns, question=SHORT, **options)
    fixed = ReducingProcessor(tiny.processor(), llava, recorder, text_query=clip.query(OTHER))
    fixed.apply_chat_template(turns, **options)
    for tokens, question in zip(recorder.recorded, ["d e", "a b", SHORT, OTHER], strict=True):
        assert torch.equal(tokens.signals["text"], clip.text(question))
    assert isinstance(processor.apply_chat_template(turns), str)
    for wrong in (None, "a", [], ["a", "b"], [{"role": "system", "content": "a"}], [{"role": "user", "content": None}]):
        assert last_user_messages(wrong) is None


def test_apply_and_remove() -> None:
    llava, model, tokenizer = make_models()
    clip = ClipText(model, tokenizer)
    with reduced(llava, make("cdpruner", budget=BUDGET), text_query=clip.query(SHORT)) as expected:
        llava(**tiny.prompt("a#"))
    trace = apply(llava, make("cdpruner", budget=BUDGET), text_query=clip.query(SHORT))
    llava(**tiny.prompt("a#"))
    remove(llava)
    assert trace[0].anchor.tolist() == expected[0].anchor.tolist()


def test_question_is_not_read_for_other_reducers() -> None:
    """Reducers that do not need the question run as usual, and the question is not embedded."""
    llava, model, tokenizer = make_models()
    clip = ClipText(model, tokenizer)
    clip.text = lambda question: pytest.fail("read")  # type: ignore[method-assign]
    for reducer in (make("random", budget=3), make("cdpruner", budget=3, relevance="none")):
        with reduced(llava, reducer, text_query=clip) as trace:
            llava(**tiny.prompt("a#"))
        assert trace.after == 3
        assert "question" not in trace.seconds


# ---------------------------------------------------------------------- refusals


def test_missing_questions_are_refused() -> None:
    llava, model, tokenizer = make_models()
    reducer, inputs = make("cdpruner", budget=BUDGET), tiny.prompt("a#")
    with (
        reduced(llava, reducer),
        pytest.raises(MissingSignal, match=r"^cdpruner\(budget=6\) chooses patches by the question and received none"),
    ):
        llava.generate(**inputs, max_new_tokens=1)
    clip = ClipText(model, tokenizer)
    for text_query, message in (
        (clip, r"none was given. Use text_query=clip.query\(question\), or text_query=clip.query\(prompts=processor\)"),
        (clip.query(" \n"), "The question is empty"),
        (clip.query(["", "a"]), "2 questions were given for 1 prompts"),
    ):
        with reduced(llava, reducer, text_query=text_query), pytest.raises(TorinoError, match=message):
            llava.generate(**inputs, max_new_tokens=1)
    for wrong in (5, [SHORT, 5], {SHORT}):
        with pytest.raises(BadParameter, match="question must be a string, or a list with one for each prompt, got"):
            clip.query(wrong)  # type: ignore[arg-type]
    with pytest.raises(MissingSignal, match="The question is empty"):
        ReducingProcessor(tiny.processor(), llava, reducer, text_query=clip)(images=tiny.photos(1), text="<image>")
    with reduced(llava, make("random", budget=2)):
        assert llava.generate(**inputs, max_new_tokens=1).shape[0] == 1  # the model is unchanged


def test_clip_of_another_tower_is_refused() -> None:
    llava, model, tokenizer = make_models()
    reducer, inputs = make("cdpruner", budget=BUDGET), tiny.prompt("a#")
    larger = ClipText(model, tokenizer, vision={"image_size": 70})
    with (
        reduced(llava, reducer, text_query=larger.query(SHORT)),
        pytest.raises(BadParameter, match=r"its image_size is 70, and the model's is 56.*vision=\{'image_size': 56\}"),
    ):
        llava(**inputs)
    siglip = tiny.llava("siglip")
    with (
        reduced(siglip, reducer, text_query=ClipText(model, tokenizer).query(SHORT)),
        pytest.raises(
            MissingSignal, match=r"LlavaForConditionalGeneration \(siglip_vision_model\) is not a CLIP tower"
        ),
    ):
        siglip(**inputs)
    with pytest.raises(BadTokens, match=r"patches must have shape \(N, 64\), got \(4, 32\)"):
        ClipText(model, tokenizer).joint(torch.ones(4, 32))
    with pytest.raises(BadParameter, match=r"needs a CLIPModel.*got LlavaForConditionalGeneration"):
        ClipText(llava, tokenizer)


# ---------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_query")
    llava, model, tokenizer = make_models()
    llava.save_pretrained(folder / "llava")
    tiny.processor().save_pretrained(folder / "llava")
    model.save_pretrained(folder / "clip")
    tokenizer.save_pretrained(folder / "clip")
    return folder


def test_load_from_a_folder(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, model, tokenizer = make_models()
    full, loaded = ClipText(model, tokenizer), load_clip_text(home / "clip", segments="closed")
    assert "UNEXPECTED" not in capfd.readouterr().err
    assert not len(loaded.model.vision_model.encoder.layers)  # the vision-language model has these
    assert loaded.vision == full.vision
    assert loaded.segments == "closed"
    torch.testing.assert_close(loaded.text(SHORT), full.text(SHORT))
    patches = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.joint(patches), full.joint(patches))
    assert load_clip_text(home / "clip", dtype="bfloat16").text(SHORT).dtype == torch.float32


def test_wrong_checkpoints_are_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from safetensors.torch import load_file, save_file

    with pytest.raises(TorinoError, match=r"llava \(llava\) is not a CLIP with a text tower"):
        load_clip_text(home / "llava")
    with pytest.raises(BadFile, match="There is no folder"):
        load_clip_text(tmp_path / "missing" / "folder")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unreachable, match=r"hub could not be reached.*owner/of-nothing-at-all"):
        load_clip_text("owner/of-nothing-at-all")
    half = tmp_path / "half"
    half.mkdir()
    for file in (home / "clip").iterdir():
        if file.suffix == ".json":
            (half / file.name).write_bytes(file.read_bytes())
    weights = {key: value for key, value in load_file(home / "clip" / "model.safetensors").items() if "text" not in key}
    save_file(weights, half / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadFile, match=r"half has no weights for \d+ tensors of CLIP, such as text_model"):
        load_clip_text(half)
    shutil.copy(home / "clip" / "model.safetensors", half)
    load_clip_text(half)
    (half / "tokenizer.json").unlink()
    (half / "tokenizer_config.json").unlink()
    with pytest.raises(BadFile, match="The tokenizer has 2 tokens, and this CLIP has 98"):
        load_clip_text(half)


def test_session(home: Path) -> None:
    clip, reducer = load_clip_text(home / "clip"), make("cdpruner", budget=BUDGET)
    photo = tiny.photos(1)[0]
    vlm = load_vlm(home / "llava", text_query=clip)
    answer = vlm.answer(vlm.inputs(photo, "a b c"), reducer, max_new_tokens=3)
    assert (answer.before, answer.after) == (tiny.PATCHES, BUDGET)
    inputs = vlm.processor(images=photo, text=answer.prompt, return_tensors="pt")
    with reduced(vlm.model, reducer, text_query=clip.query("a b c")) as trace:
        vlm.model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert answer.reduction.anchor.tolist() == trace[0].anchor.tolist()
    assert 0 < answer.seconds["question"] < answer.seconds["total"]
    without_clip = VLM(vlm.model, vlm.processor)
    with pytest.raises(MissingSignal, match="chooses patches by the question"):
        without_clip.answer(without_clip.inputs(photo, "a b c"), reducer, max_new_tokens=1)


def test_command(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torino.cli.ask import ask as command

    photo, path = tiny.photos(1)[0], str(tmp_path / "photo.png")
    photo.save(path)
    vlm = load_vlm(home / "llava", text_query=load_clip_text(home / "clip"))
    expected = vlm.answer(vlm.inputs(photo, "a b c"), make("cdpruner", budget=BUDGET), max_new_tokens=3)
    options: dict[str, Any] = {"model": str(home / "llava"), "method": "cdpruner", "budget": BUDGET}
    options["max_new_tokens"] = 3
    command(path, "a b c", clip=str(home / "clip"), as_json=True, **options)
    result = json.loads(capsys.readouterr().out)
    assert result["image_tokens"] == {"before": tiny.PATCHES, "after": BUDGET}
    assert result["reducer"] == "cdpruner(budget=6)"
    assert result["answer"] == expected.text.strip()
    command(path, "a b c", clip=str(home / "clip"), **options)
    assert "question" in capsys.readouterr().out
    for changes, message in (
        ({}, r"cdpruner chooses patches by the question.*--clip openai/clip-vit-large-patch14-336"),
        (
            {"clip": str(home / "clip"), "method": "random"},
            "random does not read the question, so --clip has no effect",
        ),
        ({"clip": str(home / "clip"), "method": "none", "budget": None}, "none does not read the question"),
        ({"clip": str(tmp_path / "missing" / "clip")}, "There is no folder"),
        ({"clip": str(home / "llava")}, "is not a CLIP with a text tower"),
    ):
        with pytest.raises(TorinoError, match=message):
            command(path, "a b c", **{**options, **changes})
