"""Policy `rd`: group transforms at the rate that the user's limit asks for, measured on held-out text (METHOD, section 2).

    calibrate     moments of every group's keys and values; Fisher information of B's cache
    decorrelate   one spectrum for each group and kind (`transform`)
    frontier      codes at several rates, each encoded, decoded and scored on held-out text as the servers would
    choose        `bytes_per_token`: the best codes of at most that size; `max_kl`, `max_relative_f1_loss`: the fewest bytes
                  whose *measured* loss keeps to the limit, by bisection on the rate; an error names the best that can be
                  had if none does

Rates are bytes per token over all groups, under one Lagrangian. A limit is kept on the held-out sample, not on every
prompt; the worst decile stands beside the mean in the artifact. A measurement is noisy: what the limit is compared with
(a mean, or the upper end of an interval) is the measurement's to say, and stands in the artifact beside the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from scd_trt.config import MethodConfig, ScdError
from scd_trt.distill.calibration import NUM_SINK_TOKENS, PairModels, Progress, Texts, kept
from scd_trt.distill.fisher import ErrorWeights, FisherWeights
from scd_trt.distill.plan import (
    DEFAULT_RATIO,
    FISHER_SCORED_TOKENS,
    NUM_BISECTIONS,
    Job,
    num_fisher_sequences,
)
from scd_trt.distill.quantiser import DistortionTable, gaussian_table
from scd_trt.distill.rate_distortion import Allocation, allocate_groups
from scd_trt.distill.statistics import Kind, PairStatistics
from scd_trt.distill.transform import SinkRows, Spectrum, row_transform, spectrum
from scd_trt.translator import GroupTransform

FINEST = 2.0
"""Ratio at which every component has 8 bits: the translation with next to no coding loss."""

COARSEST = 128.0

Transforms = tuple[GroupTransform, ...]
LimitName = Literal["bytes_per_token", "max_kl", "max_relative_f1_loss"]


class RateError(ScdError):
    """No rate keeps to the loss that was allowed."""


@dataclass(frozen=True)
class GroupSpectra:
    """Keys and values of each group, decorrelated.

    Attributes:
        table: of the quantiser that components are given.
        max_matrix_elements: of all encoders and decoders together; components of the least variance go without bits.
    """

    keys: tuple[Spectrum, ...]
    values: tuple[Spectrum, ...]
    dense_bytes_per_token: int
    sinks: tuple[SinkRows, ...] = ()
    table: DistortionTable = field(default_factory=gaussian_table)
    max_matrix_elements: int | None = None

    def at_ratio(self, ratio: float) -> Transforms:
        """The best transforms whose codes are at least `ratio` times smaller than the cache."""
        return self.at_bytes(int(self.dense_bytes_per_token / ratio))

    def at_bytes(self, bytes_per_token: int, *, groups: Sequence[int] | None = None) -> Transforms:
        """The best transforms of some groups (default: all) whose codes have at most that size."""
        chosen = self._chosen(groups)
        sinks = self.sinks or (None,) * (2 * len(self.keys))
        rows = [
            row_transform(found, allocation, self.table, sinks=sink)
            for found, allocation, sink in zip(
                self._spectra(chosen),
                self.allocate(bytes_per_token, groups=chosen),
                [sinks[2 * group + kind] for group in chosen for kind in (0, 1)],
                strict=True,
            )
        ]
        return tuple(GroupTransform(keys=k, values=v) for k, v in zip(rows[::2], rows[1::2], strict=True))

    def allocate(self, bytes_per_token: int, *, groups: Sequence[int] | None = None) -> tuple[Allocation, ...]:
        """Bits of some groups' keys and values, in turn, under one Lagrangian."""
        found = self._spectra(self._chosen(groups))
        if not found:
            return ()
        return allocate_groups(
            [one.variance_C for one in found],
            budget_bits=8 * bytes_per_token,
            table=self.table,
            max_sent=self._max_sent(found),
        )

    def _max_sent(self, found: Sequence[Spectrum]) -> list[int] | None:
        """Components of each group that its matrices may have: those of the largest variance over all groups."""
        if self.max_matrix_elements is None:
            return None
        sizes = [len(one.variance_C) for one in found]
        variance_C = torch.cat([one.variance_C for one in found])
        cost_C = torch.cat(
            [torch.full((size,), len(o.mean_I) + len(o.mean_O)) for size, o in zip(sizes, found, strict=True)]
        )
        order_C = (variance_C / cost_C).argsort(descending=True, stable=True)
        is_kept_C = torch.zeros(len(variance_C), dtype=torch.bool)
        is_kept_C[order_C] = cost_C[order_C].cumsum(0) <= self.max_matrix_elements
        return [int(part.sum()) for part in torch.split(is_kept_C, sizes)]

    def translation(self, group: int) -> float:
        """Weighted variance of a group's rows that no linear map explains."""
        return self.keys[group].translation + self.values[group].translation

    def _chosen(self, groups: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.keys)) if groups is None else groups

    def _spectra(self, groups: Sequence[int]) -> list[Spectrum]:
        return [found for group in groups for found in (self.keys[group], self.values[group])]


