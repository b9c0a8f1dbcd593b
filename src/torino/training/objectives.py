"""Loss and gradients of a batch, with hand-written gradients whose cost depends only on the active latents.

Notation: u are the rows of a batch (B × D), v = u − b the rows minus the decoder bias, z the latents, û_l the
reconstruction from the first l groups and w_l the weight of its error. The loss is

    Σ_l w_l · mean‖u − û_l‖²  +  α · mean‖e − ê‖² / mean‖e − ē‖²  (+ λ · mean Σ z for ReLU)

with e = u − û the residual and ê its reconstruction by the dead latents. With G_l = 2/B · Σ_{m ≥ l} w_m (û_m − u),
summed from the last level backwards, an entry z_bj of level l has the derivative δ_bj = ⟨W_dec_j, G_l(b)⟩, and

    ∂W_dec_j = Σ_b z_bj G_l(b)    ∂W_enc_j = Σ_b δ_bj v(b)    ∂b_enc_j = Σ_b δ_bj    ∂b = Σ_b G_1(b) − W_encᵀ ∂b_enc

so one pass over the entries computes the gradients of all levels. The component of ∂W_dec_j parallel to W_dec_j, which
the normalization to unit norm would undo, is (Σ_b z_bj δ_bj) W_dec_j; subtracting it costs one more sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.training.config import TrainConfig
from torino.training.distributed import Distributed
from torino.training.sparse_codes import SparseCode, find_above, sampled_dots

BLOCK = 1 << 25  # scores in memory at once (128 MiB); larger batches are scored in several blocks of rows
SAMPLE = 1 << 19  # scores from which the first cutoff is estimated
DENSE = 1 / 16  # fraction of active latents above which dense products are faster for ReLU
NEXT_CUTOFF = 0.95  # cutoff for the next batch, as a fraction of the smallest activation kept in this batch
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Weights:
    """The four tensors of an SAE, or tensors of the same shapes, such as their gradients."""

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor

    def named(self) -> dict[str, Tensor]:
        """Return the four tensors by name."""
        return {"W_enc": self.W_enc, "W_dec": self.W_dec, "b_enc": self.b_enc, "b_dec": self.b_dec}

    def zeros_like(self) -> Weights:
        """Return zeros of the same shapes."""
        return Weights(*[torch.zeros_like(value) for value in self.named().values()])


@dataclass
class BatchStats:
    """Loss and statistics of a batch, over all processes.

    Attributes
    ----------
    loss : float
    errors : Tensor of shape (L,), float64
        Sum of ‖u − û_l‖² over the batch, for each level.
    square_sum, row_sum : Tensor of shapes () and (D,), float64
        Sums of ‖u‖² and of u, from which the variance is computed.
    counts : Tensor of shape (C,), int64
        Number of rows in which each latent is active.
    min_kept : float
        Smallest activation that BatchTopK kept; 0 for the other objectives.
    """

    loss: float
    errors: Tensor
    square_sum: Tensor
    row_sum: Tensor
    counts: Tensor
    min_kept: float


class Objective:
    """Compute loss and gradients for a configuration; large buffers are allocated once and reused.

    Parameters
    ----------
    config : TrainConfig
        A resolved configuration.
    weights : Weights
        Read at every call; the trainer updates them in place.
    distributed : Distributed, optional

    Attributes
    ----------
    gradients : Weights
        Gradients of the last batch, summed over all processes.
    hint : float
        Value that makes the next call fast. For BatchTopK, a cutoff just below the activations to keep; for ReLU, the
        fraction of active latents, which decides between sparse and dense products. Negative before the first call.
    """

    def __init__(self, config: TrainConfig, weights: Weights, distributed: Distributed | None = None) -> None:
        self.config, self.weights, self.distributed = config, weights, distributed or Distributed()
        self.gradients = weights.zeros_like()
        self.hint, self._min_kept = -1.0, 0.0
        groups = torch.tensor((0, *config.group_sizes()), device=weights.W_enc.device)
        self._starts = groups.cumsum(0)[:-1]
        self._dtype = DTYPES[config.precision] if config.precision != "float32" else weights.W_enc.dtype
        self._scores = self._parts = weights.W_enc.new_empty(0)
        self._scored: Tensor | None = None  # the rows that self._scores belong to

    @torch.no_grad()
    def __call__(self, u: Tensor, rows: int, k: float, l1: float, rows_since_active: Tensor) -> BatchStats:
        """Compute loss and gradients of a batch.

        Parameters
        ----------
        u : Tensor of shape (b, D)
            Rows of the batch that belong to this process.
        rows : int
            Number of rows B of the whole batch.
        k, l1 : float
            Active latents per row and weight of the L1 penalty at this step.
        rows_since_active : Tensor of shape (C,), int64
            Number of rows since each latent was active; updated in place.
        """
        v = u - self.weights.b_dec
        code = self._select_active(v, rows, k)
        if code is None:
            residual, errors, counts, latent_sum = self._dense_backward(u, v, rows, l1)
        else:
            residual, errors = self._sparse_backward(code, u, v, rows, l1)
            counts, latent_sum = code.counts, code.values.sum()
        self._scored = None
        sums = [errors.double(), (u * u).sum()[None].double(), latent_sum[None].double()]
        sums += [u.sum(0).double(), residual.sum(0).double(), counts.double()]
        joined = torch.cat(sums)
        self.distributed.all_reduce_([joined])
        errors, square_sum, latent_sum, row_sum, residual_sum, active = joined.split([len(part) for part in sums])
        counts = active.long()
        if self.config.kind == "relu":
            self.hint = float(active.sum()) / (rows * len(active))
        rows_since_active += rows
        rows_since_active[counts > 0] = 0
        weights = torch.tensor(self.config.weights, dtype=torch.float64, device=u.device)
        loss = (weights * errors).sum() / rows + l1 * latent_sum[0] / rows
        residual_variance = float(errors[-1] - residual_sum.square().sum() / rows) / rows
        if self.config.aux and residual_variance > 0:
            loss += self.config.aux * self._add_aux_loss(v, residual, rows, residual_variance, rows_since_active)
        gradients = self.gradients
        gradients.b_dec -= gradients.b_enc @ self.weights.W_enc
        self.distributed.all_reduce_(list(gradients.named().values()))
        return BatchStats(float(loss), errors, square_sum[0], row_sum, counts, self._min_kept)

    # ------------------------------------------------------------------ selection of active latents

    def _select_active(self, v: Tensor, rows: int, k: float) -> SparseCode | None:
        """Return the active latents; None for ReLU if there are too many for sparse products."""
        kind = self.config.kind
        if kind == "relu":
            if not 0 <= self.hint < DENSE:
                return None
            positions, values = self._scores_above(v, 0.0)
        elif kind == "topk":
            positions, values = self._row_topk(v, round(k))
        else:
            positions, values = self._batch_topk(v, round(k * rows))
        return SparseCode(positions, values, len(v), len(self.weights.W_enc), self._starts)

    def _batch_topk(self, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Select the ``count`` largest positive scores of the whole batch; all scores tied with the smallest are kept.

        Only scores above a cutoff, slightly below the smallest activation kept in the last batch, are listed. If there
        are at least ``count``, the largest of them are the largest of all; otherwise the cutoff is lowered.
        """
        cutoff = self.hint
        if cutoff <= 0:
            cutoff = self._estimate_cutoff(v, 1.5 * count / len(v) / self.distributed.size)
        factor = 0.8
        while True:
            positions, values = self._scores_above(v, cutoff)
            all_values = self.distributed.all_gather(values)
            if len(all_values) >= count or cutoff == 0:
                break
            cutoff, factor = (cutoff * factor, factor * factor) if cutoff > 1e-6 else (0.0, factor)
        if len(all_values) > count:
            smallest = all_values.kthvalue(len(all_values) - count + 1).values
            kept = values >= smallest
            positions, values = positions[kept], values[kept]
            self._min_kept = float(smallest)
        else:
            self._min_kept = float(all_values.min()) if len(all_values) else 0.0
        self.hint = self._min_kept * NEXT_CUTOFF
        return positions, values

    def _estimate_cutoff(self, v: Tensor, per_row: float) -> float:
        """Estimate, from a sample of the scores, a cutoff that about ``per_row`` scores per row exceed."""
        _, scores = next(self._score_blocks(v))
        sample = scores[:: -(-scores.numel() // SAMPLE)].reshape(-1)
        rank = min(len(sample), max(1, round(per_row * len(sample) / scores.shape[1])))
        cutoff = sample.float().kthvalue(len(sample) - rank + 1).values.clamp(min=0)
        return float(self.distributed.all_gather(cutoff[None]).min())

    def _row_topk(self, v: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Select the ``k`` largest positive scores of each row."""
        positions: list[Tensor] = []
        for start, scores in self._score_blocks(v):
            latent = scores.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
            row = torch.arange(start, start + len(scores), device=v.device)
            positions.append((row[:, None] * scores.shape[1] + latent)[scores.gather(1, latent) > 0])
        return self._rescore(v, torch.cat(positions), 0.0)

    def _scores_above(self, v: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
        """Return positions and values of all scores above ``cutoff``."""
        positions: list[Tensor] = []
        values: list[Tensor] = []
        for start, scores in self._score_blocks(v):
            block_positions, block_values = find_above(scores, cutoff)
            positions.append(block_positions + start * scores.shape[1])
            values.append(block_values)
        if self._dtype == v.dtype:
            return torch.cat(positions), torch.cat(values)
        return self._rescore(v, torch.cat(positions), cutoff)

    def _rescore(self, v: Tensor, positions: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
        """Recompute scores in the precision of the weights, and drop those not above ``cutoff``."""
        w, latents = self.weights, len(self.weights.W_enc)
        latent = positions % latents
        row_starts = torch.arange(len(v) + 1, device=v.device) * latents
        values = sampled_dots(torch.searchsorted(positions, row_starts), latent, v, w.W_enc) + w.b_enc[latent]
        kept = values > cutoff
        return positions[kept], values[kept]

    def _score_blocks(self, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the scores W_enc v + b_enc of blocks of rows, all in one buffer."""
        w, latents = self.weights, len(self.weights.W_enc)
        step = max(1, BLOCK // latents)
        if len(v) <= step and self._scored is v:  # the buffer still holds the scores of all rows
            yield 0, self._scores[: len(v) * latents].view(len(v), latents)
            return
        size = min(step, len(v)) * latents
        if len(self._scores) < size:
            self._scores = torch.empty(size, dtype=self._dtype, device=v.device)
        weight, bias = w.W_enc.to(self._dtype), w.b_enc.to(self._dtype)
        for start in range(0, len(v), step):
            block = v[start : start + step].to(self._dtype)
            scores = self._scores[: len(block) * latents].view(len(block), latents)
            torch.addmm(bias, block, weight.T, out=scores)
            self._scored = v
            yield start, scores

    # ------------------------------------------------------------------ loss and gradients

    def _sparse_backward(self, code: SparseCode, u: Tensor, v: Tensor, rows: int, l1: float) -> tuple[Tensor, Tensor]:
        """Decode and compute the gradients; return the residual u − û and the squared error of each level."""
        w, gradients = self.weights, self.gradients
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
        residual = -parts[:, -1]
        assert self.config.weights is not None
        for level in reversed(range(levels)):
            parts[:, level] *= 2 * self.config.weights[level] / rows
            if level + 1 < levels:
                parts[:, level] += parts[:, level + 1]  # now G_l
        output_grad = parts.view(-1, width)
        delta = code.dots(output_grad, w.W_dec)
        code.accumulate(code.values, output_grad, gradients.W_dec)
        parallel = code.sum_by_latent(code.values * delta)
        gradients.W_dec.addcmul_(w.W_dec, parallel[:, None], value=-1)
        delta = delta + l1 / rows
        code.accumulate(delta, v, gradients.W_enc)
        gradients.b_enc.copy_(code.sum_by_latent(delta))
        gradients.b_dec.copy_(parts[:, 0].sum(0))
        return residual, errors

    def _dense_backward(self, u: Tensor, v: Tensor, rows: int, l1: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Do the same by dense products, for ReLU with many active latents; also return counts and sum of latents."""
        w, gradients = self.weights, self.gradients
        for value in gradients.named().values():
            value.zero_()
        parallel, counts = w.b_enc.new_zeros(len(w.b_enc)), torch.zeros_like(w.b_enc, dtype=torch.int64)
        latent_sum = u.sum() * 0
        residual = torch.empty_like(u)
        for start, scores in self._score_blocks(v):
            block = slice(start, start + len(scores))
            z = scores.clamp_(min=0).to(u.dtype)
            error = torch.addmm(w.b_dec, z, w.W_dec).sub_(u[block])
            residual[block] = -error
            output_grad = error.mul_(2 / rows)
            delta = output_grad @ w.W_dec.T
            gradients.W_dec.addmm_(z.T, output_grad)
            parallel += (z * delta).sum(0)
            active = z > 0
            delta = delta.add_(l1 / rows).mul_(active)
            gradients.W_enc.addmm_(delta.T, v[block])
            gradients.b_enc += delta.sum(0)
            gradients.b_dec += output_grad.sum(0)
            counts += active.sum(0)
            latent_sum = latent_sum + z.sum()
        gradients.W_dec.addcmul_(w.W_dec, parallel[:, None], value=-1)
        errors = torch.linalg.vector_norm(residual).double().square()[None]
        return residual, errors, counts, latent_sum

    def _add_aux_loss(
        self, v: Tensor, residual: Tensor, rows: int, residual_variance: float, rows_since_active: Tensor
    ) -> float:
        """Compute the auxiliary loss, in which dead latents reconstruct the residual, and add its gradients.

        A dead latent is not active anywhere in this batch, so its other gradients are zero and can be overwritten.
        """
        w, gradients, aux = self.weights, self.gradients, self.config.aux
        assert self.config.dead_after is not None
        assert self.config.aux_k is not None
        dead = (rows_since_active >= self.config.dead_after).nonzero()[:, 0]
        if not len(dead):
            return 0.0
        encoder, decoder, bias = w.W_enc[dead], w.W_dec[dead], w.b_enc[dead]
        encoder_grad, decoder_grad = torch.zeros_like(encoder), torch.zeros_like(encoder)
        bias_grad, parallel = torch.zeros_like(bias), torch.zeros_like(bias)
        loss = residual.new_zeros((), dtype=torch.float64)
        step = max(1, BLOCK // len(dead))
        for start in range(0, len(v), step):
            block, target = v[start : start + step], residual[start : start + step]
            z = torch.addmm(bias, block, encoder.T).clamp_(min=0)
            if self.config.aux_k < len(dead):
                z.mul_(z >= z.topk(self.config.aux_k, dim=1).values[:, -1:])
            error = (z @ decoder).sub_(target)
            loss += torch.linalg.vector_norm(error).double().square()
            output_grad = error.mul_(2 * aux / (rows * residual_variance))
            delta = (output_grad @ decoder.T).mul_(z > 0)
            decoder_grad.addmm_(z.T, output_grad)
            encoder_grad.addmm_(delta.T, block)
            bias_grad += delta.sum(0)
            parallel += (z * delta).sum(0)
        gradients.W_dec[dead] = decoder_grad.addcmul_(decoder, parallel[:, None], value=-1)
        gradients.W_enc[dead] = encoder_grad
        gradients.b_enc[dead] = bias_grad
        self.distributed.all_reduce_([loss])
        return float(loss) / (rows * residual_variance)
