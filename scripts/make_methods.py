"""Write docs/methods.md, the catalogue of all reducers, from their classes.

python scripts/make_methods.py
"""

from __future__ import annotations

import re
from inspect import getdoc
from pathlib import Path

from torino.core.io import write_atomic
from torino.reducers import Reducer, describe, get, list_reducers

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "methods.md"
HEAD = """# Methods

All reducers share one interface: `plan(tokens)` returns a `Reduction`, and `budget` is the exact number of tokens
passed to the language model. They are written from their papers and from the behavior of the released code, without
using that code. Symbols are explained in [How it works](how-it-works.md#symbols). Methods "in every block" work inside
the vision tower, see [Families](guides/reduce-in-your-model.md#families). Methods that read the language model work
[inside it](guides/reduce-in-your-model.md#inside-the-language-model); their budget is the number of tokens after the
last stage.

This page is generated from the classes by `scripts/make_methods.py`.
"""
COLUMNS = {"Reads": "needs", "Length": "length", "Output": "output", "Cost": "cost", "Paper": "paper"}


def methods() -> list[str]:
    """Return the names of the methods of the package itself, without those that other packages or tests register."""
    return [name for name in list_reducers() if get(name).__module__.startswith("torino.reducers.")]


def entry(name: str) -> str:
    """Return the section of one method."""
    cls, row = get(name), describe(name)
    facts = [f"Source: `src/{cls.__module__.replace('.', '/')}.py`."]
    if row["original_license"]:
        facts.append(f"License of the original code: {row['original_license']}.")
    return "\n\n".join([f"## {name}", description(cls), f"Defaults: `{row['parameters']}`.", " ".join(facts)])


def description(cls: type[Reducer]) -> str:
    """Return the docstring of a class up to its parameters, as Markdown."""
    text = (getdoc(cls) or "").split("\nParameters\n")[0].strip()
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)


def page() -> str:
    """Return the whole page."""
    rows = [describe(name) for name in methods()]
    table = ["| Name | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    table += [
        f"| [`{row['name']}`](#{row['name']}) | " + " | ".join(row[c] for c in COLUMNS.values()) + " |" for row in rows
    ]
    return "\n\n".join([HEAD.rstrip(), "\n".join(table), *map(entry, methods())]) + "\n"


def main() -> None:
    write_atomic(TARGET, lambda path: path.write_text(page(), encoding="utf-8"))
    print(f"Wrote {len(methods())} methods to {TARGET.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
