"""Policy `rd`: group transforms at the rate that the user's limit asks for, measured on held-out text (METHOD, section 2).

    calibrate     moments of every group's keys and values; diagonal Fisher information of B's cache
    decorrelate   one spectrum for each group and kind (`transform`)
    frontier      translators at several rates, each encoded, decoded and scored on held-out text as the servers would
    choose        `bytes_per_token`: the best codes of at most that size; `max_kl`: the fewest bytes whose *measured* KL
                  keeps to the limit, by bisection on the rate; an error names the best that can be had if none does

Rates are bytes per token over all groups, under one Lagrangian. The limit is kept on the held-out sample, not on every
prompt; the worst decile stands beside the mean in the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scd_trt.config import ScdError
from scd_trt.distill.calibration import Progress, Texts
from scd_trt.distill.fisher import FisherWeights
from scd_trt.distill.plan import DEFAULT_RATIO, Job
from scd_trt.distill.quantiser import DistortionTable, gaussian_table
from scd_trt.distill.rate_distortion import allocate_groups
from scd_trt.distill.statistics import PairStatistics
from scd_trt.distill.transform import SinkRows, Spectrum, row_transform, spectrum
from scd_trt.models import load_model
from scd_trt.translator import GroupTransform

FRONTIER = (4.0, 8.0, 10.0, 16.0, 20.0, 32.0)
"""Ratios of the cache's bytes to the codes' at which quality is always measured."""

FINEST = 2.0
"""Ratio at which every component has 8 bits: the translation with next to no coding loss."""

COARSEST = 128.0
NUM_BISECTIONS = 6
FISHER_SCORED_TOKENS = 64

Transforms = tuple[GroupTransform, ...]


class RateError(ScdError):
    """No rate keeps to the loss that was allowed."""


@dataclass(frozen=True)
class GroupSpectra:
    """Keys and values of each group, decorrelated."""

    keys: tuple[Spectrum, ...]
    values: tuple[Spectrum, ...]
    dense_bytes_per_token: int
    sinks: tuple[SinkRows, ...] = ()

    def at_ratio(self, ratio: float, *, table: DistortionTable | None = None) -> Transforms:
        """The best transforms whose codes are at least `ratio` times smaller than the cache."""
        return self.at_bytes(int(self.dense_bytes_per_token / ratio), table=table)

    def at_bytes(self, bytes_per_token: int, *, table: DistortionTable | None = None) -> Transforms:
        """The best transforms whose codes have at most that size."""
        used = table or gaussian_table()
        every = [found for pair in zip(self.keys, self.values, strict=True) for found in pair]
        allocations = allocate_groups(
            [found.variance_C for found in every], budget_bits=8 * bytes_per_token, table=used
        )
        sinks = self.sinks or (None,) * len(every)
        rows = [
            row_transform(found, allocation, used, sinks=sink)
            for found, allocation, sink in zip(every, allocations, sinks, strict=True)
        ]
        return tuple(GroupTransform(keys=k, values=v) for k, v in zip(rows[::2], rows[1::2], strict=True))


def fisher_weights(job: Job, texts: Texts, progress: Progress) -> Tensor:
    """Weights `[L, 2, F]` from the calibration text."""
    weights = FisherWeights(load_model(job.consumer_path), seed=job.config.method.seed)
    num_sequences = min(-(-job.config.method.fisher_tokens // FISHER_SCORED_TOKENS), len(texts.calibration))
    progress.stage("weigh errors by their effect", num_sequences)
    for ids in texts.calibration[:num_sequences]:
        weights.update(ids, scored_tokens=min(FISHER_SCORED_TOKENS, len(ids) // 2))
        progress.advance()
    return weights.weights()


def group_spectra(
    job: Job,
    statistics: PairStatistics,
    weights_L2F: Tensor,
    progress: Progress,
    *,
    sinks: tuple[Tensor, Tensor] | None = None,
) -> GroupSpectra:
    """Decorrelate the predicted rows of every group.

    Args:
        sinks: mean rows `[L, 2, P, F]` of the first positions, of producer and consumer.
    """
    progress.stage("decorrelate groups", len(job.groups))
    found: dict[str, list[Spectrum]] = {"group_k": [], "group_v": []}
    for group, (start, stop) in enumerate(job.groups):
        weights_2O = weights_L2F[start:stop].transpose(0, 1).flatten(1)
        found["group_k"].append(spectrum(statistics[group, "group_k"], weights_2O[0], ridge=job.config.method.ridge))
        found["group_v"].append(spectrum(statistics[group, "group_v"], weights_2O[1], ridge=job.config.method.ridge))
        progress.advance()
    sink_rows = () if sinks is None else tuple(_sinks(job, sinks))
    return GroupSpectra(tuple(found["group_k"]), tuple(found["group_v"]), job.dense_bytes_per_token, sink_rows)


def _sinks(job: Job, sinks: tuple[Tensor, Tensor]) -> Iterator[SinkRows]:
    """Of each group its keys, then its values: the layers' rows side by side."""
    for start, stop in job.groups:
        for kind in (0, 1):
            producer_PI, consumer_PO = (torch.cat([*rows[start:stop, kind]], dim=1) for rows in sinks)
            yield SinkRows(producer_PI, consumer_PO)


def choose(
    spectra: GroupSpectra,
    measure: Callable[[Transforms], float],
    *,
    bytes_per_token: int | None,
    max_kl: float | None,
) -> Transforms:
    """Transforms that keep to the user's limit.

    Args:
        measure: KL of transforms on held-out text, nats per token.
        bytes_per_token: limit on the size; `max_kl`: limit on the measured loss. None of both: a tenth of the cache.
    Raises:
        RateError: no rate keeps to `max_kl`, and the message has the best that was measured; or so few bytes were asked for
            that a group of layers gets none.
    """
    if max_kl is None:
        size = bytes_per_token or int(spectra.dense_bytes_per_token / DEFAULT_RATIO)
        return _every_group_sent(spectra.at_bytes(size), size)
    finest = spectra.at_ratio(FINEST)
    kl = measure(finest)
    if kl > max_kl:
        raise RateError(
            f"method.max_kl {max_kl}: the translation itself costs {kl:.4g} nats per token on held-out text, at any rate; "
            "allow more, or calibrate on more text (calibration.num_tokens)"
        )
    best, low, high = finest, FINEST, COARSEST
    for _ in range(NUM_BISECTIONS):
        ratio = (low * high) ** 0.5
        tried = spectra.at_ratio(ratio)
        if measure(tried) <= max_kl and _num_silent(tried) == 0:
            best, low = tried, ratio
        else:
            high = ratio
    return best


def _num_silent(transforms: Transforms) -> int:
    return sum(transform.layout.bytes_per_token == 0 for transform in transforms)


def _every_group_sent(transforms: Transforms, size: int) -> Transforms:
    """The data path carries at least a byte of each group."""
    num_silent = _num_silent(transforms)
    if num_silent:
        raise RateError(
            f"method.bytes_per_token: {size} bytes leave {num_silent} of {len(transforms)} groups without codes; "
            "allow more, or put more layers into a group (method.group_layers)"
        )
    return transforms


def frontier(
    spectra: GroupSpectra, measured: Callable[[Transforms], dict[str, Any]], ratios: Sequence[float] = FRONTIER
) -> list[dict[str, Any]]:
    """What held-out text says of the best codes at each ratio."""
    return [{"ratio": ratio} | measured(spectra.at_ratio(ratio)) for ratio in ratios]
