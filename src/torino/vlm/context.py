"""Reduce the visual tokens of a Hugging Face model inside a ``with`` block."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from torino.core.checks import check_type
from torino.core.errors import BadParameter
from torino.reducers import AttentionMode, PositionMode, Reducer
from torino.vlm.adapters.base import Adapter, Positions, adapter_for, position_choice
from torino.vlm.attention import Attention, AttentionBias, attention_bias, attention_mode, make_bias
from torino.vlm.generate import GenerateCall, run_generate
from torino.vlm.insertion import Side
from torino.vlm.inside import InsideRun, is_uneven
from torino.vlm.text_query import ClipText, TextQuery, WordText
from torino.vlm.trace import ReducedCall, Trace

_Prepared = tuple[dict[str, Any], AttentionBias | None, ReducedCall]


@dataclass(frozen=True)
class ActiveReduction:
    """How a model is being reduced, and the trace of it."""

    reducer: Reducer
    adapter: Adapter
    trace: Trace
    positions: PositionMode = "compact"
    text_query: TextQuery | None = None
    attention: AttentionMode = "plain"
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the block ends; tasks that outlive it continue with the stock model."""

    @functools.cached_property
    def reduce(self) -> Callable[[Mapping[str, Any], Side | None], _Prepared]:
        """A function that reduces inputs and records the call; it returns the new inputs and their attention bias.

        It is hidden from compilers, which cannot follow hooks.
        """

        def reduce(inputs: Mapping[str, Any], side: Side | None) -> _Prepared:
            reduced_inputs, call = self.adapter.reduce_inputs(
                inputs, self.reducer, self.positions, side=side, text_query=self.text_query
            )
            self.trace.add(call)
            bias = make_bias(self.attention, self.adapter, reduced_inputs, call.sizes, call.patches)
            return reduced_inputs, bias, call

        return cast(Any, torch.compiler.disable(reduce))

    def inside(self, call: ReducedCall) -> Callable[[Mapping[str, Any], AttentionBias | None], InsideRun] | None:
        """Return a function that creates the run inside the language model, if the reducer works there."""
        if not call.inside:
            return None
        return lambda inputs, bias: InsideRun(self.adapter, inputs, call.inside, call.after, bias)

    def finish(self, call: ReducedCall, run: InsideRun | None) -> None:
        """Complete the record of a call with what happened inside the language model."""
        if run is None:
            return
        plans = tuple(run.finish(number, plan, self.reducer.spec) for number, plan in enumerate(call.reductions))
        saved = call.bytes_saved + self.adapter.cache_bytes(run.removed_tokens()) // len(run.layers)
        self.trace.replace(call, replace(call, reductions=plans, bytes_saved=saved))


# The reduction that a thread or task uses for each model: a thread inside its own `with` never sees another's.
_current_reductions: ContextVar[Mapping[int, ActiveReduction] | None] = ContextVar("torino_reductions", default=None)
_lock = threading.RLock()
_ATTRIBUTE = "_torino_wrapper"


@contextmanager
def reduced(
    model: nn.Module,
    reducer: Reducer,
    *,
    positions: Positions = "auto",
    attention: Attention = "auto",
    text_query: ClipText | WordText | TextQuery | None = None,
) -> Generator[Trace]:
    """Reduce a model's visual tokens inside the block; afterwards the model is unchanged.

    ``generate`` and ``forward`` of this model object take the same inputs as before.

    ``generate`` returns the caller's full prompt before the answer, so ``out[:, inputs.input_ids.shape[1]:]`` is still
    the answer. ``max_length``, ``min_length``, stopping criteria, logits processors and streamers refer to the full
    prompt too. Scores, hidden states and caches are those of the reduced prompt. A right-padded prompt is padded on
    the left before generation; stock models only warn about it.

    ``forward`` returns logits (and a loss, if ``labels`` are given: they are reduced too) of the reduced prompt,
    padded on the side that was padded. To write your own decoding loop, or to continue from a cache over several
    turns, use :class:`ReducingProcessor`, whose prompts already have the reduced length.

    Other threads are not affected. To reduce in another thread too, enter ``with`` there, run the thread in
    ``contextvars.copy_context()``, or use :func:`apply`. A copy or pickle of the model is not reduced.

    Parameters
    ----------
    model : a Hugging Face vision-language model
    reducer : Reducer
    positions : {"auto", "compact", "original", "median"}
        Renumber the remaining tokens (compact), keep their positions in the full prompt (original), or keep them and
        move each merged token to the median position of its patches (median); auto follows the reducer.
    attention : {"auto", "plain", "proportional", "restore"}
        Unchanged attention, proportional attention, or attention calibrated by size and distance as in RESTORE; see
        :mod:`torino.vlm.attention`. Auto follows the reducer where the model supports it. It lasts for a whole
        ``generate`` call; in your own decoding loop, only for the call that has the images.
    text_query : ClipText, WordText or TextQuery, optional
        Reads the question, for reducers that choose patches by it: see :meth:`ClipText.query`. A CLIP reads it for
        ``cdpruner``, the language model's own embeddings (``WordText``) for ``mmtok``.

    Yields
    ------
    Trace
        The Reduction of every image, with counts and times.
    """
    active = active_reduction(model, reducer, positions, text_query, attention)
    token = _current_reductions.set({**(_current_reductions.get() or {}), id(model): active})
    _install(model)
    try:
        yield active.trace
    finally:
        active.ended.set()
        active.adapter.close()
        _uninstall(model)
        # A generator may be closed from another context, where the token is invalid; the event has ended it then.
        with suppress(ValueError):
            _current_reductions.reset(token)


