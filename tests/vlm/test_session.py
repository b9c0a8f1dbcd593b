"""The session: from an image and a question to an answer, on LLaVA checkpoints that are built here."""

from __future__ import annotations

import copy
import io
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.tiny_vlm import PATCHES, QUESTION, SIDE, TEMPLATE, build_llava, generate_by_hand, photo, write_files
from torino import SAE, TorinoError, make
from torino.core.errors import BadFile, BadParameter, MissingSignal, SAEMismatch, UnknownName, Unreachable
from torino.datasets.images import mean_color, pad_square
from torino.reducers import KeepShare, Reducer
from torino.sae import SAECard
from torino.vlm import VLM, Answer, Trace, ask, load_vlm, reduced
from torino.vlm.hooks import run_all_blocks
from torino.vlm.prompt import user_turn, write_prompt


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("session"))


@pytest.fixture(scope="module")
def vlm(home: Path) -> VLM:
    return load_vlm(home / "llava")


@pytest.fixture
def reducer(home: Path) -> Reducer:
    return make("torino-m", sae=SAE.load(home / "sae"), k=1, delta=1)


def test_the_answer_is_that_of_generate_by_hand(vlm: VLM) -> None:
    answer = ask(photo(), QUESTION, model=vlm, max_new_tokens=7)
    prompt = f"USER: <image>\n{QUESTION} ASSISTANT:"
    assert answer.prompt == prompt
    assert answer.text == generate_by_hand(vlm, photo(), prompt, max_new_tokens=7)
    assert len(answer.text.split()) > 3
    assert (answer.before, answer.after, answer.new_tokens) == (PATCHES, PATCHES, 7)
    assert (answer.reductions, answer.trace, answer.baseline, answer.speedup) == ((), None, None, {})
    assert str(answer) == answer.text
    with pytest.raises(BadParameter, match="no reduction"):
        _ = answer.reduction
    other = ask(photo(seed=5), QUESTION, model=vlm, max_new_tokens=7)
    assert other.text != answer.text, "the tiny model does not look at its picture, so these tests show nothing"


def test_a_reduced_answer_is_that_of_generate_by_hand(vlm: VLM, reducer: Reducer) -> None:

    model, stock = vlm.model, dict(vlm.model.__dict__)
    for positions in ("compact", "original"):
        session = VLM(model, vlm.processor, positions=positions)
        answer = ask(photo(), QUESTION, model=session, reducer=reducer, max_new_tokens=7)
        with reduced(model, reducer, positions=positions) as trace:
            assert answer.text == generate_by_hand(vlm, photo(), answer.prompt, max_new_tokens=7)
        assert isinstance(answer.trace, Trace)
        assert (answer.before, answer.after) == (PATCHES, len(answer.reduction)) == (trace.before, trace.after)
        assert 1 <= answer.after < PATCHES
        assert answer.reduction.by == "torino-m(k=1, delta=1)"
        assert answer.trace.calls[0].padding == answer.padding == "crop"
    assert model.__dict__.keys() == stock.keys()
    assert not model.model.vision_tower._forward_hooks


def test_seconds_by_stage(vlm: VLM, reducer: Reducer) -> None:
    answer = ask(photo(), QUESTION, model=vlm, reducer=reducer, max_new_tokens=4, baseline=True)
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
    assert set(answer.speedup) == {"first_token", "total", "early_exit"}
    assert full.text == ask(photo(), QUESTION, model=vlm, max_new_tokens=4).text
    assert full.before == full.after == PATCHES
    told = json.loads(json.dumps(answer.to_dict()))
    assert told["image_tokens"] == {"before": PATCHES, "after": answer.after}
    assert told["baseline"]["answer"] == full.text.strip()


def test_gains_of_tokens_and_of_stopping_the_tower_are_separate(vlm: VLM, reducer: Reducer) -> None:
    last = vlm.model.model.vision_tower.get_submodule("encoder.layers.2")
    delay, runs = 0.2, list[int]()

    def wait(*_: Any) -> None:
        runs.append(1)
        time.sleep(delay)

    hook = last.register_forward_hook(wait)  # only the stock model runs this block
    try:
        answer = ask(photo(), QUESTION, model=vlm, reducer=reducer, max_new_tokens=2, baseline=True)
    finally:
        hook.remove()
    assert len(runs) == 2, "once untimed and once timed; neither answer runs it"
    full, early_exit = answer.baseline, answer.early_exit
    assert full is not None
    assert early_exit is not None
    assert (early_exit.blocks, early_exit.of) == (2, 3)
    assert early_exit.saved > 0.9 * delay
    assert answer.speedup["first_token"] == pytest.approx(full.first_token / answer.first_token)
    assert answer.speedup["early_exit"] == pytest.approx(1 + early_exit.saved / full.first_token)
    told = json.loads(json.dumps(answer.to_dict()))
    assert told["early_exit"]["blocks"] == 2
    assert told["early_exit"]["all_seconds"] > delay
    with run_all_blocks() as count:
        vlm.encode(vlm.inputs(photo(), QUESTION)).run(None)
    assert (count.needed, count.all) == (2, 3)


