"""Counters and histograms of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torino.core.extras import optional_import

with optional_import("torino serve needs", "torino[serve]"):
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServerMetrics:
    """The metrics of one server.

    Parameters
    ----------
    registry : CollectorRegistry, optional
        Where they are registered; a new one by default.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"torino_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"torino_{name}", text, labels, buckets=SECONDS, registry=self.registry)

        self.requests = counter("requests", "Requests of chat completions by HTTP status.", "status")
        self.refusals = counter("refusals", "Refused or failed requests by reason.", "reason")
        self.images = counter("images", "Images of answered requests.")
        self.tokens_before = counter("image_tokens_before", "Visual tokens before reduction.")
        self.tokens_after = counter("image_tokens_after", "Visual tokens that the language model received.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, with reduced images.")
        self.generated_tokens = counter("generated_tokens", "Generated tokens.")
        self.kv_bytes = counter("kv_cache_bytes", "Bytes of key-value cache that answered requests took.")
        self.cache_hits = counter("image_cache_hits", "Images whose reduced tokens were cached.")
        self.cache_misses = counter("image_cache_misses", "Images that had to be reduced.")
        self.stages = histogram("stage_seconds", "Time of a stage, for a whole batch of requests.", "stage")
        self.waiting = histogram("queue_seconds", "Time that a request waited for its batch.")
        self.first_token = histogram("first_token_seconds", "Time from the arrival of a request to its first token.")
        self.duration = histogram("request_seconds", "Time of a whole request.")
        self.batch = Histogram(
            "torino_batch_requests",
            "Requests answered together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.running = Gauge("torino_requests_running", "Requests running or waiting.", registry=self.registry)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when it is asked for."""
        Gauge(f"torino_{name}", text, registry=self.registry).set_function(read)

    def observe_stages(self, seconds: Mapping[str, float]) -> None:
        """Record the seconds of each stage of a batch."""
        for name, value in seconds.items():
            self.stages.labels(name).observe(value)

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self.registry)
