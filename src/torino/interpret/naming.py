"""Names: for each concept the words that captions use more for its photos than for the others."""

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
from torino.interpret.top_activations import Evidence
from torino.sae.formats.native import seal_of, write_names

LEAST, QUARTER = 3, 0.25  # photos that must carry a word: so many, and such a share of them
LIFT = 1.5
DRAWS, SURE = 400, 0.99  # a name must be surer than the best word of nearly all sets of photos drawn blindly
NEAR = 0.8  # a second word joins the name if it is nearly as sure as the first
_STOP = """
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
STOP = frozenset(_STOP.split())
IRREGULAR = {
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
    """A word for a latent, and what speaks for it.

    Attributes
    ----------
    name : str
        The most over-represented word, or two of them where both are nearly as sure.
    lift : float
        How many times more often its photos carry the first word than all photos do.
    count : int
        How many of its photos carry it.
    photos : int
        How many photos it was named by.
    words : tuple of (str, float)
        The five surest words with their lifts.
    """

    name: str
    lift: float
    count: int
    photos: int
    words: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class _Word:
    word: str
    count: int
    lift: float
    sure: float


def name_concepts(evidence: Evidence, texts: Sequence[Sequence[str]]) -> dict[int, ConceptName]:
    """Name the latents by the captions or labels of their top photos.

    A photo carries the words that any of its texts uses. Words are ranked by how unlikely it is that as many of so
    many photos drawn blindly carry them (the tail of the hypergeometric distribution). A name takes a word that at
    least three and a quarter of the photos carry, with a lift of at least 1.5, and that is less likely than the best
    word of 99 in 100 sets of photos drawn blindly: with thousands of words, some are over-represented anywhere.
    Latents without one stay unnamed. Stop words are left out, and a plural counts as its singular where texts use
    both. Ties go to the word that comes first in the alphabet.

    Parameters
    ----------
    evidence : Evidence
    texts : sequence of sequences of str
        Captions or labels of each photo of the source, in its order; empty for a photo that has none.

    Raises
    ------
    BadParameter
        If no photo has a text, or the texts are not those of the photos.
    """
    if len(texts) != len(evidence.grids):
        raise BadParameter(
            f"The evidence is about {len(evidence.grids)} photos, and texts of {len(texts)} were given. "
            "Give those of the same photos, in their order."
        )
    spoken = _words_of(texts)
    told = {photo: words for photo, words in enumerate(spoken) if texts[photo] and photo not in evidence.skipped}
    if not told:
        raise BadParameter(
            "None of these photos has a caption or label, so there are no words to name concepts by. Give data with a "
            "column captions, caption, text or label."
        )
    words = _Words(list(told.values()))
    place = {photo: number for number, photo in enumerate(told)}
    named: dict[int, ConceptName] = {}
    for latent in range(evidence.latents):
        best = words.name([place[photo] for photo, _ in evidence.photos_of(latent) if photo in place])
        if best is not None:
            named[latent] = best
    return named


def save_names(folder: str | Path, names: Mapping[int, ConceptName], evidence: Evidence) -> Path:
    """Write the names beside an SAE, as ``names.json`` in its folder, where :meth:`torino.SAE.load` finds them."""
    listed = {latent: asdict(one) for latent, one in names.items()}
    return write_names(Path(folder), listed, evidence.latents, seal=seal_of(Path(folder)), **evidence.about)


class _Words:
    """The words of all photos, against which those of a few stand out or not."""

    def __init__(self, photos: Sequence[frozenset[str]]) -> None:
        self.photos = photos
        self.everywhere = Counter(word for words in photos for word in words)
        self._blind: dict[int, float] = {}

    def name(self, chosen: Sequence[int]) -> ConceptName | None:
        """The name that the words of some photos make, if they make one."""
        if not LEAST <= len(chosen) < len(self.photos):
            return None
        least = self.blind(len(chosen))
        ranked = [one for one in self.ranked(chosen) if one.sure > least and one.lift >= LIFT]
        if not ranked:
            return None
        first = ranked[0]
        second = [one.word for one in ranked[1:2] if one.sure >= NEAR * first.sure]
        return ConceptName(
            name=", ".join([first.word, *second]),
            lift=round(first.lift, 3),
            count=first.count,
            photos=len(chosen),
            words=tuple((one.word, round(one.lift, 3)) for one in ranked[:5]),
        )

    def ranked(self, chosen: Sequence[int]) -> list[_Word]:
        """The words that enough of some photos carry, surest first."""
        carried = Counter(word for photo in chosen for word in self.photos[photo])
        least = max(LEAST, QUARTER * len(chosen))
        found: list[_Word] = []
        for word, count in carried.items():
            if count >= least:
                of = self.everywhere[word]
                lift = count / len(chosen) * len(self.photos) / of
                found.append(_Word(word, count, lift, _surely(count, of, len(chosen), len(self.photos))))
        return sorted(found, key=lambda one: (-one.sure, one.word))

    def blind(self, count: int) -> float:
        """How sure the best word is of ``count`` photos drawn blindly, in all but one of a hundred draws."""
        if count not in self._blind:
            source = torch.Generator().manual_seed(count)
            best: list[float] = []
            for _ in range(DRAWS):
                drawn: list[int] = torch.randperm(len(self.photos), generator=source)[:count].tolist()
                best.append(max((one.sure for one in self.ranked(drawn)), default=0.0))
            self._blind[count] = float(torch.tensor(best, dtype=torch.float64).quantile(SURE))
        return self._blind[count]


@lru_cache(1 << 16)
def _surely(count: int, of: int, photos: int, everywhere: int) -> float:
    """How unlikely it is, as −log10, that so many of some photos drawn blindly carry a word that ``of`` carry in all.

    Examples
    --------
    Of 10 photos 2 say dog; both of 2 photos do so by chance once in 45 times.

    >>> round(10 ** _surely(2, 2, 2, 10))
    45
    """
    ways = sum(comb(of, i) * comb(everywhere - of, photos - i) for i in range(count, min(of, photos) + 1))
    return log10(comb(everywhere, photos)) - log10(ways)


def _words_of(texts: Sequence[Sequence[str]]) -> list[frozenset[str]]:
    """For each photo, the words that its texts use; plurals as singulars."""
    spoken = [{word for text in captions for word in _WORD.findall(text.lower())} for captions in texts]
    known = {word for words in spoken for word in words}
    folded = {word: _singular(word, known) for word in known}
    return [frozenset(folded[word] for word in words if not {word, folded[word]} & STOP) for words in spoken]


def _singular(word: str, known: set[str]) -> str:
    """The singular of an English plural, if captions use it too.

    Examples
    --------
    >>> [_singular(word, {"dog", "bus", "baby", "glass"}) for word in ("dogs", "buses", "babies", "glass", "cats")]
    ['dog', 'bus', 'baby', 'glass', 'cats']
    """
    if word in IRREGULAR:
        return IRREGULAR[word]
    for ending, instead in (("s", ""), ("es", ""), ("ies", "y")):
        if word.endswith(ending) and not word.endswith("ss") and word[: -len(ending)] + instead in known:
            return word[: -len(ending)] + instead
    return word
