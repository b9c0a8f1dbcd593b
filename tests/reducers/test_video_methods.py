"""Rival methods for videos: worked cases, and slow transcriptions of the published rules on random and tied tokens."""

from __future__ import annotations

from itertools import pairwise
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.clips import cuts, still
from torino import RawEmbedding, Reduction, VisualTokens, list_reducers, make
from torino.core.errors import BadParameter, BadTokens, UnmetBudget
from torino.reducers import EVS, FlashVid, FrameSampling, Pool, Scissor, Uniform, VidCom2, get
from torino.reducers._cells import share_out, video_cells
from torino.reducers._similarity import nearest_in_frame, nearest_kept
from torino.reducers.scissor import similar_components

VIDEO_METHODS = ["evs", "flashvid", "frames", "vidcom2"]


def random_video(seed: int, ties: bool = False) -> VisualTokens:
    """Return a clip of up to 6 frames; with ``ties`` its patches are few and repeat."""
    rng = np.random.default_rng(seed)
    frames, rows, columns, width = (int(value) for value in rng.integers((1, 1, 1, 2), (7, 4, 5, 7)))
    values = rng.standard_normal((frames * rows * columns, width))
    if ties:
        values = rng.integers(-1, 2, values.shape)[rng.integers(0, 3, len(values))]
    patches = torch.from_numpy(values.astype(np.float32))
    return VisualTokens(patches, (rows, columns), frames=frames)


def cosine(a: Tensor, b: Tensor) -> float:
    length = float(a.double().norm() * b.double().norm())
    return round(float(a.double() @ b.double()) / length, 11) if length else 0.0


CASES = [
    pytest.param(seed, ties, id=f"{seed}{'-ties' if ties else ''}") for seed in range(12) for ties in (False, True)
]


# ---------------------------------------------------------------------- EVS


def reference_evs(video: VisualTokens, budget: int) -> list[int]:
    size = len(video) // video.frames
    score = [255.0] * size
    score += [1 - cosine(video.patches[i], video.patches[i - size]) for i in range(size, len(video))]
    return sorted(sorted(range(len(video)), key=lambda i: (-round(score[i], 10), i))[:budget])


@pytest.mark.parametrize(("seed", "ties"), CASES)
def test_evs_equals_reference(seed: int, ties: bool) -> None:
    video = random_video(seed, ties)
    size = len(video) // video.frames
    for budget in range(size, len(video) + 1):
        assert EVS(budget).plan(video).anchor.tolist() == reference_evs(video, budget)


def test_evs_keeps_what_changes() -> None:
    frame = torch.eye(6)[:4]
    second, third = frame.clone(), frame.clone()
    second[2] = third[2] = torch.eye(6)[5]
    third[0] = torch.eye(6)[4]
    video = VisualTokens(torch.cat([frame, second, third]), (2, 2), frames=3)
    plan = EVS(6).plan(video)
    assert plan.anchor.tolist() == [0, 1, 2, 3, 6, 8]
    assert plan.score.tolist() == [255, 255, 255, 255, 1, 1]
    assert plan.assigned.tolist() == [0, 1, 2, 3, 0, 1, 4, 3, 5, 1, 4, 3]
    assert EVS(6, order="native").plan(video).anchor.tolist() == [0, 1, 2, 3, 6, 8]


def test_evs_below_one_frame_keeps_a_grid_of_the_first() -> None:
    plan = EVS(4).plan(still(3, grid=(4, 4)))
    assert plan.anchor.tolist() == Uniform(4).plan(VisualTokens(torch.zeros(16, 2), (4, 4))).anchor.tolist()
    assert plan.sizes.tolist() == [12, 12, 12, 12]


def test_evs_compares_projected_tokens_if_there_are_any() -> None:
    video = still(2, grid=(2, 2))
    projected = torch.zeros(8, 3)
    projected[:, 0] = 1
    projected[6] = torch.tensor([0.0, 1.0, 0.0])
    assert EVS(5).plan(video.with_(signals={"projected": projected})).anchor.tolist() == [0, 1, 2, 3, 6]
    assert EVS(5, space="features").plan(video.with_(signals={"projected": projected})).anchor.tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    with pytest.raises(BadTokens, match="evs needs projected of shape"):
        EVS(5).plan(video.with_(signals={"projected": projected[:3]}))


# ---------------------------------------------------------------------- VidCom2


