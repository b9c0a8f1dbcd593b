"""Proportional and calibrated attention in the language model.

A merged token is one key where there were n similar ones before, so text attends to the image less the more tokens are
merged. Adding ln n to the attention logits of a token that represents n patches corrects this; it is exact when the n
keys were equal, because a softmax over n equal keys equals a softmax over one of them with ln n added. ToMe introduced
this inside the vision tower as *proportional attention*; here it is applied in the language model. Separators of tiles
and registers represent no patch and get 0.

RESTORE (ICML 2026, arXiv 2606.01711) adds a second term. Rotary position embeddings let attention decay with distance,
for equal queries and keys by D(d) = mean_j cos(d·θ_j) with the rotary frequencies θ_j of the model. A query at position
m adds ln s_n + ln(2 − D(|m − n|)) to the logit of a key at position n that represents s_n patches, text included. As in
the released code,

- the distance term is used for the queries of the prompt; generated tokens add ln s_n only,
- the first layer of the language model uses the same size N/M for all tokens of an image of N patches and M tokens.

Differences from the released code: frequencies are those of the model, not of LLaVA-1.5. Models with
three-dimensional positions (M-RoPE) use the distance along the axis that each frequency encodes, which is a sum over
the axes weighted by their numbers of frequencies.

The model itself is not changed: hooks rewrite the attention masks of its decoder layers inside a block, for the thread
that entered it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from torino.core.checks import check_choice
from torino.core.errors import BadParameter
from torino.reducers import AttentionMode, Reducer
from torino.vlm.adapters.base import Adapter
from torino.vlm.hooks import placing

Attention = Literal["auto", "plain", "proportional", "restore"]
MASKED_ATTENTION = ("sdpa", "eager")  # implementations in transformers that take an additive mask


def attention_mode(attention: Attention, reducer: Reducer | None, adapter: Adapter) -> AttentionMode:
    """Resolve ``"auto"`` to the reducer's own attention where the model supports it, and to plain elsewhere.

    Raises
    ------
    BadParameter
        If another attention than plain is asked of a model that does not support it.
    """
    check_choice("attention", attention, Attention, "auto, plain, proportional or restore")
    if attention == "auto":
        own = "plain" if reducer is None else reducer.attention_mode
        return "plain" if own != "plain" and _unsupported(own, adapter) else own
    if attention != "plain" and (reason := _unsupported(attention, adapter)):
        raise BadParameter(reason)
    return attention


def uses_proportional(attention: Attention, reducer: Reducer | None, adapter: Adapter) -> bool:
    """Return whether attention depends on how many patches a token represents: any mode but plain."""
    return attention_mode(attention, reducer, adapter) != "plain"


def _unsupported(mode: AttentionMode, adapter: Adapter) -> str:
    """Return why a model does not support an attention mode; empty where it does."""
    name = type(adapter.model).__name__
    if not adapter.proportional_attention:
        return (
            f'attention="{mode}" is not available for {name}, whose adapter does not count the patches of each token. '
            'Use attention="plain".'
        )
    text = adapter.config.get_text_config()
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        return (
            f'attention="{mode}" is not available for {name} with a sliding window of {text.sliding_window} '
            'tokens, whose masks do not identify tokens. Use attention="plain".'
        )
    kind = str(getattr(text, "_attn_implementation", None) or "eager")
    if kind not in MASKED_ATTENTION:
        return (
            f'attention="{mode}" adds to the attention mask, which {kind} does not take. Load the model with '
            'attn_implementation="sdpa" or "eager".'
        )
    if mode == "restore" and _rotary(adapter.model) is None:
        return (
            f'attention="restore" is not available for {name}, whose language model has no single set of rotary '
            'frequencies to measure distances by. Use attention="proportional" or "plain".'
        )
    return ""


# ---------------------------------------------------------------------- what is added


@dataclass(frozen=True, eq=False)
class AttentionBias:
    """What is added to the attention logits of a prompt; generated tokens get 0.

    Attributes
    ----------
    sizes : Tensor of shape (rows, length)
        ln n for each token of the prompt, as a key.
    first_sizes : Tensor of shape (rows, length), optional
        The same for the first layer, if it differs.
    distance : Tensor of shape (rows, length, length), optional
        For each query and key of the prompt.
    """

    sizes: Tensor
    first_sizes: Tensor | None = None
    distance: Tensor | None = None

    def __bool__(self) -> bool:
        """Return whether anything is added."""
        return self.distance is not None or bool(self.sizes.any()) or self.first_sizes is not None

    def row(self, layer: int, row: int, query: int, index: Tensor | None = None) -> Tensor:
        """Return what is added for one query of one row in a layer that has all tokens, or those of ``index``."""
        sizes = self.first_sizes if layer == 0 and self.first_sizes is not None else self.sizes
        values = sizes[row] if self.distance is None else sizes[row] + self.distance[row, query].to(sizes)
        return values if index is None else values[index[row].to(values.device)]

    def taken(self, index: Tensor) -> AttentionBias:
        """Return the bias of some tokens of each row; ``index`` has shape (rows, tokens), −1 for padding."""
        index = index.clamp(min=0).to(self.sizes.device)
        distance = self.distance
        if distance is not None:
            distance = distance.gather(1, index[:, :, None].expand(-1, -1, distance.shape[2]))
            distance = distance.gather(2, index[:, None].expand(-1, index.shape[1], -1))
        first = None if self.first_sizes is None else self.first_sizes.gather(1, index)
        return AttentionBias(self.sizes.gather(1, index), first, distance)

    def padded(self, length: int) -> AttentionBias:
        """Return the bias of the same prompt with padding on the left, up to a length."""
        gap = length - self.sizes.shape[1]

        def pad(values: Tensor | None, dimensions: int) -> Tensor | None:
            return None if values is None else nn.functional.pad(values, (gap, 0) * dimensions)

        return AttentionBias(cast(Tensor, pad(self.sizes, 1)), pad(self.first_sizes, 1), pad(self.distance, 2))


def make_bias(
    mode: AttentionMode, adapter: Adapter, inputs: Mapping[str, Any], sizes: Sequence[Tensor], patches: Sequence[int]
) -> AttentionBias | None:
    """Return what a mode adds to the attention logits of a reduced prompt; None for plain attention.

    Parameters
    ----------
    mode : {"plain", "proportional", "restore"}
    adapter : Adapter
    inputs : mapping
        The reduced prompt, with its mask, and with its positions if they do not simply count.
    sizes : sequence of Tensor
        For each image, the patches that each of its tokens represents; 0 for separators and registers.
    patches : sequence of int
        Patches of each image before reduction.
    """
    if mode == "plain":
        return None
    counts = [len(size) for size in sizes]
    log = log_sizes(inputs, adapter.placeholder(inputs), sizes, counts)
    if mode == "proportional":
        return AttentionBias(log)
    uniform = [
        torch.where(size > 0, number / max(int((size > 0).sum()), 1), 0)
        for size, number in zip(sizes, patches, strict=True)
    ]
    frequencies, axis = cast("tuple[Tensor, Tensor]", _rotary(adapter.model))
    distance = distance_bias(_positions(inputs), frequencies, axis)
    has_image = ((inputs["input_ids"] == adapter.placeholder(inputs)) & inputs["attention_mask"].bool()).any(1)
    return AttentionBias(
        log,
        log_sizes(inputs, adapter.placeholder(inputs), uniform, counts),
        distance * has_image[:, None, None],  # a prompt without images is answered as by the stock model
    )


def log_sizes(inputs: Mapping[str, Any], image_token: int, sizes: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return ln n for every visual token of a reduced prompt and 0 elsewhere, shape (rows, length).

    ``sizes`` is the number of patches that each token of an image represents, ``counts`` the number of visual tokens of
    each image. A token of size 0, or that precedes those with a size, such as a register, represents no patch.
    """
    ids: Tensor = inputs["input_ids"]
    bias = torch.zeros(ids.shape, device=ids.device)
    pairs = zip(sizes, counts, strict=True)
    logs = [nn.functional.pad(size.float().clamp(min=1).log(), (count - len(size), 0)) for size, count in pairs]
    bias[(ids == image_token) & inputs["attention_mask"].bool()] = torch.cat(logs).to(ids.device)
    return bias


