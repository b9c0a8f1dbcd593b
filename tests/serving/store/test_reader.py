"""Read token stores: images, batches, data loaders, embeddings for vLLM, and answers from stored tokens."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.serving.store.conftest import OPTIONS
from tests.support.lab import needs_weights
from tests.support.tiny_vlm import QUESTION, build_llava
from torino.core.errors import BadFile, BadIndex, BadParameter
from torino.datasets.bundled import PHOTOS, example_folder
from torino.serving.settings import ReductionSettings
from torino.serving.store import PackedTokens, PaddedTokens, StoreOptions, TokenStore, collate, reduce_images
from torino.serving.store.prompt import StoredReduction
from torino.vlm import VLM, load_vlm


@pytest.fixture(scope="module")
def store(reference: Path) -> TokenStore:
    return TokenStore(reference)


@pytest.fixture(scope="module")
def vlm(home: Path) -> VLM:
    return load_vlm(home / "llava")


def test_images_are_found_by_number_and_by_name(store: TokenStore) -> None:
    assert len(store) == 20
    assert store[-1].name == "20.png"
    assert store.find("06.png") == 5  # the broken one before it has no number
    assert [len(image) for image in store] == store.lengths.tolist()
    assert store.lengths.unique().numel() > 1
    assert "20 images of 22 photos" in repr(store)
    with pytest.raises(BadIndex, match="no image 20: there are 20"):
        store[20]
    with pytest.raises(BadParameter, match=r"'05\.png' could not be used when the store was written: .*known format"):
        store.find("05.png")
    with pytest.raises(BadParameter, match=r"no image 'x\.png'"):
        store.find("x.png")


def test_the_settings_hash_is_checked(reference: Path, store: TokenStore, settings: ReductionSettings) -> None:
    assert store.settings.hash == settings.hash(store.settings.model_hash)
    TokenStore(reference, settings_hash=store.settings.hash)
    with pytest.raises(BadParameter, match=r"settings hash .* not other.*torino-x.* on llava"):
        TokenStore(reference, settings_hash="other")
    with pytest.raises(BadFile, match=r"is not a token store: it has no manifest\.json"):
        TokenStore(reference.parent)


def test_shards_that_do_not_belong_to_the_manifest_are_refused(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    shutil.copytree(reference, tmp_path / "store")
    shards = tmp_path / "store" / "shards"
    shutil.copy(shards / "00003.safetensors", shards / "00002.safetensors")  # intact, but of other images
    with pytest.raises(BadFile, match=r"00002\.safetensors is damaged"):
        TokenStore(tmp_path / "store").verify()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(store: TokenStore, side: Any) -> None:
    images = [store[number] for number in (3, 0, 9)]
    batch = collate(images, side=side)
    assert isinstance(batch, PaddedTokens)
    assert batch.tokens.shape == (3, max(map(len, images)), store.width)
    assert batch.mask.sum(1).tolist() == [len(image) for image in images]
    for row, image in enumerate(images):
        kept = batch.mask[row]
        assert torch.equal(batch.tokens[row][kept], image.tokens)
        assert torch.equal(batch.anchors[row][kept], image.anchors)
        assert torch.equal(batch.masses[row][kept], image.masses)
        assert torch.equal(batch.concepts[row][kept], image.concepts)
        assert bool((batch.masses[row][~kept] == 0).all())
        assert bool(kept[-1 if side == "left" else 0])


def test_packed_batches(store: TokenStore) -> None:
    images = [store[number] for number in (3, 0, 9)]
    batch = collate(images, "packed")
    assert isinstance(batch, PackedTokens)
    assert batch.names == [image.name for image in images]
    for row, image in enumerate(images):
        rows = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        assert torch.equal(batch.tokens[rows], image.tokens)
        assert torch.equal(batch.masses[rows], image.masses)


def test_wrong_batches_are_refused(store: TokenStore) -> None:
    with pytest.raises(BadParameter, match="at least one image"):
        collate([])
    with pytest.raises(BadParameter, match="layout must be one of 'padded', 'packed'"):
        collate([store[0]], "square")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="takes a list of the images of a TokenStore"):
        collate([torch.zeros(2, 3)])  # type: ignore[list-item]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loaders_read_every_image_once(store: TokenStore, workers: int) -> None:
    loader = DataLoader(
        store,
        batch_size=6,
        shuffle=True,
        num_workers=workers,
        collate_fn=partial(collate, layout="packed"),
        generator=torch.Generator().manual_seed(0),
        multiprocessing_context="spawn" if workers else None,
    )
    names: list[str] = []
    tokens = 0
    for batch in loader:
        names += batch.names
        tokens += len(batch.tokens)
    assert sorted(names) == store.names
    assert names != store.names
    assert tokens == int(store.lengths.sum())


def test_a_store_can_be_sent_to_another_process_without_its_tokens(store: TokenStore) -> None:
    data = pickle.dumps(store)
    assert len(data) < 4000
    assert torch.equal(pickle.loads(data)[7].tokens, store[7].tokens)


def test_embeddings_in_the_form_of_vllm(store: TokenStore) -> None:
    batches = list(store.image_embeds(batch=8))
    assert [len(batch) for batch in batches] == [8, 8, 4]
    flat = [tokens for batch in batches for tokens in batch]
    assert all(torch.equal(tokens, image.tokens) for tokens, image in zip(flat, store, strict=True))
    (chosen,) = store.image_embeds(batch=2, indices=[4, 1])
    assert torch.equal(chosen[1], store[1].tokens)
    with pytest.raises(BadParameter, match="batch must be"):
        next(store.image_embeds(batch=0))


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize("method", ["torino-x", "torino-m", "divprune", "none"])
def test_answers_equal_those_with_the_images(home: Path, tmp_path: Path, vlm: VLM, method: str) -> None:
    sae = str(home / "sae") if method.startswith("torino") else None
    settings = ReductionSettings(method, sae=sae, budget=6 if method == "divprune" else None)
    reduce_images([home / "photos"], tmp_path / "store", str(home / "llava"), settings, OPTIONS, limit=5)
    store, reducer = TokenStore(tmp_path / "store"), settings.build()
    answers: set[str] = set()
    for number, image in enumerate(store):
        inputs, reduction = store.prompt(vlm, number, QUESTION)
        source = vlm.inputs(home / "photos" / image.name, QUESTION)
        assert torch.equal(inputs.tensors["input_ids"], source.tensors["input_ids"])
        expected = vlm.answer(source, reducer, max_new_tokens=12)
        answer = vlm.generate(inputs, [reduction], max_new_tokens=12)
        assert answer.texts[0] == expected.text
        assert reduction.tokens == expected.after
        answers.add(answer.texts[0])
    assert len(answers) > 1  # they depend on the image


def test_wrong_masses_or_anchors_give_other_answers(vlm: VLM, store: TokenStore) -> None:
    changed = {"masses": 0, "anchors": 0}
    for number in range(8):
        inputs, right = store.prompt(vlm, number, QUESTION)
        assert isinstance(right, StoredReduction)
        assert (right.positions, right.proportional) == ("original", True)
        embeds = [replace(item, slots=torch.arange(len(item.slots))) for item in right.embeds]
        wrong = {
            "masses": replace(right, embeds=[replace(item, sizes=None) for item in right.embeds]),
            "anchors": replace(right, embeds=embeds),
        }
        expected = vlm.generate(inputs, [right], max_new_tokens=16).texts[0]
        for name, reduction in wrong.items():
            changed[name] += vlm.generate(inputs, [reduction], max_new_tokens=16).texts[0] != expected
    assert min(changed.values()) > 0, changed


def test_several_images_in_one_prompt(home: Path, vlm: VLM, store: TokenStore, settings: ReductionSettings) -> None:
    inputs, reduction = store.prompt(vlm, [2, 7], QUESTION)
    names = [home / "photos" / store[number].name for number in (2, 7)]
    expected = vlm.answer(vlm.inputs(names, QUESTION), settings.build(), max_new_tokens=8)
    assert vlm.generate(inputs, [reduction], max_new_tokens=8).texts[0] == expected.text


def test_prompts_for_another_model_are_refused(tmp_path: Path, vlm: VLM, store: TokenStore) -> None:
    build_llava(tmp_path / "siglip", has_cls=False)
    with pytest.raises(BadParameter, match=r"were made for llava.*Load the same model"):
        store.prompt(load_vlm(tmp_path / "siglip"), 0, QUESTION)
    with pytest.raises(BadParameter, match="were made for llava"):
        store.prompt(load_vlm(vlm.model.name_or_path, dtype="bfloat16"), 0, QUESTION)
    with pytest.raises(BadParameter, match="No image was given"):
        store.prompt(vlm, [], QUESTION)
    with pytest.raises(BadParameter, match="The question is empty"):
        store.prompt(vlm, 0, " ")


@needs_weights
def test_the_lab_answers_from_a_store_as_from_the_photos(tmp_path: Path) -> None:
    settings = ReductionSettings("torino-x", sae="lab")
    photos = [example_folder() / "photos" / f"{name}.jpg" for name in PHOTOS]
    reduce_images(photos, tmp_path / "store", "lab", settings, StoreOptions(batch=2))  # in half precision
    store, vlm, reducer = TokenStore(tmp_path / "store"), load_vlm("lab"), settings.build()
    for photo in photos[:2]:
        for question in ("Is there a person in the photo?", "What is in the photo?"):
            inputs, reduction = store.prompt(vlm, store.find(photo.name), question)
            expected = vlm.answer(vlm.inputs(photo, question), reducer, max_new_tokens=8).text
            assert vlm.generate(inputs, [reduction], max_new_tokens=8).texts[0] == expected
