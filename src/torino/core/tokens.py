"""Visual tokens: the patch tokens of an image or video after the vision encoder, and token files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.checks import (
    check_fields,
    check_real,
    check_tensor,
    check_type,
    to_grid,
    to_integer,
    to_list,
)
from torino.core.errors import BadFile, BadTokens, MissingSignal, TorinoError
from torino.core.frames import Layout, locate, pack_layouts, to_frames, to_times, unpack_frames
from torino.core.io import read_arrays, write_arrays
from torino.core.ragged import Ragged

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Origin:
    """Encoder and block that tokens come from; used to detect an SAE trained on other tokens.

    Attributes
    ----------
    encoder : str
        Name of the vision encoder, such as ``openai/clip-vit-large-patch14-336``; empty when unknown.
    block : int or None
        Zero-based block that outputs the tokens. LLaVA-1.5 reads block 22 of 24 (``hidden_states[-2]``).
    """

    encoder: str = ""
    block: int | None = None

    def __post_init__(self) -> None:
        """Check the types."""
        check_type("encoder", self.encoder, str, "the name of the vision encoder")
        if self.block is not None:
            object.__setattr__(self, "block", to_integer("block", self.block))

    def __str__(self) -> str:
        """Return the names of encoder and block."""
        return f"{self.encoder or 'an unnamed encoder'}, block {'unknown' if self.block is None else self.block}"


@dataclass(frozen=True, eq=False)
class VisualTokens:
    """The patch tokens of one image or video at the feature layer, with optional signals for reducers.

    Attributes
    ----------
    patches : Tensor of shape (N, D), floating point
        Patch tokens in raster order, frame by frame; all finite.
    grid : (int, int)
        Rows and columns of the patch grid of a frame, N = frames × rows × columns.
    origin : Origin
        Encoder and block of the patches.
    cls : Tensor of shape (D,), optional
        The CLS token at the same layer.
    cls_attention : Tensor of shape (H, N), optional
        Attention of the CLS token to each patch, one row per head.
    keys : Tensor of shape (N, Dk), optional
        Attention keys of each patch.
    signals : mapping of str to Tensor
        Signals of other blocks or kinds by name, such as ``"keys@+1"``: the keys of the block after
        the feature layer.
    question_words : tuple of str
        Words of the question, one for each row of the signal ``"words"``; empty without a question.
    frames : int
        Number of frames of a video; 1 for an image.
    times : tuple of float, optional
        Time of each frame in seconds.

    Examples
    --------
    >>> VisualTokens(torch.zeros(6, 4), grid=(2, 3))
    VisualTokens(6 patches of width 4 on a 2x3 grid, from an unnamed encoder, block unknown)
    >>> VisualTokens(torch.zeros(12, 4), grid=(2, 3), frames=2, times=(0.0, 0.5))
    VisualTokens(12 patches of width 4 on 2 frames of a 2x3 grid, from an unnamed encoder, block unknown)
    """

    patches: Tensor
    grid: tuple[int, int]
    origin: Origin = field(default_factory=Origin)
    cls: Tensor | None = None
    cls_attention: Tensor | None = None
    keys: Tensor | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    question_words: tuple[str, ...] = ()
    frames: int = 1
    times: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check shapes, types and values."""
        check_matrix(self.patches, "patches")
        rows, columns = to_grid(self.grid)
        object.__setattr__(self, "grid", (rows, columns))
        object.__setattr__(self, "frames", to_frames(self.frames))
        object.__setattr__(self, "times", to_times(self.times, self.frames))
        check_type("origin", self.origin, Origin, "an Origin(encoder, block)")
        count, width = self.patches.shape
        if self.frames > 1 and (rows < 1 or columns < 1 or self.frames * rows * columns != count):
            raise BadTokens(
                f"{self.frames} frames of a {rows}x{columns} grid have {self.frames * max(rows, 0) * max(columns, 0)} "
                f"patches, but {count} were given. frames times rows times columns must equal the number of patches."
            )
        if rows < 1 or columns < 1 or self.frames * rows * columns != count:
            raise BadTokens(
                f"grid {rows}x{columns} has {max(rows, 0) * max(columns, 0)} patches, but {count} were given. "
                "rows times columns must equal the number of patches. Pass the CLS token as cls=, not in patches."
            )
        for name, shape in (("cls", (width,)), ("cls_attention", (None, count)), ("keys", (count, None))):
            signal: Tensor | None = getattr(self, name)
            if signal is None:
                continue
            expected = " x ".join("any" if size is None else str(size) for size in shape)
            check_real(name, check_tensor(name, signal), NUMBERS)
            if not _has_shape(signal, shape):
                raise BadTokens(f"{name} must have shape ({expected}), got {tuple(signal.shape)}.")
            if not bool(torch.isfinite(signal).all()):
                raise BadTokens(f"{name} contains NaN or infinite values. Run the encoder in float32 or bfloat16.")
        check_type("signals", self.signals, Mapping, "a mapping of names to tensors")
        for name, signal in self.signals.items():
            check_tensor(f"signals[{name!r}]", signal)
        check_type("question_words", self.question_words, tuple, "a tuple of str")

    @classmethod
    def of(cls, /, patches: Tensor, grid: tuple[int, int] | None = None, **others: Any) -> VisualTokens:
        """Create tokens from patches; the grid of a frame is square unless ``grid`` is given."""
        if grid is None:
            check_matrix(patches, "patches")
            frames = to_frames(others.get("frames", 1))
            side = isqrt(len(patches) // frames)
            if frames * side * side != len(patches):
                shape = "a square grid" if frames == 1 else f"{frames} frames of a square grid"
                raise BadTokens(
                    f"{len(patches)} patches do not form {shape}. Give grid=(rows, columns). "
                    "If the first token is the CLS token, pass it as cls= instead."
                )
            grid = (side, side)
        check_fields("VisualTokens", others, [item.name for item in fields(cls)])
        return cls(patches, grid, **others)

    def __len__(self) -> int:
        """Return the number of patches, N."""
        return len(self.patches)

    @property
    def width(self) -> int:
        """Width D of a token."""
        return self.patches.shape[1]

    @property
    def layout(self) -> Layout:
        """Grid, number of frames and times, as keyword arguments of :class:`~torino.core.reduction.Reduction`."""
        return {"grid": self.grid, "frames": self.frames, "times": self.times}

    @property
    def places(self) -> Tensor:
        """Frame, row and column of every patch, shape (N, 3)."""
        return locate(torch.arange(len(self)), self.grid, self.frames)

    def __repr__(self) -> str:
        """Return the number of patches, frames and grid, and the origin."""
        grid = f"{self.grid[0]}x{self.grid[1]} grid"
        where = f"a {grid}" if self.frames == 1 else f"{self.frames} frames of a {grid}"
        return f"VisualTokens({len(self)} patches of width {self.width} on {where}, from {self.origin})"

    def with_(self, **changes: Any) -> VisualTokens:
        """Return a copy with some fields replaced."""
        check_fields("VisualTokens", changes, [item.name for item in fields(self)])
        return replace(self, **changes)

    def signal(self, name: str, wanted_by: str) -> Tensor:
        """Return a signal by name; raise :class:`MissingSignal` with the name of the method ``wanted_by``."""
        check_type("name", name, str, "the name of a signal")
        known = name in ("patches", "cls", "cls_attention", "keys")
        value: Tensor | None = self.signals.get(name, getattr(self, name) if known else None)
        if value is None:
            argument = f"{name}=..." if name in ("cls", "cls_attention", "keys") else f"signals={{{name!r}: ...}}"
            raise MissingSignal(
                f"{wanted_by} needs the signal {name}, which these tokens do not have. "
                f"Give VisualTokens(..., {argument}), or choose a reducer that does not need it."
            )
        return value


def stack_frames(images: Sequence[VisualTokens], times: Sequence[float] | None = None) -> VisualTokens:
    """Join the tokens of the frames of a video, which must have the same grid, width and origin.

    Attention of the CLS token and keys are joined if all frames have them. CLS tokens and other signals, which belong
    to one frame, are left out. The times of the frames are kept unless ``times`` are given.

    Examples
    --------
    >>> stack_frames([VisualTokens.of(torch.zeros(4, 2))] * 3, times=[0, 1, 2])
    VisualTokens(12 patches of width 2 on 3 frames of a 2x2 grid, from an unnamed encoder, block unknown)
    """
    images = check_images(images, "stack_frames")
    first, frames = images[0], sum(image.frames for image in images)
    for number, image in enumerate(images):
        if (image.grid, image.origin) != (first.grid, first.origin):
            raise BadTokens(
                f"All frames of a video must have the same grid and origin, but entry 0 is {first} and entry {number} "
                f"is {image}. Encode all frames at the same size."
            )
    seconds = [image.times for image in images]
    if times is None and all(values is not None for values in seconds):
        times = [value for values in seconds for value in values or ()]
    return VisualTokens(
        ragged_patches(images).values,
        first.grid,
        first.origin,
        frames=frames,
        times=to_times(times, frames),
        cls_attention=_join([image.cls_attention for image in images], 1),
        keys=_join([image.keys for image in images], 0),
    )


def _join(parts: list[Tensor | None], axis: int) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given, axis) if len(given) == len(parts) else None


