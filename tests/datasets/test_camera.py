"""Clips made from photos, and the clip of the documentation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torino.core.errors import BadParameter
from torino.datasets.camera import Shot, make_clip
from torino.datasets.video import open_video

ROOT = Path(__file__).resolve().parents[2]


def ramp(width: int = 60, height: int = 40) -> Image.Image:
    """Return a photo that becomes brighter from left to right."""
    values = np.tile(np.linspace(0, 255, width), (height, 1)).astype(np.uint8)
    return Image.fromarray(np.stack([values] * 3, -1))


def brightness(frame: Image.Image) -> float:
    return float(np.asarray(frame, np.float64).mean())


def test_still_pan_zoom_and_cut() -> None:
    moving = Shot(ramp(), 1.0, (0.3, 0.5, 0.5), (0.7, 0.5, 0.5))
    clip = make_clip([Shot(ramp(), 1.0), moving, Shot(ramp(), 1.0, end=(0.5, 0.5, 0.2))], fps=5, side=20)
    assert len(clip) == 15
    assert clip.duration == 3.0
    assert clip.times[1] == pytest.approx(0.2)
    still, pan, zoom = (clip.frames[i : i + 5] for i in (0, 5, 10))
    assert len({frame.tobytes() for frame in still}) == 1
    assert np.all(np.diff([brightness(frame) for frame in pan]) > 5)  # to the brighter side
    spread = [float(np.asarray(frame, np.float64).std()) for frame in zoom]
    assert np.all(np.diff(spread) < 0)  # ever less of the ramp


def test_what_the_camera_sees_stays_inside_the_photo() -> None:
    corner = make_clip([Shot(ramp(), 0.2, (1.0, 1.0, 1.0))], fps=5, side=10).frames[0]
    assert brightness(corner) == pytest.approx(brightness(ramp().crop((20, 0, 60, 40))), abs=2)


def test_wrong_shots_are_refused() -> None:
    for window in ((1.2, 0.5, 1.0), (0.5, 0.5, 0.0), (0.5, 0.5, 1.1)):
        with pytest.raises(BadParameter, match="A window has a center"):
            Shot(ramp(), 1.0, window)
    with pytest.raises(BadParameter, match="more than 0 seconds"):
        Shot(ramp(), 0.0)
    with pytest.raises(BadParameter, match="at least one shot"):
        make_clip([])


def test_clip_of_the_documentation(tmp_path: Path) -> None:
    path = ROOT / "scripts" / "make_clip.py"
    spec = importlib.util.spec_from_file_location("make_clip", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    clip = script.film(fps=5.0, side=64)
    assert len(clip) == 32
    pytest.importorskip("av")
    script.write_video(clip, tmp_path / "clip.mp4")
    again = open_video(tmp_path / "clip.mp4", fps=5)
    assert len(again) == 32
    for read, made in zip(again.frames, clip.frames, strict=True):
        assert np.abs(np.asarray(read, float) - np.asarray(made, float)).mean() < 20
