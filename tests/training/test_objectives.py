"""Hand-written gradients, compared with autograd on a dense implementation of the loss."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torino.training import objectives
from torino.training.config import TrainConfig
from torino.training.objectives import Objective, Weights
from torino.training.sparse_codes import SparseCode, find_above

KINDS = ("matryoshka", "batchtopk", "topk", "relu")
ROWS, WIDTH, LATENTS = 24, 10, 40


def random_weights(seed: int = 0, dtype: torch.dtype = torch.float64) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    encoder, decoder = (torch.randn(LATENTS, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    b_enc, b_dec = (0.3 * torch.randn(size, generator=generator, dtype=dtype) for size in (LATENTS, WIDTH))
    return Weights(encoder, decoder / decoder.norm(dim=1, keepdim=True), b_enc, b_dec)


def make_rows(seed: int = 1, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_latents(scores: Tensor, config: TrainConfig, k: int) -> Tensor:
    """Return all B × C latents."""
    z = scores.relu()
    if config.kind == "relu":
        return z
    if config.kind == "topk":
        return z * (z >= z.topk(k, dim=1).values[:, -1:])
    return z * (z >= z.flatten().topk(k * len(z)).values[-1])


def dense_loss(w: Weights, u: Tensor, config: TrainConfig, k: int, l1: float, rows_since_active: Tensor) -> Tensor:
    """Compute the loss as documented; ``rows_since_active`` is not changed."""
    scores = (u - w.b_dec) @ w.W_enc.T + w.b_enc
    z = dense_latents(scores, config, k)
    edges = [0, *itertools.accumulate(config.group_sizes())]
    assert config.weights is not None
    loss = l1 * z.sum(1).mean()
    for weight, end in zip(config.weights, edges[1:], strict=True):
        reconstruction = z[:, :end] @ w.W_dec[:end] + w.b_dec
        loss = loss + weight * (u - reconstruction).square().sum(1).mean()
    rows_since_active = (rows_since_active + len(u)) * ~(z > 0).any(0)
    dead = rows_since_active >= config.dead_after
    if config.aux and dead.any():
        error = (u - (z @ w.W_dec + w.b_dec)).detach()
        dead_latents = scores.relu() * dead
        top_k = dead_latents * (
            dead_latents >= dead_latents.topk(min(config.aux_k or 0, int(dead.sum())), dim=1).values[:, -1:]
        )
        variance = (error - error.mean(0)).square().sum(1).mean()
        loss = loss + config.aux * (error - top_k @ w.W_dec).square().sum(1).mean() / variance
    return loss


def make_config(kind: str, **changes: object) -> TrainConfig:
    config = TrainConfig(kind=kind, latents=LATENTS, k=3, batch=ROWS, steps=100, fractions=(0.1, 0.2, 0.7))  # type: ignore
    weights = (0.5, 0.3, 0.2) if kind == "matryoshka" else None
    return replace(config, weights=weights, **changes).resolve(WIDTH)


def autograd_gradients(
    w: Weights, u: Tensor, config: TrainConfig, l1: float, rows_since_active: Tensor
) -> tuple[float, dict[str, Tensor]]:
    leaves = {name: value.clone().requires_grad_() for name, value in w.named().items()}
    loss = dense_loss(Weights(**leaves), u, config, 3, l1, rows_since_active)
    loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    parallel = (gradients["W_dec"] * w.W_dec).sum(1, keepdim=True)
    gradients["W_dec"] = gradients["W_dec"] - parallel * w.W_dec
    return float(loss.detach()), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead", ["none dead", "few dead", "many dead"])
def test_gradients_match_autograd(kind: str, dead: str) -> None:
    config = make_config(kind, aux_k=4, dead_after=1000, aux=0.5)
    w, u, l1 = random_weights(), make_rows(), 0.1 if kind == "relu" else 0.0
    w.b_enc[: 3 if dead == "few dead" else 12] -= 2.0  # rarely active, so they count as dead
    rows_since_active = torch.zeros(LATENTS, dtype=torch.int64)
    if dead != "none dead":
        rows_since_active += 2000
    loss, expected = autograd_gradients(w, u, config, l1, rows_since_active.clone())
    objective = Objective(config, w)
    for _ in range(2):  # the second call uses the hint of the first
        stats = objective(u, ROWS, 3, l1, rows_since_active.clone())
        assert stats.loss == pytest.approx(loss, rel=1e-12)
        for name, value in objective.gradients.named().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
    if dead != "none dead" and kind != "relu":
        assert not torch.equal(dense_loss(w, u, replace(config, aux=0.0), 3, l1, rows_since_active), torch.tensor(loss))


def test_sparse_relu_equals_dense_relu() -> None:
    config, u = make_config("relu"), make_rows()
    w = random_weights()
    w.b_enc -= 6.0
    objective = Objective(config, w)
    rows_since_active = torch.zeros(LATENTS, dtype=torch.int64)
    dense = objective(u, ROWS, 3, 0.1, rows_since_active)
    gradients = {name: value.clone() for name, value in objective.gradients.named().items()}
    assert 0 < objective.hint < objectives.DENSE  # so the second call uses sparse products
    sparse = objective(u, ROWS, 3, 0.1, rows_since_active)
    assert sparse.loss == pytest.approx(dense.loss, rel=1e-12)
    assert torch.equal(sparse.counts, dense.counts)
    for name, value in objective.gradients.named().items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_result_does_not_depend_on_the_block_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, w, u = make_config(kind, dead_after=1, aux_k=4), random_weights(), make_rows()
    w.b_enc[:12] -= 3.0
    rows_since_active = torch.full((LATENTS,), 100)
    objective = Objective(config, w)
    full = objective(u, ROWS, 3, 0.0, rows_since_active.clone())
    gradients = {name: value.clone() for name, value in objective.gradients.named().items()}
    monkeypatch.setattr(objectives, "BLOCK", 5 * LATENTS)
    objective = Objective(config, w)
    parts = objective(u, ROWS, 3, 0.0, rows_since_active.clone())
    assert parts.loss == pytest.approx(full.loss, rel=1e-12)
    for name, value in objective.gradients.named().items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-9, atol=1e-12)


def test_batch_stats() -> None:
    config, w, u = make_config("matryoshka"), random_weights(), make_rows()
    stats = Objective(config, w)(u, ROWS, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    z = dense_latents((u - w.b_dec) @ w.W_enc.T + w.b_enc, config, 3)
    ends = list(itertools.accumulate(config.group_sizes()))
    errors = [(u - z[:, :end] @ w.W_dec[:end] - w.b_dec).square().sum() for end in ends]
    torch.testing.assert_close(stats.errors, torch.stack(errors))
    assert torch.equal(stats.counts, (z > 0).sum(0))
    assert stats.min_kept == pytest.approx(float(z[z > 0].min()))
    assert float(stats.square_sum) == pytest.approx(float(u.square().sum()))


# ---------------------------------------------------------------------- selection of active latents


@pytest.mark.parametrize("hint", ["unknown", "too high", "too low", "far too high"])
def test_batch_topk_is_exact_for_any_hint(hint: str) -> None:
    config, w = make_config("batchtopk"), random_weights()
    u = make_rows(rows=200)
    z = ((u - w.b_dec) @ w.W_enc.T + w.b_enc).relu()
    smallest = float(z.flatten().topk(3 * 200).values[-1])
    objective = Objective(config, w)
    objective.hint = {"unknown": -1.0, "too high": smallest * 1.5, "too low": smallest / 9, "far too high": 1e6}[hint]
    stats = objective(u, 200, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert int(stats.counts.sum()) == 600
    assert torch.equal(stats.counts, (z >= smallest).sum(0))
    assert stats.min_kept == pytest.approx(smallest)


def test_batch_topk_keeps_ties_and_no_latent_at_zero() -> None:
    config, w = make_config("batchtopk"), random_weights()
    u = make_rows()[:1].expand(ROWS, WIDTH).contiguous()  # equal rows: each kept score is tied 24 times
    stats = Objective(config, w)(u, ROWS, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert stats.counts.unique().tolist() == [0, ROWS]
    assert int((stats.counts > 0).sum()) == 3
    w.b_enc -= 100.0
    stats = Objective(config, w)(u, ROWS, 3, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert int(stats.counts.sum()) == 0
    assert stats.min_kept == 0


def test_all_scores_are_kept_if_fewer_than_k_are_positive() -> None:
    config, w, u = make_config("batchtopk"), random_weights(), make_rows()
    w.b_enc -= 4.0
    z = ((u - w.b_dec) @ w.W_enc.T + w.b_enc).relu()
    assert 0 < int((z > 0).sum()) < 20 * ROWS
    stats = Objective(config, w)(u, ROWS, 20, 0.0, torch.zeros(LATENTS, dtype=torch.int64))
    assert torch.equal(stats.counts, (z > 0).sum(0))


@pytest.mark.parametrize("shape", [(7, 96), (8, 40), (3, 7), (1, 1)])
def test_find_above_matches_a_mask(shape: tuple[int, int]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    positions, values = find_above(scores, 0.4)
    assert torch.equal(positions, (scores.flatten() > 0.4).nonzero()[:, 0])
    assert torch.equal(values, scores[scores > 0.4])


def test_sparse_products_match_dense_products() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(6, 9, generator=generator, dtype=torch.float64).clamp(min=0.5) - 0.5
    positions = dense.flatten().nonzero()[:, 0]
    starts = torch.tensor([0, 2, 5])
    code = SparseCode(positions, dense.flatten()[positions], 6, 9, starts)
    weight, right = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (9, 18))
    parts = code.decode(weight, weight.new_empty(18, 4)).view(6, 3, 4)
    for level, (begin, end) in enumerate(((0, 2), (2, 5), (5, 9))):
        torch.testing.assert_close(parts[:, level], dense[:, begin:end] @ weight[begin:end])
    row, latent = dense.nonzero(as_tuple=True)
    level = torch.bucketize(latent, starts[1:], right=True)
    torch.testing.assert_close(code.dots(right, weight), (right[row * 3 + level] * weight[latent]).sum(1))
    torch.testing.assert_close(code.accumulate(code.values, right[:6], weight.new_empty(9, 4)), dense.T @ right[:6])
    assert torch.equal(code.counts, (dense > 0).sum(0))


def test_half_precision_only_preselects() -> None:
    w, u = random_weights(dtype=torch.float32), make_rows(rows=256).float()
    exact, half = (
        Objective(make_config("matryoshka", precision=precision, batch=256), w) for precision in ("float32", "bfloat16")
    )
    rows_since_active = torch.zeros(LATENTS, dtype=torch.int64)
    results = [objective(u, 256, 3, 0.0, rows_since_active.clone()) for objective in (exact, half)]
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5)
    assert results[1].min_kept == pytest.approx(results[0].min_kept, rel=1e-5)
    for name, value in half.gradients.named().items():
        torch.testing.assert_close(value, exact.gradients.named()[name], rtol=1e-3, atol=1e-5)
