"""Charts of result files: distributions, the plane of tokens and score, latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json
from torino.evaluation.protocol import NO_SAE, PAIRED
from torino.evaluation.reporting.figures.points import Point
from torino.evaluation.reporting.figures.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    OWN,
    PAGE,
    SOFT,
    look,
    new_figure,
    plain,
    styled,
    typeset,
)
from torino.evaluation.reporting.summary import Document
from torino.evaluation.reporting.tables import pair_of

BENCH = "torino-bench/1"
LINES: dict[str, Any] = {"torino-p": "-", "torino-m": (0, (3, 1.4)), "torino-x": (0, (1, 1))}
VARIANTS = {"torino-p": "o", "torino-m": "s", "torino-x": "D"}
CROWD = 8  # lines beyond which bands would hide each other
PRINTED = "figures printed in the paper"
NOT_WHOLE = "preliminary: not all answers are there"


def distribution(document: Document, method: str | None = None) -> Any:
    """The share of tokens that dynamic TORINO removed from each image, by task and (k, δ).

    Boxes reach from the 10th to the 90th percentile, with a line at the median and a diamond at the mean; whiskers
    reach from the least to the most. ``method`` is ``torino-p`` or ``torino-m``, which hardly ever differ in it; by
    default the one that gave the tiers their budgets.
    """
    rows = [
        row
        for tier in document["tiers"]
        for row in tier["rows"]
        if row["dynamic"]
        and row["tokens_by_task"]
        and (row["reference"] if method is None else row["method"] == method)
    ]
    rows = rows or [
        row for tier in document["tiers"] for row in tier["rows"] if row["dynamic"] and row["tokens_by_task"]
    ]
    if not rows:
        raise BadParameter("This run has no dynamic setting, so all images were cut to the same number of tokens.")
    columns = {column["task"]: column["label"] for column in document["columns"]}
    tasks = [task for task in columns if any(task in row["tokens_by_task"] for row in rows)]
    colours = _shades(len(rows))
    with styled():
        figure = new_figure(PAGE, 2.5)
        axes = figure.subplots()
        width = 0.8 / len(rows)
        for place, row in enumerate(rows):
            for number, task in enumerate(tasks):
                if task in row["tokens_by_task"]:
                    at = number + (place - (len(rows) - 1) / 2) * width
                    _box(axes, at, 0.72 * width, row["tokens_by_task"][task]["removed"], colours[place])
        axes.set_xticks(range(len(tasks)), [plain(columns[task]) for task in tasks])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.5, len(tasks) - 0.5)
        axes.set_ylim(top=100)
        for edge in range(1, len(tasks)):
            axes.axvline(edge - 0.5, color=GRID, linewidth=0.5)
        axes.grid(axis="y")
        axes.set_ylabel("Removed tokens (%)")
        labels = [_pair(row) for row in rows]
        from matplotlib.patches import Patch

        handles = [Patch(facecolor=colour, alpha=0.75, edgecolor=colour) for colour in colours]
        axes.legend(handles, labels, ncols=min(len(rows), 3), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def pareto(points: Sequence[Point]) -> Any:
    """Relative score against tokens for dynamic TORINO, one curve for each SAE and variant over its (k, δ)."""
    chosen = [one for one in points if one.method.startswith("torino-") and not one.fixed]
    if not chosen:
        raise BadParameter("There is no dynamic TORINO with a relative score to draw a Pareto plane of.")
    saes = sorted({(one.size, one.sae) for one in chosen})
    alone = len(saes) == 1
    tiers = sorted({_tier(one) for one in chosen})
    sizes = {tier: 3.0 + 1.5 * place for place, tier in enumerate(tiers)}
    with styled():
        from matplotlib.lines import Line2D

        figure = new_figure(PAGE * 0.72, 3.1)
        axes = figure.subplots()
        _frontier(axes, chosen)
        for (_, sae), shade in zip(saes, _shades(len(saes)), strict=True):
            for method, line in LINES.items():
                curve = sorted(
                    (one for one in chosen if one.sae == sae and one.method == method), key=lambda one: one.tokens
                )
                colour = OWN[method] if alone else shade
                x, y = [one.tokens for one in curve], [one.relative for one in curve]
                axes.plot(x, y, color=colour, linestyle=line, linewidth=1.1, zorder=3)
                for one in curve:
                    axes.plot(one.tokens, one.relative, color=colour, marker=VARIANTS[method], zorder=4,
                              markersize=sizes[_tier(one)], markeredgecolor="white", markeredgewidth=0.5)  # fmt: skip
                if alone:
                    _ranges(axes, curve, colour)
        axes.grid()
        axes.set_xlabel("Visual tokens retained, mean")
        axes.set_ylabel("Relative score (%)")
        axes.margins(x=0.06, y=0.1)
        handles: list[Any] = []
        labels: list[str] = []
        if not alone:
            handles += [Line2D([], [], color=colour, linewidth=2) for colour in _shades(len(saes))]
            labels += [plain(sae) for _, sae in saes]
        for method, line in LINES.items():
            if not any(one.method == method for one in chosen):
                continue
            colour = OWN[method] if alone else SOFT
            handles.append(
                Line2D([], [], color=colour, marker=VARIANTS[method], linestyle=line, markeredgecolor="white")
            )
            labels.append(method.upper())
        if alone:
            _name_pairs(axes, chosen)
        else:
            handles += [
                Line2D([], [], color=SOFT, marker="o", linestyle="", markersize=sizes[tier], markeredgecolor="white")
                for tier in tiers
            ]
            labels += [f"$(k,\\delta)$ = ({tier.replace(',', ', ')})" if "," in tier else tier for tier in tiers]
        handles.append(Line2D([], [], color=SOFT, linewidth=4, alpha=0.25))
        labels.append("frontier")
        axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.4)
        _say_whose(axes, chosen)
    return figure


def accuracy(points: Sequence[Point], level: float = 0.95) -> Any:
    """Relative score against tokens, one line a method, with bands of the confidence intervals.

    Where there are many methods only those of TORINO that have a line of their own kind get a band, or none could be
    told from another.
    """
    if not points:
        raise BadParameter("There is no relative score to draw.")
    several = len({one.sae for one in points if one.sae}) > 1
    keys = list(dict.fromkeys((one.label, one.method, one.fixed, one.sae if several else "") for one in points))
    order = list(dict.fromkeys(one.method for one in points))
    best = {key: max(one.relative for one in points if _is(one, key, several)) for key in keys}
    keys.sort(key=lambda key: (not key[1].startswith("torino-"), key[2], -best[key]))
    with styled():
        figure = new_figure(PAGE * 0.78, 3.0)
        axes = figure.subplots()
        for key in keys:
            label, method, fixed, sae = key
            line = sorted((one for one in points if _is(one, key, several)), key=lambda one: one.tokens)
            drawn = look(method, fixed, order)
            x, y = np.array([one.tokens for one in line]), np.array([one.relative for one in line])
            named = typeset(label) + (f" ({plain(sae)})" if sae and method.startswith("torino-") else "")
            axes.plot(x, y, label=named, markersize=3.8, markeredgewidth=0.9, **drawn)
            if all(one.low is not None for one in line):
                low, high = [one.low for one in line], [one.high for one in line]
                strong = method.startswith("torino-") and (not fixed or method not in PAIRED)
                if strong or len(keys) <= CROWD:
                    axes.fill_between(x, low, high, color=drawn["color"], alpha=0.15 if strong else 0.07, linewidth=0)
        axes.axhline(100, color=INK, linewidth=0.7, linestyle=(0, (1, 1.5)))
        axes.annotate("all tokens", (1, 100), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", color=SOFT, fontsize=7.5)  # fmt: skip
        _token_scale(axes, [one.tokens for one in points])
        axes.grid(axis="y")
        axes.set_xlabel("Visual tokens an image, mean (logarithmic)")
        banded = any(one.low is not None for one in points)
        axes.set_ylabel("Relative score (%)" + (f", with {level:.0%} bands" if banded else ""))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=1 + (len(keys) > 16))
        _say_whose(axes, points)
    return figure


def read_bench(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of ``torino bench``."""
    read = read_json(path)
    if read.get("format") != BENCH:
        raise BadFile(
            f"{path} is of format {read.get('format')!r}, and latencies are read from {BENCH!r} of torino bench."
        )
    rows = read.get("rows")
    if not isinstance(rows, list) or not rows:
        raise BadFile(f"{path} holds no measurement. Run torino bench again.")
    return rows


