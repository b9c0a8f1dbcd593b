"""Comparison with the libraries that write the layouts, if installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    GROUPS,
    KINDS,
    THRESHOLD,
    C,
    D,
    K,
    X,
    check_sae,
    make_full_sae,
    random_tensor,
)

from torino.sae import SAE


def fill(module: torch.nn.Module) -> torch.nn.Module:
    """Set all parameters of a library's SAE to random values."""
    with torch.no_grad():
        for number, (name, value) in enumerate(sorted(module.named_parameters())):
            value.copy_(random_tensor(*value.shape, seed=number))
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
        check_sae(sae, z, x_hat)
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
    batches = (random_tensor(64, D, seed=seed) * 3 + 1 for seed in range(100))
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
        check_sae(SAE.load(tmp_path / "training"), finished.encode(X), finished(X))


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
        check_sae(SAE.load(tmp_path), z, theirs.decode(values, index))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("center", [True, False])
def test_against_dictionary_learning(tmp_path: Path, kind: str, center: bool) -> None:
    pytest.importorskip("dictionary_learning", exc_type=ImportError)
    utils = pytest.importorskip("dictionary_learning.utils", exc_type=ImportError)
    sae = make_full_sae(kind, center=center)
    theirs, _ = utils.load_dictionary(str(sae.export(tmp_path / "ours", "dictionary_learning")), "cpu")
    with torch.no_grad():
        check_sae(sae, theirs.encode(X), theirs(X))
        fill(theirs)
        torch.save(theirs.state_dict(), tmp_path / "ours" / "ae.pt")
        theirs, _ = utils.load_dictionary(str(tmp_path / "ours"), "cpu")
        check_sae(SAE.load(tmp_path / "ours"), theirs.encode(X), theirs(X))


@pytest.mark.filterwarnings("ignore:saev normalizes")
def test_against_saev(tmp_path: Path) -> None:
    nn = pytest.importorskip("saev.nn", exc_type=ImportError)
    config = pytest.importorskip("saev.config", exc_type=ImportError)
    if not hasattr(config, "SparseAutoencoder"):
        pytest.skip("this saev is newer than 0.1.0")
    theirs: Any = fill(nn.SparseAutoencoder(config.SparseAutoencoder(d_vit=D, exp_factor=C // D)))
    nn.dump(str(tmp_path / "sae.pt"), theirs)
    with torch.no_grad():
        x_hat, z, _ = theirs(X)
    check_sae(SAE.load(tmp_path), z, x_hat)


OVERCOMPLETE = {
    "SAE": ({}, {"kind": "relu"}),
    "TopKSAE": ({"top_k": K}, {"kind": "topk", "k": K}),
    "BatchTopKSAE": ({}, {"kind": "batchtopk"}),
    "JumpSAE": ({}, {}),
    "RATopKSAE": ({"top_k": K, "points": random_tensor(C, D, seed=20)}, {"kind": "topk", "k": K}),
}


@pytest.mark.parametrize("name", OVERCOMPLETE)
@pytest.mark.parametrize("encoder", ["linear", "mlp_bn_1", "tied", "untied"])
def test_against_overcomplete(tmp_path: Path, name: str, encoder: str) -> None:
    library = pytest.importorskip("overcomplete.sae", exc_type=ImportError)
    arguments, options = OVERCOMPLETE[name]
    module = encoder if encoder in ("linear", "mlp_bn_1") else None
    theirs: Any = fill(getattr(library, name)(D, C, encoder_module=module, **arguments))
    if module is None:
        fill(getattr(theirs, encoder)(bias=True))
    for seed in (21, 22):  # in training mode: estimates batch norm and threshold, and normalizes the dictionary
        theirs(random_tensor(64, D, seed=seed))
    theirs.eval()
    torch.save(theirs.state_dict(), tmp_path / "sae.pt")
    if name == "BatchTopKSAE":
        options = options | {"threshold": float(theirs.running_threshold)}
    with torch.no_grad():
        _, z, x_hat = theirs(X)
        check_sae(SAE.load(tmp_path, **options), z, x_hat)


def test_against_the_loader_of_saelens_for_qwen_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sae_lens = pytest.importorskip("sae_lens", exc_type=ImportError)
    loaders = pytest.importorskip("sae_lens.loading.pretrained_sae_loaders", exc_type=ImportError)
    repository = f"SAE-Res-Qwen3-1.7B-Base-W1K-L0_{K}"
    s = {"W_enc": random_tensor(C, D, seed=1), "W_dec": random_tensor(D, C, seed=2)}
    s |= {"b_enc": random_tensor(C, seed=3), "b_dec": random_tensor(D, seed=4)}
    (tmp_path / repository).mkdir()
    torch.save(s, tmp_path / repository / "layer5.sae.pt")
    monkeypatch.setattr(loaders, "hf_hub_download", lambda filename, **_: tmp_path / repository / filename)
    config, state, _ = loaders.qwen_scope_sae_huggingface_loader(f"Qwen/{repository}", "layer5.sae.pt")
    theirs = sae_lens.TopKSAE(
        sae_lens.TopKSAEConfig(
            d_in=D,
            d_sae=C,
            k=config["activation_fn_kwargs"]["k"],
            apply_b_dec_to_input=config["apply_b_dec_to_input"],
            rescale_acts_by_decoder_norm=False,
        )
    )
    theirs.load_state_dict(state)
    with torch.no_grad():
        check_sae(SAE.load(tmp_path), theirs.encode(X), theirs(X))
