"""Objectives: the loss of a batch and its gradients, worked out by hand so that only active latents cost anything.

Letters: u rows of a batch (B × D), v = u − b the centred rows, z the latents, û_l the reconstruction from the first l
groups, w_l the weight of its error. The loss is

    Σ_l w_l · mean‖u − û_l‖²  +  α · mean‖e − ê‖² / mean‖e − ē‖²  (+ λ · mean Σ z for ReLU)

with e = u − û the error that is left and ê what the dead latents make of it. With G_l = 2/B · Σ_{m ≥ l} w_m (û_m − u),
summed from the last level backwards, an entry z_bj of level l has the derivative δ_bj = ⟨W_dec_j, G_l(b)⟩, and

    ∂W_dec_j = Σ_b z_bj G_l(b)    ∂W_enc_j = Σ_b δ_bj v(b)    ∂b_enc_j = Σ_b δ_bj    ∂b = Σ_b G_1(b) − W_encᵀ ∂b_enc

so one pass over the entries serves all levels. The part of ∂W_dec_j along W_dec_j, which the unit norm takes away
again, is (Σ_b z_bj δ_bj) W_dec_j: it is subtracted for the price of one sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.training.config import TrainConfig
from torino.training.distributed import World
from torino.training.sparse_codes import Code, above, pair_dots

BLOCK = 1 << 25  # scores held at once (128 MiB); larger batches are scored in several blocks of rows
SAMPLE = 1 << 19  # scores from which the first bar is guessed
DENSE = 1 / 16  # share of active latents above which ReLU is cheaper by dense products
NEAR = 0.95  # the next batch's bar, as a share of this batch's smallest kept activation
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Weights:
    """The four tensors of an SAE, or four of the same shapes, such as their gradients."""

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor

    def named(self) -> dict[str, Tensor]:
        """All four, by name."""
        return {"W_enc": self.W_enc, "W_dec": self.W_dec, "b_enc": self.b_enc, "b_dec": self.b_dec}

    def zeros(self) -> Weights:
        """Zeros of the same shapes."""
        return Weights(*[torch.zeros_like(value) for value in self.named().values()])


@dataclass
class Outcome:
    """What a batch gave, over all processes.

    Attributes
    ----------
    loss : float
    errors : Tensor of shape (L,), float64
        Sum of ‖u − û_l‖² over the batch, for each level.
    square, total : Tensor of shapes () and (D,), float64
        Sums of ‖u‖² and of u, from which the variance follows.
    counts : Tensor of shape (C,), int64
        Rows in which each latent fired.
    edge : float
        The smallest activation that BatchTopK kept; 0 for the others.
    """

    loss: float
    errors: Tensor
    square: Tensor
    total: Tensor
    counts: Tensor
    edge: float


class Objective:
    """Works out loss and gradients for one recipe; holds the buffers, so that no step asks for large memory anew.

    Parameters
    ----------
    recipe : TrainConfig
        A settled one.
    weights : Weights
        Read at every call; the trainer changes them in between.
    world : World

    Attributes
    ----------
    gradients : Weights
        Of the last batch, summed over all processes.
    hint : float
        What makes the next call quick: for BatchTopK a bar just below the activations to keep, for ReLU the share of
        active latents, which decides between sparse and dense products. Negative before the first.
    """

    def __init__(self, recipe: TrainConfig, weights: Weights, world: World | None = None) -> None:
        self.recipe, self.weights, self.world = recipe, weights, world or World()
        self.gradients = weights.zeros()
        self.hint, self._edge = -1.0, 0.0
        groups = torch.tensor((0, *recipe.groups()), device=weights.W_enc.device)
        self._starts = groups.cumsum(0)[:-1]
        self._dtype = DTYPES[recipe.precision] if recipe.precision != "float32" else weights.W_enc.dtype
        self._scores = self._parts = weights.W_enc.new_empty(0)
        self._scored: Tensor | None = None

    @torch.no_grad()
    def __call__(self, u: Tensor, rows: int, k: float, l1: float, silent: Tensor) -> Outcome:
        """Work out a batch.

        Parameters
        ----------
        u : Tensor of shape (b, D)
            This process's rows of the batch.
        rows : int
            Rows of the whole batch, B.
        k, l1 : float
            Active latents a row, and weight of the L1 penalty, as the schedule has them now.
        silent : Tensor of shape (C,), int64
            Rows since each latent fired; brought up to date here.
        """
        v = u - self.weights.b_dec
        code = self._choose(v, rows, k)
        if code is None:
            left, errors, counts, mass = self._through_all(u, v, rows, l1)
        else:
            left, errors = self._through(code, u, v, rows, l1)
            counts, mass = code.counts, code.values.sum()
        self._scored = None
        sums = [errors.double(), (u * u).sum()[None].double(), mass[None].double()]
        sums += [u.sum(0).double(), left.sum(0).double(), counts.double()]
        joined = torch.cat(sums)
        self.world.sum_([joined])
        errors, square, mass, total, remains, fired = joined.split([len(part) for part in sums])
        counts = fired.long()
        if self.recipe.kind == "relu":
            self.hint = float(fired.sum()) / (rows * len(fired))
        silent += rows
        silent[counts > 0] = 0
        weights = torch.tensor(self.recipe.weights, dtype=torch.float64, device=u.device)
        loss = (weights * errors).sum() / rows + l1 * mass[0] / rows
        spread = float(errors[-1] - remains.square().sum() / rows) / rows
        if self.recipe.aux and spread > 0:
            loss += self.recipe.aux * self._revive(v, left, rows, spread, silent)
        gradient = self.gradients
        gradient.b_dec -= gradient.b_enc @ self.weights.W_enc
        self.world.sum_(list(gradient.named().values()))
        return Outcome(float(loss), errors, square[0], total, counts, self._edge)

    # ------------------------------------------------------------------ which latents are active

    def _choose(self, v: Tensor, rows: int, k: float) -> Code | None:
        """The active latents; None for a ReLU batch in which they are too many to be listed."""
        kind = self.recipe.kind
        if kind == "relu":
            if not 0 <= self.hint < DENSE:
                return None
            places, values = self._above(v, 0.0)
        elif kind == "topk":
            places, values = self._row_top(v, round(k))
        else:
            places, values = self._batch_top(v, round(k * rows))
        return Code(places, values, len(v), len(self.weights.W_enc), self._starts)

    def _batch_top(self, v: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """The ``wanted`` largest positive scores of the whole batch; of scores equal to the smallest, all.

        Scores above a bar, somewhat below the smallest activation kept in the last batch, are listed; if they are
        enough, the largest of them are the largest of all. If not, the bar was too high.
        """
        bar = self.hint if self.hint > 0 else self._guess(v, 1.5 * wanted / len(v) / self.world.size)
        lower = 0.8
        while True:
            places, values = self._above(v, bar)
            everyone = self.world.gathered(values)
            if len(everyone) >= wanted or bar == 0:
                break
            bar, lower = (bar * lower, lower * lower) if bar > 1e-6 else (0.0, lower)
        if len(everyone) > wanted:
            edge = everyone.kthvalue(len(everyone) - wanted + 1).values
            kept = values >= edge
            places, values = places[kept], values[kept]
            self._edge = float(edge)
        else:
            self._edge = float(everyone.min()) if len(everyone) else 0.0
        self.hint = self._edge * NEAR
        return places, values

    def _guess(self, v: Tensor, each: float) -> float:
        """A bar that some ``each`` scores a row pass, from a few rows."""
        _, scores = next(self._blocks(v))
        few = scores[:: -(-scores.numel() // SAMPLE)].reshape(-1)
        rank = min(len(few), max(1, round(each * len(few) / scores.shape[1])))
        guess = few.float().kthvalue(len(few) - rank + 1).values.clamp(min=0)
        return float(self.world.gathered(guess[None]).min())

    def _row_top(self, v: Tensor, k: int) -> tuple[Tensor, Tensor]:
        places: list[Tensor] = []
        for start, scores in self._blocks(v):
            latent = scores.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
            row = torch.arange(start, start + len(scores), device=v.device)
            places.append((row[:, None] * scores.shape[1] + latent)[scores.gather(1, latent) > 0])
        return self._exactly(v, torch.cat(places), 0.0)

    def _above(self, v: Tensor, bar: float) -> tuple[Tensor, Tensor]:
        """Places and values of all scores above ``bar``."""
        places: list[Tensor] = []
        values: list[Tensor] = []
        for start, scores in self._blocks(v):
            place, value = above(scores, bar)
            places.append(place + start * scores.shape[1])
            values.append(value)
        if self._dtype == v.dtype:
            return torch.cat(places), torch.cat(values)
        return self._exactly(v, torch.cat(places), bar)

    def _exactly(self, v: Tensor, places: Tensor, bar: float) -> tuple[Tensor, Tensor]:
        """Score entries in the precision of the weights, and drop those not above ``bar``."""
        w, latents = self.weights, len(self.weights.W_enc)
        latent = places % latents
        begins = torch.arange(len(v) + 1, device=v.device) * latents
        values = pair_dots(torch.searchsorted(places, begins), latent, v, w.W_enc) + w.b_enc[latent]
        kept = values > bar
        return places[kept], values[kept]

    def _blocks(self, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Scores W_enc v + b_enc of some rows at a time, in one buffer: first row, scores."""
        w, latents = self.weights, len(self.weights.W_enc)
        step = max(1, BLOCK // latents)
        if len(v) <= step and self._scored is v:  # a second look at the same scores
            yield 0, self._scores[: len(v) * latents].view(len(v), latents)
            return
        size = min(step, len(v)) * latents
        if len(self._scores) < size:
            self._scores = torch.empty(size, dtype=self._dtype, device=v.device)
        weight, bias = w.W_enc.to(self._dtype), w.b_enc.to(self._dtype)
        for start in range(0, len(v), step):
            some = v[start : start + step].to(self._dtype)
            scores = self._scores[: len(some) * latents].view(len(some), latents)
            torch.addmm(bias, some, weight.T, out=scores)
            self._scored = v
            yield start, scores

    # ------------------------------------------------------------------ loss and gradients

    def _through(self, code: Code, u: Tensor, v: Tensor, rows: int, l1: float) -> tuple[Tensor, Tensor]:
        """Decode, and fill the gradients. Return the error left, u − û, and the sums of squares of each level."""
        w, gradient = self.weights, self.gradients
        levels, width = len(self._starts), u.shape[1]
        if self._parts.shape != (len(u), levels, width):
            self._parts = u.new_zeros(len(u), levels, width)
        parts = self._parts
        code.decode(w.W_dec, parts.view(-1, width))
        parts[:, 0] += w.b_dec
        parts[:, 0] -= u
        for level in range(1, levels):
            parts[:, level] += parts[:, level - 1]  # now û_l − u
        errors = torch.linalg.vector_norm(parts, dim=(0, 2)).double().square()
        left = -parts[:, -1]
        assert self.recipe.weights is not None
        for level in reversed(range(levels)):
            parts[:, level] *= 2 * self.recipe.weights[level] / rows
            if level + 1 < levels:
                parts[:, level] += parts[:, level + 1]  # now G_l
        pulls = parts.view(-1, width)
        delta = code.dots(pulls, w.W_dec)
        code.pull(code.values, pulls, gradient.W_dec)
        along = code.by_latent(code.values * delta)
        gradient.W_dec.addcmul_(w.W_dec, along[:, None], value=-1)
        delta = delta + l1 / rows
        code.pull(delta, v, gradient.W_enc)
        gradient.b_enc.copy_(code.by_latent(delta))
        gradient.b_dec.copy_(parts[:, 0].sum(0))
        return left, errors

    def _through_all(self, u: Tensor, v: Tensor, rows: int, l1: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same for ReLU with many active latents, by dense products; also the counts and the sum of latents."""
        w, gradient = self.weights, self.gradients
        for value in gradient.named().values():
            value.zero_()
        along, counts, mass = w.b_enc.new_zeros(len(w.b_enc)), torch.zeros_like(w.b_enc, dtype=torch.int64), u.sum() * 0
        left = torch.empty_like(u)
        for start, scores in self._blocks(v):
            rows_here = slice(start, start + len(scores))
            z = scores.clamp_(min=0).to(u.dtype)
            error = torch.addmm(w.b_dec, z, w.W_dec).sub_(u[rows_here])
            left[rows_here] = -error
            pull = error.mul_(2 / rows)
            delta = pull @ w.W_dec.T
            gradient.W_dec.addmm_(z.T, pull)
            along += (z * delta).sum(0)
            active = z > 0
            delta = delta.add_(l1 / rows).mul_(active)
            gradient.W_enc.addmm_(delta.T, v[rows_here])
            gradient.b_enc += delta.sum(0)
            gradient.b_dec += pull.sum(0)
            counts += active.sum(0)
            mass = mass + z.sum()
        gradient.W_dec.addcmul_(w.W_dec, along[:, None], value=-1)
        errors = torch.linalg.vector_norm(left).double().square()[None]
        return left, errors, counts, mass

    def _revive(self, v: Tensor, left: Tensor, rows: int, spread: float, silent: Tensor) -> float:
        """Auxiliary loss: dead latents learn to rebuild the error that the others leave. Adds to the gradients.

        A dead latent fired nowhere in this batch, so its gradients were zero until here.
        """
        w, gradient, aux = self.weights, self.gradients, self.recipe.aux
        assert self.recipe.dead_after is not None
        assert self.recipe.aux_k is not None
        dead = (silent >= self.recipe.dead_after).nonzero()[:, 0]
        if not len(dead):
            return 0.0
        encoder, decoder, bias = w.W_enc[dead], w.W_dec[dead], w.b_enc[dead]
        to_encoder, to_decoder = torch.zeros_like(encoder), torch.zeros_like(encoder)
        to_bias, along = torch.zeros_like(bias), torch.zeros_like(bias)
        loss = left.new_zeros((), dtype=torch.float64)
        step = max(1, BLOCK // len(dead))
        for start in range(0, len(v), step):
            some, error = v[start : start + step], left[start : start + step]
            z = torch.addmm(bias, some, encoder.T).clamp_(min=0)
            if self.recipe.aux_k < len(dead):
                z.mul_(z >= z.topk(self.recipe.aux_k, dim=1).values[:, -1:])
            missing = (z @ decoder).sub_(error)
            loss += torch.linalg.vector_norm(missing).double().square()
            pull = missing.mul_(2 * aux / (rows * spread))
            delta = (pull @ decoder.T).mul_(z > 0)
            to_decoder.addmm_(z.T, pull)
            to_encoder.addmm_(delta.T, some)
            to_bias += delta.sum(0)
            along += (z * delta).sum(0)
        gradient.W_dec[dead] = to_decoder.addcmul_(decoder, along[:, None], value=-1)
        gradient.W_enc[dead] = to_encoder
        gradient.b_enc[dead] = to_bias
        self.world.sum_([loss])
        return float(loss) / (rows * spread)
