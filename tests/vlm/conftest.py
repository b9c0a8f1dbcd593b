"""A tiny LLaVA-1.5 that every test must leave unchanged, and its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import tiny
from tests.support.generation import ROWS


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    llava = tiny.llava()
    weights = {name: value.clone() for name, value in llava.state_dict().items()}
    yield llava
    assert not {"generate", "forward", "_torino_wrapper"} & set(llava.__dict__)
    assert all(torch.equal(value, weights[name]) for name, value in llava.state_dict().items())


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    return tiny.prompt(*ROWS)
