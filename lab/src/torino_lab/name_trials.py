"""Test concept names: shown patches on which a concept fires, choose between its name and another one.

The patches come from dev photos, which neither the SAE nor the names have seen. A wrong name is taken from any other
concept, or, which is harder, from a concept that fires elsewhere in the same photos: a name that says what the photos
are about, and not what the concept fires on, fails there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from torino.interpret.running_stats import encode_active
from torino.sae.model import SAE
from torino_lab.naming import GRID, SIZE, STRONG, FeaturePhotos
from torino_lab.prototypes import JointSpace, areas, fit_directions, label
from torino_lab.training.features import Encode

SHOWN = 6  # patches per trial, each from another photo
CONTEXT = 2  # patches around the shown one in a crop for CLIP
SHEET_CONTEXT = 3  # and in a crop for people
CELL = 168
Distractor = Literal["other", "same photos"]


@dataclass(frozen=True)
class Trial:
    """One choice between two names.

    Attributes
    ----------
    latent : int
    right, wrong : str
        Name of the concept, and that of another concept.
    distractor : {"other", "same photos"}
        Where the wrong name comes from.
    places : tuple of (photo, patch)
        What is shown.
    """

    latent: int
    right: str
    wrong: str
    distractor: Distractor
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Places:
    """Where each latent fires strongly.

    Attributes
    ----------
    by_latent : mapping from int to list of (photo, patch)
        The strongest patch in each photo.
    by_photo : list of mapping from int to set of int
        Latents of each photo and their patches.
    """

    by_latent: Mapping[int, list[tuple[int, int]]]
    by_photo: Sequence[Mapping[int, set[int]]]


def find_places(sae: SAE, photos: FeaturePhotos, batch: int = 16) -> Places:
    """Find where each latent is active with at least half of its largest activation."""
    entries: list[tuple[Tensor, Tensor, Tensor]] = []
    largest = torch.zeros(sae.latents)
    for start in range(0, len(photos), batch):
        for hidden in photos.hidden(start, start + batch):
            patches, latents, values = encode_active(sae, hidden[1:])
            largest.scatter_reduce_(0, latents, values, "amax")
            entries.append((patches, latents, values))
    by_latent: dict[int, list[tuple[int, int]]] = {}
    by_photo: list[dict[int, set[int]]] = []
    for photo, (patches, latents, values) in enumerate(entries):
        strong = values >= STRONG * largest[latents]
        best: dict[int, tuple[float, int]] = {}
        here: dict[int, set[int]] = {}
        rows = zip(latents[strong].tolist(), patches[strong].tolist(), values[strong].tolist(), strict=True)
        for latent, patch, value in rows:
            here.setdefault(latent, set()).add(patch)
            best[latent] = max(best.get(latent, (0.0, 0)), (value, patch))
        for latent, (_, patch) in best.items():
            by_latent.setdefault(latent, []).append((photo, patch))
        by_photo.append(here)
    return Places(by_latent, by_photo)


def draw_trials(
    names: Mapping[int, str],
    similar: Mapping[int, set[str]],
    places: Places,
    latents: Sequence[int],
    distractor: Distractor,
    seed: int,
) -> list[Trial]:
    """Make a trial for each latent that fires in at least ``SHOWN`` photos.

    Parameters
    ----------
    names : mapping from int to str
        Names of the latents; wrong names come from it, too.
    similar : mapping from int to set of str
        Words that may name a latent as well; they are not used as its wrong name.
    places : Places
    latents : sequence of int
        Latents to test.
    distractor : {"other", "same photos"}
    seed : int
    """
    everything = sorted(set(names.values()))
    trials: list[Trial] = []
    for latent in latents:
        if latent not in names or len(places.by_latent.get(latent, ())) < SHOWN:
            continue
        rng = Random(f"{seed}:same photos:{latent}")  # the same patches for both kinds of wrong names
        shown = tuple(rng.sample(places.by_latent[latent], SHOWN))
        if distractor == "same photos":
            other = {
                names[there]
                for photo, patch in shown
                for there, patches in places.by_photo[photo].items()
                if there in names and not _near(patch, patches)
            }
        else:
            other = set(everything)
        wrong = sorted(other - {names[latent]} - similar.get(latent, set()))
        if wrong:
            trials.append(Trial(latent, names[latent], rng.choice(wrong), distractor, shown))
    return trials


def _near(patch: int, patches: set[int]) -> bool:
    row, column = divmod(patch, GRID[1])
    places = (divmod(other, GRID[1]) for other in patches)
    return any(abs(r - row) <= CONTEXT and abs(c - column) <= CONTEXT for r, c in places)


def crop_patch(image: Image.Image, patch: int, context: int = CONTEXT) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """Cut out a patch with its surroundings; also return the place of the patch in the crop.

    At the border of the photo the crop is moved inwards.
    """
    side = SIZE // GRID[0]
    width = side * (2 * context + 1)
    row, column = divmod(patch, GRID[1])
    left = min(max((column - context) * side, 0), SIZE - width)
    top = min(max((row - context) * side, 0), SIZE - width)
    x, y = column * side - left, row * side - top
    return image.crop((left, top, left + width, top + width)), (x, y, x + side, y + side)


# ---------------------------------------------------------------------- judged by CLIP


@dataclass(frozen=True, eq=False)
class CropJudge:
    """Choose between words by CLIP's image embedding of crops.

    Attributes
    ----------
    words : tuple of str
    directions : Tensor of shape (V, 512)
    centre, scale : Tensor
        Mean embedding of crops, and standard deviation of each word's score on crops.
    """

    words: tuple[str, ...]
    directions: Tensor
    centre: Tensor
    scale: Tensor

    def choose(self, crops: Tensor, right: str, wrong: str) -> bool | None:
        """Return whether crops with these embeddings look more like the right name; None for unknown words."""
        if right not in self.words or wrong not in self.words:
            return None
        columns = [self.words.index(right), self.words.index(wrong)]
        scores = ((crops - self.centre) @ self.directions[columns].T / self.scale[columns]).mean(0)
        return bool(scores[0] > scores[1])


def fit_judge(space: JointSpace, photos: FeaturePhotos, texts: Sequence[frozenset[str]], crops: Tensor) -> CropJudge:
    """Fit a judge on photos with captions that names were not made from.

    Words that at least 15 of the photos mention are known. A word whose classifier cannot find it in photos left out
    of a first fit (area under the ROC curve below 0.8) is not.
    """
    embeddings = torch.cat([space.image(photos.hidden(start, start + 32)) for start in range(0, len(photos), 32)])
    counts: dict[str, int] = {}
    for mentioned in texts:
        for word in mentioned:
            counts[word] = counts.get(word, 0) + 1
    words = sorted(word for word, count in counts.items() if count >= 15)
    labels = label(texts, words)
    held = torch.arange(len(texts)) % 3 == 0
    first = fit_directions(embeddings[~held], labels[~held])
    area = areas(embeddings[held] @ first.T, labels[held])
    kept = [number for number, value in enumerate(area.tolist()) if value >= 0.8]
    directions = fit_directions(embeddings, labels[:, kept])
    centre = crops.mean(0)
    return CropJudge(
        tuple(words[number] for number in kept), directions, centre, ((crops - centre) @ directions.T).std(0)
    )


def text_judge(words: Sequence[str], vectors: Tensor, crops: Tensor) -> CropJudge:
    """Return a judge from text vectors in CLIP's joint space."""
    centre = crops.mean(0)
    return CropJudge(tuple(words), vectors, centre, ((crops - centre) @ vectors.T).std(0))


