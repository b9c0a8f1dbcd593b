"""Mass: tokens that are attended to as all the patches they stand for.

A token that stands for n patches is one key among others, where there were n alike before. Text that looked at the
picture with a certain share of its attention now has less to look at, the more the fewer tokens there are. Adding ln n
to what a token of n patches is attended with makes up for it, exactly where the n were the same: a softmax over n equal
keys gives what it gives over one with ln n added. ToMe does so inside the tower (its *proportional attention*); here it
is the language model. Nothing of the model is changed: the masks of its attention are, for as long as a block lasts,
and for the thread that is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.reducers import Reducer
from torino.vlm.adapters.base import Adapter
from torino.vlm.hooks import placing

READ = ("sdpa", "eager")  # attention of transformers that takes a mask between tokens


def weigh(mass: bool | None, reducer: Reducer | None, host: Adapter) -> bool:
    """Whether tokens are given a mass: as the user says, or as the method has it where the model allows it."""
    if mass:
        problem = _problem(host)
        if problem:
            raise BadParameter(problem)
        return True
    return mass is None and reducer is not None and reducer.proportional_attention and not _problem(host)


def _problem(host: Adapter) -> str:
    """Why tokens cannot be given a mass in a model; empty where they can."""
    if not host.proportional_attention:
        return (
            f"mass=True is not there for {type(host.model).__name__}: it is made for LLaVA-1.5's family, and in others "
            "images come in tiles, with tokens between them that stand for no patch, or it was not tried. Leave it out."
        )
    text = host.config.get_text_config()
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        return (
            f"mass=True is not there for {type(host.model).__name__} with a sliding window of {text.sliding_window} "
            "tokens, whose masks do not say which tokens they are about. Leave it out."
        )
    kind = str(getattr(text, "_attn_implementation", None) or "eager")
    if kind not in READ:
        return (
            f"mass=True adds to a mask of attention, which {kind} does not take. Open the model with "
            'attn_implementation="sdpa" or "eager".'
        )
    return ""


def added_by_mass(
    inputs: Mapping[str, Any], image_token: int, plans: Sequence[Reduction], counts: Sequence[int]
) -> Tensor:
    """What each token of a reduced prompt gets added to what it is attended with, (rows, length): ln n, or 0.

    ``counts`` are the visual tokens of each image; what an image has before those of its plan, such as registers,
    stands for no patch.
    """
    ids: Tensor = inputs["input_ids"]
    added = torch.zeros(ids.shape, device=ids.device)
    pairs = zip(plans, counts, strict=True)
    logs = torch.cat([nn.functional.pad(plan.mass.float().log(), (count - len(plan), 0)) for plan, count in pairs])
    added[(ids == image_token) & inputs["attention_mask"].bool()] = logs.to(ids.device)
    return added


@contextmanager
def attending(model: nn.Module, added: Tensor) -> Generator[None]:
    """Let the language model attend to the tokens of a prompt with something added, inside the block.

    Parameters
    ----------
    model : a Hugging Face vision-language model
    added : Tensor of shape (rows, length)
        For each token of the prompt; what is written after it gets nothing added.
    """
    if not bool(added.any()):  # as it is with all tokens, and with methods whose tokens stand for themselves alone
        yield
        return
    blocks = cast(Any, model).get_decoder().layers
    with ExitStack() as stack:
        hook = _Added(added)
        for block in blocks:
            with placing:
                handle = block.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield


@dataclass
class _Added:
    """Rewrites the mask that attention is called with; blocks that are called with the same one share what it made."""

    added: Tensor
    _thread: int = field(default_factory=threading.get_ident)
    _last: tuple[Any, tuple[int, int], Tensor] | None = None

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any] | None:
        if threading.get_ident() != self._thread:  # another one asks the same model something else
            return None
        mask: Tensor | None = given.get("attention_mask")
        states: Tensor = given["hidden_states"] if "hidden_states" in given else arguments[0]
        past, length = 0, states.shape[1]
        cache = given.get("past_key_values")
        if mask is None and cache is not None:
            past = int(cache.get_seq_length(module.layer_idx))
            length = int(cache.get_mask_sizes(length, module.layer_idx)[0])  # a static one is as long as it may get
        if self._last is None or self._last[0] is not mask or self._last[1] != (past, length):
            self._last = (mask, (past, length), self._mask(mask, states, past, length))
        return arguments, {**given, "attention_mask": self._last[2]}

    def _mask(self, mask: Tensor | None, states: Tensor, past: int, length: int) -> Tensor:
        rows, new = states.shape[:2]
        least = torch.finfo(states.dtype).min
        if mask is None:  # each token sees all that went before
            mask = torch.ones(new, length, dtype=torch.bool, device=states.device).tril(past).expand(rows, 1, -1, -1)
        if mask.dtype is torch.bool:
            made = torch.zeros(mask.shape, dtype=states.dtype, device=mask.device).masked_fill_(~mask, least)
        else:
            made = mask.to(states.dtype, copy=True)
        made = made.expand(rows, -1, -1, -1).contiguous()
        several = self.added.repeat_interleave(rows // len(self.added), 0)  # of a beam, or of several answers
        known = made[..., : several.shape[1]]
        known += several[:, None, None, : known.shape[-1]].to(made)
        return made.clamp_(min=least)
