"""The fused Triton kernel, run by Triton's interpreter on the CPU. Each case runs in one process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from torino import SAE
from torino.core.topk import kernel
from torino.core.topk.device import rescore
from torino.core.topk.exact import exact_topk, float32_error, largest_row_norm

g = torch.Generator().manual_seed(0)
kernel.TOKENS = kernel.LATENTS = kernel.WIDTH = 16


def check(x, weight, bias, k, floor, expect_proof=True):
    slack = float32_error(x.float(), bias, largest_row_norm(weight.float()))
    candidates, lowest = kernel.fused_candidates(x, weight, bias, min(k + 8, len(weight)), floor, slack)
    x, weight = x.float(), weight.float()
    indices, values, proven = rescore(x, weight, bias, k, floor, slack, candidates, lowest)
    want = exact_topk(x, weight, bias, k, floor)
    assert torch.equal(indices[proven], want[0][proven]) and torch.equal(values[proven], want[1][proven])
    assert not expect_proof or proven.float().mean() > 0.8, proven.float().mean()


for n, d, c, k in ((20, 24, 200, 2), (1, 1, 1, 1), (17, 33, 130, 3), (5, 16, 48, 4)):
    x, weight, bias = (torch.randn(shape, generator=g) for shape in ((n, d), (c, d), (c,)))
    for floor in (torch.tensor(0.0), torch.tensor(4.0), torch.rand(c, generator=g)):  # relu and topk; others; jumprelu
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            check(x.to(dtype), weight.to(dtype), bias, k, floor, expect_proof=c > 100)
check(torch.zeros(4, 8), torch.ones(100, 8), torch.zeros(100), 2, torch.tensor(0.0), expect_proof=False)
check(torch.ones(4, 8), torch.ones(100, 8), torch.zeros(100), 2, torch.tensor(0.0), expect_proof=False)

from torino.core.topk import device
device.find_candidates = kernel.fused_candidates  # as on CUDA
for kind in ("relu", "topk", "batchtopk", "matryoshka", "jumprelu"):
    threshold = {"jumprelu": 4 * torch.rand(300, generator=g), "batchtopk": 5.0, "matryoshka": 5.0}.get(kind)
    weight, bias = torch.randn(300, 20, generator=g), torch.randn(300, generator=g)
    sae = SAE(weight, bias, kind=kind, k=3, threshold=threshold, normalize="layer_norm")
    x = torch.randn(20, 20, generator=g)
    indices, values, proven = sae.device_search(2)(x)
    want = sae.top(x, 2)
    assert proven.float().mean() > 0.8
    assert torch.equal(indices[proven], want.indices[proven]) and torch.equal(values[proven], want.values[proven])
print("same")
"""


def test_all_kinds_and_dtypes_by_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout == "same\n", done.stderr[-3000:]
