"""For all tests: a hypothesis profile with the same examples on every run; and one thread.

``make fuzz`` uses the profile ``fuzz``: many examples, different ones on every run, and failures are tried again first.

Tiny products gain nothing from threads, and waiting threads are slow on a busy machine. That the number of
threads changes no answer is tested where it could (test_exact_topk.py).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

settings.register_profile(
    "torino",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "fuzz",
    settings.get_profile("torino"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis"),
    max_examples=2000,
    print_blob=True,
)
settings.load_profile("torino")

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that start many processes, so that no single one is left at the end."""
    items.sort(key=lambda item: not item.path.name.startswith("test_extras"))
