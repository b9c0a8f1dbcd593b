"""The layout of Prisma (ViT-Prisma): weights.pt or n_images_<N>.pt, and config.json, as in its hub repositories.

The package index has only a release without SAEs (0.1.4). The formulas follow StandardSparseAutoencoder and
Transcoder of the repository, the config is what VisionModelSAERunnerConfig.save_config writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    C,
    D,
    K,
    X,
    check_sae,
    parameter_weights,
    random_tensor,
    top_k,
    write_files,
)
from torch import Tensor

from torino.core.errors import BadFile, PickledObject
from torino.sae import SAE


def prisma(folder: Path, tensors: dict[str, Any], name: str = "weights.pt", **config: Any) -> SAE:
    cfg = {
        "model_class_name": "HookedViT",
        "model_name": "open-clip:laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K",
        "vit_model_cfg": None,
        "hook_point_layer": 9,
        "layer_subtype": "hook_resid_post",
        "d_in": D,
        "activation_fn_str": "relu",
        "activation_fn_kwargs": {},
        "cls_token_only": False,
        "use_patches_only": False,
        "normalize_activations": "none",
        "device": {"__type__": "torch.device", "value": "cuda"},
        "dtype": {"__type__": "torch.dtype", "value": "torch.float32"},
        "architecture": "standard",
        "expansion_factor": C // D,
        "d_sae": C,
        "is_transcoder": False,
        "dataset_name": "imagenet1k",
        **config,
    }
    options = {"decoder": False} if config.pop("decoder", True) is False else {}
    return SAE.load(write_files(folder, name, tensors, config=cfg), **options)


def hidden(s: dict[str, Tensor], x: Tensor = X) -> Tensor:
    return (x - s["b_dec"]) @ s["W_enc"] + s["b_enc"]


@pytest.mark.parametrize("name", ["weights.pt", "n_images_2600058.pt"])
def test_prisma_relu(tmp_path: Path, name: str) -> None:
    s = parameter_weights()
    sae = prisma(tmp_path, s, name)
    z = torch.relu(hidden(s))
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.center) == ("relu", True)


def test_prisma_topk(tmp_path: Path) -> None:
    s = parameter_weights()
    sae = prisma(tmp_path, s, activation_fn_str="topk", activation_fn_kwargs={"k": K})
    z = torch.relu(top_k(hidden(s)))
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.k) == ("topk", K)


@pytest.mark.parametrize("mode", ["layer_norm", "constant_norm_rescale", None])
def test_prisma_normalization(tmp_path: Path, mode: str | None) -> None:
    s = parameter_weights()
    sae = prisma(tmp_path, s, normalize_activations=mode)
    shift, scale = torch.zeros(()), torch.ones(())
    x = X
    if mode == "layer_norm":
        shift = X.mean(-1, keepdim=True)
        scale = (X - shift).std(-1, keepdim=True)
        x = (X - shift) / (scale + 1e-5)
    elif mode is not None:
        scale = X.norm(dim=-1, keepdim=True) / D**0.5
        x = X / scale
    z = torch.relu(hidden(s, x))
    check_sae(sae, z, (z @ s["W_dec"] + s["b_dec"]) * scale + shift)


def test_prisma_transcoder(tmp_path: Path) -> None:
    s = parameter_weights(b_dec_out=random_tensor(D, seed=6))
    sae = prisma(tmp_path, s, is_transcoder=True, normalize_activations="layer_norm", d_out=D)
    shift = X.mean(-1, keepdim=True)
    scale = (X - shift).std(-1, keepdim=True)
    z = torch.relu(hidden(s, (X - shift) / (scale + 1e-5)))
    check_sae(sae, z, (z @ s["W_dec"] + s["b_dec_out"]) * scale + shift)
    assert "Transcoder" in sae.card.notes


def test_prisma_transcoder_to_another_width(tmp_path: Path) -> None:
    s = parameter_weights(b_dec_out=random_tensor(D + 1, seed=6)) | {"W_dec": random_tensor(C, D + 1, seed=2)}
    with pytest.raises(BadFile, match=r"from width 8 to width 9.*decoder=False"):
        prisma(tmp_path, s, is_transcoder=True)
    torch.testing.assert_close(prisma(tmp_path, s, is_transcoder=True, decoder=False).encode(X), torch.relu(hidden(s)))


@pytest.mark.parametrize(
    ("config", "block", "tokens", "notes"),
    [
        ({}, 9, "", ""),
        ({"layer_subtype": "hook_mlp_out", "cls_token_only": True}, None, "cls", "Hook hook_mlp_out."),
        ({"layer_subtype": "hook_resid_pre", "use_patches_only": True}, 8, "patch", ""),
        ({"hook_point_layer": [9]}, None, "", "Hook hook_resid_post."),
    ],
)
def test_prisma_fills_the_card(
    tmp_path: Path, config: dict[str, Any], block: int | None, tokens: str, notes: str
) -> None:
    card = prisma(tmp_path, parameter_weights(), **config).card
    assert card.encoder == "laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K"
    assert (card.block, card.token_kind, card.data, card.notes) == (block, tokens, "imagenet1k", notes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"activation_fn_str": "jump-relu"}, "activation 'jump-relu'"),
        ({"activation_fn_str": "tanh-relu"}, "activation 'tanh-relu'"),
        ({"activation_fn_str": ["relu"]}, "activation"),
        ({"architecture": "jumprelu"}, "architecture 'jumprelu'"),
        ({"normalize_activations": "mystery"}, "normalize_activations = 'mystery'. Accepted: 'none', 'layer_norm'"),
        ({"normalize_activations": ["none"]}, r"normalize_activations = \['none'\]"),
        ({"activation_fn_str": "topk"}, "needs k"),
        ({"d_sae": 99}, "d_sae = 99, but the weights have 24"),
        ({"d_in": "8"}, "d_in = '8'"),
        ({"is_transcoder": "no"}, "is_transcoder = 'no'. Accepted: true or false"),
    ],
)
def test_prisma_refuses(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFile, match=words) as caught:
        prisma(tmp_path, parameter_weights(), **config)
    assert str(tmp_path) in str(caught.value)


def test_prisma_with_other_tensors(tmp_path: Path) -> None:
    gates = {name: random_tensor(C) for name in ("b_gate", "r_mag", "b_mag")}
    with pytest.raises(BadFile, match="gated"):
        prisma(tmp_path, parameter_weights(**gates), architecture="gated")
    skip = {"W_skip": random_tensor(D, D), "b_dec_out": random_tensor(D)}
    with pytest.raises(BadFile, match="skip connection"):
        prisma(tmp_path, parameter_weights(**skip), is_transcoder=True)


def test_prisma_without_its_config(tmp_path: Path) -> None:
    prisma(tmp_path, parameter_weights())
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadFile, match=r"kind is unknown.*Download the config\.json"):
        SAE.load(tmp_path)


class VisionModelSAERunnerConfig:
    """Stands for the config object that Prisma's save_model pickles into the weights."""


VisionModelSAERunnerConfig.__module__ = "vit_prisma.sae.config"


def test_prisma_with_a_pickled_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    for name in ("vit_prisma", "vit_prisma.sae", "vit_prisma.sae.config"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vit_prisma.sae.config"].VisionModelSAERunnerConfig = VisionModelSAERunnerConfig  # type: ignore[attr-defined]
    torch.save({"cfg": VisionModelSAERunnerConfig(), "state_dict": parameter_weights()}, tmp_path / "n_images_1.pt")
    words = (
        r"besides tensors it contains a pickled object \(vit_prisma\.sae\.config\.VisionModelSAERunnerConfig\).*"
        r"torch\.save\(sae\.state_dict\(\), 'weights\.pt'\) and sae\.cfg\.save_config\('config\.json'\)"
    )
    with pytest.raises(PickledObject, match=words):
        SAE.load(tmp_path)
