"""`scd-trt evaluate`: every control on held-out text and questions, item by item, resumable and reproducible.

Owns: which items are measured, the results file, and the summary. An *item* is one sequence of plain text or one
question; for each item all controls are measured together, over the same prefix and the same tail:

    text            S prefix tokens replaced, T scored: KL and top-1 against the oracle's logits, NLL of the true tokens
    narrativeqa,    the prompt's full blocks before its last token are replaced, exactly as when serving; greedy answer,
    disflqa         F1 and exact match

Only the `test` split is read, which neither calibration nor layer selection saw. `items.jsonl` gets one line per item
and is continued by a later run with the same settings; its first line names them. The same settings give the same bytes
in `items.jsonl` and `results.json` on one machine (floating point differs between CPUs).

Errors: `EvaluationError` where the output directory belongs to other settings or nothing can be measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from scd_trt import translator as translators
from scd_trt.config import ModelConfig, PairConfig, ScdError
from scd_trt.distill.calibration import (
    Progress,
    calibrate,
    heldout_length,
    layer_statistics,
    read_texts,
    text_sequences,
)
from scd_trt.distill.fit import LayerFits
from scd_trt.distill.plan import prepare
from scd_trt.evaluate.baselines import (
    NO_CACHE,
    Control,
    Fits,
    KvLayer,
    Prefix,
    RidgeLayer,
    controls,
    prefix_of,
    ridge_map,
    stacked,
)
from scd_trt.evaluate.generation import empty_cache, greedy
from scd_trt.evaluate.metrics import bootstrap_interval, compare_logits, gap_recovered, worst_decile
from scd_trt.evaluate.tasks import Question, exact_match, f1, prompt, questions
from scd_trt.kv_cache import num_sent_blocks
from scd_trt.model_spec import check_pair
from scd_trt.models import LoadedModel, forward_with_cache, load_model, materialize, trace
from scd_trt.translator import Translator

TaskName = Literal["text", "narrativeqa", "disflqa"]
MAX_ANSWER_TOKENS = 24
ITEMS_FILE, RESULTS_FILE = "items.jsonl", "results.json"


class EvaluationError(ScdError):
    """There is nothing to measure, or the output directory holds the results of other settings."""


@dataclass(frozen=True)
class EvaluationPlan:
    """What is measured."""

    tasks: tuple[TaskName, ...] = ("text", "narrativeqa")
    num_items: int = 24
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """One control on one item: `values` by metric name."""

    task: str
    item: int
    document: str
    control: str
    values: dict[str, float]


@dataclass(frozen=True)
class Results:
    """Summary of a run.

    Attributes:
        fingerprint: of the translator that was measured.
        bytes_per_token: by control.
        tables: task -> control -> metric -> mean, low, high (95% bootstrap over documents), worst decile; and
            `gap_recovered`.
    """

    fingerprint: str
    plan: EvaluationPlan
    bytes_per_token: dict[str, float]
    tables: dict[str, dict[str, dict[str, Any]]]


_LOWER_IS_WORSE = {"f1", "exact_match", "top1_agreement"}


def check_tasks(names: Sequence[str]) -> tuple[TaskName, ...]:
    """The tasks of these names.

    Raises:
        EvaluationError: an unknown name.
    """
    known: tuple[TaskName, ...] = get_args(TaskName)
    for name in names:
        if name not in known:
            raise EvaluationError(f"task {name!r} does not exist; choose from {', '.join(known)}")
    return tuple(task for task in known if task in names)


def evaluate(config: PairConfig, plan: EvaluationPlan, out: Path, *, progress: Progress) -> Results:
    """Measure all controls; continues an interrupted run in the same directory.

    Raises:
        EvaluationError: `out` holds other results.
        ScdError: models, corpus or translator cannot be had; see their modules.
    """
    bench = _Bench.open(config, out, progress)
    log = _ItemLog(out / ITEMS_FILE, _settings(config, plan, bench.translator))
    for task in plan.tasks:
        progress.stage(f"measure {task}", plan.num_items)
        progress.advance(log.num_done(task))
        for measured in bench.items(task, plan, skip=log.num_done(task)):
            log.append(measured)
            progress.advance()
    results = Results(bench.translator.manifest.fingerprint, plan, bench.bytes_per_token(), summarise(log.read(), plan))
    (out / RESULTS_FILE).write_text(json.dumps(asdict(results), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return results


def summarise(measured: Sequence[Measured], plan: EvaluationPlan) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean, interval, and worst decile of every metric, by task and control."""
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for task in plan.tasks:
        rows = [row for row in measured if row.task == task]
        names = list(dict.fromkeys(row.control for row in rows))
        tables[task] = {name: _summary([row for row in rows if row.control == name], plan.seed) for name in names}
        _add_gaps(tables[task])
    return tables


