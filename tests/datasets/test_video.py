"""Frames of videos are uniform in time: files and folders, variable rates, rotation, damage, limits."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.video_files import av, frame_number, write_clip
from torino.core.errors import BadFile, BadParameter, MissingPackage
from torino.datasets import video
from torino.datasets.video import Video, open_video, sample_times


def numbers(opened: Video) -> list[int]:
    return [frame_number(frame) for frame in opened.frames]


# ------------------------------------------------------------------ sampling


def test_frames_in_the_middle_of_equal_parts(tmp_path: Path) -> None:
    opened = open_video(write_clip(tmp_path / "clip.mp4", 20, 10.0), frames=4)
    assert numbers(opened) == [2, 7, 12, 17]
    assert np.allclose(opened.times, [0.2, 0.7, 1.2, 1.7])
    assert opened.duration == pytest.approx(2.0)
    assert opened.rate == pytest.approx(2.0)
    assert opened.frames[0].mode == "RGB"
    assert opened.frames[0].size == (48, 32)


def test_frames_per_second(tmp_path: Path) -> None:
    opened = open_video(write_clip(tmp_path / "clip.mp4", 25, 10.0), fps=2)
    assert numbers(opened) == [0, 5, 10, 15, 20]
    assert np.allclose(opened.times, [0, 0.5, 1, 1.5, 2])


def test_default_is_eight_frames(tmp_path: Path) -> None:
    assert len(open_video(write_clip(tmp_path / "clip.mp4"))) == video.DEFAULT_FRAMES == 8


@pytest.mark.parametrize("options", [{"frames": 50}, {"fps": 100}])
def test_a_short_video_gives_each_frame_once(tmp_path: Path, options: dict[str, Any]) -> None:
    opened = open_video(write_clip(tmp_path / "clip.mp4", 6, 10.0), **options)
    assert numbers(opened) == list(range(6))
    assert np.allclose(opened.times, [i / 10 for i in range(6)])


@pytest.mark.parametrize(
    ("name", "codec"),
    [("clip.mkv", "libx264"), ("clip.webm", "libvpx"), ("clip.avi", "mjpeg"), ("clip.ts", "mpeg4"), ("c.mov", "mpeg4")],
)
def test_formats(tmp_path: Path, name: str, codec: str) -> None:
    opened = open_video(write_clip(tmp_path / name, 20, 10.0, codec=codec), frames=4)
    assert numbers(opened) == pytest.approx([2, 7, 12, 17], abs=1)
    assert np.allclose(opened.times, [0.2, 0.7, 1.2, 1.7], atol=0.11)


def test_animated_gif(tmp_path: Path) -> None:
    images = [Image.new("RGB", (20, 16), (40 * i, 0, 0)) for i in range(4)]
    images[0].save(tmp_path / "clip.gif", save_all=True, append_images=images[1:], duration=500)
    opened = open_video(tmp_path / "clip.gif", frames=2)
    assert np.allclose(opened.times, [0.5, 1.5])
    assert [round(np.asarray(frame)[0, 0, 0] / 40) for frame in opened.frames] == [1, 3]


def test_variable_rate_is_sampled_by_time(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 0.3, 5.0, 5.1, 9.0, 9.9]  # four frames in 0.4 seconds, then long still scenes
    path = write_clip(tmp_path / "clip.mp4", len(times), 10.0, times=times)
    opened = open_video(path, fps=1)
    assert numbers(opened) == [0, 3, 4, 5, 6]  # shown at 0, 1 to 4, 5, 6 to 8 and 9 seconds
    assert np.allclose(opened.times, [0.0, 0.3, 5.0, 5.1, 9.0])


def test_sample_times_are_inside_the_video() -> None:
    for duration in (0.0, 0.04, 1.0, 3600.0):
        for options in ({"frames": 1}, {"frames": 7}, {"fps": 0.5}, {"fps": 1.0}):
            times = sample_times(duration, **options)
            assert times
            assert times == sorted(times)
            assert all(0 <= time <= duration for time in times)
            assert len(times) == options.get("frames", max(1, int(np.ceil(duration * options.get("fps", 0)))))


# ------------------------------------------------------------------ long videos


def test_a_long_video_is_not_decoded_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_clip(tmp_path / "hour.mp4", 3600, 1.0, size=(16, 16), gap=20)
    decoded = count_frames(monkeypatch)
    opened = open_video(path, frames=4)
    assert np.allclose(opened.times, [450, 1350, 2250, 3150])
    assert len(decoded) <= 4 * 42
    decoded.clear()
    assert len(open_video(path, fps=0.05)) == 180  # every 20 seconds
    assert len(decoded) < 3600 * 1.2


def test_seeking_gives_the_frames_of_decoding_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gap in (1, 7, 400):
        path = write_clip(tmp_path / f"{gap}.mp4", 300, 10.0, size=(32, 32), gap=gap)
        for options in ({"frames": 5}, {"frames": 23}, {"fps": 0.4}, {"fps": 3.0}):
            monkeypatch.setattr(video, "SEEK_SECONDS", 0.3)
            seeking = open_video(path, **options)
            monkeypatch.setattr(video, "SEEK_SECONDS", 1e9)
            everything = open_video(path, **options)
            assert seeking.times == everything.times
            assert all(np.array_equal(a, b) for a, b in zip(seeking.frames, everything.frames, strict=True))


def count_frames(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the time of every decoded frame."""
    decoded: list[float] = []
    decode = video._Reader._decode

    def counted(self: Any) -> Any:
        for frame in decode(self):
            decoded.append(self._time(frame))
            yield frame

    monkeypatch.setattr(video._Reader, "_decode", counted)
    return decoded


