"""The cache of reduced images holds copies and counts their bytes."""

from __future__ import annotations

import torch

from torino.core.reduction import Reduction, ReductionBatch
from torino.serving.server.cache import ImageCache
from torino.vlm.adapters.encoded import EncodedImages, ImageEmbeds
from torino.vlm.inputs import ReducedImages

WIDTH, TOKENS = 256, 4


def images(count: int) -> list[ReducedImages]:
    """Images reduced together: their features are parts of one tensor."""
    features = torch.randn(count * TOKENS, WIDTH)
    return [
        ReducedImages(
            ReductionBatch.of([Reduction.identity((2, 2))]),
            EncodedImages((), (TOKENS,)),
            [ImageEmbeds(features[i * TOKENS : (i + 1) * TOKENS], torch.arange(TOKENS), patches=TOKENS)],
            {},
            "compact",
            proportional=False,
        )
        for i in range(count)
    ]


def test_a_cached_image_does_not_keep_the_others_of_its_batch() -> None:
    cache = ImageCache(1 << 20)
    batch = images(8)
    cache.put("one", batch[3])
    (cached,) = (cache.get("one"),)
    assert cached is not None
    features = cached.embeds[0].features
    assert torch.equal(features, batch[3].embeds[0].features)
    assert features.untyped_storage().nbytes() == TOKENS * WIDTH * 4
    assert cached.plans[0].sources.tolist() == batch[3].plans[0].sources.tolist()
    assert cached.positions == "compact"


def test_bytes_cover_all_tensors_and_are_given_back() -> None:
    cache = ImageCache(1 << 20)
    cache.put("one", images(1)[0])
    alone = cache.bytes
    assert alone > TOKENS * WIDTH * 4
    cache.put("one", images(1)[0])
    assert cache.bytes == alone
    cache.limit = 3 * alone
    for name in "abcdef":
        cache.put(name, images(2)[1])
        assert cache.bytes <= cache.limit
    assert len(cache) == 3
    assert cache.get("one") is None
