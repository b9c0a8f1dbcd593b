"""Answers and the reductions behind them, with token counts, times and the key-value cache saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from torino.core.checks import check_type, to_index
from torino.core.errors import BadIndex, BadParameter
from torino.core.explanation import format_removed
from torino.core.reduction import Reduction
from torino.reducers.in_language_model import layer_averaged

if TYPE_CHECKING:  # so that models can be listed without Pillow
    from PIL import Image
    from torch import Tensor

    from torino.datasets.images import Padding
    from torino.vlm.inside import InsideImage

# Stages in the order they run; the stages in parentheses are part of the stage before them.
STAGES = {"tower": ("signals", "steps"), "question": (), "plan": ("sae", "grouping"), "projector": ()}


@dataclass(frozen=True)
class ReducedCall:
    """One call of the model: its images, their token counts before and after, and the times.

    Attributes
    ----------
    reductions : tuple of Reduction
        One for each planned unit: an image, or a tile of one.
    before, after : tuple of int
        Tokens of each image in the full and in the reduced prompt.
    seconds : dict
        ``tower`` and, as parts of it, ``signals`` and the ``steps`` of a reducer inside the tower; ``question``, the
        text encoder of a reducer that reads the question; ``plan``, any other reducer, with its parts ``sae`` and
        ``grouping``; ``projector``, reducing and projecting.
    bytes_saved : int
        Difference between the key-value caches of the full and the reduced prompt, including padding, for one sequence
        per row.
    padding : str
        How the images were brought to the shape of the tower: ``"square"``, ``"crop"``, or ``""`` if unknown.
    sizes : tuple of Tensor
        For each image, the patches that each of its tokens represents; 0 for separators and registers.
    patches : tuple of int
        Patches of each image.
    inside : tuple of InsideImage
        What happens to the tokens of each image inside the language model; empty for methods that work before it. The
        reductions are complete once the language model has read the prompt.
    """

    reductions: tuple[Reduction, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds: dict[str, float]
    bytes_saved: int = 0
    padding: str = ""
    sizes: tuple[Tensor, ...] = ()
    patches: tuple[int, ...] = ()
    inside: tuple[InsideImage, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Image tokens that each decoder layer processes; empty if all layers process the same."""
        return sum_layers(self.inside)

    @property
    def layer_averaged(self) -> float:
        """Mean over the decoder layers of the image tokens that they process."""
        return layer_averaged(self.layers or (sum(self.after),))


