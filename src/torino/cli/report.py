"""``torino report`` and ``torino plot``: tables and figures of evaluation runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from torino.cli._common import AllowOutsideOption, errors, examples, out, split_list, warn
from torino.cli._stop import on_stop
from torino.core.errors import BadFile, BadParameter, TorinoError

if TYPE_CHECKING:
    from torino.evaluation.reporting.figures import FigureExample, Point
    from torino.evaluation.reporting.summary import Summary

REPORT_EPILOG = examples(
    "torino report runs/llava",
    "torino report runs/llava --against paper -o report",
    "torino report runs/llava --against paper:llava-1.5-13b-x64 --versus visionzip --by image",
    "torino report runs/llava --tasks GQA,POPE -o two",
)
PLOT_EPILOG = examples(
    "torino plot runs/llava -o figures",
    "torino plot runs/x4 runs/x64 --kind pareto -o figures",
    "torino plot runs/llava --kind qualitative --samples POPE:3,GQA:17 -o figures",
    "torino plot bench.json --format pdf -o figures",
    "# the paper's own tables",
    "torino plot paper -o figures",
)
KINDS = ("distribution", "pareto", "accuracy", "latency", "qualitative", "teaser")
EXAMPLE_KINDS = ("qualitative", "teaser")
FORMATS = ("png", "pdf", "svg")
GRADES = "grades.jsonl"
CAPTIONS = {
    "accuracy": "Relative score against visual tokens, one line per method; bands are confidence intervals.",
    "distribution": "Share of tokens that dynamic TORINO removed from each image. Boxes span the 10th to the 90th "
    "percentile, the line is the median, the diamond the mean; whiskers span minimum to maximum.",
    "pareto": "Relative score of dynamic TORINO against retained tokens; curves connect the pairs (k, δ).",
}


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder written by torino eval.")],
    against: Annotated[
        str | None, typer.Option(help="paper, or paper:TABLE,…: add the figures printed in the paper.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the tasks' files (default: as recorded in the run).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write to (default: RUN/report).")
    ] = None,
    versus: Annotated[
        str | None,
        typer.Option(help="Method or setting that all others are compared with (default: TORINO-M of the tier)."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks to report, separated by commas (default: all).")] = None,
    baseline_of: Annotated[
        Path | None, typer.Option(help="Another run over the same data whose full-token answers are the baseline.")
    ] = None,
    by: Annotated[Literal["question", "image"], typer.Option(help="What the bootstrap resamples.")] = "question",
    draws: Annotated[int, typer.Option(help="Number of bootstrap resamples.", min=100)] = 10_000,
    figures: Annotated[bool, typer.Option(help="Add figures to the HTML page; needs matplotlib.")] = True,
) -> None:
    """Write the report of a run: Markdown, CSV, LaTeX and an HTML page.

    All results are saved as scores.json, so that the report can be written again without the data: in the run, or in
    the folder of --output, outside of which nothing is written.
    """
    source, _, table = (against or "paper").partition(":")
    if source != "paper":
        raise BadParameter(f"--against must be paper or paper:TABLE,…, got {against!r}.")
    from torino.evaluation.judge import Judge
    from torino.evaluation.reporting.report import list_warnings, write_report
    from torino.evaluation.reporting.summary import summarize_and_save
    from torino.evaluation.reporting.tables import select_paper_tables
    from torino.evaluation.results import open_run

    opened = open_run(run)
    if tasks is not None:
        opened = opened.select(split_list(tasks))
    if output is None and not os.access(opened.folder, os.W_OK):
        raise BadParameter(f"Cannot write to {opened.folder}: it is read-only. Give another folder: -o FOLDER.")
    saved = opened.folder if output is None else output
    judge = Judge.from_environment(cache=saved / GRADES, other_caches=[opened.folder / GRADES])
    if judge is not None:
        advice = f"Run the same command again to continue; the judge's grades so far are in {saved / GRADES}."
        on_stop(advice, at_once=True)
    with errors.status("Scoring …"):
        summary = summarize_and_save(
            opened,
            data,
            saved,
            judge=judge,
            versus=versus,
            by=by,
            baseline_of=baseline_of,
            draws=draws,
        )
    papers = select_paper_tables(summary, table or None) if against else []
    drawn = _draw_page_figures(summary) if figures else {}
    written = write_report(summary, output or opened.folder / "report", papers=papers, figures=drawn)
    for text in list_warnings(summary):
        warn(text)
    progress = summary["progress"]
    if not progress["whole"]:
        text = f"The run is not finished: {progress['answers']:,} of {progress['of']:,} answers. The report notes this."
        errors.print(text, style="yellow", highlight=False)
    _print_paths(written)


def plot(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…",
            help="Run folders, files of torino bench, files of examples, or 'paper' for the paper's own tables.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    kind: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(KINDS)}; several separated by commas (default: all that are possible)."),
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help=f"{', '.join(FORMATS)}; several separated by commas.")
    ] = "png,pdf",
    tier: Annotated[str | None, typer.Option(help="Tier of the qualitative figure, such as 2,2 or 128.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Its methods, separated by commas (default: TORINO and the first others of the tier)."),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Its questions as TASK:INDEX, separated by commas (default: the first saved ones)."),
    ] = None,
    allow_outside: AllowOutsideOption = False,
) -> None:
    """Draw figures of runs from their result files."""
    kinds = KINDS if kind is None else _parse_choices("--kind", kind, KINDS)
    file_formats = _parse_choices("--format", formats, FORMATS)
    from torino.evaluation.reporting.figures import save_figure
    from torino.evaluation.reporting.figures.style import import_matplotlib

    import_matplotlib()  # before runs are read
    given = {"--tier": tier, "--methods": methods, "--samples": samples}
    selecting = [option for option, text in given.items() if text is not None]
    if selecting and not set(kinds) & set(EXAMPLE_KINDS):
        raise BadParameter(
            f"{selecting[0]} selects what the figures {' and '.join(EXAMPLE_KINDS)} show, and --kind has neither. Omit "
            "one of them."
        )
    selection = _ExampleSelection(tier, split_list(methods or ""), split_list(samples or ""), output / GRADES)
    opened = _open_sources(sources, allow_outside)
    drawn: dict[str, Any] = {}
    reasons: list[str] = []
    for item in kinds:
        try:
            drawn |= _draw(item, opened, selection)
        except TorinoError as error:  # for example, the data is missing; other figures can still be drawn
            if selecting and item in EXAMPLE_KINDS:
                raise
            reasons.append(str(error))
    if kind and reasons:
        raise BadParameter(reasons[0])
    if not drawn:
        raise BadParameter(f"No figure can be drawn. {' '.join(dict.fromkeys(reasons))}".strip())
    for name, figure in drawn.items():
        _print_paths(save_figure(figure, output, name, file_formats))


def _parse_choices(option: str, text: str, choices: Sequence[str]) -> list[str]:
    """Return comma-separated choices of an option."""
    words = split_list(text)
    for word in words or [text]:
        if word not in choices:
            raise BadParameter(f"{option} must be one or several of {', '.join(choices)}, got {word!r}.")
    return words


@dataclass(frozen=True)
class _ExampleSelection:
    """Which examples of a run the figures with images show, and the file for new grades of their answers."""

    tier: str | None
    methods: list[str]
    samples: list[str]
    grades: Path | None = None


@dataclass
class _PlotSources:
    """Contents of the files and folders to plot."""

    summaries: list[Summary] = field(default_factory=list["Summary"])
    bench: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    examples: list[FigureExample] = field(default_factory=list["FigureExample"])
    folders: list[Path] = field(default_factory=list[Path])
    paper: bool = False

    def points(self) -> list[Point]:
        """Return the points of runs and of the paper."""
        from torino.evaluation.reporting.figures import collect_points, paper_points

        return collect_points(self.summaries) + (paper_points() if self.paper else [])


def _open_sources(names: list[str], allow_outside: bool) -> _PlotSources:
    from torino.core.checks import expand_path
    from torino.core.io import read_json
    from torino.evaluation.reporting.figures import read_bench, read_examples
    from torino.evaluation.reporting.scores_file import read_scores
    from torino.evaluation.reporting.summary import load_summary
    from torino.evaluation.results import open_run

    sources = _PlotSources()
    for name in names:
        path = expand_path(name)
        if name == "paper":
            sources.paper = True
        elif path.is_dir():
            sources.summaries.append(load_summary(open_run(path)))
            sources.folders.append(path)
        elif not path.is_file():
            raise BadFile(f"There is no run folder and no file {name}.")
        else:
            content = str(read_json(path).get("format", ""))
            if content.startswith("torino-scores/"):
                sources.summaries.append(read_scores(path))
            elif content.startswith("torino-cells/"):
                sources.examples += read_examples(path, allow_outside=allow_outside)
            else:
                sources.bench += read_bench(path)
    return sources


def _draw(kind: str, sources: _PlotSources, selection: _ExampleSelection) -> dict[str, Any]:
    """Return the figures of one kind by name."""
    from torino.evaluation.reporting import figures

    if kind == "distribution":
        if not sources.summaries:
            raise BadParameter("The distribution of removed tokens needs a run.")
        single = len(sources.summaries) == 1
        return {
            kind if single else f"{kind}-{summary['name']}": figures.plot_distribution(summary)
            for summary in sources.summaries
        }
    if kind == "pareto":
        return {kind: figures.plot_pareto(sources.points())}
    if kind == "accuracy":
        points = sources.points()
        if sources.paper:  # of the paper's SAEs only the one of its main table
            points = [point for point in points if not point.sae.startswith("ε") or point.size == 64]
        return {kind: figures.plot_accuracy(points)}
    if kind == "latency":
        if not sources.bench:
            raise BadParameter("Latencies are drawn from the files of torino bench; give one.")
        return {kind: figures.plot_latency(sources.bench)}
    if not sources.examples and sources.folders:
        sources.examples = _load_examples(sources.folders[0], selection)
    if not sources.examples:
        raise BadParameter(
            f"The {kind} figure needs images and reductions: give a run made with --save-images, or a file of examples."
        )
    if kind == "qualitative":
        return {kind: figures.plot_qualitative(sources.examples)}
    return {kind: figures.plot_teaser(sources.examples[0])}


def _load_examples(folder: Path, selection: _ExampleSelection) -> list[FigureExample]:
    """Return the saved examples of a run."""
    from torino.evaluation.examples import load_examples
    from torino.evaluation.judge import Judge
    from torino.evaluation.reporting.figures import FigureExample, Panel
    from torino.evaluation.reporting.summary import display_name
    from torino.evaluation.results import open_run

    run = open_run(folder)
    several_saes = len(run.metadata.get("saes", {})) > 1
    cases = load_examples(
        run,
        samples=selection.samples,
        tier=selection.tier,
        settings=selection.methods,
        judge=Judge.from_environment(cache=selection.grades, other_caches=[folder / GRADES]),
    )
    return [
        FigureExample(
            case.image,
            case.question,
            [
                Panel(display_name(item.setting, several_saes), item.reduction, item.answer, item.correct)
                for item in case.examples
            ],
            case.answer,
            case.correct,
        )
        for case in cases
    ]


def _draw_page_figures(summary: Summary) -> dict[str, str]:
    """Return the figures of the HTML page by caption; none, with a note, if matplotlib is missing."""
    try:
        from torino.evaluation.reporting import figures

        points = figures.collect_points([summary])
        plots: dict[str, Callable[[], Any]] = {
            "accuracy": lambda: figures.plot_accuracy(points, summary["level"]),
            "distribution": lambda: figures.plot_distribution(summary),
            "pareto": lambda: figures.plot_pareto(points),
        }
        drawn: dict[str, str] = {}
        for name, draw in plots.items():
            try:
                drawn[CAPTIONS[name]] = figures.to_svg(draw())
            except BadParameter:  # for example, the run has no dynamic setting
                continue
        return drawn
    except TorinoError as error:
        errors.print(escape(f"The page has no figures. {error}"), style="yellow", highlight=False)
        return {}


def _print_paths(paths: list[Path]) -> None:
    for path in paths:
        out.print(escape(str(path)), highlight=False, soft_wrap=True)
