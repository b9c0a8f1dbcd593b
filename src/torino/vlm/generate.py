"""GenerateCall: one call of generate, whose caller speaks of his own prompt while a shorter one is answered."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter


class GenerateCall:
    """One call of generate: what its caller says and means of his own prompt, translated to the reduced one."""

    def __init__(self, model: nn.Module, given: dict[str, Any]) -> None:
        self.own: Any = getattr(model, "generation_config", None)
        self.given = given
        self.prompt = cast(Tensor, given.get("input_ids"))  # a call without it is refused when it is shrunk
        self.cut = 0

    @property
    def inputs(self) -> dict[str, Any]:
        """What was given; without a mask, with the one that generate would read from the padding."""
        pad, eos = self._meant("pad_token_id"), self._meant("eos_token_id")
        if self.given.get("input_ids") is None or self.given.get("attention_mask") is not None or pad is None:
            return self.given
        ends: list[int] = [] if eos is None else torch.as_tensor(eos).reshape(-1).tolist()
        return self.given if pad in ends else {**self.given, "attention_mask": (self.prompt != pad).long()}

    def check(self) -> None:
        """Refuse what would go wrong without a word."""
        if self._meant("prefill_chunk_size") is not None:
            raise BadParameter(
                "prefill_chunk_size is set, and transformers leaves the images out of a prompt that it prefills in "
                "chunks. Leave it out; a reduced prompt is short."
            )

    def translate(self, shrunk: dict[str, Any]) -> dict[str, Any]:
        """Say of the reduced prompt what was said of the caller's: lengths, and who looks at it."""
        self.cut = shrunk["input_ids"].shape[1]
        said = self._lengths(shrunk)
        for name in ("logits_processor", "stopping_criteria"):
            if said.get(name):
                said[name] = type(said[name])([self._shown(one) for one in said[name]])
        if said.get("prefix_allowed_tokens_fn") is not None:
            said["prefix_allowed_tokens_fn"] = self._allowed(said["prefix_allowed_tokens_fn"])
        if said.get("streamer") is not None:
            said["streamer"] = _Streamer(said["streamer"], self.restore)
        return said

    def receive(self, output: Any) -> Any:
        """Put the caller's own prompt in front of the new tokens."""
        if isinstance(output, Tensor):
            return self.restore(output)
        if getattr(output, "sequences", None) is not None:
            output.sequences = self.restore(output.sequences)
        return output

    def restore(self, ids: Tensor) -> Tensor:
        """The caller's prompt and what follows the reduced one, for one or several sequences of each row."""
        prompt = self.prompt.repeat_interleave(len(ids) // len(self.prompt), 0)
        return torch.cat([prompt.to(ids), ids[:, self.cut :]], 1)

    def _meant(self, name: str) -> Any:
        """An option of generation, as generate looks it up: its arguments, the config given, the model's own."""
        if name in self.given:
            return self.given[name]
        configs = (self.given.get("generation_config"), self.own)
        return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)

    def _lengths(self, shrunk: dict[str, Any]) -> dict[str, Any]:
        """Lengths that count the prompt are meant of the caller's."""
        length, config = self.prompt.shape[1], shrunk.get("generation_config")
        removed = length - self.cut
        for name, instead in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            whole = self._meant(name)
            if whole is None or self._meant(instead) is not None:
                continue  # a number of new tokens goes before, and is no other for a shorter prompt
            if name == "max_length" and whole <= length:
                raise BadParameter(
                    f"The prompt is {length} tokens long, and max_length is {whole}, which leaves none for an answer. "
                    "max_length counts your prompt, not the reduced one. Raise it, or give max_new_tokens."
                )
            if config is not None and shrunk.get(name) is None:
                config = deepcopy(config)
                setattr(config, name, max(whole - removed, 0))
                shrunk = {**shrunk, "generation_config": config}
            else:
                shrunk = {**shrunk, name: max(whole - removed, 0)}
        return shrunk

    def _allowed(self, inner: Callable[[int, Tensor], Any]) -> Callable[[int, Tensor], Any]:
        # rows are numbered after they were repeated for samples, and before they are for beams
        beams, samples = self._meant("num_beams") or 1, self._meant("num_return_sequences") or 1
        copies = samples if beams == 1 else 1

        def allowed(row: int, ids: Tensor) -> Any:
            return inner(row, torch.cat([self.prompt[row // copies].to(ids), ids[self.cut :]]))

        return allowed

    def _shown(self, one: Any) -> Any:
        """Let a criterion or a processor see the caller's prompt."""
        if type(one).__name__ == "MaxLengthCriteria":
            one = copy(one)
            one.max_length -= self.prompt.shape[1] - self.cut
            return one
        # transformers merges its own with those given by their class, which another class around them would hide
        own = type(one).__module__.startswith("transformers.")
        return one if own else _Shown(one, self.restore)


@dataclass(frozen=True, eq=False)
class _Shown:
    """A stopping criterion or logits processor that sees the caller's prompt."""

    inner: Callable[..., Any]
    restore: Callable[[Tensor], Tensor]

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        return self.inner(self.restore(input_ids), scores)


class _Streamer:
    """A streamer that is given the caller's prompt first."""

    def __init__(self, inner: Any, restore: Callable[[Tensor], Tensor]) -> None:
        self.inner, self.restore, self.begun = inner, restore, False

    def put(self, value: Tensor) -> None:
        self.inner.put(value if self.begun else self.restore(value))
        self.begun = True

    def end(self) -> None:
        self.inner.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
