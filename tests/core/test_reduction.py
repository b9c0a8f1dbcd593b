"""Reductions: comparison with dense matrix products, labels, files and failed writes."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torino import RawEmbedding, Reduction, TorinoError, VisualTokens, make
from torino.core import io as files
from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.ragged import Ragged, offsets_from_lengths
from torino.core.reduction import ReductionBatch

TENSORS = ("sources", "weights", "offsets", "anchor", "concept", "assigned", "score")
WEIGHTS = st.sampled_from([1.0, 1.0, 0.5, -2.0, 0.25, 3.0, 0.0])


@st.composite
def reductions(draw: Any, patches: int | None = None, *, cls: bool = False, empty: bool = True) -> Reduction:
    """Any sparse matrix, with arbitrary labels."""
    n = patches if patches is not None else draw(st.integers(1, 6))
    high = n if cls else n - 1
    size = st.integers(0 if empty else 1, high + 1)
    row = size.flatmap(
        lambda count: st.lists(st.integers(0, high), unique=True, min_size=min(count, 3), max_size=min(count, 3))
    )
    rows = draw(st.lists(row, min_size=1, max_size=5))
    m = len(rows)

    def numbers(count: int, low: int, top: int) -> Tensor:
        values = draw(st.lists(st.integers(low, top), min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.int64)

    entries = sum(map(len, rows))
    return Reduction(
        sources=torch.tensor([patch for row in rows for patch in row], dtype=torch.int64),
        weights=torch.tensor(draw(st.lists(WEIGHTS, min_size=entries, max_size=entries)), dtype=torch.float32),
        offsets=offsets_from_lengths([len(row) for row in rows]),
        anchor=numbers(m, -1, n - 1),
        concept=numbers(m, -1, 9),
        role=tuple(draw(st.sampled_from(["primary", "padding", "context"])) for _ in rows),
        grid=(1, n),
        by=draw(st.sampled_from(["torino-p(k=2, delta=2)", "by hand", "größe 尺"])),
        assigned=numbers(n, -1, m - 1),
        score=torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.5, math.nan]), min_size=m, max_size=m))),
    )


def matrix(plan: Reduction, columns: int | None = None) -> Tensor:
    """The dense matrix of a reduction, shape (M, N) or (M, N + 1), in float64."""
    dense = torch.zeros(len(plan), columns or plan.patches, dtype=torch.float64)
    for m in range(len(plan)):
        for entry in range(int(plan.offsets[m]), int(plan.offsets[m + 1])):
            dense[m, int(plan.sources[entry])] += float(plan.weights[entry])
    return dense


def same(one: Reduction, two: Reduction) -> None:
    for name in TENSORS:
        first, second = getattr(one, name), getattr(two, name)
        assert first.dtype == second.dtype, name
        assert torch.equal(first.nan_to_num(-7), second.nan_to_num(-7)), name
    assert (one.role, one.grid, one.by) == (two.role, two.grid, two.by)


def values_for(plan: Reduction, *trailing: int, extra: int = 0) -> Tensor:
    shape = (plan.patches + extra, *trailing)
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).double()


def torino_plan(patches: int = 576, budget: int | None = None, name: str = "torino-m") -> Reduction:
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(40, 32, generator=g)
    x = centres[torch.randint(40, (patches,), generator=g)] + 0.3 * torch.randn(patches, 32, generator=g)
    return make(name, sae=RawEmbedding(), budget=budget).plan(VisualTokens.of(x))


# ---------------------------------------------------------------------- apply


@given(reductions(), st.sampled_from([(), (3,), (2, 3), (1,)]))
def test_apply_is_a_matrix_product(plan: Reduction, trailing: tuple[int, ...]) -> None:
    values = values_for(plan, *trailing)
    want = (matrix(plan) @ values.reshape(plan.patches, -1)).reshape(len(plan), *trailing)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        got = plan.apply(values.to(dtype))
        assert got.dtype == dtype
        assert got.shape == (len(plan), *trailing)
        assert torch.equal(got, want.to(dtype))


def test_a_sum_beside_an_empty_token_is_no_pruning() -> None:
    plan = Reduction.of([{0: 1.0, 1: 1.0}, {}], grid=(1, 2))  # as many entries as tokens, all of weight one
    assert not plan.is_pruning
    assert plan.apply(torch.tensor([[1.0], [2.0]])).tolist() == [[3.0], [0.0]]


def test_a_token_made_of_nothing_is_zero() -> None:
    plan = Reduction.of([{}], grid=(1, 2))
    for trailing in ((), (3,), (2, 2)):
        assert torch.equal(plan.apply(torch.ones(2, *trailing)), torch.zeros(1, *trailing))


def test_half_precision_is_summed_in_float32() -> None:
    n = 600
    plan = Reduction.of([dict.fromkeys(range(n), 1.0)], grid=(1, n))
    assert plan.apply(torch.full((n, 1), 100.0, dtype=torch.float16)).item() == 60000  # a float16 sum would be smaller
    ones = torch.ones(n, 1, dtype=torch.bfloat16)
    assert plan.apply(ones).item() == 600  # a bfloat16 sum stops at 256


@given(reductions(empty=False), st.sampled_from([(), (2,), (2, 2)]))
@settings(max_examples=15)
def test_gradients_flow(plan: Reduction, trailing: tuple[int, ...]) -> None:
    values = values_for(plan, *trailing).requires_grad_()
    assert torch.autograd.gradcheck(plan.apply, (values,))


def test_gradients_are_the_transposed_matrix() -> None:
    plan = Reduction.of([{0: 0.5, 2: 0.25}, {1: 1.0}, {}], grid=(1, 4))
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.zeros(4, 2, dtype=dtype, requires_grad=True)
        plan.apply(values).sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == [[0.5, 0.5], [1.0, 1.0], [0.25, 0.25], [0.0, 0.0]]
    pruned = torch.zeros(4, 2, requires_grad=True)
    Reduction.pick(torch.tensor([3, 0]), (2, 2), "x").apply(pruned).sum().backward()
    assert pruned.grad is not None
    assert pruned.grad[:, 0].tolist() == [1.0, 0.0, 0.0, 1.0]


@given(reductions(cls=True), st.sampled_from([(), (2,)]))
def test_the_cls_token_is_row_n(plan: Reduction, trailing: tuple[int, ...]) -> None:
    values = values_for(plan, *trailing, extra=1)
    want = (matrix(plan, plan.patches + 1) @ values.reshape(plan.patches + 1, -1)).reshape(len(plan), *trailing)
    assert torch.equal(plan.apply(values), want)
    assert torch.equal(plan.apply(values[:-1], cls=values[-1]), want)
    if bool((plan.sources == plan.patches).any()):
        with pytest.raises(BadTokens, match="CLS token"):
            plan.apply(values[:-1])
    else:
        assert torch.equal(plan.apply(values[:-1]), want)


def test_the_cls_token_takes_the_type_of_the_values() -> None:
    plan = Reduction.of([{0: 0.5, 2: 0.5}], grid=(1, 2))
    got = plan.apply(torch.tensor([[1.0], [9.0]], dtype=torch.float16), cls=torch.tensor([3.0], dtype=torch.float64))
    assert (got.dtype, got.item()) == (torch.float16, 2.0)


@pytest.mark.parametrize("rows", [0, 3, 6])
def test_values_of_another_number_of_patches_are_refused(rows: int) -> None:
    plan = Reduction.of([{0: 1.0}], grid=(2, 2))
    with pytest.raises(BadTokens, match=f"reads 4 patches, but {rows} rows"):
        plan.apply(torch.zeros(rows, 2))


def test_whole_numbers_are_refused() -> None:
    with pytest.raises(BadTokens, match=r"floating-point values, got torch\.int64"):
        Reduction.of([{0: 1.0}], grid=(1, 1)).apply(torch.zeros(1, 2, dtype=torch.int64))


def test_apply_is_deterministic_for_large_images() -> None:
    plan, x = torino_plan(), torch.randn(576, 64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(plan.apply(x), plan.apply(x))
    assert torch.allclose(plan.apply(x).double(), matrix(plan) @ x.double(), atol=1e-4)


# ---------------------------------------------------------------------- batches


@given(st.lists(reductions(cls=True), min_size=1, max_size=4), st.sampled_from([(), (2,), (2, 3)]))
def test_a_batch_is_its_images_one_by_one(plans: list[Reduction], trailing: tuple[int, ...]) -> None:
    batch = ReductionBatch.of(plans)
    parts = [values_for(plan, *trailing, extra=1) + i for i, plan in enumerate(plans)]
    want = [plan.apply(part) for plan, part in zip(plans, parts, strict=True)]
    for got in (
        batch.apply(parts),
        batch.apply(Ragged.of(parts)),
        batch.apply([part[:-1] for part in parts], cls=[part[-1] for part in parts]),
    ):
        assert got.lengths.tolist() == [len(plan) for plan in plans]
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_batch_without_cls_reads_packed_values() -> None:
    plans = [Reduction.of([{0: 0.5, 1: 0.5}], (1, 2)), Reduction.pick(torch.tensor([2, 0]), (1, 3), "x")]
    parts = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]])]
    got = ReductionBatch.of(plans).apply(Ragged.of(parts))
    assert got.values.tolist() == [[1.5], [5.0], [3.0]]
    assert got.offsets.tolist() == [0, 1, 3]
    pruning = ReductionBatch.of([plans[1], plans[1]]).apply([parts[1], parts[1] * 2])
    assert pruning.values.tolist() == [[5.0], [3.0], [10.0], [6.0]]


def test_gradients_flow_through_a_batch() -> None:
    plans = [Reduction.of([{0: 0.5, 1: 0.5}, {1: 2.0}], (1, 2)), Reduction.of([{2: 0.25, 0: 1.0}], (1, 3))]
    values = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    batch, offsets = ReductionBatch.of(plans), torch.tensor([0, 2, 5])
    assert torch.autograd.gradcheck(lambda v: batch.apply(Ragged(v, offsets)).values, (values,))


def test_a_batch_is_a_sequence() -> None:
    plans = [Reduction.identity((1, n)) for n in (1, 2, 3)]
    batch = ReductionBatch.of(plans)
    assert (len(batch), batch[1], batch[-1], list(batch)) == (3, plans[1], plans[2], plans)
    assert batch[1:] == tuple(plans[1:])
    assert batch.lengths.tolist() == [1, 2, 3]
    assert "3 images -> 6 tokens" in repr(batch)
    with pytest.raises(BadTokens, match="list of images is empty"):
        ReductionBatch.of([])


def test_a_batch_with_values_of_other_images_is_refused() -> None:
    batch = ReductionBatch.of([Reduction.identity((1, 2))] * 2)
    with pytest.raises(BadTokens, match="reduces 2 images, but values of 1 images were given"):
        batch.apply([torch.zeros(2, 1)])
    with pytest.raises(BadTokens, match="reads 2 patches, but 4 rows"):
        batch.apply([torch.zeros(2, 1), torch.zeros(4, 1)])


def test_a_batch_with_too_few_cls_tokens_is_refused() -> None:
    batch = ReductionBatch.of([Reduction.of([{2: 1.0}], (1, 2))] * 2)
    with pytest.raises(BadTokens, match="2 images"):
        batch.apply([torch.zeros(2, 1)] * 2, cls=[torch.zeros(1)])


# ---------------------------------------------------------------------- Ragged


def test_packed_parts_come_back_as_views() -> None:
    parts = [torch.arange(6.0).view(3, 2), torch.empty(0, 2), torch.ones(1, 2)]
    packed = Ragged.of(parts)
    assert packed.offsets.tolist() == [0, 3, 3, 4]
    assert packed.lengths.tolist() == [3, 0, 1]
    assert len(packed) == 3
    assert all(torch.equal(one, other) for one, other in zip(packed, parts, strict=True))
    assert torch.equal(packed[-1], parts[2])
    assert packed[2].data_ptr() == packed.values[3:].data_ptr()
    packed[0][0, 0] = 99
    assert packed.values[0, 0] == 99
    for image in (3, -4):
        with pytest.raises(IndexError, match=f"no image {image}: there are 3"):
            packed[image]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [0, 4], [-1, 3], []])
def test_packed_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    with pytest.raises(BadTokens, match=r"offsets must be non-decreasing from 0 to the number of rows \(3\)"):
        Ragged(torch.zeros(3, 1), torch.tensor(offsets, dtype=torch.int64))


def test_packing_nothing_is_refused() -> None:
    with pytest.raises(BadTokens, match="list of images is empty"):
        Ragged.of([])


# ---------------------------------------------------------------------- paint


@given(reductions(), st.sampled_from([(), (2,)]))
def test_painting_over_sources_is_a_weighted_mean(plan: Reduction, trailing: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    per_token = torch.randn(len(plan), *trailing, dtype=torch.float64, generator=g)
    painted = plan.paint(per_token)
    dense = matrix(plan).abs()
    assert painted.shape == (plan.patches, *trailing)
    for patch in range(plan.patches):
        total = dense[:, patch].sum()
        if total == 0:
            assert painted[patch].isnan().all()
        else:
            mean = (dense[:, patch].view(-1, *[1] * len(trailing)) * per_token).sum(0) / total
            assert torch.allclose(painted[patch], mean)


@given(reductions(), st.sampled_from([(), (2,)]))
def test_painting_over_groups_follows_assigned(plan: Reduction, trailing: tuple[int, ...]) -> None:
    per_token = torch.randn(len(plan), *trailing, generator=torch.Generator().manual_seed(1))
    painted = plan.paint(per_token, over="groups")
    for patch, token in enumerate(plan.assigned.tolist()):
        if token < 0:
            assert painted[patch].isnan().all()
        else:
            assert torch.equal(painted[patch], per_token[token])


def test_painting_after_pruning_gives_kept_patches_back() -> None:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    plan = make("torino-p", sae=RawEmbedding(), budget=20).plan(VisualTokens.of(x))
    painted = plan.paint(plan.apply(x))
    kept = torch.zeros(64, dtype=torch.bool)
    kept[plan.anchor] = True
    assert torch.equal(painted[kept], x[kept])
    assert painted[~kept].isnan().all()
    groups = plan.paint(plan.apply(x), over="groups")
    assert torch.equal(groups[kept], x[kept])
    assert bool(groups[~kept].isfinite().any())


def test_painting_takes_whole_numbers_and_leaves_the_cls_token_out() -> None:
    plan = Reduction.of([{2: 1.0}, {0: 1.0}], grid=(1, 2))
    painted = plan.paint(torch.tensor([7, 8]))
    assert painted[0] == 8
    assert painted[1].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_painting_in_half_precision(dtype: torch.dtype) -> None:
    painted = Reduction.of([{0: 0.5, 1: 0.5}, {1: 0.5}], grid=(1, 3)).paint(torch.tensor([[2.0], [4.0]], dtype=dtype))
    assert painted.dtype == dtype
    assert painted[:2].tolist() == [[2.0], [3.0]]
    assert painted[2].isnan().all()


def test_painting_the_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(BadParameter, match="each of the 1 output tokens, got 2"):
        Reduction.of([{0: 1.0}], grid=(1, 1)).paint(torch.zeros(2))


def test_painting_over_something_unknown_is_refused() -> None:
    with pytest.raises(BadParameter, match="over"):
        Reduction.of([{0: 1.0}], grid=(1, 1)).paint(torch.zeros(1), over="group")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- then


@given(st.data())
def test_then_is_the_matrix_product(data: st.DataObject) -> None:
    cls = data.draw(st.booleans())
    one = data.draw(reductions(cls=cls))
    two = data.draw(reductions(len(one), cls=cls))
    both = one.then(two)
    n, m = one.patches, len(one)
    first = torch.zeros(m + 1, n + 1, dtype=torch.float64)
    first[:m], first[m, n] = matrix(one, n + 1), 1  # the CLS token passes through
    assert torch.allclose(matrix(both, n + 1), matrix(two, m + 1) @ first)
    assert (both.grid, both.role, both.by) == (one.grid, two.role, f"{one.by} > {two.by}")
    for token in range(len(two)):
        anchor = int(two.anchor[token])
        assert int(both.anchor[token]) == (int(one.anchor[anchor]) if anchor >= 0 else -1)
        inherits = int(two.concept[token]) < 0 and anchor >= 0
        assert int(both.concept[token]) == int(one.concept[anchor] if inherits else two.concept[token])
    assert both.assigned.tolist() == [int(two.assigned[t]) if t >= 0 else -1 for t in one.assigned.tolist()]
    assert torch.equal(both.score.nan_to_num(-7), two.score.nan_to_num(-7))
    values = values_for(one, 2, extra=1)
    middle = torch.cat([one.apply(values), values[-1:]])
    assert torch.allclose(both.apply(values), two.apply(middle))


@given(st.data())
def test_then_is_associative(data: st.DataObject) -> None:
    cls = data.draw(st.booleans())
    a = data.draw(reductions(cls=cls))
    b = data.draw(reductions(len(a), cls=cls))
    c = data.draw(reductions(len(b), cls=cls))
    left, right = a.then(b).then(c), a.then(b.then(c))
    assert torch.allclose(matrix(left, a.patches + 1), matrix(right, a.patches + 1))
    for name in ("anchor", "concept", "assigned"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert (left.role, left.by, left.grid) == (right.role, right.by, right.grid)


def test_the_identity_changes_nothing() -> None:
    plan = torino_plan(64)
    before, after = Reduction.identity(plan.grid).then(plan), plan.then(Reduction.identity((1, len(plan))))
    for both in (before, after):
        assert torch.equal(matrix(both), matrix(plan))
        assert torch.equal(both.anchor, plan.anchor)
        assert torch.equal(both.assigned, plan.assigned)
        assert torch.equal(both.concept, plan.concept)


def test_pruning_twice_is_pruning() -> None:
    one = Reduction.pick(torch.tensor([5, 1, 3]), (2, 3), "a")
    both = one.then(Reduction.pick(torch.tensor([2, 0]), (1, 3), "b"))
    assert both.is_pruning
    assert both.sources.tolist() == both.anchor.tolist() == [3, 5]
    assert both.by == "a > b"


def test_then_on_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(BadParameter, match="outputs 1 tokens, but the next one was planned on 2 patches"):
        Reduction.of([{0: 1.0}], grid=(1, 4)).then(Reduction.identity((1, 2)))


# ---------------------------------------------------------------------- construction, errors and explanations


def test_made_by_hand() -> None:
    plan = Reduction.of([{1: 0.5, 0: 0.5}, {2: 0.1, 1: 0.9}, {}, {4: 1.0}], grid=(2, 2))
    assert plan.anchor.tolist() == [0, 1, -1, -1]  # the CLS token, patch 4, has no position
    assert plan.assigned.tolist() == [0, 0, 1, -1]
    assert plan.role == ("primary",) * 4
    assert plan.score.isnan().all()
    assert (len(plan), plan.patches) == (4, 4)
    assert plan.rows.tolist() == [0, 0, 1, 1, 3]
    assert repr(plan) == "Reduction(4 -> 4 tokens by by hand: 4 primary)"


def test_picking() -> None:
    plan = Reduction.pick(torch.tensor([4, 2, 0]), (2, 2), "mine", role="kept", score=torch.tensor([3.0, 2.0, 1.0]))
    assert plan.is_pruning
    assert plan.anchor.tolist() == [-1, 2, 0]
    assert plan.assigned.tolist() == [2, -1, 1, -1]
    assert plan.role == ("kept",) * 3
    assert plan.score.tolist() == [3.0, 2.0, 1.0]
    given_ = Reduction.pick(torch.tensor([1]), (1, 2), "mine", assigned=torch.tensor([0, 0]))
    assert given_.assigned.tolist() == [0, 0]
    assert torch.equal(Reduction.identity((2, 2)).apply(torch.eye(4)), torch.eye(4))


def parts(**changes: Any) -> dict[str, Any]:
    return {
        "sources": torch.tensor([0, 1, 3]),
        "weights": torch.ones(3),
        "offsets": torch.tensor([0, 2, 3]),
        "anchor": torch.tensor([0, 3]),
        "concept": torch.tensor([-1, 4]),
        "role": ("primary", "padding"),
        "grid": (2, 2),
        "by": "hand",
        "assigned": torch.tensor([0, 0, -1, 1]),
        "score": torch.tensor([1.0, math.nan]),
    } | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": torch.ones(2)}, r"weights must have shape \(3,\)"),
        ({"anchor": torch.tensor([0])}, r"anchor must have shape \(2,\)"),
        ({"concept": torch.tensor([[0, 1]])}, "concept must have shape"),
        ({"score": torch.zeros(3)}, "score must have shape"),
        ({"assigned": torch.zeros(3, dtype=torch.int64)}, r"assigned must have shape \(4,\)"),
        ({"role": ("primary",)}, "one entry for each of the 2 output tokens, got 1"),
        ({"offsets": torch.tensor([0, 2, 4])}, "offsets must be non-decreasing from 0 to 3"),
        ({"offsets": torch.tensor([0, 4, 3])}, "offsets must be non-decreasing"),
        ({"sources": torch.tensor([0, 1, 5])}, "sources must be between 0 and 4"),
        ({"sources": torch.tensor([-1, 1, 3])}, "sources must be between 0 and 4"),
        ({"anchor": torch.tensor([-2, 0])}, "anchor must be between -1"),
        ({"assigned": torch.tensor([0, 0, 0, 2])}, "assigned must be between -1 and 1"),
    ],
)
def test_labels_that_do_not_fit_are_refused(changes: Mapping[str, Any], words: str) -> None:
    Reduction(**parts())
    with pytest.raises(BadParameter, match=words):
        Reduction(**parts(**changes))


def test_an_explanation_lists_sources_position_and_concept() -> None:
    plan = Reduction(**parts(weights=torch.tensor([0.5, 0.25, 1.0])))
    first, last = plan.explain(0), plan.explain(-1, names={4: "stripes", -1: "nothing"})
    assert (first.token, first.of, first.role, first.anchor, first.grid) == (0, 2, "primary", 0, (2, 2))
    assert (first.sources, first.weights, first.stands_for) == ((0, 1), (0.5, 0.25), (0, 1))
    assert (first.concept, first.name, first.score) == (None, None, 1.0)
    assert (last.token, last.concept, last.name, last.stands_for) == (1, 4, "stripes", (3,))
    assert math.isnan(last.score)
    assert str(first) == (
        "Token 0 of 2 (primary) takes the place of patch 0 (row 0, column 0) and sums 2 patches with weights "
        "from 0.25 to 0.5. It stands for 2 patches, 50% of the image. Score 1."
    )
    for words in ("Token 1 of 2 (padding)", "patch 3 (row 1, column 1)", "unchanged", "4 (stripes)"):
        assert words in str(last)
    assert "Score" not in str(last)
    assert plan.explain(1).name is None


def test_an_explanation_of_the_cls_token_and_of_equal_weights() -> None:
    cls = str(Reduction.of([{4: 1.0}], grid=(2, 2)).explain(0))
    assert "no position on the grid" in cls
    assert "is the CLS token" in cls
    mean = str(Reduction.of([{0: 0.5, 1: 0.5}], grid=(1, 2)).explain(0))
    assert "weights of 0.5" in mean
    assert "100% of the image" in mean


@pytest.mark.parametrize("token", [2, -3])
def test_an_index_out_of_range_has_no_explanation(token: int) -> None:
    with pytest.raises(BadParameter, match=f"token must be between 0 and 1, got {token}"):
        Reduction(**parts()).explain(token)


# ---------------------------------------------------------------------- files

ENDINGS = (".npz", ".safetensors")


@pytest.mark.parametrize("ending", ENDINGS)
@given(plans=st.lists(reductions(cls=True), min_size=1, max_size=3))
@settings(max_examples=15)
def test_what_is_saved_comes_back(
    tmp_path_factory: pytest.TempPathFactory, ending: str, plans: Sequence[Reduction]
) -> None:
    path = tmp_path_factory.mktemp("plans") / f"plan{ending}"
    assert ReductionBatch.of(plans).save(path) == path
    for one, other in zip(ReductionBatch.load(path), plans, strict=True):
        same(one, other)
    if len(plans) == 1:
        same(Reduction.load(path), plans[0])
    else:
        with pytest.raises(BadFile, match=rf"contains {len(plans)} reductions.*ReductionBatch.load"):
            Reduction.load(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_names_of_several_lines_come_back(tmp_path: Path, ending: str) -> None:
    plans = [Reduction.of([{0: 1.0}], (1, 1), by="first\nsecond"), Reduction.of([{0: 1.0}], (1, 1), by="third")]
    path = ReductionBatch.of(plans).save(tmp_path / f"plan{ending}")
    assert [plan.by for plan in ReductionBatch.load(path)] == ["first\nsecond", "third"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("budget", [None, 64, 192])
def test_a_plan_of_576_patches_takes_a_few_kilobytes(tmp_path: Path, ending: str, budget: int | None) -> None:
    plan = torino_plan(576, budget)
    path = plan.save(tmp_path / f"plan{ending}")
    assert path.stat().st_size < (8 if ending == ".npz" else 24) * 1024
    same(Reduction.load(path), plan)


@pytest.mark.parametrize("ending", ENDINGS)
def test_other_arrays_ride_along(tmp_path: Path, ending: str) -> None:
    plan = torino_plan(16)
    path = ReductionBatch.of([plan]).save(tmp_path / f"plan{ending}", tokens=torch.ones(2, 3))
    same(Reduction.load(path), plan)
    arrays, texts = files.read_arrays(path)
    assert torch.equal(arrays["tokens"], torch.ones(2, 3))
    assert texts["format"] == "torino-reduction/1"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_cut_anywhere_is_a_bad_file(tmp_path: Path, ending: str) -> None:
    path = torino_plan(64).save(tmp_path / f"plan{ending}")
    whole = path.read_bytes()
    for length in [0, 1, 4, 7, 8, 9, 30, len(whole) - 1, *range(50, len(whole), len(whole) // 23)]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile, match=rf"plan{ending}"):
            Reduction.load(path)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("flip", [0xFF, 0x01])
def test_a_file_with_any_byte_changed_is_read_or_refused_in_words(tmp_path: Path, ending: str, flip: int) -> None:
    """Damaged files must not raise errors of other libraries."""
    path = torino_plan(16).save(tmp_path / f"plan{ending}")
    whole = path.read_bytes()
    refused = 0
    wrong: list[str] = []
    for place in range(0, len(whole), max(1, len(whole) // 350)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        try:
            Reduction.load(path)
        except TorinoError:
            refused += 1
        except Exception as error:
            wrong.append(f"byte {place}: {type(error).__name__}: {error}")
    assert refused
    assert not wrong, "\n".join(wrong[:8])


class Trap:
    """Unpickling this sets a flag."""

    sprung = False

    def __reduce__(self) -> Any:
        return (_spring, ())


def _spring() -> int:
    Trap.sprung = True
    return 0


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    np.savez(path, sources=np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(BadFile, match="never loaded"):
        Reduction.load(path)
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(BadFile, match=r"plan\.npz"):
        Reduction.load(path)
    assert not Trap.sprung


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    for name in ("other.npz", "other.safetensors"):
        path = files.write_arrays(tmp_path / name, {"patches": torch.zeros(4, 2)}, {"format": "something/2"})
        with pytest.raises(BadFile, match="not a saved reduction: its format is 'something/2'"):
            Reduction.load(path)
        files.write_arrays(path, {"patches": torch.zeros(4, 2)})
        with pytest.raises(BadFile, match="format is 'missing'"):
            Reduction.load(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npz").write_bytes((tmp_path / "array.npy").read_bytes())
    with pytest.raises(BadFile, match=r"not a readable \.npz"):
        Reduction.load(tmp_path / "array.npz")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(BadFile):
        Reduction.load(tmp_path / "text.npz")
    with pytest.raises(BadFile, match=r"suffix is '\.txt'.*Accepted"):
        Reduction.load(_written(tmp_path / "plan.txt"))
    with pytest.raises(BadFile, match="There is no file"):
        Reduction.load(tmp_path / "missing.npz")
    with pytest.raises(BadFile, match=r"Accepted: \.npz, \.safetensors"):
        torino_plan(4).save(tmp_path / "plan.csv")


def _written(path: Path) -> Path:
    path.write_text("x")
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grids", torch.tensor([[4, 4, 1]])),
        ("grids", torch.tensor([4, 4])),
        ("grids", torch.tensor([[-4, -4]])),
        ("grids", torch.tensor([[5, 4]])),
        ("lengths", torch.tensor([1])),
        ("lengths", torch.tensor([-1])),
        ("lengths", torch.tensor(3)),
        ("lengths", torch.tensor([1.5])),
        ("role", None),
        ("role", torch.tensor([9], dtype=torch.int8)),
        ("row_lengths", torch.tensor([-1])),
        ("sources", torch.tensor([10**6])),
        ("sources", None),
        ("weights", torch.zeros(1)),
        ("assigned", torch.zeros(2, dtype=torch.int64)),
        ("roles", ""),
        ("by", None),
    ],
)
def test_parts_that_do_not_fit_together_are_a_bad_file(tmp_path: Path, name: str, value: Any) -> None:
    plan = torino_plan(16)
    arrays, texts = ReductionBatch.of([plan]).arrays()
    target: dict[str, Any] = texts if name in texts else arrays  # type: ignore[assignment]
    if value is None:
        del target[name]
    else:
        target[name] = value.expand(len(plan)).contiguous() if name in ("role", "row_lengths") else value
    if (name, value) == ("roles", ""):
        texts["roles"] = "primary"  # one role too few
        arrays["role"] = torch.ones(len(plan), dtype=torch.int8)
    path = files.write_arrays(tmp_path / "plan.npz", arrays, texts)
    with pytest.raises(BadFile, match="is damaged"):
        Reduction.load(path)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("midway"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, error: BaseException
) -> None:
    path = torino_plan(16).save(tmp_path / f"plan{ending}")
    before = path.read_bytes()

    def fail(file: Any, *args: Any, **others: Any) -> None:
        target = args[0] if ending == ".safetensors" else file
        if isinstance(target, io.IOBase):
            target.write(b"half")
        else:
            Path(target).write_bytes(b"half")
        raise error

    if ending == ".npz":
        monkeypatch.setattr(files.np, "savez_compressed", fail)
    else:
        monkeypatch.setattr(files, "_save_safetensors", fail)
    with pytest.raises(BadFile if isinstance(error, OSError) else type(error)) as caught:
        torino_plan(64).save(path)
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
        assert "Nothing was changed" in str(caught.value)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    same(Reduction.load(path), torino_plan(16))


def test_a_failed_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = torino_plan(16).save(tmp_path / "plan.npz")
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(BadFile, match=r"Cannot write .*plan\.npz: Permission denied"):
        torino_plan(64).save(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["plan.npz"]


def test_writing_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(BadFile, match="it is a folder"):
        torino_plan(4).save(tmp_path / "folder.npz")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadFile, match="Cannot write"):
        torino_plan(4).save(tmp_path / "file" / "plan.npz")
    made = torino_plan(4).save(tmp_path / "new" / "folders" / "plan.npz")
    assert made.is_file()


def test_a_new_file_has_the_usual_rights(tmp_path: Path) -> None:
    path = torino_plan(4).save(tmp_path / "plan.npz")
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("patch", [-1, 5, 99])
def test_a_patch_that_is_not_there_is_refused(patch: int) -> None:
    with pytest.raises(BadParameter, match=f"no patch {patch}"):
        Reduction.of([{0: 1.0}, {patch: 1.0}], (2, 2))
    with pytest.raises(BadParameter, match=f"no patch {patch}"):
        Reduction.pick(torch.tensor([0, patch]), (2, 2), "by hand")
