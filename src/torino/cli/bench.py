"""``torino bench``: measure what methods cost, side by side in one run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    NO_SAE,
    AttentionOption,
    ClipOption,
    DeviceOption,
    DtypeOption,
    MethodsOption,
    PaddingOption,
    PositionsOption,
    all_methods,
    check_sae_names,
    errors,
    examples,
    find_package,
    load_sae,
    load_session,
    memory_errors,
    missing_sae,
    named_methods,
    note,
    out,
    parse_budgets,
    parse_pairs,
    quiet_transformers,
    split_list,
    split_names,
)
from torino.cli._photos import default_photo_sae, photo_tokens
from torino.cli._progress import progress
from torino.cli._stop import START_OVER, on_stop
from torino.core.errors import BadParameter, TorinoError
from torino.core.extras import install_command, optional_import

if TYPE_CHECKING:
    from torino.evaluation.latency import BenchPlan
    from torino.evaluation.protocol import Setting

EPILOG = examples(
    "# bundled tokens, reducers alone",
    "torino bench",
    "torino bench --tokens tokens.npz --sae ./my-sae --methods torino-m,visionzip,random --budget 192,64",
    "torino bench --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --images ./photos --device cuda -o bench.json",
    "torino plot bench.json -o figures",
    "torino bench --methods torino-m --prefilter both",
)
PrefilterChoice = Literal["auto", "int8", "bf16", "off", "both"]
NOISE = (480, 640)  # height and width of generated images


def bench(
    model: Annotated[
        str | None, typer.Option(help="Hub name, folder or model package; without it, the reducers alone.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Token file to measure on without a model (default: bundled tokens).")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            help="Folder, parquet or tar of images for --model; 'example' for the bundled photos (default: noise)."
        ),
    ] = None,
    methods: MethodsOption = "all",
    sae: Annotated[
        list[str] | None,
        typer.Option(callback=check_sae_names, help="SAE, several allowed; 'none' runs without one."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Tokens per image, separated by commas, or 'none'.")] = "192,128,64",
    kd: Annotated[
        str | None,
        typer.Option(
            "--kd", help="Pairs k,delta of dynamic TORINO, separated by spaces, or 'none' (default: 3,3 2,2 1,1)."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="Images on which reducers are timed.")] = 50,
    warmups: Annotated[int, typer.Option(help="Untimed images before that.")] = 10,
    answers: Annotated[int, typer.Option(help="Images on which whole answers are timed; 0 for none.")] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every answer, in tokens.")] = 16,
    question: Annotated[str | None, typer.Option(help="Question for the model.")] = None,
    padding: PaddingOption = "crop",
    positions: PositionsOption = "auto",
    attention: AttentionOption = "auto",
    prefilter: Annotated[
        PrefilterChoice,
        typer.Option(help="Search of the SAEs; affects time only. auto: int8 where it is faster; both: side by side."),
    ] = "auto",
    clip: ClipOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    seed: Annotated[int, typer.Option(help="Selects the images.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the measurements as JSON.")] = None,
) -> None:
    """Measure what reduction methods cost: the reducer alone, first token, whole answer, memory.

    The reducer alone is measured as in the paper: 50 images after 10 warm-ups, without tower and language model.
    """
    on_stop(START_OVER)
    if model is not None and tokens is not None:
        raise BadParameter("Give --model or --tokens, not both: tokens are measured without a model.")
    if model is None and (images is not None or clip is not None or question is not None):
        option = "--images" if images is not None else "--clip" if clip is not None else "--question"
        raise BadParameter(f"{option} needs a model. Give --model too, or omit it.")
    if output is not None and output.suffix != ".json":
        raise BadParameter(f"--output must end in .json, got {output.name!r}.")
    if output is not None and output.is_dir():
        raise BadParameter(f"--output {output} is a folder. Give the path of a file.")
    from torino.core.device import resolve_device
    from torino.core.io import write_json
    from torino.evaluation.latency import QUESTION, Bench, BenchPlan

    plan = BenchPlan(count, warmups, answers, max_new_tokens, seed)
    target = resolve_device(device)
    package = find_package(model)
    if not sae and package is not None and package.sae is not None:
        sae = [str(model)]
    if not sae and model is None and tokens is None:
        sae = [default_photo_sae()]
    saes = _load_saes(sae or [], target)
    first_sae = next(iter(saes.values()), None)
    saes, notes = _with_prefilter(saes, prefilter)
    settings, left_out = _settings(
        methods,
        parse_budgets("--budget", budget),
        None if kd is None else parse_pairs(kd),
        saes,
        with_model=model is not None,
        with_clip=clip is not None,
    )
    with warnings.catch_warnings(), progress(errors) as report:
        warnings.simplefilter("ignore")  # of transformers
        bench_run = Bench(settings, saes, plan, report)
        bench_run.notes += [*notes, *left_out]
        if model is None:
            from torino.core.tokens import load_tokens

            loaded = photo_tokens(sae[0] if sae else None, first_sae) if tokens is None else load_tokens(tokens)
            source = (
                f"the four bundled photos as tokens of {loaded[0].origin}"
                if tokens is None
                else f"{len(loaded)} images of {tokens.name}"
            )
            bench_run.on_tokens(loaded, target, source)
        else:
            from torino.vlm.loading import check_model

            check_model(model)
            photos, source = _open_images(images, plan)
            if images is None:
                bench_run.notes.append(
                    "No --images were given, so the images are noise: times are right for a fixed budget, but the "
                    "lengths of dynamic methods say nothing about photos."
                )
            with quiet_transformers(), memory_errors(model, device):
                vlm = load_session(model, device, dtype, padding, positions, attention, clip)
                name = Path(model).name or model
                bench_run.on_model(vlm, photos, question=question or QUESTION, name=name, source=source)
    document = bench_run.document()
    _print(document)
    if output is not None:
        write_json(output, document)
        text = f"Wrote {output}. Next: torino plot {output} -o figures"
        out.print(escape(text), highlight=False, soft_wrap=True)
    named = named_methods(split_list(methods))
    failed = [why for setting, why in bench_run.left_out if setting.method in named]
    if failed or not any(row.reducer is not None for row in bench_run.rows):
        raise TorinoError(f"Not all methods that were asked for could be measured. {(failed or bench_run.notes)[0]}")


def _load_saes(names: list[str], device: Any) -> dict[str, Any]:
    saes: dict[str, Any] = {}
    for name in names:
        label = NO_SAE if name == NO_SAE else Path(name).name or name
        if label in saes:
            raise BadParameter(f"Two SAEs are called {label!r}, so their rows could not be told apart.")
        saes[label] = load_sae(name, device=device)
    return saes


def _with_prefilter(saes: dict[str, Any], prefilter: PrefilterChoice) -> tuple[dict[str, Any], list[str]]:
    """Return the SAEs with the wanted search, twice for ``both``, and notes about what is not available."""
    from torino.core.topk.prefilter import backend_for
    from torino.sae import SAE

    searches = {"plain": "off", "int8": "int8"} if prefilter == "both" else {"": prefilter}
    result, notes = dict[str, Any](), list[str]()
    for label, sae in saes.items():
        if not isinstance(sae, SAE):  # without an SAE there is nothing to search
            result[label] = sae
            continue
        for suffix, search in searches.items():
            if search == "int8" and backend_for(sae.W_enc.device) is None:
                notes.append(f"The int8 prefilter was left out: on a CPU it needs {install_command('torino[fast]')}.")
                if suffix:
                    continue
                search = "off"
            copied = result[f"{label} {suffix}".rstrip()] = copy.copy(sae)  # shares the weights
            copied.prefilter = cast(Any, search)
    return result, list(dict.fromkeys(notes))


def _settings(
    methods: str,
    budgets: list[int],
    pairs: list[tuple[int, int]] | None,
    saes: dict[str, Any],
    *,
    with_model: bool,
    with_clip: bool,
) -> tuple[list[Setting], list[str]]:
    """Return the settings that the options describe, and notes about what 'all' leaves out."""
    from torino.evaluation.protocol import (
        FULL,
        KD_METHODS,
        KD_PAIRS,
        dynamic_settings,
        fixed_settings,
        has_parameter,
        own_settings,
        split_specs,
    )
    from torino.reducers import get
    from torino.reducers.base import method_name

    words, notes = split_list(methods), list[str]()
    if not words:
        raise BadParameter("--methods is empty. Name methods, or omit it for all.")
    names, specs = split_names(words)
    if "all" in names:
        every, notes = all_methods(sae=bool(saes), clip=with_clip or not with_model, tower=with_model)
        names = [*every, *(name for name in names if name not in ("all", *every))]
    for name in [*names, *map(method_name, specs)]:
        get(name)
        if has_parameter(name, "sae") and not saes:
            raise missing_sae(name)
    labels = list(saes)
    budgeted, as_written = split_specs(specs)
    if pairs and not set(names) & set(KD_METHODS):
        raise BadParameter(
            "--kd has no effect: neither torino-p nor torino-m is measured. Name one of them, or omit it."
        )
    pairs = list(KD_PAIRS) if pairs is None else pairs
    idle = [name for name in names if not budgets and not (pairs and name in KD_METHODS)]
    idle += [spec for spec in budgeted if not budgets and spec not in as_written]
    if idle:
        raise BadParameter(f"{idle[0]} has no number of tokens to be measured at. Give --budget, or leave it out.")
    settings = [
        *own_settings(as_written, labels),
        *dynamic_settings(names, labels, pairs),
        *fixed_settings([*names, *budgeted], budgets, labels, 1),
    ]
    if len(labels) > 1:
        settings = [replace(s, label=f"{s.label}, {s.sae}") if s.sae else s for s in settings]
    return [FULL, *settings] if with_model else settings, notes


def _open_images(images: str | None, plan: BenchPlan) -> tuple[Any, str]:
    """Return the images and their description."""
    if images is None:
        import numpy as np

        with optional_import("Measuring a model needs", "torino[vlm]"):
            from PIL import Image
        rng = np.random.default_rng(plan.seed)
        noise = [Image.fromarray(rng.integers(0, 256, (*NOISE, 3), dtype=np.uint8)) for _ in range(plan.images)]
        return noise, "generated noise"
    from torino.datasets import open_photos

    if images == "example":
        from torino.datasets.bundled import example_folder

        return _ImageData(open_photos(example_folder() / "photos")), "the four bundled photos"
    photos = open_photos(images)
    return _ImageData(photos), photos.describe


class _ImageData:
    """The encoded images of a source, read on access."""

    def __init__(self, photos: Any) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> Any:
        return self.photos[index].data


def _print(document: dict[str, Any]) -> None:
    protocol, rows = document["protocol"], cast(list[dict[str, Any]], document["rows"])
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
    table.add_column("method", vertical="bottom", overflow="fold")  # shrinks first
    filled = {name: cells for name, cell in columns.items() if any(cells := [cell(row) for row in rows])}
    for name in filled:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for i, row in enumerate(rows):
        table.add_row(escape(row["label"]), *[cells[i] for cells in filled.values()])
    out.print(table)
    distinct = protocol["distinct_images"]
    repeated = f", {distinct} of them distinct" if distinct < protocol["images"] else ""
    out.print(
        f"Mean ± standard deviation over {protocol['images']} images{repeated} after {protocol['warmups']} warm-ups; "
        f"{escape(protocol['source'])}. Memory: peak increase during "
        f"{'an answer' if protocol['memory'] == 'answer' else 'reduction'}.",
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
    exit_ = protocol.get("early_exit")
    if exit_:
        out.print(
            f"In all rows, also with all tokens, the tower stops after block {exit_['blocks']} of {exit_['of']}. The "
            f"stock model runs all: {1e3 * max(exit_['all_seconds'] - exit_['seconds'], 0):.1f} ms more.",
            highlight=False,
            soft_wrap=True,
        )
    for name, left in cast(dict[str, dict[str, float]], document["survivors"]).items():
        out.print(
            f"{escape(name)}: for the top {left['k']:g} concepts the int8 prefilter kept {left['mean']:.1f} "
            f"latents per token (median {left['median']:.0f}, 99 % {left['percentile_99']:.0f}, "
            f"max {left['most']:.0f}); "
            f"{left['left_to_plain']:,} of {left['tokens']:,} tokens needed the plain search.",
            highlight=False,
            soft_wrap=True,
        )
    for text in cast(list[str], document["notes"]):
        note(text)


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _mean(value: dict[str, float] | None, digits: int) -> str:
    return "" if value is None else _number(value["mean"], digits)


def _spread(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['mean']:.2f} ± {value['std']:.2f}"
