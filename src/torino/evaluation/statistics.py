"""How sure a score is: intervals by drawing questions anew, and whether two methods differ.

The bootstrap draws groups of samples that are judged together (a question with its rotations, an image with its two
questions) with replacement and scores each draw. Groups with equal sums are alike to every score, so how often each
*kind* of group is drawn is all that matters, and that is one multinomial draw: exact, and far cheaper than drawing
groups one by one. Methods are compared on the same draws.
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
_MOST = 4_000_000  # numbers drawn at a time

Scored = Score | ScoreStats
Scores = Mapping[str, Scored]


@dataclass(frozen=True)
class Interval:
    """A score and the interval that holds ``level`` of the draws, from percentile to percentile."""

    value: float
    low: float
    high: float
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Difference(Interval):
    """The first score minus the second, its interval, and how likely so large a one is if the two were alike.

    ``p`` is two-sided, from exchanging the two methods' answers at random, question by question.
    """

    p: float = math.nan

    def __str__(self) -> str:
        return f"{super().__str__()}, p = {self.p:.4f}"


@dataclass(frozen=True)
class OverSeeds(Interval):
    """The mean over the seeds of a random method; the interval is over both questions and seeds.

    ``sd`` is the standard deviation between seeds (n − 1), NaN for one seed.
    """

    values: tuple[float, ...] = ()
    sd: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.sd:.2f} over {len(self.values)} seeds [{self.low:.2f}, {self.high:.2f}]"


def interval(score: Scored, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Interval:
    """The bootstrap interval of one score. Give ``score.by_image()`` to draw whole images."""
    (drawn,) = _bootstrap([_tally(score)], draws, np.random.default_rng(seed))
    return Interval(_tally(score).value, *_edges(drawn, level), level)


def difference(first: Scored, second: Scored, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Difference:
    """Compare two methods on the same samples of one task."""
    rng = np.random.default_rng(seed)
    one, two = _tally(first), _tally(second)
    a, b = _bootstrap([one, two], draws, rng)
    apart = one.value - two.value
    exchanged = np.subtract(*_exchanged(one, two, draws, rng))
    return Difference(apart, *_edges(a - b, level), level, _p_value(exchanged, apart))


def over_seeds(scores: Sequence[Scored], *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> OverSeeds:
    """Several runs of a random method on one task, which differ in their seed alone."""
    tallies = _several(scores)
    rng = np.random.default_rng(seed)
    drawn = _mean_of_drawn(np.stack(_bootstrap(tallies, draws, rng)), rng)
    values = tuple(tally.value for tally in tallies)
    return OverSeeds(float(np.mean(values)), *_edges(drawn, level), level, values, _sd(values))


def relative_interval(
    scores: Scores, baseline: Scores, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """The relative score and its interval: in each benchmark the same questions are drawn for method and baseline."""
    ((value, drawn),) = _relative([scores], baseline, draws, np.random.default_rng(seed))
    return Interval(value, *_edges(drawn, level), level)


def relative_difference(
    first: Scores, second: Scores, baseline: Scores, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Difference:
    """Compare the relative scores of two methods against the same baseline."""
    rng = np.random.default_rng(seed)
    (one, a), (two, b) = _relative([first, second], baseline, draws, rng)
    names = _shared([first, second], baseline)
    exchanged = np.zeros(draws)
    for name in names:
        x, y = _exchanged(_tally(first[name]), _tally(second[name]), draws, rng)
        exchanged += 100 * (x - y) / _tally(baseline[name]).value / len(names)
    return Difference(one - two, *_edges(a - b, level), level, _p_value(exchanged, one - two))


def relative_over_seeds(
    runs: Sequence[Scores], baseline: Scores, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> OverSeeds:
    """The relative score of several runs of a random method, each over all benchmarks with one seed."""
    if not runs:
        raise BadParameter("Give the scores of at least one seed.")
    rng = np.random.default_rng(seed)
    results = _relative(runs, baseline, draws, rng)
    drawn = _mean_of_drawn(np.stack([one for _, one in results]), rng)
    values = tuple(value for value, _ in results)
    return OverSeeds(float(np.mean(values)), *_edges(drawn, level), level, values, _sd(values))


def _tally(score: Scored) -> ScoreStats:
    return score.tally if isinstance(score, Score) else score


def _several(scores: Sequence[Scored]) -> list[ScoreStats]:
    if not scores:
        raise BadParameter("Give the scores of at least one seed.")
    return [_tally(score) for score in scores]


def _sd(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _same_units(tallies: Sequence[ScoreStats]) -> int:
    for other in tallies[1:]:
        if other.units != tallies[0].units:
            raise BadParameter(
                f"These scores are of different questions ({len(tallies[0].units)} and {len(other.units)} groups). To "
                "compare them question by question, score both on the same samples of the same task."
            )
    return len(tallies[0].units)


def _kinds(table: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The different rows of a table, and how many there are of each."""
    rows, counts = np.unique(table, axis=0, return_counts=True)
    return rows, counts.astype(np.int64)


