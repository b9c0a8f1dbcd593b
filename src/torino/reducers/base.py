"""What every reducer is, and the registry: ``register``, ``make``, ``names``."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import getdoc
from typing import Any, ClassVar, Literal, TypeVar, cast

from torino.core.errors import BadParameter, BadTokens, unknown_name
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens

PositionMode = Literal["compact", "original"]


class Reducer(ABC):
    """A method that reduces the visual tokens of an image: a frozen dataclass of its hyperparameters.

    Write :meth:`plan`. Override :meth:`plan_batch` where all images can be planned at once.
    """

    name: ClassVar[str] = ""
    """Its name in the registry."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Signals beyond the patches that it reads: ``"cls"``, ``"cls_attention"``, ``"keys"``."""
    view_needs: ClassVar[frozenset[str]] = frozenset()
    """Further signals that :meth:`plan_views` reads."""
    shares_views: ClassVar[bool] = False
    """Whether its budget is one for all views of an image, which :meth:`plan_views` shares out, not one for each."""
    inside: ClassVar[bool] = False
    """Whether it works inside a tower and ``needs`` signals of its blocks, see :mod:`torino.reducers.in_tower`."""
    always_shown: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that its spec list_reducers even at their defaults."""
    emits_cls: ClassVar[bool] = False
    """Whether the CLS token is among its output, and so counts in its budget."""
    paper: ClassVar[str] = ""
    """Where the method comes from."""
    merges: ClassVar[bool] = False
    """Whether its output tokens are sums of patches."""
    adaptive: ClassVar[bool] = False
    """Whether it can let the image decide how many tokens stay."""
    ablation: ClassVar[bool] = False
    """Whether it is there to take another method apart, and stays out of comparisons of all."""
    cost: ClassVar[str] = ""
    """How its work grows, with the letters of docs/notation.md."""
    original_licence: ClassVar[str] = ""
    """Licence of the authors' own code, which is not used here."""

    def __init_subclass__(cls, **options: Any) -> None:
        """See that plans are asked for of tokens, whoever writes the method."""
        super().__init_subclass__(**options)
        plan = cls.__dict__.get("plan")
        if plan is not None and not getattr(plan, "__isabstractmethod__", False):
            type.__setattr__(cls, "plan", _of_tokens(plan))

    @abstractmethod
    def plan(self, tokens: VisualTokens) -> Reduction:
        """Decide what becomes of the tokens of one image."""

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Decide for several images; each is planned as if it were alone."""
        return ReductionBatch.of([self.plan(tokens) for tokens in images])

    def plan_views(
        self, base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]
    ) -> ReductionBatch:
        """Decide for one image that is seen whole and in tiles; by default each view is an image of its own.

        Parameters
        ----------
        base : VisualTokens
            The view of the whole image.
        tiles : sequence of VisualTokens or None
            Tiles row by row; None for one that shows nothing of the image. May be empty.
        layout : (int, int)
            Rows and columns of tiles.

        Returns
        -------
        ReductionBatch
            The reduction of the base view, then those of the tiles that there are; any but all may keep no token.
        """
        return self.plan_batch([base, *(tile for tile in tiles if tile is not None)])

    @property
    def position_mode(self) -> PositionMode:
        """How its tokens are numbered in the prompt: anew, as most methods do it, or by the places they had."""
        return "compact"

    @property
    def proportional_attention(self) -> bool:
        """Whether its tokens are attended to as all the patches they stand for: not so, as most methods have it."""
        return False

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share one budget, so that a plan depends on its neighbours."""
        return False

    @property
    def spec(self) -> str:
        """Name and hyperparameters as text that :func:`make` reads back; objects such as the SAE are left out."""
        shown = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in _plain_fields(self)
            if field.name in self.always_shown or getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(shown)})"

    def __repr__(self) -> str:
        """Return the spec."""
        return self.spec


def _text(value: object) -> str:
    # numpy's floats have a spelling of their own, which make does not read
    return repr(float(value)) if isinstance(value, float) else repr(value)


