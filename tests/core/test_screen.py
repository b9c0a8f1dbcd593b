"""The int8 screen: what ``strongest`` gives, to the last bit, whatever the input; and what is kept of it where."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sae import KINDS, make_sae, options
from test_strongest import NAMES, Largest, agree, definition, inputs, normal, order_sensitive, same_bits, treacherous
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torino import SAE, BadParameter
from torino.core.io import read_arrays
from torino.core.topk import prefilter as room
from torino.core.topk.exact import exact_topk
from torino.core.topk.prefilter import SearchStats, prefiltered_topk, product_of, quantise, search, zero_for
from torino.core.topk.prefilter import backends as products
from torino.core.topk.prefilter import quantization as storing
from torino.datasets.bundled import example_sae, example_tokens

try:
    import onnxruntime  # noqa: F401

    MISSING = False
except ImportError:
    MISSING = True

needs_onnxruntime = pytest.mark.skipif(MISSING, reason="onnxruntime is not installed: pip install torino[fast]")
BACKENDS = ["torch", "int_mm", pytest.param("onnxruntime", marks=needs_onnxruntime)]
ZERO = torch.tensor(0.0)


def by_screen(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    k: int,
    floor: Tensor = ZERO,
    backend: Any = "torch",
    told: Any = None,
    chunk: int = products.CHUNK,
) -> tuple[Tensor, Tensor]:
    held = quantise(w, b, zero_for(backend))
    return prefiltered_topk(x, w, b, k, floor, held, product_of(backend, held.levels, int(held.zero), chunk), told=told)


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


# ---------------------------------------------------------------------- products of whole numbers


@pytest.mark.parametrize("zero", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(32, 64, 1), (64, 64, 7), (96, 128, 40), (32, 4096, 9)])
def test_products_are_exact(backend: Any, shape: tuple[int, int, int], zero: int) -> None:
    if zero > zero_for(backend):
        pytest.skip("products of 8-bit weights are not exact on this processor, and not used")
    c, d, n = shape
    random = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 2 * zero, (c, d), generator=random).byte()
    tokens = torch.randint(-127, 128, (n, d), generator=random).char()
    weights[0], weights[1], tokens[0] = 2 * zero - 1, 1, 127  # the largest sums there are
    wanted = tokens.long() @ (weights.long() - zero).T
    for chunk in (32, 64, 4096):
        product = product_of(backend, weights, zero, chunk)
        taken = product.take(tokens)
        for start in range(0, c, chunk):
            rows = min(chunk, c - start)
            got = product.scores(taken, start, torch.empty(n, rows, dtype=torch.int32))
            assert got.shape == (n, 32, rows // 32)
            assert torch.equal(got.transpose(1, 2).flatten(1).long(), wanted[:, start : start + rows])


@needs_onnxruntime
@pytest.mark.parametrize(("most", "zero"), [(2**17, 128), (2**15 - 1, 64), (100, None)])
def test_a_product_that_saturates_is_not_trusted(monkeypatch: pytest.MonkeyPatch, most: int, zero: int | None) -> None:
    """As on processors that add pairs in 16 bits: 8-bit weights are then given up, and in the end the screen is."""

    class Saturating(products.ByOnnxruntime):
        def __init__(self, levels: Tensor, zero: int, chunk: int) -> None:
            super().__init__(levels, zero, chunk)
            self.saturates = 2 * int(levels.max() - zero) * 255 >= most

        def scores(self, tokens: Tensor, start: int, place: Tensor) -> Tensor:
            made = super().scores(tokens, start, place)
            return made.clamp_(-most, most) if self.saturates else made

    here = zero_for("onnxruntime")  # a processor without VNNI saturates by itself
    monkeypatch.setitem(products._products, "onnxruntime", Saturating)
    monkeypatch.setattr(products, "_said", set())
    products._tried.cache_clear()
    try:
        if zero is None:
            with pytest.warns(UserWarning, match="not exact"):
                assert products.backend_for(torch.device("cpu")) is None
        else:
            assert products.backend_for(torch.device("cpu")) == "onnxruntime"
            assert zero_for("onnxruntime") == min(zero, here)
    finally:
        products._tried.cache_clear()


@pytest.mark.parametrize("zero", [64, 128])
def test_seven_bits_and_eight_give_the_same(zero: int) -> None:
    x, w, b = normal(20, 50), normal(900, 50, seed=1), normal(900, seed=2)
    held = quantise(w, b, zero)
    got = prefiltered_topk(x, w, b, 5, ZERO, held, product_of("torch", held.levels, zero))
    same_bits(got, exact_topk(x, w, b, 5, ZERO))


# ---------------------------------------------------------------------- the bound


@pytest.mark.parametrize("zero", [64, 128])
@pytest.mark.parametrize("name", [*NAMES, "order sensitive"])
def test_no_score_is_further_off_than_the_bound_says(name: str, zero: int) -> None:
    x, w, b = order_sensitive() if name == "order sensitive" else inputs()[name]
    held = quantise(w, b, zero)
    latents = search._latents(b, ZERO, held)
    tokens = search._tokens(x, held, latents.largest)
    whole = (held.levels.double() - zero) @ tokens.levels.double().T
    offset, norm, error, step = latents.rows[:, :, None].unbind(1)
    missing, length, scale = tokens.terms.T[:, None].unbind(0)
    middle, bound = whole * step * scale + offset, norm * missing + error * length
    true = (x.double() @ w.double().T + b.double()).T
    rows = held.order >= 0
    off = (middle[rows] - true[held.order[rows]]).abs()
    assert bool((off <= bound[rows] + tokens.margin)[:, tokens.fine].all())
    assert bool(tokens.fine.any())


def test_the_bound_is_tight_enough_to_be_of_use() -> None:
    x, w = normal(64, 256), unit(normal(3000, 256, seed=1))
    told: list[SearchStats] = []
    by_screen(x, w, torch.zeros(3000), 3, told=told)
    assert not told[0].plain.any()
    assert float(told[0].survivors.float().mean()) < 40


def test_rows_are_in_an_order_that_holds_each_latent_once() -> None:
    for c in (1, 31, 32, 33, 700, 1025):
        held = quantise(normal(c, 5), normal(c, seed=1))
        assert sorted(held.order[held.order >= 0].tolist()) == list(range(c))
        assert len(held.order) == len(held.levels) == -(-c // 32) * 32
        assert held.levels.shape[1] == 64


def test_a_rotation_protects_against_one_huge_channel() -> None:
    """Without it the step of a token would be that of the huge channel, and hundreds of latents would survive."""
    x, w = normal(40, 384), unit(normal(4000, 384, seed=1))
    x[:, 17] = 60.0
    w[:, 17] = 0
    told: list[SearchStats] = []
    agree(by_screen(x, w, torch.zeros(4000), 3, told=told), definition(x, w, torch.zeros(4000), 3, ZERO))
    assert float(told[0].survivors.float().mean()) < 150
    assert not told[0].plain.any()


# ---------------------------------------------------------------------- the answer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_that_of_the_plain_search(name: str, backend: Any) -> None:
    x, w, b = inputs()[name]
    dense = (x.double() @ w.double().T + b.double()).float()
    middle = dense.flatten().sort().values[dense.numel() // 2].clamp(min=0)  # an attained score: "above" is strict
    per_latent = dense[torch.arange(len(w)) % len(x), torch.arange(len(w))] * (torch.arange(len(w)) % 3 != 0)
    for k in {1, 2, 5, 32, len(w)}:
        if k <= min(len(w), 32):
            for floor in (ZERO, middle, torch.tensor(math.inf), per_latent.clamp(min=0)):
                same_bits(by_screen(x, w, b, k, floor, backend), exact_topk(x, w, b, k, floor))


@pytest.mark.parametrize("k", range(1, 33))
def test_every_k_up_to_32(k: int) -> None:
    x, w, b = normal(9, 70), normal(1237, 70, seed=1), normal(1237, seed=2)
    agree(by_screen(x, w, b, k), definition(x, w, b, k, ZERO))


def drawn(seed: int, like: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of every sort, sizes that are a multiple of nothing."""
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
    got = by_screen(x, w, b, k, floor, backend)
    same_bits(got, exact_topk(x, w, b, k, floor))
    if like == "tied":  # halves and whole numbers: float64 and float32 are exact, so ties are ties
        floor = (floor * 2).round() / 2
        agree(by_screen(x, w, b, k, floor, backend), definition(x, w, b, k, floor))
    # against float64, where the order of summation cannot decide: scores that are no near-ties in float32
    scores = (x.double() @ w.double().T + b.double()).masked_fill(~((x.double() @ w.double().T + b) > floor), -math.inf)
    most, best = scores.topk(min(k + 1, len(w)))
    clear = ((most[:, :-1] - most[:, 1:]) > 2e-7 * most[:, :1].abs()).all(1) & (most[:, k - 1] > -math.inf)
    clear &= most[:, -1] > -math.inf
    assert torch.equal(got[0][clear], best[clear, :k])


