"""Scores of a task, from its samples and the answers a model gave.

Every score here is a function of sums over groups of samples that are judged together: right answers and questions for
an accuracy, true and false positives for F1, right questions and right images for MME. A :class:`Tally` keeps these
sums, so that :mod:`torino.evaluation.statistics` can draw groups anew and score the draw by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torino.core.errors import BadParameter
from torino.evaluation.extraction import normalise, option_of, yes_or_no
from torino.evaluation.samples import Sample

Floats = NDArray[np.float64]

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
BY = ("split", "l2-category", "category")  # columns whose values get an accuracy of their own


@dataclass(frozen=True, eq=False)
class ScoreStats:
    """Sums over groups of samples, and how a score is made of them.

    Attributes
    ----------
    units : tuple of str
        Name of each group; the same for all methods on a task.
    sums : array of shape (groups, features)
    of : callable
        Maps sums of shape (…, features) to scores of shape (…).
    """

    units: tuple[str, ...]
    sums: Floats
    of: Callable[[Floats], Floats]

    @property
    def value(self) -> float:
        """The score of all groups together."""
        return float(self.of(self.sums.sum(axis=0)))

    def merged(self, labels: Sequence[str]) -> ScoreStats:
        """The same with groups of an equal label made one, to draw, say, whole images."""
        names = list(dict.fromkeys(labels))
        place = {name: row for row, name in enumerate(names)}
        sums = np.zeros((len(names), self.sums.shape[1]))
        np.add.at(sums, [place[label] for label in labels], self.sums)
        return ScoreStats(tuple(names), sums, self.of)


@dataclass(frozen=True, eq=False)
class Score:
    """The score of one task.

    Attributes
    ----------
    task, metric : str
    value : float
        In per cent, for MME in points; NaN if it was not scored, and ``note`` says why.
    parts : mapping
        Further figures: precision and recall, the score of each category, …
    per_sample : mapping of index to float
        Score of each sample from 0 to 1, where a sample has one of its own.
    extracted : mapping of index to str or None
        What the answer was taken for; None where it could not be told.
    counts : mapping
        ``samples``, ``answered``, ``unanswered``, ``failed`` (the model raised), ``unparsed`` (no yes, no or option in
        the answer); these last three count as wrong. ``ignored``: answers to samples that the task does not have.
    tally : ScoreStats
    images : tuple of str
        Key of the image of each group of the tally.
    note : str
    """

    task: str
    metric: str
    value: float
    parts: Mapping[str, float]
    per_sample: Mapping[str, float]
    extracted: Mapping[str, str | None]
    counts: Mapping[str, int]
    tally: ScoreStats
    images: tuple[str, ...] = ()
    note: str = ""

    def by_image(self) -> ScoreStats:
        """The tally with all questions about an image in one group, for intervals that draw whole images."""
        return self.tally.merged(self.images)

    def facts(self) -> dict[str, Any]:
        """All but the samples, ready for JSON."""
        value = None if math.isnan(self.value) else self.value
        told = {"task": self.task, "metric": self.metric, "value": value, "parts": dict(self.parts)}
        return {**told, "counts": dict(self.counts), "note": self.note}


@dataclass
class Marked:
    """Samples with what was answered, on the way to a score."""

    samples: Sequence[Sample]
    said: Mapping[str, str]
    scores: dict[str, float] = field(default_factory=dict[str, float])
    extracted: dict[str, str | None] = field(default_factory=dict[str, str | None])

    def mark(self, judge: Callable[[Sample, str], tuple[float, str | None]]) -> Marked:
        """Score each sample by itself; one without an answer gets 0."""
        for sample in self.samples:
            text = self.said.get(sample.index)
            score, taken = (0.0, None) if text is None else judge(sample, text)
            self.scores[sample.index], self.extracted[sample.index] = float(score), taken
        return self

    def groups(self) -> dict[str, list[Sample]]:
        """Samples by the group in which they are judged."""
        found: dict[str, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.group, []).append(sample)
        return found


Parts = dict[str, float]


def exact_match(sample: Sample, text: str) -> tuple[float, str | None]:
    """1 if the answer is one of the right ones, but for case, spaces around it and a full stop (GQA)."""
    said, *right = (one.strip().rstrip(".").strip().lower() for one in (text, *sample.answers))
    return float(said in right), said


def soft_accuracy(sample: Sample, text: str) -> tuple[float, str | None]:
    """VQA's accuracy: the mean over the annotators of min(1, how many *others* gave this answer / 3).

    It is meant for ten annotators. Fewer than four could never agree by it; their answers are then taken for several
    right ones, of which any scores 1.
    """
    said = normalise(text)
    right = [normalise(answer) for answer in sample.answers]
    agree = right.count(said)
    if len(right) < 4:
        return float(agree > 0), said
    mine, others = min(1.0, (agree - 1) / 3), min(1.0, agree / 3)
    return (agree * mine + (len(right) - agree) * others) / len(right) if agree else 0.0, said


def choice(sample: Sample, text: str) -> tuple[float, str | None]:
    """1 if the right option was chosen."""
    said = option_of(text, sample.options)
    return float(said == sample.answers[0]), said


def yes_no(sample: Sample, text: str) -> tuple[float, str | None]:
    """1 if the right one of yes and no was said."""
    said = yes_or_no(text)
    return float(said == sample.answers[0].strip().lower()), said


def mean_score(marked: Marked) -> tuple[ScoreStats, Parts]:
    """The mean over samples, in per cent."""
    rows = [[marked.scores[sample.index], 1.0] for sample in marked.samples]
    tally = ScoreStats(tuple(sample.index for sample in marked.samples), _array(rows, 2), _percent)
    return tally, _by_columns(marked.samples, marked.scores)


def circular(marked: Marked) -> tuple[ScoreStats, Parts]:
    """MMBench: a question counts if it was answered rightly in every rotation of its options."""
    groups = marked.groups()
    whole = {name: float(all(marked.scores[one.index] for one in group)) for name, group in groups.items()}
    tally = ScoreStats(tuple(groups), _array([[right, 1.0] for right in whole.values()], 2), _percent)
    firsts = [group[0] for group in groups.values()]
    parts = _by_columns(firsts, {first.index: whole[first.group] for first in firsts})
    parts["each rotation by itself"] = 100 * float(np.mean(list(marked.scores.values())))
    return tally, parts


def mme(marked: Marked) -> tuple[ScoreStats, Parts]:
    """MME: in each category the share of right questions plus the share of images with all questions right, times 100.

    The score is the sum over the 14 categories; perception and cognition are its two halves.
    """
    groups = marked.groups()
    known = (*PERCEPTION, *COGNITION)
    found = {group[0].meta.get("category", "") for group in groups.values()}
    names = [*(name for name in known if name in found), *sorted(found.difference(known))]
    sums = np.zeros((len(groups), 4 * len(names)))
    for row, group in enumerate(groups.values()):
        at = 4 * names.index(group[0].meta.get("category", ""))
        right = [marked.scores[one.index] for one in group]
        sums[row, at : at + 4] = sum(right), len(right), all(right), 1.0
    tally = ScoreStats(tuple(groups), sums, _mme_total)
    total = sums.sum(axis=0)
    parts: Parts = {}
    for half, members in (("perception", PERCEPTION), ("cognition", COGNITION)):
        columns = [4 * names.index(name) + k for name in members if name in names for k in range(4)]
        if columns:
            parts[half] = float(_mme_total(total[columns]))
    for at, name in enumerate(names):
        right, questions, both, images = total[4 * at : 4 * at + 4]
        parts |= {f"{name} acc": 100 * right / questions, f"{name} acc+": 100 * both / images}
    return tally, {name: float(part) for name, part in parts.items()}


def pope(marked: Marked) -> tuple[ScoreStats, Parts]:
    """POPE: F1 of "yes" over all questions, each counted once for every split that it belongs to.

    An answer that is neither yes nor no is no "yes" for F1 and wrong for the accuracy. ``f1 mean of splits`` is the
    average of the splits' F1, which other papers report.
    """
    sums = np.zeros((len(marked.samples), 4))  # true yes, false yes, missed yes, right no
    answered = np.zeros((len(marked.samples), 2))  # right, questions
    splits: dict[str, list[int]] = {}
    for row, sample in enumerate(marked.samples):
        named = [name.strip() for name in sample.meta.get("category", "").split(",") if name.strip()]
        for name in named:
            splits.setdefault(name, []).append(row)
        right, said = sample.answers[0].strip().lower() == "yes", marked.extracted[sample.index] == "yes"
        times = max(len(named), 1)
        sums[row, 0 if right and said else 1 if said else 2 if right else 3] = times
        answered[row] = times * marked.scores[sample.index], times
    tally = ScoreStats(tuple(sample.index for sample in marked.samples), sums, _f1)
    parts = _pope_parts(sums.sum(axis=0), answered.sum(axis=0))
    for name in sorted(splits):
        once = np.minimum(sums[splits[name]], 1).sum(axis=0)
        share = answered[splits[name]] / answered[splits[name], 1:]
        parts |= {f"{key} {name}": value for key, value in _pope_parts(once, share.sum(axis=0)).items()}
    if splits:
        parts["f1 mean of splits"] = float(np.mean([parts[f"f1 {name}"] for name in splits]))
    return tally, parts


def abilities(marked: Marked) -> tuple[ScoreStats, Parts]:
    """MM-Vet: the mean of the judge's grades, and that of each ability, of which a question may need several."""
    tally, _ = mean_score(marked)
    parts: Parts = {}
    for name in ABILITIES:
        grades = [
            marked.scores[sample.index]
            for sample in marked.samples
            if name in [one.strip() for one in sample.meta.get("category", "").replace("_", ",").split(",")]
        ]
        if grades:
            parts[name] = 100 * float(np.mean(grades))
    return tally, parts


