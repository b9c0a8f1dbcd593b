"""Register the ablation-only reducers for the tests in this folder, and only for these."""

from __future__ import annotations

import pytest

from torino.reducers import base

_bundled = dict(base._registry)

import torino_steps  # noqa: E402, F401 (registers itself)
import torino_x_ablations  # noqa: E402, F401 (registers itself)

_with_ablations = dict(base._registry)
for name in _with_ablations.keys() - _bundled.keys():
    del base._registry[name]


@pytest.fixture(autouse=True)
def _ablations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registry", dict(_with_ablations))
