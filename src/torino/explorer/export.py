"""Export what the page shows of a photo: a picture, or one HTML file without scripts that needs no server."""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import Any

from torino.core.explanation import describe_change
from torino.core.reduction import Reduction
from torino.explorer.model import InspectedPhoto
from torino.viz.draw import token_color
from torino.viz.figures import draw_look

SIDE = 672
STRONGEST = 4  # concepts of a patch in its tooltip


def export_png(photo: InspectedPhoto, reduction: Reduction, names: dict[int, str]) -> bytes:
    """Draw the photo, its groups and the tokens that remain."""
    file = io.BytesIO()
    title = f"{photo.photo.name} · {reduction.by}"
    draw_look(photo.seen, [(reduction.by, reduction)], title=title, names=names).save(file, "PNG", optimize=True)
    return file.getvalue()


def export_html(photo: InspectedPhoto, reduction: Reduction, names: dict[int, str], model: str) -> str:
    """Write the page: the photo with its groups, tooltips for each patch, and a table of all tokens."""
    rows, columns = reduction.grid
    file = io.BytesIO()
    photo.seen.save(file, "JPEG", quality=88)
    tokens = [reduction.explain(token, names) for token in range(len(reduction))]
    cells: list[dict[str, Any]] = []
    for patch, token in enumerate(reduction.assigned.tolist()):
        row, column = divmod(patch, columns)
        cells.append(
            {
                "x": column,
                "y": row,
                "color": None if token < 0 else color(int(reduction.concept[token]), token),
                "dropped": token < 0,
                "right": column + 1 < columns and int(reduction.assigned[patch + 1]) != token,
                "below": row + 1 < rows and int(reduction.assigned[patch + columns]) != token,
                "title": _tooltip(photo, patch, token, names),
            }
        )
    spent: dict[int, list[int]] = {}
    for told in tokens:
        entry = spent.setdefault(-1 if told.concept is None else told.concept, [0, 0])
        entry[0] += 1
        entry[1] += len(told.stands_for)
    concepts = [
        {
            "name": label(concept, names),
            "color": color(concept, 0),
            "tokens": count,
            "patches": patches,
        }
        for concept, (count, patches) in sorted(spent.items(), key=lambda item: (-item[1][1], item[0]))
    ]
    return _template().render(
        title=f"{photo.photo.name}: {reduction.by}",
        model=model,
        change=describe_change(reduction.patches, len(reduction)),
        before=reduction.patches,
        after=len(reduction),
        rows=rows,
        columns=columns,
        side=SIDE,
        jpeg=base64.b64encode(file.getvalue()).decode(),
        cells=cells,
        concepts=concepts,
        tokens=tokens,
    )


def color(concept: int, token: int) -> str:
    """Return the color of a concept, the same in all photos; tokens without one are told apart by their number."""
    red, green, blue = token_color(concept if concept >= 0 else token)
    return f"#{red:02x}{green:02x}{blue:02x}"


def label(concept: int, names: dict[int, str]) -> str:
    """Return the name of a concept, or its number."""
    return "no concept" if concept < 0 else names.get(concept, f"concept {concept}")


def _tooltip(photo: InspectedPhoto, patch: int, token: int, names: dict[int, str]) -> str:
    row, column = divmod(patch, photo.grid[1])
    kept = "dropped" if token < 0 else f"token {token}"
    lines = [f"row {row + 1}, column {column + 1}: {kept}"]
    indices, values = photo.concepts.indices[patch].tolist(), photo.concepts.values[patch].tolist()
    for concept, value in list(zip(indices, values, strict=True))[:STRONGEST]:
        if concept >= 0:
            lines.append(f"{label(concept, names)} {value:.2f}")
    return "\n".join(lines)


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("torino.explorer", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("export.html.j2")
