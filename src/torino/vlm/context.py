"""Two doors into a model: a context manager around its own ``generate``, and a processor that gives final inputs."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import UserDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter
from torino.reducers import PositionMode, Reducer
from torino.vlm.adapters.base import Adapter, Positions, adapter_for, place
from torino.vlm.attention import added_by_mass, attending, weigh
from torino.vlm.generate import GenerateCall
from torino.vlm.insertion import FILL, Side
from torino.vlm.text_query import ClipText, Question, TextQuery, said
from torino.vlm.trace import Trace


@dataclass(frozen=True)
class ActiveReduction:
    """How a model is being reduced, and where that is written down."""

    reducer: Reducer
    host: Adapter
    trace: Trace
    positions: PositionMode = "compact"
    asking: TextQuery | None = None
    mass: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the block ends; tasks that outlive it carry on with the stock model."""

    @functools.cached_property
    def shrink(self) -> Callable[[Mapping[str, Any], Side | None], tuple[dict[str, Any], Tensor | None]]:
        """Shrinks inputs and writes it down, out of sight of any compiler, which could not follow hooks.

        Also gives what the tokens of the new prompt get added for their mass, if anything.
        """

        def shrink(given: Mapping[str, Any], side: Side | None) -> tuple[dict[str, Any], Tensor | None]:
            shrunk, look = self.host.shrink(given, self.reducer, self.positions, side=side, asking=self.asking)
            self.trace.add(look)
            if not self.mass:
                return shrunk, None
            return shrunk, added_by_mass(shrunk, self.host.image_token, look.reductions, look.after)

        return cast(Any, torch.compiler.disable(shrink))


# Which setting a thread (or task) uses for which model: a thread inside its own `with` never sees another's.
_here: ContextVar[Mapping[int, ActiveReduction] | None] = ContextVar("torino_settings", default=None)
_lock = threading.RLock()
_DOOR = "_torino_door"


@contextmanager
def reduced(
    model: nn.Module,
    reducer: Reducer,
    *,
    positions: Positions = "own",
    asking: ClipText | TextQuery | None = None,
    mass: bool | None = None,
) -> Generator[Trace]:
    """Let a model answer with fewer visual tokens inside the block, and leave no trace of it behind.

    ``generate`` and ``forward`` of this one model object take the same inputs as ever.

    ``generate`` gives back the caller's own prompt in front of the answer, so ``out[:, inputs.input_ids.shape[1]:]``
    still cuts in the right place, and ``max_length``, ``min_length``, stopping criteria, logits processors and
    streamers count and see that prompt too. Scores, hidden states and caches are those of the shorter one. A prompt
    padded on the right is padded on the left before it is answered, which stock models only warn about.

    ``forward`` returns logits (and a loss, from ``labels`` shrunk alike; padding never counts) of the shorter prompt,
    padded on the side that was padded. For a decoding loop of your own, or to go on with a cache over several turns,
    take :class:`ReducingProcessor`, whose prompts have their final length.

    Other threads are not affected; a thread that should be enters a ``with`` of its own, runs in
    ``contextvars.copy_context()``, or uses :func:`apply`. A copy or a pickle of the model is not reduced.

    Parameters
    ----------
    model : a Hugging Face vision-language model
    reducer : Reducer
    positions : {"own", "compact", "original"}
        Number the remaining tokens as the reducer has it, or anew, or keep the positions they had in the full prompt.
    asking : TextQuery, optional
        The question and who reads it, for reducers that choose patches by it: see :meth:`ClipText.about`.
    mass : bool, optional
        Let the language model attend to each token as to all the patches it stands for: see :mod:`torino.vlm.attention`.
        By default as the reducer has it, where the model allows it. ``generate`` keeps to it to the end of the answer;
        of a loop of one's own only the call that has the images.

    Yields
    ------
    Trace
        The Reduction of every image, with counts and times.
    """
    setting = _setting(model, reducer, positions, asking, mass)
    token = _here.set({**(_here.get() or {}), id(model): setting})
    _install(model)
    try:
        yield setting.trace
    finally:
        setting.over.set()
        setting.host.close()
        _uninstall(model)
        # a generator may be closed from another context, to which the token is foreign; the event has ended it then
        with suppress(ValueError):
            _here.reset(token)