# ------------------------------------------------------------------ rotation, single frames


@pytest.mark.parametrize("turn", [0, 90, 180, -90])
def test_rotation_in_the_file_is_applied(tmp_path: Path, turn: int) -> None:
    path = write_clip(tmp_path / "clip.mp4", 3, turn=turn)
    frame = np.asarray(open_video(path, frames=1).frames[0]).mean(2)
    assert frame.shape == ((48, 32) if turn % 180 else (32, 48))
    # The bright left edge of the stored frame, turned counterclockwise.
    edge = {0: frame[:, :8], 90: frame[-8:], 180: frame[:, -8:], -90: frame[:8]}[turn]
    assert edge.mean() > 200
    assert frame.mean() < 100


@pytest.mark.parametrize("options", [{}, {"fps": 1.0}, {"frames": 5}])
def test_single_frame(tmp_path: Path, options: dict[str, Any]) -> None:
    opened = open_video(write_clip(tmp_path / "clip.mp4", 1), **options)
    assert numbers(opened) == [0]
    assert opened.times == (0.0,)
    assert opened.rate == 1.0


# ------------------------------------------------------------------ damage


def test_empty_missing_and_other_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("This is not a video.\n" * 40)
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg")
    (tmp_path / "none").mkdir()
    for name, reason in {
        "empty.mp4": "is empty",
        "text.mp4": "cannot be read as a video",
        "photo.jpg": "cannot be read as a video",
        "missing.mp4": "no file or folder",
        "none": "has no images",
        "a\0b": "Cannot read",
        "x" * 5000: "Cannot read",
    }.items():
        with pytest.raises(BadFile, match=reason) as caught:
            open_video(f"{tmp_path}/{name}")
        assert "\n" not in str(caught.value)
    with pytest.raises(BadFile, match="URL"):
        open_video("https://example.com/clip.mp4")


