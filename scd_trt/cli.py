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
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from scd_trt.deploy.check import FileReport, Finding, check_files
from scd_trt.deploy.profiles import PROFILES
from scd_trt.deploy.render import render, write
from scd_trt.deploy.scd_section import CONFIG_VARIABLE, ROLE_VARIABLE
from scd_trt.deploy.served_pair import chosen_worker, load_served_pair

if TYPE_CHECKING:
    from scd_trt.evaluate.forecast import Forecast

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
config_app = typer.Typer(
    no_args_is_help=True, help="Files for TensorRT-LLM: `render` writes them for a pair, `check` explains and compares."
)
app.add_typer(config_app, name="config")
# a pipe has no width: tables must not be cut to the 80 columns of an imagined terminal
stdout = Console(width=None if sys.stdout.isatty() else 160)
stderr = Console(stderr=True)

PairFile = Annotated[
    Path, typer.Argument(help="pair file, for example engine_configs/smollm2-qa/pair.yaml", metavar="PAIR.yaml")
]
ServedFile = Annotated[
    Path,
    typer.Argument(
        envvar=CONFIG_VARIABLE,
        help="pair file, or TensorRT-LLM's disaggregated file with an scd section",
        metavar="PAIR.yaml|DISAGG.yaml",
    ),
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


@config_app.command("render")
def config_render(
    pair: PairFile,
    profile: Annotated[str, typer.Option(help=f"kind of machines: {', '.join(PROFILES)}")],
    out: Annotated[
        Path | None, typer.Option(help="directory; default: named by the profile, beside the pair file")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the files, write nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace files that were edited")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write prefill.yaml, decode.yaml and disagg.yaml of a pair; every setting that SCD needs says why it is there."""
    files = render(pair, profile, out)
    if dry_run:
        if as_json:
            print_json({str(file.path): file.text for file in files})
            return
        stdout.print("\n".join(f"# ---- {file.path}\n{file.text}" for file in files), markup=False, soft_wrap=True)
        return
    written = write(files, force=force)
    if as_json:
        print_json({str(file.path): file.state for file in written})
        return
    for file in written:
        stdout.print(f"{file.path}: {file.state}", markup=False, soft_wrap=True)


@config_app.command("check")
def config_check(
    files: Annotated[list[Path], typer.Argument(help="pair files and files of TensorRT-LLM", metavar="FILE...")],
    role: Annotated[
        Literal["prefill", "decode"] | None, typer.Option(help="of files with worker options; default: from the name")
    ] = None,
    allow: Annotated[list[str] | None, typer.Option(help="key that only looks like a typo; may be repeated")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="only what is wrong, advised or unknown")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Explain each setting that SCD needs of TensorRT-LLM, what breaks without it, and whether these files have it.

    Exit code 2 if a needed setting is wrong or a file is malformed; advice and keys unknown here only warn.
    """
    reports = check_files(files, role=role, allow=frozenset(allow or ()))
    if as_json:
        print_json({"ok": all(report.ok for report in reports), "files": [_report_json(report) for report in reports]})
    else:
        for report in reports:
            _print_report(report, brief=brief)
    if not all(report.ok for report in reports):
        raise typer.Exit(2)


def _report_json(report: FileReport) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report) | {"path": str(report.path), "ok": report.ok}


def _print_report(report: FileReport, *, brief: bool) -> None:
    lines = [f"{report.path}: {report.kind}, {'ok' if report.ok else 'WRONG'}", *report.mistakes]
    for finding in report.findings:
        if not (brief and finding.ok):
            lines += _finding_lines(report.path, finding)
    lines += [
        f"  unknown  {report.path}:{passed.line}: {passed.key}: not known to scd-trt; left to TensorRT-LLM"
        for passed in report.passed
    ]
    stdout.print("\n".join(lines), markup=False, soft_wrap=True)


def _finding_lines(path: Path, finding: Finding) -> list[str]:
    reason = f"           otherwise {finding.why}"
    if finding.ok:
        return [f"  ok       {finding.key}: {finding.found} (needs {finding.required})", reason]
    state = "WRONG" if finding.level == "required" else "advice"
    return [f"  {state:<7}  {path}:{finding.line}: {finding.key}: {finding.found}; needs {finding.required}", reason]


@config_app.command("models")
def config_models(pair: PairFile, as_json: JsonFlag = False) -> None:
    """Make the directories of the pair's models that `trtllm-serve` can load, and print them: adapters merged, GGUF
    converted, once, in the cache."""
    config = load_pair(pair)
    from scd_trt.models import materialize

    with progress_bars() as bars:
        bars.stage(f"models of {config.name}", 2)
        sections = {"producer": config.producer, "consumer": config.consumer}
        found = {name: str(materialize(section.model, adapter=section.adapter)) for name, section in sections.items()}
    if as_json:
        print_json(found)
        return
    for name, directory in found.items():
        stdout.print(f"{name}: {directory}", markup=False, soft_wrap=True)


@app.command()
def doctor(
    pair: Annotated[
        Path | None,
        typer.Argument(
            envvar=CONFIG_VARIABLE,
            help="what is served: pair file, or the disaggregated file with an scd section",
            metavar="[PAIR.yaml|DISAGG.yaml]",
        ),
    ] = None,
    peer: Annotated[str | None, typer.Option(help="also test the way from this host", metavar="HOST[:PORT]")] = None,
    listen: Annotated[bool, typer.Option("--listen", help="be the peer: wait for `--peer` of another host")] = False,
    address: Annotated[
        str | None,
        typer.Option(help="where to listen; default: the prefill worker's control address", metavar="HOST:PORT"),
    ] = None,
    role: Annotated[
        Literal["prefill", "decode"] | None, typer.Option(envvar=ROLE_VARIABLE, help="what this host will run")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="do not read the models' weights")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Say whether this host is ready to move codes, and what to do where it is not.

    Bytes are moved between two processes here, and with `--peer` from another host, and the transport that UCX really took
    is named. Codes flow from the prefill to the decode host, so `scd-trt doctor FILE --listen` belongs on the prefill host
    and `scd-trt doctor FILE --peer PREFILL-HOST` on the decode host. Exit code 1 where something failed; warnings do not
    count.
    """
    config = load_served_pair(pair, role=role, worker=chosen_worker(os.environ)) if pair else None
    from scd_trt.doctor import ends, examination, findings

    if listen:
        options = examination.options_for(config, address)
        ends.serve(options, _say_how_to_dial)
        return
    found = []
    for finding in examination.examine(config, pair, role=role, peer=peer, reads_models=not quick):
        found.append(finding)
        if not as_json:
            stdout.print("\n".join(finding.lines()), markup=False, soft_wrap=True, highlight=False)
    if as_json:
        print_json({"ok": findings.is_fit(found), "findings": [finding.as_json() for finding in found]})
    if not findings.is_fit(found):
        raise typer.Exit(1)


def _say_how_to_dial(listening_on: str) -> None:
    text = f"listening on {listening_on}; on the other host: scd-trt doctor FILE --peer {listening_on}   (Ctrl-C ends)"
    stdout.print(text, markup=False, soft_wrap=True, highlight=False)
    sys.stdout.flush()


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
    _print_modes(data["quality"])
    print_quality(data["quality"])


def _print_modes(quality: dict[str, Any]) -> None:
    """What every mode of every group was predicted to cost, and which was taken."""
    found = quality.get("modes")
    if not found:
        return
    from scd_trt.distill import report

    price = f"predicted nats per token, loss + {found['nats_per_byte']:.3g} per byte"
    _print_rows(f"Modes ({price})", "layers", report.mode_rows(found))
    stdout.print(report.rivals_text(found), markup=False, soft_wrap=True)


def _print_fields(title: str, data: dict[str, Any]) -> None:
    table = Table("field", "value", title=title)
    for key, value in data.items():
        text = str(value)
        table.add_row(key, text if len(text) <= 300 else text[:297] + "...")
    stdout.print(table)


def print_quality(quality: dict[str, Any]) -> None:
    """The held-out table that an artifact carries."""
    rows = quality.get("controls", {})
    if rows:
        _print_rows("Held-out quality of the consumer", "cache", rows)


def _print_rows(title: str, first: str, rows: dict[str, dict[str, Any]]) -> None:
    columns = list(next(iter(rows.values())))
    table = Table(first, *(column.replace("_", " ") for column in columns), title=title)
    for name, values in rows.items():
        table.add_row(name.replace("_", " "), *(_number(values.get(column)) for column in columns))
    stdout.print(table)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


@serve_app.command("prefill")
def serve_prefill(pair: ServedFile) -> None:
    """Run the producer: OpenAI endpoint, encoder, sender of codes."""
    _serve_worker(pair, "prefill")


@serve_app.command("decode")
def serve_decode(pair: ServedFile) -> None:
    """Run the consumer: OpenAI endpoint, receiver of codes, decoder. Works alone: without codes it prefills itself."""
    _serve_worker(pair, "decode")


def _serve_worker(pair: Path, role: Literal["prefill", "decode"]) -> None:
    config = load_served_pair(pair, role=role, worker=chosen_worker(os.environ))
    from scd_trt.serving.worker import run_worker

    run_worker(config, role)


@serve_app.command("router")
def serve_router(pair: ServedFile) -> None:
    """Run the endpoint that clients talk to."""
    config = load_served_pair(pair)
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
    work: Annotated[
        Path | None,
        typer.Option(help="directory for the folded calibration text, kept for fitting the pair at another rate"),
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="also measure loss at many sizes, 4x to 64x; frontier.json and .png")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fit the translator of a pair: calibrate, choose modes and rate, measure on held-out text, write artifact and report.

    Work that an earlier run finished is not repeated; the same input gives the same bytes. `--frontier` on a finished
    artifact reads the calibration text again, since its statistics are not kept, and leaves the artifact as it is.
    """
    config = load_pair(pair)
    from scd_trt.distill import pipeline, report

    if dry_run:
        data = pipeline.plan(config, full_frontier=frontier).as_json()
        print_json(data) if as_json else _print_fields(f"distill {config.name} would", data)
        return
    with progress_bars() as bars:
        translator = pipeline.distill(config, progress=bars, resume=not fresh, trace_frontier=frontier, work=work)
    manifest = translator.manifest
    points = report.read_frontier(config.translator_path(), manifest) if frontier else []
    if as_json:
        data = {"path": str(config.translator_path()), "fingerprint": manifest.fingerprint, "quality": manifest.quality}
        print_json(data | ({"frontier": points} if frontier else {}))
        return
    print_quality(manifest.quality)
    if points:
        _print_rows("Loss by size of the codes", "fewer bytes", report.frontier_rows(points))
    if limit := report.limit_text(manifest.quality, manifest.dense_bytes_per_token):
        stdout.print(f"limit: {limit}", markup=False, soft_wrap=True)
    stdout.print(f"translator: {config.translator_path()} (report.md beside it)", markup=False, soft_wrap=True)


@app.command()
def evaluate(
    pair: PairFile,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="text, narrativeqa, disflqa, multidoc, refusal, or all; may be repeated  [default: text, narrativeqa]"
        ),
    ] = None,
    items: Annotated[
        str,
        typer.Option(
            help="texts or questions: one number, or for each, as text=24,multidoc@4096=8", metavar="N|ROW=N,..."
        ),
    ] = "24",
    contexts: Annotated[
        str,
        typer.Option(
            help="lengths of the replaced prefix for text and multidoc: 512,1024,2048,4096", metavar="TOKENS,..."
        ),
    ] = "",
    controls: Annotated[
        str,
        typer.Option(help="only these, as rd,raw_rerotated,kivi_2bit; oracle and no_cache always", metavar="NAME,..."),
    ] = "",
    seed: Annotated[int, typer.Option(help="seed of the sample and of the bootstrap")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="directory for results; default: evaluations/NAME in the cache")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be measured, and for how long")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare the translator with every control on text and questions that neither fit nor selection saw.

    Each item is measured over all caches: the consumer's own (oracle), the producer's raw, compressed and translated
    ones, another prompt's (mismatched: must collapse) and none. Tasks:

    - **text**: KL and top-1 against the oracle, NLL
    - **narrativeqa**, **disflqa**: questions, graded by F1 with the right answer and with the oracle's own
    - **multidoc**: a question about one of several documents
    - **refusal**: does the consumer still refuse what it refuses over its own cache?

    Begin with `--dry-run`, then a quick look: `--items 4 --controls rd,raw_rerotated,mismatched`. The full measurement:
    `--task all --contexts 512,1024,2048,4096 --items text=16,narrativeqa=60,refusal=40`.

    An interrupted run goes on in the same directory, and the same seed gives the same bytes. Writes items.jsonl,
    results.json, results.md and pictures.
    """
    config = load_pair(pair)
    from dataclasses import asdict

    from scd_trt.evaluate import forecast, report, runner
    from scd_trt.evaluate.plan import make_plan

    plan = make_plan(config.heldout, tasks=task or (), items=items, contexts=contexts, controls=controls, seed=seed)
    directory = out or cache_root() / "evaluations" / config.name
    if dry_run:
        expected = forecast.forecast(config, plan, directory)
        print_json(asdict(expected)) if as_json else _print_forecast(config.name, expected)
        return
    with progress_bars() as bars:
        results = runner.evaluate(config, plan, directory, progress=bars)
    page = report.write(results, directory, name=config.name)
    if as_json:
        print_json(asdict(results))
        return
    for row in results.tables:
        titles, cells = report.columns(results, row)
        table = Table(*titles, title=row)
        for found in cells:
            table.add_row(*found)
        stdout.print(table)
    stdout.print(f"results: {page}", markup=False, soft_wrap=True)


def _print_forecast(name: str, expected: Forecast) -> None:
    rows = Table("row", "items", "documents", "prefix tokens", "minutes", title=f"evaluate {name} would measure")
    for row in expected.rows:
        counts = (row.num_items, row.num_documents, round(row.mean_prefix_tokens))
        rows.add_row(row.name, *map(str, counts), f"{row.cpu_seconds / 60:.1f}")
    stdout.print(rows)
    dense = expected.dense_bytes_per_token
    for line in (
        f"controls: {', '.join(expected.controls)}",
        f"bytes per token: {expected.bytes_per_token} of {dense} ({dense / expected.bytes_per_token:.1f}x fewer)",
        f"caches held at once: at most {expected.cache_bytes / 2**20:.0f} MiB",
        f"time: {expected.cpu_seconds / 60:.0f} CPU minutes and the fit of the controls, {expected.times_from}",
        f"results: {expected.directory}",
    ):
        stdout.print(line, markup=False, soft_wrap=True)


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
