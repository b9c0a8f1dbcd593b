"""Photos in tables: parquet files and Hugging Face datasets. Needs pyarrow."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from torino.core.errors import BadFile, BadParameter, TorinoError, Unreachable
from torino.core.extras import optional_import
from torino.core.io import read_json
from torino.core.safety import check_expansion, expansion_limit, is_inside
from torino.core.schema import check_schema, parse_json
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
MAX_NAME = 500  # characters of a photo's name; longer ones are cut
DELTA_ENCODING = "DELTA_BYTE_ARRAY"
DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # types of Arrow messages
CACHE_BYTES = 256 * 2**20  # size of the row groups that a parquet source keeps in memory
_BINARY_TYPES = ("binary", "large_binary", "string", "large_string")


class ClassFeature(TypedDict):
    """Class labels, as Hugging Face describes them."""

    names: list[str]


class ListFeature(TypedDict):
    """Lists of class labels."""

    feature: ClassFeature


class SavedFile(TypedDict):
    """A table of a dataset."""

    filename: str


class SavedState(TypedDict):
    """Fields of ``state.json``, which ``save_to_disk`` writes."""

    _data_files: list[SavedFile]
    _fingerprint: NotRequired[str | None]


class _TableColumns:
    """The columns of a table that hold photos, names and captions."""

    def __init__(self, schema: Any, source: str) -> None:
        names = list[str](schema.names)
        if len(set(names)) < len(names):
            raise BadFile(f"{source} has two columns of the same name; its columns are {', '.join(names)}.")
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
        self.class_names = _find_class_names(schema.metadata or {}, self.text, source)

    @property
    def photo_columns(self) -> list[str]:
        """Columns that are read for a photo."""
        return [self.image] + ([self.text] if self.text else [])

    @property
    def name_column(self) -> str | None:
        """Column of the photo names, as parquet addresses it."""
        return self.name or (f"{self.image}.path" if self.has_path else None)

    def read_row(self, table: Any, index: int, source: str) -> dict[str, Any]:
        """Return the photo and its captions in a row of a table."""
        try:
            return {name: table.column(name)[index].as_py() for name in self.photo_columns}
        except (IndexError, ValueError) as error:  # fewer rows than the file says, or text that is not UTF-8
            raise BadFile(f"Cannot read row {index} of {source} ({format_error(error)}). Download it again.") from error

    def to_photo(self, row: dict[str, Any], name: str, folder: Path, allow_outside: bool) -> Photo:
        value = row[self.image]
        texts = parse_texts(row[self.text], self.class_names) if self.text else ()
        if isinstance(value, dict):
            struct = cast(dict[str, Any], value)
            value = struct.get("bytes") or struct.get("path")
        if not isinstance(value, str):
            return Photo(name, value or b"", texts)
        if not allow_outside and not is_inside(folder / value, folder):
            raise BadFile(
                f"The photo {name} is the file {value}, which is outside the folder of its table, {folder}. Copy it "
                "there, or allow other folders with --allow-outside (allow_outside=True)."
            )
        return Photo(name, folder / value, texts)


def _find_class_names(metadata: Mapping[bytes, bytes], column: str | None, source: str) -> list[str]:
    """Return the class names of a column from the metadata that Hugging Face stores; empty if there are none."""
    try:
        value: Any = parse_json(metadata.get(b"huggingface", b"{}"))
    except ValueError as error:
        raise BadFile(f"The metadata of {source} cannot be used: {error}. Download the file again.") from error
    for name in ("info", "features", column):
        value = cast(dict[Any, Any], value).get(name) if isinstance(value, dict) else None
    feature: Any = cast(list[Any], value)[0] if isinstance(value, list) and value else value
    for kind in (ClassFeature, ListFeature):
        try:
            check_schema(feature, kind)
            return feature["names"] if kind is ClassFeature else feature["feature"]["names"]
        except ValueError:  # not a column of class labels
            continue
    return []


class ParquetPhotos(Photos):
    """Rows of parquet files; the most recently used row groups stay in memory."""

    def __init__(self, files: Sequence[Path], limit: int | None, *, allow_outside: bool = False) -> None:
        parquet = _import_pyarrow("pyarrow.parquet")
        names: list[str] = []
        marks: list[object] = []
        self._groups: list[tuple[int, int]] = []  # file number and row group number in that file
        self._files: list[tuple[Any, _TableColumns, Path]] = []
        starts, max_rows, max_bytes = [0], 1, 1
        for number, path in enumerate(files):
            file, columns, labels = _open_parquet(parquet, path)
            names += [f"{path.stem}#{row}" if label is None else label for row, label in enumerate(labels)]
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
        self._lock, self._allow_outside = threading.Lock(), allow_outside

    def _photo(self, index: int) -> Photo:
        group = bisect_right(self._starts, index) - 1
        _, columns, path = self._files[self._groups[group][0]]
        table = self._read_group(group)
        row = columns.read_row(table, index - self._starts[group], path.name)
        return columns.to_photo(row, self._names[index], path.parent, self._allow_outside)

    def _read_group(self, group: int) -> Any:
        with self._lock:  # a parquet file may be read by one thread at a time
            table = self._cache.pop(group, None)
            if table is None:
                file, columns, path = self._files[self._groups[group][0]]
                try:
                    table = _read_bounded(file, self._groups[group][1], columns.photo_columns, path)
                except (OSError, ValueError) as error:
                    if not path.is_file():
                        raise SourceUnavailable(path) from error
                    if isinstance(error, TorinoError):
                        raise
                    raise BadFile(
                        f"Cannot read a row group of {path} ({format_error(error)}). Download the file again."
                    ) from error
            self._cache[group] = table
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return table


def _open_parquet(parquet: Any, path: Path) -> tuple[Any, _TableColumns, list[str | None]]:
    """Open a parquet file; return it with its columns and the names of its rows, None for a row without a name."""
    try:
        file = parquet.ParquetFile(path)
        columns, rows = _TableColumns(file.schema_arrow, path.name), int(file.metadata.num_rows)
        # Repeated values stay in a dictionary: a few bytes can repeat an image or a name millions of times.
        leaves = [file.schema.column(index) for index in range(len(file.schema))]
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        dictionaries = [
            leaf.path
            for index, leaf in enumerate(leaves)
            if leaf.physical_type == "BYTE_ARRAY"
            and not any(DELTA_ENCODING in group.column(index).encodings for group in groups)
        ]
        file = parquet.ParquetFile(path, metadata=file.metadata, read_dictionary=dictionaries)
        if rows > path.stat().st_size:
            raise BadFile(f"{path} declares {rows:,} photos, more than it has bytes. Download it again.")
        if columns.name_column is None:
            return file, columns, [None] * rows
        tables = [_read_bounded(file, group, [columns.name_column], path) for group in range(len(groups))]
        chunks = [chunk for table in tables for chunk in table.column(0).chunks]
        return file, columns, _to_texts(chunks if columns.name else [chunk.field("path") for chunk in chunks])
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        if isinstance(error, TorinoError):
            raise
        raise BadFile(f"{path} is not a readable parquet file ({format_error(error)}). Download it again.") from error


def _read_bounded(file: Any, group: int, names: Sequence[str], path: Path) -> Any:
    """Read columns of a row group, after checking the size that the file declares for them."""
    metadata = file.metadata.row_group(group)
    selected = [metadata.column(index) for index in range(metadata.num_columns)]
    selected = [chunk for chunk in selected if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in names)]
    stored = sum(chunk.total_compressed_size for chunk in selected)
    declared = sum(chunk.total_uncompressed_size for chunk in selected)
    what = f"A row group of {path}"
    check_expansion(what, stored, declared)
    if not any(DELTA_ENCODING in chunk.encodings for chunk in selected):
        return file.read_row_group(group, columns=list(names))
    # This encoding stores what a value adds to the one before it, so a value is at most as large as the whole group.
    rows = max(1, expansion_limit(stored) // max(declared, 1))
    batches: list[Any] = []
    for batch in file.iter_batches(rows, row_groups=[group], columns=list(names)):
        batches.append(batch)
        check_expansion(what, stored, sum(each.nbytes for each in batches))
    return _import_pyarrow("pyarrow").Table.from_batches(batches, schema=None if batches else file.schema_arrow)


def _to_texts(chunks: Sequence[Any]) -> list[str | None]:
    """Return the values of Arrow arrays as short texts; rows of a dictionary share theirs."""
    texts: list[str | None] = []
    for chunk in chunks:
        indices: Any = range(len(chunk))
        if hasattr(chunk, "dictionary"):
            indices, chunk = chunk.indices.to_pylist(), chunk.dictionary
        values = [None if value is None else str(value)[:MAX_NAME] for value in chunk.to_pylist()]
        texts += [None if index is None else values[index] for index in indices]
    return texts


def _read_footer(path: Path) -> bytes:
    """Read the footer of a parquet file, which holds the sizes and offsets of its contents."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return file.read(length)


