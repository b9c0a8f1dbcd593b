"""Commands that only read a file or folder work if it cannot be changed, and do not change it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import planted_dictionary as planted
from tests.support.command import run_torino
from tests.support.files import read_only
from tests.support.tiny_run import make_sae, write_task_file
from tests.support.tiny_towers import write_photos, write_tower
from tests.support.tiny_vlm import build_llava
from torino import SAE
from torino.core.tokens import save_tokens
from torino.datasets.bundled import example_sae, example_tokens


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SAE that is large enough for the int8 prefilter, one for a tiny model, tokens, a model and a task."""
    folder = tmp_path_factory.mktemp("inputs")
    small = example_sae()
    rows = small.W_enc.repeat(8, 1)
    large = SAE(rows, W_dec=rows, kind="relu", b_dec=small.b_dec, card=small.card)
    large.names = {0: "sky"}
    large.save(folder / "large")
    make_sae().save(folder / "sae")
    save_tokens([image for image in example_tokens() for _ in range(3)], folder / "tokens.safetensors")
    build_llava(folder / "llava")
    write_task_file(folder / "small.tsv", images=1)
    return folder


def test_commands_on_an_sae(inputs: Path, tmp_path: Path) -> None:
    tokens, sae = inputs / "tokens.safetensors", inputs / "large"
    with read_only(inputs):
        run_torino("info", sae)
        run_torino("export", sae, tmp_path / "exported", "--layout", "saelens")
        run_torino("reduce", tokens, "--sae", sae, "-o", tmp_path / "reduced.safetensors")
        run_torino("calibrate", tokens, "--sae", sae, "--max-k", "2")
        size = ("--count", "2", "--warmups", "0", "--budget", "64", "--kd", "none")
        run_torino(
            "bench", "--tokens", tokens, "--sae", sae, "--methods", "torino-m", "--prefilter", "int8", *size,
            "-o", tmp_path / "bench.json",
        )  # fmt: skip
    assert torch.equal(SAE.load(tmp_path / "exported").W_enc, SAE.load(sae).W_enc)


def test_eval(inputs: Path, tmp_path: Path) -> None:
    with read_only(inputs):
        run_torino(
            "eval", "--model", inputs / "llava", "--sae", f"s={inputs / 'sae'}", "--tasks", inputs / "small.tsv",
            "--methods", "torino-m", "--kd", "2,2", "--budget", "6", "--device", "cpu", "-o", tmp_path / "run",
        )  # fmt: skip
    with read_only(inputs, tmp_path / "run"):
        run_torino("report", tmp_path / "run", "--draws", "100", "--no-figures", "-o", tmp_path / "report")


def test_store(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    tower, photos = write_tower(tmp_path / "tower"), write_photos(tmp_path / "photos")
    store = tmp_path / "store"
    with read_only(tower, photos):
        run_torino("activations", "--tower", tower, "--block", "1", "--images", photos, "--device", "cpu", "-o", store)
    with read_only(tower, photos, store):
        run_torino("activations", "-o", store, "--check")
        run_torino(
            "train", store, "-o", tmp_path / "sae", "--steps", "4", "--batch", "16", "--expansion", "1", "--k", "2"
        )
    with read_only(tower, photos, tmp_path / "sae"):
        given = ("--images", photos, "--tower", tower, "--keep", "3", "--device", "cpu")
        refused = run_torino("concepts", tmp_path / "sae", *given, code=2)
        assert "is read-only, so give a folder for the results: -o FOLDER" in refused.text
        run_torino("concepts", tmp_path / "sae", *given, "-o", tmp_path / "concepts")


def test_a_finished_training_run_is_loaded(tmp_path: Path) -> None:
    planted.run_training(str(tmp_path / "sae"))
    with read_only(tmp_path / "sae"):
        assert SAE.load(tmp_path / "sae").latents == 128