def split_frames(video: VisualTokens) -> list[VisualTokens]:
    """Return each frame of a video as an image, the inverse of :func:`stack_frames`; the other signals are left out."""
    check_type("video", video, VisualTokens, "the VisualTokens of a video")
    if video.frames == 1:
        return [video]
    size, times = video.grid[0] * video.grid[1], video.times
    keys = (None,) * video.frames if video.keys is None else video.keys.split(size)
    attention = (None,) * video.frames if video.cls_attention is None else video.cls_attention.split(size, 1)
    return [
        VisualTokens(
            patches,
            video.grid,
            video.origin,
            cls_attention=attention[frame],
            keys=keys[frame],
            times=None if times is None else (times[frame],),
        )
        for frame, patches in enumerate(video.patches.split(size))
    ]


def check_images(images: Sequence[VisualTokens], name: str = "plan_batch") -> list[VisualTokens]:
    """Return the images as a list; raise :class:`BadTokens` unless it is a list of at least one VisualTokens."""
    found: list[VisualTokens] = to_list(name, images, VisualTokens, "VisualTokens, one for each image")
    if not found:
        raise BadTokens("The list of images is empty. Give at least one image.")
    return found


def ragged_patches(images: Sequence[VisualTokens]) -> Ragged:
    """Concatenate the patches of several images; a single image is not copied."""
    images = check_images(images, "A batch")
    widths = {image.width for image in images}
    if len(widths) > 1:
        raise BadTokens(f"All images of a batch must have tokens of the same width, got widths {sorted(widths)}.")
    devices = {str(image.patches.device) for image in images}
    if len(devices) > 1:
        raise BadTokens(f"All images of a batch must be on the same device, got {', '.join(sorted(devices))}.")
    return Ragged.of([image.patches for image in images])


