"""Ctrl-C and SIGTERM: every command ends with one line that says how to continue, and exit code 130 or 143."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import colored_squares as squares
from tests.support.command import run_torino
from tests.support.tiny_run import make_sae, write_task_file
from tests.support.tiny_vlm import build_llava, photo
from torino.cli import _progress, _stop
from torino.core.tokens import save_tokens
from torino.evaluation.results import open_run

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SIGNALS = pytest.mark.parametrize("number", list(CODES), ids=lambda number: number.name)
IMPORT = """
import os, signal, sys

NAME, NUMBER = sys.argv[1], int(sys.argv[2])
sys.argv = ["torino", *sys.argv[3:]]

class Interrupt:
    def find_spec(self, name, *_):
        if name == NAME:
            os.kill(os.getpid(), NUMBER)

sys.meta_path.insert(0, Interrupt())
from torino.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    build_llava(folder / "llava")
    make_sae().save(folder / "sae")
    write_task_file(folder / "small.tsv", images=3)
    photo().save(folder / "photo.png")
    squares.write_tower(folder)
    squares.make_sae().save(folder / "colors")
    photos = squares.make_photos().photos
    columns: dict[str, Any] = {
        "image": [item.data for item in photos],
        "captions": [list(item.texts) for item in photos],
    }
    pq.write_table(pa.table(columns), folder / "photos.parquet")
    tokens = squares.make_tower().encode([item.data for item in photos])
    save_tokens(tokens, folder / "tokens.npz")
    run_torino("activations", *activation_words(folder), "-o", folder / "store")
    return folder


def activation_words(home: Path) -> list[str | Path]:
    return [
        "--tower",
        home / squares.TOWER_NAME,
        "--images",
        home / "photos.parquet",
        "--batch",
        "2",
        "--shard-rows",
        "64",
    ]


def words_of(home: Path, output: Path) -> dict[str, tuple[list[str | Path], str]]:
    """Return words of each long command, and what it says when it is stopped."""
    training = [home / "store", "-o", output, "--steps", "12", "--batch", "16", "--k", "2", "--save-every", "2"]
    resume = f"Run the same command again to resume from the last checkpoint in {output}."
    concepts = [home / "colors", "--images", home / "photos.parquet", "--tower", home / squares.TOWER_NAME]
    evaluation = [
        "--model",
        home / "llava",
        "--sae",
        home / "sae",
        "--tasks",
        home / "small.tsv",
        "--methods",
        "random",
    ]
    tokens = [home / "tokens.npz", "--sae", home / "colors"]
    return {
        "eval": (
            [*evaluation, "--budget", "6", "-o", output],
            f"Run the same command again to continue; the answers so far are in {output}.",
        ),
        "train": ([*training, "--latents", "16"], resume),
        "sweep": ([*training, "--expansions", "2,4"], resume),
        "activations": ([*activation_words(home), "-o", output], f"Continue with torino activations -o {output}."),
        "concepts": (
            [*concepts, "-o", output, "--keep", "6", "--batch", "2"],
            "Run the same command again to continue.",
        ),
        "bench": (["--tokens", *tokens, "--methods", "random", "--budget", "6", "--count", "3"], _stop.START_OVER),
        "calibrate": ([*tokens, "--target", "4"], _stop.START_OVER),
        "reduce": ([*tokens], _stop.START_OVER),
    }


@contextmanager
def stopped_at(number: int, update: int) -> Generator[None]:
    """Send a signal to this process when a command reports its progress for the ``update``-th time."""

    @contextmanager
    def show(*_: Any) -> Generator[Callable[..., None]]:
        count = 0

        def report(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == update:
                signal.raise_signal(number)

        yield report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_progress, "_print_lines", show)
        yield


