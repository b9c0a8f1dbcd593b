"""One figure for many benchmarks: the paper's relative score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torino.core.errors import BadParameter


@dataclass(frozen=True)
class Relative:
    """A relative score.

    Attributes
    ----------
    value : float
        The mean of the ratios, in per cent.
    ratios : mapping
        Of each benchmark, in per cent of the full-token baseline.
    left_out : tuple of str
        Benchmarks that have no score for the method or for the baseline. A figure over fewer benchmarks cannot be set
        beside one over all nine.
    """

    value: float
    ratios: Mapping[str, float]
    left_out: tuple[str, ...] = ()


def relative(scores: Mapping[str, float], baseline: Mapping[str, float]) -> Relative:
    """The macro-average over benchmarks of score / score with all tokens, times 100 (paper, Sec. 4.1).

    Parameters
    ----------
    scores, baseline : mapping of benchmark to score
        On each benchmark's own scale; the baseline must have been scored by the same harness on the same samples.

    Examples
    --------
    >>> relative({"GQA": 60.0, "MME": 1700.0}, {"GQA": 62.5, "MME": 2000.0})
    Relative(value=90.5, ratios={'GQA': 96.0, 'MME': 85.0}, left_out=())
    """
    ratios: dict[str, float] = {}
    left_out: list[str] = []
    for name in dict.fromkeys([*baseline, *scores]):
        ours, full = scores.get(name, math.nan), baseline.get(name, math.nan)
        if math.isnan(ours) or math.isnan(full):
            left_out.append(name)
        elif full <= 0:
            raise BadParameter(
                f"The full-token baseline of {name} is {full:g}, and nothing can be in relation to that."
            )
        else:
            ratios[name] = 100 * ours / full
    if not ratios:
        raise BadParameter("No benchmark has a score both for the method and for its full-token baseline.")
    return Relative(math.fsum(ratios.values()) / len(ratios), ratios, tuple(left_out))