def apply(
    model: nn.Module,
    reducer: Reducer,
    *,
    positions: Positions = "own",
    asking: ClipText | TextQuery | None = None,
    mass: bool | None = None,
) -> Trace:
    """Reduce a model's visual tokens until :func:`remove`, in all threads. Prefer :func:`reduced` where it fits."""
    setting = _setting(model, reducer, positions, asking, mass)
    with _lock:
        door = _door(model)
        if door is None or door.everywhere is None:
            door = _install(model)
        door.everywhere = setting
    return setting.trace


def remove(model: nn.Module) -> None:
    """Undo :func:`apply`."""
    with _lock:
        door = _door(model)
        if door is not None and door.everywhere is not None:
            door.everywhere.host.close()
            door.everywhere = None
            _uninstall(model)


def _setting(
    model: nn.Module,
    reducer: Reducer,
    positions: Positions,
    asking: ClipText | TextQuery | None = None,
    mass: bool | None = None,
) -> ActiveReduction:
    if not isinstance(reducer, Reducer):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not type-check
        raise BadParameter(
            f"reducer must be a Reducer, such as torino.make('torino-m', sae=...), got {type(reducer).__name__}."
        )
    if isinstance(asking, ClipText):
        asking = asking.about()
    host = adapter_for(model)
    setting = ActiveReduction(reducer, host, Trace(), place(positions, reducer), asking, weigh(mass, reducer, host))
    _ = setting.shrink  # made here, where nothing is being compiled yet
    return setting


# ---------------------------------------------------------------------- what stands in front of a model


class _Method:
    """A method of a model, in front of its own. It copies and pickles as that one: a copy is not reduced."""

    def __init__(self, model: nn.Module, stock: Callable[..., Any], run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stock)  # its signature is asked for all over transformers
        self.model, self.stock, self.run = model, stock, run

    def __call__(self, *arguments: Any, **given: Any) -> Any:
        """Run reduced if this thread is to, else as ever."""
        # A compiler that traces through here cannot follow a context, and a step without pixels does not need it.
        if torch.compiler.is_compiling() and not arguments and not any("pixel" in name for name in given):
            return self.stock(**given)
        setting = _current(self.model)
        if setting is None:
            return self.stock(*arguments, **given)
        return self.run(setting, self.stock, self._by_name(arguments, given))

    def _by_name(self, arguments: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        if not arguments:
            return given
        parameters = inspect.signature(self.stock).parameters.values()
        names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD][: len(arguments)]
        if len(names) < len(arguments) or set(names) & set(given):
            raise BadParameter(
                f"{len(arguments)} arguments were given by place, which {self.stock.__name__} takes as "
                f"{', '.join(names) or 'none'}, and by name {', '.join(given) or 'none'}. Give each once, by name."
            )
        return dict(zip(names, arguments, strict=True)) | given

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.stock, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.stock,)


class _Door:
    """Who uses the methods in front of a model, and what was there before; it lives in the model's own dictionary."""

    def __init__(self, model: nn.Module) -> None:
        self.users = 0
        self.everywhere: ActiveReduction | None = None
        runs = {"generate": _generate, "forward": _forward}
        self.methods = {
            name: _Method(model, getattr(model, name), run) for name, run in runs.items() if hasattr(model, name)
        }
        self.before = {name: model.__dict__[name] for name in self.methods if name in model.__dict__}

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nobody uses a copy of the model yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (None,)


def _itself(value: Any) -> Any:
    return value


def _door(model: nn.Module) -> _Door | None:
    return model.__dict__.get(_DOOR)


def _current(model: nn.Module) -> ActiveReduction | None:
    setting = (_here.get() or {}).get(id(model))
    if setting is not None and not setting.over.is_set():
        return setting
    door = _door(model)
    return None if door is None else door.everywhere


