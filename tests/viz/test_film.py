"""The film strip, the curve of tokens per second and the animation of a video."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torino.core.errors import BadFile, BadParameter
from torino.core.reduction import Reduction
from torino.viz.film import (
    draw_animation,
    draw_film,
    draw_frame,
    film_colors,
    first_frames,
    frame_times,
    pick_frames,
    save_animation,
    tokens_per_second,
)


def make_plan() -> Reduction:
    """Three frames of 2x2: one group over frames 0 and 1, one in frame 1, and one token of the last frame alone."""
    rows = [dict.fromkeys([0, 1, 2, 3, 4], 0.2), {5: 0.5, 6: 0.5}, {8: 1.0}]
    plan = Reduction.of(rows, (2, 2), frames=3, times=(0.0, 0.5, 2.5))
    plan.concept[:] = torch.tensor([7, 3, 7])
    return plan


def make_images(count: int = 3) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (60 * i, 100, 50)) for i in range(count)]


def test_a_token_begins_in_the_first_frame_it_represents() -> None:
    plan = make_plan()
    plan.anchor[0] = 4  # its anchor is in the second frame
    assert first_frames(plan).tolist() == [0, 1, 2]
    assert np.allclose(tokens_per_second(plan), [2.0, 0.5, 0.5])
    pruned = Reduction.pick(torch.tensor([5, 9]), (2, 2), "pick", frames=3, assigned=torch.full((12,), -1))
    assert first_frames(pruned).tolist() == [1, 2]
    assert frame_times(pruned).tolist() == [0, 1, 2]


def test_a_group_has_one_color_in_all_frames() -> None:
    plan, images = make_plan(), make_images()
    colors = film_colors(plan)
    assert set(colors) == {7, 3}
    cells = [np.asarray(draw_frame(plan, frame, images[0], side=20, colors=colors)) for frame in range(3)]
    assert cells[0].shape == (20, 20, 3)
    assert (cells[0][5, 5] == cells[1][5, 5]).all()  # the same group, over two frames
    assert not (cells[1][5, 15] == cells[1][5, 5]).all()  # another group
    assert (cells[2][5, 5] == np.asarray(images[0])[0, 0]).all()  # a token of its own keeps its colors
    assert cells[2][15, 15].sum() < cells[2][5, 5].sum() / 2  # dropped patches are dark


def test_film_shows_the_frames_and_grows_with_them() -> None:
    page = draw_film(make_images(), make_plan(), title="A clip", side=40)
    assert page.width == 2 * 30 + 560
    rng = np.random.default_rng(0)
    plan = Reduction.pick(torch.from_numpy(rng.choice(400, 90, False)).sort().values, (2, 2), "pick", frames=100)
    assert draw_film(make_images(100), plan, side=200, strip=6).width == 2 * 30 + 6 * 200 + 5 * 6


def test_merged_frames_show_the_first_of_them() -> None:
    images = make_images(5)
    assert pick_frames(images, 3) == images[::2]
    with pytest.raises(BadParameter, match="needs as many images"):
        pick_frames(images, 6)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_animation_has_a_picture_for_each_frame(tmp_path: Path, suffix: str) -> None:
    pages = draw_animation(make_images(), make_plan(), title="A clip", side=40)
    assert len(pages) == 3
    assert len({page.tobytes() for page in pages}) == 3
    path = save_animation(pages, tmp_path / f"clip{suffix}", [0.5, 2.0, 1.0])
    with Image.open(path) as opened:
        assert opened.n_frames == 3
        assert opened.size == pages[0].size
    with pytest.raises(BadFile, match=r"\.gif or \.webp"):
        save_animation(pages, tmp_path / "clip.png", [1, 1, 1])


def test_a_video_of_one_frame_is_drawn() -> None:
    plan = Reduction.identity((2, 2))
    assert draw_film(make_images(1), plan).width > 0
    assert len(draw_animation(make_images(1), plan)) == 1
