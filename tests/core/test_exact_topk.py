"""Exact top-k search: the definition, and independence of chunks, batches, threads and memory layout."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from topk_cases import (
    INPUT_NAMES,
    ZERO,
    LargestTensor,
    assert_equal_result,
    assert_same_bits,
    bits,
    cancelling,
    normal,
    order_sensitive,
    random_integers,
    reference_topk,
    threads,
    topk_inputs,
)

from torino.core.topk import exact
from torino.core.topk.exact import SILENT, exact_topk, stable_topk

CHUNKS = (1, 7, 64, 1000, 4096)


# ---------------------------------------------------------------------- the definition


@pytest.mark.parametrize("name", INPUT_NAMES)
def test_the_definition_holds_for_every_k_and_floor(name: str) -> None:
    x, w, b = topk_inputs()[name]
    dense = (x.double() @ w.double().T + b.double()).float()
    middle = dense.flatten().sort().values[dense.numel() // 2]  # an attained score: "above" is strict
    per_latent = dense[torch.arange(len(w)) % len(x), torch.arange(len(w))] * (torch.arange(len(w)) % 3 != 0)
    for k in {1, 2, 5, 17, 32, len(w) - 1, len(w)}:
        if 1 <= k <= min(len(w), 32):
            for floor in (ZERO, middle, torch.tensor(-math.inf), torch.tensor(math.inf), per_latent):
                assert_equal_result(exact_topk(x, w, b, k, floor), reference_topk(x, w, b, k, floor))


@pytest.mark.parametrize("k", range(1, 33))
def test_every_k_up_to_32(k: int) -> None:
    x, w, b = random_integers(-2, 2, 11, 5), random_integers(-2, 2, 160, 5, seed=1), random_integers(-1, 1, 160, seed=2)
    assert_equal_result(exact_topk(x, w, b, k, ZERO), reference_topk(x, w, b, k, ZERO))


@given(st.data())
def test_small_whole_numbers_against_plain_python(data: st.DataObject) -> None:
    n, d, c = (data.draw(st.integers(1, most)) for most in (4, 3, 12))
    numbers = st.integers(-2, 2)

    def matrix(rows: int, columns: int) -> list[list[int]]:
        return data.draw(st.lists(st.lists(numbers, min_size=columns, max_size=columns), min_size=rows, max_size=rows))

    x, w, b = matrix(n, d), matrix(c, d), matrix(1, c)[0]
    k = data.draw(st.integers(1, c))
    floor: Any = data.draw(st.one_of(numbers, st.lists(numbers, min_size=c, max_size=c)))
    chunk = data.draw(st.integers(1, c + 1))
    floors = floor if isinstance(floor, list) else [floor] * c
    args = [torch.tensor(value, dtype=torch.float32) for value in (x, w, b)]
    indices, values = exact_topk(*args, k, torch.tensor(floor, dtype=torch.float32), chunk=chunk)
    for i in range(n):
        scores = [sum(p * q for p, q in zip(x[i], w[j], strict=True)) + b[j] for j in range(c)]
        best = sorted((j for j in range(c) if scores[j] > floors[j]), key=lambda j: (-scores[j], j))[:k]
        assert indices[i].tolist() == best + [SILENT] * (k - len(best))
        assert values[i].tolist() == [scores[j] for j in best] + [0.0] * (k - len(best))


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([0.0, 0.5, -1.0]))
def test_random_shapes(seed: int, k: int, floor: float) -> None:
    sizes = torch.randint(1, 60, (3,), generator=torch.Generator().manual_seed(seed))
    n, d, c = int(sizes[0]), int(sizes[1]), int(sizes[2]) * 7 + 6
    x, w, b = normal(n, d, seed=seed), normal(c, d, seed=seed + 1), normal(c, seed=seed + 2)
    assert_equal_result(exact_topk(x, w, b, k, torch.tensor(floor)), reference_topk(x, w, b, k, torch.tensor(floor)))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("stride", [1, 2, 31, 32, 33, 64, 127, 128, 129, 256, 1024])
def test_best_latents_at_any_distance_in_a_late_chunk(n: int, stride: int) -> None:
    """A search that keeps only one latent per lane or row of a chunk would lose the others."""
    c, k = 3 * 4096, 4
    w = torch.zeros(c, 2)
    w[:, 0] = (torch.arange(c) % 97) / 1000
    best = 2 * 4096 + 5 + stride * torch.arange(k)
    best = torch.where(best < c, best, best - 4096)
    w[best, 0] = torch.tensor([2.0, 5.0, 3.0, 4.0])
    x = torch.tensor([[1.0, 0.0]]).repeat(n, 1) * (1 + torch.arange(n)[:, None])
    indices, values = exact_topk(x, w, torch.zeros(c), k, ZERO)
    assert indices.tolist() == [[int(best[i]) for i in (1, 3, 2, 0)]] * n
    assert values[0].tolist() == [5.0, 4.0, 3.0, 2.0]


@pytest.mark.parametrize("c", [4096, 4097, 8192, 8192 + 32, 9000])
def test_more_latents_than_one_chunk(c: int) -> None:
    for n, d in ((1, 3), (6, 5)):
        x, w, b = normal(n, d), normal(c, d, seed=1), torch.zeros(c)
        assert_equal_result(exact_topk(x, w, b, 6, ZERO), reference_topk(x, w, b, 6, ZERO))


def test_rising_scores_refill_every_chunk() -> None:
    c = 2 * 4096 + 320
    w = torch.arange(1, c + 1).float()[:, None]
    for order, first in ((w, c - 1), (w.flip(0), 0)):
        indices, _ = exact_topk(torch.tensor([[1.0], [0.5], [-1.0]]), order, torch.zeros(c), 5, ZERO)
        step = -1 if first else 1
        assert indices[0].tolist() == indices[1].tolist() == [first + step * i for i in range(5)]
        assert indices[2].tolist() == [SILENT] * 5


def test_identical_latents_give_the_lowest_indices() -> None:
    c = 6000
    w = torch.ones(c, 3)
    w[:17] = 0.5
    for k in (1, 5, 32):
        indices, values = exact_topk(torch.tensor([[1.0, 2.0, 3.0]]), w, torch.zeros(c), k, ZERO)
        assert indices.tolist() == [list(range(17, 17 + k))]
        assert values.tolist() == [[6.0] * k]


def test_near_ties_that_float32_cannot_tell_apart() -> None:
    """Scores that differ by less than the rounding error of float32 sums."""
    for seed in range(4):
        x, w, b = cancelling(24, 1500, seed=10 * seed)
        want = reference_topk(x, w, b, 3, ZERO)
        by_float32 = (x @ w.T).topk(12).indices
        assert (by_float32 != want[0][:, :1]).all(1).any()  # float32 does not find the best latent of some token
        assert_equal_result(exact_topk(x, w, b, 3, ZERO), want)
        assert_equal_result(
            exact_topk(x, w, b, 3, torch.full((1500,), 2.0**-10)), reference_topk(x, w, b, 3, torch.tensor(2.0**-10))
        )


@pytest.mark.parametrize("power", [-100, -60, 40, 60])
def test_scaling_tokens_up_and_latents_down_changes_nothing(power: int) -> None:
    """Powers of two are exact, so the scores are the same; norms may underflow or overflow."""
    x, w, b = cancelling(12, 300, seed=7)
    want = reference_topk(x, w, b, 3, ZERO)
    assert_equal_result(exact_topk(x * 2.0**-power, w * 2.0**power, b, 3, ZERO), want)


def test_a_largest_norm_that_was_computed_before_gives_the_same() -> None:
    x, w, b = cancelling(6, 200)
    norm = float(w.norm(dim=1).max())
    assert_same_bits(exact_topk(x, w, b, 4, ZERO, largest_norm=norm), exact_topk(x, w, b, 4, ZERO))


# ---------------------------------------------------------------------- independence of chunks, batches and threads


@pytest.mark.parametrize("name", INPUT_NAMES)
def test_chunk_size_changes_nothing(name: str) -> None:
    x, w, b = topk_inputs()[name]
    k = min(3, len(w))
    for floor in (ZERO, torch.full((len(w),), 0.25)):
        want = exact_topk(x, w, b, k, floor)
        for chunk in (*CHUNKS, len(w)):
            assert_same_bits(exact_topk(x, w, b, k, floor, chunk=chunk), want)


def test_chunk_size_changes_nothing_with_many_latents() -> None:
    x, w, b = random_integers(-3, 3, 6, 4), random_integers(-3, 3, 4096 + 1000, 4, seed=1), torch.zeros(5096)
    want = reference_topk(x, w, b, 7, ZERO)
    for chunk in (64, 96, 1000, 4096, 5096, 10**9):
        assert_equal_result(exact_topk(x, w, b, 7, ZERO, chunk=chunk), want)


@pytest.mark.parametrize("name", [*INPUT_NAMES, "order sensitive"])
def test_a_token_gets_the_same_alone_and_in_any_batch(name: str) -> None:
    x, w, b = order_sensitive() if name == "order sensitive" else topk_inputs()[name]
    k = min(4, len(w))
    for floor in (ZERO, torch.full((len(w),), 0.1)):
        together = exact_topk(x, w, b, k, floor)
        alone = [exact_topk(row[None], w, b, k, floor) for row in x]
        assert_same_bits((torch.cat([i for i, _ in alone]), torch.cat([v for _, v in alone])), together)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        assert_same_bits(exact_topk(x[order], w, b, k, floor), (together[0][order], together[1][order]))
        twice = exact_topk(torch.cat([x, x.flip(0), x]), w, b, k, floor)
        assert_same_bits((twice[0][: len(x)], twice[1][: len(x)]), together)
        assert_same_bits((twice[0][-len(x) :], twice[1][-len(x) :]), together)


def test_tiles_of_rows_change_nothing() -> None:
    n = 2 * exact.ROWS + 3
    x, w, b = random_integers(-3, 3, n, 3), random_integers(-3, 3, 64, 3, seed=1), torch.zeros(64)
    assert_equal_result(exact_topk(x, w, b, 3, ZERO), reference_topk(x, w, b, 3, ZERO))


@pytest.mark.parametrize("name", ["random", "huge channel", "cancelling", "order sensitive", "many"])
def test_threads_change_nothing(name: str) -> None:
    if name == "many":
        x, w, b = normal(300, 48), normal(5000, 48, seed=1), normal(5000, seed=2)
    else:
        x, w, b = order_sensitive() if name == "order sensitive" else topk_inputs()[name]
    with threads(1):
        one = exact_topk(x, w, b, 4, ZERO)
    with threads(2):
        two = exact_topk(x, w, b, 4, ZERO)
    assert_same_bits(two, one)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_lower_matmul_precision_changes_nothing(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    x, w, b = normal(8, 32), normal(500, 32, seed=1), torch.zeros(500)
    want = reference_topk(x, w, b, 5, ZERO)
    try:
        torch.set_float32_matmul_precision(precision)
        assert_equal_result(exact_topk(x, w, b, 5, ZERO), want)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_memory_layout_changes_nothing(layout: str) -> None:
    x, w, b = normal(9, 12), normal(120, 12, seed=1), normal(120, seed=2)
    if layout == "expanded":
        x = x[:1].expand(9, 12)
    odd = {
        "transposed": lambda t: t.T.contiguous().T,
        "strided": lambda t: torch.stack([t, -t], -1).flatten(1)[:, ::2],
        "expanded": lambda t: t,
    }[layout]
    assert_same_bits(exact_topk(odd(x), odd(w), b, 4, ZERO), exact_topk(x.contiguous(), w.contiguous(), b, 4, ZERO))


# ---------------------------------------------------------------------- limits of float32


def test_scores_beyond_float32_do_not_crash() -> None:
    x = torch.cat([torch.full((2, 3), 1e30), torch.full((1, 3), -1e30), torch.tensor([[3e38, -3e38, 3e38]])])
    w = torch.cat([normal(40, 3), normal(40, 3, seed=1) * 1e30, torch.zeros(3, 3)])
    for floor in (ZERO, torch.zeros(83)):
        for k in (1, 5):
            indices, values = exact_topk(x, w, torch.zeros(83), k, floor)
            assert indices.shape == values.shape == (4, k)
            for row in indices.tolist():
                real = [j for j in row if j != SILENT]
                assert len(set(real)) == len(real)
            assert not values.isnan().any()


def test_scores_beyond_float32_are_infinite_and_tie() -> None:
    w = torch.tensor([[1.0], [1e30], [-1e30], [1e30], [2.0]] + [[-1.0]] * 30)
    x = torch.tensor([[1e30], [-1e30], [1.0]])
    assert_equal_result(exact_topk(x, w, torch.zeros(35), 4, ZERO), reference_topk(x, w, torch.zeros(35), 4, ZERO))


def test_a_latent_far_below_float32_does_not_hide_others() -> None:
    w = torch.tensor([[1.0], *[[-1e30]] * 20])
    x = torch.tensor([[1e30]])
    assert_equal_result(exact_topk(x, w, torch.zeros(21), 3, ZERO), reference_topk(x, w, torch.zeros(21), 3, ZERO))


def test_a_zero_token_with_enormous_latents_reads_the_bias() -> None:
    w, b = torch.full((20, 1), 1e20), torch.arange(20).float()
    x = torch.zeros(3, 1)
    assert_equal_result(exact_topk(x, w, b, 2, ZERO), reference_topk(x, w, b, 2, ZERO))


def test_partial_sums_that_overflow_although_the_total_does_not() -> None:
    x = torch.full((1, 4), 1e20)
    w = torch.full((40, 4), 1e-3) * torch.arange(1, 41)[:, None]
    w[33] = torch.tensor([-4e18, 3e18, 3e18, 0.0])  # −4e38 + 3e38 + 3e38
    w[7] = torch.tensor([4e18, -3e18, -3e18, 0.0])
    w[20] = torch.tensor([3e18, 3e18, -4e18, 0.0])
    assert_equal_result(exact_topk(x, w, torch.zeros(40), 3, ZERO), reference_topk(x, w, torch.zeros(40), 3, ZERO))


# ---------------------------------------------------------------------- memory


def test_the_recorder_measures_a_dense_product() -> None:
    with LargestTensor() as largest:
        _ = torch.zeros(64, 8) @ torch.zeros(8, 4096)
    assert largest.bytes == 64 * 4096 * 4


@pytest.mark.parametrize("tokens", ["random", "some of them zero"])
@pytest.mark.parametrize("floors", [0, 1])
def test_no_tensor_comes_near_the_matrix_of_activations(tokens: str, floors: int) -> None:
    n, d, c = 576, 64, 65536  # the N x C matrix would have 151 MB
    x, w = normal(n, d), normal(c, d, seed=1)
    if tokens != "random":
        x[::24] = 0
    floor = torch.full((c,), 20.0) if floors else ZERO
    with LargestTensor() as largest:
        indices, _ = exact_topk(x, w, torch.zeros(c), 4, floor)
    assert largest.bytes < 32 << 20, f"{largest.by} returned {largest.bytes / 2**20:.0f} MiB"
    rows = torch.tensor([0, 1, 574, 575])
    assert torch.equal(indices[rows], reference_topk(x[rows], w, torch.zeros(c), 4, floor)[0])


# ---------------------------------------------------------------------- stable_topk

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.5, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38, math.inf, -math.inf, 2.0**-126]


@given(st.lists(st.lists(st.sampled_from(SPECIAL), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(1, 7))
def test_stable_top_is_sorted_with_ties_to_the_lowest_index(rows: list[list[float]], k: int) -> None:
    indices, values = stable_topk(torch.tensor(rows), k)
    for i, row in enumerate(rows):
        best = sorted(range(7), key=lambda j: (-row[j], j))[:k]
        assert indices[i].tolist() == best
        assert torch.equal(bits(values[i]), bits(torch.tensor([row[j] for j in best])))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30))
def test_stable_top_of_any_floats(row: list[float]) -> None:
    indices, _ = stable_topk(torch.tensor(row), len(row))
    assert indices.tolist() == sorted(range(len(row)), key=lambda j: (-row[j], j))


def test_stable_top_takes_leading_dimensions_and_strides() -> None:
    values = random_integers(0, 3, 3, 4, 10)
    indices, best = stable_topk(values, 3)
    assert indices.shape == best.shape == (3, 4, 3)
    flat, _ = stable_topk(values.reshape(12, 10), 3)
    assert torch.equal(indices.reshape(12, 3), flat)
    turned, _ = stable_topk(values.transpose(0, 2).contiguous().transpose(0, 2), 3)
    assert torch.equal(turned, indices)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("torch.backends", "fp32_precision", "tf32"),
        ("torch.backends.cuda.matmul", "fp32_precision", "tf32"),
        ("torch.backends.mkldnn.matmul", "fp32_precision", "bf16"),
    ],
)
def test_the_newer_settings_of_precision_change_no_answer(place: str, name: str, value: str) -> None:
    """In a separate process, because torch cannot return from the new settings to the old ones."""
    code = f"""
import torch
from torino.core.topk.exact import exact_topk
torch.manual_seed(0)
x, w, b, floor = torch.randn(9, 32), torch.randn(300, 32), torch.randn(300), torch.tensor(0.0)
before = exact_topk(x, w, b, 3, floor)
{place}.{name} = "{value}"
after = exact_topk(x, w, b, 3, floor)
assert all(torch.equal(old, new) for old, new in zip(before, after))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