class ArrowPhotos(Photos):
    """Rows of a memory-mapped Arrow table."""

    def __init__(
        self,
        table: Any,
        folder: Path,
        fingerprint: str,
        source: str,
        limit: int | None,
        *,
        allow_outside: bool = False,
    ) -> None:
        self._columns, self._table, self._folder = _TableColumns(table.schema, source), table, folder
        self._allow_outside = allow_outside
        columns = self._columns
        labels: list[str | None] = [None] * len(table)
        try:
            if columns.name is not None:
                labels = _to_texts(table.column(columns.name).chunks)
            elif columns.has_path:
                index = table.schema.field(columns.image).type.get_field_index("path")
                labels = _to_texts([chunk.field(index) for chunk in table.column(columns.image).chunks])
        except ValueError as error:
            raise BadFile(
                f"The names in {source} cannot be read ({format_error(error)}). Download it again."
            ) from error
        names = [f"{source}#{row}" if label is None else label for row, label in enumerate(labels)]
        selected, describe = take_first(names, limit, source)
        super().__init__(selected, hash_parts("table", len(table), len(selected), fingerprint), describe)

    def _photo(self, index: int) -> Photo:
        row = self._columns.read_row(self._table, index, self.describe)
        return self._columns.to_photo(row, self._names[index], self._folder, self._allow_outside)


