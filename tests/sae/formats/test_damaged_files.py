"""Damaged and malicious SAE files."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    GROUPS,
    C,
    D,
    X,
    k_and_threshold,
    linear_weights,
    make_full_sae,
    parameter_weights,
    random_tensor,
    write_files,
)
from safetensors.torch import save_file
from torch.serialization import set_crc32_options

from tests.support.files import flip_byte
from torino.core import verified
from torino.core.checksum import verify_safetensors
from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_arrays
from torino.sae import SAE
from torino.sae.formats import _common as common
from torino.sae.formats import write_sae


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.6, 0.99])
@pytest.mark.parametrize("layout", ["torino", "dictionary_learning", "saelens"])
def test_truncated_files(tmp_path: Path, fraction: float, layout: str) -> None:
    write_sae(make_full_sae("topk"), tmp_path, layout)
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
    state = linear_weights(b_dec=random_tensor(D), k=Bomb(mark))  # type: ignore[arg-type]
    if how == "torch":
        torch.save(state, tmp_path / "ae.pt")
    else:
        (tmp_path / "ae.pt").write_bytes(pickle.dumps(Bomb(mark), protocol=2))
    with pytest.raises(BadFile, match="was not loaded"):
        SAE.load(tmp_path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()  # without protection the code runs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"W_enc": ...}, "has an unknown layout"),
        ({"W_dec": ...}, "no 'W_dec'"),
        ({"b_enc": ...}, "no 'b_enc'"),
        ({"W_dec": random_tensor(D, C)}, r"'W_dec' .* has shape \(8, 24\), but 'W_enc' requires \(24, 8\)"),
        ({"W_enc": random_tensor(C)}, "not that of a matrix"),
        ({"W_enc": random_tensor(D, 0)}, "not that of a matrix"),
        ({"W_enc": random_tensor(C, D)}, "'b_enc'"),
        ({"b_dec": random_tensor(C)}, "'b_dec'"),
        ({"W_dec": torch.full((C, D), torch.nan)}, "'W_dec' .* NaN"),
        ({"b_enc": torch.full((C,), torch.inf)}, "'b_enc' .* NaN or inf"),
        ({"threshold": torch.tensor(torch.nan)}, "'threshold' .* NaN"),
        ({"threshold": random_tensor(5)}, "'threshold'"),
        ({"W_enc": torch.ones(D, C, dtype=torch.int8)}, r"'W_enc' .* torch\.int8"),
        ({"W_enc": "text"}, "'W_enc' .* str"),
        ({"k": torch.tensor([1, 2])}, "'k' .* single number"),
        ({"k": "three"}, "'k' .* 'three'"),
        ({"k": torch.tensor(2.5)}, r"k = 2\.5\. Accepted: an integer from 1 to 24"),
        ({"k": torch.tensor(torch.nan)}, "'k' .* nan, not a finite number"),
        ({"k": torch.tensor(-3)}, "k = -3"),
        ({"k": torch.tensor(10**9)}, "k = 1000000000"),
        ({"k": torch.tensor(True)}, "'k' .* True, not a finite number"),
        ({"k": 10**500}, "'k' .* is 10000.*…, not a finite number"),
        ({"group_sizes": torch.tensor([1, 2])}, "add up"),
        (
            {"group_sizes": torch.tensor([4.0, torch.nan])},
            r"group_sizes = \[4\.0, nan\]\. Accepted: a list of integers",
        ),
        ({"group_sizes": [4, 10**500]}, "group_sizes = .*Accepted: a list of integers"),
        ({"group_sizes": torch.tensor(24)}, "group_sizes = 24"),
        ({"W_enc": torch.empty(D, C, device="meta")}, "'W_enc' .* meta tensor"),
        ({"W_enc": torch.eye(D, C).to_sparse()}, "'W_enc' .* sparse tensor"),
        ({"W_enc": torch.zeros(1).expand(10**6, 10**7)}, r"'W_enc' .* the file has fewer values"),
        (
            {"group_sizes": torch.ones(1, dtype=torch.int64).expand(10**13)},
            r"'group_sizes' .* the file has fewer values",
        ),
        ({"group_sizes": torch.ones(2, device="meta")}, "'group_sizes' .* meta tensor"),
        ({"r_mag": random_tensor(C)}, "gated"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    s = parameter_weights(group_sizes=torch.tensor(GROUPS), **k_and_threshold()) | change
    write_files(tmp_path, "ae.pt", {name: value for name, value in s.items() if value is not ...})
    with pytest.raises(BadFile, match=words) as caught:
        SAE.load(tmp_path)
    assert "ae.pt" in str(caught.value)


def test_a_gated_dictionary_is_refused(tmp_path: Path) -> None:
    s = linear_weights(
        decoder_bias=random_tensor(D), r_mag=random_tensor(C), gate_bias=random_tensor(C), mag_bias=random_tensor(C)
    )
    with pytest.raises(BadFile, match=r"gated SAE, which is not supported\. Accepted: ReLU"):
        SAE.load(write_files(tmp_path, "ae.pt", s))


def test_weights_of_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="kind is unknown"):
        SAE.load(write_files(tmp_path, "ae.pt", parameter_weights()))
    with pytest.raises(BadFile, match="has an unknown layout: it contains weight"):
        SAE.load(write_files(tmp_path, "ae.pt", {"weight": random_tensor(2, 2)}))


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    write_files(tmp_path, "ae.pt", linear_weights(b_dec=random_tensor(D), **k_and_threshold()))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadFile, match="not valid JSON"):
        SAE.load(tmp_path)


def test_kind_is_checked(tmp_path: Path) -> None:
    make_full_sae("relu").save(tmp_path)
    with pytest.raises(BadParameter, match="kind must be one of 'relu'"):
        SAE.load(tmp_path, kind="gated")  # type: ignore[arg-type]
    with pytest.raises(BadFile, match="needs k"):
        SAE.load(tmp_path, kind="topk")


def test_a_file_with_a_threshold_is_read_without_it_as_relu(tmp_path: Path) -> None:
    SAE(torch.eye(3), W_dec=torch.eye(3), kind="batchtopk", threshold=2.0).save(tmp_path)
    x = torch.tensor([[3.0, 1.0, -1.0]])
    assert SAE.load(tmp_path).encode(x).tolist() == [[3.0, 0.0, 0.0]]
    assert SAE.load(tmp_path, kind="relu").encode(x).tolist() == [[3.0, 1.0, 0.0]]


# ------------------------------------------------------------------ files that are not what their name says


@pytest.mark.parametrize("name", ["sae.safetensors", "sae.pt", "sae.pth"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html><title>404</title></html>", "a web page, such as an error or sign-in page"),
        (b'{"error": "Invalid credentials"}', "JSON text, not weights"),
        (b"Entry not found", "neither safetensors nor a torch checkpoint"),
        (b"\x1f\x8b\x08\0\0\0", "compressed with gzip"),
        (b"\x82\xa6params\x80", "neither safetensors nor a torch checkpoint"),
        (b"PK\x03\x04 truncated", "truncated"),
        (b"\x93NUMPY\x01\0", "NumPy array"),
    ],
)
def test_a_file_that_is_something_else(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadFile, match=words) as caught:
        SAE.load(tmp_path)
    assert name in str(caught.value)
    assert "run code" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_torchscript_archive(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "sae.pt"))
    with pytest.raises(BadFile, match=r"a TorchScript archive.*Save its tensors"):
        SAE.load(tmp_path)


@pytest.mark.parametrize("suffix", [".npz", ".msgpack", ".pkl", ".gz", ".bin", ".ckpt"])
def test_other_suffixes(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"sae{suffix}").write_bytes(b"x")
    with pytest.raises(
        BadFile, match=rf"suffix is '\{suffix}'\. Accepted: \.safetensors, \.pt, \.pth\. Save the tensors"
    ):
        SAE.load(tmp_path / f"sae{suffix}")
    with pytest.raises(BadFile, match="no SAE in"):
        SAE.load(tmp_path)


def test_the_content_decides_and_not_the_suffix(tmp_path: Path) -> None:
    sae = make_full_sae("topk")
    sae.export(tmp_path / "lens", "saelens")
    (tmp_path / "lens" / "sae_weights.safetensors").rename(tmp_path / "lens" / "sae.pt")
    torch.testing.assert_close(SAE.load(tmp_path / "lens").encode(X), sae.encode(X))
    sae.export(tmp_path / "dl", "dictionary_learning")
    (tmp_path / "dl" / "ae.pt").rename(tmp_path / "dl" / "ae.safetensors")
    torch.testing.assert_close(SAE.load(tmp_path / "dl").encode(X), sae.encode(X))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k must be between 1 and 24"),
        ({"k": 2.5}, r"got 2\.5"),
        ({"k": True}, "got True"),
        ({"k": "3"}, "got '3'"),
        ({"k": 25}, "got 25"),
        ({"threshold": float("nan")}, "threshold must be a finite number, got nan"),
        ({"threshold": "0.5"}, "threshold must be a finite number"),
        ({"threshold": 10**400}, "threshold must be a finite number"),
    ],
)
def test_given_settings_are_checked(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    make_full_sae("batchtopk").save(tmp_path)
    with pytest.raises(BadParameter, match=words):
        SAE.load(tmp_path, **options)


def test_given_settings_replace_those_of_the_file(tmp_path: Path) -> None:
    make_full_sae("batchtopk").save(tmp_path)
    sae = SAE.load(tmp_path, k=5, threshold=1.5)
    assert (sae.k, float(sae.threshold)) == (5, 1.5)  # type: ignore[arg-type]
    assert SAE.load(tmp_path, kind="topk", k=5).encode(X).count_nonzero(dim=-1).max() == 5


# ---------------------------------------------------------------------- one wrong byte


@pytest.mark.parametrize("layout", ["torino", "saelens", "dictionary_learning"])
def test_a_flipped_byte_of_the_weights_is_noticed(tmp_path: Path, layout: str) -> None:
    write_sae(make_full_sae("topk"), tmp_path, layout)
    weights = next(path for path in tmp_path.iterdir() if path.suffix != ".json")
    flip_byte(weights, weights.read_bytes().index(make_full_sae("topk").b_enc.numpy().tobytes()))
    with pytest.raises(BadFile, match=r"damaged|truncated") as caught:
        SAE.load(tmp_path, decoder=False)
    assert weights.name in str(caught.value)
    assert "again" in str(caught.value)


def test_a_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    write_sae(make_full_sae("topk"), tmp_path, "dictionary_learning")
    state = torch.load(tmp_path / "ae.pt", weights_only=True)
    set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "ae.pt")
    finally:
        set_crc32_options(True)
    assert SAE.load(tmp_path).kind == "topk"
    torch.save(state, tmp_path / "ae.pt", _use_new_zipfile_serialization=False)
    assert SAE.load(tmp_path).kind == "topk"


def test_a_flipped_byte_of_an_earlier_file_is_noticed(tmp_path: Path) -> None:
    """Earlier versions wrote the hash of the tensors, but no checksum of the file."""
    sae = make_full_sae("topk")
    sae.save(tmp_path)
    tensors, header = read_arrays(tmp_path / "sae.safetensors")
    save_file(tensors, tmp_path / "sae.safetensors", header)
    assert verify_safetensors(tmp_path / "sae.safetensors") is None
    assert torch.equal(SAE.load(tmp_path).W_enc, sae.W_enc)
    flip_byte(tmp_path / "sae.safetensors", -20)
    with pytest.raises(BadFile, match=r"sae\.safetensors is damaged: .* checksum\. Restore it from a copy"):
        SAE.load(tmp_path)


def test_a_changed_card_is_noticed(tmp_path: Path) -> None:
    make_full_sae("topk").save(tmp_path)
    card = tmp_path / "card.json"
    card.write_text(card.read_text().replace('"k": 3', '"k": 2'))
    with pytest.raises(BadFile, match=r"card\.json is damaged or was edited"):
        SAE.load(tmp_path)


def test_changed_names_are_ignored_with_a_warning(tmp_path: Path) -> None:
    sae = make_full_sae("topk")
    sae.names = {1: "dog"}
    sae.save(tmp_path)
    assert SAE.load(tmp_path).names == {1: "dog"}
    names = tmp_path / "names.json"
    names.write_text(names.read_text().replace('"1"', '"2"'))
    with pytest.warns(UserWarning, match=r"does not match its checksum.* The names are ignored"):
        assert SAE.load(tmp_path).names == {}


def test_a_large_sae_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "SETTLED", 0.0)
    SAE(torch.randn(2048, 256), W_dec=torch.randn(2048, 256)).save(tmp_path / "sae")
    time.sleep(0.05)
    reads: list[Path] = []

    def count(path: Path) -> bool | None:
        reads.append(path)
        return verify_safetensors(path)

    monkeypatch.setattr(common, "verify_safetensors", count)
    for _ in range(3):
        SAE.load(tmp_path / "sae", decoder=False)
    assert len(reads) == 1
    flip_byte(tmp_path / "sae" / "sae.safetensors", -1)
    with pytest.raises(BadFile, match="does not match its checksum"):
        SAE.load(tmp_path / "sae", decoder=False)
