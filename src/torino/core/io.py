"""Read and write files: writes are atomic, and no file content is ever executed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file as _save_safetensors
from torch import Tensor

from torino.core import checksum
from torino.core.checks import check_tensor, to_path
from torino.core.errors import BadFile, BadParameter, TorinoError, pickled_object
from torino.core.filetype import JSON_LINE_LIMIT, explain, identify
from torino.core.safety import check_expansion, check_size
from torino.core.schema import JSON_SHARE, check_schema, max_json_bytes, parse_json, shorten
from torino.core.text import printable

HEADER_SHARE = 16  # each tensor in the header of a safetensors file takes more memory than parsed JSON


def cache_dir() -> Path:
    """Return the folder for generated and downloaded files: ``TORINO_CACHE``, or the user's cache folder.

    A relative path is made absolute, and ``~`` is the home folder.

    Raises
    ------
    BadFile
        If the path is a file or not valid UTF-8, or there is no home folder.
    """
    given = os.environ.get("TORINO_CACHE", "")
    if not is_utf8(given):
        raise BadFile(f"TORINO_CACHE is not valid UTF-8: {given!r}. Set it to another folder.")
    try:
        path = Path(given).expanduser().absolute() if given.strip() else user_cache_path("torino")
    except RuntimeError as error:
        reason = f"TORINO_CACHE is {given!r}, and this user" if given.strip() else "The user"
        raise BadFile(f"{reason} has no home folder. Set TORINO_CACHE to an absolute path.") from error
    if os.path.exists(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112 (Path raises if it may not look)
        raise BadFile(f"The cache folder {path} is a file. Set TORINO_CACHE to a folder, or remove the file.")
    return path


@contextmanager
def cache_errors(folder: Path) -> Generator[None]:
    """Turn errors of reading or writing a folder in the cache into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of a library, not of the file system
            raise
        raise BadFile(
            f"Cannot use the cache folder {folder}: {error.strerror or error}. Set TORINO_CACHE to a writable folder "
            "with enough space."
        ) from error


