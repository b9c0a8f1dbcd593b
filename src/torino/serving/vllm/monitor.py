"""Metrics of torino in the process of vLLM's own server, beside vLLM's metrics under ``/metrics``."""

from __future__ import annotations

from functools import lru_cache

from torino.core.extras import optional_import
from torino.serving.server.metrics import ServerMetrics

with optional_import("Serving with vLLM needs", "torino[vllm]"):
    from prometheus_client import REGISTRY


@lru_cache(1)
def server_metrics() -> ServerMetrics:
    """Return the metrics of this process, in the registry that vLLM shows."""
    return ServerMetrics(REGISTRY)
