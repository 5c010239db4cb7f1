"""What does each part of the rate-distortion codec buy? KL to the oracle at equal bytes, one part changed at a time.

    python benchmarks/ablations.py [PAIR.yaml] [--items 24] [--json FILE]

Every row is the pair's codec (group_layers 10) with one thing changed, at a tenth and a twentieth of the cache's bytes,
on plain text of the test split, which nothing was fitted or chosen on. The interval is that of the *paired* ratio to the
codec as it ships: 95 %, items resampled. Calibration runs once, with groups of ten layers; smaller groups and fewer
features are blocks of the same moments.

    weights         what an error costs: Fisher of every element, of whole heads, or nothing
    group           layers that are transformed together; each group sees its own layers as features
    features        layers that a layer's rows are predicted from, transformed in groups of ten all the same
    headroom        range of the quantisers, relative to a Gaussian's best
    widths          bits that a component may have
    sinks           first tokens coded around means of their position, or like all others
    share           most matrix elements, relative to the consumer's weights
    exact layers    the first n layers given exactly and for nothing: what computing them could buy
    patch           the first group of layers as Patch layers of the paper at equal bytes, against Reuse layers at equal bytes
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scd_trt.config import PairConfig, load_pair
from scd_trt.distill.assembly import assemble
from scd_trt.distill.calibration import (
    PairModels,
    SilentProgress,
    Texts,
    calibrate,
    group_statistics,
    heldout_length,
    read_texts,
    text_sequences,
)
from scd_trt.distill.fisher import ErrorWeights
from scd_trt.distill.modes import Coder, Modes, fixed_codes
from scd_trt.distill.plan import EXACT_LAYERS, Job, prepare
from scd_trt.distill.quantiser import gaussian_table
from scd_trt.distill.rate_control import GroupSpectra, error_weights
from scd_trt.distill.sensitivity import ORACLE, RAW, Heldout
from scd_trt.distill.statistics import Kind, Moments, PairStatistics
from scd_trt.distill.transform import SinkRows, Spectrum, decorrelated, regression
from scd_trt.evaluate.metrics import ratio_interval
from scd_trt.translator import TransformLayer, Translator

DEFAULT = Path(__file__).parents[1] / "engine_configs" / "smollm2-qa" / "pair.yaml"
BLOCK_LAYERS = 10
"""Layers whose joint moments are gathered; every variant is made of blocks of these."""

RATIOS = (10.0, 20.0)
SHIPPED = "as shipped"


@dataclass(frozen=True)
class Variant:
    """The codec with one thing changed.

    Attributes:
        group_layers: a divisor of `BLOCK_LAYERS`.
        reach: layers on both sides of a layer, within its group, that its rows are predicted from; None: all of the group.
        share: None: no limit.
    """

    name: str
    weights: str = "diagonal"
    group_layers: int = BLOCK_LAYERS
    reach: int | None = None
    headroom: float = 1.3
    widths: tuple[int, ...] = (0, 2, 3, 4, 6, 8)
    with_sinks: bool = True
    share: float | None = 0.14


VARIANTS = (
    Variant(SHIPPED),
    Variant("weights: of whole heads", weights="head"),
    Variant("weights: none", weights="none"),
    Variant("group: 5 layers", group_layers=5),
    Variant("group: 2 layers", group_layers=2),
    Variant("group: 1 layer", group_layers=1),
    Variant("features: own layer", reach=0),
    Variant("features: own layer and neighbours", reach=1),
    Variant("headroom: none", headroom=1.0),
    Variant("headroom: 1.6", headroom=1.6),
    Variant("widths: 0 4", widths=(0, 4)),
    Variant("widths: 0 2 4 8", widths=(0, 2, 4, 8)),
    Variant("sinks: like all tokens", with_sinks=False),
    Variant("share: 7 %", share=0.07),
    Variant("share: unlimited", share=None),
)


@dataclass(frozen=True)
class Fitted:
    """What all variants are made of."""

    job: Job
    texts: Texts
    statistics: PairStatistics
    weights: dict[str, ErrorWeights]
    models: PairModels

    @classmethod
    def of(cls, config: PairConfig, work: Path) -> Fitted:
        """Calibrate once: moments of blocks, attention inputs for Patch, and both kinds of weights."""
        method = config.method.model_copy(
            update={"group_layers": BLOCK_LAYERS, "modes": ("transform", "patch"), "source_layers": None}
        )
        job = prepare(config.model_copy(update={"method": method}))
        texts, models = read_texts(job), PairModels(job)
        empty = group_statistics(job, num_openers=texts.num_openers)
        print(f"calibrating on {len(texts.calibration)} sequences ...", flush=True)
        statistics = calibrate(job, texts, work, SilentProgress(), into=empty, models=models)
        head = error_weights(changed(job, weights="head"), texts, SilentProgress(), models=models, work=work)
        equal = ErrorWeights.equal(job.consumer.num_layers, job.consumer.kv_dim)
        weights = {"head": head, "diagonal": ErrorWeights(head.elements_L2F), "none": equal}
        return cls(job, texts, statistics, weights, models)


def changed(job: Job, **method: Any) -> Job:
    """The job with other settings of the method."""
    config = job.config
    return replace(job, config=config.model_copy(update={"method": config.method.model_copy(update=method)}))


def codec(fitted: Fitted, variant: Variant, ratio: float) -> Translator:
    """The translator of a variant at a rate."""
    job = changed(fitted.job, group_layers=variant.group_layers)
    transforms = spectra_of(fitted, job, variant).at_ratio(ratio)
    return assemble(job, (TransformLayer(),) * job.num_layers, transforms)


def spectra_of(fitted: Fitted, job: Job, variant: Variant) -> GroupSpectra:
    """Decorrelated rows of every group of a variant, from the moments of blocks."""
    kinds: tuple[Kind, Kind] = ("group_k", "group_v")
    found: dict[Kind, list[Spectrum]] = {kind: [] for kind in kinds}
    sinks: list[SinkRows] = []
    first = fitted.statistics.first_rows
    for start, stop in job.groups:
        for index, kind in enumerate(kinds):
            moments = part_of(fitted, kind, start, stop)
            weights = fitted.weights[variant.weights].of_group(start, stop, index)
            map_IO = restricted_regression(moments, job, stop - start, variant.reach)
            found[kind].append(decorrelated(moments, map_IO, weights))
            if first is not None and variant.with_sinks:
                sinks.append(SinkRows(*(rows[:, start:stop, index].flatten(1) for rows in first.means())))
    share = variant.share or 1.0
    return GroupSpectra(
        tuple(found["group_k"]),
        tuple(found["group_v"]),
        job.dense_bytes_per_token,
        tuple(sinks),
        table=gaussian_table(variant.widths, headroom=variant.headroom),
        max_matrix_elements=changed(job, max_matrix_share=share).max_matrix_elements,
    )


def part_of(fitted: Fitted, kind: Kind, start: int, stop: int) -> Moments:
    """Moments of some layers of one block."""
    block = fitted.statistics[start // BLOCK_LAYERS, kind]
    offset = start % BLOCK_LAYERS
    sides = [
        base + torch.arange(offset * width, (offset + stop - start) * width)
        for base, width in ((0, fitted.job.producer.kv_dim), (block.width_a, fitted.job.consumer.kv_dim))
    ]
    chosen = torch.cat(sides)
    found = Moments(*map(len, sides))
    found.count = block.count
    found.mean_n, found.cross_nn = block.mean_n[chosen], block.cross_nn[chosen][:, chosen]
    return found


def restricted_regression(moments: Moments, job: Job, num_layers: int, reach: int | None) -> Tensor:
    """The map `[I, O]` where each layer's rows are predicted from layers at most `reach` away; None: from all."""
    ridge = job.config.method.ridge
    if reach is None:
        return regression(moments, ridge=ridge)
    width_in, width_out = job.producer.kv_dim, job.consumer.kv_dim
    map_IO = torch.zeros(num_layers * width_in, num_layers * width_out, dtype=torch.float64)
    for layer in range(num_layers):
        near = slice(max(layer - reach, 0) * width_in, min(layer + reach + 1, num_layers) * width_in)
        own = slice(layer * width_out, (layer + 1) * width_out)
        rows = torch.arange(moments.width_a)[near]
        chosen = torch.cat([rows, moments.width_a + torch.arange(own.start, own.stop)])
        local = Moments(len(rows), width_out)
        local.count, local.mean_n = moments.count, moments.mean_n[chosen]
        local.cross_nn = moments.cross_nn[chosen][:, chosen]
        map_IO[near, own] = regression(local, ridge=ridge)
    return map_IO


