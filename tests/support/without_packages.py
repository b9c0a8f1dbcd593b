"""Run torino commands in a new process as if packages were not installed.

    python without_packages.py '{"packages": ["PIL"], "lab": true, "commands": [["list"]]}'

Prints one JSON list: exit code and output of each command.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


def run_without(
    packages: Sequence[str], commands: Sequence[Sequence[str]], folder: Path, *, lab: bool = True, **environment: str
) -> list[tuple[int, str]]:
    """Return exit code and output of each command, run in ``folder`` with an empty cache.

    Parameters
    ----------
    packages : sequence of str
        Modules that cannot be imported.
    commands : sequence of sequences of str
        Words after ``torino``.
    folder : Path
    lab : bool
        Whether the entry points of torino-lab are there.
    **environment
        More environment variables.
    """
    import os

    request = json.dumps({"packages": list(packages), "lab": lab, "commands": [list(words) for words in commands]})
    settings = {"TORINO_CACHE": str(folder / "empty-cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "400", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, __file__, request],
        cwd=folder,
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, text) for code, text in json.loads(done.stdout)]


def _run(words: Sequence[str]) -> tuple[int, str]:
    from torino.cli.main import main

    out = io.StringIO()
    sys.argv = ["torino", *words]
    with redirect_stdout(out), redirect_stderr(out):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception as error:  # what a user would see as a traceback
            code = 1
            print(f"Traceback: {type(error).__name__}: {error}")  # noqa: T201
    return code, " ".join(out.getvalue().split())


def _hide_lab() -> None:
    """Hide the entry points of model and task packages."""
    real = importlib.metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        hidden = str(selection.get("group", "")).startswith("torino.")
        return importlib.metadata.EntryPoints() if hidden else real(**selection)

    importlib.metadata.entry_points = entry_points


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for package in given["packages"]:
        sys.modules[package] = None  # type: ignore[assignment]
    if not given["lab"]:
        _hide_lab()
    print(json.dumps([_run(words) for words in given["commands"]]))  # noqa: T201
