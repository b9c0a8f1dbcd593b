"""A cache of reduced images, bounded by bytes."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace

from torch import Tensor

from torino.core.reduction import ReductionBatch
from torino.vlm.session import ReducedImages

PLAN = ("sources", "weights", "offsets", "anchor", "concept", "assigned", "score")
ITEM, TENSOR = 4096, 512  # bytes of the objects of an image, and of a tensor without its values


class ImageCache:
    """Keep the reduced images that were used last; safe to use from several threads.

    Parameters
    ----------
    limit : int
        Most bytes of images and their plans; 0 keeps nothing.
    salt : str
        Hash of everything besides the file that determines the tokens: settings, SAE, model.
    """

    def __init__(self, limit: int, salt: str = "") -> None:
        self.limit, self.salt = limit, salt
        self.bytes = self.hits = self.misses = 0
        self._items: OrderedDict[str, tuple[ReducedImages, int]] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, data: bytes) -> str:
        """Return the key of an image file."""
        return hashlib.sha256(self.salt.encode() + b"\0" + data).hexdigest()

    def get(self, key: str) -> ReducedImages | None:
        """Return a cached image; a hit or a miss is counted."""
        with self._lock:
            item = self._items.get(key)
            if item is None:
                self.misses += 1
                return None
            self.hits += 1
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: str, image: ReducedImages) -> None:
        """Add a copy of an image, and drop those that were not used for longest if there are too many bytes.

        The tensors of images that were reduced together share memory, which a cached one would keep alive for all.
        """
        image = _copy(image)
        size = _size(image)
        if size > self.limit:
            return
        with self._lock:
            if key in self._items:
                return
            self._items[key] = image, size
            self.bytes += size
            while self.bytes > self.limit:
                self.bytes -= self._items.popitem(last=False)[1][1]

    def __len__(self) -> int:
        """Return the number of cached images."""
        return len(self._items)


def _copy(image: ReducedImages) -> ReducedImages:
    plans = [replace(plan, **{name: getattr(plan, name).clone() for name in PLAN}) for plan in image.plans]
    embeds = [
        replace(
            item,
            features=item.features.clone(),
            slots=item.slots.clone(),
            sizes=None if item.sizes is None else item.sizes.clone(),
        )
        for item in image.embeds
    ]
    return replace(image, plans=ReductionBatch.of(plans), embeds=embeds)


def _size(image: ReducedImages) -> int:
    plans: list[Tensor | None] = [getattr(plan, name) for plan in image.plans for name in PLAN]
    embeds = [tensor for item in image.embeds for tensor in (item.features, item.slots, item.sizes)]
    roles = sum(len(plan.role) for plan in image.plans) * 8
    tensors = [tensor for tensor in (*plans, *embeds) if tensor is not None]
    return ITEM + roles + sum(TENSOR + tensor.numel() * tensor.element_size() for tensor in tensors)
