"""Rows of image and text tokens of one space, to train joint SAEs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadFile, BadParameter, BadTokens, TorinoError
from torino.core.io import fingerprint_tensors, read_arrays, write_arrays
from torino.core.tokens import check_matrix
from torino.datasets import Photos
from torino.sae.joint import MODALITIES, JointSAE, JointStatistics
from torino.sae.model import SAE
from torino.training.activations.base import Part, check_batch, part_range
from torino.training.activations.selection import TokenSelection
from torino.training.init import Scaling
from torino.training.objectives import Weights
from torino.training.sampler import hash_key, shuffled_epochs
from torino.vlm.joint_space import JointSpace

FORMAT = "torino-joint-rows/1"


@dataclass(frozen=True, eq=False)
class JointRows:
    """Image and text rows; half of each batch are image rows and half are text rows.

    Each modality is centered to mean 0 and scaled to a mean squared norm of 1, and read in epochs of its own order, so
    the smaller one repeats more often. :meth:`finish` puts centers and scales into the trained SAE.

    Attributes
    ----------
    image, text : Tensor of shape (rows, D)
        As the model outputs them.
    space : str
    encoder : str
        Name of the model, for the card.
    data : str
        Description of the data, for the card.
    seed : int
        Seed of the row order.
    """

    image: Tensor
    text: Tensor
    space: str
    encoder: str = ""
    data: str = ""
    seed: int = 0
    statistics: JointStatistics = field(init=False)

    def __post_init__(self) -> None:
        """Check the rows and compute their statistics."""
        check_matrix(self.image, "image rows")
        check_matrix(self.text, "text rows")
        if self.image.shape[1] != self.text.shape[1]:
            raise BadTokens(
                f"Image and text rows must have the same width, got {self.image.shape[1]} and {self.text.shape[1]}."
            )
        statistics: dict[str, Any] = {}
        for name in MODALITIES:
            rows: Tensor = getattr(self, name)
            center, total = _mean_row(rows), 0.0
            for part in rows.split(65536):
                total += float((part.double() - center).square().sum())
            if not total > 0:
                raise BadTokens(f"All {name} rows are equal, so there is nothing to learn. Give more {name}s.")
            statistics |= {f"{name}_center": center.float(), f"{name}_scale": (total / len(rows)) ** 0.5}
        object.__setattr__(self, "statistics", JointStatistics(self.space, **statistics))

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self.image.shape[1]

    @property
    def rows(self) -> int:
        """Number of rows of both modalities."""
        return len(self.image) + len(self.text)

    @property
    def metadata(self) -> dict[str, Any]:
        """Fields for the card of an SAE."""
        return {
            "encoder": f"{self.encoder} ({self.space})",
            "block": None,
            "token_kind": f"image and text tokens in the space {self.space}",
            "data": self.data,
            "license": "",
        }

    @property
    def content(self) -> str:
        """Hash of the rows; a training run is resumed only with the same ones."""
        return fingerprint_tensors({"image": self.image, "text": self.text})

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Return the normalized rows of a step; the first half of the batch are image rows."""
        check_batch(step, size)
        images = (size + 1) // 2
        own, parts = part_range(size, part), list[Tensor]()
        ranges = {"image": (0, images), "text": (images, size)}
        for number, name in enumerate(MODALITIES):
            begin, end = ranges[name]
            positions = np.arange(max(own.start, begin), min(own.stop, end)) - begin + step * (end - begin)
            rows: Tensor = getattr(self, name)
            indices = shuffled_epochs(positions, len(rows), hash_key(self.seed, name) if number else self.seed)
            center, scale = getattr(self.statistics, f"{name}_center"), getattr(self.statistics, f"{name}_scale")
            parts.append((rows[torch.from_numpy(indices)].float() - center) / scale)
        return torch.cat(parts)

    def finish(self, sae: SAE) -> JointSAE:
        """Return an SAE of normalized rows as one that reads rows as the model outputs them."""
        assert sae.W_dec is not None
        statistics = self.statistics
        scaling = Scaling(statistics.image_center.to(sae.b_dec.device), statistics.image_scale)
        weights, _ = scaling.fold(Weights(sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec), 0.0)
        folded = SAE(
            weights.W_enc,
            weights.b_enc,
            weights.W_dec,
            weights.b_dec,
            kind=sae.kind,
            k=sae.k,
            threshold=None if sae.threshold is None else sae.threshold * statistics.image_scale,
            groups=sae.groups,
            card=sae.card,
        )
        return JointSAE.of(folded, statistics)

    def save(self, path: str | Path) -> Path:
        """Write the rows, so that training can be repeated or resumed without the model."""
        texts = {"format": FORMAT, "space": self.space, "encoder": self.encoder, "data": self.data}
        return write_arrays(path, {"image": self.image, "text": self.text}, texts)

    @classmethod
    def load(cls, path: str | Path, *, seed: int = 0) -> JointRows:
        """Read rows written by :meth:`save`."""
        arrays, texts = read_arrays(path)
        if texts.get("format") != FORMAT or not {"image", "text"} <= arrays.keys():
            raise BadFile(f"{path} does not hold rows of images and text. Give a file written by torino train --rows.")
        return cls(arrays["image"], arrays["text"], texts["space"], texts["encoder"], texts["data"], seed)


def _mean_row(rows: Tensor) -> Tensor:
    return torch.stack([part.double().sum(0) for part in rows.split(65536)]).sum(0) / len(rows)


def collect_rows(
    space: JointSpace,
    photos: Photos,
    texts: Sequence[str] | None = None,
    *,
    tokens: str = "all",
    encoder: str = "",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> JointRows:
    """Run photos and texts through a model and return the rows of a space.

    Parameters
    ----------
    space : JointSpace
    photos : Photos
    texts : sequence of str, optional
        By default the captions of the photos.
    tokens : str
        ``all`` patches, or ``random:R`` of each photo.
    encoder : str
        Name of the model.
    seed : int
        Seed of the random patches and of the row order.
    progress : callable, optional
        Called with the number of photos that are done.
    """
    selection = TokenSelection.parse(tokens)
    if selection.name == "cls":
        raise BadParameter("A joint SAE reads patches and words, so tokens must be all or random:R, got cls.")
    images, captions, used = list[Tensor](), list[str](), 0
    for number, photo in enumerate(photos):
        try:
            rows = space.image_rows(photo.data)
        except TorinoError:  # a photo that cannot be used, as torino activations skips it
            continue
        finally:
            if progress is not None:
                progress(number + 1)
        images.append(rows[selection.select_patches(len(rows), photo.name, seed).long()].half())
        captions.extend(photo.texts)
        used += 1
    if not images:
        raise BadFile(f"None of the {len(photos)} photos can be used. Check the first one: {photos.names()[0]}.")
    sentences = list(dict.fromkeys(captions if texts is None else texts))
    if not sentences:
        raise BadParameter("The photos have no captions. Give texts with --texts FILE.")
    words = torch.cat([space.text_rows(text)[0].half() for text in sentences])
    data = f"{used:,} of {photos.describe} and {len(sentences):,} texts"
    return JointRows(torch.cat(images), words, space.name, encoder, data, seed)