def _bootstrap(tallies: Sequence[ScoreStats], draws: int, rng: np.random.Generator) -> list[Floats]:
    """Scores of ``draws`` samples of the groups, drawn with replacement, the same for all tallies."""
    if draws < 1:
        raise BadParameter(f"draws must be at least 1, got {draws}.")
    groups = _same_units(tallies)
    rows, counts = _kinds(np.concatenate([tally.sums for tally in tallies], axis=1))
    edges = np.cumsum([0, *(tally.sums.shape[1] for tally in tallies)])
    drawn: list[list[Floats]] = [[] for _ in tallies]
    step = max(1, _MOST // max(len(rows), 1))
    for start in range(0, draws, step):
        times = rng.multinomial(groups, counts / groups, size=min(step, draws - start))
        sums = times @ rows
        for place, tally in enumerate(tallies):
            drawn[place].append(tally.of(sums[:, edges[place] : edges[place + 1]]))
    return [np.concatenate(parts) for parts in drawn]


def _exchanged(one: ScoreStats, two: ScoreStats, draws: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Scores of the two after each group's sums changed sides, or not, by the toss of a coin."""
    _same_units([one, two])
    rows, counts = _kinds(one.sums - two.sums)
    moved: list[Floats] = []
    step = max(1, _MOST // max(len(rows), 1))
    for start in range(0, draws, step):
        moved.append(rng.binomial(counts, 0.5, size=(min(step, draws - start), len(rows))) @ rows)
    change = np.concatenate(moved)
    return one.of(one.sums.sum(axis=0) - change), two.of(two.sums.sum(axis=0) + change)


def _p_value(exchanged: Floats, apart: float) -> float:
    """The share of exchanges that are as far apart, the one observed included; so never 0."""
    as_far = np.abs(exchanged) >= abs(apart) - 1e-9 * max(1.0, abs(apart))
    return float((1 + np.count_nonzero(as_far)) / (1 + len(exchanged)))


def _shared(methods: Sequence[Scores], baseline: Scores) -> list[str]:
    """The benchmarks that all have a score on, in the order of their names so that draws do not depend on theirs."""
    names = [
        name
        for name in sorted(baseline)
        if all(name in one and not math.isnan(_tally(one[name]).value) for one in (*methods, baseline))
    ]
    if not names:
        raise BadParameter("No benchmark has a score for all of the methods and for the full-token baseline.")
    for name in names:
        if _tally(baseline[name]).value <= 0:
            raise BadParameter(f"The full-token baseline of {name} is 0, and nothing can be in relation to that.")
    return names


def _relative(
    methods: Sequence[Scores], baseline: Scores, draws: int, rng: np.random.Generator
) -> list[tuple[float, Floats]]:
    """The relative score of each method, and those of the draws."""
    names = _shared(methods, baseline)
    values = np.zeros(len(methods))
    drawn = np.zeros((len(methods), draws))
    for name in names:
        full = _tally(baseline[name])
        tallies = [_tally(one[name]) for one in methods]
        *ours, below = _bootstrap([*tallies, full], draws, rng)
        below = np.where(below > 0, below, np.nan)  # a draw on which the baseline scores nothing has no ratio
        values += [100 * tally.value / full.value / len(names) for tally in tallies]
        drawn += 100 * np.stack(ours) / below / len(names)
    return [(float(value), row) for value, row in zip(values, drawn, strict=True)]


def _mean_of_drawn(by_seed: Floats, rng: np.random.Generator) -> Floats:
    """The mean over seeds drawn with replacement, for each draw; ``by_seed`` is of shape (seeds, draws)."""
    seeds, draws = by_seed.shape
    times = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=draws)
    return np.einsum("ds,sd->d", times / seeds, by_seed)


def _edges(drawn: Floats, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise BadParameter(f"level must be between 0 and 1, such as 0.95, got {level}.")
    found = drawn[~np.isnan(drawn)]
    if not len(found):
        return math.nan, math.nan
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
