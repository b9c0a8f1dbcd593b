"""Stop a command on Ctrl-C or SIGTERM: one line that says how to continue, and exit code 130 or 143.

Importing this module is cheap, so that start-up can be interrupted too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

NOTHING_WRITTEN = "Nothing was written."
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # clears a progress line, and shows the cursor that it had hidden

_advice = NOTHING_WRITTEN
_stopping = False


class Stop(KeyboardInterrupt):
    """A signal that ends the command. Libraries treat it as Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def on_stop(advice: str) -> None:
    """Set the sentence that is printed when the command is stopped from here on."""
    global _advice
    _advice = advice


def stop_message() -> str:
    """Return the line that is printed when the command is stopped now."""
    return f"Stopped. {_advice}"


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the conventional exit code: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (stop.number if isinstance(stop, Stop) else int(signal.SIGINT))


@contextmanager
def stop_on_signals() -> Generator[None]:
    """Raise Stop on the first signal, and leave at once on the second, and on any signal while a module is imported.

    An interrupted import can neither be cleaned up nor caught: extension modules turn the exception into another one
    and print a traceback. Leaving at once is safe, because files are written atomically. A signal that the caller
    ignores, as nohup does, stays ignored.
    """
    global _stopping
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _stopping = False
    on_stop(NOTHING_WRITTEN)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hook = sys.unraisablehook
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, _handle)
    sys.unraisablehook = _report_unraisable
    try:
        yield
    except KeyboardInterrupt as stop:
        _leave(exit_code(stop))
    finally:
        if not _stopping:
            sys.unraisablehook = hook
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    global _stopping
    if _stopping or _is_importing(frame):
        _leave(128 + number)
    _stopping = True
    raise Stop(number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _report_unraisable(unraisable: Any) -> None:
    """Leave if the exception was raised in a finalizer, where it would be lost; report other exceptions as usual."""
    if isinstance(unraisable.exc_value, Stop):
        _leave(exit_code(unraisable.exc_value))
    sys.__unraisablehook__(unraisable)


def _leave(code: int) -> NoReturn:
    """Print the line and end the process without running anything else."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr:
                stream.write(f"{SHOW_CURSOR if stream.isatty() else ''}{stop_message()}\n")
            stream.flush()
        except (OSError, ValueError, RuntimeError):  # closed, full, or interrupted in the middle of a write
            continue
    os._exit(code)