def latency(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Bars of latencies: the module alone with its spread and floor, the first token, the whole answer, memory."""
    panels = [
        ("module_ms", "Module alone (ms)"),
        ("first_token_ms", "First token (ms)"),
        ("answer_ms", "Whole answer (ms)"),
        ("peak_mb", "Peak memory (MB)"),
    ]
    colours = [OWN.get(str(row.get("method") or row.get("spec")).partition("(")[0], "#a9b4c0") for row in rows]
    shown = [one for one in panels if any(_mean_of(row.get(one[0])) is not None for row in rows)]
    if not shown:
        raise BadParameter("The measurements hold no latency to draw.")
    with styled():
        figure = new_figure(min(PAGE, 1.4 + 1.6 * len(shown)), 0.7 + 0.19 * len(rows))
        drawn = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        places = np.arange(len(rows))[::-1]
        for axes, (name, title) in zip(drawn, shown, strict=True):
            means = [_mean_of(row.get(name)) for row in rows]
            spreads = [_std_of(row.get(name)) for row in rows]
            axes.barh(places, [one or 0 for one in means], height=0.66, color=colours)
            if any(spreads):
                axes.errorbar([one or 0 for one in means], places, xerr=spreads, fmt="none", ecolor=INK,
                              elinewidth=0.7, capsize=1.8, capthick=0.7)  # fmt: skip
            top = max((one or 0) + spread for one, spread in zip(means, spreads, strict=True)) or 1.0
            for at, mean, spread in zip(places, means, spreads, strict=True):
                text = "–" if mean is None else f"{mean:.1f}" if mean < 100 else f"{mean:,.0f}"
                axes.annotate(text, ((mean or 0) + spread, at), (3, 0), textcoords="offset points", va="center",
                              fontsize=6.8, color=INK)  # fmt: skip
            if name == "module_ms":
                _floors(axes, rows, places)
            axes.set_title(title, fontsize=8.5, loc="left")
            axes.set_xlim(0, 1.28 * top)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        drawn[0].set_yticks(places, [_bench_label(row) for row in rows])
        drawn[0].set_ylim(-0.6, len(rows) - 0.4)
    return figure


def _box(axes: Any, at: float, width: float, spread: Mapping[str, float], colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.plot([at, at], [spread["min"], spread["max"]], color=colour, linewidth=0.8, zorder=2)
    for end in ("min", "max"):
        axes.plot([at - width / 4, at + width / 4], [spread[end]] * 2, color=colour, linewidth=0.8, zorder=2)
    low, high = spread["p10"], spread["p90"]
    axes.add_patch(Rectangle((at - width / 2, low), width, high - low, facecolor="white", linewidth=0, zorder=3))
    axes.add_patch(
        Rectangle(
            (at - width / 2, low),
            width,
            high - low,
            facecolor=(colour, 0.75),
            edgecolor=colour,
            linewidth=0.6,
            zorder=3,
        )
    )
    axes.plot([at - width / 2, at + width / 2], [spread["median"]] * 2, color="black", linewidth=1.0, zorder=4)
    axes.plot(at, spread["mean"], marker="D", markersize=2.6, markerfacecolor="white", markeredgecolor="black",
              markeredgewidth=0.5, zorder=5)  # fmt: skip


def _pair(row: Mapping[str, Any]) -> str:
    pair, sae = pair_of(str(row["tier"]))
    k, comma, delta = pair.partition(",")
    named = f"$k={k},\\ \\delta={delta}$" if comma else plain(str(row["label"]))
    if sae:
        named += ", no SAE" if sae == NO_SAE else f", {plain(sae)}"
    return f"{named}  (mean {row['tokens']:.0f} tokens)"


def _shades(count: int) -> list[str]:
    """Colours in an order that eyes of all kinds read as one: from blue over green to yellow, never too pale."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count <= 3:
        return [BLUE, GREEN, ORANGE][:count]
    return [to_hex(colormaps["viridis"](0.02 + 0.86 * place / (count - 1))) for place in range(count)]


def _frontier(axes: Any, points: Sequence[Point]) -> None:
    """A broad pale line through the points that no other beats in both tokens and score."""
    best: list[Point] = []
    for one in sorted(points, key=lambda one: (one.tokens, -one.relative)):
        if not best or one.relative > best[-1].relative:
            best.append(one)
    axes.plot([one.tokens for one in best], [one.relative for one in best], color=SOFT, alpha=0.25, linewidth=5,
              solid_capstyle="round", zorder=1)  # fmt: skip


def _ranges(axes: Any, curve: Sequence[Point], colour: str) -> None:
    for one in curve:
        if one.low is not None:
            axes.plot([one.tokens, one.tokens], [one.low, one.high], color=colour, linewidth=0.8, alpha=0.7, zorder=2)


def _name_pairs(axes: Any, points: Sequence[Point]) -> None:
    """Write (k, δ) above the better variant of each tier."""
    for tier in {_tier(one) for one in points if pair_of(one.tier)[0]}:
        top = max((one for one in points if _tier(one) == tier), key=lambda one: one.relative)
        text = f"({tier.replace(',', ', ')})"
        place = (top.tokens, top.high if top.high is not None else top.relative)
        axes.annotate(text, place, (0, 5), textcoords="offset points", ha="center", fontsize=7, color=INK, zorder=6)


def _tier(point: Point) -> str:
    """The pair of a point, without its SAE, which a colour tells."""
    return pair_of(point.tier)[0] or point.tier


def _is(point: Point, key: tuple[str, str, bool, str], several: bool) -> bool:
    return (point.label, point.method, point.fixed, point.sae if several else "") == key


def _token_scale(axes: Any, counts: Sequence[float]) -> None:
    """A logarithmic axis with the counts themselves as ticks, as far as they do not touch."""
    axes.set_xscale("log")
    chosen: list[float] = []
    for count in sorted({round(one) for one in counts}):
        if not chosen or count / chosen[-1] > 1.15:
            chosen.append(count)
    axes.set_xticks(chosen, [f"{one:.0f}" for one in chosen])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.04)


