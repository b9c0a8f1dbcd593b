"""The concept atlas: what each concept of an SAE fires on, its neighbors, and the levels of a Matryoshka SAE.

One pass over a collection of photos collects the top activations (:mod:`torino.interpret`) and the strongest concepts
of every patch, from which histograms and concepts that fire together are computed. It runs in the background and is
saved in the cache folder, so that it is computed once for each SAE and collection.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.errors import BadFile, BadParameter, MissingSignal, TorinoError
from torino.core.io import read_arrays, write_arrays
from torino.datasets import SourceUnavailable, escape_surrogates, hash_sample
from torino.datasets.images import as_seen, open_image
from torino.explorer.model import CONCEPTS, ExplorerModel
from torino.explorer.tree import ConceptTree
from torino.interpret.dashboard import nearest_latents
from torino.interpret.naming import name_concepts
from torino.interpret.photos import PhotoSource
from torino.interpret.sheet import resize_longest_side
from torino.interpret.top_activations import (
    EncodedPhoto,
    TopActivations,
    collect_top_activations,
    image_embedding,
)
from torino.sae import SAE
from torino.sae.identity import hash_sae

ConceptSort = Literal["specificity", "usage", "monosemanticity", "strength", "name", "number"]
MAX_PHOTOS = 2000  # photos of a collection that the atlas reads
KEEP = 12  # top photos of a concept
STOP_SECONDS = 30.0  # far more than a photo takes
BINS = 24  # of the histogram of activations
NEIGHBORS = 8
THUMBNAIL = 224
CODES, TOP = "codes.safetensors", "top_activations.safetensors"


class VLMPhotos:
    """Photos encoded by the tower of the explorer's model, for :func:`collect_top_activations`.

    Parameters
    ----------
    photos : PhotoSource
    model : ExplorerModel
    sae : SAE
    """

    def __init__(self, photos: PhotoSource, model: ExplorerModel, sae: SAE) -> None:
        self.photos, self.model, self.sae = photos, model, sae
        self.indices: list[Tensor] = []
        self.values: list[Tensor] = []
        self._count = min(len(photos), MAX_PHOTOS)
        self._signals = frozenset({"cls"})

    @cached_property
    def _sample(self) -> str:
        return hash_sample(self.photos)

    @property
    def metadata(self) -> dict[str, str]:
        """Identification of photos and tower."""
        return {
            "photos": self.photos.describe,
            "fingerprint": self.photos.fingerprint,
            "sample": self._sample,
            "tower": self.model.name,
            "padding": self.model.vlm.padding,
            "embedding": f"CLS token or mean of patches of {self.model.name}",
            "count": str(self._count),
        }

    def __len__(self) -> int:
        """Return the number of photos."""
        return self._count

    def read(self, start: int, stop: int) -> list[EncodedPhoto | str]:
        """Encode photos, and remember the strongest concepts of their patches; reasons for those that cannot be."""
        results: list[EncodedPhoto | str] = []
        for index in range(start, min(stop, self._count)):
            try:
                results.append(self._encode(index))
            except SourceUnavailable:
                raise
            except (TorinoError, OSError) as error:
                results.append(escape_surrogates(str(error)))
                self.indices.append(torch.zeros(0, CONCEPTS, dtype=torch.int32))
                self.values.append(torch.zeros(0, CONCEPTS, dtype=torch.float16))
        return results

    @torch.no_grad()
    def _encode(self, index: int) -> EncodedPhoto:
        image = open_image(self.photos[index].data)
        vlm = self.model.vlm
        with self.model.lock:  # one photo at a time, so that visitors do not wait for the collection
            inputs = vlm.inputs(image, "?")
            try:
                encoded = vlm.adapter.encode(inputs.tensors, self._signals)
            except MissingSignal:
                self._signals = frozenset()
                encoded = vlm.adapter.encode(inputs.tensors, self._signals)
            if len(encoded.tokens) != 1:
                raise BadParameter(f"Photo {index} is split into tiles, which the atlas does not show.")
            (tokens,) = encoded.tokens
            concepts = self.sae.top(tokens.patches, min(CONCEPTS, self.sae.latents))
        missing = CONCEPTS - concepts.k
        pad = torch.nn.functional.pad
        self.indices.append(pad(concepts.indices.cpu(), (0, missing), value=-1).int())
        self.values.append(pad(concepts.values.cpu(), (0, missing)).half())
        return EncodedPhoto(tokens, image_embedding(tokens))

    def picture(self, index: int) -> Any:
        """Return a photo as the tower sees it."""
        with self.model.lock:
            inputs = self.model.vlm.inputs(open_image(self.photos[index].data), "?")
        return as_seen(inputs.tensors, self.model.vlm.processor, inputs.images)[0]


@dataclass(frozen=True, eq=False)
class AtlasData:
    """A finished atlas.

    Attributes
    ----------
    top : TopActivations
    indices, values : arrays of shape (patches, k)
        The strongest concepts of all patches of all photos, −1 where a patch has fewer, and their activations.
    offsets : array of shape (photos + 1,)
        First patch of each photo.
    """

    top: TopActivations
    indices: NDArray[np.int32]
    values: NDArray[np.float16]
    offsets: NDArray[np.int64]

    @cached_property
    def _inverse(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The patches on which each concept fires, concept by concept, and where each concept begins."""
        flat = self.indices.reshape(-1)
        order = np.argsort(flat, kind="stable")
        starts = np.searchsorted(flat[order], np.arange(self.top.latents + 1))
        return order, starts

    def _entries(self, latent: int) -> NDArray[np.int64]:
        order, starts = self._inverse
        return order[starts[latent] : starts[latent + 1]]

    def histogram(self, latent: int) -> dict[str, Any]:
        """Return the distribution of the nonzero activations of a concept over all patches."""
        values = self.values.reshape(-1)[self._entries(latent)].astype(np.float64)
        high = float(values.max(initial=0.0))
        counts, edges = np.histogram(values, bins=BINS, range=(0.0, high or 1.0))
        return {"edges": edges.round(4).tolist(), "counts": counts.tolist()}

    def cofiring(self, latent: int, count: int = NEIGHBORS) -> list[tuple[int, int, float]]:
        """Return the concepts that fire on the same patches most often: concept, patches, Jaccard index."""
        patches = self._entries(latent) // self.indices.shape[1]
        others = self.indices[patches].reshape(-1)
        others = others[(others >= 0) & (others != latent)]
        together = np.bincount(others, minlength=self.top.latents)
        _, starts = self._inverse
        sizes = np.diff(starts)
        union = len(patches) + sizes - together
        jaccard = together / np.maximum(union, 1)
        best = np.lexsort((np.arange(len(jaccard)), -jaccard))[:count]
        return [(int(c), int(together[c]), float(jaccard[c])) for c in best if together[c]]


