"""Fit of the guard: how far rows may lie from the calibration text before their codes are not trusted (METHOD, 2.6).

Shapes: T tokens, I features of a group's producer rows, Q directions, B tokens of a block, N blocks.

A regression holds where it was fitted. How far a token lies from there is the Mahalanobis distance of its features, of one
group and kind (keys before RoPE, or values), under the covariance of the calibration text, sketched by Q random directions:

    novelty(x) = |(x - mean) @ G|^2  ~  (x - mean) (C + lambda I)^-1 (x - mean)' / I,     about 1 on calibration text
    G = L^-T @ gaussian[I, Q] / sqrt(I Q),    C + lambda I = L L',    lambda = RIDGE * mean diagonal of C

Sixteen directions tell texts apart as well as the whole inverse (docs/method.md), cost a few percent of an encoder, and do
not depend on the rate of the codes: one limit serves a pair at every rate.

Novelty of a token is the larger one of its two kinds, each relative to its limit; that of a block is the mean over its
tokens. Positions of sinks, which have means of their own, count as typical. A block is beyond calibration in a group where
its novelty exceeds 1 (`codec.num_blocks_within`).

Limits. Text that the moments have seen looks nearer than text that they have not. So the calibration text is cut into folds
of neighbouring sequences (a document spans neighbours), and the novelty of each is measured under the moments of all other
text, which is the whole's moments less its own: no text is lost for the maps. What is bounded is the share of prompts that
are cut, so what counts of a sequence is its most unusual block; logarithms of these are near normal. A limit is the value
that the worst block of a *new* sequence exceeds with probability `rate`: mean + t * deviation * sqrt(1 + 1/n), t of Student's
distribution. Limits of the groups and kinds are then moved together until a sequence exceeds any of them with that
probability. It holds for prompts as long as the calibration sequences; longer ones have more blocks to be cut at.

Deliberately not here: what a server does with a block beyond the limit (`serving.prefill_role`).
Errors: `GuardError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from scd_trt.config import ScdError
from scd_trt.distill.calibration import NUM_SINK_TOKENS, Ids, PairModels, Progress, Texts
from scd_trt.distill.plan import Job
from scd_trt.distill.statistics import Kind, Moments, PairStatistics
from scd_trt.models import ModelTrace, trace
from scd_trt.translator import MATRIX_DTYPE, GroupTransform, RowGuard, RowTransform

NUM_DIRECTIONS = 16
"""Q."""

RIDGE = 1e-3
"""Weight of the identity, relative to the mean diagonal of the covariance."""

NUM_FOLDS = 8
MAX_FOLD_SEQUENCES = 4
"""A fold's rows are held in memory; longer folds are measured by their first sequences, whose own moments are taken off."""

BLOCK_TOKENS = 32
"""Block on which limits are measured. Longer blocks vary less and exceed them more rarely, shorter ones more often."""

KINDS: tuple[Kind, Kind] = ("group_k", "group_v")
Key = tuple[int, Kind]
Guards = Mapping[Key, RowGuard]
"""Of every group and kind."""


class GuardError(ScdError):
    """The calibration text is too little to say what is unusual."""


@dataclass(frozen=True)
class Producer:
    """Mean and covariance of a producer's rows, and how many there were."""

    count: int
    mean_I: Tensor
    cross_II: Tensor

    @classmethod
    def of(cls, moments: Moments) -> Producer:
        """The producer's part of joint moments."""
        width = moments.width_a
        return cls(moments.count, moments.mean_n[:width], moments.cross_nn[:width, :width])

    def without(self, rows_TI: Tensor) -> Producer:
        """The same before these rows were folded in."""
        count, rest = len(rows_TI), self.count - len(rows_TI)
        mean_I = rows_TI.mean(0)
        centred_TI = rows_TI - mean_I
        # from mean = (rest * mean_rest + count * mean_rows) / (rest + count), and Chan's update backwards
        shift_I = (mean_I - self.mean_I) * (self.count / rest)
        cross_II = self.cross_II - centred_TI.T @ centred_TI
        cross_II.addr_(shift_I, shift_I, alpha=-count * rest / self.count)
        return Producer(rest, mean_I - shift_I, cross_II)

    def directions(self, gaussian_IQ: Tensor) -> Tensor:
        """G."""
        covariance_II = self.cross_II / self.count
        tiny = torch.finfo(torch.float64).tiny
        shift = RIDGE * float(covariance_II.diagonal().mean().clamp_min(tiny))
        covariance_II.diagonal().add_(shift)
        lower_II = torch.linalg.cholesky(covariance_II)
        solved_IQ: Tensor = torch.linalg.solve_triangular(lower_II.T, gaussian_IQ, upper=True)
        scale: float = gaussian_IQ.numel() ** -0.5
        return solved_IQ * scale


