"""``torino list``, ``torino info`` and ``torino export``: reducers, model families, and SAE files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import JsonOption, examples, load_sae, out
from torino.core.errors import BadParameter

LIST_EPILOG = examples("torino list", "torino list models", "torino list layouts --json")
INFO_EPILOG = examples("torino info ./my-sae", "torino info owner/repository/sub/folder")
EXPORT_EPILOG = examples(
    "torino export ./my-sae ./for-saelens --layout saelens",
    "torino export ./overcomplete.pt ./my-sae --kind topk --k 32",
)
Kind = Literal["reducers", "models", "layouts"]
KindChoice = Literal["relu", "topk", "batchtopk", "matryoshka", "jumprelu"]
LayoutChoice = Literal["torino", "dictionary_learning", "saelens"]
SaeArgument = Annotated[
    str, typer.Argument(metavar="SAE", help="Folder, file, hub repository, or 'example', which is bundled.")
]


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = "reducers",
    as_json: JsonOption = False,
) -> None:
    """List the reducers, the supported models, or the layouts of SAE files."""
    rows = {"reducers": _reducers, "models": _models, "layouts": _layouts}[kind](as_json)
    if as_json:
        out.print_json(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False, show_header=kind != "reducers")
    for heading in rows[0] if kind != "reducers" else ("name", "summary"):
        table.add_column(heading, style="bold" if heading == "name" else None, no_wrap=heading == "name")
    for row in rows:
        table.add_row(*(_describe_reducer(row) if kind == "reducers" else [escape(value) for value in row.values()]))
    out.print(table)


def _describe_reducer(row: dict[str, str]) -> list[str]:
    """Return the name, and the summary above what the method reads and returns."""
    facts = f"reads {row['needs']}; length {row['length']}; {row['output']}"
    return [escape(row["name"]), f"{escape(row['summary'].replace('``', ''))}\n[dim]{escape(facts)}[/]"]


def _reducers(everything: bool) -> list[dict[str, str]]:
    from torino.reducers import describe, list_reducers

    shown = ("name", "summary", "needs", "length", "output", "cost")
    return [
        {key: value for key, value in describe(name).items() if everything or key in shown} for name in list_reducers()
    ]


def _models(everything: bool) -> list[dict[str, str]]:
    from torino.vlm import families
    from torino.vlm.loading import model_packages

    rows = [{"name": family, "kind": "model family", "from": "transformers"} for family in families()]
    packages = model_packages().items()
    return rows + [
        {"name": name, "kind": "installed model", "from": entry.dist.name if entry.dist else ""}
        for name, entry in packages
    ]


def _layouts(everything: bool) -> list[dict[str, str]]:
    from torino.sae.formats import LAYOUTS, READ_ONLY

    rows = [{"name": name, "read": "yes", "written": "yes"} for name in LAYOUTS]
    return rows + [{"name": name, "read": "yes", "written": "no"} for name in READ_ONLY]


def info(sae: SaeArgument, as_json: JsonOption = False) -> None:
    """Describe an SAE: kind, sizes, threshold, and where it comes from."""
    loaded = _load(sae)
    facts: dict[str, Any] = loaded.facts()
    threshold = loaded.threshold
    if threshold is not None:
        facts["threshold"] = (
            float(threshold) if threshold.ndim == 0 else [float(threshold.min()), float(threshold.max())]
        )
    if as_json:
        out.print_json(json.dumps(facts))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        if value not in ("", None):
            table.add_row(f"[bold]{name}[/]", escape(str(value)))
    out.print(table)


def export(
    sae: SaeArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it.")],
    layout: Annotated[LayoutChoice, typer.Option(help="The library whose layout is written.")] = "torino",
    kind: Annotated[KindChoice | None, typer.Option(help="Kind of the SAE, if the file lacks it.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Active latents per token, if the file lacks it.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Threshold of the latents, if the file lacks it.")] = None,
) -> None:
    """Write an SAE in another library's layout."""
    from torino.sae import SAE
    from torino.sae.formats import write_sae

    given = (kind, k, threshold) != (None, None, None)
    loaded = SAE.load(sae, kind=kind, k=k, threshold=threshold) if given else _load(sae)
    written = write_sae(loaded, folder, layout)
    out.print(f"Wrote {escape(str(written))} in the {layout} layout.", highlight=False)


def _load(name: str) -> Any:
    """Load a whole SAE, decoder included."""
    if name == "none":
        raise BadParameter("'none' means no SAE, so there is nothing to show. Give a folder, a file or a repository.")
    return load_sae(name, decoder=True)
