"""`scd-trt evaluate`: every control on held-out text and questions, item by item, resumable and reproducible.

Owns: the run and its files. Which items there are: `work`; how one is measured: `bench`; a dry run: `forecast`.

    items.jsonl    a line that names the settings, then one line per item with all its controls; a later run with the
                   same settings goes on behind the last whole line
    results.json   the tables (`summary`)
    seconds.jsonl  a line per group of items: row, items, CPU seconds; no result, and not reproducible
    calibration/   moments that controls are fitted on

Only the `test` split is read, which neither calibration nor any choice while fitting saw. The same settings give the same
bytes in `items.jsonl` and `results.json` on one machine (floating point differs between CPUs).

Errors: `EvaluationError` where the output directory belongs to other settings or nothing can be measured.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scd_trt import translator as translators
from scd_trt.config import ModelConfig, PairConfig
from scd_trt.distill.calibration import Progress, calibrate, layer_statistics, read_texts
from scd_trt.distill.fit import LayerFits
from scd_trt.distill.plan import prepare
from scd_trt.evaluate.baselines import NO_CACHE, Fits, RidgeLayer, controls, fit_baselines, fits_needed, ridge_map
from scd_trt.evaluate.bench import ORACLE, Bench, Measured
from scd_trt.evaluate.caches import Control
from scd_trt.evaluate.plan import EvaluationError, EvaluationPlan, choice
from scd_trt.evaluate.summary import Table, summarise
from scd_trt.evaluate.work import Group, groups_of
from scd_trt.model_spec import OTHER_SHAPE, check_pair, same_shape
from scd_trt.models import LoadedModel, load_model, materialize
from scd_trt.translator import Translator

ITEMS_FILE, RESULTS_FILE, SECONDS_FILE = "items.jsonl", "results.json", "seconds.jsonl"

MEASURE_VERSION = 2
"""Part of the settings: raise it when the same plan must give other numbers."""


@dataclass(frozen=True)
class Results:
    """Summary of a run.

    Attributes:
        fingerprint: of the translator that was measured.
        dense_bytes_per_token: of the cache that nobody compressed.
        tables: row -> control -> metric; see `summary`.
        omitted: why controls are missing that other pairs have; empty where none are.
    """

    fingerprint: str
    dense_bytes_per_token: int
    plan: EvaluationPlan
    tables: dict[str, Table]
    omitted: str = ""


def evaluate(config: PairConfig, plan: EvaluationPlan, out: Path, *, progress: Progress) -> Results:
    """Measure all controls; continues an interrupted run in the same directory.

    Raises:
        EvaluationError: `out` holds other results, or nothing can be measured.
        ScdError: models, corpus or translator cannot be had; see their modules.
    """
    translator = checked_translator(config)
    log = _ItemLog(out / ITEMS_FILE, _settings(config, plan, translator))
    bench = _open(config, plan, translator, out, progress)
    for row in plan.rows:
        groups = groups_of(row, config, bench.consumer.tokenizer, seed=plan.seed)
        _measure(bench, row.name, groups, log, progress)
    tables = summarise(log.read(), [row.name for row in plan.rows], seed=plan.seed)
    manifest = translator.manifest
    omitted = "" if same_shape(manifest.producer, manifest.consumer) else OTHER_SHAPE
    results = Results(manifest.fingerprint, manifest.dense_bytes_per_token, plan, tables, omitted)
    (out / RESULTS_FILE).write_text(json.dumps(asdict(results), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return results


def _measure(bench: Bench, row: str, groups: Sequence[Group], log: _ItemLog, progress: Progress) -> None:
    num_done = log.num_done(row)
    progress.stage(f"measure {row}", sum(len(group.probes) for group in groups))
    progress.advance(num_done)
    for group in groups:
        skip = min(num_done, len(group.probes))
        num_done -= skip
        if skip == len(group.probes):
            continue
        started = time.process_time()
        for measured in bench.measure(row, group, skip=skip):
            log.append(measured)
            progress.advance()
        log.note_seconds(row, len(group.probes) - skip, time.process_time() - started)


def seconds_per_item(out: Path) -> dict[str, float]:
    """Mean CPU time of an item by row, of all runs in this directory."""
    path = out / SECONDS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    spent: dict[str, list[float]] = {}
    for line in lines:
        row, num_items, seconds = json.loads(line)
        total = spent.setdefault(row, [0.0, 0.0])
        total[0], total[1] = total[0] + num_items, total[1] + seconds
    return {row: seconds / num_items for row, (num_items, seconds) in spent.items()}


def checked_translator(config: PairConfig) -> Translator:
    """The pair's artifact, if it was fitted with the settings that the pair file has now."""
    translator = translators.load(config.translator_path())
    if translator.manifest.config_digest != config.method_digest():
        raise EvaluationError(
            f"{config.translator_path()} was fitted with other settings than the pair file has now; run `scd-trt distill`"
        )
    return translator


