"""Drop image tokens inside a stock language model while it reads a prompt.

Hooks before the decoder layers shorten the hidden states, positions and masks of a prompt where a stage of a reducer
says so, so the later layers compute, and cache, fewer tokens. The model is not changed. Every token keeps its position.
Rows of a batch that lose different numbers of tokens are padded on the left again. During decoding the cache of a later
layer is shorter than that of the first one, whose length transformers takes for all masks; the hooks cut the masks to
the tokens that a layer has. After the last layer the tokens return to their places, with zeros for those that were
dropped, so logits have the length of the prompt.

The last token of a prompt is never dropped, even if the prompt ends with an image. If labels are given, the prompt ends
before the first one, so the answer does not influence which tokens it reads.

The signals of the reducers are computed from the inputs of the layers: one row of the attention map, not the whole map,
so the model keeps its attention kernel. Copies of a prompt, such as beams, share one decision.

Where nothing is dropped, nothing is changed. Hooks ignore all threads but the one that registered them.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter, TorinoError
from torino.core.reduction import Reduction
from torino.reducers import InLanguageModelReducer
from torino.reducers._similarity import nearest_kept
from torino.reducers.in_language_model import Stage, tokens_by_block
from torino.vlm.decoder import attention_row, is_supported, take_tokens
from torino.vlm.hooks import placing

if TYPE_CHECKING:
    from torino.vlm.adapters.base import Adapter
    from torino.vlm.attention import AttentionBias

_is_running: ContextVar[bool] = ContextVar("torino_inside", default=False)
IMPLEMENTATIONS = ("sdpa", "eager")  # attention implementations whose masks have one entry for each query and key


@dataclass(frozen=True, eq=False)
class InsideImage:
    """What happens to the tokens of one image inside the language model.

    Attributes
    ----------
    reducer : InLanguageModelReducer
    movable : Tensor of bool
        Which of its tokens may be dropped: those that represent patches, not separators and registers.
    stages : tuple of (int, int)
        After how many blocks tokens are dropped, and how many of the movable ones remain; only those that drop any.
    blocks : int
        Decoder blocks of the language model.
    """

    reducer: InLanguageModelReducer
    movable: Tensor
    stages: tuple[Stage, ...]
    blocks: int

    @property
    def layers(self) -> tuple[int, ...]:
        """Tokens of the image that each block processes."""
        movable = int(self.movable.sum())
        fixed = len(self.movable) - movable
        return tuple(fixed + count for count in tokens_by_block(movable, self.stages, self.blocks))


def plan_inside(
    adapter: Adapter, reducer: InLanguageModelReducer | None, sizes: Sequence[Tensor]
) -> tuple[InsideImage, ...]:
    """Plan what a reducer does inside the language model of an adapter; empty without a reducer.

    Parameters
    ----------
    adapter : Adapter
    reducer : InLanguageModelReducer or None
    sizes : sequence of Tensor
        For each image, the patches that each of its tokens represents; 0 for separators and registers.
    """
    if reducer is None:
        return ()
    if reason := inside_refusal(adapter):
        raise BadParameter(
            f"{reducer.spec} drops tokens inside the language model, which is not possible with "
            f"{type(adapter.model).__name__}: {reason}. Choose a method that works before the language model, such as "
            "torino-x."
        )
    blocks = len(cast(Any, adapter.model).get_decoder().layers)
    images: list[InsideImage] = []
    for size in sizes:
        movable, stages = size > 0, list[Stage]()
        remaining = int(movable.sum())
        for block, count in reducer.stages(remaining, blocks):
            if count < remaining:
                stages.append((block, count))
                remaining = count
        images.append(InsideImage(reducer, movable, tuple(stages), blocks))
    return tuple(images)


def inside_refusal(adapter: Adapter) -> str:
    """Return why no reducer can work inside the language model; empty where one can."""
    if adapter.inside_refusal:
        return adapter.inside_refusal
    if getattr(getattr(adapter.config, "vision_config", None), "deepstack_visual_indexes", None):
        return "its language model adds features of all image tokens in its first layers"
    text = adapter.config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ())
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if types - {"full_attention"} or sliding:
        return "some of its layers have a sliding window or no attention, so they do not cache every token"
    kind = str(getattr(text, "_attn_implementation", None) or "eager")
    if kind not in IMPLEMENTATIONS:
        return f'its attention implementation {kind} takes no mask; load it with attn_implementation="sdpa" or "eager"'
    layers = getattr(cast(Any, adapter.model).get_decoder(), "layers", None)
    if not layers or not all(map(is_supported, layers)):
        return "its decoder layers are not built like those of Llama or Qwen"
    return ""


def check_generation(reducer: InLanguageModelReducer, option: Any) -> None:
    """Refuse options of ``generate`` that need a cache of equal layers.

    Parameters
    ----------
    reducer : InLanguageModelReducer
    option : callable
        Returns the value of an option by name.
    """
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if option(name) is not None:
            raise BadParameter(
                f"{name} is set, and assisted generation is not supported by {reducer.spec}, whose layers cache "
                "different numbers of tokens. Omit it, or choose a method that works before the language model."
            )
    if option("cache_implementation") not in (None, "dynamic"):
        raise _cache_error(reducer, f"cache_implementation={option('cache_implementation')!r} is set")


def _cache_error(reducer: InLanguageModelReducer, what: str) -> BadParameter:
    return BadParameter(
        f"{what}, and {reducer.spec} needs a dynamic cache, which can hold another number of tokens in each layer. "
        "Omit it, or choose a method that works before the language model."
    )


def is_uneven(cache: Any) -> bool:
    """Return whether the layers of a cache hold different numbers of tokens, and no run is active that knows which."""
    if _is_running.get():
        return False
    layers = getattr(cache, "layers", None) or ()
    return len({int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")}) > 1


# ---------------------------------------------------------------------- one run


@dataclass(frozen=True, eq=False)
class Step:
    """A stage of one image: which of its remaining tokens were kept, and who represents the others."""

    kept: Tensor
    score: Tensor
    assigned: Tensor


@dataclass(eq=False)
class Layout:
    """The tokens that a layer has.

    Attributes
    ----------
    index : Tensor of shape (rows, M)
        Position in the prompt of each token; −1 for padding.
    inner : Tensor of shape (rows, P)
        Place of each token of the prompt; −1 for those that the layer does not have.
    """

    index: Tensor
    inner: Tensor
    padded: bool

    @classmethod
    def of(cls, alive: Tensor) -> Layout:
        """Create the layout of the tokens of each row, padded on the left; ``alive`` has shape (rows, P)."""
        rows = [row.nonzero()[:, 0] for row in alive]
        length = max(map(len, rows))
        index = torch.stack([nn.functional.pad(row, (length - len(row), 0), value=-1) for row in rows])
        inner = torch.full(alive.shape, -1)
        for places, row in zip(inner, rows, strict=True):
            places[row] = torch.arange(length - len(row), length)
        return cls(index, inner, bool((index < 0).any()))

    def extended(self, copies: int, prompt: int, total: int, device: torch.device) -> Tensor:
        """Return the places in a sequence of ``total`` tokens, of which the first ``prompt`` are the prompt."""
        more = torch.arange(prompt, total).expand(len(self.index), -1)
        return torch.cat([self.index, more], 1).repeat_interleave(copies, 0).to(device)


class InsideRun:
    """One prompt, or a batch of them, whose images lose tokens inside the language model.

    Parameters
    ----------
    adapter : Adapter
    inputs : mapping
        The prompt that the model reads.
    images : sequence of InsideImage or None
        In order of appearance; None for an image that keeps its tokens.
    counts : sequence of int
        Tokens of each image in the prompt.
    bias : AttentionBias, optional
        What is added to the attention logits of the prompt.
    """

    def __init__(
        self,
        adapter: Adapter,
        inputs: Mapping[str, Any],
        images: Sequence[InsideImage | None],
        counts: Sequence[int],
        bias: AttentionBias | None = None,
    ) -> None:
        ids: Tensor = inputs["input_ids"].cpu()
        mask = inputs.get("attention_mask")
        self.alive = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu().bool()
        self.images, self.bias, self.decoder = images, bias, cast(Any, adapter.model).get_decoder()
        self.layers: Sequence[Any] = self.decoder.layers
        self.prompt = ids.shape[1]
        is_image = (ids == adapter.image_token) & self.alive
        self.last = _last_tokens(self.alive, is_image, inputs.get("labels"))
        self.text = self.alive & ~is_image
        places = is_image.nonzero()
        first = torch.tensor([0, *counts]).cumsum(0).tolist()
        self.rows: list[int] = []
        self.places: list[Tensor] = []
        for number, image in enumerate(images):
            own = places[first[number] : first[number + 1]]
            self.rows.append(int(own[0, 0]) if len(own) else 0)
            self.places.append(own[:, 1] if image is None else own[image.movable.cpu(), 1])
        self.steps: list[list[Step]] = [[] for _ in images]
        self.blocks = sorted({block for image in images if image is not None for block, _ in image.stages})
        self._previous = {block - 1 for block in self.blocks}
        self._layouts: dict[int, Layout] = {}
        self._thread = threading.get_ident()
        self._inputs: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self._masks: tuple[Layout, Tensor | None, Tensor | None] | None = None
        self._embeddings: tuple[Layout, dict[str, Any]] | None = None
        self._past = self._total = 0

    # ------------------------------------------------------------------ results

    def finish(self, number: int, plan: Reduction, spec: str) -> Reduction:
        """Return the reduction of an image, composed of its plan before the language model and what happened inside."""
        for step in self.steps[number]:
            after = Reduction.pick(step.kept, (1, len(plan)), spec, score=step.score, assigned=step.assigned)
            after = replace(after, role=tuple(plan.role[token] for token in step.kept.tolist()))
            plan = replace(plan.then(after), by=spec)
        return replace(plan, by=spec)

    def removed_tokens(self) -> int:
        """Return how many entries of the cache are saved, over all layers and rows, for one sequence per row."""
        rows, saved = len(self.alive), 0
        for number in range(len(self.layers)):
            layout = self.layout(number)
            saved += 0 if layout is None else rows * (self.prompt - layout.index.shape[1])
        return saved

    def layout(self, number: int) -> Layout | None:
        """Return the tokens that a layer has; None for all of the prompt."""
        known = [block for block in self._layouts if block <= number]
        return self._layouts[max(known)] if known else None

    def index(self, number: int) -> Tensor | None:
        """Return the position in the prompt of the tokens that a layer has; None for all."""
        layout = self.layout(number)
        return None if layout is None else layout.index

    # ------------------------------------------------------------------ hooks

    @contextmanager
    def attached(self) -> Generator[None]:
        """Run the language model with its layers hooked; nothing is hooked if no stage drops tokens."""
        if not self.blocks:
            yield
            return
        with ExitStack() as stack:
            stack.callback(_is_running.reset, _is_running.set(True))
            for number, layer in enumerate(self.layers):
                with placing:
                    handle = layer.register_forward_pre_hook(partial(self._before, number), with_kwargs=True)
                stack.callback(handle.remove)
            with placing:
                handle = self.layers[-1].register_forward_hook(self._after)
            stack.callback(handle.remove)
            yield
        if set(self.blocks) - set(self._layouts):
            raise TorinoError(
                "The language model ran without the hooks that drop its tokens, which hooks on a compiled model cannot "
                "do. Pass the model from before torch.compile, or choose a method that works before the language model."
            )

    def _before(
        self, number: int, layer: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if threading.get_ident() != self._thread:
            return None
        hidden: Tensor = arguments[0] if arguments else given["hidden_states"]
        if number == 0:
            self._begin(hidden, given)
        reads_prompt = self._past == 0
        if reads_prompt and number in self.blocks and number not in self._layouts:
            self._decide(number, hidden, self._cut(self.layout(number - 1), hidden, given))
        layout = self.layout(number)
        changed = given if layout is None else self._cut(layout, hidden, given)
        if reads_prompt and layout is not None and layout is not self.layout(number - 1):
            hidden = self._shorten(layout, self.layout(number - 1), hidden)
        if reads_prompt and number in self._previous and number + 1 not in self._layouts:
            self._inputs[number] = hidden.detach(), changed
        if layout is None:
            return None
        return (hidden, *arguments[1:]), {name: value for name, value in changed.items() if name != "hidden_states"}

    def _after(self, layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        """Return the tokens of a prompt to their places."""
        layout = self.layout(len(self.layers) - 1)
        if threading.get_ident() != self._thread or self._past or layout is None:
            return None
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        index = layout.extended(self._copies(hidden), self.prompt, self._total, hidden.device)
        rows = torch.arange(len(hidden), device=hidden.device)[:, None].expand_as(index)
        restored = hidden.new_zeros(len(hidden), self._total, hidden.shape[2])
        restored = restored.index_put((rows[index >= 0], index[index >= 0]), hidden[index >= 0])
        return (restored, *cast(tuple[Any, ...], output)[1:]) if isinstance(output, tuple) else restored

    def _begin(self, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Read from the first layer how many tokens are cached and how many follow."""
        cache: Any = given.get("past_key_values")
        kinds = {type(layer).__name__ for layer in getattr(cache, "layers", None) or ()}
        if cache is not None and (kinds - {"DynamicLayer"} or not hasattr(cache, "layers")):
            reducer = next(image.reducer for image in self.images if image is not None)
            raise _cache_error(reducer, f"past_key_values is a {type(cache).__name__} of {', '.join(sorted(kinds))}")
        self._past = 0 if cache is None else int(cache.get_seq_length())
        self._total = self._past + hidden.shape[1]
        self._masks = self._embeddings = None

    def _copies(self, hidden: Tensor) -> int:
        return len(hidden) // len(self.alive)  # beams, or several answers for one prompt

    # ------------------------------------------------------------------ shortening

    def _shorten(self, layout: Layout, before: Layout | None, hidden: Tensor) -> Tensor:
        """Return the hidden states of the tokens of a layout, from those of the layout before."""
        copies = self._copies(hidden)
        index = layout.extended(copies, self.prompt, self._total, hidden.device).clamp(min=0)
        if before is not None:
            new = self._total - self.prompt
            places = torch.cat(
                [before.inner, before.index.shape[1] + torch.arange(new).expand(len(before.inner), -1)], 1
            )
            index = places.repeat_interleave(copies, 0).to(hidden.device).gather(1, index).clamp(min=0)
        return hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[2]))

    def _cut(self, layout: Layout | None, hidden: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a layer for the tokens that it has."""
        if layout is None:
            return given
        changed = {**given, "attention_mask": self._cut_mask(layout, hidden, given.get("attention_mask"))}
        if self._past:
            return changed
        if self._embeddings is None or self._embeddings[0] is not layout:
            index = layout.extended(self._copies(hidden), self.prompt, self._total, hidden.device).clamp(min=0)
            cut = {name: given.get(name) for name in ("position_ids", "position_embeddings")}
            if cut["position_ids"] is not None:
                cut["position_ids"] = take_tokens(cut["position_ids"], index, -1)
            if cut["position_embeddings"] is not None:
                cut["position_embeddings"] = tuple(take_tokens(part, index, -2) for part in cut["position_embeddings"])
            self._embeddings = layout, cut
        return changed | self._embeddings[1]

    def _cut_mask(self, layout: Layout, hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask between the tokens of a layout; layers called with the same mask share the result."""
        known = self._masks
        if known is not None and known[0] is layout and known[1] is mask:
            return known[2]
        keys = layout.extended(self._copies(hidden), self.prompt, self._total, hidden.device)
        cut: Tensor | None = None
        if mask is not None:
            cut = mask.expand(len(hidden), -1, -1, -1)
            if not self._past:
                cut = cut.gather(2, keys.clamp(min=0)[:, None, :, None].expand(-1, cut.shape[1], -1, cut.shape[3]))
            columns = keys.clamp(min=0)[:, None, None].expand(-1, cut.shape[1], cut.shape[2], -1)
            cut = cut.gather(3, columns)
        elif layout.padded:
            rows = keys.shape[1] if not self._past else self._total - self._past
            cut = torch.ones(rows, keys.shape[1], dtype=torch.bool, device=hidden.device)
            cut = cut.tril(keys.shape[1] - rows).expand(len(hidden), 1, -1, -1)
        if cut is not None and layout.padded:
            cut = cut.clone()
            padding = (keys < 0)[:, None, None]
            closed, opened = (False, True) if cut.dtype is torch.bool else (torch.finfo(cut.dtype).min, 0)
            cut = cut.masked_fill(padding, closed)
            if not self._past:  # padding sees itself, because attention to nothing is undefined
                itself = padding & torch.eye(keys.shape[1], dtype=torch.bool, device=hidden.device)
                cut = cut.masked_fill(itself, opened)
        self._masks = layout, mask, cut
        return cut

    # ------------------------------------------------------------------ decisions

    @torch.no_grad()
    def _decide(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> None:
        """Drop tokens before a layer; ``hidden`` and ``given`` are its inputs with the tokens of the layer before."""
        for image, (facts, row) in enumerate(zip(self.images, self.rows, strict=True)):
            count = None if facts is None else dict(facts.stages).get(number)
            if facts is None or count is None:
                continue
            signals = self._signals(facts.reducer.reads, number, image, row, hidden, given)
            kept, score = (part.cpu() for part in facts.reducer.select(signals, count))
            if int(self.places[image][-1]) == self.last[row]:
                kept, score = _keep_last(kept, score, len(self.places[image]) - 1)
            self.steps[image].append(Step(kept, score, nearest_kept(signals["hidden"], kept)))
            dropped = torch.ones(len(self.places[image]), dtype=torch.bool).index_fill_(0, kept, False)
            self.alive[row, self.places[image][dropped]] = False
            self.places[image] = self.places[image][kept]
        self._inputs.clear()
        self._layouts[number] = Layout.of(self.alive)

    def _signals(
        self, reads: frozenset[str], number: int, image: int, row: int, hidden: Tensor, given: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Compute the signals of one image before a layer, and its hidden states."""
        layout = self.layout(number - 1)
        inner = torch.arange(self.prompt) if layout is None else layout.inner[row]
        text = self.text[row].clone()
        text[: int(self.places[image][-1])] = False
        text[self.last[row] + 1 :] = False
        places, after = inner[self.places[image]].to(hidden.device), inner[text].to(hidden.device)
        states = self.decoder.norm(hidden[row * self._copies(hidden)])
        signals = {"hidden": states[places].float()}
        if "text_hidden" in reads:
            signals["text_hidden"] = states[after].float()
        if reads & {"attention", "keys", "text_keys"}:
            attention, keys = self._attention(number - 1, row, *self._inputs[number - 1])
            signals |= {"attention": attention[:, places], "keys": keys[places], "text_keys": keys[after]}
        if "next_attention" in reads:
            signals["next_attention"] = self._attention(number, row, hidden, given)[0][:, places]
        return signals

    def _attention(self, number: int, row: int, hidden: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the attention of the last token of a row to all of its tokens in a layer, and their keys."""
        layout = self.layout(number)
        query = self.last[row] if layout is None else int(layout.inner[row, self.last[row]])
        bias = None if self.bias is None else self.bias.row(number, row, self.last[row], self.index(number))
        return attention_row(self.layers[number], hidden, given, row * self._copies(hidden), query, bias)


def _last_tokens(alive: Tensor, is_image: Tensor, labels: Tensor | None) -> list[int]:
    """Return the position of the last token of each prompt.

    If labels follow the images, it is the token before the first label, because what follows is the answer.
    """
    last: list[int] = []
    for row, (tokens, images) in enumerate(zip(alive, is_image, strict=True)):
        known = tokens if labels is None else tokens & (labels[row].cpu() != -100)
        places, answer = tokens.nonzero()[:, 0], known.nonzero()[:, 0]
        before = places[:0] if labels is None or not len(answer) else places[places < answer[0]]
        image = images.nonzero()[:, 0]
        fits = len(before) and (not len(image) or before[-1] >= image[-1])
        last.append(int(before[-1] if fits else places[-1]))
    return last


def _keep_last(kept: Tensor, score: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Let the last token of a prompt, from whose output the answer continues, replace the kept one of lowest score."""
    if int(kept[-1]) == last:
        return kept, score
    others = torch.ones(len(kept), dtype=torch.bool)
    others[score.nan_to_num(torch.inf).argmin()] = False
    return torch.cat([kept[others], torch.tensor([last])]), torch.cat([score[others], torch.tensor([torch.nan])])
