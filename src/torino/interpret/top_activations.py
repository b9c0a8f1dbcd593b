"""Collect the top activations of every SAE latent in one pass over photos."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, get_args

import torch
from torch import Tensor

from torino.core.checks import check_type, describe_value, to_integer
from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.io import check_tensors, read_arrays, write_arrays
from torino.core.ragged import are_valid_offsets
from torino.core.schema import Count, Positive, parse_json
from torino.core.tokens import VisualTokens
from torino.interpret.monosemanticity import MonosemanticityAccumulator, MonosemanticityScores
from torino.interpret.running_stats import RunningStats, encode_active
from torino.sae.identity import hash_content, hash_sae
from torino.sae.model import SAE

FORMAT = "torino-top-activations/1"
FILE, PARTIAL_FILE = "top_activations.safetensors", "top_activations.partial.safetensors"
KEEP = 16

Pool = Literal["mean", "max"]


class ScoreValues(TypedDict):
    """Numbers of :class:`MonosemanticityScores` in a file."""

    chance: float
    dead: Count
    unpaired: Count


class CountValues(TypedDict):
    """Numbers of photos and patches in a file."""

    photos: Positive
    patches: Positive


@dataclass(frozen=True, eq=False)
class EncodedPhoto:
    """A photo as tokens at the feature layer of the SAE, and its embedding for the monosemanticity score."""

    tokens: VisualTokens
    embedding: Tensor


class EncodedPhotoSource(Protocol):
    """Photos for :func:`collect_top_activations`.

    Attributes
    ----------
    metadata : mapping
        Identifies the photos, the tower and the embedding. A partial result is continued only if all of it is equal.
    """

    @property
    def metadata(self) -> dict[str, str]: ...  # noqa: D102

    def __len__(self) -> int:
        """Return the number of photos."""
        ...

    def read(self, start: int, stop: int) -> list[EncodedPhoto | str]:
        """Encode photos ``start`` to ``stop``; a photo that cannot be read becomes a sentence with the reason."""
        ...


class PrecomputedPhotos:
    """Photos whose tokens are already computed.

    Parameters
    ----------
    tokens : sequence of VisualTokens
    embeddings : Tensor of shape (N, E), optional
        Embeddings of the photos. By default they are computed from the tokens, see :func:`image_embedding`.
    metadata : mapping, optional
        See :class:`EncodedPhotoSource`; by default a hash of the tokens.
    """

    def __init__(
        self, tokens: Sequence[VisualTokens], embeddings: Tensor | None = None, metadata: dict[str, str] | None = None
    ) -> None:
        if embeddings is not None and len(embeddings) != len(tokens):
            raise BadParameter(f"{len(tokens)} photos need as many embeddings, got {len(embeddings)}.")
        self.tokens, self.embeddings = tokens, embeddings
        self._metadata = metadata

    @property
    def metadata(self) -> dict[str, str]:
        """The given metadata, or a hash of tokens and embeddings."""
        if self._metadata is None:
            tensors = [image.patches for image in self.tokens] + ([] if self.embeddings is None else [self.embeddings])
            computed = self.embeddings is None and len(self.tokens) > 0
            self._metadata = {
                "photos": f"{len(self.tokens)} images",
                "fingerprint": hash_content(tensors),
                "embedding": describe_embedding(self.tokens[0]) if computed else "given embeddings",
            }
        return self._metadata

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self.tokens)

    def read(self, start: int, stop: int) -> list[EncodedPhoto | str]:
        """Return photos ``start`` to ``stop``."""
        photos: list[EncodedPhoto | str] = []
        for index in range(start, min(stop, len(self))):
            image = self.tokens[index]
            embedding = image_embedding(image) if self.embeddings is None else self.embeddings[index]
            photos.append(EncodedPhoto(image, embedding))
        return photos


def image_embedding(image: VisualTokens) -> Tensor:
    """Return one vector for an image: its CLS token, or the mean of its patches if there is none."""
    return image.patches.float().mean(0) if image.cls is None else image.cls.float()


def describe_embedding(image: VisualTokens) -> str:
    """Describe what :func:`image_embedding` returns for an image."""
    return f"{'mean of patches' if image.cls is None else 'CLS token'} of {image.origin}"


@dataclass(frozen=True, eq=False)
class TopActivations:
    """Activation statistics and top activating photos of every latent. C latents, K photos for each.

    Attributes
    ----------
    photo_count, patch_count : int
        Number of photos and patches that were encoded.
    active_patches, active_photos : Tensor of shape (C,), int64
        Number of patches and photos on which the latent is active.
    activation_sum : Tensor of shape (C,), float64
    max_activation : Tensor of shape (C,), float32
    top_photos : Tensor of shape (C, K), int64
        Photos sorted by their largest activation, ties by index; −1 if fewer than K activate the latent.
    top_values : Tensor of shape (C, K), float32
        Largest activation in each of these photos.
    offsets : Tensor of shape (C · K + 1,), int64
        Bounds of the activation maps: the map of latent c on photo ``top_photos[c, i]`` is the entries
        ``offsets[c * K + i]:offsets[c * K + i + 1]`` of ``map_patches`` and ``map_values``.
    map_patches, map_values : Tensor of shape (nnz,), int16 (or int32) and float32
        Activation maps, one after the other: the patches on which the latent is active, in raster order, and its
        activations on them.
    grids : Tensor of shape (photos of the source, 2), int32
        Patch grid of each photo; 0 x 0 for a photo that could not be read.
    monosemanticity : MonosemanticityScores
    metadata : dict
        SAE, photos, tower, embedding and settings.
    skipped : dict of int to str
        Photos that could not be read, and the reasons.
    """

    photo_count: int
    patch_count: int
    active_patches: Tensor
    active_photos: Tensor
    activation_sum: Tensor
    max_activation: Tensor
    top_photos: Tensor
    top_values: Tensor
    offsets: Tensor
    map_patches: Tensor
    map_values: Tensor
    grids: Tensor
    monosemanticity: MonosemanticityScores
    metadata: dict[str, str]
    skipped: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def latents(self) -> int:
        """Number of latents, C."""
        return len(self.max_activation)

    @property
    def keep(self) -> int:
        """Number of photos kept per latent, K."""
        return self.top_photos.shape[1]

    @property
    def patch_share(self) -> Tensor:
        """Share of all patches on which each latent is active, shape (C,), float64."""
        return self.active_patches.double() / self.patch_count

    @property
    def photo_share(self) -> Tensor:
        """Share of all photos on which each latent is active, shape (C,), float64."""
        return self.active_photos.double() / self.photo_count

    @property
    def mean_activation(self) -> Tensor:
        """Mean of the nonzero activations, shape (C,), float64; 0 if there are none."""
        return self.activation_sum / self.active_patches.clamp(min=1)

    def get_photos(self, latent: int) -> list[tuple[int, float]]:
        """Return the top activating photos of a latent and their largest activations, strongest first."""
        valid = self.top_photos[latent] >= 0
        return list(zip(self.top_photos[latent][valid].tolist(), self.top_values[latent][valid].tolist(), strict=True))

    def get_map(self, latent: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the active patches and their activations in the photo at ``rank`` among the top photos of a latent."""
        entries = slice(*self.offsets[latent * self.keep + rank :][:2].tolist())
        return self.map_patches[entries].long(), self.map_values[entries]

    def get_patches(self, latent: int) -> list[tuple[int, int, float]]:
        """Return the K top activating patches of a latent: photo, patch, activation; ties by photo, then patch.

        All of them are in its K top photos. A photo outside the top K is beaten by K photos, each with a stronger
        patch.
        """
        patches = [
            (photo, patch, value)
            for rank, (photo, _) in enumerate(self.get_photos(latent))
            for patch, value in zip(*(part.tolist() for part in self.get_map(latent, rank)), strict=True)
        ]
        return sorted(patches, key=lambda entry: (-entry[2], entry[0], entry[1]))[: self.keep]

    def save(self, path: str | Path) -> Path:
        """Write to ``.safetensors`` (or ``.npz``) atomically."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        scores = self.monosemanticity
        header = {
            "format": FORMAT,
            "metadata": json.dumps(self.metadata),
            "counts": json.dumps({"photos": self.photo_count, "patches": self.patch_count}),
            "scores": json.dumps({"chance": scores.chance, "dead": scores.dead, "unpaired": scores.unpaired}),
            "skipped": json.dumps(self.skipped),
        }
        return write_arrays(path, {**arrays, "scores": scores.values}, header)

    @classmethod
    def load(cls, path: str | Path) -> TopActivations:
        """Read a file written by :meth:`save`."""
        arrays, header = read_arrays(path)
        if header.get("format") != FORMAT:
            raise BadFile(
                f"{path} is not a file of top activations: its format is {header.get('format', 'not given')!r}, not "
                f"{FORMAT!r}. Give a file written by torino concepts, or delete it and run torino concepts again."
            )
        return _parse_file(Path(path), arrays, header)


def collect_top_activations(
    sae: SAE,
    photos: EncodedPhotoSource,
    *,
    keep: int = KEEP,
    pool: Pool = "mean",
    batch: int = 16,
    output: str | Path | None = None,
    earlier: str | Path | None = None,
    save_every: float = 30.0,
    progress: Callable[[int, int], None] | None = None,
) -> TopActivations:
    """Encode all photos once and collect the top activations of each latent of an SAE.

    Apart from a few bytes per photo, memory does not depend on the number of photos.

    Parameters
    ----------
    sae : SAE
    photos : EncodedPhotoSource
        :class:`PrecomputedPhotos` for tokens in memory, :class:`torino.interpret.photos.PhotoReader` to encode photos.
    keep : int
        Photos kept per latent, K.
    pool : {"mean", "max"}
        How the activations of all patches are pooled to one activation per photo for the monosemanticity score.
    batch : int
        Photos encoded together.
    output : path, optional
        Folder for ``top_activations.safetensors``. Partial results are saved there regularly, and a killed run
        continues from them with the same final result. An existing result of the same SAE, photos and settings is
        loaded.
    earlier : path, optional
        Another folder that may contain such a result; it is only read.
    save_every : float
        Seconds between two partial results.
    progress : callable, optional
        Called with the number of finished photos and the total.
    """
    if pool not in get_args(Pool):
        raise BadParameter(f"pool must be 'mean' or 'max', got {pool!r}.")
    check_type("sae", sae, SAE, "an SAE")
    if not hasattr(photos, "read") or not hasattr(photos, "metadata"):
        raise BadParameter(f"photos must be a PhotoReader, got {describe_value(photos)}.")
    keep, batch = to_integer("keep", keep), to_integer("batch", batch)
    if keep < 1 or batch < 1:
        raise BadParameter(f"keep and batch must be at least 1, got {keep} and {batch}.")
    if len(photos) <= keep:
        raise BadParameter(
            f"Comparing the top {keep} photos of each latent with the others needs more than {keep} photos, got "
            f"{len(photos)}. Give more photos or a smaller keep."
        )
    metadata = {**photos.metadata, "sae": hash_sae(sae), "keep": str(keep), "pool": pool}
    collector = _Collector(sae, photos, metadata, keep, pool)
    folder = None if output is None else Path(output)
    for place in (output, earlier):
        finished = None if place is None else _read_matching(Path(place) / FILE, metadata)
        if place is not None and finished is not None:
            return _parse_file(Path(place) / FILE, *finished)
    if folder is not None:
        collector.resume(folder / PARTIAL_FILE)
    saved = time.monotonic()
    for start in range(collector.done, len(photos), batch):
        collector.process(start, min(start + batch, len(photos)))
        if progress is not None:
            progress(collector.done, len(photos))
        if folder is not None and time.monotonic() - saved >= save_every:
            collector.save(folder / PARTIAL_FILE)
            saved = time.monotonic()
    result = collector.finish()
    if folder is not None:
        result.save(folder / FILE)
        (folder / PARTIAL_FILE).unlink(missing_ok=True)
    return result


def _read_matching(path: Path, metadata: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Read a file if it exists, is not damaged and has the same metadata; otherwise return None."""
    if not path.is_file():
        return None
    try:
        arrays, header = read_arrays(path)
        matches = header["format"] == FORMAT and parse_json(header["metadata"]) == metadata
    except BadFile as error:
        warnings.warn(f"{error} It is computed again.", stacklevel=3)
        return None
    except (KeyError, ValueError):
        warnings.warn(f"{path} is damaged; the top activations are collected again.", stacklevel=3)
        return None
    return (arrays, header) if matches else None


