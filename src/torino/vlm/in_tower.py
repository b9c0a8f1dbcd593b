"""Running a tower of stock transformers with a reducer at work in its blocks, between their attention and their MLP.

What enters the first block is tapped; from there the blocks are run here, with their own modules in their own order
(norm, attention, residual, *step*, norm, MLP, residual, and DINOv2's layer scales), because a step must shorten the
residual too, which no hook can reach. Nothing of the model is replaced. Keys and queries are taken by hooks as they
pass, which heed only this thread and are gone when it ends, also by an exception. As long as nothing was removed the
attention is called exactly as the tower would, and a run that removes nothing equals the tower's bit for bit.

All images of a call lose the same number of tokens in each block, so a batch stays one tensor. The sizes of tokens
enter as an additive mask of ln(size) on the key side, zero for CLS and registers, which are kept aside all the way.
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
from torino.vlm.hooks import Catcher, TowerLayout, tap

# The modules of both halves of a block, each in the order it is run, for CLIP and SigLIP, and for DINOv2. The second of
# the first half is the attention.
HALVES = (
    (("layer_norm1", "self_attn"), ("layer_norm2", "mlp")),
    (("norm1", "attention", "layer_scale1", "drop_path"), ("norm2", "mlp", "layer_scale2", "drop_path")),
)
# Which projections the signals of a block are worked out of; shapes are those of TowerState.advance.
SIGNALS = {"head_keys": ("key",), "keys": ("key",), "queries": ("query",), "attention": ("query", "key")}
# Attention that adds a mask to its logits.
ADDS = ("sdpa", "eager")


@dataclass(frozen=True, eq=False)
class Passed:
    """What came out at the tap.

    Attributes
    ----------
    states : Tensor of shape (images, P + M, D)
        Tokens after the tap block: the P before the patches, then those that the reducer left.
    plans : ReductionBatch
        What each of the M is made of. They stand for these patches exactly, but the blocks have changed their
        values on the way: applying a plan to the tokens of the full tower gives **other tokens than** ``states``.
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
) -> Passed:
    """Run a tower up to a tap with a reducer at work in its blocks.

    Parameters
    ----------
    tower, parts
        A CLIP, SigLIP or DINOv2 tower and its tower_layout.
    block : int
        Zero-based block whose output is tapped; −1 is what enters the first block.
    reducer : TowerReducer, or what poses as one
    grid : (int, int)
        Patch grid of the images.
    run : callable
        Calls the tower on its pixels.
    """
    halves = [_halves(each, tower) for each in parts.blocks[: block + 1]]
    unknown = sorted(reducer.needs - set(SIGNALS))
    if unknown:
        raise MissingSignal(
            f"{reducer.spec} reads {', '.join(unknown)} of each block, and inside a tower there are "
            f"{', '.join(SIGNALS)}."
        )
    states, prefix = tap(tower, parts, -1, frozenset(), run).states, parts.prefix
    if states.shape[1] != prefix + grid[0] * grid[1]:
        raise TorinoError(
            f"{type(tower).__name__} made {states.shape[1] - prefix} patches of a picture of {grid[0]}x{grid[1]}, "
            f"and {reducer.spec} works on whole grids. Choose a reducer that works at the tap."
        )
    passages = [reducer.begin(image[prefix:].detach(), grid, len(halves), parts.has_cls) for image in states]
    if any(passages[0].removals[:-1]) and passages[0].reducer.proportional:
        _check_attention(tower, reducer)
    wanted = {part for need in reducer.needs for part in SIGNALS[need]}
    find = {"query": parts.query, "key": parts.key}
    for each, (first, second) in zip(parts.blocks, halves, strict=False):
        states = _beside(states, each)
        mask = _mask(passages, states, prefix) if passages[0].proportional else None
        with ExitStack() as hooks:
            catcher = Catcher(stops=False)
            for part in wanted if passages[0].due else ():
                catcher.place(hooks, find[part](each), part)
            states = _half(each, first, states, mask)
        passages = _advance(passages, reducer.needs, catcher.caught, parts, mask)
        states = _half(each, second, _apply(passages, states, prefix))
    passages = [passage.finish() for passage in passages]
    return Passed(_apply(passages, states, prefix), ReductionBatch.of([passage.done for passage in passages]))


