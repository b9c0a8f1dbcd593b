"""Measure what methods cost, by the paper's protocol and from a user's point of view.

The paper times the reduction module alone, on 50 images after 10 warm-ups, without tower and language model. Beside it
are a lower bound (gathering as many tokens), the time to the first token, the whole answer, and peak memory.
"""

from torino.evaluation.latency.bench import FORMAT, QUESTION, Bench
from torino.evaluation.latency.probes import machine, peak_memory, versions
from torino.evaluation.latency.rows import BenchPlan, BenchRow, spread

__all__ = ["FORMAT", "QUESTION", "Bench", "BenchPlan", "BenchRow", "machine", "peak_memory", "spread", "versions"]