def reference_vidcom2(video: VisualTokens, budget: int, temperature: float) -> tuple[list[float], list[list[float]]]:
    """Return the numbers of tokens that frames should get, and the scores of their patches."""
    x, frames = video.patches.double(), video.frames
    size, width = len(video) // frames, x.shape[1]
    variance = [float(((x[:, c] - x[:, c].mean()) ** 2).mean()) for c in range(width)]
    channels = sorted(range(width), key=lambda c: (round(variance[c], 10), c))[: max(1, width // 2)]
    rows = [row[channels] / (row[channels].norm() or 1) for row in x]

    def similarity(row: Tensor, center: Tensor) -> float:
        return sum(exp(-float(((row - center) ** 2).sum()) / (2 * 2.0**power)) for power in (-3, -2, -1, 0, 1))

    middle = torch.stack(rows).mean(0)
    to_video = [[similarity(row, middle) for row in rows[f * size : (f + 1) * size]] for f in range(frames)]
    scores: list[list[float]] = []
    for f in range(frames):
        here = rows[f * size : (f + 1) * size]
        center = torch.stack(here).mean(0)
        scores.append([s + similarity(row, center) for row, s in zip(here, to_video[f], strict=True)])
    unusual = [-sum(values) / size / temperature for values in to_video]
    shares = [exp(value - max(unusual)) for value in unusual]
    shares = [share / sum(shares) for share in shares]
    wanted = [min(size, size * budget / len(video) * (1 + share - 1 / frames)) for share in shares]
    return wanted, scores


@pytest.mark.parametrize(("seed", "ties"), CASES)
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_vidcom2_equals_reference(seed: int, ties: bool, temperature: float) -> None:
    video = random_video(seed, ties)
    size = len(video) // video.frames
    for budget in {1, video.frames, len(video) // 2 or 1, len(video)}:
        plan = VidCom2(budget, temperature=temperature).plan(video)
        wanted, scores = reference_vidcom2(video, budget, temperature)
        counts = plan.tokens_per_frame.tolist()
        assert sum(counts) == budget
        if min(wanted) >= 1 and abs(sum(wanted) - budget) < 1e-6:  # no limit is reached
            assert all(abs(count - want) <= 1 + 1e-9 for count, want in zip(counts, wanted, strict=True))
        expected = [
            f * size + place
            for f, count in enumerate(counts)
            for place in sorted(sorted(range(size), key=lambda i, f=f: (round(scores[f][i], 10), i))[:count])
        ]
        assert plan.anchor.tolist() == expected


def test_vidcom2_gives_unusual_frames_more() -> None:
    base = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).repeat(5, 1)
    base[24:36] = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    counts = VidCom2(20).plan(VisualTokens(base, (3, 4), frames=5)).tokens_per_frame
    assert int(counts.argmax()) == 2
    assert counts.sum() == 20


# ---------------------------------------------------------------------- FlashVID


def reference_trees(video: VisualTokens, tau: float, cut: float, segments: int) -> list[int]:
    """Return the first patch of the tree of each patch."""
    size, x = len(video) // video.frames, video.patches.double()
    means = [x[f * size : (f + 1) * size].mean(0) for f in range(video.frames)]
    similar = [cosine(a, b) for a, b in pairwise(means)]
    starts = {0} | {f + 1 for f, value in enumerate(similar) if value < cut}
    for f in sorted(range(len(similar)), key=lambda f: (similar[f], f)):
        if len(starts) < segments and f + 1 not in starts:
            starts.add(f + 1)
    root = list(range(len(video)))
    for i in range(size, len(video)):
        frame = i // size
        if frame in starts:
            continue
        before = list(range((frame - 1) * size, frame * size))
        cosines = [cosine(x[i], x[j]) for j in before]
        if max(cosines) > tau:
            root[i] = root[before[cosines.index(max(cosines))]]
    return root


@pytest.mark.parametrize(("seed", "ties"), CASES)
def test_flashvid_trees_equal_reference(seed: int, ties: bool) -> None:
    video = random_video(seed, ties)
    for tau, cut, segments in ((0.8, 0.9, 8), (0.5, -1.0, 1), (0.2, 0.3, 2), (0.0, 0.0, 3)):
        plan = FlashVid(tau=tau, cut=cut, segments=segments).plan(video)
        root = reference_trees(video, tau, cut, segments)
        assert plan.anchor[plan.assigned].tolist() == root
        trees = [[i for i in range(len(root)) if root[i] == first] for first in sorted(set(root))]
        means = torch.stack([video.patches[tree].double().mean(0) for tree in trees])
        assert torch.allclose(plan.apply(video.patches).double(), means, atol=1e-5)


def reference_density_peaks(x: Tensor, clusters: int) -> list[int]:
    """Return the index of the center of each row."""
    n = len(x)
    distance = [[round(float((x[i] - x[j]).norm()) / x.shape[1] ** 0.5, 9) for j in range(n)] for i in range(n)]
    density = [
        round(exp(-sum(d * d for d in sorted(row)[: min(clusters, 7)]) / min(clusters, 7, n)), 9) for row in distance
    ]
    farthest = max(max(row) for row in distance)
    rank = [(density[i], -i) for i in range(n)]
    apart = [min([distance[i][j] for j in range(n) if rank[j] > rank[i]], default=farthest) for i in range(n)]
    centers = sorted(range(n), key=lambda i: (-round(apart[i] * density[i], 8), i))[:clusters]
    nearest = [min(centers, key=lambda c, i=i: (distance[i][c], centers.index(c))) for i in range(n)]
    return [i if i in centers else nearest[i] for i in range(n)]


@pytest.mark.parametrize("seed", range(12))
def test_flashvid_clusters_equal_reference(seed: int) -> None:
    video = random_video(seed)
    size = len(video) // video.frames
    for budget in (video.frames, len(video) // 2):
        if not video.frames <= budget:
            continue
        reducer = FlashVid(budget, tau=1.0, segments=1)  # no links: patches are clustered
        plan = reducer.plan(video)
        counts = plan.tokens_per_frame.tolist()
        assert max(counts) - min(counts) <= 1
        for f, count in enumerate(counts):
            centers = reference_density_peaks(video.patches[f * size : (f + 1) * size].double(), count)
            assert plan.anchor[plan.assigned[f * size : (f + 1) * size]].tolist() == [f * size + c for c in centers]


def test_flashvid_follows_a_moving_patch() -> None:
    frames = torch.zeros(3, 1, 4, 8)
    frames[:, 0] = torch.eye(8)[:4]
    for f in range(3):
        frames[f, 0, f] = torch.eye(8)[7]  # moves to the right over a still background
    video = VisualTokens(frames.view(12, 8), (1, 4), frames=3)
    plan = FlashVid(cut=-1.0, segments=1).plan(video)
    ball = int(plan.assigned[0])
    assert (plan.assigned == ball).nonzero()[:, 0].tolist() == [0, 5, 10]
    for budget in (12, 9, 6):  # fewer links are used than there are
        assert len(FlashVid(budget, cut=-1.0, segments=1).plan(video)) == budget


def test_flashvid_length_follows_the_content() -> None:
    reducer = FlashVid(segments=1)
    assert len(reducer.plan(still(8))) == 36 < len(reducer.plan(cuts(8, every=4))) < len(reducer.plan(cuts(8))) == 288
    with pytest.raises(BadParameter, match="tau is a cosine"):
        FlashVid(tau=1.5)
    with pytest.raises(BadParameter, match="segments"):
        FlashVid(segments=0)


# ---------------------------------------------------------------------- LLaVA-Scissor


def reference_components(rows: list[Tensor], tau: float) -> list[list[int]]:
    left, found = list(range(len(rows))), list[list[int]]()
    while left:
        group = [left.pop(0)]
        for here in group:
            near = [other for other in left if cosine(rows[here], rows[other]) > tau]
            group += near
            left = [other for other in left if other not in near]
        found.append(sorted(group))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tau", [0.3, 0.7, 0.9])
def test_scissor_over_frames_equals_reference(seed: int, tau: float) -> None:
    video = random_video(seed)
    size, x = len(video) // video.frames, video.patches.double()
    means: list[Tensor] = []
    for f in range(video.frames):
        rows = list(x[f * size : (f + 1) * size])
        means += [torch.stack([rows[i] for i in group]).mean(0) for group in reference_components(rows, tau)]
    means = [torch.stack([means[i] for i in group]).mean(0) for group in reference_components(means, tau)]
    joined = [[round(cosine(row, mean), 6) for mean in means] for row in x]
    nearest = [values.index(max(values)) for values in joined]
    plan = Scissor(tau=tau, order="native").plan(video)
    used = sorted(set(nearest))
    assert plan.assigned.tolist() == [used.index(token) for token in nearest]
    values = [
        (means[t] + x[[i for i, n in enumerate(nearest) if n == t]].sum(0)) / (nearest.count(t) + 1) for t in used
    ]
    assert torch.allclose(plan.apply(video.patches).double(), torch.stack(values), atol=1e-5)


def test_components_of_many_rows_are_found_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed)).double()
        monkeypatch.setattr("torino.reducers.scissor.BLOCK", 100)
        whole = similar_components(x, 0.97)
        monkeypatch.setattr("torino.reducers.scissor.BLOCK", 7)
        assert similar_components(x, 0.97).tolist() == whole.tolist()


def test_scissor_refuses_a_budget_for_long_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torino.reducers.scissor.MAX_LINKED", 20)
    with pytest.raises(UnmetBudget, match="at most 20 patches, got 72; use tau"):
        Scissor(4).plan(still(2))
    assert len(Scissor().plan(still(2))) == len(Scissor().plan(still(1)))


# ---------------------------------------------------------------------- plain baselines


def test_video_cells() -> None:
    for frames, grid, count, spans in ((1, (3, 4), 5, 1), (5, (2, 3), 7, 5), (7, (2, 2), 3, 3), (4, (2, 2), 16, 4)):
        cell, center = video_cells(frames, grid, count, spans)
        assert sorted(set(cell.tolist())) == list(range(count)) == cell[center].tolist()
    with_one, _ = video_cells(6, (2, 2), 2, 2)
    assert with_one.tolist() == [0] * 12 + [1] * 12


@pytest.mark.parametrize("budget", [1, 3, 5, 12, 24, 60])
def test_plain_baselines_share_the_budget_among_frames(budget: int) -> None:
    video = VisualTokens(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), (3, 4), frames=5)
    for reducer in (Uniform(budget), Pool(budget)):
        counts = reducer.plan(video).tokens_per_frame.tolist()
        assert sum(counts) == budget
        assert max(counts) - min(counts) <= 1 or budget < 5
    whole = FrameSampling(budget).plan(video)
    assert (whole.tokens_per_frame > 0).sum() == -(-budget // 12)
    assert whole.is_pruning


def test_frame_sampling_keeps_whole_frames() -> None:
    plan = FrameSampling(8).plan(VisualTokens(torch.randn(24, 4), (2, 2), frames=6))
    assert plan.tokens_per_frame.tolist() == [0, 4, 0, 0, 4, 0]
    assert plan.sizes.tolist() == [3] * 8
    assert FrameSampling(4).plan(VisualTokens(torch.randn(24, 4), (2, 2), frames=6)).tokens_per_frame.argmax() == 2


def test_pool_averages_spans_of_frames() -> None:
    video = VisualTokens(torch.arange(12.0)[:, None], (1, 3), frames=4)
    assert Pool(2).plan(video).apply(video.patches)[:, 0].tolist() == [2.5, 8.5]
    assert Pool(4).plan(video).apply(video.patches)[:, 0].tolist() == [1, 4, 7, 10]


# ---------------------------------------------------------------------- all methods


@pytest.mark.parametrize("total", range(1, 13))
def test_shares_are_whole_and_within_limits(total: int) -> None:
    rng = np.random.default_rng(total)
    for _ in range(50):
        most = rng.integers(0, 5, 4)
        if most.sum() < total:
            continue
        counts = share_out(rng.random(4) * 6, total, most)
        assert counts.sum() == total
        assert (counts <= most).all()
        assert (counts >= (most > 0)).all() or total < (most > 0).sum()


def test_the_nearest_kept_patch_of_the_frame() -> None:
    patches = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([7, 1, 12])
    assigned = nearest_in_frame(patches, kept, 4)
    assert assigned[5:10].tolist() == [0] * 5
    assert assigned[:5].tolist() == [1] * 5
    assert assigned[15:].tolist() == nearest_kept(patches, kept)[15:].tolist()
    assert torch.equal(nearest_in_frame(patches, kept, 1), nearest_kept(patches, kept))


@pytest.mark.parametrize("name", list_reducers())
def test_every_method_takes_videos_or_says_that_it_does_not(name: str) -> None:
    kind = get(name)
    if kind.in_tower or kind.on_pixels or kind.in_language_model:
        return
    options: dict[str, Any] = {"sae": RawEmbedding()} if "sae" in kind.__dataclass_fields__ else {}  # type: ignore[attr-defined]
    reducer = make(name, budget=8, **options)
    video = cuts(3)
    signals = {"projected": video.patches, "words": torch.eye(64)[:2], "head_keys": video.patches}
    video = video.with_(signals=signals, cls_attention=torch.full((2, len(video)), 1 / len(video)))
    if reducer.takes_frames:
        plan = reducer.plan(video)
        assert isinstance(plan, Reduction)
        assert (len(plan), plan.layout) == (8, video.layout)
    else:
        with pytest.raises(BadTokens, match="reduces images and cannot reduce a video of 3 frames at once"):
            reducer.plan(video)


@pytest.mark.parametrize("name", VIDEO_METHODS)
@pytest.mark.parametrize("degenerate", ["zero", "equal", "one patch", "one channel"])
def test_degenerate_videos(name: str, degenerate: str) -> None:
    patches = {
        "zero": torch.zeros(24, 4),
        "equal": torch.ones(24, 4),
        "one patch": torch.randn(6, 4),
        "one channel": torch.randn(24, 1),
    }[degenerate]
    size = len(patches) // 6
    video = VisualTokens(patches, (1, size), frames=6)
    for budget in {1, 5, 6, len(patches)}:
        plan = make(name, budget=budget).plan(video)
        assert len(plan) == budget
        assert bool(plan.apply(patches).isfinite().all())
    with pytest.raises(UnmetBudget):
        make(name, budget=len(patches) + 1).plan(video)
