"""Ragged: rows of several images laid end to end, with the offsets that part them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.errors import BadTokens


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged batch: image i owns rows ``offsets[i]:offsets[i+1]`` of ``values``. Nothing is padded.

    Attributes
    ----------
    values : Tensor of shape (total, ...)
        The rows of all images, one image after the other.
    offsets : Tensor of shape (images + 1,), int64, on the CPU
        Where each image begins; the last entry is ``total``. This is the ``cu_seqlens`` of
        variable-length attention kernels.

    Examples
    --------
    >>> batch = Ragged.of([torch.zeros(2, 4), torch.ones(3, 4)])
    >>> batch.offsets, batch[1].shape
    (tensor([0, 2, 5]), torch.Size([3, 4]))
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        """Refuse offsets that do not cover the rows exactly once."""
        if not fits(self.offsets, len(self.values)):
            raise BadTokens(
                f"offsets must rise from 0 to the number of rows ({len(self.values)}), got {self.offsets.tolist()}."
            )

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Ragged:
        """Pack one tensor per image."""
        if not parts:
            raise BadTokens("An empty list of images was given. Give at least one.")
        values = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return cls(values, offsets_of([len(part) for part in parts]))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.offsets) - 1

    def __getitem__(self, image: int) -> Tensor:
        """Return the rows of one image, as a view."""
        if not -len(self) <= image < len(self):
            raise IndexError(f"image {image} of a batch of {len(self)}")
        image %= len(self)
        return self.values[int(self.offsets[image]) : int(self.offsets[image + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        """Go through the images in order."""
        return (self[image] for image in range(len(self)))

    @property
    def lengths(self) -> Tensor:
        """Rows of each image, shape (images,)."""
        return self.offsets.diff()


def offsets_of(lengths: Sequence[int]) -> Tensor:
    """Return the running sum of ``lengths``, starting at 0."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def fits(offsets: Tensor, rows: int) -> bool:
    """Whether ``offsets`` part ``rows`` rows: from 0 to ``rows``, never falling."""
    return (
        offsets.ndim == 1
        and len(offsets) >= 1
        and int(offsets[0]) == 0
        and int(offsets[-1]) == rows
        and bool((offsets.diff() >= 0).all())
    )