def test_no_gain_of_the_tower_where_the_last_block_is_read(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm.model.config, "vision_feature_layer", -1)
    answer = ask(photo(), QUESTION, model=vlm, reducer=make("random(budget=5)"), max_new_tokens=2, baseline=True)
    assert answer.early_exit is None
    assert set(answer.speedup) == {"first_token", "total"}


def test_square_padding(vlm: VLM, reducer: Reducer) -> None:
    crop, square = (
        ask(photo(), QUESTION, model=VLM(vlm.model, vlm.processor, padding=padding), reducer=reducer, max_new_tokens=7)
        for padding in ("crop", "square")
    )
    assert square.padding == "square"
    assert square.trace is not None
    assert square.trace.calls[0].padding == "square"
    padded = pad_square(photo(), mean_color(vlm.processor))
    same = ask(padded, QUESTION, model=vlm, reducer=reducer, max_new_tokens=7)
    assert same.text == square.text
    grey = np.asarray(square.seen[0])[0, 0]
    assert np.abs(grey.astype(int) - mean_color(vlm.processor)).max() <= 2, "the top of a wide photo is padding"
    assert square.seen[0].size == crop.seen[0].size == (SIDE, SIDE)
    assert not np.array_equal(np.asarray(square.seen[0]), np.asarray(crop.seen[0]))


def test_a_chat_template_is_used_and_writes_the_first_token_once(vlm: VLM) -> None:
    chatty = copy.deepcopy(vlm.processor)
    chatty.chat_template = TEMPLATE
    answer = ask(photo(), QUESTION, model=VLM(vlm.model, chatty), max_new_tokens=5)
    content = [{"type": "image", "image": photo()}, {"type": "text", "text": QUESTION}]
    inputs = chatty.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert int((inputs["input_ids"] == 1).sum()) == 1
    out = vlm.model.generate(**inputs, do_sample=False, max_new_tokens=5)
    assert answer.text == chatty.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    only = copy.deepcopy(vlm.processor)
    only.tokenizer.chat_template = TEMPLATE
    assert ask(photo(), QUESTION, model=VLM(vlm.model, only), max_new_tokens=5).text == answer.text
    chatty.chat_template = "{{ nothing.here.at.all }}"
    with pytest.raises(TorinoError, match="chat template of this llava model failed"):
        ask(photo(), QUESTION, model=VLM(vlm.model, chatty))


def test_several_images_and_other_sources(vlm: VLM, reducer: Reducer, home: Path) -> None:
    data = io.BytesIO()
    photo().save(data, "PNG")
    options: dict[str, Any] = {"model": vlm, "reducer": reducer, "max_new_tokens": 3}
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


def test_a_share_of_the_tokens(vlm: VLM, reducer: Reducer) -> None:
    keep = KeepShare(reducer, 0.25)
    answer = ask([photo(), photo(seed=2)], QUESTION, model=vlm, reducer=keep, max_new_tokens=2)
    assert [len(plan) for plan in answer.reductions] == [4, 4]
    assert answer.reduction.by == "torino-m(k=1, delta=1, budget=4)"
    assert keep.needs == reducer.needs
    assert keep.position_mode == "compact"
    with pytest.raises(BadParameter, match="share"):
        KeepShare(reducer, 1.5)
    with pytest.raises(BadParameter, match="takes no budget"):
        KeepShare(keep, 0.5)


def test_a_share_is_numbered_as_its_method_has_it(vlm: VLM, reducer: Any) -> None:
    inner = make("torino-x", sae=reducer.sae, budget=4)
    seen: list[list[int]] = []
    hook = vlm.model.model.language_model.register_forward_pre_hook(
        lambda _, a, given: seen.append(given["position_ids"].flatten().tolist()), with_kwargs=True
    )
    for one in (inner, KeepShare(inner, 0.25), KeepShare(reducer, 0.25)):
        ask(photo(), QUESTION, model=vlm, reducer=one, max_new_tokens=1)
    hook.remove()
    assert seen[0] == seen[1]
    assert seen[2] == list(range(len(seen[0])))  # as torino-m has it: numbered anew
    assert max(seen[0]) > len(seen[0])


