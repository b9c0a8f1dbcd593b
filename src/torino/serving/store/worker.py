"""Write one shard of a token store: the function that every executor runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens, MissingSignal, SAEMismatch, TorinoError
from torino.core.io import fingerprint_tensors
from torino.datasets import Photos, SourceUnavailable, hash_sample, open_sources
from torino.datasets.prefetch import decoding_threads, prefetch
from torino.serving.settings import ReductionSettings, check_servable, open_vlm
from torino.serving.store.format import DTYPES, PER_TOKEN, StoreSettings, write_token_shard
from torino.training.activations.extraction import (
    describe_failure,
    describe_pixels,
    ignore_frame_warnings,
    no_usable_photo,
    split_batches,
)
from torino.training.activations.selection import SkippedPhoto
from torino.vlm.adapters.base import ImageEmbeds, position_mode
from torino.vlm.attention import uses_proportional
from torino.vlm.loading import encoder_name
from torino.vlm.prompt import user_turn

if TYPE_CHECKING:
    from PIL import Image

    from torino.core.reduction import Reduction
    from torino.vlm import VLM

OnError = Literal["skip", "stop"]
QUESTION = "?"  # prompts are built to count placeholders; their text does not change the tokens
MAX_REFUSALS = 3  # images that the method may refuse before the settings are taken to be wrong


@dataclass(frozen=True)
class StoreJob:
    """What a process needs to write shards; it can be sent to another machine.

    Attributes
    ----------
    sources : tuple of str
        See :func:`torino.datasets.open_sources`.
    model : str
    settings : dict
        :meth:`torino.serving.settings.ReductionSettings.to_dict`.
    folder : str
        Folder of the store.
    device, dtype : str
        Of the model.
    batch, threads : int
    limit, allow_outside
        As for :func:`torino.datasets.open_sources`.
    """

    sources: tuple[str, ...]
    model: str
    settings: dict[str, Any]
    folder: str
    device: str = "cpu"
    dtype: str | None = None
    batch: int = 16
    threads: int = 1
    limit: int | None = None
    allow_outside: bool = False


@dataclass(frozen=True)
class StoreFacts:
    """Fields of :class:`~torino.serving.store.format.StoreSettings` that need the model and the images."""

    hash: str
    method: str
    model: str
    family: str
    model_hash: str
    width: int
    positions: str
    proportional: bool
    data: str
    fingerprint: str
    sample: str
    photos: int


@dataclass(frozen=True)
class ReducedImage:
    """The projected tokens of one image and their labels, on the CPU."""

    tokens: Tensor
    anchors: Tensor
    masses: Tensor
    concepts: Tensor
    full: int
    grid: tuple[int, int]


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """Compute with this number of CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ShardWorker:
    """Load a model and write shards of a token store with it.

    The bytes of a shard depend on the job and the shard only: the same images are always encoded together, with the
    same number of threads, in whichever process and order.
    """

    def __init__(self, job: StoreJob) -> None:
        self.job = job
        settings = ReductionSettings.from_dict(job.settings)
        self.reduction = settings
        self.photos: Photos = open_sources(job.sources, limit=job.limit, allow_outside=job.allow_outside)
        self.names = self.photos.names()
        self.vlm: VLM = open_vlm(job.model, settings, job.device, job.dtype)
        self.reducer = settings.build(self.vlm.device)
        check_servable(self.reducer)
        self.model_hash = hash_vision(self.vlm)
        release_decoder(self.vlm)

    @cached_property
    def hash(self) -> str:
        """Hash of everything that determines the tokens of an image."""
        return self.reduction.hash(self.model_hash)

    def inspect(self) -> StoreFacts:
        """Reduce the first usable image, so that wrong settings are reported at once, and describe model and images."""
        with torch_threads(self.job.threads), ignore_frame_warnings():
            width = self._probe()
        return StoreFacts(
            hash=self.hash,
            method="none" if self.reducer is None else self.reducer.spec,
            model=encoder_name(self.job.model),
            family=self.vlm.family,
            model_hash=self.model_hash,
            width=width,
            positions=position_mode(self.reduction.positions, self.reducer),
            proportional=uses_proportional(self.reduction.attention, self.reducer, self.vlm.adapter),
            data=self.photos.describe,
            fingerprint=self.photos.fingerprint,
            sample=hash_sample(self.photos),
            photos=len(self.photos),
        )

    def write(
        self,
        number: int,
        settings: StoreSettings,
        on_error: OnError = "skip",
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Reduce the images of a shard and write it; return the number of images that were skipped.

        Parameters
        ----------
        number : int
        settings : StoreSettings
        on_error : {"skip", "stop"}
            What an image that cannot be used does: it is recorded in the shard, or ends the run.
        progress : callable, optional
            Called with the number of images of each finished batch; what it raises ends the work on the shard.
        """
        self._check_settings(settings)
        images: list[ReducedImage | SkippedPhoto] = []
        indices = settings.photo_range(number)
        batches = split_batches(indices, settings.batch)
        threads = decoding_threads(self.vlm.device.type)
        opened = prefetch(batches, self._open, threads)
        with torch_threads(settings.threads), ignore_frame_warnings(), closing(opened):
            for batch in opened:
                images += self._reduce_batch(batch, DTYPES[settings.dtype])
                if on_error == "stop" and (bad := _first_skipped(images)) is not None:
                    raise TorinoError(
                        f"{bad.name} cannot be used: {bad.reason} Remove it, or record and skip such images "
                        "(--on-error skip)."
                    )
                if progress is not None:
                    progress(len(batch))
        skipped = [image for image in images if isinstance(image, SkippedPhoto)]
        names = self.names[indices.start : indices.stop]
        path = settings.shard_path(Path(self.job.folder), number)
        write_token_shard(path, settings, _pack(images, settings), names, skipped)
        return len(skipped)

    def _check_settings(self, settings: StoreSettings) -> None:
        """Refuse to add to a store with another model, or with other images, as another machine may have them."""
        if self.hash != settings.hash:
            raise BadParameter(
                f"The model, the SAE, the image processor or the version of torino differs from that which "
                f"{self.job.folder} was started with. Use the same ones on every machine."
            )
        if self.photos.fingerprint != settings.fingerprint:
            raise BadParameter(
                f"The images differ in names or sizes from those that {self.job.folder} was started with. Give every "
                "machine the same files."
            )

    # ------------------------------------------------------------------ images

    def _open(self, index: int) -> tuple[int, Image.Image] | SkippedPhoto:
        """Read and decode an image; runs in a thread."""
        data = None
        try:
            data = self.photos[index].data
            return index, self.vlm.open(data)
        except (SourceUnavailable, MemoryError):  # not caused by this image
            raise
        except Exception as error:  # decoders raise many kinds of errors
            return SkippedPhoto(index, self.names[index], describe_failure(error, data, self.names[index]))

    def _reduce_batch(
        self, batch: Sequence[tuple[int, Image.Image] | SkippedPhoto], dtype: torch.dtype
    ) -> list[ReducedImage | SkippedPhoto]:
        """Reduce the images of a batch that could be opened; an image that cannot be reduced is skipped."""
        good = [item for item in batch if not isinstance(item, SkippedPhoto)]
        results: dict[int, ReducedImage | SkippedPhoto] = {
            item.index: item for item in batch if isinstance(item, SkippedPhoto)
        }
        try:
            reduced = self._reduce([image for _, image in good]) if good else []
            results |= {index: image for (index, _), image in zip(good, reduced, strict=True)}
        except ValueError:  # includes TorinoError; try one by one to find the image that causes it
            for index, image in good:
                try:
                    results[index] = self._reduce([image])[0]
                except ValueError as error:
                    results[index] = SkippedPhoto(index, self.names[index], describe_failure(error))
        ordered = [results[item.index if isinstance(item, SkippedPhoto) else item[0]] for item in batch]
        indices = [item.index if isinstance(item, SkippedPhoto) else item[0] for item in batch]
        return [self._convert(index, item, dtype) for index, item in zip(indices, ordered, strict=True)]

    def _reduce(self, images: Sequence[Image.Image]) -> list[ReducedImage]:
        """Reduce images through the session's own path; each is a prompt of its own."""
        vlm = self.vlm
        inputs = vlm.chat_inputs([[user_turn([image], QUESTION)] for image in images])
        reduced = vlm.reduce(vlm.encode(inputs, [self.reducer]), self.reducer)
        _check_one_unit(vlm, len(images), len(reduced.plans), reduced.embeds)
        return [
            _labelled(embeds, plan, full)
            for embeds, plan, full in zip(reduced.embeds, reduced.plans, reduced.encoded.full, strict=True)
        ]

    def _convert(
        self, index: int, image: ReducedImage | SkippedPhoto, dtype: torch.dtype
    ) -> ReducedImage | SkippedPhoto:
        """Convert the tokens to the data type on disk."""
        if isinstance(image, SkippedPhoto):
            return image
        if not len(image.tokens):
            return SkippedPhoto(index, self.names[index], "The method kept none of its tokens.")
        tokens = image.tokens.to(dtype)
        if not bool(image.tokens.isfinite().all()):
            return SkippedPhoto(index, self.names[index], "Its tokens contain values that are not finite.")
        if bool(tokens.isinf().any()):
            largest = float(image.tokens.abs().max())
            raise BadTokens(
                f"A token of {self.names[index]} has a value of {largest:,.0f}, and float16 ends at 65,504. Use "
                "another data type (--store-dtype bfloat16) and another folder."
            )
        return ReducedImage(tokens, image.anchors, image.masses, image.concepts, image.full, image.grid)

    def _probe(self) -> int:
        """Reduce the first usable image; return the width of its tokens."""
        first: SkippedPhoto | None = None
        refusals: list[Exception] = []
        for index in range(len(self.photos)):
            opened = self._open(index)
            if isinstance(opened, SkippedPhoto):
                first = first or opened
                continue
            try:
                return self._reduce([opened[1]])[0].tokens.shape[1]
            except ValueError as error:
                first = first or SkippedPhoto(index, self.names[index], describe_failure(error))
                if isinstance(error, BadParameter | MissingSignal | SAEMismatch):
                    refusals.append(error)
                if len(refusals) == MAX_REFUSALS:
                    break
        if refusals:
            raise refusals[0]
        assert first is not None  # a source has at least one photo
        raise no_usable_photo(len(self.photos), first)


def _first_skipped(images: Sequence[ReducedImage | SkippedPhoto]) -> SkippedPhoto | None:
    return next((image for image in images if isinstance(image, SkippedPhoto)), None)


def _check_one_unit(vlm: VLM, images: int, plans: int, embeds: Sequence[ImageEmbeds]) -> None:
    """Refuse families whose images are not one sequence of tokens that stand for patches."""
    if vlm.adapter.tiles or len(embeds) != images or plans != images:
        raise BadParameter(
            f"{type(vlm.model).__name__} splits an image into tiles, and a token store holds one sequence of reduced "
            "patches per image. Choose a model that encodes an image as a whole, such as LLaVA-1.5."
        )
    if any(getattr(item, "deepstack", ()) for item in embeds):
        raise BadParameter(
            f"{type(vlm.model).__name__} gives its language model features of several layers of the tower, and a token "
            "store holds those of one. Choose another model, such as LLaVA-1.5 or Qwen2.5-VL."
        )


def _labelled(embeds: ImageEmbeds, plan: Reduction, full: int) -> ReducedImage:
    """Return the tokens with their labels; tokens before those of the plan are registers, which stand for no patch."""
    prefix = len(embeds.slots) - len(plan)
    pad = torch.nn.functional.pad
    return ReducedImage(
        tokens=embeds.features.detach().to("cpu"),
        anchors=embeds.slots.to("cpu", torch.int32),
        masses=pad(plan.sizes, (prefix, 0), value=1).to(torch.int32),
        concepts=pad(plan.concept, (prefix, 0), value=-1).to(torch.int32),
        full=full,
        grid=plan.grid,
    )


def _pack(images: Sequence[ReducedImage | SkippedPhoto], settings: StoreSettings) -> dict[str, Tensor]:
    """Concatenate the images of a shard."""
    kept = [image for image in images if isinstance(image, ReducedImage)]

    def numbers(name: str, empty: Any) -> Tensor:
        return torch.tensor([getattr(image, name, empty) for image in images], dtype=torch.int32)

    lengths = [len(image.tokens) if isinstance(image, ReducedImage) else 0 for image in images]
    tokens = torch.empty(0, settings.width, dtype=DTYPES[settings.dtype])
    return {
        "tokens": torch.cat([tokens, *[image.tokens for image in kept]]),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "full": numbers("full", 0),
        "grids": numbers("grid", (0, 0)),
        **{
            name: torch.cat([torch.empty(0, dtype=torch.int32), *[getattr(image, name) for image in kept]])
            for name in PER_TOKEN
        },
    }


# ---------------------------------------------------------------------- model


def hash_vision(vlm: VLM) -> str:
    """Hash what determines the projected tokens of an image: weights outside the language model, and preprocessing."""
    model = cast(Any, vlm.model)
    language = {id(weight) for weight in model.get_decoder().parameters()}
    head = model.get_output_embeddings()
    language |= set() if head is None else {id(weight) for weight in head.parameters()}
    weights = {name: weight for name, weight in model.named_parameters() if id(weight) not in language}
    image_processor = vlm.processor.image_processor
    layer = [getattr(model.config, f"vision_feature_{name}", None) for name in ("layer", "select_strategy")]
    # another class of image processor, such as one of torchvision instead of Pillow, resizes differently
    parts = [vlm.family, str(layer), type(image_processor).__name__, describe_pixels(image_processor)]
    return hashlib.sha256("\n".join([*parts, fingerprint_tensors(weights)]).encode()).hexdigest()[:32]


def release_decoder(vlm: VLM) -> None:
    """Free the memory of the language model's layers, which do not take part in encoding images."""
    layers = getattr(cast(Any, vlm.model).get_decoder(), "layers", None)
    if layers is not None:
        layers.to("meta")
