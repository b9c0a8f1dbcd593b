"""The house contract, public: put your own reducer through the tests that ours must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import MissingSignal, UnmetBudget
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers import InTowerReducer, Reducer, as_in_tower, list_reducers, make

PLAIN = frozenset({"cls", "cls_attention", "keys"})
GRIDS = ((8, 8), (5, 3), (1, 7), (4, 4), (1, 1))


def sample_tokens(width: int = 16, *, needs: frozenset[str] = frozenset(), seed: int = 0) -> list[VisualTokens]:
    """A few small images on odd grids, clustered so that groups form; same seed, same tokens.

    They carry a CLS token, its attention and keys, and whatever else ``needs`` list_reducers.
    """
    source = torch.Generator().manual_seed(seed)
    images: list[VisualTokens] = []
    for grid in GRIDS:
        n = grid[0] * grid[1]
        centres = torch.randn(max(2, n // 6), width, generator=source)
        picked = centres[torch.randint(len(centres), (n,), generator=source)]
        attention = torch.rand(2, n, generator=source)
        images.append(
            VisualTokens(
                patches=picked + 0.1 * torch.randn(n, width, generator=source),
                grid=grid,
                cls=torch.randn(width, generator=source),
                cls_attention=attention / attention.sum(1, keepdim=True),
                keys=torch.randn(n, 8, generator=source),
                signals={name: sample_signal(name, n, width, source) for name in sorted(needs - PLAIN)},
            )
        )
    return images


def sample_signal(name: str, n: int, width: int, source: torch.Generator, heads: int = 2) -> torch.Tensor:
    """A random signal of the shape that its name stands for, for ``n`` patches."""
    kind = name.partition("@")[0]
    shapes = {
        "cls_attention": (heads, n),
        "cls_attention_joint": (n,),
        "received_attention": (n,),
        "attention": (heads, n, n),
        "head_keys": (n, max(1, width // heads)),
        "text": (3, 12),
        "joint": (n, 12),
        "projected": (n, 2 * width),
    }
    values = torch.randn(shapes.get(kind, (n, width)), generator=source)
    return values.softmax(-1) if "attention" in kind else values


def check_reducer(reducer: Reducer, tokens: Sequence[VisualTokens] | None = None) -> None:
    """Raise AssertionError, in words, if a reducer breaks what torino expects of any method.

    It must honour its budget, give well-formed rows in the order it says, plan each image independently of its
    neighbours and of the batch (or, if images share its budget, leave it on average), give the same plan twice, leave
    its input and the global random state alone, take half precision, and be rebuilt by its own spec. One that works
    inside a tower is put through :func:`pretend_tower`, and must say in a sentence that it cannot plan finished tokens.

    Parameters
    ----------
    reducer : Reducer
    tokens : sequence of VisualTokens, optional
        Images to try it on; by default small ones of the width that ``reducer.sae`` reads, if it has one.

    Examples
    --------
    >>> from torino import RawEmbedding, make
    >>> check_reducer(make("torino-p", sae=RawEmbedding()))
    """
    width = getattr(getattr(reducer, "sae", None), "width", 16)
    images = list(tokens) if tokens is not None else sample_tokens(width, needs=reducer.needs)
    before = [image.patches.clone() for image in images]
    random_state, numpy_state = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002

    inside = as_in_tower(reducer)
    planned: Callable[[VisualTokens], Reduction] = reducer.plan
    if inside is not None:
        planned = lambda image: pretend_tower(inside, image)[1]  # noqa: E731
    pairs = list(_plannable(reducer, planned, images, before))
    _expect(bool(pairs), reducer, "planned none of the sample images")
    images, plans, before = [one for one, _, _ in pairs], [one for _, one, _ in pairs], [one for _, _, one in pairs]
    for image, plan in zip(images, plans, strict=True):
        _check_plan(reducer, image, plan)
    for again, plan in zip([planned(image) for image in images], plans, strict=True):
        _expect(same_plan(again, plan), reducer, "gave two plans for the same image")
    if inside is not None:
        _expect(_refuses(reducer, images[0]), reducer, "works inside towers and planned finished tokens")
    if reducer.shares_batch:
        together, budget = reducer.plan_batch(images), getattr(reducer, "budget", 0)
        _expect(int(together.lengths.sum()) == budget * len(images), reducer, "left other than its budget on average")
    for batch in (images, images[::-1]) if inside is None and not reducer.shares_batch else ():
        alone = plans if batch is images else plans[::-1]
        for together, plan in zip(reducer.plan_batch(batch), alone, strict=True):
            _expect(same_plan(together, plan), reducer, "planned an image differently in a batch")

    for image, patches in zip(images, before, strict=True):
        _expect(torch.equal(image.patches, patches), reducer, "changed its input")
    _expect(torch.equal(torch.get_rng_state(), random_state), reducer, "used torch's global random state")
    _expect(repr(np.random.get_state()) == numpy_state, reducer, "used numpy's global random state")  # noqa: NPY002
    for image in images[:1]:
        half = planned(image.with_(patches=image.patches.half()))
        _check_plan(reducer, image, half)
    if reducer.name in list_reducers():
        _expect(make(reducer.spec, **_objects(reducer)).spec == reducer.spec, reducer, "is not rebuilt by its spec")


def pretend_tower(reducer: InTowerReducer, tokens: VisualTokens, blocks: int = 6) -> tuple[Tensor, Reduction]:
    """Put a reducer that works inside towers through a small made-up one, which the tokens of one image enter.

    Returns what came out at its end, of shape (M, D), and what that is made of. The CLS token goes along where there
    is one. Same width, same tower.
    """
    source, width = torch.Generator().manual_seed(0), tokens.width
    heads, aside = 2 - width % 2, int(tokens.cls is not None)
    states = tokens.patches.float() if tokens.cls is None else torch.cat([tokens.cls[None], tokens.patches]).float()
    passage = reducer.begin(states[aside:], tokens.grid, blocks, bool(aside))
    _expect(len(passage.removals) == blocks, reducer, f"spread its removals over {len(passage.removals)} blocks")
    for _ in range(blocks):
        weights = torch.randn(4, width, width, generator=source) / width**0.5
        query, key, value = (
            (states @ weight).unflatten(1, (heads, -1)).transpose(0, 1) for weight in weights[:3]
        )  # (heads, tokens, width / heads)
        logits = query @ key.transpose(1, 2) * key.shape[2] ** -0.5
        if passage.proportional:
            logits[:, :, aside:] += passage.sizes.log()
        attention = logits.softmax(-1)
        states = states + (attention @ value).transpose(0, 1).flatten(1)
        shown = {
            "head_keys": key.mean(0)[aside:],
            "keys": key.transpose(0, 1).flatten(1)[aside:],
            "queries": query.transpose(0, 1).flatten(1)[aside:],
            "attention": attention[:, :, aside:],
        }
        left = len(passage.done) - passage.due
        passage = passage.advance({name: shown[name] for name in reducer.needs})
        _expect(len(passage.done) == left, reducer, f"left {len(passage.done)} tokens in a block instead of {left}")
        _expect(passage.sizes.shape == (left,), reducer, f"gave {len(passage.sizes)} sizes for {left} tokens")
        _expect(bool((passage.sizes > 0).all()), reducer, "gave sizes that have no logarithm")
        states = _stepped(states, aside, passage.step)
        states = states + (states @ weights[3]).tanh()
    passage = passage.finish()
    return _stepped(states, aside, passage.step)[aside:], passage.done


def _stepped(states: Tensor, aside: int, step: Reduction | None) -> Tensor:
    return states if step is None else torch.cat([states[:aside], step.apply(states[aside:])])


def same_plan(one: Reduction, other: Reduction) -> bool:
    """Whether two reductions are the same in every number and label."""
    tensors = ("sources", "weights", "offsets", "anchor", "concept", "assigned")
    return (
        all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)
        and torch.equal(one.score.nan_to_num(), other.score.nan_to_num())
        and (one.role, one.grid, one.by) == (other.role, other.grid, other.by)
    )


def _plannable(
    reducer: Reducer,
    planned: Callable[[VisualTokens], Reduction],
    images: Sequence[VisualTokens],
    before: Sequence[Tensor],
) -> Iterator[tuple[VisualTokens, Reduction, Tensor]]:
    """The images that are large enough for the reducer's budget, with their first plan."""
    for image, patches in zip(images, before, strict=True):
        try:
            yield image, planned(image), patches
        except UnmetBudget:
            _expect(getattr(reducer, "budget", None) is not None, reducer, "raised UnmetBudget without a budget")


