"""How many bits each component gets: one Lagrangian over all components, in whole packing units.

Shapes: C components, S sent components (those with bits), W widths, G groups, E boundaries tried, B bytes.
Units: `bits` are bits per token; distortion is in whatever unit the weighted variances have (METHOD, section 2.3: with
half the diagonal Fisher as weight, nats of KL divergence).

Minimise `sum_c s_c D(b_c)` subject to `sum_c b_c <= budget`, or the reverse, where `s_c` is the weighted variance of
component c (the predicted loss of not sending it) and D the quantiser's distortion (`quantiser`). An optimal solution
never gives fewer bits to a larger s, so it is told by its *boundaries* e_w = number of components with at least w bits:

    distortion = sum_c s_c - sum_w (D(w') - D(w)) * (sum of the e_w largest s),   bits = sum_w (w - w') e_w

with w' the next narrower width.

1. Lagrangian: the lower convex hull of D turns every component into increments of falling gain per bit; taking all of
   gain above one slope is optimal (Everett 1963; Shoham and Gersho 1988), exact up to the one increment that is cut.
2. Whole packing units (`bit_packing.UNITS`): a dynamic programme over boundaries and bytes, restricted to boundaries
   within `_WINDOW` of the Lagrangian's. Rounding to units moves a boundary by less than a unit (8), so a solution always
   lies inside; what units cost is a few increments at the margin. `method="exact"` runs the same programme without
   the restriction: the optimum, for at most `MAX_EXACT` components.
3. Groups are packed separately, so each needs whole units, but share the budget: the programmes of all groups are
   joined by one more (min, +) convolution over their bytes.

Errors: `RateDistortionError` where the user's limit cannot be met; `ValueError` for arguments that are wrong by themselves.
Deliberately not here: which transform made the components, and whether predicted distortion equals measured loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from scd_trt.bit_packing import UNITS, BitLayout
from scd_trt.config import ScdError
from scd_trt.distill.quantiser import DistortionTable, Floats, Ints

Method = Literal["lagrangian", "exact"]

MAX_EXACT = 256
"""Most components of one group that `method="exact"` takes (time and memory grow with their cube and square)."""

_WINDOW = 16
"""Boundaries tried on each side of the Lagrangian's: twice the largest unit, so that neighbours can move together."""

_ROUNDING = 1e-12
"""Share of the total variance by which a distortion limit may be exceeded: the rounding error of sums over components."""


class RateDistortionError(ScdError):
    """No allocation meets the limit."""


@dataclass(frozen=True)
class Allocation:
    """Bits of the components of one group.

    Attributes:
        widths_C: int64, bits of each component, in the caller's order.
        order_C: int64, permutation of the components by falling width, then falling variance, then index: the order in
            which they are packed; those without bits come last.
        total_bits: bits per token, whole bytes.
        predicted_distortion: `sum_c s_c D(b_c)`.
        slope: distortion per bit that the next increment along the hull would save, the same for all groups of one
            solution; 0 where none is left.
    """

    widths_C: Tensor
    order_C: Tensor
    total_bits: int
    predicted_distortion: float
    slope: float

    @property
    def sent_S(self) -> Tensor:
        """Components that are sent, in packing order."""
        return self.order_C[: int((self.widths_C > 0).sum())]

    @cached_property
    def layout(self) -> BitLayout:
        """Layout of the packed components `sent_S`."""
        return BitLayout.from_bits(self.widths_C[self.sent_S].tolist())


def allocate(
    weighted_variance_C: Tensor,
    *,
    budget_bits: int | None = None,
    max_distortion: float | None = None,
    table: DistortionTable,
    method: Method = "lagrangian",
) -> Allocation:
    """Allocate bits to one group; see `allocate_groups`."""
    (allocation,) = allocate_groups(
        [weighted_variance_C], budget_bits=budget_bits, max_distortion=max_distortion, table=table, method=method
    )
    return allocation


