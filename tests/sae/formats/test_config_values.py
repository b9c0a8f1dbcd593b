"""Values of the wrong type or range in the settings of every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    linear_weights,
    make_full_sae,
    parameter_weights,
    random_tensor,
    sparse_coder,
    write_files,
)

from torino.core.errors import BadFile
from torino.sae import SAE


def write_native(folder: Path, kind: str) -> Path:
    make_full_sae(kind).save(folder)
    return folder / "card.json"


def write_saelens(folder: Path, kind: str) -> Path:
    config = {"architecture": kind, "d_in": D, "d_sae": C, "k": K, "apply_b_dec_to_input": True}
    tensors = parameter_weights(topk_threshold=torch.tensor(THRESHOLD))
    return write_files(folder, "sae_weights.safetensors", tensors, cfg=config) / "cfg.json"


def write_dictionary_learning(folder: Path, kind: str) -> Path:
    name = {"topk": "AutoEncoderTopK", "batchtopk": "BatchTopKSAE"}[kind]
    tensors = linear_weights(b_dec=random_tensor(D), threshold=torch.tensor(THRESHOLD))
    trainer = {"trainer": {"dict_class": name, "k": K}}
    return write_files(folder, "ae.pt", tensors, config=trainer) / "config.json"


def write_sparsify(folder: Path, kind: str) -> Path:
    sparse_coder(folder)
    return folder / "cfg.json"


def write_prisma(folder: Path, kind: str) -> Path:
    config = {"activation_fn_str": kind, "activation_fn_kwargs": {"k": K}, "normalize_activations": "none"}
    return write_files(folder, "weights.pt", parameter_weights(), config=config) / "config.json"


WRITERS: dict[str, tuple[Callable[[Path, str], Path], str, tuple[str, ...]]] = {
    "torino topk": (write_native, "topk", ("k",)),
    "torino batchtopk": (write_native, "batchtopk", ("k",)),
    "saelens topk": (write_saelens, "topk", ("k",)),
    "saelens batchtopk": (write_saelens, "batchtopk", ("k",)),
    "dictionary_learning topk": (write_dictionary_learning, "topk", ("trainer", "k")),
    "dictionary_learning batchtopk": (write_dictionary_learning, "batchtopk", ("trainer", "k")),
    "sparsify": (write_sparsify, "topk", ("k",)),
    "prisma": (write_prisma, "topk", ("activation_fn_kwargs", "k")),
}
BAD_K = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "negative": "-3",
    "zero": "0",
    "huge": "1" + "0" * 300,
    "huge float": "1e300",
    "above the number of latents": str(C + 1),
    "string": f'"{K}"',
    "bool": "true",
    "list": f"[{K}]",
    "object": "{}",
}


def set_raw(path: Path, keys: tuple[str, ...], raw: str) -> None:
    """Replace a value in a JSON file by raw text, which need not be valid for json.dumps."""
    content = json.loads(path.read_text())
    content.pop("checksum", None)  # edited by hand, or written by an earlier version
    section = content
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = "<here>"
    path.write_text(json.dumps(content).replace('"<here>"', raw))


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("bad", BAD_K)
def test_a_wrong_k_is_refused(tmp_path: Path, layout: str, bad: str) -> None:
    write, kind, keys = WRITERS[layout]
    path = write(tmp_path, kind)
    assert SAE.load(tmp_path).k == K
    set_raw(path, keys, BAD_K[bad])
    with pytest.raises(BadFile, match=rf"has k = .*Accepted: an integer from 1 to {C}") as caught:
        SAE.load(tmp_path)
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("raw", [str(K + 0.4), f"{K}.0"])
def test_a_fraction_is_rounded_only_for_an_average(tmp_path: Path, raw: str) -> None:
    set_raw(write_saelens(tmp_path / "batch", "batchtopk"), ("k",), raw)
    assert SAE.load(tmp_path / "batch").k == K
    set_raw(write_saelens(tmp_path / "top", "topk"), ("k",), raw)
    if raw.endswith(".0"):
        assert SAE.load(tmp_path / "top").k == K
    else:
        with pytest.raises(BadFile, match=r"k = 3\.4"):
            SAE.load(tmp_path / "top")


def write_groups(folder: Path, layout: str) -> tuple[Path, tuple[str, ...]]:
    if layout == "torino":
        return write_native(folder, "matryoshka"), ("groups",)
    if layout == "saelens":
        return write_saelens(folder, "matryoshka_batchtopk"), ("matryoshka_widths",)
    trainer = {"trainer": {"dict_class": "MatryoshkaBatchTopKSAE", "k": K, "group_sizes": list(GROUPS)}}
    folder = write_files(folder, "ae.pt", parameter_weights(threshold=torch.tensor(THRESHOLD)), config=trainer)
    return folder / "config.json", ("trainer", "group_sizes")


@pytest.mark.parametrize("layout", ["torino", "saelens", "dictionary_learning"])
@pytest.mark.parametrize("raw", ["[4, NaN]", "[4, 8.5]", '"4"', "[true]", "4", "[[4]]", "[4, 1e300]", '{"a": 1}'])
def test_wrong_groups_are_refused(tmp_path: Path, layout: str, raw: str) -> None:
    path, keys = write_groups(tmp_path, layout)
    SAE.load(tmp_path)
    set_raw(path, keys, raw)
    with pytest.raises(BadFile, match=rf"has {keys[-1]} = .*Accepted: a list of integers"):
        SAE.load(tmp_path)


FLAGS = {
    "torino": (write_native, "topk", "center"),
    "saelens centering": (write_saelens, "topk", "apply_b_dec_to_input"),
    "saelens rescaling": (write_saelens, "topk", "rescale_acts_by_decoder_norm"),
    "sparsify transcoder": (write_sparsify, "topk", "transcode"),
    "sparsify sign": (write_sparsify, "topk", "signed"),
    "prisma": (write_prisma, "topk", "is_transcoder"),
}


@pytest.mark.parametrize("case", FLAGS)
@pytest.mark.parametrize("raw", ['"false"', "NaN", "0", "[]"])
def test_a_wrong_flag_is_refused(tmp_path: Path, case: str, raw: str) -> None:
    write, kind, name = FLAGS[case]
    path = write(tmp_path, kind)
    SAE.load(tmp_path)
    set_raw(path, (name,), raw)
    with pytest.raises(BadFile, match=f"has {name} = .*Accepted: true or false"):
        SAE.load(tmp_path)


@pytest.mark.parametrize("raw", ["NaN", "true", "-1", "0", "1" + "0" * 400, '"1"', "null"])
def test_a_wrong_scale_of_saelens_is_refused(tmp_path: Path, raw: str) -> None:
    set_raw(write_saelens(tmp_path, "topk"), ("normalize_activations",), '"expected_average_only_in"')
    (tmp_path / "activation_scaler.json").write_text(f'{{"scaling_factor": {raw}}}')
    with pytest.raises(BadFile, match=r"activation_scaler\.json with the scale is missing or empty"):
        SAE.load(tmp_path)


@pytest.mark.parametrize("raw", ["NaN", "true", "-1", "9", "1e300", '"8"', "[8]"])
@pytest.mark.parametrize(
    ("write", "name"),
    [(write_native, "width"), (write_saelens, "d_in"), (write_sparsify, "d_in"), (write_prisma, "d_in")],
)
def test_a_size_that_does_not_fit_is_refused(tmp_path: Path, write: Any, name: str, raw: str) -> None:
    set_raw(write(tmp_path, "topk"), (name,), raw)
    with pytest.raises(BadFile, match=f"has {name} = .*but the weights have {D}"):
        SAE.load(tmp_path)
