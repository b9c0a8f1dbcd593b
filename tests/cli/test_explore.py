"""``torino explore``: options that are refused before the model is loaded, and the command itself."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.command import run_torino
from tests.support.tiny_vlm import write_files

pytest.importorskip("fastapi")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("explore"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "."], "--data says where the tasks of a run are"),
        (["--run", "."], "is not a run"),
        (["nothing-here"], "There are no photos at nothing-here"),
        (["--sae", ""], "--sae is empty"),
        (["--sae", "no-such-folder"], "no-such-folder"),
        (["--host", "999.1.1.1", "--sae", "none"], "Cannot listen on 999.1.1.1"),
    ],
)
def test_wrong_options_are_one_sentence(home: Path, words: list[str], message: str) -> None:
    failed = run_torino("explore", *words, "--model", home / "llava", "--port", "0", "--no-browser", code=2)
    assert message in failed.text
    assert "Explore at" not in failed.text


def test_a_taken_port_is_one_sentence(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["--model", home / "llava", "--sae", home / "sae", "--port", port]
        assert f"Cannot listen on 127.0.0.1:{port}" in run_torino("explore", *words, code=2).text


def test_the_command_serves_and_stops(home: Path) -> None:
    words = ["explore", "--model", str(home / "llava"), "--sae", str(home / "sae"), "--port", "0", "--no-browser"]
    process = subprocess.Popen([sys.executable, "-m", "torino", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        for path in ("/health", "/", "/api/info"):
            with urllib.request.urlopen(address[0] + path, timeout=60) as answer:
                assert answer.status == 200
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 128 + signal.SIGINT
