"""Wrong arguments of the API: one sentence of a TorinoError, never a TypeError or AttributeError."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torino
from torino import SAE, RawEmbedding, Reduction, TorinoError, VisualTokens, make
from torino.core.checks import describe_value, expand_path, to_index, to_integer, to_list, to_number, to_path
from torino.core.device import resolve_device, resolve_dtype
from torino.core.errors import BadFile, BadIndex, BadParameter, BadTokens
from torino.core.io import read_json, write_json
from torino.core.reduction import ReductionBatch
from torino.core.tokens import load_tokens, save_tokens
from torino.datasets import open_photos
from torino.datasets.images import open_image
from torino.evaluation import Judge
from torino.evaluation.latency import BenchPlan
from torino.evaluation.results import open_run
from torino.evaluation.runner import RunPlan
from torino.evaluation.tasks import open_task
from torino.interpret.top_activations import TopActivations, collect_top_activations
from torino.reducers import KeepShare, describe, get
from torino.reducers.calibration import calibrate, calibrate_cover
from torino.sae.formats import write_sae
from torino.training.activations.cache import cache_activations
from torino.training.activations.store import Store
from torino.training.config import TrainConfig
from torino.training.trainer import train
from torino.vlm import Trace, load_vlm
from torino.vlm.towers import Tower, load_tower

TOKENS = VisualTokens.of(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
RANDOM = make("random", budget=4)
PLAN = RANDOM.plan(TOKENS)
WEIGHTS = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
TOPK = SAE(WEIGHTS, W_dec=WEIGHTS, kind="topk", k=2)
META = torch.zeros(4, 4, device="meta")
COMPLEX = torch.zeros(4, 4, dtype=torch.complex64)

# The faults of the issue, with the words that the message must have.
CASES: dict[str, tuple[Callable[[], Any], type[TorinoError], str]] = {
    "make(None)": (lambda: make(None), BadParameter, "must be a name or spec such as 'torino-m'.* got None"),  # type: ignore[arg-type]
    "plan_batch(single)": (lambda: RANDOM.plan_batch(TOKENS), BadTokens, "got one VisualTokens. Put it in a list"),  # type: ignore[arg-type]
    "plan(None)": (lambda: RANDOM.plan(None), BadTokens, "plan takes the VisualTokens of one image, got NoneType"),  # type: ignore[arg-type]
    "plan.apply(ndarray)": (lambda: PLAN.apply(np.zeros((16, 8))), BadTokens, r"got ndarray. Use torch.as_tensor"),  # type: ignore[arg-type]
    "plan.explain('a')": (lambda: PLAN.explain("a"), BadParameter, "token must be a whole number, got 'a'"),  # type: ignore[arg-type]
    "plan.explain(99)": (lambda: PLAN.explain(99), BadParameter, "token must be between 0 and 3, got 99"),
    "SAE.load(None)": (lambda: SAE.load(None), BadFile, "loaded from a path or the name of a hub repository, got None"),  # type: ignore[arg-type]
    "meta patches": (lambda: VisualTokens.of(META), BadTokens, "patches is on the meta device"),
    "meta SAE": (lambda: SAE(META), BadTokens, "W_enc is on the meta device"),
    "meta values": (lambda: PLAN.apply(torch.zeros(16, 8, device="meta")), BadTokens, "is on the meta device"),
    "meta device": (lambda: SAE.load("x", device="meta"), BadParameter, "got 'meta', which holds no values"),
    "calibrate another method": (
        lambda: calibrate_cover([TOKENS], 3, reducer=RANDOM),  # type: ignore[arg-type]
        BadParameter,
        "must be a torino-x reducer.* got a Random",
    ),
    "calibrate one image": (lambda: calibrate(TOKENS, 3, sae=RawEmbedding()), BadTokens, "Put it in a list"),  # type: ignore[arg-type]
    "calibrate no SAE": (lambda: calibrate([TOKENS], 3, sae=None), BadParameter, "sae must be an SAE"),  # type: ignore[arg-type]
    "trace[0]": (lambda: Trace()[0], BadIndex, "Nothing was reduced yet, so the trace is empty"),
    "complex patches": (lambda: VisualTokens.of(COMPLEX), BadTokens, "real floating point, got torch.complex64"),
    "text as patches": (lambda: VisualTokens.of("abc"), BadTokens, "patches must be a torch Tensor, got str"),  # type: ignore[arg-type]
    "array of text": (lambda: VisualTokens.of(np.array(["a"])), BadTokens, "must be a torch Tensor, got ndarray.$"),  # type: ignore[arg-type]
    "sparse patches": (lambda: VisualTokens.of(torch.eye(4).to_sparse()), BadTokens, "Convert it with .to_dense"),
    "SAE vector": (lambda: SAE(torch.zeros(4)), BadTokens, r"must have shape \(latents, width\).* one row per latent"),
    "SAE of NaN": (lambda: SAE(torch.full((2, 2), math.nan)), BadTokens, "The checkpoint is damaged"),
    "load_vlm(None)": (lambda: load_vlm(None), BadFile, "a hub name or the path of a folder, got None"),  # type: ignore[arg-type]
    "load_tower(3)": (lambda: load_tower(3), BadFile, "a hub name or the path of a folder, got 3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_wrong_argument_is_one_sentence(name: str) -> None:
    call, error, words = CASES[name]
    with pytest.raises(error, match=words):
        call()


def test_integers_of_numpy_are_accepted() -> None:
    assert len(make("random", budget=np.int64(5)).plan(TOKENS)) == 5
    assert make("torino-m", sae=RawEmbedding(), k=np.int32(2), delta=np.int64(1)).spec == "torino-m(k=2, delta=1)"
    assert TOPK.top(TOKENS.patches, np.int64(2)).indices.shape == (16, 2)  # type: ignore[arg-type]
    assert SAE(WEIGHTS, kind="topk", k=np.int64(2)).k == 2  # type: ignore[arg-type]
    assert calibrate([TOKENS], np.float64(3), sae=RawEmbedding(), max_k=np.int64(2)).k <= 2  # type: ignore[arg-type]
    assert TrainConfig(k=np.int64(3), lr=np.float32(0.5)) == TrainConfig(k=3, lr=0.5)  # type: ignore[arg-type]
    assert type(TrainConfig(k=np.int64(3)).k) is int  # type: ignore[arg-type]
    assert BenchPlan(np.int64(3)) == BenchPlan(3)  # type: ignore[arg-type]
    assert RunPlan(["random"], fixed=[np.int64(5)]).fixed == (5,)  # type: ignore[list-item]


def calls() -> dict[str, Callable[[Any], Any]]:
    """Return functions of one argument."""
    batch = ReductionBatch.of([PLAN, PLAN])
    return {
        "make": make,
        "get": get,
        "describe": describe,
        "register": torino.register("never"),
        "KeepShare": lambda value: KeepShare(value, 0.5),
        "share": lambda value: KeepShare(RANDOM, value),
        "budget": lambda value: make("random", budget=value),
        "sae": lambda value: make("torino-m", sae=value),
        "plan": RANDOM.plan,
        "plan_batch": RANDOM.plan_batch,
        "apply": PLAN.apply,
        "explain": PLAN.explain,
        "save a plan": PLAN.save,
        "load a plan": Reduction.load,
        "batch": ReductionBatch.of,
        "index": batch.__getitem__,
        "save a batch": batch.save,
        "tokens": VisualTokens.of,
        "grid": lambda value: VisualTokens(TOKENS.patches, grid=value),
        "load_tokens": load_tokens,
        "save_tokens": lambda value: save_tokens(value, "never.npz"),
        "save_tokens to": lambda value: save_tokens([TOKENS], value),
        "target": lambda value: calibrate([TOKENS], value, sae=RawEmbedding()),
        "images": lambda value: calibrate(value, 3, sae=RawEmbedding()),
        "max_k": lambda value: calibrate([TOKENS], 3, sae=RawEmbedding(), max_k=value),
        "cover": lambda value: calibrate_cover([TOKENS], 3, reducer=value),
        "SAE": SAE,
        "W_dec": lambda value: SAE(WEIGHTS, W_dec=value if value is not None else "none"),
        "k": lambda value: SAE(WEIGHTS, kind="topk", k=value),
        "groups": lambda value: SAE(WEIGHTS, groups=value if value is not None else 3),  # type: ignore[arg-type]
        "SAE.load": SAE.load,
        "SAE.save": TOPK.save,
        "top": lambda value: TOPK.top(value, 2),
        "top k": lambda value: TOPK.top(TOKENS.patches, value),
        "encode": TOPK.encode,
        "decode": TOPK.decode,
        "first": TOPK.first,
        "write_sae": lambda value: write_sae(value, "never", "torino"),
        "write_sae to": lambda value: write_sae(TOPK, value, "torino"),
        "layout": lambda value: write_sae(TOPK, "never", value),
        "device": resolve_device,
        "dtype": lambda value: resolve_dtype(value if value is not None else "none", torch.device("cpu")),
        "load_vlm": load_vlm,
        "load_tower": load_tower,
        "Tower": lambda value: Tower(value, None),
        "ask": lambda value: torino.ask(value, "what ?", model="./never"),
        "reduced": lambda value: torino.reduced(value, RANDOM).__enter__(),
        "trace": lambda value: Trace()[value],
        "open_image": open_image,
        "open_photos": open_photos,
        "limit": lambda value: open_photos(".", limit=value if value is not None else "3"),  # type: ignore[arg-type]
        "open_task": open_task,
        "open_run": open_run,
        "Store.open": Store.open,
        "read_json": read_json,
        "write_json": lambda value: write_json(value, {}),
        "cache_activations": lambda value: cache_activations(value, value, value),
        "train": lambda value: train(value, TrainConfig(), "never"),
        "config": lambda value: train(TOPK, value, "never"),  # type: ignore[arg-type]
        "TopActivations.load": TopActivations.load,
        "collect": lambda value: collect_top_activations(value, value),
        "collect photos": lambda value: collect_top_activations(TOPK, value),
        "methods": lambda value: RunPlan(value),
        "fixed": lambda value: RunPlan(["random"], fixed=value),
        "dynamic": lambda value: RunPlan(["random"], dynamic=value),
        "seeds": lambda value: RunPlan(["random"], seeds=value),
        "bench images": lambda value: BenchPlan(value),
        "judge": lambda value: Judge(value, "grader"),
        "judge model": lambda value: Judge("http://127.0.0.1", value if not isinstance(value, str) else None),  # type: ignore[arg-type]
        "timeout": lambda value: Judge("http://127.0.0.1", "grader", timeout=value),
    }


WRONG: dict[str, Any] = {
    "None": None,
    "a NUL": "a\0b",
    "a long name": "x" * 5000,
    "an object": object(),
    "a class": dict,
    "a mapping": {"a": object()},
    "a complex tensor": COMPLEX,
    "an array of text": np.array(["a", "b"]),
    "a list of None": [None],
    "NaN": math.nan,
}


@pytest.mark.parametrize("name", list(calls()))
def test_any_wrong_type_is_a_torino_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a wrong argument must be refused without a connection")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    for kind, value in WRONG.items():
        with pytest.raises(TorinoError) as failure:
            calls()[name](value)
        text = str(failure.value)
        assert text.endswith((".", "]", ")")), f"{name}({kind}): {text}"
        assert len(text) < 6000
    assert not any(tmp_path.glob("never*"))


@pytest.mark.parametrize("field", [item.name for item in fields(TrainConfig)])
def test_any_wrong_training_setting_is_a_torino_error(field: str) -> None:
    optional = str(next(item for item in fields(TrainConfig) if item.name == field).type).endswith("None")
    for value in ("3", [None], object(), torch.tensor([3.0, 4.0]), math.nan, *([] if optional else [None])):
        with pytest.raises(BadParameter, match=field):
            TrainConfig(**{field: value})


def test_checks() -> None:
    assert describe_value("a" * 99).endswith("…")
    assert describe_value(int) == "the class int"
    assert to_integer("k", np.int64(3), 1, 3) == 3
    with pytest.raises(BadParameter, match=r"^k must be between 1 and 3, the levels; got 4\.$"):
        to_integer("k", 4, 1, 3, ", the levels")
    with pytest.raises(BadParameter, match="share must be a finite number of at least 0 and at most 1, got inf"):
        to_number("share", math.inf, 0, 1)
    with pytest.raises(IndexError, match="There is no image 2: there are 2, counted from 0"):
        to_index("image", 2, 2)
    with pytest.raises(BadTokens, match="but entry 1 is None"):
        to_list("plan_batch", [3, None], int, "numbers")
    for empty in ("", b"x", None):
        with pytest.raises(BadFile):
            to_path(empty)
    assert expand_path("~").is_absolute()
    with pytest.raises(BadFile, match="begins with ~no-such-user, and there is no such home folder"):
        expand_path("~no-such-user/x")
