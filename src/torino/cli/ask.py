"""``torino ask``: ask a model about an image or a video, with fewer visual tokens and with all of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    LAB,
    AttentionOption,
    BudgetOption,
    ClipOption,
    DeviceOption,
    DtypeOption,
    FpsOption,
    FramesOption,
    ImageArgument,
    JsonOption,
    KdOption,
    KeepOption,
    LevelsOption,
    ModelOption,
    OptionalMethodOption,
    PaddingOption,
    PositionsOption,
    SaeOption,
    VideoOption,
    build_reducer_with_budget,
    check_clip,
    check_image_path,
    default_sae,
    errors,
    examples,
    load_session,
    memory_errors,
    note,
    open_single_image,
    out,
    quiet_transformers,
)
from torino.cli._stop import START_OVER, on_stop
from torino.core.defaults import resolve_method
from torino.core.errors import BadParameter

if TYPE_CHECKING:
    from torino.reducers import Reducer
    from torino.vlm import VLM, Answer

EPILOG = examples(
    'torino ask astronaut "Is there a person in the photo?"',
    'torino ask photo.jpg "How many cups?" --method visionzip --budget 64',
    'torino ask photo.jpg "How many cups?" --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --no-baseline',
    'torino ask photo.jpg "What is this?" --model ./llava --sae none --keep 25% --draw groups.png',
    'torino ask --video clip.mp4 "What happens?" --frames 8',
    'torino ask --video frames "What happens?" --fps 2 --model ./qwen --method random --keep 25%',
)
STAGES = ("processor", "tower", "question", "plan", "sae", "grouping", "projector", "prefill", "decode", "total")


def ask(
    image: ImageArgument,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="Question about the image; with --video, the only argument.")
    ] = "",
    video: VideoOption = None,
    fps: FpsOption = None,
    frames: FramesOption = None,
    model: ModelOption = LAB,
    sae: SaeOption = None,
    method: OptionalMethodOption = None,
    kd: KdOption = None,
    budget: BudgetOption = None,
    keep: KeepOption = None,
    levels: LevelsOption = None,
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="Also answer with all tokens (default: yes)."),
    ] = None,
    clip: ClipOption = None,
    padding: PaddingOption = "crop",
    positions: PositionsOption = "auto",
    attention: AttentionOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    draw: Annotated[Path | None, typer.Option(help="Write an image of the groups: .png, .jpg or .webp.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a vision-language model about an image or a video, with fewer visual tokens and with all of them."""
    on_stop(START_OVER)
    image, question = _split_arguments(image, question, video, fps, frames)
    method = resolve_method(method, kd)
    if draw is not None:
        check_image_path("--draw", draw)
    # Validate the options before loading the model.
    with errors.status("Starting …"), _print_warnings():
        from torino.core.device import resolve_device
        from torino.datasets.images import prepare
        from torino.datasets.video import open_video
        from torino.vlm.loading import check_model

        check_model(model)
        film = None if video is None else open_video(video, fps=fps, frames=frames)
        opened: Any = open_single_image(image) if film is None else film
        prepare(opened if film is None else film.frames[0], padding)
        if sae is None and method != "none":
            sae = default_sae(method, model)
        reducer = build_reducer_with_budget(method, sae, levels, kd, budget, keep, resolve_device(device))
    check_clip(clip, method, reducer)
    if reducer is None and (baseline or draw is not None):
        option = "--baseline" if baseline else "--draw"
        raise BadParameter(f"{option} needs a method, and --method is none. Omit one of them.")
    with quiet_transformers(), memory_errors(model, device):
        from torino.vlm import ask as ask_model

        with errors.status(f"Loading {escape(model)} …"):
            vlm = load_session(model, device, dtype, padding, positions, attention, clip)
        if film is not None:
            _note_frames(vlm, reducer, len(film))
        with errors.status("Encoding and answering …"):
            answer = ask_model(
                opened,
                question,
                model=vlm,
                reducer=reducer,
                max_new_tokens=max_new_tokens,
                baseline=reducer is not None if baseline is None else baseline,
            )
    if draw is not None and reducer is not None:
        _draw(draw, answer, Path(image).stem if video is None else video.stem, reducer)
    if as_json:
        out.print_json(json.dumps({"model": model, "question": question, **answer.to_dict()}))
        return
    _print(answer)
    if draw is not None:
        out.print(f"Wrote an image of the groups to {escape(str(draw))}.", highlight=False)


