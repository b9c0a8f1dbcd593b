"""Writing the layouts of other libraries."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_cases import (
    GROUPS,
    KINDS,
    C,
    D,
    X,
    check_sae,
    make_full_sae,
    random_tensor,
)
from safetensors.torch import load_file

from torino.core.errors import BadFile, BadParameter, UnknownName
from torino.sae import SAE
from torino.sae.formats import write_sae


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("layout", ["dictionary_learning", "saelens"])
def test_export_and_back(tmp_path: Path, kind: str, center: bool, layout: str) -> None:
    sae = make_full_sae(kind, center=center)
    assert sae.export(tmp_path, layout) == tmp_path
    back = SAE.load(tmp_path)
    check_sae(back, sae.encode(X), sae.reconstruct(X))
    assert (back.kind, back.k, back.groups, back.card) == (sae.kind, sae.k, sae.groups, sae.card)


def test_export_of_a_relu_sae_with_decoder_norms_keeps_its_latents(tmp_path: Path) -> None:
    sae = make_full_sae("relu")
    assert sae.W_dec is not None
    sae.W_dec *= 1 + torch.arange(C)[:, None] / C
    back = SAE.load(sae.export(tmp_path, "dictionary_learning"))
    check_sae(back, sae.encode(X), sae.reconstruct(X))


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
    make_full_sae(kind).export(tmp_path, "dictionary_learning")
    state = torch.load(tmp_path / "ae.pt", weights_only=True)
    trainer = json.loads((tmp_path / "config.json").read_text())["trainer"]
    assert (trainer["dict_class"], state.keys()) == EXPECTED[kind]
    shape = (D, C) if "W_enc" in state else (C, D)
    assert tuple(state["W_enc" if "W_enc" in state else "encoder.weight"].shape) == shape
    assert (trainer["activation_dim"], trainer["dict_size"], trainer["layer"]) == (D, C, 22)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", ["none", "layer_norm", "constant_norm"])
def test_saelens_gets_an_inference_save(tmp_path: Path, kind: str, normalize: str) -> None:
    sae = make_full_sae(kind, normalize=normalize)
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
        sae = make_full_sae(kind, threshold=None)
    sae.export(tmp_path, layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        back = SAE.load(tmp_path)
    check_sae(back, sae.encode(X), sae.reconstruct(X))
    assert bool(caught) == (kind != "jumprelu")


@pytest.mark.parametrize(
    ("sae", "words"),
    [
        (lambda: make_full_sae("topk", normalize="layer_norm"), "layer_norm"),
        (lambda: make_full_sae("topk", groups=GROUPS), "groups"),
        (lambda: make_full_sae("batchtopk", k=None), "without k"),
        (lambda: make_full_sae("batchtopk", threshold=random_tensor(C).abs()), "one threshold"),
    ],
)
def test_settings_that_dictionary_learning_does_not_support(tmp_path: Path, sae: Callable[[], SAE], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        sae().export(tmp_path, "dictionary_learning")
    assert not list(tmp_path.iterdir())
    back = SAE.load(sae().export(tmp_path, "saelens"))
    check_sae(back, sae().encode(X), sae().reconstruct(X))
    assert back.groups == sae().groups


def test_unknown_layouts_missing_decoders_and_files_in_the_way(tmp_path: Path) -> None:
    sae = make_full_sae("topk")
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
