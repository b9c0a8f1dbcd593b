"""Grouping compared with a pairwise reference, for random, tied, degenerate and silent inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torino.core import grouping
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens
from torino.core.grouping import Groups, group_by_overlap, shared_concepts
from torino.core.ragged import offsets_from_lengths

RULES = ("group", "keep", "literal")
SETTINGS = [(k, delta) for k in range(1, 7) for delta in range(1, k + 1)]
Rows = list[list[int]]


def rows_of(k: int, vocabulary: int, most: int = 14) -> st.SearchStrategy[Rows]:
    """Rows of up to k distinct latents; missing latents are silent."""
    row = st.lists(st.integers(0, vocabulary - 1), unique=True, max_size=k)
    full = st.lists(st.integers(0, vocabulary - 1), unique=True, min_size=k, max_size=k)
    return st.lists(st.one_of(full, full, row), min_size=1, max_size=most)


def concepts_of(rows: Sequence[Sequence[int]], k: int) -> Concepts:
    indices = torch.tensor([[*row, *[-1] * (k - len(row))] for row in rows], dtype=torch.int64).view(len(rows), k)
    values = torch.arange(k, 0, -1).float() * (indices >= 0)
    return Concepts(indices, values, values[:, 0])


def random_rows(n: int, k: int, vocabulary: int, silent: float, seed: int) -> Rows:
    rng = random.Random(seed)
    lengths = [rng.randint(0, k) if rng.random() < silent else k for _ in range(n)]
    return [rng.sample(range(vocabulary), length) for length in lengths]


@contextmanager
def by_product(rows: int = 3) -> Iterator[None]:
    """Use the sparse product, in blocks of a few patches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "MAX_KEYS", 0)
        patch.setattr(grouping, "PRODUCT_ROWS", rows)
        yield


def check_invariants(groups: Groups, lengths: Sequence[int]) -> None:
    label = groups.label.tolist()
    seen: list[int] = []
    for value in label:
        if value not in seen:
            seen.append(value)
    assert seen == list(range(len(groups)))  # numbered by first appearance
    assert groups.sizes.tolist() == [label.count(g) for g in seen]
    ends = np.cumsum([0, *lengths])
    assert groups.counts.tolist() == [len(set(label[a:b])) for a, b in pairwise(ends)]
    assert groups.offsets.tolist() == [0, *np.cumsum(groups.counts.tolist()).tolist()]
    assert groups.label.dtype == groups.sizes.dtype == groups.offsets.dtype == torch.int64


# ---------------------------------------------------------------------- pairwise reference


@pytest.mark.parametrize(("k", "delta"), SETTINGS)
def test_every_setting_against_all_pairs(k: int, delta: int) -> None:
    @settings(max_examples=30)
    @given(st.integers(k, k + 7).flatmap(lambda vocabulary: rows_of(k, vocabulary)))
    def check(rows: Rows) -> None:
        concepts = concepts_of(rows, k)
        for silent in RULES:
            groups = group_by_overlap(concepts, delta, silent=silent)  # type: ignore[arg-type]
            assert groups.label.tolist() == oracle.pairwise_labels(concepts.indices.tolist(), delta, silent)
            check_invariants(groups, [len(rows)])
            with by_product():
                other = group_by_overlap(concepts, delta, silent=silent)  # type: ignore[arg-type]
            assert torch.equal(other.label, groups.label)

    check()


@pytest.mark.parametrize("vocabulary", [1, 2, 3])
@given(st.data())
def test_dictionaries_hardly_larger_than_k(vocabulary: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, vocabulary))
    delta = data.draw(st.integers(1, k))
    rows = data.draw(rows_of(k, vocabulary))
    concepts = concepts_of(rows, k)
    for silent in RULES:
        want = oracle.pairwise_labels(concepts.indices.tolist(), delta, silent)
        assert group_by_overlap(concepts, delta, silent=silent).label.tolist() == want  # type: ignore[arg-type]


@given(st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(1, k), rows_of(k, k + 4, most=9))))
def test_the_two_oracles_agree(case: tuple[int, int, Rows]) -> None:
    k, delta, rows = case
    z = [[0.0] * (k + 4) for _ in rows]
    for i, row in enumerate(rows):
        for rank, latent in enumerate(row):
            z[i][latent] = float(len(row) - rank)
    for silent in RULES:
        groups = oracle.grouped(z, k, delta, silent)
        label = [next(g for g, group in enumerate(groups) if i in group) for i in range(len(rows))]
        indices, _, _ = oracle.top_k(z, k)
        assert indices == concepts_of(rows, k).indices.tolist()
        assert label == oracle.pairwise_labels(indices, delta, silent)


