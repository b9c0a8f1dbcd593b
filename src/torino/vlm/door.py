"""Two doors into a model: a context manager around its own ``generate``, and a processor that gives final inputs."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torino.errors import BadParameter
from torino.reducers import Reducer
from torino.vlm.host import Host, Positions, host_of
from torino.vlm.trace import Trace


@dataclass(frozen=True)
class Setting:
    """How a model is being reduced, and where that is written down."""

    reducer: Reducer
    host: Host
    trace: Trace
    positions: Positions = "compact"


# Which setting a thread (or task) uses for which model: a thread inside its own `with` never sees another's.
_here: ContextVar[dict[int, Setting]] = ContextVar("torino_settings", default={})  # noqa: B039: never changed in place
_everywhere: weakref.WeakKeyDictionary[nn.Module, Setting] = weakref.WeakKeyDictionary()
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


@contextmanager
def reduced(model: nn.Module, reducer: Reducer, *, positions: Positions = "compact") -> Generator[Trace]:
    """Let a model answer with fewer visual tokens inside the block, and leave no trace of it behind.

    ``generate`` and ``forward`` of this one model object take the same inputs as ever. ``generate`` gives back
    the caller's own prompt in front of the answer, so ``out[:, inputs.input_ids.shape[1]:]`` still cuts in the
    right place; ``forward`` returns logits of the shorter prompt. Other threads are not affected.

    Parameters
    ----------
    model : a Hugging Face vision-language model
    reducer : Reducer
    positions : {"compact", "original"}
        Number the remaining tokens anew, or keep the positions they had in the full prompt.

    Yields
    ------
    Trace
        The Reduction of every image, with counts and times.
    """
    setting = _setting(model, reducer, positions)
    outer = _here.get()
    token = _here.set({**outer, id(model): setting})
    _install(model)
    try:
        yield setting.trace
    finally:
        _uninstall(model)
        _here.reset(token)


def apply(model: nn.Module, reducer: Reducer, *, positions: Positions = "compact") -> Trace:
    """Reduce a model's visual tokens until :func:`remove`, in all threads. Prefer :func:`reduced` where it fits."""
    setting = _setting(model, reducer, positions)
    with _lock:
        if model not in _everywhere:
            _install(model)
        _everywhere[model] = setting
    return setting.trace


def remove(model: nn.Module) -> None:
    """Undo :func:`apply`."""
    with _lock:
        if _everywhere.pop(model, None) is not None:
            _uninstall(model)


def _setting(model: nn.Module, reducer: Reducer, positions: Positions) -> Setting:
    if positions not in ("compact", "original"):
        raise BadParameter(f"positions must be 'compact' or 'original', got {positions!r}.")
    return Setting(reducer, host_of(model), Trace(), positions)


def _current(model: nn.Module) -> Setting | None:
    return _here.get().get(id(model)) or _everywhere.get(model)


def _install(model: nn.Module) -> None:
    """Put our generate and forward in front of the model's own, once however many use them."""
    with _lock:
        _users[model] = _users.get(model, 0) + 1
        if _users[model] > 1:
            return
        for name, wrap in (("generate", _generate), ("forward", _forward)):
            if hasattr(model, name):
                # an attribute of the object hides the method of its class, and deleting it brings the method back
                object.__setattr__(model, name, wrap(weakref.ref(model), getattr(model, name)))


def _uninstall(model: nn.Module) -> None:
    with _lock:
        _users[model] -= 1
        if not _users[model]:
            del _users[model]
            for name in ("generate", "forward"):
                model.__dict__.pop(name, None)


