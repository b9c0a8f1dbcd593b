"""Options, parsing and consoles that the commands share. Importing it is cheap: torch is loaded on first use."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from torino.cli._console import SafeConsole
from torino.core.defaults import DEFAULT_METHOD, KD_METHOD
from torino.core.errors import BadFile, BadParameter, TorinoError

if TYPE_CHECKING:
    from torino.core.concepts import ConceptEncoder
    from torino.reducers import Reducer
    from torino.vlm import VLM
    from torino.vlm.loading import ModelPackage

out = SafeConsole(emoji=False)
errors = SafeConsole(stderr=True, emoji=False)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
LAB = "lab"
"""The default model, from the optional package torino-lab."""
NO_SAE = "none"
PLACEHOLDER_BUDGET = 1 << 20  # of a reducer whose budget KeepShare sets for each image

# The same choices as in torino.vlm and torino.datasets, which need torch.
PaddingChoice = Literal["crop", "square"]
PositionsChoice = Literal["auto", "compact", "original", "median"]
AttentionChoice = Literal["auto", "plain", "proportional", "restore"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

ImageArgument = Annotated[
    str, typer.Argument(metavar="IMAGE", help="Image file, or a bundled photo: astronaut, coffee, chelsea, rocket.")
]
QuestionArgument = Annotated[str, typer.Argument(metavar="QUESTION", help="Question about the image.")]
VideoOption = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Ask about a video instead: a file, or a folder of frames.")
]
FpsOption = Annotated[
    float | None, typer.Option(help="Frames per second to read of a video; the rate of the frames of a folder.")
]
FramesOption = Annotated[
    int | None, typer.Option(min=1, help="Number of frames to read of a video. Default: 8, or all of a folder.")
]
ModelOption = Annotated[
    str, typer.Option(help="Hub name, folder, or installed model package; 'lab' comes with torino-lab.")
]


def check_sae_names(given: str | list[str] | None) -> str | list[str] | None:
    """Refuse an empty name of an SAE, as an unset variable of the shell gives, before anything is loaded."""
    if any(not name.strip() for name in ([given] if isinstance(given, str) else given or [])):
        raise BadParameter("--sae is empty. Give a folder, a file or a hub repository, or 'none' for no SAE.")
    return given


SaeOption = Annotated[
    str | None,
    typer.Option(
        callback=check_sae_names,
        help="Folder, file or hub repository of the SAE; 'none' runs without one. Default: that of the model package.",
    ),
]
ClipOption = Annotated[
    str | None, typer.Option(help="CLIP whose text tower reads the question, for methods that need it (cdpruner).")
]
MethodOption = Annotated[
    str, typer.Option(help="Method by name or with options in brackets (torino list); 'none' keeps all tokens.")
]
OptionalMethodOption = Annotated[
    str | None,
    typer.Option(
        help="Method by name or with options in brackets (torino list); 'none' keeps all tokens. "
        f"Default: {DEFAULT_METHOD}, or {KD_METHOD} with --kd."
    ),
]
MethodsOption = Annotated[
    str, typer.Option(help="Methods separated by commas, optionally with options in brackets, or 'all'.")
]
KdOption = Annotated[
    str | None, typer.Option("--kd", help="k,delta: concepts per patch, and how many linked patches share.")
]
BudgetOption = Annotated[int | None, typer.Option(min=1, help="Exactly this many tokens per image.")]
KeepOption = Annotated[str | None, typer.Option(help="Budget as a share of the patches: 25% or 0.25.")]
LevelsOption = Annotated[int | None, typer.Option(help="Use only the first Matryoshka levels of the SAE.")]
PaddingOption = Annotated[
    PaddingChoice, typer.Option(help="crop: the processor's own cropping; square: pad to a square first.")
]
PositionsOption = Annotated[
    PositionsChoice,
    typer.Option(
        help="compact: renumber tokens; original: keep their positions; median: original, merged tokens at the median "
        "of their patches; auto: follow the method."
    ),
]
AttentionOption = Annotated[
    AttentionChoice,
    typer.Option(
        help="proportional: attend to a merged token as to all its patches; restore: and calibrate by distance "
        "(RESTORE); auto: follow the method."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
DtypeOption = Annotated[DtypeChoice | None, typer.Option(help="Default: float32 on the CPU, else the checkpoint's.")]
AllowOutsideOption = Annotated[
    bool, typer.Option("--allow-outside", help="Read images that a table or task file names outside its folder.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def examples(*lines: str) -> str:
    """Build the examples below a command's help: one command per line, ready to copy; ``#`` lines are comments."""
    shown = [f"[dim]{escape(line)}[/]" if line.startswith("#") else f"[cyan]{escape(line)}[/]" for line in lines]
    return "\n\n".join(["[bold]Examples[/]", *shown])


