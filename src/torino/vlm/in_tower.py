"""Run a stock vision tower with a reducer active in its blocks, between their attention and their MLP.

The input of the first block is captured, and the blocks are then run here, with their own modules in their own order
(norm, attention, residual, *reduction step*, norm, MLP, residual, and the layer scales of DINOv2). A hook could not do
this, because the step must shorten the residual too. The model is not changed. Keys and queries are captured by hooks,
which only react to this thread and are removed even after an exception. Until a token is removed, attention is called
exactly as the tower calls it, so a run that removes nothing is bitwise equal to the stock tower.

All images of a call lose the same number of tokens in each block, so a batch remains one tensor. The sizes of tokens
enter attention as an additive mask of ln(size) on the keys, which is zero for CLS and registers. These are kept apart
from the patches and never reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torino.core.errors import MissingSignal, TorinoError
from torino.core.reduction import ReductionBatch
from torino.core.timing import stage
from torino.reducers import InTowerReducer, TowerState
from torino.vlm.attention import MASKED_ATTENTION
from torino.vlm.hooks import OutputCapturer, TowerLayout, capture

# The modules of the two halves of a block in the order they run: CLIP and SigLIP, then DINOv2.
BLOCK_HALVES = (
    (("layer_norm1", "self_attn"), ("layer_norm2", "mlp")),
    (("norm1", "attention", "layer_scale1", "drop_path"), ("norm2", "mlp", "layer_scale2", "drop_path")),
)
# The projections that each signal of a block is computed from; TowerState.advance documents the shapes.
BLOCK_SIGNALS = {"head_keys": ("key",), "keys": ("key",), "queries": ("query",), "attention": ("query", "key")}


@dataclass(frozen=True, eq=False)
class InTowerOutput:
    """Output of a tower in which a reducer was active.

    Attributes
    ----------
    states : Tensor of shape (images, P + M, D)
        Tokens at the feature layer: the P tokens before the patches, then the M remaining ones.
    plans : ReductionBatch
        The patches that each of the M tokens represents, exactly. The blocks between the steps change the values,
        however, so applying a plan to the tokens of the full tower does **not** give ``states``.
    """

    states: Tensor
    plans: ReductionBatch


def run_in_tower(
    tower: nn.Module,
    parts: TowerLayout,
    block: int,
    reducer: InTowerReducer,
    grid: tuple[int, int],
    run: Callable[[], object],
) -> InTowerOutput:
    """Run a tower up to the feature layer with a reducer active in its blocks.

    Parameters
    ----------
    tower, parts
        A CLIP, SigLIP or DINOv2 tower and its layout.
    block : int
        Zero-based block whose output is the feature layer; −1 is the input of the first block.
    reducer : InTowerReducer
    grid : (int, int)
        Patch grid of the images.
    run : callable
        Calls the tower on its pixels.
    """
    halves = [_find_halves(module, tower) for module in parts.blocks[: block + 1]]
    unknown = sorted(reducer.needs - set(BLOCK_SIGNALS))
    if unknown:
        raise MissingSignal(
            f"{reducer.spec} reads {', '.join(unknown)} of each block; inside a tower the available signals are "
            f"{', '.join(BLOCK_SIGNALS)}."
        )
    hidden, prefix = capture(tower, parts, -1, frozenset(), run).states, parts.prefix
    if hidden.shape[1] != prefix + grid[0] * grid[1]:
        raise TorinoError(
            f"{type(tower).__name__} made {hidden.shape[1] - prefix} patches of an image with a grid of "
            f"{grid[0]}x{grid[1]}, and {reducer.spec} needs complete grids. Choose a reducer that works on the "
            "tower's output, such as tome or gtp."
        )
    states = [reducer.begin(image[prefix:].detach(), grid, len(halves), parts.has_cls) for image in hidden]
    if any(states[0].removals[:-1]) and states[0].reducer.proportional:
        _check_attention(tower, reducer)
    needed = {part for need in reducer.needs for part in BLOCK_SIGNALS[need]}
    projections = {"query": parts.query, "key": parts.key}
    for module, (attention_half, mlp_half) in zip(parts.blocks, halves, strict=False):
        hidden = _to_device_of(module, hidden)
        mask = _size_mask(states, hidden, prefix) if states[0].proportional else None
        with ExitStack() as hooks:
            capturer = OutputCapturer(stop=False)
            for part in needed if states[0].num_to_remove else ():
                capturer.register(hooks, projections[part](module), part)
            hidden = _run_half(module, attention_half, hidden, mask)
        states = _advance(states, reducer.needs, capturer.captured, parts, mask)
        hidden = _run_half(module, mlp_half, _apply_steps(states, hidden, prefix))
    states = [state.finish() for state in states]
    plans = ReductionBatch.of([state.reduction for state in states])
    return InTowerOutput(_apply_steps(states, hidden, prefix), plans)


@torch.no_grad()
def _advance(
    states: Sequence[TowerState],
    needs: frozenset[str],
    captured: Mapping[str, Tensor],
    parts: TowerLayout,
    mask: Tensor | None,
) -> list[TowerState]:
    """Advance every image by one block; the signals of an image are freed before those of the next are computed."""
    advanced: list[TowerState] = []
    for image, state in enumerate(states):
        signals: dict[str, Tensor] = {}
        if state.num_to_remove:
            with stage("signals"):
                projected = {part: values[image].float() for part, values in captured.items()}
                bias = None if mask is None else mask[image, 0, 0].float()
                signals = {need: _compute_signal(need, projected, parts, bias) for need in needs}
        with stage("steps"):
            advanced.append(state.advance(signals))
    return advanced


def _compute_signal(need: str, projected: Mapping[str, Tensor], parts: TowerLayout, bias: Tensor | None) -> Tensor:
    """Compute a signal of one image from its queries and keys of shape (P + T, width)."""
    if need in ("keys", "queries"):
        return projected[BLOCK_SIGNALS[need][0]][parts.prefix :]
    keys = projected["key"].unflatten(1, (parts.heads, -1))
    if need == "head_keys":
        return keys.mean(1)[parts.prefix :]
    queries = projected["query"].unflatten(1, (parts.heads, -1))
    with torch.autocast(keys.device.type, enabled=False):
        logits = queries.transpose(0, 1) @ keys.permute(1, 2, 0) * keys.shape[2] ** -0.5
        return (logits if bias is None else logits + bias).softmax(-1)[:, :, parts.prefix :]


def _size_mask(states: Sequence[TowerState], hidden: Tensor, prefix: int) -> Tensor:
    """Return ln(size) for each key, shape (images, 1, 1, tokens)."""
    sizes = torch.stack([state.sizes.log() for state in states])
    return nn.functional.pad(sizes, (prefix, 0))[:, None, None].to(hidden)


def _apply_steps(states: Sequence[TowerState], hidden: Tensor, prefix: int) -> Tensor:
    """Apply the last step of each image to its patches."""
    steps = [state.step for state in states if state.step is not None]
    if not steps:
        return hidden
    before, patches = hidden[:, :prefix], hidden[:, prefix:]
    if len(steps) < len(states):  # the final sort is not needed for images that are already in order
        pairs = zip(states, patches, strict=True)
        rows = [state.step.apply(image) if state.step else image for state, image in pairs]
        return torch.cat([before, torch.stack(rows)], 1)
    reduced = ReductionBatch.of(steps).apply(list(patches)).values
    return torch.cat([before, reduced.view(len(steps), -1, reduced.shape[1])], 1)


def _run_half(block: nn.Module, names: Sequence[str], hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run one half of a block: its modules in order, and the residual connection."""
    change: Any = hidden
    for name in names:
        module = cast(nn.Module, getattr(block, name))
        is_attention = name in ("self_attn", "attention")
        change = module(change, attention_mask=mask)[0] if is_attention else module(change)
    return hidden + change


