"""Hypothesis strategies that damage files: edits of their structure, and of their bytes.

:func:`damaged` starts from the bytes of a valid file and chooses the edits by its suffix. Most results are still well
formed, so that they get past the parser and reach the code behind it.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import load, save

Draw = Callable[[st.SearchStrategy[Any]], Any]

DEEP = 500
NUMBERS = [0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")]
TEXTS = ["", " ", "x", "nan", "\x00", "a\nb", "\ud800", "9" * 5000, "a" * 5000, "../x", "/", "[AAA", "%s", "💧", "é"]
TEXTS += ["$\\x{", "a$b$c", "\x1b]0;x\x07", "[/red]", "<b>", "=1+1", "a|b", "{}", "\\"]


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


JUNK = st.one_of(
    st.sampled_from([None, True, False, [], {}, [[]], [None], {"": None}]).map(deepcopy),
    st.builds(nest, st.just(DEEP)),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.integers(-3, 40),
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
TEXT_JUNK = st.sampled_from(TEXTS) | st.text(max_size=8) | st.sampled_from(NUMBERS).map(str)


# ------------------------------------------------------------------ JSON


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values below the root."""
    if len(prefix) > 12 or not isinstance(value, dict | list):
        return []
    paths: list[tuple[Any, ...]] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        paths += [(*prefix, key), *_paths(item, (*prefix, key))]
    return paths


def _find(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value, default=repr))


def damage_value(draw: Draw, value: Any) -> Any:
    """Edit a JSON value: drop, rename, copy, replace, wrap or empty something in it."""
    paths = _paths(value)
    if not paths or draw(st.integers(0, 30)) == 0:
        return draw(JUNK)
    # shallow fields as often as deep ones, of which there are many more
    depth = draw(st.integers(1, max(map(len, paths))))
    path = draw(st.sampled_from([path for path in paths if len(path) == depth]))
    parent, key = _find(value, path[:-1]), path[-1]
    action = draw(
        st.sampled_from(["junk", "junk", "junk", "drop", "drop", "rename", "copy", "wrap", "empty", "repeat"])
    )
    if action == "drop":
        del parent[key]
    elif action == "rename" and isinstance(parent, dict):
        parent[draw(TEXT_JUNK | st.sampled_from([str(other[-1]) for other in paths]))] = parent.pop(key)
    elif action == "copy":
        parent[key] = _copy(_find(value, draw(st.sampled_from(paths))))
    elif action == "wrap":
        parent[key] = draw(st.sampled_from([[parent[key]], {"x": parent[key]}, str(parent[key])[:50]]))
    elif action == "empty":
        parent[key] = type(parent[key])()
    elif action == "repeat" and isinstance(parent, list):
        parent.append(_copy(parent[key]))
    else:
        parent[key] = draw(JUNK)
    return value


def _unseal(draw: Draw, values: dict[str, Any]) -> None:
    """Remove the checksums of a file, mostly: otherwise nothing behind them would be tested."""
    if draw(st.integers(0, 9)):
        for name in ("checksum", "crc32", "weights_sha256"):
            values.pop(name, None)


def _write_json(draw: Draw, value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


def _damage_json(draw: Draw, data: bytes) -> bytes:
    value = json.loads(data)
    if isinstance(value, dict):
        _unseal(draw, value)
    for _ in range(draw(st.integers(1, 3))):
        value = damage_value(draw, value)
    return _write_json(draw, value)


def damage_lines(draw: Draw, data: bytes) -> bytes:
    """Edit some of the first lines of a JSONL file, and its sequence of lines."""
    lines = data.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, min(len(lines), 8) - 1))
        action = draw(st.sampled_from(["edit", "edit", "edit", "drop", "repeat", "swap", "cut", "blank"]))
        if action == "edit":
            try:
                lines[number] = _damage_json(draw, lines[number]) + b"\n"
            except ValueError:  # a line that was damaged before
                continue
        elif action == "drop" and len(lines) > 1:
            del lines[number]
        elif action == "repeat":
            lines.append(lines[number])
        elif action == "swap":
            lines[0], lines[number] = lines[number], lines[0]
        elif action == "cut":
            lines[number] = lines[number][: draw(st.integers(0, len(lines[number])))]
        else:
            lines[number] = draw(st.sampled_from([b"\n", b" \n", b"[]\n", b"null\n", b"{}\n", b"\x00\n", b"\xff\n"]))
    return b"".join(lines)


# ------------------------------------------------------------------ tables


