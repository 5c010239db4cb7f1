"""Passes over the calibration text: both models on the same tokens, folded into what the fit needs.

Owns: `Texts` (token ids of both samples, the questions, and the key of all that is derived from them), `PairModels`, the
resumable statistics pass, the results of other passes kept under the same key (`kept`), and the second pass that gathers
rows for a trained aligner. One sequence is in memory at a time; both models run in float32, so that the moments carry no
rounding of the serving dtype.

Progress is told through `Progress`: the command line draws it, nothing here prints.
Errors: `CorpusError` for too little text, `StatisticsError` for a damaged file of partial statistics.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from scd_trt.config import Dtype, HeldoutConfig, Source
from scd_trt.corpus import CorpusError, Split, token_sequences
from scd_trt.distill.aligner import RowSample
from scd_trt.distill.answers import Asked, read_questions
from scd_trt.distill.layer_selection import LayerSet
from scd_trt.distill.plan import Job, PlanError
from scd_trt.distill.sources import MAX_PROBED_TOKENS, SourceProbes
from scd_trt.distill.statistics import FirstRows, Kind, PairStatistics, StatisticsError
from scd_trt.models import Capture, LoadedModel, ModelTrace, load_model, load_tokenizer, trace

SAVE_EVERY_SEQUENCES = 8
"""Sequences between two saves of the moments: an interruption loses at most these."""

Ids = tuple[tuple[int, ...], ...]
"""Token ids of several sequences."""

NUM_SINK_TOKENS = 1
"""First tokens of a sequence that are left out of the statistics of groups: attention sinks, with outlying rows."""

OPENER_SHARE = 1 / 16
"""Share of sequences that must begin with a token for its row at position 0 to be stored."""

METHOD_VERSION = 4
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


class PairModels:
    """Both models of a job, each loaded at first use and once per dtype."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loaded: dict[tuple[Path, Dtype], LoadedModel] = {}

    def producer(self, dtype: Dtype = "float32") -> LoadedModel:
        return self._load(self._job.producer_path, dtype)

    def consumer(self, dtype: Dtype = "float32") -> LoadedModel:
        return self._load(self._job.consumer_path, dtype)

    def serving(self) -> tuple[LoadedModel, LoadedModel]:
        """Producer and consumer in the dtypes in which they serve; others are let go first, to hold two models at most."""
        config = self._job.config
        kept = {(self._job.producer_path, config.producer.dtype), (self._job.consumer_path, config.consumer.dtype)}
        self._loaded = {name: loaded for name, loaded in self._loaded.items() if name in kept}
        return self.producer(config.producer.dtype), self.consumer(config.consumer.dtype)

    def _load(self, path: Path, dtype: Dtype) -> LoadedModel:
        if (path, dtype) not in self._loaded:
            self._loaded[path, dtype] = load_model(path, dtype=dtype)
        return self._loaded[path, dtype]


@dataclass(frozen=True)
class Texts:
    """Token ids of both samples, the held-out questions, and names of what is made of them.

    Attributes:
        key: names the artifact: all settings, weights and token ids.
        moments_key: names what is folded from the calibration text, which artifacts of several rates can share.
    """

    calibration: Ids
    heldout: Ids
    key: str
    moments_key: str
    questions: tuple[Asked, ...] = ()

    @cached_property
    def common_openers(self) -> tuple[int, ...]:
        """First tokens of many calibration sequences, ascending: position 0 has a row of its own for each of them."""
        counts = Counter(ids[0] for ids in self.calibration)
        return tuple(sorted(token for token, count in counts.items() if count >= OPENER_SHARE * len(self.calibration)))

    @property
    def num_openers(self) -> int:
        """Kinds of first tokens: each common one, and all others together if there are any."""
        return len(self.common_openers) + any(ids[0] not in self.common_openers for ids in self.calibration)

    def opener(self, ids: Sequence[int]) -> int:
        """Kind of a sequence's first token, below `num_openers`."""
        openers = self.common_openers
        return openers.index(ids[0]) if ids[0] in openers else len(openers)


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
            tokenizer,
            calibration.source,
            "calibration",
            num_sequences=number,
            sequence_tokens=length,
            seed=seed,
            plain_share=calibration.plain_share,
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
    asked = read_questions(job, tokenizer) if job.asks_questions else ()
    key = _key(job, calibration_ids, heldout_ids, asked)
    return Texts(
        calibration_ids, heldout_ids, key, _digest(job, job.config.moments_digest(), calibration_ids), questions=asked
    )


def heldout_length(heldout: HeldoutConfig) -> int:
    """Tokens of a sequence that is scored; one more than are scored, the target of the last."""
    return heldout.prefix_tokens + heldout.scored_tokens + 1


