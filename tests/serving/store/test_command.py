"""``torino reduce`` on images: what it prints, what it refuses, and how it tells images from token files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_torino
from tests.support.lab import needs_weights
from tests.support.stores import store_bytes
from torino.cli import _progress
from torino.core.tokens import save_tokens
from torino.datasets.bundled import example_tokens
from torino.serving.store import TokenStore


@pytest.fixture
def words(home: Path) -> list[str | Path]:
    sae: list[str | Path] = ["--model", home / "llava", "--sae", home / "sae", "--method", "torino-x"]
    return [home / "photos", *sae, "--store-dtype", "float32", "--batch", "3", "--shard-images", "4"]


def test_images_are_written_to_a_store_and_the_command_continues(
    tmp_path: Path, reference: Path, words: list[Any]
) -> None:
    folder = tmp_path / "store"
    text = run_torino("reduce", *words, "-o", folder).text
    assert "20 images: 246 tokens of width 32, 12.3 of 16 per image (23.1% removed), by torino-x(" in text
    assert f"in 6 shards of {folder}, " in text
    assert " images/s." in text
    assert f"2 images could not be used, see {folder}/skipped.txt. The first, 05.png: " in text
    assert store_bytes(folder) == store_bytes(reference)
    (folder / "shards" / "00001.safetensors").unlink()
    assert "images/s" in run_torino("reduce", *words, "-o", folder).text
    assert "already complete" in run_torino("reduce", *words, "-o", folder).text
    assert store_bytes(folder) == store_bytes(reference)


def test_parts_are_counted_from_1(tmp_path: Path, reference: Path, words: list[Any]) -> None:
    text = run_torino("reduce", *words, "--shard", "1/2", "-o", tmp_path / "store").text
    assert "This is part 1/2. The store is complete when the other parts are written too." in text
    assert "This is part" not in run_torino("reduce", *words, "--shard", "2/2", "-o", tmp_path / "store").text
    assert store_bytes(tmp_path / "store") == store_bytes(reference)


def test_progress_has_rate_and_remaining_time_when_piped(
    tmp_path: Path, words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress.progress.__wrapped__, "__kwdefaults__", {"interval": 0.0})  # type: ignore[attr-defined]
    lines = run_torino("reduce", *words, "-o", tmp_path / "store").err.splitlines()
    shown = [line for line in lines if line.startswith("images ")]
    assert any(line.startswith("images 12/22, ") and " left, " in line and "/s" in line for line in shown), lines
    assert "1 skipped" in shown[-1] or "2 skipped" in shown[-1]


def test_kd_and_keep_select_the_method(home: Path, tmp_path: Path) -> None:
    options = ("--model", home / "llava", "--limit", "3")
    run_torino("reduce", home / "photos", *options, "--sae", home / "sae", "--kd", "2,1", "-o", tmp_path / "kd")
    assert TokenStore(tmp_path / "kd").settings.method == "torino-m(k=2, delta=1)"
    run_torino("reduce", home / "photos", *options, "--method", "divprune", "--keep", "25%", "-o", tmp_path / "keep")
    assert TokenStore(tmp_path / "keep").lengths.tolist() == [4, 4, 4]
    run_torino("reduce", home / "photos", *options, "--method", "none", "-o", tmp_path / "all")
    assert TokenStore(tmp_path / "all").lengths.tolist() == [16, 16, 16]


def test_other_settings_are_refused_with_one_sentence(tmp_path: Path, reference: Path, words: list[Any]) -> None:
    shutil.copytree(reference, tmp_path / "store")
    text = run_torino("reduce", *words, "--budget", "6", "-o", tmp_path / "store", code=2).text
    assert "was started with torino-x(" in text
    assert "Use the same settings and images to continue, or another folder." in text
    assert store_bytes(tmp_path / "store") == store_bytes(reference)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["-o", "out.npz"], "out.npz is a file, and images are written to a folder. Give -o FOLDER."),
        ([], "Reduced images are written to a folder. Give it with -o"),
        (["-o", "new", "--explain", "2"], "--explain is for token files, not for images. Omit it."),
        (["-o", "new", "--levels", "2"], "--levels is for token files, not for images. Omit it."),
        (["-o", "new", "--shard", "0/2"], "--shard takes i/n with i from 1 to n, such as 1/4, got '0/2'."),
        (["-o", "new", "tokens.npz"], "tokens.npz holds tokens and "),
        (["-o", "new", "--budget", "6", "--keep", "25%"], "budget and keep exclude each other."),
        (["-o", "new", "--method", "torino-m(k=2)", "--kd", "2,2"], "Give --kd, or options in brackets"),
        (["-o", "new", "--model", "missing/folder/x"], "There is no folder 'missing/folder/x'"),
        (["-o", "new", "missing"], "There are no photos at "),
    ],
)
def test_wrong_combinations_are_refused(
    tmp_path: Path, words: list[Any], extra: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run_torino("reduce", *words, *extra, code=2).text
    assert not (tmp_path / "new" / "manifest.json").exists()


def test_options_for_images_are_refused_for_tokens(tmp_path: Path) -> None:
    tokens = save_tokens(example_tokens()[:1], tmp_path / "tokens.npz")
    text = run_torino("reduce", tokens, "--sae", "example", "--model", "lab", code=2).text
    assert "--model is for images, which are folders, image files, .parquet or .tar files. Omit it." in text
    assert "--shard is for images" in run_torino("reduce", "--shard", "1/2", code=2).text
    assert "Give one token file at a time, got 2" in run_torino("reduce", tokens, tokens, code=2).text


def test_a_method_that_reads_concepts_needs_an_sae(home: Path, tmp_path: Path) -> None:
    text = run_torino("reduce", home / "photos", "--model", home / "llava", "-o", tmp_path / "store", code=2).text
    assert "torino-x reads concepts and needs an SAE" in text


@needs_weights
def test_bundled_photos_can_be_given_by_name(tmp_path: Path) -> None:
    text = run_torino("reduce", "astronaut", "coffee", "--budget", "30", "-o", tmp_path / "store").text
    assert "2 images: 60 tokens of width 576, 30.0 of 196 per image" in text
    assert TokenStore(tmp_path / "store").names == ["astronaut.jpg", "coffee.jpg"]
