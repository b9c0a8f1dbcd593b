"""Text from others on the terminal: control characters are shown, and nothing is taken as markup."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from tests.support.command import CommandOutput, run_torino
from torino.cli._console import SafeConsole
from torino.evaluation.reporting.summary import summarize_and_save
from torino.evaluation.results import open_run

HOSTILE = "a\x1b]0;owned\x07\x9b31m[bold red]b[/]\x1b[2J"


def check_output(output: CommandOutput | str, *, shown: bool = True) -> None:
    """Check that no control character was printed, and that the hostile text was, as it is."""
    text = output if isinstance(output, str) else output.out + output.err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), repr(text)
    if shown:
        assert re.search(r"a\\(u00|x)1b\]0;owned\\(u00|x)07\\(u00|x)9b31m\[bold red\]b\[/\]", text), repr(text)


@pytest.mark.parametrize("width", [300, 20])
@pytest.mark.parametrize("kind", ["text", "Text", "cell", "status", "json"])
def test_console_shows_control_characters(kind: str, width: int) -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, width=width, emoji=False)
    table = Table(box=None)
    table.add_row(Text(HOSTILE), HOSTILE.replace("[", r"\["))
    if kind == "json":
        console.print_json(json.dumps({"name": HOSTILE + "\udcff"}))
        assert json.loads(file.getvalue()) == {"name": HOSTILE + "\udcff"}
    elif kind == "status":
        with console.status(Text(HOSTILE)):
            pass
    else:
        console.print({"text": HOSTILE, "Text": Text(HOSTILE), "cell": table}[kind], markup=False)
    check_output(file.getvalue(), shown=kind == "text" and width > 200)
    if kind == "cell":
        assert all(len(line) <= width for line in file.getvalue().splitlines())


@pytest.mark.parametrize(
    "words",
    [
        ("look", HOSTILE),
        ("ask", HOSTILE, "what ?"),
        ("reduce", HOSTILE, "-o", "x"),
        ("info", HOSTILE),
        ("export", HOSTILE, "x"),
        ("report", HOSTILE),
        ("plot", HOSTILE, "-o", "x"),
        ("eval", "--model", "lab", "--tasks", HOSTILE, "-o", "run"),
        ("train", HOSTILE, "-o", "sae"),
        ("concepts", "example", "--images", HOSTILE, "--tower", "x", "-o", "x"),
        ("activations", "--tower", "x", "--images", HOSTILE, "-o", "x"),
    ],
    ids=lambda words: words[0],
)
def test_names_in_errors_of_commands(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_output(run_torino(*words, code=2))


def test_arguments_that_typer_refuses() -> None:
    check_output(run_torino("look", "astronaut", HOSTILE, code=2), shown=False)
    check_output(run_torino("look", "--device", "cpu", f"--{HOSTILE}", code=2), shown=False)


def test_indices_and_names_of_a_task(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"index": HOSTILE, "image": "gone.png", "question": "?", "answer": "x"}] * 2
    task = tmp_path / f"{HOSTILE.replace('/', '')}.jsonl"
    task.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    check_output(run_torino("eval", "--model", "lab", "--tasks", task, "-o", tmp_path / "run", code=2), shown=False)


def test_run_with_hostile_names(tmp_path: Path) -> None:
    from tests.support.synthetic_run import write_synthetic_run

    run = write_synthetic_run(tmp_path / "run", questions=4)
    content = json.loads((run / "run.json").read_text())
    content["model"] = HOSTILE
    (run / "run.json").write_text(json.dumps(content))
    summarize_and_save(open_run(run), draws=50)
    check_output(run_torino("report", run, "--no-figures", "-o", tmp_path / HOSTILE.replace("/", "")), shown=False)
    for path in (tmp_path / HOSTILE.replace("/", "")).iterdir():
        check_output(path.read_text(encoding="utf-8"), shown=False)
