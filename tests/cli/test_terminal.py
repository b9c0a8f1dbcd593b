"""Terminals that cannot show every character, and cache folders that cannot be used: one line, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.support.command import run_torino
from tests.support.tiny_run import make_sae, write_task_file
from tests.support.tiny_vlm import build_llava, photo
from torino.cli._terminal import to_ascii
from torino.cli.main import app
from torino.core.errors import BadFile, UnknownName
from torino.core.io import cache_dir, cache_errors, read_safetensors, write_arrays
from torino.vlm import adapter_for

COMMANDS = sorted(str(item.name or item.callback.__name__) for item in app.registered_commands if item.callback)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    build_llava(folder / "llava")
    make_sae().save(folder / "sae")
    write_task_file(folder / "small.tsv", images=2)
    photo().save(folder / "photo…é.png")
    return folder


def words_of(home: Path, output: Path) -> dict[str, list[Any]]:
    """Return words of commands whose output has characters beyond ASCII."""
    model = ["--model", home / "llava", "--device", "cpu"]
    picture, small = home / "photo…é.png", ["--method", "random", "--budget", "6"]
    return {
        "ask": [picture, "what is this ?", *model, *small],
        "compare": [picture, "what is this ?", *model, "--methods", "random", "--budget", "6", "-o", output / "é.png"],
        "look": [picture, "--tower", home / "llava", *small, "--show", "-o", output / "é.png"],
        "reduce": ["--sae", "example", "--picture", "--explain", "1"],
        "calibrate": ["--sae", "example", "--max-k", "2"],
        "bench": ["--sae", "example", "--methods", "random", "--budget", "6", "--count", "1", "--warmups", "0"],
        "list": [],
        "info": ["example"],
        "eval": [*model, "--tasks", home / "small.tsv", "--methods", "random", "--budget", "6", "-o", output / "ü"],
    }


@pytest.mark.parametrize("command", list(words_of(Path(), Path())))
def test_an_ascii_terminal_shows_similar_characters(home: Path, tmp_path: Path, command: str) -> None:
    done = run_torino(command, *words_of(home, tmp_path)[command], encoding="ascii")
    assert (done.out + done.err).isascii()
    if command == "ask":
        assert "16 -> 6 image tokens" in done.out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_on_an_ascii_terminal(command: str) -> None:
    done = run_torino(*([command] if command else []), "--help", encoding="ascii")
    assert done.out.isascii()


def test_errors_and_odd_file_names(tmp_path: Path) -> None:
    assert "There is no file caf" in run_torino("look", "café.png", encoding="ascii", code=2).err
    odd = os.fsdecode(b"\xff.png")
    assert "There is no file \\udcff.png" in run_torino("look", odd, encoding="utf-8", code=2).err


def test_a_process_with_an_ascii_locale() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-m", "torino", "list"], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_to_ascii() -> None:
    assert to_ascii("✓ é ≠ 中 ⠋ ━ −1 …") == "+ e != ? * - -1 ..."


# ---------------------------------------------------------------------- cache folders


def test_a_cache_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadFile, match=r"The cache folder .*file is a file. Set TORINO_CACHE to a folder"):
        cache_dir()


@pytest.mark.parametrize("given", ["~no-such-user/cache", os.fsdecode(b"/tmp/\xff")])
def test_an_odd_cache_folder(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_CACHE", given)
    with pytest.raises(BadFile, match="Set"):
        cache_dir()
    run_torino("reduce", "--sae", "example")  # needs no cache


def test_a_relative_or_blank_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORINO_CACHE", "relative")
    assert cache_dir() == tmp_path / "relative"
    monkeypatch.setenv("TORINO_CACHE", " ")
    assert cache_dir().is_absolute()


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    words = r"Cannot use the cache folder .*: Not a directory. Set TORINO_CACHE to a writable"
    with pytest.raises(BadFile, match=words), cache_errors(tmp_path / "file" / "cache"):
        (tmp_path / "file" / "cache").mkdir()
    with pytest.raises(OSError, match="of a library"), cache_errors(tmp_path):
        raise OSError("of a library")
    pytest.importorskip("torino_lab")
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "file" / "cache"))
    failed = run_torino("ask", "astronaut", "what ?", code=2)
    assert "torino: Cannot use the cache folder" in failed.err


# ---------------------------------------------------------------------- messages


def test_a_decoder_of_nan_is_refused_by_every_command(home: Path, tmp_path: Path) -> None:
    folder = make_sae().save(tmp_path / "sae")
    tensors, metadata = read_safetensors(folder / "sae.safetensors")
    tensors["W_dec"][0, 0] = float("nan")
    write_arrays(folder / "sae.safetensors", tensors, {k: v for k, v in metadata.items() if k != "checksum"})
    for words in (("info", folder), ("reduce", "--sae", folder), ("calibrate", "--sae", folder)):
        assert "contains NaN or infinite values" in run_torino(*words, code=2).err


def test_a_budget_above_the_patches_is_an_error(home: Path) -> None:
    words = ("compare", home / "photo…é.png", "what ?", "--model", home / "llava", "--methods", "random")
    failed = run_torino(*words, "--budget", "600", "--device", "cpu", code=2)
    assert "asks for 600 tokens, more than the 16 patches of the image" in failed.err
    assert failed.out == ""


def test_a_long_question_is_refused_before_any_work(home: Path) -> None:
    words = ("ask", home / "photo…é.png", "why " * 50_000, "--model", home / "llava", "--device", "cpu")
    failed = run_torino(*words, "--method", "random", "--budget", "6", code=2)
    assert "this model reads at most" in failed.err
    assert len(failed.err) < 300


def test_calibrate_shows_progress_and_the_nearest_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torino.cli.calibrate.progress", _every_line)
    done = run_torino("calibrate", "--sae", "example", "--max-k", "9")
    assert "settings 2/45" in done.err
    assert "The 30 nearest of 45 settings." in done.out


def _every_line(console: Any) -> Any:
    from torino.cli._progress import progress

    return progress(console, interval=0.0)


def test_an_unknown_family_names_the_command_that_lists_families() -> None:
    model: Any = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="llama-vision-x", vision_config=SimpleNamespace())
    with pytest.raises(UnknownName, match=r"No model family is called 'llama-vision-x'.*Run 'torino list models'"):
        adapter_for(model)
    assert "llava" in run_torino("list", "models").out