def apply(
    model: nn.Module,
    reducer: Reducer,
    *,
    positions: Positions = "auto",
    attention: Attention = "auto",
    text_query: ClipText | WordText | TextQuery | None = None,
) -> Trace:
    """Reduce a model's visual tokens in all threads until :func:`remove`. Prefer :func:`reduced` where it fits."""
    active = active_reduction(model, reducer, positions, text_query, attention)
    with _lock:
        wrapper = _wrapper(model)
        if wrapper is None or wrapper.everywhere is None:
            wrapper = _install(model)
        wrapper.everywhere = active
    return active.trace


def remove(model: nn.Module) -> None:
    """Undo :func:`apply`."""
    check_type("model", model, nn.Module, "the model that was given to apply()")
    with _lock:
        wrapper = _wrapper(model)
        if wrapper is not None and wrapper.everywhere is not None:
            wrapper.everywhere.adapter.close()
            wrapper.everywhere = None
            _uninstall(model)


def active_reduction(
    model: nn.Module,
    reducer: Reducer,
    positions: Positions,
    text_query: ClipText | WordText | TextQuery | None,
    attention: Attention,
) -> ActiveReduction:
    """Validate and resolve the options of a reduction."""
    if not isinstance(reducer, Reducer):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not type-check
        raise BadParameter(
            f"reducer must be a Reducer, such as torino.make('torino-m', sae=...), got {type(reducer).__name__}."
        )
    kinds = (ClipText, WordText, TextQuery, type(None))
    check_type("text_query", text_query, kinds, "a ClipText, a WordText, or its query(...)")
    if isinstance(text_query, ClipText | WordText):
        text_query = text_query.query()
    adapter = adapter_for(model)
    mode = position_choice(positions, reducer)
    active = ActiveReduction(reducer, adapter, Trace(), mode, text_query, attention_mode(attention, reducer, adapter))
    _ = active.reduce  # created here, before anything is compiled
    return active


# ---------------------------------------------------------------------- wrapped methods


class _WrappedMethod:
    """A method of a model, wrapped. It copies and pickles as the original, so a copy of the model is not reduced."""

    def __init__(self, model: nn.Module, stock: Callable[..., Any], run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stock)  # transformers inspects its signature
        self.model, self.stock, self.run = model, stock, run

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run reduced if a reduction is active in this thread, otherwise run the original."""
        # A compiler that traces this call cannot follow a context variable; a step without pixels does not need it.
        if torch.compiler.is_compiling() and not arguments and not any("pixel" in name for name in named):
            return self.stock(**named)
        active = _current(self.model)
        if active is None:
            return self.stock(*arguments, **named)
        return self.run(active, self.stock, self._by_name(arguments, named))

    def _by_name(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        if not arguments:
            return named
        parameters = inspect.signature(self.stock).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][: len(arguments)]
        if len(names) < len(arguments) or set(names) & set(named):
            raise BadParameter(
                f"{self.stock.__name__} got {len(arguments)} positional arguments, which stand for "
                f"{', '.join(names) or 'none'}, and the named arguments {', '.join(named) or 'none'}. Pass each "
                "argument once, by name."
            )
        return dict(zip(names, arguments, strict=True)) | named

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.stock, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.stock,)


class _Wrapper:
    """The wrapped methods of a model, their users, and what was there before; stored in the model's ``__dict__``."""

    def __init__(self, model: nn.Module) -> None:
        self.users = 0
        self.everywhere: ActiveReduction | None = None
        runs = {"generate": _generate, "forward": _forward}
        self.methods = {
            name: _WrappedMethod(model, getattr(model, name), run) for name, run in runs.items() if hasattr(model, name)
        }
        self.before = {name: model.__dict__[name] for name in self.methods if name in model.__dict__}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model has no users yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (None,)


