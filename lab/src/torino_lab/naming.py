"""Name the concepts of an SAE on CLIP by what they fire on.

Evidence comes from patches: word prototypes in CLIP's joint space, collages whose photos have a known label and place,
and pixels for colors, edges and borders. A latent whose patches agree on nothing stays unnamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from torino.core.tokens import VisualTokens
from torino.interpret.low_level import LowLevelEvidence, LowLevelName, patch_properties
from torino.interpret.naming import extract_words
from torino.interpret.patch_naming import MIN_PHOTOS, Candidate, PatchName, WordEvidence, collect_word_evidence
from torino.interpret.running_stats import encode_active
from torino.interpret.top_activations import EncodedPhoto
from torino.sae.model import SAE
from torino_lab.corpus import Corpus
from torino_lab.prototypes import JointSpace, Prototypes, fit_prototypes, question_words
from torino_lab.training.features import Encode, Features

GRID = (14, 14)
SIZE = 224
OUTLIER = 3.0  # norm of a token relative to the median; CLIP has such tokens in backgrounds, whatever they show
ARTIFACT_SHARE = 0.7  # of a latent's activation on such tokens
MIN_CONFIDENCE = 0.5  # share of a latent's activation on patches that support its name
MIN_LIFT = 2.0  # how much more often texts of photos with the latent mention its name than texts of all photos
MIN_MENTIONS = 3
STRONG = 0.5  # activations below this share of the latent's largest one are ignored
DENSE = 0.03  # share of all patches on which a latent is active, from which on its name must describe more than a tenth
STRONG_SHARE = 0.1  # of its activation, the strong one
COLLAGE_GRIDS = ((1, 2), (2, 1), (2, 2))
COLLAGE_SHARE, COLLAGE_LIFT = 0.5, 3.0  # of a latent's activation in cells of one label, and relative to all cells
# Words of captions and questions that name nothing one could point at.
_NOT_VISIBLE = """
    activity air american asian attempt background business busy colored colorful couple day design different
    display distance dressed edge event fight forward friend front fun game group height high home hot item jump
    kind left life lot mid midair move name number old open outdoor pair parade part perform picture piece place
    play player prepare reach ready ride rider right row run say scene shape shot something space sport spot stop
    style team thing top trick trip try use view walk watch way wear wild work world year young
"""
NOT_VISIBLE = frozenset(_NOT_VISIBLE.split())
_THINGS_IN_ING = {"building", "ceiling", "clothing", "painting", "railing", "ring", "string", "swing", "wing"}


def names_nothing(word: str) -> bool:
    """Return whether a word cannot name a concept: not visible, possessive, or an activity."""
    return word in NOT_VISIBLE or "'" in word or (word.endswith("ing") and word not in _THINGS_IN_ING)


class FeaturePhotos:
    """Cached features as photos; implements :class:`torino.interpret.top_activations.EncodedPhotoSource`.

    Parameters
    ----------
    sources : sequence of Features
    picks : sequence of (source, row)
        The photos, by the number of their source and their row in it.
    """

    def __init__(self, sources: Sequence[Features], picks: Sequence[tuple[int, int]]) -> None:
        self.sources, self.picks = sources, picks

    @property
    def metadata(self) -> dict[str, str]:
        """Where the photos come from."""
        names = sorted({self.sources[source].file.stem for source, _ in self.picks})
        return {"photos": f"{len(self.picks)} of {', '.join(names)}", "embedding": "CLS token at the feature layer"}

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self.picks)

    def hidden(self, start: int, stop: int) -> Tensor:
        """Return hidden states with CLS first, (B, 197, 768)."""
        return torch.stack([self.sources[source][[row]][0] for source, row in self.picks[start:stop]]).float()

    def read(self, start: int, stop: int) -> list[EncodedPhoto | str]:
        """Return photos ``start`` to ``stop``."""
        return [EncodedPhoto(VisualTokens(one[1:], GRID), one[0]) for one in self.hidden(start, stop)]

    def images(self, index: int) -> Any:
        """Open a photo, squashed as the tower sees it."""
        source, row = self.picks[index]
        return self.sources[source].images([row])[0].resize((SIZE, SIZE))


def pick_photos(sources: Sequence[Features], count: int, seed: int) -> list[tuple[int, int]]:
    """Choose photos at random, all sources together."""
    everything = [(number, row) for number, source in enumerate(sources) for row in range(source.rows)]
    return sorted(Random(f"{seed}:picks").sample(everything, min(count, len(everything))))


def photo_texts(sources: Sequence[Features]) -> list[list[list[str]]]:
    """Return captions and questions with their answers, by source and row."""
    import pyarrow.parquet as pq

    texts: list[list[list[str]]] = []
    for source in sources:
        have = pq.read_schema(source.file).names
        columns = [name for name in ("captions", "questions", "answers") if name in have]
        rows = pq.read_table(source.file, columns=columns).to_pylist()
        texts.append(
            [
                [*(row.get("captions") or ()), *question_words(row.get("questions") or (), row.get("answers") or ())]
                for row in rows
            ]
        )
    return texts


def fit_words(space: JointSpace, photos: FeaturePhotos, batch: int = 32) -> Prototypes:
    """Fit word prototypes on photos; every tenth is held out to leave out words that cannot be recognized."""
    texts = photo_texts(photos.sources)
    words = extract_words([texts[source][row] for source, row in photos.picks])
    embeddings: list[Tensor] = []
    patches: list[Tensor] = []
    for start in range(0, len(photos), batch):
        hidden = photos.hidden(start, start + batch)
        embeddings.append(space.image(hidden))
        patches.append(hidden[:, 1::24].flatten(0, 1))
    all_embeddings = torch.cat(embeddings)
    held = torch.arange(len(photos)) % 10 == 0
    return fit_prototypes(
        space,
        all_embeddings[~held],
        [word for word, out in zip(words, held.tolist(), strict=True) if not out],
        torch.cat(patches),
        heldout=(all_embeddings[held], [word for word, out in zip(words, held.tolist(), strict=True) if out]),
        exclude={word for photo in words for word in photo if names_nothing(word)},
    )


def max_activations(sae: SAE, photos: FeaturePhotos, batch: int = 16) -> Tensor:
    """Return the largest activation of each latent."""
    largest = torch.zeros(sae.latents)
    for start in range(0, len(photos), batch):
        _, latents, values = encode_active(sae, photos.hidden(start, start + batch)[:, 1:].flatten(0, 1))
        largest.scatter_reduce_(0, latents, values, "amax")
    return largest


# ---------------------------------------------------------------------- collages


@dataclass(frozen=True, eq=False)
class CollageEvidence:
    """Activation of each latent in the cells of each label.

    Attributes
    ----------
    labels : tuple of str
    share : Tensor of shape (C, L)
        Share of the latent's activation that is in cells of the label.
    base : Tensor of shape (L,)
        Share of all patches.
    """

    labels: tuple[str, ...]
    share: Tensor
    base: Tensor

    def label(self, latent: int) -> str | None:
        """Return the label of the cells that contain most of a latent's activation, if there is one."""
        lift = self.share[latent] / self.base.clamp(min=1e-6)
        best = int(self.share[latent].argmax())
        clear = self.share[latent, best] >= COLLAGE_SHARE and lift[best] >= COLLAGE_LIFT
        return self.labels[best] if clear else None