@pytest.mark.parametrize("seed", range(10))
def test_larger_images(seed: int) -> None:
    rng = random.Random(seed)
    n, k = rng.randint(30, 80), rng.randint(1, 6)
    rows = random_rows(n, k, rng.choice([k + 3, 20, 60]), rng.choice([0.0, 0.3]), seed)
    concepts = concepts_of(rows, k)
    for delta in range(1, k + 1):
        for silent in ("group", "literal"):
            groups = group_by_overlap(concepts, delta, silent=silent)  # type: ignore[arg-type]
            assert groups.label.tolist() == oracle.pairwise_labels(concepts.indices.tolist(), delta, silent)
            check_invariants(groups, [n])


@pytest.mark.parametrize(("k", "delta"), [(9, 4), (10, 5), (12, 2), (16, 8), (32, 31)])
def test_k_so_large_that_subsets_are_too_many(k: int, delta: int) -> None:
    for seed in range(3):
        concepts = concepts_of(random_rows(24, k, k + 6, 0.4, seed), k)
        for silent in RULES:
            groups = group_by_overlap(concepts, delta, silent=silent)  # type: ignore[arg-type]
            assert groups.label.tolist() == oracle.pairwise_labels(concepts.indices.tolist(), delta, silent)


def test_chains_form_one_group() -> None:
    """Adjacent patches share one concept, the ends share none: one group, in any order of the chain."""
    n = 200
    chain = [[i, i + 1] for i in range(n)]
    order = list(range(n))
    random.Random(0).shuffle(order)
    for rows in (chain, chain[::-1], [chain[i] for i in order]):
        concepts = concepts_of(rows, 2)
        assert group_by_overlap(concepts, 1).label.tolist() == [0] * n
        assert group_by_overlap(concepts, 2).label.tolist() == list(range(n))
        with by_product(rows=7):
            assert group_by_overlap(concepts, 1).label.tolist() == [0] * n


# ---------------------------------------------------------------------- silent slots


def test_a_silent_slot_agrees_with_a_silent_slot_only() -> None:
    rows = [[5], [5], [5, 6], [7], [], []]
    concepts = concepts_of(rows, 2)
    assert group_by_overlap(concepts, 2).label.tolist() == [0, 0, 1, 2, 3, 3]
    assert group_by_overlap(concepts, 1).label.tolist() == [0, 0, 0, 1, 2, 2]
    assert group_by_overlap(concepts, 2, silent="keep").label.tolist() == [0, 0, 1, 2, 3, 4]


def test_silence_alone_links_no_active_patches() -> None:
    concepts = concepts_of([[1], [2], [3]], 6)
    for delta in range(1, 7):
        assert group_by_overlap(concepts, delta).label.tolist() == [0, 1, 2]


def test_silence_counts_towards_delta_beside_a_real_concept() -> None:
    concepts = concepts_of([[1], [1, 2], [1, 3, 4]], 4)
    assert group_by_overlap(concepts, 3).label.tolist() == [0, 0, 1]  # 1 + min(3, 2) = 3; 1 + min(2, 1) = 2
    assert group_by_overlap(concepts, 2).label.tolist() == [0, 0, 0]
    assert group_by_overlap(concepts, 4).label.tolist() == [0, 1, 2]


def test_the_literal_rule_fills_with_the_lowest_latents() -> None:
    concepts = concepts_of([[9], [0], [1, 0], []], 2)
    assert concepts.literal().indices.tolist() == [[9, 0], [0, 1], [1, 0], [0, 1]]
    assert group_by_overlap(concepts, 2, silent="literal").label.tolist() == [0, 1, 1, 1]
    assert group_by_overlap(concepts, 1, silent="literal").label.tolist() == [0, 0, 0, 0]


@given(st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), rows_of(k, k + 5))))
def test_literal_against_arg_top_over_zeros(case: tuple[int, Rows]) -> None:
    k, rows = case
    literal = concepts_of(rows, k).literal()
    for row, got in zip(rows, literal.indices.tolist(), strict=True):
        z = [0.0] * (k + 5)
        for rank, latent in enumerate(row):
            z[latent] = float(k - rank)
        assert got == oracle.arg_top(z, k)
        assert got == oracle.fill([*row, *[-1] * (k - len(row))])


