"""Compute the score of a task from its samples and the model's answers.

Every score here is a function of sums over groups of samples that are scored together: correct answers and questions
for an accuracy, true and false positives for F1, correct questions and correct images for MME. :class:`ScoreStats`
keeps these sums, so that :mod:`torino.evaluation.statistics` can resample groups and score each resample with the same
formula.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torino.core.errors import BadParameter
from torino.evaluation.extraction import extract_option, extract_yes_no, normalize_answer
from torino.evaluation.samples import Sample

Floats = NDArray[np.float64]
Parts = dict[str, float]
"""Further figures of a score by name."""
Grade = tuple[float, str | None]
"""Score of one answer from 0 to 1, and the answer that was extracted; None if extraction failed."""

PERCEPTION = (
    "existence",
    "count",
    "position",
    "color",
    "posters",
    "celebrity",
    "scene",
    "landmark",
    "artwork",
    "OCR",
)
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
ABILITIES = ("rec", "ocr", "know", "gen", "spat", "math")


@dataclass(frozen=True, eq=False)
class ScoreStats:
    """Sums over groups of samples, and the formula that turns them into a score.

    Attributes
    ----------
    units : tuple of str
        Name of each group; the same for all methods on a task.
    sums : array of shape (groups, features)
    formula : callable
        Maps sums of shape (…, features) to scores of shape (…).
    """

    units: tuple[str, ...]
    sums: Floats
    formula: Callable[[Floats], Floats]

    @property
    def value(self) -> float:
        """Score over all groups."""
        return float(self.formula(self.sums.sum(axis=0)))

    def merge(self, labels: Sequence[str]) -> ScoreStats:
        """Merge groups with equal labels, for example to resample whole images."""
        names = list(dict.fromkeys(labels))
        position = {name: row for row, name in enumerate(names)}
        sums = np.zeros((len(names), self.sums.shape[1]))
        np.add.at(sums, [position[label] for label in labels], self.sums)
        return ScoreStats(tuple(names), sums, self.formula)


@dataclass(frozen=True, eq=False)
class Score:
    """Score of one task.

    Attributes
    ----------
    task, metric : str
    value : float
        In percent, for MME in points; NaN if the task was not scored, with the reason in ``note``.
    parts : mapping
        Further figures: precision and recall, the score of each category, …
    per_sample : mapping of index to float
        Score of each sample from 0 to 1, if samples have individual scores.
    extracted : mapping of index to str or None
        The answer that was extracted from the model's text; None if extraction failed.
    counts : mapping
        ``samples``, ``answered``, ``unanswered``, ``failed`` (the model raised), ``unparsed`` (no yes, no or option in
        the answer); the last three count as wrong. ``ignored``: answers to samples that are not part of the task.
    stats : ScoreStats
    images : tuple of str
        Key of the image of each group in ``stats``.
    note : str
    """

    task: str
    metric: str
    value: float
    parts: Mapping[str, float]
    per_sample: Mapping[str, float]
    extracted: Mapping[str, str | None]
    counts: Mapping[str, int]
    stats: ScoreStats
    images: tuple[str, ...] = ()
    note: str = ""

    def by_image(self) -> ScoreStats:
        """Return the stats with one group per image, for intervals that resample whole images."""
        return self.stats.merge(self.images)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except per-sample results, ready for JSON."""
        return {
            "task": self.task,
            "metric": self.metric,
            "value": None if math.isnan(self.value) else self.value,
            "parts": dict(self.parts),
            "counts": dict(self.counts),
            "note": self.note,
        }


