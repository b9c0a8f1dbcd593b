"""Permutations without memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torino.training.sampler import Permutation, hash_key, shuffled_epochs


@given(st.integers(1, 700), st.integers(0, 2**64 - 1), st.integers(1, 60), st.integers(1, 300))
def test_permutation_contains_every_item_once(count: int, key: int, block: int, window: int) -> None:
    permutation = Permutation(count, key, block=block, window=window)
    assert np.sort(permutation[np.arange(count)]).tolist() == list(range(count))


def test_positions_can_be_read_individually() -> None:
    permutation = Permutation(1000, hash_key(5))
    full = permutation[np.arange(1000)]
    assert [int(permutation[np.array([position])][0]) for position in (0, 17, 999)] == full[[0, 17, 999]].tolist()


def test_large_permutation_needs_no_memory() -> None:
    count = 10**12
    items = Permutation(count, hash_key(0))[np.arange(count - 5000, count)]
    assert len(set(items.tolist())) == 5000
    assert items.min() >= 0
    assert items.max() < count


def test_permutations_are_uniform() -> None:
    """Positions of items over many keys: chi-square within four standard deviations of its expectation."""
    count, draws = 20, 1500
    counts = np.zeros((count, count))
    for seed in range(draws):
        counts[np.arange(count), Permutation(count, hash_key(seed))[np.arange(count)]] += 1
    expected, freedom = draws / count, (count - 1) ** 2
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 4 * (2 * freedom) ** 0.5


def test_local_permutation_reads_few_blocks_at_a_time() -> None:
    permutation = Permutation(10_000, hash_key(1), block=50, window=500)
    items = permutation[np.arange(10_000)]
    first = items[:500]
    assert len(set((first // 50).tolist())) == 10
    assert len(set((items[500:1000] // 50).tolist())) == 10
    assert (np.diff(first) == 1).mean() < 0.05  # mixed within the window
    assert np.unique(first // 50).max() > 40  # blocks from the whole range


def test_epochs_contain_every_item_once_in_different_orders() -> None:
    items = shuffled_epochs(np.arange(30), 10, seed=3)
    epochs = [items[start : start + 10].tolist() for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert shuffled_epochs(np.arange(7, 23), 10, seed=3).tolist() == items[7:23].tolist()
    assert shuffled_epochs(np.arange(30), 10, seed=4).tolist() != items.tolist()