def _find_halves(block: nn.Module, tower: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules of a block in the order they run; the block must have exactly the modules of a known kind."""
    children = {name for name, _ in block.named_children()}
    for halves in BLOCK_HALVES:
        if children == {name for half in halves for name in half}:
            return halves
    raise TorinoError(
        f"Torino cannot run a reducer inside the blocks of {type(tower).__name__} ({type(block).__name__} with "
        f"{', '.join(sorted(children))}). Supported: CLIP, SigLIP, DINOv2 with or without registers. Choose a reducer "
        "that works on the tower's output, such as tome or gtp."
    )


def _check_attention(tower: nn.Module, reducer: InTowerReducer) -> None:
    kind = str(getattr(tower.config, "_attn_implementation", None) or "eager")
    if kind not in MASKED_ATTENTION:
        raise TorinoError(
            f"{reducer.spec} uses proportional attention in the tower, which adds to the attention mask, and {kind} "
            'does not take one. Load the model with attn_implementation="sdpa", or set proportional=False in the '
            "reducer."
        )


def _to_device_of(block: nn.Module, hidden: Tensor) -> Tensor:
    """Move hidden states to the device of a block, for towers on several devices."""
    weight = next(block.parameters(), hidden)
    return hidden if weight.is_meta else hidden.to(weight.device)
