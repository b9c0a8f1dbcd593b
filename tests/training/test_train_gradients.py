"""The gradients worked out by hand, against a dense and slow transcription of the loss that torch differentiates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torino.training import objectives
from torino.training.config import TrainConfig
from torino.training.objectives import Objective, Weights
from torino.training.sparse_codes import Code, above

KINDS = ("matryoshka", "batchtopk", "topk", "relu")
ROWS, WIDTH, LATENTS = 24, 10, 40


def random_weights(seed: int = 0, dtype: torch.dtype = torch.float64) -> Weights:
    random = torch.Generator().manual_seed(seed)
    encoder, decoder = (torch.randn(LATENTS, WIDTH, generator=random, dtype=dtype) for _ in range(2))
    b_enc, b_dec = (0.3 * torch.randn(size, generator=random, dtype=dtype) for size in (LATENTS, WIDTH))
    return Weights(encoder, decoder / decoder.norm(dim=1, keepdim=True), b_enc, b_dec)


def rows_of(seed: int = 1, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def latents_by_definition(scores: Tensor, recipe: TrainConfig, k: int) -> Tensor:
    """All B × C latents."""
    z = scores.relu()
    if recipe.kind == "relu":
        return z
    if recipe.kind == "topk":
        return z * (z >= z.topk(k, dim=1).values[:, -1:])
    return z * (z >= z.flatten().topk(k * len(z)).values[-1])


def loss_by_definition(w: Weights, u: Tensor, recipe: TrainConfig, k: int, l1: float, silent: Tensor) -> Tensor:
    """The loss as the documentation writes it; ``silent`` is not changed."""
    scores = (u - w.b_dec) @ w.W_enc.T + w.b_enc
    z = latents_by_definition(scores, recipe, k)
    edges = [0, *itertools.accumulate(recipe.groups())]
    assert recipe.weights is not None
    loss = l1 * z.sum(1).mean()
    for weight, end in zip(recipe.weights, edges[1:], strict=True):
        rebuilt = z[:, :end] @ w.W_dec[:end] + w.b_dec
        loss = loss + weight * (u - rebuilt).square().sum(1).mean()
    silent = (silent + len(u)) * ~(z > 0).any(0)
    dead = silent >= recipe.dead_after
    if recipe.aux and dead.any():
        error = (u - (z @ w.W_dec + w.b_dec)).detach()
        of_dead = scores.relu() * dead
        few = of_dead * (of_dead >= of_dead.topk(min(recipe.aux_k or 0, int(dead.sum())), dim=1).values[:, -1:])
        spread = (error - error.mean(0)).square().sum(1).mean()
        loss = loss + recipe.aux * (error - few @ w.W_dec).square().sum(1).mean() / spread
    return loss


def recipe_of(kind: str, **changes: object) -> TrainConfig:
    made = TrainConfig(kind=kind, latents=LATENTS, k=3, batch=ROWS, steps=100, fractions=(0.1, 0.2, 0.7))  # type: ignore
    weights = (0.5, 0.3, 0.2) if kind == "matryoshka" else None
    return replace(made, weights=weights, **changes).settled(WIDTH)


def gradients_by_definition(
    w: Weights, u: Tensor, recipe: TrainConfig, l1: float, silent: Tensor
) -> tuple[float, dict[str, Tensor]]:
    leaves = {name: value.clone().requires_grad_() for name, value in w.named().items()}
    loss = loss_by_definition(Weights(**leaves), u, recipe, 3, l1, silent)
    loss.backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    along = (found["W_dec"] * w.W_dec).sum(1, keepdim=True)
    found["W_dec"] = found["W_dec"] - along * w.W_dec
    return float(loss.detach()), found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead", ["none dead", "few dead", "many dead"])
def test_gradients_are_those_of_the_loss(kind: str, dead: str) -> None:
    recipe = recipe_of(kind, aux_k=4, dead_after=1000, aux=0.5)
    w, u, l1 = random_weights(), rows_of(), 0.1 if kind == "relu" else 0.0
    w.b_enc[: 3 if dead == "few dead" else 12] -= 2.0  # latents that hardly fire, and count as dead
    silent = torch.zeros(LATENTS, dtype=torch.int64)
    if dead != "none dead":
        silent += 2000
    loss, wanted = gradients_by_definition(w, u, recipe, l1, silent.clone())
    objective = Objective(recipe, w)
    for _ in range(2):  # the second call knows where to look, and for ReLU whether to be sparse
        outcome = objective(u, ROWS, 3, l1, silent.clone())
        assert outcome.loss == pytest.approx(loss, rel=1e-12)
        for name, value in objective.gradients.named().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)
    if dead != "none dead" and kind != "relu":
        assert not torch.equal(loss_by_definition(w, u, replace(recipe, aux=0.0), 3, l1, silent), torch.tensor(loss))


def test_sparse_relu_equals_dense_relu() -> None:
    recipe, u = recipe_of("relu"), rows_of()
    w = random_weights()
    w.b_enc -= 6.0
    objective = Objective(recipe, w)
    silent = torch.zeros(LATENTS, dtype=torch.int64)
    dense = objective(u, ROWS, 3, 0.1, silent)
    found = {name: value.clone() for name, value in objective.gradients.named().items()}
    assert 0 < objective.hint < objectives.DENSE  # so the second is sparse
    sparse = objective(u, ROWS, 3, 0.1, silent)
    assert sparse.loss == pytest.approx(dense.loss, rel=1e-12)
    assert torch.equal(sparse.counts, dense.counts)
    for name, value in objective.gradients.named().items():
        torch.testing.assert_close(value, found[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_rows_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, w, u = recipe_of(kind, dead_after=1, aux_k=4), random_weights(), rows_of()
    w.b_enc[:12] -= 3.0
    silent = torch.full((LATENTS,), 100)
    objective = Objective(recipe, w)
    whole = objective(u, ROWS, 3, 0.0, silent.clone())
    found = {name: value.clone() for name, value in objective.gradients.named().items()}
    monkeypatch.setattr(objectives, "BLOCK", 5 * LATENTS)
    objective = Objective(recipe, w)
    parts = objective(u, ROWS, 3, 0.0, silent.clone())
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    for name, value in objective.gradients.named().items():
        torch.testing.assert_close(value, found[name], rtol=1e-9, atol=1e-12)


def test_measures_of_a_batch_are_what_they_say() -> None:
    recipe, w, u = recipe_of("matryoshka"), random_weights(), rows_of()
    outcome = Objective(recipe, w)(u, ROWS, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    z = latents_by_definition((u - w.b_dec) @ w.W_enc.T + w.b_enc, recipe, 3)
    ends = list(itertools.accumulate(recipe.groups()))
    errors = [(u - z[:, :end] @ w.W_dec[:end] - w.b_dec).square().sum() for end in ends]
    torch.testing.assert_close(outcome.errors, torch.stack(errors))
    assert torch.equal(outcome.counts, (z > 0).sum(0))
    assert outcome.edge == pytest.approx(float(z[z > 0].min()))
    assert float(outcome.square) == pytest.approx(float(u.square().sum()))


# ---------------------------------------------------------------------- choosing


@pytest.mark.parametrize("start", ["unknown", "too high", "too low", "far too high"])
def test_batch_top_is_the_exact_top_from_any_start(start: str) -> None:
    recipe, w = recipe_of("batchtopk"), random_weights()
    u = rows_of(rows=200)
    z = ((u - w.b_dec) @ w.W_enc.T + w.b_enc).relu()
    edge = float(z.flatten().topk(3 * 200).values[-1])
    objective = Objective(recipe, w)
    objective.hint = {"unknown": -1.0, "too high": edge * 1.5, "too low": edge / 9, "far too high": 1e6}[start]
    outcome = objective(u, 200, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert int(outcome.counts.sum()) == 600
    assert torch.equal(outcome.counts, (z >= edge).sum(0))
    assert outcome.edge == pytest.approx(edge)


def test_batch_top_keeps_ties_and_never_a_latent_at_zero() -> None:
    recipe, w = recipe_of("batchtopk"), random_weights()
    u = rows_of()[:1].expand(ROWS, WIDTH).contiguous()  # all rows alike: each kept score is tied 24 times
    outcome = Objective(recipe, w)(u, ROWS, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert outcome.counts.unique().tolist() == [0, ROWS]
    assert int((outcome.counts > 0).sum()) == 3
    w.b_enc -= 100.0
    outcome = Objective(recipe, w)(u, ROWS, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert int(outcome.counts.sum()) == 0
    assert outcome.edge == 0


def test_fewer_positive_scores_than_wanted_are_all_kept() -> None:
    recipe, w, u = recipe_of("batchtopk"), random_weights(), rows_of()
    w.b_enc -= 4.0
    z = ((u - w.b_dec) @ w.W_enc.T + w.b_enc).relu()
    assert 0 < int((z > 0).sum()) < 20 * ROWS
    outcome = Objective(recipe, w)(u, ROWS, 20, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert torch.equal(outcome.counts, (z > 0).sum(0))


@pytest.mark.parametrize("shape", [(7, 96), (8, 40), (3, 7), (1, 1)])
def test_above_finds_what_a_mask_finds(shape: tuple[int, int]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    places, values = above(scores, 0.4)
    assert torch.equal(places, (scores.flatten() > 0.4).nonzero()[:, 0])
    assert torch.equal(values, scores[scores > 0.4])


def test_code_products_are_matrix_products() -> None:
    random = torch.Generator().manual_seed(0)
    dense = torch.randn(6, 9, generator=random, dtype=torch.float64).clamp(min=0.5) - 0.5
    places = dense.flatten().nonzero()[:, 0]
    starts = torch.tensor([0, 2, 5])
    code = Code(places, dense.flatten()[places], 6, 9, starts)
    weight, right = (torch.randn(size, 4, generator=random, dtype=torch.float64) for size in (9, 18))
    parts = code.decode(weight, weight.new_empty(18, 4)).view(6, 3, 4)
    for level, (begin, end) in enumerate(((0, 2), (2, 5), (5, 9))):
        torch.testing.assert_close(parts[:, level], dense[:, begin:end] @ weight[begin:end])
    row, latent = dense.nonzero(as_tuple=True)
    level = torch.bucketize(latent, starts[1:], right=True)
    torch.testing.assert_close(code.dots(right, weight), (right[row * 3 + level] * weight[latent]).sum(1))
    torch.testing.assert_close(code.pull(code.values, right[:6], weight.new_empty(9, 4)), dense.T @ right[:6])
    assert torch.equal(code.counts, (dense > 0).sum(0))


def test_half_precision_only_screens() -> None:
    w, u = random_weights(dtype=torch.float32), rows_of(rows=256).float()
    exact, half = (
        Objective(recipe_of("matryoshka", precision=precision, batch=256), w) for precision in ("float32", "bfloat16")
    )
    silent = torch.zeros(LATENTS, dtype=torch.int64)
    outcomes = [objective(u, 256, 3, 0.0, silent.clone()) for objective in (exact, half)]
    assert outcomes[1].loss == pytest.approx(outcomes[0].loss, rel=1e-5)
    assert outcomes[1].edge == pytest.approx(outcomes[0].edge, rel=1e-5)
    for name, value in half.gradients.named().items():
        torch.testing.assert_close(value, exact.gradients.named()[name], rtol=1e-3, atol=1e-5)
