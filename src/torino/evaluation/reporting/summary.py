"""Summarize a run: everything that reports and figures show, stored in ``scores.json``.

The summary consists of JSON values only, so a report can be written again without the answers and the data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torino.core.errors import BadFile, BadParameter
from torino.core.io import write_json
from torino.evaluation.benchmarks import find_benchmark
from torino.evaluation.judge import Grader
from torino.evaluation.plausibility import find_implausible
from torino.evaluation.protocol import KD_METHODS, NO_SAE, Setting
from torino.evaluation.reporting.difficult import add_difficult
from torino.evaluation.reporting.scores_file import FORMAT, SCORES, read_scores
from torino.evaluation.results import SETTINGS, Run, open_run
from torino.evaluation.scoring import Score, ScoreStats
from torino.evaluation.statistics import (
    DRAWS,
    LEVEL,
    Interval,
    SeedInterval,
    holm,
    relative_difference,
    relative_interval,
    relative_seed_interval,
    score_difference,
    score_interval,
    seed_interval,
)
from torino.evaluation.tasks import Task

ResampleBy = Literal["question", "image"]
Summary = dict[str, Any]
Answers = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
"""Rows by task and setting."""


def summarize(
    run: Run,
    data: str | Path | None = None,
    *,
    tasks: Mapping[str, Task] | None = None,
    judge: Grader | None = None,
    versus: str | None = None,
    by: ResampleBy = "question",
    baseline_of: str | Path | None = None,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> Summary:
    """Score a run, which may be unfinished.

    A method that has not answered all questions of a task is scored on those it has answered, relative to the baseline
    on the same questions.

    Parameters
    ----------
    run : Run
    data : path, optional
        Folder of the tasks' files; by default the recorded one.
    tasks : mapping of name to Task, optional
        The tasks of the run, if they are open already.
    judge : Grader, optional
        For tasks with graded answers.
    versus : str, optional
        Method, label or id of the setting that all others are compared with; by default TORINO-M of the same tier.
    by : {"question", "image"}
        What the bootstrap resamples.
    baseline_of : path, optional
        Another run over the same tasks whose full-token answers are the baseline.
    draws, level
        Number of resamples and level of the intervals.
    """
    if by not in ("question", "image"):
        raise BadParameter(f"by must be question or image, got {by!r}.")
    answers = group_answers(run)
    opened = run.open_tasks(data) if tasks is None else dict(tasks)
    scorer = _RunScorer(run, opened, answers, judge, by, {"draws": draws, "level": level})
    baseline = None if baseline_of is None else open_run(baseline_of)
    if baseline is not None:
        scorer.use_baseline(baseline)
    rows = [scorer.row(settings) for settings in _group_seeds(run.settings.values())]
    summary = _build_summary(run, rows, answers)
    summary |= {"by": by, "draws": draws, "level": level}
    summary["baseline_of"] = None if baseline_of is None else Path(baseline_of).name
    for column in summary["columns"]:
        column["note"] = scorer.notes.get(column["task"], "")
    summary["warnings"] = [item.to_dict() for item in find_implausible(run, opened, scorer.rows)]
    _compare(scorer, summary, versus)
    add_difficult(summary, scorer)
    weights = [item.metadata.get("weights") for item in (run, baseline or run)]
    if None not in weights and weights[0] != weights[1]:
        summary["notes"].append("The baseline was answered with other model weights than this run.")
    return _to_json(summary)


def summarize_counts(run: Run) -> Summary:
    """Summarize a run without scores: token counts and times."""
    answers = group_answers(run)
    rows = [describe_settings(run, settings, answers) for settings in _group_seeds(run.settings.values())]
    return _to_json(_build_summary(run, rows, answers) | {"scored": False})


def summarize_and_save(run: Run, data: str | Path | None = None, folder: Path | None = None, **options: Any) -> Summary:
    """Summarize a run and save ``scores.json`` in ``folder``, by default that of the run, and nothing elsewhere.

    If the tasks' files are missing, the saved scores are returned instead.
    """
    file = (folder or run.folder) / SCORES
    try:
        tasks = run.open_tasks(data)
    except BadFile as error:
        saved = [path for path in (file, run.folder / SCORES) if _is_of_run(path, run)]
        if data is not None or not saved:
            raise
        summary = read_scores(saved[0])
        outdated = "" if summary["answers"]["bytes"] == _answer_bytes(run) else "; the run has more answers now"
        summary["notes"].append(
            f"Read from {SCORES}, which covers {summary['answers']['rows']:,} answers{outdated}, because the tasks "
            f"could not be opened: {error}"
        )
        return summary
    summary = summarize(run, tasks=tasks, **options)
    write_json(file, summary, sealed=True)
    return summary


def load_summary(run: Run) -> Summary:
    """Return ``scores.json`` if it is up to date, else summarize the run, without scores if data is missing.

    Nothing is written.
    """
    file = run.folder / SCORES
    if _is_of_run(file, run):
        summary = read_scores(file)
        if summary["answers"]["bytes"] == _answer_bytes(run):
            return summary
    try:
        tasks = run.open_tasks()
    except BadFile:
        return summarize_counts(run)
    return summarize(run, tasks=tasks)


def _is_of_run(path: Path, run: Run) -> bool:
    """Return whether a file holds the scores of a run and of the same tasks."""
    if not path.is_file():
        return False
    summary = read_scores(path)
    columns = [column["task"] for column in summary["columns"]]
    return summary["run"].get("created") == run.metadata.get("created") and columns == run.tasks


def group_answers(run: Run) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the answers by task and setting."""
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.rows():
        answers.setdefault((row["task"], row["setting"]), []).append(row)
    return answers


