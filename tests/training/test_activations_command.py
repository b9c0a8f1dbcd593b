"""The command ``torino activations``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.support.files import read_folder
from torino import TorinoError
from torino.cli.activations import EPILOG, activations
from torino.core.errors import BadFile, BadParameter
from torino.training.activations import cache as cache_module

app = typer.Typer()
app.command(epilog=EPILOG)(activations)


def run(*arguments: str | Path) -> Any:
    """Run the command; raise the error that the real command would print."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_activations_command(tmp_path: Path, clip_folder: Path, photo_folder: Path) -> None:
    store = tmp_path / "store"
    first = run("--tower", clip_folder, "--block", "1", "--images", photo_folder, "--tokens", "random:2", "-o", store)
    assert "18 rows of width 32: 2 random patches of each of 11 photos" in first.output
    assert "2 photos could not be used" in " ".join(first.output.split())
    before = read_folder(store)
    assert "checksums are correct" in run("-o", store, "--check").output
    (store / "shards" / "00000.safetensors").unlink()
    with pytest.raises(BadFile, match=r"is missing.*--repair"):
        run("-o", store, "--check")
    summary = json.loads(run("-o", store, "--repair", "--json").output)  # tower and photos are in the card
    assert (summary["rows"], summary["skipped"], summary["shards"]) == (18, 2, 1)
    assert read_folder(store) == before
    assert "already complete" in run("-o", store).output
    with pytest.raises(BadParameter, match="block 1, got block 0"):
        run("-o", store, "--block", "0")
    with pytest.raises(BadParameter, match="not both"):
        run("-o", store, "--check", "--repair")
    card = store / "card.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"complete": False, "checksum": None}))
    (store / "shards" / "00000.safetensors").unlink()
    with pytest.raises(BadFile, match="not complete: 0 of 1"):
        run("-o", store, "--check")


def test_missing_options_are_reported(tmp_path: Path, clip_folder: Path, photo_folder: Path) -> None:
    with pytest.raises(BadParameter, match="--tower is missing, for example --tower openai"):
        run("-o", tmp_path / "store", "--images", photo_folder)
    with pytest.raises(BadParameter, match="--images is missing"):
        run("-o", tmp_path / "store", "--tower", clip_folder)
    with pytest.raises(BadFile, match="is not an activation store"):
        run("-o", tmp_path / "store", "--check")
    assert not (tmp_path / "store").exists()


def test_lack_of_memory_is_one_sentence(
    tmp_path: Path, clip_folder: Path, photo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cache_module, "_write_shards", run_out_of_memory)
    with pytest.raises(TorinoError, match="--batch 4"):
        run("--tower", clip_folder, "--images", photo_folder, "--tokens", "cls", "-o", tmp_path / "store")


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [("--padding", "none", "'crop', 'square'"), ("--dtype", "bfloat16", "'float16', 'float32'")],
)
def test_invalid_choices_are_reported(tmp_path: Path, option: str, value: str, choices: str) -> None:
    result = CliRunner().invoke(app, ["-o", str(tmp_path / "store"), option, value])
    assert result.exit_code == 2
    assert f"'{value}' is not one of {choices}" in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "store").exists()


def test_help_shows_examples_on_separate_lines() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    lines = [line.strip() for line in result.output.splitlines()]
    assert "torino activations --tower facebook/dinov2-base --images photos -o store" in lines
    assert "torino activations -o store --check" in lines