def collect_collages(
    sae: SAE, corpus: Corpus, encode: Encode, largest: Tensor, *, count: int, seed: int, batch: int = 8
) -> CollageEvidence:
    """Encode collages of labelled photos and sum the strong activations of each latent by label."""
    sums: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    images: list[Any] = []
    cells: list[list[tuple[str, Tensor]]] = []
    for number in range(count):
        rng = Random(f"{seed}:collage-names:{number}")
        grid = rng.choice(COLLAGE_GRIDS)
        image, shown = corpus.collages.make(rng, grid)
        images.append(image)
        cells.append([(cell.label, _cell_patches(place, grid)) for place, cell in enumerate(shown) if cell.label])
        if len(images) == batch or number == count - 1:
            for hidden, of_image in zip(encode(images), cells, strict=True):
                patches, latents, values = encode_active(sae, hidden[1:])
                strong = values >= STRONG * largest[latents]
                for label, inside in of_image:
                    chosen = strong & inside[patches]
                    total = sums.setdefault(label, torch.zeros(sae.latents))
                    total.index_add_(0, latents[chosen], values[chosen])
                    sizes[label] = sizes.get(label, 0) + int(inside.sum())
            images, cells = [], []
    labels = tuple(sorted(sums))
    table = torch.stack([sums[label] for label in labels], 1)
    base = torch.tensor([float(sizes[label]) for label in labels])
    return CollageEvidence(labels, table / table.sum(1, keepdim=True).clamp(min=1e-12), base / base.sum())


def _cell_patches(place: int, grid: tuple[int, int]) -> Tensor:
    """Return which patches lie inside a cell of a collage, a boolean tensor of shape (196,)."""
    row, column = divmod(place, grid[1])
    inside = torch.zeros(GRID, dtype=torch.bool)
    top, bottom = (round(GRID[0] * edge / grid[0]) for edge in (row, row + 1))
    left, right = (round(GRID[1] * edge / grid[1]) for edge in (column, column + 1))
    inside[top:bottom, left:right] = True
    return inside.flatten()


# ---------------------------------------------------------------------- texts


class Mentions:
    """How often the texts of photos in which a latent is active mention each word.

    A latent that fires everywhere has some word that its patches score highest on, but photos with it do not mention
    the word more often than others.
    """

    def __init__(self, latents: int, words: Sequence[str]) -> None:
        self.words = {word: number for number, word in enumerate(words)}
        self.counts = torch.zeros(latents, len(words))
        self.photos = torch.zeros(latents)
        self.total, self.base = 0, torch.zeros(len(words))

    def add(self, latents: Tensor, words: Iterable[str]) -> None:
        """Add a photo with the latents that are active in it; photos without texts are ignored."""
        columns = [self.words[word] for word in words if word in self.words]
        if not columns:
            return
        present = latents.unique()
        self.photos[present] += 1
        self.counts[present[:, None], torch.tensor(columns)] += 1
        self.base[columns] += 1
        self.total += 1

    def contradict(self, latent: int, word: str) -> bool:
        """Return whether photos with the latent mention a word less than twice as often as all photos do.

        False if there are too few photos to expect three mentions.
        """
        column = self.words[word]
        expected = MIN_LIFT * float(self.base[column]) / max(1, self.total) * float(self.photos[latent])
        return expected >= MIN_MENTIONS and float(self.counts[latent, column]) < expected


