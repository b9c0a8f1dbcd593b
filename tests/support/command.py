"""Run the command ``torino`` in the test's own process."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

ENVIRONMENT = {"COLUMNS": "160", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


class CommandOutput(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything, without line breaks and frames."""
        return " ".join((self.out + " " + self.err).replace("│", " ").split())


def run_torino(*words: str | Path, code: int = 0) -> CommandOutput:
    """Run ``torino`` with these words, check its exit code, and return what it printed."""
    from torino.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["torino", *map(str, words)])
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        try:
            main()
            ended = 0
        except SystemExit as stop:
            ended = int(stop.code or 0)
    output = CommandOutput(out.getvalue(), err.getvalue())
    assert ended == code, output
    assert "Traceback" not in output.err
    return output
