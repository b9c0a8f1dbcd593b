"""Settings of a run, also of methods with options in brackets."""

from __future__ import annotations

import pytest

from torino import RawEmbedding
from torino.core.errors import BadParameter
from torino.evaluation.protocol import (
    FULL,
    Setting,
    default_methods,
    dynamic_settings,
    fixed_settings,
    matched_settings,
    own_settings,
    split_specs,
)
from torino.evaluation.reporting.summary import display_name
from torino.evaluation.runner import RunPlan

SPEC = 'divprune(space="projected")'
METHODS = ["torino-p", "torino-m", "random", "divprune"]


def find(settings: list[Setting], method: str) -> list[Setting]:
    return [setting for setting in settings if setting.method == method]


def test_settings_of_the_protocol() -> None:
    dynamic = dynamic_settings(METHODS, ["s"])
    assert [(item.method, item.tier, item.reference) for item in dynamic[:2]] == [
        ("torino-p", "3,3", True),
        ("torino-m", "3,3", False),
    ]
    references = {item.tier: item for item in dynamic if item.reference}
    matched = matched_settings(METHODS, {"2,2": 7}, references, ["s"], seeds=2)
    assert [item.spec for item in matched] == [
        "torino-p(k=2, delta=2, budget=7)",
        "torino-m(k=2, delta=2, budget=7)",
        "random(budget=7, seed=0)",
        "random(budget=7, seed=1)",
        "divprune(budget=7)",
    ]
    assert matched[0].label == "TORINO-P_FB"
    fixed = fixed_settings(METHODS, [64], ["s"], seeds=1)
    ids = [item.id for item in [FULL, *dynamic, *matched, *fixed]]
    assert len(set(ids)) == len(ids)
    for item in [*dynamic, *matched, *fixed]:
        reducer = item.reducer({"s": RawEmbedding()})
        assert reducer is not None
        assert reducer.name == item.method


def test_each_sae_has_its_own_tiers() -> None:
    dynamic = dynamic_settings(METHODS, ["a", "b"], [(2, 2)])
    assert [item.tier for item in dynamic if item.reference] == ["2,2 [a]", "2,2 [b]"]
    references = {item.tier: item for item in dynamic if item.reference}
    matched = matched_settings(METHODS, {"2,2 [a]": 7, "2,2 [b]": 9}, references, ["a", "b"], seeds=1)
    assert [(item.sae, item.budget) for item in matched if item.method == "torino-m"] == [("a", 7), ("b", 9)]
    ids = [item.id for item in [*dynamic, *matched]]
    assert len(set(ids)) == len(ids)


def test_a_dynamic_tier_needs_torino() -> None:
    with pytest.raises(BadParameter, match="neither torino-p nor torino-m"):
        RunPlan(["random"]).first_settings(["s"])


def test_a_method_without_a_tier_is_refused() -> None:
    plan = RunPlan(("torino-p", "random"), dynamic=[(2, 2)], fixed=(), matched=False)
    with pytest.raises(BadParameter, match="random has no tier to run in"):
        plan.first_settings(["s"])
    with pytest.raises(BadParameter, match="random has no tier to run in: there are no dynamic tiers"):
        RunPlan(["random"], dynamic=(), fixed=()).first_settings([])
    with pytest.raises(BadParameter, match=r"divprune.* has no tier to run in"):
        RunPlan([], [SPEC], dynamic=(), fixed=()).first_settings([])
    with pytest.raises(BadParameter, match="torino-m reads concepts and there is no SAE"):
        RunPlan(["torino-m"], dynamic=(), fixed=[64]).first_settings([])
    with pytest.raises(BadParameter, match="seeds must be at least 1"):
        RunPlan(["random"], dynamic=(), fixed=[64], seeds=0).first_settings([])
    assert RunPlan([], dynamic=(), fixed=()).first_settings([]) == [FULL], "the baseline alone"


def test_spec_runs_at_the_budget_of_each_tier() -> None:
    settings = fixed_settings(["divprune", SPEC], [192, 64], ["s"], 3)
    assert [(item.tier, item.budget, item.spec) for item in settings] == [
        ("192", 192, "divprune(budget=192)"),
        ("192", 192, "divprune(space='projected', budget=192)"),
        ("64", 64, "divprune(budget=64)"),
        ("64", 64, "divprune(space='projected', budget=64)"),
    ]
    assert settings[1].label == "DivPrune(space='projected')"
    assert settings[1].id == "divprune(space='projected')@192"
    assert len({item.id for item in settings}) == len({display_name(item) + item.tier for item in settings}) == 4
    for item in settings:
        reducer = item.reducer({})
        assert reducer is not None
        assert reducer.budget == item.budget
        assert reducer.space == ("projected" if "space" in item.spec else type(reducer).space)


