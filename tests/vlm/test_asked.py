"""Patches chosen for a question: CLIP's text half beside a model that has its vision half, both tiny."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_cdpruner import slow_gains, slow_relevance
from torch import Tensor

from torino import BadFile, BadParameter, BadTokens, MissingSignal, Reduction, TorinoError, Unreachable, make
from torino.core.tokens import VisualTokens
from torino.reducers import Reducer
from torino.vlm import ClipText, ReducingProcessor, adapter_for, apply, load_clip_text, reduced, remove
from torino.vlm.text_query import said
from torino.vlm.towers import Tower

BUDGET = 6
SHORT, OTHER = "what is on the table ?", "how many red cups"
LONG = " ".join(f"word{number % 55}" for number in range(90))  # 92 tokens with both ends
LONGER = " ".join(f"word{(7 * number) % 55}" for number in range(160))


def pair(tower: str = "clip", **text: Any) -> tuple[Any, Any, Any]:
    """A LLaVA, and the CLIP that its tower is of."""
    model = tiny.llava(tower)
    return model, *tiny.clip(model.model.vision_tower, **text)


def slow_text(model: Any, tokenizer: Any, question: str) -> Tensor:
    """The release: zeros up to a multiple of 77, runs of 77, each a text of its own."""
    from transformers import CLIPTextModelWithProjection

    reader = CLIPTextModelWithProjection(model.config.text_config).eval()
    reader.text_model.load_state_dict(model.text_model.state_dict())
    reader.text_projection.load_state_dict(model.text_projection.state_dict())
    ids: list[int] = tokenizer(question)["input_ids"]
    mask = [1] * len(ids)
    while len(ids) % 77:
        ids, mask = [*ids, 0], [*mask, 0]
    rows = []
    for start in range(0, len(ids), 77):
        run = slice(start, start + 77)
        given = {"input_ids": torch.tensor([ids[run]]), "attention_mask": torch.tensor([mask[run]])}
        rows.append(reader(**given).text_embeds[0])
    return torch.stack(rows)


def slow_joint(model: Any, pixels: Tensor) -> Tensor:
    """The release: patches of the last hidden state but one, through the last norm and the projection."""
    states = model.vision_model(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
    return model.visual_projection(model.vision_model.post_layernorm(states))


@dataclass(frozen=True)
class Reader(Reducer):
    """Keeps everything, and remembers what it was shown."""

    shown: list[VisualTokens]
    name = "reader"
    needs = frozenset({"joint", "text"})

    def plan(self, tokens: VisualTokens) -> Reduction:
        self.shown.append(tokens)
        return Reduction.identity(tokens.grid, self.spec)


# ---------------------------------------------------------------------- the two signals


@pytest.mark.parametrize("end", [len(tiny.WORDS) - 1, 2])  # by its own number; by the highest, as older configs say
@pytest.mark.parametrize("question", [SHORT, LONG, LONGER, "?", " ".join(["red"] * 75), " ".join(["red"] * 76)])
@torch.no_grad()
def test_text_is_that_of_the_release(question: str, end: int) -> None:
    _, model, tokenizer = pair(eos_token_id=end)
    text = ClipText(model, tokenizer).text(question)
    expected = slow_text(model, tokenizer, question)
    tokens = len(question.split()) + 2
    assert text.shape == ((tokens - 1) // 77 + 1, 16) == expected.shape
    assert text.dtype == torch.float32
    torch.testing.assert_close(text, expected, atol=1e-5, rtol=1e-4)


def test_long_questions_in_closed_segments() -> None:
    _, model, tokenizer = pair()
    released, closed = ClipText(model, tokenizer), ClipText(model, tokenizer, segments="closed")
    assert torch.equal(released.text(SHORT), closed.text(SHORT))
    words = LONGER.split()
    parts = [" ".join(words[at : at + 75]) for at in (0, 75, 150)]
    # as if each part were a question; padded rows sum in another order
    torch.testing.assert_close(closed.text(LONGER), torch.cat([closed.text(part) for part in parts]))
    # and what that mends: as released the first segment is the same whatever was asked
    torch.testing.assert_close(released.text(LONG)[0], released.text(LONGER)[0])
    assert not torch.allclose(closed.text(LONG)[0], closed.text(LONGER)[0], atol=0.1)
    with pytest.raises(BadParameter, match="segments must be one of 'released', 'closed', got 'open'"):
        ClipText(model, tokenizer, segments="open")  # type: ignore[arg-type]


@torch.no_grad()
def test_joint_is_that_of_the_release() -> None:
    llava, model, tokenizer = pair()
    pixels = tiny.pictures(2)
    sight = adapter_for(llava).look({"pixel_values": pixels}, frozenset())
    clip = ClipText(model, tokenizer)
    for tokens, expected in zip(sight.tokens, slow_joint(model, pixels), strict=True):
        torch.testing.assert_close(clip.joint(tokens.patches), expected, atol=1e-5, rtol=1e-4)
        both = clip.signals(tokens, SHORT).signals
        assert torch.equal(both["text"], clip.text(SHORT))
        assert torch.equal(both["joint"], clip.joint(tokens.patches))
    assert "hidden_size" not in repr(clip)
    assert repr(clip) == "ClipText(patches of width 64 and questions, both to width 16)"


def test_half_precision_is_read_in_float32() -> None:
    llava, model, tokenizer = pair()
    tokens = Tower(llava, None).model(tiny.pictures(1)).last_hidden_state[0, 1:]
    exact = ClipText(model, tokenizer).joint(tokens)
    half = ClipText(model.to(torch.bfloat16), tokenizer).joint(tokens.to(torch.bfloat16))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, atol=0.1, rtol=0.1)


# ---------------------------------------------------------------------- inside a model


@torch.no_grad()
@pytest.mark.parametrize("question", [SHORT, LONG])
@pytest.mark.parametrize("space", ["tap", "projected"])
def test_a_plan_is_that_of_the_rule(question: str, space: Any) -> None:
    """The whole of CDPruner, from pixels and words to patches, against its rule written down plainly."""
    llava, model, tokenizer = pair()
    clip = ClipText(model, tokenizer)
    inputs = tiny.prompt("ab#c")
    reducer = make("cdpruner", budget=BUDGET, order="native", space=space)
    with reduced(llava, reducer, asking=clip.about(question)) as trace:
        llava.generate(**inputs, max_new_tokens=2)
    joint = slow_joint(model, inputs["pixel_values"])[0]
    r = slow_relevance(joint.tolist(), slow_text(model, tokenizer, question).tolist())
    states = model.vision_model(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
    features = (states if space == "tap" else llava.model.multi_modal_projector(states))[0].tolist()
    picks: list[int] = []
    while len(picks) < BUDGET:
        gains = slow_gains(features, r, picks)
        picks.append(gains.index(max(gains)))
    assert trace[0].anchor.tolist() == picks
    assert (trace.before, trace.after) == (tiny.PATCHES, BUDGET)
    assert list(trace.seconds)[:2] == ["tower", "question"]
    assert "question" in trace.summary()


def test_every_prompt_has_its_own_question() -> None:
    """Several rows, one with two images and one with none; each is as if it were alone."""
    llava, model, tokenizer = pair()
    clip = ClipText(model, tokenizer)
    rows, questions = ["a#b", "cd", "#e#", "f#"], [SHORT, "is this red ?", LONG, OTHER]
    inputs = tiny.prompt(*rows)
    reader = Reader([])
    with reduced(llava, reader, asking=clip.about(questions)):
        llava(**inputs)
    asked = [SHORT, LONG, LONG, OTHER]
    assert [len(tokens.signals["text"]) for tokens in reader.shown] == [1, 2, 2, 1]
    for tokens, question in zip(reader.shown, asked, strict=True):
        assert torch.equal(tokens.signals["text"], clip.text(question))
    reducer = make("cdpruner", budget=BUDGET)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with reduced(llava, reducer, asking=clip.about(questions)) as trace:
        together = llava.generate(**inputs, **options)
    kept = [plan.anchor.tolist() for plan in trace]
    alone: list[list[int]] = []
    for number, (single, question) in enumerate(zip(tiny.one_by_one(rows, inputs), questions, strict=True)):
        with reduced(llava, reducer, asking=clip.about(question)) as trace:
            out = llava.generate(**single, **options)
        assert torch.equal(out[0, -4:], together[number, -4:])
        alone += [plan.anchor.tolist() for plan in trace]
    assert kept == alone
    with reduced(llava, reducer, asking=clip.about(SHORT)) as trace:  # one for all of them
        llava(**inputs)
    assert trace[0].anchor.tolist() == kept[0]
    assert [plan.anchor.tolist() for plan in trace][1:] != kept[1:]


def test_a_processor_reads_the_prompt() -> None:
    llava, model, tokenizer = pair()
    clip, inner = ClipText(model, tokenizer), tiny.processor()
    reader = Reader([])
    processor = ReducingProcessor(inner, llava, reader, asking=clip)
    photos, texts = tiny.photos(2), ["USER: <image> a b", "USER: c <image> d e"]

    def words(*given: Any, **named: Any) -> list[Tensor]:
        reader.shown.clear()
        processor(*given, padding=True, **named)
        return [tokens.signals["text"] for tokens in reader.shown]

    # all words of the prompt, without placeholders, padding and special tokens
    for seen, question in zip(words(images=photos, text=texts), ["USER: a b", "USER: c d e"], strict=True):
        assert torch.equal(seen, clip.text(question))
    for seen, question in zip(words(images=photos, text=texts, question=[SHORT, OTHER]), [SHORT, OTHER], strict=True):
        assert torch.equal(seen, clip.text(question))
    for seen in words(images=photos, text=texts, question=SHORT):
        assert torch.equal(seen, clip.text(SHORT))
    # what was told from the start stays, unless a call says otherwise
    processor = ReducingProcessor(inner, llava, reader, asking=clip.about(OTHER))
    assert torch.equal(words(images=photos[0], text=texts[0])[0], clip.text(OTHER))
    assert torch.equal(words(images=photos[0], text=texts[0], question=SHORT)[0], clip.text(SHORT))
    # and a block around a model reads prompts where it is told who can
    inputs = inner(images=photos[0], text=texts[0], return_tensors="pt")
    reader.shown.clear()
    with reduced(llava, reader, asking=clip.about(prompts=inner)):
        llava(**inputs)
    assert torch.equal(reader.shown[0].signals["text"], clip.text("USER: a b"))


def test_a_conversation_asks_what_the_user_said_last() -> None:
    llava, model, tokenizer = pair()
    clip, reader = ClipText(model, tokenizer), Reader([])
    processor = ReducingProcessor(tiny.processor(), llava, reader, asking=clip)
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
    fixed = ReducingProcessor(tiny.processor(), llava, reader, asking=clip.about(OTHER))
    fixed.apply_chat_template(turns, **options)
    for tokens, question in zip(reader.shown, ["d e", "a b", SHORT, OTHER], strict=True):
        assert torch.equal(tokens.signals["text"], clip.text(question))
    assert isinstance(processor.apply_chat_template(turns), str)
    for odd in (None, "a", [], ["a", "b"], [{"role": "system", "content": "a"}], [{"role": "user", "content": None}]):
        assert said(odd) is None


def test_until_removed() -> None:
    llava, model, tokenizer = pair()
    clip = ClipText(model, tokenizer)
    with reduced(llava, make("cdpruner", budget=BUDGET), asking=clip.about(SHORT)) as expected:
        llava(**tiny.prompt("a#"))
    trace = apply(llava, make("cdpruner", budget=BUDGET), asking=clip.about(SHORT))
    llava(**tiny.prompt("a#"))
    remove(llava)
    assert trace[0].anchor.tolist() == expected[0].anchor.tolist()


def test_others_do_not_have_the_question_read() -> None:
    """Reducers that need no question run as ever, and nobody reads one for them."""
    llava, model, tokenizer = pair()
    clip = ClipText(model, tokenizer)
    clip.text = lambda question: pytest.fail("read")  # type: ignore[method-assign]
    for reducer in (make("random", budget=3), make("cdpruner", budget=3, relevance="none")):
        with reduced(llava, reducer, asking=clip) as trace:
            llava(**tiny.prompt("a#"))
        assert trace.after == 3
        assert "question" not in trace.seconds


# ---------------------------------------------------------------------- what cannot be


def test_no_question_is_said_in_a_sentence() -> None:
    llava, model, tokenizer = pair()
    reducer, inputs = make("cdpruner", budget=BUDGET), tiny.prompt("a#")
    with (
        reduced(llava, reducer),
        pytest.raises(MissingSignal, match=r"^cdpruner\(budget=6\) chooses patches for a question, and was told none"),
    ):
        llava.generate(**inputs, max_new_tokens=1)
    clip = ClipText(model, tokenizer)
    for asking, sentence in (
        (clip, r"none was given. Give asking=clip.about\(question\), or asking=clip.about\(prompts=processor\)"),
        (clip.about(" \n"), "The question is empty"),
        (clip.about(["", "a"]), "2 questions were given for 1 prompts"),
    ):
        with reduced(llava, reducer, asking=asking), pytest.raises(TorinoError, match=sentence):
            llava.generate(**inputs, max_new_tokens=1)
    for odd in (5, [SHORT, 5], {SHORT}):
        with pytest.raises(BadParameter, match="A question must be a text, or a list with one for each prompt, got"):
            clip.about(odd)  # type: ignore[arg-type]
    with pytest.raises(MissingSignal, match="The question is empty"):
        ReducingProcessor(tiny.processor(), llava, reducer, asking=clip)(images=tiny.photos(1), text="<image>")
    with reduced(llava, make("random", budget=2)):
        assert llava.generate(**inputs, max_new_tokens=1).shape[0] == 1  # nothing of it stays behind


def test_a_clip_of_another_tower() -> None:
    llava, model, tokenizer = pair()
    reducer, inputs = make("cdpruner", budget=BUDGET), tiny.prompt("a#")
    larger = ClipText(model, tokenizer, vision={"image_size": 70})
    with (
        reduced(llava, reducer, asking=larger.about(SHORT)),
        pytest.raises(BadParameter, match=r"its image_size is 70, that of the model 56.*vision=\{'image_size': 56\}"),
    ):
        llava(**inputs)
    siglip = tiny.llava("siglip")
    with (
        reduced(siglip, reducer, asking=ClipText(model, tokenizer).about(SHORT)),
        pytest.raises(MissingSignal, match=r"of LlavaForConditionalGeneration \(siglip_vision_model\) is none of CLIP"),
    ):
        siglip(**inputs)
    with pytest.raises(BadTokens, match=r"patches of shape \(N, 64\), got \(4, 32\)"):
        ClipText(model, tokenizer).joint(torch.ones(4, 32))
    with pytest.raises(BadParameter, match=r"reads with a CLIPModel.*got LlavaForConditionalGeneration"):
        ClipText(llava, tokenizer)


# ---------------------------------------------------------------------- from files


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    llava, model, tokenizer = pair()
    llava.save_pretrained(folder / "llava")
    tiny.processor().save_pretrained(folder / "llava")
    model.save_pretrained(folder / "clip")
    tokenizer.save_pretrained(folder / "clip")
    return folder


def test_opened_from_a_folder(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, model, tokenizer = pair()
    whole, opened = ClipText(model, tokenizer), load_clip_text(home / "clip", segments="closed")
    assert "UNEXPECTED" not in capfd.readouterr().err
    assert not len(opened.model.vision_model.encoder.layers)  # the model that answers has these
    assert opened.vision == whole.vision
    assert opened.segments == "closed"
    torch.testing.assert_close(opened.text(SHORT), whole.text(SHORT))
    patches = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(opened.joint(patches), whole.joint(patches))
    assert load_clip_text(home / "clip", dtype="bfloat16").text(SHORT).dtype == torch.float32


def test_what_is_no_clip(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from safetensors.torch import load_file, save_file

    with pytest.raises(TorinoError, match=r"llava \(llava\) is no CLIP with a text half"):
        load_clip_text(home / "llava")
    with pytest.raises(BadFile, match="There is no folder"):
        load_clip_text(tmp_path / "nothing" / "here")
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
    with pytest.raises(BadFile, match=r"half holds no weights for \d+ parts of CLIP, such as text_model"):
        load_clip_text(half)
    shutil.copy(home / "clip" / "model.safetensors", half)
    load_clip_text(half)
    (half / "tokenizer.json").unlink()
    (half / "tokenizer_config.json").unlink()
    with pytest.raises(BadFile, match="The tokenizer knows 2 tokens, and this CLIP reads 98"):
        load_clip_text(half)


def test_ask_and_its_command(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torino.cli.ask import ask as command
    from torino.vlm.session import ask, load_vlm

    model, processor = load_vlm(home / "llava")
    photo = tiny.photos(1)[0]
    clip = load_clip_text(home / "clip")
    reducer = make("cdpruner", budget=BUDGET)
    answer = ask(photo, "a b c", model=model, processor=processor, reducer=reducer, max_new_tokens=3, asking=clip)
    assert (answer.before, answer.after) == (tiny.PATCHES, BUDGET)
    inputs = processor(images=photo, text=answer.prompt, return_tensors="pt")
    with reduced(model, reducer, asking=clip.about("a b c")) as trace:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert answer.reduction.anchor.tolist() == trace[0].anchor.tolist()
    assert 0 < answer.seconds["question"] < answer.seconds["total"]
    with pytest.raises(MissingSignal, match="chooses patches for a question"):
        ask(photo, "a b c", model=model, processor=processor, reducer=reducer, max_new_tokens=1)

    photo.save(tmp_path / "photo.png")
    given: dict[str, Any] = {"model": str(home / "llava"), "method": "cdpruner", "budget": BUDGET, "max_new_tokens": 3}
    command(str(tmp_path / "photo.png"), "a b c", clip=str(home / "clip"), as_json=True, **given)
    told = json.loads(capsys.readouterr().out)
    assert told["image_tokens"] == {"before": tiny.PATCHES, "after": BUDGET}
    assert told["reducer"] == "cdpruner(budget=6)"
    assert told["answer"] == answer.text.strip()
    command(str(tmp_path / "photo.png"), "a b c", clip=str(home / "clip"), **given)
    assert "question" in capsys.readouterr().out
    for options, sentence in (
        ({}, r"cdpruner chooses patches for the question.*--clip openai/clip-vit-large-patch14-336"),
        ({"clip": str(home / "clip"), "method": "random"}, "random reads no question, so --clip has no meaning"),
        ({"clip": str(home / "clip"), "method": "none", "budget": None}, "none reads no question"),
        ({"clip": str(tmp_path / "away" / "clip")}, "There is no folder"),
        ({"clip": str(home / "llava")}, "is no CLIP with a text half"),
    ):
        with pytest.raises(TorinoError, match=sentence):
            command(str(tmp_path / "photo.png"), "a b c", **{**given, **options})