def _refuses(reducer: Reducer, image: VisualTokens) -> bool:
    try:
        reducer.plan(image)
    except MissingSignal:
        return True
    return False


def _check_plan(reducer: Reducer, image: VisualTokens, plan: Reduction) -> None:
    _expect(plan.grid == image.grid, reducer, f"gave a plan for grid {plan.grid}, not {image.grid}")
    _expect(plan.by == reducer.spec, reducer, f"signed its plan {plan.by!r}, not {reducer.spec!r}")
    budget = getattr(reducer, "budget", None)
    if budget is not None:
        _expect(len(plan) == budget, reducer, f"gave {len(plan)} tokens for a budget of {budget}")
    _expect(len(plan) >= 1, reducer, "gave no token at all")
    _expect(bool((plan.offsets.diff() >= 1).all()), reducer, "gave a token made of nothing")
    _expect(bool(torch.isfinite(plan.weights).all()), reducer, "gave weights that are not finite")
    if getattr(reducer, "order", None) == "raster":
        place = torch.where(plan.anchor < 0, plan.patches, plan.anchor)
        _expect(bool((place.diff() >= 0).all()), reducer, "promised raster order and broke it")
    reduced = plan.apply(image.patches, image.cls)
    _expect(reduced.shape == (len(plan), image.width), reducer, f"reduced to shape {tuple(reduced.shape)}")
    _expect(bool(torch.isfinite(reduced).all()), reducer, "made tokens that are not finite")


def _objects(reducer: Reducer) -> dict[str, Any]:
    """Fields that a spec cannot spell, such as the SAE."""
    plain = (bool, int, float, str, type(None))
    names_ = [field.name for field in fields(cast(Any, reducer))] if is_dataclass(reducer) else []
    return {name: getattr(reducer, name) for name in names_ if not isinstance(getattr(reducer, name), plain)}


def _expect(truth: bool, reducer: Reducer | InTowerReducer, complaint: str) -> None:
    if not truth:
        raise AssertionError(f"{reducer.spec} {complaint}.")
