"""Reading and writing files: whole or not at all, and never running what is inside them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file as _save_safetensors
from torch import Tensor

from torino.core.errors import BadFile


def cache_dir() -> Path:
    """Where torino keeps what it made or fetched: ``TORINO_CACHE``, or ``torino`` in the user's cache."""
    given = os.environ.get("TORINO_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache") / "torino"


def write_atomic(path: str | Path, write: Callable[[Path], None]) -> Path:
    """Write a file through a temporary neighbour and rename it into place.

    A reader sees the old file or the new one, never half of one; a failed write leaves the old one.
    """
    path = Path(path)
    if path.is_dir():
        raise BadFile(f"Cannot write {path}: it is a folder. Give the path of a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    except OSError as error:
        raise BadFile(f"Cannot write {path}: {error.strerror or error}. Choose a writable folder.") from error
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as done:
            os.fsync(done.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes private files; give it the usual rights
        temporary.replace(path)
    except OSError as error:
        raise BadFile(f"Cannot write {path}: {error.strerror or error}. Nothing was changed.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: str | Path, value: object) -> Path:
    """Write ``value`` as indented JSON, whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    return write_atomic(path, write)


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object; anything else is a :class:`BadFile`."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise BadFile(f"{path} is not valid JSON ({error}). Write it again or fetch it anew.") from error
    if not isinstance(value, dict):
        raise BadFile(f"{path} holds a JSON {type(value).__name__}, not an object with named fields.")
    return cast(dict[str, Any], value)


def write_arrays(
    path: str | Path, arrays: Mapping[str, Tensor | np.ndarray], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write named arrays to ``.npz`` or ``.safetensors``, by the ending of ``path``.

    ``metadata`` becomes the header of a safetensors file, and 0-d strings in an npz.
    """
    path, metadata = Path(path), dict(metadata or {})
    if path.suffix == ".safetensors":
        tensors: dict[str, Tensor] = {}
        for name, value in arrays.items():
            taken = [tensor.data_ptr() for tensor in tensors.values()]
            tensors[name] = _alone(torch.as_tensor(value).detach().cpu(), taken)

        def save(target: Path) -> None:
            try:
                _save_safetensors(tensors, target, metadata or None)
            except SafetensorError as error:  # a full disk, among others
                raise OSError(str(error)) from error

        return write_atomic(path, save)
    if path.suffix == ".npz":
        plain = {name: _as_numpy(value) for name, value in arrays.items()}
        plain |= {name: np.array(text) for name, text in metadata.items()}

        def write(target: Path) -> None:
            with target.open("wb") as file:
                np.savez_compressed(file, **cast(dict[str, Any], plain))

        return write_atomic(path, write)
    raise BadFile(f"Cannot write {path}: its ending is {path.suffix!r}. Accepted: .npz, .safetensors.")


def read_arrays(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read named arrays and their metadata from ``.npz`` or ``.safetensors``."""
    path = Path(path)
    if not path.is_file():
        raise BadFile(f"There is no file {path}. Accepted: a .npz or .safetensors file that exists.")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    raise BadFile(f"Cannot read {path}: its ending is {path.suffix!r}. Accepted: .npz, .safetensors.")


def read_safetensors(
    path: str | Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors whose name is ``wanted`` from a safetensors file, and its metadata."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118 (not a dict)
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise BadFile(
            f"{path} is not a readable safetensors file ({error}). "
            "It may be truncated: write it again or fetch it anew."
        ) from error


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a torch checkpoint of plain tensors; one that would run code is refused."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise BadFile(f"There is no file {path}.") from error
    except Exception as error:
        # torch raises UnpicklingError for both foreign code and damage, RuntimeError or EOFError for a cut archive
        if "weights_only" in str(error) or "Weights only" in str(error):
            reason = "it holds more than tensors and would run code when opened"
        else:
            reason = "it is truncated or not a torch checkpoint"
        raise BadFile(
            f"{path} was refused: {reason}. Accepted: a state dict of plain tensors, or safetensors. "
            "Ask its publisher for one of these, or fetch the file anew."
        ) from error
    if not isinstance(value, dict):
        raise BadFile(f"{path} holds a {type(value).__name__}, not a state dict of named tensors.")
    return cast(dict[str, Any], value)


def _alone(value: Tensor, taken: list[int]) -> Tensor:
    """A contiguous tensor with memory of its own: safetensors refuses tensors that share it."""
    owns = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes and value.data_ptr() not in taken
    return value if owns else value.clone(memory_format=torch.contiguous_format)


def _as_numpy(value: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    value = value.detach().cpu()
    return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()


def _read_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    texts: dict[str, str] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                value = file[name]
                if not isinstance(value, np.ndarray):  # a member of the zip that is no array comes as bytes
                    raise ValueError(f"{name} is not an array")
                if value.dtype.kind == "U" and value.ndim == 0:
                    texts[name] = str(value)
                elif value.dtype.kind in "biuf":  # dates, texts and the like are nothing anyone here asks for
                    tensors[name] = torch.from_numpy(value)
    except Exception as error:  # a damaged zip fails in a dozen ways, deep in zipfile, zlib and numpy
        raise BadFile(
            f"{path} is not a readable .npz of plain arrays ({error}). "
            "It may be truncated, or hold pickled objects, which are never opened."
        ) from error
    return tensors, texts
