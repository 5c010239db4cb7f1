"""What `distill` is going to do, decided before any weights are loaded.

Owns: `Job` (the models' directories and specifications, ranks per layer, layers that may be patched, all checked against each
other) and `Plan`, the estimate that a dry run shows. Reading a specification digests the weights' files but loads none.

Time is estimated from the floating-point operations of the passes over text, counted from the shapes, and the speed of a
matrix product measured on the spot. Solving and reading files are not in it: it says minutes or hours, not seconds.

Errors: those of `models.materialize` and `model_spec`, `FitError` for ranks, `LayerSelectionError` for layers, `PlanError`
for sequences that a model cannot hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from scd_trt.config import Dtype, ModelConfig, PairConfig, ScdError
from scd_trt.distill.fit import ranks
from scd_trt.distill.layer_selection import LayerSet, check_layers
from scd_trt.distill.sources import MAX_PROBED_TOKENS
from scd_trt.model_spec import ModelSpec, check_pair, same_shape
from scd_trt.models import materialize

FRONTIER = (4.0, 8.0, 10.0, 16.0, 20.0, 32.0)
"""Ratios of the cache's bytes to the codes' at which quality is always measured."""

FULL_FRONTIER = (4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0)
"""Ratios of `distill --frontier`; it holds those of `FRONTIER`."""

NUM_BISECTIONS = 6
"""Steps of the search for the rate that keeps to a loss; the last one is 7 % of the bytes wide."""

EXACT_LAYERS = (1, 2, 4)
"""Numbers of first layers of which is measured what computing them exactly would gain."""

FISHER_SCORED_TOKENS = 64
"""Tokens of a sequence that are scored to weigh errors."""

DEFAULT_RATIO = 10.0
"""Policy `rd` without a limit: by how much the codes are smaller than the cache."""

NUM_CONTROLS = 7
"""Rows of the held-out table, at most."""


class PlanError(ScdError):
    """The configured sequences do not fit the models."""


@dataclass(frozen=True)
class Job:
    """A pair, opened and checked.

    Attributes:
        sources: producer layers that each group is computed from, once they are chosen (`sources`); empty: its own layers.
    """

    config: PairConfig
    producer_path: Path
    consumer_path: Path
    producer: ModelSpec
    consumer: ModelSpec
    sources: tuple[tuple[int, ...], ...] = ()

    @property
    def num_layers(self) -> int:
        return self.consumer.num_layers

    @property
    def same_model(self) -> bool:
        """A = B: nothing is lost by sending the cache itself."""
        return self.producer.weights_digest == self.consumer.weights_digest and self.producer.rope == self.consumer.rope

    @property
    def same_shape(self) -> bool:
        """Layer l of one model looks like layer l of the other; between other shapes a cache cannot be reused as it is."""
        return same_shape(self.producer, self.consumer)

    @property
    def chooses_sources(self) -> bool:
        """Groups are not simply computed from their own layers."""
        method = self.config.method
        return method.policy == "rd" and (method.source_layers is not None or not self.same_shape)

    def num_sources(self, group: int) -> int:
        """Producer layers that a group is computed from."""
        start, stop = self.groups[group]
        if not self.chooses_sources:
            return stop - start
        as_wide = -(-(stop - start) * self.consumer.kv_dim // self.producer.kv_dim)
        return min(self.config.method.source_layers or as_wide, self.producer.num_layers)

    def source_layers(self, group: int) -> tuple[int, ...]:
        """Producer layers that a group is computed from, ascending."""
        return self.sources[group] if self.sources else tuple(range(*self.groups[group]))

    def has_own_sources(self, group: int) -> bool:
        """Whether a group is computed from its own layers, so that these may also be sent as they are."""
        return self.same_shape and self.source_layers(group) == tuple(range(*self.groups[group]))

    @property
    def needs_calibration(self) -> bool:
        return self.config.method.policy != "exact"

    @property
    def needs_heldout(self) -> bool:
        """Quality is measured unless it is exact by construction."""
        return self.needs_calibration or not self.same_model

    @property
    def asks_questions(self) -> bool:
        """Quality is also measured by answers to held-out questions."""
        return self.config.method.policy == "rd" and self.config.method.max_relative_f1_loss is not None

    @cached_property
    def r_k(self) -> tuple[int, ...]:
        return self._ranks("r_k", self.consumer.kv_dim)

    @cached_property
    def r_v(self) -> tuple[int, ...]:
        return self._ranks("r_v", self.consumer.kv_dim)

    @cached_property
    def r_h(self) -> tuple[int, ...]:
        return self._ranks("r_h", self.producer.hidden_size)

    @cached_property
    def patch_candidates(self) -> LayerSet:
        """Layers that may be patched: those configured, or all."""
        method = self.config.method
        if method.policy == "rd" and "patch" in method.modes and self.same_shape:
            return tuple(range(self.num_layers))
        if method.policy != "paper":
            return ()
        if method.patch_layers != "auto":
            return check_layers(method.patch_layers, self.num_layers)
        return tuple(range(self.num_layers)) if method.max_patch_layers else ()

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of layers that are coded together."""
        size = self.config.method.group_layers if self.config.method.policy == "rd" else 1
        return tuple((start, min(start + size, self.num_layers)) for start in range(0, self.num_layers, size))

    @property
    def dense_bytes_per_token(self) -> int:
        """The cache itself, in the consumer's dtype."""
        return self.num_layers * 2 * self.consumer.kv_dim * _itemsize(self.config.consumer.dtype)

    @property
    def code_bytes(self) -> int:
        return _itemsize(self.config.method.code_dtype)

    @property
    def max_matrix_elements(self) -> int:
        """Of all encoders and decoders of transforms together."""
        num_weights = _weight_bytes(self.consumer_path, self.consumer.dtype) // 4
        return int(self.config.method.max_matrix_share * num_weights)

    def patch_bytes(self, layer: int) -> int:
        """Bytes of one token's codes of a Patch layer."""
        return self.r_h[layer] * self.code_bytes

    def _ranks(self, name: str, limit: int) -> tuple[int, ...]:
        return ranks(getattr(self.config.method, name), name=name, num_layers=self.num_layers, limit=limit)


