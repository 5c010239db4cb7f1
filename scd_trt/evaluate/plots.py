"""Pictures of a run: quality against bytes for every control, and loss by length of the context.

Figures, as far as the run has their data:

    pareto_kl.png       KL to the oracle against bytes per token, both logarithmic, a panel per row of plain text
    pareto_f1.png       F1 against bytes per token, a panel per row of questions
    kl_by_context.png   KL of every control over the length of the replaced prefix, from two lengths of plain text on

The line joins the controls that no other one beats in both; what is on it is named in bold. A control that sends nothing
is a line across. Files are PNG without dates: the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scd_trt.evaluate.baselines import MISMATCHED
from scd_trt.evaluate.bench import ORACLE
from scd_trt.evaluate.runner import Results
from scd_trt.evaluate.summary import Table

OWN_CONTROLS = ("rd", "scd", "exact")
_OWN_COLOR, _OTHER_COLOR, _NEUTRAL = "#c1662f", "#2a6f97", "#8a8f98"
_PANEL_INCHES = (6.4, 5.0)


@dataclass(frozen=True)
class Point:
    """A control in a picture: bytes per token, and mean with its interval."""

    name: str
    size: float
    mean: float
    low: float
    high: float


def write(results: Results, out: Path) -> list[str]:
    """Draw what there is data for; returns the names of the files."""
    texts = {row: table for row, table in results.tables.items() if "kl" in table[ORACLE]}
    asked = {row: table for row, table in results.tables.items() if "f1" in table[ORACLE]}
    drawn = []
    for name, tables, metric in (("pareto_kl.png", texts, "kl"), ("pareto_f1.png", asked, "f1")):
        if tables:
            _draw_fronts(tables, metric, out / name)
            drawn.append(name)
    if len(texts) > 1:
        lengths = [row.context_tokens for row in results.plan.rows if row.name in texts]
        _draw_lengths(texts, [length for length in lengths if length is not None], out / "kl_by_context.png")
        drawn.append("kl_by_context.png")
    return drawn


def front(points: Sequence[Point], *, higher_is_better: bool) -> list[Point]:
    """The points that none with as few bytes beats, by increasing size."""
    sign = -1 if higher_is_better else 1
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.size, sign * point.mean)):
        if not found or sign * point.mean < sign * found[-1].mean:
            found.append(point)
    return found


def points_of(table: Table, metric: str) -> list[Point]:
    """Every control that has the metric."""
    return [
        Point(name, summary["bytes_per_token"], *(summary[metric][part] for part in ("mean", "low", "high")))
        for name, summary in table.items()
        if metric in summary
    ]


def _draw_fronts(tables: dict[str, Table], metric: str, path: Path) -> None:
    figure, panels = _figure(len(tables))
    for axes, (row, table) in zip(panels, tables.items(), strict=True):
        points = points_of(table, metric)
        _draw_front(axes, points, on_log=metric == "kl")
        label = "KL to the oracle, nats per token" if metric == "kl" else "F1"
        axes.set(title=row, xlabel="bytes per token, as packed", ylabel=label, xscale="log")
    figure.savefig(path, dpi=110)


def _draw_front(axes: Axes, points: Sequence[Point], *, on_log: bool) -> None:
    if on_log:
        axes.set_yscale("log")
    # zero has no place on a logarithmic axis: the oracle is its bottom
    shown = [point for point in points if not on_log or point.mean > 0]
    sent = [point for point in shown if point.size]
    # another prompt's codes are no way to send a cache
    best = front([point for point in sent if point.name != MISMATCHED], higher_is_better=not on_log)
    axes.plot(
        [point.size for point in best], [point.mean for point in best], "-", color=_NEUTRAL, linewidth=1, zorder=1
    )
    for point in shown:
        if point.size:
            _draw_point(axes, point, on_front=point in best, on_log=on_log)
        else:
            axes.axhline(point.mean, linestyle="--", linewidth=1, color=_NEUTRAL)
            axes.annotate(
                point.name, (0.99, point.mean), xycoords=("axes fraction", "data"), fontsize=7, ha="right", va="bottom"
            )


def _draw_point(axes: Axes, point: Point, *, on_front: bool, on_log: bool) -> None:
    own = point.name in OWN_CONTROLS
    color = _OWN_COLOR if own else _OTHER_COLOR
    low = max(point.low, point.mean * 1e-3) if on_log else point.low
    bar = [[max(point.mean - low, 0.0)], [max(point.high - point.mean, 0.0)]]
    axes.errorbar(
        point.size,
        point.mean,
        yerr=bar,
        fmt="D" if own else "o",
        color=color,
        markersize=7 if own else 4,
        elinewidth=0.7,
    )
    axes.annotate(
        point.name,
        (point.size, point.mean),
        textcoords="offset points",
        xytext=(5, 3),
        fontsize=7,
        color=color,
        fontweight="bold" if on_front else "normal",
    )


def _draw_lengths(tables: dict[str, Table], lengths: Sequence[int], path: Path) -> None:
    figure, (axes,) = _figure(1)
    names = [name for name in next(iter(tables.values())) if name != ORACLE]
    for name in names:
        means = [table[name]["kl"]["mean"] for table in tables.values() if name in table]
        if len(means) < len(lengths) or min(means) <= 0:
            continue
        own = name in OWN_CONTROLS
        style: dict[str, Any] = {"color": _OWN_COLOR if own else _OTHER_COLOR, "linewidth": 2.4 if own else 0.9}
        axes.plot(lengths, means, "o-", markersize=3, alpha=1.0 if own else 0.7, **style)
        where: dict[str, Any] = {"textcoords": "offset points", "xytext": (5, 0), "fontsize": 7, "va": "center"}
        axes.annotate(name, (lengths[-1], means[-1]), color=style["color"], **where)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens of the replaced prefix", ylabel="KL to the oracle, nats per token"
    )
    axes.set_xticks(list(lengths), labels=[str(length) for length in lengths], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_title("Loss by length of the context")
    axes.margins(x=0.15)
    figure.savefig(path, dpi=110)


def _figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * num_panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure, panels
