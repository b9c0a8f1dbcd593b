"""One code path: the session's answer equals ``with reduced(...): model.generate(...)``, for every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tiny, tiny_qwen, tiny_tiles
from tests.support.tiny_cells import (
    GEMMA_FAMILIES,
    PROMPTS,
    Family,
    KeepAll,
    KeepSome,
    MergePairs,
    build_idefics,
    build_internvl,
    idefics_pixels,
)
from torino import make
from torino.reducers import Reducer
from torino.vlm import VLM, families, reduced
from torino.vlm.early_exit import measure_early_exit
from torino.vlm.hooks import run_all_blocks
from torino.vlm.session import Inputs

Build = Callable[[], tuple[Any, list[dict[str, Any]]]]


def _llava() -> tuple[Any, list[dict[str, Any]]]:
    return tiny.llava(), [tiny.prompt("ab#cd"), tiny.prompt("ab#cd", "e#f#g", "#")]


def _tiles(family: str) -> tuple[Any, list[dict[str, Any]]]:
    model = tiny_tiles.make_model(family)
    return model, [tiny_tiles.make_inputs(model, [[(40, 90)]]), tiny_tiles.make_inputs(model, [[(40, 90)], [(64, 60)]])]


def _qwen(family: str) -> tuple[Any, list[dict[str, Any]]]:
    model = tiny_qwen.make_model(family).eval()
    return model, [tiny_qwen.make_inputs([[(3, 2)]]), tiny_qwen.make_inputs([[(3, 2)], [(2, 4), (1, 3)]])]


def _cells(family: Family) -> tuple[Any, list[dict[str, Any]]]:
    model = family.build()
    return model, [family.inputs(PROMPTS[:1]), family.inputs([PROMPTS[0], PROMPTS[1], PROMPTS[3]])]


MODELS: dict[str, Build] = {
    "llava": _llava,
    "llava_next": lambda: _tiles("llava_next"),
    "llava_next_video": lambda: _tiles("llava_next_video"),
    "llava_onevision": lambda: _tiles("llava_onevision"),
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "internvl": lambda: _cells(Family("internvl", build_internvl)),
    "idefics3": lambda: _cells(Family("idefics3", lambda: build_idefics("idefics3"), pixels=idefics_pixels)),
    "smolvlm": lambda: _cells(Family("smolvlm", lambda: build_idefics("smolvlm"), pixels=idefics_pixels)),
    "paligemma": lambda: _cells(GEMMA_FAMILIES["paligemma"]()),
    "gemma3": lambda: _cells(GEMMA_FAMILIES["gemma3"]()),
}
REDUCERS: dict[str, Reducer] = {
    "keep all": KeepAll(),
    "prune": KeepSome(),
    "merge": MergePairs(),
    "random": make("random(budget=1)"),
}
GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "max_length": {"max_length": 400, "max_new_tokens": None},
}


class _Decoder:
    """Decode tokens as numbers, so that texts show them all."""

    chat_template = None

    @staticmethod
    def batch_decode(rows: Tensor, skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(map(str, row.tolist())) for row in rows]


def test_every_family_is_covered() -> None:
    assert set(MODELS) == set(families())


@pytest.mark.parametrize("family", MODELS)
def test_session_equals_reduced(family: str) -> None:
    model, batches = MODELS[family]()
    image_token = int(model.config.image_token_id)
    compared = 0
    for inputs in batches:
        rows, length = inputs["input_ids"].shape
        single = rows == 1
        for name, reducer in REDUCERS.items():
            if name == "merge" and any(count % 2 for count in _units(model, inputs)):
                reducer = make("random(budget=2)")
            for positions in ("compact", "original", "median"):
                attention = "restore" if positions == "median" and family != "gemma3" else "auto"
                host: dict[str, Any] = {"positions": positions, "attention": attention}
                vlm = VLM(model, _Decoder(), **host)
                given = Inputs(dict(inputs), ("",) * rows)
                for mode, options in GENERATION.items() if single else [("greedy", {})]:
                    generation = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [image_token]} | options
                    if options.get("max_length"):
                        generation |= {"max_length": length + 4}
                    with reduced(model, reducer, **host):
                        expected = model.generate(**inputs, **generation)[:, length:]
                    output = vlm.generate(given, [vlm.reduce(vlm.encode(given, [reducer]), reducer)], **generation)
                    assert torch.equal(output.ids, expected), (family, name, positions, mode)
                    compared += 1
    assert compared >= 3 * len(REDUCERS) * (len(GENERATION) + 1) - 8


@pytest.mark.parametrize("family", MODELS)
def test_all_tokens_equal_the_stock_model(family: str) -> None:
    model, batches = MODELS[family]()
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [int(model.config.image_token_id)]}
    for inputs in batches:
        rows, length = inputs["input_ids"].shape
        vlm, given = VLM(model, _Decoder()), Inputs(dict(inputs), ("",) * rows)
        output = vlm.generate(given, [vlm.reduce(vlm.encode(given), None)], **options)
        assert torch.equal(output.ids, model.generate(**inputs, **options)[:, length:])


@pytest.mark.parametrize("family", MODELS)
def test_tower_with_all_blocks_gives_the_same_tokens(family: str) -> None:
    model, batches = MODELS[family]()
    for inputs in batches:
        vlm, given = VLM(model, _Decoder()), Inputs(dict(inputs), ("",) * len(inputs["input_ids"]))
        stopped = vlm.encode(given).run(None)[0].tokens
        with run_all_blocks() as count:
            complete = vlm.encode(given).run(None)[0].tokens
        assert len(stopped) == len(complete)
        assert all(torch.equal(a.patches, b.patches) for a, b in zip(stopped, complete, strict=True))
        early_exit = measure_early_exit(vlm, given)
        assert (early_exit is not None) == (count.needed < count.all)
        if early_exit is not None:
            assert (early_exit.blocks, early_exit.of) == (count.needed, count.all)


def _units(model: Any, inputs: dict[str, Any]) -> list[int]:
    from torino.vlm import adapter_for

    with torch.no_grad():
        return [len(unit) for unit in adapter_for(model).encode(inputs, frozenset()).tokens]
