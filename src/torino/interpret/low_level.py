"""Recognize low-level concepts: colors, edges, flat areas and image borders.

Some latents fire on an appearance rather than on a thing. They are recognized by the pixels and the place of the
patches on which they are active: nearly all of one color, with edges in one direction, flat, or at one border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadParameter

if TYPE_CHECKING:
    from PIL import Image

LowLevelKind = Literal["color", "edge", "texture", "position"]

COLORS: dict[str, tuple[int, int, int]] = {
    "black": (18, 18, 18),
    "gray": (128, 128, 128),
    "white": (242, 242, 242),
    "red": (190, 30, 40),
    "orange": (230, 120, 30),
    "yellow": (235, 210, 60),
    "green": (60, 130, 50),
    "blue": (40, 90, 180),
    "purple": (120, 60, 150),
    "pink": (235, 150, 175),
    "brown": (115, 75, 45),
}
PROPERTIES: tuple[tuple[str, LowLevelKind], ...] = (
    *((name, "color") for name in COLORS),
    ("horizontal edges", "edge"),
    ("vertical edges", "edge"),
    ("flat area", "texture"),
    ("fine texture", "texture"),
    ("top border", "position"),
    ("bottom border", "position"),
    ("left border", "position"),
    ("right border", "position"),
)
FLAT, FINE = 0.015, 0.16  # standard deviation of the luminance, from 0 to 1
ANISOTROPY = 3.0  # energy of the gradients in one direction, relative to the other
MIN_SHARE = 0.7  # share of a latent's activation on patches with the property
MIN_LIFT = 3.0  # that share, relative to the share of all patches


@dataclass(frozen=True)
class LowLevelName:
    """A property that the patches of a latent have in common.

    Attributes
    ----------
    name : str
    kind : {"color", "edge", "texture", "position"}
    share : float
        Share of the latent's activation on patches with this property.
    lift : float
        The share, divided by that of all patches.
    """

    name: str
    kind: LowLevelKind
    share: float
    lift: float


def patch_properties(image: Image.Image, grid: tuple[int, int]) -> Tensor:
    """Return which patch has which of :data:`PROPERTIES`, a boolean tensor of shape (N, P).

    Parameters
    ----------
    image : Image
        The image as the tower sees it: the grid covers all of it.
    grid : tuple of int
        Rows and columns of patches.

    Examples
    --------
    >>> from PIL import Image
    >>> table = patch_properties(Image.new("RGB", (32, 32), (190, 30, 40)), (2, 2))
    >>> [name for (name, _), has in zip(PROPERTIES, table[0].tolist()) if has]
    ['red', 'flat area', 'top border', 'left border']
    """
    rows, columns = grid
    if image.width < 2 * columns or image.height < 2 * rows:
        raise BadParameter(
            f"An image of {image.width} x {image.height} pixels is too small for {columns} x {rows} patches. Give at "
            "least two pixels per patch in each direction."
        )
    side = (max(2, image.width // columns), max(2, image.height // rows))
    pixels = np.asarray(image.convert("RGB").resize((side[0] * columns, side[1] * rows)), dtype=np.float32) / 255
    patches = torch.from_numpy(pixels).reshape(rows, side[1], columns, side[0], 3).transpose(1, 2)
    patches = patches.reshape(rows * columns, side[1], side[0], 3)
    luminance = patches @ torch.tensor([0.299, 0.587, 0.114])
    palette = _perceptual(torch.tensor(list(COLORS.values())) / 255)
    nearest = torch.cdist(_perceptual(patches.flatten(1, 2)), palette).argmin(-1)
    share = torch.nn.functional.one_hot(nearest, len(COLORS)).float().mean(1)
    across = (luminance[:, 1:] - luminance[:, :-1]).square().mean((1, 2))  # changes from row to row
    along = (luminance[:, :, 1:] - luminance[:, :, :-1]).square().mean((1, 2))
    contrast = luminance.flatten(1).std(1)
    visible = contrast > 2 * FLAT
    row = torch.arange(rows).repeat_interleave(columns)
    column = torch.arange(columns).repeat(rows)
    others = [
        (across > ANISOTROPY * along) & visible,
        (along > ANISOTROPY * across) & visible,
        contrast < FLAT,
        contrast > FINE,
        row == 0,
        row == rows - 1,
        column == 0,
        column == columns - 1,
    ]
    return torch.cat([share > 0.5, torch.stack(others, 1)], 1)


def _perceptual(rgb: Tensor) -> Tensor:
    """Map sRGB values from 0 to 1 to the Oklab color space, in which distances are perceptual."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb.clamp(min=0.04045) + 0.055) / 1.055) ** 2.4)
    cones = torch.tensor(
        [[0.4122215, 0.5363325, 0.0514460], [0.2119035, 0.6806995, 0.1073970], [0.0883025, 0.2817188, 0.6299787]]
    )
    lab = torch.tensor(
        [[0.2104543, 0.7936178, -0.0040720], [1.9779985, -2.4285922, 0.4505937], [0.0259040, 0.7827718, -0.8086758]]
    )
    return (linear @ cones.T).clamp(min=0) ** (1 / 3) @ lab.T


class LowLevelEvidence:
    """Collect the properties of the patches on which each latent is active.

    Parameters
    ----------
    latents : int
    """

    def __init__(self, latents: int) -> None:
        self._with = torch.zeros(latents, len(PROPERTIES))
        self._weight = torch.zeros(latents)
        self._base = torch.zeros(len(PROPERTIES))
        self._patches = 0

    def add(self, properties: Tensor, latents: Tensor, patches: Tensor, values: Tensor) -> None:
        """Add an image: its properties, and latent, patch and activation of every entry that counts."""
        table = properties.float()
        self._base += table.sum(0)
        self._patches += len(table)
        self._with.index_add_(0, latents, table[patches] * values[:, None])
        self._weight.index_add_(0, latents, values)

    def name(self, latent: int) -> LowLevelName | None:
        """Return the property that nearly all of a latent's activation has in common, if there is one."""
        if not self._weight[latent]:
            return None
        share = self._with[latent] / self._weight[latent]
        lift = share / (self._base / max(1, self._patches)).clamp(min=1e-6)
        lift[(share < MIN_SHARE) | (lift < MIN_LIFT)] = 0
        best = int(lift.argmax())
        if not lift[best]:
            return None
        name, kind = PROPERTIES[best]
        return LowLevelName(name, kind, round(float(share[best]), 3), round(float(lift[best]), 2))
