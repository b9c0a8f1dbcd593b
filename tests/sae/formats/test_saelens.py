"""The SAELens layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    GROUPS,
    THRESHOLD,
    C,
    D,
    K,
    X,
    check_sae,
    gate,
    parameter_weights,
    random_tensor,
    top_k,
    write_files,
)
from torch import Tensor

from torino.core.errors import BadFile
from torino.sae import SAE


def saelens(folder: Path, tensors: dict[str, Tensor], architecture: str | None, **config: Any) -> SAE:
    cfg = {"d_in": D, "d_sae": C, "dtype": "float32", "apply_b_dec_to_input": True, **config}
    cfg |= {"architecture": architecture} if architecture else {}
    return SAE.load(write_files(folder, "sae_weights.safetensors", tensors, cfg=cfg))


def hidden(s: dict[str, Tensor], x: Tensor = X, *, center: bool = True) -> Tensor:
    return (x - s["b_dec"] * center) @ s["W_enc"] + s["b_enc"]


@pytest.mark.parametrize("center", [True, False])
def test_saelens_standard(tmp_path: Path, center: bool) -> None:
    s = parameter_weights()
    z = torch.relu(hidden(s, center=center))
    sae = saelens(tmp_path, s, "standard", apply_b_dec_to_input=center, normalize_activations="none")
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])


def test_saelens_jumprelu(tmp_path: Path) -> None:
    s = parameter_weights(threshold=random_tensor(C, seed=7).abs())
    z = torch.relu(hidden(s)) * (hidden(s) > s["threshold"])
    sae = saelens(tmp_path, s, "jumprelu")
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert sae.kind == "jumprelu"


def test_saelens_jumprelu_of_an_older_training_save(tmp_path: Path) -> None:
    s = parameter_weights(log_threshold=random_tensor(C, seed=7))
    z = gate(torch.relu(hidden(s)), s["log_threshold"].exp())
    check_sae(saelens(tmp_path, s, "jumprelu"), z, z @ s["W_dec"] + s["b_dec"])


@pytest.mark.parametrize("rescale", [True, False])
def test_saelens_topk(tmp_path: Path, rescale: bool) -> None:
    s = parameter_weights()
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = torch.relu(top_k(hidden(s) * norm))
    sae = saelens(tmp_path, s, "topk", k=K, rescale_acts_by_decoder_norm=rescale)
    check_sae(sae, z, (z / norm) @ s["W_dec"] + s["b_dec"])


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("architecture", ["batchtopk", "matryoshka_batchtopk"])
@pytest.mark.parametrize("decoder", [True, False])
def test_saelens_training_saves(tmp_path: Path, rescale: bool, architecture: str, decoder: bool) -> None:
    s = parameter_weights(topk_threshold=torch.tensor(THRESHOLD, dtype=torch.double))
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = gate(torch.relu(hidden(s) * norm), THRESHOLD)
    config = {"k": K + 0.4, "rescale_acts_by_decoder_norm": rescale, "matryoshka_widths": [4, 12]}
    sae = saelens(tmp_path, s, architecture, **config)
    check_sae(sae, z, (z / norm) @ s["W_dec"] + s["b_dec"])
    assert sae.k == K
    assert sae.groups == GROUPS  # cumulative widths 4 and 12; the library adds the last one
    assert sae.kind == {"batchtopk": "batchtopk"}.get(architecture, "matryoshka")
    torch.testing.assert_close(SAE.load(tmp_path, decoder=decoder).encode(X), sae.encode(X))


def test_saelens_inference_save_remembers_its_training(tmp_path: Path) -> None:
    s = parameter_weights(threshold=torch.full((C,), THRESHOLD))
    details = {"k": K, "matryoshka_widths": [4, 12, 24], "rescale_acts_by_decoder_norm": True}
    metadata = {"training_architecture": "matryoshka_batchtopk", "training_architecture_details": details}
    sae = saelens(tmp_path, s, "jumprelu", metadata=metadata)
    z = gate(torch.relu(hidden(s)), THRESHOLD)  # the flag belongs to the training save and is folded already
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.groups, sae.k) == ("matryoshka", GROUPS, K)


@pytest.mark.parametrize("mode", ["layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("center", [True, False])
def test_saelens_normalization(tmp_path: Path, mode: str, center: bool) -> None:
    s = parameter_weights()
    sae = saelens(tmp_path, s, "standard", normalize_activations=mode, apply_b_dec_to_input=center)
    if mode == "layer_norm":
        mu = X.mean(-1, keepdim=True)
        std = (X - mu).std(-1, keepdim=True)
        z = torch.relu(hidden(s, (X - mu) / (std + 1e-5), center=center))
        check_sae(sae, z, (z @ s["W_dec"] + s["b_dec"]) * std + mu)
    else:
        factor = D**0.5 / X.norm(dim=-1, keepdim=True)
        z = torch.relu(hidden(s, X * factor, center=center))
        check_sae(sae, z, (z @ s["W_dec"] + s["b_dec"]) / factor)


@pytest.mark.parametrize("mode", ["expected_average_only_in", True])
@pytest.mark.parametrize("rescale", [True, False])
def test_saelens_folds_the_scale_of_activations(tmp_path: Path, mode: str | bool, rescale: bool) -> None:
    scale = 0.3
    s = parameter_weights(topk_threshold=torch.tensor(THRESHOLD))
    config = {"normalize_activations": mode, "rescale_acts_by_decoder_norm": rescale}
    write_files(
        tmp_path, "sparsity.safetensors", {"sparsity": torch.zeros(C)}, activation_scaler={"scaling_factor": scale}
    )
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = gate(torch.relu(hidden(s, X * scale) * norm), THRESHOLD)
    # the library folds the scale first, which divides decoder norms and latents by it
    sae = saelens(tmp_path, s, "batchtopk", **config)
    check_sae(sae, z / (scale if rescale else 1), ((z / norm) @ s["W_dec"] + s["b_dec"]) / scale)


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("center", [True, False])
def test_saelens_folds_whitening(tmp_path: Path, rescale: bool, center: bool) -> None:
    s = parameter_weights()
    mean, matrix = random_tensor(D, seed=11).double(), (random_tensor(D, D, seed=12) + 3 * torch.eye(D)).double()
    inverse = torch.linalg.inv(matrix)
    white = {"mean": mean, "matrix": matrix, "inverse_matrix": inverse}
    write_files(tmp_path, "activation_whitening.safetensors", white)
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = top_k(torch.relu(hidden(s, ((X.double() - mean) @ matrix).float(), center=center) * norm))
    config = {"k": K, "rescale_acts_by_decoder_norm": rescale, "apply_b_dec_to_input": center}
    sae = saelens(tmp_path, s, "topk", normalize_activations="covariance_whitening", **config)
    check_sae(sae, z, (((z / norm) @ s["W_dec"] + s["b_dec"]).double() @ inverse + mean).float())


@pytest.mark.parametrize("spelling", ["activation_fn", "activation_fn_str"])
def test_saelens_before_version_six(tmp_path: Path, spelling: str) -> None:
    s = parameter_weights(scaling_factor=torch.ones(C))
    old = {spelling: "topk", "activation_fn_kwargs": {"k": K}, "normalize_activations": False, "hook_layer": 3}
    sae = saelens(tmp_path, s, None, model_name="vit", finetuning_scaling_factor=False, **old)
    z = torch.relu(top_k(hidden(s)))
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.card.encoder, sae.card.block) == ("vit", 3)


def test_saelens_without_architecture_is_standard(tmp_path: Path) -> None:
    s = parameter_weights()
    z = torch.relu(hidden(s))
    check_sae(saelens(tmp_path, s, None), z, z @ s["W_dec"] + s["b_dec"])


def test_saelens_finetuning_factor_is_folded(tmp_path: Path) -> None:
    s = parameter_weights(scaling_factor=1 + random_tensor(C, seed=8).abs())
    z = torch.relu(hidden(s))
    sae = saelens(tmp_path, s, "standard", finetuning_scaling_factor=True)
    check_sae(sae, z, (z * s["scaling_factor"]) @ s["W_dec"] + s["b_dec"])
    with pytest.raises(BadFile, match="scaling_factor"):
        saelens(tmp_path, s, "standard", finetuning_scaling_factor=False)


@pytest.mark.parametrize(
    ("hook", "block"),
    [
        ("blocks.22.hook_resid_post", 22),
        ("blocks.23.hook_resid_pre", 22),
        ("vision_model.encoder.layers.22", 22),
        ("blocks.0.hook_resid_pre", None),
        ("blocks.22.hook_mlp_out", None),
        ("blocks.22.hook_resid_mid", None),
    ],
)
def test_saelens_hook_names_the_block(tmp_path: Path, hook: str, block: int | None) -> None:
    card = saelens(tmp_path, parameter_weights(), "standard", metadata={"model_name": "vit", "hook_name": hook}).card
    assert (card.encoder, card.block) == ("vit", block)
    assert bool(card.notes) == (block is None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architecture": "gated"}, "gated"),
        ({"architecture": "temporal"}, "temporal"),
        ({"architecture": "abstopk"}, "abstopk"),
        ({"architecture": "matching_pursuit"}, "matching_pursuit"),
        ({"architecture": "jumprelu_transcoder"}, "transcoder"),
        ({"activation_fn_str": "tanh-relu"}, "tanh-relu"),
        ({"reshape_activations": "hook_z"}, "hook_z"),
        ({"hook_point": "blocks.3.attn.hook_z"}, "hook_z"),
        ({"normalize_activations": "expected_average_only_in"}, r"activation_scaler\.json"),
        ({"normalize_activations": "covariance_whitening"}, "whitening"),
        ({"normalize_activations": "mystery"}, "mystery"),
        ({"architecture": "topk"}, "needs k"),
        ({"architecture": "jumprelu"}, "no 'threshold'"),
        ({"d_sae": 99}, "d_sae = 99"),
        ({"architecture": "matryoshka_batchtopk", "matryoshka_widths": [8, 4], "topk": 1}, "groups"),
    ],
)
@pytest.mark.filterwarnings("ignore:The threshold")
def test_saelens_refuses(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    architecture = config.pop("architecture", "standard")
    with pytest.raises(BadFile, match=words) as caught:
        saelens(tmp_path, parameter_weights(), architecture, **config)
    assert str(tmp_path) in str(caught.value)


def test_saelens_needs_its_config(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no cfg\.json"):
        SAE.load(write_files(tmp_path, "sae_weights.safetensors", parameter_weights()))
