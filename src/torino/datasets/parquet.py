"""Photos in tables: parquet files and Hugging Face datasets. Needs pyarrow."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from torino.core.errors import BadFile, BadParameter, TorinoError, Unreachable
from torino.core.extras import optional_import
from torino.core.io import read_json
from torino.datasets.base import (
    TEXT_COLUMNS,
    Photo,
    Photos,
    SourceUnavailable,
    format_error,
    hash_parts,
    parse_texts,
    source_name,
    take_first,
)

IMAGE_COLUMNS = ("image", "img", "jpg", "png")  # the first one that exists is used
NAME_COLUMNS = ("file", "file_name", "filename", "name", "path", "__key__", "key", "id")
CACHE_BYTES = 256 * 2**20  # size of the row groups that a parquet source keeps in memory
_BINARY_TYPES = ("binary", "large_binary", "string", "large_string")


class _TableColumns:
    """The columns of a table that hold photos, names and captions."""

    def __init__(self, schema: Any, source: str) -> None:
        names = list[str](schema.names)
        types = {name: schema.field(name).type for name in names}
        structs = [name for name in names if str(types[name]).startswith("struct<bytes:")]
        images = [name for name in IMAGE_COLUMNS if name in names] or structs
        if not images:
            raise BadFile(
                f"{source} has no image column; its columns are {', '.join(names)}. Accepted: a column called image "
                "of bytes, or of a struct of bytes and path."
            )
        self.image = images[0]
        kind = str(types[self.image])
        if not (kind.startswith("struct<") and "bytes:" in kind) and kind not in _BINARY_TYPES:
            raise BadFile(
                f"Column {self.image} of {source} has type {kind}. Accepted: the bytes of image files, a struct of "
                "bytes and path, or paths."
            )
        self.has_path = kind.startswith("struct<") and "path:" in kind
        self.name = next((name for name in NAME_COLUMNS if name in names), None)
        self.text = next((name for name in TEXT_COLUMNS if name in names), None)
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature: Any = metadata.get("info", {}).get("features", {}).get(self.text) or {}
        feature = cast(Any, feature[0] if isinstance(feature, list) else feature)
        self.class_names: list[str] = list(feature.get("names") or feature.get("feature", {}).get("names") or [])

    @property
    def photo_columns(self) -> list[str]:
        """Columns that are read for a photo."""
        return [self.image] + ([self.text] if self.text else [])

    @property
    def name_column(self) -> str | None:
        """Column of the photo names, as parquet addresses it."""
        return self.name or (f"{self.image}.path" if self.has_path else None)

    def to_photo(self, row: dict[str, Any], name: str, folder: Path) -> Photo:
        value = row[self.image]
        texts = parse_texts(row[self.text], self.class_names) if self.text else ()
        if isinstance(value, dict):
            struct = cast(dict[str, Any], value)
            value = struct.get("bytes") or struct.get("path")
        return Photo(name, folder / value if isinstance(value, str) else value or b"", texts)


class ParquetPhotos(Photos):
    """Rows of parquet files; the most recently used row groups stay in memory."""

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        parquet = _import_pyarrow("pyarrow.parquet")
        names: list[str] = []
        marks: list[object] = []
        self._groups: list[tuple[int, int]] = []  # file number and row group number in that file
        self._files: list[tuple[Any, _TableColumns, Path]] = []
        starts, max_rows, max_bytes = [0], 1, 1
        for number, path in enumerate(files):
            file, columns, column = _open_parquet(parquet, path)
            labels = [None] * file.metadata.num_rows if column is None else column.to_pylist()
            names += [f"{path.stem}#{row}" if label is None else str(label) for row, label in enumerate(labels)]
            marks += [(path.stat().st_size, _read_footer(path))]
            for group in range(file.num_row_groups):
                metadata = file.metadata.row_group(group)
                max_rows, max_bytes = max(max_rows, metadata.num_rows), max(max_bytes, metadata.total_byte_size)
                starts.append(starts[-1] + metadata.num_rows)
                self._groups.append((number, group))
            self._files.append((file, columns, path))
            if limit is not None and len(names) >= limit:
                break
        selected, describe = take_first(names, limit, source_name(*files))
        locality = (max_rows, max_rows * max(1, CACHE_BYTES // max_bytes))
        super().__init__(selected, hash_parts("parquet", len(selected), *marks), describe, locality)
        self._starts, self._cache_size = starts, max(2, CACHE_BYTES // max_bytes)
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def _photo(self, index: int) -> Photo:
        group = bisect_right(self._starts, index) - 1
        _, columns, path = self._files[self._groups[group][0]]
        table = self._read_group(group)
        row = {name: table.column(name)[index - self._starts[group]].as_py() for name in columns.photo_columns}
        return columns.to_photo(row, self._names[index], path.parent)

    def _read_group(self, group: int) -> Any:
        with self._lock:  # a parquet file may be read by one thread at a time
            table = self._cache.pop(group, None)
            if table is None:
                file, columns, path = self._files[self._groups[group][0]]
                try:
                    table = file.read_row_group(self._groups[group][1], columns=columns.photo_columns)
                except (OSError, ValueError) as error:
                    if not path.is_file():
                        raise SourceUnavailable(path) from error
                    raise BadFile(
                        f"Cannot read a row group of {path} ({format_error(error)}). Download the file again."
                    ) from error
            self._cache[group] = table
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return table


def _open_parquet(parquet: Any, path: Path) -> tuple[Any, _TableColumns, Any]:
    """Open a parquet file; return it with its columns and the column of names, or None if there is none."""
    try:
        file = parquet.ParquetFile(path)
        columns = _TableColumns(file.schema_arrow, path.name)
        if columns.name_column is None:
            return file, columns, None
        column = file.read(columns=[columns.name_column]).column(0)
        return file, columns, column if columns.name else column.combine_chunks().field("path")
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        if isinstance(error, TorinoError):
            raise
        raise BadFile(f"{path} is not a readable parquet file ({format_error(error)}). Download it again.") from error


def _read_footer(path: Path) -> bytes:
    """Read the footer of a parquet file, which holds the sizes and offsets of its contents."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return file.read(length)


