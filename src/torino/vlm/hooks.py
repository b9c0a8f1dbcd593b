"""Capture features and signals inside a vision tower, and stop the tower once they are complete.

Hooks on the blocks and on their query and key projections capture what is needed; then the forward pass stops, so later
blocks never run. The tower keeps its own attention kernels: attention maps are computed from the captured queries and
keys. Hooks ignore all threads but the one that registered them, so several threads can share a tower.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torino.core.errors import MissingSignal, TorinoError
from torino.core.timing import stage

# The projections that each signal is computed from.
SIGNALS = {
    "cls_attention": ("query", "key"),  # (heads, N): attention of the CLS token to the patches
    "cls_attention_joint": ("query", "key"),  # (N,): the same, with all heads as one head of full width
    "received_attention": ("query", "key"),  # (N,): attention that each patch receives, mean over heads and queries
    "attention": ("query", "key"),  # (heads, N, N): between patches, rows are queries
    "keys": ("key",),  # (N, width)
    "head_keys": ("key",),  # (N, width / heads): mean over heads
    "queries": ("query",),  # (N, width)
}


@dataclass
class BlockCount:
    """Blocks of a tower that its feature layer and the captured signals need, and all of its blocks; 0 if unknown."""

    needed: int = 0
    all: int = 0


_count: ContextVar[BlockCount | None] = ContextVar("torino_block_count", default=None)
# PyTorch numbers hooks with a counter that two threads could read at once; the second hook would replace the first.
placing = threading.Lock()


@dataclass(frozen=True)
class TowerLayout:
    """The parts of a tower.

    Attributes
    ----------
    blocks : nn.ModuleList
        Its transformer blocks, in order.
    prefix : int
        Number of tokens before the patches: CLS and registers.
    has_cls : bool
        Whether the first of them is a CLS token.
    heads : int
        Attention heads of a block.
    query, key : callable
        Return the projections of a block whose outputs are its queries and keys, shape (images, tokens, width).
    name : str
        Name of the tower, for the origin of the tokens and for errors.
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
    """Captured values: ``states`` (images, tokens, D) at the feature layer, and signals by name, one row per image."""

    states: Tensor
    signals: dict[str, Tensor]

    def signal(self, name: str, image: int) -> Tensor | None:
        """Return a signal of one image, or None if it was not captured."""
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
            query=lambda block: _find_module(
                block, "attention.attention.query", "attention.q_proj", "self_attn.q_proj"
            ),
            key=lambda block: _find_module(block, "attention.attention.key", "attention.k_proj", "self_attn.k_proj"),
            name=name,
        )
    raise TorinoError(
        f"The vision tower {type(tower).__name__} ({kind}) is not supported. "
        "Supported: CLIP, SigLIP, SigLIP2, DINOv2 with or without registers."
    )


@contextmanager
def run_all_blocks() -> Generator[BlockCount]:
    """Let towers run to their last block, as the stock model does; yield how many blocks would have been enough."""
    count = BlockCount()
    token = _count.set(count)
    try:
        yield count
    finally:
        _count.reset(token)


def capture(
    tower: nn.Module, parts: TowerLayout, block: int, needs: frozenset[str], run: Callable[[], object]
) -> CapturedFeatures:
    """Run a tower until all needed values are captured.

    Parameters
    ----------
    tower, parts
        The tower and its layout.
    block : int
        Zero-based block whose output is the feature layer; −1 is the input of the first block.
    needs : frozenset of str
        Signals, such as ``"cls_attention"``, ``"keys"`` and ``"queries"``, of the block ``block``.
        ``"cls_attention@+1"`` and ``"keys@8"`` refer to another block, by relative or absolute number. ``"cls"`` costs
        nothing and is available in every tower with a CLS token. Signals are float32 without gradients.
    run : callable
        Calls the tower on its pixels.
    """
    sources = {name: _check_signal(name, block, len(parts.blocks), parts) for name in sorted(needs)}
    sources.pop("cls", None)
    projections = {"query": parts.query, "key": parts.key}
    count = _count.get()
    if count is not None:
        count.needed, count.all = max(block, *sources.values(), -1) + 1, len(parts.blocks)
    capturer = OutputCapturer(stop=count is None and not _is_checkpointing(parts))
    with ExitStack() as hooks:
        if block < 0:
            capturer.register(hooks, parts.blocks[0], "states", take_input=True)
        else:
            capturer.register(hooks, parts.blocks[block], "states")
        needed = {(part, source) for name, source in sources.items() for part in SIGNALS[_kind(name)]}
        for part, source in sorted(needed):
            capturer.register(hooks, projections[part](parts.blocks[source]), f"{part}@{source}")
        with suppress(_StopForward):
            run()
    captured = capturer.captured
    missing = sorted(capturer.expected - set(captured))
    if missing:
        raise TorinoError(
            f"The tower {type(tower).__name__} finished without computing {', '.join(missing)}. Hooks see nothing "
            "inside a compiled tower: pass the model from before torch.compile, or compile only its language model. "
            "Otherwise, torino does not support this version of the tower."
        )
    if not sources:
        return CapturedFeatures(captured["states"], {})
    with stage("signals"):
        signals = {name: _compute_signal(_kind(name), source, captured, parts) for name, source in sources.items()}
    return CapturedFeatures(captured["states"], signals)