def patched(fitted: Fitted, ratio: float) -> Iterator[tuple[str, Translator]]:
    """One group of layers after the other as Patch layers that take as many bytes as its transform did."""
    shipped = spectra_of(fitted, fitted.job, VARIANTS[0])
    plain = Coder(shipped, fitted.job.groups, ((),) * len(fitted.job.groups)).plain(
        int(fitted.job.dense_bytes_per_token / ratio)
    )
    for group, (start, stop) in enumerate(fitted.job.groups):
        rank = max(1, plain.group_bytes[group] // ((stop - start) * fitted.job.code_bytes))
        job = changed(fitted.job, r_h=rank)
        weights = fitted.weights["diagonal"]
        consumer = fitted.models.consumer()
        coder = Coder(shipped, job.groups, fixed_codes(job, fitted.statistics, weights, consumer))
        modes: Modes = tuple("patch" if index == group else "transform" for index in range(len(job.groups)))
        coding = coder.coding(replace(plain.table, modes=modes))
        yield f"patch: layers {start} to {stop - 1}, rank {rank}", assemble(job, coding.layers, coding.transforms)


def open_test(fitted: Fitted, num_items: int) -> Heldout:
    """Plain text of the test split, in the serving dtypes."""
    config = fitted.job.config
    producer, consumer = fitted.models.serving()
    heldout = Heldout(consumer)
    for ids in text_sequences(
        consumer.tokenizer,
        config.heldout.source,
        "test",
        num_sequences=num_items,
        sequence_tokens=heldout_length(config.heldout),
        seed=config.method.seed,
    ):
        heldout.add_sequence(producer, ids, prefix_tokens=config.heldout.prefix_tokens)
    return heldout


def losses(heldout: Heldout, translator: Translator, source: str = "codec") -> list[float]:
    """KL of every item over a translator's codes."""
    heldout.add_source(source, translator, range(heldout.num_layers))
    return [found.kl for found in heldout.compare(heldout.mixture(source))]


def rows_of(fitted: Fitted, heldout: Heldout, ratio: float) -> Iterator[tuple[str, int, list[float]]]:
    """Name, bytes per token and losses of every variant at a rate, the shipped one first."""
    for variant in VARIANTS:
        translator = codec(fitted, variant, ratio)
        found = losses(heldout, translator)
        yield variant.name, sum(translator.manifest.bytes_per_token), found
        if variant.name == SHIPPED:
            size = sum(translator.manifest.bytes_per_token)
            for number in EXACT_LAYERS:
                mixture = heldout.mixture("codec", range(number), ORACLE)
                yield f"exact layers: {number}, for nothing", size, [one.kl for one in heldout.compare(mixture)]
    for name, translator in patched(fitted, ratio):
        yield name, sum(translator.manifest.bytes_per_token), losses(heldout, translator)


def measure(fitted: Fitted, heldout: Heldout, ratio: float) -> list[dict[str, Any]]:
    """The table at one rate; printed as it grows."""
    rows: list[dict[str, Any]] = []
    shipped: Sequence[float] = ()
    for name, num_bytes, found in rows_of(fitted, heldout, ratio):
        shipped = shipped or found
        mean = sum(found) / len(found)
        change = ratio_interval(found, shipped, seed=0)
        interval = {"mean": change.mean, "low": change.low, "high": change.high}
        rows.append({"variant": name, "ratio": ratio, "bytes_per_token": num_bytes, "kl": mean, "relative": interval})
        print(
            f"| {name} | {num_bytes} | {mean:.4f} | {change.mean:.2f} [{change.low:.2f}, {change.high:.2f}] |",
            flush=True,
        )
    return rows


def main() -> None:
    """Calibrate once, measure every variant at every rate, print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--items", type=int, default=24, help="sequences of the test split")
    parser.add_argument("--work", type=Path, help="keep moments here, for another run")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fitted = Fitted.of(load_pair(options.pair), options.work or Path(scratch))
    heldout = open_test(fitted, options.items)
    raw = [found.kl for found in heldout.compare(heldout.mixture(RAW))]
    rows = [{"variant": "raw reuse", "ratio": 1.0, "kl": sum(raw) / len(raw)}]
    print(f"raw reuse: KL {rows[0]['kl']:.4f}, {options.items} sequences", flush=True)
    for ratio in RATIOS:
        print(f"\n| {ratio:g}x fewer bytes | bytes/token | KL | relative to {SHIPPED} |\n|---|---|---|---|", flush=True)
        rows += measure(fitted, heldout, ratio)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
