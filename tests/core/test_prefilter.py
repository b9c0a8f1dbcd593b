"""The int8 prefilter: same result as the exact search, bit by bit; threads, backends and cache files."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sae_cases import KINDS, make_sae, sae_options
from topk_cases import (
    INPUT_NAMES,
    ZERO,
    LargestTensor,
    assert_equal_result,
    assert_same_bits,
    assert_same_concepts,
    cancelling,
    normal,
    order_sensitive,
    reference_topk,
    topk_inputs,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torino import SAE
from torino.core.errors import BadParameter
from torino.core.topk import prefilter
from torino.core.topk.exact import exact_topk
from torino.core.topk.prefilter import (
    SearchStats,
    backends,
    make_product,
    prefiltered_topk,
    quantize,
    search,
    zero_point_for,
)
from torino.datasets.bundled import example_sae, example_tokens
from torino.sae import model

MISSING = any(find_spec(name) is None for name in ("onnx", "onnxruntime"))
needs_onnxruntime = pytest.mark.skipif(MISSING, reason='onnxruntime is not installed: pip install "torino[fast]"')
BACKENDS = ["torch", "int_mm", pytest.param("onnxruntime", marks=needs_onnxruntime)]


def search_int8(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    k: int,
    floor: Tensor = ZERO,
    backend: Any = "torch",
    stats: Any = None,
    chunk: int = backends.CHUNK,
) -> tuple[Tensor, Tensor]:
    quantized = quantize(w, b, zero_point_for(backend))
    return prefiltered_topk(
        x,
        w,
        b,
        k,
        floor,
        quantized,
        make_product(backend, quantized.levels, int(quantized.zero_point), chunk),
        stats=stats,
    )


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


# ---------------------------------------------------------------------- integer products


@pytest.mark.parametrize("zero", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(32, 64, 1), (64, 64, 7), (96, 128, 40), (32, 4096, 9)])
def test_products_are_exact(backend: Any, shape: tuple[int, int, int], zero: int) -> None:
    if zero > zero_point_for(backend):
        pytest.skip("products of 8-bit weights are not exact on this processor, and not used")
    c, d, n = shape
    random = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 2 * zero, (c, d), generator=random).byte()
    tokens = torch.randint(-127, 128, (n, d), generator=random).char()
    weights[0], weights[1], tokens[0] = 2 * zero - 1, 1, 127  # the largest possible sums
    expected = tokens.long() @ (weights.long() - zero).T
    for chunk in (32, 64, 4096):
        product = make_product(backend, weights, zero, chunk)
        prepared = product.prepare(tokens)
        for start in range(0, c, chunk):
            rows = min(chunk, c - start)
            got = product.scores(prepared, start, torch.empty(n, rows, dtype=torch.int32))
            assert got.shape == (n, 32, rows // 32)
            assert torch.equal(got.transpose(1, 2).flatten(1).long(), expected[:, start : start + rows])


@needs_onnxruntime
@pytest.mark.parametrize(("most", "zero"), [(2**17, 128), (2**15 - 1, 64), (100, None)])
def test_a_product_that_saturates_is_not_used(monkeypatch: pytest.MonkeyPatch, most: int, zero: int | None) -> None:
    """As on processors that add pairs in 16 bits: 7-bit weights are used, or no prefilter if these saturate too."""

    class Saturating(backends.OnnxruntimeProduct):
        def __init__(self, levels: Tensor, zero: int, chunk: int) -> None:
            super().__init__(levels, zero, chunk)
            self.saturates = 2 * int(levels.max() - zero) * 255 >= most

        def scores(self, tokens: Tensor, start: int, out: Tensor) -> Tensor:
            scores = super().scores(tokens, start, out)
            return scores.clamp_(-most, most) if self.saturates else scores

    actual = zero_point_for("onnxruntime")  # a processor without VNNI saturates by itself
    monkeypatch.setitem(backends._products, "onnxruntime", Saturating)
    monkeypatch.setattr(backends, "_warned", set())
    backends._probe.cache_clear()
    try:
        if zero is None:
            with pytest.warns(UserWarning, match="not exact"):
                assert backends.backend_for(torch.device("cpu")) is None
        else:
            assert backends.backend_for(torch.device("cpu")) == "onnxruntime"
            assert zero_point_for("onnxruntime") == min(zero, actual)
    finally:
        backends._probe.cache_clear()


@pytest.mark.parametrize("zero", [64, 128])
def test_seven_bits_and_eight_give_the_same(zero: int) -> None:
    x, w, b = normal(20, 50), normal(900, 50, seed=1), normal(900, seed=2)
    quantized = quantize(w, b, zero)
    got = prefiltered_topk(x, w, b, 5, ZERO, quantized, make_product("torch", quantized.levels, zero))
    assert_same_bits(got, exact_topk(x, w, b, 5, ZERO))


# ---------------------------------------------------------------------- the bound


@pytest.mark.parametrize("zero", [64, 128])
@pytest.mark.parametrize("name", [*INPUT_NAMES, "order sensitive"])
def test_no_score_exceeds_the_bound(name: str, zero: int) -> None:
    x, w, b = order_sensitive() if name == "order sensitive" else topk_inputs()[name]
    quantized = quantize(w, b, zero)
    latents = search._latent_bounds(b, ZERO, quantized)
    tokens = search._token_bounds(x, quantized, latents.largest_bias)
    product = (quantized.levels.double() - zero) @ tokens.levels.double().T
    offset, norm, error, scale = latents.rows[:, :, None].unbind(1)
    token_error, length, token_scale = tokens.terms.T[:, None].unbind(0)
    estimate, bound = product * scale * token_scale + offset, norm * token_error + error * length
    exact = (x.double() @ w.double().T + b.double()).T
    rows = quantized.order >= 0
    difference = (estimate[rows] - exact[quantized.order[rows]]).abs()
    assert bool((difference <= bound[rows] + tokens.margin)[:, tokens.valid].all())
    assert bool(tokens.valid.any())


def test_the_bound_excludes_most_latents() -> None:
    x, w = normal(64, 256), unit(normal(3000, 256, seed=1))
    stats: list[SearchStats] = []
    search_int8(x, w, torch.zeros(3000), 3, stats=stats)
    assert not stats[0].fallback.any()
    assert float(stats[0].survivors.float().mean()) < 40


def test_the_order_of_rows_contains_each_latent_once() -> None:
    for c in (1, 31, 32, 33, 700, 1025):
        quantized = quantize(normal(c, 5), normal(c, seed=1))
        assert sorted(quantized.order[quantized.order >= 0].tolist()) == list(range(c))
        assert len(quantized.order) == len(quantized.levels) == -(-c // 32) * 32
        assert quantized.levels.shape[1] == 64


def test_a_rotation_protects_against_one_huge_channel() -> None:
    """Without it the scale of a token would be that of the huge channel, and hundreds of latents would survive."""
    x, w = normal(40, 384), unit(normal(4000, 384, seed=1))
    x[:, 17] = 60.0
    w[:, 17] = 0
    stats: list[SearchStats] = []
    assert_equal_result(
        search_int8(x, w, torch.zeros(4000), 3, stats=stats), reference_topk(x, w, torch.zeros(4000), 3, ZERO)
    )
    assert float(stats[0].survivors.float().mean()) < 150
    assert not stats[0].fallback.any()


# ---------------------------------------------------------------------- the result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", INPUT_NAMES)
def test_the_result_is_that_of_the_exact_search(name: str, backend: Any) -> None:
    x, w, b = topk_inputs()[name]
    dense = (x.double() @ w.double().T + b.double()).float()
    middle = dense.flatten().sort().values[dense.numel() // 2].clamp(min=0)  # an attained score: "above" is strict
    per_latent = dense[torch.arange(len(w)) % len(x), torch.arange(len(w))] * (torch.arange(len(w)) % 3 != 0)
    for k in {1, 2, 5, 32, len(w)}:
        if k <= min(len(w), 32):
            for floor in (ZERO, middle, torch.tensor(math.inf), per_latent.clamp(min=0)):
                assert_same_bits(search_int8(x, w, b, k, floor, backend), exact_topk(x, w, b, k, floor))


@pytest.mark.parametrize("k", range(1, 33))
def test_every_k_up_to_32(k: int) -> None:
    x, w, b = normal(9, 70), normal(1237, 70, seed=1), normal(1237, seed=2)
    assert_equal_result(search_int8(x, w, b, k), reference_topk(x, w, b, k, ZERO))


def drawn(seed: int, like: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of several kinds, with sizes that are not multiples of anything."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 50, (3,), generator=random)
    n, d, c = int(sizes[0]), int(sizes[1]) + 3, int(sizes[2]) * 31 + 37
    x, w, b = normal(n, d, seed=seed), normal(c, d, seed=seed + 1), normal(c, seed=seed + 2)
    if like == "tied":
        return (x * 2).round(), (w * 2).round(), b.round()
    if like == "clustered":
        centres = normal(3, d, seed=seed + 3)
        x = centres[torch.randint(3, (n,), generator=random)] + 0.01 * x
        w = unit(centres[torch.randint(3, (c,), generator=random)] + 0.1 * w)
        return x, w, 0.01 * b
    if like == "outliers":
        x[:, d // 2], w[:, d // 3] = 1000 * x[:, d // 2], 300 * w[:, d // 3]
        x[::3] *= 1e3
        return x, w * torch.rand(c, 1, generator=random) ** 4, b
    if like == "adversarial":
        x[0], x[-1] = 0.0, 1e-41
        w[: c // 2] = w[0]
        x[n // 2] = w[0] * 1e18
        return x, w, b * (torch.rand(c, generator=random) < 0.5)
    return x, w, b


@given(
    st.integers(0, 10**6),
    st.sampled_from(["random", "tied", "clustered", "outliers", "adversarial"]),
    st.integers(1, 32),
    st.booleans(),
    st.sampled_from(["torch", "int_mm"] if MISSING else ["torch", "int_mm", "onnxruntime"]),
)
def test_any_input_against_the_definition(seed: int, like: str, k: int, own_floors: bool, backend: str) -> None:
    x, w, b = drawn(seed, like)
    floor = normal(len(w), seed=seed + 9).clamp(min=0) if own_floors else ZERO
    got = search_int8(x, w, b, k, floor, backend)
    assert_same_bits(got, exact_topk(x, w, b, k, floor))
    if like == "tied":  # halves and integers are exact in float32 and float64, so ties are exact
        floor = (floor * 2).round() / 2
        assert_equal_result(search_int8(x, w, b, k, floor, backend), reference_topk(x, w, b, k, floor))
    # against float64, for tokens without near-ties in float32
    scores = (x.double() @ w.double().T + b.double()).masked_fill(~((x.double() @ w.double().T + b) > floor), -math.inf)
    most, best = scores.topk(min(k + 1, len(w)))
    clear = ((most[:, :-1] - most[:, 1:]) > 2e-7 * most[:, :1].abs()).all(1) & (most[:, k - 1] > -math.inf)
    clear &= most[:, -1] > -math.inf
    assert torch.equal(got[0][clear], best[clear, :k])


@pytest.mark.parametrize("seed", range(3))
def test_near_ties_that_float32_cannot_tell_apart(seed: int) -> None:
    x, w, b = cancelling(24, 1500, seed=10 * seed)
    assert_equal_result(search_int8(x, w, b, 3), reference_topk(x, w, b, 3, ZERO))
    floors = torch.full((1500,), 2.0**-10)
    assert_equal_result(search_int8(x, w, b, 3, floors), reference_topk(x, w, b, 3, floors))


def test_identical_latents_cost_time_and_give_the_lowest_indices() -> None:
    w = unit(torch.ones(6000, 3))
    w[:17] *= 0.5
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    stats: list[SearchStats] = []
    indices, _ = search_int8(x, w, torch.zeros(6000), 5, stats=stats)
    assert indices.tolist() == [list(range(17, 22)), [-1] * 5, [-1] * 5]
    assert stats[0].fallback.tolist() == [True, False, False]


def test_tokens_near_the_limits_of_float32_are_passed_to_the_exact_search() -> None:
    x = torch.cat([torch.full((2, 3), 1e30), torch.full((1, 3), -3e38), normal(2, 3), torch.full((1, 3), 1e-42)])
    w = torch.cat([normal(40, 3), normal(40, 3, seed=1) * 1e30, torch.zeros(3, 3)])
    for k in (1, 5):
        assert_same_bits(search_int8(x, w, torch.zeros(83), k), exact_topk(x, w, torch.zeros(83), k, ZERO))
    x = torch.cat([normal(3, 3), torch.tensor([[math.inf, 0.0, 1.0], [math.nan, 0.0, 1.0]])])
    w = normal(40, 3)
    stats: list[SearchStats] = []
    got = search_int8(x, w, torch.zeros(40), 2, stats=stats)
    assert stats[0].fallback.tolist() == [False] * 3 + [True] * 2
    assert_same_bits(got, exact_topk(x, w, torch.zeros(40), 2, ZERO))


@pytest.mark.parametrize("name", ["random", "ties everywhere", "huge channel", "order sensitive"])
def test_batch_tiles_and_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = order_sensitive() if name == "order sensitive" else topk_inputs()[name]
    want = exact_topk(x, w, b, 3, ZERO)
    alone = [search_int8(row[None], w, b, 3) for row in x]
    assert_same_bits((torch.cat([i for i, _ in alone]), torch.cat([v for _, v in alone])), want)
    for size in ("ROWS", "LANES_AT_ONCE"):
        with monkeypatch.context() as patch:
            patch.setattr(search, size, 3)
            assert_same_bits(search_int8(x, w, b, 3), want)
    assert_same_bits(search_int8(x, w, b, 3, chunk=32), want)
    assert_same_bits(search_int8(x.T.contiguous().T, w, b, 3), want)


@pytest.mark.parametrize("width", [64, 192, 384])
def test_tokens_in_column_order_are_accepted(width: int) -> None:
    x, w = normal(width, 9).T, normal(137, width, seed=1)
    assert_same_bits(search_int8(x, w, torch.zeros(137), 3), exact_topk(x, w, torch.zeros(137), 3, ZERO))


def test_a_low_limit_of_survivors_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = normal(30, 40), normal(2000, 40, seed=1), torch.zeros(2000)
    want = exact_topk(x, w, b, 4, ZERO)
    for survivors in (0, 5, 7):
        monkeypatch.setattr(search, "MAX_SURVIVORS", survivors)
        stats: list[SearchStats] = []
        assert_same_bits(search_int8(x, w, b, 4, stats=stats), want)
        assert stats[0].fallback.any()
        assert bool(stats[0].fallback.all()) == (survivors == 0)


class ThreadCounts(threading.Thread):
    """Record ``torch.get_num_threads()`` as seen by another thread, until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.counts: set[int] = set()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            self.counts.add(torch.get_num_threads())
            new = threading.Thread(target=lambda: self.counts.add(torch.get_num_threads()))  # inherits the setting
            new.start()
            new.join()

    def __enter__(self) -> set[int]:
        self.start()
        return self.counts

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