def _generate(model: weakref.ref[nn.Module], stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def generate(inputs: Tensor | None = None, *others: Any, **given: Any) -> Any:
        here = model()
        setting = _current(here) if here is not None else None
        if setting is None or not setting.host.has_images(given):
            return stock(inputs, *others, **given)
        if others:
            raise BadParameter("Give generate its arguments by name while a model is reduced.")
        if inputs is not None:
            given = {"input_ids": inputs, **given}
        prompt: Tensor | None = given.get("input_ids")
        shrunk, look = setting.host.shrink(given, setting.reducer, setting.positions, side="left")
        setting.trace.add(look)
        assert prompt is not None
        _count_new_tokens(shrunk, prompt.shape[1])
        cut = shrunk["input_ids"].shape[1]
        return _with_prompt(stock(**shrunk), prompt, cut)

    return generate


def _forward(model: weakref.ref[nn.Module], stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward(*arguments: Any, **given: Any) -> Any:
        here = model()
        setting = _current(here) if here is not None else None
        if setting is None or not setting.host.has_images(given):
            return stock(*arguments, **given)
        if arguments:
            given = {"input_ids": arguments[0], **given}
            if len(arguments) > 1:
                raise BadParameter("Give forward its arguments by name while a model is reduced.")
        shrunk, look = setting.host.shrink(given, setting.reducer, setting.positions)
        setting.trace.add(look)
        return stock(**shrunk)

    return forward


def _count_new_tokens(given: dict[str, Any], prompt: int) -> None:
    """Lengths that count the prompt are meant for the caller's prompt: count what comes after it instead."""
    for whole, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if given.get(whole) is not None:
            given.setdefault(new, max(int(given.pop(whole)) - prompt, 1))


def _with_prompt(output: Any, prompt: Tensor, cut: int) -> Any:
    """Put the caller's own prompt in front of the new tokens."""
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    copies = len(sequences) // len(prompt)
    restored = torch.cat([prompt.repeat_interleave(copies, 0).to(sequences), sequences[:, cut:]], 1)
    if isinstance(output, Tensor):
        return restored
    output.sequences = restored
    return output


class ReducedInputs(dict[str, Any]):
    """Inputs of their final length; each use hands out encoder outputs that a model may change as it likes."""

    def __getitem__(self, name: str) -> Any:
        """Return an input; the encoder outputs as a fresh shallow copy, because beam search changes them."""
        value = super().__getitem__(name)
        if name == "mm_encoder_outputs":
            return {modality: copy(output) for modality, output in cast(Mapping[str, Any], value).items()}
        return value

    def __getattr__(self, name: str) -> Any:
        """Allow ``inputs.input_ids``, as with the processor's own."""
        if name in self:
            return self[name]
        raise AttributeError(name)

    def to(self, *arguments: Any, **options: Any) -> ReducedInputs:
        """Move the prompt; the features are where the model is already."""
        moved = {
            name: value.to(*arguments, **options) if isinstance(value, Tensor) else value
            for name, value in self.items()
        }
        return ReducedInputs(moved)


class ReducingProcessor:
    """A processor that encodes and reduces, and returns a prompt of its final length.

    ``model.generate(**processor(images=..., text=...))`` on the unchanged model: every length, position and cache
    is right from the start, because nothing is shortened behind anyone's back.

    Parameters
    ----------
    processor : the model's own processor
    model : the model, whose tower is run
    reducer : Reducer
    positions : {"compact", "original"}

    Attributes
    ----------
    trace : Trace
        What became of every image so far.
    """

    def __init__(self, processor: Any, model: nn.Module, reducer: Reducer, *, positions: Positions = "compact") -> None:
        self.processor = processor
        self.setting = _setting(model, reducer, positions)

    @property
    def trace(self) -> Trace:
        """What became of every image so far."""
        return self.setting.trace

    @torch.no_grad()
    def __call__(self, *arguments: Any, **given: Any) -> ReducedInputs:
        """Process, encode and reduce; takes what the model's own processor takes."""
        given.setdefault("return_tensors", "pt")
        model = self.setting.host.model
        device = next(model.parameters()).device
        full = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in dict(self.processor(*arguments, **given)).items()
        }
        if not self.setting.host.has_images(full):
            return ReducedInputs(full)
        shrunk, look = self.setting.host.shrink(full, self.setting.reducer, self.setting.positions, side="left")
        self.setting.trace.add(look)
        return ReducedInputs(shrunk)

    def __getattr__(self, name: str) -> Any:
        """Pass everything else (decoding, chat templates) to the model's own processor."""
        if name in ("processor", "setting"):
            raise AttributeError(name)
        return getattr(self.processor, name)