def test_silent_patches_of_two_images_stay_apart() -> None:
    concepts = concepts_of([[], [1], [], [], [1], []], 2)
    for context in (None, by_product()):
        with context or pytest.MonkeyPatch.context():
            groups = group_by_overlap(concepts, 2, offsets=offsets_from_lengths([3, 3]))
            assert groups.label.tolist() == [0, 1, 0, 2, 3, 2]
            assert groups.counts.tolist() == [2, 2]


# ---------------------------------------------------------------------- batches


@given(st.data())
def test_a_batch_is_its_images_one_by_one(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 5))
    delta = data.draw(st.integers(1, k))
    silent = data.draw(st.sampled_from(RULES))
    images = data.draw(st.lists(rows_of(k, k + 3, most=7), min_size=1, max_size=5))
    offsets = offsets_from_lengths([len(image) for image in images])
    concepts = concepts_of([row for image in images for row in image], k)
    together = group_by_overlap(concepts, delta, silent=silent, offsets=offsets)
    check_invariants(together, [len(image) for image in images])
    with by_product(rows=2):
        product = group_by_overlap(concepts, delta, silent=silent, offsets=offsets)
    assert torch.equal(product.label, together.label)
    start = 0
    for i, image in enumerate(images):
        alone = group_by_overlap(concepts_of(image, k), delta, silent=silent)
        mine = together.label[start : start + len(image)] - together.offsets[i]
        assert torch.equal(mine, alone.label)
        sizes = together.sizes[int(together.offsets[i]) : int(together.offsets[i + 1])]
        assert torch.equal(sizes, alone.sizes)
        start += len(image)


def test_images_without_patches_have_no_groups() -> None:
    concepts = concepts_of([[1], [], [1]], 1)
    for context in (None, by_product()):
        with context or pytest.MonkeyPatch.context():
            groups = group_by_overlap(concepts, 1, offsets=torch.tensor([0, 0, 2, 2, 2, 3, 3]))
            assert groups.counts.tolist() == [0, 2, 0, 0, 1, 0]
            assert groups.label.tolist() == [0, 1, 2]


# ---------------------------------------------------------------------- large numbers


@pytest.mark.parametrize("large", [65535, 2**31 - 1, 2**32, 2**40, 2**62])
def test_large_latents_neither_overflow_nor_collide(large: int) -> None:
    rng = random.Random(1)
    names = [large - i for i in range(6)] + list(range(6)) + [large // 2 + i for i in range(6)]
    rows = [[names[c] for c in row] for row in random_rows(30, 5, 18, 0.2, 3)]
    rng.shuffle(rows)
    concepts = concepts_of(rows, 5)
    for delta in range(1, 6):
        want = oracle.pairwise_labels(concepts.indices.tolist(), delta, "group")
        assert group_by_overlap(concepts, delta).label.tolist() == want
        with by_product():
            assert group_by_overlap(concepts, delta).label.tolist() == want


def test_keys_of_many_symbols_do_not_overflow() -> None:
    """6 symbols with 20000 values each do not fit into 63 bits."""
    n, k = 4000, 6
    indices = torch.arange(n * k).view(n, k)
    indices[-1] = indices[0]
    values = torch.ones(n, k)
    for delta in (1, 5, 6):
        label = group_by_overlap(Concepts(indices, values, values[:, 0]), delta).label
        assert label.tolist() == [*range(n - 1), 0]


def test_many_images_with_large_latents() -> None:
    rows = [[2**40, 2**40 - 1], [2**40 - 1, 2**40], [2**40, 5]] * 300
    concepts = concepts_of(rows, 2)
    groups = group_by_overlap(concepts, 2, offsets=offsets_from_lengths([3] * 300))
    assert groups.label.tolist() == [2 * (i // 3) + (i % 3 == 2) for i in range(900)]
    assert shared_concepts(concepts, groups).tolist() == [2**40 - 1, 2**40] * 300


# ---------------------------------------------------------------------- shared concepts


@given(st.data())
def test_the_shared_concept_against_counting_by_hand(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 4))
    rows = data.draw(rows_of(k, k + 3))
    concepts = concepts_of(rows, k)
    amounts = st.lists(st.integers(1, 3), min_size=len(rows) * k, max_size=len(rows) * k)
    values = torch.tensor(data.draw(amounts)).view(len(rows), k).float().sort(1, descending=True).values
    values = values * (concepts.indices >= 0)
    concepts = Concepts(concepts.indices, values, values[:, 0])
    delta = data.draw(st.integers(1, k))
    groups = group_by_overlap(concepts, delta, silent=data.draw(st.sampled_from(RULES)))
    label = groups.label.tolist()
    want = [
        oracle.shared_concept(
            [i for i, of in enumerate(label) if of == g], concepts.indices.tolist(), concepts.values.tolist()
        )
        for g in range(len(groups))
    ]
    assert shared_concepts(concepts, groups).tolist() == want


def test_ties_of_the_shared_concept() -> None:
    indices = torch.tensor([[8, 3], [3, 8], [-1, -1]])
    even = Concepts(indices, torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.0, 0.0]]), torch.tensor([2.0, 2.0, 0.0]))
    uneven = Concepts(indices, torch.tensor([[3.0, 1.0], [2.0, 1.0], [0.0, 0.0]]), torch.tensor([3.0, 2.0, 0.0]))
    assert shared_concepts(even, group_by_overlap(even, 2)).tolist() == [3, -1]
    assert shared_concepts(uneven, group_by_overlap(uneven, 2)).tolist() == [8, -1]


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("delta", [0, -1, 3])
def test_delta_out_of_range_is_refused(delta: int) -> None:
    with pytest.raises(BadParameter, match=f"delta must be between 1 and k=2, got {delta}"):
        group_by_overlap(concepts_of([[1, 2]], 2), delta)