def save_tokens(images: Sequence[VisualTokens], path: str | Path) -> Path:
    """Write the patches of several images to ``.npz`` or ``.safetensors``, for ``torino reduce``.

    The file contains ``patches`` (of all images, concatenated), ``grids`` (images, 2), and the origin as metadata. If
    there are videos, it also contains ``frames`` (images,) and ``times`` (total number of frames,), NaN if unknown.
    """
    images = check_images(images, "save_tokens")
    packed = ragged_patches(images)
    origins = {image.origin for image in images}
    if len(origins) > 1:
        raise BadTokens(
            f"All tokens of a file must have the same origin, got {len(origins)}: {', '.join(map(str, origins))}."
        )
    origin = origins.pop()
    metadata = {"encoder": origin.encoder} if origin.encoder else {}
    metadata |= {} if origin.block is None else {"block": str(origin.block)}
    layouts = pack_layouts([image.layout for image in images])
    return write_arrays(path, {"patches": packed.values, **layouts}, metadata)


def load_tokens(path: str | Path) -> list[VisualTokens]:
    """Read the images of a token file.

    Accepted layouts of ``patches``: (N, D) for one image; (images, N, D); or (total, D) with ``grids`` of shape
    (images, 2), which define how the rows are split. Without ``grids`` each image must be a square grid. ``frames``
    of shape (images,) makes the entries videos, with patches ordered frame by frame, and ``times`` of shape (total
    number of frames,) are the seconds of their frames. ``encoder`` and ``block`` are read from the metadata if present.
    """
    arrays, texts = read_arrays(path)
    if "patches" not in arrays:
        raise BadFile(
            f"{path} has no array called 'patches'; it has {', '.join(sorted(arrays)) or 'none'}. "
            "Give it shape (N, D), (images, N, D), or (total, D) together with 'grids'."
        )
    patches, grids = arrays["patches"], _read_grids(arrays.get("grids", arrays.get("grid")), path)
    block = texts.get(
        "block", str(arrays["block"].item()) if "block" in arrays and arrays["block"].numel() == 1 else ""
    )
    origin = Origin(texts.get("encoder", ""), int(block) if re.fullmatch(r"-?[0-9]{1,9}", block) else None)
    count = len(patches) if patches.ndim == 3 else len(grids or [0])
    try:
        frames, times = unpack_frames(arrays, count)
    except ValueError as error:
        raise BadTokens(f"{path} cannot be read as videos: {error}. Write it with save_tokens.") from error
    if patches.ndim == 3:
        parts = list(patches)
    elif grids is not None and len(grids) > 1:
        sizes = [frames[number] * rows * columns for number, (rows, columns) in enumerate(grids)]
        if patches.ndim != 2 or min(sizes) < 1 or sum(sizes) != len(patches):
            raise BadTokens(
                f"The grids in {path} have {sum(sizes)} patches, but patches has shape {tuple(patches.shape)}."
            )
        parts = list(patches.split(sizes))
    else:
        parts = [patches]
    if grids is not None and len(grids) != len(parts):
        raise BadTokens(f"{path} contains {len(parts)} images but {len(grids)} grids. Give one grid per image.")
    return [
        VisualTokens.of(part, grids[i] if grids else None, origin=origin, frames=frames[i], times=times[i])
        for i, part in enumerate(parts)
    ]