def signal_block(name: str, default: int, blocks: int) -> int:
    """Return the block that a signal refers to: ``keys`` the default, ``keys@8`` block 8, ``keys@+1`` the next one.

    ``keys@9/24`` is the block that corresponds to the ninth of 24: in a tower of 12 blocks the fifth (4.5, rounded up).
    """
    kind, at, number = name.partition("@")
    if scaled := re.fullmatch(r"(\d{1,4})/(\d{1,4})", number):
        count, depth = (int(part) for part in scaled.groups())
        if 1 <= count <= depth:
            return max(0, (2 * count * blocks + depth) // (2 * depth) - 1)
    digits = number.lstrip("+-")
    if at and not (digits.isdecimal() and len(digits) < 10 and len(number) - len(digits) <= 1):
        raise MissingSignal(
            f"{name!r} does not name a block. Write {kind}@8 for block 8, or {kind}@-1 for the one before the default."
        )
    block = default + int(number) if number[:1] in ("+", "-") else int(number) if number else default
    if not 0 <= block < blocks:
        raise MissingSignal(f"{name} refers to block {block}, and the tower has blocks 0 to {blocks - 1}.")
    return block


class _StopForward(BaseException):
    """Raised when everything is captured; not an Exception, so that no code on the way handles it as an error."""


class OutputCapturer:
    """Store outputs of modules in ``captured``, by name; with ``stop``, end the forward pass once all are there."""

    def __init__(self, stop: bool) -> None:
        self.stop, self.thread = stop, threading.get_ident()
        self.expected: set[str] = set()
        self.captured: dict[str, Tensor] = {}

    def register(self, hooks: ExitStack, module: nn.Module, name: str, take_input: bool = False) -> None:
        """Capture the output of a module, or its input, until ``hooks`` is closed."""

        def take(value: Any) -> None:
            if threading.get_ident() != self.thread or name in self.captured:
                return
            self.captured[name] = value[0] if isinstance(value, tuple) else value
            if self.stop and self.expected == set(self.captured):
                raise _StopForward

        self.expected.add(name)
        with placing:
            if take_input:
                handle = module.register_forward_pre_hook(
                    lambda _, arguments, named: take(arguments or named["hidden_states"]), with_kwargs=True
                )
            else:
                handle = module.register_forward_hook(lambda _, arguments, output: take(output))
        hooks.callback(handle.remove)


def _is_checkpointing(parts: TowerLayout) -> bool:
    """Return whether blocks use gradient checkpointing, where a tensor has its gradient only after the block ends."""
    block = parts.blocks[0]
    return torch.is_grad_enabled() and block.training and bool(getattr(block, "gradient_checkpointing", False))


@torch.no_grad()
def _compute_signal(kind: str, block: int, captured: dict[str, Tensor], parts: TowerLayout) -> Tensor:
    """Compute a signal of the patches from captured projections, in float32."""
    if kind in ("keys", "queries"):
        return captured[f"{SIGNALS[kind][0]}@{block}"][:, parts.prefix :].detach().float()
    key = captured[f"key@{block}"].float()
    images, tokens, width = key.shape
    if kind == "head_keys":
        return key.view(images, tokens, parts.heads, -1).mean(2)[:, parts.prefix :]
    heads = 1 if kind == "cls_attention_joint" else parts.heads
    size = width // heads
    query = captured[f"query@{block}"].float()
    query = query[:, :1] if kind.startswith("cls") else query  # these need only the CLS row of the map
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


def _check_signal(name: str, block: int, blocks: int, parts: TowerLayout) -> int:
    """Return the block that a signal comes from; refuse signals that the tower does not have."""
    kind = _kind(name)
    if kind not in (*SIGNALS, "cls") or (kind == "cls" and "@" in name):
        raise MissingSignal(
            f"{name!r} is not a signal of a tower. Use cls, {', '.join(SIGNALS)}; all but cls optionally of another "
            "block, such as keys@+1 or keys@8."
        )
    if kind.startswith("cls") and not parts.has_cls:
        what = "the CLS token" if kind == "cls" else "the attention of a CLS token"
        raise MissingSignal(
            f"{name} is {what}, and the tower {parts.name or 'of this model'} has none. "
            "Choose a reducer that does not need it, such as torino-m."
        )
    return block if kind == "cls" else signal_block(name, block, blocks)


def _find_module(block: nn.Module, *paths: str) -> nn.Module:
    for path in paths:
        try:
            return block.get_submodule(path)
        except AttributeError:
            continue
    raise TorinoError(
        f"{type(block).__name__} has none of {', '.join(paths)}; torino does not support this version of it."
    )