def _summary(rows: Sequence[Measured], seed: int) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for metric in rows[0].values:
        values = [row.values[metric] for row in rows]
        interval = bootstrap_interval(values, seed=seed, clusters=[row.document for row in rows])
        worst = worst_decile(values, higher_is_worse=metric not in _LOWER_IS_WORSE)
        summary[metric] = {"mean": interval.mean, "low": interval.low, "high": interval.high, "worst_decile": worst}
    return summary


def _add_gaps(table: dict[str, dict[str, Any]]) -> None:
    metric = "f1" if "f1" in table["oracle"] else "nll"
    oracle, nothing = table["oracle"][metric]["mean"], table[NO_CACHE][metric]["mean"]
    if oracle != nothing:
        for summary in table.values():
            summary["gap_recovered"] = gap_recovered(summary[metric]["mean"], nothing, oracle)


def _settings(config: PairConfig, plan: EvaluationPlan, translator: Translator) -> dict[str, Any]:
    tokens_per_block = config.engine.tokens_per_block
    text = json.dumps([translator.manifest.fingerprint, config.method_digest(), tokens_per_block, asdict(plan)])
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

    def read(self) -> list[Measured]:
        lines = self._path.read_text(encoding="utf-8").splitlines()[1:]
        return [Measured(**row) for line in lines for row in json.loads(line)]

    def num_done(self, task: str) -> int:
        return len({row.item for row in self.read() if row.task == task})