def display_name(setting: Setting, several_saes: bool = False) -> str:
    """Return the name of a setting in tables, as in the paper: TORINO_FB-M has a budget, TORINO-M has none."""
    label = setting.label
    if setting.method in KD_METHODS:
        label = label.replace("_FB", "", 1)
        if setting.budget is not None:
            label = label.replace("TORINO-", "TORINO_FB-", 1)
    if setting.sae is not None and several_saes:
        label += " (no SAE)" if setting.sae == NO_SAE else f" ({setting.sae})"
    return label


def describe_settings(run: Run, settings: Sequence[Setting], answers: Answers) -> dict[str, Any]:
    """Describe settings that differ only in their seed, without scores."""
    first = settings[0]
    several_saes = len({setting.sae for setting in run.settings.values() if setting.sae is not None}) > 1
    rows = {task: [row for item in settings for row in answers.get((task, item.id), ())] for task in run.tasks}
    by_task = {task: counts for task in run.tasks if (counts := _count_tokens(rows[task]))}
    plan_seconds = [
        row["seconds"]["plan"] for task in run.tasks for row in rows[task] if "plan" in row.get("seconds", {})
    ]
    return {
        "ids": [setting.id for setting in settings],
        "label": display_name(first, several_saes),
        "method": first.method,
        "spec": first.spec if len(settings) == 1 else _without_seed(first.spec),
        "sae": first.sae,
        "tier": first.tier,
        "dynamic": first.dynamic,
        "reference": first.reference,
        "budget": first.budget,
        "seeds": len(settings),
        "tokens": _mean(counts["mean"] for counts in by_task.values()),
        "before": _mean(counts["before"] for counts in by_task.values()),
        "removed": _mean(counts["removed"]["mean"] for counts in by_task.values()),
        "tokens_by_task": by_task,
        "plan_ms": 1000 * _mean(plan_seconds),
        "scores": {},
        "relative": None,
        "versus": None,
    }


