"""Videos in ``torino ask`` and ``torino look``: files and folders, film strips and animations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from tests.support import colored_squares as squares
from tests.support.tiny_vlm import QUESTION, photo, write_files
from torino import SAE, make
from torino.cli.ask import ask as ask_command
from torino.cli.look import look
from torino.core.errors import TorinoError
from torino.datasets.video import open_video
from torino.vlm import ask, load_vlm

FRAMES = 3


def run(command: Any, *words: str | Path) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_files(tmp_path_factory.mktemp("video"))
    (folder / "frames").mkdir()
    for number in range(FRAMES):
        photo().rotate(90 * number).save(folder / "frames" / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower of colors, its SAE, and frames: two with red squares and one with blue ones."""
    folder = tmp_path_factory.mktemp("look-video")
    squares.write_tower(folder)
    squares.make_sae().save(folder / "sae")
    red, blue = squares.COLORS["red"], squares.COLORS["blue"]
    (folder / "frames").mkdir()
    for number, cells in enumerate(({0: red, 1: red}, {1: red, 2: red}, {0: blue, 14: blue})):
        (folder / "frames" / f"{number}.png").write_bytes(squares.paint_photo(cells))
    return folder


def run_look(data: Path, *options: str | Path) -> Any:
    return run(look, data / "frames", "--tower", data / squares.TOWER_NAME, "--sae", data / "sae", *options)


# ---------------------------------------------------------------------- ask


def test_ask_about_a_folder_of_frames(home: Path, tmp_path: Path) -> None:
    words = ("--video", home / "frames", QUESTION, "--model", home / "llava", "--sae", home / "sae", "--kd", "1,1")
    result = run(ask_command, *words, "--max-new-tokens", "4", "--json", "--draw", tmp_path / "film.png")
    assert result.exit_code == 0, result.output
    assert f"its {FRAMES} frames are shown as images, reduced together" in result.output
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert report["image_tokens"]["before"] == FRAMES * 16
    vlm = load_vlm(home / "llava")
    reducer = make("torino-m(k=1, delta=1)", sae=SAE.load(home / "sae"))
    answer = ask(open_video(home / "frames"), QUESTION, model=vlm, reducer=reducer, max_new_tokens=4)
    assert report["image_tokens"]["after"] == answer.after
    assert report["answer"] == answer.text.strip()
    assert answer.reduction.frames == FRAMES
    assert answer.reduction.times == (0.0, 1.0, 2.0)
    with Image.open(tmp_path / "film.png") as film:
        assert film.width == 620  # the curve below needs more room than three small frames


def test_frames_reduced_by_themselves_equal_several_images(home: Path) -> None:
    vlm, reducer = load_vlm(home / "llava"), make("prunesid(budget=4)")
    video = open_video(home / "frames")
    together = ask(video, QUESTION, model=vlm, reducer=reducer, max_new_tokens=4)
    images = ask(list(video.frames), QUESTION, model=vlm, reducer=reducer, max_new_tokens=4)
    assert (together.text, together.after) == (images.text, images.after)
    assert len(together.reductions) == FRAMES
    words = ("--video", home / "frames", QUESTION, "--model", home / "llava", "--method", "prunesid", "--budget", "4")
    result = run(ask_command, *words, "--max-new-tokens", "2", "--no-baseline")
    assert result.exit_code == 0, result.output
    assert "each reduced by itself by prunesid" in result.output


def test_all_tokens_of_a_video_equal_several_images(home: Path) -> None:
    vlm, video = load_vlm(home / "llava"), open_video(home / "frames")
    full = ask(video, QUESTION, model=vlm, max_new_tokens=6)
    assert full.text == ask(list(video.frames), QUESTION, model=vlm, max_new_tokens=6).text
    kept = ask(video, QUESTION, model=vlm, reducer=make("random(budget=48)"), max_new_tokens=6)
    assert (kept.text, kept.after) == (full.text, FRAMES * 16)


def test_reductions_of_frames_together_and_apart_share_a_batch(home: Path) -> None:
    vlm = load_vlm(home / "llava")
    reducers = [make("random(budget=9)"), make("prunesid(budget=4)"), None, make("random(budget=20)")]
    inputs = vlm.inputs(open_video(home / "frames"), QUESTION)
    encoded = vlm.encode(inputs, reducers)
    reductions = [vlm.reduce(encoded, reducer) for reducer in reducers]
    assert [len(reduction.encoded.full) for reduction in reductions] == [1, FRAMES, FRAMES, 1]
    output = vlm.generate(inputs, reductions, max_new_tokens=5)
    alone = [vlm.answer(inputs, reducer, max_new_tokens=5).text for reducer in reducers]
    assert output.texts == alone


def test_one_frame_equals_the_image(home: Path) -> None:
    vlm, reducer = load_vlm(home / "llava"), make("random(budget=5)")
    video = open_video(home / "frames", frames=1)
    answer = ask(video, QUESTION, model=vlm, reducer=reducer, max_new_tokens=6)
    assert answer.text == ask(video.frames[0], QUESTION, model=vlm, reducer=reducer, max_new_tokens=6).text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["photo.jpg", "What?", "--fps", "2"], "Add --video PATH"),
        (["photo.jpg"], "The question is missing"),
        (["photo.jpg", "What?", "--video", "clip.mp4"], "takes the place of the image"),
        (["What?", "--video", "missing.mp4"], "no file or folder"),
    ],
)
def test_wrong_arguments_of_ask(words: list[str], message: str) -> None:
    result = run(ask_command, *words)
    assert isinstance(result.exception, TorinoError), result.output
    assert message in str(result.exception)


# ---------------------------------------------------------------------- look


def test_look_draws_a_film_strip(data: Path, tmp_path: Path) -> None:
    result = run_look(data, "--kd", "1,1", "--fps", "2", "--json", "-o", tmp_path / "film.png")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["frames"] == FRAMES
    assert report["times"] == [0.0, 0.5, 1.0]
    assert report["patches"] == FRAMES * 16
    assert report["tokens"] == 3  # gray, red and blue; the gray one lasts from the first frame to the last
    assert report["tokens_per_second"] == [4.0, 0.0, 2.0]
    with Image.open(tmp_path / "film.png") as film:
        assert film.format == "PNG"


@pytest.mark.parametrize("name", ["film.gif", "film.webp"])
def test_look_writes_an_animation(data: Path, tmp_path: Path, name: str) -> None:
    result = run_look(data, "-o", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert f"{FRAMES} frames, {FRAMES * 16} patches" in result.output
    with Image.open(tmp_path / name) as film:
        assert film.n_frames == FRAMES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kd", "1,1", "--kd", "2,2"], "drawn with one setting"),
        (["--show"], "not a video"),
        (["-o", "film.mp4"], "must end in"),
        (["--frames", "1", "--fps", "0"], "fps must be"),
    ],
)
def test_wrong_options_of_look(data: Path, options: list[str], message: str) -> None:
    result = run_look(data, *options)
    assert isinstance(result.exception, TorinoError), result.output
    assert message in str(result.exception)


def test_a_method_for_images_is_refused(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "film.png"
    words = ("--tower", data / squares.TOWER_NAME, "--method", "tome-tower(budget=4)", "-o", output)
    result = run(look, data / "frames", *words)
    assert "works on single images" in str(result.exception)