class ConceptAtlas:
    """Build an atlas in the background, and describe concepts; without photos only names and neighbors are known.

    Parameters
    ----------
    model : ExplorerModel
        With an SAE.
    photos : PhotoSource
    folder : Path
        Folder for finished atlases.
    """

    def __init__(self, model: ExplorerModel, photos: PhotoSource, folder: Path) -> None:
        assert model.sae is not None
        self.model, self.sae, self.folder = model, model.sae, folder
        self.source = VLMPhotos(photos, model, model.sae)
        self.data: AtlasData | None = None
        self.done, self.error = 0, ""
        self._thumbnails: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._builder: threading.Thread | None = None

    def start(self) -> None:
        """Begin to build."""
        self._builder = threading.Thread(target=self.build, name="atlas", daemon=True)
        self._builder.start()

    def stop(self) -> None:
        """Stop building after the current photo, and wait for it: a process must not end while torch computes."""
        self._stop.set()
        if self._builder is not None:
            self._builder.join(STOP_SECONDS)

    def build(self) -> None:
        """Read the saved atlas, or make it and save it; an error is kept for the status."""
        try:
            metadata = {**self.source.metadata, "sae": hash_sae(self.sae)}
            key = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()[:24]
            self.data = _load(self.folder / key) or self._collect(self.folder / key)
            if not self.sae.names:
                self._name()
        except _Stopped:
            return
        except (TorinoError, OSError) as error:
            self.error = str(error)

    def _collect(self, folder: Path) -> AtlasData:
        keep = min(KEEP, len(self.source) - 1)
        if keep < 1:
            raise BadParameter("The atlas compares photos and needs at least two. Give a folder with more of them.")

        def progress(done: int, total: int) -> None:
            self.done = done
            if self._stop.is_set():
                raise _Stopped

        top = collect_top_activations(self.sae, self.source, keep=keep, batch=1, progress=progress)
        lengths = [len(item) for item in self.source.indices]
        codes = {
            "indices": torch.cat(self.source.indices),
            "values": torch.cat(self.source.values),
            "offsets": torch.tensor([0, *np.cumsum(lengths).tolist()]),
        }
        self.source.indices, self.source.values = [], []
        try:
            write_arrays(folder / CODES, codes)
            top.save(folder / TOP)
        except BadFile:  # the cache cannot be written; the atlas is made again next time
            pass
        return _atlas(top, codes)

    def _name(self) -> None:
        """Name concepts by the captions of the photos, in memory only."""
        texts = [tuple(self.source.photos[index].texts) for index in range(len(self.source))]
        if self.data is not None and any(texts):
            self.sae.names = {latent: name.name for latent, name in name_concepts(self.data.top, texts).items()}

    # ------------------------------------------------------------------ views

    def status(self) -> dict[str, Any]:
        """Return how far the atlas is, and of what photos it is made."""
        ready, scores = self.data is not None, None if self.data is None else self.data.top.monosemanticity
        defined = scores is not None and len(scores.defined) > 0
        return {
            "ready": ready,
            "done": len(self.source) if ready else self.done,
            "total": len(self.source),
            "photos": self.source.photos.describe,
            "limited": len(self.source.photos) > len(self.source),
            "error": self.error,
            "dead": scores.dead if scores else None,
            "monosemanticity": round(scores.mean, 4) if scores and defined else None,
            "chance": round(scores.chance, 4) if scores and defined else None,
        }

    @cached_property
    def tree(self) -> ConceptTree:
        """The nested levels of the SAE."""
        return ConceptTree(self.sae)

    def list(
        self,
        search: str = "",
        sort: ConceptSort = "specificity",
        level: int | None = None,
        offset: int = 0,
        limit: int = 60,
    ) -> dict[str, Any]:
        """Return one page of the concepts that fire, and how many there are."""
        names, word = self.model.names, search.strip().lower()
        alive = range(self.sae.latents) if self.data is None else self.data.top.active_patches.nonzero()[:, 0].tolist()
        found = [
            latent
            for latent in alive
            if (not word or word in names.get(latent, "").lower() or word.lstrip("#") == str(latent))
            and (level is None or self.tree.level(latent) == level)
        ]
        found.sort(key=self._sort_key(sort, names))
        return {"total": len(found), "concepts": [self.summary(latent) for latent in found[offset : offset + limit]]}

    def _sort_key(self, sort: ConceptSort, names: Mapping[int, str]) -> Callable[[int], Any]:
        if sort == "name":
            return lambda latent: (latent not in names, names.get(latent, "").strip("(").lower(), latent)
        if self.data is None or sort == "number":
            return lambda latent: latent
        top = self.data.top
        values: Tensor = {
            "specificity": 1 - top.photo_share,
            "usage": top.patch_share,
            "strength": top.max_activation,
            "monosemanticity": top.monosemanticity.values.nan_to_num(-2.0),
        }[sort]
        # specific concepts that fire on a single patch of one photo say little, so ties go to more patches
        return lambda latent: (-float(values[latent]), -int(top.active_patches[latent]), latent)

    def summary(self, latent: int) -> dict[str, Any]:
        """Return name, level and statistics of a concept."""
        facts: dict[str, Any] = {
            "id": latent,
            "name": self.model.names.get(latent, ""),
            "level": self.tree.level(latent),
        }
        if self.data is None:
            return facts
        top = self.data.top
        score = float(top.monosemanticity.values[latent])
        return {
            **facts,
            "patch_share": round(float(top.patch_share[latent]), 6),
            "photo_share": round(float(top.photo_share[latent]), 6),
            "specificity": round(1 - float(top.photo_share[latent]), 6),
            "mean": round(float(top.mean_activation[latent]), 4),
            "max": round(float(top.max_activation[latent]), 4),
            "monosemanticity": None if isnan(score) else round(score, 4),
        }

    def describe(self, latent: int) -> dict[str, Any]:
        """Return everything about a concept."""
        self.check(latent)
        near = nearest_latents(self.sae, [latent], NEIGHBORS).get(latent, [])
        facts = {
            **self.summary(latent),
            "nearest": [
                {"id": other, "name": self._name_of(other), "cosine": round(value, 4)} for other, value in near
            ],
            "parent": self._reference(self.tree.parent(latent)),
            "children": [self._reference(child) for child in self.tree.children(latent)[:60]],
        }
        if self.data is None:
            return {**facts, "cofiring": [], "histogram": None, "photos": [], "patches": []}
        top = self.data.top
        together = self.data.cofiring(latent)
        return {
            **facts,
            "cofiring": [
                {"id": other, "name": self._name_of(other), "patches": count, "jaccard": round(value, 4)}
                for other, count, value in together
            ],
            "histogram": self.data.histogram(latent),
            "photos": [
                self._photo(latent, rank, photo, value) for rank, (photo, value) in enumerate(top.get_photos(latent))
            ],
            "patches": [
                {"photo": photo, "patch": patch, "value": round(value, 4), "grid": top.grids[photo].tolist()}
                for photo, patch, value in top.get_patches(latent)
            ],
        }

    def check(self, latent: int) -> None:
        """Refuse a concept that the SAE does not have."""
        if not 0 <= latent < self.sae.latents:
            raise BadParameter(f"The SAE has {self.sae.latents} concepts, numbered from 0, got {latent}.")

    def _photo(self, latent: int, rank: int, photo: int, value: float) -> dict[str, Any]:
        assert self.data is not None
        patches, values = self.data.top.get_map(latent, rank)
        return {
            "photo": photo,
            "name": self.source.photos[photo].name,
            "value": round(value, 4),
            "grid": self.data.top.grids[photo].tolist(),
            "patches": patches.tolist(),
            "values": [round(number, 3) for number in values.tolist()],
        }

    def _name_of(self, latent: int) -> str:
        return self.model.names.get(latent, "")

    def _reference(self, latent: int | None) -> dict[str, Any] | None:
        return None if latent is None else {"id": latent, "name": self._name_of(latent)}

    def roots(self) -> list[dict[str, Any]]:
        """Return the concepts of the first level that fire, with the number of concepts below them."""
        return [self.branch(latent) for latent in self.tree.roots() if self._fires(latent)]

    def branches(self, latent: int) -> list[dict[str, Any]]:
        """Return the concepts directly below a concept that fire."""
        self.check(latent)
        return [self.branch(child) for child in self.tree.children(latent) if self._fires(child)]

    def branch(self, latent: int) -> dict[str, Any]:
        """Return a concept as a node of the tree."""
        children = sum(self._fires(child) for child in self.tree.children(latent))
        return {"id": latent, "name": self._name_of(latent), "level": self.tree.level(latent), "children": children}

    def _fires(self, latent: int) -> bool:
        return self.data is None or int(self.data.top.active_patches[latent]) > 0

    def thumbnail(self, photo: int) -> bytes:
        """Return a photo of the collection as the tower sees it, as a small JPEG file."""
        if not 0 <= photo < len(self.source):
            raise BadParameter(f"The atlas has {len(self.source)} photos, numbered from 0, got {photo}.")
        if photo not in self._thumbnails:
            if len(self._thumbnails) >= 1024:
                self._thumbnails.pop(next(iter(self._thumbnails)))
            file = io.BytesIO()
            resize_longest_side(self.source.picture(photo), THUMBNAIL).save(file, "JPEG", quality=85)
            self._thumbnails[photo] = file.getvalue()
        return self._thumbnails[photo]


class _Stopped(Exception):
    """The explorer ends before the atlas is finished."""


def _load(folder: Path) -> AtlasData | None:
    """Read a saved atlas; None if there is none or it is damaged."""
    try:
        codes, _ = read_arrays(folder / CODES)
        return _atlas(TopActivations.load(folder / TOP), codes)
    except (BadFile, KeyError):
        return None


def _atlas(top: TopActivations, codes: dict[str, Tensor]) -> AtlasData:
    return AtlasData(top, codes["indices"].numpy(), codes["values"].numpy(), codes["offsets"].numpy())