@dataclass
class _RunScorer:
    """Computes the scores of a run, each once."""

    run: Run
    tasks: dict[str, Task]
    answers: Answers
    judge: Grader | None
    by: ResampleBy
    bootstrap: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict[str, str])
    _scores: dict[tuple[str, str, frozenset[str]], Score] = field(default_factory=dict[Any, Score])
    _baseline: Answers | None = None

    def use_baseline(self, other: Run) -> None:
        """Use the full-token answers of another run."""
        fingerprints = {task["task"]: task["fingerprint"] for task in other.metadata["tasks"]}
        for task in self.run.metadata["tasks"]:
            if fingerprints.get(task["task"]) != task["fingerprint"]:
                raise BadParameter(
                    f"{other.folder} has no answers to {task['task']} with the same file, so it cannot be the baseline "
                    "of this run."
                )
        self._baseline = group_answers(other)

    def rows(self, task: str, setting: str) -> Sequence[Mapping[str, Any]]:
        source = self._baseline if self._baseline is not None and setting == "full" else self.answers
        return source.get((task, setting), ())

    def answered(self, task: str, settings: Iterable[str]) -> frozenset[str]:
        """Return the questions that all settings have answered, complete groups only."""
        samples = self.tasks[task].samples
        common = {sample.index for sample in samples}
        for setting in settings:
            common &= {str(row["index"]) for row in self.rows(task, setting)}
        incomplete = {sample.group for sample in samples if sample.index not in common}
        return frozenset(sample.index for sample in samples if sample.group not in incomplete)

    def score(self, task: str, setting: str, within: frozenset[str]) -> Score:
        """Score a setting on some of the questions of a task."""
        key = (task, setting, within)
        if key not in self._scores:
            part = self.tasks[task]
            if len(within) < len(part):
                part = replace(part, samples=tuple(sample for sample in part.samples if sample.index in within))
            rows = [row for row in self.rows(task, setting) if str(row["index"]) in within]
            self._scores[key] = part.score(rows, self.judge)
            if self._scores[key].note:
                self.notes[task] = self._scores[key].note
        return self._scores[key]

    def stats(self, task: str, setting: str, within: frozenset[str]) -> ScoreStats:
        score = self.score(task, setting, within)
        return score.by_image() if self.by == "image" else score.stats

    def comparable(self, settings: Sequence[str]) -> dict[str, frozenset[str]]:
        """Return the tasks, with their questions, on which settings have a relative score."""
        tasks: dict[str, frozenset[str]] = {}
        for task in self.tasks:
            within = self.answered(task, [*settings, "full"])
            if within and self.score(task, "full", within).value > 0:  # False for NaN
                tasks[task] = within
        return tasks

    def row(self, settings: Sequence[Setting]) -> dict[str, Any]:
        """Score settings that differ only in their seed."""
        row = describe_settings(self.run, settings, self.answers)
        ids = [setting.id for setting in settings]
        for task in self.tasks:
            within = self.answered(task, ids)
            if within:
                row["scores"][task] = self._score_entry(task, ids, within)
        tasks = self.comparable(ids)
        if tasks:
            baseline = {task: self.stats(task, "full", within) for task, within in tasks.items()}
            runs = [{task: self.stats(task, item, within) for task, within in tasks.items()} for item in ids]
            interval = (
                relative_seed_interval(runs, baseline, **self.bootstrap)
                if len(runs) > 1
                else relative_interval(runs[0], baseline, **self.bootstrap)
            )
            ratios = {
                task: 100 * float(np.mean([stats[task].value for stats in runs])) / baseline[task].value
                for task in tasks
            }
            left_out = [task for task in self.tasks if task not in tasks]
            row["relative"] = _interval_values(interval) | {"ratios": ratios, "left_out": left_out}
        return row

    def _score_entry(self, task: str, ids: Sequence[str], within: frozenset[str]) -> dict[str, Any]:
        scores = [self.score(task, item, within) for item in ids]
        counts = [score.counts for score in scores]
        entry: dict[str, Any] = {
            "metric": scores[0].metric,
            "counts": {name: sum(item.get(name, 0) for item in counts) for name in dict.fromkeys(counts[0])},
            "of": len(self.tasks[task]),
            "questions": len(within),
            "parts": {
                name: float(np.mean([score.parts[name] for score in scores if name in score.parts]))
                for name in scores[0].parts
            },
            "note": scores[0].note,
        }
        if any(math.isnan(score.value) for score in scores):
            return entry | {"value": None}
        stats = [self.stats(task, item, within) for item in ids]
        if len(stats) > 1:
            return entry | _interval_values(seed_interval(stats, **self.bootstrap))
        return entry | _interval_values(score_interval(stats[0], **self.bootstrap))

    def difference(self, ids: Sequence[str], others: Sequence[str]) -> dict[str, Any] | None:
        """Compare settings with others on the questions that both have answered; seeds are averaged."""
        tasks: dict[str, Any] = {}
        first: dict[str, ScoreStats] = {}
        second: dict[str, ScoreStats] = {}
        baseline: dict[str, ScoreStats] = {}
        for task, within in self.comparable([*ids, *others]).items():
            first[task] = _mean_stats([self.stats(task, item, within) for item in ids])
            second[task] = _mean_stats([self.stats(task, item, within) for item in others])
            baseline[task] = self.stats(task, "full", within)
            result = score_difference(first[task], second[task], **self.bootstrap)
            tasks[task] = _interval_values(result) | {"p": result.p}
        if not tasks:
            return None
        total = relative_difference(first, second, baseline, **self.bootstrap)
        return _interval_values(total) | {"p": total.p, "tasks": tasks}


