"""Name concepts by the words that the captions of their top photos use more often than all captions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import comb, log10
from pathlib import Path

import torch

from torino.core.errors import BadParameter
from torino.interpret.top_activations import TopActivations
from torino.sae.formats.native import NAMES, count_names, read_digest, write_names

MIN_PHOTOS, MIN_SHARE = 3, 0.25  # number and share of the top photos that must contain a word
MIN_LIFT = 1.5
RANDOM_SETS, QUANTILE = 400, 0.99  # significance threshold: this quantile of the best words of random photo sets
SECOND_WORD_RATIO = 0.8  # a second word joins the name if its significance is this close to that of the first
_STOP_WORDS = """
    a about above across after against all along also am among an and another any appear appears are area around as at
    away back background be because been before behind being below beside between big both bunch but by can close
    could did different do does doing down during each eight either few first five for foreground four from front full
    get gets getting go goes going had has have having he her here hers herself him himself his hold holding holds how
    image in inside into is it its itself just kind large like little long look looking looks lot lots made make makes
    making many middle more most much near nearby next nine no not object objects of off on one only onto or other
    others our out outside over own part past people person photo picture pose poses posing second see seen set seven
    several she show shown shows side sit sits sitting six small so some someone something stand standing stands still
    such take taken takes taking ten than that the their them then there these they thing things third this those
    three through to together too top toward towards two type under until up upon us use using various very view was
    way we wear wearing wears were what when where which while who whose will with within without you your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
IRREGULAR_PLURALS = {
    "men": "man",
    "women": "woman",
    "children": "child",
    "feet": "foot",
    "teeth": "tooth",
    "mice": "mouse",
    "geese": "goose",
    "leaves": "leaf",
    "knives": "knife",
    "wolves": "wolf",
    "shelves": "shelf",
    "calves": "calf",
    "loaves": "loaf",
    "scarves": "scarf",
}


_WORD = re.compile(r"[^\W\d_]{2,}(?:[-'’][^\W\d_]+)*")


@dataclass(frozen=True)
class ConceptName:
    """Name of a latent and its statistics.

    Attributes
    ----------
    name : str
        The most over-represented word, or two words if both are about equally significant.
    lift : float
        Share of the top photos that contain the first word, divided by the share of all photos.
    count : int
        Number of top photos that contain the first word.
    photos : int
        Number of top photos with a caption.
    words : tuple of (str, float)
        The five most significant words with their lifts.
    """

    name: str
    lift: float
    count: int
    photos: int
    words: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class _WordScore:
    word: str
    count: int
    lift: float
    significance: float


def name_concepts(activations: TopActivations, texts: Sequence[Sequence[str]]) -> dict[int, ConceptName]:
    """Name the latents by the captions or labels of their top photos.

    A photo contains a word if any of its texts does. Words are ranked by the hypergeometric probability that a random
    set of as many photos contains them at least as often. A word becomes a name if at least three and a quarter of the
    top photos contain it, its lift is at least 1.5, and it is less probable than the best word of 99 % of random photo
    sets: among thousands of words, some are over-represented in any set. Latents without such a word stay unnamed. Stop
    words are ignored, and a plural counts as its singular if the texts contain both. Ties are broken alphabetically.

    Parameters
    ----------
    activations : TopActivations
    texts : sequence of sequences of str
        Captions or labels of each photo of the source, in its order; empty for a photo without any.

    Raises
    ------
    BadParameter
        If no photo has a text, or the number of texts differs from the number of photos.
    """
    if len(texts) != len(activations.grids):
        raise BadParameter(
            f"The top activations are of {len(activations.grids)} photos, but texts of {len(texts)} photos were given. "
            "Give the texts of the same photos in the same order."
        )
    words = extract_words(texts)
    captioned = [photo for photo in range(len(texts)) if texts[photo] and photo not in activations.skipped]
    if not captioned:
        raise BadParameter(
            "None of the photos has a caption or label, so concepts cannot be named. Give data with a column captions, "
            "caption, text or label."
        )
    vocabulary = _Vocabulary([words[photo] for photo in captioned])
    position = {photo: number for number, photo in enumerate(captioned)}
    names: dict[int, ConceptName] = {}
    for latent in range(activations.latents):
        top = [position[photo] for photo, _ in activations.get_photos(latent) if photo in position]
        name = vocabulary.find_name(top)
        if name is not None:
            names[latent] = name
    return names