def layer_statistics(job: Job) -> PairStatistics:
    """Empty moments of every layer: keys and values, and attention inputs where Patch is possible."""
    kv, hidden = (job.producer.kv_dim, job.consumer.kv_dim), (job.producer.hidden_size, job.consumer.hidden_size)
    kinds: tuple[Kind, ...] = ("k", "v")
    every = {(layer, kind): kv for layer in range(job.num_layers) for kind in kinds}
    return PairStatistics(every | {(layer, "x"): hidden for layer in job.patch_candidates})


def group_statistics(job: Job, *, num_openers: int) -> PairStatistics:
    """Empty moments of every group of layers: the keys of all its layers, and their values.

    Where Patch is possible also the attention inputs of every layer; and room for the rows of position 0, by kind of opener.

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
        (job.num_sources(group) * job.producer.kv_dim, (stop - start) * job.consumer.kv_dim)
        for group, (start, stop) in enumerate(job.groups)
    ]
    every = {(group, kind): found for group, found in enumerate(widths) for kind in kinds}
    hidden = (job.producer.hidden_size, job.consumer.hidden_size)
    shapes = [(spec.num_layers, 2, spec.kv_dim) for spec in (job.producer, job.consumer)]
    return PairStatistics(
        every | {(layer, "x"): hidden for layer in job.patch_candidates}, first_rows=FirstRows(num_openers, *shapes)
    )


def calibrate(
    job: Job,
    texts: Texts,
    work: Path,
    progress: Progress,
    *,
    into: PairStatistics,
    models: PairModels | None = None,
) -> PairStatistics:
    """Fold the calibration text into empty moments, going on from `work` where an earlier run was interrupted."""

    def fold(remaining: Ids) -> Iterator[None]:
        traces = paired_traces(job, remaining, _captured(job), models=models)
        for ids, (traced_A, traced_B) in zip(remaining, traces, strict=True):
            _fold(job, into, traced_A, traced_B)
            if into.first_rows is not None:
                into.first_rows.update(texts.opener(ids), _first_rows(traced_A), _first_rows(traced_B))
            yield

    return fold_resumably(
        into, texts, work / f"{texts.moments_key}.safetensors", progress, stage="calibrate", fold=fold
    )


def fold_resumably(
    statistics: PairStatistics,
    texts: Texts,
    path: Path,
    progress: Progress,
    *,
    stage: str,
    fold: Callable[[Ids], Iterable[None]],
) -> PairStatistics:
    """Fold the calibration text into empty moments, going on from what an earlier run has left in `path`.

    Args:
        fold: folds sequences in, and yields after each.
    """
    if path.exists():
        statistics.restore(path, key=texts.moments_key)
    path.parent.mkdir(parents=True, exist_ok=True)
    progress.stage(stage, len(texts.calibration))
    progress.advance(statistics.num_sequences)
    for _ in fold(texts.calibration[statistics.num_sequences :]):
        if statistics.num_sequences % SAVE_EVERY_SEQUENCES == 0 or statistics.num_sequences == len(texts.calibration):
            statistics.save(path, key=texts.moments_key)
        progress.advance()
    return statistics


def kept(path: Path, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a pass computes, or what an earlier run has left of it in `path`.

    Raises:
        StatisticsError: the file is damaged; delete it to start over.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({name: tensor.contiguous() for name, tensor in compute().items()}, temporary)
        temporary.replace(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise StatisticsError(f"{path}: not the result of a pass ({error}); delete it") from error


def choose_sources(job: Job, texts: Texts, work: Path, progress: Progress, *, models: PairModels | None = None) -> Job:
    """The job with the producer layers that each group is computed from, where they are not simply its own."""
    if job.sources or not job.chooses_sources:
        return job

    def choose() -> dict[str, Tensor]:
        number = -(-MAX_PROBED_TOKENS // job.config.calibration.sequence_tokens)
        sequences = texts.calibration[:number]
        probes = SourceProbes(job.producer, job.consumer, seed=job.config.method.seed)
        progress.stage("choose source layers", len(sequences))
        for traced_A, traced_B in paired_traces(job, sequences, {"kv"}, models=models):
            probes.update(traced_A, traced_B, num_sinks=NUM_SINK_TOKENS)
            progress.advance()
        return {
            str(group): torch.tensor(probes.best(range(*layers), num_sources=job.num_sources(group)))
            for group, layers in enumerate(job.groups)
        }

    found = kept(work / f"{texts.moments_key}.sources.safetensors", choose)
    return replace(job, sources=tuple(tuple(found[str(group)].tolist()) for group in range(len(job.groups))))


def sample_rows(job: Job, texts: Texts, layers: LayerSet, *, capacity: int, progress: Progress) -> dict[int, RowSample]:
    """A bounded sample of both models' normalised attention inputs in some layers."""
    samples = {layer: RowSample(capacity, job.config.method.seed) for layer in layers}
    progress.stage("sample rows for the aligner", len(texts.calibration))
    for traced_A, traced_B in paired_traces(job, texts.calibration, {"x"}):
        for layer, sample in samples.items():
            sample.update(traced_A.x_TM[layer], traced_B.x_TM[layer])
        progress.advance()
    return samples


