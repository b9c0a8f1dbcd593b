"""Stop a command on Ctrl-C or SIGTERM: one line that says how to continue, and exit code 130 or 143.

Importing this module is cheap, so that start-up can be interrupted too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

RUN_AGAIN = "Run the same command again."
START_OVER = "Run the same command again to start over."
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # clears a progress line, and shows the cursor that it had hidden

_advice = RUN_AGAIN
_at_once = False
_stopping = False


class Stop(BaseException):
    """A signal that ends the command; not a KeyboardInterrupt, which typer catches."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def on_stop(advice: str, *, at_once: bool = False) -> None:
    """Set the sentence that is printed when the command is stopped from here on.

    Parameters
    ----------
    advice : str
        How to continue.
    at_once : bool
        Leave on the first signal, without waiting for threads that may take minutes, such as requests to a server.
    """
    global _advice, _at_once
    _advice, _at_once = advice, at_once


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
    on_stop(RUN_AGAIN)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hook = sys.unraisablehook
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, _handle)
    sys.unraisablehook = _report_unraisable
    try:
        yield
    except (Stop, KeyboardInterrupt) as stop:
        _leave(stop.number if isinstance(stop, Stop) else signal.SIGINT)
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    global _stopping
    if _stopping or _at_once or _is_importing(frame):
        _leave(number)
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
        _leave(unraisable.exc_value.number)
    sys.__unraisablehook__(unraisable)


def _leave(number: int) -> NoReturn:
    """Print the line and end the process without running anything else, with the usual exit code of a signal."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # one line is enough
    with suppress(OSError, ValueError, RuntimeError):  # closed, full, or interrupted in the middle of a write
        sys.stdout.flush()
    with suppress(OSError, ValueError, RuntimeError):
        sys.stderr.write(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}Stopped. {_advice}\n")
        sys.stderr.flush()
    os._exit(128 + number)