def _identity(value: Any) -> Any:
    return value


def _wrapper(model: nn.Module) -> _Wrapper | None:
    return model.__dict__.get(_ATTRIBUTE)


def _current(model: nn.Module) -> ActiveReduction | None:
    active = (_current_reductions.get() or {}).get(id(model))
    if active is not None and not active.ended.is_set():
        return active
    wrapper = _wrapper(model)
    return None if wrapper is None else wrapper.everywhere


def _install(model: nn.Module) -> _Wrapper:
    """Wrap the model's ``generate`` and ``forward``, once for all users."""
    with _lock:
        wrapper = _wrapper(model)
        if wrapper is None:
            wrapper = _Wrapper(model)
            # An instance attribute hides the method of the class; deleting it restores the method.
            for name, method in {_ATTRIBUTE: wrapper, **wrapper.methods}.items():
                object.__setattr__(model, name, method)
        wrapper.users += 1
        return wrapper


def _uninstall(model: nn.Module) -> None:
    with _lock:
        wrapper = _wrapper(model)
        if wrapper is None:
            return
        wrapper.users -= 1
        if wrapper.users:
            return
        del model.__dict__[_ATTRIBUTE]
        for name, method in wrapper.methods.items():
            if model.__dict__.get(name) is not method:
                continue  # someone else has wrapped it since; ours passes every call on from now on
            if name in wrapper.before:
                object.__setattr__(model, name, wrapper.before[name])
            else:
                del model.__dict__[name]


def _generate(active: ActiveReduction, stock: Callable[..., Any], named: dict[str, Any]) -> Any:
    """Generate from the reduced prompt and return the caller's full prompt before the answer."""
    if named.get("inputs") is not None and named.get("input_ids") is None:
        named["input_ids"] = named.pop("inputs")
    _check_cache(active.adapter, named)
    if named.get("inputs") is not None or not active.adapter.has_images(named):
        return stock(**named)
    call = GenerateCall(active.adapter.model, named)
    call.check()
    with torch.no_grad():
        inputs, bias, record = active.reduce(call.inputs, "left")
    call.check_inside(record.inside)
    output, run = run_generate(call, stock, inputs, bias, active.positions, inside=active.inside(record))
    active.finish(record, run)
    return output


def _forward(active: ActiveReduction, stock: Callable[..., Any], named: dict[str, Any]) -> Any:
    """Run ``forward`` on the reduced prompt."""
    if not active.adapter.has_images(named):
        _check_even(named.get("past_key_values"))
        return stock(**named)
    _check_cache(active.adapter, named)
    inputs, bias, record = active.reduce(named, None)
    inside = active.inside(record)
    run = None if inside is None else inside(inputs, bias)
    hooked = nullcontext() if run is None else run.attached()
    with hooked, attention_bias(active.adapter.model, bias, None if run is None else run.index):
        output = stock(**inputs)
    active.finish(record, run)
    return output


def _check_even(cache: Any) -> None:
    """Refuse to continue from a cache whose layers hold different numbers of tokens."""
    if is_uneven(cache):
        raise BadParameter(
            "The layers of past_key_values hold different numbers of tokens, because a method inside the language "
            "model dropped some, and only the generate() call that filled it can continue from it. Give the whole "
            "conversation to generate(), or choose a method that works before the language model."
        )


def _check_cache(adapter: Adapter, named: Mapping[str, Any]) -> None:
    """Refuse to continue from a cache that holds a shorter prompt than the one given."""
    cache, ids = named.get("past_key_values"), named.get("input_ids")
    _check_even(cache)
    length = int(getattr(cache, "get_seq_length", int)())
    if not length:
        return
    if adapter.has_images(named) or (
        ids is not None and bool(torch.isin(ids, ids.new_tensor(adapter.placeholders)).any())
    ):
        raise BadParameter(
            f"past_key_values already holds {length} tokens, and this prompt has images, which are shorter in that "
            "cache than here. To continue over several turns, write the prompts with ReducingProcessor: its input_ids "
            "have the length of the cache."
        )
