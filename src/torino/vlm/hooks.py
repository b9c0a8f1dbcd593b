"""Tapping a vision tower: the tokens after one block and the signals asked for, with the rest of the tower left out.

Hooks on the blocks and on their query and key projections take what is wanted as it passes; as soon as all of it is
there the tower is stopped. The tower keeps its own attention kernels: the CLS row of an attention map is worked out
from the captured queries and keys. Hooks heed only the thread that position_mode them, so threads may share a tower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torino.core.errors import MissingSignal, TorinoError
from torino.core.timing import stage

# Which projections each signal is worked out of.
SIGNALS = {
    "cls_attention": ("query", "key"),  # (heads, N): of the CLS token to the patches
    "cls_attention_joint": ("query", "key"),  # (N,): the same with all heads as one of full width
    "received_attention": ("query", "key"),  # (N,): what each patch receives, mean over heads and all queries
    "attention": ("query", "key"),  # (heads, N, N): between patches, rows are queries
    "keys": ("key",),  # (N, width)
    "head_keys": ("key",),  # (N, width / heads): mean over heads
    "queries": ("query",),  # (N, width)
}
# PyTorch numbers hooks by a counter that two threads could read at once; the second hook would replace the first.
placing = threading.Lock()


@dataclass(frozen=True)
class TowerLayout:
    """Where things are in a tower.

    Attributes
    ----------
    blocks : nn.ModuleList
        Its transformer blocks, in order.
    prefix : int
        Tokens before the patches: CLS and registers.
    has_cls : bool
        Whether the first of them is a CLS token.
    heads : int
        Attention heads of a block.
    query, key : callable
        The projections of a block whose outputs are its queries and keys, shape (images, tokens, width).
    name : str
        The tower, for the origin of the tokens and for errors.
    """

    blocks: nn.ModuleList
    prefix: int
    has_cls: bool
    heads: int
    query: Callable[[nn.Module], nn.Module]
    key: Callable[[nn.Module], nn.Module]
    name: str


@dataclass(frozen=True)
class CapturedFeatures:
    """What was captured: ``states`` (images, tokens, D) after the tap block, and signals by name, one row per image."""

    states: Tensor
    signals: dict[str, Tensor]

    def of(self, name: str, image: int) -> Tensor | None:
        """A signal of one image, if it was captured."""
        values = self.signals.get(name)
        return None if values is None else values[image]


def tower_layout(tower: nn.Module) -> TowerLayout:
    """Find the parts of a CLIP, SigLIP, SigLIP2 or DINOv2 tower (with or without registers)."""
    config: Any = tower.config
    kind = str(getattr(config, "model_type", type(tower).__name__))
    name = str(getattr(config, "_name_or_path", "") or "")
    heads = int(getattr(config, "num_attention_heads", 1))
    inner: Any = getattr(tower, "vision_model", tower)
    if kind in ("clip_vision_model", "clip", "siglip_vision_model", "siglip", "siglip2_vision_model", "siglip2"):
        has_cls = kind.startswith("clip")
        return TowerLayout(
            blocks=inner.encoder.layers,
            prefix=int(has_cls),
            has_cls=has_cls,
            heads=heads,
            query=lambda block: block.self_attn.q_proj,  # type: ignore[union-attr, return-value]
            key=lambda block: block.self_attn.k_proj,  # type: ignore[union-attr, return-value]
            name=name,
        )
    if kind in ("dinov2", "dinov2_with_registers"):
        return TowerLayout(
            blocks=inner.encoder.layer if hasattr(inner.encoder, "layer") else inner.encoder.layers,
            prefix=1 + int(getattr(config, "num_register_tokens", 0)),
            has_cls=True,
            heads=heads,
            query=lambda block: _first(block, "attention.attention.query", "attention.q_proj", "self_attn.q_proj"),
            key=lambda block: _first(block, "attention.attention.key", "attention.k_proj", "self_attn.k_proj"),
            name=name,
        )
    raise TorinoError(
        f"The vision tower {type(tower).__name__} ({kind}) is not known here. "
        "Known: CLIP, SigLIP, SigLIP2, DINOv2 with or without registers."
    )


def tap(
    tower: nn.Module, parts: TowerLayout, block: int, needs: frozenset[str], run: Callable[[], object]
) -> CapturedFeatures:
    """Run a tower until everything wanted is captured.

    Parameters
    ----------
    tower, parts
        The tower and its tower_layout.
    block : int
        Zero-based block whose output is tapped; −1 is what enters the first block.
    needs : frozenset of str
        ``"cls_attention"``, ``"keys"`` and ``"queries"`` at the tap block. ``"cls_attention@+1"`` or ``"keys@8"``
        name another block, relative or absolute. ``"cls"`` costs nothing and is always there where a tower has it.
        Signals are float32 and carry no gradient.
    run : callable
        Calls the tower on its pixels.
    """
    wanted = {name: _site(name, block, len(parts.blocks), parts) for name in sorted(needs)}
    wanted.pop("cls", None)
    find = {"query": parts.query, "key": parts.key}
    catcher = Catcher(stops=not _is_checkpointing(parts))
    with ExitStack() as hooks:
        if block < 0:
            catcher.place(hooks, parts.blocks[0], "states", before=True)
        else:
            catcher.place(hooks, parts.blocks[block], "states")
        for part, site in sorted({(part, site) for name, site in wanted.items() for part in SIGNALS[_kind(name)]}):
            catcher.place(hooks, find[part](parts.blocks[site]), f"{part}@{site}")
        with suppress(_Enough):
            run()
    missing = sorted(catcher.wanted - set(catcher.caught))
    if missing:
        raise TorinoError(
            f"The tower {type(tower).__name__} ended without passing {', '.join(missing)}. A tower that was compiled "
            "does not show what is inside it: give the model as it was before torch.compile, or compile its language "
            "model alone. Otherwise torino does not know this version of it."
        )
    caught = catcher.caught
    if not wanted:
        return CapturedFeatures(caught["states"], {})
    with stage("signals"):
        signals = {name: _signal(_kind(name), site, caught, parts) for name, site in wanted.items()}
    return CapturedFeatures(caught["states"], signals)


def _is_checkpointing(parts: TowerLayout) -> bool:
    """Whether blocks run inside a checkpoint, which gives a tensor its gradient only once the block has ended."""
    block = parts.blocks[0]
    return torch.is_grad_enabled() and block.training and bool(getattr(block, "gradient_checkpointing", False))


class _Enough(BaseException):
    """Everything is captured; not an Exception, so that nothing on the way out takes it for an error."""


class Catcher:
    """Takes outputs of modules as they pass into ``caught``, by name, and where it ``stops`` ends the tower then."""

    def __init__(self, stops: bool) -> None:
        self.stops, self.thread = stops, threading.get_ident()
        self.wanted: set[str] = set()
        self.caught: dict[str, Tensor] = {}

    def place(self, hooks: ExitStack, module: nn.Module, name: str, before: bool = False) -> None:
        """Wait for what a module gives, or takes, until ``hooks`` are closed."""

        def take(value: Any) -> None:
            if threading.get_ident() != self.thread or name in self.caught:
                return
            self.caught[name] = value[0] if isinstance(value, tuple) else value
            if self.stops and self.wanted == set(self.caught):
                raise _Enough

        self.wanted.add(name)
        with placing:
            if before:
                handle = module.register_forward_pre_hook(
                    lambda _, arguments, named: take(arguments or named["hidden_states"]), with_kwargs=True
                )
            else:
                handle = module.register_forward_hook(lambda _, arguments, output: take(output))
        hooks.callback(handle.remove)


@torch.no_grad()
def _signal(kind: str, site: int, caught: dict[str, Tensor], parts: TowerLayout) -> Tensor:
    """Work a signal out of captured projections, in float32, the tokens before the patches cut off."""
    if kind in ("keys", "queries"):
        return caught[f"{SIGNALS[kind][0]}@{site}"][:, parts.prefix :].detach().float()
    key = caught[f"key@{site}"].float()
    images, tokens, width = key.shape
    if kind == "head_keys":
        return key.view(images, tokens, parts.heads, -1).mean(2)[:, parts.prefix :]
    heads = 1 if kind == "cls_attention_joint" else parts.heads
    size = width // heads
    query = caught[f"query@{site}"].float()
    query = query[:, :1] if kind.startswith("cls") else query  # most want one row of the map, not all of it
    with torch.autocast(query.device.type, enabled=False):
        q = query.view(images, -1, heads, size).transpose(1, 2)
        k = key.view(images, tokens, heads, size).transpose(1, 2)
        attention = (q @ k.transpose(2, 3) * size**-0.5).softmax(-1)
    if kind == "received_attention":
        return attention.mean((1, 2))[:, parts.prefix :]
    if kind == "attention":
        return attention[:, :, parts.prefix :, parts.prefix :]
    row = attention[:, :, 0, parts.prefix :]
    return row[:, 0] if kind == "cls_attention_joint" else row


def _kind(name: str) -> str:
    return name.partition("@")[0]


def _site(name: str, block: int, blocks: int, parts: TowerLayout) -> int:
    kind, at, where = name.partition("@")
    if kind not in (*SIGNALS, "cls") or (kind == "cls" and at):
        raise MissingSignal(
            f"No signal is called {name!r}. Known: cls, {', '.join(SIGNALS)}; all but cls also of another block, as "
            "keys@+1 or keys@8."
        )
    if kind.startswith("cls") and not parts.has_cls:
        what = "the CLS token" if kind == "cls" else "the attention of a CLS token"
        raise MissingSignal(
            f"{name} is {what}, and the tower {parts.name or 'of this model'} has none. "
            "Choose a reducer that does without, such as torino-m."
        )
    if kind == "cls":
        return block
    number = where.lstrip("+-")
    if at and not (number.isdecimal() and len(where) - len(number) <= 1):
        raise MissingSignal(
            f"{name!r} names no block. Write {kind}@8 for block 8, or {kind}@+1 for the one after the tap."
        )
    site = block + int(where) if where[:1] in ("+", "-") else int(where) if where else block
    if not 0 <= site < blocks:
        raise MissingSignal(f"{name} asks for block {site}, and the tower has blocks 0 to {blocks - 1}.")
    return site


def _first(block: nn.Module, *paths: str) -> nn.Module:
    for path in paths:
        try:
            return block.get_submodule(path)
        except AttributeError:
            continue
    raise TorinoError(
        f"{type(block).__name__} has none of {', '.join(paths)}; torino does not know this version of it."
    )
