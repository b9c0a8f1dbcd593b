"""Exact top-k search with an int8 prefilter: integer products select candidates, and a bound excludes all others.

With a token x = a·q + x' and an encoder row w = b·p + w', where q and p are integers,

    ⟨x, w⟩ = a·b·⟨q, p⟩ + ⟨x', w⟩ + a·⟨q, w'⟩,  so  |⟨x, w⟩ − a·b·⟨q, p⟩| ≤ ‖x'‖·‖w‖ + a·‖q‖·‖w'‖.

A latent cannot be in the result if ``a·b·⟨q, p⟩`` plus bias plus this bound is below the k-th best score. The remaining
latents, a few per token, are scored by the same code as in :mod:`torino.core.topk.exact`, so the result is identical
bit by bit. Everything except the product itself is computed in float64, and the bounds include rounding errors. Tokens
with too many candidates, or with values near the limits of float32, are passed to the exact search.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torino.core.topk.exact import SILENT, exact_topk, input_rounding, merge, pair_scores
from torino.core.topk.prefilter.backends import LANE, MAX_LEVEL, Int8Product
from torino.core.topk.prefilter.quantization import QuantizedEncoder

ROWS = 576  # tokens per tile, an image of 24 × 24 patches; each thread searches one tile at a time
MIN_ROWS = 64  # minimum number of tokens per thread, because each tile reads all weights
UPDATE_STEPS = frozenset({1, 2, *(4**i for i in range(1, 16))})  # chunks after which the bar is raised
LANES_AT_ONCE = 1 << 12  # lanes that are expanded at once; 0.5 MiB
MAX_SURVIVORS = 512  # candidates per token above which the exact search is faster
MAX_PENDING = 1 << 17  # candidates of a tile that may wait for their float32 product; 4 MiB
LANE_BITS = LANE.bit_length() - 1


class SearchStats(NamedTuple):
    """Statistics of the prefilter for each token of a tile.

    Attributes
    ----------
    survivors : Tensor of shape (N,), int64
        Number of latents that the int8 bound could not exclude and that were multiplied in float32.
    fallback : Tensor of shape (N,), bool
        Whether the token was passed to the exact search.
    """

    survivors: Tensor
    fallback: Tensor


class _LatentBounds(NamedTuple):
    """Terms of the bound for encoder rows, in the order of the quantized rows; all float64."""

    rows: Tensor  # (C', 4): bias (−inf for padding), norm, error and scale
    lanes: Tensor  # (4, lanes): 1 and the largest bias, norm and error of each lane, divided by its scale
    lanes_above_floor: Tensor | None  # the same with bias minus floor, if each latent has its own floor
    largest_bias: float  # largest absolute value


class _TokenBounds(NamedTuple):
    """Quantized tokens and the terms of their bound."""

    levels: Tensor  # (n, D') int8
    terms: Tensor  # (n, 3): ‖x'‖ (to be multiplied by norm), a·‖q‖ (to be multiplied by error) and the scale a
    margin: Tensor  # (n,): rounding error of a score
    slack: Tensor  # (n,): error of a float32 product
    valid: Tensor  # (n,) bool: whether the bound holds


@torch.no_grad()
def prefiltered_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    floor: Tensor,
    quantized: QuantizedEncoder,
    product: Int8Product,
    *,
    chunk: int | None = None,
    stats: list[SearchStats] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same result as :func:`torino.core.topk.exact.exact_topk`, bit by bit.

    On a CPU the tokens are divided among as many threads as torch uses. The number of threads of the process is not
    changed.

    Parameters
    ----------
    x, weight, bias, k, floor, chunk
        As in :func:`torino.core.topk.exact.exact_topk`. The floor must not be negative.
    quantized : QuantizedEncoder
        The quantized ``weight``; its levels are not read.
    product : Int8Product
        Product with the levels of ``quantized``.
    stats : list of SearchStats, optional
        One entry per tile is appended.
    """
    _discard_sparse_warning()
    x = x.contiguous()
    threads = torch.get_num_threads() if x.device.type == "cpu" else 1
    workers = max(1, min(threads, len(x) // MIN_ROWS))
    tiles = x.split(min(ROWS, -(-len(x) // workers)))

    @torch.no_grad()  # gradient mode is local to a thread
    def search(tile: Tensor, latents: _LatentBounds) -> _TileSearch:
        return _TileSearch(tile, weight, bias, k, floor, quantized, latents).run(product)

    if workers == 1:
        latents = _latent_bounds(bias, floor, quantized)
        searches = [search(tile, latents) for tile in tiles]
    else:
        # the bounds are computed in the pool too: OpenMP threads of the calling thread would slow down the workers
        with ThreadPoolExecutor(workers, "torino-prefilter", _use_one_openmp_thread) as pool:
            latents = pool.submit(_latent_bounds, bias, floor, quantized).result()
            searches = list(pool.map(search, tiles, repeat(latents)))
    indices = torch.cat([tile.indices for tile in searches])
    values = torch.cat([tile.values for tile in searches])
    fallback = torch.cat([tile.fallback for tile in searches])
    if bool(fallback.any()):
        norm = quantized.largest_norm
        indices[fallback], values[fallback] = exact_topk(
            x[fallback], weight, bias, k, floor, largest_norm=norm, chunk=chunk
        )
    if stats is not None:
        stats += [SearchStats(tile.survivors, tile.fallback) for tile in searches]
    silent = values == -torch.inf
    return indices.masked_fill(silent, SILENT), values.masked_fill(silent, 0.0)


def _use_one_openmp_thread() -> None:
    """Limit torch operations of the calling thread to one OpenMP thread; the setting is local to the thread.

    Without the limit each worker would start as many threads as torch uses. If torch.set_num_threads was called
    before, matrix products of MKL ignore the limit; the only large one is the rotation of the tokens of a tile.
    """
    torch.get_num_threads()  # torch initializes the setting of a new thread on first use; later it would undo the limit
    controller = _openmp_controller()
    if controller is not None:
        controller.limit(limits=1)


@lru_cache(1)
def _openmp_controller() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:  # an optional dependency: without it the search is correct but may be slower
        return None
    return ThreadpoolController().select(user_api="openmp")


@torch.no_grad()
def _latent_bounds(bias: Tensor, floor: Tensor, quantized: QuantizedEncoder) -> _LatentBounds:
    latent = quantized.order.clamp(min=0)
    offset = bias.double()[latent].masked_fill(quantized.order < 0, -torch.inf)

    def lane_terms(first: Tensor) -> Tensor:
        parts = [part.view(-1, LANE).amax(1) for part in (first, quantized.norm, quantized.error)]
        return torch.stack([torch.ones_like(quantized.scale), *parts]) / quantized.scale

    above_floor = lane_terms(offset - floor.double()[latent]) if floor.ndim else None
    rows = torch.stack([offset, quantized.norm, quantized.error, quantized.scale.repeat_interleave(LANE)], 1)
    return _LatentBounds(rows, lane_terms(offset), above_floor, float(bias.abs().max()))


def _token_bounds(x: Tensor, quantized: QuantizedEncoder, largest_bias: float) -> _TokenBounds:
    """Quantize tokens and compute the terms of their bound."""
    levels, terms = _quantize_tokens(x, quantized)
    terms = terms.double()
    norm = terms[:, 3]
    size = norm * quantized.largest_norm + largest_bias  # upper bound of all scores
    # the definition rounds scores to float32; the rounding of float64 is much smaller
    margin = torch.where(size > 0, 2.0**-21 * size + 2.0**-140, 0.0)
    slack = (_sum_rounding(x.shape[1]) + input_rounding(x)) * size
    slack += x.shape[1] * 2.0**-126 * (1 + norm + quantized.largest_norm)  # denormal numbers may be flushed to zero
    valid = terms.isfinite().all(1) & (size < 2.0**126)
    return _TokenBounds(levels, torch.where(valid[:, None], terms[:, :3], 1.0), margin, slack, valid)


def _quantize_tokens(x: Tensor, quantized: QuantizedEncoder) -> tuple[Tensor, Tensor]:
    """Return integers (n, D') of tokens; and ‖x'‖, a·‖q‖, a and ‖x‖ of each token, shape (n, 4)."""
    rotated = quantized.rotate(x)
    largest = rotated.abs().amax(1, keepdim=True)
    usable = (largest > 1e-30) & largest.isfinite()
    scale = torch.where(usable, largest / MAX_LEVEL, 1.0)  # a token of zeros can have any scale
    levels = (rotated * torch.where(usable, MAX_LEVEL / largest, 0.0)).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
    nonzero = x.any(1)
    error = _norm_bound(torch.addcmul(rotated, levels, scale, value=-1.0), nonzero)
    norm, length = _norm_bound(x, nonzero), _norm_bound(levels, nonzero) * scale[:, 0]
    block = quantized.block
    # float32 rounds in the rotation, by sums of `block` terms, and in the difference above
    error += ((_sum_rounding(block) + input_rounding(x)) * block + 2.0**-22 * block**0.5) * norm
    terms = torch.stack([error, length, scale[:, 0], norm], 1) * (1 + 2.0**-20)
    terms[:, 2] = scale[:, 0]
    return levels.char(), terms


def _norm_bound(rows: Tensor, nonzero: Tensor) -> Tensor:
    """Return upper bounds of the norms of rows: float32 may round, and lose squares below 2^-126."""
    norm = torch.linalg.vector_norm(rows, dim=1)
    smallest = 2.0**-60 * rows.shape[1] ** 0.5
    return norm * (1 + _sum_rounding(rows.shape[1])) + torch.where(nonzero, smallest, 0.0)


def _sum_rounding(terms: int) -> float:
    """Return the error of a float32 sum of this many products, relative to the sum of their absolute values."""
    unit = (terms + 2) * 2.0**-24
    return unit / (1 - unit)


class _TileSearch:
    """The search for one tile of tokens.

    Candidates are pairs of token and latent with a lower and an upper bound of their score. ``int8_pairs`` have bounds
    from integer products. The likely ones, and at the end all that are left, are multiplied in float32 and become
    ``float32_pairs``, with much tighter bounds. Those that are left at the end are scored by the definition. ``bar`` is
    the score that a latent of each token must be able to reach: the k-th best lower bound or the floor; +inf for tokens
    that are passed to the exact search (``fallback``).
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        k: int,
        floor: Tensor,
        quantized: QuantizedEncoder,
        latents: _LatentBounds,
    ) -> None:
        self.x, self.weight, self.bias, self.k, self.floor = x, weight, bias, k, floor
        self.quantized, self.latents = quantized, latents
        self.tokens = _token_bounds(x, quantized, latents.largest_bias)
        self.indices = torch.full((len(x), k), SILENT, device=x.device)
        self.values = x.new_full((len(x), k), -torch.inf)
        self.lower = self.values.double()  # the k best lower bounds, decreasing
        self.first_latents = self.indices  # latents (n, ·) that are multiplied first and must not be added again
        self.pending_lanes: list[tuple[Tensor, ...]] = []  # token, lane, integer scores, what a score must exceed
        self.int8_pairs: list[tuple[Tensor, ...]] = []  # token, latent, estimate, upper bound
        self.float32_pairs: list[tuple[Tensor, ...]] = []  # token, latent, upper bound
        self.pending = 0  # number of int8 pairs
        self.survivors = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        self.fallback = ~self.tokens.valid
        self.bar = self.limits = torch.empty(0)
        self._update_bar()

    def run(self, product: Int8Product) -> _TileSearch:
        """Search all latents, chunk by chunk; after some chunks multiply the likely candidates in float32."""
        n, rows = len(self.x), product.rows
        buffer = torch.empty(n * min(rows, product.chunk), dtype=torch.int32, device=self.x.device)
        tokens = product.prepare(self.tokens.levels)
        for step, start in enumerate(range(0, rows, product.chunk), start=1):
            stop = min(start + product.chunk, rows)
            out = buffer[: n * (stop - start)].view(n, stop - start)
            self._collect(product.scores(tokens, start, out), slice(start // LANE, stop // LANE))
            if step in UPDATE_STEPS and stop < rows:
                self._refine()
                if bool(self.fallback.all()):
                    break
        del buffer
        self._refine()
        self._refine(last=True)
        token, latent, _ = (torch.cat(parts) for parts in zip(*self.float32_pairs, strict=True))
        scores = pair_scores(self.x, self.weight, self.bias, token, latent)
        keep = scores > self._floor(latent)
        self.indices, self.values = merge(self.indices, self.values, token[keep], latent[keep], scores[keep])
        return self

    def _collect(self, scores: Tensor, lanes: slice) -> None:
        """Collect the lanes of integer ``scores``, (n, LANE, lanes), in which a latent may reach the bar."""
        peak = scores.amax(1)
        if lanes.start == 0:
            self._multiply_first(scores, peak)
        # what an integer score must exceed, by the bound of its lane
        required = _sum_of_products(self.limits, self.latents.lanes[:, lanes])
        if self.latents.lanes_above_floor is not None:
            above_floor = self.latents.lanes_above_floor[:, lanes]
            required = torch.maximum(required, _sum_of_products(self._limits(-self.tokens.margin), above_floor))
        hits = _nonzero(peak > required)
        crowded = len(hits[0]) > LANES_AT_ONCE
        for token, lane in zip(*(part.split(LANES_AT_ONCE) for part in hits), strict=True):
            if crowded:
                active = ~self.fallback[token]
                lane, token = lane[active], token[active]
            if sum(len(part[0]) for part in self.pending_lanes) + len(token) > LANES_AT_ONCE:
                self._expand_lanes()
            self.pending_lanes.append((token, lane + lanes.start, scores[token, :, lane], required[token, lane]))
            if crowded:
                self._expand_lanes(crowded)

    def _expand_lanes(self, crowded: bool = False) -> None:
        """Turn the collected lanes into pairs, each with its own bound."""
        if not self.pending_lanes:
            return
        token, lane, levels, required = (torch.cat(parts) for parts in zip(*self.pending_lanes, strict=True))
        self.pending_lanes.clear()
        pair, slot = _nonzero(levels > required[:, None])
        token, row = token[pair], lane[pair] * LANE + slot
        offset, norm, error, scale = self.latents.rows[row].unbind(1)
        token_error, length, token_scale = self.tokens.terms[token].unbind(1)
        estimate = levels[pair, slot] * (token_scale * scale) + offset
        upper = estimate + norm * token_error + error * length
        latent = self.quantized.order[row]
        if self.floor.ndim:
            upper.masked_fill_(upper <= self._floor(latent) - self.tokens.margin[token], -torch.inf)
        upper.masked_fill_((self.first_latents[token] == latent[:, None]).any(1), -torch.inf)
        self.int8_pairs.append((token, latent, estimate, upper))
        self.pending += len(token)
        if crowded:
            self._drop_crowded(self.int8_pairs, MAX_SURVIVORS)
        if self.pending > MAX_PENDING:
            self._refine()
        if self.pending > MAX_PENDING:
            self._drop_crowded(self.int8_pairs, MAX_PENDING // len(self.x))
            self._refine()

    def _drop_crowded(self, pairs: list[tuple[Tensor, ...]], limit: int) -> bool:
        """Pass tokens with more than ``limit`` pairs to the exact search; return whether there are any."""
        crowded = torch.cat([part[0] for part in pairs]).bincount(minlength=len(self.x)) > limit
        if not bool(crowded.any()):
            return False
        self.fallback |= crowded
        self._update_bar()
        return True

    def _limits(self, least: Tensor) -> Tensor:
        """Return factors (n, 4) whose product with those of a lane is the integer score that means ``least``."""
        error, length, scale = self.tokens.terms.unbind(1)
        return torch.stack([least.clamp(max=1e200), -torch.ones_like(least), -error, -length], 1) / scale[:, None]

    def _multiply_first(self, scores: Tensor, peak: Tensor) -> None:
        """Multiply the best latents of the best lanes of the first chunk, to get an initial bar."""
        above_floor = self.latents.lanes_above_floor  # silent latents do not raise the bar
        terms = self.latents.lanes if above_floor is None else above_floor
        lanes = peak.shape[1]
        estimate = (peak * self.tokens.terms[:, 2:] + terms[1, :lanes]) * self.quantized.scale[:lanes]
        lane = estimate.topk(min(self.k, lanes), dim=1).indices  # (n, lanes)
        token = torch.arange(len(self.x), device=self.x.device).repeat_interleave(lane.shape[1])
        parts = zip(token.split(LANES_AT_ONCE), lane.view(-1).split(LANES_AT_ONCE), strict=True)
        slot = torch.cat([scores[i, :, j].argmax(1) for i, j in parts])
        latent = self.quantized.order[lane.view(-1) * LANE + slot]
        usable = (latent != SILENT) & ~self.fallback[token]
        self._multiply(token[usable], latent[usable])
        self._update_bar()
        self.first_latents = latent.view(lane.shape)

    def _refine(self, last: bool = False) -> None:
        """Multiply likely pairs in float32 (all pairs if ``last``), raise the bar and drop the pairs below it."""
        self._expand_lanes()
        if self.int8_pairs:
            self._drop_crowded(self.int8_pairs, MAX_SURVIVORS)
            token, latent, estimate, upper = pairs = tuple(
                torch.cat(parts) for parts in zip(*self.int8_pairs, strict=True)
            )
            selected = upper > self.bar[token]
            if not last:
                selected &= (estimate > self.bar[token]) & (estimate > self._floor(latent))
            self._multiply(token[selected], latent[selected])
            self._update_bar()
            rest = (upper > self.bar[token]) & ~selected
            self.int8_pairs = [tuple(part[rest] for part in pairs)]
            self.pending = len(self.int8_pairs[0][0])
        for _ in range(2):  # a second time if tokens were dropped
            pairs = tuple(torch.cat(parts) for parts in zip(*self.float32_pairs, strict=True))
            rest = pairs[2] > self.bar[pairs[0]]
            self.float32_pairs = [tuple(part[rest] for part in pairs)]
            if not self._drop_crowded(self.float32_pairs, MAX_SURVIVORS):
                break

    def _multiply(self, token: Tensor, latent: Tensor) -> None:
        """Add pairs to ``float32_pairs``: compute their float32 products and bounds."""
        if not len(token):
            self.float32_pairs.append((token, latent, latent.double()))
            return
        order = _stable_order(token, len(self.x))
        token, latent = token[order], latent[order]
        count = token.bincount(minlength=len(self.x))
        start = count.cumsum(0) - count
        estimate = _pair_products(self.x, self.weight, start, latent).double() + self.bias[latent]
        slack = self.tokens.slack[token]
        self.float32_pairs.append((token, latent, estimate + slack))
        self.survivors += count
        lower = estimate - slack
        lower.masked_fill_(lower - self.tokens.margin[token] <= self._floor(latent), -torch.inf)
        rank = torch.arange(len(token), device=token.device) - start[token]
        bounds = lower.new_full((len(self.x), int(count.max())), -torch.inf)
        bounds[token, rank] = lower
        self.lower = torch.cat([self.lower, bounds], 1).topk(self.k, dim=1).values

    def _floor(self, latent: Tensor) -> Tensor:
        return self.floor[latent] if self.floor.ndim else self.floor

    def _update_bar(self) -> None:
        least = torch.maximum(self.lower[:, -1], self.floor.double().min())
        self.bar = (least - self.tokens.margin).masked_fill(self.fallback, torch.inf)
        self.limits = self._limits(self.bar)


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` for a few columns of ``left``, without the threads of a matrix library."""
    total = left[:, :1] * right[0]
    for i in range(1, len(right)):
        total.addcmul_(left[:, i : i + 1], right[i])
    return total


def _nonzero(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the nonzero entries of a matrix; numpy is faster for sparse masks."""
    if mask.device.type != "cpu":
        row, column = mask.nonzero(as_tuple=True)
        return row, column
    index = torch.from_numpy(np.flatnonzero(mask.contiguous().numpy()))
    if mask.shape[1] == LANE:
        return index >> LANE_BITS, index & (LANE - 1)
    row = index // mask.shape[1]
    return row, index - row * mask.shape[1]


def _stable_order(token: Tensor, n: int) -> Tensor:
    """Return the stable sorting order of tokens; numpy uses radix sort for 16-bit integers."""
    if token.device.type != "cpu" or n > 1 << 16:
        return token.argsort(stable=True)
    return torch.from_numpy(np.argsort(token.numpy().astype(np.uint16), kind="stable"))


def _pair_products(x: Tensor, weight: Tensor, start: Tensor, latent: Tensor) -> Tensor:
    """Return ⟨x[i], weight[j]⟩ in float32 without gathering rows; the latents j of token i begin at ``start[i]``."""
    offsets = torch.cat([start, start.new_tensor([len(latent)])])
    size = (len(x), len(weight))
    pattern = torch.sparse_csr_tensor(offsets, latent, x.new_zeros(len(latent)), size, check_invariants=False)
    return torch.sparse.sampled_addmm(pattern, x, weight.T, beta=0.0).values()


@lru_cache(1)
def _discard_sparse_warning() -> None:
    """Trigger and discard torch's one-time beta warning for sparse CSR tensors; warning filters are not thread-safe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