# ---------------------------------------------------------------------- names


@dataclass(frozen=True)
class LabName:
    """The name of a latent with its evidence.

    Attributes
    ----------
    name, kind : str
        ``thing``, or the kind of a low-level concept: ``color``, ``edge``, ``texture``, ``position`` or ``artifact``.
    confidence : float
        Share of the latent's activation on patches that support the name.
    candidates : tuple of Candidate
        The best words, the name first if it is one of them.
    collage : str or None
        Label of the collage cells that contain most of the latent's activation.
    photos : int
        Number of photos in which the latent is active.
    """

    name: str
    kind: str
    confidence: float
    candidates: tuple[Candidate, ...]
    collage: str | None
    photos: int

    def entry(self) -> dict[str, Any]:
        """Return the entry of ``names.json``, with the words and confidences of three candidates."""
        candidates = [[candidate.word, candidate.confidence] for candidate in self.candidates[:3]]
        return {**asdict(self), "candidates": candidates}


def choose_name(
    words: PatchName | None,
    candidates: tuple[Candidate, ...],
    low: LowLevelName | None,
    collage: str | None,
    photos: int,
    artifact: float = 0.0,
) -> LabName | None:
    """Choose the name of a latent from its evidence; None if nothing is clear.

    A word that patches agree on is the name; if collages point to another of its candidates, that one is. A property of
    the pixels is the name if no word is clear. A latent that fires on tokens of an unusual norm (``artifact`` is their
    share) is named after that, because such tokens do not show what is at their place.
    """
    if artifact >= ARTIFACT_SHARE:
        return LabName("high-norm token", "artifact", round(artifact, 3), candidates, collage, photos)
    if words is not None:
        chosen = next((item for item in candidates if item.word == collage), candidates[0])
        ordered = (chosen, *(item for item in candidates if item is not chosen))
        return LabName(chosen.word, "thing", chosen.confidence, ordered, collage, photos)
    if low is not None:
        return LabName(low.name, low.kind, low.share, candidates, collage, photos)
    return None


def name_latents(
    sae: SAE,
    photos: FeaturePhotos,
    prototypes: Prototypes,
    collages: CollageEvidence,
    largest: Tensor,
    *,
    min_confidence: float = MIN_CONFIDENCE,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[int, LabName], WordEvidence]:
    """Name all latents that have a clear name; also return the word evidence.

    A word is a name if the patches agree on it, unless texts of photos in which the latent is active mention it less
    than twice as often as those of all photos. A latent that is active almost everywhere, mostly weakly, gets no word.
    """
    evidence = collect_word_evidence(sae, photos, prototypes, max_activation=largest, progress=progress)
    low, mentions = LowLevelEvidence(sae.latents), Mentions(sae.latents, prototypes.words)
    texts = photo_texts(photos.sources)
    words = extract_words([texts[source][row] for source, row in photos.picks])
    on_outliers, on_strong, total, active = (torch.zeros(sae.latents) for _ in range(4))
    for index in range(len(photos)):
        hidden = photos.hidden(index, index + 1)[0, 1:]
        patches, latents, values = encode_active(sae, hidden)
        norms = hidden.norm(dim=-1)
        outlier = (norms > OUTLIER * norms.median())[patches]
        on_outliers.index_add_(0, latents, values * outlier)
        total.index_add_(0, latents, values)
        strong = values >= STRONG * largest[latents]
        on_strong.index_add_(0, latents, values * strong)
        active.index_add_(0, latents, torch.ones_like(values))
        mentions.add(latents[strong], words[index])
        if index % 4 == 0:  # every fourth photo is enough
            low.add(patch_properties(photos.images(index), GRID), latents[strong], patches[strong], values[strong])
    artifact = (on_outliers / total.clamp(min=1e-12)).tolist()
    names: dict[int, LabName] = {}
    for latent in range(sae.latents):
        count = int(evidence.photos[latent])
        if count < MIN_PHOTOS:
            continue
        candidates = evidence.candidates(latent)
        candidates = tuple(item for item in candidates if not mentions.contradict(latent, item.word))
        rare = float(active[latent]) < DENSE * len(photos) * GRID[0] * GRID[1]
        specific = rare or float(on_strong[latent]) >= STRONG_SHARE * float(total[latent])
        first = candidates[0] if candidates and specific else None
        word = (
            PatchName(first.word, first.confidence, candidates, count)
            if first is not None and first.confidence >= min_confidence
            else None
        )
        name = choose_name(word, candidates, low.name(latent), collages.label(latent), count, artifact[latent])
        if name is not None:
            names[latent] = name
    return names, evidence
