"""Pseudo-random sampling without stored permutations: the index at any position is computed on demand."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
IndexArray = NDArray[np.int64]
_UInt64Array = NDArray[np.uint64]


def hash_key(*parts: object) -> int:
    """Hash values, such as a seed and a name, to a 64-bit key; values with the same ``repr`` give the same key.

    Examples
    --------
    >>> hash_key(0, "cat.jpg") == hash_key(0, "cat.jpg"), hash_key(0, "cat.jpg") == hash_key(1, "cat.jpg")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Permutation:
    """A pseudo-random permutation of 0 to ``count`` − 1 that is computed, not stored.

    A small Feistel network permutes the next power of two; a number outside the range is passed through the network
    again until it is inside (cycle walking).

    Parameters
    ----------
    count : int
        At least 1.
    key : int
        64-bit key; see :func:`hash_key`.
    block, window : int
        With ``block`` > 1 the permutation is local: blocks of ``block`` neighbors are shuffled, and only the items of
        about ``window`` / ``block`` blocks are mixed with each other before the next blocks follow. A reader then
        accesses one window at a time, in contiguous blocks.

    Examples
    --------
    >>> sorted(Permutation(7, hash_key(0))[np.arange(7)].tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, count: int, key: int, *, block: int = 1, window: int = 1) -> None:
        self.count = count
        self._keys = np.array([key], np.uint64)  # not a scalar: numpy warns when scalars overflow
        self.block = min(block, count)
        self.window = min(max(window // self.block, 1), count // self.block) * self.block

    def __len__(self) -> int:
        """Return the number of items."""
        return self.count

    def __getitem__(self, positions: IndexArray) -> IndexArray:
        """Return the items at some positions, each from 0 to ``count`` − 1."""
        if self.block == 1 or self.window == 1:
            return _permute(positions, self.count, self._keys)
        items = self._permute_locally(positions)
        while (outside := np.flatnonzero(items >= self.count)).size:  # the last window may exceed the count
            items[outside] = self._permute_locally(items[outside])
        return items

    def _permute_locally(self, positions: IndexArray) -> IndexArray:
        windows = -(-self.count // self.window)
        window, offset = np.divmod(positions, self.window)
        keys = _mix64(window.astype(np.uint64) * _GOLDEN ^ self._keys)
        mixed = _permute(offset, self.window, keys)
        per_window = self.window // self.block
        blocks = _permute(window * per_window + mixed // self.block, windows * per_window, self._keys)
        return blocks * self.block + mixed % self.block


def shuffled_epochs(positions: IndexArray, count: int, seed: int, *, block: int = 1, window: int = 1) -> IndexArray:
    """Return the items at some positions of an endless sequence of epochs over ``count`` items.

    Every epoch contains each item once, in its own pseudo-random order.
    """
    epochs, positions = np.divmod(positions, count)
    items = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        mask = epochs == epoch
        items[mask] = Permutation(count, hash_key(seed, epoch), block=block, window=window)[positions[mask]]
    return items


def sample_without_replacement(count: int, size: int, key: int) -> IndexArray:
    """Sample ``size`` of the numbers below ``count``, in ascending order; all of them if there are no more.

    Fast for small ``count``, such as the patches of a photo.

    Examples
    --------
    >>> sample_without_replacement(4, 9, hash_key(0)).tolist()
    [0, 1, 2, 3]
    >>> len(set(sample_without_replacement(576, 3, hash_key(0)).tolist()))
    3
    """
    if size >= count:
        return np.arange(count)
    hashes = _mix64(np.arange(count, dtype=np.uint64) * _GOLDEN + np.array([key], np.uint64))  # all different
    return np.sort(np.argpartition(hashes, size)[:size])


def _permute(numbers: IndexArray, count: int, keys: _UInt64Array) -> IndexArray:
    """Permute numbers below ``count``, with one key for all or one key for each."""
    bits = max((count - 1).bit_length(), 2)
    permuted = _feistel(numbers.astype(np.uint64), bits, keys)
    while (outside := np.flatnonzero(permuted >= count)).size:
        permuted[outside] = _feistel(permuted[outside], bits, keys if len(keys) == 1 else keys[outside])
    return permuted.astype(np.int64)


def _feistel(numbers: _UInt64Array, bits: int, keys: _UInt64Array) -> _UInt64Array:
    """Permute the numbers below 2 ** ``bits``: each round changes one half by a hash of the other half."""
    high, low = bits // 2, bits - bits // 2
    left, right = numbers >> np.uint64(low), numbers & np.uint64((1 << low) - 1)
    left_bits, right_bits = high, low  # the halves are swapped in every round
    for turn in range(ROUNDS):
        salt = np.uint64((turn + 1) * int(_GOLDEN) & 2**64 - 1)
        mixed = left ^ (_mix64(right + _mix64(keys ^ salt)) & np.uint64((1 << left_bits) - 1))
        left, right, left_bits, right_bits = right, mixed, right_bits, left_bits
    return left << np.uint64(low) | right


def _mix64(words: _UInt64Array) -> _UInt64Array:
    """Hash 64 bits to 64 bits, one to one (the finalizer of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