class ArrowPhotos(Photos):
    """Rows of a memory-mapped Arrow table."""

    def __init__(self, table: Any, folder: Path, fingerprint: str, source: str, limit: int | None) -> None:
        self._columns, self._table, self._folder = _TableColumns(table.schema, source), table, folder
        columns = self._columns
        labels: list[Any] = [None] * len(table)
        if columns.name is not None:
            labels = table.column(columns.name).to_pylist()
        elif columns.has_path:
            index = table.schema.field(columns.image).type.get_field_index("path")
            labels = [path for chunk in table.column(columns.image).chunks for path in chunk.field(index).to_pylist()]
        names = [f"{source}#{row}" if label is None else str(label) for row, label in enumerate(labels)]
        selected, describe = take_first(names, limit, source)
        super().__init__(selected, hash_parts("table", len(table), len(selected), fingerprint), describe)

    def _photo(self, index: int) -> Photo:
        row = {name: self._table.column(name)[index].as_py() for name in self._columns.photo_columns}
        return self._columns.to_photo(row, self._names[index], self._folder)


def open_saved(path: Path, limit: int | None) -> Photos:
    """Open a folder written by ``save_to_disk``."""
    arrow, state = _import_pyarrow("pyarrow"), read_json(path / "state.json")
    files = [path / str(entry["filename"]) for entry in state.get("_data_files", [])]
    try:
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all() for file in files]
        table = arrow.concat_tables(tables)
    except (OSError, ValueError) as error:
        raise BadFile(
            f"{path} is not a readable dataset ({format_error(error)}). Save or download it again."
        ) from error
    return ArrowPhotos(table, path, str(state.get("_fingerprint")), source_name(path), limit)


def open_hub(text: str, limit: int | None) -> Photos:
    """Open a dataset of the Hugging Face hub."""
    name, *rest = text.removeprefix("hf:").split(":")
    if not name or not 1 <= len(rest) <= 2 or not all(rest):
        raise BadParameter(f"Write a hub dataset as hf:owner/name:split, for example hf:beans:train, got {text!r}.")
    with optional_import(f"Reading {text} needs", "datasets"):
        datasets = import_module("datasets")
    try:
        dataset = datasets.load_dataset(name, *rest[:-1], split=rest[-1])
        dataset = dataset if dataset._indices is None else dataset.flatten_indices()
        table, fingerprint = dataset.data.table, str(dataset._fingerprint)
    except Exception as error:  # errors of the libraries that datasets uses
        raise Unreachable(f"Cannot open {text}: {format_error(error)}") from error
    return ArrowPhotos(table, Path(), fingerprint, f"{name} ({rest[-1]})", limit)


def _import_pyarrow(module: str) -> Any:
    with optional_import("Reading parquet and Arrow files needs", "torino[train]"):
        return import_module(module)
