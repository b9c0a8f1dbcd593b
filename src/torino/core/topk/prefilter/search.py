"""The search behind the screen: whole numbers find the candidates, a bound proves that there are no others.

With a token x = a·q + x' and an encoder row w = b·p + w', q and p in whole numbers,

    ⟨x, w⟩ = a·b·⟨q, p⟩ + ⟨x', w⟩ + a·⟨q, w'⟩,  so  |⟨x, w⟩ − a·b·⟨q, p⟩| ≤ ‖x'‖·‖w‖ + a·‖q‖·‖w'‖.

A latent whose ``a·b·⟨q, p⟩`` plus bias plus this bound stays below the k-th best score found cannot be in the answer.
The others, a handful a token, are scored as :mod:`torino.core.topk.exact` defines it, by the same code, so the answer is the
same to the last bit. All but the product itself is done in float64, and bounds hold for what is computed, rounding
included. Tokens with too many survivors, or at the edge of float32, are left to the plain search.
"""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torino.core.topk.exact import SILENT, exact_topk, input_rounding, merge, pair_scores
from torino.core.topk.prefilter.backends import LANE, LARGEST, Product
from torino.core.topk.prefilter.quantization import Quantised

ROWS = 576  # tokens a tile, an image of 24 × 24; each thread has a tile of its own
LEAST = 64  # tokens a tile: each reads all of the weights
TURNS = frozenset({1, 2, *(4**i for i in range(1, 16))})  # chunks after which likely pairs are multiplied
PIECE = 1 << 12  # lanes that are looked into at once; 0.5 MiB
PATIENCE = 512  # survivors of a token, from which on the plain search is faster
ROOM = 1 << 17  # survivors of a tile that may wait to be multiplied; 4 MiB
SHIFT = LANE.bit_length() - 1


class SearchStats(NamedTuple):
    """What became of each token, for those who measure.

    Attributes
    ----------
    survivors : Tensor of shape (N,), int64
        Latents that were multiplied in float32, because the bound of the int8 product could not exclude them.
    plain : Tensor of shape (N,), bool
        Left to the plain search.
    """

    survivors: Tensor
    plain: Tensor


class _Latents(NamedTuple):
    """The encoder rows in the order of the screen; all float64."""

    rows: Tensor  # (C', 4): bias, −inf where a row is no latent; norm, error and step
    lanes: Tensor  # (lanes, 4): 1 and the largest bias, norm and error of a lane, over its step
    above: Tensor | None  # the same with bias less floor, where each latent has a floor of its own
    largest: float  # of all |bias|


class _Tokens(NamedTuple):
    levels: Tensor  # (n, D') int8
    terms: Tensor  # (n, 3): ‖x'‖ and a·‖q‖, to be multiplied by norm and error; and the scale a
    margin: Tensor  # (n,): how far a score may be rounded
    slack: Tensor  # (n,): how far a float32 product may be off
    fine: Tensor  # (n,) bool: the bound holds


