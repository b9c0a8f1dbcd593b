"""SAE checkpoints: every layout read with its library's formula, written back, and refused with a sentence."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from torino.core.errors import BadFile, BadParameter, UnknownName, Unreachable
from torino.sae import SAE, SAECard
from torino.sae.formats import read_sae, write_sae
from torino.sae.formats.locate import locate

D, C, K = 8, 24, 3
GROUPS = (4, 8, 12)
THRESHOLD = 0.4


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = rand(40, D, seed=99) * 2 + 0.5


def linear(**extra: Tensor) -> dict[str, Tensor]:
    """encoder.weight (C, D) and decoder.weight (D, C), as nn.Linear stores them."""
    decoder = torch.nn.functional.normalize(rand(D, C, seed=2), dim=0)
    return {"encoder.weight": rand(C, D, seed=1), "encoder.bias": rand(C, seed=3), "decoder.weight": decoder, **extra}


def parameters(**extra: Tensor) -> dict[str, Tensor]:
    """W_enc (D, C) and W_dec (C, D), as plain parameters are stored."""
    return {
        "W_enc": rand(D, C, seed=1),
        "b_enc": rand(C, seed=3),
        "W_dec": rand(C, D, seed=2),
        "b_dec": rand(D, seed=4),
        **extra,
    }


def k_and_threshold(threshold: float = THRESHOLD) -> dict[str, Tensor]:
    return {"k": torch.tensor(K, dtype=torch.int), "threshold": torch.tensor(threshold)}


def put(folder: Path, name: str, tensors: dict[str, Tensor], **jsons: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    for file, value in jsons.items():
        (folder / f"{file}.json").write_text(json.dumps(value))
    return folder


def top_k(z: Tensor, k: int = K) -> Tensor:
    values, index = z.topk(k, dim=-1)
    return torch.zeros_like(z).scatter(-1, index, values)


def gate(z: Tensor, threshold: Tensor | float) -> Tensor:
    return z * (z > threshold)


def check(sae: SAE, z: Tensor, x_hat: Tensor) -> None:
    """Compare latents and reconstruction with those of the library, and see that the case is not an empty one."""
    assert 0 < int((z > 0).sum()) < z.numel()
    torch.testing.assert_close(sae.encode(X), z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae.reconstruct(X), x_hat, rtol=1e-4, atol=1e-4)


def make(kind: str, **changes: Any) -> SAE:
    """Make an SAE whose decoder rows are of unit norm, with a full card."""
    options: dict[str, Any] = {"kind": kind, "k": K, "groups": GROUPS if kind == "matryoshka" else None}
    if kind in ("batchtopk", "matryoshka"):
        options["threshold"] = THRESHOLD
    if kind == "jumprelu":
        options |= {"threshold": rand(C, seed=7).abs(), "k": None}
    if kind == "relu":
        options["k"] = None
    card = SAECard("a name", "openai/clip-vit-large-patch14-336", 22, "patch", "ImageNet", "mit", "a note")
    W_dec = torch.nn.functional.normalize(rand(C, D, seed=2), dim=1)
    return SAE(rand(C, D, seed=1), rand(C, seed=3), W_dec, rand(D, seed=4), card=card, **(options | changes))


KINDS = ("relu", "topk", "batchtopk", "matryoshka", "jumprelu")


# ------------------------------------------------------------------ dictionary_learning


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("dict_class", ["BatchTopKSAE", None])
def test_dictionary_learning_batchtopk(tmp_path: Path, ending: str, dict_class: str | None) -> None:
    s = linear(b_dec=rand(D, seed=4), **k_and_threshold())
    config = {"config": {"trainer": {"dict_class": dict_class, "k": K}}} if dict_class else {}
    sae = SAE.load(put(tmp_path, f"ae.{ending}", s, **config))
    z = gate(torch.relu((X - s["b_dec"]) @ s["encoder.weight"].T + s["encoder.bias"]), s["threshold"])
    check(sae, z, z @ s["decoder.weight"].T + s["b_dec"])
    assert (sae.kind, sae.k, sae.center) == ("batchtopk", K, True)


@pytest.mark.parametrize("how", ["dict_class", "trainer_class", "kind="])
def test_dictionary_learning_topk(tmp_path: Path, how: str) -> None:
    s = linear(b_dec=rand(D, seed=4), **k_and_threshold())
    names = {"dict_class": "AutoEncoderTopK", "trainer_class": "TopKTrainer"}
    config = {"config": {"trainer": {how: names[how]}}} if how in names else {}
    sae = SAE.load(put(tmp_path, "ae.pt", s, **config), kind=None if config else "topk")
    z = top_k(torch.relu((X - s["b_dec"]) @ s["encoder.weight"].T + s["encoder.bias"]))
    check(sae, z, z @ s["decoder.weight"].T + s["b_dec"])


def test_dictionary_learning_topk_takes_k_from_the_config(tmp_path: Path) -> None:
    s = linear(b_dec=rand(D, seed=4))
    folder = put(tmp_path, "ae.pt", s, config={"trainer": {"dict_class": "AutoEncoderTopK", "k": K}})
    assert SAE.load(folder).k == K


@pytest.mark.parametrize("spelling", ["MatryoshkaBatchTopKSAE", "MatroyshkaBatchTopKSAE", None])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_dictionary_learning_matryoshka(tmp_path: Path, spelling: str | None, ending: str) -> None:
    s = parameters(group_sizes=torch.tensor(GROUPS), **k_and_threshold())
    config = {"config": {"trainer": {"dict_class": spelling}}} if spelling else {}
    sae = SAE.load(put(tmp_path, f"ae.{ending}", s, **config))
    z = gate(torch.relu((X - s["b_dec"]) @ s["W_enc"] + s["b_enc"]), s["threshold"])
    check(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.groups, sae.k) == ("matryoshka", GROUPS, K)


@pytest.mark.parametrize("spelling", ["MatryoshkaBatchTopKTrainer", "MatroyshkaBatchTopKTrainer"])
def test_groups_come_from_the_config_if_the_weights_lack_them(tmp_path: Path, spelling: str) -> None:
    trainer = {"trainer_class": spelling, "group_sizes": list(GROUPS)}
    sae = SAE.load(put(tmp_path, "ae.pt", parameters(**k_and_threshold()), config={"trainer": trainer}))
    assert (sae.kind, sae.groups) == ("matryoshka", GROUPS)


def test_levels_keep_the_first_groups(tmp_path: Path) -> None:
    s = parameters(group_sizes=torch.tensor(GROUPS), **k_and_threshold())
    sae = SAE.load(put(tmp_path, "ae.pt", s), levels=2)
    size = sum(GROUPS[:2])
    z = gate(torch.relu((X - s["b_dec"]) @ s["W_enc"] + s["b_enc"]), s["threshold"])[:, :size]
    check(sae, z, z @ s["W_dec"][:size] + s["b_dec"])


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("decoder", [False, True])
def test_dictionary_learning_autoencoder_folds_decoder_norms(tmp_path: Path, norms: bool, decoder: bool) -> None:
    s = linear(bias=rand(D, seed=4))
    if norms:
        s["decoder.weight"] = s["decoder.weight"] * (0.5 + torch.arange(C) / C)
    sae = SAE.load(put(tmp_path, "ae.pt", s), decoder=decoder)
    n = s["decoder.weight"].norm(dim=0)
    z = torch.relu((X - s["bias"]) @ (s["encoder.weight"] * n[:, None]).T + s["encoder.bias"] * n)
    torch.testing.assert_close(sae.encode(X), z)
    assert (sae.W_dec is not None) == decoder
    if decoder:
        plain = torch.relu((X - s["bias"]) @ s["encoder.weight"].T + s["encoder.bias"])
        check(sae, z, plain @ s["decoder.weight"].T + s["bias"])


def test_a_dead_decoder_row_folds_to_silence(tmp_path: Path) -> None:
    s = linear(bias=rand(D, seed=4))
    s["decoder.weight"][:, 5] = 0
    sae = SAE.load(put(tmp_path, "ae.pt", s))
    assert torch.isfinite(sae.reconstruct(X)).all()
    assert not sae.encode(X)[:, 5].any()


def test_dictionary_learning_new_autoencoder_is_not_centred(tmp_path: Path) -> None:
    s = linear(**{"decoder.bias": rand(D, seed=4)})
    s["decoder.weight"] = s["decoder.weight"] * 3  # this class keeps its norms
    z = torch.relu(X @ s["encoder.weight"].T + s["encoder.bias"])
    check(SAE.load(put(tmp_path, "ae.pt", s)), z, z @ s["decoder.weight"].T + s["decoder.bias"])


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_dictionary_learning_jumprelu_is_not_centred(tmp_path: Path, ending: str) -> None:
    s = parameters(threshold=rand(C, seed=7).abs())
    config = {"trainer": {"dict_class": "JumpReluAutoEncoder"}}
    sae = SAE.load(put(tmp_path, f"ae.{ending}", s, config=config))
    pre = X @ s["W_enc"] + s["b_enc"]
    z = torch.relu(pre * (pre > s["threshold"]))
    check(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert sae.kind == "jumprelu"


def test_a_threshold_of_minus_one_warns(tmp_path: Path) -> None:
    s = linear(b_dec=rand(D, seed=4), **k_and_threshold(-1.0))
    with pytest.warns(UserWarning, match="never estimated"):
        sae = SAE.load(put(tmp_path, "ae.pt", s))
    z = torch.relu((X - s["b_dec"]) @ s["encoder.weight"].T + s["encoder.bias"])
    check(sae, z, z @ s["decoder.weight"].T + s["b_dec"])


@pytest.mark.parametrize(
    ("trainer", "encoder", "block"),
    [
        ({"lm_name": "openai/clip", "layer": 22, "submodule_name": "resid_post_layer_22"}, "openai/clip", 22),
        ({"lm_name": "openai/clip", "layer": 22, "submodule_name": None}, "openai/clip", 22),
        ({"lm_name": "openai/clip", "layer": 22, "submodule_name": "mlp_out"}, "openai/clip", None),
        ({"lm_name": "", "layer": "", "submodule_name": ""}, "", None),
    ],
)
def test_the_config_fills_the_card(tmp_path: Path, trainer: dict[str, Any], encoder: str, block: int | None) -> None:
    s = linear(b_dec=rand(D, seed=4), **k_and_threshold())
    card = SAE.load(put(tmp_path, "ae.pt", s, config={"trainer": trainer})).card
    assert (card.encoder, card.block) == (encoder, block)


def test_the_run_folder_of_pach_et_al_fills_the_card(tmp_path: Path) -> None:
    name = "imagenet_train_activations_clip-vit-large-patch14-336_22_post_mlp_residual_matroyshka_batch_top_k_20_x64"
    s = parameters(group_sizes=torch.tensor(GROUPS), **k_and_threshold())
    trainer = {"dict_class": "MatroyshkaBatchTopKSAE", "layer": "", "lm_name": "", "submodule_name": ""}
    put(tmp_path / "random_k_2" / name / "trainer_0", "ae.pt", s, config={"trainer": trainer})
    card = SAE.load(tmp_path).card
    assert (card.encoder, card.block, card.data) == ("clip-vit-large-patch14-336", 22, "imagenet_train")
    assert card.token_kind == "2 random tokens per image"


# ------------------------------------------------------------------ SAELens


def saelens(folder: Path, tensors: dict[str, Tensor], architecture: str | None, **config: Any) -> SAE:
    cfg = {"d_in": D, "d_sae": C, "dtype": "float32", "apply_b_dec_to_input": True, **config}
    cfg |= {"architecture": architecture} if architecture else {}
    return SAE.load(put(folder, "sae_weights.safetensors", tensors, cfg=cfg))


def hidden(s: dict[str, Tensor], x: Tensor = X, *, center: bool = True) -> Tensor:
    return (x - s["b_dec"] * center) @ s["W_enc"] + s["b_enc"]


@pytest.mark.parametrize("center", [True, False])
def test_saelens_standard(tmp_path: Path, center: bool) -> None:
    s = parameters()
    z = torch.relu(hidden(s, center=center))
    sae = saelens(tmp_path, s, "standard", apply_b_dec_to_input=center, normalize_activations="none")
    check(sae, z, z @ s["W_dec"] + s["b_dec"])


def test_saelens_jumprelu(tmp_path: Path) -> None:
    s = parameters(threshold=rand(C, seed=7).abs())
    z = torch.relu(hidden(s)) * (hidden(s) > s["threshold"])
    sae = saelens(tmp_path, s, "jumprelu")
    check(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert sae.kind == "jumprelu"


def test_saelens_jumprelu_of_an_older_training_save(tmp_path: Path) -> None:
    s = parameters(log_threshold=rand(C, seed=7))
    z = gate(torch.relu(hidden(s)), s["log_threshold"].exp())
    check(saelens(tmp_path, s, "jumprelu"), z, z @ s["W_dec"] + s["b_dec"])


@pytest.mark.parametrize("rescale", [True, False])
def test_saelens_topk(tmp_path: Path, rescale: bool) -> None:
    s = parameters()
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = torch.relu(top_k(hidden(s) * norm))
    sae = saelens(tmp_path, s, "topk", k=K, rescale_acts_by_decoder_norm=rescale)
    check(sae, z, (z / norm) @ s["W_dec"] + s["b_dec"])


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("architecture", ["batchtopk", "matryoshka_batchtopk"])
@pytest.mark.parametrize("decoder", [True, False])
def test_saelens_training_saves(tmp_path: Path, rescale: bool, architecture: str, decoder: bool) -> None:
    s = parameters(topk_threshold=torch.tensor(THRESHOLD, dtype=torch.double))
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = gate(torch.relu(hidden(s) * norm), THRESHOLD)
    config = {"k": K + 0.4, "rescale_acts_by_decoder_norm": rescale, "matryoshka_widths": [4, 12]}
    sae = saelens(tmp_path, s, architecture, **config)
    check(sae, z, (z / norm) @ s["W_dec"] + s["b_dec"])
    assert sae.k == K
    assert sae.groups == GROUPS  # 4 and 12 are ends of levels, and the library adds the last one
    assert sae.kind == {"batchtopk": "batchtopk"}.get(architecture, "matryoshka")
    torch.testing.assert_close(SAE.load(tmp_path, decoder=decoder).encode(X), sae.encode(X))


def test_saelens_inference_save_remembers_its_training(tmp_path: Path) -> None:
    s = parameters(threshold=torch.full((C,), THRESHOLD))
    details = {"k": K, "matryoshka_widths": [4, 12, 24], "rescale_acts_by_decoder_norm": True}
    metadata = {"training_architecture": "matryoshka_batchtopk", "training_architecture_details": details}
    sae = saelens(tmp_path, s, "jumprelu", metadata=metadata)
    z = gate(torch.relu(hidden(s)), THRESHOLD)  # the flag in the details is of the training save: already folded
    check(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.groups, sae.k) == ("matryoshka", GROUPS, K)


@pytest.mark.parametrize("mode", ["layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("center", [True, False])
def test_saelens_normalisation(tmp_path: Path, mode: str, center: bool) -> None:
    s = parameters()
    sae = saelens(tmp_path, s, "standard", normalize_activations=mode, apply_b_dec_to_input=center)
    if mode == "layer_norm":
        mu = X.mean(-1, keepdim=True)
        std = (X - mu).std(-1, keepdim=True)
        z = torch.relu(hidden(s, (X - mu) / (std + 1e-5), center=center))
        check(sae, z, (z @ s["W_dec"] + s["b_dec"]) * std + mu)
    else:
        factor = D**0.5 / X.norm(dim=-1, keepdim=True)
        z = torch.relu(hidden(s, X * factor, center=center))
        check(sae, z, (z @ s["W_dec"] + s["b_dec"]) / factor)


@pytest.mark.parametrize("mode", ["expected_average_only_in", True])
@pytest.mark.parametrize("rescale", [True, False])
def test_saelens_folds_the_scale_of_activations(tmp_path: Path, mode: str | bool, rescale: bool) -> None:
    scale = 0.3
    s = parameters(topk_threshold=torch.tensor(THRESHOLD))
    config = {"normalize_activations": mode, "rescale_acts_by_decoder_norm": rescale}
    put(tmp_path, "sparsity.safetensors", {"sparsity": torch.zeros(C)}, activation_scaler={"scaling_factor": scale})
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = gate(torch.relu(hidden(s, X * scale) * norm), THRESHOLD)
    # the library folds the scale first, which divides the decoder norms, and with them the latents, by it
    sae = saelens(tmp_path, s, "batchtopk", **config)
    check(sae, z / (scale if rescale else 1), ((z / norm) @ s["W_dec"] + s["b_dec"]) / scale)


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("center", [True, False])
def test_saelens_folds_whitening(tmp_path: Path, rescale: bool, center: bool) -> None:
    s = parameters()
    mean, matrix = rand(D, seed=11).double(), (rand(D, D, seed=12) + 3 * torch.eye(D)).double()
    inverse = torch.linalg.inv(matrix)
    white = {"mean": mean, "matrix": matrix, "inverse_matrix": inverse}
    put(tmp_path, "activation_whitening.safetensors", white)
    norm = s["W_dec"].norm(dim=-1) if rescale else torch.ones(C)
    z = top_k(torch.relu(hidden(s, ((X.double() - mean) @ matrix).float(), center=center) * norm))
    config = {"k": K, "rescale_acts_by_decoder_norm": rescale, "apply_b_dec_to_input": center}
    sae = saelens(tmp_path, s, "topk", normalize_activations="covariance_whitening", **config)
    check(sae, z, (((z / norm) @ s["W_dec"] + s["b_dec"]).double() @ inverse + mean).float())


@pytest.mark.parametrize("spelling", ["activation_fn", "activation_fn_str"])
def test_saelens_before_version_six(tmp_path: Path, spelling: str) -> None:
    s = parameters(scaling_factor=torch.ones(C))
    old = {spelling: "topk", "activation_fn_kwargs": {"k": K}, "normalize_activations": False, "hook_layer": 3}
    sae = saelens(tmp_path, s, None, model_name="vit", finetuning_scaling_factor=False, **old)
    z = torch.relu(top_k(hidden(s)))
    check(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.card.encoder, sae.card.block) == ("vit", 3)


def test_saelens_without_architecture_is_standard(tmp_path: Path) -> None:
    s = parameters()
    z = torch.relu(hidden(s))
    check(saelens(tmp_path, s, None), z, z @ s["W_dec"] + s["b_dec"])


def test_saelens_finetuning_factor_is_folded(tmp_path: Path) -> None:
    s = parameters(scaling_factor=1 + rand(C, seed=8).abs())
    z = torch.relu(hidden(s))
    sae = saelens(tmp_path, s, "standard", finetuning_scaling_factor=True)
    check(sae, z, (z * s["scaling_factor"]) @ s["W_dec"] + s["b_dec"])
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
    card = saelens(tmp_path, parameters(), "standard", metadata={"model_name": "vit", "hook_name": hook}).card
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
        saelens(tmp_path, parameters(), architecture, **config)
    assert str(tmp_path) in str(caught.value)


def test_saelens_needs_its_config(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no cfg\.json"):
        SAE.load(put(tmp_path, "sae_weights.safetensors", parameters()))


# ------------------------------------------------------------------ sparsify


def sparse_coder(folder: Path, extra: dict[str, Tensor] | None = None, **config: Any) -> SAE:
    s = {"encoder.weight": rand(C, D, seed=1), "encoder.bias": rand(C, seed=3), "W_dec": rand(C, D, seed=2)}
    s |= {"b_dec": rand(D, seed=4), **(extra or {})}
    cfg = {"activation": "topk", "expansion_factor": 3, "k": K, "num_latents": 0, "d_in": D, **config}
    return SAE.load(put(folder, "sae.safetensors", s, cfg=cfg))


@pytest.mark.parametrize("transcode", [False, True])
def test_sparsify(tmp_path: Path, transcode: bool) -> None:
    sae = sparse_coder(tmp_path / "layers.22", transcode=transcode)
    s = load_file(tmp_path / "layers.22" / "sae.safetensors")
    x = X if transcode else X - s["b_dec"]
    z = top_k(torch.relu(x @ s["encoder.weight"].T + s["encoder.bias"]))
    check(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert sae.card.block == 22
    assert ("Transcoder" in sae.card.notes) == transcode


@pytest.mark.parametrize(
    ("config", "words"),
    [({"skip_connection": True}, "skip"), ({"activation": "groupmax"}, "groupmax"), ({"signed": True}, "signed")],
)
def test_sparsify_refuses(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFile, match=words):
        sparse_coder(tmp_path, **config)


def test_sparsify_needs_its_config(tmp_path: Path) -> None:
    sparse_coder(tmp_path)
    (tmp_path / "cfg.json").unlink()
    with pytest.raises(BadFile, match=r"no cfg\.json"):
        SAE.load(tmp_path)


# ------------------------------------------------------------------ torino's own


@pytest.mark.parametrize("kind", KINDS)
def test_own_layout_keeps_every_bit(tmp_path: Path, kind: str) -> None:
    sae = make(kind, center=kind != "relu", normalize="layer_norm" if kind == "topk" else "none")
    assert sae.save(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    back = SAE.load(tmp_path / "new" / "folder")
    assert back.facts() == sae.facts()
    assert back.state_dict().keys() == sae.state_dict().keys()
    assert all(torch.equal(value, sae.state_dict()[name]) for name, value in back.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["card.json", "sae.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_own_layout_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    sae = make("jumprelu")
    sae.save(tmp_path, dtype=dtype)
    stored = load_file(tmp_path / "sae.safetensors")
    assert {name: value.dtype for name, value in stored.items() if value.ndim == 2} == {"W_enc": dtype, "W_dec": dtype}
    back = SAE.load(tmp_path)
    torch.testing.assert_close(back.W_enc, sae.W_enc, rtol=1e-2, atol=1e-3)
    assert back.threshold is not None
    assert torch.equal(back.threshold, sae.threshold)
    assert torch.equal(back.b_enc, sae.b_enc)


def test_own_layout_refuses_a_dtype_that_overflows(tmp_path: Path) -> None:
    sae = make("relu")
    sae.W_enc[0, 0] = 1e6
    with pytest.raises(BadParameter, match="too large"):
        sae.save(tmp_path, dtype=torch.float16)
    with pytest.raises(BadParameter, match="dtype must be"):
        sae.save(tmp_path, dtype=torch.int8)
    assert not list(tmp_path.iterdir())


def test_own_layout_keeps_a_missing_threshold_missing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="never estimated"):
        sae = make("batchtopk", threshold=None)
    sae.save(tmp_path)
    with pytest.warns(UserWarning, match="never estimated"):
        assert SAE.load(tmp_path).threshold is None


def test_without_decoder_it_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("topk").save(tmp_path)
    taken: list[str] = []

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Spy:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def metadata(self) -> Any:
            return self.file.metadata()

        def get_tensor(self, name: str) -> Tensor:
            taken.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr("torino.core.io.safe_open", Spy)
    assert SAE.load(tmp_path, decoder=False).W_dec is None
    assert sorted(taken) == ["W_enc", "b_dec", "b_enc"]


def test_tied_weights_are_written(tmp_path: Path) -> None:
    W = rand(C, D)
    SAE(W, W_dec=W, kind="topk", k=K).save(tmp_path)
    assert torch.equal(SAE.load(tmp_path).W_dec, W)


def test_first_groups_are_written_alone(tmp_path: Path) -> None:
    small = make("matryoshka").first(1)
    for layout in ("torino", "dictionary_learning", "saelens"):
        back = SAE.load(write_sae(small, tmp_path / layout, layout))
        torch.testing.assert_close(back.encode(X), small.encode(X))
    assert (tmp_path / "dictionary_learning" / "ae.pt").stat().st_size < 6000


def edit(path: Path, **changes: Any) -> None:
    card = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in card.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "torino-sae/2"}, "Update torino"),
        ({"format": ...}, "this version of torino reads 'torino-sae/1'"),
        ({"weights_sha256": "0"}, "other weights"),
        ({"latents": 7}, "latents = 7"),
        ({"groups": "many"}, "groups = 'many'"),
        ({"groups": [1, 2]}, "add up"),
        ({"kind": "gated"}, "kind must be one of"),
        ({"kind": ...}, "kind must be one of"),
        ({"normalize": "sphere"}, "normalize must be one of"),
    ],
)
def test_a_wrong_card_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    make("matryoshka").save(tmp_path)
    edit(tmp_path / "card.json", **changes)
    with pytest.raises(BadFile, match=words):
        SAE.load(tmp_path)


def test_a_card_may_be_written_by_hand(tmp_path: Path) -> None:
    sae = make("topk")
    tensors = {"W_enc": sae.W_enc, "b_enc": sae.b_enc, "W_dec": sae.W_dec, "b_dec": sae.b_dec}
    card = {"format": "torino-sae/1", "kind": "topk", "k": K, "encoder": None, "block": 22.0}
    back = SAE.load(put(tmp_path, "sae.safetensors", tensors, card=card))
    assert torch.equal(back.encode(X), sae.encode(X))
    assert (back.card.encoder, back.card.block) == ("", 22)


def test_a_save_without_its_card_is_incomplete(tmp_path: Path) -> None:
    make("topk").save(tmp_path)
    (tmp_path / "card.json").unlink()
    with pytest.raises(BadFile, match=r"no card\.json"):
        SAE.load(tmp_path)


def test_keys_decide_between_torino_and_sparsify(tmp_path: Path) -> None:
    make("relu").save(tmp_path)
    sparse_coder(tmp_path)  # leaves the card of the other one behind
    assert SAE.load(tmp_path).kind == "topk"


# ------------------------------------------------------------------ writing other layouts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("layout", ["dictionary_learning", "saelens"])
def test_export_and_back(tmp_path: Path, kind: str, center: bool, layout: str) -> None:
    sae = make(kind, center=center)
    assert sae.export(tmp_path, layout) == tmp_path
    back = SAE.load(tmp_path)
    check(back, sae.encode(X), sae.reconstruct(X))
    assert (back.kind, back.k, back.groups, back.card) == (sae.kind, sae.k, sae.groups, sae.card)


def test_export_of_a_relu_sae_with_decoder_norms_keeps_its_latents(tmp_path: Path) -> None:
    sae = make("relu")
    assert sae.W_dec is not None
    sae.W_dec *= 1 + torch.arange(C)[:, None] / C
    back = SAE.load(sae.export(tmp_path, "dictionary_learning"))
    check(back, sae.encode(X), sae.reconstruct(X))


EXPECTED = {
    "relu": ("AutoEncoder", {"bias", "encoder.weight", "encoder.bias", "decoder.weight"}),
    "topk": ("AutoEncoderTopK", {"encoder.weight", "encoder.bias", "decoder.weight", "b_dec", "k", "threshold"}),
    "batchtopk": ("BatchTopKSAE", {"encoder.weight", "encoder.bias", "decoder.weight", "b_dec", "k", "threshold"}),
    "matryoshka": (
        "MatryoshkaBatchTopKSAE",
        {"W_enc", "b_enc", "W_dec", "b_dec", "k", "threshold", "group_sizes"},
    ),
    "jumprelu": ("JumpReluAutoEncoder", {"W_enc", "b_enc", "W_dec", "b_dec", "threshold"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_dictionary_learning_gets_the_keys_of_its_class(tmp_path: Path, kind: str) -> None:
    make(kind).export(tmp_path, "dictionary_learning")
    state = torch.load(tmp_path / "ae.pt", weights_only=True)
    trainer = json.loads((tmp_path / "config.json").read_text())["trainer"]
    assert (trainer["dict_class"], state.keys()) == EXPECTED[kind]
    shape = (D, C) if "W_enc" in state else (C, D)
    assert tuple(state["W_enc" if "W_enc" in state else "encoder.weight"].shape) == shape
    assert (trainer["activation_dim"], trainer["dict_size"], trainer["layer"]) == (D, C, 22)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", ["none", "layer_norm", "constant_norm"])
def test_saelens_gets_an_inference_save(tmp_path: Path, kind: str, normalize: str) -> None:
    sae = make(kind, normalize=normalize)
    sae.export(tmp_path, "saelens")
    config = json.loads((tmp_path / "cfg.json").read_text())
    stored = load_file(tmp_path / "sae_weights.safetensors")
    assert config["architecture"] == {"relu": "standard", "topk": "topk"}.get(kind, "jumprelu")
    assert ("threshold" in stored) == (config["architecture"] == "jumprelu")
    assert all(tuple(value.shape) == (C,) for name, value in stored.items() if name == "threshold")
    assert SAE.load(tmp_path).normalize == normalize


@pytest.mark.parametrize("layout", ["dictionary_learning", "saelens"])
@pytest.mark.parametrize("kind", ["batchtopk", "matryoshka", "jumprelu"])
def test_a_missing_threshold_survives_export(tmp_path: Path, layout: str, kind: str) -> None:
    with pytest.warns(UserWarning, match="never estimated"):
        sae = make(kind, threshold=None)
    sae.export(tmp_path, layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        back = SAE.load(tmp_path)
    check(back, sae.encode(X), sae.reconstruct(X))
    assert bool(caught) == (kind != "jumprelu")


@pytest.mark.parametrize(
    ("sae", "words"),
    [
        (lambda: make("topk", normalize="layer_norm"), "layer_norm"),
        (lambda: make("topk", groups=GROUPS), "groups"),
        (lambda: make("batchtopk", k=None), "without k"),
        (lambda: make("batchtopk", threshold=rand(C).abs()), "one threshold"),
    ],
)
def test_what_dictionary_learning_cannot_express(tmp_path: Path, sae: Callable[[], SAE], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        sae().export(tmp_path, "dictionary_learning")
    assert not list(tmp_path.iterdir())
    back = SAE.load(sae().export(tmp_path, "saelens"))
    check(back, sae().encode(X), sae().reconstruct(X))
    assert back.groups == sae().groups


def test_unknown_layouts_missing_decoders_and_files_in_the_way(tmp_path: Path) -> None:
    sae = make("topk")
    with pytest.raises(UnknownName, match=r"No SAE layout is called 'sae_lens'\. Did you mean 'saelens'"):
        sae.export(tmp_path, "sae_lens")
    with pytest.raises(BadParameter, match="float32"):
        write_sae(sae, tmp_path, "saelens", dtype=torch.float16)
    sae.save(tmp_path / "a")
    half = SAE.load(tmp_path / "a", decoder=False)
    for layout in ("torino", "dictionary_learning", "saelens"):
        with pytest.raises(BadParameter, match="decoder=True"):
            write_sae(half, tmp_path / "a", layout)
        with pytest.raises(BadFile, match="Cannot write"):
            write_sae(sae, tmp_path / "a" / "card.json", layout)
    assert SAE.load(tmp_path / "a").W_dec is not None


# ------------------------------------------------------------------ damaged and hostile files


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.6, 0.99])
@pytest.mark.parametrize("layout", ["torino", "dictionary_learning", "saelens"])
def test_truncated_files(tmp_path: Path, fraction: float, layout: str) -> None:
    write_sae(make("topk"), tmp_path, layout)
    weights = next(path for path in tmp_path.iterdir() if path.suffix != ".json")
    data = weights.read_bytes()
    weights.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(BadFile, match="truncated") as caught:
        SAE.load(tmp_path)
    assert weights.name in str(caught.value)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.target, "ran")


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, how: str) -> None:
    mark = tmp_path / "mark.txt"
    state = linear(b_dec=rand(D), k=Bomb(mark))  # type: ignore[arg-type]
    if how == "torch":
        torch.save(state, tmp_path / "ae.pt")
    else:
        (tmp_path / "ae.pt").write_bytes(pickle.dumps(Bomb(mark), protocol=2))
    with pytest.raises(BadFile, match="was not loaded"):
        SAE.load(tmp_path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()  # the bomb is a live one


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"W_enc": ...}, "has an unknown layout"),
        ({"W_dec": ...}, "no 'W_dec'"),
        ({"b_enc": ...}, "no 'b_enc'"),
        ({"W_dec": rand(D, C)}, r"'W_dec' .* has shape \(8, 24\), but 'W_enc' requires \(24, 8\)"),
        ({"W_enc": rand(C)}, "not that of a matrix"),
        ({"W_enc": rand(D, 0)}, "not that of a matrix"),
        ({"W_enc": rand(C, D)}, "'b_enc'"),
        ({"b_dec": rand(C)}, "'b_dec'"),
        ({"W_dec": torch.full((C, D), torch.nan)}, "'W_dec' .* NaN"),
        ({"b_enc": torch.full((C,), torch.inf)}, "'b_enc' .* NaN or inf"),
        ({"threshold": torch.tensor(torch.nan)}, "'threshold' .* NaN"),
        ({"threshold": rand(5)}, "'threshold'"),
        ({"W_enc": torch.ones(D, C, dtype=torch.int8)}, r"'W_enc' .* torch\.int8"),
        ({"W_enc": "text"}, "'W_enc' .* str"),
        ({"k": torch.tensor([1, 2])}, "'k' .* single number"),
        ({"k": "three"}, "'k' .* 'three'"),
        ({"group_sizes": torch.tensor([1, 2])}, "add up"),
        ({"r_mag": rand(C)}, "gated"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    s = parameters(group_sizes=torch.tensor(GROUPS), **k_and_threshold()) | change
    put(tmp_path, "ae.pt", {name: value for name, value in s.items() if value is not ...})
    with pytest.raises(BadFile, match=words) as caught:
        SAE.load(tmp_path)
    assert "ae.pt" in str(caught.value)


def test_a_gated_dictionary_is_refused(tmp_path: Path) -> None:
    s = linear(decoder_bias=rand(D), r_mag=rand(C), gate_bias=rand(C), mag_bias=rand(C))
    with pytest.raises(BadFile, match=r"gated SAE, which is not supported\. Accepted: ReLU"):
        SAE.load(put(tmp_path, "ae.pt", s))


def test_weights_that_do_not_tell_their_kind(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="kind is unknown"):
        SAE.load(put(tmp_path, "ae.pt", parameters()))
    with pytest.raises(BadFile, match="has an unknown layout: it contains weight"):
        SAE.load(put(tmp_path, "ae.pt", {"weight": rand(2, 2)}))


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    put(tmp_path, "ae.pt", linear(b_dec=rand(D), **k_and_threshold()))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadFile, match="not valid JSON"):
        SAE.load(tmp_path)


def test_kind_is_checked(tmp_path: Path) -> None:
    make("relu").save(tmp_path)
    with pytest.raises(BadParameter, match="kind must be one of 'relu'"):
        SAE.load(tmp_path, kind="gated")  # type: ignore[arg-type]
    with pytest.raises(BadFile, match="needs k"):
        SAE.load(tmp_path, kind="topk")


def test_a_file_with_a_threshold_is_read_without_it_as_relu(tmp_path: Path) -> None:
    SAE(torch.eye(3), W_dec=torch.eye(3), kind="batchtopk", threshold=2.0).save(tmp_path)
    x = torch.tensor([[3.0, 1.0, -1.0]])
    assert SAE.load(tmp_path).encode(x).tolist() == [[3.0, 0.0, 0.0]]
    assert SAE.load(tmp_path, kind="relu").encode(x).tolist() == [[3.0, 1.0, 0.0]]


# ------------------------------------------------------------------ finding the file


@pytest.mark.parametrize("place", ["", "trainer_0", "run/trainer_0", "a/b/c/d"])
def test_the_only_sae_below_a_folder_is_found(tmp_path: Path, place: str) -> None:
    folder = make("topk").export(tmp_path / place, "dictionary_learning")
    (folder / "checkpoints").mkdir()
    torch.save({}, folder / "checkpoints" / "ae_100.pt")
    for source in (tmp_path, str(tmp_path) + "/", folder / "ae.pt", folder / "config.json"):
        assert SAE.load(source).kind == "topk"


def test_checkpoints_of_a_run_find_its_config(tmp_path: Path) -> None:
    make("topk").export(tmp_path, "dictionary_learning")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "ae.pt").rename(tmp_path / "checkpoints" / "ae_100.pt")
    assert SAE.load(tmp_path).kind == "topk"


def test_a_folder_itself_comes_before_what_is_below_it(tmp_path: Path) -> None:
    make("relu").save(tmp_path)
    make("topk").save(tmp_path / "checkpoints" / "step_100")
    assert SAE.load(tmp_path).kind == "relu"


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    for place in ("trainer_0", "trainer_1"):
        make("topk").export(tmp_path / place, "dictionary_learning")
    with pytest.raises(BadFile, match=r"2 files .*: trainer_0/ae\.pt, trainer_1/ae\.pt\. Give the path of one"):
        SAE.load(tmp_path)
    assert SAE.load(tmp_path / "trainer_1").kind == "topk"


def test_many_candidates_are_not_all_listed(tmp_path: Path) -> None:
    for number in range(25):
        put(tmp_path / f"t{number}", "ae.pt", {})
    with pytest.raises(BadFile, match=r"25 files .* and 5 more"):
        SAE.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["nothing", "./nothing", "a/b/../c", "a//b", "runs/ae.pt", "~no-such-user/x", "x" * 5000]
)
def test_a_source_that_is_nothing(name: str) -> None:
    with pytest.raises(BadFile, match=r"no file or folder .* hub repository either") as caught:
        SAE.load(name)
    assert "owner/repository" in str(caught.value)


def test_folders_and_files_without_an_sae(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="no SAE in"):
        SAE.load(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadFile, match=r"suffix is '\.txt'"):
        SAE.load(tmp_path / "notes.txt")
    with pytest.raises(BadFile, match="no file or folder ''"):
        SAE.load("")


# ------------------------------------------------------------------ the hub


@pytest.fixture
def hub() -> Any:
    pytest.importorskip("huggingface_hub.errors")
    return pytest.importorskip("huggingface_hub")


def http_error(kind: type[Exception]) -> Exception:
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    return kind("no", response=response)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("OfflineModeIsEnabled", "cannot be reached"),
        ("RepositoryNotFoundError", "no model repository 'owner/repo'"),
        ("GatedRepoError", "gated: accept its terms"),
        ("HfHubHTTPError", "HfHubHTTPError"),
        ("ConnectionError", "ConnectionError"),
    ],
)
def test_the_hub_is_out_of_reach(hub: Any, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    kind = getattr(hub.errors, name, ConnectionError)
    error = http_error(kind) if issubclass(kind, hub.errors.HfHubHTTPError) else kind("no")

    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(Unreachable, match=words) as caught:
        SAE.load("owner/repo/sub")
    assert "no local path" in str(caught.value)
    assert "'owner/repo/sub'" in str(caught.value)


class Hub:
    """Stands in for snapshot_download: links the files that match into a snapshot, as the real one does."""

    def __init__(self, repository: Path, snapshot: Path, *, lists: bool = True) -> None:
        self.repository, self.snapshot, self.lists = repository, snapshot, lists
        self.fetched: list[str] = []

    def __call__(self, repo_id: str, *, allow_patterns: list[str], dry_run: bool = False) -> Any:
        from huggingface_hub.utils import filter_repo_objects

        assert repo_id == "owner/repo"
        files = [path.relative_to(self.repository).as_posix() for path in self.repository.rglob("*") if path.is_file()]
        matching = list(filter_repo_objects(files, allow_patterns=allow_patterns))
        if dry_run and not self.lists:
            raise TypeError("an older client has no dry_run")
        if dry_run:
            return [SimpleNamespace(filename=name) for name in matching]
        self.snapshot.mkdir(exist_ok=True)
        for name in matching:
            (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (self.snapshot / name).write_bytes((self.repository / name).read_bytes())
        self.fetched += matching
        return str(self.snapshot)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of three SAEs in three layouts, with files that nobody asked for."""
    make("relu").save(tmp_path / "repo" / "torino" / "block_22")
    make("topk").export(tmp_path / "repo" / "dl" / "trainer_0", "dictionary_learning")
    make("jumprelu").export(tmp_path / "repo" / "lens[1]", "saelens")
    (tmp_path / "repo" / "README.md").write_text("# hello")
    (tmp_path / "repo" / "dl" / "trainer_0" / "optimizer.bin").write_bytes(b"x")
    return tmp_path / "repo"


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ("torino", "relu"),
        ("torino/block_22/", "relu"),
        ("torino/block_22/sae.safetensors", "relu"),
        ("dl", "topk"),
        ("lens[1]", "jumprelu"),
    ],
)
def test_a_sub_folder_on_the_hub(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path, inside: str, kind: str, lists: bool
) -> None:
    fake = Hub(repository, tmp_path / "snapshot", lists=lists)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    assert SAE.load(f"owner/repo/{inside}").kind == kind
    assert len(fake.fetched) == 2  # the weights and their settings, and nothing else
    assert {name.split("/")[0] for name in fake.fetched} == {inside.split("/")[0]}