@dataclass
class Trace(Sequence[Reduction]):
    """All calls inside one ``with reduced(...)``; ``trace[0]`` is the Reduction of the first image."""

    calls: list[ReducedCall] = field(default_factory=list[ReducedCall])
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        """Check that the calls are a list."""
        check_type("calls", self.calls, list, "a list of ReducedCall")
        for call in self.calls:
            check_type("calls", call, ReducedCall, "a list of ReducedCall")

    def add(self, call: ReducedCall) -> None:
        """Add a call; several threads may share a trace."""
        check_type("call", call, ReducedCall, "a ReducedCall")
        with self._lock:
            self.calls.append(call)

    def replace(self, call: ReducedCall, new: ReducedCall) -> None:
        """Replace a call, once what happened inside the language model is known."""
        with self._lock:
            self.calls[next(i for i, known in enumerate(self.calls) if known is call)] = new

    @property
    def reductions(self) -> list[Reduction]:
        """All reductions, in order."""
        return [reduction for call in self.calls for reduction in call.reductions]

    @overload
    def __getitem__(self, index: int) -> Reduction: ...
    @overload
    def __getitem__(self, index: slice) -> list[Reduction]: ...
    def __getitem__(self, index: int | slice) -> Reduction | list[Reduction]:
        """Return the reduction of an image."""
        if isinstance(index, slice):
            return self.reductions[index]
        if not self.calls:
            raise BadIndex("Nothing was reduced yet, so the trace is empty. Call the model with an image first.")
        return self.reductions[to_index("reduction", index, len(self))]

    def __len__(self) -> int:
        """Return the number of reductions."""
        return sum(len(call.reductions) for call in self.calls)

    def __iter__(self) -> Iterator[Reduction]:
        """Iterate over the reductions."""
        return iter(self.reductions)

    @property
    def before(self) -> int:
        """Image tokens of the full prompts."""
        return sum(sum(call.before) for call in self.calls)

    @property
    def after(self) -> int:
        """Image tokens that the language model received."""
        return sum(sum(call.after) for call in self.calls)

    @property
    def layer_averaged(self) -> float:
        """Image tokens, averaged over the layers of the language model; ``after`` unless a method works inside it."""
        return sum(call.layer_averaged for call in self.calls)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, over all calls."""
        total: dict[str, float] = {}
        for call in self.calls:
            for name, value in call.seconds.items():
                total[name] = total.get(name, 0.0) + value
        known = [name for stage, parts in STAGES.items() for name in (stage, *parts)]
        return {name: total[name] for name in known if name in total} | total

    @property
    def bytes_saved(self) -> int:
        """Bytes of key-value cache saved over all calls."""
        return sum(call.bytes_saved for call in self.calls)

    def __reduce__(self) -> tuple[type[Trace], tuple[list[ReducedCall]]]:
        """Copy and pickle the calls without the lock."""
        return Trace, (list(self.calls),)

    def summary(self) -> str:
        """Return a table with a line for each call and the times by stage."""
        if not self.calls:
            return "No image was reduced."
        lines = [f"{'call':>4}  {'images':>6}  {'tokens':>15}  {'removed':>10}  {'cache saved':>11}  reducer"]
        for number, call in enumerate(self.calls):
            before, after = sum(call.before), min(call.layers, default=sum(call.after))
            by = call.reductions[0].by if call.reductions else ""
            lines.append(
                f"{number:>4}  {len(call.before):>6}  {f'{before} -> {after}':>15}  "
                f"{format_removed(before, after):>10}  {call.bytes_saved / 2**20:>7.1f} MiB  {by}"
            )
        if any(call.inside for call in self.calls):
            lines.append(f"layer-averaged tokens: {self.before} -> {self.layer_averaged:.1f}")
        return "\n".join([*lines, f"time: {self._format_times()}"])

    def _format_times(self) -> str:
        seconds = self.seconds
        times: list[str] = []
        for stage, parts in STAGES.items():
            inner = ", ".join(f"{name} {seconds.pop(name) * 1e3:.1f}" for name in parts if name in seconds)
            if stage in seconds:
                times.append(f"{stage} {seconds.pop(stage) * 1e3:.1f} ms" + (f" ({inner})" if inner else ""))
        return ", ".join([*times, *[f"{name} {value * 1e3:.1f} ms" for name, value in seconds.items()]])


def sum_layers(inside: Sequence[InsideImage]) -> tuple[int, ...]:
    """Return how many tokens of all images each decoder layer processes; empty without images."""
    return tuple(map(sum, zip(*(image.layers for image in inside), strict=True)))


@dataclass(frozen=True, eq=False)
class Generated:
    """Output of one ``generate`` call.

    Attributes
    ----------
    texts : list of str
        One per reduction and prompt: all prompts of the first reduction, then of the second, and so on.
    ids : Tensor
        Generated tokens, shape (rows, new tokens).
    prefill, decode : float
        Seconds until the first token, and from there to the end.
    plans : list of tuple of Reduction
        The reductions of each of the given images, with what happened inside the language model.
    """

    texts: list[str]
    ids: Tensor
    prefill: float
    decode: float
    plans: list[tuple[Reduction, ...]] = field(default_factory=list[tuple[Reduction, ...]])


@dataclass(frozen=True)
class EarlyExit:
    """The tower stops at its feature layer with and without reduction; the stock model runs all blocks.

    Attributes
    ----------
    blocks, of : int
        Blocks up to the feature layer, and all blocks of the tower.
    seconds, all_seconds : float
        Time of the tower up to the feature layer, and of all blocks.
    """

    blocks: int
    of: int
    seconds: float
    all_seconds: float

    @property
    def saved(self) -> float:
        """Seconds saved for each prompt; never negative, although measured times vary."""
        return max(self.all_seconds - self.seconds, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, ready for JSON."""
        times = {"seconds": round(self.seconds, 6), "all_seconds": round(self.all_seconds, 6)}
        return {"blocks": self.blocks, "of": self.of, **times}


