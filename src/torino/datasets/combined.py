"""Photos of several sources, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from torino.datasets.base import Photo, Photos, hash_parts


class CombinedPhotos(Photos):
    """The photos of several sources, in the order of the sources; repeated names get a number.

    Parameters
    ----------
    sources : sequence of Photos
    limit : int or None
        Use only the first ``limit`` photos.
    """

    def __init__(self, sources: Sequence[Photos], limit: int | None) -> None:
        names = [name for photos in sources for name in photos.names()][:limit]
        describe = ", ".join(photos.describe for photos in sources)
        if limit is not None and len(names) < sum(map(len, sources)):
            describe = f"the first {len(names):,} of {describe}"
        fingerprint = hash_parts("combined", len(names), *[photos.fingerprint for photos in sources])
        super().__init__(names, fingerprint, describe)
        self._sources = list(sources)
        self._ends = list(accumulate(len(photos) for photos in sources))

    def _photo(self, index: int) -> Photo:
        number = bisect_right(self._ends, index)
        photos = self._sources[number]
        photo = photos[index - (self._ends[number] - len(photos))]
        return Photo(self._names[index], photo.data, photo.texts)
