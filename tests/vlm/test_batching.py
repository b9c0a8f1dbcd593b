"""Images reduced one by one and prompts answered together give the answers of the session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny_vlm import QUESTION, TEMPLATE, photo, write_files
from torino import SAE, make
from torino.core.errors import BadParameter
from torino.reducers import Reducer
from torino.vlm import VLM, load_vlm
from torino.vlm.batching import (
    join_images,
    pad_inputs,
    process_image,
    prompt_length,
    reduce_pixels,
    split_images,
    write_inputs,
)
from torino.vlm.prompt import user_turn


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("batching"))


@pytest.fixture(scope="module", params=["auto", "original", "proportional"])
def vlm(home: Path, request: pytest.FixtureRequest) -> VLM:
    options = {"auto": {}, "original": {"positions": "original"}, "proportional": {"attention": "proportional"}}
    loaded = load_vlm(home / "llava", **options[request.param])
    loaded.processor.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def reducer(home: Path) -> Reducer:
    return make("torino-m", sae=SAE.load(home / "sae"), k=1, delta=1)


@pytest.mark.parametrize("reduces", [True, False])
def test_answers_are_those_of_the_session(vlm: VLM, reducer: Reducer, reduces: bool) -> None:
    chosen = reducer if reduces else None
    groups = [[photo(seed=1)], [photo(seed=2), photo(seed=3)], [photo(seed=4), photo(seed=1), photo(seed=5)], []]
    pixels = [process_image(vlm, image) for group in groups for image in group]
    parts = reduce_pixels(vlm, pixels, chosen)
    assert len(parts) == 6
    rows, used = [], 0
    for group in groups:
        own = parts[used : used + len(group)]
        used += len(group)
        turn = user_turn(group, QUESTION)
        inputs = write_inputs(vlm, [turn], [sum(part.encoded.full) for part in own])
        expected = vlm.chat_inputs([[turn]])
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(inputs.tensors[name], expected.tensors[name])
        short, positions = prompt_length(inputs, own)
        assert short == inputs.tensors["input_ids"].shape[1] - 16 * len(own) + sum(part.tokens for part in own)
        assert positions == (inputs.tensors["input_ids"].shape[1] if vlm.positions == "original" else short)
        rows.append(inputs)
    together = vlm.generate(pad_inputs(rows), [join_images(parts)], max_new_tokens=8)
    for group, text in zip(groups, together.texts, strict=True):
        if group:
            assert text == vlm.answer(vlm.inputs(group, QUESTION), chosen, max_new_tokens=8).text
        else:
            alone = vlm.generate_text(vlm.chat_inputs([[user_turn([], QUESTION)]]), max_new_tokens=8)
            assert text == alone.texts[0]
    assert len(set(together.texts)) == 4


def test_an_image_is_the_same_alone_and_with_others(vlm: VLM, reducer: Reducer) -> None:
    pixels = [process_image(vlm, photo(seed=seed)) for seed in range(4)]
    together = reduce_pixels(vlm, pixels, reducer)
    for item, part in zip(pixels, together, strict=True):
        (alone,) = reduce_pixels(vlm, [item], reducer)
        assert torch.equal(alone.embeds[0].slots, part.embeds[0].slots)
        assert torch.allclose(alone.embeds[0].features, part.embeds[0].features, atol=1e-5)
    joined = join_images(together)
    assert [part.tokens for part in split_images(joined)] == [part.tokens for part in together]


def test_what_does_not_fit_is_refused(vlm: VLM, reducer: Reducer) -> None:
    with pytest.raises(ValueError, match="shows 1 images, and 2 were given"):
        write_inputs(vlm, [user_turn([photo()], QUESTION)], [16, 16])
    with pytest.raises(BadParameter, match="No image"):
        join_images([])
    (part,) = reduce_pixels(vlm, [process_image(vlm, photo())], reducer)
    other = VLM(vlm.model, vlm.processor, positions="compact" if part.positions == "original" else "original")
    (changed,) = reduce_pixels(other, [process_image(vlm, photo())], reducer)
    with pytest.raises(BadParameter, match="different positions"):
        join_images([part, changed])


def test_models_that_need_the_prompt_are_refused(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(vlm.adapter), "separates_images", False)
    with pytest.raises(BadParameter, match="cannot be encoded without their prompt"):
        process_image(vlm, photo())