def _install(model: nn.Module) -> _Door:
    """Put our generate and forward in front of the model's own, once however many use them."""
    with _lock:
        door = _door(model)
        if door is None:
            door = _Door(model)
            # an attribute of the object hides the method of its class, and deleting it brings the method back
            for name, method in {_DOOR: door, **door.methods}.items():
                object.__setattr__(model, name, method)
        door.users += 1
        return door


def _uninstall(model: nn.Module) -> None:
    with _lock:
        door = _door(model)
        if door is None:
            return
        door.users -= 1
        if door.users:
            return
        del model.__dict__[_DOOR]
        for name, method in door.methods.items():
            if model.__dict__.get(name) is not method:
                continue  # someone has wrapped ours meanwhile; it lets everything through from now on
            if name in door.before:
                object.__setattr__(model, name, door.before[name])
            else:
                del model.__dict__[name]


def _generate(setting: ActiveReduction, stock: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Answer a reduced prompt, and give the caller his own back in front of the answer."""
    if given.get("inputs") is not None and given.get("input_ids") is None:
        given["input_ids"] = given.pop("inputs")
    host = setting.host
    _check_cache(host, given)
    if given.get("inputs") is not None or not host.has_images(given):
        return stock(**given)
    caller = GenerateCall(host.model, given)
    caller.check()
    with torch.no_grad():
        shrunk, added = setting.shrink(caller.inputs, "left")
    if setting.positions == "original" and given.get("use_cache") is False:
        shrunk = _with_padding(shrunk)
        if added is not None:  # in step with the prompt
            added = nn.functional.pad(added, (shrunk["input_ids"].shape[1] - added.shape[1], 0))
    with nullcontext() if added is None else attending(host.model, added):
        return caller.receive(stock(**caller.translate(shrunk)))


def _forward(setting: ActiveReduction, stock: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Run the reduced prompt."""
    if not setting.host.has_images(given):
        return stock(**given)
    _check_cache(setting.host, given)
    shrunk, added = setting.shrink(given, None)
    with nullcontext() if added is None else attending(setting.host.model, added):
        return stock(**shrunk)


def _with_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Put a token of padding in front of a prompt that has none.

    ``generate`` drops a mask that is all ones, and without mask and cache transformers takes gaps in the positions for
    the seams of packed prompts, and masks across them.
    """
    if not bool(inputs["attention_mask"].all()):
        return inputs
    along = {name: fill for name, fill in {**FILL, "input_ids": 0, "position_ids": 0}.items() if name in inputs}
    return inputs | {name: nn.functional.pad(inputs[name], (1, 0), value=fill) for name, fill in along.items()}


def _check_cache(host: Adapter, given: Mapping[str, Any]) -> None:
    """Refuse to go on from a cache that holds a shorter prompt than the one given."""
    cache, ids = given.get("past_key_values"), given.get("input_ids")
    held = int(getattr(cache, "get_seq_length", int)())
    if not held:
        return
    if host.has_images(given) or (ids is not None and bool((ids == host.image_token).any())):
        raise BadParameter(
            f"past_key_values holds {held} tokens already, and this prompt has images, which are "
            "shorter in that cache than here. To go on over several turns, let ReducingProcessor write the prompt: "
            "its input_ids have the length that the cache has."
        )


# ---------------------------------------------------------------------- the other door


class ReducedInputs(UserDict[str, Any]):
    """Inputs of their final length; each use hands out encoder outputs that a model may change as it likes."""

    def __getitem__(self, name: str) -> Any:
        """Return an input; the encoder outputs as a fresh shallow copy, because beam search changes them."""
        value = super().__getitem__(name)
        if name == "mm_encoder_outputs":
            encoded: Mapping[str, Any] = value
            return {modality: copy(output) for modality, output in encoded.items()}
        return value

    def __getattr__(self, name: str) -> Any:
        """Allow ``inputs.input_ids``, as with the processor's own."""
        if name != "data" and name in self.data:
            return self[name]
        raise AttributeError(name)

    def to(self, *arguments: Any, **options: Any) -> ReducedInputs:
        """Move the prompt, and cast what is not whole numbers; the features are where the model is already."""
        where = [argument for argument in arguments if not isinstance(argument, torch.dtype)]
        whither = {name: option for name, option in options.items() if name != "dtype"}
        moved = dict(self.data)
        for name, value in moved.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                moved[name] = value.to(*arguments, **options)
            elif isinstance(value, Tensor) and (where or "device" in whither):
                moved[name] = value.to(*where, **whither)
        return ReducedInputs(moved)


class ReducingProcessor:
    """A processor that encodes and reduces, and returns a prompt of its final length.

    ``model.generate(**processor(images=..., text=...))`` on the unchanged model: every length, position and cache
    is right from the start, because nothing is shortened behind anyone's back. Padding is on the left.

    Parameters
    ----------
    processor : the model's own processor
    model : the model, whose tower is run
    reducer : Reducer
    positions : {"own", "compact", "original"}
        Number the remaining tokens as the reducer has it, or anew, or keep the positions they had in the full prompt.
        Inputs cannot say that a token has a mass, so tokens have none here.
    asking : ClipText or TextQuery, optional
        For reducers that choose patches by a question, which is that of :meth:`ClipText.about`, or that of a call
        (``question=``), or what the user said last in a conversation, or all words of the prompt.

    Attributes
    ----------
    trace : Trace
        What became of every image so far.
    """

    def __init__(
        self,
        processor: Any,
        model: nn.Module,
        reducer: Reducer,
        *,
        positions: Positions = "own",
        asking: ClipText | TextQuery | None = None,
    ) -> None:
        self.processor = processor
        self.setting = _setting(model, reducer, positions, asking)

    @property
    def trace(self) -> Trace:
        """What became of every image so far."""
        return self.setting.trace

    def __call__(self, *arguments: Any, question: Question | None = None, **given: Any) -> ReducedInputs:
        """Process, encode and reduce; takes what the model's own processor takes, and the question apart from it."""
        given.setdefault("return_tensors", "pt")
        return self._reduce(self.processor(*arguments, **given), given, question)

    def apply_chat_template(self, *arguments: Any, question: Question | None = None, **given: Any) -> Any:
        """Write a conversation as the model's own processor does; where that gives inputs, they are reduced."""
        if question is None and self.setting.asking is not None and self.setting.asking.question is None:
            question = said(arguments[0] if arguments else given.get("conversation"))
        if given.get("return_dict"):
            given.setdefault("return_tensors", "pt")
        written = self.processor.apply_chat_template(*arguments, **given)
        options = {**given, **(given.get("processor_kwargs") or {})}
        return self._reduce(written, options, question) if isinstance(written, Mapping) else written

    @torch.no_grad()
    def _reduce(
        self, processed: Mapping[str, Any], given: Mapping[str, Any], question: Question | None
    ) -> ReducedInputs:
        host, asking = self.setting.host, self.setting.asking
        device = next(host.model.parameters()).device
        full = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in processed.items()}
        if not host.has_images(full):
            return ReducedInputs(full)
        if not isinstance(full.get("input_ids"), Tensor):
            raise BadParameter(
                f"The processor gave input_ids as {type(full.get('input_ids')).__name__}, and reduction needs tensors. "
                'Give return_tensors="pt", or leave it out.'
            )
        if asking is not None:
            asking = asking.or_prompts(self.processor, question)
        shrunk, look = host.shrink(full, self.setting.reducer, self.setting.positions, side="left", asking=asking)
        self.setting.trace.add(replace(look, padding=self._padding(given)))
        return ReducedInputs(shrunk)

    def _padding(self, given: Mapping[str, Any]) -> str:
        """How images are brought to the tower's shape, as far as a processor of LLaVA-1.5 says it."""
        images = getattr(self.processor, "image_processor", None)
        said = {**given.get("images_kwargs", {}), **given}

        def does(name: str) -> bool:
            return bool(said.get(name, getattr(images, name, False)))

        if type(images).__name__.startswith("LlavaImageProcessor") and does("do_pad"):
            return "square"
        return "crop" if does("do_center_crop") else ""

    def __getattr__(self, name: str) -> Any:
        """Pass everything else, such as decoding, to the model's own processor."""
        if name in ("processor", "setting"):
            raise AttributeError(name)
        return getattr(self.processor, name)
