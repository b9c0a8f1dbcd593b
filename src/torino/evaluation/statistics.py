"""Compute confidence intervals by bootstrap, and compare methods.

The bootstrap resamples groups of samples that are scored together (a question with its rotations, an image with its
two questions) with replacement, and scores each resample. Groups with equal sums are interchangeable for every score,
so only the number of draws of each distinct row of sums matters, which is one multinomial draw. This is exact and far
cheaper than drawing groups one by one, which is why ``scipy.stats.bootstrap`` is not used. Methods are compared on the
same resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torino.core.errors import BadParameter
from torino.evaluation.scoring import Floats, Score, ScoreStats

DRAWS = 10_000
LEVEL = 0.95
_MAX_NUMBERS = 4_000_000  # random numbers drawn at a time

Scored = Score | ScoreStats
Scores = Mapping[str, Scored]


@dataclass(frozen=True)
class Interval:
    """A score and its percentile interval, which contains the share ``level`` of the resamples."""

    value: float
    low: float
    high: float
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Difference(Interval):
    """The first score minus the second, its interval, and its p-value.

    ``p`` is the two-sided p-value of a paired permutation test: the answers of the two methods are exchanged at
    random, question by question.
    """

    p: float = math.nan

    def __str__(self) -> str:
        return f"{super().__str__()}, p = {self.p:.4f}"


@dataclass(frozen=True)
class SeedInterval(Interval):
    """The mean over the seeds of a random method; the interval covers both questions and seeds.

    ``sd`` is the standard deviation between seeds (n − 1), NaN for one seed.
    """

    values: tuple[float, ...] = ()
    sd: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.sd:.2f} over {len(self.values)} seeds [{self.low:.2f}, {self.high:.2f}]"


def score_interval(score: Scored, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Compute the bootstrap interval of one score. Give ``score.by_image()`` to resample whole images."""
    (resampled,) = _bootstrap([_stats(score)], draws, np.random.default_rng(seed))
    return Interval(_stats(score).value, *_percentiles(resampled, level), level)


