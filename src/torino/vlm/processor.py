"""A processor that encodes and reduces images, and returns a prompt of its final length."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torino.core.checks import check_choice
from torino.core.errors import BadParameter
from torino.reducers import Reducer, split_reducer
from torino.vlm.adapters.base import Positions
from torino.vlm.attention import Attention
from torino.vlm.context import ActiveReduction, active_reduction
from torino.vlm.limits import check_processor
from torino.vlm.text_query import ClipText, Question, TextQuery, WordText, last_user_messages
from torino.vlm.trace import Trace


class ReducedInputs(UserDict[str, Any]):
    """Model inputs of their final length; every read returns encoder outputs that the model may modify."""

    def __getitem__(self, name: str) -> Any:
        """Return an input; encoder outputs as a shallow copy, because beam search modifies them."""
        value = super().__getitem__(name)
        if name == "mm_encoder_outputs":
            encoded: Mapping[str, Any] = value
            return {modality: copy(output) for modality, output in encoded.items()}
        return value

    def __getattr__(self, name: str) -> Any:
        """Allow ``inputs.input_ids``, like the processor's own output."""
        if name != "data" and name in self.data:
            return self[name]
        raise AttributeError(name)

    def to(self, *arguments: Any, **options: Any) -> ReducedInputs:
        """Move the prompt and cast its floating-point inputs; image features already are on the model's device."""
        places = [argument for argument in arguments if not isinstance(argument, torch.dtype)]
        placing = {name: option for name, option in options.items() if name != "dtype"}
        moved = dict(self.data)
        for name, value in moved.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                moved[name] = value.to(*arguments, **options)
            elif isinstance(value, Tensor) and (places or "device" in placing):
                moved[name] = value.to(*places, **placing)
        return ReducedInputs(moved)


class ReducingProcessor:
    """A processor that encodes and reduces images, and returns a prompt of its final length.

    ``model.generate(**processor(images=..., text=...))`` runs the unchanged model: lengths, positions and caches are
    right from the start. Padding is on the left.

    Parameters
    ----------
    processor : the model's own processor
    model : the model, whose vision tower is run
    reducer : Reducer
    positions : {"auto", "compact", "original", "median"}
        As for :func:`torino.vlm.reduced`.
    attention : {"auto", "plain"}
        Plain in both cases: inputs for the unchanged model cannot carry another attention.
    text_query : ClipText, WordText or TextQuery, optional
        For reducers that choose patches by a question: that of :meth:`ClipText.query`, or of a call (``question=``),
        or the user's last turn of a conversation, or all words of the prompt.

    Attributes
    ----------
    trace : Trace
        The reductions of all images so far.
    """

    def __init__(
        self,
        processor: Any,
        model: nn.Module,
        reducer: Reducer,
        *,
        positions: Positions = "auto",
        attention: Attention = "auto",
        text_query: ClipText | WordText | TextQuery | None = None,
    ) -> None:
        check_processor(processor)
        check_choice("attention", attention, Attention, "auto or plain")
        if attention not in ("auto", "plain"):
            raise BadParameter(
                f'attention="{attention}" cannot be part of inputs for the unchanged model, which ReducingProcessor '
                "returns. Use reduced(model, reducer), or plain attention."
            )
        if split_reducer(reducer)[1] is not None:
            raise BadParameter(
                f"{reducer.spec} drops tokens inside the language model, which inputs for the unchanged model cannot "
                "do. Use reduced(model, reducer) instead of ReducingProcessor, or a method that works before the "
                "language model, such as torino-x."
            )
        self.processor = processor
        self.active: ActiveReduction = active_reduction(model, reducer, positions, text_query, "plain")

    @property
    def trace(self) -> Trace:
        """The reductions of all images so far."""
        return self.active.trace

    def __call__(self, *arguments: Any, question: Question | None = None, **options: Any) -> ReducedInputs:
        """Process, encode and reduce; takes the arguments of the model's own processor and the bare question."""
        options.setdefault("return_tensors", "pt")
        return self._reduce(self.processor(*arguments, **options), options, question)

    def apply_chat_template(self, *arguments: Any, question: Question | None = None, **options: Any) -> Any:
        """Write a conversation as the model's own processor does; inputs, if it returns them, are reduced."""
        if question is None and self.active.text_query is not None and self.active.text_query.question is None:
            question = last_user_messages(arguments[0] if arguments else options.get("conversation"))
        if options.get("return_dict"):
            options.setdefault("return_tensors", "pt")
        written = self.processor.apply_chat_template(*arguments, **options)
        if not isinstance(written, Mapping):
            return written
        return self._reduce(written, {**options, **(options.get("processor_kwargs") or {})}, question)

    @torch.no_grad()
    def _reduce(
        self, processed: Mapping[str, Any], options: Mapping[str, Any], question: Question | None
    ) -> ReducedInputs:
        adapter, text_query = self.active.adapter, self.active.text_query
        device = next(adapter.model.parameters()).device
        full = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in processed.items()}
        if not adapter.has_images(full):
            return ReducedInputs(full)
        if not isinstance(full.get("input_ids"), Tensor):
            raise BadParameter(
                f"The processor returned input_ids as {type(full.get('input_ids')).__name__}; reduction needs tensors. "
                'Pass return_tensors="pt", or omit it.'
            )
        if text_query is not None:
            text_query = text_query.with_prompts(self.processor, question)
        reduced, call = adapter.reduce_inputs(
            full, self.active.reducer, self.active.positions, side="left", text_query=text_query
        )
        self.active.trace.add(replace(call, padding=self._padding(options)))
        return ReducedInputs(reduced)

    def _padding(self, options: Mapping[str, Any]) -> str:
        """Return how images are brought to the tower's shape, as far as a LLaVA-1.5 processor says it."""
        images = getattr(self.processor, "image_processor", None)
        given = {**options.get("images_kwargs", {}), **options}

        def does(name: str) -> bool:
            return bool(given.get(name, getattr(images, name, False)))

        if type(images).__name__.startswith("LlavaImageProcessor") and does("do_pad"):
            return "square"
        return "crop" if does("do_center_crop") else ""

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else, such as decoding, to the model's own processor."""
        if name in ("processor", "active"):
            raise AttributeError(name)
        return getattr(self.processor, name)
