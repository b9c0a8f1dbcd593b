"""The commands ``torino train`` and ``torino sweep``."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.support import planted_dictionary as planted
from tests.support import tiny
from torino import SAE
from torino.cli._stop import Stop
from torino.cli.train import SWEEP_EPILOG, TRAIN_EPILOG, sweep, train
from torino.core.errors import BadFile, BadParameter
from torino.core.io import write_json
from torino.training.activations.selection import SkippedPhoto
from torino.training.activations.shards import CARD, CacheSettings, write_shard
from torino.training.activations.store import Store
from torino.training.config import TrainConfig
from torino.training.trainer import train as run_training

PHOTOS, PATCHES = 20, 16
BROKEN = SkippedPhoto(PHOTOS, "broken.jpg", "Not an image.")
SMALL = ["--k", "3", "--steps", "12", "--batch", "64"]


def make_app() -> typer.Typer:
    commands = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
    commands.command(epilog=TRAIN_EPILOG)(train)
    commands.command(epilog=SWEEP_EPILOG)(sweep)
    return commands


def run_command(*arguments: str, fails: type[Exception] | None = None) -> str:
    result = CliRunner().invoke(make_app(), list(arguments))
    if fails is None:
        assert result.exception is None, result.exception
        return result.output
    assert isinstance(result.exception, fails), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store"), "all")


def write_store(folder: Path, tokens: str, scale: float = 1.0, **changes: Any) -> Path:
    """Write a store of planted rows; the last photo was skipped."""
    settings = CacheSettings(
        encoder="tiny/tower",
        block=4,
        width=planted.WIDTH,
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
    rows = (scale * planted.make_rows(PHOTOS * PATCHES)[0]).half()
    write_shard(settings.shard_path(folder, 0), settings.digest, rows, counts, grids, patches, [BROKEN])
    return folder


def test_train_on_a_store(store: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "sae")
    output = run_command(
        "train", str(store), "-o", target, *SMALL, "--expansion", "2", "--log-every", "4", "--name", "mine"
    )
    assert "FVU" in output
    assert "top latent" in output
    sae = SAE.load(target)
    assert (sae.latents, sae.groups, sae.k) == (64, (4, 8, 16, 36), 3)
    assert (sae.card.name, sae.card.encoder, sae.card.data) == ("mine", "tiny/tower", "planted")
    lines = (tmp_path / "sae" / "training" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8, 12]
    assert set(json.loads(lines[0])) >= {"fvu", "levels", "l0", "dead", "top_frequency", "loss", "lr", "threshold"}
    again = run_command("train", str(store), "-o", target, *SMALL, "--expansion", "2")
    assert "already finished" in again
    message = run_command("train", str(store), "-o", target, *SMALL, "--expansion", "4", fails=BadParameter)
    assert "expansion was 2.0, now 4.0" in message


@pytest.mark.parametrize("objective", ["matryoshka", "batchtopk", "topk", "relu"])
@pytest.mark.parametrize("layout", ["dictionary_learning", "saelens"])
def test_exported_sae_is_equivalent(objective: str, layout: str, store: Path, tmp_path: Path) -> None:
    small = SMALL[2:] if objective == "relu" else SMALL  # relu has no k
    options = [*small, "--objective", objective, "--latents", "64", "--export", layout]
    run_command("train", str(store), "-o", str(tmp_path), *options)
    ours, theirs, x = SAE.load(tmp_path), SAE.load(tmp_path / layout), planted.make_rows(64)[0]
    torch.testing.assert_close(theirs.encode(x), ours.encode(x), rtol=1e-4, atol=1e-4)


def test_sweep_prints_and_writes_a_table(store: Path, tmp_path: Path) -> None:
    output = run_command(
        "sweep", str(store), "-o", str(tmp_path), *SMALL, "--expansions", "1,2", "--heldout", str(store)
    )
    assert "(3,3)" in output
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n") == 4
    assert "groups (2,2)" in table
    assert SAE.load(tmp_path / "x2").latents == 64


def test_train_on_a_tower(tmp_path: Path) -> None:
    model, processor = tiny.llava(), tiny.processor()
    model.save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    (tmp_path / "photos").mkdir()
    for number, photo in enumerate(tiny.photos(6)):
        photo.save(tmp_path / "photos" / f"{number}.png")
    options = ["--tower", str(tmp_path / "llava"), "--images", str(tmp_path / "photos"), "--tokens", "random:8"]
    run_command("train", "-o", str(tmp_path / "sae"), *options, *SMALL, "--expansion", "2", "--device", "cpu")
    sae = SAE.load(tmp_path / "sae")
    assert sae.card.token_kind == "8 random tokens per image"
    assert sae.width == tiny.WIDTH


@pytest.mark.parametrize(
    ("arguments", "fails", "message"),
    [
        ([], BadParameter, "Give either STORE, or both --tower and --images"),
        (["--tower", "lab"], BadParameter, "both --tower and --images"),
        (["nowhere"], BadFile, "nowhere"),
        (["STORE", "--fractions", "a,b"], BadParameter, "--fractions must be numbers separated by commas"),
        (["STORE", "--latents", "4"], BadParameter, "at most the number of latents, 4, got 20"),
        (["STORE", "--paper", "--objective", "topk"], BadParameter, "--paper needs --objective matryoshka"),
        (["STORE", "--device", "tpu9"], BadParameter, "device must be"),
        (["STORE", "--tokens", "cls"], BadParameter, "--tokens needs --tower"),
        (["STORE", "--limit", "5"], BadParameter, "--limit needs --tower"),
        (["STORE", "--l1", "0.1"], BadParameter, "--l1 has no effect with --objective matryoshka"),
        (["STORE", "--objective", "topk", "--weights", "1,2"], BadParameter, "only matryoshka has levels"),
        (["STORE", "--objective", "relu", "--k", "8"], BadParameter, "relu has no k"),
        (["STORE", "--anneal", "8"], BadParameter, "k decreases only with --k-start"),
    ],
)
def test_invalid_options_are_reported(
    arguments: list[str], fails: type[Exception], message: str, store: Path, tmp_path: Path
) -> None:
    options = [str(store) if word == "STORE" else word for word in arguments]
    assert message in run_command("train", "-o", str(tmp_path / "sae"), *options, fails=fails)


def test_run_resumes_with_the_same_row_order_only(store: Path, tmp_path: Path) -> None:
    config = TrainConfig(expansion=1, k=3, steps=2, batch=64)
    run_training(Store.open(store), config, tmp_path)
    assert run_training(Store.open(store), config, tmp_path).already_finished
    with pytest.raises(BadParameter, match=r"settings: activations\.local was None, now 4\. Use"):
        run_training(Store.open(store, read_block=4), config, tmp_path)


def test_heldout_photos_need_all_patches(store: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "random", "random:16")
    options = ["-o", str(tmp_path / "sweep"), *SMALL, "--heldout", str(other)]
    assert "must contain all patches" in run_command("sweep", str(store), *options, fails=BadParameter)
    deeper = write_store(tmp_path / "deeper", "all", block=5)
    options[-1] = str(deeper)
    assert "after block 4 of tiny/tower" in run_command("sweep", str(store), *options, fails=BadParameter)
    assert not (tmp_path / "sweep").exists()


def test_metrics_are_computed_again_for_new_heldout_photos(store: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "heldout", "all")
    options = ["-o", str(tmp_path / "sweep"), *SMALL, "--expansions", "1", "--heldout", str(other)]
    run_command("sweep", str(store), *options)
    table = tmp_path / "sweep" / "table.csv"
    before = table.read_text()
    assert before.splitlines()[1].split(",")[before.splitlines()[0].split(",").index("rows")] == str(PHOTOS * PATCHES)
    run_command("sweep", str(store), *options)
    assert table.read_text() == before
    write_store(other, "all", fingerprint="1", scale=2.0)
    run_command("sweep", str(store), *options)
    assert table.read_text() != before


def test_paper_settings() -> None:
    from torino.cli.train import _make_config

    config = _make_config(True, kind="matryoshka", steps=7, lr=None).resolve(1024)
    assert (config.steps, config.batch, config.aux, config.k) == (7, 4096, 0.03, 20)


def test_interrupted_command_can_be_resumed(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torino.training.trainer import Trainer

    train_step = Trainer.train_step

    def interrupt(self: Any, rows: Any) -> Any:
        if self.step == 9:
            raise Stop(signal.SIGINT)
        return train_step(self, rows)

    arguments = ["train", str(store), "-o", str(tmp_path), *SMALL, "--expansion", "2", "--save-every", "4"]
    monkeypatch.setattr(Trainer, "train_step", interrupt)
    with pytest.raises(Stop):
        run_command(*arguments)
    monkeypatch.undo()
    run_command(*arguments)
    assert SAE.load(tmp_path).latents == 64


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("train", "torino train store -o my-sae --expansion 64 --paper --log tensorboard"),
        ("sweep", "torino sweep store -o sweep --heldout val-store --steps 20000"),
    ],
)
def test_help_shows_examples_on_separate_lines(command: str, example: str) -> None:
    result = CliRunner().invoke(make_app(), [command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    assert example in [line.strip() for line in result.output.splitlines()]


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [
        ("--export", "onnx", "'dictionary_learning', 'saelens'"),
        ("--log", "paper", "'tensorboard', 'wandb'"),
        ("--objective", "jumprelu", "'matryoshka', 'batchtopk', 'topk', 'relu'"),
        ("--bias", "max", "'median', 'mean', 'zero'"),
        ("--precision", "int8", "'float32', 'bfloat16', 'float16'"),
    ],
)
def test_invalid_choices_are_reported(option: str, value: str, choices: str, store: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["train", str(store), "-o", str(tmp_path / "sae"), option, value])
    assert result.exit_code == 2
    assert f"'{value}' is not one of {choices}" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "sae").exists()
