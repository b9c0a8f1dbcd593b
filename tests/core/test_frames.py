"""The time axis of VisualTokens and Reduction: validation, accessors, files, and images as videos of one frame."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torino import RawEmbedding, Reduction, VisualTokens, make
from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.frames import locate
from torino.core.io import read_arrays, write_arrays
from torino.core.placement import place_at_median
from torino.core.reduction import ReductionBatch
from torino.core.tokens import Origin, load_tokens, save_tokens, split_frames, stack_frames
from torino.testing import same_plan


def video(frames: int = 3, grid: tuple[int, int] = (2, 4), seed: int = 0, **others: Any) -> VisualTokens:
    patches = torch.randn(frames * grid[0] * grid[1], 5, generator=torch.Generator().manual_seed(seed))
    return VisualTokens(patches, grid, frames=frames, **others)


def test_patches_are_numbered_frame_by_frame() -> None:
    tokens = video(frames=3, grid=(2, 4))
    expected = [(f, r, c) for f in range(3) for r in range(2) for c in range(4)]
    assert [tuple(place) for place in tokens.places.tolist()] == expected
    assert locate(torch.tensor([23, 24, -1]), (2, 4), 3).tolist() == [[2, 1, 3], [-1] * 3, [-1] * 3]
    assert "24 patches of width 5 on 3 frames of a 2x4 grid" in repr(tokens)
    assert VisualTokens.of(torch.zeros(12, 2), frames=3).grid == (2, 2)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"frames": 0}, "frames must be a whole number of at least 1, got 0"),
        ({"frames": 1.5}, "frames must be a whole number of at least 1, got 1.5"),
        ({"frames": True}, "frames must be a whole number"),
        ({"frames": 4}, "4 frames of a 2x4 grid have 32 patches, but 24 were given"),
        ({"frames": 1}, "grid 2x4 has 8 patches, but 24 were given"),
        ({"times": (0.0, 1.0)}, "one number for each of the 3 frames, got 2"),
        ({"times": (0.0, 2.0, 1.0)}, "times must not decrease, but frame 2 is at 1 s, after 2 s"),
        ({"times": (0.0, float("nan"), 1.0)}, "finite numbers of seconds, got nan for frame 1"),
        ({"times": (0.0, "1", 2.0)}, "finite numbers of seconds, got '1' for frame 1"),
        ({"times": 1.0}, "one number per frame, or None; got 1.0"),
        ({"times": "abc"}, "one number per frame, or None; got 'abc'"),
    ],
)
def test_a_wrong_time_axis_is_one_sentence(others: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"frames": 3, **others}
    with pytest.raises(BadTokens, match=re.escape(words)):
        VisualTokens(torch.zeros(24, 2), (2, 4), **arguments)


def test_a_frame_count_that_leaves_no_square_says_so() -> None:
    with pytest.raises(BadTokens, match="12 patches do not form 2 frames of a square grid"):
        VisualTokens.of(torch.zeros(12, 2), frames=2)


@pytest.mark.parametrize("times", [[0, 1, 2], np.array([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]), (0.0, 1, 2)])
def test_times_become_a_tuple_of_float(times: Any) -> None:
    assert video(times=times).times == (0.0, 1.0, 2.0)
    assert all(type(value) is float for value in video(times=times).times or ())


def test_reductions_know_frame_row_and_column() -> None:
    plan = Reduction.of([{0: 0.5, 9: 0.5}, {23: 1.0}], grid=(2, 4), frames=3, times=[0, 0.5, 2])
    assert plan.patches == 24
    assert plan.locate(plan.sources).tolist() == [[0, 0, 0], [1, 0, 1], [2, 1, 3]]
    assert plan.tokens_per_frame.tolist() == [1, 0, 1]
    assert plan.apply(torch.arange(24.0)[:, None]).tolist() == [[4.5], [23.0]]
    text = str(plan.explain(0))
    assert "(frame 0 at 0 s, row 0, column 0)" in text
    assert "8% of the video, in 2 of 3 frames." in text
    assert plan.explain(1).place(23) == (1, 3)
    assert plan.explain(1).frame(23) == 2
    with pytest.raises(BadParameter, match="the grid has patches 0 to 23"):
        Reduction.of([{25: 1.0}], grid=(2, 4), frames=3)
    with pytest.raises(BadParameter, match="frames must be a whole number of at least 1"):
        Reduction.identity((2, 4), frames=0)


def test_the_identity_keeps_every_frame() -> None:
    plan = Reduction.identity((2, 4), frames=3, times=(0, 1, 2))
    assert plan.is_pruning
    assert plan.tokens_per_frame.tolist() == [8, 8, 8]
    assert plan.layout == {"grid": (2, 4), "frames": 3, "times": (0.0, 1.0, 2.0)}


def test_composition_keeps_the_time_axis() -> None:
    first = Reduction.identity((2, 2), frames=2, times=(0, 1))
    second = Reduction.of([{0: 1.0}, {5: 1.0}], grid=(1, 8))
    both = first.then(second)
    assert both.layout == first.layout
    assert both.locate(both.anchor).tolist() == [[0, 0, 0], [1, 0, 1]]


def test_the_median_of_a_token_has_a_frame() -> None:
    rows = [{1: 0.2, 9: 0.2, 10: 0.2, 22: 0.2, 23: 0.2}]  # frames 0, 1, 1, 2, 2; rows 0, 0, 0, 1, 1; columns 1 1 2 2 3
    plan = Reduction.of(rows, grid=(2, 4), frames=3)
    moved = place_at_median(plan, per_axis=True)[0]
    assert moved.locate(moved.anchor).tolist() == [[1, 0, 2]]
    assert place_at_median(plan)[0].anchor.tolist() == [10]


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_token_files_keep_the_time_axis(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tokens{suffix}"
    given = [
        video(frames=3, times=(0.0, 0.1, 7.25)),
        VisualTokens.of(torch.ones(9, 5)),
        video(frames=2, grid=(1, 3)),
        VisualTokens(torch.ones(2, 5), (1, 2), times=(4.0,)),
    ]
    loaded = load_tokens(save_tokens(given, path))
    assert [tokens.layout for tokens in loaded] == [tokens.layout for tokens in given]
    assert all(torch.equal(a.patches, b.patches) for a, b in zip(loaded, given, strict=True))


def test_files_of_images_are_the_same_as_before_videos(tmp_path: Path) -> None:
    images = [VisualTokens.of(torch.ones(9, 2)), VisualTokens.of(torch.ones(4, 2))]
    arrays, _ = read_arrays(save_tokens(images, tmp_path / "tokens.npz"))
    assert sorted(arrays) == ["grids", "patches"]
    batch = make("random(budget=2)").plan_batch(images)
    assert not {"frames", "times"} & set(batch.arrays()[0])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"frames": torch.tensor([2.0])}, "frames is torch.float32"),
        ({"frames": torch.tensor([0])}, "a number of frames is 0"),
        ({"frames": torch.tensor([1, 1])}, r"frames is torch.int64 of shape \(2,\)"),
        ({"frames": torch.tensor([2]), "times": torch.tensor([0.0])}, "times is torch.float32"),
        ({"times": torch.tensor([0.0])}, "times but no frames"),
        ({"frames": torch.tensor([2]), "times": torch.tensor([1.0, 0.0])}, "must not decrease"),
        ({"frames": torch.tensor([2]), "times": torch.tensor([1.0, float("nan")])}, "finite numbers of seconds"),
        ({"frames": torch.tensor([3])}, "3 frames of a 2x2 grid have 12 patches, but 8"),
    ],
)
def test_a_damaged_time_axis_of_a_token_file_is_refused(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    path = write_arrays(
        tmp_path / "tokens.npz", {"patches": torch.ones(8, 2), "grids": torch.tensor([[2, 2]]), **arrays}
    )
    with pytest.raises(BadTokens, match=words):
        load_tokens(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_reduction_files_keep_the_time_axis(tmp_path: Path, suffix: str) -> None:
    plans = [
        Reduction.of([{0: 0.5, 9: 0.5}, {23: 1.0}], grid=(2, 4), frames=3, times=[0, 0.5, 2]),
        Reduction.identity((2, 2)),
        Reduction.identity((1, 2), frames=2),
    ]
    loaded = ReductionBatch.load(ReductionBatch.of(plans).save(tmp_path / f"plans{suffix}"))
    assert all(same_plan(a, b) for a, b in zip(loaded, plans, strict=True))
    arrays, texts = ReductionBatch.of(plans).arrays()
    arrays["frames"] = arrays["frames"] + 1
    with pytest.raises(BadFile, match="inconsistent"):
        ReductionBatch.load(write_arrays(tmp_path / f"bad{suffix}", arrays, texts))


# ---------------------------------------------------------------------- frames and images


def test_frames_are_stacked_and_split() -> None:
    images = [
        VisualTokens(
            torch.full((4, 2), float(i)),
            (2, 2),
            Origin("tower", 3),
            cls_attention=torch.full((2, 4), float(i)),
            keys=torch.full((4, 3), float(i)),
            times=(i / 2,),
        )
        for i in range(3)
    ]
    tokens = stack_frames(images)
    assert tokens.layout == {"grid": (2, 2), "frames": 3, "times": (0.0, 0.5, 1.0)}
    for frame, image in zip(split_frames(tokens), images, strict=True):
        assert (frame.layout, frame.origin) == (image.layout, image.origin)
        for name in ("patches", "keys", "cls_attention"):
            assert torch.equal(getattr(frame, name), getattr(image, name))
    assert stack_frames([tokens, tokens], times=range(6)).times == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert stack_frames([images[0], images[1].with_(keys=None)]).keys is None
    assert split_frames(images[0])[0] is images[0]
    with pytest.raises(BadTokens, match="same grid and origin"):
        stack_frames([images[0], VisualTokens.of(torch.zeros(9, 2))])


@pytest.mark.parametrize(
    "spec", ["torino-p", "torino-m", "torino-p(budget=5)", "torino-m(budget=5)", "random(budget=5)"]
)
def test_an_image_is_a_video_of_one_frame(spec: str) -> None:
    image = video(frames=1, grid=(4, 4))
    clip = image.with_(frames=1, times=(0.5,))
    sae: dict[str, Any] = {"sae": RawEmbedding()} if "torino" in spec else {}
    reducer = make(spec, **sae)
    plan, timed = reducer.plan(image), reducer.plan(clip)
    assert timed.times == (0.5,)
    assert same_plan(plan, replace(timed, times=None))


@pytest.mark.parametrize("spec", ["torino-p", "torino-m"])
def test_a_concept_that_persists_is_one_group(spec: str) -> None:
    image = torch.eye(4).repeat(2, 1)  # four concepts, twice
    reducer = make(f"{spec}(k=1, delta=1)", sae=RawEmbedding())
    still = reducer.plan(VisualTokens(image.repeat(10, 1), (2, 4), frames=10))
    assert len(still) == len(reducer.plan(VisualTokens(image, (2, 4)))) == 4
    assert (still.sizes == 20).all()


def test_methods_for_images_refuse_videos() -> None:
    with pytest.raises(BadTokens, match="hiprune reduces images and cannot reduce a video of 3 frames at once"):
        make("hiprune(budget=4)").plan(video())
    with pytest.raises(BadTokens, match="hiprune reduces images"):
        make("hiprune(budget=4)").plan_batch([video()])
