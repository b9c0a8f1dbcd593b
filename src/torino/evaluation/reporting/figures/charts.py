"""Draw charts of result files: token distributions, score against tokens, latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json
from torino.core.schema import Measure
from torino.evaluation.protocol import KD_METHODS, NO_SAE
from torino.evaluation.reporting.figures.points import Point
from torino.evaluation.reporting.figures.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PAGE_WIDTH,
    TORINO_COLORS,
    escape_math,
    figure_style,
    format_label,
    method_style,
    new_figure,
)
from torino.evaluation.reporting.summary import Summary
from torino.evaluation.reporting.tables import parse_tier

BENCH_FORMAT = "torino-bench/1"
LINE_STYLES: dict[str, Any] = {"torino-p": "-", "torino-m": (0, (3, 1.4)), "torino-x": (0, (1, 1))}
MARKERS = {"torino-p": "o", "torino-m": "s", "torino-x": "D"}
MAX_BANDS = 8  # lines above which bands would hide each other
PRINTED = "figures printed in the paper"
PRELIMINARY = "preliminary: the run is not finished"
PANELS = {
    "module_ms": "Module alone (ms)",
    "first_token_ms": "First token (ms)",
    "answer_ms": "Whole answer (ms)",
    "peak_mb": "Peak memory (MB)",
}


class BenchTime(TypedDict):
    """Mean and spread of a measurement."""

    mean: Measure
    std: NotRequired[Measure]


class BenchEntry(TypedDict):
    """A row of a file of ``torino bench``, as far as it is drawn."""

    spec: str
    label: NotRequired[str]
    method: NotRequired[str]
    tokens: NotRequired[Measure | None]
    module_ms: NotRequired[BenchTime | Measure | None]
    floor_ms: NotRequired[BenchTime | Measure | None]
    first_token_ms: NotRequired[BenchTime | Measure | None]
    answer_ms: NotRequired[BenchTime | Measure | None]
    peak_mb: NotRequired[BenchTime | Measure | None]


class BenchFile(TypedDict):
    """A file of ``torino bench``."""

    rows: list[BenchEntry]


def plot_distribution(summary: Summary, method: str | None = None) -> Any:
    """Draw the share of tokens that dynamic TORINO removed per image, by task and (k, δ).

    Boxes span the 10th to the 90th percentile, with a line at the median and a diamond at the mean; whiskers span
    minimum to maximum. ``method`` is ``torino-p`` or ``torino-m``, whose lengths hardly differ; by default the
    reference of the tiers.
    """
    dynamic = [row for tier in summary["tiers"] for row in tier["rows"] if row["dynamic"] and row["tokens_by_task"]]
    rows = [row for row in dynamic if (row["reference"] if method is None else row["method"] == method)] or dynamic
    if not rows:
        raise BadParameter("The run has no dynamic setting, so all images have the same number of tokens.")
    columns = {column["task"]: column["label"] for column in summary["columns"]}
    tasks = [task for task in columns if any(task in row["tokens_by_task"] for row in rows)]
    colors = _color_sequence(len(rows))
    with figure_style():
        from matplotlib.patches import Patch

        figure = new_figure(PAGE_WIDTH, 2.5)
        axes = figure.subplots()
        width = 0.8 / len(rows)
        for position, row in enumerate(rows):
            for number, task in enumerate(tasks):
                if task in row["tokens_by_task"]:
                    center = number + (position - (len(rows) - 1) / 2) * width
                    _draw_box(axes, center, 0.72 * width, row["tokens_by_task"][task]["removed"], colors[position])
        axes.set_xticks(range(len(tasks)), [escape_math(columns[task]) for task in tasks])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.5, len(tasks) - 0.5)
        axes.set_ylim(top=100)
        for edge in range(1, len(tasks)):
            axes.axvline(edge - 0.5, color=GRID, linewidth=0.5)
        axes.grid(axis="y")
        axes.set_ylabel("Removed tokens (%)")
        handles = [Patch(facecolor=color, alpha=0.75, edgecolor=color) for color in colors]
        labels = [_distribution_label(row) for row in rows]
        axes.legend(handles, labels, ncols=min(len(rows), 3), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def plot_pareto(points: Sequence[Point]) -> Any:
    """Draw relative score against tokens for dynamic TORINO, one curve over (k, δ) per SAE and variant."""
    dynamic = [point for point in points if point.method.startswith("torino-") and not point.fixed]
    if not dynamic:
        raise BadParameter("There is no dynamic TORINO with a relative score, so there is no Pareto curve to draw.")
    saes = sorted({(point.size, point.sae) for point in dynamic})
    single = len(saes) == 1
    tiers = sorted({_pair(point) for point in dynamic})
    sizes = {tier: 3.0 + 1.5 * position for position, tier in enumerate(tiers)}
    with figure_style():
        from matplotlib.lines import Line2D

        figure = new_figure(PAGE_WIDTH * 0.72, 3.1)
        axes = figure.subplots()
        _draw_frontier(axes, dynamic)
        for (_, sae), sae_color in zip(saes, _color_sequence(len(saes)), strict=True):
            for method, line in LINE_STYLES.items():
                curve = sorted(
                    (point for point in dynamic if point.sae == sae and point.method == method),
                    key=lambda point: point.tokens,
                )
                color = TORINO_COLORS[method] if single else sae_color
                x, y = [point.tokens for point in curve], [point.relative for point in curve]
                axes.plot(x, y, color=color, linestyle=line, linewidth=1.1, zorder=3)
                for point in curve:
                    axes.plot(point.tokens, point.relative, color=color, marker=MARKERS[method], zorder=4,
                              markersize=sizes[_pair(point)], markeredgecolor="white", markeredgewidth=0.5)  # fmt: skip
                if single:
                    _draw_intervals(axes, curve, color)
        axes.grid()
        axes.set_xlabel("Visual tokens retained, mean")
        axes.set_ylabel("Relative score (%)")
        axes.margins(x=0.06, y=0.1)
        handles: list[Any] = []
        labels: list[str] = []
        if not single:
            handles += [Line2D([], [], color=color, linewidth=2) for color in _color_sequence(len(saes))]
            labels += [escape_math(sae) for _, sae in saes]
        for method, line in LINE_STYLES.items():
            if not any(point.method == method for point in dynamic):
                continue
            color = TORINO_COLORS[method] if single else MUTED
            handles.append(Line2D([], [], color=color, marker=MARKERS[method], linestyle=line, markeredgecolor="white"))
            labels.append(method.upper())
        if single:
            _label_pairs(axes, dynamic)
        else:
            handles += [
                Line2D([], [], color=MUTED, marker="o", linestyle="", markersize=sizes[tier], markeredgecolor="white")
                for tier in tiers
            ]
            labels += [f"$(k,\\delta)$ = ({tier.replace(',', ', ')})" if "," in tier else tier for tier in tiers]
        handles.append(Line2D([], [], color=MUTED, linewidth=4, alpha=0.25))
        labels.append("frontier")
        axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.4)
        _note_source(axes, dynamic)
    return figure


def plot_accuracy(points: Sequence[Point], level: float = 0.95) -> Any:
    """Draw relative score against tokens, one line per method, with bands of the confidence intervals.

    With many methods only dynamic TORINO and TORINO-X get a band, because bands would hide each other.
    """
    if not points:
        raise BadParameter("There is no relative score to draw.")
    several = len({point.sae for point in points if point.sae}) > 1

    def key_of(point: Point) -> tuple[str, str, bool, str]:
        return point.label, point.method, point.fixed, point.sae if several else ""

    lines: dict[tuple[str, str, bool, str], list[Point]] = {}
    for point in points:
        lines.setdefault(key_of(point), []).append(point)
    order = list(dict.fromkeys(point.method for point in points))
    best = {key: max(point.relative for point in line) for key, line in lines.items()}
    keys = sorted(lines, key=lambda key: (not key[1].startswith("torino-"), key[2], -best[key]))
    with figure_style():
        figure = new_figure(PAGE_WIDTH * 0.78, 3.0)
        axes = figure.subplots()
        for key in keys:
            label, method, fixed, sae = key
            line = sorted(lines[key], key=lambda point: point.tokens)
            style = method_style(method, fixed, order)
            x, y = np.array([point.tokens for point in line]), np.array([point.relative for point in line])
            text = format_label(label) + (f" ({escape_math(sae)})" if sae and method.startswith("torino-") else "")
            axes.plot(x, y, label=text, markersize=3.8, markeredgewidth=0.9, **style)
            if all(point.low is not None for point in line):
                low, high = [point.low for point in line], [point.high for point in line]
                strong = method.startswith("torino-") and (not fixed or method not in KD_METHODS)
                if strong or len(keys) <= MAX_BANDS:
                    axes.fill_between(x, low, high, color=style["color"], alpha=0.15 if strong else 0.07, linewidth=0)
        axes.axhline(100, color=INK, linewidth=0.7, linestyle=(0, (1, 1.5)))
        axes.annotate("all tokens", (1, 100), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", color=MUTED, fontsize=7.5)  # fmt: skip
        _set_token_scale(axes, [point.tokens for point in points])
        axes.grid(axis="y")
        axes.set_xlabel("Visual tokens per image, mean (logarithmic)")
        banded = any(point.low is not None for point in points)
        axes.set_ylabel("Relative score (%)" + (f", with {level:.0%} bands" if banded else ""))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=1 + (len(keys) > 16))
        _note_source(axes, points)
    return figure


def read_bench(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a file of ``torino bench``."""
    content = read_json(path)
    if content.get("format") != BENCH_FORMAT:
        raise BadFile(
            f"{path} has the format {content.get('format')!r}; latencies are read from files of torino bench, "
            f"{BENCH_FORMAT!r}."
        )
    if not content.get("rows"):
        raise BadFile(f"{path} contains no measurement. Run torino bench again.")
    return read_json(path, BenchFile, fix="Run torino bench again.")["rows"]