def save_names(
    folder: str | Path,
    names: Mapping[int, ConceptName],
    activations: TopActivations,
    *,
    sae_folder: str | Path | None = None,
    replace: bool = False,
) -> Path:
    """Write the names to ``names.json`` in the folder of an SAE, where :meth:`torino.SAE.load` reads them.

    Parameters
    ----------
    folder : path
    names : mapping of latent to ConceptName
    activations : TopActivations
        The activations that the names come from.
    sae_folder : path, optional
        Folder of the SAE, if the names are written to another one.
    replace : bool
        Whether to replace existing names by fewer ones.

    Raises
    ------
    BadParameter
        If the folder has more names than these, and ``replace`` is False.
    """
    folder = Path(folder)
    digest = read_digest(folder if sae_folder is None else Path(sae_folder))
    existing = count_names(folder, digest)
    if len(names) < existing and not replace:
        raise BadParameter(
            f"{folder / NAMES} has {existing:,} names, and only {len(names):,} would replace them. It is not changed; "
            "use --replace-names (replace=True) to replace them."
        )
    entries = {latent: asdict(name) for latent, name in names.items()}
    return write_names(folder, entries, activations.latents, digest=digest, **activations.metadata)


class _Vocabulary:
    """Words of all photos, the reference for the words of a subset."""

    def __init__(self, photos: Sequence[frozenset[str]]) -> None:
        self.photos = photos
        self.frequency = Counter(word for words in photos for word in words)
        self._thresholds: dict[int, float] = {}

    def find_name(self, subset: Sequence[int]) -> ConceptName | None:
        """Return the name for a subset of photos, or None if no word is significant."""
        if not MIN_PHOTOS <= len(subset) < len(self.photos):
            return None
        threshold = self.random_threshold(len(subset))
        ranked = [
            score for score in self.rank_words(subset) if score.significance > threshold and score.lift >= MIN_LIFT
        ]
        if not ranked:
            return None
        first = ranked[0]
        second = [score.word for score in ranked[1:2] if score.significance >= SECOND_WORD_RATIO * first.significance]
        return ConceptName(
            name=", ".join([first.word, *second]),
            lift=round(first.lift, 3),
            count=first.count,
            photos=len(subset),
            words=tuple((score.word, round(score.lift, 3)) for score in ranked[:5]),
        )

    def rank_words(self, subset: Sequence[int]) -> list[_WordScore]:
        """Return the words that enough photos of a subset contain, most significant first."""
        counts = Counter(word for photo in subset for word in self.photos[photo])
        minimum = max(MIN_PHOTOS, MIN_SHARE * len(subset))
        scores: list[_WordScore] = []
        for word, count in counts.items():
            if count >= minimum:
                frequency = self.frequency[word]
                lift = count / len(subset) * len(self.photos) / frequency
                significance = _significance(count, frequency, len(subset), len(self.photos))
                scores.append(_WordScore(word, count, lift, significance))
        return sorted(scores, key=lambda score: (-score.significance, score.word))

    def random_threshold(self, size: int) -> float:
        """Return the significance that only 1 % of random sets of ``size`` photos exceed with their best word."""
        if size not in self._thresholds:
            generator = torch.Generator().manual_seed(size)
            best: list[float] = []
            for _ in range(RANDOM_SETS):
                subset: list[int] = torch.randperm(len(self.photos), generator=generator)[:size].tolist()
                best.append(max((score.significance for score in self.rank_words(subset)), default=0.0))
            self._thresholds[size] = float(torch.tensor(best, dtype=torch.float64).quantile(QUANTILE))
        return self._thresholds[size]


@lru_cache(1 << 16)
def _significance(count: int, frequency: int, size: int, photos: int) -> float:
    """Return −log10 of the probability that ``count`` or more of ``size`` random photos contain a word.

    ``frequency`` of all ``photos`` contain it (tail of the hypergeometric distribution).

    Examples
    --------
    2 of 10 photos contain a word; the probability that 2 random photos are these two is 1 in 45.

    >>> round(10 ** _significance(2, 2, 2, 10))
    45
    """
    ways = sum(comb(frequency, i) * comb(photos - frequency, size - i) for i in range(count, min(frequency, size) + 1))
    return log10(comb(photos, size)) - log10(ways)


def extract_words(texts: Sequence[Sequence[str]]) -> list[frozenset[str]]:
    """Return the words in the texts of each photo, plurals as singulars, without stop words."""
    words = [{word for text in captions for word in _WORD.findall(text.lower())} for captions in texts]
    known = {word for photo_words in words for word in photo_words}
    singular = {word: _singularize(word, known) for word in known}
    return [frozenset(singular[w] for w in photo_words if not {w, singular[w]} & STOP_WORDS) for photo_words in words]


def _singularize(word: str, known: set[str]) -> str:
    """Return the singular of an English plural if it is a known word, otherwise the word.

    Examples
    --------
    >>> known = {"dog", "bus", "baby", "bu"}
    >>> [_singularize(word, known) for word in ("dogs", "buses", "babies", "glass", "cats", "bus")]
    ['dog', 'bus', 'baby', 'glass', 'cats', 'bus']
    """
    if word in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[word]
    if word.endswith(("ss", "us", "is")):  # glass, bus, tennis, even if a caption has the typing error "bu"
        return word
    for ending, replacement in (("s", ""), ("es", ""), ("ies", "y")):
        if word.endswith(ending) and word[: -len(ending)] + replacement in known:
            return word[: -len(ending)] + replacement
    return word
