"""Reference implementations of ToMe and GTP inside a tower, with plain loops in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.reference_gtp import reference_graph, reference_step
from tests.support.reference_matching import Token, drop_cls, step
from torino import VisualTokens
from torino.vlm.hooks import tower_layout

GRID = (4, 4)


def block_modules(block: Any) -> tuple[Any, ...]:
    """Return norm, attention, its output projection, scale, norm, MLP and scale of a block."""
    if hasattr(block, "self_attn"):
        identity: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
        return (
            block.layer_norm1,
            block.self_attn,
            block.self_attn.out_proj,
            identity,
            block.layer_norm2,
            block.mlp,
            identity,
        )
    attention = block.attention
    return block.norm1, attention, attention.o_proj, block.layer_scale1, block.norm2, block.mlp, block.layer_scale2


def dot(a: list[float], b: list[float]) -> float:
    """Return the dot product."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def attend(attention: Any, x: Tensor, sizes: list[float]) -> tuple[Tensor, list[list[list[float]]], list[list[float]]]:
    """Compute attention with ln(size) on the keys: return the output, the maps of each head, and the mean keys."""
    heads = 4
    query, key, value = (
        part(x).unflatten(1, (heads, -1)).transpose(0, 1).tolist()
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    count, width = len(x), len(key[0][0])
    maps: list[list[list[float]]] = []
    mixed = [[0.0] * (heads * width) for _ in range(count)]
    for head in range(heads):
        rows: list[list[float]] = []
        for q in range(count):
            logits = [dot(query[head][q], key[head][k]) / math.sqrt(width) + math.log(sizes[k]) for k in range(count)]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            rows.append([weight / sum(weights) for weight in weights])
            for d in range(width):
                mixed[q][head * width + d] = sum(rows[q][k] * value[head][k][d] for k in range(count))
        maps.append(rows)
    keys = [[sum(key[head][k][d] for head in range(heads)) / heads for d in range(width)] for k in range(count)]
    return torch.tensor(mixed, dtype=torch.float64), maps, keys


@torch.no_grad()
def reference_tome_in_tower(
    tower: Any, pixels: Tensor, removals: list[int], has_cls: bool, prefix: int
) -> tuple[Tensor, Any]:
    """Run a tower with ToMe on one image; CLS is a token of the sequence and registers follow the tokens."""
    tower64 = copy.deepcopy(tower).double()
    x = tower64(pixels.double(), output_hidden_states=True).hidden_states[0][0]
    registers = x[int(has_cls) : prefix]
    tokens = [Token(place, [], row, 1.0, 0.0, [place]) for place, row in enumerate(x[prefix:].tolist())]
    if has_cls:
        tokens = [Token(-1, [], x[0].tolist()), *tokens]
    for block, r in zip(tower_layout(tower64).blocks, removals, strict=False):
        norm1, attention, project, scale1, norm2, mlp, scale2 = block_modules(block)
        x = torch.cat([torch.tensor([token.feature for token in tokens], dtype=torch.float64), registers])
        mixed, _, keys = attend(attention, norm1(x), [token.size for token in tokens] + [1.0] * len(registers))
        x = x + scale1(project(mixed))
        for token, key, feature in zip(tokens, keys, x.tolist(), strict=False):
            token.metric, token.feature = key, feature
        registers = x[len(tokens) :]
        tokens = step(tokens, r, in_place_order=False) if r else tokens
        x = torch.cat([torch.tensor([token.feature for token in tokens], dtype=torch.float64), registers])
        x = x + scale2(mlp(norm2(x)))
        for token, feature in zip(tokens, x.tolist(), strict=False):
            token.feature = feature
        registers = x[len(tokens) :]
    cls = torch.tensor([token.feature for token in tokens if token.place < 0], dtype=torch.float64)
    remaining = sorted(drop_cls(tokens), key=lambda token: token.place)
    features = torch.tensor([token.feature for token in remaining], dtype=torch.float64)
    return torch.cat([cls.reshape(-1, x.shape[1]), registers, features]), remaining


@torch.no_grad()
def reference_gtp_in_tower(
    tower: Any, pixels: Tensor, removals: list[int], alpha: float, graph: str
) -> tuple[Tensor, list[int]]:
    """Run a tower with GTP on one image; the tokens before the patches are never reduced."""
    tower64 = copy.deepcopy(tower).double()
    prefix = tower_layout(tower).prefix
    x = tower64(pixels.double(), output_hidden_states=True).hidden_states[0][0]
    graph_matrix = reference_graph(VisualTokens(x[prefix:].float(), GRID), graph, 8)
    places, scales = list(range(16)), [1.0] * 16
    for block, p in zip(tower_layout(tower64).blocks, removals, strict=False):
        norm1, attention, project, scale1, norm2, mlp, scale2 = block_modules(block)
        mixed, maps, _ = attend(attention, norm1(x), [1.0] * prefix + scales)
        x = x + scale1(project(mixed))
        rank = [
            max(rows[i][i] for rows in maps) * max(sum(row[i] for row in rows) for rows in maps)
            for i in range(prefix, len(x))
        ]
        kept, rows = reference_step(graph_matrix, rank, p, alpha, 1)
        weights = torch.tensor(rows, dtype=torch.float64)
        x = torch.cat([x[:prefix], weights @ x[prefix:]])
        scales = [dot(row, scales) for row in rows]
        graph_matrix, places = [[graph_matrix[i][j] for j in kept] for i in kept], [places[i] for i in kept]
        x = x + scale2(mlp(norm2(x)))
    order = sorted(range(len(places)), key=lambda i: places[i])
    return torch.cat([x[:prefix], x[prefix:][order]]), [places[i] for i in order]
