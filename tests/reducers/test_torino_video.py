"""TORINO over time: sparse coverage equals the dense rule, groups over frames, and length that follows the content."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.clips import clip, cuts, pan, scene, still
from torino import RawEmbedding, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, UnmetBudget
from torino.core.grouping import group_by_overlap
from torino.core.tokens import split_frames
from torino.reducers import KeepShare, TorinoX
from torino.reducers._sparse_coverage import TIE, time_factors
from torino.reducers.torino_x import greedy_coverage
from torino.testing import check_reducer, same_plan

RAW = RawEmbedding()
CASES, PARTS = 2000, 8


def random_video(seed: int) -> tuple[VisualTokens, Concepts, np.random.Generator]:
    """Return a small random video with codes; odd seeds have many ties, and some patches are silent."""
    rng = np.random.default_rng(seed)
    frames, rows, columns = rng.integers(1, 7), rng.integers(1, 5), rng.integers(1, 5)
    n, k = int(frames * rows * columns), int(rng.integers(1, 5))
    latents = int(rng.integers(k, 12))
    indices = np.stack([rng.permutation(latents)[:k] for _ in range(n)])
    values = (rng.integers(1, 4, (n, k)) if seed % 2 else rng.random((n, k)) + 0.05).astype(np.float32)
    values = -np.sort(-values, axis=1)
    silent = np.arange(k) >= np.where(rng.random(n) < 0.3, rng.integers(0, k + 1, n), k)[:, None]
    indices[silent], values[silent] = -1, 0
    codes = Concepts(torch.from_numpy(indices), torch.from_numpy(values), torch.from_numpy(values[:, 0].copy()))
    patches = torch.from_numpy(rng.standard_normal((n, 3)).astype(np.float32))
    return VisualTokens(patches, (int(rows), int(columns)), frames=int(frames)), codes, rng


def dense_rule(
    reducer: TorinoX, video: VisualTokens, codes: Concepts, count: int, min_gain: float
) -> tuple[list[int], list[float], list[set[int]], list[float]]:
    """Return selection, gains, the selected patches with the largest overlap with each patch, and this overlap."""
    codes_of = [
        {i: v for i, v in zip(*row, strict=True) if i >= 0}
        for row in zip(codes.indices.tolist(), codes.values.tolist(), strict=True)
    ]
    norm = [sum(v * v for v in code.values()) ** 0.5 for code in codes_of]
    places, n = video.places.tolist(), len(video)
    radius = None if reducer.locality is None else reducer.locality * (video.grid[0] * video.grid[1]) ** 0.5
    overlap = np.zeros((n, n), np.float32)
    for i in range(n):
        for j in range(n):
            if i == j or not (codes_of[i] or codes_of[j]):
                value = 1.0
            else:
                value = sum(v * codes_of[j].get(c, 0.0) for c, v in codes_of[i].items()) / ((norm[i] * norm[j]) or 1.0)
            (f, r, c), (g, s, d) = places[i], places[j]
            if reducer.time_locality is not None:
                near = abs(f - g) <= 3 * reducer.time_locality
                value *= float(np.exp(-((f - g) ** 2) / (2 * reducer.time_locality**2))) * near
            if radius is not None:
                value *= float(np.exp(-((r - s) ** 2 + (c - d) ** 2) / (2 * radius**2)))
            overlap[i, j] = value
    kept, gains = greedy_coverage(overlap, reducer.patch_weights(codes), count, min_gain)
    candidates = kept.tolist()
    owners, share = list[set[int]](), list[float]()
    for j in range(n):
        highest = max(float(overlap[i, j]) for i in candidates)
        tied = {i for i in candidates if overlap[i, j] >= highest - 1e-6}
        owners.append({j} if j in candidates else tied if highest > TIE else {-1})
        share.append(highest)
    return kept.tolist(), gains.tolist(), owners, share


@pytest.mark.parametrize("part", range(PARTS))
def test_sparse_coverage_equals_the_dense_rule(part: int) -> None:
    for seed in range(part, CASES, PARTS):
        video, codes, rng = random_video(seed)
        reducer = TorinoX(
            RAW,
            locality=rng.choice(np.array([None, 0.2, 0.5, 1.0])),
            time_locality=rng.choice(np.array([None, 0.3, 1.0, 2.0, 4.0])),
            order=("raster", "native")[rng.integers(2)],
        )
        count, min_gain = int(rng.integers(1, len(video) + 1)), float(rng.choice([0.0, 0.0, 0.3, 1.0]))
        kept, gains, owner, share = reducer.cover_sparsely(video, codes, count, min_gain)
        expected = dense_rule(reducer, video, codes, count, min_gain)
        assert kept.tolist() == expected[0], seed
        assert np.allclose(gains, expected[1], atol=1e-3), seed
        assert all(patch in tied for patch, tied in zip(owner.tolist(), expected[2], strict=True)), seed
        assert np.allclose(share, expected[3], atol=1e-5), seed


def test_time_factors() -> None:
    assert time_factors(6, 1.0).round(4).tolist() == pytest.approx([1, 0.6065, 0.1353, 0.0111, 0, 0], abs=1e-4)
    assert time_factors(3, None).tolist() == [1, 1, 1]
    assert time_factors(3, 1e-300).tolist() == [1, 0, 0]
    with pytest.raises(BadParameter, match="time_locality must be above 0"):
        TorinoX(RAW, time_locality=0)
    assert TorinoX(RAW, time_locality=2.0).spec == "torino-x(locality=0.2, time_locality=2.0, proportional=True)"


@pytest.mark.parametrize("parameters", [{}, {"budget": 3}, {"budget": 3, "mode": "prune", "order": "native"}])
def test_one_frame_is_the_image(parameters: dict[str, Any]) -> None:
    image = VisualTokens(torch.randn(16, 9, generator=torch.Generator().manual_seed(0)), (4, 4))
    reducer = TorinoX(RAW, **parameters)
    assert same_plan(reducer.plan(image), reducer.plan(image.with_(frames=1)))


def test_frames_far_apart_are_covered_separately() -> None:
    video = still(40)
    plan = TorinoX(RAW, concepts=1, time_locality=2.0).plan(video)
    frames = plan.locate(plan.sources)[:, 0]
    anchors = plan.locate(plan.anchor)[:, 0].repeat_interleave(plan.offsets.diff())
    assert int((frames - anchors).abs().max()) <= 6  # 3 · time_locality
    assert len(TorinoX(RAW, concepts=1, time_locality=None, locality=None).plan(video)) == len(
        TorinoX(RAW, concepts=1, locality=None).plan(split_frames(video)[0])
    )


@pytest.mark.parametrize(
    ("spec", "most"),
    [("torino-p(k=1, delta=1)", 1), ("torino-m(k=1, delta=1)", 1), ("torino-x(concepts=1, min_gain=2.0)", 5)],
)
def test_length_follows_the_content(spec: str, most: int) -> None:
    """Eight still frames cost at most as much as ``most`` images."""
    reducer, grid = make(spec, sae=RAW), (12, 12)
    videos = still(1, grid), still(8, grid), cuts(8, every=4, grid=grid), cuts(8, grid=grid)
    image, calm, cut, busy = (len(reducer.plan(video)) for video in videos)
    each = sum(len(reducer.plan(frame)) for frame in split_frames(videos[-1]))
    assert image <= calm < cut < busy <= each
    assert calm <= most * image
    assert abs(len(reducer.plan(pan(8, grid))) - calm) < 0.1 * busy  # the same concepts in other places


def test_a_group_reaches_over_time() -> None:
    frames = [scene((4, 4), 0) for _ in range(6)]
    ball = torch.eye(64)[63]
    for number in (1, 2, 4):  # an object appears, hides and returns
        frames[number] = frames[number].clone()
        frames[number][number % 4, 1] = ball
    video = clip(frames, times=(0, 1, 2, 3, 4, 9))
    plan = make("torino-m(k=1, delta=1)", sae=RAW).plan(video)
    token = int((plan.concept == 63).nonzero())
    assert plan.times == video.times
    assert plan.locate((plan.assigned == token).nonzero()[:, 0])[:, 0].tolist() == [1, 2, 4]
    assert "in 3 of 6 frames" in str(plan.explain(token))


@pytest.mark.parametrize("name", ["torino-p", "torino-m", "torino-x"])
@pytest.mark.parametrize("parameters", [{}, {"budget": 20}, {"budget": 1}, {"budget": 20, "order": "native"}])
def test_the_contract_holds_for_videos(name: str, parameters: dict[str, Any]) -> None:
    videos = [cuts(4), still(3), pan(2), VisualTokens(torch.randn(64, 64), (8, 8))]
    check_reducer(make(name, sae=RAW, **parameters), videos)


@pytest.mark.parametrize("name", ["torino-p", "torino-m", "torino-x"])
def test_a_budget_is_for_the_whole_video(name: str) -> None:
    reducer = make(name, sae=RAW, budget=30)
    plans = reducer.plan_batch([cuts(6), still(6)])
    assert plans.lengths.tolist() == [30, 30]
    assert plans[0].tokens_per_frame.sum() == 30
    assert len(KeepShare(reducer, 0.25).plan(cuts(4))) == 36
    if name != "torino-m":
        with pytest.raises(UnmetBudget):
            make(name, sae=RAW, budget=200).plan(still(2))


def test_videos_share_a_pooled_budget_by_content() -> None:
    plans = make("torino-x(budget=12, pooled=True, concepts=1)", sae=RAW).plan_batch([cuts(6), still(6)])
    assert int(plans.lengths.sum()) == 24
    assert plans.lengths[0] > plans.lengths[1]


@pytest.mark.parametrize(("k", "delta"), [(1, 1), (2, 2), (2, 1), (6, 3)])
def test_groups_of_a_long_video_are_exact(k: int, delta: int) -> None:
    """Compare with all pairs on a prefix, and groups of the whole with those of the prefix."""
    rng = np.random.default_rng(0)
    indices = torch.from_numpy(np.stack([rng.permutation(60)[:k] for _ in range(900)]))
    concepts = Concepts(indices, torch.ones(900, k), torch.ones(900))
    label = group_by_overlap(concepts, delta).label
    shared = (indices[:, None, :, None] == indices[None, :, None, :]).sum((2, 3)) >= delta
    expected = torch.arange(900)
    while True:  # labels spread along links until nothing changes
        lowest = torch.where(shared, expected[None], 900).amin(1)
        if torch.equal(lowest, expected):
            break
        expected = lowest
    assert torch.equal(label, torch.unique(expected, return_inverse=True)[1])


@pytest.mark.parametrize(
    "spec", ["torino-m(k=1, delta=1)", "torino-x(concepts=1, budget=2, locality=None, time_locality=None)"]
)
def test_merged_tokens_can_be_placed_elsewhere(spec: str) -> None:
    """A concept is in column 0, then in columns 1 and 2, then in columns 2 and 3, where it is brightest."""
    concept = torch.tensor([[5, 0, 0, 0], [0, 5, 5, 0], [0, 0, 5, 5]])
    patches = torch.eye(9)[concept.flatten()]
    patches[11] *= 2
    video = VisualTokens(patches, (1, 4), frames=3)
    found = {}
    for place in ("anchor", "median", "first"):
        plan = make(spec, sae=RAW, place=place).plan(video)
        token = int((plan.concept == 5).nonzero()[0])
        found[place] = plan.locate(plan.anchor[token]).tolist()
        assert bool((plan.anchor.diff() >= 0).all())
        assert sorted((plan.assigned == token).nonzero()[:, 0].tolist()) == [0, 5, 6, 10, 11]
        assert plan.by == make(spec, sae=RAW, place=place).spec
    assert found["median"] == [1, 0, 2]
    assert found["first"] == [0, 0, 0]
    assert found["anchor"] == ([2, 0, 3] if spec.startswith("torino-m") else found["anchor"])
    with pytest.raises(BadParameter, match="place must be one of 'anchor', 'median', 'first', got 'last'"):
        make(spec, sae=RAW, place="last")
