"""``Trace``: reductions, token counts, times and the key-value cache saved."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from transformers import DynamicCache

from tests.support import tiny
from tests.support.generation import ROWS, torino_reducer
from tests.support.tiny import Ragged
from torino.vlm import Trace, reduced


def test_trace(model: Any, inputs: dict[str, Any]) -> None:
    with reduced(model, torino_reducer()) as trace:
        model.generate(**inputs, max_new_tokens=2)
        model(**tiny.prompt("a#"))
    assert len(trace) == 5
    assert [len(call.reductions) for call in trace.calls] == [4, 1]
    assert trace.before == 5 * 16
    assert trace.after == sum(len(plan) for plan in trace) == sum(sum(call.after) for call in trace.calls)
    assert trace[0].by == "torino-m(k=2, delta=2)"
    assert trace[-1] is trace.calls[1].reductions[0]
    seconds = trace.seconds
    assert list(seconds) == ["tower", "plan", "sae", "grouping", "projector"]
    assert all(value > 0 for value in seconds.values())
    assert seconds["sae"] + seconds["grouping"] <= seconds["plan"]
    lines = trace.summary().splitlines()
    assert len(lines) == 4
    assert lines[0].split() == ["call", "images", "tokens", "removed", "cache", "saved", "reducer"]
    after = sum(trace.calls[0].after)
    assert lines[1].split()[:6] == ["0", "4", "64", "->", str(after), f"{1 - after / 64:.1%}"]
    assert lines[1].endswith("torino-m(k=2, delta=2)")
    assert lines[3].startswith("time: tower ")
    assert "(sae " in lines[3]
    copied = pickle.loads(pickle.dumps(trace))
    assert isinstance(copied, Trace)
    assert copied.summary() == trace.summary()
    for duplicate in (copied, copy.copy(trace), copy.deepcopy(trace)):
        duplicate.add(trace.calls[0])
        assert (len(duplicate), len(trace)) == (9, 5)


@pytest.mark.parametrize("rows", [("ab#cd",), ROWS], ids=["one row", "padded rows"])
def test_bytes_saved_equal_the_difference_of_the_caches(model: Any, rows: tuple[str, ...]) -> None:
    inputs = tiny.prompt(*rows)

    def size(cache: DynamicCache) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    full = size(model(**inputs, use_cache=True).past_key_values)
    with reduced(model, Ragged()) as trace:
        reduced_size = size(model(**inputs, use_cache=True).past_key_values)
    assert trace.bytes_saved == trace.calls[0].bytes_saved == full - reduced_size > 0