def distance_bias(positions: Tensor, frequencies: Tensor, axis: Tensor) -> Tensor:
    """Return ln(2 − D) between all tokens of each row, shape (rows, length, length).

    Parameters
    ----------
    positions : Tensor of shape (axes, rows, length)
    frequencies : Tensor of shape (J,)
        Rotary frequencies θ.
    axis : Tensor of shape (J,)
        The axis that each frequency encodes.

    Examples
    --------
    >>> distance_bias(torch.tensor([[[0, 3]]]), torch.tensor([torch.pi / 3]), torch.tensor([0])).exp()
    tensor([[[1., 3.],
             [3., 1.]]])
    """
    total = torch.zeros(*positions.shape[1:], positions.shape[2], device=positions.device)
    for number, coordinate in enumerate(positions):
        own = frequencies[axis == number].to(positions.device)
        if not len(own):
            continue
        distance = (coordinate[:, :, None] - coordinate[:, None, :]).abs()
        known, index = distance.unique(return_inverse=True)
        total += (known[:, None] * own).cos().sum(1)[index]
    return (2 - total / len(frequencies)).log()


def _positions(inputs: Mapping[str, Any]) -> Tensor:
    """Return the positions of a prompt, shape (axes, rows, length)."""
    given: Tensor | None = inputs.get("position_ids")
    if given is None:
        return (inputs["attention_mask"].long().cumsum(1) - 1).clamp(min=0)[None]
    return given[None] if given.ndim == 2 else given[1:]  # the first of four rows is a plain count


