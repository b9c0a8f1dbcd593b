"""The command, as a person types it: in its own process, with its exit code and its sentences."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

from torino import SAE, RawEmbedding, Reduction, VisualTokens, make
from torino.cli.main import main
from torino.core.io import read_arrays
from torino.core.reduction import ReductionBatch
from torino.core.tokens import load_tokens, save_tokens
from torino.datasets.bundled import example_folder, example_sae, example_tokens


@pytest.fixture(autouse=True)
def _wide_and_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", "160"), ("HF_HUB_OFFLINE", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)


def torino(*words: str | Path, code: int = 0) -> str:
    """Run the command in this process: its output, or its errors where a code other than 0 is expected."""
    said, complained = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setattr(sys, "argv", ["torino", *map(str, words)])
        try:
            main()
            ended = 0
        except SystemExit as stop:
            ended = int(stop.code or 0)
    assert ended == code, said.getvalue() + complained.getvalue()
    return complained.getvalue() if code else said.getvalue()


def test_the_command_itself() -> None:
    """One real process: the entry point, the exit code, a sentence and no traceback."""
    done = subprocess.run([sys.executable, "-m", "torino", "reduce", "--k", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("torino: k must be a whole number")
    assert "Traceback" not in done.stderr


def test_help_shows_examples() -> None:
    assert "reduce" in torino("--help")
    for command in ("list", "info", "reduce", "calibrate", "export"):
        assert f"torino {command}" in torino(command, "--help"), f"torino {command} --help has no example"


def test_list_and_version() -> None:
    assert "torino-m" in torino("list")
    rows = json.loads(torino("list", "reducers", "--json"))
    assert {row["name"] for row in rows} >= {"torino-m", "torino-p"}
    assert "saelens" in torino("list", "layouts")
    assert torino("--version").startswith("torino 0.")


def test_info() -> None:
    assert "matryoshka" in torino("info", "example")
    facts = json.loads(torino("info", example_folder() / "sae", "--json"))
    assert (facts["width"], facts["latents"], facts["block"]) == (384, 1536, 10)
    assert facts["threshold"] > 0


def test_demo_reduces_the_bundled_photos(tmp_path: Path) -> None:
    target = tmp_path / "reduced.npz"
    said = torino("reduce", "--explain", "2", "-o", target)
    for word in ("astronaut", "rocket", "mean", "most common concept", "Wrote"):
        assert word in said
    batch = ReductionBatch.load(target)
    images = example_tokens()
    tokens = read_arrays(target)[0]["tokens"]
    again = batch.apply([image.patches for image in images])
    assert torch.equal(tokens, again.values)
    assert batch[0].by == "torino-m(k=2, delta=2)"


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_reduce_own_tokens(tmp_path: Path, ending: str) -> None:
    images = [image.with_(patches=image.patches[:48], grid=(6, 8)) for image in example_tokens()[:2]]
    source, target = tmp_path / f"tokens.{ending}", tmp_path / f"out.{ending}"
    save_tokens(images, source)
    said = torino("reduce", source, "--sae", "example", "--method", "torino-p", "--keep", "25%", "-o", target)
    assert "image 1" in said
    batch = ReductionBatch.load(target)
    assert batch.lengths.tolist() == [12, 12]
    assert batch[0].by == "torino-p(k=2, delta=2, budget=12)"


def test_method_can_be_a_spec_and_options_overrule_it(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    torino("reduce", "--method", "torino-m(k=3, delta=1, scale='mean')", "--delta", "3", "-o", target)
    assert ReductionBatch.load(target)[0].by == "torino-m(k=3, delta=3, scale='mean')"


def test_raw_and_levels(tmp_path: Path) -> None:
    assert "torino-m" in torino("reduce", "--sae", "raw", "--k", "1", "--delta", "1")
    assert "torino-m" in torino("reduce", "--levels", "2")


def test_picture_is_drawn_on_demand() -> None:
    assert "▀" in torino("reduce", "--picture")
    assert "▀" not in torino("reduce")


def test_calibrate() -> None:
    said = torino("calibrate", "--target", "100", "--max-k", "3")
    assert "Nearest to 100" in said
    assert "--delta" in said


def test_calibrate_the_cover() -> None:
    said = " ".join(torino("calibrate", "--method", "torino-x", "--target", "100").split())
    assert re.search(
        r"torino-x\(min_gain=0\.\d+, locality=0\.2, proportional=True\), 100\.0 tokens on average over 4 images", said
    )
    given = "torino-x(concepts=2, mode='prune', budget=9)"
    said = " ".join(torino("calibrate", "--method", given, "--target", "100").split())
    (spec, mean) = re.findall(r"Nearest to 100: (torino-x\(.*?\)), ([\d.]+) tokens", said)[0]
    made = make(spec, sae=example_sae())
    assert made.spec == spec
    assert float(made.plan_batch(example_tokens()).lengths.double().mean()) == pytest.approx(float(mean), abs=0.05)


def test_reduce_shares_a_pooled_budget_among_all_images(tmp_path: Path) -> None:
    rich, flat = torch.eye(8), torch.eye(8)[[0] * 8]
    images = [VisualTokens(patches, (2, 4)) for patches in [flat] * 16 + [rich] * 4]
    save_tokens(images, tmp_path / "tokens.npz")
    said = torino(
        "reduce",
        tmp_path / "tokens.npz",
        "--sae",
        "raw",
        "--method",
        "torino-x(budget=2, pooled=True)",
        "-o",
        tmp_path / "out.npz",
    )
    assert "40 tokens" in said
    wanted = make("torino-x(budget=2, pooled=True)", sae=RawEmbedding()).plan_batch(images)
    assert torch.equal(ReductionBatch.load(tmp_path / "out.npz").lengths, wanted.lengths)


def test_export_round_trip(tmp_path: Path) -> None:
    weights = torch.eye(6)[:, :4]
    SAE(weights, W_dec=weights.clone(), kind="matryoshka", k=2, threshold=0.5, groups=(2, 4)).save(tmp_path / "sae")
    torino("export", tmp_path / "sae", tmp_path / "dl", "--layout", "dictionary_learning")
    facts = json.loads(torino("info", tmp_path / "dl", "--json"))
    assert facts["groups"] == [2, 4]


def _tokens(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_mistakes_get_a_sentence_and_code_2(tmp_path: Path) -> None:
    good = save_tokens([VisualTokens.of(torch.randn(4, 384))], tmp_path / "good.npz")
    narrow = save_tokens([VisualTokens.of(torch.randn(4, 8))], tmp_path / "narrow.npz")
    nan = _tokens(tmp_path / "nan.npz", patches=np.full((4, 384), np.nan, np.float32))
    whole = _tokens(tmp_path / "whole.npz", patches=np.ones((4, 384), np.int64))
    nameless = _tokens(tmp_path / "nameless.npz", other=np.ones((4, 384), np.float32))
    cut = tmp_path / "cut.npz"
    cut.write_bytes(good.read_bytes()[:100])
    foreign = save_tokens(
        [
            image.with_(origin=type(image.origin)("openai/clip-vit-large-patch14-336", 22))
            for image in load_tokens(good)
        ],
        tmp_path / "foreign.npz",
    )
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("reduce", tmp_path / "none.npz", "--sae", "example"), "no file"),
        (("reduce", good), "--sae"),
        (("reduce", narrow, "--sae", "example"), "384-wide"),
        (("reduce", foreign, "--sae", "example"), "clip-vit-large"),
        (("reduce", nan, "--sae", "example"), "NaN"),
        (("reduce", whole, "--sae", "example"), "floating point"),
        (("reduce", nameless, "--sae", "example"), "patches"),
        (("reduce", cut, "--sae", "example"), "readable"),
        (("reduce", "--method", "torino"), "torino-p"),
        (("reduce", "--k", "2", "--delta", "3"), "delta must be between 1 and k=2"),
        (("reduce", "--k", "9999", "--delta", "1"), "1536 latents"),
        (("reduce", "--budget", "0"), "budget"),
        (("reduce", "--budget", "577", "--method", "torino-p"), "cannot give 577"),
        (("reduce", "--keep", "lots"), "25%"),
        (("reduce", "--keep", "25%", "--budget", "3"), "not both"),
        (("reduce", "-o", tmp_path / "out.txt"), ".npz"),
        (("reduce", "--levels", "9"), "levels"),
        (("info", "owner/of-nothing-at-all"), "owner/of-nothing-at-all"),
        (("info", tmp_path), "No SAE|no SAE"),
        (("list", "everything"), "everything"),
        (("calibrate", "--target", "0"), "target"),
        (("calibrate", "--method", "tome"), "torino-p, torino-m or torino-x, got 'tome'"),
        (("export", "example", tmp_path / "x", "--layout", "onnx"), "onnx"),
    ]
    for words, expected in cases:
        said = torino(*words, code=2)
        assert re.search(expected, said), f"{words}: {said}"
        assert len(said) < 700


def test_saved_reduction_is_readable_alone(tmp_path: Path) -> None:
    images = example_tokens()[:1]
    save_tokens(images, tmp_path / "one.npz")
    torino("reduce", tmp_path / "one.npz", "--sae", "example", "-o", tmp_path / "out.npz")
    assert len(Reduction.load(tmp_path / "out.npz")) < 576
