"""The layout of overcomplete: the state dict of an SAE. Checked against version 0.3.0 (test_libraries.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    THRESHOLD,
    C,
    D,
    K,
    X,
    check_sae,
    gate,
    random_tensor,
    top_k,
    write_files,
)
from torch import Tensor

from torino.core.errors import BadFile, PickledObject
from torino.sae import SAE

LINEAR, NORM = "encoder.final_block.0", "encoder.final_block.1"


def weights(**extra: Tensor) -> dict[str, Tensor]:
    """State dict of an SAE with the encoder 'linear' in evaluation mode."""
    return {
        f"{LINEAR}.weight": random_tensor(C, D, seed=1),
        f"{LINEAR}.bias": random_tensor(C, seed=3),
        "dictionary._weights": torch.nn.functional.normalize(random_tensor(C, D, seed=2), dim=1),
        "dictionary.multiplier": torch.tensor(0.7),
        **extra,
    }


def hidden(s: dict[str, Tensor]) -> Tensor:
    return X @ s[f"{LINEAR}.weight"].T + s[f"{LINEAR}.bias"]


def dictionary(s: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.normalize(s["dictionary._weights"], dim=1) * s["dictionary.multiplier"].exp()


def load(folder: Path, s: dict[str, Tensor], **options: Any) -> SAE:
    return SAE.load(write_files(folder, "sae.pth", s), **options)


def test_overcomplete_relu(tmp_path: Path) -> None:
    s = weights()
    z = torch.relu(hidden(s))
    sae = load(tmp_path, s, kind="relu")
    check_sae(sae, z, z @ dictionary(s))
    assert (sae.center, sae.k) == (False, None)


def test_overcomplete_topk(tmp_path: Path) -> None:
    s = weights()
    z = top_k(torch.relu(hidden(s)))
    check_sae(load(tmp_path, s, kind="topk", k=K), z, z @ dictionary(s))


def test_overcomplete_batchtopk(tmp_path: Path) -> None:
    s = weights()
    z = gate(torch.relu(hidden(s)), THRESHOLD)
    check_sae(load(tmp_path, s, kind="batchtopk", threshold=THRESHOLD), z, z @ dictionary(s))


@pytest.mark.parametrize("decoder", [True, False])
def test_overcomplete_jumprelu(tmp_path: Path, decoder: bool) -> None:
    s = weights(thresholds=random_tensor(C, seed=5) - 1)
    z = torch.relu(hidden(s))
    s["thresholds"][0] = z[0, 0].log() if z[0, 0] > 0 else s["thresholds"][0]
    z = z * (z >= s["thresholds"].exp())  # a latent equal to its threshold is kept
    sae = load(tmp_path, s, decoder=decoder)
    assert sae.kind == "jumprelu"
    if decoder:
        check_sae(sae, z, z @ dictionary(s))
    torch.testing.assert_close(sae.encode(X), z)


@pytest.mark.parametrize("kind", ["jumprelu", "batchtopk"])
def test_overcomplete_keeps_latents_equal_to_the_threshold(tmp_path: Path, kind: str) -> None:
    s = weights(**({"thresholds": torch.zeros(C)} if kind == "jumprelu" else {}))
    s[f"{LINEAR}.weight"] = torch.zeros(C, D)
    s[f"{LINEAR}.bias"] = torch.linspace(0, 2, C + 1)[:C]  # one of them is exp(0) = 1
    z = load(tmp_path, s, **({} if kind == "jumprelu" else {"kind": kind, "threshold": 1.0})).encode(X[:1])[0]
    assert z.tolist() == [value if value >= 1 else 0 for value in s[f"{LINEAR}.bias"].tolist()]
    assert 1.0 in z.tolist()


def test_overcomplete_folds_batch_norm(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(C).eval()
    with torch.no_grad():
        for number, value in enumerate((norm.weight, norm.bias, norm.running_mean)):
            assert value is not None
            value.copy_(random_tensor(C, seed=10 + number))
        assert norm.running_var is not None
        norm.running_var.copy_(random_tensor(C, seed=13).abs())
        s = weights(**{f"{NORM}.{name}": value for name, value in norm.state_dict().items()})
        z = top_k(torch.relu(norm(hidden(s))))
    check_sae(load(tmp_path, s, kind="topk", k=K), z, z @ dictionary(s))


@pytest.mark.parametrize("bias", [True, False])
def test_overcomplete_untied(tmp_path: Path, bias: bool) -> None:
    s = weights()
    encoder, shift = s.pop(f"{LINEAR}.weight"), s.pop(f"{LINEAR}.bias")
    s |= {"encoder.weight": encoder, **({"encoder.bias": shift} if bias else {})}
    z = torch.relu(X @ encoder.T + shift * bias)
    check_sae(load(tmp_path, s, kind="relu"), z, z @ dictionary(s))


@pytest.mark.parametrize("decoder", [True, False])
def test_overcomplete_tied(tmp_path: Path, decoder: bool) -> None:
    s = weights()
    del s[f"{LINEAR}.weight"], s[f"{LINEAR}.bias"]
    s |= {f"encoder.tied_to.{name.split('.')[1]}": value for name, value in s.items()}
    z = torch.relu(X @ dictionary(s).T)
    sae = load(tmp_path, s, kind="relu", decoder=decoder)
    torch.testing.assert_close(sae.encode(X), z)
    assert (sae.W_dec is not None) == decoder


def test_overcomplete_normalizes_a_dictionary_saved_in_training(tmp_path: Path) -> None:
    s = weights()
    s["dictionary._weights"] = s["dictionary._weights"] * (1 + torch.linspace(-0.02, 0.02, C))[:, None]
    z = torch.relu(hidden(s))
    check_sae(load(tmp_path, s, kind="relu"), z, z @ dictionary(s))


def test_overcomplete_keeps_a_dictionary_of_other_norms(tmp_path: Path) -> None:
    s = weights()
    s["dictionary._weights"] = s["dictionary._weights"] * torch.linspace(0.1, 1, C)[:, None]  # normalization "max_l2"
    z = torch.relu(hidden(s))
    check_sae(load(tmp_path, s, kind="relu"), z, z @ (s["dictionary._weights"] * s["dictionary.multiplier"].exp()))


def test_overcomplete_archetypal_dictionary(tmp_path: Path) -> None:
    s = weights()
    del s["dictionary._weights"]
    s |= {"dictionary.C": random_tensor(10, D, seed=6), "dictionary.W": random_tensor(C, 10, seed=7)}
    s["dictionary.Relax"] = random_tensor(C, D, seed=8) * 0.1
    mix = torch.relu(s["dictionary.W"])
    mix = mix / (mix.sum(dim=-1, keepdim=True) + 1e-8)
    rows = (mix @ s["dictionary.C"] + s["dictionary.Relax"]) * s["dictionary.multiplier"].exp()
    z = top_k(torch.relu(hidden(s)))
    check_sae(load(tmp_path, s, kind="topk", k=K), z, z @ rows)


def test_overcomplete_does_not_contain_its_kind(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"does not define the kind.*kind='topk' with k=.*torino export FILE"):
        load(tmp_path, weights())
    with pytest.raises(BadFile, match=r"needs k between 1 and 24.*neither the kind nor k"):
        load(tmp_path, weights(), kind="topk")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"Q": torch.linspace(0, 1, 4)}, "quantized"),
        ({f"{LINEAR}.weight": ..., f"{LINEAR}.bias": ...}, "matching pursuit"),
        ({f"{NORM}.weight": torch.ones(C), f"{NORM}.bias": torch.zeros(C)}, "LayerNorm over the latents"),
        ({"encoder.mlp_blocks.0.0.weight": torch.eye(D)}, "not one linear layer"),
        ({"encoder.attention_blocks.0.norm1.weight": torch.ones(D)}, "not one linear layer"),
        (
            {"dictionary._weights": random_tensor(C + 1, D)},
            r"dictionary .* shape \(25, 8\).*encoder has shape \(24, 8\)",
        ),
        ({"dictionary._weights": torch.full((C, D), torch.nan)}, "'dictionary._weights' .* NaN"),
        ({"dictionary.multiplier": torch.tensor(torch.nan)}, "'dictionary.multiplier' .* not a finite number"),
        ({"dictionary.multiplier": torch.tensor(1e4)}, "W_dec contains NaN or infinite"),
        ({f"{LINEAR}.weight": random_tensor(C)}, "not that of a matrix"),
        ({f"{LINEAR}.bias": random_tensor(C + 1)}, r"final_block\.0\.bias' .* shape \(25,\)"),
        ({"thresholds": random_tensor(3)}, "'thresholds' .* shape"),
    ],
)
def test_overcomplete_refuses(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    s = weights() | change
    kind = None if "thresholds" in change else "relu"
    with pytest.raises(BadFile, match=words) as caught:
        load(tmp_path, {name: value for name, value in s.items() if value is not ...}, kind=kind)
    assert "sae.pth" in str(caught.value)


def test_a_pickled_model_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "sae.pth")
    with pytest.raises(PickledObject, match=r"torch\.nn\.modules\.linear\.Linear\).*save its state_dict\(\)"):
        SAE.load(tmp_path)