@pytest.fixture
def fixed_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the number of torch threads; any other call of set_num_threads fails."""
    before, set_num_threads = torch.get_num_threads(), torch.set_num_threads

    def forbidden(count: int) -> None:
        raise AssertionError(f"torch.set_num_threads({count}) was called")

    monkeypatch.setattr(torch, "set_num_threads", forbidden)
    yield set_num_threads
    set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("threads", "min_rows"), [(1, 1), (2, 144), (2, 10), (3, 20), (4, 1)])
def test_threads_do_not_change_the_result_and_are_not_changed(
    fixed_threads: Any, monkeypatch: pytest.MonkeyPatch, backend: Any, threads: int, min_rows: int
) -> None:
    x, w, b = normal(50, 48), normal(3000, 48, seed=1), normal(3000, seed=2)
    want = exact_topk(x, w, b, 4, ZERO)
    fixed_threads(threads)
    monkeypatch.setattr(search, "MIN_ROWS", min_rows)  # search all tokens in one thread, or in several
    with ThreadCounts() as counts:
        assert_same_bits(search_int8(x, w, b, 4, ZERO, backend), want)
        with torch.inference_mode():
            assert_same_bits(search_int8(x.clone(), w.clone(), b, 4, ZERO, backend), want)
        assert torch.get_num_threads() == threads
    assert counts == {threads}
    assert torch.get_num_threads() == threads


def test_searches_from_several_threads_do_not_change_the_number_of_threads(
    fixed_threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b = normal(60, 8), normal(900, 8, seed=1), torch.zeros(900)
    want = exact_topk(x, w, b, 3, ZERO)
    fixed_threads(2)
    monkeypatch.setattr(search, "MIN_ROWS", 10)
    results: list[tuple[Tensor, Tensor]] = []

    def run() -> None:
        results.extend(search_int8(x, w, b, 3) for _ in range(5))

    with ThreadCounts() as counts:
        runners = [threading.Thread(target=run) for _ in range(3)]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
    assert len(results) == 15
    for result in results:
        assert_same_bits(result, want)
    assert counts == {2}
    assert torch.get_num_threads() == 2


def test_each_worker_uses_one_torch_thread(fixed_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("threadpoolctl")
    fixed_threads(2)
    monkeypatch.setattr(search, "MIN_ROWS", 10)
    counts: list[int] = []
    run = search._TileSearch.run

    def recorded(self: Any, product: Any) -> Any:
        counts.append(torch.get_num_threads())
        return run(self, product)

    monkeypatch.setattr(search._TileSearch, "run", recorded)
    search_int8(normal(60, 8), normal(900, 8, seed=1), torch.zeros(900), 3)
    assert counts == [1, 1]


def test_without_threadpoolctl_the_result_is_the_same(fixed_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = normal(60, 8), normal(900, 8, seed=1), torch.zeros(900)
    want = exact_topk(x, w, b, 3, ZERO)
    fixed_threads(2)
    monkeypatch.setattr(search, "MIN_ROWS", 10)
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    search._openmp_controller.cache_clear()
    try:
        assert_same_bits(search_int8(x, w, b, 3), want)
        assert torch.get_num_threads() == 2
    finally:
        search._openmp_controller.cache_clear()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_lower_matmul_precision_changes_nothing(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    x, w, b = normal(8, 70), normal(500, 70, seed=1), torch.zeros(500)
    try:
        torch.set_float32_matmul_precision(precision)
        assert_equal_result(search_int8(x, w, b, 5), reference_topk(x, w, b, 5, ZERO))
    finally:
        torch.set_float32_matmul_precision(before)


def test_widths_whose_sums_exceed_32_bits_use_the_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefilter, "backend_for", lambda device: "torch")
    assert 127**2 * (prefilter.MAX_WIDTH + 63) < 2**31 <= 127**2 * (prefilter.MAX_WIDTH + 200)
    w = torch.zeros(37, prefilter.MAX_WIDTH + 1)
    w[torch.arange(37), torch.arange(37)] = 1.0
    stats: list[SearchStats] = []
    assert SAE(w).top(w[:3], 1, prefilter="int8", stats=stats).indices[:, 0].tolist() == [0, 1, 2]
    assert not stats


class LargestDense(LargestTensor):
    """Ignore sparse tensors, which report the size of the dense tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.bytes, self.by
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in tree_leaves(out)):
            self.bytes, self.by = before
        return out


