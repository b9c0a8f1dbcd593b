"""Measuring a run: everything that a report or a figure says about it, as one document for ``scores.json``.

The document is JSON alone: a report can be made of it again where neither the answers nor the data are at hand.
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
from torino.core.io import read_json, write_json
from torino.evaluation.benchmarks import benchmark_of
from torino.evaluation.judge import Grader
from torino.evaluation.protocol import NO_SAE, PAIRED, Setting
from torino.evaluation.results import SETTINGS, Run, open_run
from torino.evaluation.scoring import Score, ScoreStats
from torino.evaluation.statistics import (
    DRAWS,
    LEVEL,
    Interval,
    OverSeeds,
    difference,
    interval,
    over_seeds,
    relative_difference,
    relative_interval,
    relative_over_seeds,
)
from torino.evaluation.tasks import Task

FORMAT = "torino-scores/1"
SCORES = "scores.json"
By = Literal["question", "image"]
Document = dict[str, Any]
Answers = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def measure(
    run: Run,
    data: str | Path | None = None,
    *,
    tasks: Mapping[str, Task] | None = None,
    judge: Grader | None = None,
    versus: str | None = None,
    by: By = "question",
    baseline_of: str | Path | None = None,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> Document:
    """Score a run, as far as it has come.

    A method that has not answered all questions of a task is scored on those it has, and set in relation to the
    baseline on the same ones.

    Parameters
    ----------
    run : Run
    data : path, optional
        Folder of the tasks' files; by default where they were.
    tasks : mapping of name to Task, optional
        Where they are open already.
    judge : Grader, optional
        For tasks that are graded.
    versus : str, optional
        Method, label or id of the setting that all others are compared with; by default TORINO-M of the same tier.
    by : {"question", "image"}
        What the bootstrap draws.
    baseline_of : path, optional
        Another run over the same tasks whose full-token answers are the baseline.
    draws, level
        Of the bootstrap.
    """
    if by not in ("question", "image"):
        raise BadParameter(f"by must be question or image, got {by!r}.")
    answers = group_answers(run)
    opened = run.open_tasks(data) if tasks is None else dict(tasks)
    marks = _Marks(run, opened, answers, judge, by, {"draws": draws, "level": level})
    if baseline_of is not None:
        marks.borrow(open_run(baseline_of))
    rows = [marks.row(settings) for settings in _families(run.settings.values())]
    document = _document(run, rows, answers)
    document |= {"by": by, "draws": draws, "level": level}
    document["baseline_of"] = None if baseline_of is None else Path(baseline_of).name
    for column in document["columns"]:
        column["note"] = marks.notes.get(column["task"], "")
    _compare(marks, document, versus)
    return _plain(document)


def counts_only(run: Run) -> Document:
    """The document without scores: what the answers alone say of tokens and times."""
    answers = group_answers(run)
    rows = [describe(run, settings, answers) for settings in _families(run.settings.values())]
    return _plain(_document(run, rows, answers) | {"scored": False})


def document_of(run: Run, data: str | Path | None = None, **options: Any) -> Document:
    """Measure a run, or read what was measured where the tasks' files are gone; keeps it in ``scores.json``."""
    kept = run.folder / SCORES
    try:
        tasks = run.open_tasks(data)
    except BadFile as error:
        if data is not None or not kept.is_file():
            raise
        document = read_scores(kept)
        late = "" if document["answers"]["bytes"] == _size(run) else "; it has more now"
        document["notes"].append(
            f"Made of {SCORES}, which was measured when the run had {document['answers']['rows']:,} answers{late}, "
            f"because the tasks could not be opened: {error}"
        )
        return document
    document = measure(run, tasks=tasks, **options)
    write_json(kept, document)
    return document


def known_document(run: Run) -> Document:
    """For figures: ``scores.json`` where it is up to date, else measured, else without scores."""
    kept = run.folder / SCORES
    if kept.is_file():
        document = read_scores(kept)
        if document["answers"]["bytes"] == _size(run):
            return document
    try:
        return document_of(run)
    except BadFile:
        return counts_only(run)


def read_scores(path: str | Path) -> Document:
    """Read ``scores.json``."""
    document = read_json(path)
    if document.get("format") != FORMAT:
        raise BadFile(f"{path} is of format {document.get('format')!r}, and this torino reads {FORMAT!r}.")
    return document


def group_answers(run: Run) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Answers by task and setting."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.rows():
        found.setdefault((row["task"], row["setting"]), []).append(row)
    return found


