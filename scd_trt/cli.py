"""The `scd-trt` command: one place where library errors become friendly text and exit codes, and progress becomes bars.

Exit codes: 0 done; 1 a check or comparison said no; 2 the user can cure it (the message says how); 130 interrupted. Any
other failure is a bug and shows its traceback. `--json` prints one JSON document on stdout and nothing else there;
everything for people goes to stderr or, without `--json`, to stdout. Nothing is computed in this file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

# Read by tokenizers and OpenMP when they load, and by transformers: no hub is ever asked, no thread pool spins.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from scd_trt import __version__
from scd_trt.config import ScdError, cache_root, load_pair

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Semantic Cache Distillation: send compact codes instead of KV cache between the servers of a model pair.\n\n"
    "Start with `scd-trt demo engine_configs/smollm2-qa/pair.yaml`; for a pair of your own: `check`, `distill`, "
    "`evaluate`, `serve all`.",
)
serve_app = typer.Typer(
    no_args_is_help=True, help="Run a server of a pair: `prefill`, `decode`, `router`, or `all` three."
)
app.add_typer(serve_app, name="serve")
# a pipe has no width: tables must not be cut to the 80 columns of an imagined terminal
stdout = Console(width=None if sys.stdout.isatty() else 160)
stderr = Console(stderr=True)

PairFile = Annotated[
    Path, typer.Argument(help="pair file, for example engine_configs/smollm2-qa/pair.yaml", metavar="PAIR.yaml")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="print one JSON document for machines")]


class BarProgress:
    """Progress of library code as bars on stderr; a line per stage where stderr is no terminal."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = None if bars.disable else bars.add_task("")
        self._name = ""

    def stage(self, name: str, total: int) -> None:
        """Begin a stage of `total` steps."""
        self._name = name
        if self._bars.console.is_terminal:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(escape(name), total=total)
        else:
            self._bars.console.print(f"[{total}] {name}", markup=False)

    def advance(self, num_steps: int = 1) -> None:
        """Count steps of the current stage."""
        if self._task is not None:
            self._bars.advance(self._task, num_steps)


@contextmanager
def progress_bars() -> Iterator[BarProgress]:
    """Bars with elapsed time on stderr."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as bars:
        yield BarProgress(bars)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(data, indent=1, default=str) + "\n")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log debug messages")] = False,
) -> None:
    """Shared options."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if version:
        stdout.print(__version__)
        raise typer.Exit


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="pair files", metavar="FILE...")], as_json: JsonFlag = False
) -> None:
    """Say whether pair files are well formed: every mistake with line, key, value, and what is allowed."""
    mistakes: dict[str, list[str]] = {}
    for path in files:
        try:
            load_pair(path)
            mistakes[str(path)] = []
        except ScdError as error:
            mistakes[str(path)] = str(error).splitlines()
    if as_json:
        print_json({path: {"ok": not found, "errors": found} for path, found in mistakes.items()})
    else:
        for name, found in mistakes.items():
            stdout.print(f"{name}: ok" if not found else "\n".join(found), markup=False, soft_wrap=True)
    if any(mistakes.values()):
        raise typer.Exit(2)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="translator directory, model directory, .gguf file or package:<name>")],
    as_json: JsonFlag = False,
) -> None:
    """Show what a translator or a model is: pair, modes, bytes per token, measured quality; or shapes and digests."""
    from scd_trt import translator as translators

    if (Path(target) / translators.MANIFEST_FILE).exists():
        manifest = translators.load(Path(target)).manifest
        data = manifest.model_dump(mode="json") | {
            "fingerprint": manifest.fingerprint,
            "bytes_per_token": sum(manifest.bytes_per_token),
            "dense_bytes_per_token": manifest.dense_bytes_per_token,
        }
        print_json(data) if as_json else _print_translator(data)
        return
    from scd_trt.model_spec import ModelSpec
    from scd_trt.models import materialize

    with progress_bars() as bars:
        bars.stage(f"open {target}", 1)
        spec = ModelSpec.from_directory(materialize(target))
    data = spec.model_dump(mode="json")
    print_json(data) if as_json else _print_fields("Model", data)


