"""vLLM's own server is run as a process of its own: arguments, environment, signals, exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

STAND_IN = """
import json, os, signal, sys, time
if "--fail" in sys.argv:
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps([sys.argv[1:], os.environ.get("VLLM_API_KEY")]), flush=True)
time.sleep(60)
"""
RUN = """
import json, os, sys
from torino.serving.server.vllm import run_vllm
sys.exit(run_vllm(sys.argv[1:], os.environ | {"VLLM_API_KEY": "key"}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a stand-in for vLLM's server."""
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").write_text("")
    (folder / "api_server.py").write_text(STAND_IN)
    paths = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def test_arguments_reach_it_and_signals_too(environment: dict[str, str]) -> None:
    words = [sys.executable, "-c", RUN, "--model", "x"]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == '[["--model", "x"], "key"]\n'
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert time.monotonic() - begin < 15


def test_its_exit_code_is_passed_on(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, "--fail"], env=environment, check=False)
    assert done.returncode == 7


def test_a_killed_server_gives_the_code_of_its_signal(environment: dict[str, str]) -> None:
    words = [sys.executable, "-c", RUN]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    import psutil

    (child,) = psutil.Process(process.pid).children()
    child.kill()
    assert process.wait(20) == 137


PARENT = """
import subprocess, sys, time
from torino.serving.server.supervisor import end_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=end_with_parent)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="parent death signals are a feature of Linux")
def test_an_engine_ends_with_a_front_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