def _open(config: PairConfig, plan: EvaluationPlan, translator: Translator, out: Path, progress: Progress) -> Bench:
    manifest = translator.manifest
    can_fit = manifest.policy != "exact" and same_shape(manifest.producer, manifest.consumer)
    needs_fits, with_families = fits_needed(plan.controls)
    fits = _fits(config, out, progress, with_families=with_families) if can_fit and needs_fits else None
    progress.stage("load both models", 2)
    producer, consumer = _load(config.producer, progress), _load(config.consumer, progress)
    check_pair(producer.spec, consumer.spec, allow_other_shape=manifest.policy == "rd")
    translator.check_producer(producer.spec)
    translator.check_consumer(consumer.spec)
    for row in plan.rows:
        check_length(row.name, row.context_tokens, consumer.spec.max_position)
    return Bench(producer, consumer, chosen_controls(controls(consumer, translator, fits), plan.controls))


def chosen_controls(found: dict[str, Control], names: Sequence[str]) -> dict[str, Control]:
    """The named controls (none: all), with the oracle.

    Raises:
        EvaluationError: a name that this pair has no control of, or nothing to compare with the oracle.
    """
    known = [*found, NO_CACHE]
    for name in names:
        if name not in known:
            raise EvaluationError(f"control {name!r} does not exist for this pair; {choice(name, known)}")
    chosen = {name: control for name, control in found.items() if not names or name in names or name == ORACLE}
    if len(chosen) < 2:
        raise EvaluationError(
            f"nothing to compare with {ORACLE} and {NO_CACHE}, which are always measured; {choice('', known)}"
        )
    return chosen


def check_length(row: str, context_tokens: int | None, max_position: int) -> None:
    """Refuse contexts that the consumer cannot hold."""
    if context_tokens is not None and context_tokens >= max_position:
        raise EvaluationError(
            f"{row}: the consumer holds {max_position} tokens, with what follows the context; ask for shorter --contexts"
        )


def _settings(config: PairConfig, plan: EvaluationPlan, translator: Translator) -> dict[str, Any]:
    parts = [translator.manifest.fingerprint, config.method_digest(), config.engine.tokens_per_block, asdict(plan)]
    text = json.dumps([MEASURE_VERSION, *parts])
    return {"settings": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), "plan": asdict(plan)}


class _ItemLog:
    """`items.jsonl`: a line of settings, then one line per item with all its controls."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps(settings, sort_keys=True)
        if not path.exists():
            path.write_text(header + "\n", encoding="utf-8")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if not lines or lines[0].rstrip("\n") != header:
            raise EvaluationError(f"{path} belongs to other settings; choose another --out, or delete the directory")
        # a run that was cut while it wrote leaves half a line: that item is measured again
        if not lines[-1].endswith("\n"):
            path.write_text("".join(lines[:-1]), encoding="utf-8")

    def append(self, measured: Sequence[Measured]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([asdict(row) for row in measured], sort_keys=True) + "\n")

    def note_seconds(self, row: str, num_items: int, seconds: float) -> None:
        with (self._path.parent / SECONDS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([row, num_items, round(seconds, 3)]) + "\n")

    def read(self) -> list[Measured]:
        lines = self._path.read_text(encoding="utf-8").splitlines()[1:]
        return [Measured(**row) for line in lines for row in json.loads(line)]

    def num_done(self, row: str) -> int:
        return len({measured.item for measured in self.read() if measured.task == row})


def _fits(config: PairConfig, out: Path, progress: Progress, *, with_families: bool) -> Fits:
    """What controls need beyond the artifact, from the same calibration text; its moments stay in `out`."""
    job, work = prepare(config), out / "calibration"
    texts = read_texts(job)
    statistics = calibrate(job, texts, work, progress, into=layer_statistics(job))
    layers = range(job.num_layers)
    ridge = config.method.ridge
    reuse = LayerFits(statistics, ridge)
    return Fits(
        reuse=tuple(reuse.reuse(layer, r_k=job.r_k[layer], r_v=job.r_v[layer]) for layer in layers),
        ridge=tuple(
            RidgeLayer(ridge_map(statistics[layer, "k"], ridge), ridge_map(statistics[layer, "v"], ridge))
            for layer in layers
        ),
        baselines=fit_baselines(job, texts, statistics, work, progress) if with_families else None,
    )


def _load(section: ModelConfig, progress: Progress) -> LoadedModel:
    loaded = load_model(materialize(section.model, adapter=section.adapter), dtype=section.dtype)
    progress.advance()
    return loaded