def _print_translator(data: dict[str, Any]) -> None:
    _print_fields(
        f"Translator {data['name']}",
        {
            "fingerprint": data["fingerprint"],
            "policy": data["policy"],
            "producer": data["producer"]["weights_digest"],
            "consumer": data["consumer"]["weights_digest"],
            "bytes per token": f"{data['bytes_per_token']} of {data['dense_bytes_per_token']} dense "
            f"({data['dense_bytes_per_token'] / data['bytes_per_token']:.2f}x fewer)",
        },
    )
    layers = Table("layer", "mode", "ranks", title="Layers")
    for index, mode in enumerate(data["layers"]):
        ranks = ", ".join(f"{key} {value}" for key, value in mode.items() if key != "mode" and value is not None)
        layers.add_row(str(index), mode["mode"], ranks)
    stdout.print(layers)
    print_quality(data["quality"])


def _print_fields(title: str, data: dict[str, Any]) -> None:
    table = Table("field", "value", title=title)
    for key, value in data.items():
        text = str(value)
        table.add_row(key, text if len(text) <= 300 else text[:297] + "...")
    stdout.print(table)


def print_quality(quality: dict[str, Any]) -> None:
    """The held-out table that an artifact carries."""
    rows = quality.get("controls", {})
    if not rows:
        return
    columns = list(next(iter(rows.values())))
    table = Table("cache", *(column.replace("_", " ") for column in columns), title="Held-out quality of the consumer")
    for name, values in rows.items():
        table.add_row(name.replace("_", " "), *(_number(values.get(column)) for column in columns))
    stdout.print(table)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


@serve_app.command("prefill")
def serve_prefill(pair: PairFile) -> None:
    """Run the producer: OpenAI endpoint, encoder, sender of codes."""
    _serve_worker(pair, "prefill")


@serve_app.command("decode")
def serve_decode(pair: PairFile) -> None:
    """Run the consumer: OpenAI endpoint, receiver of codes, decoder. Works alone: without codes it prefills itself."""
    _serve_worker(pair, "decode")


def _serve_worker(pair: Path, role: Literal["prefill", "decode"]) -> None:
    config = load_pair(pair)
    from scd_trt.serving.worker import run_worker

    run_worker(config, role)


@serve_app.command("router")
def serve_router(pair: PairFile) -> None:
    """Run the endpoint that clients talk to."""
    config = load_pair(pair)
    from scd_trt.serving.worker import run_router

    run_router(config)


@serve_app.command("all")
def serve_all(
    pair: PairFile,
    logs: Annotated[Path | None, typer.Option(help="directory of the servers' logs")] = None,
) -> None:
    """Distil the pair if needed, then run prefill, decode and router until Ctrl-C."""
    config = load_pair(pair)
    from scd_trt.serving.demo import await_interrupt, curl_line, ensure_translator, log_directory
    from scd_trt.serving.launcher import check_ports_free, serving_group

    check_ports_free(config)
    with progress_bars() as bars:
        ensure_translator(config, progress=bars)
    log_path = logs or log_directory(config)
    with serving_group(pair, config, log_directory=log_path, waiting=_waiting) as children:
        stdout.print(f"ready: {children['router'].url}  (logs in {log_path})\ntry:\n", markup=False, soft_wrap=True)
        stdout.print(curl_line(config), markup=False, soft_wrap=True)
        stdout.print("\nCtrl-C stops all three servers.")
        await_interrupt(children)


