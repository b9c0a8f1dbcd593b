"""Evidence: one pass over photos, and what every latent fired on is known: how often, how strongly, where."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.io import read_arrays, write_arrays
from torino.core.tokens import VisualTokens
from torino.interpret.monosemanticity import Monosemanticity, Scores
from torino.interpret.running_stats import RunningStats, active
from torino.sae.model import SAE

FORMAT = "torino-evidence/1"
FILE, PARTIAL = "evidence.safetensors", "evidence.partial.safetensors"
KEEP = 16

Pool = Literal["mean", "max"]


@dataclass(frozen=True, eq=False)
class View:
    """A photo as the judges see it: its tokens at the tap of the SAE, and the embedding of the one that compares."""

    tokens: VisualTokens
    embedding: Tensor


class Views(Protocol):
    """Photos to gather evidence on.

    Attributes
    ----------
    about : mapping
        What says which photos these are, seen by which tower and compared by which judge; evidence gathered in part
        goes on only where it is the same.
    """

    @property
    def about(self) -> dict[str, str]: ...  # noqa: D102

    def __len__(self) -> int:
        """How many photos there are."""
        ...

    def views(self, start: int, stop: int) -> list[View | str]:
        """Photos ``start`` to ``stop``, each seen, or the sentence that says why it could not be."""
        ...


class Looked:
    """Photos whose tokens are there already.

    Parameters
    ----------
    tokens : sequence of VisualTokens
    embeddings : Tensor of shape (N, E), optional
        What the judge makes of the photos. Without it the tokens judge themselves, see :func:`embedding_of`.
    about : mapping, optional
        See :class:`Views`; by default a hash of the tokens.
    """

    def __init__(
        self, tokens: Sequence[VisualTokens], embeddings: Tensor | None = None, about: dict[str, str] | None = None
    ) -> None:
        if embeddings is not None and len(embeddings) != len(tokens):
            raise BadParameter(f"{len(tokens)} photos take as many embeddings, got {len(embeddings)}.")
        self.tokens, self.embeddings = tokens, embeddings
        self._about = about

    @property
    def about(self) -> dict[str, str]:
        """A hash of the tokens and embeddings, unless something better was given."""
        if self._about is None:
            parts = [image.patches for image in self.tokens] + ([] if self.embeddings is None else [self.embeddings])
            judge = embedding_kind(self.tokens[0]) if self.embeddings is None and self.tokens else "given embeddings"
            self._about = {"photos": f"{len(self.tokens)} images", "fingerprint": _digest(parts), "judge": judge}
        return self._about

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self.tokens)

    def views(self, start: int, stop: int) -> list[View | str]:
        """Photos ``start`` to ``stop``."""
        seen: list[View | str] = []
        for index in range(start, min(stop, len(self))):
            image = self.tokens[index]
            seen.append(View(image, embedding_of(image) if self.embeddings is None else self.embeddings[index]))
        return seen


def embedding_of(image: VisualTokens) -> Tensor:
    """One vector for a photo: its CLS token, or the mean of its patches where there is none."""
    return image.patches.float().mean(0) if image.cls is None else image.cls.float()


def embedding_kind(image: VisualTokens) -> str:
    """Say what :func:`embedding_of` takes."""
    return f"{'mean of patches' if image.cls is None else 'CLS token'} of {image.origin}"


@dataclass(frozen=True, eq=False)
class Evidence:
    """What fired every latent. C latents, K photos kept for each.

    Attributes
    ----------
    photos, patches : int
        How many were looked at.
    fired_patches, fired_photos : Tensor of shape (C,), int64
        How many of them fired the latent.
    total : Tensor of shape (C,), float64
        Sum of its activations.
    peak : Tensor of shape (C,), float32
        Its largest activation.
    top_photos : Tensor of shape (C, K), int64
        Photos by their largest activation, ties to the lowest; −1 where fewer fired it.
    top_values : Tensor of shape (C, K), float32
        That activation.
    offsets : Tensor of shape (C · K + 1,), int64
    map_patches, map_values : Tensor of shape (nnz,), int16 (or int32) and float32
        All patches of photo ``top_photos[c, i]`` that fired latent c, in raster order, are entries
        ``offsets[c * K + i]`` up to the next.
    grids : Tensor of shape (photos of the source, 2), int32
        Patch grid of each photo; 0 x 0 for one that could not be read.
    monosemanticity : Scores
    about : dict
        SAE, photos, tower, judge and settings it was gathered with.
    skipped : dict of int to str
        Photos that could not be read, and why.
    """

    photos: int
    patches: int
    fired_patches: Tensor
    fired_photos: Tensor
    total: Tensor
    peak: Tensor
    top_photos: Tensor
    top_values: Tensor
    offsets: Tensor
    map_patches: Tensor
    map_values: Tensor
    grids: Tensor
    monosemanticity: Scores
    about: dict[str, str]
    skipped: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def latents(self) -> int:
        """How many latents there are, C."""
        return len(self.peak)

    @property
    def keep(self) -> int:
        """How many photos are kept for each, K."""
        return self.top_photos.shape[1]

    @property
    def patch_share(self) -> Tensor:
        """Share of all patches that fire each latent, shape (C,), float64."""
        return self.fired_patches.double() / self.patches

    @property
    def photo_share(self) -> Tensor:
        """Share of all photos that fire each latent, shape (C,), float64."""
        return self.fired_photos.double() / self.photos

    @property
    def mean(self) -> Tensor:
        """Mean activation where it fires, shape (C,), float64; 0 where it never does."""
        return self.total / self.fired_patches.clamp(min=1)

    def photos_of(self, latent: int) -> list[tuple[int, float]]:
        """The photos that fire a latent most, and how strongly, strongest first."""
        held = self.top_photos[latent] >= 0
        return list(zip(self.top_photos[latent][held].tolist(), self.top_values[latent][held].tolist(), strict=True))

    def map_of(self, latent: int, place: int) -> tuple[Tensor, Tensor]:
        """Patches, and their activations, that fire a latent in the photo at ``place`` among its top photos."""
        entries = slice(*self.offsets[latent * self.keep + place :][:2].tolist())
        return self.map_patches[entries].long(), self.map_values[entries]

    def patches_of(self, latent: int) -> list[tuple[int, int, float]]:
        """The K patches that fire a latent most: photo, patch, activation; ties to the lowest photo, then patch.

        They all lie in its K top photos: each photo ranked before that of a patch has a patch ranked before it.
        """
        found = [
            (photo, patch, value)
            for place, (photo, _) in enumerate(self.photos_of(latent))
            for patch, value in zip(*(part.tolist() for part in self.map_of(latent, place)), strict=True)
        ]
        return sorted(found, key=lambda one: (-one[2], one[0], one[1]))[: self.keep]

    def save(self, path: str | Path) -> Path:
        """Write it to ``.safetensors`` (or ``.npz``), whole or not at all."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        scores = self.monosemanticity
        texts = {
            "format": FORMAT,
            "about": json.dumps(self.about),
            "counts": json.dumps({"photos": self.photos, "patches": self.patches}),
            "scores": json.dumps({"chance": scores.chance, "silent": scores.silent, "single": scores.single}),
            "skipped": json.dumps(self.skipped),
        }
        return write_arrays(path, {**arrays, "scores": scores.values}, texts)

    @classmethod
    def load(cls, path: str | Path) -> Evidence:
        """Read what :meth:`save` wrote."""
        arrays, texts = read_arrays(path)
        if texts.get("format") != FORMAT:
            raise BadFile(
                f"{path} is not evidence about concepts: its format is {texts.get('format', 'not named')!r}, not "
                f"{FORMAT!r}. Give a file written by torino concepts, or delete it and gather anew."
            )
        try:
            scores = Scores(arrays.pop("scores"), **json.loads(texts["scores"]))
            skipped = {int(photo): why for photo, why in json.loads(texts["skipped"]).items()}
            counts: dict[str, Any] = json.loads(texts["counts"])
            facts: dict[str, Any] = {**counts, **arrays}
            return cls(**facts, monosemanticity=scores, about=json.loads(texts["about"]), skipped=skipped)
        except (KeyError, TypeError, ValueError) as error:
            raise BadFile(f"{path} is damaged: its parts do not fit together ({error}). Gather it anew.") from error


