"""Names from the patches on which a latent is active, not from what their photos are about."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torino import SAE, VisualTokens
from torino.core.errors import BadParameter
from torino.interpret.patch_naming import (
    MIN_PHOTOS,
    PatchName,
    WordEvidence,
    collect_word_evidence,
    name_by_patches,
)
from torino.interpret.top_activations import EncodedPhoto, PrecomputedPhotos

WORDS = ("dog", "grass", "sky", *(f"other{n}" for n in range(12)))
WIDTH = 4


class ToyScorer:
    """Coordinates 0, 1 and 2 are dog, grass and sky; coordinate 3 scores nothing."""

    words = WORDS

    def score(self, tokens: VisualTokens) -> Tensor:
        scores = torch.full((len(tokens), len(WORDS)), -1.0)
        scores[:, :3] = 3 * tokens.patches[:, :3] - 1
        scores[:, 3:] += torch.linspace(0, 0.5, 12)
        return scores


def toy_sae() -> SAE:
    """Latent i reads coordinate i."""
    return SAE(
        W_enc=torch.eye(WIDTH), b_enc=torch.zeros(WIDTH), W_dec=torch.eye(WIDTH), b_dec=torch.zeros(WIDTH), kind="relu"
    )


def photos(count: int = 8) -> PrecomputedPhotos:
    """Dog on grass in every photo: captions could not tell the two latents apart."""
    patches = torch.zeros(4, WIDTH)
    patches[0, 0] = 1.0  # dog
    patches[1:3, 1] = 1.0  # grass
    patches[3, 3] = 1.0  # nothing that has a word
    return PrecomputedPhotos([VisualTokens(patches.clone(), (2, 2)) for _ in range(count)])


def test_latents_of_the_same_photos_get_different_names() -> None:
    seen: list[tuple[int, int]] = []
    evidence = collect_word_evidence(
        toy_sae(), photos(), ToyScorer(), batch=3, progress=lambda done, total: seen.append((done, total))
    )
    names = name_by_patches(evidence)
    assert {latent: name.name for latent, name in names.items() if latent < 3} == {0: "dog", 1: "grass"}
    assert names[0].confidence == 1.0
    assert names[0].candidates[0].score == pytest.approx(2.0)
    assert seen[-1] == (8, 8)
    assert evidence.photos.tolist() == [8, 8, 0, 8]


def test_evidence_equals_a_slow_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = [VisualTokens(torch.rand(6, WIDTH, generator=generator) - 0.3, (2, 3)) for _ in range(5)]
    sae, scorer = toy_sae(), ToyScorer()
    limit = torch.tensor([0.5, 0.6, 0.7, 0.4])
    evidence = collect_word_evidence(sae, PrecomputedPhotos(tokens), scorer, max_activation=limit)
    for latent in range(WIDTH):
        total, weight, supported = torch.zeros(len(WORDS)), 0.0, torch.zeros(len(WORDS))
        for image in tokens:
            scores = scorer.score(image)
            for patch in range(6):
                value = float(image.patches[patch, latent])
                if value > 0 and value >= limit[latent] / 2:
                    total += value * scores[patch]
                    weight += value
                    supported[scores[patch].topk(10).indices] += value
        assert torch.allclose(evidence.scores[latent], total / weight, atol=1e-5)
        assert torch.allclose(evidence.support[latent], supported / weight, atol=1e-5)


def test_unsure_and_rare_latents_stay_unnamed() -> None:
    scores = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    support = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]])
    evidence = WordEvidence(("dog", "cat"), scores, support, torch.tensor([MIN_PHOTOS, MIN_PHOTOS, MIN_PHOTOS - 1]))
    names = name_by_patches(evidence)
    assert list(names) == [0]
    assert isinstance(names[0], PatchName)
    assert [candidate.word for candidate in names[0].candidates] == ["dog", "cat"]
    assert set(name_by_patches(evidence, min_confidence=0.05)) == {0, 1}


def test_unreadable_photos_are_skipped_and_wrong_sizes_refused() -> None:
    class Broken(PrecomputedPhotos):
        def read(self, start: int, stop: int) -> list[EncodedPhoto | str]:
            return ["broken" if index == 2 else photo for index, photo in enumerate(super().read(start, stop), start)]

    evidence = collect_word_evidence(toy_sae(), Broken(photos().tokens), ToyScorer())
    assert evidence.photos.tolist() == [7, 7, 0, 7]
    with pytest.raises(
        BadParameter, match=r"max_activation must have one value for each of the 4 latents, got .*\(3,\)"
    ):
        collect_word_evidence(toy_sae(), photos(), ToyScorer(), max_activation=torch.ones(3))
