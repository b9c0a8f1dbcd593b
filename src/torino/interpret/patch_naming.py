"""Name concepts by what they fire *on*: word scores of the patches on which a latent is active.

Captions describe whole photos, so names from captions of the top photos (:mod:`torino.interpret.naming`) tell what the
photos are about. Here a :class:`WordScorer` scores every word at every patch, and a latent gets the word that its own
patches score highest on, weighted by the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.tokens import VisualTokens
from torino.interpret.running_stats import encode_active
from torino.interpret.top_activations import EncodedPhoto, EncodedPhotoSource
from torino.sae.model import SAE

TOP_WORDS = 10  # a patch supports the words with its highest scores
MIN_CONFIDENCE = 0.25  # share of a latent's activation on patches that support its name
MIN_PHOTOS = 5  # photos that a latent must be active in
CANDIDATES = 5


class WordScorer(Protocol):
    """Score words at patches.

    Attributes
    ----------
    words : sequence of str
    """

    @property
    def words(self) -> Sequence[str]: ...  # noqa: D102

    def score(self, tokens: VisualTokens) -> Tensor:
        """Return a score for each patch and word, shape (N, V), standardized over the patches of many photos."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A word that may name a latent.

    Attributes
    ----------
    word : str
    score : float
        Mean standardized score of the word on the latent's patches, weighted by activation.
    confidence : float
        Share of the latent's activation that is on patches with the word among their ten best.
    """

    word: str
    score: float
    confidence: float


@dataclass(frozen=True)
class PatchName:
    """Name of a latent from the patches on which it is active.

    Attributes
    ----------
    name : str
        The word of the first candidate.
    confidence : float
        Its confidence.
    candidates : tuple of Candidate
        The best words, highest score first.
    photos : int
        Number of photos in which the latent is active.
    """

    name: str
    confidence: float
    candidates: tuple[Candidate, ...]
    photos: int


@dataclass(frozen=True, eq=False)
class WordEvidence:
    """Sums over all patches on which each latent is active. C latents, V words.

    Attributes
    ----------
    words : tuple of str
    scores, support : Tensor of shape (C, V), float32
        Mean score of each word, and share of the activation on patches that support it.
    photos : Tensor of shape (C,), int64
        Number of photos in which the latent is active.
    """

    words: tuple[str, ...]
    scores: Tensor
    support: Tensor
    photos: Tensor

    def candidates(self, latent: int, count: int = CANDIDATES) -> tuple[Candidate, ...]:
        """Return the best words of a latent, highest score first."""
        best = self.scores[latent].topk(min(count, len(self.words)))
        return tuple(
            Candidate(self.words[word], round(value, 3), round(float(self.support[latent, word]), 3))
            for word, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )


def collect_word_evidence(
    sae: SAE,
    photos: EncodedPhotoSource,
    scorer: WordScorer,
    *,
    max_activation: Tensor | None = None,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> WordEvidence:
    """Encode all photos once and collect the word scores of the patches on which each latent is active.

    Parameters
    ----------
    sae : SAE
    photos : EncodedPhotoSource
    scorer : WordScorer
    max_activation : Tensor of shape (C,), optional
        The largest activation of each latent. If given, activations below half of it are ignored: what a latent fires
        on weakly says little about it.
    batch : int
        Photos encoded together.
    progress : callable, optional
        Called with the number of finished photos and the total.
    """
    if max_activation is not None and max_activation.shape != (sae.latents,):
        raise BadParameter(
            f"max_activation must have one value for each of the {sae.latents} latents, got the shape "
            f"{tuple(max_activation.shape)}."
        )
    scores = torch.zeros(sae.latents, len(scorer.words))
    support = torch.zeros_like(scores)
    weight = torch.zeros(sae.latents)
    active_photos = torch.zeros(sae.latents, dtype=torch.int64)
    for start in range(0, len(photos), batch):
        stop = min(start + batch, len(photos))
        for photo in photos.read(start, stop):
            if isinstance(photo, EncodedPhoto):
                latents, patches, values = _active(sae, photo.tokens, max_activation)
                word_scores = scorer.score(photo.tokens).float()
                best = torch.zeros_like(word_scores).scatter_(
                    1, word_scores.topk(min(TOP_WORDS, len(scorer.words))).indices, 1
                )
                present, rows = latents.unique(return_inverse=True)
                spread = torch.zeros(len(present), len(word_scores)).index_put_((rows, patches), values)
                scores[present] += spread @ word_scores
                support[present] += spread @ best
                weight[present] += spread.sum(1)
                active_photos[present] += 1
        if progress is not None:
            progress(stop, len(photos))
    weight = weight.clamp(min=1e-12)[:, None]
    return WordEvidence(tuple(scorer.words), scores / weight, support / weight, active_photos)


def _active(sae: SAE, tokens: VisualTokens, max_activation: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return latent, patch and activation of every entry that counts."""
    patches, latents, values = encode_active(sae, tokens.patches)
    if max_activation is None:
        return latents, patches, values.float()
    strong = values >= 0.5 * max_activation[latents]
    return latents[strong], patches[strong], values[strong].float()


def name_by_patches(evidence: WordEvidence, *, min_confidence: float = MIN_CONFIDENCE) -> dict[int, PatchName]:
    """Name every latent whose patches agree on a word; the others stay unnamed.

    Parameters
    ----------
    evidence : WordEvidence
    min_confidence : float
        Smallest confidence of a name.
    """
    names: dict[int, PatchName] = {}
    for latent in range(len(evidence.scores)):
        photos = int(evidence.photos[latent])
        if photos < MIN_PHOTOS:
            continue
        candidates = evidence.candidates(latent)
        if candidates and candidates[0].confidence >= min_confidence:
            names[latent] = PatchName(candidates[0].word, candidates[0].confidence, candidates, photos)
    return names