def allocate_groups(
    weighted_variances: Sequence[Tensor],
    *,
    budget_bits: int | None = None,
    max_distortion: float | None = None,
    table: DistortionTable,
    max_sent: Sequence[int] | None = None,
    method: Method = "lagrangian",
) -> tuple[Allocation, ...]:
    """Allocate bits to several groups under one Lagrangian.

    Args:
        weighted_variances: for each group `[C]`, finite and not negative.
        budget_bits: least distortion with at most these bits per token, over all groups; or
        max_distortion: least bits with at most this distortion, summed over all groups. Give exactly one of the two.
        table: distortion of each width.
        max_sent: for each group the most components that may get bits, those of the largest variance; default: all.
        method: see the module docstring.
    Returns:
        one allocation for each group.
    Raises:
        RateDistortionError: `max_distortion` is below what the largest width reaches.
        ValueError: both limits or none, a negative one, or variances that are not finite, negative or not `[C]`.
    """
    limits = [None] * len(weighted_variances) if max_sent is None else max_sent
    groups = [
        _Group.of(variance_C, index, max_sent=limit)
        for index, (variance_C, limit) in enumerate(zip(weighted_variances, limits, strict=True))
    ]
    if not groups:
        raise ValueError("no groups to allocate bits to")
    increments = _Increments.of(groups, table)
    if budget_bits is not None and max_distortion is None and budget_bits >= 0:
        num_taken = increments.num_within_bits(budget_bits)
        front = _joint_front(groups, increments.boundaries(num_taken), table, method)
        chosen = front.best_within_bytes(budget_bits // 8)
    elif max_distortion is not None and budget_bits is None and max_distortion >= 0:
        total = sum(group.total for group in groups)
        num_taken = increments.num_within_distortion(max_distortion, total)
        front = _joint_front(groups, increments.boundaries(num_taken), table, method)
        chosen = front.cheapest_within_distortion(max_distortion, total)
    else:
        raise ValueError(
            f"budget_bits {budget_bits} and max_distortion {max_distortion}: give exactly one of the two, not negative"
        )
    slope = increments.gain_after(num_taken)
    return tuple(
        group.allocation(counts, table, slope) for group, counts in zip(groups, front.counts(chosen), strict=True)
    )


def frontier(
    weighted_variance_C: Tensor, slopes: Sequence[float], *, table: DistortionTable
) -> list[tuple[int, float]]:
    """Rate-distortion points `(bits, distortion)` of one group: for each slope the least `distortion + slope * bits`.

    At equal slope the points of several groups add up to the point of all of them.

    Raises:
        ValueError: a slope that is negative or not finite, or variances as in `allocate_groups`.
    """
    groups = [_Group.of(weighted_variance_C, 0)]
    increments = _Increments.of(groups, table)
    points = []
    for slope in slopes:
        if not 0 <= slope < inf:
            raise ValueError(f"slope {slope} must be finite and not negative")
        num_taken = increments.num_above(slope)
        front = _joint_front(groups, increments.boundaries(num_taken), table, "lagrangian")
        points.append(front.tangent(slope))
    return points


# ------------------------------------------------------------------------------------------------------- Lagrangian


@dataclass(frozen=True)
class _Group:
    """Variances of one group in falling order, and what leads back to the caller's order.

    Those of components that may get no bits are left out of `falling_C`; `unsent` is their sum.
    """

    falling_C: Floats
    order_C: Ints
    sums: Floats
    unsent: float = 0.0

    @classmethod
    def of(cls, variance_C: Tensor, index: int, *, max_sent: int | None = None) -> _Group:
        values_C = variance_C.detach().double().cpu().numpy()
        if values_C.ndim != 1 or not np.isfinite(values_C).all() or (values_C < 0).any():
            raise ValueError(f"group {index}: weighted variances {values_C.shape} must be [C], finite and not negative")
        order_C = np.argsort(-values_C, kind="stable")
        falling_C, unsent_C = np.split(values_C[order_C], [len(order_C) if max_sent is None else max_sent])
        return cls(falling_C, order_C, np.concatenate([[0.0], np.cumsum(falling_C)]), float(unsent_C.sum()))

    @property
    def total(self) -> float:
        return float(self.sums[-1]) + self.unsent

    def allocation(self, counts: Sequence[tuple[int, int]], table: DistortionTable, slope: float) -> Allocation:
        """Give the first components the widest width, and so on; `counts` are `(width, number)`, widest first."""
        sent = np.repeat([width for width, _ in counts], [count for _, count in counts])
        widths_C = np.zeros(len(self.order_C), dtype=np.int64)
        widths_C[self.order_C[: len(sent)]] = sent
        ordered = np.concatenate([sent, np.zeros(len(self.falling_C) - len(sent), dtype=np.int64)])
        return Allocation(
            widths_C=torch.from_numpy(widths_C),
            order_C=torch.from_numpy(self.order_C),
            total_bits=int(sent.sum()),
            predicted_distortion=float(np.sum(self.falling_C * table.of(ordered))) + self.unsent,
            slope=slope,
        )


@dataclass(frozen=True)
class _Increments:
    """Steps along the hull of all components of all groups, by falling gain per bit; those that gain nothing left out.

    A step raises one component of `group` to width number `width` of the table; `bits_after`, `saved_after` are sums
    over all steps up to and including it.
    """

    gain: Floats
    group: Ints
    width: Ints
    bits_after: Ints
    saved_after: Floats
    shape: tuple[int, int]

    @classmethod
    def of(cls, groups: Sequence[_Group], table: DistortionTable) -> _Increments:
        hull = _hull(table)
        bits = np.array([table.widths[b] - table.widths[a] for a, b in pairwise(hull)])
        saved = np.array([table.distortion[a] - table.distortion[b] for a, b in pairwise(hull)])
        variance = np.concatenate([group.falling_C for group in groups])
        owner = np.repeat(np.arange(len(groups)), [len(group.falling_C) for group in groups])
        gain = (variance[:, None] * (saved / bits)).ravel()
        order = np.argsort(-gain, kind="stable")[: np.count_nonzero(gain)]
        component, step = np.divmod(order, len(bits))
        return cls(
            gain=gain[order],
            group=owner[component],
            width=np.array(hull[1:])[step],
            bits_after=np.cumsum(bits[step]),
            saved_after=np.cumsum(variance[component] * saved[step]),
            shape=(len(groups), len(table.widths)),
        )

    def num_within_bits(self, budget_bits: int) -> int:
        return int(np.searchsorted(self.bits_after, budget_bits, side="right"))

    def num_within_distortion(self, limit: float, total: float) -> int:
        """Fewest steps after which at most `limit` of `total` is left; all of them where that is not enough."""
        if total <= limit:
            return 0
        return min(int(np.searchsorted(self.saved_after, total - limit)) + 1, len(self.gain))

    def gain_after(self, num_taken: int) -> float:
        return float(self.gain[num_taken]) if num_taken < len(self.gain) else 0.0

    def num_above(self, slope: float) -> int:
        return int(np.searchsorted(-self.gain, -slope))

    def boundaries(self, num_taken: int) -> Ints:
        """`[G, W]`: number of components of each group that have at least each width, after these steps."""
        steps = np.zeros(self.shape, dtype=np.int64)
        np.add.at(steps, (self.group[:num_taken], self.width[:num_taken]), 1)
        # a width off the hull is passed over: as many components have it as have the next wider one
        for narrower in range(self.shape[1] - 2, 0, -1):
            steps[:, narrower] = np.maximum(steps[:, narrower], steps[:, narrower + 1])
        return steps


def _hull(table: DistortionTable) -> list[int]:
    """Indices of the widths on the lower convex hull of `(width, distortion)`."""
    hull: list[int] = []
    for index in range(len(table.widths)):
        while len(hull) > 1 and _slope(table, hull[-2], hull[-1]) <= _slope(table, hull[-1], index):
            hull.pop()
        hull.append(index)
    return hull


def _slope(table: DistortionTable, a: int, b: int) -> float:
    return (table.distortion[a] - table.distortion[b]) / (table.widths[b] - table.widths[a])


# ------------------------------------------------------------------------------- dynamic programme over whole units


@dataclass(frozen=True)
class _Stage:
    """One width: which numbers of components with at least this width are tried, and the range of bytes so far."""

    width: int
    distortion: float
    low: int
    high: int
    first_byte: int
    num_bytes: int


@dataclass(frozen=True)
class _GroupFront:
    """Least distortion of one group for each number of bytes from `first_byte` on; infinite where none is possible."""

    first_byte: int
    distortion_B: Floats
    last_B: Ints
    stages: tuple[_Stage, ...]
    choices: tuple[Ints, ...]

    def counts(self, byte: int) -> list[tuple[int, int]]:
        """`(width, number of components)` of the solution with this many bytes, widest first."""
        end = int(self.last_B[byte - self.first_byte])
        counts = []
        for stage, choice in zip(reversed(self.stages), reversed(self.choices), strict=True):
            unit = UNITS[stage.width]
            num_units = int(choice[end - stage.low, byte - stage.first_byte])
            counts.append((stage.width, num_units * unit.num_components))
            end, byte = end - num_units * unit.num_components, byte - num_units * unit.num_bytes
        return counts[::-1]


@dataclass(frozen=True)
class _JointFront:
    """The same over all groups; `taken` says for each group how many of the bytes are its own."""

    first_byte: int
    distortion_B: Floats
    groups: tuple[_GroupFront, ...]
    taken: tuple[Ints, ...]

    def best_within_bytes(self, num_bytes: int) -> int:
        within = self.distortion_B[: max(num_bytes - self.first_byte + 1, 0)]
        return self.first_byte + int(within.argmin())

    def cheapest_within_distortion(self, limit: float, total: float) -> int:
        within = np.flatnonzero(self.distortion_B <= limit + _ROUNDING * total)
        if not len(within):
            raise RateDistortionError(
                f"distortion {limit:.4g} cannot be reached: with the largest width everywhere it is "
                f"{self.distortion_B.min():.4g} of {total:.4g}; allow more"
            )
        return self.first_byte + int(within[0])

    def tangent(self, slope: float) -> tuple[int, float]:
        bits_B = 8 * (self.first_byte + np.arange(len(self.distortion_B)))
        best = int((self.distortion_B + slope * bits_B).argmin())
        return int(bits_B[best]), float(self.distortion_B[best])

    def counts(self, byte: int) -> list[list[tuple[int, int]]]:
        index, counts = byte - self.first_byte, []
        for group, taken in zip(reversed(self.groups), reversed(self.taken), strict=True):
            own = int(taken[index])
            counts.append(group.counts(group.first_byte + own))
            index -= own
        return counts[::-1]


def _joint_front(groups: Sequence[_Group], centres_GW: Ints, table: DistortionTable, method: Method) -> _JointFront:
    window = _WINDOW
    if method == "exact":
        window = max(len(group.falling_C) for group in groups)
        if window > MAX_EXACT:
            raise ValueError(f"{window} components in one group; the exact method takes at most {MAX_EXACT}")
    fronts = [
        _group_front(group, _stages(len(group.falling_C), centre_W, table, window))
        for group, centre_W in zip(groups, centres_GW, strict=True)
    ]
    joint_B, taken = np.zeros(1), []
    for front in fronts:
        joint_B, own_B = _min_plus(joint_B, front.distortion_B)
        taken.append(own_B)
    return _JointFront(sum(front.first_byte for front in fronts), joint_B, tuple(fronts), tuple(taken))


def _min_plus(a: Floats, b: Floats) -> tuple[Floats, Ints]:
    """`c[k] = min_j a[k - j] + b[j]`, and the j that attains it."""
    best = np.full(len(a) + len(b) - 1, inf)
    chosen = np.zeros(len(best), dtype=np.int64)
    for j in np.flatnonzero(np.isfinite(b)):
        _improve(best[j : j + len(a)], a + b[j], chosen[j : j + len(a)], int(j))
    return best, chosen


def _improve(best: Floats, trial: Floats, chosen: Ints, choice: int) -> None:
    better = trial < best
    best[better] = trial[better]
    chosen[better] = choice


def _stages(num_components: int, centre_W: Ints, table: DistortionTable, window: int) -> tuple[_Stage, ...]:
    stages: list[_Stage] = []
    low_bits, high_bits, low, high = 0, 0, 0, 0
    for index in range(len(table.widths) - 1, 0, -1):
        width = table.widths[index]
        next_low, next_high = max(int(centre_W[index]) - window, 0), min(int(centre_W[index]) + window, num_components)
        # all boundaries at their lowest is the least number of bits so far, all at their highest the largest
        low_bits, high_bits = low_bits + width * (next_low - low), high_bits + width * (next_high - high)
        low, high = next_low, next_high
        first_byte = low_bits // 8
        stages.append(
            _Stage(width, table.distortion[index], low, high, first_byte, -(-high_bits // 8) - first_byte + 1)
        )
    return tuple(stages)


def _group_front(group: _Group, stages: tuple[_Stage, ...]) -> _GroupFront:
    start = _Stage(width=0, distortion=0.0, low=0, high=0, first_byte=0, num_bytes=1)
    cost_EB, choices = np.zeros((1, 1)), []
    for before, stage in pairwise((start, *stages)):
        cost_EB, choice_EB = _advance(group, cost_EB, before, stage)
        choices.append(choice_EB)
    last = stages[-1]
    # components past the last boundary are not sent
    cost_EB = cost_EB + (group.total - group.sums[last.low : last.high + 1])[:, None]
    ends_B = cost_EB.argmin(0)
    return _GroupFront(
        first_byte=last.first_byte,
        distortion_B=cost_EB[ends_B, np.arange(last.num_bytes)],
        last_B=last.low + ends_B,
        stages=stages,
        choices=tuple(choices),
    )


def _advance(group: _Group, cost_EB: Floats, before: _Stage, stage: _Stage) -> tuple[Floats, Ints]:
    """Try every number of units of one width behind every boundary of the wider widths."""
    unit = UNITS[stage.width]
    next_EB = np.full((stage.high - stage.low + 1, stage.num_bytes), inf)
    choice_EB = np.zeros(next_EB.shape, dtype=np.int64)
    least = max(-(-(stage.low - before.high) // unit.num_components), 0)
    most = (stage.high - before.low) // unit.num_components
    for num_units in range(least, most + 1):
        added = num_units * unit.num_components
        ends = np.arange(max(stage.low, before.low + added), min(stage.high, before.high + added) + 1)
        gained = stage.distortion * (group.sums[ends] - group.sums[ends - added])
        trial_EB = cost_EB[ends - added - before.low] + gained[:, None]
        shift = before.first_byte + num_units * unit.num_bytes - stage.first_byte
        # cut columns hold no possible solution: `_stages` bounds the bytes of all that are
        trial_EB = trial_EB[:, max(-shift, 0) : max(stage.num_bytes - shift, 0)]
        rows, first = slice(ends[0] - stage.low, ends[-1] - stage.low + 1), max(shift, 0)
        columns = slice(first, first + trial_EB.shape[1])
        _improve(next_EB[rows, columns], trial_EB, choice_EB[rows, columns], num_units)
    return next_EB, choice_EB
