"""Texts for joint training: lines of a file, or a column of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torino.core.errors import BadFile, BadParameter
from torino.datasets import PARQUET_SUFFIXES
from torino.datasets.base import TEXT_COLUMNS, parse_texts
from torino.datasets.parquet import read_column

COLUMNS = (*TEXT_COLUMNS, "questions", "question")


def read_texts(source: str | Path) -> list[str]:
    """Read texts from a text file (one a line), or from a column of a parquet or JSONL file.

    ``FILE:COLUMN`` names the column; by default it is the first of captions, caption, texts, text, label, labels,
    questions, question that exists.
    """
    text = str(source)
    name, _, column = text.rpartition(":") if ":" in Path(text).name else (text, "", "")
    path = Path(name).expanduser()
    if not path.is_file():
        raise BadFile(f"There is no file {path}. Give a .txt, .jsonl or .parquet file of texts.")
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", *PARQUET_SUFFIXES):
        if column:
            raise BadParameter(f"{path.name} has no columns, so {column!r} cannot be read from it. Leave it out.")
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        found = [line.strip() for line in lines if line.strip()]
    else:
        cells = _json_cells(path, column) if suffix == ".jsonl" else read_column(path, _column_of(path, column))
        found = [text for cell in cells for text in parse_texts(cell)]
    if not found:
        raise BadFile(f"{path} contains no texts{f' in the column {column!r}' if column else ''}.")
    return found


def _column_of(path: Path, column: str) -> Callable[[Sequence[str]], str]:
    """Return a function that chooses the column among those of a file."""

    def choose(known: Sequence[str]) -> str:
        found = [name for name in ([column] if column else COLUMNS) if name in known]
        if not found:
            missing = f"no column {column!r}" if column else "no column of texts"
            raise BadFile(f"{path} has {missing}; it has {', '.join(known)}. Name one: {path.name}:COLUMN.")
        return found[0]

    return choose


def _json_cells(path: Path, column: str) -> Iterator[Any]:
    choose = _column_of(path, column)
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadFile(f"Line {number} of {path} is not JSON ({error}). Write one object a line.") from error
        if not isinstance(row, dict):
            raise BadFile(f"Line {number} of {path} is not a JSON object. Write one object a line.")
        values = cast(dict[str, Any], row)
        yield values[choose(list(values))]
