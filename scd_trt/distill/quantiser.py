"""The scalar quantiser of components and its distortion for each width, of a Gaussian source or measured on samples.

Shapes: C components, N samples of each, K trial loadings.

Uniform, with midpoints. For w bits, loading g and a component of mean 0 and standard deviation s:

    step = 2 g s / 2**w,   level = clamp(floor(x / step) + 2**(w-1), 0, 2**w - 1),   x ~ (level + 1/2 - 2**(w-1)) * step

*Normalised distortion* D(w) is mean squared error over variance at the best g; D(0) = 1. A small g clips the tails, a
large one makes the step coarse. For a Gaussian source this is the quantiser with equal spacing of J. Max, "Quantizing
for Minimum Distortion", IRE Transactions on Information Theory 6 (1960), table II.

A Gaussian's best loading is too tight for what is quantised here. Components have tails (kurtosis 3 to 5), and the tokens
out there are those that attention reads most: clipping them costs far more than its share of the squared error says. So the
range may be widened by a factor, the *headroom*, at a stated price in D (docs/method.md has what it gains).

Both tables come from one formula: with the partial moments m_k(t) = E[x^k; x < t] of a source, a cell [a, b) with
midpoint y adds `dm_2 - 2 y dm_1 + y^2 dm_0`, d the difference between b and a. For a Gaussian these are closed forms,
for samples prefix sums over the sorted values, so that no trial touches the samples again.

Deliberately not here: quantising itself (steps and midpoints are folded into the maps), who gets how many bits
(`rate_distortion`). Errors: `ValueError` for arguments that are wrong by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scd_trt.bit_packing import UNITS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WIDTHS = (0, *sorted(UNITS))
"""All widths, narrowest first: 0 2 3 4 6 8."""

MAX_HEADROOM = 2.0
"""Beyond, 2 bits gain nothing over none."""

_NUM_TRIALS = 33
"""Loadings tried in each round of the search; every round narrows the interval sixteenfold."""


@dataclass(frozen=True)
class DistortionTable:
    """Normalised distortion of each width at its best loading.

    Attributes:
        widths: 0 first, ascending.
        distortion: mean squared error over variance; 1 for width 0, falling.
        loading: half the quantiser's range in standard deviations; 0 for width 0.
    """

    widths: tuple[int, ...]
    distortion: tuple[float, ...]
    loading: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.widths) == len(self.distortion) == len(self.loading):
            raise ValueError(
                f"{len(self.widths)} widths, {len(self.distortion)} distortions, {len(self.loading)} loadings"
            )
        _check_widths(self.widths)
        if self.distortion[0] != 1.0 or self.distortion[-1] < 0 or any(a <= b for a, b in pairwise(self.distortion)):
            raise ValueError(f"distortions {self.distortion} of widths {self.widths}; expected 1.0, then falling")

    def of(self, widths: Ints) -> Floats:
        """Distortion of each of these widths."""
        return np.array(self.distortion)[np.searchsorted(self.widths, widths)]

    def steps(self, widths_S: Tensor, deviation_S: Tensor) -> Tensor:
        """Steps of components of these widths and standard deviations, float64."""
        loading_S = torch.tensor(
            [self.loading[self.widths.index(int(width))] for width in widths_S], dtype=torch.float64
        )
        return 2 * loading_S * deviation_S / torch.exp2(widths_S.double())


@lru_cache
def gaussian_table(widths: tuple[int, ...] = WIDTHS, *, headroom: float = 1.0) -> DistortionTable:
    """Distortion of a Gaussian source, at loadings found by numerical minimisation of the exact integral.

    Args:
        headroom: factor on the best loadings, at least 1.
    """
    _check_widths(widths)
    if not 1.0 <= headroom <= MAX_HEADROOM:
        raise ValueError(f"headroom {headroom}; expected 1 to {MAX_HEADROOM:g}")
    best = _best_table(widths, _gaussian_moments, largest_loading=8.0)
    if headroom == 1.0:
        return best
    loading = tuple(headroom * value for value in best.loading)
    errors = [
        float(_distortion(_gaussian_moments, width, np.array([value]))[0])
        for width, value in zip(widths[1:], loading[1:], strict=True)
    ]
    return DistortionTable(widths, (1.0, *errors), loading)


def measured_table(samples_NC: Tensor, widths: tuple[int, ...] = WIDTHS) -> DistortionTable:
    """Distortion measured on samples, at the loadings that are best on average over components.

    Each component is centred and divided by its own standard deviation; components without spread are left out.

    Args:
        samples_NC: `[N, C]`; a million values in all are plenty.
    Raises:
        ValueError: no component has any spread, a value is not finite, or there are so few different values that a
            wider quantiser gains nothing.
    """
    _check_widths(widths)
    values_NC = samples_NC.double()
    if values_NC.dim() != 2 or not bool(values_NC.isfinite().all()):
        raise ValueError(f"samples {tuple(samples_NC.shape)} must be [N, C] and finite")
    values_NC = values_NC - values_NC.mean(0)
    deviation_C = values_NC.square().mean(0).sqrt()
    # what rounding leaves of a constant component is no spread
    spread_C = deviation_C > samples_NC.double().abs().amax(0) * 1e-12
    if not bool(spread_C.any()):
        raise ValueError(f"none of the {samples_NC.shape[1]} components has any spread over {len(samples_NC)} samples")
    ordered = np.sort((values_NC[:, spread_C] / deviation_C[spread_C]).flatten().numpy())
    peak = float(max(-ordered[0], ordered[-1]))
    return _best_table(widths, _sample_moments(ordered), largest_loading=max(8.0, peak))


_Moments = Callable[[Floats], tuple[Floats, Floats, Floats]]
"""For thresholds t: `P(x < t)`, `E[x; x < t]`, `E[x^2; x < t]` of a source."""


def _gaussian_moments(thresholds: Floats) -> tuple[Floats, Floats, Floats]:
    below = torch.special.ndtr(torch.from_numpy(thresholds)).numpy()
    density = np.exp(-0.5 * thresholds**2) / np.sqrt(2 * np.pi)
    with np.errstate(invalid="ignore"):
        tail = np.where(np.isinf(thresholds), 0.0, thresholds * density)
    return below, -density, below - tail


def _sample_moments(ordered: Floats) -> _Moments:
    sums = [np.concatenate([[0.0], np.cumsum(ordered**power)]) / len(ordered) for power in range(3)]

    def moments(thresholds: Floats) -> tuple[Floats, Floats, Floats]:
        below = np.searchsorted(ordered, thresholds)
        return sums[0][below], sums[1][below], sums[2][below]

    return moments


def _distortion(moments: _Moments, width: int, loading_K: Floats) -> Floats:
    """Mean squared error of the uniform quantiser for each loading."""
    num_levels = 1 << width
    offsets = np.arange(num_levels + 1) - num_levels / 2
    steps_K1 = (2 * loading_K / num_levels)[:, None]
    thresholds = steps_K1 * offsets
    thresholds[:, 0], thresholds[:, -1] = -inf, inf
    m0, m1, m2 = (np.diff(moment, axis=1) for moment in moments(thresholds))
    midpoints = steps_K1 * (offsets[:-1] + 0.5)
    error_K: Floats = np.sum(m2 - 2 * midpoints * m1 + midpoints**2 * m0, axis=1)
    return error_K


def _best_table(widths: tuple[int, ...], moments: _Moments, *, largest_loading: float) -> DistortionTable:
    best = [_best_loading(moments, width, largest_loading) for width in widths[1:]]
    distortion, loading = zip((1.0, 0.0), *best, strict=True)
    return DistortionTable(widths, distortion, loading)


def _best_loading(moments: _Moments, width: int, largest: float) -> tuple[float, float]:
    """Least distortion and its loading: a geometric grid, narrowed to the neighbours of its best point."""
    low, high = 0.25, largest
    # 1e-7 in the loading, at a minimum, is 1e-14 in the distortion
    while high / low > 1 + 1e-7:
        trials_K = np.geomspace(low, high, _NUM_TRIALS)
        errors_K = _distortion(moments, width, trials_K)
        best = int(errors_K.argmin())
        low, high = float(trials_K[max(best - 1, 0)]), float(trials_K[min(best + 1, _NUM_TRIALS - 1)])
    return float(errors_K[best]), float(trials_K[best])


def _check_widths(widths: tuple[int, ...]) -> None:
    if widths[:1] != (0,) or list(widths) != sorted(set(widths)) or len(widths) < 2 or not set(widths) <= set(WIDTHS):
        raise ValueError(f"widths {widths}; expected 0 and at least one more of {WIDTHS[1:]}, ascending")