@app.command()
def distill(
    pair: PairFile,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be done, load no weights")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="forget partial and finished work on this pair first")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fit the translator of a pair: calibrate, choose layers, measure on held-out text, write artifact and report.

    Work that an earlier run finished is not repeated; the same input gives the same bytes.
    """
    config = load_pair(pair)
    from scd_trt.distill import pipeline

    if dry_run:
        data = pipeline.plan(config).as_json()
        print_json(data) if as_json else _print_fields(f"distill {config.name} would", data)
        return
    with progress_bars() as bars:
        translator = pipeline.distill(config, progress=bars, resume=not fresh)
    manifest = translator.manifest
    if as_json:
        print_json(
            {"path": str(config.translator_path()), "fingerprint": manifest.fingerprint, "quality": manifest.quality}
        )
        return
    print_quality(manifest.quality)
    stdout.print(f"translator: {config.translator_path()} (report.md beside it)", markup=False, soft_wrap=True)


@app.command()
def evaluate(
    pair: PairFile,
    out: Annotated[
        Path | None, typer.Option(help="directory for results; default: evaluations/<name> in the cache")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="text, narrativeqa or disflqa; may be repeated")] = None,
    items: Annotated[int, typer.Option(help="sequences or questions of each task", min=2)] = 24,
    seed: Annotated[int, typer.Option(help="seed of the sample")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Compare the translator with every control on text and questions that neither fit nor selection saw.

    Continues an interrupted run in the same directory. Writes items.jsonl, results.json, report.md and a picture.
    """
    config = load_pair(pair)
    from dataclasses import asdict

    from scd_trt.evaluate import report, runner

    plan = runner.EvaluationPlan(runner.check_tasks(task or ["text", "narrativeqa"]), items, seed)
    directory = out or cache_root() / "evaluations" / config.name
    with progress_bars() as bars:
        results = runner.evaluate(config, plan, directory, progress=bars)
    page = report.write(results, directory, name=config.name)
    if as_json:
        print_json(asdict(results))
        return
    for name, table in results.tables.items():
        _print_controls(name, table, results.bytes_per_token)
    stdout.print(f"report: {page}", markup=False, soft_wrap=True)


def _print_controls(task: str, controls: dict[str, dict[str, Any]], sizes: dict[str, float]) -> None:
    metrics = [name for name, value in controls["oracle"].items() if isinstance(value, dict)]
    table = Table("cache given to the consumer", "bytes/token", *metrics, "gap recovered", title=task)
    for name, summary in controls.items():
        cells = [f"{summary[m]['mean']:.4g} [{summary[m]['low']:.4g}, {summary[m]['high']:.4g}]" for m in metrics]
        table.add_row(name, f"{sizes[name]:.0f}", *cells, _number(summary.get("gap_recovered")))
    stdout.print(table)


@app.command()
def demo(
    pair: PairFile,
    logs: Annotated[Path | None, typer.Option(help="directory of the servers' logs")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The main job from end to end: distil, serve over NIXL, answer three real questions, compare, stop."""
    config = load_pair(pair)
    from scd_trt.serving import demo as demonstration
    from scd_trt.serving.launcher import check_ports_free

    check_ports_free(config)
    with progress_bars() as bars:
        translator = demonstration.ensure_translator(config, progress=bars)
        rows = demonstration.run_demo(pair, config, logs=logs or demonstration.log_directory(config), progress=bars)
    if as_json:
        print_json({"quality": translator.manifest.quality, "questions": [row.as_json() for row in rows]})
        return
    print_quality(translator.manifest.quality)
    for row in rows:
        _print_demo_row(row.as_json())
    same = sum(row.served.text == row.own_prefill.text for row in rows)
    sent = [row.served.usage["scd"] for row in rows]
    num_bytes = sum(scd["bytes_sent"] for scd in sent)
    manifest = translator.manifest
    ratio = manifest.dense_bytes_per_token / sum(manifest.bytes_per_token)
    stdout.print(
        f"{same} of {len(rows)} answers over codes equal the consumer's own; {num_bytes} bytes of "
        f"codes crossed the wire, {ratio:.1f}x fewer than the cache they stand for; "
        f"{sum(scd['fallback'] is not None for scd in sent)} fallbacks.",
        soft_wrap=True,
    )


def _print_demo_row(row: dict[str, Any]) -> None:
    scd = row["served"]["usage"].get("scd", {})
    table = Table(
        "", "answer", "F1", "first token ms", title=escape(f"{row['question']}  (expected: {row['expected']})")
    )
    names = {"served": "consumer, codes", "own_prefill": "consumer, own prefill", "producer": "producer"}
    for key, label in names.items():
        answer = row[key]
        table.add_row(label, escape(answer["text"]), f"{row['f1'][key]:.2f}", f"{answer['first_token_ms']:.0f}")
    stdout.print(table)
    stdout.print(f"usage.scd: {json.dumps(scd)}", markup=False, soft_wrap=True)


def _waiting(role: str) -> None:
    stderr.print(f"waiting for {role} ...")


def main() -> None:
    """Run the command line; the one place where `ScdError` becomes text and an exit code."""
    try:
        app()
    except ScdError as error:
        stderr.print("[bold red]error:[/] " + escape(str(error)), soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
