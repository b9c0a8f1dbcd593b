"""Checksums inside files, and the record of verified files."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.files import flip_byte, read_folder, read_only
from torino.core import verified
from torino.core.checksum import (
    check_object,
    encode_record,
    split_record,
    verify_safetensors,
    verify_zip,
    with_checksum,
)
from torino.core.errors import BadFile
from torino.core.io import read_arrays, read_json, write_arrays, write_json
from torino.core.verified import VerifiedFiles

TENSORS = {"a": torch.arange(20.0), "b": torch.ones(3, 3, dtype=torch.float16)}
METADATA = {"format": "test", "z": "1", "y": "2", 'an "odd"\n name': "Größe \x01\u2028"}


# ---------------------------------------------------------------------- zip


def test_every_byte_of_an_archive_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    content = path.read_bytes()
    assert verify_zip(path) is True
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xE1]) + content[position + 1 :])
        with suppress(BadFile):
            assert verify_zip(path) in (True, False, None)  # some bytes, such as the padding, have no checksum


# ---------------------------------------------------------------------- safetensors


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    files = [write_arrays(tmp_path / f"{number}.safetensors", TENSORS, METADATA) for number in range(8)]
    assert len({file.read_bytes() for file in files}) == 1
    arrays, metadata = read_arrays(files[0])
    assert metadata == METADATA
    assert all(torch.equal(arrays[name], value) for name, value in TENSORS.items())


def test_no_flipped_byte_of_a_safetensors_file_is_used(tmp_path: Path) -> None:
    good = write_arrays(tmp_path / "good.safetensors", TENSORS, METADATA).read_bytes()
    file = tmp_path / "bad.safetensors"
    harmless = range(good.index(b'"checksum"'), good.index(b'"checksum"') + len('"checksum":"crc32:00000000"'))
    for position in range(len(good)):
        file.write_bytes(good)
        flip_byte(file, position)
        if position not in harmless:  # without its checksum, the content is still correct
            with pytest.raises(BadFile):
                read_arrays(file)
    file.write_bytes(good)
    flip_byte(file, len(good) - 1)
    with pytest.raises(
        BadFile, match=r"bad\.safetensors is damaged: its content does not match its checksum\. Restore"
    ):
        read_arrays(file)


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "other.safetensors", {"format": "pt"})
    assert verify_safetensors(tmp_path / "other.safetensors") is None
    assert read_arrays(tmp_path / "other.safetensors")[1] == {"format": "pt"}


# ---------------------------------------------------------------------- JSON


def test_a_sealed_json_file_notices_changes(tmp_path: Path) -> None:
    value = {"k": 20, "groups": [1, 2], "scale": 0.1, "names": {10: "ä", 9: None}, "nan": float("nan")}
    path = write_json(tmp_path / "card.json", value, sealed=True)
    assert read_json(path)["names"] == {"10": "ä", "9": None}
    assert "checksum" not in read_json(path)
    text = path.read_text(encoding="utf-8")
    for old, new in (("20", "30"), ("0.1", "0.2"), ('"9"', '"8"'), ("ä", "ö"), ('"k"', '"j"')):
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(
            BadFile, match=r'does not match its checksum.*if you edited it on purpose, remove .*"checksum"'
        ):
            read_json(path)
    edited = json.loads(text) | {"k": 30}
    del edited["checksum"]
    path.write_text(json.dumps(edited), encoding="utf-8")
    assert read_json(path)["k"] == 30


def test_checksums_of_others_are_left_alone(tmp_path: Path) -> None:
    for value in ({"checksum": "sha256:00"}, {"checksum": 5}, {"a": 1}):
        assert check_object("x.json", dict(value)) == value
    assert check_object("x.json", with_checksum({"a": 1})) == {"a": 1}


# ---------------------------------------------------------------------- JSONL


def test_no_flipped_byte_of_a_record_is_used() -> None:
    row = {"index": "1", "prediction": "a dög } ", "tokens": 64}
    good = encode_record(row)
    assert {name: value for name, value in json.loads(good).items() if name != "crc32"} == row
    assert json.loads(split_record(good)[0]) == row
    for position in range(len(good)):
        for bit in (1, 2, 4, 8, 16, 32, 64, 128):
            bad = bytearray(good)
            bad[position] ^= bit
            content, correct = split_record(bytes(bad))
            try:
                used = json.loads(content) if correct else row
            except ValueError:
                continue
            assert {name: used.get(name) for name in row} == row, bad


def test_a_record_of_an_earlier_version_is_read() -> None:
    assert split_record(b'{"n": 1}\n') == (b'{"n": 1}\n', True)


# ---------------------------------------------------------------------- verified files


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 2 MB that changed a while ago."""
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "SETTLED", 0.05)
    path = tmp_path / "folder" / "large.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(2 << 20))
    time.sleep(0.1)
    return path


