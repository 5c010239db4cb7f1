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
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from scd_trt.config import HeldoutConfig
from scd_trt.corpus import CorpusError, Split, token_sequences
from scd_trt.distill.aligner import RowSample
from scd_trt.distill.layer_selection import LayerSet
from scd_trt.distill.plan import Job, PlanError
from scd_trt.distill.statistics import Kind, PairStatistics
from scd_trt.models import Capture, ModelTrace, load_model, load_tokenizer, trace

SAVE_EVERY_SEQUENCES = 8
"""Sequences between two saves of the moments: an interruption loses at most these."""

Ids = tuple[tuple[int, ...], ...]
"""Token ids of several sequences."""

NUM_SINK_TOKENS = 4
"""First tokens of a sequence that are left out of the statistics of groups: attention sinks, with outlying keys."""

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

    @cached_property
    def num_sink_tokens(self) -> int:
        """First positions whose rows are coded around means of their own: the sinks, and whatever opens every sequence.

        The opening of a chat is the same in every prompt, so its mean rows are exact; and its special tokens are sinks too.
        """
        columns = zip(*self.calibration, strict=False)
        differing = (position for position, column in enumerate(columns) if len(set(column)) > 1)
        length = min(map(len, self.calibration), default=0)
        return min(max(NUM_SINK_TOKENS, next(differing, 0)), length // 2)


def read_texts(job: Job) -> Texts:
    """Tokenise what the job needs; the samples come from splits that share no document."""
    calibration, heldout = job.config.calibration, job.config.heldout
    tokenizer, seed = load_tokenizer(job.consumer_path), job.config.method.seed
    calibration_ids: Ids = ()
    heldout_ids: Ids = ()
    if job.needs_calibration:
        length = calibration.sequence_tokens
        number = -(-calibration.num_tokens // length)
        calibration_ids = text_sequences(
            tokenizer, calibration.source, "calibration", num_sequences=number, sequence_tokens=length, seed=seed
        )
    if job.needs_heldout:
        heldout_ids = text_sequences(
            tokenizer,
            heldout.source,
            "heldout",
            num_sequences=heldout.num_sequences,
            sequence_tokens=heldout_length(heldout),
            seed=seed,
        )
    return Texts(calibration_ids, heldout_ids, _key(job, calibration_ids, heldout_ids))


def heldout_length(heldout: HeldoutConfig) -> int:
    """Tokens of a sequence that is scored; one more than are scored, the target of the last."""
    return heldout.prefix_tokens + heldout.scored_tokens + 1


def layer_statistics(job: Job) -> PairStatistics:
    """Empty moments of every layer: keys and values, and attention inputs where Patch is possible."""
    kv, hidden = (job.producer.kv_dim, job.consumer.kv_dim), (job.producer.hidden_size, job.consumer.hidden_size)
    kinds: tuple[Kind, ...] = ("k", "v")
    every = {(layer, kind): kv for layer in range(job.num_layers) for kind in kinds}
    return PairStatistics(every | {(layer, "x"): hidden for layer in job.patch_candidates})


def group_statistics(job: Job) -> PairStatistics:
    """Empty moments of every group of layers: the keys of all its layers, and their values.

    Raises:
        PlanError: sequences so short that nothing of them is used.
    """
    length = job.config.calibration.sequence_tokens
    if length <= NUM_SINK_TOKENS:
        raise PlanError(
            f"calibration.sequence_tokens is {length}, but policy rd leaves out the first {NUM_SINK_TOKENS} of each "
            "sequence; ask for longer ones"
        )
    kinds: tuple[Kind, ...] = ("group_k", "group_v")
    widths = [
        ((stop - start) * job.producer.kv_dim, (stop - start) * job.consumer.kv_dim) for start, stop in job.groups
    ]
    return PairStatistics({(group, kind): found for group, found in enumerate(widths) for kind in kinds})


def calibrate(job: Job, texts: Texts, work: Path, progress: Progress, *, into: PairStatistics) -> PairStatistics:
    """Fold the calibration text into empty moments, going on from `work` where an earlier run was interrupted."""
    statistics = into
    path = work / f"{texts.key}.safetensors"
    if path.exists():
        statistics.restore(path, key=texts.key)
    work.mkdir(parents=True, exist_ok=True)
    remaining = texts.calibration[statistics.num_sequences :]
    progress.stage("calibrate", len(texts.calibration))
    progress.advance(statistics.num_sequences)
    for traced_A, traced_B in paired_traces(job, remaining, _captured(job)):
        _fold(job, statistics, traced_A, traced_B, num_sinks=texts.num_sink_tokens)
        if statistics.num_sequences % SAVE_EVERY_SEQUENCES == 0 or statistics.num_sequences == len(texts.calibration):
            statistics.save(path, key=texts.key)
        progress.advance()
    return statistics


def sink_rows(job: Job, texts: Texts) -> tuple[Tensor, Tensor]:
    """Mean rows `[L, 2, P, F]` of the first P positions, of the producer and of the consumer; keys first."""
    firsts = tuple(ids[: texts.num_sink_tokens] for ids in texts.calibration)
    sums = [torch.zeros(()), torch.zeros(())]
    for traces in paired_traces(job, firsts, {"kv"}):
        for side, traced in enumerate(traces):
            rows = torch.stack([torch.stack(traced.k_TF), torch.stack(traced.v_TF)], dim=1)
            sums[side] = sums[side] + rows.double() / len(firsts)
    return sums[0], sums[1]


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


def text_sequences(
    tokenizer: Any, source: str, split: Split, *, num_sequences: int, sequence_tokens: int, seed: int
) -> Ids:
    """Sequences of a split that begin as served prompts do: with the opening of a user's message, then text.

    A model's first tokens are attention sinks with rows unlike all others; those of a chat are always the same.

    Raises:
        CorpusError: too little text, or sequences too short for the opening.
    """
    opening = _chat_opening(tokenizer)
    length = sequence_tokens - len(opening)
    if length < 1:
        raise CorpusError(
            f"sequences of {sequence_tokens} tokens hold no text behind the {len(opening)} that open a chat; make them longer"
        )

    def encode(text: str) -> list[int]:
        # verbose would warn of texts longer than the context: they are cut into sequences here
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    texts = token_sequences(
        source, encode, num_tokens=num_sequences * length, sequence_tokens=length, split=split, seed=seed
    )
    return tuple((*opening, *ids) for ids in texts)


def _chat_opening(tokenizer: Any) -> list[int]:
    """What comes before the user's first word; without a chat template the tokenizer's special tokens."""
    if tokenizer.chat_template is None:
        return list(tokenizer.build_inputs_with_special_tokens([]))
    mark = "text"
    rendered: str = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    ids: list[int] = tokenizer(rendered[: rendered.rindex(mark)], add_special_tokens=False)["input_ids"]
    return ids


def _key(job: Job, *ids: Ids) -> str:
    parts = [METHOD_VERSION, job.config.method_digest(), job.producer.weights_digest, job.consumer.weights_digest, ids]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _captured(job: Job) -> Set[Capture]:
    return {"kv", "x"} if job.patch_candidates else {"kv"}


def _fold(job: Job, statistics: PairStatistics, traced_A: ModelTrace, traced_B: ModelTrace, *, num_sinks: int) -> None:
    rows = {
        "k": (traced_A.k_TF, traced_B.k_TF),
        "v": (traced_A.v_TF, traced_B.v_TF),
        "x": (traced_A.x_TM, traced_B.x_TM),
    }
    for (index, kind), moments in statistics.moments.items():
        a, b = rows[kind.removeprefix("group_")]
        if kind.startswith("group_"):
            layers = slice(*job.groups[index])
            moments.update(_side_by_side(a[layers], num_sinks), _side_by_side(b[layers], num_sinks))
        else:
            moments.update(a[index], b[index])
    statistics.num_sequences += 1


def _side_by_side(rows: Sequence[Tensor], num_sinks: int) -> Tensor:
    """Rows of several layers as one, without the first tokens: attention sinks are not typical."""
    return torch.cat([*rows], dim=1)[num_sinks:]
