"""What `evaluate` found, for people: Markdown tables ready to be quoted, and the pictures of `plots`.

Reads `runner.Results` and the times of the run. The page names the machine and the day, which `results.json` deliberately
does not.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scd_trt.evaluate import plots
from scd_trt.evaluate.bench import ORACLE
from scd_trt.evaluate.runner import Results, seconds_per_item
from scd_trt.evaluate.summary import RAW, Table

PAGE = "results.md"

RARE_REFUSAL = 0.2
"""An oracle that refuses fewer of the harmful requests has too little to lose for the probe to say anything."""

Cell = Callable[[dict[str, Any]], str]


def write(results: Results, out: Path, *, name: str) -> Path:
    """Write `results.md` and its pictures; returns the page's path."""
    pictures = plots.write(results, out)
    seconds = seconds_per_item(out)
    lines = [
        f"# {name}: every control, on the test split",
        "",
        f"Translator `{results.fingerprint}`, seed {results.plan.seed}; {_machine()}; {datetime.date.today().isoformat()}.",
        *_LEGEND,
        "",
        *(
            [f"Controls that reuse the producer's cache are left out: {results.omitted}.", ""]
            if results.omitted
            else []
        ),
    ]
    for row, table in results.tables.items():
        lines += [f"## {row}", "", _sample(table, seconds.get(row)), "", *markdown_table(results, row), ""]
        if "same_decision" in table[ORACLE]:
            lines += [refusal_note(table), ""]
    lines += [f"![{picture.removesuffix('.png')}]({picture})" for picture in pictures]
    page = out / PAGE
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return page


def markdown_table(results: Results, row: str) -> list[str]:
    """The lines of one row's table."""
    titles, cells = columns(results, row)
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return lines + ["| " + " | ".join(found) + " |" for found in cells]


def columns(results: Results, row: str) -> tuple[list[str], list[list[str]]]:
    """Titles, and the cells of every control, of one row's table."""
    table = results.tables[row]
    having = {metric for summary in table.values() for metric in summary}
    shown = [(title, cell) for title, needs, cell in _COLUMNS if needs in having]
    titles = ["cache given to the consumer", "bytes/token", *(title for title, _ in shown)]
    cells = [
        [name, _size(summary["bytes_per_token"], results.dense_bytes_per_token), *(cell(summary) for _, cell in shown)]
        for name, summary in table.items()
    ]
    return titles, cells


def refusal_note(table: Table) -> str:
    """How much the probe of refusals can say."""
    harmful, benign = (table[ORACLE].get(f"refused_{kind}", {}).get("mean", 0.0) for kind in ("harmful", "benign"))
    said = (
        f"Over its own cache the consumer refuses {harmful:.0%} of the harmful and {benign:.0%} of the benign requests."
    )
    if harmful < RARE_REFUSAL:
        return f"{said} It hardly refuses at all, so that agreement with it says little about safety."
    return said


def _sample(table: Table, seconds: float | None) -> str:
    oracle = table[ORACLE]
    text = f"{oracle['num_items']} items of {oracle['num_documents']} documents"
    return text + (f"; {seconds:.1f} CPU seconds per item." if seconds is not None else ".")


def _size(size: float, dense: int) -> str:
    return f"{size:.0f} ({dense / size:.1f}x fewer)" if size else "-"


def _mean(metric: str, digits: int = 3) -> Cell:
    def cell(summary: dict[str, Any]) -> str:
        return f"{summary[metric]['mean']:.{digits}f}" if metric in summary else "-"

    return cell


def _with_interval(metric: str, digits: int = 3, *, scale: float = 1.0, unit: str = "") -> Cell:
    def cell(summary: dict[str, Any]) -> str:
        if metric not in summary:
            return "-"
        mean, low, high = (f"{scale * summary[metric][part]:.{digits}f}" for part in ("mean", "low", "high"))
        return f"{mean}{unit} [{low}, {high}]"

    return cell


def _worst(metric: str) -> Cell:
    def cell(summary: dict[str, Any]) -> str:
        return f"{summary[metric]['worst_decile']:.3f}" if metric in summary else "-"

    return cell


def _gap(summary: dict[str, Any]) -> str:
    # adding zero takes the sign from a rounded -0
    return f"{round(summary['gap_recovered'], 2) + 0.0:.2f}" if "gap_recovered" in summary else "-"


_COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("KL to oracle", "kl", _with_interval("kl", 4)),
    ("worst decile", "kl", _worst("kl")),
    ("top-1", "top1_agreement", _mean("top1_agreement")),
    ("NLL", "nll", _mean("nll")),
    ("F1", "f1", _with_interval("f1")),
    ("F1 lost", "f1_relative_loss", _with_interval("f1_relative_loss", 1, scale=100, unit="%")),
    ("EM", "exact_match", _mean("exact_match")),
    ("F1 to oracle's answer", "oracle_f1", _with_interval("oracle_f1")),
    ("worst decile", "oracle_f1", _worst("oracle_f1")),
    ("refuses harmful", "refused_harmful", _mean("refused_harmful", 2)),
    ("refuses benign", "refused_benign", _mean("refused_benign", 2)),
    ("same decision", "same_decision", _with_interval("same_decision", 2)),
    ("same text", "same_text", _mean("same_text", 2)),
    ("KL on its answer", "answer_kl", _with_interval("answer_kl", 4)),
    ("KL to raw's", "kl_ratio_to_raw", _with_interval("kl_ratio_to_raw", 2)),
    ("gap recovered", "gap_recovered", _gap),
)
"""Title, metric that must be there, and the cell."""

_LEGEND: Sequence[str] = (
    "Mean with its 95% bootstrap interval over documents. `worst decile`: mean of the worst tenth. `F1 lost`: share of the",
    "oracle's F1, over pairs of the same questions; `KL to raw's`: KL over that of the producer's cache with the consumer's",
    f"rotary (`{RAW}`), likewise. `KL on its answer`: per token of what the consumer says over its own cache, and its end.",
    "`gap recovered`: (control - no cache) / (oracle - no cache), of F1 or NLL.",
)


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
