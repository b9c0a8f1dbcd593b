"""The command ``torino calibrate``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.command import run_torino
from torino import VisualTokens, make
from torino.core.tokens import save_tokens
from torino.datasets.bundled import example_sae, example_tokens


def test_calibrate_k_and_delta() -> None:
    output = run_torino("calibrate", "--sae", "example", "--target", "100", "--max-k", "3")
    match = re.search(r"Closest to 100: --kd (\d),(\d), ([\d.]+) tokens on average\.", output.text)
    assert match is not None, output.out
    k, delta, mean = int(match[1]), int(match[2]), float(match[3])
    lengths = make("torino-m", k=k, delta=delta, sae=example_sae()).plan_batch(example_tokens()).lengths
    assert float(lengths.double().mean()) == pytest.approx(mean, abs=0.05)
    assert "tokens per image over 4 images" in output.out


def test_calibrate_the_threshold_of_torino_x() -> None:
    text = run_torino("calibrate", "--sae", "example", "--method", "torino-x", "--target", "100").text
    assert re.search(
        r"torino-x\(min_gain=0\.\d+, locality=0\.2, proportional=True\), 100\.0 tokens on average over 4 images", text
    )
    method = "torino-x(concepts=2, mode='prune', budget=9)"
    text = run_torino("calibrate", "--sae", "example", "--method", method, "--target", "100").text
    (spec, mean) = re.findall(r"Closest to 100: (torino-x\(.*?\)), ([\d.]+) tokens", text)[0]
    reducer = make(spec, sae=example_sae())
    assert reducer.spec == spec
    assert float(reducer.plan_batch(example_tokens()).lengths.double().mean()) == pytest.approx(float(mean), abs=0.05)


def test_calibrate_without_an_sae(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    tokens = save_tokens([VisualTokens.of(torch.randn(16, 8, generator=source))], tmp_path / "tokens.npz")
    assert "Closest to 5: --kd " in run_torino("calibrate", tokens, "--sae", "none", "--target", "5").text


def test_errors(tmp_path: Path) -> None:
    tokens = save_tokens([VisualTokens.of(torch.randn(16, 384))], tmp_path / "tokens.npz")
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("--sae", "example", "--target", "0"), "target"),
        (("--method", "tome"), "torino-p, torino-m or torino-x, got 'tome'"),
        (("--max-k", "0"), "--max-k"),
        ((tokens,), "--sae"),
        ((tmp_path / "none.npz", "--sae", "example"), "no file"),
    ]
    for words, expected in cases:
        output = run_torino("calibrate", *words, code=2)
        assert expected in output.text, words
        assert len(output.text) < 700
