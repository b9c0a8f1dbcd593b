"""Make text from others safe for a terminal, a spreadsheet or Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

# Control characters except tab and line feed, line separators, characters that reorder text, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # also the full-width forms


def printable(text: str) -> str:
    r"""Replace characters that control a terminal or reorder text by visible escapes; tabs and line feeds stay.

    The escapes are those of JSON, so that JSON stays valid.

    Examples
    --------
    >>> printable("a\x1b[31mb\u202ec\udcff")
    'a\\u001b[31mb\\u202ec\\udcff'
    """
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def csv_cell(value: object) -> object:
    """Return a value for a CSV file: a text that a spreadsheet would run as a formula is preceded by an apostrophe.

    Examples
    --------
    >>> [csv_cell(value) for value in ("=1+1", "-0.5", -0.5, "- 3", "@x", "cat")]
    ["'=1+1", '-0.5', -0.5, "'- 3", "'@x", 'cat']
    """
    if not isinstance(value, str) or not value.lstrip(" ").startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def format_csv(rows: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV, without formulas."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def neutralize_markdown(text: str, allowed: Sequence[str] = ()) -> str:
    """Return Markdown without raw HTML, links and images; ``allowed`` tags stay.

    Examples
    --------
    >>> neutralize_markdown("<u>2</u> <script> ![x](http://y) p &lt; 1", ["u"])
    '<u>2</u> &lt;script> !&#91;x]&#40;http://y) p &lt; 1'
    """
    tags = "|".join(re.escape(f"<{slash}{name}>") for name in allowed for slash in ("", "/")) or "(?!)"
    text = re.sub(f"({tags})|<", lambda match: match[1] or "&lt;", text)
    # entities, because a backslash before them cannot give them a meaning again
    return re.sub(r"(?<=\])[(\[:]|(?<=!)\[", lambda match: f"&#{ord(match[0])};", text)