@dataclass
class GradedAnswers:
    """Samples with the model's answers and the grade of each.

    Attributes
    ----------
    samples : sequence of Sample
    predictions : mapping of index to str
        The model's answers; samples without one get 0.
    columns : sequence of str
        Columns of ``Sample.meta`` whose values get their own mean score.
    scores, extracted
        Filled by :meth:`grade`.
    """

    samples: Sequence[Sample]
    predictions: Mapping[str, str]
    columns: Sequence[str] = ()
    scores: dict[str, float] = field(default_factory=dict[str, float])
    extracted: dict[str, str | None] = field(default_factory=dict[str, str | None])

    def grade(self, rule: Callable[[Sample, str], Grade]) -> GradedAnswers:
        """Grade each sample individually."""
        for sample in self.samples:
            text = self.predictions.get(sample.index)
            score, extracted = (0.0, None) if text is None else rule(sample, text)
            self.scores[sample.index], self.extracted[sample.index] = float(score), extracted
        return self

    def groups(self) -> dict[str, list[Sample]]:
        """Return the samples by the group in which they are scored."""
        groups: dict[str, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.group, []).append(sample)
        return groups


def exact_match(sample: Sample, text: str) -> Grade:
    """Grade by equality with a correct answer, ignoring case, surrounding spaces and a final full stop (GQA)."""
    answer, *correct = (item.strip().rstrip(".").strip().lower() for item in (text, *sample.answers))
    return float(answer in correct), answer


def soft_accuracy(sample: Sample, text: str) -> Grade:
    """Grade by VQA accuracy: the mean over annotators of min(1, number of *other* annotators who agree / 3).

    The formula is meant for ten annotators. Fewer than four can never reach 1 with it, so their answers count as
    alternatives, any of which scores 1.
    """
    answer = normalize_answer(text)
    correct = [normalize_answer(item) for item in sample.answers]
    agree = correct.count(answer)
    if len(correct) < 4:
        return float(agree > 0), answer
    without_self, all_agree = min(1.0, (agree - 1) / 3), min(1.0, agree / 3)
    score = (agree * without_self + (len(correct) - agree) * all_agree) / len(correct) if agree else 0.0
    return score, answer


def match_option(sample: Sample, text: str) -> Grade:
    """Grade by the chosen option."""
    answer = extract_option(text, sample.options)
    return float(answer == sample.answers[0]), answer


# VLMEvalKit's list lacks commas, so three of its prefixes are two texts joined; those never occur.
LETTER_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
    "Answer:",
    "Option:",
)


def match_letter(sample: Sample, text: str) -> Grade:
    """Grade by the first capital letter of an option, as VLMEvalKit does for Video-MME and LongVideoBench.

    Some introductions are removed first, and one letter is found in any word: "Cats" is C. Without such a letter the
    answer is read as in other multiple choices.
    """
    rest = text.strip()
    for prefix in LETTER_PREFIXES:
        rest = rest.replace(prefix, "")
    found = re.search(r"[ABCD]" if len(sample.options) < 5 else r"[ABCDE]", rest)
    if found is None:
        return match_option(sample, text)
    return float(found[0] == sample.answers[0]), found[0]


def match_first_word(sample: Sample, text: str) -> Grade:
    """Grade by the first word of the answer, as VLMEvalKit does for MVBench.

    The word counts if it is part of the letter in brackets, such as ``a``, ``a)`` and ``(a)`` of ``(A)``, or contains
    it. Otherwise the answer is read as in other multiple choices. An empty answer is wrong; VLMEvalKit's rule finds it
    in every letter.
    """
    word, correct = text.strip().lower().split(" ")[0], f"({sample.answers[0].lower()})"
    if word and (word.replace(".", "") in correct or correct in word):
        return 1.0, sample.answers[0]
    return match_option(sample, text)


def match_yes_no(sample: Sample, text: str) -> Grade:
    """Grade by yes or no."""
    answer = extract_yes_no(text)
    return float(answer == sample.answers[0].strip().lower()), answer


def mean_score(graded: GradedAnswers) -> tuple[ScoreStats, Parts]:
    """Compute the mean over samples, in percent."""
    rows = [[graded.scores[sample.index], 1.0] for sample in graded.samples]
    stats = ScoreStats(tuple(sample.index for sample in graded.samples), _to_array(rows, 2), _percent)
    return stats, _means_by_column(graded.samples, graded.scores, graded.columns)