@dataclass(frozen=True)
class Plan:
    """What a run would take; bytes are estimates of what is held at once.

    Attributes:
        forward_tokens: tokens that go through each of the two models.
        weighing_tokens: tokens that go through the consumer once more, with a gradient, to weigh errors.
        answered_questions: answers that are generated, at most.
        text_passes: passes over the whole calibration text.
        scored_caches: (mixture, sequence) pairs that are scored on held-out text, at most.
        statistics_bytes: streamed moments; does not grow with the calibration text.
        weights_bytes: both models in float32.
        heldout_bytes: held-out caches and reference predictions.
        code_bytes_per_token: codes of one token (paper: with no layer patched, rd: at most); None where held-out text
            decides.
        dense_bytes_per_token: the cache itself.
        num_flops: floating-point operations of the passes over text.
        estimated_s: what they take on this machine.
    """

    producer: str
    consumer: str
    translator: str
    calibration_tokens: int
    heldout_tokens: int
    forward_tokens: int
    weighing_tokens: int
    answered_questions: int
    text_passes: int
    scored_caches: int
    statistics_bytes: int
    weights_bytes: int
    heldout_bytes: int
    code_bytes_per_token: int | None
    dense_bytes_per_token: int
    num_flops: int
    estimated_s: float

    def as_json(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)


