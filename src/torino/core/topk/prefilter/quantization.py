"""Quantised: encoder rows as small whole numbers, with how far they lie from the true ones; and where they are kept.

Rows are turned first, by a rotation that spreads every channel over its neighbours: a few channels that are huge, as
CLIP has, would otherwise leave no bits for the rest. A rotation changes no product as long as tokens are turned too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from torino.core.errors import TorinoError
from torino.core.io import cache_dir, read_arrays, write_arrays
from torino.core.topk.prefilter.backends import LANE

FORMAT = "torino-screen/1"
KIN = 16 * LANE  # latents of like size, which are then put in order of bias
BLOCK, LEAST = 128, 64  # channels that are turned together, at most; widths are filled up to a multiple of the least
KEEP_FROM = 1 << 22  # weights from which it takes long enough to be worth a file
WORKSPACE = 1 << 20  # elements that are worked on at once


@dataclass(frozen=True, eq=False)
class Quantised:
    """Encoder rows in whole numbers: row j is ``step · (levels − zero)`` up to ``error``, in turned coordinates.

    Attributes
    ----------
    levels : Tensor of shape (C', D'), uint8
        C' and D' are C and D filled up to multiples of 32 and 64.
    order : Tensor of shape (C',), int64
        The latent of each row; −1 where there is none. Like stands with like: by size, then by bias.
    step : Tensor of shape (C' / 32,), float64
        One a lane, that is 32 rows.
    norm, error : Tensor of shape (C',), float64
        Euclidean norm of the turned row, and of what the whole numbers miss of it; never too small.
    signs : Tensor of shape (D',), float32
        The random half of the rotation.
    zero : Tensor of shape (), int64
        What stands for 0 among the levels: 128 for 8 bits, 64 for 7.
    """

    levels: Tensor
    order: Tensor
    step: Tensor
    norm: Tensor
    error: Tensor
    signs: Tensor
    zero: Tensor

    @property
    def block(self) -> int:
        """Channels that are turned together."""
        return block_of(len(self.signs))

    @property
    def largest_norm(self) -> float:
        """At least the norm of every encoder row as it was before it was turned."""
        return float(self.norm.max()) * self.block**0.5 * (1 + 1e-9)

    def turn(self, x: Tensor) -> Tensor:
        """Fill up and rotate rows: √block times an orthonormal map."""
        return turn(x, self.signs)

    def to(self, device: torch.device) -> Quantised:
        """The same on another device."""
        return Quantised(**{name: value.to(device) for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def block_of(width: int) -> int:
    """Channels that are turned together: the largest power of two that divides the width, up to 128."""
    return min(width & -width, BLOCK)


def turn(x: Tensor, signs: Tensor) -> Tensor:
    """Multiply by signs, then each block of channels by a Hadamard matrix: whole numbers, so exact but for the sums."""
    block = block_of(len(signs))
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    filled = pad(x, (0, len(signs) - x.shape[1])) * signs.to(x.dtype)
    return (filled.reshape(-1, block) @ matrix).view(filled.shape)


@torch.no_grad()
def quantise(weight: Tensor, bias: Tensor, zero: int = 64) -> Quantised:
    """Make whole numbers of encoder rows (C, D); ``bias`` only helps to put them in order."""
    width, device = weight.shape[1], weight.device
    source = torch.Generator().manual_seed(0)
    signs = (torch.randint(2, (width + -width % LEAST,), generator=source, device="cpu") * 2 - 1).float().to(device)
    part = max(LANE, WORKSPACE // len(signs) // LANE * LANE)
    size = torch.cat([turn(rows, signs).abs().amax(1) for rows in weight.split(part)])
    order = _in_order(size, bias)
    rows = len(order)
    levels = torch.full((rows, len(signs)), zero, dtype=torch.uint8, device=device)
    step = torch.zeros(rows // LANE, dtype=torch.float64, device=device)
    norm, error = (torch.zeros(rows, dtype=torch.float64, device=device) for _ in range(2))
    for start in range(0, rows, part):
        here = slice(start, min(start + part, rows))
        latent = order[here]
        # tokens and rows both turned come out block times too large, which the rows make up for
        true = turn(weight[latent.clamp(min=0)].double(), signs) / block_of(len(signs)) * (latent >= 0)[:, None]
        width_of_step = true.view(-1, LANE * len(signs)).abs().amax(1) / (zero - 1)
        width_of_step.masked_fill_(width_of_step == 0, 1.0)  # any would do for zeros
        each = width_of_step.repeat_interleave(LANE)[:, None]
        whole = (true / each).round().clamp_(1 - zero, zero - 1)
        levels[here] = (whole + zero).byte()
        step[start // LANE : (start + len(latent)) // LANE] = width_of_step
        length = true.norm(dim=1)
        norm[here] = length * (1 + 1e-9)
        error[here] = (true - whole * each).norm(dim=1) + 1e-9 * length  # more than float64 can have rounded away
    return Quantised(levels, order, step, norm, error, signs, torch.tensor(zero, device="cpu"))


def _in_order(size: Tensor, bias: Tensor) -> Tensor:
    """Latents by falling size, since strong ones should come early; of like size by bias, for like bounds in a lane."""
    order = size.argsort(descending=True, stable=True)
    kin = torch.arange(len(order), device=order.device) // KIN
    by_bias = bias[order].argsort(stable=True)
    order = order[by_bias[kin[by_bias].argsort(stable=True)]]
    return pad(order, (0, -len(order) % LANE), value=-1)


# ---------------------------------------------------------------------- kept on disk


def quantised_of(weight: Tensor, bias: Tensor, home: Path | None, zero: int) -> Quantised:
    """Read the whole numbers of an encoder from beside it, or make and keep them.

    Parameters
    ----------
    weight, bias : Tensor
        The encoder.
    home : Path, optional
        Folder of the SAE. Where it cannot be written to, torino's folder in the user's cache is taken, and where that
        cannot be either, nothing is kept. A file that is damaged or of other weights is made anew.
    zero : int
        Whether levels have 8 bits or 7, see :mod:`torino.core.topk.prefilter.backends`.
    """
    if home is None or weight.numel() < KEEP_FROM:
        return quantise(weight, bias, zero)
    key = digest({"weight": weight})
    name = f"screen{zero.bit_length()}-{weight.shape[0]}x{weight.shape[1]}-{key[:16]}.safetensors"
    places = [home / f".{name}"]  # hidden, where it must not be taken for an SAE
    with suppress(RuntimeError):  # there may be no home
        places.append(cache_dir() / name)
    for path in places:
        held = _read(path, key, weight, zero)
        if held is not None:
            return held.to(weight.device)
    made = quantise(weight, bias, zero)
    for path in places:
        try:
            sealed = {"format": FORMAT, "weights_sha256": key, "sha256": digest(made.tensors())}
            write_arrays(path, made.tensors(), sealed)
            break
        except (TorinoError, OSError):
            continue
    return made


def forget(home: Path) -> None:
    """Remove what is kept beside an SAE, when another one takes its place."""
    with suppress(OSError):
        for path in home.glob(".screen*.safetensors"):
            path.unlink()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of named tensors, shapes included."""
    seal = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        seal.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        seal.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return seal.hexdigest()


def _read(path: Path, key: str, weight: Tensor, zero: int) -> Quantised | None:
    """What a file holds, if it is whole and of these weights."""
    try:
        if not path.is_file():
            return None
        tensors, header = read_arrays(path)
        if (header.get("format"), header.get("weights_sha256")) != (FORMAT, key):
            return None
        if header.get("sha256") != digest(tensors):
            return None
        held = Quantised(**tensors)
    except (TorinoError, OSError, TypeError, ValueError):
        return None
    rows, width = (size + -size % least for size, least in zip(weight.shape, (LANE, LEAST), strict=True))
    return held if held.levels.shape == (rows, width) and int(held.zero) == zero else None
