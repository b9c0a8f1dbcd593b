"""The monosemanticity score equals the formula of the paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens
from torino.interpret import MonosemanticityAccumulator, monosemanticity_score


def score_by_loops(activations: Tensor, embeddings: Tensor) -> list[float]:
    """The formula of the paper, pair by pair."""
    scores: list[float] = []
    photos, latents = activations.shape
    for latent in range(latents):
        a = activations[:, latent].double()
        span = a.max() - a.min()
        numerator = denominator = 0.0
        for n in range(photos):
            for m in range(photos):
                if n == m or span == 0:
                    continue
                weight = float((a[n] - a.min()) / span * (a[m] - a.min()) / span)
                similarity = torch.nn.functional.cosine_similarity(
                    embeddings[n].double(), embeddings[m].double(), dim=0
                )
                numerator += weight * float(similarity)
                denominator += weight
        scores.append(numerator / denominator if denominator > 0 else float("nan"))
    return scores


def make_activations(photos: int = 13, latents: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    activations = torch.rand(photos, latents, generator=generator)
    activations *= torch.rand(photos, latents, generator=generator) < 0.4
    activations[:, 1] = 0  # never active
    activations[:, 2] = 0
    activations[5, 2] = 3.0  # active once
    activations[:, 3] = 1 + torch.rand(photos, generator=generator)  # active everywhere
    activations[:, 4] = 2.0  # equally active everywhere
    return activations, torch.randn(photos, 6, generator=generator)


@pytest.mark.parametrize("seed", range(4))
def test_score_is_the_formula_of_the_paper(seed: int) -> None:
    activations, embeddings = make_activations(seed=seed)
    scores = monosemanticity_score(activations, embeddings, chunk=5)
    expected = score_by_loops(activations, embeddings)
    torch.testing.assert_close(scores.values, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert scores.values.isnan().tolist() == [False, True, True, False, True, False, False]
    assert (scores.dead, scores.unpaired) == (1, 2)
    defined = [score for score in expected if score == score]
    assert scores.mean == pytest.approx(sum(defined) / 4)
    assert scores.median == pytest.approx(sum(sorted(defined)[1:3]) / 2)
    everywhere = torch.cat([torch.ones(13, 1), torch.zeros(1, 1)])  # the last photo only sets the scale
    chance = monosemanticity_score(everywhere, torch.cat([embeddings, embeddings[:1]]))
    assert scores.chance == pytest.approx(float(chance.values))
    assert "4 latents scored, 1 never active, 2 without a pair of photos" in str(scores)


def test_accumulator_continues_from_its_state() -> None:
    activations, embeddings = make_activations()
    full, part = MonosemanticityAccumulator(7, 6), MonosemanticityAccumulator(7, 6)
    full.update(activations[:10], embeddings[:10])
    full.update(activations[10:], embeddings[10:])
    part.update(activations[:10], embeddings[:10])
    state = {name: value.clone() for name, value in part.state_dict().items()}
    part.update(activations[:3], embeddings[:3])  # must not change the saved state
    resumed = MonosemanticityAccumulator.from_state(state)
    resumed.update(activations[10:], embeddings[10:])
    assert torch.equal(resumed.compute().values.nan_to_num(9), full.compute().values.nan_to_num(9))


def test_invalid_input_is_refused() -> None:
    activations, embeddings = make_activations()
    with pytest.raises(BadParameter, match="13 photos need as many embeddings, got 12"):
        monosemanticity_score(activations, embeddings[:12])
    with pytest.raises(BadParameter, match="must not be negative"):
        monosemanticity_score(activations - 1, embeddings)
    with pytest.raises(BadTokens, match="zero or not finite"):
        monosemanticity_score(activations, embeddings * 0)
    with pytest.raises(BadParameter, match="compares photos with each other: give at least 2, got 1"):
        monosemanticity_score(activations[:1], embeddings[:1])
