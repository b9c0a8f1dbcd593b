"""The file ``scores.json``: the summary of a run, and what a reader can rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from torino.core.io import read_json
from torino.core.schema import Count, Measure
from torino.evaluation.results import RunFacts, TaskFacts

FORMAT = "torino-scores/1"
SCORES = "scores.json"


class TaskScore(TypedDict):
    """Score of a setting on a task; ``value`` is None if it could not be scored."""

    metric: str
    counts: dict[str, Count]
    of: Count
    questions: Count
    value: Measure | None
    low: NotRequired[Measure | None]
    high: NotRequired[Measure | None]
    sd: NotRequired[Measure | None]


class RelativeScore(TypedDict):
    """Relative score of a setting."""

    value: Measure
    low: Measure | None
    high: Measure | None
    sd: NotRequired[Measure | None]
    left_out: list[str]


class DifficultScore(TypedDict):
    """Score on the questions that all tokens answer and a smaller image does not."""

    value: Measure
    low: Measure | None
    high: Measure | None
    questions: Count


class TaskDifference(TypedDict):
    """Difference between two settings on a task."""

    value: Measure
    low: Measure
    high: Measure
    p: Measure


class RelativeDifference(TaskDifference):
    """Difference between the relative scores of two settings; ``p_holm`` is corrected for all rows of the tier."""

    p_holm: Measure
    tasks: dict[str, TaskDifference]


class TokenSpread(TypedDict):
    """Distribution over images."""

    mean: Measure
    min: Measure
    p10: Measure
    median: Measure
    p90: Measure
    max: Measure


class TokenStats(TokenSpread):
    """Numbers of tokens, and the removed percentages."""

    images: Count
    removed: TokenSpread


class ScoresRow(TypedDict):
    """A setting, or several that differ in their seed."""

    ids: list[str]
    label: str
    method: str
    spec: str
    sae: str | None
    tier: str
    dynamic: bool
    reference: bool
    budget: int | None
    seeds: Count
    tokens: Measure | None
    before: Measure | None
    plan_ms: Measure | None
    tokens_by_task: dict[str, TokenStats]
    scores: dict[str, TaskScore]
    relative: RelativeScore | None
    versus: RelativeDifference | None
    difficult: NotRequired[DifficultScore | None]


class ScoresTier(TypedDict):
    """The settings of a tier."""

    tier: str
    dynamic: bool
    tokens: Measure | None
    removed: Measure | None
    rows: list[ScoresRow]
    versus: NotRequired[str]


class ScoresColumn(TypedDict):
    """A task as a column of the table."""

    task: str
    label: str
    note: str


class ScoresProgress(TypedDict):
    """How much of the run is done."""

    answers: Count
    of: Count
    whole: bool
    waits_for_budgets: bool


class AnswerCounts(TypedDict):
    """Size of the answers that were scored."""

    rows: Count
    bytes: Count


class SummarizedRun(RunFacts):
    """What ``run.json`` says about the run."""

    tasks: list[TaskFacts]


class ScoresWarning(TypedDict):
    """What makes scores meaningless."""

    text: str


class ScoresFile(TypedDict):
    """Fields of ``scores.json`` that are read again."""

    name: str
    run: SummarizedRun
    scored: bool
    notes: list[str]
    warnings: NotRequired[list[ScoresWarning]]
    answers: AnswerCounts
    progress: ScoresProgress
    columns: list[ScoresColumn]
    baseline: ScoresRow | None
    tiers: list[ScoresTier]
    by: str
    draws: Count
    level: float
    baseline_of: str | None


def read_scores(path: str | Path) -> dict[str, Any]:
    """Read and check ``scores.json``."""
    return read_json(path, ScoresFile, version=FORMAT, fix="Delete it; torino report writes it again.")
