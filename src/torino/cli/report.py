"""The commands ``torino report`` and ``torino plot``: tables and figures of what runs found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from torino.cli._common import split_words
from torino.core.errors import BadFile, BadParameter, TorinoError

out = Console()
errors = Console(stderr=True)

REPORT_EPILOG = (
    "Examples: [cyan]torino report runs/llava[/] · [cyan]torino report runs/llava --against paper -o report[/] · "
    "[cyan]torino report runs/llava --against paper:llava-1.5-13b-x64 --versus visionzip --by image[/] · "
    "[cyan]torino report runs/llava --tasks GQA,POPE -o two[/]"
)
PLOT_EPILOG = (
    "Examples: [cyan]torino plot runs/llava -o figures[/] · "
    "[cyan]torino plot runs/x4 runs/x64 --kind pareto -o figures[/] · "
    "[cyan]torino plot runs/llava --kind qualitative --tier 64 --samples POPE:3,GQA:17 -o figures[/] · "
    "[cyan]torino plot bench.json --format pdf -o figures[/] · "
    "[cyan]torino plot paper -o figures[/], of the paper's own tables"
)
FORMATS = ("png", "pdf", "svg")
KINDS = ("distribution", "pareto", "accuracy", "latency", "qualitative", "teaser")
CAPTIONS = {
    "accuracy": "Relative score against visual tokens, one line a method; bands are confidence intervals.",
    "distribution": "Share of tokens that dynamic TORINO removed from each image. Boxes reach from the 10th to the "
    "90th percentile, the line is the median, the diamond the mean; whiskers reach from the least to the most.",
    "pareto": "Dynamic TORINO on the plane of retained tokens and relative score; curves join the pairs (k, δ).",
}


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that torino eval has written.")],
    against: Annotated[
        str | None, typer.Option(help="paper, or paper:TABLE: set the figures printed in the paper beside ours.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the tasks' files; by default where they were.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write to; by default report in the run.")
    ] = None,
    versus: Annotated[
        str | None, typer.Option(help="Method or setting that all are compared with; by default TORINO-M of the tier.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks to report, separated by commas; by default all of the run.")
    ] = None,
    baseline_of: Annotated[
        Path | None, typer.Option(help="Another run over the same data whose full-token answers are the baseline.")
    ] = None,
    by: Annotated[str, typer.Option(help="What the bootstrap draws: question or image.")] = "question",
    draws: Annotated[int, typer.Option(help="Draws of the bootstrap.", min=100)] = 10_000,
    figures: Annotated[bool, typer.Option(help="Put figures into the page; needs matplotlib.")] = True,
) -> None:
    """Write what a run found: Markdown, CSV, LaTeX and a page of HTML.

    Everything the report says is kept in scores.json of the run, so that it can be made again without the data.
    """
    if by not in ("question", "image"):
        raise BadParameter(f"--by must be question or image, got {by!r}.")
    word, _, table = (against or "paper").partition(":")
    if word != "paper":
        raise BadParameter(f"--against must be paper or paper:TABLE, got {against!r}.")
    from torino.evaluation.judge import Judge
    from torino.evaluation.reporting.report import write_report
    from torino.evaluation.reporting.summary import document_of
    from torino.evaluation.reporting.tables import choose_tables
    from torino.evaluation.results import open_run

    opened = open_run(run)
    if tasks is not None:
        opened = opened.only(split_words(tasks))
    with errors.status("Scoring …"):
        document = document_of(
            opened,
            data,
            judge=Judge.from_environment(cache=opened.folder / "grades.jsonl"),
            versus=versus,
            by=by,
            baseline_of=baseline_of,
            draws=draws,
        )
    papers = choose_tables(document, table or None) if against else []
    drawn = _page_figures(document) if figures else {}
    written = write_report(document, output or opened.folder / "report", papers=papers, figures=drawn)
    progress = document["progress"]
    if not progress["whole"]:
        errors.print(
            f"The run is not finished: {progress['answers']:,} of {progress['of']:,} answers. The report says so.",
            style="yellow",
            highlight=False,
        )
    for path in written:
        out.print(escape(str(path)), highlight=False, soft_wrap=True)


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
        str | None, typer.Option(help=f"Separated by commas: {', '.join(KINDS)}; by default all that can be drawn.")
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="png, pdf, svg, separated by commas.")] = "png,pdf",
    tier: Annotated[
        str | None, typer.Option(help="Tier that the qualitative figure shows, such as 2,2 or 128.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods in it, separated by commas; by default TORINO and some of the tier.")
    ] = None,
    samples: Annotated[
        str | None, typer.Option(help="Questions in it, as TASK:INDEX, separated by commas; by default the first kept.")
    ] = None,
) -> None:
    """Draw figures of runs, from their result files alone."""
    wanted: list[str] = split_words(kind) if kind else [*KINDS]
    for one in wanted:
        if one not in KINDS:
            raise BadParameter(f"--kind must be of {', '.join(KINDS)}, got {one!r}.")
    kinds = split_words(formats)
    if not kinds or not set(kinds) <= set(FORMATS):
        raise BadParameter(f"--format must be of {', '.join(FORMATS)}, separated by commas, got {formats!r}.")
    from torino.evaluation.reporting.figures import save_figure

    drawn, reasons = _draw(sources, wanted, _Shown(tier, split_words(methods or ""), split_words(samples or "")))
    if kind and reasons:
        raise BadParameter(next(iter(reasons.values())))
    if not drawn:
        raise BadParameter(f"Nothing can be drawn of this. {' '.join(dict.fromkeys(reasons.values()))}".strip())
    for name, figure in drawn.items():
        for path in save_figure(figure, output, name, kinds):
            out.print(escape(str(path)), highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Shown:
    """What the figures with photos show of a run."""

    tier: str | None
    methods: list[str]
    samples: list[str]


def _draw(sources: list[str], wanted: list[str], shown: _Shown) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures by name, and why others could not be made."""
    from torino.evaluation.reporting import figures as plots

    documents, bench, examples, points = _open(sources)
    kept = [Path(one).expanduser() for one in sources if one != "paper" and Path(one).expanduser().is_dir()]
    drawn: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for one in wanted:
        try:
            if one == "distribution":
                if not documents:
                    raise BadParameter("The distribution of removed tokens needs a run.")
                for document in documents:
                    name = one if len(documents) == 1 else f"{one}-{document['name']}"
                    drawn[name] = plots.distribution(document)
            elif one in ("pareto", "accuracy"):
                chosen = points
                if one == "accuracy" and "paper" in sources:
                    chosen = [point for point in points if not point.sae.startswith("ε") or point.size == 64]
                drawn[one] = plots.pareto(chosen) if one == "pareto" else plots.accuracy(chosen)
            elif one == "latency":
                if not bench:
                    raise BadParameter("Latencies are drawn of the files that torino bench writes; give one.")
                drawn[one] = plots.latency(bench)
            else:
                if not examples and kept:
                    examples = _examples(kept[0], shown)
                if not examples:
                    raise BadParameter(
                        f"The {one} figure needs photos and reductions: give a run made with --keep, or a file of "
                        "examples."
                    )
                drawn[one] = plots.qualitative(examples) if one == "qualitative" else plots.teaser(examples[0])
        except TorinoError as error:  # the data of a run is gone, among others; its charts can be drawn still
            reasons[one] = str(error)
    return drawn, reasons


