"""Bench: how long methods take, side by side in one run, by the paper's protocol and by what a user waits for.

The paper times the reduction module alone, on 50 images after 10 warm-ups, without tower and language model. Beside
that stand here the floor, a bare gather of as many tokens, below which no method can go; the time to the first token;
the whole answer; and the peak of memory.
"""

from torino.evaluation.latency.bench import FORMAT, QUESTION, Bench
from torino.evaluation.latency.gauges import machine, peak_memory, versions
from torino.evaluation.latency.rows import BenchPlan, BenchRow, spread

__all__ = ["FORMAT", "QUESTION", "Bench", "BenchPlan", "BenchRow", "machine", "peak_memory", "spread", "versions"]
