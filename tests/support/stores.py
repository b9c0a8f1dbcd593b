"""Contents of token stores, and processes to kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.files import read_folder

ROOT = Path(__file__).parents[2]


def store_bytes(folder: Path) -> dict[str, bytes]:
    """Return the files of a store without its lock files."""
    return {name: data for name, data in read_folder(folder).items() if not Path(name).name.startswith(".lock")}


def start_torino(words: Sequence[str | Path], **environment: str) -> subprocess.Popen[str]:
    """Start ``torino`` in a new process."""
    paths = [str(ROOT / "src"), str(ROOT / "lab" / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "torino", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", **environment},
    )


def kill_after_first_shard(process: subprocess.Popen[str], folder: Path, seconds: float = 240) -> None:
    """Kill a process with SIGKILL as soon as its store has a shard."""
    end = time.monotonic() + seconds
    while not list((folder / "shards").glob("[0-9]*.safetensors")):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < end, "no shard was written in time"
        time.sleep(0.02)
    process.kill()
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def wait_for_descendants(process: subprocess.Popen[str], words: str, seconds: float = 240) -> list[int]:
    """Wait until a process has started others with these words in their command line; return them."""
    end = time.monotonic() + seconds
    while not (found := [pid for pid in descendants(process.pid) if words in command_of(pid)]):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < end, f"no process with {words} was started in time"
        time.sleep(0.2)
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def ended(pids: Sequence[int], seconds: float = 60) -> bool:
    """Wait until processes have ended; return whether they have."""
    end = time.monotonic() + seconds
    while any(command_of(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
