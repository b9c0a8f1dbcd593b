"""Numerical shortcuts for many tokens: symmetric products, subspace iteration, rounded cosines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from torino import VisualTokens, make
from torino.reducers import prunesid
from torino.reducers._similarity import SYMMETRIC_ROWS, cross_cosines, gram_matrix, pairwise_cosines
from torino.reducers.gtp import build_graph
from torino.reducers.prunesid import PruneSID, leading_eigenvectors, suppress
from torino.reducers.vispruner import _drop_duplicates


def clustered(seed: int, n: int = 450, width: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(30, width, generator=generator) + 0.7 * torch.randn(width, generator=generator)
    return centers[torch.randint(30, (n,), generator=generator)] + 0.4 * torch.randn(n, width, generator=generator)


# ---------------------------------------------------------------------- similarities


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [SYMMETRIC_ROWS - 1, SYMMETRIC_ROWS, SYMMETRIC_ROWS + 1, 577])
def test_gram_matrix_equals_matrix_product(n: int, dtype: torch.dtype) -> None:
    x = clustered(0, n).to(dtype)
    torch.testing.assert_close(gram_matrix(x), x @ x.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gram_matrix(x.T.contiguous().T), x @ x.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [SYMMETRIC_ROWS + 1, 512, 577])
def test_copies_have_cosine_one_in_all_quarters(n: int, dtype: torch.dtype) -> None:
    label = torch.arange(n) % 7
    for width in (3, 100, 1024):
        similar = pairwise_cosines(clustered(1, 7, width)[label], dtype)
        assert (similar[label[:, None] == label] == 1).all()
        assert torch.equal(similar, similar.T)


@pytest.mark.parametrize("factor", [1e-44, 1e-30, 1.0, 1e30])
def test_float64_cosines_of_tiny_and_huge_rows(factor: float) -> None:
    x = torch.tensor([[1.0, 0], [1, 1], [0, 0], [-1, 0]]) * factor
    expected = torch.tensor([[1, 0.5**0.5, 0, -1], [0.5**0.5, 1, 0, -(0.5**0.5)], [0] * 4, [-1, -(0.5**0.5), 0, 1]])
    torch.testing.assert_close(pairwise_cosines(x, torch.float64), expected.double())
    torch.testing.assert_close(pairwise_cosines(x.double() * 1e200, torch.float64), expected.double())


# ---------------------------------------------------------------------- eigenvectors


def spectrum(values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    n = len(values)
    basis = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q
    return (basis * values) @ basis.T, basis


@pytest.mark.parametrize("decay", [0.9, 0.95])
@pytest.mark.parametrize("count", [1, 4, 16, 40])
def test_leading_eigenvectors_without_full_decomposition(
    count: int, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gram, basis = spectrum(decay ** torch.arange(400, dtype=torch.float64), count)
    full_eigh = torch.linalg.eigh

    def small(matrix: Tensor) -> object:
        assert len(matrix) < 100, "all directions were decomposed"
        return full_eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", small)
    value, vector = leading_eigenvectors(gram, count)
    torch.testing.assert_close(value, decay ** torch.arange(count, dtype=torch.float64), rtol=1e-9, atol=0)
    torch.testing.assert_close(vector.abs(), basis[:, :count].abs(), rtol=0, atol=1e-9)
    torch.testing.assert_close(vector.T @ vector, torch.eye(count, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["flat", "late", "zero", "low rank", "pairs"])
def test_leading_eigenvectors_of_difficult_spectra(kind: str) -> None:
    place = torch.arange(300, dtype=torch.float64)
    values = {
        "flat": 2 - place / 300,
        "late": 1 + 1e-4 * (place < 10).double(),
        "zero": 0 * place,
        "low rank": (0.8**place) * (place < 12),
        "pairs": 0.9 ** (place // 2),
    }[kind]
    gram, _ = spectrum(values, 3)
    value, vector = leading_eigenvectors(gram, 16)
    torch.testing.assert_close(value, values[:16], rtol=0, atol=1e-12)
    torch.testing.assert_close(gram @ vector, vector * value, rtol=0, atol=2e-12)
    torch.testing.assert_close(vector.T @ vector, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-11)


@pytest.mark.parametrize("fidelity", ["released", "paper"])
@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (300, 40)])
def test_loadings_equal_svd(shape: tuple[int, int], fidelity: str) -> None:
    patches = clustered(2, *shape)
    z = patches.double().sigmoid()
    z = z - z.mean(1 if fidelity == "released" else 0, keepdim=True)
    expected = torch.linalg.svd(z, full_matrices=False).U[:, :12].abs().numpy()
    np.testing.assert_allclose(PruneSID(48, fidelity=fidelity)._loading(patches, 12), expected, rtol=0, atol=2e-9)


def test_plans_do_not_depend_on_the_eigensolver(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        patches = clustered(seed, 441, 500)
        patches[200:260] = patches[:60]
        attention = torch.rand(2, 441, generator=torch.Generator().manual_seed(seed))
        tokens = VisualTokens(patches, (21, 21), cls=torch.zeros(500), cls_attention=attention)
        for budget, fidelity in ((64, "released"), (128, "paper")):
            reducer = make("prunesid", budget=budget, fidelity=fidelity, order="native")
            fast = reducer.plan(tokens)
            with monkeypatch.context() as patched:
                patched.setattr(prunesid, "_subspace_iteration", lambda *_: None)
                assert reducer.plan(tokens).sources.tolist() == fast.sources.tolist()


def test_suppression_with_interleaved_groups() -> None:
    unit = torch.nn.functional.normalize(clustered(4, 60, 8), dim=1)
    group = np.arange(60) % 5
    order = np.random.default_rng(0).permutation(60)
    kept: list[bool] = []
    for place, i in enumerate(order):
        better = [j for j, stays in zip(order[:place], kept, strict=True) if stays and group[j] == group[i]]
        kept.append(all(float(unit[i] @ unit[j]) <= 0.6 for j in better))
    assert suppress(unit, 0.6, order, group).tolist() == kept
    assert not all(kept)


# ---------------------------------------------------------------------- greedy loops


def reference_duplicates(similar: np.ndarray, expected: int) -> list[int]:
    left = list(range(len(similar)))
    while len(left) > expected:
        even, odd = left[::2], left[1::2]
        nearest = {i: max(similar[i, j] for j in odd) for i in even}
        even.sort(key=lambda i: -nearest[i])
        left = even[min(8, len(left) - expected) :] + odd
    return left


def test_duplicates_beyond_float32_precision() -> None:
    for seed in range(5):
        draw = np.random.default_rng(seed)
        similar = 0.5 + 1e-9 * draw.random((41, 41)) * (draw.random((41, 41)) < 0.7)
        similar[:20] += 0.25 * draw.random((20, 1))
        similar = (similar + similar.T) / 2
        for expected in (1, 10, 24, 40):
            assert _drop_duplicates(similar, expected)[0].tolist() == reference_duplicates(similar, expected)


def test_coverage_sums_do_not_overflow() -> None:
    n = 300  # sums of so many rows would overflow int32
    patches = torch.ones(n, 4) + 0.01 * torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    attention = torch.rand(1, n, generator=torch.Generator().manual_seed(1)).double()
    similar = pairwise_cosines(patches).clamp(0, 1).double().mul(1 << 24).round().numpy()
    covered, saliency, picked = np.zeros(n), attention[0].numpy(), list[int]()
    for _ in range(20):
        value = np.maximum(0, similar - covered).sum(1) * saliency
        value[picked] = -1
        picked.append(int(value.argmax()))
        covered = np.maximum(covered, similar[picked[-1]])
    plan = make("scope", budget=20, order="native").plan(VisualTokens(patches, (1, n), cls_attention=attention))
    assert plan.sources.tolist() == picked


# ---------------------------------------------------------------------- graphs


@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (5, 1), (2, 2), (3, 4), (4, 3)])
def test_grid_neighbors(grid: tuple[int, int]) -> None:
    rows, columns = grid
    n = rows * columns
    adjacent = build_graph(torch.zeros(n, 1), grid, "spatial") > 0
    for i in range(n):
        for j in range(n):
            distance = max(abs(i // columns - j // columns), abs(i % columns - j % columns))
            assert bool(adjacent[i, j]) == (distance == 1)


@pytest.mark.parametrize("factor", [1e-42, 1e-25, 1.0, 1e25])
def test_neighbors_of_tiny_and_huge_patches(factor: float) -> None:
    patches = clustered(5, 60, 8) * factor
    patches[[3, 30]] = 0
    exact = cross_cosines(patches, patches).fill_diagonal_(-torch.inf)
    expected = (exact >= exact.topk(5, dim=1).values[:, -1:]).fill_diagonal_(False)
    assert torch.equal(build_graph(patches, (6, 10), "semantic", 5) > 0, expected & (expected.sum(0) > 0))
