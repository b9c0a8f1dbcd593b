"""Scores on the questions where methods can differ: VTC-Bench's difficult subset.

A smaller image answers many benchmark questions as well as the full one, so these do not tell methods apart (VTC-Bench,
ACL 2026). A question of a tier is *difficult* if the model answers it with all tokens and not with ``downsample`` of
the same tier. The score of a method is the mean score of its answers to them, in percent, over the questions of all
tasks whose samples have individual scores. ``downsample`` itself is near 0 and all tokens near 100, by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from torino.evaluation.scoring import Score, ScoreStats
from torino.evaluation.statistics import score_interval

METHOD = "downsample"
RIGHT = 0.5  # least score of a right answer; soft metrics such as VQA accuracy have scores in between


class Scores(Protocol):
    """Scores of the settings of a run."""

    tasks: dict[str, Any]
    bootstrap: dict[str, Any]

    def answered(self, task: str, settings: Sequence[str]) -> frozenset[str]:
        """Return the questions of a task that all settings have answered."""
        ...

    def score(self, task: str, setting: str, within: frozenset[str]) -> Score:
        """Score a setting on some questions of a task."""
        ...


def add_difficult(summary: dict[str, Any], scores: Scores) -> None:
    """Add ``difficult`` to all rows of the tiers in which the image was shrunk."""
    for tier in summary["tiers"]:
        filters = [row for row in tier["rows"] if row["method"] == METHOD]
        if summary["baseline"] is None or not filters:
            continue
        for row in tier["rows"]:
            row["difficult"] = difficult_score(scores, row["ids"], filters[0]["ids"][0])


def difficult_score(scores: Scores, settings: Sequence[str], filtering: str) -> dict[str, Any] | None:
    """Return the score of settings that differ in their seed on the difficult questions; None if there are none.

    Parameters
    ----------
    scores : Scores
    settings : sequence of str
    filtering : str
        The setting whose wrong answers make a question difficult.
    """
    units, values = list[str](), list[float]()
    for task in scores.tasks:
        within = scores.answered(task, [*settings, filtering, "full"])
        if not within:
            continue
        full, small = (scores.score(task, name, within).per_sample for name in ("full", filtering))
        hard = select_difficult(full, small)
        answers = [scores.score(task, name, within).per_sample for name in settings]
        units += [f"{task} {index}" for index in hard]
        values += [float(np.mean([answer.get(index, 0.0) for answer in answers])) for index in hard]
    if not values:
        return None
    sums = np.stack([np.array(values), np.ones(len(values))], axis=1)
    stats = ScoreStats(tuple(units), sums, lambda totals: 100 * totals[..., 0] / totals[..., 1])
    interval = score_interval(stats, **scores.bootstrap)
    return {"value": interval.value, "low": interval.low, "high": interval.high, "questions": len(values)}


def select_difficult(full: Mapping[str, float], small: Mapping[str, float]) -> list[str]:
    """Return the samples that are answered with all tokens and not with the smaller image.

    Examples
    --------
    >>> select_difficult({"1": 1.0, "2": 1.0, "3": 0.0, "4": 0.6}, {"1": 0.0, "2": 1.0, "3": 0.0, "4": 0.3})
    ['1', '4']
    """
    return [index for index, score in full.items() if score >= RIGHT and small.get(index, 0.0) < RIGHT]