def count_verifications(path: Path, times: int = 1, *, again: bool = False) -> int:
    calls: list[Path] = []
    for _ in range(times):
        files = VerifiedFiles(path.parent)
        files.check(path, lambda: calls.append(path), again=again)
        files.save()
    return len(calls)


def test_a_large_file_is_verified_once(file: Path) -> None:
    with read_only(file.parent):  # the record is elsewhere
        assert count_verifications(file, 3) == 1
    assert count_verifications(file, 2, again=True) == 2
    status = file.stat()
    flip_byte(file, 7)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # the time of change stays visible
    time.sleep(0.1)
    assert count_verifications(file, 3) == 1
    replacement = file.with_name("new")
    replacement.write_bytes(file.read_bytes())
    os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns))
    replacement.replace(file)
    assert count_verifications(file) == 1


def test_a_small_or_new_file_is_verified_every_time(file: Path) -> None:
    small = file.with_name("small.bin")
    small.write_bytes(b"small")
    time.sleep(0.1)
    assert count_verifications(small, 3) == 3
    file.write_bytes(bytes(3 << 20))
    assert count_verifications(file, 3) >= 2  # within the resolution of the clock it could change again


def test_a_damaged_file_is_not_recorded(file: Path) -> None:
    def refuse() -> None:
        raise BadFile("damaged")

    for _ in range(2):
        files = VerifiedFiles(file.parent)
        with pytest.raises(BadFile):
            files.check(file, refuse)
        files.save()
    assert count_verifications(file) == 1


@pytest.mark.parametrize("how", ["a file", "damaged record", "no home"])
def test_without_a_usable_cache_files_are_verified_every_time(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "a file":
        (tmp_path / "cache").write_text("in the way")
    elif how == "damaged record":
        assert count_verifications(file) == 1
        (record,) = (tmp_path / "cache").rglob("*.json")
        record.write_text('{"files": [1, 2]}')
        assert count_verifications(file) == 1
        return
    else:
        monkeypatch.setattr(verified, "cache_dir", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert count_verifications(file, 2) == 2


# ---------------------------------------------------------------------- the test helper


def test_read_only_refuses_every_change(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("text")
    other.mkdir()
    changes = [
        lambda: (folder / "new").write_text("x"),
        lambda: (folder / "file").open("r+b"),
        lambda: os.open(folder / "sub" / "lock", os.O_RDWR | os.O_CREAT),
        lambda: (folder / "file").unlink(),
        lambda: (folder / "file").rename(other / "file"),
        lambda: (folder / "more").mkdir(),
        lambda: write_json(folder / "x.json", {}),
    ]
    with read_only(folder):
        for change in changes:
            with pytest.raises((OSError, BadFile), match="Read-only file system"):
                change()
        assert (folder / "file").read_text() == "text"
        assert not os.access(folder, os.W_OK)
        (other / "new").write_text("x")
    assert os.access(folder, os.W_OK)
    (folder / "new").write_text("x")
    assert sorted(read_folder(folder)) == ["file", "new"]