def note(text: str) -> None:
    """Print a note on the error console."""
    errors.print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True, highlight=False)


def warn(text: str) -> None:
    """Print a warning that must not be overlooked on the error console."""
    errors.print(f"[bold red]warning:[/] [bold]{escape(text)}[/]", soft_wrap=True, highlight=False)


# ---------------------------------------------------------------------- SAEs and reducers


def find_package(model: str | None) -> ModelPackage | None:
    """Return the installed model package of this name, if there is one."""
    from torino.vlm import saes

    return saes.find_package(model)


def load_sae(name: str, levels: int | None = None, device: Any = "cpu", *, decoder: bool = False) -> ConceptEncoder:
    """Load an SAE: folder, file, hub repository, model package (``lab``), ``example``, or ``none`` for no SAE."""
    from torino.sae import SAE
    from torino.vlm.saes import load_encoder

    if name == NO_SAE and levels is not None:
        raise BadParameter("--levels selects Matryoshka levels of an SAE, and --sae is none. Omit one of them.")
    loaded = load_encoder(name, decoder=decoder)
    if not isinstance(loaded, SAE):
        return loaded
    return (loaded if levels is None else loaded.first(levels)).to(device)


def takes_parameter(method: str, parameter: str) -> bool:
    """Return whether a method, by name or spec, has a parameter; of methods joined by ``+``, the first."""
    from torino.reducers import get
    from torino.reducers.base import method_name

    kind = get(method_name(method))
    return is_dataclass(kind) and parameter in {field.name for field in fields(kind)}


def reads_concepts(method: str) -> bool:
    """Return whether a method, by name or spec, reads concepts of an SAE."""
    return takes_parameter(method, "sae")


def all_methods(*, sae: bool, clip: bool, tower: bool = True) -> tuple[list[str], list[str]]:
    """Return the methods that ``all`` stands for, and notes about those that cannot run.

    Parameters
    ----------
    sae, clip, tower : bool
        Whether there is an SAE, a text tower that reads the question, and a model with its vision tower.
    """
    from torino.evaluation.protocol import default_methods
    from torino.reducers import get

    names = default_methods(text_query=True)
    left_out = {
        "which read concepts: give --sae": [name for name in names if not sae and reads_concepts(name)],
        "which read the question: give --clip": [
            name for name in names if not clip and get(name).needs & {"joint", "text"}
        ],
        "which run inside a vision tower or a language model: give --model": [
            name for name in names if not tower and (get(name).in_tower or get(name).in_language_model)
        ],
    }
    notes = [f"Left out: {', '.join(group)}, {reason}." for reason, group in left_out.items() if group]
    return [name for name in names if not any(name in group for group in left_out.values())], notes


