"""Bring projected patches near the words for what they show, before any sentence is learned.

The first of LLaVA's two stages, made cheap: no language model takes part. A picture holds a word as strongly as its
best patches do; which words it holds is known from the questions and their answers. A model that is trained on
sentences alone needs thousands of steps until a word finds its patches, and learns little before.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from lab_reader import WIDTH
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

LEAST = 12  # pictures a word must be in
PLAIN = {"a", "an", "the", "and", "in", "on", "of", "at", "with", "is", "are", "to", "no", "yes", "none", "by"}
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
Questions = Sequence[dict[str, object]]


def said(questions: Questions) -> str:
    """All that questions say to be in a picture, as one text."""
    parts: list[str] = []
    for one in questions:
        answer, options = str(one["answer"]), one["options"]
        if answer == "yes" and one["kind"] in {"presence", "action", "cell-presence", "shape-presence"}:
            parts.append(
                re.sub(r"^(Is there|Do you see|Does the photo show|Is this)|in the .*|[?.]", "", str(one["text"]))
            )
        elif isinstance(options, list) and options and answer in "ABCD":
            parts.append(str(options["ABCD".index(answer)]))
        elif answer not in {"yes", "no"}:
            parts.append(answer)
    return " " + " ".join(parts)


def words_of(tokenizer: Tokenizer, pictures: Sequence[Sequence[Questions]]) -> tuple[list[int], Tensor]:
    """Tokens that are whole words with something to see, and (pictures, words) which picture holds which."""
    held = [
        set(tokenizer.encode(" ".join(said(asked) for asked in sets), add_special_tokens=False).ids)
        for sets in pictures
    ]
    count = Counter(token for tokens in held for token in tokens)
    names = {token: str(tokenizer.id_to_token(token)).replace("▁", "") for token in count}
    words = sorted(t for t, n in count.items() if n >= LEAST and names[t].isalnum() and names[t] not in PLAIN)
    place = {token: number for number, token in enumerate(words)}
    table = torch.zeros(len(held), len(words))
    for row, tokens in enumerate(held):
        table[row, [place[token] for token in tokens if token in place]] = 1
    return words, table


def align_words(
    tokenizer: Tokenizer,
    pictures: Sequence[Sequence[Questions]],
    tokens: Callable[[Sequence[int]], Tensor],
    spread: tuple[Tensor, Tensor],
    *,
    width: int,
    passes: int,
    seed: int,
    say: Callable[..., None],
) -> dict[str, Tensor]:
    """Train projector and word vectors.

    Parameters
    ----------
    tokenizer : Tokenizer
        Of the language model.
    pictures : sequence
        Sets of questions of every picture.
    tokens : callable
        Gives (B, 576, 384) tokens of pictures by number.
    spread : tuple of Tensor
        Mean and deviation of the tokens' channels.
    width : int
        Of the language model.
    passes : int
        Over all pictures.
    seed : int
        Of the order and the first weights.
    say : callable
        Told how far it is.

    Returns
    -------
    dict of Tensor
        ``linear_1.weight``, ``linear_1.bias``, ``linear_2.weight``, ``linear_2.bias``; ``words``, tokens, and
        ``vectors``, one unit vector each.
    """
    words, table = words_of(tokenizer, pictures)
    torch.manual_seed(seed)
    first, second = nn.Linear(WIDTH, width), nn.Linear(width, width)
    vectors = nn.Parameter(torch.randn(len(words), width) / math.sqrt(width))
    often = table.mean(0).clamp(1e-4, 0.9)
    bias, gain = nn.Parameter((often / (1 - often)).log() - 2), nn.Parameter(torch.tensor(2.3))
    # where a patch stands is said with the words that questions use for it
    index = {str(tokenizer.id_to_token(token)).replace("▁", ""): number for number, token in enumerate(words)}
    sides = [torch.tensor([index[name] for name in names]) for names in (ROWS, COLUMNS)]
    third = torch.arange(24) // 8
    stands = [third.repeat_interleave(24), third.repeat(24)]
    optimiser = torch.optim.AdamW(
        [*first.parameters(), *second.parameters(), vectors, bias, gain], lr=2e-3, weight_decay=0.01, fused=True
    )
    size = 16
    steps, begun = passes * len(pictures) // size, time.monotonic()
    mean, deviation = spread
    running: list[tuple[float, float]] = []
    for step in range(steps):
        order = torch.randperm(
            len(pictures), generator=torch.Generator().manual_seed(seed + step * size // len(pictures))
        )
        at = step * size % len(pictures)
        chosen = order[at : at + size].tolist()
        for group in optimiser.param_groups:
            group["lr"] = (
                2e-3 * min(1.0, (step + 1) / 50) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            )
        seen = second(nn.functional.gelu(first((tokens(chosen) - mean) / deviation)))
        near = normalize(seen, dim=-1) @ normalize(vectors, dim=-1).T * gain.exp()
        holds = near.logsumexp(1) - math.log(near.shape[1]) + bias
        loss = binary_cross_entropy_with_logits(holds, table[chosen], reduction="sum") / len(chosen)
        where = sum(
            cross_entropy(near[..., names].flatten(0, 1), stand.repeat(len(chosen)))
            for names, stand in zip(sides, stands, strict=True)
        )
        (loss + where).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        running.append((float(loss.detach()), float(where.detach())))
        if (step + 1) % 25 == 0 or step + 1 == steps:
            means = np.mean(running, 0)
            left = (time.monotonic() - begun) / (step + 1) * (steps - step - 1)
            say(
                f"\rwords: step {step + 1}/{steps}, loss {means[0]:.2f} for {len(words)} words, "
                f"{means[1]:.2f} for places, "
                f"{left / 60:.0f} min left  ",
                end="",
            )
            running = []
    say("")
    scale = float(seen.detach().norm(dim=-1).mean())  # patches as long as words, one
    return {
        "linear_1.weight": first.weight.detach(),
        "linear_1.bias": first.bias.detach(),
        "linear_2.weight": second.weight.detach() / scale,
        "linear_2.bias": second.bias.detach() / scale,
        "words": torch.tensor(words),
        "vectors": normalize(vectors.detach(), dim=-1),
    }
