"""Generate answers with tiny LLaVA-1.5 models, stock or reduced, and compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.support import tiny
from torino import make
from torino.reducers import Reducer
from torino.vlm import reduced

ROWS = ("ab#cd", "#e#fgh", "klm", "z#")
NEW = 5
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


def generate(
    model: Any,
    inputs: Mapping[str, Any],
    reducer: Reducer | None = None,
    *,
    positions: Any = "compact",
    attention: Any = "auto",
    **options: Any,
) -> Any:
    """Generate, stock or reduced; sampling starts from the same seed each time."""
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True} | options
    torch.manual_seed(0)
    if reducer is None:
        return model.generate(**inputs, **options)
    with reduced(model, reducer, positions=positions, attention=attention):
        return model.generate(**inputs, **options)


def same(first: Any, second: Any) -> bool:
    """Return whether two outputs are equal in every token and bitwise in the logits of every step."""
    return torch.equal(first.sequences, second.sequences) and all_equal(first.logits, second.logits)


def all_equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Return whether two lists of tensors are equal."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def torino_reducer(name: str = "torino-m", **options: Any) -> Reducer:
    """Return a reducer of the torino family with a small random SAE."""
    return make(name, sae=tiny.sae(), **options)


def without(inputs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return inputs without some of them."""
    return {name: value for name, value in inputs.items() if name not in names}
