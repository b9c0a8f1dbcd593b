"""Read damaged copies of a file: the only error allowed is ``TorinoError``, with a message that can be printed."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings

from tests.support.damage import damaged
from torino import TorinoError

MAX_SECONDS = 60  # for one damaged file
MAX_NEW_BYTES = 4 << 30  # of address space, for one damaged file
MAX_MESSAGE = 2000


@dataclass(frozen=True)
class FuzzCase:
    """A file and its reader.

    Attributes
    ----------
    name : str
    build : callable
        Writes a valid file, and the others that it needs, into a new folder.
    target : str
        The file that is damaged, relative to the folder.
    use : callable
        Reads the folder and uses what it has read.
    cost : int
        By how much the number of examples is divided, because reading takes long.
    reseal : callable
        Corrects a checksum of the damaged content: otherwise nothing behind it would be tested.
    """

    name: str
    build: Callable[[Path], Any]
    target: str
    use: Callable[[Path], Any]
    cost: int = 1
    reseal: Callable[[bytes], bytes] = bytes

    def __str__(self) -> str:
        return f"{self.name}:{self.target}"

    @property
    def template(self) -> Path:
        """The folder with valid files, written once."""
        return _build_once(self.build)

    def run(self, content: bytes | None) -> None:
        """Use a copy of the folder in which the target has this content; None leaves it as it is."""
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top) / "copy"
            shutil.copytree(self.template, folder)
            if content is None:
                self.use(folder)
                return
            (folder / self.target).write_bytes(self.reseal(content))
            with only_torino_errors():
                self.use(folder)


def fuzz(case: FuzzCase) -> None:
    """Read many damaged copies; their number is that of the hypothesis profile."""
    valid = (case.template / case.target).read_bytes()

    @settings(max_examples=max(5, settings.default.max_examples // case.cost))  # type: ignore[union-attr]
    @given(damaged(valid, case.target))
    def check(content: bytes) -> None:
        case.run(content)

    check()


@contextmanager
def only_torino_errors() -> Generator[None]:
    """Allow only ``TorinoError``, with a short message that every terminal and file can hold."""
    with warnings.catch_warnings(), _limits():
        warnings.simplefilter("ignore")
        try:
            yield
        except TorinoError as error:
            message = str(error)
            assert message.strip(), "the message is empty"
            assert len(message) <= MAX_MESSAGE, f"the message has {len(message)} characters: {message[:200]}"
            message.encode()  # a lone surrogate could not be printed


@contextmanager
def _limits() -> Generator[None]:
    """Bound time and memory, so that a file that asks for too much of them fails its test and not the machine."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # not Linux
        yield
        return
    main = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_NEW_BYTES, hard))
    previous = signal.signal(signal.SIGALRM, _stop) if main else None
    if main:
        signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if main:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)


def _stop(number: int, frame: object) -> None:
    raise AssertionError(f"reading takes more than {MAX_SECONDS} s")


@cache
def _build_once(build: Callable[[Path], Any]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="torino-fuzz-"))
    _templates.append(folder)
    build(folder)
    return folder


_templates: list[Path] = []


def remove_templates() -> None:
    """Remove the folders of valid files."""
    while _templates:
        shutil.rmtree(_templates.pop(), ignore_errors=True)
    _build_once.cache_clear()