def test_playlists_open_no_other_file(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.ts")
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{tmp_path}/clip.ts\n")
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {tmp_path}/clip.ts\n")
    for name in ("list.m3u8", "list.mp4"):
        with pytest.raises(BadFile, match="cannot be read as a video"):
            open_video(tmp_path / name)


def test_sound_alone_is_refused(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mka"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(BadFile, match="no video, only sound"):
        open_video(tmp_path / "sound.mka")


def test_a_truncated_file_gives_what_it_has(tmp_path: Path) -> None:
    whole = write_clip(tmp_path / "whole.mkv", 40, 10.0, size=(64, 64), codec="mjpeg").read_bytes()
    (tmp_path / "half.mkv").write_bytes(whole[: len(whole) // 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = open_video(tmp_path / "half.mkv", frames=4)
    assert len(opened) == 4
    assert opened.times[-1] < 2.2
    assert numbers(opened) == pytest.approx([10 * time for time in opened.times], abs=1)
    assert any("ends after" in str(item.message) for item in caught)
    (tmp_path / "none.mp4").write_bytes(write_clip(tmp_path / "a.mp4").read_bytes()[:200])  # without its index
    with pytest.raises(BadFile, match="cannot be read as a video"):
        open_video(tmp_path / "none.mp4")


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    rng, outcomes = np.random.default_rng(0), {"read": 0, "refused": 0}
    for name, codec in (("a.mp4", "libx264"), ("b.mkv", "mpeg4"), ("c.avi", "mjpeg")):
        whole = np.frombuffer(write_clip(tmp_path / name, 12, codec=codec).read_bytes(), np.uint8)
        for trial in range(12):
            broken = whole.copy()
            at = rng.integers(0, len(broken), 1 + 4 * trial)
            broken[at] = rng.integers(0, 256, len(at), dtype=np.uint8)
            (tmp_path / f"broken{name}").write_bytes(broken.tobytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    opened = open_video(tmp_path / f"broken{name}", frames=3)
                except BadFile:
                    outcomes["refused"] += 1
                else:
                    assert 1 <= len(opened) <= 3
                    outcomes["read"] += 1
    assert min(outcomes.values()) > 0


# ------------------------------------------------------------------ limits


def test_limits_of_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_clip(tmp_path / "clip.mp4", 20)
    monkeypatch.setenv("TORINO_MAX_PIXELS", "1000")
    with pytest.raises(BadFile, match="48x32 pixels; torino accepts up to 1,000"):
        open_video(path)
    monkeypatch.setenv("TORINO_MAX_PIXELS", "1600")
    with pytest.raises(BadFile, match="up to 8 of this size"):
        open_video(path, frames=9)
    assert len(open_video(path, frames=8)) == 8


def test_options_are_checked(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4")
    for options, message in (
        ({"fps": 0}, "fps must be"),
        ({"fps": float("nan")}, "fps must be"),
        ({"frames": 0}, "frames must be"),
        ({"frames": 10**6}, "frames must be at most"),
        ({"fps": 1, "frames": 2}, "not both"),
    ):
        with pytest.raises(BadParameter, match=message):
            open_video(path, **options)
    with pytest.raises(BadParameter, match="are 72,000 frames"):
        sample_times(3600.0, fps=20)
    opened = open_video(path)
    assert open_video(opened) is opened
    with pytest.raises(BadParameter, match="read already"):
        open_video(opened, frames=2)


def test_video_checks_its_fields() -> None:
    image = Image.new("RGB", (4, 4))
    for frames, times in (((), ()), ((image,), (0.0, 1.0)), ((image, image), (1.0, 1.0))):
        with pytest.raises(BadParameter):
            Video(frames, times)
    with pytest.raises(BadFile, match="different sizes"):
        Video((image, Image.new("RGB", (4, 5))), (0.0, 1.0))


# ------------------------------------------------------------------ folders


def test_folder_in_natural_order(tmp_path: Path) -> None:
    for i in (1, 2, 9, 10, 11):
        Image.new("RGB", (48, 32), (9 * i,) * 3).save(tmp_path / f"frame{i}.png")
    (tmp_path / "notes.txt").write_text("")
    opened = open_video(tmp_path)
    assert numbers(opened) == [1, 2, 9, 10, 11]
    assert opened.times == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert open_video(tmp_path, fps=2).times == (0.0, 0.5, 1.0, 1.5, 2.0)
    some = open_video(tmp_path, fps=2, frames=2)
    assert numbers(some) == [2, 10]
    assert some.times == (0.5, 1.5)


def test_folder_with_frames_of_different_sizes(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    Image.new("RGB", (9, 8)).save(tmp_path / "2.png")
    with pytest.raises(BadFile, match="different sizes"):
        open_video(tmp_path)


def test_only_files_need_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_clip(tmp_path / "clip.mp4")
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingPackage, match=r"Reading video files needs av.*torino\[video\]"):
        open_video(path)
    assert len(open_video(tmp_path)) == 1


def test_a_part_of_a_video(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", 20, 10.0)
    opened = open_video(path, frames=2, between=(1.0, 1.8))
    assert numbers(opened) == [12, 16]
    assert np.allclose(opened.times, [1.2, 1.6])
    assert numbers(open_video(path, fps=5, between=(1.5, 99.0))) == [15, 17, 19]
    with pytest.raises(BadFile, match="none between 3 and 4"):
        open_video(path, between=(3, 4))
