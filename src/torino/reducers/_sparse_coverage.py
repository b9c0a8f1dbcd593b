"""Greedy coverage of a video by sparse codes, without the matrix of all pairs of patches.

The result is that of :func:`torino.reducers.torino_x.greedy_coverage` on the dense matrix. Overlaps of one patch are
computed when they are needed, from the patches that share one of its latents in the frames nearby. Gains never
increase, so an old gain is an upper bound, and few have to be computed again for each selected patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from torino.core.grouping import Ints

Floats = NDArray[np.float32]
# Gains within TIE of the highest one (in patches) count as equal to it, and gains and overlaps up to TIE count as 0. So
# rounding, which depends on the order of summation, does not change the selection.
TIE = 1e-4
TIME_CUTOFF = 3.0  # overlap ends at this multiple of the distance in time at which it decays


@dataclass(frozen=True, eq=False)
class Decay:
    """Decay of overlaps with distance: the factors of two patches are multiplied.

    Attributes
    ----------
    rows, columns : array of shape (rows, rows), (columns, columns)
        Factors of pairs of rows and of pairs of columns.
    frames : array of shape (frames,)
        Factor of two frames by their distance.
    """

    rows: Floats
    columns: Floats
    frames: Floats

    @property
    def reach(self) -> int:
        """The largest distance of two frames that overlap."""
        return int(np.flatnonzero(self.frames)[-1])


def time_factors(frames: int, time_locality: float | None) -> Floats:
    """Return exp(−t²/2r²) by the distance t of two frames, 0 beyond 3·r, for r = ``time_locality``; None: ones.

    Examples
    --------
    >>> time_factors(5, 1.0).round(3).tolist()
    [1.0, 0.6069999933242798, 0.13500000536441803, 0.010999999940395355, 0.0]
    """
    distance = np.arange(frames)
    if time_locality is None:
        return np.ones(frames, np.float32)
    with np.errstate(over="ignore"):  # for an extremely small locality
        factors = np.exp(-0.5 * (distance / time_locality) ** 2).astype(np.float32)
    return np.where(distance <= TIME_CUTOFF * time_locality, factors, 0).astype(np.float32)


class CodeIndex:
    """Overlaps of the patches of a video, computed on demand.

    Parameters
    ----------
    codes : csr_array of shape (N, C)
        Codes of length 1 in rows; patches without active concepts share a column of their own.
    decay : Decay
    """

    def __init__(self, codes: csr_array, decay: Decay) -> None:
        self.decay, self.frames = decay, len(decay.frames)
        self._grid = (len(decay.rows), len(decay.columns))
        self.size = self._grid[0] * self._grid[1]
        self._codes: Any = codes
        by_latent: Any = codes.tocsc()
        starts, latents = np.asarray(self._codes.indptr, np.int64), np.asarray(self._codes.indices, np.int64)
        self._patch, self._value = np.asarray(by_latent.indices, np.int64), np.asarray(by_latent.data, np.float32)
        # The patches of a latent are in order of frames, so those of a window of frames are adjacent.
        latent = np.repeat(np.arange(by_latent.shape[1]), np.diff(by_latent.indptr))
        key = latent * self.frames + self._patch // self.size
        frame = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) // self.size
        first = np.maximum(frame - decay.reach, 0)
        last = np.minimum(frame + decay.reach + 1, self.frames)
        self._begin: list[int] = np.searchsorted(key, latents * self.frames + first).tolist()
        self._end: list[int] = np.searchsorted(key, latents * self.frames + last).tolist()
        self._starts: list[int] = starts.tolist()
        self._values = np.asarray(self._codes.data, np.float32)
        self._sums = np.zeros(len(starts) - 1, np.float32)

    def window(self, frame: int) -> tuple[int, int]:
        """Return the range of frames that overlap with a frame."""
        return max(0, frame - self.decay.reach), min(self.frames, frame + self.decay.reach + 1)

    def overlap(self, patch: int) -> tuple[slice, Floats]:
        """Return the overlaps of a patch with all patches of the frames around it."""
        frame, place = divmod(patch, self.size)
        first, last = self.window(frame)
        near = slice(first * self.size, last * self.size)
        for entry in range(self._starts[patch], self._starts[patch + 1]):
            part = slice(self._begin[entry], self._end[entry])
            self._sums[self._patch[part]] += self._values[entry] * self._value[part]
        overlap = self._sums[near].copy()
        self._sums[near] = 0
        overlap[patch - near.start] = 1.0
        row, column = divmod(place, self._grid[1])
        grid = overlap.reshape(last - first, *self._grid)
        grid *= self.decay.frames[np.abs(np.arange(first, last) - frame)][:, None, None]
        grid *= self.decay.rows[row][:, None]
        grid *= self.decay.columns[column]
        return near, overlap

    def weighted_sums(self, weight: Floats) -> NDArray[np.float64]:
        """Return the sum of the overlaps of each patch with all others, weighted, shape (N,).

        Codes of frames are added with the factors of their distance before they are compared with a frame, so the work
        for a frame does not depend on how many others overlap with it.
        """
        size, codes = self.size, self._codes.astype(np.float64)
        weighted = codes.multiply(weight.astype(np.float64)[:, None]).tocsr()
        kernel = np.einsum("ac,bd->abcd", self.decay.rows, self.decay.columns, dtype=np.float64).reshape(size, size)
        sums = np.empty(len(weight))
        for frame in range(self.frames):
            first, last = self.window(frame)
            count = (last - first) * size
            factors = self.decay.frames[np.abs(np.arange(first, last) - frame)].astype(np.float64)
            fold = csr_array((factors.repeat(size), (np.arange(count) % size, np.arange(count))), shape=(size, count))
            near = fold @ weighted[first * size : last * size]
            here = slice(frame * size, (frame + 1) * size)
            sums[here] = np.einsum("ij,ij->i", (codes[here] @ near.T).toarray(), kernel)
        return sums


def sparse_coverage(
    index: CodeIndex, weight: Floats, max_patches: int, min_gain: float, *, lowest_first: bool
) -> tuple[Ints, Floats, Ints, Floats]:
    """Select patches as :func:`torino.reducers.torino_x.greedy_coverage` does, and assign all others to them.

    Parameters
    ----------
    index : CodeIndex
    weight : array of shape (N,)
    max_patches : int
    min_gain : float
        Stop before a gain below this value; the first patch is always selected.
    lowest_first : bool
        A patch that overlaps equally with several selected ones is assigned to that of lowest index, or else to the
        one selected first.

    Returns
    -------
    selected, gains : arrays of shape (M,)
        In order of selection.
    owner : array of shape (N,)
        The selected patch that each patch is assigned to; −1 for none.
    overlap : array of shape (N,)
        Overlap with that patch.
    """
    size, reach = index.size, index.decay.reach
    wide = weight.astype(np.float64)
    bound = index.weighted_sums(weight).reshape(index.frames, size)  # gains, or upper bounds of them
    highest_of = bound.max(1)
    known_at = np.zeros((index.frames, size), np.int64)  # number of selections when a gain was computed
    changed_at = np.zeros(index.frames, np.int64)  # number of selections when gains of a frame last changed
    coverage = np.zeros(index.frames * size, np.float32)
    owner = np.full(index.frames * size, -1)
    selected, gains = np.empty(max_patches, np.int64), np.empty(max_patches, np.float32)

    def is_known(frame: int, place: int, step: int) -> bool:
        """Return whether a bound is the gain; compute the gain if it is not."""
        if known_at[frame, place] >= changed_at[frame]:
            return True
        near, overlap = index.overlap(frame * size + place)
        overlap -= coverage[near]
        np.maximum(overlap, 0, out=overlap)
        bound[frame, place], known_at[frame, place] = overlap @ wide[near], step
        highest_of[frame] = bound[frame].max()
        return False

    def find_highest(step: int) -> float:
        while True:
            frame = int(highest_of.argmax())
            if is_known(frame, int(bound[frame].argmax()), step):
                return float(highest_of[frame])

    def find_first(lowest: float, step: int) -> tuple[int, int]:
        """Return frame and place of the first patch whose gain is at least ``lowest``."""
        for frame in np.flatnonzero(highest_of >= lowest).tolist():
            while highest_of[frame] >= lowest:
                place = int((bound[frame] >= lowest).argmax())
                if is_known(frame, place, step) or bound[frame, place] >= lowest:
                    return frame, place
        raise AssertionError("no patch has the highest gain")

    for step in range(max_patches):
        highest = find_highest(step)
        step_gain = highest if highest > TIE else 0.0
        if step and step_gain < min_gain - TIE:
            selected, gains = selected[:step], gains[:step]
            break
        frame, place = find_first(highest - TIE, step) if step_gain else _first_left(bound)
        best = frame * size + place
        selected[step], gains[step] = best, step_gain
        near, overlap = index.overlap(best)
        if lowest_first:
            tied = (overlap == coverage[near]) & (owner[near] > best)
            owner[near][tied] = best
        improved = overlap > coverage[near]
        owner[near][improved] = best
        coverage[near][improved] = overlap[improved]
        changed_at[max(0, frame - 2 * reach) : frame + 2 * reach + 1] = step + 1
        bound[frame, place] = -np.inf
        highest_of[frame] = bound[frame].max()
    owner[coverage <= TIE] = -1
    owner[selected] = selected
    return selected, np.minimum.accumulate(gains), owner, coverage


def _first_left(bound: NDArray[np.float64]) -> tuple[int, int]:
    """Return frame and place of the first patch that is not selected."""
    frame, place = divmod(int((bound > -np.inf).argmax()), bound.shape[1])
    return frame, place