def _progress(run: Run, answers: Answers) -> dict[str, Any]:
    """Return how many answers the run has, and how many it will have."""
    count = sum(len({str(row["index"]) for row in rows}) for rows in answers.values())
    waits = any(setting.reference for setting in run.settings.values()) and run.metadata.get("matched", True)
    waits = waits and not (run.folder / SETTINGS).is_file()
    total = sum(int(task["samples"]) for task in run.metadata["tasks"]) * len(run.settings)
    return {"answers": count, "of": total, "whole": count >= total and not waits, "waits_for_budgets": waits}


def _build_summary(run: Run, rows: list[dict[str, Any]], answers: Answers) -> Summary:
    columns: list[dict[str, Any]] = []
    for task in run.metadata["tasks"]:
        benchmark = find_benchmark(str(task["task"]))
        label = benchmark.label if benchmark else task["task"]
        columns.append({"task": task["task"], "label": label, "metric": task["metric"], "note": ""})
    metadata = {name: value for name, value in run.metadata.items() if name not in ("settings", "format")}
    metadata["tasks"] = [{key: value for key, value in task.items() if key != "path"} for task in metadata["tasks"]]
    return {
        "format": FORMAT,
        "name": run.folder.resolve().name,
        "run": metadata,
        "scored": True,
        "warnings": [],
        "notes": [f"Tasks of the run that are left out here: {', '.join(run.left_out)}."] if run.left_out else [],
        "answers": {"rows": sum(map(len, answers.values())), "bytes": _answer_bytes(run)},
        "progress": _progress(run, answers),
        "columns": columns,
        "baseline": next((row for row in rows if row["method"] == "full"), None),
        "tiers": _build_tiers([row for row in rows if row["method"] != "full"]),
        "versus": None,
    }