@pytest.mark.parametrize("seed", range(3))
def test_near_ties_that_float32_cannot_tell_apart(seed: int) -> None:
    x, w, b = treacherous(24, 1500, seed=10 * seed)
    agree(by_screen(x, w, b, 3), definition(x, w, b, 3, ZERO))
    floors = torch.full((1500,), 2.0**-10)
    agree(by_screen(x, w, b, 3, floors), definition(x, w, b, 3, floors))


def test_identical_latents_cost_time_and_give_the_lowest_indices() -> None:
    w = unit(torch.ones(6000, 3))
    w[:17] *= 0.5
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    told: list[SearchStats] = []
    indices, _ = by_screen(x, w, torch.zeros(6000), 5, told=told)
    assert indices.tolist() == [list(range(17, 22)), [-1] * 5, [-1] * 5]
    assert told[0].plain.tolist() == [True, False, False]


def test_tokens_at_the_edge_of_float32_are_left_to_the_plain_search() -> None:
    x = torch.cat([torch.full((2, 3), 1e30), torch.full((1, 3), -3e38), normal(2, 3), torch.full((1, 3), 1e-42)])
    w = torch.cat([normal(40, 3), normal(40, 3, seed=1) * 1e30, torch.zeros(3, 3)])
    for k in (1, 5):
        same_bits(by_screen(x, w, torch.zeros(83), k), exact_topk(x, w, torch.zeros(83), k, ZERO))
    x = torch.cat([normal(3, 3), torch.tensor([[math.inf, 0.0, 1.0], [math.nan, 0.0, 1.0]])])
    w = normal(40, 3)
    told: list[SearchStats] = []
    got = by_screen(x, w, torch.zeros(40), 2, told=told)
    assert told[0].plain.tolist() == [False] * 3 + [True] * 2
    same_bits(got, exact_topk(x, w, torch.zeros(40), 2, ZERO))


