"""The dictionary_learning layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    GROUPS,
    C,
    D,
    K,
    X,
    check_sae,
    gate,
    k_and_threshold,
    linear_weights,
    parameter_weights,
    random_tensor,
    top_k,
    write_files,
)

from torino.sae import SAE


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("dict_class", ["BatchTopKSAE", None])
def test_dictionary_learning_batchtopk(tmp_path: Path, ending: str, dict_class: str | None) -> None:
    s = linear_weights(b_dec=random_tensor(D, seed=4), **k_and_threshold())
    config = {"config": {"trainer": {"dict_class": dict_class, "k": K}}} if dict_class else {}
    sae = SAE.load(write_files(tmp_path, f"ae.{ending}", s, **config))
    z = gate(torch.relu((X - s["b_dec"]) @ s["encoder.weight"].T + s["encoder.bias"]), s["threshold"])
    check_sae(sae, z, z @ s["decoder.weight"].T + s["b_dec"])
    assert (sae.kind, sae.k, sae.center) == ("batchtopk", K, True)


@pytest.mark.parametrize("how", ["dict_class", "trainer_class", "kind="])
def test_dictionary_learning_topk(tmp_path: Path, how: str) -> None:
    s = linear_weights(b_dec=random_tensor(D, seed=4), **k_and_threshold())
    names = {"dict_class": "AutoEncoderTopK", "trainer_class": "TopKTrainer"}
    config = {"config": {"trainer": {how: names[how]}}} if how in names else {}
    sae = SAE.load(write_files(tmp_path, "ae.pt", s, **config), kind=None if config else "topk")
    z = top_k(torch.relu((X - s["b_dec"]) @ s["encoder.weight"].T + s["encoder.bias"]))
    check_sae(sae, z, z @ s["decoder.weight"].T + s["b_dec"])


def test_dictionary_learning_topk_takes_k_from_the_config(tmp_path: Path) -> None:
    s = linear_weights(b_dec=random_tensor(D, seed=4))
    folder = write_files(tmp_path, "ae.pt", s, config={"trainer": {"dict_class": "AutoEncoderTopK", "k": K}})
    assert SAE.load(folder).k == K


@pytest.mark.parametrize("spelling", ["MatryoshkaBatchTopKSAE", "MatroyshkaBatchTopKSAE", None])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_dictionary_learning_matryoshka(tmp_path: Path, spelling: str | None, ending: str) -> None:
    s = parameter_weights(group_sizes=torch.tensor(GROUPS), **k_and_threshold())
    config = {"config": {"trainer": {"dict_class": spelling}}} if spelling else {}
    sae = SAE.load(write_files(tmp_path, f"ae.{ending}", s, **config))
    z = gate(torch.relu((X - s["b_dec"]) @ s["W_enc"] + s["b_enc"]), s["threshold"])
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.groups, sae.k) == ("matryoshka", GROUPS, K)


@pytest.mark.parametrize("spelling", ["MatryoshkaBatchTopKTrainer", "MatroyshkaBatchTopKTrainer"])
def test_groups_come_from_the_config_if_the_weights_lack_them(tmp_path: Path, spelling: str) -> None:
    trainer = {"trainer_class": spelling, "group_sizes": list(GROUPS)}
    sae = SAE.load(write_files(tmp_path, "ae.pt", parameter_weights(**k_and_threshold()), config={"trainer": trainer}))
    assert (sae.kind, sae.groups) == ("matryoshka", GROUPS)


def test_levels_keep_the_first_groups(tmp_path: Path) -> None:
    s = parameter_weights(group_sizes=torch.tensor(GROUPS), **k_and_threshold())
    sae = SAE.load(write_files(tmp_path, "ae.pt", s), levels=2)
    size = sum(GROUPS[:2])
    z = gate(torch.relu((X - s["b_dec"]) @ s["W_enc"] + s["b_enc"]), s["threshold"])[:, :size]
    check_sae(sae, z, z @ s["W_dec"][:size] + s["b_dec"])


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("decoder", [False, True])
def test_dictionary_learning_autoencoder_folds_decoder_norms(tmp_path: Path, norms: bool, decoder: bool) -> None:
    s = linear_weights(bias=random_tensor(D, seed=4))
    if norms:
        s["decoder.weight"] = s["decoder.weight"] * (0.5 + torch.arange(C) / C)
    sae = SAE.load(write_files(tmp_path, "ae.pt", s), decoder=decoder)
    n = s["decoder.weight"].norm(dim=0)
    z = torch.relu((X - s["bias"]) @ (s["encoder.weight"] * n[:, None]).T + s["encoder.bias"] * n)
    torch.testing.assert_close(sae.encode(X), z)
    assert (sae.W_dec is not None) == decoder
    if decoder:
        plain = torch.relu((X - s["bias"]) @ s["encoder.weight"].T + s["encoder.bias"])
        check_sae(sae, z, plain @ s["decoder.weight"].T + s["bias"])


def test_a_zero_decoder_row_is_folded_to_zero(tmp_path: Path) -> None:
    s = linear_weights(bias=random_tensor(D, seed=4))
    s["decoder.weight"][:, 5] = 0
    sae = SAE.load(write_files(tmp_path, "ae.pt", s))
    assert torch.isfinite(sae.reconstruct(X)).all()
    assert not sae.encode(X)[:, 5].any()


def test_dictionary_learning_new_autoencoder_is_not_centered(tmp_path: Path) -> None:
    s = linear_weights(**{"decoder.bias": random_tensor(D, seed=4)})
    s["decoder.weight"] = s["decoder.weight"] * 3  # this class keeps its norms
    z = torch.relu(X @ s["encoder.weight"].T + s["encoder.bias"])
    check_sae(SAE.load(write_files(tmp_path, "ae.pt", s)), z, z @ s["decoder.weight"].T + s["decoder.bias"])


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_dictionary_learning_jumprelu_is_not_centered(tmp_path: Path, ending: str) -> None:
    s = parameter_weights(threshold=random_tensor(C, seed=7).abs())
    config = {"trainer": {"dict_class": "JumpReluAutoEncoder"}}
    sae = SAE.load(write_files(tmp_path, f"ae.{ending}", s, config=config))
    pre = X @ s["W_enc"] + s["b_enc"]
    z = torch.relu(pre * (pre > s["threshold"]))
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert sae.kind == "jumprelu"


def test_a_threshold_of_minus_one_warns(tmp_path: Path) -> None:
    s = linear_weights(b_dec=random_tensor(D, seed=4), **k_and_threshold(-1.0))
    with pytest.warns(UserWarning, match="never estimated"):
        sae = SAE.load(write_files(tmp_path, "ae.pt", s))
    z = torch.relu((X - s["b_dec"]) @ s["encoder.weight"].T + s["encoder.bias"])
    check_sae(sae, z, z @ s["decoder.weight"].T + s["b_dec"])


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
    s = linear_weights(b_dec=random_tensor(D, seed=4), **k_and_threshold())
    card = SAE.load(write_files(tmp_path, "ae.pt", s, config={"trainer": trainer})).card
    assert (card.encoder, card.block) == (encoder, block)


def test_the_run_folder_of_pach_et_al_fills_the_card(tmp_path: Path) -> None:
    name = "imagenet_train_activations_clip-vit-large-patch14-336_22_post_mlp_residual_matroyshka_batch_top_k_20_x64"
    s = parameter_weights(group_sizes=torch.tensor(GROUPS), **k_and_threshold())
    trainer = {"dict_class": "MatroyshkaBatchTopKSAE", "layer": "", "lm_name": "", "submodule_name": ""}
    write_files(tmp_path / "random_k_2" / name / "trainer_0", "ae.pt", s, config={"trainer": trainer})
    card = SAE.load(tmp_path).card
    assert (card.encoder, card.block, card.data) == ("clip-vit-large-patch14-336", 22, "imagenet_train")
    assert card.token_kind == "2 random tokens per image"
