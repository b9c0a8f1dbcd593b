"""The SAE compared with its formulas in plain Python, for integers, where float32 is exact."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sae_cases import KINDS, C, D, make_sae, sae_options, sae_tensors
from topk_cases import random_integers
from torch import Tensor

from torino import SAE, VisualTokens, make
from torino.core.concepts import CachedEncoder, ConceptEncoder
from torino.core.errors import BadFile, BadParameter, BadTokens, SAEMismatch
from torino.core.tokens import Origin
from torino.sae import SAECard


def plain_encode(x: Tensor, sae: dict[str, Tensor], kind: str, opts: dict[str, Any], center: bool = True) -> Any:
    """The formulas of the docstring of SAE."""
    w, b, b_dec = sae["W_enc"].tolist(), sae["b_enc"].tolist(), sae["b_dec"].tolist()
    rows = []
    for token in x.tolist():
        v = [t - s for t, s in zip(token, b_dec, strict=True)] if center else token
        z = [max(0.0, sum(p * q for p, q in zip(v, row, strict=True)) + bias) for row, bias in zip(w, b, strict=True)]
        if kind == "topk":
            best = sorted(range(len(z)), key=lambda j: (-z[j], j))[: opts["k"]]
            z = [value if j in best else 0.0 for j, value in enumerate(z)]
        elif kind != "relu":
            t = opts["threshold"]
            bars = t.tolist() if isinstance(t, Tensor) and t.ndim else [float(t)] * len(z)
            z = [value if value > bar else 0.0 for value, bar in zip(z, bars, strict=True)]
        rows.append(z)
    return rows


def plain_top(z: list[list[float]], k: int) -> tuple[list[list[int]], list[list[float]], list[float]]:
    indices, values = [], []
    for row in z:
        best = sorted((j for j, value in enumerate(row) if value > 0), key=lambda j: (-row[j], j))[:k]
        indices.append(best + [-1] * (k - len(best)))
        values.append([row[j] for j in best] + [0.0] * (k - len(best)))
    return indices, values, [max(row) for row in z]


# ---------------------------------------------------------------------- encode, decode, top


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_encode_is_the_formula(kind: str, center: bool) -> None:
    x = random_integers(-3, 3, 30, D, seed=20)
    want = plain_encode(x, sae_tensors(), kind, sae_options(kind), center)
    assert make_sae(kind, center=center).encode(x).tolist() == want
    assert any(value > 0 for row in want for value in row)
    assert center == (want == plain_encode(x, sae_tensors(), kind, sae_options(kind)))  # centering changes the latents


@pytest.mark.parametrize("kind", KINDS)
def test_encode_keeps_leading_dimensions(kind: str) -> None:
    x = random_integers(-3, 3, 6, D)
    sae = make_sae(kind)
    assert torch.equal(sae.encode(x.view(2, 3, D)), sae.encode(x).view(2, 3, C))
    assert torch.equal(sae.encode(x[0]), sae.encode(x)[0])


@pytest.mark.parametrize("k", [1, 2, 4, 5, 6, 12, C])
@pytest.mark.parametrize("kind", KINDS)
def test_top_is_the_top_of_encode(kind: str, k: int) -> None:
    x = random_integers(-3, 3, 40, D, seed=20)
    sae = make_sae(kind)
    indices, values, peak = plain_top(sae.encode(x).tolist(), k)
    concepts = sae.top(x, k)
    assert concepts.indices.tolist() == indices
    assert concepts.values.tolist() == values
    assert concepts.peak.tolist() == peak
    assert concepts.indices.dtype == torch.int64
    assert concepts.values.dtype == torch.float32


@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 8), st.booleans(), st.sampled_from([None, 1, 5]))
def test_top_is_the_top_of_the_formula_for_any_numbers(
    seed: int, kind: str, k: int, center: bool, chunk: int | None
) -> None:
    x = random_integers(-3, 3, 5, D, seed=seed + 50)
    sae = make_sae(kind, seed=seed, center=center)
    want = plain_top(plain_encode(x, sae_tensors(seed), kind, sae_options(kind), center), k)
    concepts = sae.top(x, k, chunk=chunk)
    assert (concepts.indices.tolist(), concepts.values.tolist(), concepts.peak.tolist()) == want


@pytest.mark.parametrize("kind", KINDS)
def test_top_of_random_floats_is_near_the_top_of_encode(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(200, 12, generator=g), torch.randn(50, 12, generator=g)
    opts = {**sae_options(kind), "groups": None}
    opts |= {"threshold": torch.rand(200, generator=g)} if kind == "jumprelu" else {}
    sae = SAE(w, torch.randn(200, generator=g), b_dec=torch.randn(12, generator=g), kind=kind, **opts)  # type: ignore[arg-type]
    concepts, z = sae.top(x, 6), sae.encode(x)
    found = torch.where(concepts.indices >= 0, z.gather(1, concepts.indices.clamp(min=0)), 0.0)
    assert torch.allclose(found, concepts.values, atol=1e-5)
    assert torch.allclose(z.topk(6).values, concepts.values, atol=1e-5)
    assert torch.allclose(z.amax(1), concepts.peak, atol=1e-5)


def test_peak_is_that_of_the_whole_dictionary_whatever_k() -> None:
    x, sae = random_integers(-3, 3, 20, D), make_sae("relu")
    assert torch.equal(sae.top(x, 1).peak, sae.encode(x).amax(1))
    assert torch.equal(sae.top(x, 7).peak, sae.top(x, 1).peak)


def test_fewer_concepts_are_the_first_of_more() -> None:
    x = random_integers(-3, 3, 20, D)
    for kind in KINDS:
        sae = make_sae(kind)
        many = sae.top(x, 9)
        for k in range(1, 10):
            few, first = sae.top(x, k), many.first(k)
            assert torch.equal(few.indices, first.indices)
            assert torch.equal(few.values, first.values)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_pre_threshold_silences_only_what_is_not_positive(kind: str) -> None:
    x = random_integers(-3, 3, 40, D, seed=20)
    before = plain_top(plain_encode(x, sae_tensors(), "relu", {}), 8)
    concepts = make_sae(kind).top(x, 8, rank="pre-threshold")
    assert (concepts.indices.tolist(), concepts.values.tolist(), concepts.peak.tolist()) == before
    assert kind == "relu" or not torch.equal(concepts.indices, make_sae(kind).top(x, 8).indices)


def test_a_threshold_that_is_met_exactly_is_not_exceeded() -> None:
    sae = SAE(torch.eye(3), kind="batchtopk", threshold=2.0)
    x = torch.tensor([[2.0, 2.0 + 2.0**-22, 1.0]])
    assert sae.encode(x).tolist() == [[0.0, 2.0 + 2.0**-22, 0.0]]
    assert sae.top(x, 3).indices.tolist() == [[1, -1, -1]]
    per_latent = SAE(torch.eye(3), kind="jumprelu", threshold=torch.tensor([2.0, 3.0, 0.5]))
    assert per_latent.encode(x).tolist() == [[0.0, 0.0, 1.0]]
    assert per_latent.top(x, 3).indices.tolist() == [[2, -1, -1]]
    assert per_latent.top(x, 1).indices.tolist() == [[2]]


def test_the_own_k_of_a_topk_sae_silences_the_rest() -> None:
    sae = SAE(torch.eye(5), kind="topk", k=2)
    x = torch.tensor([[5.0, 4.0, 4.0, 1.0, 0.0]])
    assert sae.encode(x).tolist() == [[5.0, 4.0, 0.0, 0.0, 0.0]]
    assert sae.top(x, 4).indices.tolist() == [[0, 1, -1, -1]]
    assert sae.top(x, 4, rank="pre-threshold").indices.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("normalize", ["layer_norm", "constant_norm"])
def test_normalisations_are_their_formulas(normalize: Any) -> None:
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(1)) * 3 + 1
    sae = make_sae("relu", normalize=normalize)
    rows = []
    for token in x.double().tolist():
        if normalize == "layer_norm":
            mean = sum(token) / D
            std = math.sqrt(sum((t - mean) ** 2 for t in token) / (D - 1))
            rows.append([(t - mean) / (std + 1e-5) for t in token])
        else:
            norm = math.sqrt(sum(t * t for t in token))
            rows.append([t * math.sqrt(D) / norm for t in token])
    v = torch.tensor(rows, dtype=torch.float64)
    p = {name: value.double() for name, value in sae_tensors().items()}
    want = torch.relu((v - p["b_dec"]) @ p["W_enc"].T + p["b_enc"])
    assert torch.allclose(sae.encode(x).double(), want, atol=1e-4)
    assert torch.allclose(sae.top(x, 3).values.double(), want.topk(3).values, atol=1e-4)
    assert not torch.allclose(sae.encode(x), make_sae("relu").encode(x), atol=1e-2)


@pytest.mark.parametrize("normalize", ["none", "layer_norm", "constant_norm"])
@pytest.mark.parametrize("center", [True, False])
def test_reconstruct_undoes_what_encode_did(normalize: Any, center: bool) -> None:
    eye = torch.eye(D)
    both = torch.cat([eye, -eye])  # relu(v) - relu(-v) = v, so the reconstruction is exact
    b_dec = torch.tensor([0.5, -1.0, 2.0, 0.0])
    x = torch.randn(7, D, generator=torch.Generator().manual_seed(2)) * 5 + 3
    sae = SAE(both, None, both, b_dec, center=center, normalize=normalize)
    scale = x.std(1, keepdim=True) if normalize == "layer_norm" else x.norm(dim=1, keepdim=True) / 2
    extra = 0 if center else b_dec * (1 if normalize == "none" else scale)
    assert torch.allclose(sae.reconstruct(x), x + extra, atol=1e-3)


def test_zero_tokens_survive_every_normalisation() -> None:
    for normalize in ("none", "layer_norm", "constant_norm"):
        sae = make_sae("relu", normalize=normalize)  # type: ignore[arg-type]
        assert torch.isfinite(sae.encode(torch.zeros(2, D))).all()
        assert sae.top(torch.zeros(2, D), 2).values.isfinite().all()
        assert torch.isfinite(sae.reconstruct(torch.zeros(2, D))).all()


def test_decode_is_the_formula() -> None:
    z = random_integers(0, 3, 5, C)
    p = sae_tensors()
    assert torch.equal(make_sae("relu").decode(z), z @ p["W_dec"] + p["b_dec"])
    assert make_sae("relu").decode(z.view(1, 5, C)).shape == (1, 5, D)


def test_without_a_decoder_concepts_work_and_decoding_raises() -> None:
    sae = make_sae("relu", W_dec=None)
    x = random_integers(-3, 3, 4, D)
    assert torch.equal(sae.top(x, 2).indices, make_sae("relu").top(x, 2).indices)
    for call in (lambda: sae.decode(torch.zeros(1, C)), lambda: sae.reconstruct(x)):
        with pytest.raises(BadParameter, match="without its decoder"):
            call()


# ---------------------------------------------------------------------- precision and modes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tokens_of_any_float_type_give_float32_concepts(dtype: torch.dtype) -> None:
    x, sae = random_integers(-3, 3, 10, D), make_sae("matryoshka")
    concepts = sae.top(x.to(dtype), 4)
    assert torch.equal(concepts.indices, sae.top(x, 4).indices)
    assert torch.equal(concepts.values, sae.top(x, 4).values)
    assert sae.encode(x.to(dtype)).dtype == torch.float32


def test_weights_of_half_precision_become_float32() -> None:
    sae = SAE(sae_tensors()["W_enc"].half(), sae_tensors()["b_enc"].bfloat16(), b_dec=sae_tensors()["b_dec"].double())
    assert {buffer.dtype for buffer in sae.buffers()} == {torch.float32}
    assert torch.equal(
        sae.top(random_integers(-3, 3, 4, D), 3).indices, make_sae("relu").top(random_integers(-3, 3, 4, D), 3).indices
    )


def test_autocast_does_not_change_the_answer() -> None:
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(64, 16, generator=g), torch.randn(6, 16, generator=g)
    want = SAE(w, normalize="layer_norm").top(x, 8)
    fresh = SAE(w, normalize="layer_norm")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fresh.top(x, 8)
        half = fresh.top(x.bfloat16(), 8)
    assert torch.equal(got.indices, want.indices)
    assert torch.equal(got.values, want.values)
    assert torch.equal(half.values, fresh.top(x.bfloat16(), 8).values)


def test_no_gradient_is_kept_and_none_is_needed() -> None:
    x = random_integers(-3, 3, 4, D).requires_grad_()
    sae = make_sae("relu")
    concepts = sae.top(x, 3)
    assert not concepts.values.requires_grad
    assert not list(sae.parameters())
    with torch.inference_mode():
        assert torch.equal(sae.top(x, 3).indices, concepts.indices)


def test_an_sae_made_for_inference_only_works() -> None:
    x = random_integers(-3, 3, 4, D)
    with torch.inference_mode():
        sae = make_sae("jumprelu")
        inside = sae.top(x, 3)
    assert torch.equal(sae.top(x, 3).indices, inside.indices)
    assert torch.equal(inside.indices, make_sae("jumprelu").top(x, 3).indices)


def test_new_weights_are_not_read_with_the_old_bound() -> None:
    """A bound cached for small weights must not be used for larger weights loaded later."""
    g = torch.Generator().manual_seed(5)
    fine = (torch.randn(24, 32, generator=g) * 256).round().clamp(-1024, 1024) / 256
    big = (torch.randn(1500, 32, generator=g) * 1000).round().clamp(-2000, 2000)
    rare = torch.randint(-1, 2, (1500, 64), generator=g) * (torch.rand(1500, 64, generator=g) < 0.125)
    apart = torch.randperm(64, generator=g)
    x = fine.repeat_interleave(2, 1)[:, apart]
    w = (torch.stack([big, -big], 2).reshape(1500, 64) + rare / 4096)[:, apart]  # large parts cancel
    sae = SAE(w * 2.0**-40)
    sae.top(x, 3)
    sae.load_state_dict(SAE(w).state_dict())
    exact = (x.double() @ w.double().T).float()
    order = exact.sort(dim=1, descending=True, stable=True)
    assert torch.equal(sae.top(x, 3).values, order.values[:, :3].clamp(min=0))
    assert torch.equal(sae.top(x, 3).indices, order.indices[:, :3])


def test_the_answer_of_one_image_does_not_depend_on_its_batch() -> None:
    g = torch.Generator().manual_seed(3)
    w, x = torch.randn(300, 33, generator=g), torch.randn(20, 33, generator=g)
    for normalize in ("none", "layer_norm", "constant_norm"):
        sae = SAE(w, normalize=normalize)  # type: ignore[arg-type]
        together = sae.top(x, 5)
        for i in range(20):
            alone = sae.top(x[i : i + 1], 5)
            assert torch.equal(alone.indices[0], together.indices[i])
            assert torch.equal(alone.values[0], together.values[i])


# ---------------------------------------------------------------------- levels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_first_levels_are_the_first_latents(kind: str, levels: int) -> None:
    x = random_integers(-3, 3, 30, D)
    sae = make_sae(kind, groups=(4, 8, 12))
    size = (4, 12, 24)[levels - 1]
    small = sae.first(levels)
    opts = sae_options(kind)
    if kind == "topk":
        opts["k"] = min(5, size)
    if kind == "jumprelu":
        opts["threshold"] = opts["threshold"][:size]
    cut = {name: value if name == "b_dec" else value[:size] for name, value in sae_tensors().items()}
    assert small.encode(x).tolist() == plain_encode(x, cut, kind, opts)
    assert small.groups == (4, 8, 12)[:levels]
    assert (small.kind, small.latents, small.width) == (kind, size, D)
    assert small.W_enc.data_ptr() == sae.W_enc.data_ptr()
    indices, values, peak = plain_top(small.encode(x).tolist(), 3)
    top = small.top(x, 3)
    assert (top.indices.tolist(), top.values.tolist(), top.peak.tolist()) == (indices, values, peak)


def test_first_keeps_everything_else() -> None:
    sae = make_sae("matryoshka", center=False, normalize="constant_norm", card=SAECard(name="m", block=3))
    small = sae.first(1)
    assert (small.center, small.normalize, small.card) == (False, "constant_norm", sae.card)
    assert torch.equal(small.decode(torch.zeros(1, 4)), sae.b_dec[None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unknown = make_sae("matryoshka", threshold=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unknown.first(2)  # the warning is issued only once


@pytest.mark.parametrize("levels", [0, 4, -1])
def test_levels_out_of_range_are_refused(levels: int) -> None:
    with pytest.raises(BadParameter, match=rf"levels must be between 1 and 3.*\(4, 8, 12\).*got {levels}"):
        make_sae("matryoshka").first(levels)


# ---------------------------------------------------------------------- thresholds that were never estimated


@pytest.mark.parametrize("kind", ["batchtopk", "matryoshka", "jumprelu"])
@pytest.mark.parametrize("threshold", [-1.0, None, torch.tensor(-1.0), torch.tensor([-1.0])])
def test_a_threshold_never_estimated_warns_and_lets_all_pass(kind: Any, threshold: Any) -> None:
    with pytest.warns(UserWarning, match="never estimated"):
        sae = make_sae(kind, threshold=threshold)
    x = random_integers(-3, 3, 20, D)
    assert sae.encode(x).tolist() == plain_encode(x, sae_tensors(), "relu", {})
    assert torch.equal(sae.top(x, 5).indices, make_sae("relu").top(x, 5).indices)


def test_a_threshold_of_zero_is_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sae = make_sae("batchtopk", threshold=0.0)
    assert torch.equal(sae.encode(random_integers(-3, 3, 9, D)), make_sae("relu").encode(random_integers(-3, 3, 9, D)))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("k", [0, -1, C + 1])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(BadParameter, match=f"k must be between 1 and {C}, the number of latents; got {k}"):
        make_sae("relu").top(torch.zeros(2, D), k)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(D), r"shape \(N, D\)"),
        (torch.zeros(1, 2, D), r"shape \(N, D\)"),
        (torch.zeros(0, D), "empty"),
        (torch.zeros(2, D, dtype=torch.int64), "floating point, got torch.int64"),
        (torch.tensor([[0.0] * D, [0.0, math.nan, 0.0, 0.0]]), "NaN or infinite.*row 1"),
        (torch.full((1, D), math.inf), "NaN or infinite"),
        ([[0.0] * D], "torch Tensor, got list"),
    ],
)
def test_bad_tokens_are_refused(x: Any, words: str) -> None:
    with pytest.raises(BadTokens, match=words):
        make_sae("relu").top(x, 2)


def test_tokens_too_large_for_float32_are_no_nan() -> None:
    """Values that are finite in float64 but not in float32 raise an error or give a result without NaN."""
    try:
        concepts = SAE(torch.eye(3)).top(torch.full((1, 3), 1e300, dtype=torch.float64), 1)
    except BadTokens:
        return
    assert not concepts.values.isnan().any()


@pytest.mark.parametrize("width", [1, D - 1, D + 1])
def test_tokens_of_another_width_are_refused(width: int) -> None:
    for call in (
        lambda: make_sae("relu").top(torch.zeros(2, width), 1),
        lambda: make_sae("relu").check_origin(Origin(), width),
    ):
        with pytest.raises(SAEMismatch, match=f"reads tokens of width {D} .*the tokens have width {width} "):
            call()


def test_tokens_of_width_one_are_not_encoded_by_accident() -> None:
    """One column minus b_dec would broadcast to a full token."""
    with pytest.raises((SAEMismatch, RuntimeError)):
        make_sae("relu").encode(torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"W_enc": torch.zeros(3)}, BadTokens, "W_enc must have shape"),
        ({"W_enc": torch.full((C, D), math.nan)}, BadTokens, "W_enc contains NaN"),
        ({"b_enc": torch.zeros(C + 1)}, BadParameter, rf"b_enc must have shape \({C},\)"),
        ({"b_dec": torch.zeros(C)}, BadParameter, rf"b_dec must have shape \({D},\)"),
        ({"b_enc": torch.full((C,), math.inf)}, BadFile, "b_enc contains NaN or infinite"),
        ({"W_dec": torch.zeros(D, C)}, BadParameter, "W_dec must have the shape of W_enc"),
        ({"kind": "gated"}, BadParameter, "kind must be one of 'relu'.*got 'gated'"),
        ({"normalize": "l2"}, BadParameter, "normalize must be one of 'none'.*got 'l2'"),
        ({"kind": "relu", "threshold": 2.0}, BadParameter, "A relu SAE has no threshold, but one was given.*jumprelu"),
        ({"kind": "topk"}, BadParameter, f"needs k between 1 and {C}, the number of latents; got None"),
        ({"kind": "topk", "k": 0}, BadParameter, "got 0"),
        ({"kind": "topk", "k": C + 1}, BadParameter, f"got {C + 1}"),
        ({"kind": "topk", "k": 2.5}, BadParameter, r"k must be a whole number .* got 2\.5"),
        ({"kind": "batchtopk", "k": -1, "threshold": 1.0}, BadParameter, "k must be between 1 .* got -1"),
        ({"kind": "batchtopk", "k": math.nan, "threshold": 1.0}, BadParameter, "k must be a whole number .* got nan"),
        ({"kind": "topk", "k": True}, BadParameter, "k must be a whole number .* got True"),
        ({"kind": "topk", "k": "2"}, BadParameter, "k must be a whole number .* got '2'"),
        ({"groups": (4, 4)}, BadParameter, rf"add up to {C}, the number of latents; got \(4, 4\)"),
        ({"groups": (C + 2, -2)}, BadParameter, "groups must be positive"),
        ({"groups": ()}, BadParameter, "groups"),
        ({"kind": "jumprelu", "threshold": torch.zeros(3)}, BadParameter, rf"one number or one per latent \({C}\)"),
        ({"kind": "batchtopk", "threshold": math.nan}, (BadParameter, BadFile), "threshold"),
        ({"kind": "jumprelu", "threshold": torch.full((C,), math.nan)}, (BadParameter, BadFile), "threshold"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make_sae("relu", **change) if "kind" not in change else SAE(sae_tensors()["W_enc"], **change)


@pytest.mark.parametrize("chunk", [-1, -4096])
def test_a_chunk_below_one_is_refused(chunk: int) -> None:
    with pytest.raises(BadParameter, match=f"chunk.*got {chunk}"):
        make_sae("relu").top(torch.zeros(1, D), 1, chunk=chunk)


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(BadParameter, match="rank must be one of 'activation', 'pre-threshold', got 'norm'"):
        make_sae("relu").top(torch.zeros(1, D), 1, rank="norm")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- origin


CARD = SAECard(encoder="openai/clip-vit-large-patch14-336", block=22)


def test_another_encoder_or_block_is_refused_by_name() -> None:
    sae = make_sae("relu", card=CARD)
    with pytest.raises(SAEMismatch) as caught:
        sae.check_origin(Origin("google/siglip-base", 22), D)
    assert "openai/clip-vit-large-patch14-336, block 22" in str(caught.value)
    assert "google/siglip-base, block 22" in str(caught.value)
    with pytest.raises(SAEMismatch, match=r"block 22.*block 11"):
        sae.check_origin(Origin("openai/clip-vit-large-patch14-336", 11), D)
    with pytest.raises(SAEMismatch, match=r"block 22.*block 0"):
        sae.check_origin(Origin("", 0), D)


def test_the_same_or_an_unknown_origin_fits() -> None:
    sae = make_sae("relu", card=CARD)
    for origin in (Origin(), Origin("CLIP-ViT-Large-Patch14-336", 22), Origin("", 22), Origin(CARD.encoder)):
        sae.check_origin(origin, D)
    make_sae("relu").check_origin(Origin("anything", 3), D)
    with pytest.raises(SAEMismatch, match=r"block 0.*block 1"):
        make_sae("relu", card=SAECard(block=0)).check_origin(Origin("", 1), D)


def test_a_reducer_refuses_tokens_of_another_origin() -> None:
    reducer = make("torino-m", sae=make_sae("relu", card=CARD))
    good = VisualTokens.of(random_integers(-3, 3, 4, D))
    bad = VisualTokens.of(random_integers(-3, 3, 4, D), origin=Origin("other/encoder", 22))
    with pytest.raises(SAEMismatch, match="other/encoder"):
        reducer.plan_batch([good, bad])


def test_repr_contains_kind_and_sizes() -> None:
    text = repr(make_sae("topk", card=SAECard(name="mine")))
    for words in ("mine", "topk", "4 wide", "24 latents", "k=5"):
        assert words in text
    assert "groups=(4, 8, 12)" in repr(make_sae("matryoshka"))
    assert isinstance(make_sae("relu"), ConceptEncoder)


def test_facts_and_cards_hold_what_was_given() -> None:
    sae = make_sae("topk", card=SAECard(name="mine")).update_card(block=7, license="MIT")
    facts = sae.facts()
    assert (facts["kind"], facts["width"], facts["latents"], facts["k"]) == ("topk", D, C, 5)
    assert (facts["name"], facts["block"], facts["license"]) == ("mine", 7, "MIT")
    assert SAECard.of({"name": "a", "unknown": 1}) == SAECard(name="a")


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16)])
@pytest.mark.parametrize("inside", [False, True])
def test_weights_keep_every_bit_whatever_is_done_to_the_model(move: Any, inside: bool) -> None:
    weight = torch.randn(5, 4) * 1e6
    sae = SAE(weight, threshold=0.1, kind="batchtopk")
    move(torch.nn.Sequential(sae, torch.nn.Linear(2, 2)) if inside else sae)
    assert torch.equal(sae.W_enc, weight)
    assert sae.W_enc.dtype == sae.b_enc.dtype == torch.float32


def test_the_bound_follows_weights_that_are_replaced_or_edited_through_data() -> None:
    sae = SAE(torch.eye(4))
    for factor in (10.0, 10.0, 0.1):
        sae.W_enc = sae.W_enc * factor
        assert sae._bounds(sae._weights_state(), False)[0] == pytest.approx(float(sae.W_enc.norm(dim=1).max()))
    sae.W_enc.data.mul_(7)
    assert sae._bounds(sae._weights_state(), False)[0] == pytest.approx(float(sae.W_enc.norm(dim=1).max()))


def test_autocast_rounds_neither_latents_nor_tokens() -> None:
    random = torch.Generator().manual_seed(0)
    sae = SAE(torch.randn(20, 8, generator=random), W_dec=torch.randn(20, 8, generator=random))
    x = torch.randn(5, 8, generator=random)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = sae.encode(x)
        again = sae.reconstruct(x)
    assert z.dtype == again.dtype == torch.float32
    assert torch.equal(z, sae.encode(x))
    assert torch.equal(again, sae.reconstruct(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [True, False])
def test_a_cached_encoder_returns_the_same(kind: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sae = make_sae(kind)
    x = random_integers(-3, 3, 40, D, seed=5)  # integers, with many ties
    x = x if exact else x + torch.rand(40, D, generator=torch.Generator().manual_seed(1))
    wanted = {(k, rank): sae.top(x, k, rank=rank) for k in (1, 3, 8) for rank in ("activation", "pre-threshold")}
    calls: list[int] = []
    stock = sae.top
    monkeypatch.setattr(sae, "top", lambda tokens, k, **given: calls.append(k) or stock(tokens, k, **given))
    encoder = CachedEncoder(sae)
    assert isinstance(encoder, ConceptEncoder)
    assert encoder.latents == C
    for rank in ("activation", "pre-threshold"):
        for k in (3, 1, 8, 3):
            result = encoder.top(x, k, rank=rank)
            for name in ("indices", "values", "peak"):
                assert torch.equal(getattr(result, name), getattr(wanted[k, rank], name))
    assert calls == [3, 8, 3, 8]
    encoder.top(x.clone(), 1)  # another tensor with equal values
    x.add_(1)
    encoder.top(x, 1)
    assert calls[4:] == [1, 1]
    assert encoder.saved_seconds > 0
    with pytest.raises(BadParameter, match="k must be between 1"):
        encoder.top(x, 0)
    assert torch.equal(copy.deepcopy(encoder).top(x, 1).indices, encoder.top(x, 1).indices)
    with pytest.raises(SAEMismatch):
        encoder.check_origin(Origin(), D + 1)