@SIGNALS
@pytest.mark.parametrize("command", list(words_of(Path(), Path())))
def test_a_long_command_says_how_to_continue(home: Path, tmp_path: Path, command: str, number: signal.Signals) -> None:
    words, advice = words_of(home, tmp_path / "out")[command]
    before = signal.getsignal(number)
    with stopped_at(number, 2):
        stopped = run_torino(command, *words, code=CODES[number])
    assert stopped.err.splitlines()[-1] == f"Stopped. {advice}"
    assert stopped.err.count("Stopped") == 1
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("command", ["eval", "train", "sweep", "activations", "concepts"])
def test_a_stopped_command_continues(home: Path, tmp_path: Path, command: str) -> None:
    words, _ = words_of(home, tmp_path / "out")[command]
    with stopped_at(signal.SIGTERM, 7):
        run_torino(command, *words, code=143)
    run_torino(command, *words)
    if command == "eval":
        rows = [(row["setting"], row["index"]) for row in open_run(tmp_path / "out").rows()]
        assert len(rows) == len(set(rows)) == 6 * len(open_run(tmp_path / "out").settings)


@pytest.mark.parametrize(
    "words",
    [("look", "--tower", "{llava}"), ("ask", "what ?", "--model", "{llava}", "--draw", "{out}")],
    ids=lambda words: words[0],
)
def test_short_commands_too(
    home: Path, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torino.viz.draw.save_picture", lambda *_: signal.raise_signal(signal.SIGINT))
    command, *others = [word.format(llava=home / "llava", out=tmp_path / "out.png") for word in words]
    options = ["--method", "random", "--budget", "6", "--device", "cpu"]
    stopped = run_torino(command, home / "photo.png", *others, *options, code=130)
    assert stopped.err.splitlines()[-1] == "Stopped. Run the same command again to start over."


@pytest.mark.parametrize(
    ("name", "number", "advice"),
    [
        ("typer", signal.SIGINT, "Run the same command again."),
        ("rich.markup", signal.SIGTERM, "Run the same command again."),
        ("torino.core.tokens", signal.SIGINT, "Run the same command again to start over."),
    ],
)
def test_while_it_starts(name: str, number: signal.Signals, advice: str) -> None:
    """An exception during an import would come out as a traceback."""
    words = [sys.executable, "-c", IMPORT, name, str(int(number)), "calibrate"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (CODES[number], "", f"Stopped. {advice}\n")


def test_in_a_finalizer() -> None:
    """Python would print the exception and ignore it."""
    code = (
        "import os, signal\n"
        "from torino.cli._stop import stop_on_signals\n"
        "class Final:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        [0 for _ in range(99)]\n"
        "with stop_on_signals():\n"
        "    Final()\n"
        "    print('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped. Run the same command again.\n")


def test_a_second_signal_leaves_at_once_and_an_ignored_one_is_ignored() -> None:
    code = (
        "import os, signal, sys\n"
        "from torino.cli._stop import stop_on_signals\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with stop_on_signals():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('ignored', flush=True)\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        print('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "ignored\n")
    assert done.stderr == "Stopped. Run the same command again.\n"


def test_a_report_does_not_wait_for_the_judge(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    data = write_task_file(tmp_path / "MMVet.tsv", images=1)
    given = ("--model", home / "llava", "--methods", "none", "--device", "cpu", "--max-new-tokens", "2")
    run_torino("eval", *given, "--tasks", data, "-o", tmp_path / "run")
    asked, answer = Event(), Event()

    class Silent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.set()
            answer.wait(60)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    environment = {"TORINO_JUDGE_URL": f"http://127.0.0.1:{server.server_port}/v1", "TORINO_JUDGE_MODEL": "grader"}
    command = [sys.executable, "-m", "torino", "report", str(tmp_path / "run"), "--no-figures"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, text = process.communicate(timeout=30)
        assert time.monotonic() - begin < 5
    finally:
        process.kill()
        answer.set()
        server.shutdown()
        server.server_close()
    assert process.returncode == 130
    grades = tmp_path / "run" / "grades.jsonl"
    advice = f"Stopped. Run the same command again to continue; the judge's grades so far are in {grades}."
    assert text.splitlines()[-1] == advice