def plot_latency(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw bars of latencies: the module alone with its spread and floor, the first token, the answer, and memory."""
    colors = [TORINO_COLORS.get(str(row.get("method") or row.get("spec")).partition("(")[0], "#a9b4c0") for row in rows]
    panels = {name: title for name, title in PANELS.items() if any(_mean(row.get(name)) is not None for row in rows)}
    if not panels:
        raise BadParameter("The measurements contain no latency to draw.")
    with figure_style():
        figure = new_figure(min(PAGE_WIDTH, 1.4 + 1.6 * len(panels)), 0.7 + 0.19 * len(rows))
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        positions = np.arange(len(rows))[::-1]
        for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
            means = [_mean(row.get(name)) for row in rows]
            spreads = [_std(row.get(name)) for row in rows]
            axes.barh(positions, [mean or 0 for mean in means], height=0.66, color=colors)
            if any(spreads):
                axes.errorbar([mean or 0 for mean in means], positions, xerr=spreads, fmt="none", ecolor=INK,
                              elinewidth=0.7, capsize=1.8, capthick=0.7)  # fmt: skip
            longest = max((mean or 0) + spread for mean, spread in zip(means, spreads, strict=True)) or 1.0
            for position, mean, spread in zip(positions, means, spreads, strict=True):
                text = "–" if mean is None else f"{mean:.1f}" if mean < 100 else f"{mean:,.0f}"
                axes.annotate(text, ((mean or 0) + spread, position), (3, 0), textcoords="offset points", va="center",
                              fontsize=6.8, color=INK)  # fmt: skip
            if name == "module_ms":
                _draw_floors(axes, rows, positions)
            axes.set_title(title, fontsize=8.5, loc="left")
            axes.set_xlim(0, 1.28 * longest)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        all_axes[0].set_yticks(positions, [_bench_label(row) for row in rows])
        all_axes[0].set_ylim(-0.6, len(rows) - 0.4)
    return figure


def _draw_box(axes: Any, center: float, width: float, spread: Mapping[str, float], color: str) -> None:
    from matplotlib.patches import Rectangle

    axes.plot([center, center], [spread["min"], spread["max"]], color=color, linewidth=0.8, zorder=2)
    for end in ("min", "max"):
        axes.plot([center - width / 4, center + width / 4], [spread[end]] * 2, color=color, linewidth=0.8, zorder=2)
    low, high = spread["p10"], spread["p90"]
    corner = (center - width / 2, low)
    axes.add_patch(Rectangle(corner, width, high - low, facecolor="white", linewidth=0, zorder=3))
    axes.add_patch(
        Rectangle(corner, width, high - low, facecolor=(color, 0.75), edgecolor=color, linewidth=0.6, zorder=3)
    )
    axes.plot([center - width / 2, center + width / 2], [spread["median"]] * 2, color="black", linewidth=1.0, zorder=4)
    axes.plot(center, spread["mean"], marker="D", markersize=2.6, markerfacecolor="white", markeredgecolor="black",
              markeredgewidth=0.5, zorder=5)  # fmt: skip


def _distribution_label(row: Mapping[str, Any]) -> str:
    pair, sae = parse_tier(str(row["tier"]))
    k, comma, delta = pair.partition(",")
    label = f"$k={k},\\ \\delta={delta}$" if comma else escape_math(str(row["label"]))
    if sae:
        label += ", no SAE" if sae == NO_SAE else f", {escape_math(sae)}"
    return f"{label}  (mean {row['tokens']:.0f} tokens)"


def _color_sequence(count: int) -> list[str]:
    """Return ordered colors from blue over green to yellow that color-blind readers can distinguish."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count <= 3:
        return [BLUE, GREEN, ORANGE][:count]
    return [to_hex(colormaps["viridis"](0.02 + 0.86 * position / (count - 1))) for position in range(count)]


def _draw_frontier(axes: Any, points: Sequence[Point]) -> None:
    """Draw a wide pale line through the points that no other point beats in both tokens and score."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.tokens, -point.relative)):
        if not best or point.relative > best[-1].relative:
            best.append(point)
    axes.plot([point.tokens for point in best], [point.relative for point in best], color=MUTED, alpha=0.25,
              linewidth=5, solid_capstyle="round", zorder=1)  # fmt: skip


def _draw_intervals(axes: Any, curve: Sequence[Point], color: str) -> None:
    for point in curve:
        if point.low is not None:
            axes.plot([point.tokens] * 2, [point.low, point.high], color=color, linewidth=0.8, alpha=0.7, zorder=2)


def _label_pairs(axes: Any, points: Sequence[Point]) -> None:
    """Write (k, δ) above the better variant of each tier."""
    for tier in {_pair(point) for point in points if parse_tier(point.tier)[0]}:
        best = max((point for point in points if _pair(point) == tier), key=lambda point: point.relative)
        text = f"({tier.replace(',', ', ')})"
        position = (best.tokens, best.high if best.high is not None else best.relative)
        axes.annotate(text, position, (0, 5), textcoords="offset points", ha="center", fontsize=7, color=INK, zorder=6)


def _pair(point: Point) -> str:
    """Return the pair of a point without its SAE, which the color shows."""
    return parse_tier(point.tier)[0] or point.tier


def _set_token_scale(axes: Any, counts: Sequence[float]) -> None:
    """Set a logarithmic axis with the counts themselves as ticks, as far as they do not overlap."""
    axes.set_xscale("log")
    ticks: list[float] = []
    for count in sorted({max(1, round(count)) for count in counts}):
        if not ticks or count / ticks[-1] > 1.15:
            ticks.append(count)
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.04)


def _note_source(axes: Any, points: Sequence[Point]) -> None:
    """Note which points are the paper's, and whether others are preliminary."""
    printed = [point.printed for point in points]
    notes = [PRINTED] if all(printed) else [f"ε = …: {PRINTED}"] if any(printed) else []
    notes += [] if all(point.complete for point in points) else [PRELIMINARY]
    if notes:
        axes.annotate(", ".join(notes), (0.99, 0.02), xycoords="axes fraction", ha="right", color=MUTED, fontsize=7,
                      style="italic")  # fmt: skip


def _mean(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("mean")  # type: ignore[reportUnknownMemberType]
    return float(value) if isinstance(value, int | float) else None


def _std(value: Any) -> float:
    std: Any = value.get("std", 0.0) if isinstance(value, Mapping) else 0.0  # type: ignore[reportUnknownMemberType]
    return float(std) if isinstance(std, int | float) else 0.0


def _draw_floors(axes: Any, rows: Sequence[Mapping[str, Any]], positions: Any) -> None:
    """Hatch the part of the module's time that an empty module takes too."""
    floors = [_mean(row.get("floor_ms")) or 0.0 for row in rows]
    longest = max((_mean(row.get("module_ms")) or 0.0) for row in rows)
    if max(floors) > 0.02 * longest:
        axes.barh(positions, floors, height=0.66, color="none", edgecolor="white", linewidth=0, hatch="//////",
                  zorder=2)  # fmt: skip
        axes.annotate("hatched: floor", (1, 0), (0, -1), xycoords="axes fraction", textcoords="offset points",
                      ha="right", va="top", fontsize=6.5, color=MUTED)  # fmt: skip


def _bench_label(row: Mapping[str, Any]) -> str:
    tokens = _mean(row.get("tokens"))
    return format_label(str(row.get("label") or row.get("spec"))) + (f"  ({tokens:.0f})" if tokens is not None else "")
