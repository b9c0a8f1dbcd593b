"""Cache files of the int8 prefilter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sae_cases import make_sae
from topk_cases import (
    assert_same_concepts,
    normal,
)
from torch import Tensor

from tests.support.files import read_only
from torino import SAE
from torino.core.errors import BadFile
from torino.core.io import read_arrays
from torino.core.topk import prefilter
from torino.core.topk.prefilter import (
    quantization,
    quantize,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an SAE whose quantized encoder is cached although it is small."""
    monkeypatch.setattr(quantization, "CACHE_MIN_WEIGHTS", 1)
    monkeypatch.setattr(prefilter, "backend_for", lambda device: "torch")
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    make_sae("relu").save(tmp_path / "sae")
    return tmp_path / "sae"


def cached(folder: Path) -> list[Path]:
    return list((folder.parent / "cache").glob("prefilter*"))


def count_quantizations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []

    def watched(weight: Tensor, bias: Tensor, zero: int) -> Any:
        counted.append(len(weight))
        return quantize(weight, bias, zero)

    monkeypatch.setattr(quantization, "quantize", watched)
    return counted


def test_the_encoder_is_quantized_once_and_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, x = count_quantizations(monkeypatch), normal(20, 4) * 3
    want = SAE.load(folder).top(x, 3, prefilter="int8")
    (file,) = cached(folder)
    assert file.name.startswith("prefilter8-24x4-")
    for _ in range(2):
        assert_same_concepts(SAE.load(folder).top(x, 3, prefilter="int8"), want)
    assert counted == [24]


def test_nothing_is_written_beside_the_sae(folder: Path) -> None:
    with read_only(folder):
        SAE.load(folder).top(normal(20, 4) * 3, 3, prefilter="int8")
    assert len(cached(folder)) == 1


def test_a_file_of_an_earlier_version_beside_the_sae_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(20, 4) * 3
    want = SAE.load(folder).top(x, 3, prefilter="int8")
    (file,) = cached(folder)
    file.rename(folder / f".{file.name}")
    counted = count_quantizations(monkeypatch)
    assert_same_concepts(SAE.load(folder).top(x, 3, prefilter="int8"), want)
    assert counted == []
    assert SAE.load(folder).folder == folder  # the cache file is not mistaken for an SAE
    make_sae("relu").save(folder)  # deletes it
    assert not list(folder.glob(".prefilter8-*"))


def test_levels_of_an_sae_have_separate_files(folder: Path) -> None:
    make_sae("matryoshka").save(folder)
    x = normal(20, 4) * 3
    for levels in (1, 2, 3):
        sae = SAE.load(folder, levels=levels)
        assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    assert len(cached(folder)) == 3


def test_files_that_are_damaged_or_of_other_weights_are_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(20, 4) * 3
    SAE.load(folder).top(x, 3, prefilter="int8")
    (file,) = cached(folder)
    good, numbers = file.read_bytes(), {name: value.clone() for name, value in read_arrays(file)[0].items()}
    counted = count_quantizations(monkeypatch)
    flipped = bytearray(good)
    flipped[-100] ^= 255  # in the tensors, not in the header
    for n, bad in enumerate((b"", good[: len(good) // 2], bytes(flipped), b"{}" * 50), start=1):
        file.write_bytes(bad)
        sae = SAE.load(folder)
        assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
        assert len(counted) == n
        assert all(torch.equal(value, numbers[name]) for name, value in read_arrays(file)[0].items())
    (folder / "sae.safetensors").write_bytes(_other(folder.parent / "other"))  # another SAE in the same folder
    (folder / "card.json").write_bytes((folder.parent / "other" / "card.json").read_bytes())
    sae = SAE.load(folder)
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    assert len(counted) == 5
    assert len(cached(folder)) == 2


def _other(folder: Path) -> bytes:
    make_sae("relu", seed=5).save(folder)
    return (folder / "sae.safetensors").read_bytes()


def test_changed_weights_are_not_cached(folder: Path) -> None:
    sae, x = SAE.load(folder), normal(20, 4) * 3
    sae.top(x, 3, prefilter="int8")
    for _ in range(3):
        sae.W_enc = sae.W_enc * 1.5
        assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    assert len(cached(folder)) == 1


def test_a_cache_folder_that_cannot_be_read_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError("no")

    x = normal(20, 4) * 3
    want = SAE.load(folder).top(x, 3, prefilter="off")
    monkeypatch.setattr(quantization, "write_arrays", lambda *_: (_ for _ in ()).throw(BadFile("Cannot write.")))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        weight, bias = make_sae("relu").W_enc, make_sae("relu").b_enc
        assert len(quantization.load_or_quantize(weight, bias, folder, 128).levels) == 32
    monkeypatch.setattr(quantization, "cache_dir", lambda: (_ for _ in ()).throw(BadFile("no home")))
    sae = make_sae("relu")
    sae.folder = folder
    assert_same_concepts(sae.top(x, 3, prefilter="int8"), want)


def test_without_a_writable_cache_no_file_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "write_arrays", lambda *rest: (_ for _ in ()).throw(BadFile("Cannot write.")))
    counted, x = count_quantizations(monkeypatch), normal(20, 4) * 3
    for _ in range(2):
        sae = SAE.load(folder)
        assert_same_concepts(sae.top(x, 3, prefilter="int8"), sae.top(x, 3, prefilter="off"))
    assert counted == [24, 24]
    assert not cached(folder)


def test_an_sae_created_in_memory_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "CACHE_MIN_WEIGHTS", 1)
    monkeypatch.setattr(prefilter, "backend_for", lambda device: "torch")
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_sae("relu").top(normal(20, 4), 3, prefilter="int8")
    assert not list(tmp_path.iterdir())