@pytest.mark.parametrize("floors", [0, 1])
def test_no_tensor_comes_near_the_matrix_of_activations(floors: int) -> None:
    n, d, c = 576, 64, 65536
    x, w = normal(n, d), normal(c, d, seed=1)
    x[::24] = 0
    floor = torch.full((c,), 20.0) if floors else ZERO
    quantized = quantize(w, torch.zeros(c), 128)
    with LargestDense() as largest:
        indices, _ = prefiltered_topk(
            x, w, torch.zeros(c), 4, floor, quantized, make_product("torch", quantized.levels, 128)
        )
    assert largest.bytes <= w.nbytes, f"{largest.by} returned {largest.bytes / 2**20:.0f} MiB"
    rows = torch.tensor([0, 1, 574, 575])
    assert torch.equal(indices[rows], reference_topk(x[rows], w, torch.zeros(c), 4, floor)[0])


def waves(n: int, c: int) -> tuple[Tensor, Tensor]:
    """Tokens with thousands of equal best latents, which come after as many larger ones with low scores."""
    spike = torch.zeros(64)
    spike[0] = 1.0
    like = torch.nn.functional.normalize(torch.ones(64), dim=0)
    w = torch.cat([(2 * like).expand(c // 4, 64), spike.expand(c - c // 4, 64)]).contiguous()
    x = -spike.expand(n, 64).clone()
    x[: n // 4] = 3 * spike - 2 * like
    return x, w


def test_the_number_of_pending_pairs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = waves(64, 20_000)
    most = 0
    collect = search._TileSearch._collect

    def watched(self: Any, *rest: Any) -> None:
        nonlocal most
        collect(self, *rest)
        most = max(most, sum(len(part[0]) for part in [*self.int8_pairs, *self.float32_pairs]))

    monkeypatch.setattr(search._TileSearch, "_collect", watched)
    want = exact_topk(x, w, torch.zeros(len(w)), 3, ZERO)
    assert_same_bits(search_int8(x, w, torch.zeros(len(w)), 3), want)
    for limit in (1 << 10, 64):
        most = 0
        monkeypatch.setattr(search, "MAX_PENDING", limit)
        assert_same_bits(search_int8(x, w, torch.zeros(len(w)), 3, chunk=512), want)
        assert most <= limit + 64 * search.MAX_SURVIVORS


# ---------------------------------------------------------------------- SAE.top


@pytest.fixture
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the product in floating point instead of onnxruntime, which may not be installed."""
    monkeypatch.setattr(prefilter, "backend_for", lambda device: "torch")


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize("rank", ["activation", "pre-threshold"])
@pytest.mark.parametrize("normalize", ["none", "layer_norm", "constant_norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_top_is_the_same_with_and_without(kind: str, normalize: str, rank: Any) -> None:
    sae = make_sae(kind, normalize=normalize)
    x = normal(30, sae.width, seed=3) * 3
    for k in (1, 3, 9, sae.latents):
        assert_same_concepts(sae.top(x, k, rank=rank, prefilter="int8"), sae.top(x, k, rank=rank, prefilter="off"))


@pytest.mark.usefixtures("with_torch")
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 32))
def test_top_of_random_saes_is_the_same(seed: int, kind: str, k: int) -> None:
    c, d = 700 + seed % 41, 20 + seed % 7
    opts = {**sae_options(kind), "groups": None}
    opts |= {"threshold": normal(c, seed=seed).abs()} if kind == "jumprelu" else {}
    sae = SAE(unit(normal(c, d, seed=seed)), normal(c, seed=seed + 1) / 9, b_dec=normal(d), kind=kind, **opts)  # type: ignore[arg-type]
    x = 3 * normal(12, d, seed=seed + 2)
    assert_same_concepts(sae.top(x, k, prefilter="int8"), sae.top(x, k, prefilter="off"))


@pytest.mark.usefixtures("with_torch")
def test_real_tokens_give_the_same_at_every_level() -> None:
    sae = example_sae()
    x = torch.cat([tokens.patches for tokens in example_tokens()])[::5]
    for levels in range(1, len(sae.groups) + 1):
        small = sae.first(levels)
        for k in (1, 3):
            assert_same_concepts(small.top(x, k, prefilter="int8"), small.top(x, k, prefilter="off"))


@needs_onnxruntime
def test_real_tokens_give_the_same_with_onnxruntime() -> None:
    sae, x = example_sae(), example_tokens()[0].patches
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))


@pytest.mark.usefixtures("with_torch")
def test_changed_weights_are_quantized_again() -> None:
    sae, x = make_sae("relu"), normal(20, 4) * 3
    sae.top(x, 3, prefilter="int8")
    with torch.no_grad():
        sae.W_enc.mul_(-1)
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    sae.W_enc = normal(*sae.W_enc.shape, seed=5)
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    sae.W_enc.data[0] = 7.0
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    sae.W_enc.data.neg_()  # does not change the version
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    sae.W_enc.data = sae.W_enc.data.flip(1).clone()
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    with torch.inference_mode():
        sae.W_enc.neg_()
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    sae.b_enc.add_(1.0)
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))


@pytest.mark.usefixtures("with_torch")
def test_an_sae_that_was_used_can_be_copied() -> None:
    sae, x = make_sae("relu"), normal(20, 4)
    want = sae.top(x, 3, prefilter="int8")
    assert_same_concepts(copy.deepcopy(sae).top(x, 3, prefilter="int8"), want)
    sae.top(x, 3, prefilter="off")
    assert_same_concepts(pickle.loads(pickle.dumps(sae)).top(x, 3, prefilter="int8"), want)


def test_an_unknown_prefilter_is_refused() -> None:
    sae = make_sae("relu")
    with pytest.raises(BadParameter, match="prefilter must be one of 'auto', 'int8', 'bf16', 'off', got 'fast'"):
        sae.top(normal(2, 4), 1, prefilter="fast")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- when it is used


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each search with the prefilter, on a processor without bfloat16."""
    monkeypatch.setattr("torino.sae.model.use_half", lambda weight, tokens: False)
    calls: list[int] = []

    def recorded(x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        return prefiltered_topk(x, *rest, **options)

    monkeypatch.setattr(model, "prefiltered_topk", recorded)
    monkeypatch.setattr(prefilter, "backend_for", lambda device: "torch")
    return calls


def test_auto_waits_until_it_pays(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sae = make_sae("relu")
    sae.top(normal(100, 4), 2)
    assert calls == []  # too few weights
    monkeypatch.setattr(prefilter, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(prefilter, "QUANTIZE_AFTER", 400)
    for _ in range(3):
        sae.top(normal(100, 4), 2)
    assert calls == [100]  # 400 tokens in total
    sae.top(normal(prefilter.MIN_TOKENS - 1, 4), 2)
    assert calls == [100]
    sae.top(normal(prefilter.MIN_TOKENS, 4), 2)
    assert calls == [100, prefilter.MIN_TOKENS]
    sae.top(normal(100, 4), 2, prefilter="off")
    sae.prefilter = "off"
    sae.top(normal(100, 4), 2)
    assert len(calls) == 2
    sae.top(normal(3, 4), 2, prefilter="int8")
    assert calls[-1] == 3
    sae.W_enc = sae.W_enc.clone()
    sae.prefilter = "auto"
    sae.top(normal(100, 4), 2)  # other weights, which must be quantized again
    assert len(calls) == 3
    monkeypatch.setattr(prefilter, "MIN_WEIGHTS", 1 << 20)  # fewer weights are enough for many tokens
    monkeypatch.setattr(prefilter, "MIN_WEIGHTS_MANY_TOKENS", 1)
    monkeypatch.setattr(prefilter, "MANY_TOKENS", 500)
    sae.top(normal(499, 4), 2)
    assert len(calls) == 3
    sae.top(normal(500, 4), 2)
    assert calls[-1] == 500


def test_levels_keep_the_setting() -> None:
    sae = make_sae("matryoshka")
    sae.prefilter = "off"
    assert sae.first(2).prefilter == "off"


@pytest.mark.parametrize("package", ["onnxruntime", "onnx"])
def test_without_onnx_or_onnxruntime_one_warning_is_issued(package: str) -> None:
    """In a separate process, where the package cannot be imported."""
    if package == "onnx":
        pytest.importorskip("onnxruntime")  # which is imported first
    code = f"""
import sys, warnings
sys.modules["{package}"] = None
import torch
from torino import SAE
sae = SAE(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))
x = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first, second, want = (sae.top(x, 3, prefilter=mode) for mode in ("int8", "int8", "off"))
assert torch.equal(first.indices, want.indices) and torch.equal(first.values, want.values)
assert torch.equal(second.indices, want.indices) and torch.equal(second.values, want.values)
print([str(warning.message) for warning in caught])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f'on a CPU it needs {package}, which is not installed: pip install "torino[fast]"') == 1


def test_importing_torino_does_not_import_onnxruntime() -> None:
    code = "import sys, torino; assert not {'onnx', 'onnxruntime'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