def circular_score(graded: GradedAnswers) -> tuple[ScoreStats, Parts]:
    """Compute MMBench's circular accuracy: a question counts if every rotation of its options is answered correctly."""
    groups = graded.groups()
    correct = {name: float(all(graded.scores[item.index] for item in group)) for name, group in groups.items()}
    stats = ScoreStats(tuple(groups), _to_array([[value, 1.0] for value in correct.values()], 2), _percent)
    firsts = [group[0] for group in groups.values()]
    parts = _means_by_column(firsts, {first.index: correct[first.group] for first in firsts}, graded.columns)
    parts["each rotation by itself"] = 100 * float(np.mean(list(graded.scores.values())))
    return stats, parts


def mme_score(graded: GradedAnswers) -> tuple[ScoreStats, Parts]:
    """Compute MME's score: per category 100 × (share of correct questions + share of fully correct images).

    The score is the sum over the 14 categories; perception and cognition are its two halves.
    """
    groups = graded.groups()
    known = (*PERCEPTION, *COGNITION)
    present = {group[0].meta.get("category", "") for group in groups.values()}
    names = [*(name for name in known if name in present), *sorted(present.difference(known))]
    sums = np.zeros((len(groups), 4 * len(names)))
    for row, group in enumerate(groups.values()):
        column = 4 * names.index(group[0].meta.get("category", ""))
        correct = [graded.scores[sample.index] for sample in group]
        sums[row, column : column + 4] = sum(correct), len(correct), all(correct), 1.0
    stats = ScoreStats(tuple(groups), sums, _mme_total)
    total = sums.sum(axis=0)
    parts: Parts = {}
    for half, members in (("perception", PERCEPTION), ("cognition", COGNITION)):
        columns = [4 * names.index(name) + k for name in members if name in names for k in range(4)]
        if columns:
            parts[half] = float(_mme_total(total[columns]))
    for position, name in enumerate(names):
        correct, questions, correct_images, images = total[4 * position : 4 * position + 4]
        parts |= {f"{name} acc": 100 * correct / questions, f"{name} acc+": 100 * correct_images / images}
    return stats, {name: float(part) for name, part in parts.items()}


def pope_score(graded: GradedAnswers) -> tuple[ScoreStats, Parts]:
    """Compute POPE's score: F1 of "yes" over all questions, each counted once for every split it belongs to.

    An answer that is neither yes nor no is not a "yes" for F1 and is wrong for the accuracy. ``f1 mean of splits`` is
    the mean F1 of the splits, which other papers report.
    """
    sums = np.zeros((len(graded.samples), 4))  # true positives, false positives, false negatives, true negatives
    answered = np.zeros((len(graded.samples), 2))  # correct answers, questions
    splits: dict[str, list[int]] = {}
    for row, sample in enumerate(graded.samples):
        names = [name.strip() for name in sample.meta.get("category", "").split(",") if name.strip()]
        for name in names:
            splits.setdefault(name, []).append(row)
        positive, predicted = sample.answers[0].strip().lower() == "yes", graded.extracted[sample.index] == "yes"
        weight = max(len(names), 1)
        sums[row, 0 if positive and predicted else 1 if predicted else 2 if positive else 3] = weight
        answered[row] = weight * graded.scores[sample.index], weight
    stats = ScoreStats(tuple(sample.index for sample in graded.samples), sums, _f1)
    parts = _pope_parts(sums.sum(axis=0), answered.sum(axis=0))
    for name in sorted(splits):
        unweighted = np.minimum(sums[splits[name]], 1).sum(axis=0)
        share = answered[splits[name]] / answered[splits[name], 1:]
        parts |= {f"{key} {name}": value for key, value in _pope_parts(unweighted, share.sum(axis=0)).items()}
    if splits:
        parts["f1 mean of splits"] = float(np.mean([parts[f"f1 {name}"] for name in splits]))
    return stats, parts


