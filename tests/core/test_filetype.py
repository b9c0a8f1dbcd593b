"""Weights files are recognized by their content."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from torino.core.errors import BadFile
from torino.core.filetype import FileType, explain, identify
from torino.core.io import read_checkpoint, read_json_line, read_safetensors

TENSORS = {"a": torch.arange(300.0)}


def write_script(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


def write_json_header(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        torch.save(TENSORS, file)


def write_half(path: Path) -> None:
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_archive(path: Path) -> None:
    from zipfile import ZipFile

    with ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.ones(3))


FILES: dict[FileType, list[Callable[[Path], object]]] = {
    "safetensors": [lambda path: save_file(TENSORS, path)],
    "torch": [
        lambda path: torch.save(TENSORS, path),
        lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
    ],
    "json header": [write_json_header],
    "empty": [lambda path: path.write_bytes(b"")],
    "git lfs": [
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
    ],
    "html": [
        lambda path: path.write_text("<!DOCTYPE html><html>Not found</html>"),
        lambda path: path.write_text("\n <html>"),
        lambda path: path.write_text('<?xml version="1.0"?><Error>AccessDenied</Error>'),
    ],
    "json": [
        lambda path: path.write_text('{"error": "Repository not found"}'),
        lambda path: path.write_text(json.dumps({"a": [1, 2]}, indent=2) + "\n"),
        lambda path: path.write_text("{" + "x" * (1 << 21)),
    ],
    "pickle": [
        lambda path: path.write_bytes(pickle.dumps({"a": 1}, protocol=2)),
        lambda path: path.write_bytes(pickle.dumps({"a": 1}, protocol=5)),
    ],
    "torchscript": [write_script],
    "truncated zip": [write_half, lambda path: path.write_bytes(b"PK\x03\x04")],
    "zip": [write_archive],
    "npz": [write_npz],
    "npy": [lambda path: np.save(path.open("wb"), np.ones(3))],
    "gzip": [lambda path: path.write_bytes(gzip.compress(b"hello"))],
    "hdf5": [lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 64)],
    "gguf": [lambda path: path.write_bytes(b"GGUF\x03\0\0\0")],
    "unknown": [lambda path: path.write_bytes(b"\x83\xa6params"), lambda path: path.write_text("hello")],
}
CASES = [(kind, write) for kind, writers in FILES.items() for write in writers]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("kind", "write"), CASES)
def test_the_content_decides(tmp_path: Path, kind: FileType, write: Callable[[Path], object]) -> None:
    write(tmp_path / "file.bin")
    assert identify(tmp_path / "file.bin") == kind


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("kind", "write"), CASES)
def test_readers_say_what_a_wrong_file_is(tmp_path: Path, kind: FileType, write: Callable[[Path], object]) -> None:
    path = tmp_path / "file.bin"
    write(path)
    if kind == "torch":
        assert torch.equal(read_checkpoint(path)["a"], TENSORS["a"])
    else:
        with pytest.raises(BadFile) as caught:
            read_checkpoint(path)
        assert explain(kind) in str(caught.value)
    if kind == "safetensors":
        assert torch.equal(read_safetensors(path)[0]["a"], TENSORS["a"])
    else:
        with pytest.raises(BadFile) as caught:
            read_safetensors(path)
        assert explain(kind) in str(caught.value)
    code = kind in ("pickle", "torchscript")
    assert ("code" in str(caught.value)) == code


def test_a_checkpoint_after_a_line_of_json(tmp_path: Path) -> None:
    write_json_header(tmp_path / "a.pt")
    header, start = read_json_line(tmp_path / "a.pt")
    assert header == {"a": 1}
    assert torch.equal(read_checkpoint(tmp_path / "a.pt", start)["a"], TENSORS["a"])


@pytest.mark.parametrize("line", ["[1]", "{", "nul", '{"a":' * 5000, "\udcff"])
def test_a_first_line_that_is_not_an_object(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.pt").write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(BadFile, match=r"first line of .*a\.pt cannot be used: it "):
        read_json_line(tmp_path / "a.pt")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="There is no file"):
        identify(tmp_path / "missing")
    with pytest.raises(BadFile, match="Cannot read"):
        identify(tmp_path)


def test_a_checkpoint_that_is_not_a_dictionary(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(BadFile, match="contains a list, not a state dict"):
        read_checkpoint(tmp_path / "a.pt")