@pytest.mark.parametrize("name", ["random", "ties everywhere", "huge channel", "order sensitive"])
def test_batch_tiles_and_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = order_sensitive() if name == "order sensitive" else inputs()[name]
    want = exact_topk(x, w, b, 3, ZERO)
    alone = [by_screen(row[None], w, b, 3) for row in x]
    same_bits((torch.cat([i for i, _ in alone]), torch.cat([v for _, v in alone])), want)
    for size in ("ROWS", "PIECE"):
        with monkeypatch.context() as patch:
            patch.setattr(search, size, 3)
            same_bits(by_screen(x, w, b, 3), want)
    same_bits(by_screen(x, w, b, 3, chunk=32), want)
    same_bits(by_screen(x.T.contiguous().T, w, b, 3), want)


@pytest.mark.parametrize("width", [64, 192, 384])
def test_tokens_by_column_are_taken(width: int) -> None:
    x, w = normal(width, 9).T, normal(137, width, seed=1)
    same_bits(by_screen(x, w, torch.zeros(137), 3), exact_topk(x, w, torch.zeros(137), 3, ZERO))


def test_few_survivors_allowed_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = normal(30, 40), normal(2000, 40, seed=1), torch.zeros(2000)
    want = exact_topk(x, w, b, 4, ZERO)
    for patience in (0, 5, 7):
        monkeypatch.setattr(search, "PATIENCE", patience)
        told: list[SearchStats] = []
        same_bits(by_screen(x, w, b, 4, told=told), want)
        assert told[0].plain.any()
        assert bool(told[0].plain.all()) == (patience == 0)