def test_half_precision(home: Path, reducer: Reducer) -> None:
    vlm = load_vlm(home / "llava", dtype="bfloat16")
    assert vlm.dtype == torch.bfloat16
    answer = ask(photo(), QUESTION, model=vlm, reducer=reducer, max_new_tokens=3, baseline=True)
    assert isinstance(answer.baseline, Answer)


def test_older_processors_are_told_how_to_count(home: Path, tmp_path: Path) -> None:
    old = shutil.copytree(home / "llava", tmp_path / "old")
    settings = json.loads((old / "processor_config.json").read_text())
    for name in ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens"):
        settings.pop(name)
    (old / "processor_config.json").write_text(json.dumps(settings))
    vlm = load_vlm(old)
    assert ask(photo(), QUESTION, model=vlm, max_new_tokens=1).before == PATCHES


def test_mistakes_in_asking(vlm: VLM, home: Path, reducer: Reducer) -> None:
    wide = make("torino-m", sae=SAE(torch.randn(8, 16)))
    elsewhere = make("torino-m", sae=SAE(torch.randn(8, 32), card=SAECard(block=2)))
    cases: list[tuple[dict[str, Any], type[TorinoError], str]] = [
        ({"question": " "}, BadParameter, "question is empty"),
        ({"question": "<image> what ?"}, BadParameter, "marks an image"),
        ({"image": []}, BadParameter, "No image"),
        ({"image": home}, BadFile, "folder"),
        ({"image": Image.new("RGB", (1, 900))}, BadFile, "200 times"),
        ({"max_new_tokens": 0}, BadParameter, "at least 1"),
        ({"baseline": True}, BadParameter, "reducer"),
        ({"reducer": wide}, SAEMismatch, "width 16.*width 32"),
        ({"reducer": elsewhere}, SAEMismatch, "block 2.*block 1"),
        ({"reducer": make("cdpruner(budget=4)")}, MissingSignal, "text tower of a CLIP"),
    ]
    for changes, error, expected in cases:
        with pytest.raises(error, match=expected):
            ask(**{"image": photo(), "question": QUESTION, "model": vlm, **changes})
    with pytest.raises(BadParameter, match="crop or square"):
        VLM(vlm.model, vlm.processor, padding="stretch")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="positions"):
        VLM(vlm.model, vlm.processor, positions="none")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="attention"):
        VLM(vlm.model, vlm.processor, attention="heavy")  # type: ignore[arg-type]
    batch = vlm.chat_inputs([[user_turn([photo()], QUESTION)], [user_turn([photo(seed=1)], QUESTION)]])
    with pytest.raises(BadParameter, match="one prompt, got 2"):
        vlm.answer(batch)
    other = SimpleNamespace(config=SimpleNamespace(model_type="gemma3"), prompt_template="")
    with pytest.raises(TorinoError, match="gemma3 model has no chat template"):
        write_prompt([user_turn([photo()], QUESTION)], vlm.processor, other)


def test_encoding_is_shared_by_reducers_and_questions(vlm: VLM, reducer: Reducer) -> None:
    runs: list[int] = []
    handle = vlm.model.model.vision_tower.register_forward_pre_hook(lambda *_: runs.append(1))
    reducers = [None, reducer, make("visionzip(budget=5)"), make("divprune(budget=4)")]
    encoded = vlm.encode(vlm.inputs(photo(), QUESTION), reducers)
    shared = [vlm.answer(encoded, each, max_new_tokens=5).text for each in reducers]
    other = [vlm.answer(encoded.with_question("how many ?"), each, max_new_tokens=5).text for each in reducers]
    handle.remove()
    assert len(runs) == 1
    alone = [ask(photo(), QUESTION, model=vlm, reducer=each, max_new_tokens=5).text for each in reducers]
    assert shared == alone
    assert other == [ask(photo(), "how many ?", model=vlm, reducer=each, max_new_tokens=5).text for each in reducers]


def test_a_missing_signal_fails_only_the_reducers_that_need_it(tmp_path: Path, reducer: Reducer) -> None:
    build_llava(tmp_path / "siglip", has_cls=False)
    vlm = load_vlm(tmp_path / "siglip")
    needs_cls, plain = make("visionzip(budget=5)"), make("divprune(budget=4)")
    encoded = vlm.encode(vlm.inputs(photo(), QUESTION), [plain, needs_cls])
    with pytest.raises(MissingSignal, match="CLS"):
        vlm.reduce(encoded, needs_cls)
    assert vlm.reduce(encoded, plain).tokens == 4


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
        (lacking, BadFile, "no weights for 2 tensors of the model, such as model.multi_modal_projector"),
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
