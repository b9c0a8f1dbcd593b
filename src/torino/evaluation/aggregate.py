"""Aggregate the scores of several benchmarks into the paper's relative score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torino.core.errors import BadParameter


@dataclass(frozen=True)
class RelativeScore:
    """A relative score.

    Attributes
    ----------
    value : float
        The mean of the ratios, in percent.
    ratios : mapping
        Score of each benchmark, in percent of the full-token baseline.
    left_out : tuple of str
        Benchmarks without a score for the method or for the baseline. A relative score over fewer benchmarks is not
        comparable with one over all nine.
    """

    value: float
    ratios: Mapping[str, float]
    left_out: tuple[str, ...] = ()


def relative_score(scores: Mapping[str, float], baseline: Mapping[str, float]) -> RelativeScore:
    """Compute the mean over benchmarks of score / score with all tokens, times 100 (paper, Sec. 4.1).

    Parameters
    ----------
    scores, baseline : mapping of benchmark to score
        On each benchmark's own scale; the baseline must be scored by the same harness on the same samples.

    Examples
    --------
    >>> relative_score({"GQA": 60.0, "MME": 1700.0}, {"GQA": 62.5, "MME": 2000.0})
    RelativeScore(value=90.5, ratios={'GQA': 96.0, 'MME': 85.0}, left_out=())
    """
    ratios: dict[str, float] = {}
    left_out: list[str] = []
    for name in dict.fromkeys([*baseline, *scores]):
        score, full = scores.get(name, math.nan), baseline.get(name, math.nan)
        if math.isnan(score) or math.isnan(full):
            left_out.append(name)
        elif full <= 0:
            raise BadParameter(f"The full-token baseline of {name} is {full:g}, so relative scores are undefined.")
        else:
            ratios[name] = 100 * score / full
    if not ratios:
        raise BadParameter("No benchmark has a score both for the method and for its full-token baseline.")
    return RelativeScore(math.fsum(ratios.values()) / len(ratios), ratios, tuple(left_out))