def _parse_file(path: Path, arrays: dict[str, Tensor], header: dict[str, str]) -> TopActivations:
    """Build the result from the content of the file ``path``."""
    try:
        fields: dict[str, Any] = dict(arrays)
        scores: ScoreValues = parse_json(header["scores"], ScoreValues)
        counts: CountValues = parse_json(header["counts"], CountValues)
        result = TopActivations(
            monosemanticity=MonosemanticityScores(
                fields.pop("scores"), scores["chance"], scores["dead"], scores["unpaired"]
            ),
            **fields,
            photo_count=counts["photos"],
            patch_count=counts["patches"],
            metadata=parse_json(header["metadata"], dict[str, str]),
            skipped=_parse_skipped(header),
        )
        _check_arrays(result)
        return result
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadFile(f"{path} is damaged: {error}. Delete it and run torino concepts again.") from error


def _parse_skipped(header: dict[str, str]) -> dict[int, str]:
    return {int(photo): reason for photo, reason in parse_json(header["skipped"], dict[str, str]).items()}


def _check_arrays(top: TopActivations) -> None:
    """Raise ``ValueError`` unless the arrays have the right shapes and types, and name existing photos."""
    (latents, keep), photos, entries = top.top_photos.shape, len(top.grids), len(top.map_patches)
    long, double = torch.empty(latents, dtype=torch.int64, device="meta"), torch.float64
    expected = {
        "active_patches": long,
        "active_photos": long,
        "activation_sum": long.to(double),
        "max_activation": long.float(),
        "top_photos": long[:, None].expand(latents, keep),
        "top_values": long[:, None].expand(latents, keep).float(),
        "offsets": torch.empty(latents * keep + 1, dtype=torch.int64, device="meta"),
        "map_values": torch.empty(entries, device="meta"),
        "grids": torch.empty(photos, 2, dtype=torch.int32, device="meta"),
    }
    check_tensors(vars(top) | {"scores": top.monosemanticity.values}, expected | {"scores": long.to(double)})
    if top.map_patches.ndim != 1 or top.map_patches.dtype not in (torch.int16, torch.int32):
        raise ValueError("'map_patches' must be a list of integers")
    if not are_valid_offsets(top.offsets, entries):
        raise ValueError("'offsets' must be non-decreasing and end with the number of entries")
    if latents and keep and not -1 <= int(top.top_photos.min()) <= int(top.top_photos.max()) < photos:
        raise ValueError("'top_photos' contains a photo that does not exist")
    sizes = torch.cat(
        [top.grids.long().clamp(min=0).prod(1), torch.zeros(1, dtype=torch.int64)]
    )  # the last is no photo
    patches, owners = top.map_patches.long(), top.top_photos.flatten().repeat_interleave(top.offsets.diff())
    if bool(((patches < 0) | (patches >= sizes[owners])).any()):
        raise ValueError("'map_patches' contains a patch that does not exist")