@dataclass(frozen=True)
class _Bench:
    """Both models, the translator and the controls made of them."""

    config: PairConfig
    producer: LoadedModel
    consumer: LoadedModel
    translator: Translator
    controls: dict[str, Control]

    @classmethod
    def open(cls, config: PairConfig, out: Path, progress: Progress) -> _Bench:
        translator = translators.load(config.translator_path())
        if translator.manifest.config_digest != config.method_digest():
            raise EvaluationError(
                f"{config.translator_path()} was fitted with other settings than the pair file has now; run `scd-trt distill`"
            )
        fits = _fits(config, out, progress) if translator.manifest.policy != "exact" else None
        progress.stage("load both models", 2)
        producer, consumer = _load(config.producer, progress), _load(config.consumer, progress)
        check_pair(producer.spec, consumer.spec)
        translator.check_producer(producer.spec)
        translator.check_consumer(consumer.spec)
        return cls(config, producer, consumer, translator, controls(consumer, translator, fits))

    def bytes_per_token(self) -> dict[str, float]:
        return {name: control.bytes_per_token for name, control in self.controls.items()} | {NO_CACHE: 0.0}

    def items(self, task: TaskName, plan: EvaluationPlan, *, skip: int) -> Iterator[list[Measured]]:
        return self._texts(plan, skip) if task == "text" else self._questions(task, plan, skip)

    @torch.no_grad()
    def _texts(self, plan: EvaluationPlan, skip: int) -> Iterator[list[Measured]]:
        sequences = text_sequences(
            self.consumer.tokenizer,
            self.config.heldout.source,
            "test",
            num_sequences=plan.num_items,
            sequence_tokens=heldout_length(self.config.heldout),
            seed=plan.seed,
        )
        for index in range(skip, len(sequences)):
            yield self._text(index, sequences)

    def _text(self, index: int, sequences: Sequence[Sequence[int]]) -> list[Measured]:
        num_prefix = self.config.heldout.prefix_tokens
        own, other = (torch.tensor(sequences[(index + step) % len(sequences)]) for step in (0, 1))
        tail, targets = own[num_prefix:-1], own[num_prefix + 1 :]
        caches = self._caches(own[:num_prefix], other[:num_prefix])
        logits = forward_with_cache(
            self.consumer, tail, stacked(caches, self.consumer.dtype), start_position=num_prefix
        )
        by_control = dict(zip(caches, logits, strict=True))
        positions = torch.arange(num_prefix, num_prefix + len(tail))
        without = trace(self.consumer, tail, capture={"logits"}, positions=positions).logits_TV
        if without is None:
            raise EvaluationError("the consumer returned no logits")
        by_control[NO_CACHE] = without
        rows = []
        for name, found in by_control.items():
            compared = compare_logits(by_control["oracle"].float(), found.float(), targets_T=targets)
            values = {"kl": compared.kl, "top1_agreement": compared.top1_agreement, "nll": compared.nll}
            rows.append(Measured("text", index, str(index), name, values))
        return rows

    @torch.no_grad()
    def _questions(self, task: str, plan: EvaluationPlan, skip: int) -> Iterator[list[Measured]]:
        asked = questions(task, split="test", limit=plan.num_items, seed=plan.seed)
        for index in range(skip, len(asked)):
            # the mismatched cache is that of a question about another text
            others = [question for question in asked[index:] + asked[:index] if question.digest != asked[index].digest]
            if not others:
                raise EvaluationError(f"{task}: all {len(asked)} questions are about one text; ask for more items")
            yield self._question(task, index, asked[index], others[0])

    def _question(self, task: str, index: int, question: Question, other: Question) -> list[Measured]:
        ids, other_ids = self._prompt_ids(question), self._prompt_ids(other)
        block = self.config.engine.tokens_per_block
        num_prefix = num_sent_blocks(len(ids), block) * block
        caches = self._caches(torch.tensor(ids[:num_prefix]), torch.tensor(other_ids))
        tail = ids[num_prefix:]
        layers = stacked(caches, self.consumer.dtype)
        answers = greedy(self.consumer, layers, tail, first_position=num_prefix, max_tokens=MAX_ANSWER_TOKENS)
        said = dict(zip(caches, answers, strict=True))
        nothing = empty_cache(self.consumer)
        (said[NO_CACHE],) = greedy(
            self.consumer, nothing, tail, first_position=num_prefix, max_tokens=MAX_ANSWER_TOKENS
        )
        rows = []
        for name, tokens in said.items():
            text = self.consumer.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            values = {"f1": f1(text, question.answers), "exact_match": exact_match(text, question.answers)}
            rows.append(Measured(task, index, question.digest, name, values))
        return rows

    def _caches(self, own: torch.Tensor, other: torch.Tensor) -> dict[str, list[KvLayer]]:
        prefix: Prefix = prefix_of(self.producer, self.consumer, own)
        another = prefix_of(self.producer, self.consumer, other)
        return {name: control.cache(prefix, another) for name, control in self.controls.items()}

    def _prompt_ids(self, question: Question) -> list[int]:
        rendered = self.consumer.tokenizer.apply_chat_template(
            list(prompt(question).messages), add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self.consumer.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids


def _fits(config: PairConfig, out: Path, progress: Progress) -> Fits:
    """What controls need beyond the artifact, from the same calibration text; its moments stay in `out`."""
    job = prepare(config)
    statistics = calibrate(job, read_texts(job), out / "calibration", progress, into=layer_statistics(job))
    layers = range(job.num_layers)
    ridge = config.method.ridge
    reuse = LayerFits(statistics, ridge)
    return Fits(
        reuse=tuple(reuse.reuse(layer, r_k=job.r_k[layer], r_v=job.r_v[layer]) for layer in layers),
        ridge=tuple(
            RidgeLayer(ridge_map(statistics[layer, "k"], ridge), ridge_map(statistics[layer, "v"], ridge))
            for layer in layers
        ),
    )


def _load(section: ModelConfig, progress: Progress) -> LoadedModel:
    loaded = load_model(materialize(section.model, adapter=section.adapter), dtype=section.dtype)
    progress.advance()
    return loaded
