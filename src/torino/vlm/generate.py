"""Translate one ``generate`` call between the caller's full prompt and the reduced one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter
from torino.core.timing import synchronize
from torino.reducers import PositionMode
from torino.vlm.attention import AttentionBias, attention_bias
from torino.vlm.insertion import FILL
from torino.vlm.inside import InsideImage, InsideRun, check_generation
from torino.vlm.prefix import PrefixCache


class GenerateCall:
    """One call of ``generate``, whose arguments refer to the full prompt while the model gets the reduced one.

    Parameters
    ----------
    model : a Hugging Face vision-language model
    given : dict
        The arguments of the call, by name.
    """

    def __init__(self, model: nn.Module, given: dict[str, Any]) -> None:
        self.model = model
        self.model_config: Any = getattr(model, "generation_config", None)
        self.given = given
        self.prompt = cast(Tensor, given.get("input_ids"))  # a call without it is refused when it is reduced
        self.reduced_length = 0

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments; without a mask, with the mask that ``generate`` would infer from the padding."""
        pad, eos = self._option("pad_token_id"), self._option("eos_token_id")
        if self.given.get("input_ids") is None or self.given.get("attention_mask") is not None or pad is None:
            return self.given
        ends: list[int] = [] if eos is None else torch.as_tensor(eos).reshape(-1).tolist()
        return self.given if pad in ends else {**self.given, "attention_mask": (self.prompt != pad).long()}

    def check(self) -> None:
        """Refuse options that would silently give wrong results."""
        if self._option("prefill_chunk_size") is not None:
            raise BadParameter(
                "prefill_chunk_size is set, and transformers drops the images of a prompt that it prefills in chunks. "
                "Omit it; a reduced prompt is short."
            )

    def check_inside(self, images: Sequence[InsideImage | None]) -> None:
        """Refuse options that do not fit methods inside the language model."""
        reducer = next((image.reducer for image in images if image is not None), None)
        if reducer is not None:
            check_generation(reducer, self._option)

    def translate(self, reduced: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for the reduced prompt: adjusted lengths, and callbacks that see the full prompt."""
        self.reduced_length = reduced["input_ids"].shape[1]
        arguments = self._adjust_lengths(reduced)
        for name in ("logits_processor", "stopping_criteria"):
            if arguments.get(name):
                arguments[name] = type(arguments[name])([self._wrap_callback(item) for item in arguments[name]])
        if arguments.get("prefix_allowed_tokens_fn") is not None:
            arguments["prefix_allowed_tokens_fn"] = self._wrap_allowed(arguments["prefix_allowed_tokens_fn"])
        if arguments.get("streamer") is not None:
            arguments["streamer"] = _FullPromptStreamer(arguments["streamer"], self.restore)
        return arguments

    def receive(self, output: Any) -> Any:
        """Put the full prompt in front of the new tokens of an output of ``generate``."""
        if isinstance(output, Tensor):
            return self.restore(output)
        if getattr(output, "sequences", None) is not None:
            output.sequences = self.restore(output.sequences)
        return output

    def restore(self, ids: Tensor) -> Tensor:
        """Replace the reduced prompt by the full one, for one or several sequences of each row."""
        prompt = self.prompt.repeat_interleave(len(ids) // len(self.prompt), 0)
        return torch.cat([prompt.to(ids), ids[:, self.reduced_length :]], 1)

    def _option(self, name: str) -> Any:
        """Return an option as ``generate`` resolves it: argument, then given config, then the model's config."""
        if name in self.given:
            return self.given[name]
        configs = (self.given.get("generation_config"), self.model_config)
        return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)

    def _adjust_lengths(self, reduced: dict[str, Any]) -> dict[str, Any]:
        """Reduce the lengths that include the prompt, which refer to the full prompt."""
        length, config = self.prompt.shape[1], reduced.get("generation_config")
        removed = length - self.reduced_length
        for name, new_tokens in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            total = self._option(name)
            if total is None or self._option(new_tokens) is not None:
                continue  # the number of new tokens takes precedence and does not depend on the prompt
            if name == "max_length" and total <= length:
                raise BadParameter(
                    f"The prompt has {length} tokens and max_length is {total}, which leaves none for an answer. "
                    "max_length counts the full prompt, not the reduced one. Increase it, or use max_new_tokens."
                )
            if config is not None and reduced.get(name) is None:
                config = deepcopy(config)
                setattr(config, name, max(total - removed, 0))
                reduced = {**reduced, "generation_config": config}
            else:
                reduced = {**reduced, name: max(total - removed, 0)}
        return reduced

    def _wrap_allowed(self, inner: Callable[[int, Tensor], Any]) -> Callable[[int, Tensor], Any]:
        # Row numbers count repeated rows for samples, but not for beams.
        beams, samples = self._option("num_beams") or 1, self._option("num_return_sequences") or 1
        copies = samples if beams == 1 else 1

        def allowed(row: int, ids: Tensor) -> Any:
            return inner(row, torch.cat([self.prompt[row // copies].to(ids), ids[self.reduced_length :]]))

        return allowed

    def _wrap_callback(self, callback: Any) -> Any:
        """Wrap a stopping criterion or logits processor so that it sees the full prompt."""
        if type(callback).__name__ == "MaxLengthCriteria":
            callback = copy(callback)
            callback.max_length -= self.prompt.shape[1] - self.reduced_length
            return callback
        # transformers merges given callbacks with its own by class, which a wrapper would hide.
        is_stock = type(callback).__module__.startswith("transformers.")
        return callback if is_stock else _FullPromptCallback(callback, self.restore)


@dataclass(frozen=True, eq=False)
class _FullPromptCallback:
    """A stopping criterion or logits processor that sees the full prompt."""

    inner: Callable[..., Any]
    restore: Callable[[Tensor], Tensor]

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        return self.inner(self.restore(input_ids), scores)


class _FullPromptStreamer:
    """A streamer that receives the full prompt first."""

    def __init__(self, inner: Any, restore: Callable[[Tensor], Tensor]) -> None:
        self.inner, self.restore, self.started = inner, restore, False

    def put(self, value: Tensor) -> None:
        self.inner.put(value if self.started else self.restore(value))
        self.started = True

    def end(self) -> None:
        self.inner.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def run_generate(
    call: GenerateCall,
    stock: Callable[..., Any],
    inputs: dict[str, Any],
    bias: AttentionBias | None,
    positions: PositionMode,
    *,
    prefix: PrefixCache | None = None,
    clock: FirstTokenClock | None = None,
    inside: Callable[[Mapping[str, Any], AttentionBias | None], InsideRun] | None = None,
) -> tuple[Any, InsideRun | None]:
    """Run ``generate`` on a reduced prompt, in the caller's terms.

    ``inside`` creates the run of a reducer inside the language model for the final inputs; it is returned too.
    """
    if positions != "compact" and inputs.get("use_cache") is False:
        inputs = _with_padding(inputs)
        bias = bias and bias.padded(inputs["input_ids"].shape[1])
    run = None if inside is None else inside(inputs, bias)
    hooked = nullcontext() if run is None else run.attached()
    with hooked, attention_bias(call.model, bias, None if run is None else run.index):
        if prefix is not None and run is None:  # its tokens would be chosen before the question is read
            inputs = prefix.resume(call.model, inputs, int(cast(Any, call.model).config.image_token_id))
        arguments = call.translate(inputs)
        if clock is not None:
            given: Any = arguments.get("stopping_criteria")
            arguments["stopping_criteria"] = [*(given or ()), clock]
        return call.receive(stock(**arguments)), run


def _with_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Put one padding token before a prompt that has none.

    ``generate`` drops a mask of ones, and without mask and cache transformers interprets gaps in the positions as
    boundaries of packed prompts and masks across them.
    """
    if not bool(inputs["attention_mask"].all()):
        return inputs
    fills = {name: fill for name, fill in {**FILL, "input_ids": 0, "position_ids": 0}.items() if name in inputs}
    return inputs | {name: nn.functional.pad(inputs[name], (1, 0), value=fill) for name, fill in fills.items()}


class FirstTokenClock:
    """A stopping criterion that never stops; it records when the first token is generated."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        """Record the time of the first call."""
        if not self.first:
            synchronize()
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