@needs_onnxruntime
def test_threads_change_nothing_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = normal(50, 48), normal(3000, 48, seed=1), normal(3000, seed=2)
    want = exact_topk(x, w, b, 4, ZERO)
    before = torch.get_num_threads()
    try:
        for threads, least in ((2, 144), (2, 10), (3, 20), (4, 1)):  # all tokens in one thread, or shared
            torch.set_num_threads(threads)
            monkeypatch.setattr(search, "LEAST", least)
            same_bits(by_screen(x, w, b, 4, ZERO, "onnxruntime"), want)
            assert torch.get_num_threads() == threads
            with torch.inference_mode():
                same_bits(by_screen(x.clone(), w.clone(), b, 4, ZERO, "onnxruntime"), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_lower_matmul_precision_changes_nothing(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    x, w, b = normal(8, 70), normal(500, 70, seed=1), torch.zeros(500)
    try:
        torch.set_float32_matmul_precision(precision)
        agree(by_screen(x, w, b, 5), definition(x, w, b, 5, ZERO))
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_born_later_keep_their_own() -> None:
    """In a process of its own: searches from several threads at once, then a new thread."""
    code = """
import threading, torch
from torino.core.topk.prefilter import product_of, quantise, prefiltered_topk
torch.set_num_threads(2)
x, w = torch.randn(300, 8), torch.randn(900, 8)
held = quantise(w, torch.zeros(900), 64)
product = product_of("torch", held.levels, 64)
def search():
    for _ in range(5):
        prefiltered_topk(x, w, torch.zeros(900), 3, torch.tensor(0.0), held, product)
threads = [threading.Thread(target=search) for _ in range(3)]
for one in threads: one.start()
for one in threads: one.join()
seen = []
late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
late.start(); late.join()
assert seen == [2] and torch.get_num_threads() == 2, seen
import os
child = os.fork()
if not child:
    search()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_widths_whose_sums_leave_32_bits_are_searched_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "backend_for", lambda device: "torch")
    assert 127**2 * (room.WIDEST + 63) < 2**31 <= 127**2 * (room.WIDEST + 200)
    w = torch.zeros(37, room.WIDEST + 1)
    w[torch.arange(37), torch.arange(37)] = 1.0
    told: list[SearchStats] = []
    assert SAE(w).top(w[:3], 1, screen="int8", told=told).indices[:, 0].tolist() == [0, 1, 2]
    assert not told


class LargestDense(Largest):
    """Leaves out sparse tensors, which say the size that they would have if they were dense."""

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
    held = quantise(w, torch.zeros(c), 128)
    with LargestDense() as seen:
        indices, _ = prefiltered_topk(x, w, torch.zeros(c), 4, floor, held, product_of("torch", held.levels, 128))
    assert seen.bytes <= w.nbytes, f"{seen.by} returned {seen.bytes / 2**20:.0f} MiB"
    rows = torch.tensor([0, 1, 574, 575])
    assert torch.equal(indices[rows], definition(x[rows], w, torch.zeros(c), 4, floor)[0])


def waves(n: int, c: int) -> tuple[Tensor, Tensor]:
    """Tokens that thousands of equal latents suit, which come after as many that are larger and suit none."""
    spike = torch.zeros(64)
    spike[0] = 1.0
    like = torch.nn.functional.normalize(torch.ones(64), dim=0)
    w = torch.cat([(2 * like).expand(c // 4, 64), spike.expand(c - c // 4, 64)]).contiguous()
    x = -spike.expand(n, 64).clone()
    x[: n // 4] = 3 * spike - 2 * like
    return x, w


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = waves(64, 20_000)
    most = 0
    collect = search._Search._collect

    def watched(self: Any, *rest: Any) -> None:
        nonlocal most
        collect(self, *rest)
        most = max(most, sum(len(part[0]) for part in [*self.open, *self.near]))

    monkeypatch.setattr(search._Search, "_collect", watched)
    want = exact_topk(x, w, torch.zeros(len(w)), 3, ZERO)
    same_bits(by_screen(x, w, torch.zeros(len(w)), 3), want)
    for room_ in (1 << 10, 64):
        most = 0
        monkeypatch.setattr(search, "ROOM", room_)
        same_bits(by_screen(x, w, torch.zeros(len(w)), 3, chunk=512), want)
        assert most <= room_ + 64 * search.PATIENCE


# ---------------------------------------------------------------------- SAE.top


@pytest.fixture
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product in floating point in the place of onnxruntime's, which may not be there."""
    monkeypatch.setattr(room, "backend_for", lambda device: "torch")


def same(one: Any, other: Any) -> None:
    same_bits((one.indices, one.values), (other.indices, other.values))
    assert torch.equal(one.peak, other.peak)


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize("rank", ["activation", "pre-threshold"])
@pytest.mark.parametrize("normalize", ["none", "layer_norm", "constant_norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_top_is_the_same_with_and_without(kind: str, normalize: str, rank: Any) -> None:
    sae = make_sae(kind, normalize=normalize)
    x = normal(30, sae.width, seed=3) * 3
    for k in (1, 3, 9, sae.latents):
        same(sae.top(x, k, rank=rank, screen="int8"), sae.top(x, k, rank=rank, screen="off"))


@pytest.mark.usefixtures("with_torch")
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 32))
def test_top_of_random_saes_is_the_same(seed: int, kind: str, k: int) -> None:
    c, d = 700 + seed % 41, 20 + seed % 7
    opts = {**options(kind), "groups": None}
    opts |= {"threshold": normal(c, seed=seed).abs()} if kind == "jumprelu" else {}
    sae = SAE(unit(normal(c, d, seed=seed)), normal(c, seed=seed + 1) / 9, b_dec=normal(d), kind=kind, **opts)  # type: ignore[arg-type]
    x = 3 * normal(12, d, seed=seed + 2)
    same(sae.top(x, k, screen="int8"), sae.top(x, k, screen="off"))


@pytest.mark.usefixtures("with_torch")
def test_real_tokens_give_the_same_at_every_level() -> None:
    sae = example_sae()
    x = torch.cat([tokens.patches for tokens in example_tokens()])[::5]
    for levels in range(1, len(sae.groups) + 1):
        small = sae.first(levels)
        for k in (1, 3):
            same(small.top(x, k, screen="int8"), small.top(x, k, screen="off"))


@needs_onnxruntime
def test_real_tokens_give_the_same_with_onnxruntime() -> None:
    sae, x = example_sae(), example_tokens()[0].patches
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))


