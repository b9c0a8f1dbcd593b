"""Metrics of torino in the process of vLLM's own server, beside vLLM's metrics under ``/metrics``."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import REGISTRY

from torino.serving.server.metrics import ServerMetrics


@lru_cache(1)
def server_metrics() -> ServerMetrics:
    """Return the metrics of this process, in the registry that vLLM shows."""
    return ServerMetrics(REGISTRY)
