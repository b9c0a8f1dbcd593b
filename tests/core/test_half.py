"""Candidates by a bfloat16 product: the same result as the float32 product, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torino import SAE
from torino.core.topk.exact import exact_topk, largest_row_norm
from torino.core.topk.half import can_use_half, round_encoder, use_half


@given(
    st.integers(1, 80),
    st.integers(1, 40),
    st.integers(1, 700),
    st.integers(1, 9),
    st.sampled_from([1e-38, 1e-20, 1.0, 1e18, 3e38]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_the_same_result(n: int, d: int, c: int, k: int, scale: float, tied: bool, per_latent: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((n, d), (c, d), (c,)))
    if tied:  # a few levels, repeated rows, tokens of zeros
        x, weight, bias = x.round(), weight.round()[torch.randint(c, (c,), generator=g)], bias.round()
    x = (x * scale).clamp(-3.4e38, 3.4e38)
    floor = torch.rand(c, generator=g) if per_latent else torch.tensor(0.25 if tied else 0.0)
    half = round_encoder(weight, bias, largest_row_norm(weight))
    k = min(k, c)
    for chunk in (None, 64):
        want = exact_topk(x, weight, bias, k, floor, chunk=chunk)
        got = exact_topk(x, weight, bias, k, floor, half=half, chunk=chunk)
        assert all(torch.equal(one, two) for one, two in zip(want, got, strict=True))


@pytest.mark.parametrize("kind", ["relu", "topk", "batchtopk", "matryoshka", "jumprelu"])
def test_every_kind(kind: str) -> None:
    g = torch.Generator().manual_seed(3)
    x, weight, bias = torch.randn(200, 96, generator=g), torch.randn(2048, 96, generator=g), torch.randn(2048)
    threshold = {"jumprelu": 20 * torch.rand(2048, generator=g), "batchtopk": 25.0, "matryoshka": 25.0}.get(kind)
    sae = SAE(weight, bias, kind=kind, k=4, threshold=threshold)  # type: ignore[arg-type]
    for k in (1, 6):
        plain, half = sae.top(x, k, prefilter="off"), sae.top(x, k, prefilter="bf16")
        assert torch.equal(plain.indices, half.indices)
        assert torch.equal(plain.values, half.values)


def test_changed_weights_are_rounded_again() -> None:
    g = torch.Generator().manual_seed(0)
    sae, x = SAE(torch.randn(256, 32, generator=g)), torch.randn(80, 32, generator=g)
    sae.top(x, 2, prefilter="bf16")
    sae.W_enc.mul_(-1)
    assert torch.equal(sae.top(x, 2, prefilter="bf16").indices, sae.top(x, 2, prefilter="off").indices)


def test_when_it_is_used() -> None:
    small = torch.empty(64, 64)
    assert can_use_half(small)
    assert not use_half(small, 1)  # too few tokens
    assert not use_half(torch.empty(1, 1).expand(1 << 13, 1 << 12), 1000)  # too large an encoder
    assert not can_use_half(torch.empty(2, 2, device="meta"))
