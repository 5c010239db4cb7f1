"""What `distill` is going to do, decided before any weights are loaded.

Owns: `Job` (the models' directories and specifications, ranks per layer, layers that may be patched, all checked against each
other) and `Plan`, the estimate that a dry run shows. Reading a specification digests the weights' files but loads none.

Errors: those of `models.materialize` and `model_spec`, `FitError` for ranks, `LayerSelectionError` for layers, `PlanError`
for sequences that a model cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from scd_trt.config import Dtype, ModelConfig, PairConfig, ScdError
from scd_trt.distill.fit import ranks
from scd_trt.distill.layer_selection import LayerSet, check_layers
from scd_trt.model_spec import ModelSpec, check_pair
from scd_trt.models import materialize

NUM_RATES = 14
"""Rates that policy `rd` tries, at most: those of the frontier, and twice the finest, and a bisection."""

DEFAULT_RATIO = 10.0
"""Policy `rd` without a limit: by how much the codes are smaller than the cache."""

NUM_CONTROLS = 7
"""Rows of the held-out table, at most."""


class PlanError(ScdError):
    """The configured sequences do not fit the models."""


@dataclass(frozen=True)
class Job:
    """A pair, opened and checked."""

    config: PairConfig
    producer_path: Path
    consumer_path: Path
    producer: ModelSpec
    consumer: ModelSpec

    @property
    def num_layers(self) -> int:
        return self.consumer.num_layers

    @property
    def same_model(self) -> bool:
        """A = B: nothing is lost by sending the cache itself."""
        return self.producer.weights_digest == self.consumer.weights_digest and self.producer.rope == self.consumer.rope

    @property
    def needs_calibration(self) -> bool:
        return self.config.method.policy != "exact"

    @property
    def needs_heldout(self) -> bool:
        """Quality is measured unless it is exact by construction."""
        return self.needs_calibration or not self.same_model

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
        text_passes: passes over the calibration text.
        scored_caches: (mixture, sequence) pairs that are scored on held-out text, at most.
        statistics_bytes: streamed moments; does not grow with the calibration text.
        weights_bytes: both models in float32.
        heldout_bytes: held-out caches and reference predictions.
        code_bytes_per_token: codes of one token (paper: with no layer patched, rd: at most); None where held-out text
            decides.
        dense_bytes_per_token: the cache itself.
    """

    producer: str
    consumer: str
    translator: str
    calibration_tokens: int
    heldout_tokens: int
    forward_tokens: int
    text_passes: int
    scored_caches: int
    statistics_bytes: int
    weights_bytes: int
    heldout_bytes: int
    code_bytes_per_token: int | None
    dense_bytes_per_token: int

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
    check_pair(job.producer, job.consumer)
    _check_lengths(job)
    _ = job.patch_candidates
    if config.method.policy == "paper":
        _ = job.r_k, job.r_v, job.r_h
    return job


def plan(config: PairConfig) -> Plan:
    """Say what `distill` would do; loads no weights, but converts a packaged model on first use."""
    job = prepare(config)
    heldout = config.heldout
    passes = job.needs_calibration * (1 + (config.method.aligner == "mlp" and bool(job.patch_candidates)))
    calibration_tokens = config.calibration.num_tokens if job.needs_calibration else 0
    heldout_tokens = heldout.num_sequences * (heldout.prefix_tokens + heldout.scored_tokens) * job.needs_heldout
    return Plan(
        producer=job.producer.name,
        consumer=job.consumer.name,
        translator=str(config.translator_path()),
        calibration_tokens=calibration_tokens,
        heldout_tokens=heldout_tokens,
        forward_tokens=passes * calibration_tokens + heldout_tokens,
        text_passes=passes,
        scored_caches=_num_mixtures(job) * heldout.num_sequences * job.needs_heldout,
        statistics_bytes=_statistics_bytes(job) * job.needs_calibration,
        weights_bytes=_weight_bytes(job.producer_path, job.producer.dtype)
        + _weight_bytes(job.consumer_path, job.consumer.dtype),
        heldout_bytes=_heldout_bytes(job) * job.needs_heldout,
        code_bytes_per_token=_code_bytes(job),
        dense_bytes_per_token=job.dense_bytes_per_token,
    )


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


def _num_mixtures(job: Job) -> int:
    method = job.config.method
    if method.policy == "rd":
        return NUM_CONTROLS + NUM_RATES
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
    if method.max_kl is not None:
        return None
    return method.bytes_per_token or int(job.dense_bytes_per_token / DEFAULT_RATIO)


def _statistics_bytes(job: Job) -> int:
    if job.config.method.policy == "rd":
        return 8 * sum(2 * ((stop - start) * 2 * job.consumer.kv_dim) ** 2 for start, stop in job.groups)
    hidden = job.producer.hidden_size + job.consumer.hidden_size
    return 8 * (job.num_layers * 2 * (2 * job.consumer.kv_dim) ** 2 + len(job.patch_candidates) * hidden**2)


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
