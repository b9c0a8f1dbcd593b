"""Slow transcriptions of FastV, PyramidDrop and DART: a Llama in explicit loops, without cache, masks or batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

Rule = Callable[["Prefix", int], list[int]]
"""Which image tokens of the sequence remain, given what was computed so far and how many are to remain."""


class Prefix:
    """What a rule may read before the layer ``block``: hidden states, and queries and keys of any layer."""

    def __init__(self, model: Any, states: list[Tensor], places: Tensor, block: int, image: list[int], prompt: int):
        self.model, self.states, self.places, self.block = model, states, places, block
        self.image = image  # where the image tokens are in the current sequence
        self.text = [place for place in range(image[-1] + 1, prompt) if place not in image]
        self.last = prompt - 1

    def attention(self, layer: int) -> Tensor:
        """Return the attention map (H, n, n) of a layer, from its input."""
        queries, keys, _ = project(self.model, layer, self.states[layer], self.places)
        return attention_map(queries, keys)

    def keys(self, layer: int) -> Tensor:
        """Return the keys (n, W) of a layer."""
        return project(self.model, layer, self.states[layer], self.places)[1].transpose(0, 1).flatten(1)


def project(model: Any, number: int, hidden: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (heads, n, d) of a layer; the first two with rotary embedding."""
    language = model.get_decoder()
    layer = language.layers[number]
    attention, config = layer.self_attn, language.config
    normed = layer.input_layernorm(hidden)
    width = config.hidden_size // config.num_attention_heads
    angle = places[:, None].float() * language.rotary_emb.inv_freq[None]
    rotated: list[Tensor] = []
    for projection in (attention.q_proj, attention.k_proj):
        heads = projection(normed).view(len(hidden), -1, width).transpose(0, 1)
        first, second = heads[..., : width // 2], heads[..., width // 2 :]
        turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        rotated.append(torch.cat(turned, -1))
    values = attention.v_proj(normed).view(len(hidden), -1, width).transpose(0, 1)
    return rotated[0], rotated[1], values


def attention_map(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the causal attention map (H, n, n)."""
    keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    logits = queries @ keys.transpose(1, 2) / sqrt(keys.shape[2])
    n = keys.shape[1]
    return logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1)


def run_layer(model: Any, number: int, hidden: Tensor, places: Tensor) -> Tensor:
    """Run one decoder layer on a sequence (n, E)."""
    layer = model.get_decoder().layers[number]
    queries, keys, values = project(model, number, hidden, places)
    weights = attention_map(queries, keys)
    mixed = weights @ values.repeat_interleave(len(queries) // len(values), 0)
    hidden = hidden + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@torch.no_grad()
def reference_generate(
    model: Any, embeds: Tensor, image: Sequence[int], stages: Sequence[tuple[int, int]], rule: Rule, new: int
) -> tuple[list[int], list[Tensor], list[int]]:
    """Decode greedily, reading the whole prompt again for every token.

    Parameters
    ----------
    model : LLaVA with a Llama
    embeds : Tensor of shape (n, E)
        Input embeddings of the prompt.
    image : sequence of int
        Positions of the image tokens.
    stages : sequence of (block, count)
    rule : callable
    new : int
        Tokens to generate.

    Returns
    -------
    tokens, logits, kept positions
    """
    language, prompt = model.get_decoder(), len(embeds)
    chosen: dict[int, list[int]] = {}
    tokens: list[int] = []
    every: list[Tensor] = []
    for _ in range(new):
        answer = language.embed_tokens(torch.tensor(tokens, dtype=torch.int64))
        hidden, places = torch.cat([embeds, answer]), torch.arange(prompt + len(tokens))
        left = list(image)
        states: list[Tensor] = []
        for number in range(len(language.layers)):
            count = dict(stages).get(number)
            if count is not None:
                if number not in chosen:  # decided once, from the prompt alone
                    here = places.tolist()
                    inner = [here.index(position) for position in left]
                    prefix = Prefix(model, [*states, hidden], places, number, inner, len(here))
                    chosen[number] = [here[place] for place in rule(prefix, count)]
                gone = set(left) - set(chosen[number])
                left = chosen[number]
                keep = torch.tensor([position not in gone for position in places.tolist()])
                hidden, places = hidden[keep], places[keep]
                states = []  # their sequence was longer
            while len(states) < number:
                states.append(torch.empty(0))
            states.append(hidden)
            hidden = run_layer(model, number, hidden, places)
        every.append(model.lm_head(language.norm(hidden[-1])))
        tokens.append(int(every[-1].argmax()))
    return tokens, every, left


def best(scores: Sequence[float], places: Sequence[int], count: int) -> list[int]:
    """Return the places of the highest scores, one after the other, sorted."""
    left, kept = list(range(len(places))), list[int]()
    while len(kept) < count:
        winner = left[0]
        for candidate in left:
            if scores[candidate] > scores[winner]:
                winner = candidate
        left.remove(winner)
        kept.append(winner)
    return [places[index] for index in sorted(kept)]


def fastv(prefix: Prefix, count: int) -> list[int]:
    """Keep what the last token attends to in the layer before."""
    weights = prefix.attention(prefix.block - 1)
    scores = [float(sum(head[prefix.last, place] for head in weights)) / len(weights) for place in prefix.image]
    return best(scores, prefix.image, count)


def pyramiddrop(prefix: Prefix, count: int) -> list[int]:
    """Keep what the last token would attend to in the layer that follows."""
    weights = prefix.attention(prefix.block)
    scores = [float(sum(head[prefix.last, place] for head in weights)) / len(weights) for place in prefix.image]
    return best(scores, prefix.image, count)


def dart(prefix: Prefix, count: int) -> list[int]:
    """Keep four image pivots, and for them and four text pivots what resembles them least."""
    norms = prefix.keys(prefix.block - 1).abs().sum(1).tolist()
    hidden = prefix.model.get_decoder().norm(prefix.states[prefix.block])
    image_pivots = best([norms[place] for place in prefix.image], prefix.image, min(4, count))
    text_pivots = best([norms[place] for place in prefix.text], prefix.text, min(4, len(prefix.text)))
    pivots = [*image_pivots, *text_pivots]
    kept = list(image_pivots)
    quota, rest = divmod(count - len(kept), len(pivots))
    for number, pivot in enumerate(pivots):
        left = [place for place in prefix.image if place not in kept]
        unlike = [-float(torch.cosine_similarity(hidden[pivot], hidden[place], 0)) for place in left]
        kept += best(unlike, left, quota + (number < rest))
    return sorted(kept)


RULES: dict[str, Rule] = {"fastv": fastv, "pyramiddrop": pyramiddrop, "dart": dart}
