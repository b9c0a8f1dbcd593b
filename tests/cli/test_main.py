"""The command ``torino``: entry point, exit codes, help, start-up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.command import run_torino
from torino.cli.main import app

COMMANDS = sorted(str(item.name or item.callback.__name__) for item in app.registered_commands if item.callback)
HEAVY = {"torch", "transformers", "PIL", "huggingface_hub", "pyarrow", "matplotlib", "numpy"}


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)


def test_an_error_is_one_sentence_with_exit_code_2() -> None:
    """Run one real process."""
    done = subprocess.run([sys.executable, "-m", "torino", "reduce", "--kd", "0,0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("torino: --kd takes k,delta")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("look",),
        ("ask", "astronaut", "What is it?"),
        ("compare", "astronaut", "What is it?"),
        ("compare", "astronaut", "What is it?", "--methods", "random"),
        ("reduce",),
        ("calibrate",),
        ("eval", "--model", "lab", "--tasks", "POPE", "-o", "never-written"),
        ("serve",),
        ("bench",),
        ("bench", "--sae", "none"),
    ],
    ids=" ".join,
)
def test_an_empty_sae_is_refused_everywhere(words: tuple[str, ...]) -> None:
    """An unset variable of the shell gives it."""
    for empty in ("", " "):
        failed = run_torino(*words, "--sae", empty, code=2)
        assert failed.err.startswith("torino: --sae is empty. Give a folder"), failed.err
        assert failed.out == ""
    assert "The name of the SAE is empty" in run_torino("info", "", code=2).err


def test_there_are_all_commands() -> None:
    assert {"ask", "bench", "calibrate", "compare", "eval", "export", "info", "list", "look", "reduce", "report"} <= {
        *COMMANDS
    }
    text = run_torino("--help").text
    assert all(f" {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str) -> None:
    lines = [line.strip() for line in run_torino(command, "--help").out.splitlines()]
    examples = [line for line in lines if line.startswith("torino ")]
    assert examples, f"torino {command} --help has no example on a line of its own"
    assert any(line.split()[1] == command for line in examples)


def test_version() -> None:
    assert run_torino("--version").out.startswith("torino 0.")


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("eval", "--help"), ("compare", "--help")])
def test_help_loads_no_heavy_library(words: tuple[str, ...]) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('MODULES', *sys.modules))\n"
        "from torino.cli.main import main\n"
        "sys.argv[0] = 'torino'\n"
        "main()\n"
    )
    done = run_python(code, *words)
    assert done.returncode == 0, done.stderr
    shown, _, modules = done.stdout.rpartition("MODULES ")
    assert "torino" in shown
    loaded = {name.partition(".")[0] for name in modules.split()}
    assert "typer" in loaded
    assert not HEAVY & loaded


def test_a_closed_pipe_is_no_error() -> None:
    code = "from torino.cli.main import main; import sys; sys.argv = ['torino', 'list', 'layouts']; main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait()


def test_unknown_commands_and_options_are_usage_errors() -> None:
    assert "No such command 'reduse'" in run_torino("reduse", code=2).text
    assert "No such option: --k" in run_torino("reduce", "--k", "2", code=2).text
