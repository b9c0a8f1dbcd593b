"""Pseudo-random orders that take no memory: where the place of a thing is worked out, not looked up."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Numbers = NDArray[np.int64]
_Words = NDArray[np.uint64]


def key_of(*parts: object) -> int:
    """A 64-bit key from anything that prints the same everywhere, such as a seed and a name.

    Examples
    --------
    >>> key_of(0, "cat.jpg") == key_of(0, "cat.jpg"), key_of(0, "cat.jpg") == key_of(1, "cat.jpg")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Order:
    """The numbers 0 to ``count`` − 1 in a pseudo-random order, each once.

    A small Feistel network permutes the next power of two, and a number that falls outside is sent through again
    until it falls inside (cycle walking).

    Parameters
    ----------
    count : int
        At least 1.
    key : int
        Of 64 bits; see :func:`key_of`.
    block, window : int
        With a ``block`` of more than 1 the order is local: blocks of so many neighbours are drawn, and only the
        things of about ``window`` / ``block`` blocks are mixed with each other before the next are begun. Whoever
        reads in this order touches one ``window`` at a time, in pieces of a block.

    Examples
    --------
    >>> sorted(Order(7, key_of(0)).at(np.arange(7)).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, count: int, key: int, *, block: int = 1, window: int = 1) -> None:
        self.count = count
        self._keys = np.array([key], np.uint64)  # an array of one: those may overflow in peace
        self.block = min(block, count)
        self.window = min(max(window // self.block, 1), count // self.block) * self.block

    def at(self, places: Numbers) -> Numbers:
        """What is at some places of the order, each from 0 to ``count`` − 1."""
        if self.block == 1 or self.window == 1:
            return _permuted(places, self.count, self._keys)
        found = self._local(places)
        while (outside := np.flatnonzero(found >= self.count)).size:  # the last window may be larger than what is left
            found[outside] = self._local(found[outside])
        return found

    def _local(self, places: Numbers) -> Numbers:
        windows = -(-self.count // self.window)
        number, place = np.divmod(places, self.window)
        keys = _mixed(number.astype(np.uint64) * _GOLDEN ^ self._keys)
        mixed = _permuted(place, self.window, keys)
        per_window = self.window // self.block
        blocks = _permuted(number * per_window + mixed // self.block, windows * per_window, self._keys)
        return blocks * self.block + mixed % self.block


def endless(places: Numbers, count: int, seed: int, *, block: int = 1, window: int = 1) -> Numbers:
    """What is at some places of a sequence that goes through ``count`` things again and again, each time anew mixed."""
    passes, places = np.divmod(places, count)
    found = np.empty_like(places)
    for number in np.unique(passes).tolist():
        here = passes == number
        found[here] = Order(count, key_of(seed, number), block=block, window=window).at(places[here])
    return found


def drawn(count: int, few: int, key: int) -> Numbers:
    """Draw ``few`` of the numbers below ``count`` without putting back, ascending; all of them if there are no more.

    Quick where ``count`` is small, as patches of a photo are.

    Examples
    --------
    >>> drawn(4, 9, key_of(0)).tolist(), len(set(drawn(576, 3, key_of(0)).tolist()))
    ([0, 1, 2, 3], 3)
    """
    if few >= count:
        return np.arange(count)
    hashes = _mixed(np.arange(count, dtype=np.uint64) * _GOLDEN + np.array([key], np.uint64))  # no two are equal
    return np.sort(np.argpartition(hashes, few)[:few])


def _permuted(numbers: Numbers, count: int, keys: _Words) -> Numbers:
    """Permute numbers below ``count``, by one key for all or one for each."""
    bits = max((count - 1).bit_length(), 2)
    found = _network(numbers.astype(np.uint64), bits, keys)
    while (outside := np.flatnonzero(found >= count)).size:
        found[outside] = _network(found[outside], bits, keys if len(keys) == 1 else keys[outside])
    return found.astype(np.int64)


def _network(numbers: _Words, bits: int, keys: _Words) -> _Words:
    """Permute the numbers below 2 ** ``bits``: each round stirs one half with what the other half says."""
    high, low = bits // 2, bits - bits // 2
    left, right = numbers >> np.uint64(low), numbers & np.uint64((1 << low) - 1)
    wide, other = high, low  # bits of left and right; they change sides every round
    for turn in range(ROUNDS):
        salt = np.uint64((turn + 1) * int(_GOLDEN) & 2**64 - 1)
        stirred = left ^ (_mixed(right + _mixed(keys ^ salt)) & np.uint64((1 << wide) - 1))
        left, right, wide, other = right, stirred, other, wide
    return left << np.uint64(low) | right


def _mixed(words: _Words) -> _Words:
    """A hash of 64 bits to 64 bits, one to one (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
