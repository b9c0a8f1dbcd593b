"""Host options (padding, positions, attention, text query) reach the model in every command that asks one."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_torino
from tests.support.tiny_vlm import QUESTION, photo, write_clip, write_files
from torino import make
from torino.vlm import VLM, ask, load_clip_text, load_vlm
from torino.vlm.session import Generated, Inputs, ReducedImages

SPEC = "tome(budget=6)"
Calls = list[tuple[VLM, Inputs, ReducedImages, Generated]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_files(tmp_path_factory.mktemp("options"))
    write_clip(folder / "clip", load_vlm(folder / "llava"))
    (folder / "photos").mkdir()
    photo().save(folder / "photos" / "a.png")
    image = base64.b64encode((folder / "photo.png").read_bytes()).decode()
    (folder / "task.tsv").write_text(f"index\timage\tquestion\tanswer\n0\t{image}\t{QUESTION}\tword1\n")
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every single generated answer of a reduced prompt."""
    result: Calls = []
    stock = VLM.generate

    def generate(self: VLM, inputs: Inputs, reductions: Any, **options: Any) -> Generated:
        output = stock(self, inputs, reductions, **options)
        result.extend((self, inputs, each, output) for each in reductions if each.tokens < 16)
        return output

    monkeypatch.setattr(VLM, "generate", generate)
    return result


def run_ask(home: Path, method: str, *options: str | Path) -> None:
    run_torino("ask", home / "photo.png", QUESTION, "--method", method, "--max-new-tokens", "4", *options)


def run_compare(home: Path, method: str, *options: str | Path) -> None:
    given = ("--methods", method, "--max-new-tokens", "4", "-o", home / "compare.png")
    run_torino("compare", home / "photo.png", QUESTION, *given, *options)


def run_eval(home: Path, method: str, *options: str | Path) -> None:
    output = home / f"run{len(list(home.iterdir()))}"
    given = ("--tasks", home / "task.tsv", "--methods", method, "--max-new-tokens", "4", "-o", output)
    run_torino("eval", *given, *options)


def run_bench(home: Path, method: str, *options: str | Path) -> None:
    sizes = ("--count", "1", "--warmups", "0", "--answers", "1", "--max-new-tokens", "4")
    given = ("--images", home / "photos", "--methods", method, "--question", QUESTION)
    run_torino("bench", *given, *sizes, *options)


COMMANDS = [run_ask, run_compare, run_eval, run_bench]
Command = Callable[..., None]


def run(command: Command, home: Path, method: str, *options: str | Path) -> None:
    command(home, method, "--model", home / "llava", "--device", "cpu", *options)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_reach_the_model(command: Command, home: Path, calls: Calls) -> None:
    options = {"padding": "square", "positions": "original", "attention": "proportional"}
    run(command, home, SPEC, *[word for name, value in options.items() for word in (f"--{name}", value)])
    assert calls
    for vlm, inputs, reduction, _ in calls:
        assert {name: getattr(vlm, name) for name in options} == options
        assert inputs.images[0].size == (96, 96), "padded to a square"
        assert (reduction.positions, reduction.proportional, reduction.tokens) == ("original", True, 6)
    calls.clear()
    run(command, home, SPEC)
    assert calls
    for _, inputs, reduction, _ in calls:
        assert inputs.images[0].size == (96, 56)
        assert (reduction.positions, reduction.proportional) == ("compact", False)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "options", [{"padding": "square"}, {"positions": "original"}, {"attention": "proportional"}], ids=str
)
def test_answers_are_those_of_a_session_with_the_option(
    command: Command, options: dict[str, Any], home: Path, calls: Calls
) -> None:
    run(command, home, SPEC, *[word for name, value in options.items() for word in (f"--{name}", value)])
    texts = {output.texts[0].strip() for _, _, _, output in calls if output.ids.shape[1] == 4}
    session = load_vlm(home / "llava", **options)
    question = calls[0][1].prompts[0].removeprefix("USER: <image>\n").removesuffix(" ASSISTANT:")
    assert question.startswith(QUESTION)  # an evaluation adds an instruction
    expected = ask(photo(), question, model=session, reducer=make(SPEC), max_new_tokens=4)
    assert texts == {expected.text.strip()}
    plain = ask(photo(), question, model=load_vlm(home / "llava"), reducer=make(SPEC), max_new_tokens=4)
    assert plain.text != expected.text, "the option has no effect here, so this test shows nothing"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_text_query_reaches_the_model(command: Command, home: Path, calls: Calls) -> None:
    run(command, home, "cdpruner(budget=6)", "--clip", home / "clip")
    assert calls
    session = load_vlm(home / "llava", text_query=load_clip_text(home / "clip"))
    for vlm, inputs, reduction, _ in calls:
        assert vlm.text_query is not None
        question = inputs.prompts[0].removeprefix("USER: <image>\n").removesuffix(" ASSISTANT:")
        encoded = session.encode(session.inputs(photo(), question))
        expected = session.reduce(encoded, make("cdpruner(budget=6)"))
        assert reduction.plans[0].anchor.tolist() == expected.plans[0].anchor.tolist()
