"""Write docs/zoo.md, the page of all reducers, from their classes.

python scripts/make_zoo.py
"""

from __future__ import annotations

from inspect import getdoc
from pathlib import Path

from torino.core.io import write_atomic
from torino.reducers import describe, get, list_reducers

HEAD = """# The method zoo

Every reducer, written anew from its paper and from what its released code does, behind one contract
(`torino.testing.check_reducer`): `plan(tokens)` gives a `Reduction`, and `budget` is the exact number of tokens handed
to the language model. Those that need something in every block work inside the vision tower instead, see
[hosts.md](hosts.md). This page is made by `scripts/make_zoo.py` from the classes; letters are those of
[notation.md](notation.md).
"""


def page() -> str:
    """The whole page."""
    rows = [describe(name) for name in list_reducers()]
    table = [
        "| Name | Paper | Needs | Length | Output | Cost | License of the original |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    columns = ("paper", "needs", "length", "output", "cost", "original_license")
    table += [f"| [`{row['name']}`](#{row['name']}) | " + " | ".join(row[c] for c in columns) + " |" for row in rows]
    parts = [HEAD, "\n".join(table)]
    for row in rows:
        text = (getdoc(get(row["name"])) or "").split("\nParameters\n")[0].strip()
        source = get(row["name"]).__module__.rsplit(".", 1)[-1]
        parts.append(f"## {row['name']}\n\n{text}\n\nDefaults: `{row['parameters']}`. Source: `reducers/{source}.py`.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    target = Path(__file__).parents[1] / "docs" / "zoo.md"

    def write(path: Path) -> None:
        path.write_text(page(), encoding="utf-8")

    write_atomic(target, write)
    print(f"Wrote {len(list_reducers())} reducers to {target.name}.")


if __name__ == "__main__":
    main()
