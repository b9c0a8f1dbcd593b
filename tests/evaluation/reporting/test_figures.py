"""Figures: each holds what the result files say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from typer.testing import CliRunner

from tests.support.synthetic_run import make_report_app, write_synthetic_run

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from torino import TorinoError, make
from torino.core.errors import BadFile, BadParameter
from torino.core.reduction import Reduction
from torino.datasets.bundled import PHOTOS, example_folder, example_sae, example_tokens
from torino.datasets.images import open_image
from torino.evaluation.reporting.figures import (
    FigureExample,
    Panel,
    collect_points,
    paper_points,
    plot_accuracy,
    plot_distribution,
    plot_latency,
    plot_pareto,
    plot_qualitative,
    plot_teaser,
    read_bench,
    read_examples,
    save_figure,
    to_svg,
)
from torino.evaluation.reporting.figures.pictures import group_outlines
from torino.evaluation.reporting.figures.style import wrap_text
from torino.evaluation.reporting.summary import summarize_and_save
from torino.evaluation.results import open_run

BENCH = [
    {"label": "All tokens", "spec": "", "module_ms": {"mean": 0.3, "std": 0.01}, "floor_ms": 0.2, "tokens": 576},
    {"label": "PruneSID", "spec": "prunesid", "module_ms": {"mean": 64.6, "std": 2.0}, "floor_ms": 0.2, "tokens": 217},
    {"label": "TORINO-M", "spec": "torino-m", "module_ms": {"mean": 26.4, "std": 1.0}, "floor_ms": 0.2, "tokens": 214},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_run(tmp_path_factory.mktemp("plots") / "llava", questions=30, saes=("x4",))


@pytest.fixture(scope="module")
def summary(finished: Path) -> dict[str, Any]:
    return summarize_and_save(open_run(finished), draws=100)


@pytest.fixture(scope="module")
def examples() -> list[FigureExample]:
    sae, made = example_sae(), []
    for name, tokens in list(zip(PHOTOS, example_tokens(), strict=True))[:2]:
        shown = [
            Panel(f"({k}, {k})", make(f"torino-p(k={k}, delta={k})", sae=sae).plan(tokens), f"answer {k}", k > 1)
            for k in (2, 1)
        ]
        made.append(
            FigureExample(open_image(example_folder() / "photos" / f"{name}.jpg"), "What is this?", shown, "all", True)
        )
    return made


def boxes(axes: Any) -> list[tuple[float, float]]:
    """Lower and upper edges of the boxes that are filled with a colour."""
    filled = [
        item for item in axes.patches if isinstance(item, Rectangle) and to_hex(item.get_facecolor()) != "#ffffff"
    ]
    return [(item.get_y(), item.get_y() + item.get_height()) for item in filled]


def texts(figure: Any) -> list[str]:
    """Everything written beside axes and in legends."""
    return [
        word.get_text()
        for axes in figure.axes
        for word in [
            *axes.texts,
            axes.title,
            axes._left_title,
            axes.xaxis.label,
            axes.yaxis.label,
            *axes.get_yticklabels(),
            *(axes.get_legend().get_texts() if axes.get_legend() else []),
        ]
    ]


def test_boxes_span_the_10th_to_the_90th_percentile(summary: dict[str, Any]) -> None:
    (axes,) = plot_distribution(summary).axes
    rows = [row for tier in summary["tiers"] for row in tier["rows"] if row["reference"]]
    expected = [
        (row["tokens_by_task"][task]["removed"]["p10"], row["tokens_by_task"][task]["removed"]["p90"])
        for row in rows
        for task in ("GQA", "POPE")
    ]
    assert len(rows) == 3
    assert boxes(axes) == [(pytest.approx(low), pytest.approx(high)) for low, high in expected]
    diamonds = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "D"]
    means = [row["tokens_by_task"][task]["removed"]["mean"] for row in rows for task in ("GQA", "POPE")]
    assert diamonds == pytest.approx(means)
    whiskers = {tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 2}
    spread = rows[0]["tokens_by_task"]["GQA"]["removed"]
    assert (spread["min"], spread["max"]) in whiskers
    fixed = {**summary, "tiers": [tier for tier in summary["tiers"] if not tier["dynamic"]]}
    with pytest.raises(BadParameter, match="no dynamic setting"):
        plot_distribution(fixed)


def test_legend_names_several_saes(summary: dict[str, Any]) -> None:
    tiers = [
        {**tier, "rows": [{**row, "tier": f"{tier['tier']} [{sae}]"} for row in tier["rows"]]}
        for tier in summary["tiers"][:3]
        for sae in ("a$b$c", "none")
    ]
    (axes,) = plot_distribution({**summary, "tiers": tiers}).axes
    legend = axes.get_legend()
    text = [text.get_text() for text in legend.get_texts()]
    assert text[0].startswith(r"$k=3,\ \delta=3$, a\$b\$c  (mean ")
    assert text[1].startswith(r"$k=3,\ \delta=3$, no SAE  (mean ")
    axes.figure.draw_without_rendering()
    assert legend.get_window_extent().width <= axes.figure.bbox.width


def test_points_have_the_values_of_the_summary(summary: dict[str, Any]) -> None:
    points = collect_points([summary])
    item = next(point for point in points if (point.tier, point.label) == ("2,2", "TORINO-M"))
    row = next(row for row in summary["tiers"][1]["rows"] if row["label"] == "TORINO-M")
    assert (item.tokens, item.relative, item.low) == (row["tokens"], row["relative"]["value"], row["relative"]["low"])
    assert (item.sae, item.size, item.fixed) == ("x4", 4096, False)
    twice = collect_points([summary, {**summary, "name": "other"}])
    assert {point.sae for point in twice if point.method == "torino-m"} == {"llava: x4", "other: x4"}


def test_paper_points_are_marked_as_printed() -> None:
    points = paper_points()
    assert all(item.printed for item in points)
    best = max((item for item in points if not item.fixed), key=lambda item: item.relative)
    assert (best.sae, best.tier) == ("ε = 4", "3,3")
    last = next(item for item in points if (item.label, item.sae, item.tier) == ("TORINO-P", "ε = 16", "1,1"))
    assert last.relative == pytest.approx(72.7, abs=0.05)  # the collapse that the paper's text speaks of
    sizes = {item.size for item in points}
    assert sizes == {1, 2, 4, 8, 16, 64}
    assert "figures printed in the paper" in texts(plot_pareto(points))


def test_pareto_draws_a_curve_per_sae_and_variant(summary: dict[str, Any]) -> None:
    (axes,) = plot_pareto(collect_points([summary])).axes
    curves = [line for line in axes.lines if len(line.get_xdata()) == 3]
    dynamic = [item for item in collect_points([summary]) if not item.fixed and item.method == "torino-p"]
    assert sorted(dynamic, key=lambda item: item.tokens)[0].relative in [line.get_ydata()[0] for line in curves]
    assert {"TORINO-P", "TORINO-M", "(1, 1)", "(3, 3)"} <= set(texts(axes.figure))
    (axes,) = plot_pareto(paper_points()).axes
    curves = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert len(curves) == 12
    with pytest.raises(BadParameter, match="no dynamic TORINO"):
        plot_pareto([item for item in paper_points() if item.fixed])


def test_frontier_dominates_all_points() -> None:
    points = [item for item in paper_points() if item.method.startswith("torino-") and not item.fixed]
    (axes,) = plot_pareto(points).axes
    frontier = axes.lines[0]
    for x, y in zip(frontier.get_xdata(), frontier.get_ydata(), strict=True):
        assert not [item for item in points if item.tokens <= x and item.relative > y]


def test_accuracy_draws_a_line_and_a_band_per_method(summary: dict[str, Any]) -> None:
    (axes,) = plot_accuracy(collect_points([summary])).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(labels) == 7
    assert labels[:2] == ["TORINO-M", "TORINO-P"] or labels[:2] == ["TORINO-P", "TORINO-M"]
    assert r"TORINO$_\mathrm{FB}$-M" in labels
    assert len(axes.collections) == 7
    random = next(line for line in axes.lines if line.get_label() == "Random")
    rows = [row for tier in summary["tiers"] for row in tier["rows"] if row["method"] == "random"]
    assert sorted(random.get_ydata()) == pytest.approx(sorted(row["relative"]["value"] for row in rows))
    with pytest.raises(BadParameter, match="no relative score"):
        plot_accuracy([])


def test_unfinished_run_is_marked_as_preliminary(tmp_path: Path) -> None:
    result = summarize_and_save(open_run(write_synthetic_run(tmp_path / "half", questions=12, answered=0.5)), draws=100)
    assert any("preliminary" in text for text in texts(plot_accuracy(collect_points([result]))))


def test_latency_bars_show_the_means(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"format": "torino-bench/1", "rows": BENCH}))
    figure = plot_latency(read_bench(file))
    (axes,) = figure.axes  # no other column was measured
    assert [bar.get_width() for bar in axes.patches[:3]] == [0.3, 64.6, 26.4]
    assert {"64.6", "26.4", "Module alone (ms)", "TORINO-M  (214)"} <= set(texts(figure))
    full = [{**row, "first_token_ms": 100.0, "answer_ms": {"mean": 400.0, "std": 5.0}, "peak_mb": 1e4} for row in BENCH]
    assert len(plot_latency(full).axes) == 4
    with pytest.raises(BadParameter, match="no latency"):
        plot_latency([{"label": "x"}])
    file.write_text(json.dumps({"format": "torino-bench/2", "rows": BENCH}))
    with pytest.raises(BadFile, match="torino-bench/1"):
        read_bench(file)


def test_outlines_surround_groups_but_not_single_patches() -> None:
    grid = torch.tensor([0, 0, 1, 2, 2, -1])  # two rows of three: 0 0 1 / 2 2 -
    lines = group_outlines(_plan(grid, (2, 3)))
    across = {((0, 1), (1, 1)), ((1, 1), (2, 1))}
    along = {((2, 0), (2, 1)), ((2, 1), (2, 2))}
    assert {(line[0], line[1]) for line in lines} == across | along


def _plan(assigned: torch.Tensor, grid: tuple[int, int]) -> Reduction:
    tokens = int(assigned.max()) + 1
    anchor = torch.tensor([int((assigned == item).nonzero()[0, 0]) for item in range(tokens)])
    return Reduction(
        sources=anchor,
        weights=torch.ones(tokens),
        offsets=torch.arange(tokens + 1),
        anchor=anchor,
        concept=torch.full((tokens,), -1),
        role=("kept",) * tokens,
        grid=grid,
        by="test",
        assigned=assigned,
        score=torch.zeros(tokens),
    )


def test_qualitative_grid_shows_images_and_answers(examples: list[FigureExample]) -> None:
    figure = plot_qualitative(examples)
    assert len(figure.axes) == 6
    text = texts(figure)
    assert text.count("✓ answer 2") == 2
    assert text.count("✗ answer 1") == 2
    assert f"{len(examples[0].panels[0].reduction)} tokens" in text
    assert {"All tokens", "(2, 2)", "(1, 1)"} <= set(text)
    with pytest.raises(BadParameter, match="at least one"):
        plot_qualitative([])
    odd = FigureExample(examples[0].image, "?", examples[0].panels[:1])
    with pytest.raises(BadParameter, match="same methods"):
        plot_qualitative([examples[0], odd])


def test_teaser_shows_the_token_counts(examples: list[FigureExample]) -> None:
    figure = plot_teaser(examples[0])
    kept = len(examples[0].panels[0].reduction)
    text = texts(figure)
    assert "576 visual tokens" in text
    assert f"{kept} visual tokens  (↓{100 * (1 - kept / 576):.0f} %)" in text
    with pytest.raises(BadParameter, match="needs an example with a reduction"):
        plot_teaser(FigureExample(examples[0].image, "?", []))


def test_long_texts_do_not_widen_a_figure(examples: list[FigureExample]) -> None:
    talk = "word " * 200
    shown = [replace(item, heading="TORINO_FB-M", answer=talk) for item in examples[0].panels[:1]]
    example = replace(examples[0], question=talk, answer=f"{talk} too", panels=shown)
    for figure in (plot_teaser(example), plot_qualitative([example] * 4)):
        figure.draw_without_rendering()
        assert figure.get_tightbbox().width <= figure.bbox.width / figure.dpi + 0.2
    grid = plot_qualitative([example] * 4)
    assert r"TORINO$_\mathrm{FB}$-M" in texts(grid)
    grid.draw_without_rendering()
    counted, text = [item.get_window_extent() for item in grid.axes[0].texts]
    assert counted.x1 < text.x0


@pytest.mark.parametrize(
    "text", ["这张照片里最左边的动物是什么颜色的，它旁边有几只狗？" * 3, "word " * 30, "x" * 99, "", "狗"]
)
def test_wrapped_lines_fit_the_width(text: str) -> None:
    for width, most in ((16, 3), (9, 1), (200, 2)):
        lines = wrap_text(text, width, most)
        assert len(lines) <= most
        assert all(cell_len(line) <= width for line in lines)
        whole = "".join(text.split()) == "".join("".join(lines).split())
        assert whole == (not lines or not lines[-1].endswith("…"))


def test_figures_are_saved_and_converted_to_svg(summary: dict[str, Any], tmp_path: Path) -> None:
    figure = plot_accuracy(collect_points([summary]))
    files = save_figure(figure, tmp_path, "accuracy", ("png", "pdf", "svg"))
    assert [file.read_bytes()[:5] for file in files] == [b"\x89PNG\r", b"%PDF-", b"<?xml"]
    assert Image.open(files[0]).width > 1000
    svg = to_svg(plot_accuracy(collect_points([summary])))
    assert "currentColor" in svg
    assert "#1d2126" not in svg
    assert svg == to_svg(plot_accuracy(collect_points([summary])))
    with pytest.raises(BadParameter, match="png, pdf, svg"):
        save_figure(figure, tmp_path, "x", ("gif",))


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch, summary: dict[str, Any]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TorinoError, match=r"torino\[plot\]"):
        plot_accuracy(collect_points([summary]))


def test_plot_command_draws_all_possible_figures(
    finished: Path, summary: dict[str, Any], examples: list[FigureExample], tmp_path: Path
) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"format": "torino-bench/1", "rows": BENCH}))
    examples[0].image.save(tmp_path / "photo.png")
    examples[0].panels[0].reduction.save(tmp_path / "plan.npz")
    shown = [{"heading": "(2, 2)", "reduction": "plan.npz", "answer": "a cup", "right": True}]
    cells = tmp_path / "cells.json"
    result = {"format": "torino-cells/1", "examples": [{"photo": "photo.png", "question": "What?", "shown": shown}]}
    cells.write_text(json.dumps(result))
    assert read_examples(cells)[0].panels[0].answer == "a cup"
    sources = [str(finished), str(bench), str(cells)]
    out = tmp_path / "figures"
    done = CliRunner().invoke(make_report_app(), ["plot", *sources, "-o", str(out), "--format", "svg"])
    assert done.exit_code == 0, done.output
    names = ["accuracy", "distribution", "latency", "pareto", "qualitative", "teaser"]
    assert sorted(path.stem for path in out.iterdir()) == names
    only = CliRunner().invoke(make_report_app(), ["plot", str(bench), "-o", str(tmp_path / "one"), "--format", "svg"])
    assert only.exit_code == 0, only.output
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["latency.svg"]
    for words, text in (
        ([str(bench), "--kind", "pareto"], "no dynamic TORINO"),
        ([str(bench), "--kind", "cake"], "--kind must be one or several of"),
        ([str(bench), "--format", "gif"], "--format must be one or several of"),
        ([str(tmp_path / "nothing")], "no run folder and no file"),
    ):
        failed = CliRunner().invoke(make_report_app(), ["plot", *words, "-o", str(tmp_path)])
        assert text in str(failed.exception)
    del result["examples"][0]["question"]  # type: ignore[attr-defined]
    cells.write_text(json.dumps(result))
    with pytest.raises(BadFile, match=r"'examples\[0\]\.question' is missing"):
        read_examples(cells)