def _build_tiers(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group rows by tier: dynamic tiers first, each kind from many tokens to few."""
    by_tier: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_tier.setdefault(row["tier"], []).append(row)
    tiers: list[dict[str, Any]] = []
    for name, members in by_tier.items():
        dynamic = not name.isdecimal()
        budgets = [row["budget"] for row in members if row["budget"] is not None]
        means = [row["tokens"] for row in members if row["reference"] or not budgets]
        tokens = budgets[0] if budgets else _mean(means)
        before = _mean(row["before"] for row in members)
        members.sort(key=_row_order)
        removed = 100 * (1 - tokens / before)
        tiers.append({"tier": name, "dynamic": dynamic, "tokens": tokens, "removed": removed, "rows": members})

    def order(tier: Mapping[str, Any]) -> tuple[bool, bool, float]:
        tokens = tier["tokens"]
        return not tier["dynamic"], tier["tier"] == "own", math.inf if math.isnan(tokens) else -tokens

    return sorted(tiers, key=order)


def _row_order(row: Mapping[str, Any]) -> tuple[int, str, bool, bool]:
    """Return a sort key: random first and TORINO last, P before M, as in the paper; the others as given."""
    if not row["method"].startswith("torino-"):
        return int(row["method"] != "random"), "", False, False
    return 2, row["sae"] or "", row["method"] != "torino-p", row["budget"] is not None


def _compare(scorer: _RunScorer, summary: Summary, versus: str | None) -> None:
    """Compare each row with the row of its tier that ``versus`` names."""
    name = (versus or "torino-m").casefold()
    rows = [row for tier in summary["tiers"] for row in tier["rows"]]
    exact = [row for row in rows if any(name == item.casefold() for item in row["ids"])]
    compared = False
    for tier in summary["tiers"]:
        matches = [row for row in tier["rows"] if name in (row["method"].casefold(), row["label"].casefold())]
        # a method with default options is preferred to one whose label shows options, as in DivPrune(space='x')
        matches.sort(key=lambda row: (not row["dynamic"], re.search(r"\S\(", row["label"]) is not None))
        reference = next(iter([*exact, *matches]), None)
        if reference is None:
            continue
        compared = True
        tier["versus"] = reference["label"]
        for row in tier["rows"]:
            if row is not reference:
                row["versus"] = scorer.difference(row["ids"], reference["ids"])
        differences = [row["versus"] for row in tier["rows"] if row.get("versus")]
        for difference, p in zip(differences, holm([item["p"] for item in differences]), strict=True):
            difference["p_holm"] = p
    if versus is not None and not compared:
        raise BadParameter(
            f"No setting of this run is called {versus!r}. Give a method, such as visionzip, or one of: "
            f"{', '.join(item for row in rows for item in row['ids'])}."
        )
    summary["versus"] = versus or "TORINO-M"


def _group_seeds(settings: Iterable[Setting]) -> list[list[Setting]]:
    """Group settings that differ only in their seed."""
    groups: dict[tuple[Any, ...], list[Setting]] = {}
    for item in settings:
        key = (item.method, item.tier, item.sae, item.budget, item.dynamic, _without_seed(item.spec))
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def _without_seed(spec: str) -> str:
    return re.sub(r",?\s*seed=\d+", "", spec)


def _count_tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return statistics of the tokens kept per image; seeds count as further images."""
    by_image = {(row["setting"], row["image"]): row for row in rows if "error" not in row}
    if not by_image:
        return {}
    kept = np.array([row["tokens"] for row in by_image.values()], dtype=np.float64)
    before = np.array([row["before"] for row in by_image.values()], dtype=np.float64)
    images = len({image for _, image in by_image})
    removed = _distribution(100 * (1 - kept / before))
    return {"images": images, "before": before.mean()} | _distribution(kept) | {"removed": removed}


def _distribution(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return {"mean": values.mean(), "min": values.min(), "p10": low, "median": middle, "p90": high, "max": values.max()}


def _mean_stats(stats: Sequence[ScoreStats]) -> ScoreStats:
    return replace(stats[0], sums=np.mean([item.sums for item in stats], axis=0))


def _interval_values(interval: Interval) -> dict[str, Any]:
    values: dict[str, Any] = {"value": interval.value, "low": interval.low, "high": interval.high}
    if isinstance(interval, SeedInterval):
        values |= {"sd": interval.sd, "values": list(interval.values)}
    return values


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else math.nan


def _answer_bytes(run: Run) -> int:
    return sum(path.stat().st_size for path in run.answer_files())


def _to_json(value: Any) -> Any:
    """Convert NumPy scalars to Python numbers, and NaN to None."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}  # type: ignore[reportUnknownMemberType]
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value