def display(setting: Setting, several: bool = False) -> str:
    """Name of a setting in tables, as the paper writes it: TORINO_FB-M has a budget, TORINO-M none."""
    label = setting.label.removesuffix("_FB")
    if setting.method in PAIRED and setting.budget is not None:
        label = label.replace("TORINO-", "TORINO_FB-")
    if setting.sae is not None and several:
        label += " (no SAE)" if setting.sae == NO_SAE else f" ({setting.sae})"
    return label


def describe(run: Run, settings: Sequence[Setting], answers: Answers) -> dict[str, Any]:
    """What is known of settings that differ in their seed alone, without scores."""
    one = settings[0]
    several = len({setting.sae for setting in run.settings.values() if setting.sae is not None}) > 1
    by_task = {task: _tokens([row for s in settings for row in answers.get((task, s.id), ())]) for task in run.tasks}
    by_task = {task: facts for task, facts in by_task.items() if facts}
    plans = [
        row["seconds"]["plan"]
        for s in settings
        for task in run.tasks
        for row in answers.get((task, s.id), ())
        if "plan" in row.get("seconds", {})
    ]
    facts: dict[str, Any] = {
        "ids": [setting.id for setting in settings],
        "label": display(one, several),
        "method": one.method,
        "spec": one.spec if len(settings) == 1 else re.sub(r",?\s*seed=\d+", "", one.spec),
        "sae": one.sae,
        "tier": one.tier,
        "dynamic": one.dynamic,
        "reference": one.reference,
        "budget": one.budget,
        "seeds": len(settings),
        "tokens": _mean(by_task[task]["mean"] for task in by_task),
        "before": _mean(by_task[task]["before"] for task in by_task),
        "removed": _mean(by_task[task]["removed"]["mean"] for task in by_task),
        "tokens_by_task": by_task,
        "plan_ms": 1000 * _mean(plans),
        "scores": {},
        "relative": None,
        "versus": None,
    }
    return facts