def _rotary(model: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the rotary frequencies of the language model and the axis of positions that each one encodes."""
    rotary: Any = getattr(cast(Any, model).get_decoder(), "rotary_emb", None)
    frequencies: Tensor | None = getattr(rotary, "inv_freq", None)
    if frequencies is None:
        return None
    axis = torch.zeros(len(frequencies), dtype=torch.int64)
    if getattr(rotary, "mrope_section", None) is None:
        return frequencies.float().cpu(), axis
    states = torch.zeros(1, 1, 1, device=frequencies.device)
    for number in range(3):  # a position of 1 on one axis turns the frequencies of this axis
        position = torch.zeros(3, 1, 1, dtype=torch.int64, device=frequencies.device)
        position[number] = 1
        sine: Tensor = rotary(states, position)[1]
        axis[sine.reshape(-1)[: len(frequencies)].cpu() != 0] = number
    return frequencies.float().cpu(), axis


# ---------------------------------------------------------------------- hooks


@contextmanager
def attention_bias(
    model: nn.Module, bias: AttentionBias | None, index: Callable[[int], Tensor | None] | None = None
) -> Generator[None]:
    """Add a bias to the attention logits of the prompt's tokens inside the block; None or zeros change nothing.

    ``index`` returns which tokens of the prompt a layer has, shape (rows, tokens); None for all.
    """
    if bias is None or not bias:
        yield
        return
    layers = cast(Any, model).get_decoder().layers
    first, other = (_BiasHook(bias, number, index) for number in range(2))
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            with placing:
                handle = layer.self_attn.register_forward_pre_hook(other if number else first, with_kwargs=True)
            stack.callback(handle.remove)
        yield


@dataclass
class _BiasHook:
    """Rewrite the attention mask of a layer; layers called with the same mask share the result."""

    bias: AttentionBias
    layer: int
    """0 for the first layer, any other number for the others."""
    index: Callable[[int], Tensor | None] | None = None
    _thread: int = field(default_factory=threading.get_ident)
    _last: tuple[Any, tuple[int, int], Tensor] | None = None
    _taken: tuple[Tensor | None, AttentionBias] | None = None

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any] | None:
        if threading.get_ident() != self._thread:  # another thread uses the same model
            return None
        index = None if self.index is None else self.index(cast(Any, module).layer_idx)
        if self._taken is None or self._taken[0] is not index:  # the layer has other tokens than the one before
            self._taken, self._last = (index, self.bias if index is None else self.bias.taken(index)), None
        mask: Tensor | None = given.get("attention_mask")
        states: Tensor = given["hidden_states"] if "hidden_states" in given else arguments[0]
        past, length = 0, states.shape[1]
        cache = given.get("past_key_values")
        if cache is not None and (mask is None or self.bias.distance is not None):
            past = int(cache.get_seq_length(module.layer_idx))
            if mask is None:  # a static cache has its maximal length
                length = int(cache.get_mask_sizes(length, module.layer_idx)[0])
        if self._last is None or self._last[0] is not mask or self._last[1] != (past, length):
            self._last = (mask, (past, length), self._biased(self._taken[1], mask, states, past, length))
        return arguments, {**given, "attention_mask": self._last[2]}

    def _biased(self, bias: AttentionBias, mask: Tensor | None, states: Tensor, past: int, length: int) -> Tensor:
        rows, new = states.shape[:2]
        lowest = torch.finfo(states.dtype).min
        if mask is None:  # causal
            mask = torch.ones(new, length, dtype=torch.bool, device=states.device).tril(past).expand(rows, 1, -1, -1)
        if mask.dtype is torch.bool:
            additive = torch.zeros(mask.shape, dtype=states.dtype, device=mask.device).masked_fill_(~mask, lowest)
        else:
            additive = mask.to(states.dtype, copy=True)
        additive = additive.expand(rows, -1, -1, -1).contiguous()
        sizes = bias.first_sizes if self.layer == 0 and bias.first_sizes is not None else bias.sizes
        copies = rows // len(sizes)  # beams, or several answers for one prompt
        prompt = additive[..., : sizes.shape[1]]
        prompt += sizes.repeat_interleave(copies, 0)[:, None, None, : prompt.shape[-1]].to(additive)
        if bias.distance is not None and past < sizes.shape[1]:
            distance = bias.distance[:, past : past + new, : prompt.shape[-1]]
            prompt[:, :, : distance.shape[1]] += distance.repeat_interleave(copies, 0)[:, None].to(additive)
        return additive.clamp_(min=lowest)
