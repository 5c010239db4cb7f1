"""What `scd-trt evaluate --dry-run` says: the items of every row, the controls, memory, and how long it may take.

The items are those that a run would measure. Times come from earlier runs in the same directory, where it has some; else from
a matrix product that is timed here, and from counted tokens: right within a factor of two or three, no more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from scd_trt.config import PairConfig
from scd_trt.evaluate.baselines import NO_CACHE, controls
from scd_trt.evaluate.bench import CHUNK_BYTES
from scd_trt.evaluate.plan import EvaluationPlan
from scd_trt.evaluate.runner import check_length, checked_translator, seconds_per_item
from scd_trt.evaluate.work import Group, groups_of
from scd_trt.model_spec import same_shape
from scd_trt.models import LoadedModel, load_model, materialize
from scd_trt.translator import Translator

FITTED = "those that are fitted on calibration text (evaluate.baselines)"
_NUM_FITTED = 26
"""How many these are, about."""

_PROBE_SECONDS = 0.2
_SHARE_OF_PEAK = 0.5
"""Of the rate of a large matrix product, what a model reaches."""

_ENCODE_SHARE = 0.3
"""Cost of one control's cache, in prefills of the same prefix."""

_ANSWER_TOKENS = 8
"""Length of an answer that is tried on every cache."""

_STEPS, _STEP_TOKENS = 24, 8
"""Tokens generated one by one for each question, and what such a step costs, in tokens of a prefill."""

_MOST_CHUNKS = 4
"""Caches as they are made, as rows, the rows that go on by themselves, and the chunk before."""


@dataclass(frozen=True)
class RowForecast:
    """One row of the results."""

    name: str
    num_items: int
    num_documents: int
    mean_prefix_tokens: float
    cpu_seconds: float


@dataclass(frozen=True)
class Forecast:
    """What a run would do.

    Attributes:
        cache_bytes: memory of the caches that are held at once, at most.
        times_from: in words, where the times come from.
    """

    rows: tuple[RowForecast, ...]
    controls: tuple[str, ...]
    bytes_per_token: int
    dense_bytes_per_token: int
    cache_bytes: int
    cpu_seconds: float
    times_from: str
    directory: str


def forecast(config: PairConfig, plan: EvaluationPlan, out: Path) -> Forecast:
    """Look at the items of a plan; loads the consumer, measures nothing and writes nothing.

    Raises:
        ScdError: as the run would, but for names of controls that must be fitted to be known.
    """
    translator = checked_translator(config)
    manifest, section = translator.manifest, config.consumer
    consumer = load_model(materialize(section.model, adapter=section.adapter), dtype=section.dtype)
    names, num_controls = _controls(consumer, translator, plan)
    known, rate = seconds_per_item(out), tokens_per_second(consumer)
    rows = []
    for row in plan.rows:
        check_length(row.name, row.context_tokens, consumer.spec.max_position)
        groups = groups_of(row, config, consumer.tokenizer, seed=plan.seed)
        guess = counted_tokens(groups, num_controls) / rate
        rows.append(_row(row.name, groups, known.get(row.name), guess=guess))
    return Forecast(
        rows=tuple(rows),
        controls=names,
        bytes_per_token=sum(manifest.bytes_per_token),
        dense_bytes_per_token=manifest.dense_bytes_per_token,
        cache_bytes=_MOST_CHUNKS * CHUNK_BYTES,
        cpu_seconds=sum(row.cpu_seconds for row in rows),
        times_from="as in earlier runs here" if known.keys() >= {row.name for row in rows} else "a rough guess",
        directory=str(out),
    )


def counted_tokens(groups: Sequence[Group], num_controls: int) -> float:
    """The work of some groups in tokens of a prefill: both models' prefills, caches, tails, and answers token by token."""
    prefixes = sum(len(group.prefix_ids) for group in groups) * (2 + _ENCODE_SHARE * num_controls)
    probes = [probe for group in groups for probe in group.probes]
    tails = sum(len(probe.tail_ids) for probe in probes) * (1 + num_controls)
    asked = sum(not isinstance(probe.scored, tuple) for probe in probes)
    return prefixes + tails + asked * (_ANSWER_TOKENS * num_controls + _STEPS * _STEP_TOKENS)


def tokens_per_second(loaded: LoadedModel) -> float:
    """Tokens of a prefill per second on this machine, from the rate of a matrix product."""
    weights: int = sum(parameter.numel() for parameter in loaded.model.parameters())
    width = loaded.spec.hidden_size
    a, b = (torch.ones(rows, width, dtype=loaded.dtype) for rows in (512, 4 * width))
    num_products, started = 0, time.process_time()
    while time.process_time() - started < _PROBE_SECONDS:
        torch.mm(a, b.T)
        num_products += 1
    flops: float = num_products * 2 * a.shape[0] * b.numel() / (time.process_time() - started)
    return _SHARE_OF_PEAK * flops / (2 * weights)


def _controls(consumer: LoadedModel, translator: Translator, plan: EvaluationPlan) -> tuple[tuple[str, ...], int]:
    """Names, as far as they are known without a fit, and how many there will be."""
    if plan.controls:
        return plan.controls, len(plan.controls)
    names = (*controls(consumer, translator, None), NO_CACHE)
    manifest = translator.manifest
    if manifest.policy == "exact" or not same_shape(manifest.producer, manifest.consumer):
        return names, len(names)
    return (*names, FITTED), len(names) + _NUM_FITTED


def _row(name: str, groups: Sequence[Group], seconds_each: float | None, *, guess: float) -> RowForecast:
    probes = [probe for group in groups for probe in group.probes]
    return RowForecast(
        name,
        num_items=len(probes),
        num_documents=len({probe.document for probe in probes}),
        mean_prefix_tokens=sum(len(group.prefix_ids) for group in groups) / len(groups),
        cpu_seconds=guess if seconds_each is None else seconds_each * len(probes),
    )