def prepare(config: PairConfig, *, tell: Callable[[str], None] | None = None) -> Job:
    """Open the pair and check everything that can be checked without weights.

    Args:
        tell: is told in words what takes long.
    """
    producer_path, consumer_path = (_materialize(section, tell) for section in (config.producer, config.consumer))
    job = Job(
        config=config,
        producer_path=producer_path,
        consumer_path=consumer_path,
        producer=ModelSpec.from_directory(producer_path),
        consumer=ModelSpec.from_directory(consumer_path),
    )
    check_pair(job.producer, job.consumer, allow_other_shape=config.method.policy == "rd")
    _check_lengths(job)
    _ = job.patch_candidates
    if config.method.policy == "paper":
        _ = job.r_k, job.r_v
    if job.patch_candidates:
        _ = job.r_h
    return job


def plan(config: PairConfig, *, full_frontier: bool = False) -> Plan:
    """Say what `distill` would do; loads no weights, but converts a packaged model on first use.

    Args:
        full_frontier: as with `--frontier`.
    """
    job = prepare(config)
    heldout = config.heldout
    trains = config.method.policy == "paper" and config.method.aligner == "mlp" and bool(job.patch_candidates)
    passes = job.needs_calibration * (1 + trains)
    calibration_tokens = config.calibration.num_tokens if job.needs_calibration else 0
    heldout_tokens = heldout.num_sequences * (heldout.prefix_tokens + heldout.scored_tokens) * job.needs_heldout
    weights_bytes = (
        _weight_bytes(job.producer_path, job.producer.dtype),
        _weight_bytes(job.consumer_path, job.consumer.dtype),
    )
    scored_caches = _num_mixtures(job, full_frontier) * heldout.num_sequences * job.needs_heldout
    probed_tokens = min(MAX_PROBED_TOKENS, calibration_tokens) * job.chooses_sources
    forward_tokens = passes * calibration_tokens + probed_tokens + heldout_tokens
    num_flops = _num_flops(job, forward_tokens, scored_caches, weights_bytes)
    return Plan(
        producer=job.producer.name,
        consumer=job.consumer.name,
        translator=str(config.translator_path()),
        calibration_tokens=calibration_tokens,
        heldout_tokens=heldout_tokens,
        forward_tokens=forward_tokens,
        weighing_tokens=_weighing_tokens(job),
        answered_questions=_num_answers(job),
        text_passes=passes,
        scored_caches=scored_caches,
        statistics_bytes=_statistics_bytes(job) * job.needs_calibration,
        weights_bytes=sum(weights_bytes),
        heldout_bytes=_heldout_bytes(job) * job.needs_heldout,
        code_bytes_per_token=_code_bytes(job),
        dense_bytes_per_token=job.dense_bytes_per_token,
        num_flops=num_flops,
        estimated_s=float(f"{num_flops / _flops_per_s():.2g}"),
    )