def gather(
    sae: SAE,
    photos: Views,
    *,
    keep: int = KEEP,
    pool: Pool = "mean",
    batch: int = 16,
    into: str | Path | None = None,
    every: float = 30.0,
    progress: Callable[[int, int], None] | None = None,
) -> Evidence:
    """Look at all photos once and gather what fires each latent of an SAE.

    Memory does not grow with the number of photos, but for a few bytes each.

    Parameters
    ----------
    sae : SAE
    photos : Views
        :class:`Looked` where the tokens are there, :class:`torino.interpret.photos.Looking` to look at them now.
    keep : int
        Photos kept for each latent, K.
    pool : {"mean", "max"}
        What the activations of the patches of a photo become for its monosemanticity.
    batch : int
        Photos looked at together.
    into : path, optional
        Folder for ``evidence.safetensors``. What is gathered is kept there every so often, and a run that was killed
        goes on where it stood, to the same result. Evidence that is there already, of the same SAE, photos and
        settings, is read instead of gathered again.
    every : float
        Seconds between two savings.
    progress : callable, optional
        Called with the photos done and their number.
    """
    if pool not in get_args(Pool):
        raise BadParameter(f"pool must be 'mean' or 'max', got {pool!r}.")
    if keep < 1 or batch < 1:
        raise BadParameter(f"keep and batch must be at least 1, got {keep} and {batch}.")
    if len(photos) <= keep:
        raise BadParameter(
            f"The {keep} strongest photos of each concept are compared with the others, and there are {len(photos)} "
            f"photos in all. Give more than {keep}, or keep fewer."
        )
    about = {**photos.about, "sae": fingerprint(sae), "keep": str(keep), "pool": pool}
    run = _Run(sae, photos, about, keep, pool)
    folder = None if into is None else Path(into)
    if folder is not None:
        done = _same(folder / FILE, about)
        if done is not None:
            return Evidence.load(folder / FILE)
        run.resume(folder / PARTIAL)
    saved = time.monotonic()
    for start in range(run.done, len(photos), batch):
        run.take(start, min(start + batch, len(photos)))
        if progress is not None:
            progress(run.done, len(photos))
        if folder is not None and time.monotonic() - saved >= every:
            run.save(folder / PARTIAL)
            saved = time.monotonic()
    evidence = run.finish()
    if folder is not None:
        evidence.save(folder / FILE)
        (folder / PARTIAL).unlink(missing_ok=True)
    return evidence