def score_difference(
    first: Scored, second: Scored, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Difference:
    """Compare two methods on the same samples of one task."""
    rng = np.random.default_rng(seed)
    a, b = _stats(first), _stats(second)
    resampled_a, resampled_b = _bootstrap([a, b], draws, rng)
    value = a.value - b.value
    permuted = np.subtract(*_permute(a, b, draws, rng))
    return Difference(value, *_percentiles(resampled_a - resampled_b, level), level, _p_value(permuted, value))


def seed_interval(scores: Sequence[Scored], *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> SeedInterval:
    """Compute the mean and interval of several runs of a random method on one task that differ only in their seed."""
    if not scores:
        raise BadParameter("Give the scores of at least one seed.")
    stats = [_stats(score) for score in scores]
    rng = np.random.default_rng(seed)
    resampled = _average_seeds(np.stack(_bootstrap(stats, draws, rng)), rng)
    values = tuple(item.value for item in stats)
    return SeedInterval(float(np.mean(values)), *_percentiles(resampled, level), level, values, _sd(values))


def relative_interval(
    scores: Scores, baseline: Scores, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Compute the relative score and its interval; method and baseline share the resampled questions."""
    ((value, resampled),) = _resample_relative([scores], baseline, draws, np.random.default_rng(seed))
    return Interval(value, *_percentiles(resampled, level), level)


def relative_difference(
    first: Scores, second: Scores, baseline: Scores, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Difference:
    """Compare the relative scores of two methods against the same baseline."""
    rng = np.random.default_rng(seed)
    (value_a, resampled_a), (value_b, resampled_b) = _resample_relative([first, second], baseline, draws, rng)
    names = _shared_benchmarks([first, second], baseline)
    permuted = np.zeros(draws)
    for name in names:
        a, b = _permute(_stats(first[name]), _stats(second[name]), draws, rng)
        permuted += 100 * (a - b) / _stats(baseline[name]).value / len(names)
    value = value_a - value_b
    return Difference(value, *_percentiles(resampled_a - resampled_b, level), level, _p_value(permuted, value))


def relative_seed_interval(
    runs: Sequence[Scores], baseline: Scores, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> SeedInterval:
    """Compute the relative score of several runs of a random method, each over all benchmarks with one seed."""
    if not runs:
        raise BadParameter("Give the scores of at least one seed.")
    rng = np.random.default_rng(seed)
    results = _resample_relative(runs, baseline, draws, rng)
    resampled = _average_seeds(np.stack([row for _, row in results]), rng)
    values = tuple(value for value, _ in results)
    return SeedInterval(float(np.mean(values)), *_percentiles(resampled, level), level, values, _sd(values))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down rule.

    If every difference whose corrected value is at most 0.05 is called significant, the probability that one of them
    is due to chance is at most 5 %.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def _stats(score: Scored) -> ScoreStats:
    return score.stats if isinstance(score, Score) else score


def _sd(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _count_units(stats: Sequence[ScoreStats]) -> int:
    """Return the number of groups, which must be the same groups for all."""
    for other in stats[1:]:
        if other.units != stats[0].units:
            raise BadParameter(
                f"The scores are of different questions ({len(stats[0].units)} and {len(other.units)} groups). Score "
                "both methods on the same samples of the same task."
            )
    return len(stats[0].units)


def _distinct_rows(table: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return the distinct rows of a table, and the count of each."""
    rows, counts = np.unique(table, axis=0, return_counts=True)
    return rows, counts.astype(np.int64)


def _bootstrap(stats: Sequence[ScoreStats], draws: int, rng: np.random.Generator) -> list[Floats]:
    """Score ``draws`` resamples of the groups, the same for all of ``stats``."""
    if draws < 1:
        raise BadParameter(f"draws must be at least 1, got {draws}.")
    groups = _count_units(stats)
    rows, counts = _distinct_rows(np.concatenate([item.sums for item in stats], axis=1))
    edges = np.cumsum([0, *(item.sums.shape[1] for item in stats)])
    scores: list[list[Floats]] = [[] for _ in stats]
    step = max(1, _MAX_NUMBERS // max(len(rows), 1))
    for start in range(0, draws, step):
        times = rng.multinomial(groups, counts / groups, size=min(step, draws - start))
        sums = times @ rows
        for position, item in enumerate(stats):
            scores[position].append(item.formula(sums[:, edges[position] : edges[position + 1]]))
    return [np.concatenate(parts) for parts in scores]


def _permute(a: ScoreStats, b: ScoreStats, draws: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Score both methods after exchanging each group's sums between them with probability 1/2."""
    _count_units([a, b])
    rows, counts = _distinct_rows(a.sums - b.sums)
    moved: list[Floats] = []
    step = max(1, _MAX_NUMBERS // max(len(rows), 1))
    for start in range(0, draws, step):
        moved.append(rng.binomial(counts, 0.5, size=(min(step, draws - start), len(rows))) @ rows)
    change = np.concatenate(moved)
    return a.formula(a.sums.sum(axis=0) - change), b.formula(b.sums.sum(axis=0) + change)


def _p_value(permuted: Floats, value: float) -> float:
    """Return the share of permutations with at least this difference, including the observed one; never 0."""
    extreme = np.abs(permuted) >= abs(value) - 1e-9 * max(1.0, abs(value))
    return float((1 + np.count_nonzero(extreme)) / (1 + len(permuted)))


def _shared_benchmarks(methods: Sequence[Scores], baseline: Scores) -> list[str]:
    """Return the benchmarks on which all have a score, sorted so that the draws do not depend on the given order."""
    names = [
        name
        for name in sorted(baseline)
        if all(name in scores and not math.isnan(_stats(scores[name]).value) for scores in (*methods, baseline))
    ]
    if not names:
        raise BadParameter("No benchmark has a score for all methods and for the full-token baseline.")
    for name in names:
        if _stats(baseline[name]).value <= 0:
            raise BadParameter(f"The full-token baseline of {name} is 0, so relative scores are undefined.")
    return names


def _resample_relative(
    methods: Sequence[Scores], baseline: Scores, draws: int, rng: np.random.Generator
) -> list[tuple[float, Floats]]:
    """Return the relative score of each method, and those of the resamples."""
    names = _shared_benchmarks(methods, baseline)
    values = np.zeros(len(methods))
    resampled = np.zeros((len(methods), draws))
    for name in names:
        full = _stats(baseline[name])
        stats = [_stats(scores[name]) for scores in methods]
        *numerators, denominator = _bootstrap([*stats, full], draws, rng)
        denominator = np.where(denominator > 0, denominator, np.nan)  # no ratio if the baseline scores 0
        values += [100 * item.value / full.value / len(names) for item in stats]
        resampled += 100 * np.stack(numerators) / denominator / len(names)
    return [(float(value), row) for value, row in zip(values, resampled, strict=True)]


def _average_seeds(by_seed: Floats, rng: np.random.Generator) -> Floats:
    """Average over seeds drawn with replacement, for each resample; ``by_seed`` is of shape (seeds, draws)."""
    seeds, draws = by_seed.shape
    times = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=draws)
    return np.einsum("ds,sd->d", times / seeds, by_seed)


def _percentiles(resampled: Floats, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise BadParameter(f"level must be between 0 and 1, such as 0.95, got {level}.")
    valid = resampled[~np.isnan(resampled)]
    if not len(valid):
        return math.nan, math.nan
    low, high = np.quantile(valid, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
