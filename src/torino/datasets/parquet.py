"""Photos in the rows of a table: parquet files, and datasets of Hugging Face. Needs pyarrow."""

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
from torino.core.io import read_json
from torino.datasets.base import TEXT_COLUMNS, Gone, Photo, Photos, as_texts, called, hash_of, limited, short

IMAGE_COLUMNS = ("image", "img", "jpg", "png")  # the first that is there counts
NAME_COLUMNS = ("file", "file_name", "filename", "name", "path", "__key__", "key", "id")
HELD = 256 * 2**20  # bytes of row groups that a parquet source keeps in memory


class _Columns:
    """Which columns of a table hold the photos, their names and their texts."""

    def __init__(self, schema: Any, where: str) -> None:
        names = list[str](schema.names)
        types = {name: schema.field(name).type for name in names}
        structs = [name for name in names if str(types[name]).startswith("struct<bytes:")]
        images = [name for name in IMAGE_COLUMNS if name in names] or structs
        if not images:
            raise BadFile(
                f"{where} has no column of photos; its columns are {', '.join(names)}. Wanted: image, of bytes or of "
                "a struct of bytes and path."
            )
        self.image = images[0]
        kind = str(types[self.image])
        if not (kind.startswith("struct<") and "bytes:" in kind) and kind not in (
            "binary",
            "large_binary",
            "string",
            "large_string",
        ):
            raise BadFile(
                f"Column {self.image} of {where} holds {kind}. Wanted: the bytes of image files, a struct of bytes "
                "and path, or paths."
            )
        self.inner_path = kind.startswith("struct<") and "path:" in kind
        self.name = next((name for name in NAME_COLUMNS if name in names), None)
        self.text = next((name for name in TEXT_COLUMNS if name in names), None)
        told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature: Any = told.get("info", {}).get("features", {}).get(self.text) or {}
        feature = cast(Any, feature[0] if isinstance(feature, list) else feature)
        self.classes: list[str] = list(feature.get("names") or feature.get("feature", {}).get("names") or [])

    @property
    def read(self) -> list[str]:
        return [self.image] + ([self.text] if self.text else [])

    def label(self) -> str | None:
        """The column that names photos, as parquet addresses it."""
        return self.name or (f"{self.image}.path" if self.inner_path else None)

    def photo(self, row: dict[str, Any], name: str, folder: Path) -> Photo:
        value = row[self.image]
        texts = as_texts(row[self.text], self.classes) if self.text else ()
        if isinstance(value, dict):
            inner = cast(dict[str, Any], value)
            value = inner.get("bytes") or inner.get("path")
        return Photo(name, folder / value if isinstance(value, str) else value or b"", texts)


