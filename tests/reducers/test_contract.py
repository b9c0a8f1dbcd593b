"""The contract of torino.testing: all registered reducers fulfill it, and it detects invalid reducers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torino import SAE, RawEmbedding, Reduction, VisualTokens, list_reducers, make
from torino.core.errors import BadParameter
from torino.core.reduction import ReductionBatch
from torino.reducers import Reducer, describe, get
from torino.testing import check_reducer, sample_tokens

WIDTH = 16


def small_sae(**changes: Any) -> SAE:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, WIDTH, generator=generator)
    given = {"kind": "matryoshka", "threshold": 3.0, "groups": (12, 36), "k": 4} | changes
    return SAE(
        weight, 0.1 * torch.randn(48, generator=generator), b_dec=0.1 * torch.randn(WIDTH, generator=generator), **given
    )


ENCODERS = {"sae": small_sae(), "relu": small_sae(kind="relu", threshold=None), "raw": RawEmbedding()}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"k": 1, "delta": 1},
    {"k": 3, "delta": 2, "order": "native"},
    {"k": 4, "delta": 1, "silent": "keep"},
    {"k": 3, "delta": 3, "silent": "literal"},
    {"rank": "pre-threshold"},
    *[{"k": 3, "delta": 3, "budget": budget} for budget in (1, 2, 7, 15, 16)],
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("name", ["torino-m", "torino-p"])
def test_contract(name: str, encoder: str, setting: dict[str, Any]) -> None:
    check_reducer(make(name, sae=ENCODERS[encoder], **setting))


# Smallest budget and required parameters of a method.
MIN_BUDGET = {"visionzip": 3}
REQUIRED: dict[str, dict[str, Any]] = {"scts": {"sae": ENCODERS["sae"]}}


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 15, 16])
@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("name", [name for name in list_reducers() if not name.startswith("torino")])
def test_contract_of_other_methods(name: str, order: str, budget: int) -> None:
    given = {"budget": budget, "order": order, **REQUIRED.get(name, {})}
    if get(name).in_language_model:  # the order is that of the prompt
        del given["order"]
    if budget < MIN_BUDGET.get(name, 1):
        with pytest.raises(BadParameter, match="budget"):
            make(name, **given)
    else:
        check_reducer(make(name, **given))


@pytest.mark.parametrize("spec", ["divprune(budget=9)+fastv(budget=4)", "uniform(budget=4)+pyramiddrop(budget=4)"])
def test_contract_of_joined_methods(spec: str) -> None:
    check_reducer(make(spec))


@pytest.mark.parametrize("name", list_reducers())
def test_every_method_is_described(name: str) -> None:
    description = describe(name)
    for key in ("summary", "paper", "cost", "original_license"):
        assert description[key], f"{name} has no {key}"
    assert description["summary"].endswith(".")
    assert len(description["summary"]) <= 90


@pytest.mark.parametrize("scale", ["mean", "sqrt", "sum"])
def test_contract_of_scales(scale: str) -> None:
    check_reducer(make("torino-m", sae=ENCODERS["sae"], scale=scale))


def test_pruners_keep_patches_unchanged() -> None:
    for image in sample_tokens(WIDTH):
        plan = make("torino-p", sae=ENCODERS["sae"]).plan(image)
        assert plan.is_pruning
        assert torch.equal(plan.apply(image.patches), image.patches[plan.anchor])


@dataclass(frozen=True, repr=False)
class Bad(Reducer):
    """A reducer that can violate each rule of the contract."""

    fault: str = ""
    budget: int | None = None
    order: str = "raster"

    name = "bad"

    def plan(self, tokens: VisualTokens) -> Reduction:
        kept = torch.arange(len(tokens))
        if self.fault == "random":
            kept = torch.randperm(len(tokens)).sort().values
        if self.fault == "unsorted":
            kept = kept.flip(0)
        if self.fault == "writes":
            tokens.patches.add_(1)
        if self.fault == "clamps":
            tokens.patches.clamp_(min=0)  # does nothing the second time
        by = "someone else" if self.fault == "signature" else self.spec
        grid = (1, len(tokens)) if self.fault == "grid" else tokens.grid
        if self.fault == "empty":
            return Reduction.of([{}], grid, by)
        if self.fault == "infinite":
            return Reduction.of([{0: float("inf")}], grid, by)
        return Reduction.pick(kept, grid, by)

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        plans = [self.plan(image) for image in images]
        if self.fault == "batch":
            plans = [Reduction.pick(torch.tensor([0]), image.grid, self.spec) for image in images]
        return ReductionBatch.of(plans)


def test_contract_accepts_a_valid_reducer() -> None:
    check_reducer(Bad())


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("random", "random state"),
        ("unsorted", "raster order"),
        ("writes", "changed its input|two different plans"),
        ("clamps", "changed its input"),
        ("signature", "set plan.by"),
        ("grid", "plan for grid"),
        ("empty", "token without patches"),
        ("infinite", "not finite"),
        ("batch", "in a batch"),
    ],
)
def test_contract_detects(fault: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_reducer(Bad(fault=fault))


def test_contract_detects_a_wrong_number_of_tokens() -> None:
    with pytest.raises(AssertionError, match="budget of 3"):
        check_reducer(Bad(budget=3))
