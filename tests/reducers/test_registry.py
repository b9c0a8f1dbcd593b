"""The registry: names, specs, invalid and malicious specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torino import RawEmbedding, Reducer, Reduction, VisualTokens, list_reducers, make, register
from torino.core.errors import BadParameter, BadTokens, UnknownName, unknown_name
from torino.reducers import TorinoMerge, TorinoPrune, base, describe, get


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Reducer]]:
    """A temporary copy of the registry."""
    copy = dict(base._registry)
    monkeypatch.setattr(base, "_registry", copy)
    return copy


def first_patch() -> type[Reducer]:
    @dataclass(frozen=True)
    class FirstPatch(Reducer):
        """Keep the first patch."""

        share: float = 0.5
        label: str = "it's"
        flag: bool = False

        def plan(self, tokens: VisualTokens) -> Reduction:
            return Reduction.pick(torch.tensor([0]), tokens.grid, self.spec)

    return FirstPatch


# ---------------------------------------------------------------------- names


def test_list_reducers() -> None:
    assert {"torino-p", "torino-m"} <= set(list_reducers())
    assert list_reducers() == sorted(list_reducers())


def test_plan_checks_the_type_of_its_argument() -> None:
    for wrong in (torch.zeros(4, 8), [torch.zeros(4, 8)], None):
        with pytest.raises(BadTokens, match=r"got (Tensor|list|NoneType)\. Wrap a matrix of patches as VisualTokens"):
            make("random", budget=2).plan(wrong)  # type: ignore[arg-type]
    assert get("torino-p") is TorinoPrune
    assert get("torino-m") is TorinoMerge
    assert type(make("torino-m", sae=RawEmbedding())) is TorinoMerge


@pytest.mark.parametrize(("name", "near"), [("torino", "torino-p"), ("torino-y", "torino-x"), ("torinop", "torino-p")])
def test_similar_names_are_suggested(name: str, near: str) -> None:
    for call in (lambda: make(name), lambda: get(name), lambda: describe(name)):
        with pytest.raises(UnknownName, match=f"No reducer is called '{name}'. Did you mean .*'{near}'"):
            call()


def test_without_similar_names_all_are_listed_or_the_command_is() -> None:
    with pytest.raises(UnknownName, match=r"No reducer is called 'zzz'. Run 'torino list' to see all names.$"):
        make("zzz")
    assert "Known: alpha, beta. Run 'list'" in str(unknown_name("method", "zzz", ["alpha", "beta"], "list"))
    assert "Known: none" in str(unknown_name("method", "a", []))
    assert issubclass(UnknownName, ValueError)


# ---------------------------------------------------------------------- parameters


def test_unknown_parameter_raises() -> None:
    for call in (
        lambda: make("torino-p", sae=RawEmbedding(), threshold=3),
        lambda: make("torino-p(threshold=3)", sae=RawEmbedding()),
    ):
        with pytest.raises(
            BadParameter, match=r"torino-p has no parameter 'threshold'. It takes sae, k, delta, budget"
        ):
            call()
    with pytest.raises(BadParameter, match="has no parameter 'scale'"):
        make("torino-p(scale='log')", sae=RawEmbedding())  # only merging has a scale


def test_missing_sae_raises() -> None:
    with pytest.raises(BadParameter, match=r"torino-m needs sae: an SAE .*RawEmbedding\(\)\. Give sae=\.\.\. or --sae"):
        make("torino-m(k=2)")


def test_keyword_arguments_override_the_spec() -> None:
    made = make("torino-m(k=3, delta=1)", sae=RawEmbedding(), delta=2, budget=9)
    assert (made.k, made.delta, made.budget) == (3, 2, 9)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    [
        "torino-m(k=3,delta=2)",
        " torino-m ( k = 3 , delta=2 ) ",
        "torino-m(\n  k=3,\n  delta=2,\n)",
        "torino-m(delta=2, k=3)",
        "torino-m(k=0x3, delta=+2)",
    ],
)
def test_spec_may_contain_whitespace(text: str) -> None:
    made = make(text, sae=RawEmbedding())
    assert made.spec == "torino-m(k=3, delta=2)"


@pytest.mark.parametrize("text", ["torino-m", "torino-m()", "torino-m(budget=None)"])
def test_name_without_parameters_uses_the_defaults(text: str) -> None:
    assert make(text, sae=RawEmbedding()).spec == "torino-m(k=2, delta=2)"


SPRUNG: list[str] = []


@pytest.mark.parametrize(
    "text",
    [
        "torino-m(k=__import__('os').getpid())",
        "torino-m(k=__import__('os'))",
        "torino-m(k=__import__('test_registry').SPRUNG.append('x'))",
        "torino-m(k=(lambda: 2)())",
        "torino-m(k=[i for i in (1, 2)][0])",
        "torino-m(k=1+1 if True else 3)",
        "torino-m(k=open)",
        "torino-m(k=f'{2}')",
        "torino-m(**{'k': 2})",
        "torino-m(*[1])",
        "torino-m(3)",
        "torino-m(k)",
        "torino-m(k:=3)",
        "torino-m(k=2; delta=2)",
        "torino-m(k=2",
        "torino-m k=2)",
        "torino-m(k=)",
        "torino-m(k=2))",
        "torino-m((k=2)",
        "torino-m(k=2) or f(k=3)",
        "torino-m(k=2)(delta=1)",
        "torino-m(k=5, delta=1).__class__(delta=1)",
        "torino-m(k=2)[0](k=3)",
        "torino-m(k=2, k=3)",
        "torino-m(k=2 # comment)",
        "torino-m(k=2\0)",
        "torino-m(k='a)",
        "torino m",
        "torino-m; import os",
        "",
        "()",
        "(k=2)",
    ],
)
def test_invalid_spec_raises_and_is_never_executed(text: str) -> None:
    with pytest.raises(BadParameter, match="Cannot read the"):
        make(text, sae=RawEmbedding())
    assert not SPRUNG


@pytest.mark.parametrize(
    "text", ["-" * 5000 + "1", "[" * 5000 + "]" * 5000, "(" * 5000 + "1" + ")" * 5000, "9" * 10000]
)
def test_spec_that_exhausts_the_parser_raises(text: str) -> None:
    with pytest.raises(BadParameter):
        make(f"torino-m(k={text})", sae=RawEmbedding())


@pytest.mark.parametrize("value", ["'2'", "2.0", "[2]", "{}", "True", "None", "b'2'", "1j"])
def test_values_of_wrong_type_raise(value: str) -> None:
    with pytest.raises(BadParameter, match="k must be a whole number of at least 1, got"):
        make(f"torino-m(k={value})", sae=RawEmbedding())


# ---------------------------------------------------------------------- registration


def test_register_a_new_reducer(registry: dict[str, type[Reducer]]) -> None:
    cls = first_patch()
    assert register("first-patch")(cls) is cls
    assert "first-patch" in list_reducers()
    made = make("first-patch(share=0.25)")
    assert (made.name, made.spec) == ("first-patch", "first-patch(share=0.25)")
    assert repr(make("first-patch")) == "first-patch()"
    plan = make(made.spec).plan(VisualTokens.of(torch.eye(4)))
    assert plan.by == made.spec
    batch = made.plan_batch([VisualTokens.of(torch.eye(4)), VisualTokens.of(torch.eye(9))])
    assert batch.lengths.tolist() == [1, 1]
    about = describe("first-patch")
    assert about["summary"] == "Keep the first patch."
    assert about["needs"] == "patches only"
    assert "share=0.5" in about["parameters"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"label": "quotes \" and ' and (brackets), k=3"},
        {"label": "new\nline"},
        {"label": "größe \\ 尺"},
        {"share": 1e-17},
        {"share": -0.1},
        {"flag": True, "share": 3.0},
    ],
)
def test_plain_parameters_round_trip_through_the_spec(
    registry: dict[str, type[Reducer]], parameters: dict[str, Any]
) -> None:
    register("first-patch")(first_patch())
    made = make("first-patch", **parameters)
    assert make(made.spec) == made


def test_name_can_be_registered_once(registry: dict[str, type[Reducer]]) -> None:
    class Other(Reducer):
        def plan(self, tokens: VisualTokens) -> Reduction:
            return Reduction.identity(tokens.grid)

    with pytest.raises(BadParameter, match="'torino-p' is already registered by TorinoPrune"):
        register("torino-p")(Other)
    assert get("torino-p") is TorinoPrune
    assert TorinoPrune.name == "torino-p"
    assert Other.name == ""  # the refused class is not half registered


def test_same_class_can_be_registered_again(registry: dict[str, type[Reducer]]) -> None:
    """Notebooks may load a module more than once."""
    register("first-patch")(first_patch())
    again = first_patch()
    register("first-patch")(again)
    assert get("first-patch") is again


def test_reducer_without_plan_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Reducer()  # type: ignore[abstract]


def test_describe() -> None:
    about = describe("torino-m")
    assert about["name"] == "torino-m"
    assert "Merge each concept group" in about["summary"]
    for words in ("k=2", "delta=2", "budget=None", "scale='log'"):
        assert words in about["parameters"]
    assert "sae" not in about["parameters"]
