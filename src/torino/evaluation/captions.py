"""Score captions with CIDEr-D and ROUGE-L, as the COCO caption evaluation does.

The reference implementation (pycocoevalcap, which VLMEvalKit calls) is a 100 MB package with two Java programs, so the
two formulas are written here. Captions are split into lower-case words without punctuation, as COCO's tokenizer does;
VLMEvalKit splits at spaces only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torino.evaluation.samples import Sample
from torino.evaluation.scoring import GradedAnswers, Parts, ScoreStats, mean_score

ORDERS = 4  # n-grams of one to four words
SIGMA = 6.0  # width of the length penalty of CIDEr-D
BETA = 1.2  # weight of recall in ROUGE-L
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")

Ngram = tuple[str, ...]


class _Vector(NamedTuple):
    """TF-IDF weights of a caption by order, their norms, and the number of bigrams, the caption's length."""

    weights: list[dict[Ngram, float]]
    norms: list[float]
    length: int


class CaptionScorer:
    """Score captions against the references of all images.

    The inverse document frequencies are those of the references, so the score of a caption does not depend on other
    captions.

    Parameters
    ----------
    references : sequence of sequences of str
        The references of each image.

    Examples
    --------
    >>> scorer = CaptionScorer([["A dog runs.", "The dog runs fast."], ["A red bus."], ["Two cats sleep."]])
    >>> round(scorer.cider(0, "A dog runs."), 2), scorer.cider(1, "Two cats sleep.")
    (5.1, 0.0)
    """

    def __init__(self, references: Sequence[Sequence[str]]) -> None:
        self.references = [[split_words(text) for text in texts] for texts in references]
        counts = [[_count_ngrams(words) for words in texts] for texts in self.references]
        self._images: Counter[Ngram] = Counter(
            ngram for texts in counts for ngram in {ngram for text in texts for ngram in text}
        )
        self._vectors = [[self._vectorize(text) for text in texts] for texts in counts]

    def cider(self, image: int, caption: str) -> float:
        """Return CIDEr-D of a caption, from 0 to 10."""
        references = self._vectors[image]
        if not references:
            return 0.0
        own = self._vectorize(_count_ngrams(split_words(caption)))
        return 10 * sum(_similarity(own, reference) for reference in references) / len(references)

    def rouge(self, image: int, caption: str) -> float:
        """Return ROUGE-L of a caption, from 0 to 1: the best precision and the best recall over all references."""
        words, references = split_words(caption), self.references[image]
        common = [_common_length(words, reference) for reference in references]
        precision = max((length / len(words) for length in common), default=0.0) if words else 0.0
        recall = max(
            (length / len(reference) for length, reference in zip(common, references, strict=True) if reference),
            default=0.0,
        )
        if not precision or not recall:
            return 0.0
        return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)

    def _vectorize(self, counts: Counter[Ngram]) -> _Vector:
        weights: list[dict[Ngram, float]] = [{} for _ in range(ORDERS)]
        total = math.log(max(len(self.references), 1))
        for ngram, count in counts.items():
            weights[len(ngram) - 1][ngram] = count * (total - math.log(max(self._images[ngram], 1)))
        norms = [math.sqrt(sum(value**2 for value in order.values())) for order in weights]
        return _Vector(weights, norms, sum(count for ngram, count in counts.items() if len(ngram) == 2))


def grade_captions(samples: Sequence[Sample], predictions: Mapping[str, str]) -> dict[str, float | None]:
    """Return CIDEr-D of each caption by index, from 0 to 10; the samples are all of the task."""
    scorer = CaptionScorer([sample.answers for sample in samples])
    return {
        sample.index: scorer.cider(number, predictions[sample.index])
        for number, sample in enumerate(samples)
        if sample.index in predictions
    }


def caption_score(graded: GradedAnswers) -> tuple[ScoreStats, Parts]:
    """Compute the mean CIDEr-D, times 100 as usual, and the mean ROUGE-L."""
    stats, parts = mean_score(graded)
    scorer = CaptionScorer([sample.answers for sample in graded.samples])
    rouge = [
        scorer.rouge(number, graded.predictions.get(sample.index, "")) for number, sample in enumerate(graded.samples)
    ]
    parts["ROUGE-L"] = 100 * sum(rouge) / len(rouge)
    return stats, parts


def split_words(text: str) -> list[str]:
    """Return the words of a caption in lower case, without punctuation.

    Examples
    --------
    >>> split_words("A well-known man's dog, running.")
    ['a', 'well-known', "man's", 'dog', 'running']
    """
    return _WORD.findall(text.lower())


def _count_ngrams(words: Sequence[str]) -> Counter[Ngram]:
    return Counter(
        tuple(words[start : start + order]) for order in range(1, ORDERS + 1) for start in range(len(words) - order + 1)
    )


def _similarity(own: _Vector, reference: _Vector) -> float:
    penalty = math.exp(-((own.length - reference.length) ** 2) / (2 * SIGMA**2))
    total = 0.0
    for order in range(ORDERS):
        norm = own.norms[order] * reference.norms[order]
        if norm:
            weights = reference.weights[order]
            clipped = sum(
                min(value, weights.get(ngram, 0.0)) * weights.get(ngram, 0.0)
                for ngram, value in own.weights[order].items()
            )
            total += clipped / norm
    return penalty * total / ORDERS


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for column, other in enumerate(second, 1):
            diagonal, row[column] = row[column], diagonal + 1 if word == other else max(row[column], row[column - 1])
    return row[-1]
