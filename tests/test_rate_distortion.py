"""Allocations are optimal, keep their limits, and do not depend on order or units."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scd_trt.bit_packing import UNITS, pack, unpack
from scd_trt.distill.quantiser import WIDTHS, DistortionTable, gaussian_table
from scd_trt.distill.rate_distortion import MAX_EXACT, RateDistortionError, allocate, allocate_groups, frontier

TABLE = gaussian_table()
POWER_LAW = torch.arange(1, 12_001, dtype=torch.float64) ** -1.5
METHODS = ("lagrangian", "exact")

variances = st.lists(
    st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1e6, allow_subnormal=False)), min_size=1, max_size=60
).map(lambda values: torch.tensor(values, dtype=torch.float64))


def _distortion(variance_C, widths_C, table=TABLE):
    of = dict(zip(table.widths, table.distortion, strict=True))
    return sum(s * of[b] for s, b in zip(variance_C.tolist(), widths_C.tolist(), strict=True))


def _is_whole(widths):
    return all(widths.count(width) % unit.num_components == 0 for width, unit in UNITS.items())


def _brute_force(variance_C):
    """Every assignment of widths to at most five components, as (bits, distortion)."""
    of = dict(zip(TABLE.widths, TABLE.distortion, strict=True))
    rows = [widths for widths in itertools.product(WIDTHS, repeat=len(variance_C)) if _is_whole(widths)]
    return [(sum(row), sum(s * of[b] for s, b in zip(variance_C.tolist(), row, strict=True))) for row in rows]


def _brute_force_counts(variance_C):
    """Every whole number of units of each width, widest first on the largest variances, as (bits, distortion)."""
    sums = np.concatenate([[0.0], np.cumsum(variance_C.sort(descending=True).values.numpy())])
    ranges = [range(0, len(variance_C) + 1, UNITS[width].num_components) for width in WIDTHS[:0:-1]]
    points = []
    for counts in itertools.product(*ranges):
        if sum(counts) <= len(variance_C):
            ends = np.concatenate([[0], np.cumsum(counts)])
            saved = sum((1 - TABLE.distortion[5 - i]) * (sums[ends[i + 1]] - sums[ends[i]]) for i in range(5))
            points.append((sum(w * n for w, n in zip(WIDTHS[:0:-1], counts, strict=True)), sums[-1] - saved))
    return points


@pytest.mark.parametrize("method", METHODS)
@given(variance_C=variances.filter(lambda v: len(v) <= 4), budget_bits=st.integers(0, 40))
def test_optimal_over_all_assignments(method, variance_C, budget_bits):
    best = min(distortion for bits, distortion in _brute_force(variance_C) if bits <= budget_bits)
    found = allocate(variance_C, budget_bits=budget_bits, table=TABLE, method=method)
    # sums of the same terms in another order
    assert found.predicted_distortion == pytest.approx(best, rel=1e-9, abs=1e-12 * float(variance_C.sum()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_components", [9, 21])
def test_optimal_over_all_unit_counts(method, num_components):
    variance_C = torch.rand(num_components, generator=torch.Generator().manual_seed(3), dtype=torch.float64) ** 4
    points = _brute_force_counts(variance_C)
    for budget_bits in range(0, 8 * num_components + 9, 8):
        best = min(distortion for bits, distortion in points if bits <= budget_bits)
        found = allocate(variance_C, budget_bits=budget_bits, table=TABLE, method=method)
        assert found.predicted_distortion == pytest.approx(best, rel=1e-9)
        # the reverse: nothing cheaper reaches this distortion
        fewest = min(bits for bits, distortion in points if distortion <= best * (1 + 1e-9))
        reverse = allocate(variance_C, max_distortion=best * (1 + 1e-9), table=TABLE, method=method)
        assert reverse.total_bits == fewest


@given(variance_C=variances, budget_bits=st.integers(0, 500), table=st.sampled_from([TABLE, gaussian_table((0, 3, 8))]))
def test_an_allocation_keeps_its_promises(variance_C, budget_bits, table):
    found = allocate(variance_C, budget_bits=budget_bits, table=table)
    assert found.total_bits == int(found.widths_C.sum()) <= budget_bits
    assert _is_whole(found.widths_C.tolist())
    assert found.predicted_distortion == pytest.approx(_distortion(variance_C, found.widths_C, table), rel=1e-12)
    assert found.layout.bytes_per_token * 8 == found.total_bits
    assert found.layout.num_components == len(found.sent_S) == int((found.widths_C > 0).sum())
    ordered = [
        (-width, -variance, index)
        for width, variance, index in zip(
            found.widths_C[found.order_C].tolist(),
            variance_C[found.order_C].tolist(),
            found.order_C.tolist(),
            strict=True,
        )
    ]
    assert ordered == sorted(ordered)
    assert sorted(found.order_C.tolist()) == list(range(len(variance_C)))


@given(variance_C=variances, share=st.floats(1e-4, 1.2))
def test_a_distortion_limit_is_kept_as_cheaply_as_the_exact_method_can(variance_C, share):
    limit = share * float(variance_C.sum())
    found = allocate(variance_C, max_distortion=limit, table=TABLE)
    exact = allocate(variance_C, max_distortion=limit, table=TABLE, method="exact")
    # the documented rounding error of sums
    assert found.predicted_distortion <= limit + 1e-11 * float(variance_C.sum())
    assert exact.total_bits == found.total_bits


@given(variance_C=variances, budget_bits=st.integers(0, 500))
def test_the_window_loses_nothing(variance_C, budget_bits):
    found = allocate(variance_C, budget_bits=budget_bits, table=TABLE)
    exact = allocate(variance_C, budget_bits=budget_bits, table=TABLE, method="exact")
    assert found.predicted_distortion == pytest.approx(
        exact.predicted_distortion, rel=1e-9, abs=1e-12 * float(variance_C.sum())
    )


def test_more_bits_never_hurt():
    variance_C = POWER_LAW[:300]
    found = [allocate(variance_C, budget_bits=bits, table=TABLE) for bits in range(0, 2500, 50)]
    distortions = [one.predicted_distortion for one in found]
    slopes = [one.slope for one in found]
    assert distortions == sorted(distortions, reverse=True)
    assert slopes == sorted(slopes, reverse=True)
    assert distortions[-1] == pytest.approx(TABLE.distortion[-1] * float(variance_C.sum()))
    assert slopes[-1] == 0.0


@given(variance_C=variances, budget_bits=st.integers(0, 300), seed=st.integers(0, 1000))
def test_order_and_unit_do_not_matter(variance_C, budget_bits, seed):
    found = allocate(variance_C, budget_bits=budget_bits, table=TABLE)
    order_C = torch.randperm(len(variance_C), generator=torch.Generator().manual_seed(seed))
    # a power of two scales without rounding
    other = allocate(variance_C[order_C] * 0.125, budget_bits=budget_bits, table=TABLE)
    assert other.layout == found.layout
    assert other.predicted_distortion == pytest.approx(found.predicted_distortion * 0.125, rel=1e-12)
    assert torch.equal(variance_C[order_C][other.sent_S], variance_C[found.sent_S])


@pytest.mark.parametrize("budget_bits", [400, 9_600, 19_200, 40_000])
def test_no_allocation_whatever_is_much_better(budget_bits):
    # weak duality: for every slope, min over allocations of (distortion + slope * bits) - slope * budget bounds the
    # optimum from below; without whole units, so this is also what units cost
    found = allocate(POWER_LAW, budget_bits=budget_bits, table=TABLE)
    cost_CW = POWER_LAW[:, None] * torch.tensor(TABLE.distortion) + found.slope * torch.tensor(WIDTHS)
    bound = float(cost_CW.min(dim=1).values.sum()) - found.slope * budget_bits
    # at most a unit's worth of bits is misplaced at the margin
    assert bound <= found.predicted_distortion <= bound + 24 * found.slope
    assert found.predicted_distortion <= 1.01 * bound


def test_variances_that_fit_their_widths_reach_the_closed_form():
    # D(b) = 4^-b and variances 4^2, 4^1, 4^0: water-filling gives 4, 3, 2 bits, and C * geometric mean * 4^-mean bits
    table = DistortionTable((0, 2, 3, 4), (1.0, 4.0**-2, 4.0**-3, 4.0**-4), (0.0, 1.0, 1.0, 1.0))
    variance_C = torch.tensor([16.0, 4.0, 1.0] * 8, dtype=torch.float64)
    found = allocate(variance_C, budget_bits=3 * 24, table=table)
    assert found.widths_C.tolist() == [4, 3, 2] * 8
    assert found.predicted_distortion == pytest.approx(24 * 4.0 * 4.0**-3, rel=1e-12)


def test_high_rate_approaches_water_filling():
    # D(b) = 4^-b; variances spread over eight bits, all within reach of widths 2..8, so that the continuous optimum is
    # C * geometric mean * 4^-mean bits. Widths a step of d bits apart leave every component's distortion spread over a
    # factor 4^d: on average sinh(d ln 2) / (d ln 2) of the optimum, 1.35 for the widest step of two bits.
    table = DistortionTable(WIDTHS, tuple(4.0**-width for width in WIDTHS), (1.0,) * len(WIDTHS))
    variance_C = 4.0 ** torch.linspace(-2.5, 2.5, 4000, dtype=torch.float64)
    bits = 5.0
    closed_form = len(variance_C) * float(variance_C.log().mean().exp()) * 4.0**-bits
    found = allocate(variance_C, budget_bits=int(bits * len(variance_C)), table=table)
    assert 1.0 <= found.predicted_distortion / closed_form <= np.sinh(2 * np.log(2)) / (2 * np.log(2)) + 0.01


@given(parts=st.lists(variances.filter(lambda v: len(v) <= 12), min_size=1, max_size=3), num_bytes=st.integers(0, 20))
def test_groups_share_the_budget_optimally(parts, num_bytes):
    found = allocate_groups(parts, budget_bits=8 * num_bytes + 7, table=TABLE)
    assert sum(one.total_bits for one in found) <= 8 * num_bytes + 7
    # exhaustively: all ways to split the bytes, each group solved on its own
    own = [
        [
            allocate(part, budget_bits=8 * n, table=TABLE, method="exact").predicted_distortion
            for n in range(num_bytes + 1)
        ]
        for part in parts
    ]
    best = min(
        sum(row[n] for row, n in zip(own, split, strict=True))
        for split in itertools.product(range(num_bytes + 1), repeat=len(parts))
        if sum(split) <= num_bytes
    )
    total = sum(float(part.sum()) for part in parts)
    assert sum(one.predicted_distortion for one in found) == pytest.approx(best, rel=1e-9, abs=1e-12 * total)


@given(parts=st.lists(variances.filter(lambda v: len(v) <= 2), min_size=2, max_size=3), num_bytes=st.integers(0, 6))
def test_groups_are_optimal_over_all_assignments(parts, num_bytes):
    """Every assignment of widths to every component of every group, each group in whole units."""
    points = [_brute_force(part) for part in parts]
    best = min(
        sum(distortion for _, distortion in chosen)
        for chosen in itertools.product(*points)
        if sum(bits for bits, _ in chosen) <= 8 * num_bytes
    )
    found = allocate_groups(parts, budget_bits=8 * num_bytes, table=TABLE)
    total = sum(float(part.sum()) for part in parts)
    assert sum(one.predicted_distortion for one in found) == pytest.approx(best, rel=1e-9, abs=1e-12 * total)


@given(parts=st.lists(variances, min_size=1, max_size=5), budget_bits=st.integers(0, 1200))
def test_bits_of_groups_sum_to_the_promised_bytes(parts, budget_bits):
    found = allocate_groups(parts, budget_bits=budget_bits, table=TABLE)
    sizes = [one.layout.bytes_per_token for one in found]
    assert [8 * size for size in sizes] == [one.total_bits for one in found]
    assert [int(one.widths_C.sum()) for one in found] == [one.total_bits for one in found]
    assert 8 * sum(sizes) <= budget_bits
    # what is packed has the promised size, group by group
    for one, size in zip(found, sizes, strict=True):
        assert pack(torch.zeros(3, len(one.sent_S), dtype=torch.uint8), one.layout).shape == (3, size)


def test_groups_have_one_slope():
    groups = [POWER_LAW[:2000] * scale for scale in (10.0, 1.0, 0.1)]
    found = allocate_groups(groups, budget_bits=6000, table=TABLE)
    assert len({one.slope for one in found}) == 1
    alone = [
        allocate(group, budget_bits=one.total_bits, table=TABLE).slope for group, one in zip(groups, found, strict=True)
    ]
    # each group alone, given the bits that it got, is cut within a unit of the common slope: the smallest sends 84
    # components, of which neighbours differ by 2% in variance
    assert alone == pytest.approx([found[0].slope] * 3, rel=0.1)
    reverse = allocate_groups(groups, max_distortion=sum(one.predicted_distortion for one in found), table=TABLE)
    assert sum(one.total_bits for one in reverse) == sum(one.total_bits for one in found)


def test_frontier_is_tangent_at_each_slope():
    slopes = [0.0, 1e-6, 1e-4, 1e-2, 1.0]
    points = frontier(POWER_LAW[:500], slopes, table=TABLE)
    bits = [point[0] for point in points]
    assert bits == sorted(bits, reverse=True)
    assert points[0] == (8 * 500, pytest.approx(TABLE.distortion[-1] * float(POWER_LAW[:500].sum())))
    assert points[-1] == (0, pytest.approx(float(POWER_LAW[:500].sum())))
    for slope, (own_bits, own_distortion) in zip(slopes, points, strict=True):
        for num_bits in range(0, 4000, 40):
            other = allocate(POWER_LAW[:500], budget_bits=num_bits, table=TABLE)
            least = own_distortion + slope * own_bits
            assert least <= other.predicted_distortion + slope * other.total_bits + 1e-12


def test_a_width_above_the_hull_is_not_wanted():
    # three bits gain hardly more than two, so they only ever serve to use up a budget
    table = DistortionTable((0, 2, 3, 4), (1.0, 0.12, 0.119, 0.01), (0.0, 2.0, 2.3, 2.7))
    variance_C = torch.ones(400, dtype=torch.float64)
    found = allocate(variance_C, budget_bits=1200, table=table)
    assert found.widths_C.bincount(minlength=5).tolist() == [0, 0, 200, 0, 200]


def test_allocated_components_pack():
    found = allocate(POWER_LAW[:333], budget_bits=500, table=TABLE)
    limits_C = 2 ** found.widths_C[found.sent_S]
    levels_TC = (torch.randint(0, 256, (5, len(limits_C))) % limits_C).to(torch.uint8)
    packed_TP = pack(levels_TC, found.layout)
    assert packed_TP.shape == (5, found.total_bits // 8)
    assert torch.equal(unpack(packed_TP, found.layout), levels_TC)


def test_a_model_is_allocated_in_well_under_a_second():
    begin = time.process_time()
    allocate_groups(POWER_LAW[torch.randperm(12_000)].split(1000), budget_bits=9_600, table=TABLE)
    # 12,000 components in twelve groups take 0.03 s of CPU; a loaded machine gets thirty times that
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize("method", METHODS)
def test_empty_and_dead_groups_cost_nothing(method):
    found = allocate_groups(
        [torch.empty(0), torch.zeros(5), torch.ones(2)], budget_bits=100, table=TABLE, method=method
    )
    assert [one.total_bits for one in found] == [0, 0, 16]
    assert found[0].widths_C.tolist() == []
    assert allocate(torch.zeros(5), max_distortion=0.0, table=TABLE, method=method).total_bits == 0


def test_a_limit_out_of_reach_is_named():
    with pytest.raises(
        RateDistortionError, match=r"distortion 1e-05 cannot be reached: .* 0\.0008769 of 10; allow more"
    ):
        allocate(torch.ones(10), max_distortion=1e-5, table=TABLE)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "give exactly one of the two"),
        ({"budget_bits": 8, "max_distortion": 0.1}, "give exactly one of the two"),
        ({"budget_bits": -1}, "budget_bits -1 .* not negative"),
        ({"max_distortion": float("nan")}, "max_distortion nan"),
    ],
)
def test_wrong_limits_are_refused(arguments, expected):
    with pytest.raises(ValueError, match=expected):
        allocate(torch.ones(10), table=TABLE, **arguments)


@pytest.mark.parametrize("values", [[-1.0], [float("nan")], [float("inf")], [[1.0]]])
def test_wrong_variances_are_refused(values):
    with pytest.raises(ValueError, match=r"group 1: weighted variances .* must be \[C\], finite and not negative"):
        allocate_groups([torch.ones(3), torch.tensor(values)], budget_bits=8, table=TABLE)


def test_other_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="no groups"):
        allocate_groups([], budget_bits=8, table=TABLE)
    with pytest.raises(ValueError, match=f"{MAX_EXACT + 1} components in one group; the exact method takes at most"):
        allocate(torch.ones(MAX_EXACT + 1), budget_bits=8, table=TABLE, method="exact")
    with pytest.raises(ValueError, match=r"slope -1\.0 must be finite and not negative"):
        frontier(torch.ones(3), [-1.0], table=TABLE)
