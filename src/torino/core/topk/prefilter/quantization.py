"""Quantization of encoder rows to integers, with error bounds, and the files that cache the result.

Rows are rotated first, so that every channel is spread over its block. Otherwise a few channels of huge values, as in
CLIP, would leave few bits for the rest. A rotation of rows and tokens does not change their inner products.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from torino.core.errors import TorinoError
from torino.core.io import cache_dir, hash_tensors, read_arrays, write_arrays
from torino.core.topk.prefilter.backends import LANE

FORMAT = "torino-prefilter/1"
SORT_GROUP = 16 * LANE  # latents of similar size that are sorted by bias
MAX_BLOCK = 128  # largest number of channels that are rotated together
WIDTH_MULTIPLE = 64  # widths are padded to a multiple of this
CACHE_MIN_WEIGHTS = 1 << 22  # number of weights from which a cache file is worth while
WORKSPACE = 1 << 20  # elements that are processed at once


@dataclass(frozen=True, eq=False)
class QuantizedEncoder:
    """Quantized encoder rows: rotated row j equals ``scale · (levels − zero_point)`` up to ``error``.

    Attributes
    ----------
    levels : Tensor of shape (C', D'), uint8
        C' and D' are C and D padded to multiples of 32 and 64.
    order : Tensor of shape (C',), int64
        The latent of each row; −1 for padding. Rows are sorted by size, then by bias.
    scale : Tensor of shape (C' / 32,), float64
        One scale per lane of 32 rows.
    norm, error : Tensor of shape (C',), float64
        Upper bounds of the Euclidean norm of the rotated row and of its quantization error.
    signs : Tensor of shape (D',), float32
        Random signs of the rotation.
    zero_point : Tensor of shape (), int64
        The level that represents 0: 128 for 8 bits, 64 for 7 bits.
    """

    levels: Tensor
    order: Tensor
    scale: Tensor
    norm: Tensor
    error: Tensor
    signs: Tensor
    zero_point: Tensor

    @property
    def block(self) -> int:
        """Number of channels that are rotated together."""
        return rotation_block(len(self.signs))

    @property
    def largest_norm(self) -> float:
        """Upper bound of the norms of the encoder rows before rotation."""
        return float(self.norm.max()) * self.block**0.5 * (1 + 1e-9)

    def rotate(self, x: Tensor) -> Tensor:
        """Pad and rotate rows; see :func:`rotate`."""
        return rotate(x, self.signs)

    def to(self, device: torch.device) -> QuantizedEncoder:
        """Return a copy on another device."""
        return QuantizedEncoder(**{name: value.to(device) for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def rotation_block(width: int) -> int:
    """Return the number of channels rotated together: the largest power of two that divides the width, up to 128."""
    return min(width & -width, MAX_BLOCK)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Pad rows, multiply them by signs, then multiply each block of channels by a Hadamard matrix.

    The result is √block times an orthonormal map. The factors are ±1, so only the sums are rounded.
    """
    block = rotation_block(len(signs))
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    padded = pad(x, (0, len(signs) - x.shape[1])) * signs.to(x.dtype)
    return (padded.reshape(-1, block) @ matrix).view(padded.shape)


@torch.no_grad()
def quantize(weight: Tensor, bias: Tensor, zero_point: int = 64) -> QuantizedEncoder:
    """Quantize encoder rows (C, D); ``bias`` is used only to sort them."""
    width, device = weight.shape[1], weight.device
    generator = torch.Generator().manual_seed(0)
    padded_width = width + -width % WIDTH_MULTIPLE
    signs = (torch.randint(2, (padded_width,), generator=generator, device="cpu") * 2 - 1).float().to(device)
    part = max(LANE, WORKSPACE // len(signs) // LANE * LANE)
    size = torch.cat([rotate(rows, signs).abs().amax(1) for rows in weight.split(part)])
    order = _sort_latents(size, bias)
    rows = len(order)
    levels = torch.full((rows, len(signs)), zero_point, dtype=torch.uint8, device=device)
    scale = torch.zeros(rows // LANE, dtype=torch.float64, device=device)
    norm, error = (torch.zeros(rows, dtype=torch.float64, device=device) for _ in range(2))
    for start in range(0, rows, part):
        here = slice(start, min(start + part, rows))
        latent = order[here]
        # rotating tokens and rows multiplies their products by the block size, so the rows are divided by it
        exact = rotate(weight[latent.clamp(min=0)].double(), signs) / rotation_block(len(signs))
        exact *= (latent >= 0)[:, None]
        lane_scale = exact.view(-1, LANE * len(signs)).abs().amax(1) / (zero_point - 1)
        lane_scale.masked_fill_(lane_scale == 0, 1.0)  # a lane of zeros can have any scale
        row_scale = lane_scale.repeat_interleave(LANE)[:, None]
        rounded = (exact / row_scale).round().clamp_(1 - zero_point, zero_point - 1)
        levels[here] = (rounded + zero_point).byte()
        scale[start // LANE : (start + len(latent)) // LANE] = lane_scale
        length = exact.norm(dim=1)
        norm[here] = length * (1 + 1e-9)
        error[here] = (exact - rounded * row_scale).norm(dim=1) + 1e-9 * length  # exceeds the rounding of float64
    return QuantizedEncoder(levels, order, scale, norm, error, signs, torch.tensor(zero_point, device="cpu"))


def _sort_latents(size: Tensor, bias: Tensor) -> Tensor:
    """Sort latents by decreasing size, so that large scores come early, then by bias, for similar bounds in a lane."""
    order = size.argsort(descending=True, stable=True)
    group = torch.arange(len(order), device=order.device) // SORT_GROUP
    by_bias = bias[order].argsort(stable=True)
    order = order[by_bias[group[by_bias].argsort(stable=True)]]
    return pad(order, (0, -len(order) % LANE), value=-1)


# ---------------------------------------------------------------------- cache files


def load_or_quantize(weight: Tensor, bias: Tensor, folder: Path | None, zero_point: int) -> QuantizedEncoder:
    """Read the quantized encoder from its cache file, or quantize it and write the file.

    Parameters
    ----------
    weight, bias : Tensor
        The encoder.
    folder : Path, optional
        Folder of the SAE, which may contain a file of an earlier version; nothing is written there. The file is in
        torino's folder in the user's cache; if that is not writable, no file is written. A file that is damaged or
        belongs to other weights is replaced. None means that no file is read or written.
    zero_point : int
        128 for levels of 8 bits, 64 for 7 bits; see :mod:`torino.core.topk.prefilter.backends`.
    """
    if folder is None or weight.numel() < CACHE_MIN_WEIGHTS:
        return quantize(weight, bias, zero_point)
    weights_sha256 = hash_tensors({"weight": weight})
    size = f"{weight.shape[0]}x{weight.shape[1]}"
    name = f"prefilter{zero_point.bit_length()}-{size}-{weights_sha256[:16]}.safetensors"
    file: Path | None = None
    with suppress(TorinoError):  # the user may have no home folder, or TORINO_CACHE is unusable
        file = cache_dir() / name
    for path in [folder / f".{name}", *([] if file is None else [file])]:
        cached = _read_cached(path, weights_sha256, weight, zero_point)
        if cached is not None:
            return cached.to(weight.device)
    quantized = quantize(weight, bias, zero_point)
    metadata = {"format": FORMAT, "weights_sha256": weights_sha256, "sha256": hash_tensors(quantized.tensors())}
    if file is not None:
        with suppress(TorinoError, OSError):
            write_arrays(file, quantized.tensors(), metadata)
    return quantized


def delete_cached(folder: Path) -> None:
    """Delete the cache files in the folder of an SAE, after another SAE was written there."""
    with suppress(OSError):
        for path in folder.glob(".prefilter*.safetensors"):
            path.unlink()


def _read_cached(path: Path, weights_sha256: str, weight: Tensor, zero_point: int) -> QuantizedEncoder | None:
    """Return the content of a cache file, or None if it is missing, damaged or of other weights."""
    try:
        if not path.is_file():
            return None
        tensors, metadata = read_arrays(path)
        if (metadata.get("format"), metadata.get("weights_sha256")) != (FORMAT, weights_sha256):
            return None
        if metadata.get("sha256") != hash_tensors(tensors):
            return None
        quantized = QuantizedEncoder(**tensors)
    except (TorinoError, OSError, TypeError, ValueError):
        return None
    multiples = (LANE, WIDTH_MULTIPLE)
    shape = tuple(size + -size % multiple for size, multiple in zip(weight.shape, multiples, strict=True))
    matches = tuple(quantized.levels.shape) == shape and int(quantized.zero_point) == zero_point
    return quantized if matches else None
