"""Run the command ``torino`` in the test's own process."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
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


def run_torino(*words: str | Path, code: int = 0, encoding: str | None = None) -> CommandOutput:
    """Run ``torino`` with these words, check its exit code, and return what it printed.

    ``encoding`` is that of the terminal; without one, every character can be printed.
    """
    from torino.__main__ import main
    from torino.cli import _stop

    streams = [io.StringIO() if encoding is None else io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        patch.setattr(sys, "argv", ["torino", *map(str, words)])
        # only the command's own way of leaving, not that of forked processes
        patch.setattr(_stop, "os", SimpleNamespace(**{**vars(os), "_exit": sys.exit}))
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        try:
            main()
            ended = 0
        except SystemExit as stop:
            ended = int(stop.code or 0)
    for stream in streams:
        stream.seek(0)
    output = CommandOutput(*[stream.read() for stream in streams])
    assert ended == code, output
    assert "Traceback" not in output.err
    return output
