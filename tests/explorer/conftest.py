"""An explorer on a tiny model, shared by its tests. Without torino[serve] nothing is collected."""

from __future__ import annotations

from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("fastapi") else ["test_*.py"]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_vlm import write_files

    return write_files(tmp_path_factory.mktemp("explorer"))


@pytest.fixture(scope="session")
def vlm(home: Path) -> Any:
    from torino.vlm import load_vlm

    return load_vlm(home / "llava")


@pytest.fixture
def open_client(vlm: Any, home: Path, tmp_path: Path) -> Generator[Callable[..., Any]]:
    """Open explorers in this process, each with a copy of the SAE; the result is a client."""
    from tests.support.explorer import ExplorerClient

    clients: list[ExplorerClient] = []

    def build(**options: Any) -> ExplorerClient:
        clients.append(ExplorerClient(vlm, home, tmp_path / f"explorer-{len(clients)}", **options))
        return clients[-1]

    yield build
    for client in clients:
        client.close()


@pytest.fixture
def client(open_client: Callable[..., Any]) -> Any:
    return open_client()
