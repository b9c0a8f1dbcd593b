"""A tiny model with its SAE, shared by the tests of the server. Without torino[serve] nothing is collected."""

from __future__ import annotations

from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("fastapi") else ["test_*.py"]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.serving import write_home

    return write_home(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="session")
def session(home: Path) -> Any:
    from tests.support.serving import open_home

    return open_home(home)


@pytest.fixture
def vlm(session: Any) -> Any:
    return session[0]


@pytest.fixture
def reducer(session: Any) -> Any:
    return session[1]


@pytest.fixture(scope="session")
def server(home: Path) -> Generator[Any]:
    """A server in a process of its own, with small limits."""
    from tests.support.serving import command_server, tiny_words

    limits = ["--max-tokens", "900", "--max-megabytes", "1", "--timeout", "30"]
    with command_server(*tiny_words(home), *limits) as running:
        yield running