class _Collector:
    """State of one pass over photos, which can be saved and resumed."""

    def __init__(self, sae: SAE, photos: EncodedPhotoSource, metadata: dict[str, str], keep: int, pool: Pool) -> None:
        self.sae, self.photos, self.metadata, self.pool = sae, photos, metadata, pool
        self.stats = RunningStats(sae.latents, keep, len(photos))
        self.scores: MonosemanticityAccumulator | None = None
        self.grids = torch.zeros(len(photos), 2, dtype=torch.int32)
        self.skipped: dict[int, str] = {}
        self.done = 0

    def process(self, start: int, stop: int) -> None:
        pooled: list[Tensor] = []
        embeddings: list[Tensor] = []
        for index, photo in enumerate(self.photos.read(start, stop), start):
            if isinstance(photo, str):
                self.skipped[index] = photo
                continue
            image = photo.tokens
            self.sae.check_origin(image.origin, image.width)
            sums, maxima = self.stats.update(index, len(image), *encode_active(self.sae, image.patches))
            pooled.append(maxima.double() if self.pool == "max" else sums / len(image))
            embeddings.append(photo.embedding.detach().cpu())
            self.grids[index] = torch.tensor(image.grid)
        if pooled:
            stacked = torch.stack(embeddings)
            self.scores = self.scores or MonosemanticityAccumulator(self.sae.latents, stacked.shape[1])
            self.scores.update(torch.stack(pooled), stacked)
        self.done = stop

    def save(self, path: Path) -> None:
        arrays = {f"stats.{name}": value for name, value in self.stats.state_dict().items()}
        if self.scores is not None:
            arrays |= {f"scores.{name}": value for name, value in self.scores.state_dict().items()}
        header = {
            "format": FORMAT,
            "metadata": json.dumps(self.metadata),
            "done": str(self.done),
            "skipped": json.dumps(self.skipped),
        }
        write_arrays(path, {**arrays, "grids": self.grids}, header)

    def resume(self, path: Path) -> None:
        partial = _read_matching(path, self.metadata)
        if partial is None:
            return
        arrays, header = partial
        states: dict[str, dict[str, Tensor]] = {"stats": {}, "scores": {}}
        for name, value in arrays.items():
            owner, _, key = name.partition(".")
            if key:
                states.setdefault(owner, {})[key] = value
        try:
            done, skipped = parse_json(header["done"], Positive), _parse_skipped(header)
            if done > len(self.photos):
                raise ValueError(f"it has {done} photos, more than there are")
            check_tensors(arrays, {"grids": self.grids})
            scores = MonosemanticityAccumulator.from_state(states["scores"]) if states["scores"] else None
            if scores is not None and len(scores.weighted) != self.sae.latents:
                raise ValueError(f"it has {len(scores.weighted)} latents")
            self.stats.load_state_dict(states["stats"])
        except (KeyError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}); the top activations are collected again.", stacklevel=4)
            return
        self.scores, self.grids, self.done, self.skipped = scores, arrays["grids"], done, skipped

    def finish(self) -> TopActivations:
        if self.scores is None or int(self.stats.photos) < 2:
            reason = next(iter(self.skipped.values()), "")
            raise BadTokens(f"Fewer than two of the {len(self.photos)} photos could be read. First error: {reason}")
        fields: dict[str, Any] = self.stats.compute()
        return TopActivations(
            **fields,
            grids=self.grids,
            monosemanticity=self.scores.compute(),
            metadata=self.metadata,
            skipped=self.skipped,
        )