def embed_crops(space: JointSpace, encode: Encode, crops: Sequence[Image.Image], batch: int = 16) -> Tensor:
    """Return CLIP's image embeddings of crops."""
    return torch.cat([space.image(encode(crops[start : start + batch])) for start in range(0, len(crops), batch)])


# ---------------------------------------------------------------------- judged by people


def draw_sheet(rows: Sequence[tuple[int, Sequence[tuple[int, int]], tuple[str, str]]], photos: Any) -> Image.Image:
    """Draw trials for a person: number, crops with the patch outlined, and the two names in random order.

    Parameters
    ----------
    rows : sequence of (number, places, (name a, name b))
    photos : FeaturePhotos
    """
    font = ImageFont.load_default(22)
    sheet = Image.new("RGB", (SHOWN * CELL + 250, len(rows) * CELL), "white")
    draw = ImageDraw.Draw(sheet)
    for line, (number, places, (first, second)) in enumerate(rows):
        for column, (photo, patch) in enumerate(places):
            crop, box = crop_patch(photos.images(photo), patch, SHEET_CONTEXT)
            factor = (CELL - 6) / crop.width
            crop = crop.resize((CELL - 6, CELL - 6), Image.Resampling.BICUBIC)
            ImageDraw.Draw(crop).rectangle([round(edge * factor) for edge in box], outline="red", width=2)
            sheet.paste(crop, (column * CELL, line * CELL + 3))
        x, y = SHOWN * CELL + 8, line * CELL + 12
        draw.text((x, y), f"{number}", "black", font)
        draw.text((x, y + 46), f"a  {first}", "black", font)
        draw.text((x, y + 84), f"b  {second}", "black", font)
    return sheet
