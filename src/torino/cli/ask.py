"""The command ``torino ask``: one question about one image, with fewer visual tokens."""

from __future__ import annotations

import json
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    LAB,
    POSITIONS,
    build_reducer,
    hushed,
    one_picture,
    picture_file,
    reads_concepts,
    share_of,
)
from torino.core.errors import BadParameter, TorinoError

if TYPE_CHECKING:  # torch, Pillow and transformers are only fetched by those who ask
    from torino.reducers import Reducer
    from torino.vlm.session import Answer

out = Console()
errors = Console(stderr=True)

EPILOG = (
    'Examples: [cyan]torino ask photo.jpg "What is on the table?"[/] (the lab, a small model that comes with torino) · '
    '[cyan]torino ask photo.jpg "How many cups?" --method visionzip --budget 64[/] · '
    '[cyan]torino ask photo.jpg "How many cups?" --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --no-baseline[/] · '
    '[cyan]torino ask photo.jpg "What is this?" --model ./llava --sae raw --keep 25% --draw groups.png[/]'
)
STAGES = ("processor", "tower", "question", "plan", "sae", "grouping", "projector", "prefill", "decode", "total")


def ask(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="An image file, or astronaut, coffee, chelsea or rocket: bundled.")
    ],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask about it.")],
    model: Annotated[
        str,
        typer.Option(help="Hub name or folder of a vision-language model; 'lab' is the one that comes with torino."),
    ] = LAB,
    sae: Annotated[
        str | None,
        typer.Option(
            help="Folder, file or hub repository of the SAE; 'lab' is that of --model lab, which takes it by itself; "
            "'raw' is the no-SAE ablation."
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(
            help="Hub name or folder of the CLIP that the model's tower is of, to read the question for cdpruner."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Reducer, by name or spec (torino list); 'none' keeps all tokens.")
    ] = "torino-m",
    k: Annotated[int | None, typer.Option(help="Concepts kept per patch.")] = None,
    delta: Annotated[int | None, typer.Option(help="Concepts that linked patches share, 1 to k.")] = None,
    budget: Annotated[
        int | None, typer.Option(help="Exactly this many tokens an image; without it the image decides.")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="The budget as a share of the patches: 25% or 0.25.")] = None,
    levels: Annotated[int | None, typer.Option(help="Use only the first Matryoshka levels of the SAE.")] = None,
    baseline: Annotated[
        bool | None,
        typer.Option(
            "--baseline/--no-baseline",
            help="Also ask with all tokens, and compare; done unless you say no, or --method is none.",
        ),
    ] = None,
    padding: Annotated[
        str, typer.Option(help="crop: as the model's processor does it; square: pad first, so that nothing is cut.")
    ] = "crop",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 64,
    positions: Annotated[
        str,
        typer.Option(
            help="compact: number the tokens left anew; original: keep their places in the full prompt; own: as the "
            "method has it."
        ),
    ] = "own",
    mass: Annotated[
        bool | None,
        typer.Option(
            "--mass/--no-mass",
            help="Attend to each token as to all the patches it stands for; by default as the method has it.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
    draw: Annotated[Path | None, typer.Option(help="Write a picture of the groups to .png, .jpg or .webp.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Ask a vision-language model about an image, with fewer visual tokens and with all of them."""
    # Whatever can be wrong without the model is said before the model is fetched.
    if padding not in ("crop", "square"):
        raise BadParameter(f"--padding must be crop or square, got {padding!r}.")
    if positions not in POSITIONS:
        raise BadParameter(f"--positions must be own, compact or original, got {positions!r}.")
    if draw is not None:
        picture_file("--draw", draw)
    with errors.status("Starting …"), _notes():
        from torino.datasets.images import prepare
        from torino.vlm.session import check_vlm
        from torino.vlm.towers import device_of

        if model != LAB:
            check_vlm(model)
        elif sae is None and method != "none" and reads_concepts(method):
            sae = LAB
        picture = one_picture(image)
        prepare(picture, padding)  # type: ignore[arg-type]: checked above
        given = {"k": k, "delta": delta, "budget": budget}
        reducer = _reducer(method, sae, levels, keep, given, device_of(device))
    _check_clip(clip, method, reducer)
    if baseline is None:
        baseline = reducer is not None
    if baseline and reducer is None:
        raise BadParameter("--baseline compares a method with the full tokens, and --method is none. Leave one out.")
    if draw is not None and reducer is None:
        raise BadParameter("--draw shows what a method did to the tokens, and --method is none. Leave one out.")
    with hushed():  # our own warnings were printed above
        from torino.vlm import load_clip_text
        from torino.vlm.session import ask as put
        from torino.vlm.session import load_vlm

        try:
            asking = None
            if clip is not None:
                with errors.status(f"Opening {escape(clip)} …"):
                    asking = load_clip_text(clip, device=device, dtype=dtype)
            with errors.status(f"Opening {escape(model)} …"):
                opened, processor = load_vlm(model, device, dtype)
            with errors.status("Looking and answering …"):
                answer = put(
                    picture,
                    question,
                    model=opened,
                    processor=processor,
                    reducer=reducer,
                    padding=padding,  # type: ignore[arg-type]: checked above
                    max_new_tokens=max_new_tokens,
                    baseline=baseline,
                    positions=positions,  # type: ignore[arg-type]: checked above
                    mass=mass,
                    asking=asking,
                )
        except MemoryError as error:
            raise TorinoError(_full(model, device)) from error
        except RuntimeError as error:
            if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
                raise
            raise TorinoError(_full(model, device)) from error
    if draw is not None:
        _draw(draw, answer, Path(image).stem, reducer)
    if as_json:
        out.print_json(json.dumps({"model": model, "question": question, **answer.facts()}))
        return
    _print(answer)
    if draw is not None:
        out.print(f"Drew what became of the tokens to {escape(str(draw))}.", highlight=False)


def _reducer(
    method: str, sae: str | None, levels: int | None, keep: str | None, given: dict[str, int | None], device: Any
) -> Reducer | None:
    """The reducer that the options describe."""
    from torino.vlm.session import KeepShare

    if method == "none":
        options = {**given, "keep": keep, "sae": sae, "levels": levels}
        told = [name for name, value in options.items() if value is not None]
        if told:
            raise BadParameter(f"--method none keeps all tokens, so --{told[0]} has no meaning. Leave one out.")
        return None
    share = None if keep is None else share_of(keep)
    if share is not None and given["budget"] is not None:
        raise BadParameter("Give --budget or --keep, not both.")
    reducer = build_reducer(method, sae, levels, given, device)
    return reducer if share is None else KeepShare(reducer, share)


def _check_clip(clip: str | None, method: str, reducer: Reducer | None) -> None:
    """Whether there is someone to read the question where a method wants it read, and only there."""
    from torino.vlm.towers import local_name

    reads = reducer is not None and "text" in reducer.needs
    if reads and clip is None:
        raise BadParameter(
            f"{method} chooses patches for the question, so say which CLIP reads it: --clip "
            "openai/clip-vit-large-patch14-336, which is that of LLaVA-1.5, or the folder of another. Without a "
            "question it is a plain DPP: --method \"cdpruner(relevance='none')\"."
        )
    if clip is not None and not reads:
        raise BadParameter(f"{method} reads no question, so --clip has no meaning for it. Leave it out.")
    if clip is not None:
        local_name(clip)


@contextmanager
def _notes() -> Generator[None]:
    """Print our own warnings as plain sentences."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        errors.print(f"[yellow]note:[/] {escape(str(warning.message))}", soft_wrap=True, highlight=False)


def _full(model: str, device: str) -> str:
    return (
        f"{model} does not fit into the memory of this machine (--device {device}). "
        "Try --dtype bfloat16, another device, or a smaller model."
    )


def _print(answer: Answer) -> None:
    full = answer.baseline
    if full is None:
        out.print(answer.text.strip(), markup=False, highlight=False, soft_wrap=True)
    else:
        for name, one in ((f"{answer.after} tokens", answer), (f"{full.after} tokens", full)):
            out.print(f"[bold]{name}[/]: {escape(one.text.strip())}", highlight=False, soft_wrap=True)
    out.print()
    removed = f", {1 - answer.after / max(answer.before, 1):.1%} removed" if answer.reductions else ", all of them"
    by = f" by {answer.reductions[0].by}" if answer.reductions else ""
    out.print(
        f"{answer.before} → {answer.after} image tokens{removed}{escape(by)} (padding {answer.padding})",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("milliseconds")
    table.add_column("reduced" if answer.reductions else "full", justify="right")
    if full is not None:
        table.add_column("full", justify="right")
    told = [answer] if full is None else [answer, full]
    for stage in STAGES:
        cells = [f"{one.seconds[stage] * 1e3:.1f}" if stage in one.seconds else "" for one in told]
        inner = stage in ("sae", "grouping")
        if any(cells):
            table.add_row(f"  {stage}" if inner else stage, *cells, style="bold" if stage == "total" else "")
    table.add_row("answer, tokens", *[str(one.new_tokens) for one in told])
    out.print(table)
    if full is not None:
        ratio = answer.speedup
        out.print(
            f"First token {ratio['first_token']:.2f} times as fast as with all tokens, "
            f"whole answer {ratio['total']:.2f} times.",
            highlight=False,
        )


def _draw(path: Path, answer: Answer, name: str, reducer: Reducer | None) -> None:
    """Draw the tokens over what the tower saw, tile by tile where it saw tiles."""
    from torino.core.explanation import names_of
    from torino.viz.draw import draw_sheet, save_picture

    plans = answer.reductions
    # where patches are not told apart by picture, all of them are of the one photo
    seen = answer.seen if len(answer.seen) == len(plans) else answer.seen[:1] * len(plans)
    names = [name] if len(plans) == 1 else [f"{name} {number}" for number in range(len(plans))]
    rows: dict[str, Any] = {
        title: (photo, [(plan.by, plan)]) for title, photo, plan in list(zip(names, seen, plans, strict=True))[:8]
    }
    save_picture(draw_sheet(rows, names=names_of(reducer)), path)
