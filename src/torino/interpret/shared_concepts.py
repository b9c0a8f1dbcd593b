"""Which latents of a joint SAE fire for images, for words, and for the same meaning in both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from torino.core.checks import check_type, to_integer
from torino.core.errors import BadParameter, TorinoError
from torino.datasets import Photos
from torino.interpret.naming import extract_words
from torino.sae.joint import JointSAE
from torino.vlm.joint_space import JointSpace

Floats = NDArray[np.float64]
LEAST = 3  # photos, texts or sides of a comparison from which something counts
LEVEL = 0.05


@dataclass(frozen=True)
class SharedConcept:
    """A latent that fires for a word and for patches.

    Attributes
    ----------
    latent : int
    word : str
        The word for which it is most active; chosen by texts only.
    words : tuple of (str, float)
        Its five words with their mean activations.
    auc : float
        Probability that its largest activation is larger in a photo whose captions hold the word than in another one.
    chance : float
        95th percentile of the AUC when captions and photos are exchanged at random.
    p : float
        Share of these exchanges with at least this AUC.
    precision : float
        Share of the photos it fires on whose captions hold the word.
    base : float
        Share of all photos whose captions hold the word.
    photos : tuple of (int, int)
        The photos and the patches of its largest activations, the largest first.
    """

    latent: int
    word: str
    words: tuple[tuple[str, float], ...]
    auc: float
    chance: float
    p: float
    precision: float
    base: float
    photos: tuple[tuple[int, int], ...]

    @property
    def same_meaning(self) -> bool:
        """Whether it fires for the same meaning in words and patches, beyond chance."""
        return self.auc > self.chance and self.auc > 0.5


@dataclass(frozen=True)
class SharedConcepts:
    """Counts of latents by modality, and those that can be compared with captions.

    Attributes
    ----------
    latents, both, image_only, text_only, silent : int
        All latents; those that fire on at least three photos and at least three texts, on photos only, on texts only,
        and on neither.
    concepts : tuple of SharedConcept
        Latents of both modalities whose word is in the captions of at least three photos and missing in those of three;
        the largest AUC first.
    mean_auc, mean_chance, p : float
        Mean AUC; its mean when captions and photos are exchanged at random; share of the exchanges with at least it.
    photos, texts, permutations : int
    """

    latents: int
    both: int
    image_only: int
    text_only: int
    silent: int
    concepts: tuple[SharedConcept, ...]
    mean_auc: float
    mean_chance: float
    p: float
    photos: int
    texts: int
    permutations: int

    @property
    def same_meaning(self) -> int:
        """Number of latents that fire for the same meaning in both modalities."""
        return sum(concept.same_meaning for concept in self.concepts)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, ready for JSON; undefined ones are None."""
        values: dict[str, Any] = {**asdict(self), "same_meaning": self.same_meaning}
        values["expected_by_chance"] = round(LEVEL * len(self.concepts), 1)
        return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}

    def summary(self) -> str:
        """Return the counts in a few sentences."""
        text = (
            f"Of {self.latents:,} latents, {self.both:,} fire for images and text, {self.image_only:,} for images "
            f"only, {self.text_only:,} for text only, {self.silent:,} for neither ({self.photos:,} photos, "
            f"{self.texts:,} texts)."
        )
        if not self.concepts:
            return f"{text} None of them can be compared with captions."
        return (
            f"{text} {len(self.concepts):,} can be compared with captions: {self.same_meaning:,} fire for the same "
            f"meaning in both ({LEVEL * len(self.concepts):.1f} by chance). Mean AUC {self.mean_auc:.3f}, and "
            f"{self.mean_chance:.3f} if captions are exchanged (p = {self.p:.3g})."
        )