@dataclass(frozen=True)
class Answer:
    """The answer of a model, with its visual tokens and timings.

    Attributes
    ----------
    text : str
        The generated text, without special tokens.
    prompt : str
        The text that the model received, with one marker for each image.
    before, after : int
        Image tokens of the full prompt, and those that the language model processed. If it dropped some, the mean over
        its layers, rounded.
    new_tokens : int
        Length of the answer.
    seconds : dict
        ``processor`` (pixels and text), ``tower``, ``question`` (where a method reads it), ``plan`` (the reducer;
        ``sae`` and ``grouping`` are parts of it), ``projector``, ``prefill`` (to the first token), ``decode`` (the
        other tokens), ``total``. One run: the first run of a process includes start-up, unless a baseline was asked
        for.
    padding : {"crop", "square"}
    trace : Trace or None
        The reductions; None where all tokens were kept.
    seen : tuple of PIL images
        The images as the tower received them, one for each reduction.
    baseline : Answer or None
        The answer with all tokens, if it was asked for. Its tower stops at the feature layer too, so the two answers
        differ in their tokens only.
    early_exit : EarlyExit or None
        What stopping the tower saves in both answers compared with the stock model; measured with a baseline, where
        the model does not read the last block.
    layers : tuple of int
        Image tokens that each layer of the language model processed; empty if all processed the same.
    """

    text: str
    prompt: str
    before: int
    after: int
    new_tokens: int
    seconds: dict[str, float]
    padding: Padding
    trace: Trace | None = None
    seen: tuple[Image.Image, ...] = field(default=(), repr=False)
    baseline: Answer | None = None
    early_exit: EarlyExit | None = None
    layers: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reduction of each image (or tile); empty where all tokens were kept."""
        return () if self.trace is None else tuple(self.trace)

    @property
    def reduction(self) -> Reduction:
        """The reduction of the first image."""
        if not self.reductions:
            raise BadParameter("All tokens were kept, so there is no reduction. Ask with reducer=...")
        return self.reductions[0]

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.seconds["total"] - self.seconds["decode"]

    @property
    def speedup(self) -> dict[str, float]:
        """How many times as fast, separately by cause; empty without a baseline.

        ``first_token`` and ``total`` are due to the tokens: this answer and the baseline, whose towers both stop at
        the feature layer (answers may differ in length). ``early_exit`` is due to stopping the tower: the first token
        of the baseline and of the stock model. It needs no reduction, so it is not part of the other two.
        """
        full = self.baseline
        if full is None:
            return {}
        times = {"first_token": (full.first_token, self.first_token)}
        times["total"] = (full.seconds["total"], self.seconds["total"])
        if self.early_exit is not None:
            times["early_exit"] = (full.first_token + self.early_exit.saved, full.first_token)
        return {name: slow / max(fast, 1e-9) for name, (slow, fast) in times.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything that goes into JSON."""
        result: dict[str, Any] = {
            "answer": self.text.strip(),
            "reducer": self.reductions[0].by if self.reductions else None,
            "padding": self.padding,
            "image_tokens": {"before": self.before, "after": self.after},
            "new_tokens": self.new_tokens,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
        if self.layers:
            averaged = round(layer_averaged(self.layers), 3)
            result["image_tokens"] |= {"layer_averaged": averaged, "first_layer": self.layers[0]}
            result["image_tokens"]["last_layer"] = self.layers[-1]
        if self.baseline is not None:
            result["baseline"] = self.baseline.to_dict()
            result["speedup"] = {name: round(value, 3) for name, value in self.speedup.items()}
        if self.early_exit is not None:
            result["early_exit"] = self.early_exit.to_dict()
        return result