def fit(job: Job, texts: Texts, statistics: PairStatistics, progress: Progress, *, models: PairModels) -> Guards:
    """Directions from all calibration text, limits from each part of it under the others.

    Raises:
        GuardError: there are fewer than two calibration sequences.
    """
    if len(texts.calibration) < 2:
        raise GuardError(
            f"the guard needs two calibration sequences, found {len(texts.calibration)}; raise calibration.num_tokens or "
            "lower calibration.sequence_tokens"
        )
    wholes = {(group, kind): Producer.of(statistics[group, kind]) for group in range(len(job.groups)) for kind in KINDS}
    gaussians = _gaussians(wholes, seed=job.config.method.seed)
    folds = _folds(texts.calibration)
    progress.stage("measure how unusual text looks", sum(map(len, folds)))
    measured: list[dict[Key, Tensor]] = []
    for fold in folds:
        traces = [trace(models.producer(), ids, capture={"kv"}) for ids in fold]
        measured += _fold_novelty(job, wholes, gaussians, traces)
        progress.advance(len(fold))
    limits = joint_limits(measured, rate=job.config.method.guard_rate)
    return {
        key: RowGuard(whole.directions(gaussians[key]).to(MATRIX_DTYPE).contiguous(), limits[key])
        for key, whole in wholes.items()
    }


def attach(transforms: Sequence[GroupTransform | None], guards: Guards) -> tuple[GroupTransform | None, ...]:
    """The transforms with the guards of their groups."""

    def guarded(rows: RowTransform, key: Key) -> RowTransform:
        return replace(rows, guard=guards[key])

    return tuple(
        None
        if found is None
        else replace(
            found, keys=guarded(found.keys, (group, "group_k")), values=guarded(found.values, (group, "group_v"))
        )
        for group, found in enumerate(transforms)
    )


def joint_limits(measured: Sequence[Mapping[Key, Tensor]], *, rate: float) -> dict[Key, float]:
    """Limits that the blocks of a new sequence exceed anywhere with probability `rate`.

    Args:
        measured: of each of two sequences or more, the novelty of its tokens by group and kind.
    """
    single = {
        key: predictive_limit([worst_block(sequence[key]) for sequence in measured], rate=rate) for key in measured[0]
    }
    groups = sorted({group for group, _ in single})
    worst = [
        max(
            worst_block(torch.stack([sequence[group, kind] / single[group, kind] for kind in KINDS]).amax(0))
            for group in groups
        )
        for sequence in measured
    ]
    factor = predictive_limit(worst, rate=rate)
    return {key: limit * factor for key, limit in single.items()}


def worst_block(novelty_T: Tensor) -> float:
    """Largest mean over the tokens of a whole block, or the mean of a sequence that is shorter than one."""
    size = min(BLOCK_TOKENS, len(novelty_T))
    return float(novelty_T[: len(novelty_T) // size * size].reshape(-1, size).mean(1).max())


def predictive_limit(values: Sequence[float], *, rate: float) -> float:
    """What a new value exceeds with probability `rate`, the logarithm of two values or more being normal."""
    logs = torch.tensor(values, dtype=torch.float64).clamp_min(torch.finfo(torch.float32).tiny).log()
    deviation = float(logs.var() * (1 + 1 / len(logs))) ** 0.5
    return math.exp(float(logs.mean()) + student_quantile(1 - rate, len(logs) - 1) * deviation)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution by the expansion of Cornish and Fisher.

    Within 2 % of the exact value for six degrees and more; for fewer it is too small by up to a half.
    """
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _gaussians(wholes: Mapping[Key, Producer], *, seed: int) -> dict[Key, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(len(whole.mean_I), NUM_DIRECTIONS, dtype=torch.float64, generator=generator)
        for key, whole in wholes.items()
    }


def _folds(sequences: Ids) -> list[Ids]:
    """Neighbouring sequences, in `NUM_FOLDS` parts of nearly equal size; the first few of each."""
    number = min(NUM_FOLDS, len(sequences))
    edges = [len(sequences) * fold // number for fold in range(number + 1)]
    return [sequences[start:stop][:MAX_FOLD_SEQUENCES] for start, stop in pairwise(edges)]


def _fold_novelty(
    job: Job,
    wholes: Mapping[Key, Producer],
    gaussians: Mapping[Key, Tensor],
    traces: Sequence[ModelTrace],
) -> list[dict[Key, Tensor]]:
    """Novelty of the tokens of each sequence, under the moments of all text but these sequences."""
    found: list[dict[Key, Tensor]] = [{} for _ in traces]
    for key, whole in wholes.items():
        rows = [_rows(job, traced, key)[NUM_SINK_TOKENS:].double() for traced in traces]
        rest = whole.without(torch.cat(rows))
        directions_IQ = rest.directions(gaussians[key])
        for sequence, rows_TI in zip(found, rows, strict=True):
            sequence[key] = ((rows_TI - rest.mean_I) @ directions_IQ).square().sum(1)
    return found


def _rows(job: Job, traced: ModelTrace, key: Key) -> Tensor:
    group, kind = key
    layers = traced.k_TF if kind == "group_k" else traced.v_TF
    return torch.cat([layers[layer] for layer in job.source_layers(group)], dim=1)
