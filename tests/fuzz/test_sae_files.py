"""Damaged SAEs in all layouts, token files and saved reductions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_cases import (
    GROUPS,
    THRESHOLD,
    C,
    D,
    K,
    X,
    k_and_threshold,
    linear_weights,
    make_full_sae,
    parameter_weights,
    random_tensor,
    write_files,
)
from tests.support.fuzzing import FuzzCase, fuzz
from torino import SAE, RawEmbedding, Reduction, VisualTokens, make
from torino.core.tokens import Origin, load_tokens, save_tokens


def use_sae(folder: Path, file: str = "") -> None:
    sae = SAE.load(folder / file)
    repr(sae)
    json.dumps(sae.facts(), allow_nan=False)
    sae.check_origin(Origin("", 22), sae.width)
    assert all(isinstance(name, str) and 0 <= latent < sae.latents for latent, name in sae.names.items())
    x = X[:3] if sae.width == D else torch.ones(3, sae.width)
    sae.encode(x)
    sae.top(x, min(2, sae.latents))
    if sae.W_dec is not None:
        sae.reconstruct(x)
    sae.save(folder / "again")
    SAE.load(folder / "again")


def write_torino(folder: Path) -> None:
    sae = make_full_sae("matryoshka")
    sae.names = {0: "dog", 5: "cat"}
    sae.save(folder)


def write_dictionary_learning(folder: Path) -> None:
    trainer = {
        "dict_class": "BatchTopKSAE",
        "trainer_class": "BatchTopKTrainer",
        "k": K,
        "layer": 22,
        "lm_name": "clip",
    }
    config = {"trainer": trainer | {"submodule_name": "resid_post_layer_22"}, "buffer": {}}
    write_files(folder, "ae.pt", linear_weights(b_dec=random_tensor(D, seed=4), **k_and_threshold()), config=config)


def write_matryoshka(folder: Path) -> None:
    trainer = {"dict_class": "MatryoshkaBatchTopKSAE", "group_sizes": list(GROUPS), "k": K}
    extra = k_and_threshold() | {"group_sizes": torch.tensor(GROUPS)}
    write_files(folder, "ae.pt", parameter_weights(**extra), config={"trainer": trainer})


def saelens_config(**changes: Any) -> dict[str, Any]:
    metadata = {
        "sae_lens_version": "6.0.0",
        "model_name": "clip",
        "hook_name": "blocks.22.hook_resid_post",
        "dataset_path": "imagenet",
        "training_architecture": "matryoshka_batchtopk",
        "training_architecture_details": {"k": K, "matryoshka_widths": [4, 12, 24]},
    }
    config = {"architecture": "jumprelu", "d_in": D, "d_sae": C, "apply_b_dec_to_input": True, "dtype": "float32"}
    config |= {"normalize_activations": "none", "reshape_activations": "none", "metadata": metadata}
    return config | changes


def write_saelens(folder: Path) -> None:
    tensors = parameter_weights(threshold=torch.full((C,), THRESHOLD))
    write_files(folder, "sae_weights.safetensors", tensors, cfg=saelens_config())


def write_scaled(folder: Path) -> None:
    config = saelens_config(
        architecture="batchtopk",
        k=K,
        normalize_activations="expected_average_only_in",
        rescale_acts_by_decoder_norm=True,
    )
    tensors = parameter_weights(topk_threshold=torch.tensor(THRESHOLD))
    write_files(folder, "sae_weights.safetensors", tensors, cfg=config, activation_scaler={"scaling_factor": 0.5})


def write_whitened(folder: Path) -> None:
    config = saelens_config(architecture="topk", k=K, normalize_activations="covariance_whitening")
    write_files(folder, "sae_weights.safetensors", parameter_weights(), cfg=config)
    whitening = {"mean": random_tensor(D, seed=8), "matrix": torch.eye(D), "inverse_matrix": torch.eye(D)}
    write_files(folder, "activation_whitening.safetensors", whitening)


def write_sparsify(folder: Path) -> None:
    weights = {"encoder.weight": random_tensor(C, D, seed=1), "encoder.bias": random_tensor(C, seed=3)}
    weights |= {"W_dec": random_tensor(C, D, seed=2), "b_dec": random_tensor(D, seed=4)}
    config = {"activation": "topk", "expansion_factor": 3, "k": K, "num_latents": 0, "d_in": D, "signed": False}
    write_files(folder, "sae.safetensors", weights, cfg=config | {"transcode": False, "skip_connection": False})


def write_saev(folder: Path) -> None:
    """Write a line of JSON and a checkpoint after it."""
    activation = {"cls": "TopK", "params": {"top_k": K, "aux": {"cls": "AuxK", "params": {"k_aux": 512}}}}
    line = {"schema": 5, "cfg": {"d_model": D, "d_sae": C, "activation": activation, "normalize_w_dec": True}}
    with (folder / "sae.pt").open("wb") as file:
        file.write(json.dumps(line).encode() + b"\n")
        torch.save(parameter_weights(), file)
    data = {"scale_mean": False, "scale_norm": False, "layer": -2, "patches": "patches"}
    (folder / "config.json").write_text(json.dumps({"data": data}))


def write_prisma(folder: Path) -> None:
    config = {"model_class_name": "HookedViT", "model_name": "open-clip:x/y", "hook_point_layer": 22, "d_in": D}
    config |= {"layer_subtype": "hook_resid_post", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}}
    config |= {"cls_token_only": False, "use_patches_only": True, "normalize_activations": "layer_norm"}
    config |= {"architecture": "standard", "expansion_factor": C // D, "d_sae": C, "is_transcoder": False}
    write_files(folder, "weights.pt", parameter_weights(), config=config)


def write_overcomplete(folder: Path) -> None:
    weights = {
        "encoder.final_block.0.weight": random_tensor(C, D, seed=1),
        "encoder.final_block.0.bias": random_tensor(C, seed=3),
        "encoder.final_block.1.weight": torch.ones(C),
        "encoder.final_block.1.bias": torch.zeros(C),
        "encoder.final_block.1.running_mean": torch.zeros(C),
        "encoder.final_block.1.running_var": torch.ones(C),
        "encoder.final_block.1.num_batches_tracked": torch.tensor(3),
        "dictionary._weights": random_tensor(C, D, seed=2),
        "dictionary.multiplier": torch.tensor(0.7),
    }
    write_files(folder, "sae.pt", weights)


def write_qwen_scope(folder: Path) -> None:
    weights = {"W_enc": random_tensor(C, D, seed=1), "W_dec": random_tensor(D, C, seed=2)}
    weights |= {"b_enc": random_tensor(C, seed=3), "b_dec": random_tensor(D, seed=4)}
    write_files((folder / QWEN_SCOPE).parent, "layer22.sae.pt", weights)


def use_qwen_scope(folder: Path) -> None:
    use_sae(folder, QWEN_SCOPE)


def use_relu_sae(folder: Path) -> None:
    """Load an SAE whose files do not name its kind."""
    sae = SAE.load(folder, kind="relu")
    sae.encode(torch.ones(3, sae.width))


def make_tokens(seed: int = 0) -> VisualTokens:
    return VisualTokens(random_tensor(12, 4, seed=seed), (3, 4), Origin("clip", 22))


def use_reduction(path: Path) -> None:
    reduction = Reduction.load(path)
    repr(reduction)
    for token in range(len(reduction)):
        str(reduction.explain(token))
    values = torch.ones(reduction.patches + 1, 2)
    assert reduction.apply(values).shape == (len(reduction), 2)
    assert reduction.sizes.shape == (len(reduction),)
    for over in ("sources", "groups"):
        reduction.paint(torch.arange(len(reduction)), over)
    reduction.then(Reduction.identity((1, len(reduction)))).save(path.with_name("again.npz"))


def use_tokens(path: Path) -> None:
    for tokens in load_tokens(path):
        repr(tokens)
        plan = make("torino-m", sae=RawEmbedding(), k=1, delta=1).plan(tokens)
        plan.apply(tokens.patches)


def write_reductions(folder: Path) -> None:
    plan = make("torino-m", sae=RawEmbedding(), k=2, delta=1, budget=5).plan(make_tokens())
    for suffix in ("npz", "safetensors"):
        plan.save(folder / f"plan.{suffix}")


def write_token_files(folder: Path) -> None:
    for suffix in ("npz", "safetensors"):
        save_tokens([make_tokens(0), make_tokens(1)], folder / f"tokens.{suffix}")


QWEN_SCOPE = f"SAE-Res-Qwen3.5-2B-Base-W32K-L0_{K}/layer22.sae.pt"
CASES = [
    *(FuzzCase("torino", write_torino, file, use_sae) for file in ("card.json", "names.json", "sae.safetensors")),
    *(FuzzCase("dictionary_learning", write_dictionary_learning, file, use_sae) for file in ("config.json", "ae.pt")),
    *(FuzzCase("matryoshka", write_matryoshka, file, use_sae) for file in ("config.json", "ae.pt")),
    *(FuzzCase("saelens", write_saelens, file, use_sae) for file in ("cfg.json", "sae_weights.safetensors")),
    *(FuzzCase("scaled", write_scaled, file, use_sae) for file in ("cfg.json", "activation_scaler.json")),
    *(FuzzCase("whitened", write_whitened, file, use_sae) for file in ("cfg.json", "activation_whitening.safetensors")),
    *(FuzzCase("sparsify", write_sparsify, file, use_sae) for file in ("cfg.json", "sae.safetensors")),
    *(FuzzCase("saev", write_saev, file, use_sae) for file in ("config.json", "sae.pt")),
    *(FuzzCase("prisma", write_prisma, file, use_sae) for file in ("config.json", "weights.pt")),
    FuzzCase("overcomplete", write_overcomplete, "sae.pt", use_relu_sae),
    FuzzCase("qwen-scope", write_qwen_scope, QWEN_SCOPE, use_qwen_scope),
    FuzzCase("reduction", write_reductions, "plan.npz", lambda folder: use_reduction(folder / "plan.npz")),
    FuzzCase(
        "reduction", write_reductions, "plan.safetensors", lambda folder: use_reduction(folder / "plan.safetensors")
    ),
    FuzzCase("tokens", write_token_files, "tokens.npz", lambda folder: use_tokens(folder / "tokens.npz")),
    FuzzCase(
        "tokens", write_token_files, "tokens.safetensors", lambda folder: use_tokens(folder / "tokens.safetensors")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_valid_files_are_read(case: FuzzCase) -> None:
    case.run(None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damaged_files_raise_only_torino_errors(case: FuzzCase) -> None:
    fuzz(case)