def damage_table(draw: Draw, data: bytes) -> bytes:
    """Edit the cells of a TSV, mostly those of the image and the answer, in columns 1 and 3."""
    rows = [line.split(b"\t") for line in data.rstrip(b"\n").split(b"\n")]
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.sampled_from(rows))
        cell = min(draw(st.sampled_from([1, 1, 3, *range(len(row))])), len(row) - 1)
        action = draw(st.sampled_from(["text", "text", "list", "drop", "repeat", "swap", "quote"]))
        if action == "text":
            row[cell] = draw(TEXT_JUNK).encode("utf-8", "surrogatepass")
        elif action == "list":
            inner = draw(st.sampled_from([b"A" * 200, b"[" * 300, b"'A'", b'"', b"'x', 'y'", b"", b"1e999", b"{}"]))
            row[cell] = b"[" + inner + draw(st.sampled_from([b"]", b""]))
        elif action == "drop" and len(row) > 1:
            del row[cell]
        elif action == "repeat":
            row.insert(cell, row[cell])
        elif action == "swap":
            other = draw(st.integers(0, len(row) - 1))
            row[cell], row[other] = row[other], row[cell]
        else:
            row[cell] = b'"' + row[cell] + draw(st.sampled_from([b'"', b"", b'"x']))
    return b"\n".join(b"\t".join(row) for row in rows) + b"\n"


# ------------------------------------------------------------------ arrays


