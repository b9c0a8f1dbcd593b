"""Arrays and texts of a file of reductions, without the class :class:`~torino.core.reduction.Reduction`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torino.core.frames import pack_layouts, unpack_layouts
from torino.core.ragged import offsets_from_lengths
from torino.core.schema import parse_json

if TYPE_CHECKING:
    from torino.core.reduction import Reduction

FORMAT = "torino-reduction/1"


def pack_reductions(reductions: Sequence[Reduction]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the arrays and texts that are stored in a file."""
    roles = sorted({role for reduction in reductions for role in reduction.role})
    code = {role: index for index, role in enumerate(roles)}
    arrays = {
        name: torch.cat([getattr(reduction, name) for reduction in reductions])
        for name in ("sources", "weights", "anchor", "concept", "score", "assigned")
    }
    codes = [code[role] for reduction in reductions for role in reduction.role]
    arrays["role"] = torch.tensor(codes, dtype=torch.int8)
    arrays["row_lengths"] = torch.cat([reduction.offsets.diff() for reduction in reductions])
    arrays["lengths"] = torch.tensor([len(reduction) for reduction in reductions])
    arrays |= pack_layouts([reduction.layout for reduction in reductions])
    by = [reduction.by for reduction in reductions]
    return arrays, {"format": FORMAT, "roles": json.dumps(roles), "by": json.dumps(by)}


def unpack_reductions(arrays: dict[str, Tensor], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the fields of each stored reduction; raise an error if arrays are missing or do not fit together."""
    lengths: list[int] = arrays["lengths"].tolist()
    grids: list[tuple[int, int]] = [(rows, columns) for rows, columns in arrays["grids"].tolist()]
    roles, names = parse_json(texts["roles"], list[str]), parse_json(texts["by"], list[str])
    if min(min(grid) for grid in grids) < 1:
        raise ValueError("a grid has no patches")
    if len(arrays["role"]) and not 0 <= int(arrays["role"].min()) <= int(arrays["role"].max()) < len(roles):
        raise ValueError("a role has no name")
    layouts = unpack_layouts(arrays, grids)
    floats = ("weights", "score")
    for name in ("sources", "anchor", "concept", "assigned", *floats):
        if arrays[name].is_floating_point() != (name in floats) or arrays[name].ndim != 1:
            raise ValueError(f"{name} is {arrays[name].dtype} of shape {tuple(arrays[name].shape)}")
        arrays[name] = arrays[name].float() if name in floats else arrays[name].long()
    per_token = {name: arrays[name].split(lengths) for name in ("anchor", "concept", "score", "role", "row_lengths")}
    entries = [int(rows.sum()) for rows in per_token["row_lengths"]]
    per_entry = {name: arrays[name].split(entries) for name in ("sources", "weights")}
    sizes = [layout["frames"] * layout["grid"][0] * layout["grid"][1] for layout in layouts]
    assigned = arrays["assigned"].split(sizes)
    return [
        {
            "sources": per_entry["sources"][i],
            "weights": per_entry["weights"][i],
            "offsets": offsets_from_lengths(per_token["row_lengths"][i].tolist()),
            "anchor": per_token["anchor"][i],
            "concept": per_token["concept"][i],
            "role": tuple(roles[code] for code in per_token["role"][i].tolist()),
            "by": names[i],
            "assigned": assigned[i],
            "score": per_token["score"][i],
            **layout,
        }
        for i, layout in enumerate(layouts)
    ]
