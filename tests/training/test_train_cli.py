"""The commands ``torino train`` and ``torino sweep``, on a store that is written here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import planted as plant
import pytest
import tiny
import torch
import typer
from typer.testing import CliRunner

from torino import SAE, BadFile, BadParameter
from torino.cli.train import SWEEP_EPILOG, TRAIN_EPILOG, sweep, train
from torino.core.io import write_json
from torino.training.activations.selection import Skipped
from torino.training.activations.shards import CARD, CacheSettings, write_shard
from torino.training.activations.store import Store
from torino.training.config import TrainConfig
from torino.training.trainer import train as run

PHOTOS, PATCHES = 20, 16
BROKEN = Skipped(PHOTOS, "broken.jpg", "It is no photo.")
SMALL = ["--k", "3", "--steps", "12", "--batch", "64"]


def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
    made.command(epilog=TRAIN_EPILOG)(train)
    made.command(epilog=SWEEP_EPILOG)(sweep)
    return made


def told(*arguments: str, fails: type[Exception] | None = None) -> str:
    result = CliRunner().invoke(app(), list(arguments))
    if fails is None:
        assert result.exception is None, result.exception
        return result.output
    assert isinstance(result.exception, fails), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("store"), "all")


def written(folder: Path, tokens: str, scale: float = 1.0, **changes: Any) -> Path:
    """A store of planted rows; the last photo could not be opened."""
    settings = CacheSettings(
        encoder="tiny/tower",
        block=4,
        width=plant.WIDTH,
        tower="0",
        tokens=tokens,
        padding="crop",
        seed=0,
        dtype="float16",
        data="planted",
        fingerprint="0",
        photos=PHOTOS + 1,
        photos_per_shard=PHOTOS + 1,
    )
    settings = replace(settings, **changes)
    write_json(folder / CARD, {**asdict(settings), "complete": True})
    patches = torch.arange(PATCHES, dtype=torch.int32).repeat(PHOTOS) if tokens.startswith("random") else None
    counts = torch.tensor([PATCHES] * PHOTOS + [0], dtype=torch.int32)
    grids = torch.tensor([(4, 4)] * PHOTOS + [(0, 0)], dtype=torch.int32)
    rows = (scale * plant.planted(PHOTOS * PATCHES)[0]).half()
    write_shard(settings.file_of(folder, 0), settings.digest, rows, counts, grids, patches, [BROKEN])
    return folder


def test_a_store_becomes_an_sae(store: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "sae")
    said = told("train", str(store), "-o", target, *SMALL, "--expansion", "2", "--log-every", "4", "--name", "mine")
    assert "FVU" in said
    assert "top latent" in said
    sae = SAE.load(target)
    assert (sae.latents, sae.groups, sae.k) == (64, (4, 8, 16, 36), 3)
    assert (sae.card.name, sae.card.encoder, sae.card.data) == ("mine", "tiny/tower", "planted")
    lines = (tmp_path / "sae" / "training" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8, 12]
    assert set(json.loads(lines[0])) >= {"fvu", "levels", "l0", "dead", "top_frequency", "loss", "lr", "threshold"}
    again = told("train", str(store), "-o", target, *SMALL, "--expansion", "2")
    assert "finished already" in again
    message = told("train", str(store), "-o", target, *SMALL, "--expansion", "4", fails=BadParameter)
    assert "expansion was 2.0, now 4.0" in message


@pytest.mark.parametrize("objective", ["matryoshka", "batchtopk", "topk", "relu"])
@pytest.mark.parametrize("layout", ["dictionary_learning", "saelens"])
def test_exports_encode_alike(objective: str, layout: str, store: Path, tmp_path: Path) -> None:
    small = SMALL[2:] if objective == "relu" else SMALL  # which has no k
    given = [*small, "--objective", objective, "--latents", "64", "--export", layout]
    told("train", str(store), "-o", str(tmp_path), *given)
    ours, theirs, x = SAE.load(tmp_path), SAE.load(tmp_path / layout), plant.planted(64)[0]
    torch.testing.assert_close(theirs.encode(x), ours.encode(x), rtol=1e-4, atol=1e-4)


def test_a_sweep_prints_and_writes_its_table(store: Path, tmp_path: Path) -> None:
    said = told("sweep", str(store), "-o", str(tmp_path), *SMALL, "--expansions", "1,2", "--heldout", str(store))
    assert "(3,3)" in said
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n") == 4
    assert "groups (2,2)" in table
    assert SAE.load(tmp_path / "x2").latents == 64


def test_a_tower_can_be_trained_from_directly(tmp_path: Path) -> None:
    model, processor = tiny.llava(), tiny.processor()
    model.save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    (tmp_path / "photos").mkdir()
    for number, photo in enumerate(tiny.photos(6)):
        photo.save(tmp_path / "photos" / f"{number}.png")
    given = ["--tower", str(tmp_path / "llava"), "--images", str(tmp_path / "photos"), "--tokens", "random:8"]
    told("train", "-o", str(tmp_path / "sae"), *given, *SMALL, "--expansion", "2", "--device", "cpu")
    sae = SAE.load(tmp_path / "sae")
    assert sae.card.token_kind == "8 random tokens per image"
    assert sae.width == tiny.WIDTH


@pytest.mark.parametrize(
    ("arguments", "fails", "sentence"),
    [
        ([], BadParameter, "Give a STORE, or both --tower and --images"),
        (["--tower", "lab"], BadParameter, "both --tower and --images"),
        (["nowhere"], BadFile, "nowhere"),
        (["STORE", "--export", "onnx"], BadParameter, "--export must be dictionary_learning or saelens"),
        (["STORE", "--fractions", "a,b"], BadParameter, "--fractions takes numbers with commas"),
        (["STORE", "--latents", "4"], BadParameter, "20 of 4 latents cannot be active"),
        (["STORE", "--paper", "--objective", "topk"], BadParameter, "--paper is a recipe for matryoshka"),
        (["STORE", "--device", "tpu9"], BadParameter, "device must be"),
        (["STORE", "--log", "paper"], BadParameter, "tensorboard or wandb"),
        (["STORE", "--tokens", "cls"], BadParameter, "--tokens goes with --tower"),
        (["STORE", "--limit", "5"], BadParameter, "--limit goes with --tower"),
        (["STORE", "--l1", "0.1"], BadParameter, "--l1 would do nothing with --objective matryoshka"),
        (["STORE", "--objective", "topk", "--weights", "1,2"], BadParameter, "only matryoshka has levels"),
        (["STORE", "--objective", "relu", "--k", "8"], BadParameter, "relu has no k"),
        (["STORE", "--anneal", "8"], BadParameter, "k only falls with --k-start"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], fails: type[Exception], sentence: str, store: Path, tmp_path: Path
) -> None:
    given = [str(store) if word == "STORE" else word for word in arguments]
    assert sentence in told("train", "-o", str(tmp_path / "sae"), *given, fails=fails)


def test_a_store_read_in_another_order_is_another(store: Path, tmp_path: Path) -> None:
    recipe = TrainConfig(expansion=1, k=3, steps=2, batch=64)
    run(Store.open(store), recipe, tmp_path)
    assert run(Store.open(store), recipe, tmp_path).already
    with pytest.raises(BadParameter, match=r"settings: activations\.local was None, now 4\. Give"):
        run(Store.open(store, local=4), recipe, tmp_path)


def test_heldout_photos_need_all_their_patches(store: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "random", "random:16")
    given = ["-o", str(tmp_path / "sweep"), *SMALL, "--heldout", str(other)]
    assert "needs all patches" in told("sweep", str(store), *given, fails=BadParameter)
    deeper = written(tmp_path / "deeper", "all", block=5)
    given[-1] = str(deeper)
    assert "after block 4 of tiny/tower" in told("sweep", str(store), *given, fails=BadParameter)
    assert not (tmp_path / "sweep").exists()


def test_heldout_photos_that_were_harvested_anew_are_measured_anew(store: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "heldout", "all")
    given = ["-o", str(tmp_path / "sweep"), *SMALL, "--expansions", "1", "--heldout", str(other)]
    told("sweep", str(store), *given)
    table = tmp_path / "sweep" / "table.csv"
    before = table.read_text()
    assert before.splitlines()[1].split(",")[before.splitlines()[0].split(",").index("rows")] == str(PHOTOS * PATCHES)
    told("sweep", str(store), *given)
    assert table.read_text() == before
    written(other, "all", fingerprint="1", scale=2.0)
    told("sweep", str(store), *given)
    assert table.read_text() != before


def test_the_papers_recipe_is_one_flag_away() -> None:
    from torino.cli.train import _recipe

    recipe = _recipe(True, kind="matryoshka", steps=7, lr=None).settled(1024)
    assert (recipe.steps, recipe.batch, recipe.aux, recipe.k) == (7, 4096, 0.03, 20)


def test_interruption_is_said_and_the_run_goes_on(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torino.training.trainer import Trainer

    take = Trainer.take

    def interrupted(self: Any, rows: Any) -> Any:
        if self.step == 9:
            raise KeyboardInterrupt
        return take(self, rows)

    given = ["train", str(store), "-o", str(tmp_path), *SMALL, "--expansion", "2", "--save-every", "4"]
    monkeypatch.setattr(Trainer, "take", interrupted)
    result = CliRunner().invoke(app(), given)
    assert result.exit_code == 130
    assert "Give the same command again" in result.output.replace("\n", " ")
    monkeypatch.undo()
    told(*given)
    assert SAE.load(tmp_path).latents == 64


def test_help_shows_examples() -> None:
    for command in ("train", "sweep"):
        result = CliRunner().invoke(app(), [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exit_code == 0
        assert f"torino {command} ./store -o" in result.output
