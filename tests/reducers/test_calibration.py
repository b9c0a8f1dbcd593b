"""Calibration of (k, δ): the chosen setting is the nearest one and gives the reported lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torino import SAE, RawEmbedding, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, SAEMismatch
from torino.core.tokens import Origin
from torino.reducers.calibration import Calibration, calibrate
from torino.sae import SAECard

ALL = [(k, delta) for k in range(1, 5) for delta in range(1, k + 1)]


def images(seed: int = 0, count: int = 3) -> list[VisualTokens]:
    g = torch.Generator().manual_seed(seed)
    grids = [(4, 4), (3, 5), (2, 2), (1, 7)][:count]
    return [
        VisualTokens(torch.randint(-2, 4, (rows * columns, 8), generator=g).float(), (rows, columns))
        for rows, columns in grids
    ]


@pytest.mark.parametrize("silent", ["group", "keep", "literal"])
@pytest.mark.parametrize("rank", ["activation", "pre-threshold"])
def test_table_equals_the_lengths_of_the_reducers(silent: Any, rank: Any) -> None:
    sae = SAE(torch.eye(8), kind="batchtopk", threshold=1.0)
    calibration = calibrate(images(), 5, sae=sae, max_k=4, silent=silent, rank=rank)
    assert sorted(calibration.table) == sorted(ALL)
    for (k, delta), counts in calibration.table.items():
        for name in ("torino-p", "torino-m"):
            plans = make(name, sae=sae, k=k, delta=delta, silent=silent, rank=rank).plan_batch(images())
            assert counts.tolist() == plans.lengths.tolist()


@given(st.integers(0, 1000), st.one_of(st.integers(1, 20), st.floats(1, 20)))
def test_nearest_setting_is_chosen(seed: int, target: float) -> None:
    calibration = calibrate(images(seed), target, sae=RawEmbedding(), max_k=4)
    distance = {key: abs(sum(counts.tolist()) / 3 - target) for key, counts in calibration.table.items()}
    best = min(distance.values())
    assert (calibration.k, calibration.delta) == min(
        key for key, value in distance.items() if math.isclose(value, best)
    )
    assert torch.equal(calibration.counts, calibration.table[calibration.k, calibration.delta])
    assert calibration.target == target
    assert calibration.mean == pytest.approx(sum(calibration.counts.tolist()) / 3)


def test_ties_go_to_the_smaller_k_then_the_smaller_delta() -> None:
    single_patch = [VisualTokens(torch.eye(4)[:1], (1, 1))]  # one token with every setting
    calibration = calibrate(single_patch, 3, sae=RawEmbedding(), max_k=4)
    assert (calibration.k, calibration.delta) == (1, 1)
    assert all(counts.tolist() == [1] for counts in calibration.table.values())


def test_concepts_are_computed_once() -> None:
    class Counting:
        calls: list[tuple[int, int]]

        def __init__(self) -> None:
            self.calls = []

        def top(self, x: Tensor, k: int, *, rank: Any = "activation") -> Any:
            self.calls.append((len(x), k))
            return RawEmbedding().top(x, k, rank=rank)

        def check_origin(self, origin: Origin, width: int) -> None:
            pass

    sae = Counting()
    calibrate(images(), 4, sae=sae, max_k=3)
    assert sae.calls == [(16 + 15 + 4, 3)]


def test_repr_and_quantiles() -> None:
    calibration = Calibration(2, 1, 10.0, torch.tensor([4, 8, 9, 10, 30]), {})
    assert calibration.mean == pytest.approx(12.2)
    assert calibration.quantiles(0.0, 0.5, 1.0) == [4.0, 9.0, 30.0]
    text = repr(calibration)
    for words in ("k=2, delta=1", "12.2 tokens on average", "target of 10", "50th and 90th", "4 to 30"):
        assert words in text


@pytest.mark.parametrize("target", [0, 0.5, -3, math.nan])
def test_target_below_one_raises(target: float) -> None:
    with pytest.raises(BadParameter, match="target must be at least 1 token per image, got"):
        calibrate(images(), target, sae=RawEmbedding())


@pytest.mark.parametrize("max_k", [0, -1])
def test_max_k_below_one_raises(max_k: int) -> None:
    with pytest.raises(BadParameter, match=f"max_k must be at least 1, got {max_k}"):
        calibrate(images(), 4, sae=RawEmbedding(), max_k=max_k)


def test_invalid_arguments() -> None:
    with pytest.raises(BadTokens, match="list of images is empty"):
        calibrate([], 4, sae=RawEmbedding())
    assert max(k for k, _ in calibrate(images(), 4, sae=RawEmbedding(), max_k=9).table) == 8  # the width of the tokens
    with pytest.raises(BadParameter, match="silent must be one of"):
        calibrate(images(), 4, sae=RawEmbedding(), silent="drop")  # type: ignore[arg-type]
    clip = images()[0].with_(origin=Origin("clip", 3))
    with pytest.raises(SAEMismatch, match=r"siglip.*clip"):
        calibrate([clip], 4, sae=SAE(torch.eye(8), card=SAECard(encoder="siglip")))
