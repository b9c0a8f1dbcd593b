"""Draw the reduction of a video: a film strip, the tokens kept per second, and an animation. Needs Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.errors import BadFile, BadParameter
from torino.core.explanation import describe_change
from torino.core.io import write_atomic
from torino.core.reduction import Reduction
from torino.viz.draw import (
    INK,
    MUTED,
    PAPER,
    SHADE,
    Image,
    ImageDraw,
    ImageFont,
    enlarge,
    paint_groups,
    scale_to_grid,
    token_color,
)
from torino.viz.figures import LINE, concept_sizes, draw_text

STRIP_FRAMES = 8
CURVE = (38, 96, 164)
CURVE_FILL = (203, 220, 240)
MARGIN, GAP, PLOT = 30, 6, 120


def pick_frames(images: Sequence[Image.Image], frames: int) -> list[Image.Image]:
    """Return one image for each frame of a reduction; a tower may merge several frames of the video into one."""
    if not 1 <= frames <= len(images):
        raise BadParameter(f"A reduction of {frames} frames needs as many images, got {len(images)}.")
    step = -(-len(images) // frames)
    return list(images[::step])


def tokens_per_second(plan: Reduction) -> NDArray[np.float64]:
    """Return how many tokens begin in each frame of a reduction, divided by the seconds until the next frame.

    A token begins in the first frame of the patches that it represents, or else in that of its anchor. Without times,
    frames are one second apart.

    Examples
    --------
    >>> still = Reduction.of([{0: 0.5, 1: 0.5}], (1, 1), frames=2, times=(0.0, 0.5))
    >>> tokens_per_second(Reduction.identity((1, 3), frames=2, times=(0.0, 0.5))), tokens_per_second(still)
    (array([6., 6.]), array([2., 0.]))
    """
    counts = first_frames(plan).bincount(minlength=plan.frames).double().numpy()
    times = frame_times(plan)
    gaps = np.diff(times)
    lengths = np.append(gaps, gaps[-1]) if len(gaps) else np.ones(1)
    return counts / np.maximum(lengths, 1e-9)


def first_frames(plan: Reduction) -> Tensor:
    """Return the first frame of the patches that each token represents, or that of its anchor; 0 without either."""
    size = plan.grid[0] * plan.grid[1]
    first = torch.full((len(plan),), plan.frames)
    shown = (plan.assigned >= 0).nonzero()[:, 0]
    first = first.scatter_reduce(0, plan.assigned[shown], shown // size, "amin")
    return torch.where(first < plan.frames, first, plan.locate(plan.anchor)[:, 0].clamp(min=0))


def frame_times(plan: Reduction) -> NDArray[np.float64]:
    """Return the time of each frame in seconds; frames without times are one second apart."""
    return np.arange(plan.frames, dtype=np.float64) if plan.times is None else np.array(plan.times)


def draw_frame(
    plan: Reduction,
    frame: int,
    photo: Image.Image | None = None,
    *,
    side: int = 168,
    colors: Mapping[int, tuple[int, int, int]] | None = None,
) -> Image.Image:
    """Draw the groups of one frame; a group has the same color in all frames.

    Patches of a token of their own keep the colors of the photo, and dropped patches are dark.

    Parameters
    ----------
    plan : Reduction
        Of the whole video.
    frame : int
    photo, side
        As for :func:`torino.viz.draw.draw_reduction`.
    colors : mapping of latent to color, optional
        Colors of concepts, see :func:`film_colors`. Groups of other concepts have a color for each token.
    """
    rows, columns = plan.grid
    cell = max(2, side // max(rows, columns))
    size = rows * columns
    token = plan.assigned[frame * size : (frame + 1) * size].numpy().reshape(rows, columns)
    sizes = plan.assigned[plan.assigned >= 0].bincount(minlength=max(len(plan), 1)).numpy()
    concepts = plan.concept.tolist() or [-1]
    tints = [(colors or {}).get(concept, token_color(number)) for number, concept in enumerate(concepts)]
    return paint_groups(scale_to_grid(photo, plan.grid, cell), enlarge(token, cell), sizes, tints)


def film_colors(plan: Reduction) -> dict[int, tuple[int, int, int]]:
    """Return a color for each concept that groups of several patches share, the largest first."""
    return {concept: token_color(number) for number, concept in enumerate(concept_sizes([plan]))}


def draw_film(
    images: Sequence[Image.Image],
    plan: Reduction,
    *,
    title: str = "",
    side: int = 168,
    strip: int = STRIP_FRAMES,
) -> Image.Image:
    """Draw a film strip: frames, their groups below, and the tokens kept per second.

    Parameters
    ----------
    images : sequence of PIL images
        The frames as the tower sees them.
    plan : Reduction
    title : str
    side : int
        Length of the longer side of a frame in pixels.
    strip : int
        Largest number of frames in the strip, evenly spaced; the curve shows all.
    """
    photos, colors, times = pick_frames(images, plan.frames), film_colors(plan), frame_times(plan)
    shown = np.unique(np.linspace(0, plan.frames - 1, min(strip, plan.frames)).round().astype(int)).tolist()
    cell = max(2, side // max(plan.grid))
    width, height = plan.grid[1] * cell, plan.grid[0] * cell
    head, label = 58 if title else 14, 26
    across = len(shown) * width + (len(shown) - 1) * GAP
    inner = max(across, 560)
    page = Image.new("RGB", (2 * MARGIN + inner, head + 2 * height + GAP + label + 44 + PLOT + 50), PAPER)
    pen, huge, small = ImageDraw.Draw(page), ImageFont.load_default(24), ImageFont.load_default(15)
    draw_text(pen, (MARGIN, 20), title, INK, huge, inner)
    for number, frame in enumerate(shown):
        left = MARGIN + number * (width + GAP)
        photo = Image.fromarray(scale_to_grid(photos[frame], plan.grid, cell).astype(np.uint8))
        page.paste(photo, (left, head))
        page.paste(draw_frame(plan, frame, photos[frame], side=side, colors=colors), (left, head + height + GAP))
        text = f"{times[frame]:.1f} s" if plan.times is not None else f"frame {frame}"
        draw_text(pen, (left, head + 2 * height + GAP + 6), text, MUTED, small, width)
    top = head + 2 * height + GAP + label + 8
    draw_text(pen, (MARGIN, top), _summary(plan), INK, small, inner)
    draw_curve(page, (MARGIN, top + 30, inner, PLOT), plan)
    return page


def _summary(plan: Reduction) -> str:
    unit = "frames" if plan.frames > 1 else "frame"
    return (
        f"{plan.patches} patches in {plan.frames} {unit}: {len(plan)} tokens "
        f"({describe_change(plan.patches, len(plan))}). New tokens per second:"
    )


def draw_curve(page: Image.Image, box: tuple[int, int, int, int], plan: Reduction, cursor: int | None = None) -> None:
    """Draw the tokens kept per second into a box: left, top, width, height; ``cursor`` marks a frame."""
    left, top, width, height = box
    rates, times = tokens_per_second(plan), frame_times(plan)
    gaps = np.diff(times)
    ends = np.append(times[1:], times[-1] + (gaps[-1] if len(gaps) else 1.0))
    pen, small = ImageDraw.Draw(page), ImageFont.load_default(13)
    axis = 46
    span, highest = ends[-1] - times[0], max(float(rates.max()), 1e-9)

    def place(time: float) -> float:
        return left + axis + (width - axis) * (time - times[0]) / span

    bottom = top + height
    pen.rectangle((left + axis, top, left + width, bottom), SHADE)
    for begin, end, rate in zip(times, ends, rates, strict=True):
        level = bottom - (height - 6) * float(rate) / highest
        pen.rectangle((place(begin), level, place(end), bottom), CURVE_FILL)
        pen.line((place(begin), level, place(end), level), CURVE, 3)
    pen.line((left + axis, bottom, left + width, bottom), LINE)
    for value in (0.0, highest):
        y = bottom - (height - 6) * value / highest
        pen.text((left + axis - 6, y), f"{value:.0f}", MUTED, small, anchor="rm")
    unit = "s" if plan.times is not None else ""
    for time, anchor in ((times[0], "la"), (ends[-1], "ra")):
        pen.text((place(time), bottom + 5), f"{time:.1f} {unit}".strip(), MUTED, small, anchor=anchor)
    if cursor is not None:
        x = place((times[cursor] + ends[cursor]) / 2)
        pen.line((x, top, x, bottom), INK, 2)


def draw_animation(
    images: Sequence[Image.Image], plan: Reduction, *, title: str = "", side: int = 280
) -> list[Image.Image]:
    """Draw one picture for each frame: the frame, its groups beside it, and the curve with a cursor below."""
    photos, colors = pick_frames(images, plan.frames), film_colors(plan)
    cell = max(2, side // max(plan.grid))
    width, height = plan.grid[1] * cell, plan.grid[0] * cell
    head, plot = 44, 80
    begun = first_frames(plan).bincount(minlength=plan.frames).cumsum(0)
    pages: list[Image.Image] = []
    for frame, photo in enumerate(photos):
        page = Image.new("RGB", (2 * MARGIN + 2 * width + 12, head + height + 34 + plot + 30), PAPER)
        pen, large, small = ImageDraw.Draw(page), ImageFont.load_default(18), ImageFont.load_default(14)
        draw_text(pen, (MARGIN, 14), title, INK, large, page.width - 2 * MARGIN)
        page.paste(Image.fromarray(scale_to_grid(photo, plan.grid, cell).astype(np.uint8)), (MARGIN, head))
        page.paste(draw_frame(plan, frame, photo, side=side, colors=colors), (MARGIN + width + 12, head))
        done = f"{int(begun[frame])} tokens for {(frame + 1) * plan.grid[0] * plan.grid[1]} patches so far"
        draw_text(pen, (MARGIN, head + height + 8), done, MUTED, small, page.width - 2 * MARGIN)
        draw_curve(page, (MARGIN, head + height + 32, page.width - 2 * MARGIN, plot), plan, frame)
        pages.append(page)
    return pages


def save_animation(pages: Sequence[Image.Image], path: str | Path, seconds: Sequence[float]) -> Path:
    """Write pictures as an animated GIF or WebP, each shown for some seconds, atomically."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".gif", ".webp"):
        raise BadFile(f"Cannot write the animation {path}: its suffix must be .gif or .webp.")
    options: dict[str, Any] = {"save_all": True, "loop": 0, "duration": [max(20, round(1000 * s)) for s in seconds]}
    options |= {"quality": 80, "method": 4} if suffix == ".webp" else {"optimize": True}
    first, *others = pages
    return write_atomic(path, lambda target: first.save(target, suffix[1:].upper(), append_images=others, **options))