@dataclass
class _Marks:
    """Scores of a run, each made once."""

    run: Run
    tasks: dict[str, Task]
    answers: Answers
    judge: Grader | None
    by: By
    draw: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict[str, str])
    _made: dict[tuple[str, str, frozenset[str]], Score] = field(default_factory=dict[Any, Score])
    _other: Answers | None = None

    def borrow(self, other: Run) -> None:
        """Take the full-token answers of another run."""
        prints = {task["task"]: task["fingerprint"] for task in other.facts["tasks"]}
        for task in self.run.facts["tasks"]:
            if prints.get(task["task"]) != task["fingerprint"]:
                raise BadParameter(
                    f"{other.folder} was not asked {task['task']} of the same file, so it has no baseline for this run."
                )
        self._other = group_answers(other)

    def rows(self, task: str, setting: str) -> Sequence[Mapping[str, Any]]:
        source = self._other if self._other is not None and setting == "full" else self.answers
        return source.get((task, setting), ())

    def answered(self, task: str, settings: Iterable[str]) -> frozenset[str]:
        """Questions that all of these have answered, whole groups only."""
        samples = self.tasks[task].samples
        common = {one.index for one in samples}
        for setting in settings:
            common &= {str(row["index"]) for row in self.rows(task, setting)}
        waiting = {one.group for one in samples if one.index not in common}
        return frozenset(one.index for one in samples if one.group not in waiting)

    def score(self, task: str, setting: str, within: frozenset[str]) -> Score:
        key = (task, setting, within)
        if key not in self._made:
            whole = self.tasks[task]
            cut = whole
            if len(within) < len(whole):
                cut = replace(whole, samples=tuple(one for one in whole.samples if one.index in within))
            rows = [row for row in self.rows(task, setting) if str(row["index"]) in within]
            self._made[key] = cut.score(rows, self.judge)
            if self._made[key].note:
                self.notes[task] = self._made[key].note
        return self._made[key]

    def tally(self, task: str, setting: str, within: frozenset[str]) -> ScoreStats:
        score = self.score(task, setting, within)
        return score.by_image() if self.by == "image" else score.tally

    def pairs(self, settings: Sequence[str]) -> dict[str, frozenset[str]]:
        """Tasks on which these settings and the baseline can be set in relation, and on which questions."""
        found: dict[str, frozenset[str]] = {}
        for task in self.tasks:
            within = self.answered(task, [*settings, "full"])
            if within and self.score(task, "full", within).value > 0:  # NaN is not
                found[task] = within
        return found

    def row(self, settings: Sequence[Setting]) -> dict[str, Any]:
        """Scores of settings that differ in their seed alone."""
        facts = describe(self.run, settings, self.answers)
        ids = [setting.id for setting in settings]
        for task in self.tasks:
            within = self.answered(task, ids)
            if within:
                facts["scores"][task] = self._cell(task, ids, within)
        pairs = self.pairs(ids)
        if pairs:
            below = {task: self.tally(task, "full", within) for task, within in pairs.items()}
            runs = [{task: self.tally(task, one, within) for task, within in pairs.items()} for one in ids]
            found = (
                relative_over_seeds(runs, below, **self.draw)
                if len(runs) > 1
                else relative_interval(runs[0], below, **self.draw)
            )
            facts["relative"] = _interval(found) | {
                "ratios": {
                    task: 100 * float(np.mean([one[task].value for one in runs])) / below[task].value for task in pairs
                },
                "left_out": [task for task in self.tasks if task not in pairs],
            }
        return facts

    def _cell(self, task: str, ids: Sequence[str], within: frozenset[str]) -> dict[str, Any]:
        scores = [self.score(task, one, within) for one in ids]
        counts = [score.counts for score in scores]
        facts: dict[str, Any] = {
            "metric": scores[0].metric,
            "counts": {name: sum(one.get(name, 0) for one in counts) for name in dict.fromkeys(counts[0])},
            "of": len(self.tasks[task]),
            "questions": len(within),
            "parts": {
                name: float(np.mean([score.parts[name] for score in scores if name in score.parts]))
                for name in scores[0].parts
            },
            "note": scores[0].note,
        }
        if any(math.isnan(score.value) for score in scores):
            return facts | {"value": None}
        tallies = [self.tally(task, one, within) for one in ids]
        found = over_seeds(tallies, **self.draw) if len(tallies) > 1 else interval(tallies[0], **self.draw)
        return facts | _interval(found)

    def apart(self, ids: Sequence[str], others: Sequence[str]) -> dict[str, Any] | None:
        """The difference to other settings, on the questions that both have answered; seeds are averaged."""
        tasks: dict[str, Any] = {}
        first: dict[str, ScoreStats] = {}
        second: dict[str, ScoreStats] = {}
        below: dict[str, ScoreStats] = {}
        for task, within in self.pairs([*ids, *others]).items():
            first[task] = _mean_tally([self.tally(task, one, within) for one in ids])
            second[task] = _mean_tally([self.tally(task, one, within) for one in others])
            below[task] = self.tally(task, "full", within)
            found = difference(first[task], second[task], **self.draw)
            tasks[task] = _interval(found) | {"p": found.p}
        if not tasks:
            return None
        whole = relative_difference(first, second, below, **self.draw)
        return _interval(whole) | {"p": whole.p, "tasks": tasks}


def _progress(run: Run, answers: Answers) -> dict[str, Any]:
    """How far the run has come."""
    there = sum(len({str(row["index"]) for row in rows}) for rows in answers.values())
    waits = any(one.reference for one in run.settings.values()) and run.facts.get("matched", True)
    waits = waits and not (run.folder / SETTINGS).is_file()
    wanted = sum(int(task["samples"]) for task in run.facts["tasks"]) * len(run.settings)
    return {"answers": there, "of": wanted, "whole": there >= wanted and not waits, "waits_for_budgets": waits}


def _document(run: Run, rows: list[dict[str, Any]], answers: Answers) -> Document:
    columns: list[dict[str, Any]] = []
    for task in run.facts["tasks"]:
        known = benchmark_of(str(task["task"]))
        columns.append(
            {
                "task": task["task"],
                "label": known.label if known else task["task"],
                "metric": task["metric"],
                "note": "",
            }
        )
    facts = {name: value for name, value in run.facts.items() if name not in ("settings", "format")}
    facts["tasks"] = [{key: value for key, value in task.items() if key != "path"} for task in facts["tasks"]]
    return {
        "format": FORMAT,
        "name": run.folder.resolve().name,
        "run": facts,
        "scored": True,
        "notes": [f"Left out, though the run has answers: {', '.join(run.left_out)}."] if run.left_out else [],
        "answers": {"rows": sum(map(len, answers.values())), "bytes": _size(run)},
        "progress": _progress(run, answers),
        "columns": columns,
        "baseline": next((row for row in rows if row["method"] == "full"), None),
        "tiers": _tiers([row for row in rows if row["method"] != "full"]),
        "versus": None,
    }


