"""Text that is harmless on a terminal, in a spreadsheet and in Markdown."""

from __future__ import annotations

import json

import numpy as np
import pytest

from torino.core.errors import TorinoError
from torino.core.text import csv_cell, format_csv, neutralize_markdown, printable


@pytest.mark.parametrize("code", [*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066, 0x2028, 0xD800])
def test_control_characters_become_visible(code: int) -> None:
    assert printable(f"a{chr(code)}b").isprintable()


def test_ordinary_text_is_not_changed() -> None:
    text = "Café δ × 中文 \N{FAMILY} a\u200db שלום\tline\nline"
    assert printable(text) == text


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", "--1"]
)
def test_formulas_are_neutralized(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


def test_numbers_stay_numbers() -> None:
    assert (
        format_csv([["a", "-0.5", -0.5, "+1e-3", "cat", "", None, np.float64(-2.5)]])
        == "a,-0.5,-0.5,+1e-3,cat,,,-2.5\n"
    )


def test_markdown_without_html_links_and_images() -> None:
    hostile = (
        "<img src=x onerror=alert(1)> <u>ok</u> ![a](http://x) [b](javascript:c) \\[d](e) [f][g]\n[g]: h <http://i>"
    )
    text = neutralize_markdown(hostile, ["u"])
    assert "<u>ok</u>" in text
    assert text.count("<") == 2
    for syntax in ("![", "](", "][", "]:"):
        assert syntax not in text


def test_escapes_keep_json_valid() -> None:
    text = json.dumps({"name": "a\x9b31m\u202e\x7f"}, ensure_ascii=False)
    assert json.loads(printable(text)) == json.loads(text)


def test_messages_of_errors_are_printable_and_not_endless() -> None:
    message = str(TorinoError(f"The file a\x1b]0;title\x07\udcff is bad. {'x' * 10_000} Download it again."))
    assert message.isprintable()
    assert len(message) < 2000
    assert message.startswith("The file a\\u001b]0;title\\u0007\\udcff is bad.")
    assert message.endswith("Download it again.")
