"""Read the rows of a TSV file with the byte offsets of every cell, one row in memory at a time.

Written by hand because the benchmark files are gigabytes large and hold images as base64 text: a sample stores only
where its image is. Python's csv module reports no offsets, and after an unclosed quote it reads the rest of the file
as one cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, NamedTuple

MAX_EXTRA_BYTES = 32_000_000  # bytes of a row after its first line; a longer row has an unclosed quote


class TsvRow(NamedTuple):
    """One row; a quoted cell can contain line breaks, so it can span several lines."""

    number: int  # line number of its first line, from 1
    start: int  # offset of its first byte in the file
    raw: bytes
    spans: list[tuple[int, int]] | None  # start and stop of each cell in raw, with its quotes; None: unclosed quote


def read_rows(file: IO[bytes]) -> Iterator[TsvRow]:
    """Yield the rows of a TSV. A row with an unclosed quote has no spans, and reading continues at the next line."""
    number = start = 0
    pending: list[bytes] = []  # lines that were read while looking for a closing quote

    def next_line() -> bytes:
        return pending.pop() if pending else file.readline()

    while first := next_line():
        number += 1
        lines, extra = [first], 0
        raw = first
        spans = _split(raw)
        while spans is None and extra < MAX_EXTRA_BYTES and (line := next_line()):
            lines.append(line)
            extra += len(line)
            if b'"' in line:
                raw = b"".join(lines)
                spans = _split(raw, strict=True)
        if not spans:
            pending.extend(reversed(lines[1:]))
            lines, raw = [first], first
        if raw.strip(b"\r\n"):
            yield TsvRow(number, start, raw, spans or None)
        number += len(lines) - 1
        start += len(raw)


def _split(raw: bytes, strict: bool = False) -> list[tuple[int, int]] | None:
    """Return the start and stop of each cell, or None if a quoted cell does not end.

    ``strict`` returns an empty list if text follows a closing quote. Within one line such text is accepted. Across
    several lines it means that the quote that seems to close a cell opens a cell of another row.
    """
    end = len(raw)
    while end and raw[end - 1] in b"\r\n":
        end -= 1
    spans: list[tuple[int, int]] = []
    start = 0
    while True:
        stop = start
        if raw[start : start + 1] == b'"':
            stop = start + 1
            while True:
                stop = raw.find(b'"', stop)
                if stop < 0:
                    return None
                if raw[stop + 1 : stop + 2] != b'"':
                    break
                stop += 2  # a doubled quote stands for one quote
            if strict and raw[stop + 1 : stop + 2] not in (b"\t", b"\r", b"\n", b""):
                return []
        stop = raw.find(b"\t", stop, end)
        if stop < 0:
            spans.append((start, end))
            return spans
        spans.append((start, stop))
        start = stop + 1


def unquote(raw: bytes) -> bytes:
    """Return the text of a cell without its surrounding quotes."""
    if raw[:1] == b'"':
        closing = raw.rfind(b'"')
        return raw[1:closing].replace(b'""', b'"') + raw[closing + 1 :]
    return raw
