"""What `evaluate` found, for people: a Markdown page and a picture of quality against bytes.

Reads `runner.Results` only. The page names the machine and the day, which `results.json` deliberately does not.
"""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

from scd_trt.evaluate.runner import Results

mpl.use("Agg")

import matplotlib.pyplot as plt

PICTURE = "quality_by_bytes.png"
_MAIN_METRIC = {
    "text": ("kl", "KL to the oracle, nats per token"),
    "narrativeqa": ("f1", "F1"),
    "disflqa": ("f1", "F1"),
}


def write(results: Results, out: Path, *, name: str) -> Path:
    """Write `report.md` and its picture; returns the page's path."""
    _draw(results, out / PICTURE)
    lines = [
        f"# {name}: every control, on held-out text",
        "",
        f"Translator `{results.fingerprint}`, {results.plan.num_items} items per task, seed {results.plan.seed}; "
        f"{_machine()}; {datetime.date.today().isoformat()}.",
        "Mean with its 95% bootstrap interval over documents; `worst` is the mean of the worst tenth; `gap` is "
        "(method - no cache) / (oracle - no cache).",
        "",
    ]
    for task, table in results.tables.items():
        lines += [f"## {task}", "", *_table(table, results.bytes_per_token), ""]
    page = out / "report.md"
    page.write_text("\n".join([*lines, f"![quality against bytes]({PICTURE})", ""]), encoding="utf-8")
    return page


def _table(table: dict[str, dict[str, Any]], sizes: dict[str, float]) -> list[str]:
    metrics = [name for name, value in table["oracle"].items() if isinstance(value, dict)]
    dense = sizes["raw"]
    head = (
        ["cache", "bytes/token", "fewer than raw"]
        + [part for metric in metrics for part in (metric, "worst")]
        + ["gap"]
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for control, summary in table.items():
        size = sizes[control]
        cells = [control, f"{size:.0f}" if size else "-", f"{dense / size:.2f}x" if size else "-"]
        for metric in metrics:
            value = summary[metric]
            cells += [f"{value['mean']:.4g} [{value['low']:.4g}, {value['high']:.4g}]", f"{value['worst_decile']:.4g}"]
        gap = summary.get("gap_recovered")
        lines.append("| " + " | ".join([*cells, "-" if gap is None else f"{gap:.3f}"]) + " |")
    return lines


def _draw(results: Results, path: Path) -> None:
    figure, axes = plt.subplots(
        1, len(results.tables), figsize=(6.4 * len(results.tables), 4.8), squeeze=False, layout="constrained"
    )
    for axis, (task, table) in zip(axes[0], results.tables.items(), strict=True):
        metric, label = _MAIN_METRIC[task]
        for control, summary in table.items():
            _draw_control(axis, control, results.bytes_per_token[control], summary[metric], on_log=metric == "kl")
        axis.set(
            title=task,
            xlabel="bytes per token",
            ylabel=label,
            xscale="log",
            yscale="log" if metric == "kl" else "linear",
        )
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_control(axis: Any, control: str, size: float, value: dict[str, float], *, on_log: bool) -> None:
    """A point with its interval, or a line across for what sends nothing; zero has no place on a logarithmic axis."""
    if on_log and value["mean"] <= 0:
        return
    if size:
        low = max(value["low"], 1e-9) if on_log else value["low"]
        bar = [[max(value["mean"] - low, 0.0)], [max(value["high"] - value["mean"], 0.0)]]
        axis.errorbar(size, value["mean"], yerr=bar, fmt="o", capsize=3, label=control)
        return
    axis.axhline(value["mean"], linestyle="--", linewidth=1, color="grey", label=control)


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
