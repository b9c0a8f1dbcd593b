"""One hypothesis profile for all tests: the same examples on every run, no time limit for a single one."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "torino",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("torino")
