"""Output to terminals and files that cannot show every character, such as an ASCII terminal."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

ERRORS = "torino"
"""Name of the error handler that replaces characters."""
SUBSTITUTES = {
    "→": "->",
    "…": "...",
    "×": "x",
    "±": "+/-",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "√": "sqrt ",
    "δ": "delta",
    "ε": "epsilon",
    "✓": "+",
    "✗": "-",
    "−": "-",
    "–": "-",
    "—": "-",
    "·": "-",
    "•": "*",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "▀": "#",
}


def replace_unprintable() -> None:
    """Make the standard streams replace characters that they cannot encode, instead of raising an error."""
    codecs.register_error(ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)


def to_ascii(text: str) -> str:
    """Return text with each character that is not ASCII replaced by a similar one, or by a question mark.

    Examples
    --------
    >>> to_ascii("576 → 127 tokens, 2.0× faster: Café …")
    '576 -> 127 tokens, 2.0x faster: Cafe ...'
    """
    return "".join(SUBSTITUTES.get(character) or _to_ascii(character) for character in text)


def _to_ascii(character: str) -> str:
    if character.isascii():
        return character
    if "\u2800" <= character <= "\u28ff":  # the spinner of rich
        return "*"
    if "\u2500" <= character <= "\u257f":  # frames and bars of rich
        return "-"
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return letters or ("" if unicodedata.combining(character) else "?")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return to_ascii(error.object[error.start : error.end]), error.end