def num_fisher_sequences(job: Job) -> int:
    """Calibration sequences whose last tokens are scored to weigh errors."""
    calibration = job.config.calibration
    wanted = -(-job.config.method.fisher_tokens // FISHER_SCORED_TOKENS)
    return min(wanted, -(-calibration.num_tokens // calibration.sequence_tokens))


def _materialize(section: ModelConfig, tell: Callable[[str], None] | None) -> Path:
    return materialize(section.model, adapter=section.adapter, progress=tell)


def _check_lengths(job: Job) -> None:
    limit = min(job.producer.max_position, job.consumer.max_position)
    heldout = job.config.heldout
    lengths = {
        "calibration.sequence_tokens": job.config.calibration.sequence_tokens,
        "heldout.prefix_tokens + heldout.scored_tokens": heldout.prefix_tokens + heldout.scored_tokens,
    }
    for name, length in lengths.items():
        if length > limit:
            raise PlanError(f"{name} is {length}, but the pair's context holds {limit} tokens; ask for shorter ones")


def _num_mixtures(job: Job, full_frontier: bool) -> int:
    method = job.config.method
    if method.policy == "rd":
        # those of the frontier, the finest, and the chosen one or those of the search; each twice if several modes are tried
        num_searched = 1 if _code_bytes(job) is not None else 1 + NUM_BISECTIONS
        num_rates = len(FULL_FRONTIER if full_frontier else FRONTIER) + 1 + num_searched
        return NUM_CONTROLS + 1 + len(EXACT_LAYERS) + num_rates * (2 if len(method.modes) > 1 else 1)
    if method.patch_layers != "auto":
        return NUM_CONTROLS + len(method.patch_layers)
    tried = min(method.num_candidates, job.num_layers)
    steps = range(min(method.max_patch_layers, tried))
    return NUM_CONTROLS + (1 + job.num_layers + sum(tried - step for step in steps) if steps else 0)


def _code_bytes(job: Job) -> int | None:
    method = job.config.method
    if method.policy == "exact":
        return job.dense_bytes_per_token
    if method.policy == "paper":
        return (sum(job.r_k) + sum(job.r_v)) * job.code_bytes
    if method.max_kl is not None or method.max_relative_f1_loss is not None:
        return None
    return method.bytes_per_token or int(job.dense_bytes_per_token / DEFAULT_RATIO)


def _statistics_bytes(job: Job) -> int:
    return 8 * sum(number * width**2 for number, width in _moment_widths(job))


def _moment_widths(job: Job) -> list[tuple[int, int]]:
    """Number and joint width of all moments that are kept."""
    inputs = [(len(job.patch_candidates), job.producer.hidden_size + job.consumer.hidden_size)]
    kv_dim = job.producer.kv_dim + job.consumer.kv_dim
    if job.config.method.policy == "rd":
        return inputs + [
            (2, job.num_sources(group) * job.producer.kv_dim + (stop - start) * job.consumer.kv_dim)
            for group, (start, stop) in enumerate(job.groups)
        ]
    return [*inputs, (2 * job.num_layers, kv_dim)]


def _weighing_tokens(job: Job) -> int:
    if job.config.method.policy != "rd":
        return 0
    return num_fisher_sequences(job) * job.config.calibration.sequence_tokens


def _num_answers(job: Job) -> int:
    """The consumer's own, the finest rate's and those of each step of the search."""
    return job.config.heldout.num_questions * (2 + NUM_BISECTIONS) * job.asks_questions


def _num_flops(job: Job, forward_tokens: int, scored_caches: int, weights_bytes: tuple[int, int]) -> int:
    """Two per weight and token forward, twice that backward, two per entry of a cross-product and token."""
    both, consumer = sum(weights_bytes) // 4, weights_bytes[1] // 4
    scored_tokens = scored_caches * job.config.heldout.scored_tokens
    moments = job.needs_calibration * job.config.calibration.num_tokens
    return (
        2 * both * forward_tokens
        + 2 * consumer * scored_tokens
        + 6 * consumer * _weighing_tokens(job)
        + 2 * moments * _statistics_bytes(job) // 8
    )


def _flops_per_s() -> float:
    """Of a float32 matrix product, the best of a few."""
    size = 512
    x = torch.ones(size, size)
    best_s = float("inf")
    for _ in range(3):
        began_s = time.perf_counter()
        torch.mm(x, x)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * size**3 / best_s


def _heldout_bytes(job: Job) -> int:
    heldout = job.config.heldout
    hidden = job.num_layers * job.producer.hidden_size * _itemsize(job.config.producer.dtype)
    # oracle, raw, re-rotated, reuse, patch and one source of the sweep
    per_token = 6 * job.dense_bytes_per_token + hidden
    return heldout.num_sequences * (
        heldout.prefix_tokens * per_token + heldout.scored_tokens * job.consumer.vocab_size * 4
    )


def _weight_bytes(path: Path, dtype: str) -> int:
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    itemsize: int = getattr(torch, dtype).itemsize
    return stored * 4 // itemsize


def _itemsize(dtype: Dtype) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize
