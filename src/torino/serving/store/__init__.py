"""Token stores: the reduced tokens of large collections of images, written once and read many times."""

from __future__ import annotations

from torino.serving.store.reader import PackedTokens, PaddedTokens, StoredImage, TokenStore, collate
from torino.serving.store.write import StoreOptions, reduce_images

__all__ = [
    "PackedTokens",
    "PaddedTokens",
    "StoreOptions",
    "StoredImage",
    "TokenStore",
    "collate",
    "reduce_images",
]
