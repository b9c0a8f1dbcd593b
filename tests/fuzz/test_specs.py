"""Random and damaged specs of reducers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.damage import JUNK, Draw
from tests.support.fuzzing import only_torino_errors
from torino import RawEmbedding, VisualTokens, list_reducers, make
from torino.evaluation.protocol import fixed_settings, own_settings, split_specs
from torino.reducers import get
from torino.reducers.base import _fields, parse_spec

TOKENS = VisualTokens(
    torch.randn(12, 4, generator=torch.Generator().manual_seed(0)),
    (3, 4),
    cls=torch.ones(4),
    cls_attention=torch.rand(2, 12),
    keys=torch.rand(12, 4),
)
NAMES = list_reducers()
PIECES = [
    "(",
    ")",
    ",",
    "=",
    "k=2",
    "delta",
    "budget=5",
    "'",
    '"',
    "[",
    "]",
    "None",
    "lambda: 0",
    "**x",
    "*",
    "\x00",
    " ",
]
PIECES += [
    "\n",
    "__import__('os')",
    "1e999",
    "9" * 5000,
    "-" * 3000,
    "(" * 900,
    "f()",
    "{}",
    "\ud800",
    "é",
    "#",
    ";",
    "\\",
]


@st.composite
def specs(draw: Draw) -> str:
    """Return the name of a reducer with its own parameters, of which some have values that it does not accept."""
    name = draw(st.sampled_from(NAMES))
    fields = [field.name for field in _fields(get(name)) if field.init and field.name != "sae"]
    given_fields = draw(st.lists(st.sampled_from([*fields, "x"]), unique=True, max_size=4))
    values = (
        st.integers(-2, 14) | st.booleans() | st.none() | st.floats() | JUNK | st.sampled_from(["raster", "native"])
    )
    arguments = [f"{field}={draw(values)!r}" for field in given_fields]
    text = f"{name}({', '.join(arguments)})"
    if draw(st.booleans()):
        return text
    position = draw(st.integers(0, len(text)))
    return text[:position] + draw(st.sampled_from(PIECES)) + text[position + draw(st.integers(0, 3)) :]


@given(specs() | st.text(max_size=30) | st.lists(st.sampled_from([*NAMES, *PIECES]), max_size=6).map("".join))
def test_specs_raise_only_torino_errors(spec: str) -> None:
    with only_torino_errors():
        name, values = parse_spec(spec)
        split_specs([spec])
        own_settings([spec], ["none"])
        has_sae = any(field.name == "sae" for field in _fields(get(name)))
        options = {"sae": RawEmbedding()} if has_sae else {}
        reducer = make(spec, **options)
        assert make(reducer.spec, **options).spec == reducer.spec
        reducer.plan(TOKENS).apply(TOKENS.patches, TOKENS.cls)
        if "budget" not in values:
            fixed_settings([spec], [5], ["none"], seeds=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_alone_is_a_spec(name: str) -> None:
    assert parse_spec(name) == (name, {})
