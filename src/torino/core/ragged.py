"""Ragged batches: the rows of several images concatenated, with offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.checks import check_tensor, to_index, to_list
from torino.core.errors import BadTokens


@dataclass(frozen=True, eq=False)
class Ragged:
    """A batch without padding: image i owns rows ``offsets[i]:offsets[i+1]`` of ``values``.

    Attributes
    ----------
    values : Tensor of shape (total, ...)
        The rows of all images, concatenated.
    offsets : Tensor of shape (images + 1,), int64, on the CPU
        First row of each image, followed by ``total``. Variable-length attention kernels call this
        ``cu_seqlens``.

    Examples
    --------
    >>> batch = Ragged.of([torch.zeros(2, 4), torch.ones(3, 4)])
    >>> batch.offsets, batch[1].shape
    (tensor([0, 2, 5]), torch.Size([3, 4]))
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        """Raise an error unless the offsets cover the rows exactly once."""
        if check_tensor("values", self.values).ndim < 1:
            raise BadTokens("values must have at least one dimension, got a single number.")
        check_tensor("offsets", self.offsets)
        if not are_valid_offsets(self.offsets, len(self.values)):
            raise BadTokens(
                f"offsets must be non-decreasing from 0 to the number of rows ({len(self.values)}), "
                f"got {self.offsets.tolist()}."
            )

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Ragged:
        """Concatenate one tensor per image."""
        parts = to_list("A batch", parts, Tensor, "tensors, one for each image")
        if not parts:
            raise BadTokens("The list of images is empty. Give at least one image.")
        if len({part.shape[1:] for part in parts}) > 1 or not all(part.ndim for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts[:4])
            raise BadTokens(f"All tensors of a batch must have the same shape after the first dimension, got {shapes}.")
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return cls(values, offsets_from_lengths([len(part) for part in parts]))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.offsets) - 1

    def __getitem__(self, image: int) -> Tensor:
        """Return the rows of one image, as a view."""
        image = to_index("image", image, len(self))
        return self.values[int(self.offsets[image]) : int(self.offsets[image + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the images in order."""
        return (self[image] for image in range(len(self)))

    @property
    def lengths(self) -> Tensor:
        """Number of rows of each image, shape (images,)."""
        return self.offsets.diff()


def offsets_from_lengths(lengths: Sequence[int]) -> Tensor:
    """Return the cumulative sum of ``lengths``, starting at 0."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def are_valid_offsets(offsets: Tensor, rows: int) -> bool:
    """Return whether ``offsets`` start at 0, end at ``rows`` and never decrease."""
    return (
        offsets.ndim == 1
        and len(offsets) >= 1
        and int(offsets[0]) == 0
        and int(offsets[-1]) == rows
        and bool((offsets.diff() >= 0).all())
    )