def open_saved(path: Path, limit: int | None, *, allow_outside: bool = False) -> Photos:
    """Open a folder written by ``save_to_disk``."""
    arrow = _import_pyarrow("pyarrow")
    state = read_json(path / "state.json", SavedState, fix="Save or download the dataset again.")
    files = [path / entry["filename"] for entry in state["_data_files"]]
    try:
        for file in files:
            _check_stream(arrow, path, file)
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all() for file in files]
        table = arrow.concat_tables(tables)
        table.validate(full=True)  # arrow ends the process when it follows a wrong offset
    except (OSError, ValueError) as error:
        if isinstance(error, TorinoError):
            raise
        raise BadFile(
            f"{path} is not a readable dataset ({format_error(error)}). Save or download it again."
        ) from error
    fingerprint = str(state.get("_fingerprint"))
    return ArrowPhotos(table, path, fingerprint, source_name(path), limit, allow_outside=allow_outside)


def _check_stream(arrow: Any, folder: Path, file: Path) -> None:
    """Refuse an Arrow file outside its folder, or with compressed contents, which can expand to any size."""
    if not is_inside(file, folder):
        raise BadFile(f"state.json in {folder} refers to {file}, which is outside this folder. Copy the file into it.")
    with arrow.memory_map(str(file)) as source:
        for message in arrow.ipc.MessageReader.open_stream(source):
            if _is_compressed(message.metadata.to_pybytes()):
                raise BadFile(f"{file} is compressed, which save_to_disk never does. Save the dataset again.")


def _is_compressed(metadata: bytes) -> bool:
    """Return whether a message of an Arrow stream has compressed buffers; pyarrow does not tell.

    The metadata is a flatbuffer: field 2 of ``Message`` is its header, field 3 of ``RecordBatch`` the compression.
    """

    def field(table: int, index: int) -> int:
        """Return the position of a field of a table, or 0 if it is not set."""
        vtable = table - int.from_bytes(metadata[table : table + 4], "little", signed=True)
        entry = 4 + 2 * index
        if entry >= int.from_bytes(metadata[vtable : vtable + 2], "little"):
            return 0
        offset = int.from_bytes(metadata[vtable + entry : vtable + entry + 2], "little")
        return table + offset if offset else 0

    def target(position: int) -> int:
        return position + int.from_bytes(metadata[position : position + 4], "little")

    message = target(0)
    kind, header = field(message, 1), field(message, 2)
    if not kind or not header or metadata[kind] not in (DICTIONARY_BATCH, RECORD_BATCH):
        return False
    batch = target(header)
    if metadata[kind] == DICTIONARY_BATCH:
        data = field(batch, 1)
        batch = target(data) if data else batch
    return field(batch, 3) != 0


def open_hub(text: str, limit: int | None, *, allow_outside: bool = False) -> Photos:
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
        cache = Path(datasets.config.HF_CACHE_HOME)  # files of a dataset are unpacked here
    except Exception as error:  # errors of the libraries that datasets uses
        raise Unreachable(f"Cannot open {text}: {format_error(error)}") from error
    return ArrowPhotos(table, cache, fingerprint, f"{name} ({rest[-1]})", limit, allow_outside=allow_outside)


def read_column(path: Path, choose: Callable[[Sequence[str]], str]) -> list[Any]:
    """Return the cells of one column of a parquet file; ``choose`` names it, given all columns."""
    parquet = _import_pyarrow("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            name = choose(list(file.schema_arrow.names))
            return file.read(columns=[name]).column(name).to_pylist()
    except (OSError, ValueError, MemoryError) as error:  # pyarrow's errors are among these
        raise BadFile(f"{path} cannot be read as parquet: {format_error(error)}.") from error


def _import_pyarrow(module: str) -> Any:
    with optional_import("Reading parquet and Arrow files needs", "torino[train]"):
        return import_module(module)
