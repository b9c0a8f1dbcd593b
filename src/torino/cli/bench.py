"""The command ``torino bench``: what methods cost, side by side in one run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from torino.cli._common import POSITIONS, open_sae, split_pairs, split_words
from torino.cli._progress import phase_bars
from torino.core.errors import BadParameter

if TYPE_CHECKING:  # torch, Pillow and transformers are only fetched by those who measure
    from torino.evaluation.latency import Bench, BenchPlan
    from torino.evaluation.protocol import Setting

out = Console()
errors = Console(stderr=True)
EPILOG = (
    "Examples: [cyan]torino bench[/] (bundled tokens, module alone) · "
    "[cyan]torino bench --tokens tokens.npz --sae ./my-sae --methods torino-m,visionzip,random --budgets 192,64[/] · "
    "[cyan]torino bench --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --images ./pope-images --device cuda "
    "-o bench.json[/] · [cyan]torino plot bench.json -o figures[/] · "
    "[cyan]torino bench --methods torino-m --screen both[/]"
)
SCREENS = ("auto", "int8", "off", "both")
NOISE = (480, 640)  # rows and columns of generated pictures


def bench(
    model: Annotated[
        str | None, typer.Option(help="Hub name or folder of a vision-language model; without it, the module alone.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Token file to measure on without a model; bundled tokens if left out.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            help="Folder, parquet or tar of pictures for --model; 'example' for the four bundled photos. "
            "Generated noise if left out."
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas, or 'all'; specs with brackets run as they are written.")
    ] = "all",
    sae: Annotated[
        list[str] | None,
        typer.Option(help="SAE of methods that read concepts, may be given more than once; 'raw' is the ablation."),
    ] = None,
    budgets: Annotated[str, typer.Option(help="Tokens left of an image, separated by commas, or 'no'.")] = "192,128,64",
    dynamic: Annotated[
        str, typer.Option(help="Pairs k,delta at which TORINO lets the image decide, or 'no'.")
    ] = "3,3 2,2 1,1",
    count: Annotated[int, typer.Option(help="Images that the module is timed on.")] = 50,
    warmups: Annotated[int, typer.Option(help="Images that every method runs on first, untimed.")] = 10,
    answers: Annotated[int, typer.Option(help="Images that whole answers are timed on; 0 for none.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer, in tokens.")] = 16,
    question: Annotated[str | None, typer.Option(help="What the model is asked.")] = None,
    padding: Annotated[str, typer.Option(help="crop or square, as for torino ask.")] = "crop",
    positions: Annotated[str, typer.Option(help="own, compact or original, as for torino ask.")] = "own",
    screen: Annotated[
        str,
        typer.Option(
            help="How SAEs find concepts, which changes time alone: int8 or off, auto to take int8 where it pays, "
            "both to measure the two side by side."
        ),
    ] = "auto",
    clip: Annotated[str | None, typer.Option(help="CLIP that reads the question, for cdpruner.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto, for --model.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the images out of more.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the figures as JSON.")] = None,
) -> None:
    """Measure what reduction methods cost: module alone, first token, whole answer, memory.

    The module alone follows the paper: 50 images after 10 warm-ups, without tower and language model. The floor beside
    it is a bare gather of as many tokens.
    """
    for name, value, accepted in (
        ("--padding", padding, ("crop", "square")),
        ("--positions", positions, POSITIONS),
        ("--screen", screen, SCREENS),
    ):
        if value not in accepted:
            raise BadParameter(f"{name} must be {', '.join(accepted[:-1])} or {accepted[-1]}, got {value!r}.")
    if model is not None and tokens is not None:
        raise BadParameter("Give --model or --tokens, not both: tokens are measured without a model.")
    if model is None and (images is not None or clip is not None or question is not None):
        given = "--images" if images is not None else "--clip" if clip is not None else "--question"
        raise BadParameter(f"{given} has a meaning for a model only. Give --model too, or leave it out.")
    if output is not None and output.suffix != ".json":
        raise BadParameter(f"--output must end in .json, got {output.name!r}.")
    if output is not None and output.is_dir():
        raise BadParameter(f"--output {output} is a folder. Give the path of a file.")
    from torino.core.io import write_json
    from torino.evaluation.latency import QUESTION, Bench, BenchPlan
    from torino.vlm.towers import device_of

    plan = BenchPlan(count, warmups, answers, max_new_tokens, seed)
    place = device_of(device)
    saes: dict[str, Any] = {}
    for one in _named_saes(sae, model is None and tokens is None):
        if _label(one) in saes:
            raise BadParameter(f"Two SAEs are called {_label(one)!r}, and their rows could not be told apart.")
        saes[_label(one)] = open_sae(one, device=place)
    saes, said = _screened(saes, screen)
    settings, notes = _settings(
        methods, budgets, dynamic, saes, with_model=model is not None, with_clip=clip is not None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        bars, progress = phase_bars(errors, transient=True)
        made = Bench(settings, saes, plan, progress)
        made.notes += [*said, *notes]
        if model is None:
            _on_tokens(made, tokens, place, bars)
        else:
            _on_model(
                made, model, images, bars, dtype=dtype, clip=clip, device=device,
                options={"padding": padding, "positions": positions, "question": question or QUESTION},
            )  # fmt: skip
    told = made.document()
    _print(told)
    if output is not None:
        write_json(output, told)
        told = f"Wrote {output}. Next: torino plot {output} -o figures"
        out.print(escape(told), highlight=False, soft_wrap=True)


def _named_saes(given: list[str] | None, bundled: bool) -> list[str]:
    return given or (["example"] if bundled else [])


def _screened(saes: dict[str, Any], screen: str) -> tuple[dict[str, Any], list[str]]:
    """SAEs set to the wanted search, twice where both are wanted; and what could not be had."""
    from torino.core.topk.prefilter import backend_for
    from torino.sae.model import SAE

    ways = {"plain": "off", "int8": "int8"} if screen == "both" else {"": screen}
    found, notes = dict[str, Any](), list[str]()
    for label, sae in saes.items():
        if not isinstance(sae, SAE):  # the ablation without one has nothing to screen
            found[label] = sae
            continue
        for way, how in ways.items():
            if how == "int8" and backend_for(sae.W_enc.device) is None:
                notes.append("The int8 screen was left out: it needs pip install torino[fast] on a CPU.")
                if way:  # the plain search stands beside it
                    continue
                how = "off"
            one = found[f"{label} {way}".rstrip()] = copy.copy(sae)  # shares the weights
            one.screen = cast(Any, how)
    return found, list(dict.fromkeys(notes))


def _label(name: str) -> str:
    from torino.evaluation.protocol import NO_SAE

    return NO_SAE if name in ("raw", NO_SAE) else Path(name).name or name


def _settings(
    methods: str, budgets: str, dynamic: str, saes: dict[str, Any], *, with_model: bool, with_clip: bool
) -> tuple[list[Setting], list[str]]:
    """What the options describe, and what was left out of 'all'."""
    from torino.evaluation.protocol import FULL, dynamic_settings, fixed_settings, own_settings, read_budgets, takes
    from torino.reducers import get, list_reducers

    words, notes = split_words(methods), list[str]()
    plain = [word for word in words if "(" not in word]
    if "all" in plain:
        plain = [name for name in list_reducers() if not get(name).ablation]
        left = {
            "which read concepts: give --sae": [name for name in plain if takes(name, "sae") and not saes],
            "which read the question: give --clip": [
                name for name in plain if with_model and not with_clip and get(name).needs & {"joint", "text"}
            ],
            "which work inside a vision tower: give --model": [
                name for name in plain if not with_model and get(name).inside
            ],
        }
        notes = [f"Left out: {', '.join(some)}, {why}." for why, some in left.items() if some]
        plain = [name for name in plain if not any(name in some for some in left.values())]
    specs = [word for word in words if "(" in word]
    for one in [*plain, *(spec.partition("(")[0] for spec in specs)]:
        get(one)
        if takes(one, "sae") and not saes:
            raise BadParameter(
                f"{one} groups patches by concepts, so say which SAE reads them: --sae FOLDER, --sae owner/repository, "
                "or --sae raw for none."
            )
    wanted = read_budgets("--budgets", budgets)
    labels = list(saes)
    found = [
        *own_settings(specs, labels),
        *dynamic_settings(plain, labels, split_pairs(dynamic)),
        *fixed_settings(plain, wanted, labels, 1),
    ]
    if not found:
        raise BadParameter("There is nothing to measure. Give --methods, and --budgets or pairs for --dynamic.")
    if len(labels) > 1:
        found = [replace(one, label=f"{one.label}, {one.sae}") if one.sae else one for one in found]
    return [FULL, *found] if with_model else found, notes


def _on_tokens(made: Bench, path: Path | None, place: Any, bars: Progress) -> None:
    from torino.core.tokens import load_tokens
    from torino.datasets.bundled import example_tokens

    found = example_tokens() if path is None else load_tokens(path)
    source = "the four bundled photos as tokens" if path is None else f"{len(found)} images of {path.name}"
    with bars:
        made.on_tokens(found, place, source)


def _on_model(
    made: Bench,
    model: str,
    images: str | None,
    bars: Progress,
    *,
    dtype: str | None,
    clip: str | None,
    device: str,
    options: dict[str, Any],
) -> None:
    from torino.vlm.session import check_vlm, load_vlm
    from torino.vlm.towers import transformers

    check_vlm(model)
    pictures, source = _pictures(images, made.plan)
    library = transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    from torino.vlm import load_clip_text

    with errors.status(f"Opening {escape(model)} …"):
        opened, processor = load_vlm(model, device, dtype)
        asking = None if clip is None else load_clip_text(clip, device=device, dtype=dtype)
    if images is None:
        made.notes.append(
            "No --images were given, so the pictures are generated noise: times are right for a fixed budget, and the "
            "counts of methods that let the image decide say nothing about photos."
        )
    with bars:
        made.on_model(
            opened, processor, pictures, asking=asking, name=Path(model).name or model, source=source, **options
        )


def _pictures(images: str | None, plan: BenchPlan) -> tuple[Any, str]:
    """Pictures to look at, and what they are."""
    if images is None:
        import numpy as np
        from PIL import Image

        source = np.random.default_rng(plan.seed)
        made = [Image.fromarray(source.integers(0, 256, (*NOISE, 3), dtype=np.uint8)) for _ in range(plan.images)]
        return made, "generated noise"
    from torino.datasets import open_photos

    if images == "example":
        from torino.datasets.bundled import example_folder

        return _Data(open_photos(example_folder() / "photos")), "the four bundled photos"
    photos = open_photos(images)
    return _Data(photos), photos.describe


class _Data:
    """The pictures of a source, read when asked for."""

    def __init__(self, photos: Any) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> Any:
        return self.photos[index].data


def _print(told: dict[str, Any]) -> None:
    protocol, rows = told["protocol"], cast(list[dict[str, Any]], told["rows"])
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "tokens": lambda row: _number(row["tokens"]),
        "module, ms": lambda row: _spread(row["module_ms"]),
        "floor": lambda row: _mean(row["floor_ms"], 3),
        "above\nfloor": lambda row: _number(row["above_floor_ms"], 2),
        "first\ntoken": lambda row: _mean(row["first_token_ms"], 1),
        "answer": lambda row: _mean(row["answer_ms"], 1),
        "peak MB": lambda row: _number(row["peak_mb"]),
    }
    table = Table(box=None, pad_edge=False)
    table.add_column("method", vertical="bottom", overflow="fold")  # gives way where the figures need the room
    filled = {name: cells for name, cell in columns.items() if any(cells := [cell(row) for row in rows])}
    for name in filled:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for i, row in enumerate(rows):
        table.add_row(escape(row["label"]), *[cells[i] for cells in filled.values()])
    out.print(table)
    used = protocol["distinct_images"]
    again = f", {used} of them different" if used < protocol["images"] else ""
    out.print(
        f"Mean ± standard deviation over {protocol['images']} images{again}, warm-ups before: {protocol['warmups']}; "
        f"{escape(protocol['source'])}. Memory: the rise while "
        f"{'an answer is made' if protocol['memory'] == 'answer' else 'the module runs'}.",
        highlight=False,
        soft_wrap=True,
    )
    if protocol.get("answers"):
        out.print(
            f"First token and whole answer: mean of {protocol['answers']} answers of {protocol['answer_tokens']} "
            "tokens each, image processor and tower included.",
            highlight=False,
            soft_wrap=True,
        )
    for name, left in cast(dict[str, dict[str, float]], told["survivors"]).items():
        out.print(
            f"{escape(name)}: for the {left['k']:g} strongest concepts the int8 screen left {left['mean']:.1f} "
            f"latents a token (median {left['median']:.0f}, 99 % {left['percentile_99']:.0f}, "
            f"most {left['most']:.0f}); "
            f"{left['left_to_plain']:,} of {left['tokens']:,} tokens went to the plain search.",
            highlight=False,
            soft_wrap=True,
        )
    for note in cast(list[str], told["notes"]):
        errors.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True, highlight=False)


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _mean(value: dict[str, float] | None, digits: int) -> str:
    return "" if value is None else _number(value["mean"], digits)


def _spread(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['mean']:.2f} ± {value['std']:.2f}"
