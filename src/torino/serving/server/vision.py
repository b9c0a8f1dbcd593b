"""From the bytes of images to reduced images, with a cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torino.core.errors import TorinoError
from torino.datasets.images import open_image
from torino.reducers import Reducer
from torino.serving.server.cache import ImageCache
from torino.serving.server.errors import ApiError, bad_request, internal_error
from torino.serving.server.images import check_pixels
from torino.serving.server.jobs import ImageReport
from torino.serving.server.logs import log
from torino.serving.server.metrics import ServerMetrics
from torino.vlm.batching import Pixels, process_image, reduce_pixels
from torino.vlm.session import VLM, ReducedImages


@dataclass
class PreparedImage:
    """An image of a request: from the cache, or its pixels, or its file where a model needs the prompt with it.

    Attributes
    ----------
    key : str
        Key in the cache.
    reduced : ReducedImages, optional
    pixels : dict of tensors, optional
    data : bytes
        The file, kept only where it is needed later.
    cached : bool
    """

    key: str
    reduced: ReducedImages | None = None
    pixels: Pixels | None = None
    data: bytes = b""
    cached: bool = False

    def report(self, *, keeps_all: bool) -> ImageReport:
        """Return what became of the image."""
        assert self.reduced is not None
        plans = () if keeps_all else tuple(self.reduced.plans)
        return ImageReport(sum(self.reduced.encoded.full), self.reduced.tokens, plans, self.cached)


class Vision:
    """Tower, reducer and projector of a model, with a cache of what they made.

    Parameters
    ----------
    vlm : VLM
    reducer : Reducer, optional
        None keeps all tokens.
    cache : ImageCache
    metrics : ServerMetrics
    max_pixels : int
        Larger images are refused before they are decoded.
    """

    def __init__(
        self, vlm: VLM, reducer: Reducer | None, cache: ImageCache, metrics: ServerMetrics, max_pixels: int
    ) -> None:
        self.vlm, self.reducer, self.cache, self.metrics, self.max_pixels = vlm, reducer, cache, metrics, max_pixels
        self.separate = vlm.adapter.separates_images
        if cache.limit:
            metrics.gauge("image_cache_bytes", "Size of the image cache.", lambda: float(cache.bytes))

    def prepare(self, data: bytes) -> PreparedImage:
        """Look an image up, or decode it to the size of the tower; called from any thread.

        Raises
        ------
        ApiError
            If the file is not an image, is damaged, or is too large.
        """
        key = self.cache.key(data)
        if self.separate and self.cache.limit:
            found = self.cache.get(key)
            (self.metrics.cache_misses if found is None else self.metrics.cache_hits).inc()
            if found is not None:
                return PreparedImage(key, found, cached=True)
        begin = time.perf_counter()
        try:
            check_pixels(data, self.max_pixels)
            if not self.separate:
                open_image(data)  # a damaged file is refused before it waits
                return PreparedImage(key, data=data)
            return PreparedImage(key, pixels=process_image(self.vlm, open_image(data)))
        except ApiError:
            raise
        except TorinoError as error:
            raise bad_request(str(error), "image_url", "image") from error
        finally:
            self.metrics.observe_stages({"image": time.perf_counter() - begin})

    def reduce(self, images: Sequence[PreparedImage]) -> dict[int, ApiError]:
        """Reduce all images that are not reduced yet, together; return the errors of those that cannot be.

        Equal images are reduced once. The result is in ``reduced`` of each image.
        """
        pending: dict[str, list[int]] = {}
        for index, image in enumerate(images):
            if image.reduced is None:
                pending.setdefault(image.key, []).append(index)
        errors: dict[int, ApiError] = {}
        made = self._reduce({key: images[where[0]].pixels or {} for key, where in pending.items()})
        for key, where in pending.items():
            result = made[key]
            for index in where:
                if isinstance(result, ApiError):
                    errors[index] = result
                else:
                    images[index].reduced, images[index].pixels = result, None
            if not isinstance(result, ApiError):
                self.cache.put(key, result)
        return errors

    def _reduce(self, pixels: dict[str, Pixels]) -> dict[str, ReducedImages | ApiError]:
        if not pixels:
            return {}
        try:
            made = reduce_pixels(self.vlm, list(pixels.values()), self.reducer)
        except Exception as error:  # one image may be at fault: the others must not suffer
            if len(pixels) > 1:
                return {key: self._reduce({key: value})[key] for key, value in pixels.items()}
            if isinstance(error, TorinoError):
                return dict.fromkeys(pixels, bad_request(str(error), "image_url", "image"))
            log("reduction failed", 40, failed=error)
            return dict.fromkeys(pixels, internal_error())
        seconds: dict[str, float] = {}
        for part in made:
            for name, value in part.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + value
        self.metrics.observe_stages(seconds)
        return dict(zip(pixels, made, strict=True))