def _of_tokens(plan: Callable[[Any, VisualTokens], Reduction]) -> Callable[[Any, VisualTokens], Reduction]:
    @wraps(plan)
    def checked(self: Any, tokens: VisualTokens) -> Reduction:
        if not isinstance(tokens, VisualTokens):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check
            raise BadTokens(
                f"plan takes the VisualTokens of one image, got {type(tokens).__name__}. Of a matrix of patches make "
                "them with VisualTokens(patches, grid=(rows, columns)); for several images there is plan_batch."
            )
        return plan(self, tokens)

    return checked


Class = TypeVar("Class", bound=type[Reducer])
_registry: dict[str, type[Reducer]] = {}


def register(name: str) -> Callable[[Class], Class]:
    """Give a reducer class its name. A name can be taken once."""

    def add(cls: Class) -> Class:
        known = _registry.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise BadParameter(f"A reducer called {name!r} is registered already: {_registry[name].__qualname__}.")
        cls.name = name
        type.__setattr__(cls, "__repr__", Reducer.__repr__)  # a dataclass writes its own, with the whole SAE in it
        _registry[name] = cls
        return cls

    return add


def list_reducers() -> list[str]:
    """Names of all registered reducers, sorted."""
    return sorted(_registry)


def get(name: str) -> type[Reducer]:
    """Return the class of a registered name."""
    if name not in _registry:
        raise unknown_name("reducer", name, list_reducers())
    return _registry[name]


def make(spec: str, **parameters: Any) -> Reducer:
    """Build a reducer from its name or spec; keyword arguments add to the spec and overrule it.

    Examples
    --------
    >>> from torino import RawEmbedding
    >>> make("torino-m(k=3, delta=2)", sae=RawEmbedding())
    torino-m(k=3, delta=2)
    """
    name, values = _parse(spec)
    cls = get(name)
    values |= parameters
    accepted = [field.name for field in _fields(cls) if field.init]
    for given in values:
        if given not in accepted:
            raise BadParameter(f"{name} has no parameter {given!r}. It takes {', '.join(accepted)}.")
    for field in _fields(cls):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in values:
            hint = ": an SAE (SAE.load(...)) or RawEmbedding()" if field.name == "sae" else ""
            raise BadParameter(f"{name} needs {field.name}{hint}. Give it as make({name!r}, {field.name}=...).")
    return cls(**values)


def describe(name: str) -> dict[str, str]:
    """One line about a registered reducer, for lists: its summary, hyperparameters and needs."""
    cls = get(name)
    plain = [field for field in _fields(cls) if field.default is not MISSING]
    return {
        "name": name,
        "summary": (getdoc(cls) or "").split("\n")[0],
        "parameters": ", ".join(f"{field.name}={field.default!r}" for field in plain),
        "needs": (", ".join(sorted(cls.needs)) or "patches only") + (", in every block" if cls.inside else ""),
        "length": "adaptive or fixed" if cls.adaptive else "fixed",
        "output": "merges" if cls.merges else "prunes",
        "cost": cls.cost,
        "paper": cls.paper,
        "original_licence": cls.original_licence,
    }


def _fields(cls: object) -> tuple[Field[Any], ...]:
    return fields(cast(Any, cls)) if is_dataclass(cls) else ()


def _plain_fields(reducer: Reducer) -> list[Field[Any]]:
    plain = (bool, int, float, str, type(None))
    return [field for field in _fields(reducer) if isinstance(getattr(reducer, field.name), plain)]


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", spec, re.DOTALL)
    if not match:
        raise BadParameter(f"Cannot read the reducer {spec!r}. Write a name, or name(k=2, delta=2).")
    name, arguments = match.group(1), match.group(2) or ""
    try:
        if len(arguments) > 2000:
            raise ValueError(f"{len(arguments)} characters are too many")
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):  # more than one pair of brackets
            raise ValueError("only name=value pairs are read")
        if call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("only name=value pairs are read")
        values: Mapping[str, Any] = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        if len(values) < len(call.keywords):
            raise ValueError("a parameter is given twice")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BadParameter(
            f"Cannot read the parameters of {spec[:80]!r} ({error}). Write name(k=2, delta=2)."
        ) from error
    return name, dict(values)
