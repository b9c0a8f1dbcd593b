"""The command ``torino look``: reduce the tokens of one image or video with any method and draw the result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    LAB,
    DeviceOption,
    FpsOption,
    FramesOption,
    JsonOption,
    PaddingChoice,
    PaddingOption,
    SaeOption,
    check_image_path,
    default_sae,
    errors,
    examples,
    load_sae,
    missing_sae,
    open_single_image,
    out,
    parse_budgets,
    parse_pairs,
    parse_share,
    quiet_transformers,
    reads_concepts,
)
from torino.cli._film import draw_video
from torino.cli._stop import START_OVER, on_stop
from torino.core.errors import BadParameter

if TYPE_CHECKING:  # imported in functions, so that torino --help stays fast
    from torino.core.concepts import ConceptEncoder
    from torino.core.reduction import Reduction
    from torino.reducers import Reducer
    from torino.vlm.towers import Tower

EPILOG = examples(
    "torino look",
    "torino look photo.jpg -o photo-look.png --show",
    "torino look photo.jpg --method torino-p --kd 2,1 --kd 2,2",
    "torino look photo.jpg --method visionzip --budget 64,128,192",
    "torino look photo.jpg --method tome-tower --keep 25%",
    "torino look photo.jpg --tower ./clip --block 22 --sae ./my-sae",
    "torino look clip.mp4 --fps 4 -o film.png",
    "torino look frames --frames 16 --kd 2,2 -o film.gif",
)
DEFAULT_IMAGE = "astronaut"
DEFAULT_OUTPUT = Path("look.png")
DEFAULT_PAIRS = ((1, 1), (2, 2), (3, 3))
DEFAULT_SHARES = (0.5, 0.25, 0.125)  # for methods without a default number of tokens
PLACEHOLDER_BUDGET = 1 << 20  # of a reducer whose budget KeepShare sets for each image
LARGEST_GROUPS = 4  # groups listed for each setting
QUESTION_SIGNALS = {"joint", "text", "words", "generic_words"}


@dataclass(frozen=True)
class LookSetting:
    """Hyperparameters of one row of the picture; None where the default of the method applies."""

    k: int | None = None
    delta: int | None = None
    budget: int | None = None
    keep: float | None = None

    @property
    def label(self) -> str:
        """Short text for a heading."""
        parts = [] if self.k is None else [f"k = {self.k}, δ = {self.delta}"]
        parts += [] if self.budget is None else [f"budget = {self.budget}"]
        parts += [] if self.keep is None else [f"keep = {100 * self.keep:.4g}%"]
        return ", ".join(parts)

    def build(self, method: str, encoder: ConceptEncoder | None) -> Reducer:
        """Build the reducer of this setting."""
        from torino.reducers import KeepShare, make

        budget = PLACEHOLDER_BUDGET if self.keep is not None else self.budget
        given = {"sae": encoder, "k": self.k, "delta": self.delta, "budget": budget}
        reducer = make(method, **{name: value for name, value in given.items() if value is not None})
        return reducer if self.keep is None else KeepShare(reducer, self.keep)


def look(
    image: Annotated[
        str,
        typer.Argument(metavar="IMAGE", help="Image, video, folder of frames, or a bundled photo such as coffee."),
    ] = DEFAULT_IMAGE,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Picture to write: .png, .jpg or .webp; of a video an animation as .gif or .webp."
        ),
    ] = DEFAULT_OUTPUT,
    fps: FpsOption = None,
    frames: FramesOption = None,
    method: Annotated[
        str, typer.Option(help="Any method of torino list by name or with options in brackets.")
    ] = "torino-m",
    kd: Annotated[
        list[str] | None,
        typer.Option(metavar="K,D", help="k,delta of a torino method; can be repeated. Default: 1,1 2,2 3,3."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="N", help="Number of tokens, or several separated by commas: 64,128.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Share of the patches, or several separated by commas: 25%,50%."),
    ] = None,
    sae: SaeOption = None,
    tower: Annotated[
        str, typer.Option(help="Hub name or folder of a vision tower or of a model with one, or a model package.")
    ] = LAB,
    block: Annotated[
        int | None, typer.Option(help="Zero-based block whose output is used. Default: the block of the SAE.")
    ] = None,
    padding: PaddingOption = "crop",
    device: DeviceOption = "auto",
    show: Annotated[bool, typer.Option("--show", help="Also draw the groups in the terminal.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Reduce the tokens of an image or a video, print the token counts and draw the result. No language model is run.

    Each --kd, --budget or --keep is a row of the picture; a video takes one of them.
    """
    on_stop(START_OVER)
    # Validate the options before loading the tower.
    is_film = _is_film(image, fps, frames, show)
    check_image_path("--output", output.with_suffix(".webp") if is_film and output.suffix == ".gif" else output)
    settings = _parse_settings(method, kd or [], budget, keep)
    with errors.status("Loading …") as status:
        from torino.core.explanation import concept_names
        from torino.datasets.images import prepare
        from torino.datasets.video import open_video
        from torino.viz.draw import save_picture
        from torino.viz.figures import draw_look

        film = open_video(image, fps=fps, frames=frames) if is_film else None
        picture = open_single_image(image) if film is None else film.frames[0]
        prepare(picture, padding)
        encoder = _open_encoder(method, sae, tower, device)
        if film is not None and len(settings) > 1:
            raise BadParameter(f"A video is drawn with one setting, and {len(settings)} were given. Give one.")
        settings = settings or _default_settings(method, encoder)
        settings = settings if film is None else settings[len(settings) // 2 :][:1]
        reducers = [setting.build(method, encoder) for setting in settings]
        with quiet_transformers():
            status.update(f"Loading the tower {escape(tower)} …")
            opened = _open_tower(tower, block, encoder, device)
            status.update("Reducing …")
            if film is not None:
                draw_video(film, opened, reducers[0], f"{method} {settings[0].label}", output, padding, as_json)
                return
            plans = _reduce(opened, picture, reducers, padding)
            photo = _processed_picture(opened, picture, padding)
        status.update("Drawing …")
        names = concept_names(reducers[0])
        rows = [(setting.label or plan.by, plan) for setting, plan in zip(settings, plans, strict=True)]
        title = f"{Path(image).stem} · {opened.origin} · {method}"
        save_picture(draw_look(photo, rows, title=title, names=names), output)
    summaries = [_summarize(setting, plan, names) for setting, plan in zip(settings, plans, strict=True)]
    patches = plans[0].patches
    if as_json:
        report = {
            "image": image,
            "method": method,
            "tower": str(opened.origin),
            "patches": patches,
            "settings": summaries,
            "picture": str(output),
        }
        out.print_json(json.dumps(report))
        return
    heading = f"[bold]{escape(Path(image).name)}[/]: {patches} patches of {escape(str(opened.origin))}"
    out.print(f"{heading}, reduced by {escape(method)}", highlight=False, soft_wrap=True)
    out.print(_table(summaries))
    if show:
        from torino.viz.terminal import draw_groups

        out.print(draw_groups([(label.replace(" ", ""), plan) for label, plan in rows], out.width, names))
    out.print(f"Wrote {escape(str(output))}", highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------- options


def _is_film(image: str, fps: float | None, frames: int | None, show: bool) -> bool:
    """Return whether the argument is a video, and refuse options that do not fit it."""
    from torino.datasets.video import is_video

    is_film = is_video(image) or fps is not None or frames is not None
    if is_film and show:
        raise BadParameter("--show draws one image in the terminal, not a video. Omit it.")
    return is_film


def _parse_settings(method: str, kd: Sequence[str], budget: str | None, keep: str | None) -> list[LookSetting]:
    """Check the method, and return one setting for each combination of the given options; none if none is given."""
    from torino.reducers import get
    from torino.reducers.base import method_name, split_spec

    reducer = get(method_name(method))
    if reducer.in_language_model or len(split_spec(method)) > 1:
        raise BadParameter(
            f"{method} drops tokens inside the language model, and torino look runs the vision tower only. Use torino "
            "ask --draw FILE with it."
        )
    if QUESTION_SIGNALS & reducer.needs:
        raise BadParameter(
            f"{reducer.name} selects patches by the question, and torino look has none. Use torino ask with it."
        )
    if kd and not {"k", "delta"} <= set(_parameters(method)):
        raise BadParameter(f"--kd sets k and delta, which {reducer.name} does not have. Use --budget or --keep.")
    for option, texts in {"--kd": kd, "--budget": [budget or ""]}.items():
        if any(text.strip() == "none" for text in texts):
            raise BadParameter(f"{option} none leaves nothing to draw. Give a value, or omit {option}.")
    pairs = [pair for text in kd for pair in parse_pairs(text)]
    sizes = [] if budget is None else [LookSetting(budget=count) for count in parse_budgets("--budget", budget)]
    sizes += [] if keep is None else [LookSetting(keep=parse_share(word.strip())) for word in keep.split(",")]
    if not pairs:
        return sizes
    return [LookSetting(k, delta, size.budget, size.keep) for k, delta in pairs for size in sizes or [LookSetting()]]


def _parameters(method: str) -> Mapping[str, Any]:
    """Return the hyperparameters of a method by name."""
    from torino.reducers import get

    return getattr(get(method.partition("(")[0].strip()), "__dataclass_fields__", {})


def _default_settings(method: str, encoder: ConceptEncoder | None) -> list[LookSetting]:
    """Return the settings to use if no option is given."""
    arguments = method.partition("(")[2]
    if {"k", "delta"} <= set(_parameters(method)) and not re.search(r"\b(k|delta|budget)\s*=", arguments):
        return [LookSetting(k, delta) for k, delta in DEFAULT_PAIRS]
    try:
        LookSetting().build(method, encoder)
    except BadParameter:  # the method requires a budget; an error in the spec is raised again when it is built
        return [LookSetting(keep=share) for share in DEFAULT_SHARES]
    return [LookSetting()]


# ---------------------------------------------------------------------- loading and reducing


def _open_encoder(method: str, sae: str | None, tower: str, device: str) -> ConceptEncoder | None:
    """Load the SAE if the method reads concepts; by default the one that belongs to the tower."""
    from torino.core.device import resolve_device

    if not reads_concepts(method):
        if sae is not None:
            raise BadParameter(f"{method} reads no concepts, so --sae has no effect. Omit it.")
        return None
    name = default_sae(method, tower) if sae is None else sae
    if name is None:
        raise missing_sae(method)
    return load_sae(name, device=resolve_device(device))


def _open_tower(name: str, block: int | None, encoder: ConceptEncoder | None, device: str) -> Tower:
    """Load the tower, with the block that the SAE was trained on unless another one is given."""
    from torino.vlm.towers import load_tower

    card = getattr(encoder, "card", None)
    return load_tower(name, block=getattr(card, "block", None) if block is None else block, device=device)


def _reduce(tower: Tower, picture: Any, reducers: Sequence[Reducer], padding: PaddingChoice) -> list[Reduction]:
    """Run the tower, once for all methods that work on its output, and return the reduction of each reducer."""
    if reducers[0].in_tower:
        return [tower.reduce(picture, reducer, padding=padding)[0][1] for reducer in reducers]
    (tokens,) = tower.encode(picture, reducers[0].needs, padding=padding)
    return [reducer.plan(tokens) for reducer in reducers]


def _processed_picture(tower: Tower, picture: Any, padding: PaddingChoice) -> Any:
    """Return the picture as the tower sees it, scaled and cropped."""
    from torino.datasets.images import as_seen, mean_color, prepare

    prepared = prepare(picture, padding, mean_color(tower.processor))
    return as_seen(tower.processor(images=[prepared], return_tensors="pt"), tower.processor, [prepared])[0]


# ---------------------------------------------------------------------- output


def _summarize(setting: LookSetting, plan: Reduction, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the token counts and the largest groups of a reduction."""
    sizes: list[int] = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
    largest = sorted(range(len(plan)), key=lambda token: (-sizes[token], token))[:LARGEST_GROUPS]
    given = {name: value for name, value in vars(setting).items() if value is not None}
    return {
        "spec": plan.by,
        **given,
        "tokens": len(plan),
        "removed": round(1 - len(plan) / plan.patches, 4),
        "single": sum(size == 1 for size in sizes),
        "largest": [
            {
                "patches": sizes[token],
                "concept": None if int(plan.concept[token]) < 0 else int(plan.concept[token]),
                "name": names.get(int(plan.concept[token])),
            }
            for token in largest
        ],
    }


def _table(summaries: Sequence[Mapping[str, Any]]) -> Table:
    from torino.core.explanation import format_removed

    table = Table(box=None, pad_edge=False)
    headings = {"k": "k", "delta": "δ", "budget": "budget", "keep": "keep"}
    given = [name for name in headings if any(name in summary for summary in summaries)]
    for heading in (*(headings[name] for name in given), "tokens", "removed", "single patches"):
        table.add_column(heading, justify="right")
    table.add_column("largest groups, in patches")
    for summary in summaries:
        groups = ", ".join(_format_group(group) for group in summary["largest"] if group["patches"] > 1)
        table.add_row(
            *(_format_option(name, summary.get(name)) for name in given),
            f"[bold]{summary['tokens']}[/]",
            format_removed(1, 1 - summary["removed"]),
            str(summary["single"]),
            groups or "none",
        )
    return table


def _format_option(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.4g}%" if name == "keep" else str(value)


def _format_group(group: Mapping[str, Any]) -> str:
    if group["name"]:
        return f"{group['patches']} {escape(group['name'])}"
    return str(group["patches"]) if group["concept"] is None else f"{group['patches']} [dim]#{group['concept']}[/]"