@torch.no_grad()
def _advance(
    passages: Sequence[TowerState],
    needs: frozenset[str],
    caught: Mapping[str, Tensor],
    parts: TowerLayout,
    mask: Tensor | None,
) -> list[TowerState]:
    """One step of every image; the signals of one are gone before those of the next are made."""
    moved: list[TowerState] = []
    for image, passage in enumerate(passages):
        signals: dict[str, Tensor] = {}
        if passage.due:
            with stage("signals"):
                shown = {part: values[image].float() for part, values in caught.items()}
                bias = None if mask is None else mask[image, 0, 0].float()
                signals = {need: _signal(need, shown, parts, bias) for need in needs}
        with stage("steps"):
            moved.append(passage.advance(signals))
    return moved


def _signal(need: str, shown: Mapping[str, Tensor], parts: TowerLayout, bias: Tensor | None) -> Tensor:
    """A signal of one image, from its queries and keys of shape (P + T, width)."""
    if need in ("keys", "queries"):
        return shown[SIGNALS[need][0]][parts.prefix :]
    keys = shown["key"].unflatten(1, (parts.heads, -1))
    if need == "head_keys":
        return keys.mean(1)[parts.prefix :]
    queries = shown["query"].unflatten(1, (parts.heads, -1))
    with torch.autocast(keys.device.type, enabled=False):
        logits = queries.transpose(0, 1) @ keys.permute(1, 2, 0) * keys.shape[2] ** -0.5
        return (logits if bias is None else logits + bias).softmax(-1)[:, :, parts.prefix :]


def _mask(passages: Sequence[TowerState], states: Tensor, prefix: int) -> Tensor:
    """ln(size) for each key, shape (images, 1, 1, tokens)."""
    sizes = torch.stack([passage.sizes.log() for passage in passages])
    return nn.functional.pad(sizes, (prefix, 0))[:, None, None].to(states)


def _apply(passages: Sequence[TowerState], states: Tensor, prefix: int) -> Tensor:
    """What the last call of the passages did, done to the patches of a batch."""
    steps = [passage.step for passage in passages if passage.step is not None]
    if not steps:
        return states
    aside, patches = states[:, :prefix], states[:, prefix:]
    if len(steps) < len(passages):  # by chance, some images stand in their final order already
        pairs = zip(passages, patches, strict=True)
        rows = [passage.step.apply(image) if passage.step else image for passage, image in pairs]
        return torch.cat([aside, torch.stack(rows)], 1)
    made = ReductionBatch.of(steps).apply(list(patches)).values
    return torch.cat([aside, made.view(len(steps), -1, made.shape[1])], 1)


def _half(block: nn.Module, names: Sequence[str], states: Tensor, mask: Tensor | None = None) -> Tensor:
    """One half of a block: its modules one after the other, and what went in added to what comes out."""
    change: Any = states
    for name in names:
        module = cast(nn.Module, getattr(block, name))
        attends = name in ("self_attn", "attention")
        change = module(change, attention_mask=mask)[0] if attends else module(change)
    return states + change


def _halves(block: nn.Module, tower: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules of a block in the order it runs them, known only if it has these and no others."""
    has = {name for name, _ in block.named_children()}
    for halves in HALVES:
        if has == {name for half in halves for name in half}:
            return halves
    raise TorinoError(
        f"The blocks of {type(tower).__name__} ({type(block).__name__} of {', '.join(sorted(has))}) are not known well "
        "enough to work inside them. Known: CLIP, SigLIP, DINOv2 with or without registers. Choose a reducer that "
        "works at the tap, such as tome or gtp."
    )


def _check_attention(tower: nn.Module, reducer: InTowerReducer) -> None:
    kind = str(getattr(tower.config, "_attn_implementation", None) or "eager")
    if kind not in ADDS:
        raise TorinoError(
            f"{reducer.spec} proportional_attention tokens by their size in the attention of the tower, and {kind} takes no such mask. "
            'Load the model with attn_implementation="sdpa", or give the reducer proportional=False.'
        )


def _beside(states: Tensor, block: nn.Module) -> Tensor:
    """Bring states to where a block is, in a tower that is spread over devices."""
    weight = next(block.parameters(), states)
    return states if weight.is_meta else states.to(weight.device)
