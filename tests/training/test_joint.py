"""Joint SAEs: rows of two modalities, training, files, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.support import tiny_vlm
from tests.training.test_train_command import run_command
from torino import SAE
from torino.core.errors import BadFile, BadParameter, BadTokens, MissingSignal, TorinoError
from torino.core.io import read_json, write_json
from torino.datasets.texts import read_texts
from torino.sae.joint import JointSAE, JointStatistics
from torino.training.config import TrainConfig
from torino.training.joint import JointRows, collect_rows
from torino.training.trainer import train
from torino.vlm import load_clip_text, load_vlm
from torino.vlm.joint_space import open_joint_space

WIDTH = 12
SENTENCE = "what is this"


def shared_rows(count: int, modality: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of sparse sums of shared directions, far away and at another scale for text, and their directions."""
    source = torch.Generator().manual_seed(7)
    directions = torch.nn.functional.normalize(torch.randn(16, WIDTH, generator=source), dim=1)
    source.manual_seed(seed + (modality == "text"))
    which = torch.randint(16, (count,), generator=source)
    rows = directions[which] + 0.02 * torch.randn(count, WIDTH, generator=source)
    return (rows if modality == "image" else 0.1 * rows + 5.0), which


def joint_rows(**options: Any) -> JointRows:
    return JointRows(shared_rows(700, "image")[0], shared_rows(500, "text")[0], "projected", **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joint") / "sae"
    train(joint_rows(encoder="tiny"), TrainConfig(kind="topk", latents=32, k=1, steps=300, batch=128, lr=3e-3), folder)
    return folder


def test_batches_are_balanced_and_normalized() -> None:
    rows = joint_rows(seed=3)
    statistics = rows.statistics
    for name, size in (("image", 700), ("text", 500)):
        given = getattr(rows, name)
        center, scale = getattr(statistics, f"{name}_center"), getattr(statistics, f"{name}_scale")
        normalized = (given - center) / scale
        assert torch.allclose(given.mean(0), center, atol=1e-4)
        assert float(normalized.square().sum(1).mean()) == pytest.approx(1.0, abs=1e-3)
        half = slice(0, 50) if name == "image" else slice(50, 100)
        steps = size // 50
        seen = torch.cat([rows.batch(step, 100)[half] for step in range(steps)])
        # an epoch holds every row of a modality once
        assert torch.allclose(seen.sort(0).values, normalized.sort(0).values, atol=1e-5)
    whole = rows.batch(4, 101)
    assert torch.equal(torch.cat([rows.batch(4, 101, (rank, 3)) for rank in range(3)]), whole)
    assert not torch.equal(joint_rows(seed=4).batch(4, 101), whole)


def test_a_trained_sae_compares_modalities(trained: Path) -> None:
    sae = SAE.load(trained)
    assert isinstance(sae, JointSAE)
    agree = total = 0
    latents: dict[str, Tensor] = {}
    for name in ("image", "text"):
        rows, which = shared_rows(400, name, seed=50)
        top = sae.top(sae.align(rows, name), 1).indices[:, 0]  # type: ignore[arg-type]
        latents[name] = torch.stack([top[which == direction].mode().values for direction in range(16)])
    agree, total = int((latents["image"] == latents["text"]).sum()), 16
    assert agree >= 14, f"{agree} of {total} directions have the same latent in both modalities"
    # without the statistics the text rows mean nothing to it
    raw = sae.top(shared_rows(400, "text", seed=50)[0], 1).indices[:, 0]
    assert len(raw.unique()) < 4


def test_statistics_survive_files(trained: Path, tmp_path: Path) -> None:
    sae = SAE.load(trained)
    assert isinstance(sae, JointSAE)
    card = read_json(trained / "card.json")
    assert card["format"] == "torino-sae/joint/1"
    assert card["joint"]["space"] == "projected"
    assert set(card["joint"]) == {"space", "image_scale", "text_scale"}
    again = SAE.load(sae.save(tmp_path / "again"))
    assert isinstance(again, JointSAE)
    rows = shared_rows(9, "text")[0]
    assert torch.equal(again.encode(again.align(rows, "text")), sae.encode(sae.align(rows, "text")))
    assert isinstance(SAE.load(trained, levels=1), JointSAE)
    assert repr(sae.statistics.image_scale) == repr(again.statistics.image_scale)
    with pytest.raises(BadParameter, match=r"statistics of their own, which the saelens layout cannot hold"):
        sae.export(tmp_path / "other", "saelens")


@pytest.mark.parametrize("damage", [{"joint": None}, {"joint": {"space": "projected"}}, {"joint": {"image_scale": -1}}])
def test_a_card_without_statistics_is_refused(trained: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    folder = SAE.load(trained).save(tmp_path / "damaged")
    write_json(folder / "card.json", {**read_json(folder / "card.json"), **damage}, sealed=True)
    with pytest.raises(BadFile, match=r"center or scale of a modality is missing|wrong statistics"):
        SAE.load(folder)


def test_one_modality_as_a_plain_sae(trained: Path, tmp_path: Path) -> None:
    sae = SAE.load(trained)
    assert isinstance(sae, JointSAE)
    for name in ("image", "text"):
        rows = shared_rows(60, name)[0]
        plain = sae.modality(name)  # type: ignore[arg-type]
        assert not isinstance(plain, JointSAE)
        aligned = sae.align(rows, name)  # type: ignore[arg-type]
        assert torch.equal(plain.top(rows, 1).indices, sae.top(aligned, 1).indices)
        error = (plain.reconstruct(rows) - rows).norm() / (rows - rows.mean(0)).norm()
        assert float(error) < 0.5
        assert SAE.load(plain.export(tmp_path / name, "saelens")).latents == 32


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(BadTokens, match="must have the same width, got 12 and 3"):
        JointRows(shared_rows(5, "image")[0], torch.randn(4, 3), "projected")
    with pytest.raises(BadTokens, match="All text rows are equal"):
        JointRows(shared_rows(5, "image")[0], torch.ones(4, WIDTH), "projected")
    with pytest.raises(BadParameter, match="image_scale must be above 0"):
        JointStatistics("projected", torch.zeros(2), torch.zeros(2), 0.0, 1.0)


# ---------------------------------------------------------------------- texts


def test_texts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A dog.\n\n Two cats. \n")
    assert read_texts(tmp_path / "a.txt") == ["A dog.", "Two cats."]
    lines = [{"caption": "A dog.", "q": ["What?", "Who?"]}, {"caption": "A cat.", "q": []}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_texts(tmp_path / "b.jsonl") == ["A dog.", "A cat."]
    assert read_texts(f"{tmp_path / 'b.jsonl'}:q") == ["What?", "Who?"]
    pq.write_table(pa.table({"id": [1, 2], "questions": [["Where?"], ["When?", "Why?"]]}), tmp_path / "c.parquet")
    assert read_texts(tmp_path / "c.parquet") == ["Where?", "When?", "Why?"]
    for source, message in (
        ("nothing.txt", "There is no file"),
        ("a.txt:caption", "has no columns"),
        ("c.parquet:caption", "has no column 'caption'; it has id, questions"),
        ("b.jsonl:answers", "has no column 'answers'; it has caption, q"),
    ):
        with pytest.raises(TorinoError, match=message):
            read_texts(f"{tmp_path}/{source}")
    (tmp_path / "d.jsonl").write_text("{\n")
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    for name in ("d.jsonl", "e.parquet"):
        with pytest.raises(BadFile, match=r"is not JSON|cannot be read as parquet"):
            read_texts(tmp_path / name)


# ---------------------------------------------------------------------- a model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model, its CLIP, and photos with captions."""
    folder = tmp_path_factory.mktemp("model")
    tiny_vlm.build_llava(folder / "llava")
    tiny_vlm.write_clip(folder / "clip", load_vlm(folder / "llava"))
    (folder / "photos").mkdir()
    for seed in range(6):
        tiny_vlm.photo(seed=seed).save(folder / "photos" / f"{seed}.png")
        (folder / "photos" / f"{seed}.txt").write_text(SENTENCE if seed % 2 else "what is")
    return folder


@pytest.mark.parametrize("name", ["projected", "block:0", "block:1", "clip"])
def test_spaces_of_a_model(home: Path, name: str) -> None:
    vlm = load_vlm(home / "llava", text_query=load_clip_text(home / "clip") if name == "clip" else None)
    space = open_joint_space(name, vlm)
    image = space.image_rows(tiny_vlm.photo(seed=1))
    text, words = space.text_rows(SENTENCE)
    assert image.shape[1] == text.shape[1]
    assert len(words) == len(text)
    patches = len(vlm.adapter.encode(vlm.inputs(tiny_vlm.photo(seed=1), "?").tensors, frozenset()).tokens[0])
    assert len(image) == patches
    if name.startswith("block"):
        # the same rows as hidden_states, which the model also returns
        tensors = vlm.inputs(tiny_vlm.photo(seed=1), SENTENCE).tensors
        with torch.no_grad():
            states = vlm.model(**tensors, output_hidden_states=True).hidden_states
        is_image = tensors["input_ids"][0] == vlm.adapter.image_token
        if name == "block:0":  # the last hidden state is after the final norm
            assert torch.allclose(image, states[1][0][is_image], atol=1e-5)
        assert not torch.allclose(image, states[0][0][is_image], atol=1e-3)


def test_spaces_that_a_model_lacks(home: Path) -> None:
    vlm = load_vlm(home / "llava")
    with pytest.raises(MissingSignal, match="The space clip needs the text tower"):
        open_joint_space("clip", vlm)
    with pytest.raises(BadParameter, match="block:99 does not exist"):
        open_joint_space("block:99", vlm)
    with pytest.raises(BadParameter, match="The joint space must be projected, block:N"):
        open_joint_space("middle", vlm)


def test_the_command(home: Path, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.safetensors", tmp_path / "sae"
    small = ["--k", "2", "--steps", "8", "--batch", "16", "--latents", "24"]
    source = ["--model", str(home / "llava"), "--images", str(home / "photos"), "--tokens", "random:5"]
    run_command("train", "--joint", "projected", *source, "--rows", str(rows), "-o", str(output), *small)
    sae = SAE.load(output)
    assert isinstance(sae, JointSAE)
    assert sae.card.encoder == "llava (projected)"
    assert "6 photos" in sae.card.data
    assert "2 texts" in sae.card.data
    stored = JointRows.load(rows)
    assert len(stored.image) == 30
    # the rows are read again, so the model is not needed
    run_command("train", "--joint", "projected", "--rows", str(rows), "-o", str(tmp_path / "second"), *small)
    assert torch.equal(SAE.load(tmp_path / "second").W_enc, sae.W_enc)
    again = run_command("train", "--joint", "projected", "--rows", str(rows), "-o", str(output), *small)
    assert "already finished" in again
    for options, message in (
        (["--joint", "block:1", "--rows", str(rows)], "holds rows of the space projected"),
        (["--joint", "projected"], "needs --model and --images"),
        (["--joint", "clip", *source], "--joint clip needs the CLIP"),
        (["--joint", "projected", "--tower", "lab", *source], "--tower cannot be combined with --joint"),
        (["store", "--texts", "a.txt"], "--texts has no effect without --joint"),
    ):
        assert message in run_command("train", *options, "-o", str(tmp_path / "no"), fails=BadParameter)


def test_photos_without_captions_need_texts(home: Path, tmp_path: Path) -> None:
    from torino.datasets import open_photos

    (tmp_path / "photos").mkdir()
    tiny_vlm.photo(seed=1).save(tmp_path / "photos" / "1.png")
    space = open_joint_space("projected", load_vlm(home / "llava"))
    photos = open_photos(tmp_path / "photos")
    with pytest.raises(BadParameter, match=r"have no captions. Give texts with --texts"):
        collect_rows(space, photos)
    assert len(collect_rows(space, photos, ["what is", "this"]).text) == 3
    with pytest.raises(BadParameter, match="tokens must be all or random:R, got cls"):
        collect_rows(space, photos, ["a"], tokens="cls")
