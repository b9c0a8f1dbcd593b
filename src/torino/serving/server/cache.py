"""A cache of reduced images, bounded by bytes."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from torino.vlm.session import ReducedImages


class ImageCache:
    """Keep the reduced images that were used last; safe to use from several threads.

    Parameters
    ----------
    limit : int
        Most bytes of features; 0 keeps nothing.
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
        """Add an image, and drop those that were not used for longest if there are too many bytes."""
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


def _size(image: ReducedImages) -> int:
    plans = [tensor for plan in image.plans for tensor in (plan.sources, plan.weights, plan.assigned, plan.anchor)]
    tensors = [*plans, *[tensor for item in image.embeds for tensor in (item.features, item.slots)]]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