def score_of(
    task: str,
    metric: str,
    marked: Marked,
    total: Callable[[Marked], tuple[ScoreStats, Parts]],
    counts: Mapping[str, int],
    note: str = "",
) -> Score:
    """Put a score together."""
    if not marked.samples:
        raise BadParameter(f"{task} has no sample to score.")
    tally, parts = total(marked)
    first = {sample.index: sample for sample in reversed(marked.samples)} | {
        sample.group: sample for sample in reversed(marked.samples)
    }
    images = tuple(first[unit].image.key for unit in tally.units)
    return Score(
        task, metric, tally.value, parts, dict(marked.scores), dict(marked.extracted), counts, tally, images, note
    )


def unscored(task: str, metric: str, samples: Sequence[Sample], counts: Mapping[str, int], note: str) -> Score:
    """A score that could not be had, and why."""
    units = tuple(sample.index for sample in samples)
    tally = ScoreStats(units, np.full((len(units), 2), np.nan), _percent)
    images = tuple(sample.image.key for sample in samples)
    return Score(task, metric, math.nan, {}, {}, {}, counts, tally, images, note)


def _array(rows: Sequence[Sequence[float]], width: int) -> Floats:
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), width)


def _by_columns(samples: Sequence[Sample], scores: Mapping[str, float]) -> Parts:
    """The mean score of each value of ``split``, ``category`` and the like."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for column in BY:
            if column in sample.meta:
                found.setdefault(f"{column} {sample.meta[column]}", []).append(scores[sample.index])
    return {name: 100 * float(np.mean(found[name])) for name in sorted(found)}


def _ratio(above: Floats, below: Floats) -> Floats:
    """``above / below``, and 0 where there is nothing below."""
    return np.divide(above, below, out=np.zeros(np.broadcast(above, below).shape), where=np.asarray(below) != 0)


def _percent(sums: Floats) -> Floats:
    return 100 * _ratio(sums[..., 0], sums[..., 1])


def _f1(sums: Floats) -> Floats:
    true, false, missed = sums[..., 0], sums[..., 1], sums[..., 2]
    return 100 * _ratio(2 * true, 2 * true + false + missed)


def _mme_total(sums: Floats) -> Floats:
    by = sums.reshape(*sums.shape[:-1], -1, 4)
    return 100 * (_ratio(by[..., 0], by[..., 1]) + _ratio(by[..., 2], by[..., 3])).sum(axis=-1)


def _pope_parts(counted: Floats, answered: Floats) -> Parts:
    true, false, missed, _ = counted
    shares = {
        "f1": _f1(counted) / 100,
        "precision": _ratio(true, true + false),
        "recall": _ratio(true, true + missed),
        "accuracy": _ratio(answered[0], answered[1]),
        "yes ratio": _ratio(true + false, counted.sum()),
    }
    return {name: 100 * float(share) for name, share in shares.items()}