def ability_score(graded: GradedAnswers) -> tuple[ScoreStats, Parts]:
    """Compute MM-Vet's score: the mean grade, and the mean of each ability; a question may need several."""
    stats, _ = mean_score(graded)
    parts: Parts = {}
    for name in ABILITIES:
        grades = [
            graded.scores[sample.index]
            for sample in graded.samples
            if name in [item.strip() for item in sample.meta.get("category", "").replace("_", ",").split(",")]
        ]
        if grades:
            parts[name] = 100 * float(np.mean(grades))
    return stats, parts


def build_score(
    task: str,
    metric: str,
    graded: GradedAnswers,
    total: Callable[[GradedAnswers], tuple[ScoreStats, Parts]],
    counts: Mapping[str, int],
    note: str = "",
) -> Score:
    """Build the score of a task from graded answers."""
    if not graded.samples:
        raise BadParameter(f"{task} has no sample to score.")
    stats, parts = total(graded)
    first = {sample.index: sample for sample in reversed(graded.samples)} | {
        sample.group: sample for sample in reversed(graded.samples)
    }
    images = tuple(first[unit].image.key for unit in stats.units)
    return Score(
        task, metric, stats.value, parts, dict(graded.scores), dict(graded.extracted), counts, stats, images, note
    )


def build_empty_score(task: str, metric: str, samples: Sequence[Sample], counts: Mapping[str, int], note: str) -> Score:
    """Build the score of a task that could not be scored; ``note`` gives the reason."""
    units = tuple(sample.index for sample in samples)
    stats = ScoreStats(units, np.full((len(units), 2), np.nan), _percent)
    images = tuple(sample.image.key for sample in samples)
    return Score(task, metric, math.nan, {}, {}, {}, counts, stats, images, note)


def _to_array(rows: Sequence[Sequence[float]], width: int) -> Floats:
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), width)


def _means_by_column(samples: Sequence[Sample], scores: Mapping[str, float], columns: Sequence[str]) -> Parts:
    """Return the mean score of each value of the columns, in percent."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for column in columns:
            if column in sample.meta:
                values.setdefault(f"{column} {sample.meta[column]}", []).append(scores[sample.index])
    return {name: 100 * float(np.mean(values[name])) for name in sorted(values)}


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    """Return the ratio, and 0 for a denominator of 0."""
    shape = np.broadcast(numerator, denominator).shape
    return np.divide(numerator, denominator, out=np.zeros(shape), where=np.asarray(denominator) != 0)


def _percent(sums: Floats) -> Floats:
    return 100 * _divide(sums[..., 0], sums[..., 1])


def _f1(sums: Floats) -> Floats:
    true_positive, false_positive, false_negative = sums[..., 0], sums[..., 1], sums[..., 2]
    return 100 * _divide(2 * true_positive, 2 * true_positive + false_positive + false_negative)


def _mme_total(sums: Floats) -> Floats:
    by_category = sums.reshape(*sums.shape[:-1], -1, 4)
    accuracy = _divide(by_category[..., 0], by_category[..., 1])
    accuracy_plus = _divide(by_category[..., 2], by_category[..., 3])
    return 100 * (accuracy + accuracy_plus).sum(axis=-1)


def _pope_parts(confusion: Floats, answered: Floats) -> Parts:
    true_positive, false_positive, false_negative, _ = confusion
    shares = {
        "f1": _f1(confusion) / 100,
        "precision": _divide(true_positive, true_positive + false_positive),
        "recall": _divide(true_positive, true_positive + false_negative),
        "accuracy": _divide(answered[0], answered[1]),
        "yes ratio": _divide(true_positive + false_positive, confusion.sum()),
    }
    return {name: 100 * float(share) for name, share in shares.items()}
