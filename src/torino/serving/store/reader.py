"""Read token stores: a ragged dataset for training, batches, embeddings for vLLM, and answers of a model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from torino.core.checks import check_choice, expand_path, to_index, to_integer, to_list
from torino.core.checksum import damaged_file, stored_checksum
from torino.core.errors import BadFile, BadParameter
from torino.core.ragged import offsets_from_lengths
from torino.core.schema import check_schema
from torino.core.shards import SHARDS
from torino.core.verified import VerifiedFiles
from torino.serving.store.format import DTYPES, MANIFEST, StoreSettings, TokenShard, read_manifest

if TYPE_CHECKING:
    from torino.vlm import VLM
    from torino.vlm.session import Inputs, ReducedImages

Layout = Literal["padded", "packed"]
Side = Literal["right", "left"]


@dataclass(frozen=True, eq=False)
class StoredImage:
    """The tokens of one image, as the language model receives them.

    Attributes
    ----------
    name : str
        Name of the image in its collection.
    tokens : Tensor of shape (n, E)
        In the data type of the store; memory-mapped and read-only: use ``.clone()`` before you change them.
    anchors : Tensor of shape (n,), int64
        The placeholder, counted from 0, whose position each token takes in a prompt with all tokens.
    masses : Tensor of shape (n,), int64
        Number of patches that each token represents, at least 1.
    concepts : Tensor of shape (n,), int64
        The concept that most of these patches share; −1 for none.
    full : int
        Placeholders of the image in a prompt with all tokens.
    grid : (int, int)
        Patch grid of the image.
    """

    name: str
    tokens: Tensor
    anchors: Tensor
    masses: Tensor
    concepts: Tensor
    full: int
    grid: tuple[int, int]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class PaddedTokens:
    """A batch padded to the length L of its longest image.

    Attributes
    ----------
    names : list of str
    tokens : Tensor of shape (B, L, E)
    mask : Tensor of shape (B, L), bool
        True for tokens, False for padding.
    anchors, masses, concepts : Tensor of shape (B, L), int64
        Padding has anchor −1, mass 0 and concept −1.
    """

    names: list[str]
    tokens: Tensor
    mask: Tensor
    anchors: Tensor
    masses: Tensor
    concepts: Tensor


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """A batch without padding: image i owns the rows ``offsets[i]:offsets[i + 1]``.

    Attributes
    ----------
    names : list of str
    tokens : Tensor of shape (T, E)
    offsets : Tensor of shape (B + 1,), int64
        ``cu_seqlens`` of variable-length attention kernels.
    anchors, masses, concepts : Tensor of shape (T,), int64
    """

    names: list[str]
    tokens: Tensor
    offsets: Tensor
    anchors: Tensor
    masses: Tensor
    concepts: Tensor


def collate(
    images: Sequence[StoredImage], layout: Layout = "padded", side: Side = "right"
) -> PaddedTokens | PackedTokens:
    """Collate images to a batch; a ``collate_fn`` of ``torch.utils.data.DataLoader``.

    Parameters
    ----------
    images : sequence of StoredImage
    layout : {"padded", "packed"}
    side : {"right", "left"}
        Side of the padding.
    """
    images = to_list("A batch", images, StoredImage, "the images of a TokenStore", BadParameter)
    check_choice("layout", layout, Layout)
    check_choice("side", side, Side)
    if not images:
        raise BadParameter("A batch must have at least one image, got none.")
    names = [image.name for image in images]
    if layout == "packed":
        labels = {name: torch.cat([getattr(image, name) for image in images]) for name in _FILL}
        offsets = offsets_from_lengths([len(image) for image in images])
        return PackedTokens(names, torch.cat([image.tokens for image in images]), offsets, **labels)

    def pad(rows: list[Tensor], value: float) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)

    labels = {name: pad([getattr(image, name) for image in images], value) for name, value in _FILL.items()}
    mask = pad([torch.ones(len(image), dtype=torch.bool) for image in images], 0)
    return PaddedTokens(names, pad([image.tokens for image in images], 0), mask, **labels)


_FILL = {"anchors": -1, "masses": 0, "concepts": -1}  # values of padding


class TokenStore(Dataset[StoredImage]):
    """Reduced tokens of a collection of images, as a map-style dataset of images of different lengths.

    Images that could not be used are left out (:attr:`skipped`). A shard is mapped into memory, and verified by its
    checksum on first use: not again until its file changes.

    Parameters
    ----------
    path : str or path
        Folder that ``torino reduce`` or :func:`torino.serving.store.reduce_images` wrote.
    settings_hash : str, optional
        Raise an error unless the store has this hash, for example that of the store a model was trained on.
    verify : bool
        Whether to verify checksums on first use. Settings, shapes and counts are checked in any case.

    Attributes
    ----------
    folder : Path
    settings : StoreSettings
    skipped : list of SkippedPhoto

    Raises
    ------
    BadFile
        If there is no store, it is not complete, or a shard is missing or damaged.
    BadParameter
        If it has another hash.

    Examples
    --------
    >>> store = TokenStore("store")  # doctest: +SKIP
    >>> store[0].tokens.shape, store[0].name  # doctest: +SKIP
    (torch.Size([54, 576]), 'astronaut.jpg')
    """

    def __init__(self, path: str | PathLike[str], *, settings_hash: str | None = None, verify: bool = True) -> None:
        self.folder = expand_path(path, "The store").absolute()
        manifest = read_manifest(self.folder)
        self.settings = StoreSettings.from_manifest(manifest, self.folder / MANIFEST)
        self._verify = verify
        if settings_hash is not None and settings_hash != self.settings.hash:
            raise BadParameter(
                f"{self.folder} has the settings hash {self.settings.hash}, not {settings_hash}: its tokens come from "
                f"another model, method, SAE or version ({self.settings.method} on {self.settings.model}). Reduce the "
                "images again with the same settings."
            )
        if not manifest.get("complete"):
            written = sum(
                self.settings.shard_path(self.folder, number).is_file() for number in range(self.settings.shards)
            )
            raise BadFile(
                f"{self.folder} is not complete: {written} of {self.settings.shards} shards exist. Run the torino "
                "reduce command that started it again, or those of its other parts (--shard)."
            )
        self._checksums = _read_checksums(manifest, self.settings, self.folder)
        self._open()

    def _open(self) -> None:
        self._shards = [self._open_shard(number) for number in range(self.settings.shards)]
        self.skipped = [photo for shard in self._shards for photo in shard.skipped]
        self._places = [shard.lengths.nonzero()[:, 0] for shard in self._shards]
        self._rows = [offsets_from_lengths(shard.lengths.tolist()) for shard in self._shards]
        self._ends = offsets_from_lengths([len(places) for places in self._places])[1:].tolist()
        self._verified: set[int] = set()
        self._models: WeakSet[Any] = WeakSet()

    def _open_shard(self, number: int) -> TokenShard:
        path = self.settings.shard_path(self.folder, number)
        fix = "Run the torino reduce command that wrote the store again to repair it."
        if not path.is_file():
            raise BadFile(f"{path} is missing. {fix}")
        try:
            return TokenShard.open(path, self.settings, number)
        except BadFile as error:
            raise BadFile(f"{error} {fix}") from error

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process, such as a worker of a DataLoader, needs to open the store again."""
        return {name: vars(self)[name] for name in ("folder", "settings", "_verify", "_checksums")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the store again."""
        vars(self).update(state)
        self._open()

    def __len__(self) -> int:
        """Return the number of images."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> StoredImage:
        """Return an image by number, counted from 0."""
        number, place = self._locate(index)
        shard = self._shard(number)
        rows = slice(int(self._rows[number][place]), int(self._rows[number][place + 1]))
        rows_columns: list[int] = shard.grids[place].tolist()
        return StoredImage(
            name=shard.names[place],
            tokens=shard.tokens[rows],
            anchors=shard.anchors[rows].long(),
            masses=shard.masses[rows].long(),
            concepts=shard.concepts[rows].long(),
            full=int(shard.full[place]),
            grid=(rows_columns[0], rows_columns[1]),
        )

    def __iter__(self) -> Iterator[StoredImage]:
        """Iterate over the images in order."""
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        """Return a summary of the contents."""
        settings = self.settings
        return (
            f"TokenStore({len(self):,} images of {settings.data}, {settings.method} on {settings.model}, "
            f"{int(self.lengths.sum()):,} tokens of width {settings.width})"
        )

    @property
    def width(self) -> int:
        """Width E of a token."""
        return self.settings.width

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tokens."""
        return DTYPES[self.settings.dtype]

    @cached_property
    def names(self) -> list[str]:
        """Names of the images."""
        pairs = zip(self._shards, self._places, strict=True)
        return [shard.names[place] for shard, places in pairs for place in places.tolist()]

    @cached_property
    def lengths(self) -> Tensor:
        """Number of tokens of each image, shape (images,), int64; for samplers that batch by length."""
        pairs = zip(self._shards, self._places, strict=True)
        return torch.cat([shard.lengths[places].long() for shard, places in pairs])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def find(self, name: str) -> int:
        """Return the number of an image by its name."""
        if name not in self._numbers:
            reason = next((photo.reason for photo in self.skipped if photo.name == name), "")
            raise BadParameter(
                f"{name!r} could not be used when the store was written: {reason}"
                if reason
                else f"{self.folder} has no image {name!r}. Its names are in TokenStore.names."
            )
        return self._numbers[name]

    def verify(self) -> None:
        """Read all shards, and raise :class:`BadFile` if one is damaged."""
        for number in range(len(self._shards)):
            self._check_shard(number, again=True)

    def image_embeds(self, batch: int = 1, indices: Sequence[int] | None = None) -> Iterator[list[Tensor]]:
        """Yield lists of tensors of shape (n, E): the form of vLLM's ``image_embeds``, one tensor for each image.

        Parameters
        ----------
        batch : int
            Images per list; the last one may be shorter.
        indices : sequence of int, optional
            Images by number; all by default.
        """
        size = to_integer("batch", batch, 1)
        wanted = range(len(self)) if indices is None else list(indices)
        for start in range(0, len(wanted), size):
            yield [self[index].tokens.clone() for index in wanted[start : start + size]]

    # ------------------------------------------------------------------ answers

    def prompt(self, vlm: VLM, images: int | Sequence[int], question: str) -> tuple[Inputs, ReducedImages]:
        """Return what :meth:`torino.vlm.VLM.generate` needs to answer a question about stored images.

        The answer equals :meth:`torino.vlm.VLM.answer` with the reducer of the store, up to the rounding of the tokens
        on disk. Neither the images nor the vision tower are used.

        Parameters
        ----------
        vlm : VLM
            The model that the tokens were made for.
        images : int or sequence of int
            One image, or several for one question, by number.
        question : str

        Examples
        --------
        >>> inputs, reduction = store.prompt(vlm, 0, "What is it?")  # doctest: +SKIP
        >>> vlm.generate(inputs, [reduction], max_new_tokens=32).texts[0]  # doctest: +SKIP
        """
        from torino.serving.store.prompt import build_prompt, check_model

        if vlm not in self._models:
            check_model(vlm, self.settings, self.folder)
            self._models.add(vlm)
        numbers = [images] if isinstance(images, int) else list(images)
        if not numbers:
            raise BadParameter("No image was given. Give at least one.")
        return build_prompt(vlm, self.settings, [self[number] for number in numbers], question)

    # ------------------------------------------------------------------ shards

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the shard of an image and its place in the shard."""
        index = to_index("image", index, len(self))
        number = bisect_right(self._ends, index)
        first = 0 if number == 0 else self._ends[number - 1]
        return number, int(self._places[number][index - first])

    def _shard(self, number: int) -> TokenShard:
        if self._verify and number not in self._verified:
            self._check_shard(number)
        return self._shards[number]

    def _check_shard(self, number: int, *, again: bool = False) -> None:
        """Verify a shard, unless that was done before and its file did not change."""
        shard = self._shards[number]
        verified = VerifiedFiles(self.folder / SHARDS)
        verified.check(shard.path, shard.verify, again=again)
        verified.save()
        if stored_checksum(shard.path) != self._checksums[number]:
            raise damaged_file(shard.path)
        self._verified.add(number)


def _read_checksums(manifest: dict[str, Any], settings: StoreSettings, folder: Path) -> list[str]:
    """Return the checksums of the shards from a complete manifest."""
    entries = manifest.get("shards")
    try:
        check_schema(entries, list[dict[str, Any]])
        checksums = [entry.get("checksum") for entry in entries or []]
        check_schema(checksums, list[str])
        if len(checksums) != settings.shards:
            raise ValueError(f"it lists {len(checksums)} of {settings.shards} shards")
    except ValueError as error:
        raise BadFile(
            f"{folder / MANIFEST} is damaged: {error}. Delete it and run the same torino reduce command again, which "
            "keeps the shards."
        ) from error
    return checksums