def _say_whose(axes: Any, points: Sequence[Point]) -> None:
    """Say which points are the paper's, and whether others may still move."""
    theirs = [one.printed for one in points]
    told = PRINTED if all(theirs) else f"ε = …: {PRINTED}" if any(theirs) else ""
    told = told if all(one.whole for one in points) else ", ".join(filter(None, [told, NOT_WHOLE]))
    if told:
        axes.annotate(told, (0.99, 0.02), xycoords="axes fraction", ha="right", color=SOFT, fontsize=7, style="italic")


def _mean_of(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("mean")  # type: ignore[reportUnknownMemberType]
    return float(value) if isinstance(value, int | float) else None


def _std_of(value: Any) -> float:
    std: Any = value.get("std", 0.0) if isinstance(value, Mapping) else 0.0  # type: ignore[reportUnknownMemberType]
    return float(std) if isinstance(std, int | float) else 0.0


def _floors(axes: Any, rows: Sequence[Mapping[str, Any]], places: Any) -> None:
    """The part of the module's time that an empty module takes as well, hatched."""
    floors = [_mean_of(row.get("floor_ms")) or 0.0 for row in rows]
    widest = max((_mean_of(row.get("module_ms")) or 0.0) for row in rows)
    if max(floors) > 0.02 * widest:
        axes.barh(places, floors, height=0.66, color="none", edgecolor="white", linewidth=0, hatch="//////", zorder=2)
        axes.annotate("hatched: floor", (1, 0), (0, -1), xycoords="axes fraction", textcoords="offset points",
                      ha="right", va="top", fontsize=6.5, color=SOFT)  # fmt: skip


def _bench_label(row: Mapping[str, Any]) -> str:
    tokens = _mean_of(row.get("tokens"))
    return typeset(str(row.get("label") or row.get("spec"))) + (f"  ({tokens:.0f})" if tokens is not None else "")