def test_several_saes_on_the_hub_are_listed_before_any_is_fetched(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    fake = Hub(repository, tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    with pytest.raises(BadFile, match=r"owner/repo contains 3 files .*: dl/trainer_0/ae\.pt, lens") as caught:
        SAE.load("owner/repo")
    assert "owner/repo/dl/trainer_0/ae.pt" in str(caught.value)
    assert not fake.fetched


@pytest.mark.parametrize("lists", [True, False])
def test_a_sub_folder_that_the_hub_does_not_have(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path, lists: bool
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", Hub(repository, tmp_path / "snapshot", lists=lists))
    for inside in ("absent", "absent/ae.pt"):
        with pytest.raises(Unreachable, match=f"no SAE in '{inside}'"):
            SAE.load(f"owner/repo/{inside}")


def test_offline_an_sae_used_before_is_found_again(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    fake = Hub(repository, tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot_download", fake)
    SAE.load("owner/repo/dl")

    def incomplete(*args: Any, **kwargs: Any) -> str:
        error = hub.errors.LocalEntryNotFoundError("incomplete")
        error.snapshot_path = str(fake.snapshot)
        raise error

    monkeypatch.setattr(hub, "snapshot_download", incomplete)
    assert SAE.load("owner/repo/dl").kind == "topk"


def test_a_local_path_wins_over_the_hub(
    hub: Any, monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", Hub(repository, tmp_path / "snapshot"))
    monkeypatch.chdir(tmp_path)
    make("batchtopk").save("owner/repo")
    assert read_sae("owner/repo").kind == "batchtopk"
    assert locate(Path("owner/repo")) == Path("owner/repo/sae.safetensors")


def test_without_the_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unreachable, match=r"torino\[hub\]"):
        SAE.load("owner/repo")


# ------------------------------------------------------------------ the libraries themselves, where installed


def fill(module: torch.nn.Module) -> torch.nn.Module:
    """Give every weight, bias and threshold of a library's SAE a random value."""
    with torch.no_grad():
        for number, (name, value) in enumerate(sorted(module.named_parameters())):
            value.copy_(rand(*value.shape, seed=number))
            if "threshold" in name:
                value.abs_()
    return module


SAELENS = {
    "standard": ("StandardTrainingSAE", {}),
    "topk": ("TopKTrainingSAE", {"k": K}),
    "batchtopk": ("BatchTopKTrainingSAE", {"k": K}),
    "matryoshka_batchtopk": ("MatryoshkaBatchTopKTrainingSAE", {"k": K, "matryoshka_widths": [4, 12, C]}),
    "jumprelu": ("JumpReLUTrainingSAE", {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", SAELENS)
@pytest.mark.parametrize("normalize", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("center", [True, False])
def test_against_saelens(tmp_path: Path, architecture: str, normalize: str, center: bool) -> None:
    sae_lens = pytest.importorskip("sae_lens", exc_type=ImportError)
    name, options = SAELENS[architecture]
    config = {"d_in": D, "d_sae": C, "normalize_activations": normalize, "apply_b_dec_to_input": center, **options}
    theirs: Any = fill(getattr(sae_lens, name)(getattr(sae_lens, f"{name}Config")(**config)))
    if hasattr(theirs, "topk_threshold"):
        theirs.topk_threshold.fill_(THRESHOLD)
    theirs.save_model(tmp_path / "training")
    theirs.save_inference_model(tmp_path / "inference")
    finished = sae_lens.SAE.load_from_disk(tmp_path / "inference")
    with torch.no_grad():
        z = finished.encode(X)
        x_hat = finished.decode(z)
    for save in ("training", "inference"):
        sae = SAE.load(tmp_path / save)
        check(sae, z, x_hat)
        assert sae.groups == (GROUPS if "matryoshka" in architecture else (C,))
    exported = sae_lens.SAE.load_from_disk(SAE.load(tmp_path / "training").export(tmp_path / "ours", "saelens"))
    with torch.no_grad():
        torch.testing.assert_close(exported.encode(X), z, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(exported(X), x_hat, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["topk", "batchtopk"])
@pytest.mark.parametrize("mode", ["expected_average_only_in", "covariance_whitening"])
def test_against_saelens_half_way_through_training(tmp_path: Path, architecture: str, mode: str) -> None:
    sae_lens = pytest.importorskip("sae_lens", exc_type=ImportError)
    from sae_lens.training.activation_scaler import ActivationScaler

    name, options = SAELENS[architecture]
    config = {"d_in": D, "d_sae": C, "normalize_activations": mode, **options}
    theirs: Any = fill(getattr(sae_lens, name)(getattr(sae_lens, f"{name}Config")(**config)))
    if hasattr(theirs, "topk_threshold"):
        theirs.topk_threshold.fill_(THRESHOLD)
    scaler = ActivationScaler()
    batches = (rand(64, D, seed=seed) * 3 + 1 for seed in range(100))
    if mode == "covariance_whitening":
        scaler.estimate_whitening(D, batches, 10)
    else:
        scaler.estimate_scaling_factor(D, batches, 10)
    theirs.save_model(tmp_path / "training")
    scaler.save(str(tmp_path / "training" / "activation_scaler.json"))
    if scaler.whitening is not None:
        white = scaler.whitening
        theirs.fold_activation_whitening(white.mean, white.matrix, white.inverse_matrix)
    else:
        theirs.fold_activation_norm_scaling_factor(scaler.scaling_factor)
    theirs.save_inference_model(tmp_path / "inference")
    finished = sae_lens.SAE.load_from_disk(tmp_path / "inference")
    with torch.no_grad():
        check(SAE.load(tmp_path / "training"), finished.encode(X), finished(X))


@pytest.mark.parametrize("transcode", [False, True])
def test_against_sparsify(tmp_path: Path, transcode: bool) -> None:
    sparsify = pytest.importorskip("sparsify", exc_type=ImportError)
    if not hasattr(sparsify, "SparseCoder"):
        pytest.skip("this sparsify is another package; eai-sparsify has SparseCoder")
    theirs: Any = fill(sparsify.SparseCoder(D, sparsify.SparseCoderConfig(num_latents=C, k=K, transcode=transcode)))
    theirs.save_to_disk(tmp_path)
    with torch.no_grad():
        values, index, _ = theirs.encode(X)
        z = torch.zeros(len(X), C).scatter(-1, index, values)
        check(SAE.load(tmp_path), z, theirs.decode(values, index))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("center", [True, False])
def test_against_dictionary_learning(tmp_path: Path, kind: str, center: bool) -> None:
    pytest.importorskip("dictionary_learning", exc_type=ImportError)
    utils = pytest.importorskip("dictionary_learning.utils", exc_type=ImportError)
    sae = make(kind, center=center)
    theirs, _ = utils.load_dictionary(str(sae.export(tmp_path / "ours", "dictionary_learning")), "cpu")
    with torch.no_grad():
        check(sae, theirs.encode(X), theirs(X))
        fill(theirs)
        torch.save(theirs.state_dict(), tmp_path / "ours" / "ae.pt")
        theirs, _ = utils.load_dictionary(str(tmp_path / "ours"), "cpu")
        check(SAE.load(tmp_path / "ours"), theirs.encode(X), theirs(X))
