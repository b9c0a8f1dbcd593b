"""Warn about runs whose scores mean nothing: a baseline at chance, or one answer to all questions.

A model that is asked in a way it was not trained for still answers something. Its scores then say nothing about the
methods, so a run and its report say so first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torino.evaluation.benchmarks import OPTION_KINDS
from torino.evaluation.extraction import normalize_answer
from torino.evaluation.results import Run
from torino.evaluation.samples import Sample
from torino.evaluation.tasks import Task

MAX_CONSTANTS = 3  # most frequent answers that are tried as the answer to all questions
MIN_QUESTIONS = 5  # questions from which on one constant answer of a method, not of the baseline, is mentioned
SHOWN = 40  # characters of an answer in a warning
ADVICE = (
    "Scores of this task say nothing about the methods. Check the prompt style ({style}) and the answers of the run."
)
Rows = Sequence[Mapping[str, Any]]
Answers = Callable[[str, str], Rows]
"""Returns the rows of a task and a setting."""


@dataclass(frozen=True)
class ImplausibleResult:
    """Something that makes the scores of a task meaningless.

    Attributes
    ----------
    task : str
    kind : {"chance", "constant", "constant-methods"}
        The baseline is not above chance; the baseline gives one answer to all questions; some methods do.
    text : str
        One or two sentences for the reader.
    questions : int
        Number of questions that were answered.
    score, chance : float or None
        Score of the baseline, and the score that needs no image.
    answer : str or None
        The constant answer.
    settings : tuple of str
        Ids of the settings that it concerns.
    """

    task: str
    kind: Literal["chance", "constant", "constant-methods"]
    text: str
    questions: int
    score: float | None = None
    chance: float | None = None
    answer: str | None = None
    settings: tuple[str, ...] = ("full",)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, ready for JSON."""
        return asdict(self)


def find_implausible(run: Run, tasks: Mapping[str, Task], answers: Answers) -> list[ImplausibleResult]:
    """Check the answers of a run, which may be unfinished.

    Parameters
    ----------
    run : Run
    tasks : mapping of name to Task
        The tasks of the run.
    answers : callable
        Returns the rows of a task and a setting.
    """
    found: list[ImplausibleResult] = []
    for entry in run.metadata["tasks"]:
        task = tasks[str(entry["task"])]
        baseline = check_baseline(task, answers(task.name, "full"))
        if baseline is not None:
            style = f"{entry['prompts']}: {str(entry['prompt'])!r}"
            found.append(replace(baseline, text=f"{baseline.text} {ADVICE.format(style=style)}"))
        if baseline is None or baseline.kind != "constant":
            found += _check_methods(run, task, answers)
    return found


def check_baseline(task: Task, rows: Rows) -> ImplausibleResult | None:
    """Check the answers with all tokens to some or all questions of a task."""
    predictions = _predictions(rows)
    incomplete = {sample.group for sample in task.samples if sample.index not in predictions}
    part = replace(task, samples=tuple(sample for sample in task.samples if sample.group not in incomplete))
    if not part.samples:
        return None
    value = None if task.kind == "judge" else part.score(rows).value
    constant = _constant_answer(task, predictions)
    score = "" if value is None else f" and scores {value:.2f}"
    if constant is not None:
        text = f"{task.name}: with all tokens the model gives one answer to all {len(predictions):,} questions"
        text += f", {_shorten(constant)}{score}."
        return ImplausibleResult(task.name, "constant", text, len(predictions), value, answer=constant)
    if value is None:
        return None
    chance, how = chance_score(part)
    if value > chance:
        return None
    reason = f", not above chance: {how} scores {chance:.2f}." if how else ": no answer is right."
    text = f"{task.name}: with all tokens the model scores {value:.2f}{reason}"
    return ImplausibleResult(task.name, "chance", text, len(predictions), value, chance)


def chance_score(task: Task) -> tuple[float, str]:
    """Return the best score that needs neither image nor model, by the task's own rule, and how to get it.

    It is that of guessing among the options, or of always giving the same answer if the right answers differ; 0 and
    an empty text if there is no such strategy.
    """
    best = (0.0, "")
    if task.kind in OPTION_KINDS:
        groups: dict[str, float] = {}
        for sample in task.samples:
            groups[sample.group] = groups.get(sample.group, 1.0) / len(sample.options)
        best = (100 * sum(groups.values()) / len(groups), "guessing among the options")
    if _distinct_truths(task) == 1:
        return best
    for answer in _frequent_answers(task):
        rows = [{"index": sample.index, "prediction": answer} for sample in task.samples]
        value = task.score(rows).value
        if value > best[0]:
            best = (value, f"always answering {_shorten(answer)}")
    return best


def _frequent_answers(task: Task) -> list[str]:
    """Return the answers that are right most often."""
    if task.kind in ("yes-no", "mme", "pope"):
        return ["Yes", "No"]
    counts: Counter[str] = Counter()
    for sample in task.samples:
        counts.update(_truth(task, sample))  # a set: several annotators of a question count once
    return [answer for answer, _ in counts.most_common(MAX_CONSTANTS)]


def _check_methods(run: Run, task: Task, answers: Answers) -> list[ImplausibleResult]:
    """Return one result for all methods that give one answer to all questions."""
    constant: dict[str, int] = {}
    for setting in run.settings:
        predictions = _predictions(answers(task.name, setting))
        enough = setting != "full" and len(predictions) >= MIN_QUESTIONS
        if enough and _constant_answer(task, predictions) is not None:
            constant[setting] = len(predictions)
    if not constant:
        return []
    text = f"{task.name}: {', '.join(constant)} {'give' if len(constant) > 1 else 'gives'} one answer to all questions."
    return [ImplausibleResult(task.name, "constant-methods", text, max(constant.values()), settings=tuple(constant))]


def _constant_answer(task: Task, predictions: Mapping[str, str]) -> str | None:
    """Return the answer that was given to all questions, if the right answers differ."""
    asked = replace(task, samples=tuple(sample for sample in task.samples if sample.index in predictions))
    if len(predictions) < 2 or _distinct_truths(asked) == 1:
        return None
    same = len(set(map(_normalize, predictions.values()))) == 1
    return next(iter(predictions.values())) if same else None


def _distinct_truths(task: Task) -> int:
    return len({_truth(task, sample) for sample in task.samples})


def _truth(task: Task, sample: Sample) -> frozenset[str]:
    """Return the right answers of a sample in the form in which the task compares them."""
    if task.kind in OPTION_KINDS:
        return frozenset(sample.answers)
    return frozenset(map(normalize_answer if task.kind == "vqa" else _normalize, sample.answers))


def _predictions(rows: Rows) -> dict[str, str]:
    return {str(row["index"]): str(row["prediction"]) for row in rows if row.get("prediction") is not None}


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