def check_matrix(
    values: Tensor,
    name: str,
    *,
    shape: str = "(N, D)",
    wrong_shape: str = "Give one image at a time.",
    not_finite: str = "The encoder may have overflowed in half precision: run it in float32 or bfloat16.",
    error: type[TorinoError] = BadTokens,
) -> None:
    """Raise an error unless ``values`` is a non-empty, finite, floating-point matrix.

    ``wrong_shape`` and ``not_finite`` are the advice in the messages, by default for the tokens of an image.
    """
    check_tensor(name, values, error)
    if values.ndim != 2:
        raise error(f"{name} must have shape {shape}, got {tuple(values.shape)}. {wrong_shape}".rstrip())
    if 0 in values.shape:
        raise error(f"{name} is empty: its shape is {tuple(values.shape)}. Give at least one row and one column.")
    check_real(name, values, FLOATS, error)
    if bool(values.float().sum().isfinite()):  # then all values are, and this is much faster than checking each
        return
    finite = torch.isfinite(values.float() if values.dtype == torch.float64 else values)  # computations use float32
    if not bool(finite.all()):
        bad = int((~finite).any(dim=1).nonzero()[0])
        raise error(f"{name} contains NaN or infinite values, first in row {bad}. {not_finite}")


def _read_grids(grids: Tensor | None, path: str | Path) -> list[tuple[int, int]] | None:
    if grids is None:
        return None
    if grids.ndim == 1:
        grids = grids[None]
    if grids.ndim != 2 or grids.shape[1] != 2 or grids.is_floating_point():
        raise BadTokens(
            f"'grids' in {path} must be integers of shape (images, 2), got {grids.dtype} of shape {tuple(grids.shape)}."
        )
    return [(int(rows), int(columns)) for rows, columns in grids.tolist()]


def _has_shape(value: Tensor, shape: tuple[int | None, ...]) -> bool:
    return value.ndim == len(shape) and all(
        size in (None, actual) for size, actual in zip(shape, value.shape, strict=True)
    )