def test_plan_runs_specs_in_all_tiers() -> None:
    plan = RunPlan(["torino-p", "divprune"], [SPEC], dynamic=[(2, 2)], fixed=[192, 64], seeds=1)
    first = plan.first_settings(["s"])
    assert [item.budget for item in find(first, "divprune")] == [192, 192, 64, 64]
    assert not [item for item in first if item.tier == "own"]
    references = {item.tier: item for item in first if item.reference}
    methods = [*plan.methods, *split_specs(plan.specs)[0]]
    second = matched_settings(methods, {"2,2": 150}, references, ["s"], 1)
    assert [item.spec for item in find(second, "divprune")] == [
        "divprune(budget=150)",
        "divprune(space='projected', budget=150)",
    ]
    assert find(second, "divprune")[1].id == "divprune(space='projected')@2,2"


def test_spec_with_a_budget_runs_as_written() -> None:
    plan = RunPlan(["random"], ["divprune(space='projected', budget=9)", "prumerge(budget=None)"], (), [192, 64], 1)
    settings = plan.first_settings(["s"])
    (divprune,) = find(settings, "divprune")
    assert (divprune.budget, divprune.tier) == (9, "9")
    (prumerge,) = find(settings, "prumerge")
    assert (prumerge.budget, prumerge.tier, prumerge.dynamic) == (None, "own", True)
    with pytest.raises(BadParameter, match="already has a budget"):
        fixed_settings(["tome(budget=3)"], [64], [], 1)


def test_torino_spec_runs_dynamically_and_at_the_budgets() -> None:
    plan = RunPlan(["torino-m"], ["torino-m(k=4, delta=3)"], [(2, 2)], [64], 1)
    settings = plan.first_settings(["s"])
    assert [(item.spec, item.dynamic) for item in find(settings, "torino-m")] == [
        ("torino-m(k=2, delta=2)", True),
        ("torino-m(k=2, delta=2, budget=64)", False),
        ("torino-m(k=4, delta=3, budget=64)", False),
        ("torino-m(k=4, delta=3)", True),
    ]
    references = {item.tier: item for item in settings if item.reference}
    (matched,) = matched_settings(["torino-m(k=4, delta=3)"], {"2,2": 99}, references, ["s"], 1)
    assert matched.spec == "torino-m(k=4, delta=3, budget=99)"
    assert display_name(matched) == "TORINO_FB-M(k=4, delta=3)"
    (other,) = matched_settings(["torino-m(order='native')"], {"2,2": 99}, references, ["s"], 1)
    assert other.spec == "torino-m(k=2, delta=2, order='native', budget=99)"
    names = [display_name(item) for item in find(settings, "torino-m")]
    assert names == ["TORINO-M", "TORINO_FB-M", "TORINO_FB-M(k=4, delta=3)", "torino-m(k=4, delta=3)"]


def test_seeds_of_random_specs() -> None:
    settings = fixed_settings(["random(order='native')", "random(seed=7)"], [5], [], 2)
    assert [(item.spec, item.seed) for item in settings] == [
        ("random(order='native', budget=5, seed=0)", 0),
        ("random(order='native', budget=5, seed=1)", 1),
        ("random(seed=7, budget=5)", 7),
    ]
    assert len({item.id for item in settings}) == 3


def test_specs_with_several_saes() -> None:
    settings = fixed_settings(["torino-x(mode='prune')"], [5], ["a", "b"], 1)
    assert [item.id for item in settings] == [
        "torino-x(mode='prune')@5[a]",
        "torino-x(mode='prune')@5[b]",
    ]
    for item in settings:
        assert item.reducer({"a": RawEmbedding(), "b": RawEmbedding()}) is not None


def test_spec_without_a_tier_is_refused() -> None:
    plan = RunPlan(["torino-p"], [SPEC], dynamic=[(2, 2)], fixed=[], matched=False)
    with pytest.raises(BadParameter, match=r"divprune.* has no tier to run in"):
        plan.first_settings(["s"])
    RunPlan(["torino-p"], ["torino-m(k=4, delta=3)"], dynamic=[(2, 2)], fixed=[], matched=False).first_settings(["s"])


def test_invalid_options_are_refused() -> None:
    with pytest.raises(BadParameter, match="divprune has no parameter 'spice'"):
        fixed_settings(["divprune(spice=1)"], [64], [], 1)


def test_settings_survive_json() -> None:
    settings = [FULL, *dynamic_settings(["torino-p", "torino-m"], ["s"]), *own_settings(["tome(budget=3)"], [])]
    assert [Setting.from_dict(item.to_dict() | {"later": 1}) for item in settings] == settings


def test_default_methods() -> None:
    assert "cdpruner" not in default_methods()
    assert set(default_methods(text_query=True)) > set(default_methods())