def fingerprint(sae: SAE) -> str:
    """A hash of what decides the latents of an SAE."""
    parts = [sae.W_enc, sae.b_enc, sae.b_dec] + ([] if sae.threshold is None else [sae.threshold])
    settings = f"{sae.kind} {sae.k} {sae.center} {sae.normalize} "
    return hashlib.sha256((settings + _digest(parts)).encode()).hexdigest()[:32]


def _digest(parts: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{tuple(part.shape)}{part.dtype}".encode())
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _same(path: Path, about: dict[str, str]) -> dict[str, Tensor] | None:
    """The arrays of a file, if it is there and of the same make; a damaged one is as good as none."""
    if not path.is_file():
        return None
    try:
        arrays, texts = read_arrays(path)
        return arrays if texts["format"] == FORMAT and json.loads(texts["about"]) == about else None
    except (BadFile, KeyError, ValueError):
        return None


class _Run:
    """A pass over photos, which can be put down and taken up again."""

    def __init__(self, sae: SAE, photos: Views, about: dict[str, str], keep: int, pool: Pool) -> None:
        self.sae, self.photos, self.about, self.pool = sae, photos, about, pool
        self.tally = RunningStats(sae.latents, keep, len(photos))
        self.scores: Monosemanticity | None = None
        self.grids = torch.zeros(len(photos), 2, dtype=torch.int32)
        self.skipped: dict[int, str] = {}
        self.done = 0

    def take(self, start: int, stop: int) -> None:
        pooled: list[Tensor] = []
        embeddings: list[Tensor] = []
        for index, view in enumerate(self.photos.views(start, stop), start):
            if isinstance(view, str):
                self.skipped[index] = view
                continue
            image = view.tokens
            self.sae.check_origin(image.origin, image.width)
            sums, peaks = self.tally.add(index, len(image), *active(self.sae, image.patches))
            pooled.append(peaks.double() if self.pool == "max" else sums / len(image))
            embeddings.append(view.embedding.detach().cpu())
            self.grids[index] = torch.tensor(image.grid)
        if pooled:
            together = torch.stack(embeddings)
            self.scores = self.scores or Monosemanticity(self.sae.latents, together.shape[1])
            self.scores.add(torch.stack(pooled), together)
        self.done = stop

    def save(self, path: Path) -> None:
        arrays = {f"tally.{name}": value for name, value in self.tally.state().items()}
        if self.scores is not None:
            arrays |= {f"scores.{name}": value for name, value in self.scores.state().items()}
        texts = {
            "format": FORMAT,
            "about": json.dumps(self.about),
            "done": str(self.done),
            "skipped": json.dumps(self.skipped),
        }
        write_arrays(path, {**arrays, "grids": self.grids}, texts)

    def resume(self, path: Path) -> None:
        arrays = _same(path, self.about)
        if arrays is None:
            return
        _, texts = read_arrays(path)
        parts: dict[str, dict[str, Tensor]] = {"tally": {}, "scores": {}}
        for name, value in arrays.items():
            room, _, inner = name.partition(".")
            if inner:
                parts[room][inner] = value
        self.tally.take_up(parts["tally"])
        self.scores = Monosemanticity.of(parts["scores"]) if parts["scores"] else None
        self.grids, self.done = arrays["grids"], int(texts["done"])
        self.skipped = {int(photo): why for photo, why in json.loads(texts["skipped"]).items()}

    def finish(self) -> Evidence:
        if self.scores is None or int(self.tally.photos) < 2:
            why = next(iter(self.skipped.values()), "")
            raise BadTokens(f"Fewer than two of the {len(self.photos)} photos could be read. The first one: {why}")
        facts: dict[str, Any] = self.tally.result()
        return Evidence(
            **facts,
            grids=self.grids,
            monosemanticity=self.scores.scores(),
            about=self.about,
            skipped=self.skipped,
        )
