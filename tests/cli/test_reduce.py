"""The command ``torino reduce``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.command import run_torino
from tests.support.lab import needs_weights
from torino import RawEmbedding, Reduction, VisualTokens, make
from torino.core.io import read_arrays
from torino.core.reduction import ReductionBatch
from torino.core.tokens import load_tokens, save_tokens
from torino.datasets.bundled import example_tokens


def test_the_bundled_photos_are_reduced_by_default(tmp_path: Path) -> None:
    target = tmp_path / "reduced.npz"
    text = run_torino("reduce", "--sae", "example", "--explain", "2", "-o", target).out
    for word in ("astronaut", "rocket", "mean", "most common concept", "Wrote"):
        assert word in text
    batch = ReductionBatch.load(target)
    images = example_tokens()
    tokens = read_arrays(target)[0]["tokens"]
    again = batch.apply([image.patches for image in images])
    assert torch.equal(tokens, again.values)
    assert batch[0].by == "torino-x(locality=0.2, proportional=True)"


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_reduce_own_tokens(tmp_path: Path, suffix: str) -> None:
    images = [image.with_(patches=image.patches[:48], grid=(6, 8)) for image in example_tokens()[:2]]
    source, target = tmp_path / f"tokens.{suffix}", tmp_path / f"out.{suffix}"
    save_tokens(images, source)
    options = ("--sae", "example", "--method", "torino-p", "--keep", "25%", "-o", target)
    assert "image 1" in run_torino("reduce", source, *options).out
    batch = ReductionBatch.load(target)
    assert batch.lengths.tolist() == [12, 12]
    assert batch[0].by == "torino-p(k=2, delta=2, budget=12)"


def test_method_can_be_a_spec_and_options_override_it(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    method = "torino-m(k=3, delta=1, scale='mean')"
    run_torino("reduce", "--sae", "example", "--method", method, "--kd", "3,3", "-o", target)
    assert ReductionBatch.load(target)[0].by == "torino-m(k=3, delta=3, scale='mean')"


def test_without_an_sae_and_with_levels() -> None:
    assert "torino-m(k=1, delta=1)" in run_torino("reduce", "--sae", "none", "--kd", "1,1").out
    assert "torino-x" in run_torino("reduce", "--sae", "example", "--levels", "2").out


def test_a_method_without_concepts_needs_no_sae(tmp_path: Path) -> None:
    tokens = save_tokens(example_tokens()[:1], tmp_path / "one.npz")
    assert "divprune(budget=9)" in run_torino("reduce", tokens, "--method", "divprune", "--budget", "9").out
    assert "divprune(budget=9)" in run_torino("reduce", "--method", "divprune", "--budget", "9").out


def test_groups_are_drawn_on_demand(tmp_path: Path) -> None:
    assert "▀" in run_torino("reduce", "--sae", "example", "--picture").out
    assert "▀" not in run_torino("reduce", "--sae", "example").out
    run_torino("reduce", "--sae", "example", "--draw", tmp_path / "groups.png")
    assert (tmp_path / "groups.png").stat().st_size > 10_000


def test_more_tokens_than_patches_are_said_to_be_added() -> None:
    text = run_torino("reduce", "--sae", "example", "--method", "torino-m", "--budget", "577").text
    assert "576 577 0.2% added" in text
    assert "-0.2%" not in text


@needs_weights
def test_the_same_photo_has_the_same_tokens_in_all_commands(tmp_path: Path) -> None:
    look = run_torino("look", "astronaut", "--kd", "2,2", "-o", tmp_path / "look.png", "--json")
    tokens = json.loads(look.out)["settings"][0]["tokens"]
    run_torino("reduce", "--kd", "2,2", "-o", tmp_path / "reduced.npz")
    reduced = ReductionBatch.load(tmp_path / "reduced.npz")
    assert len(reduced[0]) == tokens
    words = (
        "ask",
        "astronaut",
        "Is there a person?",
        "--kd",
        "2,2",
        "--no-baseline",
        "--max-new-tokens",
        "1",
        "--json",
    )
    assert json.loads(run_torino(*words).out)["image_tokens"]["after"] == tokens
    mean = float(reduced.lengths.double().mean())
    assert re.search(rf"2 +2 +{mean:.1f} ", run_torino("calibrate", "--target", "100", "--max-k", "2").out)
    words = ("bench", "--methods", "torino-m", "--budget", "none", "--kd", "2,2", "--count", "4", "--warmups", "0")
    run_torino(*words, "--device", "cpu", "-o", tmp_path / "bench.json")
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["tokens"] == pytest.approx(mean, abs=0.01)


@needs_weights
def test_the_tower_gives_the_signals_that_the_stored_tokens_lack() -> None:
    assert "visionzip(budget=9) on 4 images" in run_torino("reduce", "--method", "visionzip", "--budget", "9").out


def test_without_the_model_package_the_stored_tokens_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torino.vlm.loading.model_packages", dict)
    assert "127" in run_torino("reduce", "--kd", "2,2").out
    assert re.search(r"2 +2 +88\.2 ", run_torino("calibrate", "--target", "100", "--max-k", "2").out)


def test_all_images_share_a_pooled_budget(tmp_path: Path) -> None:
    rich, flat = torch.eye(8), torch.eye(8)[[0] * 8]
    images = [VisualTokens(patches, (2, 4)) for patches in [flat] * 16 + [rich] * 4]
    source = save_tokens(images, tmp_path / "tokens.npz")
    method = "torino-x(budget=2, pooled=True)"
    output = run_torino("reduce", source, "--sae", "none", "--method", method, "-o", tmp_path / "out.npz")
    assert "40 tokens" in output.out
    wanted = make(method, sae=RawEmbedding()).plan_batch(images)
    assert torch.equal(ReductionBatch.load(tmp_path / "out.npz").lengths, wanted.lengths)


def test_saved_reduction_of_one_image_is_readable_alone(tmp_path: Path) -> None:
    save_tokens(example_tokens()[:1], tmp_path / "one.npz")
    run_torino("reduce", tmp_path / "one.npz", "--sae", "example", "-o", tmp_path / "out.npz")
    assert len(Reduction.load(tmp_path / "out.npz")) < 576


def write_arrays(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    good = save_tokens([VisualTokens.of(torch.randn(4, 384))], tmp_path / "good.npz")
    narrow = save_tokens([VisualTokens.of(torch.randn(4, 8))], tmp_path / "narrow.npz")
    nan = write_arrays(tmp_path / "nan.npz", patches=np.full((4, 384), np.nan, np.float32))
    whole = write_arrays(tmp_path / "whole.npz", patches=np.ones((4, 384), np.int64))
    nameless = write_arrays(tmp_path / "nameless.npz", other=np.ones((4, 384), np.float32))
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
        ((tmp_path / "none.npz", "--sae", "example"), "no file"),
        ((good,), "--sae"),
        ((narrow, "--sae", "example"), "width 384"),
        ((foreign, "--sae", "example"), "clip-vit-large"),
        ((nan, "--sae", "example"), "NaN"),
        ((whole, "--sae", "example"), "floating point"),
        ((nameless, "--sae", "example"), "patches"),
        ((cut, "--sae", "example"), "readable"),
        (("--method", "torino"), "torino-p"),
        (("--method", "none"), "nothing to reduce"),
        (("--method", "divprune", "--sae", "example"), "reads no concepts"),
        (("--kd", "2,3"), "--kd takes k,delta with delta from 1 to k"),
        (("--kd", "2"), "--kd takes k,delta"),
        (("--sae", "example", "--kd", "9999,1"), "between 1 and 1536, the number of latents; got 9999"),
        (("--sae", "example", "--budget", "577", "--method", "torino-p"), "cannot give 577"),
        (("--keep", "lots"), "25%"),
        (("--keep", "25%", "--budget", "3"), "not both"),
        (("-o", tmp_path / "out.txt"), ".npz"),
        (("--draw", tmp_path / "out.txt"), ".png"),
        (("--levels", "9"), "levels"),
        (("--levels", "2", "--sae", "none"), "--levels"),
    ]
    for words, expected in cases:
        output = run_torino("reduce", *words, code=2)
        assert output.err.startswith("torino: "), words
        assert expected in output.text, f"{words}: {output.err}"
        assert len(output.err) < 700
    usage = run_torino("reduce", "--budget", "0", code=2)
    assert "Invalid value for '--budget'" in usage.text