class Parquet(Photos):
    """Rows of parquet files; the row groups used last stay in memory."""

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        parquet = _pyarrow("pyarrow.parquet")
        names: list[str] = []
        marks: list[object] = []
        self._places: list[tuple[int, int]] = []  # of each row group: file and number in it
        self._files: list[tuple[Any, _Columns, Path]] = []  # each opened, its columns, and where it lies
        starts, largest, most = [0], 1, 1
        for number, path in enumerate(files):
            try:
                file = parquet.ParquetFile(path)
                columns = _Columns(file.schema_arrow, path.name)
                label = columns.label()
                found = None if label is None else file.read(columns=[label]).column(0)
                found = found.combine_chunks().field("path") if found is not None and "." in str(label) else found
            except (OSError, ValueError) as error:  # pyarrow's own errors are one or the other
                if isinstance(error, TorinoError):
                    raise
                raise BadFile(f"{path} is not a readable parquet file ({short(error)}). Fetch it anew.") from error
            own = [None] * file.metadata.num_rows if found is None else found.to_pylist()
            names += [f"{path.stem}#{row}" if name is None else str(name) for row, name in enumerate(own)]
            marks += [(path.stat().st_size, _footer(path))]
            for group in range(file.num_row_groups):
                inside = file.metadata.row_group(group)
                largest, most = max(largest, inside.num_rows), max(most, inside.total_byte_size)
                starts.append(starts[-1] + inside.num_rows)
                self._places.append((number, group))
            self._files.append((file, columns, path))
            if limit is not None and len(names) >= limit:
                break
        chosen, describe = limited(names, limit, called(*files))
        nearby = (largest, largest * max(1, HELD // most))
        super().__init__(chosen, hash_of("parquet", len(chosen), *marks), describe, nearby)
        self._starts, self._most = starts, max(2, HELD // most)
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def _photo(self, index: int) -> Photo:
        group = bisect_right(self._starts, index) - 1
        _, columns, path = self._files[self._places[group][0]]
        table = self._group(group)
        row = {name: table.column(name)[index - self._starts[group]].as_py() for name in columns.read}
        return columns.photo(row, self._names[index], path.parent)

    def _group(self, group: int) -> Any:
        with self._lock:  # a parquet file is read by one thread at a time
            table = self._held.pop(group, None)
            if table is None:
                file, columns, path = self._files[self._places[group][0]]
                try:
                    table = file.read_row_group(self._places[group][1], columns=columns.read)
                except (OSError, ValueError) as error:
                    if not path.is_file():
                        raise Gone(path) from error
                    raise BadFile(f"A row group cannot be read ({short(error)}): fetch the file anew.") from error
            self._held[group] = table
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return table


def _footer(path: Path) -> bytes:
    """The end of a parquet file, which tells sizes and places of all that is in it."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return file.read(length)


class TableImages(Photos):
    """Rows of an Arrow table, mapped into memory."""

    def __init__(self, table: Any, folder: Path, mark: str, called: str, limit: int | None) -> None:
        self._columns, self._table, self._folder = _Columns(table.schema, called), table, folder
        columns = self._columns
        values: list[Any] = [None] * len(table)
        if columns.name is not None:
            values = table.column(columns.name).to_pylist()
        elif columns.inner_path:
            index = table.schema.field(columns.image).type.get_field_index("path")
            values = [path for chunk in table.column(columns.image).chunks for path in chunk.field(index).to_pylist()]
        names = [f"{called}#{row}" if name is None else str(name) for row, name in enumerate(values)]
        chosen, describe = limited(names, limit, called)
        super().__init__(chosen, hash_of("table", len(table), len(chosen), mark), describe)

    def _photo(self, index: int) -> Photo:
        row = {name: self._table.column(name)[index].as_py() for name in self._columns.read}
        return self._columns.photo(row, self._names[index], self._folder)


def open_saved(path: Path, limit: int | None) -> Photos:
    """Open a folder written by ``save_to_disk``."""
    arrow, state = _pyarrow("pyarrow"), read_json(path / "state.json")
    files = [path / str(entry["filename"]) for entry in state.get("_data_files", [])]
    try:
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all() for file in files]
        table = arrow.concat_tables(tables)
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} is not a readable dataset ({short(error)}). Save it again or fetch it anew.") from error
    return TableImages(table, path, str(state.get("_fingerprint")), called(path), limit)


def open_hub(text: str, limit: int | None) -> Photos:
    """Open a dataset of the hub."""
    name, *rest = text.removeprefix("hf:").split(":")
    if not name or not 1 <= len(rest) <= 2 or not all(rest):
        raise BadParameter(f"A dataset of the hub is given as hf:owner/name:split (hf:beans:train), got {text!r}.")
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise TorinoError(
            f"{text} is read through the package datasets, which is not installed: pip install datasets. Folders "
            "written by save_to_disk, and parquet files, need pyarrow alone."
        ) from error
    try:
        found = datasets.load_dataset(name, *rest[:-1], split=rest[-1])
        found = found if found._indices is None else found.flatten_indices()
        table, mark = found.data.table, str(found._fingerprint)
    except Exception as error:  # it raises what the libraries below it raise
        raise Unreachable(f"{text} could not be opened: {short(error)}") from error
    return TableImages(table, Path(), mark, f"{name} ({rest[-1]})", limit)


def _pyarrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise TorinoError("Reading parquet and Arrow needs pyarrow: pip install pyarrow.") from error