def paired_traces(
    job: Job, sequences: Ids, capture: Set[Capture], *, models: PairModels | None = None
) -> Iterator[tuple[ModelTrace, ModelTrace]]:
    """What both models compute on each sequence, in float32; models are loaded at the first one."""
    if not sequences:
        return
    loaded = models or PairModels(job)
    producer = loaded.producer()
    consumer = None if job.same_model else loaded.consumer()
    for ids in sequences:
        traced = trace(producer, ids, capture=capture)
        yield traced, traced if consumer is None else trace(consumer, ids, capture=capture)


def text_sequences(
    tokenizer: Any,
    source: Source,
    split: Split,
    *,
    num_sequences: int,
    sequence_tokens: int,
    seed: int,
    plain_share: float = 0.0,
) -> Ids:
    """Sequences of a split that begin as served prompts do: with the opening of a user's message, then text.

    Args:
        plain_share: share of sequences, spread evenly, that begin with text, as prompts without a chat do; they are shorter
            by that opening.
    Raises:
        CorpusError: too little text, or sequences too short for the opening.
    """
    chat, plain = _chat_opening(tokenizer), _plain_opening(tokenizer)
    length = sequence_tokens - len(chat)
    if length < 1:
        raise CorpusError(
            f"sequences of {sequence_tokens} tokens hold no text behind the {len(chat)} that open a chat; make them longer"
        )

    def encode(text: str) -> list[int]:
        # verbose would warn of texts longer than the context: they are cut into sequences here
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    texts = token_sequences(
        source, encode, num_tokens=num_sequences * length, sequence_tokens=length, split=split, seed=seed
    )
    return tuple((*(plain if _is_plain(index, plain_share) else chat), *ids) for index, ids in enumerate(texts))


def _is_plain(index: int, share: float) -> bool:
    return int((index + 1) * share) > int(index * share)


def _plain_opening(tokenizer: Any) -> list[int]:
    """What comes before the first word of a prompt that is no chat."""
    ids: list[int] = tokenizer("")["input_ids"]
    return ids


def _chat_opening(tokenizer: Any) -> list[int]:
    """What comes before the user's first word; without a chat template as without a chat."""
    if tokenizer.chat_template is None:
        return _plain_opening(tokenizer)
    mark = "text"
    rendered: str = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    ids: list[int] = tokenizer(rendered[: rendered.rindex(mark)], add_special_tokens=False)["input_ids"]
    return ids


def _key(job: Job, calibration: Ids, heldout: Ids, questions: Sequence[Asked]) -> str:
    asked = [asdict(question) for question in questions]
    return _digest(job, job.config.method_digest(), calibration, heldout, asked)


def _digest(job: Job, *parts: Any) -> str:
    whole = [METHOD_VERSION, job.producer.weights_digest, job.consumer.weights_digest, *parts]
    return hashlib.blake2b(json.dumps(whole).encode(), digest_size=16).hexdigest()


def _captured(job: Job) -> Set[Capture]:
    return {"kv", "x"} if job.patch_candidates else {"kv"}


def _fold(job: Job, statistics: PairStatistics, traced_A: ModelTrace, traced_B: ModelTrace) -> None:
    rows = {
        "k": (traced_A.k_TF, traced_B.k_TF),
        "v": (traced_A.v_TF, traced_B.v_TF),
        "x": (traced_A.x_TM, traced_B.x_TM),
    }
    for (index, kind), moments in statistics.moments.items():
        a, b = rows[kind.removeprefix("group_")]
        if kind.startswith("group_"):
            given = [a[layer] for layer in job.source_layers(index)]
            moments.update(_side_by_side(given), _side_by_side(b[slice(*job.groups[index])]))
        else:
            moments.update(a[index], b[index])
    statistics.num_sequences += 1


def _first_rows(traced: ModelTrace) -> Tensor:
    """`[L, 2, F]`."""
    return torch.stack([torch.stack([rows[0] for rows in kind]) for kind in (traced.k_TF, traced.v_TF)], dim=1).double()


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several layers as one, without attention sinks, which are not typical."""
    return torch.cat([*rows], dim=1)[NUM_SINK_TOKENS:]