@torch.no_grad()
def prefiltered_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    floor: Tensor,
    held: Quantised,
    product: Product,
    *,
    chunk: int | None = None,
    told: list[SearchStats] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what :func:`torino.core.topk.exact.strongest` returns, to the last bit.

    Parameters
    ----------
    x, weight, bias, k, floor, chunk
        As there. The floor is nowhere below 0.
    held : Quantised
        ``weight`` in whole numbers; the levels themselves are not read.
    product : Product
        Multiplies by them, see :mod:`torino.core.topk.prefilter.backends`.
    told : list of SearchStats, optional
        Takes one entry a tile.
    """
    _hear_out()
    x = x.contiguous()
    with _alone if x.device.type == "cpu" else nullcontext(1) as threads:
        workers = max(1, min(threads, len(x) // LEAST))
        tiles = x.split(min(ROWS, -(-len(x) // workers)))
        latents = _latents(bias, floor, held)

        @torch.no_grad()  # which other threads do not know of
        def search(tile: Tensor) -> _Search:
            return _Search(tile, weight, bias, k, floor, held, latents).run(product)

        if workers == 1:
            done = [search(tile) for tile in tiles]
        else:
            with ThreadPoolExecutor(workers, "torino-screen", torch.set_num_threads, (1,)) as pool:
                done = list(pool.map(search, tiles))
    found = [(one.indices, one.values, one.lost) for one in done]
    indices, values, lost = (torch.cat(parts) for parts in zip(*found, strict=True))
    if bool(lost.any()):
        norm = held.largest_norm
        indices[lost], values[lost] = exact_topk(x[lost], weight, bias, k, floor, largest_norm=norm, chunk=chunk)
    if told is not None:
        told += [SearchStats(one.survivors, one.lost) for one in done]
    silent = values == -torch.inf
    return indices.masked_fill(silent, SILENT), values.masked_fill(silent, 0.0)


class _Alone:
    """While any search runs, torch has one thread, so that each of Python's threads has: much is too small to be split.

    The number is torch's and MKL's for the whole process, and new threads take it over for good, so the first search
    notes it and every one sets it back. (A thread that is born during a search keeps one thread all the same.)
    """

    def __init__(self) -> None:
        self.lock, self.searches, self.before = threading.Lock(), 0, 1

    def __enter__(self) -> int:
        """Return how many threads there were."""
        with self.lock:
            if not self.searches:
                self.before = torch.get_num_threads()
            self.searches += 1
            torch.set_num_threads(1)
            return self.before

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.searches -= 1
            torch.set_num_threads(self.before)


_alone = _Alone()


def _latents(bias: Tensor, floor: Tensor, held: Quantised) -> _Latents:
    there, place = held.order >= 0, held.order.clamp(min=0)
    offset = bias.double()[place].masked_fill(~there, -torch.inf)

    def lanes(first: Tensor) -> Tensor:
        parts = [part.view(-1, LANE).amax(1) for part in (first, held.norm, held.error)]
        return torch.stack([torch.ones_like(held.step), *parts], 1) / held.step[:, None]

    above = lanes(offset - floor.double()[place]) if floor.ndim else None
    rows = torch.stack([offset, held.norm, held.error, held.step.repeat_interleave(LANE)], 1)
    return _Latents(rows, lanes(offset), above, float(bias.abs().max()))


def _tokens(x: Tensor, held: Quantised, largest_bias: float) -> _Tokens:
    """Make whole numbers of tokens, and say how far they are from them."""
    whole, terms = _levels(x, held)
    terms = terms.double()
    norm = terms[:, 3]
    size = norm * held.largest_norm + largest_bias  # no score is larger
    # The definition rounds to float32 at the end; what float64 rounds before and here is far less.
    margin = torch.where(size > 0, 2.0**-21 * size + 2.0**-140, 0.0)
    slack = (_rounding(x.shape[1]) + input_rounding(x)) * size
    slack += x.shape[1] * 2.0**-126 * (1 + norm + held.largest_norm)  # where denormal numbers count as nothing
    fine = terms.isfinite().all(1) & (size < 2.0**126)
    return _Tokens(whole, torch.where(fine[:, None], terms[:, :3], 1.0), margin, slack, fine)


def _levels(x: Tensor, held: Quantised) -> tuple[Tensor, Tensor]:
    """Whole numbers (n, D') of some tokens; and ‖x'‖, a·‖q‖, a and ‖x‖ of each, shape (n, 4)."""
    turned = held.turn(x)
    largest = turned.abs().amax(1, keepdim=True)
    usable = (largest > 1e-30) & largest.isfinite()
    scale = torch.where(usable, largest / LARGEST, 1.0)  # any would do for zeros
    whole = (turned * torch.where(usable, LARGEST / largest, 0.0)).round_().clamp_(-LARGEST, LARGEST)
    some = x.any(1)
    missing = _norm(torch.addcmul(turned, whole, scale, value=-1.0), some)
    norm, length = _norm(x, some), _norm(whole, some) * scale[:, 0]
    block = held.block
    # float32 rounds where tokens are turned, by sums of `block` terms, and in the difference above
    missing += ((_rounding(block) + input_rounding(x)) * block + 2.0**-22 * block**0.5) * norm
    terms = torch.stack([missing, length, scale[:, 0], norm], 1) * (1 + 2.0**-20)
    terms[:, 2] = scale[:, 0]
    return whole.char(), terms


def _norm(rows: Tensor, some: Tensor) -> Tensor:
    """Norms of rows, at least, where there are ``some``: float32 may round, and lose squares below 2^-126."""
    norm = torch.linalg.vector_norm(rows, dim=1)
    least = 2.0**-60 * rows.shape[1] ** 0.5
    return norm * (1 + _rounding(rows.shape[1])) + torch.where(some, least, 0.0)


def _rounding(terms: int) -> float:
    """By how much a float32 sum of that many products may be off, relative to the sum of their sizes."""
    unit = (terms + 2) * 2.0**-24
    return unit / (1 - unit)


class _Search:
    """The search for one tile of tokens.

    Pairs of a token and a latent that may be in the answer are held with the ends between which their score lies. They
    come from whole numbers, ``open``; the likely ones, and in the end all that are left, are multiplied in float32 and
    become ``near``, with ends far closer; and what is left of these is scored by the definition. ``bar`` is what a
    latent must be able to reach to matter, a token: the k-th best of the lower ends, or the floor; +inf for tokens
    that are ``lost`` to the plain search.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, k: int, floor: Tensor, held: Quantised, latents: _Latents
    ) -> None:
        self.x, self.weight, self.bias, self.k, self.floor = x, weight, bias, k, floor
        self.held, self.latents = held, latents
        self.tokens = _tokens(x, held, latents.largest)
        self.indices = torch.full((len(x), k), SILENT, device=x.device)
        self.values = x.new_full((len(x), k), -torch.inf)
        self.lower = self.values.double()  # the k best lower ends, falling
        self.leading = self.indices  # latents (n, ·) that were multiplied first and are not opened again
        self.lanes: list[tuple[Tensor, ...]] = []  # token, lane, its whole numbers, what one must exceed
        self.open: list[tuple[Tensor, ...]] = []  # token, latent, middle, upper end
        self.near: list[tuple[Tensor, ...]] = []  # token, latent, upper end
        self.waiting = 0  # open pairs
        self.survivors = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        self.lost = ~self.tokens.fine
        self.bar = self.limits = torch.empty(0)
        self._raise()

    def run(self, product: Product) -> _Search:
        """Go through all latents, chunk by chunk; likely ones are multiplied now and then."""
        n, rows = len(self.x), product.rows
        buffer = torch.empty(n * min(rows, product.chunk), dtype=torch.int32, device=self.x.device)
        tokens = product.take(self.tokens.levels)
        for turn, start in enumerate(range(0, rows, product.chunk), start=1):
            stop = min(start + product.chunk, rows)
            place = buffer[: n * (stop - start)].view(n, stop - start)
            self._collect(product.scores(tokens, start, place), slice(start // LANE, stop // LANE))
            if turn in TURNS and stop < rows:
                self._settle()
                if bool(self.lost.all()):
                    break
        del buffer
        self._settle()
        self._settle(last=True)
        token, latent, _ = (torch.cat(parts) for parts in zip(*self.near, strict=True))
        scores = pair_scores(self.x, self.weight, self.bias, token, latent)
        keep = scores > self._floor(latent)
        self.indices, self.values = merge(self.indices, self.values, token[keep], latent[keep], scores[keep])
        return self

    def _collect(self, scores: Tensor, here: slice) -> None:
        """Take up lanes of a token in ``scores``, (n, LANE, lanes), in which some latent may reach the bar."""
        peak = scores.amax(1)
        if here.start == 0:
            self._lead(scores, peak)
        # what a whole number must exceed, with what holds for all of its lane
        need = self.limits @ self.latents.lanes[here].T
        if self.latents.above is not None:
            need = torch.maximum(need, self._limits(-self.tokens.margin) @ self.latents.above[here].T)
        hits = _where(peak > need)
        crowded = len(hits[0]) > PIECE
        for token, lane in zip(*(part.split(PIECE) for part in hits), strict=True):
            if crowded:
                left = ~self.lost[token]
                lane, token = lane[left], token[left]
            if sum(len(part[0]) for part in self.lanes) + len(token) > PIECE:
                self._open()
            self.lanes.append((token, lane + here.start, scores[token, :, lane], need[token, lane]))
            if crowded:
                self._open(crowded)

    def _open(self, crowded: bool = False) -> None:
        """Open the pairs that the lanes taken up consist of, each with the ends of its own."""
        if not self.lanes:
            return
        token, lane, levels, need = (torch.cat(parts) for parts in zip(*self.lanes, strict=True))
        self.lanes.clear()
        pair, slot = _where(levels > need[:, None])
        token, row = token[pair], lane[pair] * LANE + slot
        offset, norm, error, step = self.latents.rows[row].unbind(1)
        missing, length, scale = self.tokens.terms[token].unbind(1)
        middle = levels[pair, slot] * (scale * step) + offset
        upper = middle + norm * missing + error * length
        latent = self.held.order[row]
        if self.floor.ndim:
            upper.masked_fill_(upper <= self._floor(latent) - self.tokens.margin[token], -torch.inf)
        upper.masked_fill_((self.leading[token] == latent[:, None]).any(1), -torch.inf)
        self.open.append((token, latent, middle, upper))
        self.waiting += len(token)
        if crowded:
            self._give_up(self.open, PATIENCE)
        if self.waiting > ROOM:
            self._settle()
        if self.waiting > ROOM:
            self._give_up(self.open, ROOM // len(self.x))
            self._settle()

    def _give_up(self, pairs: list[tuple[Tensor, ...]], most: int) -> bool:
        """Leave tokens with more than that many pairs to the plain search; tell whether there are any."""
        many = torch.cat([part[0] for part in pairs]).bincount(minlength=len(self.x)) > most
        if any_ := bool(many.any()):
            self.lost |= many
            self._raise()
        return any_

    def _limits(self, least: Tensor) -> Tensor:
        """Factors (n, 4) that, with those of lanes, say which whole number stands for a score of at least ``least``."""
        ones = torch.ones_like(least)
        missing, length, scale = self.tokens.terms.unbind(1)
        return torch.stack([least.clamp(max=1e200), -ones, -missing, -length], 1) / scale[:, None]

    def _lead(self, scores: Tensor, peak: Tensor) -> None:
        """Multiply the best latents of the best lanes of the first chunk, to have a bar."""
        first = self.latents.lanes if self.latents.above is None else self.latents.above  # what is silent is no help
        lanes = peak.shape[1]
        reach = (peak * self.tokens.terms[:, 2:] + first[:lanes, 1]) * self.held.step[:lanes]
        lane = reach.topk(min(self.k, lanes), dim=1).indices  # (n, lanes)
        token = torch.arange(len(self.x), device=self.x.device).repeat_interleave(lane.shape[1])
        slot = torch.cat(
            [scores[i, :, at].argmax(1) for at, i in zip(lane.view(-1).split(PIECE), token.split(PIECE), strict=True)]
        )
        leading = self.held.order[lane.view(-1) * LANE + slot]
        able = (leading != SILENT) & ~self.lost[token]
        self._multiply(token[able], leading[able])
        self._raise()
        self.leading = leading.view(lane.shape)

    def _settle(self, last: bool = False) -> None:
        """Multiply open pairs that are likely to be in the answer, raise the bar, and drop what is below it."""
        self._open()
        if self.open:
            self._give_up(self.open, PATIENCE)
            token, latent, middle, upper = pool = tuple(torch.cat(parts) for parts in zip(*self.open, strict=True))
            wanted = upper > self.bar[token]
            if not last:
                wanted &= (middle > self.bar[token]) & (middle > self._floor(latent))
            self._multiply(token[wanted], latent[wanted])
            self._raise()
            rest = (upper > self.bar[token]) & ~wanted
            self.open = [tuple(part[rest] for part in pool)]
            self.waiting = len(self.open[0][0])
        for _ in range(2):  # once more where tokens were given up
            pool = tuple(torch.cat(parts) for parts in zip(*self.near, strict=True))
            rest = pool[2] > self.bar[pool[0]]
            self.near = [tuple(part[rest] for part in pool)]
            if not self._give_up(self.near, PATIENCE):
                break

    def _multiply(self, token: Tensor, latent: Tensor) -> None:
        """Move pairs to those that are near: a float32 product of each, and how far it may be off."""
        if not len(token):
            self.near.append((token, latent, latent.double()))
            return
        order = _sorted(token, len(self.x))
        token, latent = token[order], latent[order]
        count = token.bincount(minlength=len(self.x))
        start = count.cumsum(0) - count
        middle = _products(self.x, self.weight, start, latent).double() + self.bias[latent]
        slack = self.tokens.slack[token]
        self.near.append((token, latent, middle + slack))
        self.survivors += count
        lower = middle - slack
        lower.masked_fill_(lower - self.tokens.margin[token] <= self._floor(latent), -torch.inf)
        rank = torch.arange(len(token), device=token.device) - start[token]
        ends = lower.new_full((len(self.x), int(count.max())), -torch.inf)
        ends[token, rank] = lower
        self.lower = torch.cat([self.lower, ends], 1).topk(self.k, dim=1).values

    def _floor(self, latent: Tensor) -> Tensor:
        return self.floor[latent] if self.floor.ndim else self.floor

    def _raise(self) -> None:
        """Set the bar anew."""
        least = torch.maximum(self.lower[:, -1], self.floor.double().min())
        self.bar = (least - self.tokens.margin).masked_fill(self.lost, torch.inf)
        self.limits = self._limits(self.bar)


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of what is true in a matrix; numpy is faster where little is."""
    if mask.device.type != "cpu":
        row, column = mask.nonzero(as_tuple=True)
        return row, column
    place = torch.from_numpy(np.flatnonzero(mask.contiguous().numpy()))
    if mask.shape[1] == LANE:
        return place >> SHIFT, place & (LANE - 1)
    row = place // mask.shape[1]
    return row, place - row * mask.shape[1]


def _sorted(token: Tensor, n: int) -> Tensor:
    """The stable order of tokens; numpy sorts short integers by radix."""
    if token.device.type != "cpu" or n > 1 << 16:
        return token.argsort(stable=True)
    return torch.from_numpy(np.argsort(token.numpy().astype(np.uint16), kind="stable"))


def _products(x: Tensor, weight: Tensor, start: Tensor, latent: Tensor) -> Tensor:
    """⟨x[i], weight[j]⟩ in float32, in any order of summation, no rows gathered; the j of token i begin at start[i]."""
    split = torch.cat([start, start.new_tensor([len(latent)])])
    size = (len(x), len(weight))
    wanted = torch.sparse_csr_tensor(split, latent, x.new_zeros(len(latent)), size, check_invariants=False)
    return torch.sparse.sampled_addmm(wanted, x, weight.T, beta=0.0).values()  # only where it is wanted


@lru_cache(1)
def _hear_out() -> None:
    """Let torch say, unheard, that sparse matrices are young, which it says once; filters are not for threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
