"""The rows of a TSV file with the place of every cell, one row in memory at a time.

Python's csv module reads such files too, but does not tell where in the file a cell is, and after a quote that was
never closed it takes the rest of the file for one cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, NamedTuple

MOST = 32_000_000  # bytes of a row after its first line; beyond them a quote was left open


class TsvRow(NamedTuple):
    """One row, which may be several lines: a quoted cell can hold line breaks."""

    number: int  # of its first line, from 1
    start: int  # of its first byte in the file
    raw: bytes
    spans: list[tuple[int, int]] | None  # of its cells, quotes included; None: a quote is left open


def rows(file: IO[bytes]) -> Iterator[TsvRow]:
    """The rows of a TSV. A row with an open quote is given as broken, and reading goes on at the next line."""
    number = start = 0
    waiting: list[bytes] = []  # lines that were read in search of a closing quote

    def line() -> bytes:
        return waiting.pop() if waiting else file.readline()

    while first := line():
        number += 1
        taken, size = [first], 0
        raw = first
        spans = _split(raw)
        while spans is None and size < MOST and (more := line()):
            taken.append(more)
            size += len(more)
            if b'"' in more:
                raw = b"".join(taken)
                spans = _split(raw, strict=True)
        if not spans:
            waiting.extend(reversed(taken[1:]))
            taken, raw = [first], first
        if raw.strip(b"\r\n"):
            yield TsvRow(number, start, raw, spans or None)
        number += len(taken) - 1
        start += len(raw)


def _split(raw: bytes, strict: bool = False) -> list[tuple[int, int]] | None:
    """Where the cells of a row begin and end; None if a quoted one does not end.

    ``strict`` gives nothing if text follows a closing quote. In one line that is taken as it is; over several it says
    that the quote which seems to close a cell in truth opens one, of another row.
    """
    end = len(raw)
    while end and raw[end - 1] in b"\r\n":
        end -= 1
    spans: list[tuple[int, int]] = []
    at = 0
    while True:
        stop = at
        if raw[at : at + 1] == b'"':
            stop = at + 1
            while True:
                stop = raw.find(b'"', stop)
                if stop < 0:
                    return None
                if raw[stop + 1 : stop + 2] != b'"':
                    break
                stop += 2  # a doubled quote is one of the text
            if strict and raw[stop + 1 : stop + 2] not in (b"\t", b"\r", b"\n", b""):
                return []
        stop = raw.find(b"\t", stop, end)
        if stop < 0:
            spans.append((at, end))
            return spans
        spans.append((at, stop))
        at = stop + 1


def unquoted(raw: bytes) -> bytes:
    """The text of a cell, without the quotes around it."""
    if raw[:1] == b'"':
        closing = raw.rfind(b'"')
        return raw[1:closing].replace(b'""', b'"') + raw[closing + 1 :]
    return raw
