"""The results table: fits the example pairs at a tenth and a twentieth of the cache's bytes and measures every control.

    python benchmarks/results.py [--pairs smollm2-qa,...] [--out results] [--quick]      or: make results

Each pair is distilled at both rates and evaluated on the test split; unfinished work goes on where it stopped. Consumers that
a recipe makes must be there (`python examples/pairs/recipe.py NAME`). `summary.md` in the output directory has the tables for
docs/results.md and says of every target whether it was met; the pairs' own directories have all rows, pictures and JSON.
Hours on two cores; `--quick` measures two items of each row, to see that everything runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from scd_trt.config import ScdError, load_pair

ROOT = Path(__file__).parents[1]
PAIRS = ("smollm2-qa", "smollm2-rope", "smollm2-same", "qwen-qa")
RATIOS = (10, 20)
CALIBRATION_TOKENS = {"smollm2-qa": 40_960}
"""More than the demo's pair file asks for, which has to be quick."""

ITEMS = "text=24,narrativeqa=60,disflqa=60,multidoc=12,refusal=36"
TASKS = ("text", "narrativeqa", "disflqa")
SAME = "smollm2-same"
OWN = "rd"
MAX_TO_TRANSLATION, MIN_TRANSLATION_GAIN = 1.3, 3.0
MAX_F1_LOSS = {10: 0.01, 20: 0.05}
BEYOND_COMPARISON = {"oracle", "no_cache", "mismatched", OWN}


@dataclass(frozen=True)
class Run:
    """One pair at one rate: the pair file that was written for it, and where its results are."""

    pair: str
    ratio: int
    directory: Path

    @property
    def pair_file(self) -> Path:
        return self.directory / "pair.yaml"

    @property
    def moments(self) -> Path:
        return self.directory.parent / f"{self.pair}-moments"

    def results(self) -> dict[str, Any]:
        """What `scd-trt evaluate` wrote."""
        found: dict[str, Any] = json.loads((self.directory / "results.json").read_text())
        return found

    def quality(self) -> dict[str, Any]:
        """What `scd-trt distill` measured on held-out text."""
        manifest = json.loads((self.directory / "translator" / "translator.json").read_text())
        found: dict[str, Any] = manifest["quality"]
        return found


def prepare_run(pair: str, ratio: int, out: Path) -> Run:
    """Write the pair file of a rate: that of the repository with another size and an artifact of its own."""
    run = Run(pair, ratio, out / f"{pair}-{ratio}x")
    run.directory.mkdir(parents=True, exist_ok=True)
    source = ROOT / "engine_configs" / pair / "pair.yaml"
    content = yaml.safe_load(source.read_text())
    adapter = content["consumer"].get("adapter")
    if adapter:
        content["consumer"]["adapter"] = str((source.parent / adapter).resolve())
    content["translator"] = "translator"
    content["method"] = {
        name: value for name, value in content["method"].items() if name not in ("max_kl", "max_relative_f1_loss")
    }
    content["calibration"]["num_tokens"] = CALIBRATION_TOKENS.get(pair, content["calibration"]["num_tokens"])
    content["method"]["bytes_per_token"] = load_dense_bytes(source) // ratio
    run.pair_file.write_text(yaml.safe_dump(content, sort_keys=False))
    return run


def load_dense_bytes(pair_file: Path) -> int:
    """Bytes of a token's cache, from the models' shapes."""
    from scd_trt.distill.plan import prepare

    return prepare(load_pair(pair_file)).dense_bytes_per_token


def scd_trt(*arguments: str) -> None:
    """Run a command of this project in a process of its own, so that its memory is given back."""
    print("$ scd-trt", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "scd_trt.cli", *arguments], check=True)


def measure(run: Run, items: str, tasks: tuple[str, ...]) -> None:
    """Fit and evaluate one pair at one rate; both rates start from the same moments."""
    scd_trt("distill", str(run.pair_file), "--work", str(run.moments))
    chosen = [part for task in tasks for part in ("--task", task)]
    wanted = ",".join(part for part in items.split(",") if part.partition("=")[0] in tasks) or items
    scd_trt("evaluate", str(run.pair_file), "--out", str(run.directory), "--items", wanted, *chosen)


def summary(runs: list[Run]) -> str:
    """Tables of all runs, and what became of the targets."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {datetime.date.today()}"
    lines = [f"`python benchmarks/results.py`, {machine}.", ""]
    for pair in dict.fromkeys(run.pair for run in runs):
        own = [run for run in runs if run.pair == pair]
        lines += [f"### {pair}", "", *table(own), "", *targets(own), ""]
    return "\n".join(lines)


def table(runs: list[Run]) -> list[str]:
    """Controls of one pair by falling size; the codec of every rate is a row of its own."""
    rows = {name: row for run in reversed(runs) for name, row in rows_of(run)}
    tasks = [task for task in ("narrativeqa", "disflqa") if any(task in row for row in rows.values())]
    titles = ["cache given to the consumer", "bytes/token", "KL to oracle", "worst decile", "top-1"]
    titles += [f"{task}: {metric}" for task in tasks for metric in ("F1", "F1 lost, %", "F1 to oracle's answer")]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    ordered = sorted(rows.items(), key=lambda item: (item[0] != "oracle", -item[1]["text"]["bytes_per_token"]))
    return lines + ["| " + " | ".join(cells(name, row, tasks)) + " |" for name, row in ordered]


def rows_of(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Control, and its summary by task."""
    tables = {row.partition("@")[0]: found for row, found in run.results()["tables"].items()}
    for control in tables["text"]:
        by_task = {task: found[control] for task, found in tables.items() if control in found}
        # controls of a fixed size are the same at every rate; those that follow the codec's size carry it
        follows = control in (OWN, "mismatched") or control.endswith("_equal")
        yield (f"{control} {run.ratio}x" if follows else control), by_task