@pytest.mark.usefixtures("with_torch")
def test_changed_weights_are_made_into_whole_numbers_again() -> None:
    sae, x = make_sae("relu"), normal(20, 4) * 3
    sae.top(x, 3, screen="int8")
    with torch.no_grad():
        sae.W_enc.mul_(-1)
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    sae.W_enc = normal(*sae.W_enc.shape, seed=5)
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    sae.W_enc.data[0] = 7.0
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    sae.W_enc.data.neg_()  # which no version tells of
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    sae.W_enc.data = sae.W_enc.data.flip(1).clone()
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    with torch.inference_mode():
        sae.W_enc.neg_()
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    sae.b_enc.add_(1.0)
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))


@pytest.mark.usefixtures("with_torch")
def test_an_sae_that_was_used_can_be_copied() -> None:
    sae, x = make_sae("relu"), normal(20, 4)
    want = sae.top(x, 3, screen="int8")
    same(copy.deepcopy(sae).top(x, 3, screen="int8"), want)
    sae.top(x, 3, screen="off")
    same(pickle.loads(pickle.dumps(sae)).top(x, 3, screen="int8"), want)


def test_a_screen_of_another_name_is_refused() -> None:
    sae = make_sae("relu")
    with pytest.raises(BadParameter, match="screen must be one of 'auto', 'int8', 'off', got 'fast'"):
        sae.top(normal(2, 4), 1, screen="fast")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- when it is taken


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the screen was given, each time it was."""
    seen: list[int] = []
    from torino import sae as module

    def watched(x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return prefiltered_topk(x, *rest, **options)

    monkeypatch.setattr(module, "screened", watched)
    monkeypatch.setattr(room, "backend_for", lambda device: "torch")
    return seen


def test_auto_waits_until_it_pays(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sae = make_sae("relu")
    sae.top(normal(100, 4), 2)
    assert taken == []  # too few weights
    monkeypatch.setattr(room, "PAYS_FROM", 1)
    monkeypatch.setattr(room, "MAKES_AFTER", 400)
    for _ in range(3):
        sae.top(normal(100, 4), 2)
    assert taken == [100]  # 400 tokens in all by then
    sae.top(normal(room.PAYS_TOKENS - 1, 4), 2)
    assert taken == [100]
    sae.top(normal(room.PAYS_TOKENS, 4), 2)
    assert taken == [100, room.PAYS_TOKENS]
    sae.top(normal(100, 4), 2, screen="off")
    sae.screen = "off"
    sae.top(normal(100, 4), 2)
    assert len(taken) == 2
    sae.top(normal(3, 4), 2, screen="int8")
    assert taken[-1] == 3
    sae.W_enc = sae.W_enc.clone()
    sae.screen = "auto"
    sae.top(normal(100, 4), 2)  # other weights, so they must pay anew
    assert len(taken) == 3
    monkeypatch.setattr(room, "PAYS_FROM", 1 << 20)  # and fewer weights will do for many tokens
    monkeypatch.setattr(room, "PAYS_MANY", (1, 500))
    sae.top(normal(499, 4), 2)
    assert len(taken) == 3
    sae.top(normal(500, 4), 2)
    assert taken[-1] == 500


def test_levels_keep_the_setting() -> None:
    sae = make_sae("matryoshka")
    sae.screen = "off"
    assert sae.first(2).screen == "off"


def test_without_onnxruntime_one_line_says_so_once() -> None:
    """In a process of its own, where onnxruntime cannot be imported."""
    code = """