def _open(sources: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[Any], list[Any]]:
    """Documents of runs, rows of benches, examples, and points of runs and of the paper."""
    from torino.core.io import read_json
    from torino.evaluation.reporting.figures import paper_points, points_of, read_bench, read_examples
    from torino.evaluation.reporting.summary import known_document, read_scores
    from torino.evaluation.results import open_run

    documents: list[dict[str, Any]] = []
    bench: list[dict[str, Any]] = []
    examples: list[Any] = []
    for source in sources:
        path = Path(source).expanduser()
        if source == "paper":
            continue
        if path.is_dir():
            documents.append(known_document(open_run(path)))
            continue
        if not path.is_file():
            raise BadFile(f"There is no run folder and no file {source}.")
        form = str(read_json(path).get("format", ""))
        if form.startswith("torino-scores/"):
            documents.append(read_scores(path))
        elif form.startswith("torino-cells/"):
            examples += read_examples(path)
        else:
            bench += read_bench(path)
    return documents, bench, examples, points_of(documents) + (paper_points() if "paper" in sources else [])


def _examples(folder: Path, shown: _Shown) -> list[Any]:
    """Examples of what a run kept."""
    from torino.evaluation.examples import cases
    from torino.evaluation.judge import Judge
    from torino.evaluation.reporting.figures import Example, Shown
    from torino.evaluation.reporting.summary import display
    from torino.evaluation.results import open_run

    judge = Judge.from_environment(cache=folder / "grades.jsonl")
    run = open_run(folder)
    several = len(run.facts.get("saes", {})) > 1
    found = cases(run, samples=shown.samples, tier=shown.tier, settings=shown.methods, judge=judge)
    return [
        Example(
            case.photo,
            case.question,
            [Shown(display(cell.setting, several), cell.reduction, cell.answer, cell.right) for cell in case.cells],
            case.answer,
            case.right,
        )
        for case in found
    ]


def _page_figures(document: dict[str, Any]) -> dict[str, str]:
    """Figures for the page; without matplotlib none, with a sentence."""
    try:
        from torino.evaluation.reporting import figures as plots

        points = plots.points_of([document])
        makers = {
            "accuracy": lambda: plots.accuracy(points, document["level"]),
            "distribution": lambda: plots.distribution(document),
            "pareto": lambda: plots.pareto(points),
        }
        found: dict[str, str] = {}
        for name, make in makers.items():
            try:
                found[CAPTIONS[name]] = plots.svg_text(make())
            except BadParameter:  # a run without dynamic settings has no such figure
                continue
        return found
    except TorinoError as error:
        errors.print(escape(f"The page has no figures. {error}"), style="yellow", highlight=False)
        return {}