def _split_arguments(
    image: str, question: str, video: Path | None, fps: float | None, frames: int | None
) -> tuple[str, str]:
    """Return image and question; with a video, the question is the only argument."""
    if video is None:
        if fps is not None or frames is not None:
            raise BadParameter("--fps and --frames choose frames of a video. Add --video PATH, or omit them.")
        if not question:
            raise BadParameter('The question is missing. Ask something: torino ask photo.jpg "What is this?"')
        return image, question
    if question:
        raise BadParameter(f"--video takes the place of the image, and {image!r} was given too. Give one of them.")
    return "", image


def _note_frames(vlm: VLM, reducer: Reducer | None, frames: int) -> None:
    """Say how a model that takes no videos is shown the frames."""
    from torino.vlm.clips import plans_together

    if vlm.adapter.takes_videos:
        return
    text = f"{vlm.family} takes no videos, so its {frames} frames are shown as images"
    if reducer is not None:
        together = plans_together(vlm.adapter, reducer)
        text += ", reduced together" if together else f", each reduced by itself by {reducer.name}"
    note(f"{text}.")


@contextmanager
def _print_warnings() -> Generator[None]:
    """Print torino's own warnings as notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        note(str(warning.message))


def _print(answer: Answer) -> None:
    from torino.core.explanation import describe_change, describe_words
    from torino.reducers.in_language_model import layer_averaged

    full = answer.baseline
    if full is None:
        out.print(answer.text.strip(), markup=False, highlight=False, soft_wrap=True)
    else:
        for result in (answer, full):
            text = escape(result.text.strip())
            out.print(f"[bold]{result.after} tokens[/]: {text}", highlight=False, soft_wrap=True)
    out.print()
    removed = describe_change(answer.before, answer.after) if answer.reductions else "all kept"
    by = f" by {answer.reductions[0].by}" if answer.reductions else ""
    out.print(
        f"{answer.before} → {answer.after} image tokens, {removed}{escape(by)} (padding {answer.padding})",
        highlight=False,
        soft_wrap=True,
    )
    words = describe_words([asked for reduction in answer.reductions for asked in reduction.words])
    if words:
        out.print(escape(words[0].upper() + words[1:]), highlight=False, soft_wrap=True)
    if answer.layers:
        counts = " → ".join(map(str, dict.fromkeys(answer.layers)))
        out.print(
            f"layer-averaged: the {len(answer.layers)} layers of the language model process {counts} image tokens, "
            f"{layer_averaged(answer.layers):.1f} on average",
            highlight=False,
            soft_wrap=True,
        )
    table = Table(box=None, pad_edge=False)
    table.add_column("milliseconds")
    table.add_column("reduced" if answer.reductions else "full", justify="right")
    if full is not None:
        table.add_column("full", justify="right")
    results = [answer] if full is None else [answer, full]
    for stage in STAGES:
        cells = [f"{result.seconds[stage] * 1e3:.1f}" if stage in result.seconds else "" for result in results]
        if any(cells):
            name = f"  {stage}" if stage in ("sae", "grouping") else stage
            table.add_row(name, *cells, style="bold" if stage == "total" else "")
    table.add_row("answer, tokens", *[str(result.new_tokens) for result in results])
    out.print(table)
    if full is not None:
        ratio, exit_ = answer.speedup, answer.early_exit
        lines = [
            f"{answer.after} instead of {full.after} tokens: first token {ratio['first_token']:.2f}×, whole answer "
            f"{ratio['total']:.2f}× as fast."
        ]
        if exit_ is not None:
            lines.append(
                f"In both, the tower stops after block {exit_.blocks} of {exit_.of}, which saves "
                f"{exit_.saved * 1e3:.1f} ms: with all tokens, first token {ratio['early_exit']:.2f}× as fast as the "
                "stock model."
            )
        lines.append("Times are of one run; torino bench repeats them.")
        out.print("\n".join(lines), highlight=False, soft_wrap=True)


def _draw(path: Path, answer: Answer, name: str, reducer: Reducer) -> None:
    """Draw the tokens over the image as the tower received it, tile by tile if there are tiles."""
    from torino.core.explanation import concept_names
    from torino.viz.draw import draw_sheet, save_picture
    from torino.viz.film import draw_film

    plans = answer.reductions
    if any(plan.frames > 1 for plan in plans):
        save_picture(draw_film(answer.seen, plans[0], title=f"{name} · {plans[0].by}"), path)
        return
    # Processors that return packed patches give one image for all of them.
    images = answer.seen if len(answer.seen) == len(plans) else answer.seen[:1] * len(plans)
    titles = [name] if len(plans) == 1 else [f"{name} {number}" for number in range(len(plans))]
    rows = {title: (image, [(plan.by, plan)]) for title, image, plan in zip(titles, images, plans, strict=True)}
    save_picture(draw_sheet(rows, names=concept_names(reducer)), path)