def error_weights(
    job: Job, texts: Texts, progress: Progress, *, models: PairModels | None = None, work: Path | None = None
) -> ErrorWeights:
    """What errors cost, from the calibration text, as `method.weights` says.

    Args:
        models: to take the consumer from, else it is loaded.
        work: directory where the result is kept for a run that goes on after an interruption.
    """
    method = job.config.method
    if method.weights == "none":
        return ErrorWeights.equal(job.consumer.num_layers, job.consumer.kv_dim)

    def weigh() -> dict[str, Tensor]:
        consumer = (models or PairModels(job)).consumer()
        weights = FisherWeights(consumer, seed=method.seed, num_sink_tokens=NUM_SINK_TOKENS)
        num_sequences = num_fisher_sequences(job)
        progress.stage("weigh errors by their effect", num_sequences)
        for ids in texts.calibration[:num_sequences]:
            weights.update(ids, scored_tokens=min(FISHER_SCORED_TOKENS, len(ids) // 2))
            progress.advance()
        found = weights.weights(of_heads=method.weights == "head")
        return {"elements": found.elements_L2F} | ({} if found.heads_L2HDD is None else {"heads": found.heads_L2HDD})

    found = weigh() if work is None else kept(work / f"{texts.moments_key}.fisher.safetensors", weigh)
    return ErrorWeights(found["elements"], found.get("heads"))


def group_spectra(
    job: Job,
    statistics: PairStatistics,
    weights: ErrorWeights,
    progress: Progress,
    *,
    sinks: tuple[Tensor, Tensor] | None = None,
) -> GroupSpectra:
    """Decorrelate the predicted rows of every group.

    Args:
        sinks: mean rows `[K, L, 2, F]` of position 0, by kind of opener, of producer and consumer.
    """
    method = job.config.method
    progress.stage("decorrelate groups", len(job.groups))
    kinds: tuple[Kind, Kind] = ("group_k", "group_v")
    found: dict[Kind, list[Spectrum]] = {kind: [] for kind in kinds}
    for group, (start, stop) in enumerate(job.groups):
        for index, kind in enumerate(kinds):
            rows_weights = weights.of_group(start, stop, index)
            found[kind].append(spectrum(statistics[group, kind], rows_weights, ridge=method.ridge))
        progress.advance()
    return GroupSpectra(
        tuple(found["group_k"]),
        tuple(found["group_v"]),
        job.dense_bytes_per_token,
        () if sinks is None else tuple(_sinks(job, sinks)),
        table=gaussian_table(headroom=method.headroom),
        max_matrix_elements=job.max_matrix_elements,
    )


def _sinks(job: Job, sinks: tuple[Tensor, Tensor]) -> Iterator[SinkRows]:
    """Of each group its keys, then its values: the layers' rows side by side."""
    for group, (start, stop) in enumerate(job.groups):
        layers = (list(job.source_layers(group)), list(range(start, stop)))
        for kind in (0, 1):
            producer_KI, consumer_KO = (
                rows[:, chosen, kind].flatten(1) for rows, chosen in zip(sinks, layers, strict=True)
            )
            yield SinkRows(producer_KI, consumer_KO)


class Codes(Protocol):
    """Codes of all groups, as far as choosing a rate looks at them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a token."""

    @property
    def num_silent_groups(self) -> int:
        """Groups without codes: the data path carries at least a byte of each."""


C = TypeVar("C", bound=Codes)


@dataclass(frozen=True)
class Limit:
    """What the user asked of the codes.

    Attributes:
        is_default: the user asked for nothing.
    """

    name: LimitName
    allowed: float
    is_default: bool = False

    @classmethod
    def of(cls, method: MethodConfig, dense_bytes_per_token: int) -> Limit:
        """The limit of a pair file; without one a tenth of the cache's bytes."""
        if method.max_kl is not None:
            return cls("max_kl", method.max_kl)
        if method.max_relative_f1_loss is not None:
            return cls("max_relative_f1_loss", method.max_relative_f1_loss)
        if method.bytes_per_token is not None:
            return cls("bytes_per_token", method.bytes_per_token)
        return cls("bytes_per_token", int(dense_bytes_per_token / DEFAULT_RATIO), is_default=True)


@dataclass(frozen=True)
class Loss:
    """A measured loss.

    Attributes:
        value: what must keep to the limit.
        text: the measurement in words that follow a noun: "costs ...".
        figures: what belongs beside it in the artifact.
    """

    value: float
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chosen(Generic[C]):
    """Codes that keep to a limit, and the loss that was measured of them; None where bytes are the limit."""

    codes: C
    limit: Limit
    loss: Loss | None

    def as_json(self) -> dict[str, Any]:
        """What the artifact says of its limit."""
        return {
            "name": self.limit.name,
            "allowed": self.limit.allowed,
            "is_default": self.limit.is_default,
            "measured": self.codes.num_bytes if self.loss is None else self.loss.value,
            "bytes_per_token": self.codes.num_bytes,
        } | dict({} if self.loss is None else self.loss.figures)


def choose(limit: Limit, codes_of: Callable[[int], C], measure: Callable[[C], Loss], *, dense_bytes: int) -> Chosen[C]:
    """Codes that keep to the user's limit.

    Args:
        codes_of: the best codes of at most so many bytes per token.
        measure: their loss on held-out text, in the unit of the limit.
        dense_bytes: of the cache.
    Raises:
        RateError: no rate keeps to the loss, and the message has the best that was measured; or so few bytes were asked for
            that a group of layers gets none.
    """
    if limit.name == "bytes_per_token":
        return Chosen(_every_group_sent(codes_of(int(limit.allowed)), int(limit.allowed)), limit, None)
    finest = codes_of(int(dense_bytes / FINEST))
    loss = measure(finest)
    if loss.value > limit.allowed:
        raise RateError(
            f"method.{limit.name} {limit.allowed:g}: the translation itself {loss.text}, at any rate; the best that was "
            f"found sends {finest.num_bytes} bytes per token; {_CURES[limit.name]}"
        )
    best, low, high = Chosen(finest, limit, loss), FINEST, COARSEST
    for _ in range(NUM_BISECTIONS):
        ratio = (low * high) ** 0.5
        tried = codes_of(int(dense_bytes / ratio))
        loss = measure(tried)
        if loss.value <= limit.allowed and tried.num_silent_groups == 0:
            best, low = Chosen(tried, limit, loss), ratio
        else:
            high = ratio
    return best


_CURES: dict[LimitName, str] = {
    "max_kl": "allow more, or calibrate on more text (calibration.num_tokens)",
    "max_relative_f1_loss": "allow more, calibrate on more text (calibration.num_tokens), or, where the interval is what is "
    "too wide, ask more questions (heldout.num_questions) or judge by the mean (method.f1_loss_rule)",
}


def _every_group_sent(codes: C, size: int) -> C:
    """The data path carries at least a byte of each group."""
    if codes.num_silent_groups:
        raise RateError(
            f"method.bytes_per_token: {size} bytes leave {codes.num_silent_groups} groups without codes; "
            "allow more, or put more layers into a group (method.group_layers)"
        )
    return codes