import sys, warnings
sys.modules["onnxruntime"] = None
import torch
from torino import SAE
sae = SAE(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))
x = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    one, two, three = sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off")
assert torch.equal(one.indices, three.indices) and torch.equal(one.values, three.values)
print([str(one.message) for one in said])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("onnxruntime is not installed: pip install torino[fast]") == 1


def test_importing_torino_does_not_import_onnxruntime() -> None:
    code = "import sys, torino; assert 'onnxruntime' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---------------------------------------------------------------------- kept beside the SAE


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an SAE, whose whole numbers are kept although they are few."""
    monkeypatch.setattr(storing, "KEEP_FROM", 1)
    monkeypatch.setattr(room, "backend_for", lambda device: "torch")
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    make_sae("relu").save(tmp_path / "sae")
    return tmp_path / "sae"


def count_makings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    def watched(weight: Tensor, bias: Tensor, zero: int) -> Any:
        made.append(len(weight))
        return quantise(weight, bias, zero)

    monkeypatch.setattr(storing, "quantise", watched)
    return made


def test_whole_numbers_are_made_once_and_read_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = count_makings(monkeypatch), normal(20, 4) * 3
    want = SAE.load(kept).top(x, 3, screen="int8")
    (file,) = kept.glob(".screen8-24x4-*.safetensors")
    for _ in range(2):
        same(SAE.load(kept).top(x, 3, screen="int8"), want)
    assert made == [24]
    assert SAE.load(kept).home == kept  # the file is not taken for an SAE
    assert not list(kept.glob("*.tmp"))
    assert [path.name for path in kept.iterdir() if path.name.startswith(".")] == [file.name]


def test_levels_of_an_sae_have_files_of_their_own(kept: Path) -> None:
    make_sae("matryoshka").save(kept)
    x = normal(20, 4) * 3
    for levels in (1, 2, 3):
        sae = SAE.load(kept, levels=levels)
        same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    assert len(list(kept.glob(".screen8-*"))) == 3


def test_files_that_are_damaged_or_of_other_weights_are_made_anew(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(20, 4) * 3
    SAE.load(kept).top(x, 3, screen="int8")
    (file,) = kept.glob(".screen8-*")
    good, numbers = file.read_bytes(), {name: value.clone() for name, value in read_arrays(file)[0].items()}
    made = count_makings(monkeypatch)
    flipped = bytearray(good)
    flipped[-100] ^= 255  # in the numbers, not in the header
    for n, bad in enumerate((b"", good[: len(good) // 2], bytes(flipped), b"{}" * 50), start=1):
        file.write_bytes(bad)
        sae = SAE.load(kept)
        same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
        assert len(made) == n
        assert all(torch.equal(value, numbers[name]) for name, value in read_arrays(file)[0].items())
    (kept / "sae.safetensors").write_bytes(_other(kept.parent / "other"))  # the file of the SAE that was here before
    (kept / "card.json").write_bytes((kept.parent / "other" / "card.json").read_bytes())
    sae = SAE.load(kept)
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    assert len(made) == 5
    assert len(list(kept.glob(".screen8-*"))) == 2
    sae.save(kept)  # takes them along
    assert not list(kept.glob(".screen8-*"))


def _other(folder: Path) -> bytes:
    make_sae("relu", seed=5).save(folder)
    return (folder / "sae.safetensors").read_bytes()


def test_weights_that_were_changed_leave_no_file(kept: Path) -> None:
    sae, x = SAE.load(kept), normal(20, 4) * 3
    sae.top(x, 3, screen="int8")
    for _ in range(3):
        sae.W_enc = sae.W_enc * 1.5
        same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    assert len(list(kept.glob(".screen8-*"))) == 1


def test_a_cache_that_cannot_be_entered_is_no_fault(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torino import BadFile

    def refuse(*_: Any) -> Any:
        raise PermissionError("no")

    x = normal(20, 4) * 3
    want = SAE.load(kept).top(x, 3, screen="off")
    monkeypatch.setattr(storing, "write_arrays", lambda *_: (_ for _ in ()).throw(BadFile("Cannot write.")))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        weight, bias = make_sae("relu").W_enc, make_sae("relu").b_enc
        assert len(storing.quantised_of(weight, bias, kept, 128).levels) == 32
    monkeypatch.delenv("TORINO_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home")))
    sae = make_sae("relu")
    sae.home = kept
    same(sae.top(x, 3, screen="int8"), want)


def test_where_the_folder_cannot_be_written_the_cache_is_taken(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torino import BadFile
    from torino.core.io import write_arrays

    refused: list[Path] = []

    def only_cache(path: Path, *rest: Any) -> Path:
        if path.parent == kept or refused == [Path()]:
            refused.append(path)
            raise BadFile("Cannot write.")
        return write_arrays(path, *rest)

    monkeypatch.setattr(storing, "write_arrays", only_cache)
    made, x = count_makings(monkeypatch), normal(20, 4) * 3
    for _ in range(2):
        sae = SAE.load(kept)
        same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    assert made == [24]
    assert len(list((kept.parent / "cache").glob("screen8-24x4-*.safetensors"))) == 1
    assert not list(kept.glob(".screen*"))
    # and where that cannot be written either, nothing is kept, and nothing fails
    monkeypatch.setattr(storing, "write_arrays", lambda *rest: (_ for _ in ()).throw(BadFile("Cannot write.")))
    monkeypatch.setenv("TORINO_CACHE", str(kept.parent / "other"))
    sae = SAE.load(kept)
    same(sae.top(x, 3, screen="int8"), sae.top(x, 3, screen="off"))
    assert made == [24, 24]


def test_an_sae_made_in_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "KEEP_FROM", 1)
    monkeypatch.setattr(room, "backend_for", lambda device: "torch")
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_sae("relu").top(normal(20, 4), 3, screen="int8")
    assert not list(tmp_path.iterdir())
