"""Base class of all reducers and the registry: ``register``, ``make``, ``list_reducers``, ``describe``."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import getdoc
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np

from torino.core.checks import check_type, describe_value, to_grid
from torino.core.errors import BadParameter, BadTokens, unknown_name
from torino.core.plugins import load_plugins
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens, check_images

PositionMode = Literal["compact", "original", "median"]
AttentionMode = Literal["plain", "proportional", "restore"]
Order = Literal["raster", "native"]
Fidelity = Literal["released", "paper"]
Space = Literal["features", "projected"]
AutoSpace = Literal["auto", "features", "projected"]
MAX_SPEC_LENGTH = 2000  # longer arguments could exhaust the parser


class Reducer(ABC):
    """Base class of a method that reduces the visual tokens of an image.

    Subclasses are frozen dataclasses whose fields are the hyperparameters. Implement :meth:`plan`. Override
    :meth:`plan_batch` if several images can be planned at once.
    """

    name: ClassVar[str] = ""
    """Name in the registry."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Signals beyond the patches that the method reads, for example ``"cls"``, ``"cls_attention"``, ``"keys"``."""
    optional: ClassVar[frozenset[str]] = frozenset()
    """Signals that the method reads if there are any; models provide them."""
    view_needs: ClassVar[frozenset[str]] = frozenset()
    """Additional signals that :meth:`plan_views` reads."""
    shares_views: ClassVar[bool] = False
    """Whether all views of an image share one budget (see :meth:`plan_views`) instead of having one each."""
    in_tower: ClassVar[bool] = False
    """Whether the method works inside a tower (:mod:`torino.reducers.in_tower`) and ``needs`` signals of its blocks."""
    in_language_model: ClassVar[bool] = False
    """Whether the method works inside the language model (:mod:`torino.reducers.in_language_model`)."""
    on_pixels: ClassVar[bool] = False
    """Whether the method changes the image before the tower (:class:`~torino.reducers.Downsample`)."""
    always_shown: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that the spec includes even if they have their default values."""
    emits_cls: ClassVar[bool] = False
    """Whether the output includes the CLS token, which then counts towards the budget."""
    paper: ClassVar[str] = ""
    """Publication of the method."""
    merges: ClassVar[bool] = False
    """Whether output tokens are weighted sums of patches."""
    adaptive: ClassVar[bool] = False
    """Whether the number of output tokens can depend on the image."""
    takes_frames: ClassVar[bool] = False
    """Whether the method can reduce all frames of a video at once. Other methods refuse tokens of several frames."""
    for_videos: ClassVar[bool] = False
    """Whether the method is meant for videos only. Comparisons of all methods on images leave it out."""
    ablation: ClassVar[bool] = False
    """Whether the method exists only for ablations. Comparisons of all methods leave it out."""
    cost: ClassVar[str] = ""
    """Computational complexity, in the symbols of the documentation."""
    original_license: ClassVar[str] = ""
    """License of the authors' code, which is not used here."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap methods of every subclass: planning checks its argument, and hyperparameters may be numpy scalars."""
        super().__init_subclass__(**options)
        wrappers: dict[str, Callable[[Any], Any]] = {
            "plan": _with_type_check,
            "plan_batch": _with_batch_check,
            "plan_views": _with_views_check,
            "__post_init__": _with_plain_numbers,
        }
        for name, wrap in wrappers.items():
            method = cls.__dict__.get(name)
            if method is not None and not getattr(method, "__isabstractmethod__", False):
                type.__setattr__(cls, name, wrap(method))

    def __post_init__(self) -> None:
        """Check the hyperparameters; subclasses override it."""
        _use_plain_numbers(self)

    @abstractmethod
    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan the reduction of one image."""

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan several images. By default each image is planned independently."""
        return ReductionBatch.of([self.plan(tokens) for tokens in check_images(images)])

    def plan_views(
        self, base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]
    ) -> ReductionBatch:
        """Plan one image that is given as a base view and tiles. By default each view is planned independently.

        Parameters
        ----------
        base : VisualTokens
            View of the whole image.
        tiles : sequence of VisualTokens or None
            Tiles in row-major order; None for a tile that shows nothing of the image. May be empty.
        layout : (int, int)
            Rows and columns of tiles.

        Returns
        -------
        ReductionBatch
            Reduction of the base view, followed by those of the tiles that are not None. Some of them, but not all,
            may keep no token.
        """
        _check_views(base, tiles, layout)
        return self.plan_batch([base, *(tile for tile in tiles if tile is not None)])

    @property
    def position_mode(self) -> PositionMode:
        """Positions of the tokens in the prompt: consecutive (default), those of the original patches, or medians."""
        return "compact"

    @property
    def attention_mode(self) -> AttentionMode:
        """Attention to the tokens in the language model (default: plain); see :mod:`torino.vlm.attention`."""
        return "plain"

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share one budget, so that a plan depends on the batch."""
        return False

    @property
    def spec(self) -> str:
        """Name and hyperparameters in the syntax of :func:`make`. Objects such as the SAE are left out."""
        shown = [
            f"{field.name}={_format_value(getattr(self, field.name))}"
            for field in _plain_fields(self)
            if field.name in self.always_shown or getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(shown)})"

    def __repr__(self) -> str:
        """Return the spec."""
        return self.spec


def _format_value(value: object) -> str:
    # the repr of numpy floats ("np.float64(0.5)") cannot be parsed by make
    return repr(float(value)) if isinstance(value, float) else repr(value)


def _with_type_check(plan: Callable[[Any, VisualTokens], Reduction]) -> Callable[[Any, VisualTokens], Reduction]:
    @wraps(plan)
    def checked_plan(self: Any, tokens: VisualTokens) -> Reduction:
        if not isinstance(tokens, VisualTokens):  # pyright: ignore[reportUnnecessaryIsInstance]: untyped callers
            raise BadTokens(
                f"plan takes the VisualTokens of one image, got {type(tokens).__name__}. Wrap a matrix of patches as "
                "VisualTokens(patches, grid=(rows, columns)); for several images use plan_batch."
            )
        _check_frames(self, tokens)
        return plan(self, tokens)

    return checked_plan


def _check_frames(reducer: Reducer, tokens: VisualTokens) -> None:
    if tokens.frames > 1 and not reducer.takes_frames:
        raise BadTokens(
            f"{reducer.name or type(reducer).__name__} reduces images and cannot reduce a video of {tokens.frames} "
            "frames at once; choose a method for videos, or reduce each frame (torino.core.tokens.split_frames)."
        )


def _with_batch_check(plan_batch: Callable[..., ReductionBatch]) -> Callable[..., ReductionBatch]:
    @wraps(plan_batch)
    def checked_plan_batch(self: Any, images: Sequence[VisualTokens]) -> ReductionBatch:
        images = check_images(images)
        for tokens in images:
            _check_frames(self, tokens)
        return plan_batch(self, images)

    return checked_plan_batch


def _with_views_check(plan_views: Callable[..., ReductionBatch]) -> Callable[..., ReductionBatch]:
    @wraps(plan_views)
    def checked_plan_views(
        self: Any, base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]
    ) -> ReductionBatch:
        _check_views(base, tiles, layout)
        return plan_views(self, base, tiles, layout)

    return checked_plan_views


def _check_views(base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]) -> None:
    check_type("base", base, VisualTokens, "the VisualTokens of the whole image")
    check_type("tiles", tiles, (list, tuple), "a list of VisualTokens, with None for an empty tile")
    for tile in tiles:
        check_type("tiles", tile, (VisualTokens, type(None)), "a list of VisualTokens, with None for an empty tile")
    to_grid(layout, BadParameter, "layout")


def _with_plain_numbers(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(post_init)
    def plain_post_init(self: Any) -> None:
        _use_plain_numbers(self)
        post_init(self)

    return plain_post_init


def _use_plain_numbers(reducer: Reducer) -> None:
    """Replace numpy scalars among the hyperparameters by Python's: a spec could not be parsed otherwise."""
    for field in _fields(reducer):
        value = getattr(reducer, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(reducer, field.name, value.item())


ReducerClass = TypeVar("ReducerClass", bound=type[Reducer])
_registry: dict[str, type[Reducer]] = {}


def register(name: str) -> Callable[[ReducerClass], ReducerClass]:
    """Return a class decorator that registers a reducer under a unique name."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadParameter(f"The name of a reducer has letters, digits, '.', '_' and '-', got {describe_value(name)}.")

    def add(cls: ReducerClass) -> ReducerClass:
        if not isinstance(cls, type) or not issubclass(cls, Reducer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadParameter(f"register decorates a subclass of Reducer, got {describe_value(cls)}.")
        known = _registry.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise BadParameter(f"The reducer name {name!r} is already registered by {known.__qualname__}.")
        cls.name = name
        type.__setattr__(cls, "__repr__", Reducer.__repr__)  # the repr of a dataclass would include the whole SAE
        _registry[name] = cls
        return cls

    return add


def list_reducers() -> list[str]:
    """Return the names of all registered reducers, sorted; packages add theirs through ``torino.reducers``."""
    load_plugins("torino.reducers")
    return sorted(_registry)


def get(name: str) -> type[Reducer]:
    """Return the class of a registered reducer."""
    check_type("The reducer", name, str, "a name such as 'torino-m'")
    if name not in _registry and name not in list_reducers():
        raise unknown_name("reducer", name, list_reducers(), "torino list")
    return _registry[name]


def make(spec: str, **parameters: Any) -> Reducer:
    """Build a reducer from a name or spec. Keyword arguments are added to the spec and override it.

    Examples
    --------
    >>> from torino import RawEmbedding
    >>> make("torino-m(k=3, delta=2)", sae=RawEmbedding())
    torino-m(k=3, delta=2)
    >>> make("divprune(budget=64)+fastv(budget=32)")
    divprune(budget=64)+fastv(budget=32)
    """
    check_type("The reducer", spec, str, "a name or spec such as 'torino-m' or 'torino-m(k=3)'")
    if len(parts := split_spec(spec)) > 1:
        return _make_composed(parts, parameters)
    name, values = parse_spec(spec)
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
            option = f" or --{field.name}" if field.name in ("budget", "sae") else ""
            raise BadParameter(f"{name} needs {field.name}{hint}. Give {field.name}=...{option}.")
    return cls(**values)


def _make_composed(parts: Sequence[str], parameters: Mapping[str, Any]) -> Reducer:
    from torino.reducers.composed import Composed, before_error  # which is built on this module

    if len(parts) > 2:
        raise BadParameter(
            f"At most two methods can be joined by +, one before and one inside the language model, got {len(parts)}."
        )
    if "budget" in parameters:
        raise BadParameter(
            f"A budget for {'+'.join(parts)} would be ambiguous. Write one for each method, such as "
            "torino-x(budget=64)+fastv(budget=32)."
        )
    if not get(parse_spec(parts[1])[0]).in_language_model:
        raise before_error(*parts)
    return Composed(make(parts[0], **parameters), make(parts[1]))


def split_spec(spec: str) -> list[str]:
    """Split the spec of joined methods at ``+``; a ``+`` inside brackets does not count.

    Examples
    --------
    >>> split_spec("torino-x(budget=64) + fastv(budget=32)"), split_spec("torino-x(threshold=1e+1)")
    (['torino-x(budget=64)', 'fastv(budget=32)'], ['torino-x(threshold=1e+1)'])
    """
    return [part.strip() for part in re.split(r"\+(?![^()]*\))", spec)]


def method_name(spec: str) -> str:
    """Return the name of a method that is given by name or spec; of joined methods, that of the first.

    Examples
    --------
    >>> method_name("torino-m(k=2, delta=1)"), method_name("torino-x+fastv(budget=32)")
    ('torino-m', 'torino-x')
    """
    return split_spec(spec)[0].partition("(")[0].strip()


def describe(name: str) -> dict[str, str]:
    """Return a summary of a registered reducer, one line of text per entry."""
    cls = get(name)
    with_default = [field for field in _fields(cls) if field.default is not MISSING]
    reads_concepts = any(field.name == "sae" for field in _fields(cls))
    return {
        "name": name,
        "summary": (getdoc(cls) or "").split("\n")[0],
        "parameters": ", ".join(f"{field.name}={field.default!r}" for field in with_default),
        "needs": ", ".join(
            [*(["concepts"] if reads_concepts else []), *sorted(cls.needs)]
            or ["the language model" if cls.in_language_model else "the image" if cls.on_pixels else "patches only"]
        )
        + (", in every block" if cls.in_tower and not cls.on_pixels else ""),
        "length": "adaptive or fixed" if cls.adaptive else "fixed",
        "output": "merges" if cls.merges else "prunes",
        "cost": cls.cost,
        "paper": cls.paper,
        "original_license": cls.original_license,
    }


def _fields(cls: object) -> tuple[Field[Any], ...]:
    return fields(cast(Any, cls)) if is_dataclass(cls) else ()


def _plain_fields(reducer: Reducer) -> list[Field[Any]]:
    plain = (bool, int, float, str, type(None))
    return [field for field in _fields(reducer) if isinstance(getattr(reducer, field.name), plain)]


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a spec.

    Examples
    --------
    >>> parse_spec("torino-m(k=3, delta=2)")
    ('torino-m', {'k': 3, 'delta': 2})
    """
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", spec, re.DOTALL)
    if not match:
        raise BadParameter(f"Cannot read the reducer {spec!r}. Write a name, or name(k=2, delta=2).")
    name, arguments = match.group(1), match.group(2) or ""
    try:
        if len(arguments) > MAX_SPEC_LENGTH:
            raise ValueError(f"the arguments have {len(arguments)} characters, at most {MAX_SPEC_LENGTH} are allowed")
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):  # more than one pair of parentheses
            raise ValueError("only name=value pairs are allowed")
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("only name=value pairs are allowed")
        values: Mapping[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        if len(values) < len(call.keywords):
            raise ValueError("a parameter is given twice")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BadParameter(
            f"Cannot read the parameters of {spec[:80]!r} ({error}). Write name(k=2, delta=2)."
        ) from error
    return name, dict(values)
