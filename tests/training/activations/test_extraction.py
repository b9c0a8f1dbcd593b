"""Extraction of rows from photos."""

from __future__ import annotations

import time

from tests.support.tiny_towers import COUNT
from torino.datasets import Photo, Photos
from torino.training.activations.extraction import RowExtractor
from torino.vlm.towers import Tower


def test_only_two_batches_are_decoded_ahead(clip: Tower, photos: Photos) -> None:
    read: list[int] = []

    class RecordingPhotos(Photos):
        def _photo(self, index: int) -> Photo:
            read.append(index)
            return photos[index % COUNT]

    many = RecordingPhotos([str(number) for number in range(200)], "", "")
    extractor = RowExtractor(clip, many)
    extractor.workers = 2
    batches = extractor.extract([range(start, start + 4) for start in range(0, 200, 4)])
    next(batches)
    deadline = time.monotonic() + 10
    while len(read) < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(read) == list(range(12))  # the yielded batch and the next two
    batches.close()