def _tiers(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by tier: dynamic ones first, each kind from many tokens to few."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["tier"], []).append(row)
    tiers: list[dict[str, Any]] = []
    for name, members in found.items():
        dynamic = not name.isdecimal()
        budgets = [row["budget"] for row in members if row["budget"] is not None]
        means = [row["tokens"] for row in members if row["reference"] or not budgets]
        tokens = budgets[0] if budgets else _mean(means)
        before = _mean(row["before"] for row in members)
        members.sort(key=_place)
        removed = 100 * (1 - tokens / before)
        tiers.append({"tier": name, "dynamic": dynamic, "tokens": tokens, "removed": removed, "rows": members})
    return sorted(tiers, key=lambda tier: (not tier["dynamic"], tier["tier"] == "own", -_number(tier["tokens"])))


def _place(row: Mapping[str, Any]) -> tuple[int, str, bool, bool]:
    """Random first and TORINO last, P before M, as the paper has it; the rest as they were given."""
    if not row["method"].startswith("torino-"):
        return int(row["method"] != "random"), "", False, False
    return 2, row["sae"] or "", row["method"] != "torino-p", row["budget"] is not None


def _compare(marks: _Marks, document: Document, versus: str | None) -> None:
    """Set each row beside the one of its tier that ``versus`` names."""
    wanted = (versus or "torino-m").casefold()
    rows = [row for tier in document["tiers"] for row in tier["rows"]]
    exact = [row for row in rows if any(wanted == one.casefold() for one in row["ids"])]
    found = False
    for tier in document["tiers"]:
        named = [row for row in tier["rows"] if wanted in (row["method"].casefold(), row["label"].casefold())]
        # a method with its own defaults comes before one whose hyperparameters were written out
        named.sort(key=lambda row: (not row["dynamic"], row["label"].startswith(f"{row['method']}(")))
        chosen = next(iter([*exact, *named]), None)
        if chosen is None:
            continue
        found = True
        tier["versus"] = chosen["label"]
        for row in tier["rows"]:
            if row is not chosen:
                row["versus"] = marks.apart(row["ids"], chosen["ids"])
    if versus is not None and not found:
        raise BadParameter(
            f"No setting of this run is called {versus!r}. Give a method, such as visionzip, or one of: "
            f"{', '.join(one for row in rows for one in row['ids'])}."
        )
    document["versus"] = versus or "TORINO-M"


def _families(settings: Iterable[Setting]) -> list[list[Setting]]:
    """Settings that differ in their seed alone, together."""
    found: dict[tuple[Any, ...], list[Setting]] = {}
    for one in settings:
        bare = re.sub(r",?\s*seed=\d+", "", one.spec)
        found.setdefault((one.method, one.tier, one.sae, one.budget, one.dynamic, bare), []).append(one)
    return list(found.values())


def _tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens that the images of a task kept; seeds count as further images."""
    by_image = {(row["setting"], row["image"]): row for row in rows if "error" not in row}
    if not by_image:
        return {}
    kept = np.array([row["tokens"] for row in by_image.values()], dtype=np.float64)
    before = np.array([row["before"] for row in by_image.values()], dtype=np.float64)
    removed = 100 * (1 - kept / before)
    return (
        {"images": len({image for _, image in by_image}), "before": before.mean()}
        | _spread(kept)
        | {"removed": _spread(removed)}
    )


def _spread(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return {"mean": values.mean(), "min": values.min(), "p10": low, "median": middle, "p90": high, "max": values.max()}


def _mean_tally(tallies: Sequence[ScoreStats]) -> ScoreStats:
    return replace(tallies[0], sums=np.mean([tally.sums for tally in tallies], axis=0))


def _interval(found: Interval) -> dict[str, Any]:
    told: dict[str, Any] = {"value": found.value, "low": found.low, "high": found.high}
    if isinstance(found, OverSeeds):
        told |= {"sd": found.sd, "values": list(found.values)}
    return told


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else math.nan


def _number(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _size(run: Run) -> int:
    return sum(path.stat().st_size for path in run.files())


def _plain(value: Any) -> Any:
    """The same for JSON, which has no NaN and no NumPy."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}  # type: ignore[reportUnknownMemberType]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value
