"""Limits for crafted files, and paths outside a folder."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_arrays, read_checkpoint, read_json, read_safetensors, write_arrays
from torino.core.safety import (
    check_expansion,
    is_inside,
    max_bytes,
    max_pixels,
)
from torino.core.tokens import load_tokens

MEGABYTE = 2**20


@pytest.fixture
def one_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_MAX_BYTES", str(MEGABYTE))


# ---------------------------------------------------------------------- limits


def test_small_npz_that_expands_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_arrays(tmp_path / "t.npz", {"patches": torch.zeros(3, 1024 * 1024)})
    monkeypatch.setenv("TORINO_MAX_BYTES", str(MEGABYTE))
    assert path.stat().st_size < 100_000
    with pytest.raises(BadFile, match=r"t\.npz takes .* bytes on disk and 12,58.,... in memory; .* TORINO_MAX_BYTES"):
        load_tokens(path)
    monkeypatch.setenv("TORINO_MAX_BYTES", str(16 * MEGABYTE))
    assert read_arrays(path)[0]["patches"].shape == (3, 1024 * 1024)


@pytest.mark.usefixtures("one_megabyte")
def test_large_npz_that_does_not_expand_is_read(tmp_path: Path) -> None:
    values = torch.randn(1024, 1024)
    assert torch.equal(read_arrays(write_arrays(tmp_path / "t.npz", {"patches": values}))[0]["patches"], values)


def test_array_larger_than_its_zip_member_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2000000000,)}"
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("patches.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))
    with pytest.raises(BadFile, match=r"patches\.npy declares shape \(2000000000,\)"):
        load_tokens(tmp_path / "t.npz")


@pytest.mark.usefixtures("one_megabyte")
def test_compressed_checkpoint_that_expands_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1024, 1024)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "small.pt", "w", 8) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    assert read_checkpoint(tmp_path / "plain.pt")["weight"].shape == (1024, 1024)  # as large as its file
    with pytest.raises(BadFile, match="in memory; torino accepts"):
        read_checkpoint(tmp_path / "small.pt")


@pytest.mark.usefixtures("one_megabyte")
def test_long_json_and_long_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"names": [[]] * 200_000}))
    with pytest.raises(BadFile, match=r"card\.json has 800,\d+ bytes; torino accepts up to 524,288"):
        read_json(path)
    header = json.dumps({f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(2000)}).encode()
    (tmp_path / "t.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(BadFile, match=r"The header of .*t\.safetensors has .* bytes; torino accepts up to 65,536"):
        read_safetensors(tmp_path / "t.safetensors")


@pytest.mark.parametrize("text", ["0", "-1", "1e9", "many", "9" * 30])
def test_invalid_limits_are_reported(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_MAX_BYTES", text)
    monkeypatch.setenv("TORINO_MAX_PIXELS", text)
    for limit in (max_bytes, max_pixels):
        with pytest.raises(BadParameter, match=r"TORINO_MAX_(BYTES|PIXELS) must be a whole number above 0, got"):
            limit()


def test_data_may_be_ten_times_its_size_on_disk() -> None:
    check_expansion("x", 10**9, 10**10)
    with pytest.raises(BadFile, match="x takes 1,000,000,000 bytes on disk"):
        check_expansion("x", 10**9, 10**10 + 1)


# ---------------------------------------------------------------------- paths


def test_is_inside_resolves_links(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "data-other"
    data.mkdir()
    other.mkdir()
    (data / "link").symlink_to(other)
    (data / "loop").symlink_to(data / "loop")
    assert is_inside(data / "a" / ".." / "b", data)
    for path in (data / ".." / "b", Path("/etc/passwd"), data / "link" / "b", other / "b", data / "a\0b"):
        assert not is_inside(path, data), path
    assert is_inside(data / "link" / "b", data / "link")
