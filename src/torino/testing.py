"""Public test suite for reducers: run your own method through the checks that all bundled methods pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadParameter, MissingSignal, UnmetBudget
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers import (
    Downsample,
    InLanguageModelReducer,
    InTowerReducer,
    Reducer,
    as_in_tower,
    list_reducers,
    make,
    split_reducer,
)
from torino.reducers._similarity import nearest_kept

STANDARD_SIGNALS = frozenset({"cls", "cls_attention", "keys"})  # arguments of VisualTokens
GRIDS = ((8, 8), (5, 3), (1, 7), (4, 4), (1, 1))


def sample_tokens(width: int = 16, *, needs: frozenset[str] = frozenset(), seed: int = 0) -> list[VisualTokens]:
    """Return the tokens of a few small random images on various grids, clustered so that groups form.

    They have a CLS token, its attention, keys, and all signals in ``needs``. The result depends only on the arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    images: list[VisualTokens] = []
    for grid in GRIDS:
        n = grid[0] * grid[1]
        centers = torch.randn(max(2, n // 6), width, generator=generator)
        assigned = centers[torch.randint(len(centers), (n,), generator=generator)]
        attention = torch.rand(2, n, generator=generator)
        images.append(
            VisualTokens(
                patches=assigned + 0.1 * torch.randn(n, width, generator=generator),
                grid=grid,
                cls=torch.randn(width, generator=generator),
                cls_attention=attention / attention.sum(1, keepdim=True),
                keys=torch.randn(n, 8, generator=generator),
                signals={name: sample_signal(name, n, width, generator) for name in sorted(needs - STANDARD_SIGNALS)},
            )
        )
    return images


def sample_videos(width: int = 16, *, needs: frozenset[str] = frozenset(), seed: int = 0) -> list[VisualTokens]:
    """Return the tokens of two small random clips: a scene with some noise and a cut, and one frame shown twice."""
    generator = torch.Generator().manual_seed(seed)
    videos: list[VisualTokens] = []
    for frames, grid, times in ((6, (3, 4), None), (2, (1, 5), (0.0, 0.5))):
        size = grid[0] * grid[1]
        scenes = torch.randn(2, size, width, generator=generator)
        noise = 0.2 * torch.randn(frames, size, width, generator=generator) * (frames > 2)
        patches = torch.stack([scenes[int(frame >= 4)] for frame in range(frames)]) + noise
        n = frames * size
        attention = torch.rand(2, n, generator=generator)
        videos.append(
            VisualTokens(
                patches.view(n, width),
                grid,
                cls_attention=attention / attention.sum(1, keepdim=True),
                keys=torch.randn(n, 8, generator=generator),
                signals={name: sample_signal(name, n, width, generator) for name in sorted(needs - STANDARD_SIGNALS)},
                frames=frames,
                times=times,
            )
        )
    return videos


def sample_signal(name: str, n: int, width: int, generator: torch.Generator, heads: int = 2) -> Tensor:
    """Return a random signal for ``n`` patches, with the shape that belongs to its name."""
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
        "words": (5, 2 * width),
    }
    values = torch.randn(shapes.get(kind, (n, width)), generator=generator)
    return values.softmax(-1) if "attention" in kind else values


def check_reducer(reducer: Reducer, tokens: Sequence[VisualTokens] | None = None) -> None:
    """Raise AssertionError if a reducer violates the contract of torino.

    A reducer must meet its budget, return well-formed rows in its output order, plan each image independently of the
    batch (or, if images share its budget, meet it on average), return the same plan twice, not change its input or the
    global random state, accept half precision, and be rebuilt from its own spec. A reducer that works inside a tower is
    run through :func:`simulate_tower`, and one inside the language model through :func:`simulate_language_model`; both
    must raise MissingSignal for the output tokens of a tower.

    Parameters
    ----------
    reducer : Reducer
    tokens : sequence of VisualTokens, optional
        Test images. Defaults to small ones, and clips if it takes frames, with the width of ``reducer.sae``, if any.

    Examples
    --------
    >>> from torino import RawEmbedding, make
    >>> check_reducer(make("torino-p", sae=RawEmbedding()))
    """
    width = getattr(getattr(reducer, "sae", None), "width", 16)
    images = list(tokens) if tokens is not None else sample_tokens(width, needs=reducer.needs)
    if tokens is None and reducer.takes_frames:
        images += sample_videos(width, needs=reducer.needs)
    original_patches = [image.patches.clone() for image in images]
    random_state, numpy_state = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002

    in_tower = as_in_tower(reducer)
    plan_image: Callable[[VisualTokens], Reduction] = reducer.plan
    if isinstance(reducer, Downsample):
        plan_image = lambda image: reducer.plan_grid(image.grid)[1]  # noqa: E731
    elif in_tower is not None:
        plan_image = lambda image: simulate_tower(in_tower, image)[1]  # noqa: E731
    elif split_reducer(reducer)[1] is not None:
        plan_image = lambda image: simulate_language_model(reducer, image)  # noqa: E731
    plans_output = in_tower is None and split_reducer(reducer)[1] is None
    planned = list(_plan_feasible(reducer, plan_image, images, original_patches))
    _expect(bool(planned), reducer, "planned none of the sample images")
    images = [image for image, _, _ in planned]
    plans = [plan for _, plan, _ in planned]
    original_patches = [patches for _, _, patches in planned]
    for image, plan in zip(images, plans, strict=True):
        _check_plan(reducer, image, plan)
    for second_plan, plan in zip([plan_image(image) for image in images], plans, strict=True):
        _expect(same_plan(second_plan, plan), reducer, "gave two different plans for the same image")
    if not plans_output:
        _expect(_rejects_output_tokens(reducer, images[0]), reducer, "works inside a model but planned output tokens")
    if reducer.shares_batch:
        batch, budget = reducer.plan_batch(images), getattr(reducer, "budget", 0)
        _expect(int(batch.lengths.sum()) == budget * len(images), reducer, "did not meet its budget on average")
    elif plans_output:
        for order in (1, -1):
            batch = reducer.plan_batch(images[::order])
            for batch_plan, plan in zip(batch, plans[::order], strict=True):
                _expect(same_plan(batch_plan, plan), reducer, "planned an image differently in a batch")

    for image, patches in zip(images, original_patches, strict=True):
        _expect(torch.equal(image.patches, patches), reducer, "changed its input")
    _expect(torch.equal(torch.get_rng_state(), random_state), reducer, "used torch's global random state")
    _expect(repr(np.random.get_state()) == numpy_state, reducer, "used numpy's global random state")  # noqa: NPY002
    half_precision = images[0].with_(patches=images[0].patches.half())
    _check_plan(reducer, images[0], plan_image(half_precision))
    if reducer.name in list_reducers():
        rebuilt = make(reducer.spec, **_object_fields(reducer))
        _expect(rebuilt.spec == reducer.spec, reducer, "is not rebuilt by its spec")


def simulate_tower(reducer: InTowerReducer, tokens: VisualTokens, blocks: int = 6) -> tuple[Tensor, Reduction]:
    """Run a reducer inside a small random tower whose input are the tokens of one image.

    Returns the output of the tower, of shape (M, D), and the composed reduction. The CLS token is included if there is
    one. The weights of the tower depend only on the width of the tokens.
    """
    generator, width = torch.Generator().manual_seed(0), tokens.width
    heads, prefix = 2 - width % 2, int(tokens.cls is not None)
    hidden = tokens.patches.float() if tokens.cls is None else torch.cat([tokens.cls[None], tokens.patches]).float()
    state = reducer.begin(hidden[prefix:], tokens.grid, blocks, bool(prefix))
    _expect(len(state.removals) == blocks, reducer, f"gave removals for {len(state.removals)} of {blocks} blocks")
    for _ in range(blocks):
        weights = torch.randn(4, width, width, generator=generator) / width**0.5
        query, key, value = (
            (hidden @ weight).unflatten(1, (heads, -1)).transpose(0, 1) for weight in weights[:3]
        )  # (heads, tokens, width / heads)
        logits = query @ key.transpose(1, 2) * key.shape[2] ** -0.5
        if state.proportional:
            logits[:, :, prefix:] += state.sizes.log()
        attention = logits.softmax(-1)
        hidden = hidden + (attention @ value).transpose(0, 1).flatten(1)
        signals = {
            "head_keys": key.mean(0)[prefix:],
            "keys": key.transpose(0, 1).flatten(1)[prefix:],
            "queries": query.transpose(0, 1).flatten(1)[prefix:],
            "attention": attention[:, :, prefix:],
        }
        expected = len(state.reduction) - state.num_to_remove
        state = state.advance({name: signals[name] for name in reducer.needs})
        count = len(state.reduction)
        _expect(count == expected, reducer, f"kept {count} tokens in a block instead of {expected}")
        _expect(state.sizes.shape == (count,), reducer, f"gave {len(state.sizes)} sizes for {count} tokens")
        _expect(bool((state.sizes > 0).all()), reducer, "gave sizes that are not positive")
        hidden = _apply_step(hidden, prefix, state.step)
        hidden = hidden + (hidden @ weights[3]).tanh()
    state = state.finish()
    return _apply_step(hidden, prefix, state.step)[prefix:], state.reduction


def simulate_language_model(reducer: Reducer, tokens: VisualTokens, blocks: int = 8) -> Reduction:
    """Run a reducer inside a small random language model, which reads the tokens of one image and then some text.

    A method that works before the language model, if the reducer has one, reduces the tokens first. Returns the
    composed reduction. The weights of the language model depend only on the width of the tokens.
    """
    before, inside = split_reducer(reducer)
    if inside is None:
        raise BadParameter(f"{reducer.spec} does not work inside the language model. Use its plan().")
    generator, width = torch.Generator().manual_seed(0), tokens.width
    plan = Reduction.identity(**tokens.layout) if before is None else before.plan(tokens)
    text, heads = torch.randn(6, width, generator=generator), 2 - width % 2
    weights = torch.randn(blocks, 3, width, width, generator=generator) / width**0.5
    hidden = torch.cat([plan.apply(tokens.patches.float()), text])
    stages = dict(inside.stages(len(plan), blocks))
    _expect(0 < min(stages) <= max(stages) < blocks, inside, f"gave stages {stages} for {blocks} blocks")
    attention, keys = _attend(hidden, weights[0], heads)
    for block in range(blocks):
        count, n = stages.get(block, len(plan)), len(plan)
        if count < n:
            following = _attend(hidden, weights[block], heads)[0]
            signals = {"attention": attention[:, -1, :n], "next_attention": following[:, -1, :n]}
            signals |= {"keys": keys[:n], "text_keys": keys[n:], "hidden": hidden[:n], "text_hidden": hidden[n:]}
            kept, score = inside.select({name: signals[name] for name in inside.reads}, count)
            _expect(len(kept) == len(score) == count, inside, f"kept {len(kept)} tokens instead of {count}")
            _expect(bool((kept.diff() > 0).all()), inside, "did not return tokens in increasing order")
            assigned = nearest_kept(hidden[:n], kept)
            plan = plan.then(Reduction.pick(kept, (1, n), inside.spec, score=score, assigned=assigned))
            hidden = torch.cat([hidden[kept], hidden[n:]])
        attention, keys = _attend(hidden, weights[block], heads)
        mixed = attention @ hidden.unflatten(1, (heads, -1)).transpose(0, 1)
        hidden = hidden + mixed.transpose(0, 1).flatten(1) @ weights[block, 2]
    return replace(plan, by=reducer.spec)


def _attend(hidden: Tensor, weights: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return a causal attention map (heads, tokens, tokens) and the keys (tokens, width)."""
    query, key = ((hidden @ weight).unflatten(1, (heads, -1)).transpose(0, 1) for weight in weights[:2])
    logits = query @ key.transpose(1, 2) * key.shape[2] ** -0.5
    causal = torch.ones(logits.shape[1:], dtype=torch.bool).tril()
    return logits.masked_fill(~causal, -torch.inf).softmax(-1), key.transpose(0, 1).flatten(1)


def _apply_step(hidden: Tensor, prefix: int, step: Reduction | None) -> Tensor:
    return hidden if step is None else torch.cat([hidden[:prefix], step.apply(hidden[prefix:])])


def same_plan(first: Reduction, second: Reduction) -> bool:
    """Return whether two reductions are equal in all values and labels."""
    tensors = ("sources", "weights", "offsets", "anchor", "concept", "assigned")
    return (
        all(torch.equal(getattr(first, name), getattr(second, name)) for name in tensors)
        and torch.equal(first.score.nan_to_num(), second.score.nan_to_num())
        and (first.role, first.layout, first.by) == (second.role, second.layout, second.by)
    )


def _plan_feasible(
    reducer: Reducer,
    plan_image: Callable[[VisualTokens], Reduction],
    images: Sequence[VisualTokens],
    original_patches: Sequence[Tensor],
) -> Iterator[tuple[VisualTokens, Reduction, Tensor]]:
    """Yield the images that are large enough for the budget, with their plans and original patches."""
    for image, patches in zip(images, original_patches, strict=True):
        try:
            yield image, plan_image(image), patches
        except UnmetBudget:
            _expect(getattr(reducer, "budget", None) is not None, reducer, "raised UnmetBudget without a budget")


def _rejects_output_tokens(reducer: Reducer, image: VisualTokens) -> bool:
    try:
        reducer.plan(image)
    except MissingSignal:
        return True
    return False


def _check_plan(reducer: Reducer, image: VisualTokens, plan: Reduction) -> None:
    _expect(plan.grid == image.grid, reducer, f"gave a plan for grid {plan.grid} instead of {image.grid}")
    _expect(plan.frames == image.frames, reducer, f"gave a plan of {plan.frames} frames instead of {image.frames}")
    _expect(plan.times == image.times, reducer, "did not copy the times of the frames into the plan")
    _expect(plan.by == reducer.spec, reducer, f"set plan.by to {plan.by!r} instead of {reducer.spec!r}")
    budget = getattr(reducer, "budget", None)
    if budget is not None:
        met = len(plan) <= budget if reducer.on_pixels else len(plan) == budget
        _expect(met, reducer, f"gave {len(plan)} tokens for a budget of {budget}")
    _expect(len(plan) >= 1, reducer, "gave no tokens")
    _expect(bool((plan.offsets.diff() >= 1).all()), reducer, "gave a token without patches")
    _expect(bool(torch.isfinite(plan.weights).all()), reducer, "gave weights that are not finite")
    if getattr(reducer, "order", None) == "raster":
        position = torch.where(plan.anchor < 0, plan.patches, plan.anchor)
        _expect(bool((position.diff() >= 0).all()), reducer, "did not return tokens in raster order")
    reduced = plan.apply(image.patches, image.cls)
    _expect(reduced.shape == (len(plan), image.width), reducer, f"reduced to shape {tuple(reduced.shape)}")
    _expect(bool(torch.isfinite(reduced).all()), reducer, "gave tokens that are not finite")


def _object_fields(reducer: Reducer) -> dict[str, Any]:
    """Return fields that a spec cannot represent, such as the SAE."""
    plain = (bool, int, float, str, type(None))
    names = [field.name for field in fields(cast(Any, reducer))] if is_dataclass(reducer) else []
    return {name: getattr(reducer, name) for name in names if not isinstance(getattr(reducer, name), plain)}


def _expect(condition: bool, reducer: Reducer | InTowerReducer | InLanguageModelReducer, violation: str) -> None:
    if not condition:
        raise AssertionError(f"{reducer.spec} {violation}.")