def _damage_tensor(draw: Draw, value: torch.Tensor) -> torch.Tensor:
    dtypes = [
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    action = draw(st.sampled_from(["number", "number", "type", "shape", "cut", "repeat", "new"]))
    if action == "number" and value.numel():
        value = value.clone().contiguous()
        small = [number for number in NUMBERS if value.is_floating_point() or number in (0, -1, 1, 3, 2**31)]
        numbers = torch.tensor([float(number) for number in small if number != 10**400], dtype=torch.float64)
        value.view(-1)[draw(st.integers(0, value.numel() - 1))] = numbers.to(value.dtype)[
            draw(st.integers(0, len(numbers) - 1))
        ]
        return value
    if action == "type":
        return value.nan_to_num().to(draw(st.sampled_from(dtypes)))
    if action == "shape":
        return draw(
            st.sampled_from(
                [value.reshape(-1), value[None], value[..., None], value.mT.contiguous()]
                if value.ndim > 1
                else [value[None], value[..., None]]
            )
        )
    if action == "cut" and value.ndim:
        return value[: draw(st.integers(0, len(value)))].clone()
    if action == "repeat" and value.ndim:
        return torch.cat([value, value])
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    return torch.ones(shape).to(draw(st.sampled_from(dtypes)))


def damage_arrays(draw: Draw, arrays: dict[str, Any], texts: dict[str, str]) -> None:
    """Edit named arrays and their metadata in place."""
    for _ in range(draw(st.integers(1, 3))):
        pool = texts if texts and (not arrays or draw(st.integers(0, 2)) == 0) else arrays
        if not pool:
            return
        name = draw(st.sampled_from(sorted(pool)))
        action = draw(st.sampled_from(["edit", "edit", "edit", "drop", "rename", "copy"]))
        if action == "drop":
            del pool[name]
        elif action == "rename":
            pool[draw(st.sampled_from(["x", "", *sorted(pool)]))] = pool.pop(name)
        elif action == "copy":
            pool[name] = pool[draw(st.sampled_from(sorted(pool)))]
        elif pool is texts:
            texts[name] = _damage_text(draw, texts[name])
        elif isinstance(arrays[name], torch.Tensor):
            arrays[name] = _damage_tensor(draw, arrays[name])
        else:
            arrays[name] = draw(JUNK.filter(lambda value: value != nest(DEEP)))


def _damage_text(draw: Draw, text: str) -> str:
    try:
        return json.dumps(damage_value(draw, json.loads(text)))
    except ValueError:
        return draw(TEXT_JUNK)


def _damage_safetensors(draw: Draw, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if draw(st.integers(0, 3)) == 0:  # the header itself, which safetensors reads before anything else
        edited = _write_json(draw, damage_value(draw, header))
        return len(edited).to_bytes(8, "little") + edited + data[8 + length :]
    texts = dict(header.get("__metadata__", {}))
    _unseal(draw, texts)
    arrays: dict[str, Any] = load(data)
    damage_arrays(draw, arrays, texts)
    texts = {name: text.encode(errors="replace").decode() for name, text in texts.items()}
    return save({name: value.contiguous().clone() for name, value in arrays.items()}, texts or None)


def _damage_npz(draw: Draw, data: bytes) -> bytes:
    with np.load(io.BytesIO(data)) as file:
        loaded = {name: file[name] for name in file.files}
    texts = {name: str(value) for name, value in loaded.items() if value.dtype.kind == "U"}
    arrays = {name: torch.from_numpy(value) for name, value in loaded.items() if name not in texts}
    damage_arrays(draw, arrays, texts)
    out = io.BytesIO()
    values = {name: value.numpy() for name, value in arrays.items()}
    values |= {name: np.array(text) for name, text in texts.items()}
    np.savez(out, **{name or "empty": value for name, value in values.items()})
    return out.getvalue()


def _damage_checkpoint(draw: Draw, data: bytes) -> bytes:
    """Edit the tensors of a checkpoint, or the line of JSON before it."""
    line, start = (data[: data.index(b"\n") + 1], data.index(b"\n") + 1) if data.startswith(b"{") else (b"", 0)
    if line and draw(st.booleans()):
        return _damage_json(draw, line) + b"\n" + data[start:]
    data = data[start:]
    arrays = dict(torch.load(io.BytesIO(data), weights_only=True))
    damage_arrays(draw, arrays, {})
    out = io.BytesIO()
    torch.save(draw(st.sampled_from([arrays, arrays, arrays, list(arrays.values()), {"state": arrays}])), out)
    return line + out.getvalue()


# ------------------------------------------------------------------ archives


def _damage_tar(draw: Draw, data: bytes) -> bytes:
    """Edit the members of a tar; JSON members are edited as JSON."""
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        members = {entry.name: file.extractfile(entry).read() for entry in file}  # type: ignore[union-attr]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(members)))
        action = draw(st.sampled_from(["edit", "edit", "drop", "rename"]))
        if action == "edit":
            members[name] = (
                _damage_json(draw, members[name])
                if name.endswith(".json") and members[name].startswith(b"{")
                else damage_bytes(draw, members[name])
            )
        elif action == "drop" and len(members) > 1:
            del members[name]
        else:
            members[draw(st.sampled_from(["a", "b.json", ".png", "a.b.png", "/x.png", "x/" * 80 + "y.png"]))] = b"1"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _damage_parquet(draw: Draw, data: bytes) -> bytes:
    """Edit the columns of a parquet file and the metadata that Hugging Face stores in it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    metadata = dict(table.schema.metadata or {})
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(columns)))
        action = draw(st.sampled_from(["value", "drop", "rename", "null", "metadata"]))
        if action == "value":
            row = draw(st.integers(0, len(columns[name]) - 1))
            values = list(columns[name])
            values[row] = damage_value(draw, {"x": deepcopy(values[row])})
            columns[name] = values
        elif action == "null":
            columns[name] = [None] * len(columns[name])
        elif action == "drop" and len(columns) > 1:
            del columns[name]
        elif action == "rename":
            columns[draw(st.sampled_from(["image", "name", "label", "x"]))] = columns.pop(name)
        else:
            metadata[b"huggingface"] = _damage_json(draw, metadata.get(b"huggingface", b"{}"))
    out = io.BytesIO()
    try:
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), out, row_group_size=2)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError):  # values that no column can hold
        return damage_bytes(draw, data)
    return out.getvalue()


# ------------------------------------------------------------------ bytes


def damage_bytes(draw: Draw, data: bytes) -> bytes:
    """Flip, remove, insert or repeat bytes, cut the data, or change its encoding."""
    position = draw(st.integers(0, len(data)))
    action = draw(st.sampled_from(["flip", "flip", "cut", "remove", "insert", "repeat", "zeros", "encode", "replace"]))
    if action == "flip" and data:
        position = min(position, len(data) - 1)
        return data[:position] + bytes([data[position] ^ draw(st.integers(1, 255))]) + data[position + 1 :]
    if action == "cut":
        return data[:position]
    if action == "remove":
        return data[:position] + data[position + draw(st.integers(1, 64)) :]
    if action == "insert":
        inserted = draw(
            st.sampled_from([b"\x00", b"\xff", b"\xed\xa0\x80", b"\n", b'"', b"[" * 2000]) | st.binary(max_size=8)
        )
        return data[:position] + inserted + data[position:]
    if action == "repeat":
        return data[:position] + data[max(0, position - 64) :]
    if action == "zeros":
        return data[:position] + b"\x00" * draw(st.integers(1, 64)) + data[position + 64 :]
    if action == "encode":
        prefix = draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00\x00\xfe\xff"]))
        return prefix + data if draw(st.booleans()) else data.decode("latin-1").encode("utf-16")
    return draw(st.binary(max_size=200))


STRUCTURES: dict[str, Callable[[Draw, bytes], bytes]] = {
    ".json": _damage_json,
    ".jsonl": damage_lines,
    ".tsv": damage_table,
    ".safetensors": _damage_safetensors,
    ".npz": _damage_npz,
    ".pt": _damage_checkpoint,
    ".tar": _damage_tar,
    ".parquet": _damage_parquet,
}


@st.composite
def damaged(draw: Draw, data: bytes, name: str) -> bytes:
    """Return the bytes of a damaged copy of the file ``name``, which contains ``data``."""
    structure = STRUCTURES.get(Path(name).suffix)
    if structure is not None and draw(st.integers(0, 4)):
        data = structure(draw, data)
        if draw(st.integers(0, 4)):
            return data
    return damage_bytes(draw, data)
