"""``torino look`` on a video: reduce its frames together and draw a film strip or an animation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from torino.cli._common import PaddingChoice, out
from torino.core.errors import BadParameter

if TYPE_CHECKING:
    from torino.core.reduction import Reduction
    from torino.datasets.video import Video
    from torino.reducers import Reducer
    from torino.vlm.towers import Tower

ANIMATED = (".gif", ".webp")


def draw_video(
    video: Video, tower: Tower, reducer: Reducer, label: str, output: Path, padding: PaddingChoice, as_json: bool
) -> None:
    """Reduce the frames of a video together, print the counts and write the picture."""
    from torino.viz.draw import save_picture
    from torino.viz.film import draw_animation, draw_film, frame_times, save_animation, tokens_per_second

    plan = reduce_frames(video, tower, reducer, padding)
    images = processed_frames(video, tower, padding)
    title = f"{Path(video.name).stem} · {tower.origin} · {label}"
    if output.suffix.lower() in ANIMATED:
        times = frame_times(plan)
        seconds = [float(after - before) for before, after in pairwise(times)]
        save_animation(draw_animation(images, plan, title=title), output, [*seconds, *(seconds[-1:] or [1.0])])
    else:
        save_picture(draw_film(images, plan, title=title), output)
    rates = tokens_per_second(plan)
    if as_json:
        report = {
            "video": video.name,
            "method": plan.by,
            "tower": str(tower.origin),
            "frames": plan.frames,
            "times": list(video.times),
            "patches": plan.patches,
            "tokens": len(plan),
            "removed": round(1 - len(plan) / plan.patches, 4),
            "tokens_per_second": [round(float(rate), 3) for rate in rates],
            "picture": str(output),
        }
        out.print_json(json.dumps(report))
        return
    name, tokens = escape(Path(video.name).name), f"[bold]{len(plan)}[/] tokens by {escape(plan.by)}"
    for line in (
        f"[bold]{name}[/]: {plan.frames} frames, {plan.patches} patches of {escape(str(tower.origin))}",
        f"{tokens}, {rates.min():.0f} to {rates.max():.0f} new tokens per second",
    ):
        out.print(line, highlight=False, soft_wrap=True)
    out.print(f"Wrote {escape(str(output))}", highlight=False, soft_wrap=True)


def reduce_frames(video: Video, tower: Tower, reducer: Reducer, padding: PaddingChoice) -> Reduction:
    """Run the tower on all frames and plan them as one video."""
    from torino.core.tokens import stack_frames

    if reducer.in_tower:
        raise BadParameter(f"{reducer.spec} works on single images. Choose a method for videos, such as torino-m.")
    return reducer.plan(stack_frames(tower.encode(list(video.frames), reducer.needs, padding=padding), video.times))


def processed_frames(video: Video, tower: Tower, padding: PaddingChoice) -> list[Any]:
    """Return the frames as the tower sees them."""
    from torino.datasets.images import as_seen, mean_color, prepare

    color = mean_color(tower.processor)
    frames: list[Any] = []
    for frame in video.frames:
        prepared = prepare(frame, padding, color)
        frames += as_seen(tower.processor(images=[prepared], return_tensors="pt"), tower.processor, [prepared])
    return frames
