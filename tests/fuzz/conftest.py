"""Remove the files that the fuzz tests start from."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.support.fuzzing import remove_templates


@pytest.fixture(scope="session", autouse=True)
def _templates() -> Generator[None]:
    yield
    remove_templates()