@torch.no_grad()
def find_shared_concepts(
    sae: JointSAE,
    space: JointSpace,
    photos: Photos,
    *,
    keep: int = 6,
    permutations: int = 200,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> SharedConcepts:
    """Compare the photos and the words that each latent fires for, with the captions of photos it was not trained on.

    The word of a latent is the one with the largest mean activation over all its occurrences in the captions. Photos
    take no part in this choice, so exchanging the captions of photos at random gives the distribution without a
    relation between both modalities.

    Parameters
    ----------
    sae : JointSAE
    space : JointSpace
        The space it was trained in.
    photos : Photos
        With captions.
    keep : int
        Photos to keep for each latent.
    permutations : int
        Number of random exchanges.
    seed : int
    progress : callable, optional
        Called with the number of photos that are done.
    """
    check_type("sae", sae, JointSAE, "a joint SAE, written by torino train --joint")
    if space.name != sae.space:
        raise BadParameter(f"This SAE reads the space {sae.space}, got rows of the space {space.name}.")
    keep, permutations = to_integer("keep", keep, 1), to_integer("permutations", permutations, 1)
    numbers, peaks, patches, captions = list[int](), list[Tensor](), list[Tensor](), list[tuple[str, ...]]()
    for number, photo in enumerate(photos):
        try:
            rows = space.image_rows(photo.data)
        except TorinoError:  # a photo that cannot be read
            continue
        finally:
            if progress is not None:
                progress(number + 1)
        if photo.texts:
            peak, patch = _largest(sae, sae.align(rows, "image"))
            numbers.append(number)
            peaks.append(peak)
            patches.append(patch.int())
            captions.append(photo.texts)
    if len(numbers) < 2 * LEAST:
        raise BadParameter(f"At least {2 * LEAST} photos with captions are needed, got {len(numbers)}.")
    sentences = list(dict.fromkeys(text for texts in captions for text in texts))
    means, words, fired = _word_activations(sae, space, sentences)
    peak, patch = torch.stack(peaks), torch.stack(patches)
    in_images, in_text = (peak > 0).sum(0) >= LEAST, fired >= LEAST
    both = in_images & in_text
    holds = _word_in_captions(words, captions)
    compared = holds.sum(1)
    usable = (compared >= LEAST) & (len(numbers) - compared >= LEAST)
    chosen, concepts = list[tuple[int, int]](), list[SharedConcept]()
    best = means[torch.from_numpy(usable)].max(0) if usable.any() else None
    if best is not None:
        names = np.flatnonzero(usable)
        # the strongest word of all, so that a latent of "the" is not given the next best noun
        strongest = means.max(0).values
        for latent in both.nonzero()[:, 0].tolist():
            if best.values[latent] > 0 and best.values[latent] >= strongest[latent]:
                chosen.append((latent, int(names[int(best.indices[latent])])))
    auc, chance, p, totals = _compare(peak, holds, chosen, permutations, seed)
    for index, (latent, word) in enumerate(chosen):
        fires = (peak[:, latent] > 0).numpy()
        order = peak[:, latent].argsort(descending=True, stable=True)[:keep].tolist()
        top = means[:, latent].topk(min(5, len(words)))
        concepts.append(
            SharedConcept(
                latent=latent,
                word=words[word],
                words=tuple((words[i], round(v, 4)) for v, i in zip(*(x.tolist() for x in top), strict=True) if v > 0),
                auc=float(auc[index]),
                chance=float(chance[index]),
                p=float(p[index]),
                precision=float(holds[word][fires].mean()),
                base=float(holds[word].mean()),
                photos=tuple((numbers[i], int(patch[i, latent])) for i in order if peak[i, latent] > 0),
            )
        )
    concepts.sort(key=lambda concept: (-concept.auc, concept.latent))
    mean = float(auc.mean()) if len(auc) else math.nan
    return SharedConcepts(
        latents=sae.latents,
        both=int(both.sum()),
        image_only=int((in_images & ~in_text).sum()),
        text_only=int((in_text & ~in_images).sum()),
        silent=int((~in_images & ~in_text).sum()),
        concepts=tuple(concepts),
        mean_auc=mean,
        mean_chance=float(totals.mean()) if len(auc) else math.nan,
        p=float((1 + (totals >= mean).sum()) / (1 + permutations)) if len(auc) else math.nan,
        photos=len(numbers),
        texts=len(sentences),
        permutations=permutations,
    )


def _largest(sae: JointSAE, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest activation of each latent and its row; half precision saves memory."""
    activations = sae.encode(rows.to(sae.W_enc.device))
    peak, row = activations.max(0)
    return peak.cpu(), row.cpu()


def _word_activations(sae: JointSAE, space: JointSpace, sentences: Sequence[str]) -> tuple[Tensor, list[str], Tensor]:
    """Return mean activations (words, C), the words, and the number of texts that each latent fires in."""
    index: dict[str, int] = {}
    sums, counts = list[Tensor](), list[int]()
    fired = torch.zeros(sae.latents, dtype=torch.int64)
    for sentence in sentences:
        rows, names = space.text_rows(sentence)
        activations = sae.encode(sae.align(rows, "text").to(sae.W_enc.device)).cpu()
        fired += (activations > 0).any(0)
        pieces: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            pieces.setdefault(name.lower(), []).append(row)
        for name, own in pieces.items():  # a word of several tokens is as active as its most active token
            if name not in index:
                index[name] = len(index)
                sums.append(torch.zeros(sae.latents))
                counts.append(0)
            sums[index[name]] += activations[own].amax(0)
            counts[index[name]] += 1
    return torch.stack(sums) / torch.tensor(counts)[:, None], list(index), fired


def _word_in_captions(words: Sequence[str], captions: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
    """Return which words are in the captions of which photos, (words, photos); False for words that are no nouns."""
    sets = extract_words(captions)  # without stop words, and plurals as singulars
    known = frozenset[str]().union(*sets)
    result = np.zeros((len(words), len(captions)), np.bool_)
    for number, word in enumerate(words):
        singular = word if word in known else word.removesuffix("s")
        if singular in known:
            result[number] = [singular in found for found in sets]
    return result


def _compare(
    peak: Tensor, holds: NDArray[np.bool_], chosen: Sequence[tuple[int, int]], permutations: int, seed: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return AUC, its 95th percentile by chance and p of each latent, and the mean AUC of each exchange."""
    if not chosen:
        return np.empty(0), np.empty(0), np.empty(0), np.empty(0)
    latents, words = (list(column) for column in zip(*chosen, strict=True))
    ranks = rankdata(peak[:, latents].numpy(), axis=0).T
    labels = holds[words].astype(np.float64)
    positive = labels.sum(1)
    pairs = positive * (labels.shape[1] - positive)

    def auc(order: NDArray[np.int64]) -> Floats:
        return ((ranks[:, order] * labels).sum(1) - positive * (positive + 1) / 2) / pairs

    source = np.random.default_rng(seed)
    own = auc(np.arange(labels.shape[1]))
    random = np.stack([auc(source.permutation(labels.shape[1])) for _ in range(permutations)])
    p = (1 + (random >= own).sum(0)) / (1 + permutations)
    return own, np.quantile(random, 1 - LEVEL, axis=0), p, random.mean(1)
