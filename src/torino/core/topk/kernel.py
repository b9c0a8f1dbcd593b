# type: ignore  # the language of Triton kernels is not typed Python
"""Fused encoder and top-k selection in Triton, for CUDA. It has not been run on a GPU; tests use Triton's interpreter.

A program multiplies a block of tokens with a block of encoder rows, sums in float32, and keeps only the ``KEEP``
largest scores of each token in the block of latents and the largest score that it does not keep. So the N × C scores
never reach the memory of the device. The candidates are scored by the definition afterwards
(:mod:`torino.core.topk.device`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, LATENTS, WIDTH = 64, 64, 32  # block sizes
KEEP = 2  # scores per token and block of latents; the proof fails if more of the top k are in one block


@triton.jit
def _encode_kernel(
    x, weight, bias, floor, margin, scores, latents, rest, n, c, d, blocks,
    HAS_FLOORS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    column = tl.arange(0, BLOCK_C)
    latent = block * BLOCK_C + column
    token_ok, latent_ok = token < n, latent < c
    total = tl.zeros((BLOCK_N, BLOCK_C), dtype=tl.float32)
    for start in range(0, d, BLOCK_D):
        channel = start + tl.arange(0, BLOCK_D)
        channel_ok = channel < d
        x_tile = tl.load(
            x + token[:, None].to(tl.int64) * d + channel[None], mask=token_ok[:, None] & channel_ok[None], other=0.0
        )
        w_tile = tl.load(
            weight + latent[None].to(tl.int64) * d + channel[:, None],
            mask=latent_ok[None] & channel_ok[:, None],
            other=0.0,
        )
        total = tl.dot(x_tile.to(tl.float32), w_tile.to(tl.float32), total, input_precision="ieee")
    total += tl.load(bias + latent, mask=latent_ok, other=0.0)[None]
    shown = latent_ok[None] & token_ok[:, None]
    if HAS_FLOORS:
        above = total + tl.load(margin + token, mask=token_ok, other=0.0)[:, None]
        shown = shown & (above > tl.load(floor + latent, mask=latent_ok, other=0.0)[None])
    total = tl.where(shown, total, float("-inf"))
    row = token.to(tl.int64) * blocks + block
    for kept in tl.static_range(KEPT):
        best = tl.argmax(total, 1)
        tl.store(scores + row * KEPT + kept, tl.max(total, 1), mask=token_ok)
        tl.store(latents + row * KEPT + kept, block * BLOCK_C + best, mask=token_ok)
        total = tl.where(column[None] == best[:, None], float("-inf"), total)
    tl.store(rest + row, tl.max(total, 1), mask=token_ok)


def fused_candidates(
    x: Tensor, weight: Tensor, bias: Tensor, m: int, floor: Tensor, slack: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``m`` candidates per token, (N, m), −1 in empty slots, and the score that no other latent exceeds, (N,).

    Parameters
    ----------
    x : Tensor of shape (N, D), float32, float16 or bfloat16
    weight : Tensor of shape (C, D), float32, float16 or bfloat16
    bias : Tensor of shape (C,), float32
    m : int
        Candidates per token.
    floor : Tensor of shape () or (C,), float32
        Latents that cannot reach their own floor are no candidates.
    slack : Tensor of shape (N,), float64
        Error of the scores.
    """
    n, d = x.shape
    c = len(weight)
    blocks = triton.cdiv(c, LATENTS)
    scores = torch.empty(n, blocks * KEEP, device=x.device)
    latents = torch.empty(n, blocks * KEEP, dtype=torch.int32, device=x.device)
    rest = torch.empty(n, blocks, device=x.device)
    kernel: Any = _encode_kernel
    kernel[(triton.cdiv(n, TOKENS), blocks)](
        x.contiguous(), weight.contiguous(), bias, floor, (1.01 * slack).float(),
        scores, latents, rest, n, c, d, blocks,
        HAS_FLOORS=floor.ndim == 1, BLOCK_N=TOKENS, BLOCK_C=LATENTS, BLOCK_D=WIDTH, KEPT=KEEP,
    )  # fmt: skip
    kept = min(m + 1, blocks * KEEP)  # the first score that is left out bounds those after it
    best, order = scores.topk(kept, dim=1)
    candidates = latents.gather(1, order).long().masked_fill(best == -torch.inf, -1)
    lowest = rest.amax(1)
    if kept == m + 1:
        lowest = torch.maximum(lowest, best[:, m])
    return candidates[:, :m], lowest