def cells(name: str, row: Mapping[str, Any], tasks: list[str]) -> list[str]:
    """One line of the table."""
    text = row["text"]
    size = text["bytes_per_token"]
    found = [
        f"**{name}**" if name.startswith(f"{OWN} ") else name,
        f"{size:.0f}" if size else "-",
        interval(text["kl"], 4),
        f"{text['kl']['worst_decile']:.3f}",
        f"{text['top1_agreement']['mean']:.3f}",
    ]
    for task in tasks:
        given = row.get(task, {})
        found += [interval(given.get("f1"), 3), interval(given.get("f1_relative_loss"), 1, scale=100)]
        found.append(interval(given.get("oracle_f1"), 3))
    return found


def interval(metric: Mapping[str, float] | None, digits: int, *, scale: float = 1.0) -> str:
    """Mean with its interval."""
    if metric is None:
        return "-"
    mean, low, high = (f"{scale * metric[part]:.{digits}f}" for part in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def targets(runs: list[Run]) -> list[str]:
    """A line for each target: met or missed, and by what."""
    lines = []
    held = runs[0].quality()["controls"]
    translation, raw, coded = held["translation"]["kl"], held.get("raw_rerotated", {}).get("kl"), held["rd"]["kl"]
    if runs[0].pair != SAME:
        lines.append(verdict("10x against the translation, held-out KL", coded / translation, MAX_TO_TRANSLATION))
        if raw is not None:
            lines.append(
                verdict("translation against raw reuse, held-out KL", translation / raw, 1 / MIN_TRANSLATION_GAIN)
            )
    for run in runs:
        for task, found in rows_of_own(run).items():
            loss = found.get("f1_relative_loss")
            if loss is not None:
                name = f"{run.ratio}x: relative F1 loss, {task}, {interval(loss, 1, scale=100)} %"
                lines.append(verdict(name, loss["mean"], MAX_F1_LOSS[run.ratio]))
        lines += better_controls(run)
    return lines


def rows_of_own(run: Run) -> dict[str, Any]:
    """The codec's summary by task."""
    return {row.partition("@")[0]: found[OWN] for row, found in run.results()["tables"].items()}


def better_controls(run: Run) -> list[str]:
    """Controls at equal or fewer bytes whose KL is lower than the codec's."""
    found = next(table for row, table in run.results()["tables"].items() if row.startswith("text"))
    own = found[OWN]
    better = [
        f"{name} ({row['kl']['mean']:.4f} at {row['bytes_per_token']:.0f})"
        for name, row in found.items()
        if name not in BEYOND_COMPARISON
        and row["bytes_per_token"] <= own["bytes_per_token"] * 1.02
        and row["kl"]["mean"] < own["kl"]["mean"]
    ]
    return [f"- {run.ratio}x: controls at equal or fewer bytes with less KL: {', '.join(better) or 'none'}"]


def verdict(name: str, value: float, limit: float) -> str:
    """Whether a value keeps to its limit."""
    return f"- {name}: {value:.3f}, limit {limit:.3f}: {'met' if value <= limit else '**missed**'}"


def main() -> None:
    """Run everything and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=",".join(PAIRS), help="names of directories under engine_configs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory of everything that is written")
    parser.add_argument("--items", default=ITEMS, help="as for scd-trt evaluate")
    parser.add_argument("--tasks", default=",".join(TASKS), help="as for scd-trt evaluate, between commas")
    parser.add_argument("--quick", action="store_true", help="two items of each row")
    parser.add_argument("--summary-only", action="store_true", help="from results that are there")
    options = parser.parse_args()
    items = "2" if options.quick else options.items
    runs = []
    for pair in options.pairs.split(","):
        for ratio in RATIOS:
            try:
                run = prepare_run(pair, ratio, options.out)
            except ScdError as error:
                sys.exit(f"{pair}: {error}")
            if not options.summary_only:
                measure(run, items, tuple(options.tasks.split(",")))
            runs.append(run)
        # they take many times an artifact's bytes
        shutil.rmtree(options.out / f"{pair}-moments", ignore_errors=True)
    page = options.out / "summary.md"
    page.write_text(summary(runs) + "\n", encoding="utf-8")
    print(f"{page}: written")


if __name__ == "__main__":
    main()