@pytest.mark.parametrize("rows", [[[1, 1]], [[1, 2], [3, 4], [5, 5]], [[0, 0]]])
def test_duplicate_concepts_are_refused(rows: Rows) -> None:
    with pytest.raises(BadParameter, match=f"Patch {len(rows) - 1} has the same concept twice"):
        group_by_overlap(concepts_of(rows, 2), 1)


def test_nothing_to_group_is_refused() -> None:
    empty = Concepts(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), torch.empty(0))
    with pytest.raises(BadTokens, match="no patches"):
        group_by_overlap(empty, 1)
    none = Concepts(torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0), torch.zeros(3))
    with pytest.raises(BadParameter, match="delta must be between 1 and k=0"):
        group_by_overlap(none, 1)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(BadParameter, match="silent must be one of 'group', 'keep', 'literal', got 'drop'"):
        group_by_overlap(concepts_of([[1]], 1), 1, silent="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [0, 4], [[0, 3]], []])
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    with pytest.raises(BadTokens, match="offsets must be non-decreasing from 0 to the number of patches, 3; got"):
        group_by_overlap(concepts_of([[1], [2], [3]], 1), 1, offsets=torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize(
    "shapes", [((2, 3), (2, 2), (2,)), ((2, 3), (2, 3), (3,)), ((6,), (6,), (6,)), ((2, 3), (2, 3), (2, 1))]
)
def test_concepts_that_do_not_belong_together_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    indices, values, peak = shapes
    with pytest.raises(BadParameter, match=r"shape \(N, k\)"):
        Concepts(torch.zeros(indices, dtype=torch.int64), torch.zeros(values), torch.zeros(peak))


@pytest.mark.parametrize("k", [0, 4])
def test_keeping_more_concepts_than_there_are_is_refused(k: int) -> None:
    with pytest.raises(BadParameter, match=f"k must be between 1 and 3.*got {k}"):
        concepts_of([[1, 2, 3]], 3).first(k)


def test_concepts_by_hand() -> None:
    concepts = Concepts.of([[1, 3], [2], []])
    assert concepts.indices.tolist() == [[1, 3], [2, -1], [-1, -1]]
    assert concepts.values.tolist() == [[2.0, 1.0], [2.0, 0.0], [0.0, 0.0]]
    assert concepts.peak.tolist() == [2.0, 2.0, 0.0]
    assert concepts.active.tolist() == [2, 1, 0]
    assert Concepts.of([[1], [2]], peak=[5, 6]).peak.tolist() == [5.0, 6.0]
    assert (len(concepts), concepts.k) == (3, 2)
