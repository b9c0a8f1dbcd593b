"""Reduce before the language model with one method and inside it with another."""

from __future__ import annotations

from dataclasses import dataclass

from torino.core.checks import check_type
from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers.base import AttentionMode, PositionMode, Reducer
from torino.reducers.in_language_model import InLanguageModelReducer, as_in_language_model, inside_error


@dataclass(frozen=True, repr=False)
class Composed(Reducer):
    """Reduce with ``first`` before the language model, and its output with ``inside`` in the language model.

    Written ``torino-x(budget=64)+fastv(budget=32)`` in :func:`torino.make`. The reductions of an answer are
    compositions: the sources of each token are patches of the image.

    Parameters
    ----------
    first : Reducer
        Any method that works before the language model.
    inside : Reducer
        A method that works inside the language model, such as ``fastv``.
    """

    first: Reducer
    inside: Reducer
    name = "composed"

    def __post_init__(self) -> None:
        """Check that the two methods work in this order."""
        check_type("first", self.first, Reducer, "a reducer that works before the language model")
        check_type("inside", self.inside, Reducer, "a reducer that works inside the language model, such as fastv")
        if split_reducer(self.first)[1] is not None:
            raise BadParameter(
                f"{self.first.spec} already works inside the language model, so {self.inside.spec} cannot follow it. "
                "Write a method that works before it first, such as torino-x(budget=64)+fastv(budget=32)."
            )
        if not self.inside.in_language_model:
            raise before_error(self.first.spec, self.inside.spec)

    @property
    def spec(self) -> str:
        """Both specs, joined by ``+``."""
        return f"{self.first.spec}+{self.inside.spec}"

    @property
    def budget(self) -> int | None:
        """Exact number of tokens after the last stage; None if it is a share."""
        return getattr(self.inside, "budget", None)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Signals of the tower that the first method reads."""
        return self.first.needs

    @property
    def optional(self) -> frozenset[str]:  # type: ignore[override]
        """Signals of the tower that the first method reads if there are any."""
        return self.first.optional

    @property
    def takes_frames(self) -> bool:  # type: ignore[override]
        """Whether the first method can reduce videos; methods inside the language model can."""
        return self.first.takes_frames

    @property
    def position_mode(self) -> PositionMode:
        """Position mode of the first method; tokens keep their positions inside the language model."""
        return self.first.position_mode

    @property
    def attention_mode(self) -> AttentionMode:
        """Attention of the first method."""
        return self.first.attention_mode

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share one budget of the first method."""
        return self.first.shares_batch

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Raise MissingSignal: the second method reads the language model."""
        raise inside_error(self.spec)


def before_error(first: str, second: str) -> BadParameter:
    """Return the error for a second method that does not work inside the language model."""
    return BadParameter(
        f"{second} works before the language model, so it cannot follow {first}. After + write a method that works "
        "inside it: fastv, pyramiddrop or dart."
    )


def split_reducer(reducer: Reducer) -> tuple[Reducer | None, InLanguageModelReducer | None]:
    """Return the method that works before the language model and the one that works inside it, if there are any."""
    if isinstance(reducer, Composed):
        return reducer.first, as_in_language_model(reducer.inside)
    inside = as_in_language_model(reducer)
    return (reducer, None) if inside is None else (None, inside)
