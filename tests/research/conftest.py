"""Register the ablation-only reducers for the tests in this folder, and only for these."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torino.reducers import base

sys.path.insert(0, str(Path(__file__).parents[2] / "research" / "reducers"))
_bundled = dict(base._registry)

import torino_steps  # noqa: E402, F401 (registers itself)
import torino_x_ablations  # noqa: E402, F401 (registers itself)

_with_ablations = dict(base._registry)
for _name in _with_ablations.keys() - _bundled.keys():
    del base._registry[_name]


@pytest.fixture(autouse=True)
def _ablations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registry", dict(_with_ablations))