def expand_methods(words: Sequence[str], *, sae: bool, clip: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the names and the specs of ``--methods``, and notes about methods of ``all`` that cannot run."""
    from torino.reducers import get

    if not words:
        raise BadParameter("--methods is empty. Name methods, all, or none to run the baseline alone.")
    names, specs = split_names(words)
    notes: list[str] = []
    if "all" in names:
        every, notes = all_methods(sae=sae, clip=clip)
        names = [*every, *(name for name in names if name not in ("all", *every))]
    elif list(words) == ["none"]:
        names = []
    for name in names:
        get(name)
    return names, specs, notes


def named_methods(words: Sequence[str]) -> list[str]:
    """Return the names in a list of names and specs that the user has written, without ``all``."""
    from torino.reducers.base import method_name

    return [method_name(word) for word in words if word != "all"]


def split_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the plain names and the specs in a list of methods; methods joined by ``+`` are a spec.

    Examples
    --------
    >>> split_names(["random", "tome(budget=64)", "random+fastv(budget=8)"])
    (['random'], ['tome(budget=64)', 'random+fastv(budget=8)'])
    """
    specs = [word for word in words if "(" in word or "+" in word]
    return [word for word in words if word not in specs], specs


def default_sae(method: str, model: str | None) -> str | None:
    """Return the SAE of the model package for a method that reads concepts, if there is one."""
    package = find_package(model)
    return model if package is not None and package.sae is not None and takes_parameter(method, "sae") else None


def build_reducer(
    method: str, sae: str | None, levels: int | None, options: dict[str, Any], device: Any = "cpu"
) -> Reducer:
    """Build the reducer that the options describe; omitted options keep the method's defaults."""
    from torino.reducers import make

    parameters = {name: value for name, value in options.items() if value is not None}
    reads = takes_parameter(method, "sae")
    if reads and sae is None:
        raise missing_sae(method)
    if sae is not None and not reads:
        raise BadParameter(f"{method} reads no concepts, so --sae has no effect. Omit it.")
    if sae is not None:
        parameters["sae"] = load_sae(sae, levels, device)
    return make(method, **parameters)


def missing_sae(method: str) -> BadParameter:
    """Build the error for a method that reads concepts when no SAE is given."""
    return BadParameter(
        f"{method} reads concepts and needs an SAE: --sae FOLDER, --sae owner/repository, or --sae none "
        "to run without one."
    )


def build_reducer_with_budget(
    method: str,
    sae: str | None,
    levels: int | None,
    kd: str | None,
    budget: int | None,
    keep: str | None,
    device: Any = "cpu",
) -> Reducer | None:
    """Build the reducer of ``--method``, ``--kd``, ``--budget`` and ``--keep``; None for ``none``."""
    from torino.reducers import KeepShare

    if method == "none":
        given = {"kd": kd, "budget": budget, "keep": keep, "sae": sae, "levels": levels}
        superfluous = [name for name, value in given.items() if value is not None]
        if superfluous:
            raise BadParameter(f"--method none keeps all tokens, so --{superfluous[0]} has no effect. Omit it.")
        return None
    share = None if keep is None else parse_share(keep)
    if share is not None and budget is not None:
        raise BadParameter("Give --budget or --keep, not both.")
    k, delta = (None, None) if kd is None else parse_pair(kd)
    if share is not None and takes_parameter(method, "budget"):
        budget = PLACEHOLDER_BUDGET
    reducer = build_reducer(method, sae, levels, {"k": k, "delta": delta, "budget": budget}, device)
    return reducer if share is None else KeepShare(reducer, share)


def check_clip(clip: str | None, method: str, reducer: Reducer | None) -> None:
    """Refuse a method that reads the question without ``--clip``, and ``--clip`` for other methods."""
    from torino.vlm.loading import local_name

    reads = reducer is not None and "text" in reducer.needs
    if reads and clip is None:
        raise BadParameter(
            f"{method} chooses patches by the question and needs the CLIP that reads it: --clip "
            "openai/clip-vit-large-patch14-336 for LLaVA-1.5, or the folder of another. To ignore the question: "
            "--method \"cdpruner(relevance='none')\"."
        )
    if clip is not None and not reads:
        raise BadParameter(f"{method} does not read the question, so --clip has no effect. Omit it.")
    if clip is not None:
        local_name(clip)


# ---------------------------------------------------------------------- images and models


def open_single_image(path: str | Path) -> Any:
    """Open the image of a question; a bundled photo may be given by its name. Animations are refused."""
    from torino.datasets.bundled import PHOTOS, example_folder
    from torino.datasets.images import open_image

    if str(path) in PHOTOS and not Path(path).exists():
        path = example_folder() / "photos" / f"{path}.jpg"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*several frames")
        try:
            image = open_image(path)
        except UserWarning as error:
            raise BadFile(f"{path} has several frames. Save the frame you mean as a PNG or JPEG file.") from error
    if max(image.size) < 2:
        raise BadFile(f"{path} is a single pixel. Give a larger image.")
    return image


def check_image_path(option: str, path: Path) -> Path:
    """Refuse a path to which no image can be written."""
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise BadParameter(f"{option} must end in .png, .jpg or .webp, got {path.name!r}.")
    if path.is_dir():
        raise BadParameter(f"{option} {path} is a folder. Give the path of a file.")
    return path


@contextmanager
def quiet_transformers() -> Generator[Any]:
    """Yield transformers with its progress bars, advice and warnings, and those of the hub client, turned off."""
    from torino.vlm.loading import quiet_loading

    with quiet_loading() as library:
        yield library


def load_session(
    model: str,
    device: str,
    dtype: DtypeChoice | None,
    padding: PaddingChoice,
    positions: PositionsChoice,
    attention: AttentionChoice,
    clip: str | None,
) -> VLM:
    """Load a model with its host options, and the text tower that reads questions if ``--clip`` is given."""
    from torino.vlm import load_clip_text, load_vlm

    text_query = None if clip is None else load_clip_text(clip, device=device, dtype=dtype)
    return load_vlm(
        model, device, dtype, padding=padding, positions=positions, attention=attention, text_query=text_query
    )


@contextmanager
def memory_errors(model: str, device: str) -> Generator[None]:
    """Turn out-of-memory errors into one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        full = isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text
        if not full:
            raise
        raise TorinoError(
            f"{model} does not fit into the memory of this machine (--device {device}). "
            "Try --dtype bfloat16, another device, or a smaller model."
        ) from error


# ---------------------------------------------------------------------- parsing


def parse_share(text: str) -> float:
    """Parse a share such as ``25%`` or ``0.25``."""
    try:
        share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise BadParameter(f"--keep must be a share such as 25% or 0.25, got {text!r}.")
    return share


def split_list(text: str) -> list[str]:
    """Split at commas; commas inside brackets do not count.

    Examples
    --------
    >>> split_list("random, torino-m(k=2, delta=1),tome")
    ['random', 'torino-m(k=2, delta=1)', 'tome']
    """
    words = [word.strip() for word in re.split(r",(?![^()]*\))", text)]
    return [word for word in words if word]


def parse_pair(text: str, option: str = "--kd") -> tuple[int, int]:
    """Parse one pair ``k,delta``.

    Examples
    --------
    >>> parse_pair("3,2")
    (3, 2)
    """
    match = re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*", text)
    if match is None or not 1 <= int(match[2]) <= int(match[1]):
        raise BadParameter(f"{option} takes k,delta with delta from 1 to k, such as 2,2, got {text!r}.")
    return int(match[1]), int(match[2])


def parse_pairs(text: str, option: str = "--kd") -> list[tuple[int, int]]:
    """Parse pairs ``k,delta`` separated by spaces; ``none`` gives an empty list.

    Examples
    --------
    >>> parse_pairs("3,3 2,1"), parse_pairs("none")
    ([(3, 3), (2, 1)], [])
    """
    return [] if text.strip() == "none" else [parse_pair(word, option) for word in text.split()]


def parse_budgets(option: str, text: str) -> list[int]:
    """Parse token counts separated by commas or spaces; ``none`` gives an empty list.

    Examples
    --------
    >>> parse_budgets("--budget", "192,64"), parse_budgets("--budget", "none")
    ([192, 64], [])
    """
    words = [] if text.strip() == "none" else re.split(r"[,\s]+", text.strip())
    if any(not re.fullmatch(r"\d{1,9}", word) or int(word) < 1 for word in words):
        raise BadParameter(f"{option} takes token counts separated by commas, such as 192,64, or none, got {text!r}.")
    return list(dict.fromkeys(int(word) for word in words))


def parse_shard(text: str) -> tuple[int, int]:
    """Parse ``i/n``, counted from 1, as (i - 1, n).

    Examples
    --------
    >>> parse_shard("2/4")
    (1, 4)
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise BadParameter(f"--shard takes i/n with i from 1 to n, such as 1/4, got {text!r}.")
    return int(match[1]) - 1, int(match[2])


def one_of(words: Sequence[str]) -> str:
    """Join words with commas and "or".

    Examples
    --------
    >>> one_of(["a", "b", "c"])
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