def write_atomic(path: str | Path, write: Callable[[Path], None]) -> Path:
    """Write a file atomically: write a temporary file in the same folder, then rename it.

    A reader sees either the old or the new file. If writing fails, the old file stays as it was.
    """
    path = to_path(path)
    try:
        if path.is_dir():
            raise BadFile(f"Cannot write {path}: it is a folder. Give the path of a file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    except OSError as error:
        raise BadFile(f"Cannot write {path}: {error.strerror or error}. Choose a writable folder.") from error
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp creates private files; use the default permissions
        temporary.replace(path)
    except OSError as error:
        raise BadFile(f"Cannot write {path}: {error.strerror or error}. Nothing was changed.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: str | Path, value: object, *, sealed: bool = False) -> Path:
    """Write ``value`` as indented JSON, atomically; ``sealed`` adds the field ``checksum`` to a JSON object."""
    if sealed:
        value = checksum.with_checksum(cast(Mapping[str, Any], value))
    text = json.dumps(value, indent=2, ensure_ascii=False).encode(errors="replace").decode()  # lone surrogates
    text = printable(text) + "\n"

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    return write_atomic(path, write)


def read_json(
    path: str | Path,
    kind: Any = dict,
    *,
    version: str | None = None,
    fix: str = "Write it again or download it again.",
) -> dict[str, Any]:
    """Read a JSON object; raise :class:`BadFile` for anything else, and if it has a checksum that is wrong.

    Parameters
    ----------
    path : path
    kind : type
        Its fields, see :func:`torino.core.schema.check_schema`.
    version : str, optional
        What its field ``format`` must be.
    fix : str
        The sentence of the error message that says what to do.
    """
    path = to_path(path)
    try:
        with path.open("rb") as file:
            check_size(str(path), os.fstat(file.fileno()).st_size, JSON_SHARE)
            value: dict[str, Any] = parse_json(file.read(max_json_bytes() + 1), dict)
        value = checksum.check_object(path, value)
        if version is not None and value.get("format") != version:
            raise BadFile(f"{path} has the format {shorten(value.get('format'))}; this torino reads {version!r}.")
        check_schema(value, kind)
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        if isinstance(error, TorinoError):
            raise
        raise BadFile(f"{path} cannot be used: {error}. {fix}") from error
    return value


def is_file(path: str | Path) -> bool:
    """Return whether a path is a file; False also for a name that the system does not accept, such as a long one."""
    return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises for such names)


def write_arrays(
    path: str | Path, arrays: Mapping[str, Tensor | np.ndarray], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write named arrays to ``.npz`` or ``.safetensors``, depending on the suffix of ``path``.

    ``metadata`` is stored in the header of a safetensors file, with a checksum of the file, or as 0-d string arrays in
    an npz file, whose format has checksums. The same arrays and metadata give the same bytes.
    """
    path, metadata = to_path(path), dict(metadata or {})
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray):
            check_tensor(name, value, BadParameter)
    if path.suffix == ".safetensors":
        _check_utf8(path)
        tensors: dict[str, Tensor] = {}
        for name, value in arrays.items():
            used = [tensor.data_ptr() for tensor in tensors.values()]
            tensors[name] = _unshared(torch.as_tensor(value).detach().cpu(), used)

        def save(target: Path) -> None:
            try:
                _save_safetensors(tensors, target, {**metadata, checksum.FIELD: checksum.UNSET})
            except SafetensorError as error:  # for example a full disk
                raise OSError(str(error)) from error
            checksum.seal_safetensors(target)

        return write_atomic(path, save)
    if path.suffix == ".npz":
        values = {name: _as_numpy(value) for name, value in arrays.items()}
        values |= {name: np.array(text) for name, text in metadata.items()}

        def write(target: Path) -> None:
            with target.open("wb") as file:
                np.savez_compressed(file, **cast(dict[str, Any], values))

        return write_atomic(path, write)
    raise BadFile(f"Cannot write {path}: the suffix is {path.suffix!r}. Accepted: .npz, .safetensors.")


def read_arrays(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read named arrays and their metadata from ``.npz`` or ``.safetensors``, and verify the checksum, if any."""
    path = to_path(path)
    if not is_file(path):
        raise BadFile(f"There is no file {path}. Give an existing .npz or .safetensors file.")
    if path.suffix == ".safetensors":
        arrays = read_safetensors(path)
        if checksum.verify_safetensors(path) is False:
            raise checksum.damaged_file(path)
        return arrays
    if path.suffix == ".npz":
        return _read_npz(path)
    raise BadFile(f"Cannot read {path}: the suffix is {path.suffix!r}. Accepted: .npz, .safetensors.")


def read_safetensors(
    path: str | Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the metadata of a safetensors file, and the tensors for whose name ``wanted`` is true.

    The checksum of the file, which covers all tensors, is not verified; see :mod:`torino.core.checksum`.
    """
    _check_utf8(path)
    try:
        with Path(path).open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
        if length < Path(path).stat().st_size:  # safetensors refuses a longer header
            check_size(f"The header of {path}", length, HEADER_SHARE)
        with safe_open(str(path), framework="pt") as file:
            names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118 (not a dict)
            metadata = {name: text for name, text in (file.metadata() or {}).items() if name != checksum.FIELD}
            return {name: file.get_tensor(name) for name in names}, metadata
    except (SafetensorError, OSError) as error:
        kind = identify(path)
        if kind != "safetensors":
            raise BadFile(f"{path} is not a safetensors file: {explain(kind)}") from error
        raise BadFile(
            f"{path} is not a readable safetensors file ({error}). "
            "It may be truncated: write it again or download it again."
        ) from error


def read_rows(path: str | Path, name: str, size: int = 1 << 22) -> Iterator[Tensor]:
    """Yield a tensor of a safetensors file in parts of about ``size`` numbers, along its first dimension."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensor = file.get_slice(name)
            rows, *others = tensor.get_shape() or [0]
            step = max(1, size // max(1, prod(others)))
            for start in range(0, rows, step):
                yield tensor[start : start + step]
    except (SafetensorError, OSError) as error:
        raise BadFile(f"{path} is not a readable safetensors file ({error}). Download it again.") from error


def read_checkpoint(path: str | Path, start: int = 0) -> dict[str, Any]:
    """Read a torch checkpoint of plain tensors, which begins at byte ``start``; nothing in the file is executed.

    Raise :class:`PickledObject` if it contains other objects, and :class:`BadFile` if it is something else.
    """
    kind = identify(path)
    if kind != ("json header" if start else "torch"):
        raise BadFile(f"{path} was not loaded: {explain(kind)}")
    try:
        with Path(path).open("rb") as file:  # given a path, torch would look at its suffix
            file.seek(start)
            content = io.BytesIO(file.read()) if start else file
            if zipfile.is_zipfile(content):  # normally not compressed, but torch reads compressed ones too
                _check_archive(path, content)
            content.seek(0)
            value = torch.load(content, map_location="cpu", weights_only=True)
    except BadFile:
        raise
    except Exception as error:
        # torch raises UnpicklingError for objects and for damage, RuntimeError or EOFError for a truncated archive
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is not None:
            raise pickled_object(path, found[1]) from error
        raise BadFile(
            f"{path} was not loaded: it is damaged or truncated. Accepted: a state dict of plain tensors, or "
            "safetensors. Download it again."
        ) from error
    if not isinstance(value, dict):
        raise BadFile(f"{path} contains a {type(value).__name__}, not a state dict of named tensors.")
    return cast(dict[str, Any], value)


def read_json_line(path: str | Path) -> tuple[dict[str, Any], int]:
    """Read the JSON object in the first line of a file; return it and the position after the line."""
    try:
        with Path(path).open("rb") as file:
            line = file.readline(JSON_LINE_LIMIT)
        return parse_json(line, dict), len(line)
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise BadFile(f"The first line of {path} cannot be used: {error}. Download the file again.") from error


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` unless ``tensors`` contain all ``expected`` names, with their shapes and types.

    The values are not read. The expected tensors may be on the device ``meta``.
    """
    for name, like in expected.items():
        value = tensors.get(name)
        if value is None:
            raise ValueError(f"{name!r} is missing")
        if value.shape != like.shape or value.dtype != like.dtype:
            given, wanted = (f"{item.dtype} of shape {tuple(item.shape)}" for item in (value, like))
            raise ValueError(f"{name!r} is {given}, not {wanted}")


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors, including names, shapes and types."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a short hash of named tensors, several times faster than :func:`hash_tensors`, for gigabytes of weights.

    It is made of CRC-32 checksums: good enough to tell checkpoints apart, but not to resist forgery. Of tensors without
    data, on the device ``meta``, only name, shape and type count.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        values = None if value.is_meta else value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        crc = "" if values is None else f"{zlib.crc32(values):08x}"
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {crc}\n".encode())
    return digest.hexdigest()[:32]


def is_utf8(path: str | Path) -> bool:
    """Return whether a path is valid UTF-8 on disk; safetensors cannot read others."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeError:
        return False
    return True


def _check_utf8(path: str | Path) -> None:
    if not is_utf8(path):
        raise BadFile(
            f"{os.fspath(path)!r} is not valid UTF-8, as safetensors files require. Rename the folder or file."
        )


def _unshared(value: Tensor, used: list[int]) -> Tensor:
    """Return a contiguous tensor that shares no memory: safetensors rejects tensors that do."""
    owns = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes and value.data_ptr() not in used
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
        with path.open("rb") as content:
            _check_archive(path, content)
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                value = file[name]
                if not isinstance(value, np.ndarray):  # numpy returns other zip members as bytes
                    raise ValueError(f"{name} is not an array")
                if value.dtype.kind == "U" and value.ndim == 0:
                    texts[name] = str(value)
                elif value.dtype.kind in "biuf":  # other types, such as dates and text arrays, are not used
                    tensors[name] = torch.from_numpy(value)
    except BadFile:
        raise
    except Exception as error:  # a damaged archive raises many error types from zipfile, zlib and numpy
        raise BadFile(
            f"{path} is not a readable .npz of plain arrays ({error}). "
            "It may be truncated, or contain pickled objects, which are never loaded."
        ) from error
    return tensors, texts


def _check_archive(path: str | Path, content: IO[bytes]) -> None:
    """Check the sizes that a zip file declares for its members, and those in the headers of arrays, before reading.

    Readers do not decompress more of a member than its declared size.
    """
    with zipfile.ZipFile(content) as archive:
        members = archive.infolist()
        check_expansion(str(path), Path(path).stat().st_size, sum(member.file_size for member in members))
        for member in members:
            if not member.filename.endswith(".npy"):
                continue
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read_header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read_header(file)
            if prod(shape) * dtype.itemsize > member.file_size:
                raise ValueError(f"{member.filename} declares shape {shape}, but has {member.file_size:,} bytes")
