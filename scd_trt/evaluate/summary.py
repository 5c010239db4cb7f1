"""Tables of a run: every metric of every control with its uncertainty, made of the measured items alone.

A table is `row -> control -> metric`. A metric is `mean`, `low`, `high` (95% bootstrap over documents) and `worst_decile`.
Beside the metrics of `bench`, by pairs of the same items:

    f1_relative_loss   (oracle - control) / oracle, of F1: share of the oracle's F1 that is lost; negative is a gain
    kl_ratio_to_raw    KL of the control over KL of `raw_rerotated`, the producer's cache with the consumer's rotary
    gap_recovered      (control - no cache) / (oracle - no cache), of F1, or of NLL: a number, no interval

and `bytes_per_token`, the mean over items as packed, `num_items` and `num_documents`. What cannot be said is left out: a
loss relative to an oracle that scores nothing, a gap where no cache does as well, KL to a control that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from scd_trt.evaluate.baselines import NO_CACHE
from scd_trt.evaluate.bench import ORACLE, Measured
from scd_trt.evaluate.metrics import (
    Interval,
    bootstrap_interval,
    gap_recovered,
    ratio_interval,
    relative_loss,
    worst_decile,
)

Table = dict[str, dict[str, Any]]
RAW = "raw_rerotated"
LOWER_IS_WORSE = frozenset({"f1", "exact_match", "top1_agreement", "oracle_f1", "same_text", "same_decision"})
_KL_METRICS = ("kl", "answer_kl")


def summarise(measured: Sequence[Measured], rows: Iterable[str], *, seed: int) -> dict[str, Table]:
    """The tables of these rows, in this order."""
    return {row: _table([one for one in measured if one.task == row], seed) for row in rows}


def _table(measured: Sequence[Measured], seed: int) -> Table:
    by_control: dict[str, list[Measured]] = {}
    for one in measured:
        by_control.setdefault(one.control, []).append(one)
    table = {name: _own_numbers(found, seed) for name, found in by_control.items()}
    for name, found in by_control.items():
        table[name] |= _against(found, by_control, seed)
    _add_gaps(table)
    return table


def _own_numbers(found: Sequence[Measured], seed: int) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "num_items": len(found),
        "num_documents": len({one.document for one in found}),
        "bytes_per_token": sum(one.bytes_per_token for one in found) / len(found),
    }
    # harmful and benign requests have a metric of their own
    for metric in dict.fromkeys(metric for one in found for metric in one.values):
        having = [one for one in found if metric in one.values]
        values = [one.values[metric] for one in having]
        interval = bootstrap_interval(values, seed=seed, clusters=[one.document for one in having])
        worst = worst_decile(values, higher_is_worse=metric not in LOWER_IS_WORSE)
        summary[metric] = _as_json(interval) | {"worst_decile": worst}
    return summary


def _against(found: Sequence[Measured], by_control: dict[str, list[Measured]], seed: int) -> dict[str, Any]:
    """Comparisons with the oracle and with the raw cache, on the items that both have."""
    numbers: dict[str, Any] = {}
    pairs = _paired(found, by_control[ORACLE], "f1")
    if pairs and any(reference for _, reference, _ in pairs):
        values, references, documents = zip(*pairs, strict=True)
        numbers["f1_relative_loss"] = _as_json(relative_loss(values, references, seed=seed, clusters=documents))
    for metric in _KL_METRICS:
        pairs = _paired(found, by_control.get(RAW, []), metric)
        if pairs and any(reference for _, reference, _ in pairs):
            values, references, documents = zip(*pairs, strict=True)
            numbers["kl_ratio_to_raw"] = _as_json(ratio_interval(values, references, seed=seed, clusters=documents))
    return numbers


def _paired(found: Sequence[Measured], references: Sequence[Measured], metric: str) -> list[tuple[float, float, str]]:
    """Value, reference and document of each item that both were measured on."""
    by_item = {one.item: one.values[metric] for one in references if metric in one.values}
    return [
        (one.values[metric], by_item[one.item], one.document)
        for one in found
        if metric in one.values and one.item in by_item
    ]


def _add_gaps(table: Table) -> None:
    metric = next((name for name in ("f1", "nll") if name in table[ORACLE]), None)
    if metric is None:
        return
    oracle, nothing = table[ORACLE][metric]["mean"], table[NO_CACHE][metric]["mean"]
    if oracle != nothing:
        for summary in table.values():
            summary["gap_recovered"] = gap_recovered(summary[metric]["mean"], nothing, oracle)


def _as_json(interval: Interval) -> dict[str, float]:
    return {name: asdict(interval)[name] for name in ("mean", "low", "high")}
