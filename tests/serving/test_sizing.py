"""The sizing formula, and its numbers in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torino.core.errors import BadParameter
from torino.serving.sizing import Accelerator, LlavaShape, MeasuredCosts, estimate, predicted_gain

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serve.md"


def test_the_table_of_the_guide() -> None:
    row = r"^\| (\d+), (\d+) \| (\d+) → (\d+) \| ([\d.]+) → ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for text, answer, *numbers in rows:
        full, reduced = (estimate(tokens, int(text), int(answer)) for tokens in (576, 128))
        gain = reduced.requests_per_second / full.requests_per_second
        expected = [full.batch, reduced.batch, full.requests_per_second, reduced.requests_per_second, gain]
        assert [float(number) for number in numbers] == pytest.approx(expected, abs=0.051)


def test_cache_and_bounds() -> None:
    assert LlavaShape().kv_bytes == 2**19
    assert 576 * LlavaShape().kv_bytes == 288 * 2**20
    assert estimate(128, 60, 128).kv_bytes == 316 * 2**19
    assert estimate(64, 60, 16, most=100).batch == 100
    with pytest.raises(BadParameter, match="more key-value cache"):
        estimate(576, 60, 128, device=Accelerator(memory=19.7e9))
    with pytest.raises(BadParameter):
        estimate(0, 60, 128)


def test_fewer_tokens_gain_more_the_shorter_the_answer() -> None:
    gains = [
        estimate(128, 60, answer).requests_per_second / estimate(576, 60, answer).requests_per_second
        for answer in (16, 128, 512)
    ]
    assert gains == sorted(gains, reverse=True)


def test_measured_costs() -> None:
    full = MeasuredCosts(first=0.9, step=0.02, token=0.001)
    reduced = MeasuredCosts(first=0.31, step=0.02, token=0.001)
    assert full.requests_per_second(1, 1) == pytest.approx(1 / 0.9)
    assert full.requests_per_second(4, 11) == pytest.approx(1 / (0.9 + 10 * 0.023 / 4))
    assert predicted_gain(reduced, full, 8, 1) == pytest.approx(0.9 / 0.31)
    assert predicted_gain(reduced, full, 1, 1000) < 1.05
