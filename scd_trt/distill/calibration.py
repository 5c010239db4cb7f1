"""Passes over the calibration text: both models on the same tokens, folded into what the fit needs.

Owns: `Texts` (token ids of both samples and the key of all that is derived from them), the resumable statistics pass, and the
second pass that gathers rows for a trained aligner. One sequence is in memory at a time; both models run in float32, so that
the moments carry no rounding of the serving dtype.

Progress is told through `Progress`: the command line draws it, nothing here prints.
Errors: `CorpusError` for too little text, `StatisticsError` for a damaged file of partial statistics.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scd_trt.corpus import Split, token_sequences
from scd_trt.distill.aligner import RowSample
from scd_trt.distill.layer_selection import LayerSet
from scd_trt.distill.plan import Job
from scd_trt.distill.statistics import PairStatistics
from scd_trt.models import Capture, ModelTrace, load_model, load_tokenizer, trace

SAVE_EVERY_SEQUENCES = 8
"""Sequences between two saves of the moments: an interruption loses at most these."""

Ids = tuple[tuple[int, ...], ...]
"""Token ids of several sequences."""

METHOD_VERSION = 1
"""Part of the key: raise it when the same input must give another artifact."""


class Progress(Protocol):
    """Is told what is being done."""

    def stage(self, name: str, total: int) -> None:
        """A stage of `total` steps begins."""

    def advance(self, num_steps: int = 1) -> None:
        """Steps of the current stage are done."""


class SilentProgress:
    """Tells nobody."""

    def stage(self, name: str, total: int) -> None:
        """Ignore."""

    def advance(self, num_steps: int = 1) -> None:
        """Ignore."""


@dataclass(frozen=True)
class Texts:
    """Token ids of both samples, and the key under which work on them is kept."""

    calibration: Ids
    heldout: Ids
    key: str


def read_texts(job: Job) -> Texts:
    """Tokenise what the job needs; the samples come from splits that share no document."""
    calibration, heldout = job.config.calibration, job.config.heldout
    calibration_ids: Ids = ()
    heldout_ids: Ids = ()
    if job.needs_calibration:
        calibration_ids = _sequences(
            job, calibration.source, "calibration", calibration.num_tokens, calibration.sequence_tokens
        )
    if job.needs_heldout:
        # one token more: the target of the last scored one
        length = heldout.prefix_tokens + heldout.scored_tokens + 1
        heldout_ids = _sequences(job, heldout.source, "heldout", heldout.num_sequences * length, length)
    return Texts(calibration_ids, heldout_ids, _key(job, calibration_ids, heldout_ids))


def calibrate(job: Job, texts: Texts, work: Path, progress: Progress) -> PairStatistics:
    """Fold the calibration text into moments, going on from `work` where an earlier run was interrupted."""
    statistics = _empty_statistics(job)
    path = work / f"{texts.key}.safetensors"
    if path.exists():
        statistics.restore(path, key=texts.key)
    work.mkdir(parents=True, exist_ok=True)
    remaining = texts.calibration[statistics.num_sequences :]
    progress.stage("calibrate", len(texts.calibration))
    progress.advance(statistics.num_sequences)
    for traced_A, traced_B in paired_traces(job, remaining, _captured(job)):
        _fold(statistics, traced_A, traced_B)
        if statistics.num_sequences % SAVE_EVERY_SEQUENCES == 0 or statistics.num_sequences == len(texts.calibration):
            statistics.save(path, key=texts.key)
        progress.advance()
    return statistics


def sample_rows(job: Job, texts: Texts, layers: LayerSet, *, capacity: int, progress: Progress) -> dict[int, RowSample]:
    """A bounded sample of both models' normalised attention inputs in some layers."""
    samples = {layer: RowSample(capacity, job.config.method.seed) for layer in layers}
    progress.stage("sample rows for the aligner", len(texts.calibration))
    for traced_A, traced_B in paired_traces(job, texts.calibration, {"x"}):
        for layer, sample in samples.items():
            sample.update(traced_A.x_TM[layer], traced_B.x_TM[layer])
        progress.advance()
    return samples


def paired_traces(job: Job, sequences: Ids, capture: Set[Capture]) -> Iterator[tuple[ModelTrace, ModelTrace]]:
    """What both models compute on each sequence, in float32; models are loaded at the first one."""
    if not sequences:
        return
    producer = load_model(job.producer_path)
    consumer = None if job.same_model else load_model(job.consumer_path)
    for ids in sequences:
        traced = trace(producer, ids, capture=capture)
        yield traced, traced if consumer is None else trace(consumer, ids, capture=capture)


def _sequences(job: Job, source: str, split: Split, num_tokens: int, sequence_tokens: int) -> Ids:
    tokenizer = load_tokenizer(job.consumer_path)

    def encode(text: str) -> list[int]:
        # verbose would warn of texts longer than the context: they are cut into sequences here
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return ids

    sequences = token_sequences(
        source, encode, num_tokens=num_tokens, sequence_tokens=sequence_tokens, split=split, seed=job.config.method.seed
    )
    return tuple(map(tuple, sequences))


def _key(job: Job, *ids: Ids) -> str:
    parts = [METHOD_VERSION, job.config.method_digest(), job.producer.weights_digest, job.consumer.weights_digest, ids]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _empty_statistics(job: Job) -> PairStatistics:
    kv, every = (job.producer.kv_dim, job.consumer.kv_dim), tuple(range(job.num_layers))
    return PairStatistics(
        {"k": kv, "v": kv, "x": (job.producer.hidden_size, job.consumer.hidden_size)},
        {"k": every, "v": every, "x": job.patch_candidates},
    )


def _captured(job: Job) -> Set[Capture]:
    return {"kv", "x"} if job.patch_candidates else {"kv"}


def _fold(statistics: PairStatistics, traced_A: ModelTrace, traced_B: ModelTrace) -> None:
    rows = {
        "k": (traced_A.k_TF, traced_B.k_TF),
        "v": (traced_A.v_TF, traced_B.v_TF),
        "x": (traced_A.x_TM, traced_B.x_TM),
    }
    for (layer, kind), moments in statistics.moments.items():
        a, b = rows[kind]
        moments.update(a[layer], b[layer])
    statistics.num_sequences += 1
