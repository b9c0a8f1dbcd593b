"""The layout of saev: version 0.1.0 of the package index, and schemas 1 to 5 of its repository.

Checked against saev 0.1.0 (test_libraries.py); the schemas follow the code of OSU-NLP-Group/saev (nn/modeling.py).
"""

from __future__ import annotations

import json
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
    parameter_weights,
    random_tensor,
    top_k,
)
from torch import Tensor

from torino.core.errors import BadFile
from torino.sae import SAE

LEGACY = {"d_vit": D, "exp_factor": C // D, "sparsity_coeff": 4e-4, "n_reinit_samples": 16, "ghost_grads": False}
LEGACY |= {"remove_parallel_grads": True, "normalize_w_dec": True, "seed": 0}
PLAIN = {"data": {"scale_mean": False, "scale_norm": False, "layer": -2, "patches": "patches"}}


def header(activation: str, schema: int = 5, **parameters: Any) -> dict[str, Any]:
    """The first line of a file of schema 2 to 5."""
    cfg = {"d_model": D, "d_sae": C, "activation": {"cls": activation, "params": parameters}, "normalize_w_dec": True}
    return {"schema": schema, "cfg": cfg, "commit": "abc", "lib": "0.2.0"}


def write(folder: Path, line: Any, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """Write a file as saev does: JSON, a newline, then torch.save into the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sae.pt").open("wb") as file:
        file.write((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n")
        torch.save(tensors, file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def hidden(s: dict[str, Tensor], *, center: bool = False) -> Tensor:
    return (X - s["b_dec"] * center) @ s["W_enc"] + s["b_enc"]


@pytest.mark.parametrize("decoder", [True, False])
def test_saev_before_schemas_subtracts_b_dec(tmp_path: Path, decoder: bool) -> None:
    s = parameter_weights()
    sae = SAE.load(write(tmp_path, LEGACY, s, PLAIN), decoder=decoder)
    z = torch.relu(hidden(s, center=True))
    assert (sae.kind, sae.k, sae.card.token_kind, sae.card.block) == ("relu", None, "patch", None)
    if decoder:
        check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    torch.testing.assert_close(sae.encode(X), z)


@pytest.mark.parametrize("schema", [2, 3, 4, 5])
def test_saev_relu(tmp_path: Path, schema: int) -> None:
    s = parameter_weights()
    z = torch.relu(hidden(s))
    check_sae(SAE.load(write(tmp_path, header("Relu", schema), s)), z, z @ s["W_dec"] + s["b_dec"])


@pytest.mark.parametrize("k", [K, 10 * C])
def test_saev_topk(tmp_path: Path, k: int) -> None:
    s = parameter_weights()
    sae = SAE.load(write(tmp_path, header("TopK", top_k=k, aux={"cls": "AuxK", "params": {"k_aux": 512}}), s))
    z = torch.relu(top_k(hidden(s), min(k, C)))  # the library uses at most d_sae
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.k) == ("topk", min(k, C))


@pytest.mark.parametrize("threshold", [THRESHOLD, 0.0])
def test_saev_batchtopk(tmp_path: Path, threshold: float) -> None:
    s = parameter_weights(**{"activation.threshold": torch.tensor(threshold)})
    z = gate(torch.relu(hidden(s)), threshold)
    sae = SAE.load(write(tmp_path, header("BatchTopK", top_k=K, momentum=0.1), s))
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert (sae.kind, sae.k) == ("batchtopk", K)


def test_saev_batchtopk_without_a_threshold(tmp_path: Path) -> None:
    s = parameter_weights()
    folder = write(tmp_path, header("BatchTopK", 2, top_k=K), s)
    with pytest.raises(BadFile, match=r"kind of the SAE.*without a threshold.*kind='batchtopk', threshold="):
        SAE.load(folder)
    z = torch.relu(top_k(hidden(s)))
    check_sae(SAE.load(folder, kind="topk"), z, z @ s["W_dec"] + s["b_dec"])
    z = gate(torch.relu(hidden(s)), THRESHOLD)
    check_sae(SAE.load(folder, kind="batchtopk", threshold=THRESHOLD), z, z @ s["W_dec"] + s["b_dec"])


def test_saev_schema_one(tmp_path: Path) -> None:
    line = {"schema": 1, "cls": "TopK", "cfg": {"d_vit": D, "exp_factor": C // D, "top_k": K}, "lib": "0.1.0"}
    s = parameter_weights()
    with pytest.raises(BadFile, match="schema 1, which saev used before and after"):
        SAE.load(write(tmp_path, line, s))
    s["b_dec"] = torch.zeros(D)  # then both versions compute the same
    z = torch.relu(top_k(hidden(s)))
    check_sae(SAE.load(write(tmp_path, line, s)), z, z @ s["W_dec"])


@pytest.mark.parametrize(
    ("config", "place", "block", "tokens"),
    [
        ({"train_data": {"layer": 23, "tokens": "content", "scale_norm": False}}, "checkpoint", 23, "patch"),
        ({"train_data": {"layer": -1, "tokens": "special"}}, "run", None, "cls"),
        (None, "layer_21/abc", 21, ""),
    ],
)
def test_saev_fills_the_card(
    tmp_path: Path, config: dict[str, Any] | None, place: str, block: int | None, tokens: str
) -> None:
    card = SAE.load(write(tmp_path / place, header("Relu"), parameter_weights(), config)).card
    assert (card.block, card.token_kind, card.notes) == (block, tokens, "")


@pytest.mark.parametrize(
    ("line", "config", "names"),
    [
        (LEGACY, None, r"scale_mean, scale_norm\)"),
        (LEGACY, {"data": {"scale_mean": "mean.pt", "scale_norm": False}}, r"\(scale_mean\)"),
        (header("Relu"), {"train_data": {"scale_norm": True}}, r"\(scale_norm\)"),
    ],
)
def test_saev_warns_of_normalized_activations(tmp_path: Path, line: Any, config: Any, names: str) -> None:
    with pytest.warns(UserWarning, match=f"{names}.*does not contain their mean and scale.*'Load an SAE'"):
        assert "normalized" in SAE.load(write(tmp_path, line, parameter_weights(), config)).card.notes


def test_mean_and_scale_can_be_folded(tmp_path: Path) -> None:
    """The example of the guide 'Load an SAE'."""
    s = parameter_weights()
    mean, scale = random_tensor(D, seed=5), 3.0
    with pytest.warns(UserWarning, match="mean and scale"):
        sae = SAE.load(write(tmp_path, LEGACY, s))
    assert sae.W_dec is not None
    folded = SAE(sae.W_enc / scale, sae.b_enc, sae.W_dec * scale, sae.b_dec * scale + mean, kind=sae.kind, k=sae.k)
    z = torch.relu(((X - mean) / scale - s["b_dec"]) @ s["W_enc"] + s["b_enc"])
    check_sae(folded, z, (z @ s["W_dec"] + s["b_dec"]) * scale + mean)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (header("AbsBatchTopK", top_k=K), "activation 'AbsBatchTopK'. Accepted: Relu, TopK, BatchTopK"),
        (header("JumpRelu"), "JumpRelu"),
        (header("Relu") | {"schema": 6}, "schema = 6. Accepted: none, or 1, 2, 3, 4, 5"),
        (header("Relu") | {"schema": [1]}, r"schema = \[1\]"),
        ({"schema": 5, "cfg": {"activation": {"cls": ["TopK"]}}}, "activation"),
        ({"schema": 1, "cls": "SparseAutoencoderConfig", "cfg": {"activation": {"top_k": K}}}, "activation 'None'"),
        ({"schema": 5, "cfg": 3}, "not an SAE of saev"),
        ({"model": "gpt"}, "begins with a line of JSON, but is not an SAE of saev"),
        (LEGACY | {"exp_factor": 7}, r"d_vit \* exp_factor = 56, but the weights have 24"),
        (LEGACY | {"d_vit": 9}, "d_vit = 9, but the weights have 8"),
        ("[1, 2]", "neither safetensors nor a torch checkpoint"),
        ('{"d_vit": ', "first line of .* cannot be used: it is not valid JSON"),
        ('{"a":' * 5000, "first line of .* cannot be used: it is nested more than 64 levels deep"),
    ],
)
@pytest.mark.filterwarnings("ignore:saev normalizes")
def test_saev_refuses(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(BadFile, match=words) as caught:
        SAE.load(write(tmp_path, line, parameter_weights()))
    assert "run code" not in str(caught.value)
    assert "sae.pt" in str(caught.value)


def test_saev_with_other_tensors(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="not an SAE of saev"):
        SAE.load(write(tmp_path, LEGACY, {"weight": random_tensor(2, 2)}))


@pytest.mark.parametrize("fraction", [0.3, 0.8])
def test_saev_truncated(tmp_path: Path, fraction: float) -> None:
    path = write(tmp_path, header("Relu"), parameter_weights()) / "sae.pt"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])
    with pytest.raises(BadFile, match="truncated") as caught:
        SAE.load(tmp_path)
    assert "run code" not in str(caught.value)
