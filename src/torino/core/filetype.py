"""Recognize the type of a weights file by its content, whatever its suffix."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from zipfile import BadZipFile, ZipFile, is_zipfile

from torino.core.errors import BadFile

FileType = Literal[
    "safetensors",
    "torch",
    "json header",
    "empty",
    "git lfs",
    "html",
    "json",
    "pickle",
    "torchscript",
    "truncated zip",
    "zip",
    "npz",
    "npy",
    "gzip",
    "hdf5",
    "gguf",
    "unknown",
]

JSON_LINE_LIMIT = 1 << 20  # bytes of a JSON header; those of saev have a few hundred
_CONVERT = "Save its tensors as safetensors, or as a state dict with torch.save."
_EXPLANATIONS: dict[FileType, str] = {
    "safetensors": "it is a safetensors file. Give it the suffix .safetensors.",
    "torch": "it is a torch checkpoint. Give it the suffix .pt.",
    "json header": "it is a torch checkpoint after a line of JSON. Give it the suffix .pt.",
    "empty": "it is empty (0 bytes): the download or copy was truncated. Download it again.",
    "git lfs": (
        "it is a Git LFS pointer, a short text in place of the weights. Run 'git lfs pull' in its repository, or "
        "download the file itself."
    ),
    "html": (
        "it is a web page, such as an error or sign-in page, not weights. Download the file itself; a gated repository "
        "requires 'hf auth login'."
    ),
    "json": "it is JSON text, not weights. Give the path of the weights.",
    "pickle": f"it is a pickle, which could run code when opened. {_CONVERT}",
    "torchscript": f"it is a TorchScript archive, which contains code. {_CONVERT}",
    "truncated zip": "it is truncated: the end of the archive is missing. Download it again.",
    "zip": "it is a zip archive, but not a torch checkpoint. Unpack it and give the path of the weights.",
    "npz": f"it is a NumPy archive (.npz). {_CONVERT}",
    "npy": f"it is a NumPy array (.npy). {_CONVERT}",
    "gzip": "it is compressed with gzip. Decompress it first.",
    "hdf5": f"it is an HDF5 file. {_CONVERT}",
    "gguf": f"it is a GGUF file. {_CONVERT}",
    "unknown": "it is damaged, truncated, or neither safetensors nor a torch checkpoint. Download it again.",
}
_MAGIC: dict[bytes, FileType] = {
    b"version https://git-lfs": "git lfs",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "torch",  # torch.save before version 1.6
    b"\x93NUMPY": "npy",
    b"\x1f\x8b": "gzip",
    b"\x89HDF\r\n": "hdf5",
    b"GGUF": "gguf",
}


def identify(path: str | Path) -> FileType:
    """Return the type of a file; raise :class:`BadFile` if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(512)
            if head[:1] == b"{":
                file.seek(0)
                line = file.readline(JSON_LINE_LIMIT)
                start = file.read(2)
                return "json header" if line.endswith(b"\n") and start in (b"PK", b"\x80\x02") else "json"
    except FileNotFoundError as error:
        raise BadFile(f"There is no file {path}.") from error
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    if not head:
        return "empty"
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head.startswith(b"PK\x03\x04"):
        return _identify_zip(path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:  # the length of the header, then its JSON
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    return "html" if head.lstrip()[:1] == b"<" else "unknown"


def explain(kind: FileType) -> str:
    """Return what a file of this type is and what to do, for the end of an error message."""
    return _EXPLANATIONS[kind]


def _identify_zip(path: str | Path) -> FileType:
    try:
        if not is_zipfile(path):
            return "truncated zip"
        with ZipFile(path) as archive:
            names = archive.namelist()
    except (BadZipFile, OSError, ValueError, NotImplementedError):
        return "truncated zip"
    if any(name.endswith("/constants.pkl") for name in names):
        return "torchscript"
    if any(name.endswith("/data.pkl") for name in names):
        return "torch"
    return "npz" if any(name.endswith(".npy") for name in names) else "zip"
