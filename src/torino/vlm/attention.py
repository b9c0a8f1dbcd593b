"""Proportional attention in the language model.

A merged token is one key where there were n similar ones before, so text attends to the image less the more tokens are
merged. Adding ln n to the attention logits of a token that represents n patches corrects this; it is exact when the n
keys were equal, because a softmax over n equal keys equals a softmax over one of them with ln n added. ToMe introduced
this inside the vision tower as *proportional attention*; here it is applied in the language model.

The model itself is not changed: hooks rewrite the attention masks of its decoder layers inside a block, for the thread
that entered it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from torino.core.checks import check_choice
from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.reducers import Reducer
from torino.vlm.adapters.base import Adapter
from torino.vlm.hooks import placing

Attention = Literal["auto", "plain", "proportional"]
MASKED_ATTENTION = ("sdpa", "eager")  # implementations in transformers that take an additive mask


def uses_proportional(attention: Attention, reducer: Reducer | None, adapter: Adapter) -> bool:
    """Return whether to use proportional attention; ``"auto"`` follows the reducer where the model supports it.

    Raises
    ------
    BadParameter
        If ``"proportional"`` is asked of a model that does not support it.
    """
    check_choice("attention", attention, Attention, "auto, plain or proportional")
    if attention == "auto":
        return reducer is not None and reducer.proportional_attention and not _unsupported(adapter)
    if attention == "proportional" and (reason := _unsupported(adapter)):
        raise BadParameter(reason)
    return attention == "proportional"


def _unsupported(adapter: Adapter) -> str:
    """Return why a model does not support proportional attention; empty where it does."""
    name = type(adapter.model).__name__
    if not adapter.proportional_attention:
        return (
            f'attention="proportional" is not available for {name}. It supports the LLaVA-1.5 family; other families '
            'use tiles, separators that represent no patch, or were not tested. Use attention="plain".'
        )
    text = adapter.config.get_text_config()
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        return (
            f'attention="proportional" is not available for {name} with a sliding window of {text.sliding_window} '
            'tokens, whose masks do not identify tokens. Use attention="plain".'
        )
    kind = str(getattr(text, "_attn_implementation", None) or "eager")
    if kind not in MASKED_ATTENTION:
        return (
            f'attention="proportional" adds to the attention mask, which {kind} does not take. Load the model with '
            'attn_implementation="sdpa" or "eager".'
        )
    return ""


def log_sizes(inputs: Mapping[str, Any], image_token: int, plans: Sequence[Reduction], counts: Sequence[int]) -> Tensor:
    """Return ln n for every visual token of a reduced prompt and 0 elsewhere, shape (rows, length).

    ``counts`` is the number of visual tokens of each image. Tokens that precede those of the plan, such as registers,
    represent no patch.
    """
    ids: Tensor = inputs["input_ids"]
    bias = torch.zeros(ids.shape, device=ids.device)
    pairs = zip(plans, counts, strict=True)
    logs = torch.cat([nn.functional.pad(plan.sizes.float().log(), (count - len(plan), 0)) for plan, count in pairs])
    bias[(ids == image_token) & inputs["attention_mask"].bool()] = logs.to(ids.device)
    return bias


@contextmanager
def attention_bias(model: nn.Module, bias: Tensor | None) -> Generator[None]:
    """Add a bias to the attention logits of the prompt's tokens inside the block.

    Parameters
    ----------
    model : a Hugging Face vision-language model
    bias : Tensor of shape (rows, length), optional
        One value for each token of the prompt; generated tokens get 0. None or all zeros changes nothing.
    """
    if bias is None or not bool(bias.any()):
        yield
        return
    layers = cast(Any, model).get_decoder().layers
    with ExitStack() as stack:
        hook = _BiasHook(bias)
        for layer in layers:
            with placing:
                handle = layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield


@dataclass
class _BiasHook:
    """Rewrite the attention mask of a layer; layers called with the same mask share the result."""

    bias: Tensor
    _thread: int = field(default_factory=threading.get_ident)
    _last: tuple[Any, tuple[int, int], Tensor] | None = None

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any] | None:
        if threading.get_ident() != self._thread:  # another thread uses the same model
            return None
        mask: Tensor | None = given.get("attention_mask")
        states: Tensor = given["hidden_states"] if "hidden_states" in given else arguments[0]
        past, length = 0, states.shape[1]
        cache = given.get("past_key_values")
        if mask is None and cache is not None:
            past = int(cache.get_seq_length(module.layer_idx))
            length = int(cache.get_mask_sizes(length, module.layer_idx)[0])  # a static cache has its maximal length
        if self._last is None or self._last[0] is not mask or self._last[1] != (past, length):
            self._last = (mask, (past, length), self._biased(mask, states, past, length))
        return arguments, {**given, "attention_mask": self._last[2]}

    def _biased(self, mask: Tensor | None, states: Tensor, past: int, length: int) -> Tensor:
        rows, new = states.shape[:2]
        lowest = torch.finfo(states.dtype).min
        if mask is None:  # causal
            mask = torch.ones(new, length, dtype=torch.bool, device=states.device).tril(past).expand(rows, 1, -1, -1)
        if mask.dtype is torch.bool:
            additive = torch.zeros(mask.shape, dtype=states.dtype, device=mask.device).masked_fill_(~mask, lowest)
        else:
            additive = mask.to(states.dtype, copy=True)
        additive = additive.expand(rows, -1, -1, -1).contiguous()
        bias = self.bias.repeat_interleave(rows // len(self.bias), 0)  # beams, or several answers for one prompt
        prompt = additive[..., : bias.shape[1]]
        prompt += bias[:, None, None, : prompt.shape[-1]].to(additive)
        return additive.clamp_(min=lowest)
