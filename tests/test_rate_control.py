"""Choosing the rate: limits are kept, whatever the measurement says; measurements here are formulas."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from scd_trt.config import MethodConfig
from scd_trt.distill.plan import NUM_BISECTIONS
from scd_trt.distill.quantiser import gaussian_table
from scd_trt.distill.rate_control import COARSEST, FINEST, Chosen, GroupSpectra, Limit, Loss, RateError, choose
from scd_trt.distill.rate_distortion import allocate_groups
from scd_trt.distill.transform import Spectrum
from scd_trt.translator import GroupTransform

WIDTH, NUM_GROUPS = 48, 3
DENSE_BYTES = NUM_GROUPS * 2 * WIDTH * 2
TABLE = gaussian_table()


def _spectrum(scale: float) -> Spectrum:
    """Components with variances that fall geometrically, each an element of the rows."""
    variance_C = scale * 0.85 ** torch.arange(WIDTH, dtype=torch.float64)
    eye = torch.eye(WIDTH, dtype=torch.float64)
    zeros = torch.zeros(WIDTH, dtype=torch.float64)
    return Spectrum(eye, eye, variance_C, zeros, zeros, translation=0.0)


@pytest.fixture
def spectra() -> GroupSpectra:
    return GroupSpectra(tuple(map(_spectrum, (1.0, 2.0, 0.5))), tuple(map(_spectrum, (0.3, 1.0, 1.0))), DENSE_BYTES)


@dataclass(frozen=True)
class Coded:
    """Transforms everywhere, as `choose` looks at them."""

    transforms: tuple[GroupTransform, ...]

    @property
    def num_bytes(self) -> int:
        return sum(transform.layout.bytes_per_token for transform in self.transforms)

    @property
    def num_silent_groups(self) -> int:
        return sum(transform.layout.bytes_per_token == 0 for transform in self.transforms)


def _loss(codes: Coded) -> float:
    """Falls as bytes are added, as a measured loss does on average."""
    return 2.0 ** (-codes.num_bytes / 20)


class Meter:
    """A measurement that counts its calls and remembers their sizes."""

    def __init__(self, loss=_loss):
        self.sizes: list[int] = []
        self._loss = loss

    def __call__(self, codes) -> Loss:
        self.sizes.append(codes.num_bytes)
        value = self._loss(codes)
        return Loss(value, f"costs {value:.4g} nats per token on held-out text")


def _choose(spectra, meter, **method) -> Chosen[Coded]:
    return choose(
        Limit.of(MethodConfig(**method), DENSE_BYTES),
        lambda size: Coded(spectra.at_bytes(size)),
        meter,
        dense_bytes=DENSE_BYTES,
    )


@pytest.mark.parametrize("limit", [*range(5, 80), DENSE_BYTES // 2, 10 * DENSE_BYTES])
def test_bytes_are_never_exceeded_and_nothing_is_measured(spectra, limit):
    meter = Meter()
    chosen = _choose(spectra, meter, bytes_per_token=limit)
    # the largest width of every component is all that can be bought
    size = chosen.codes.num_bytes
    assert limit - 1 <= size <= limit or size == NUM_GROUPS * 2 * WIDTH < limit
    assert not meter.sizes
    assert chosen.as_json() == {
        "name": "bytes_per_token",
        "allowed": limit,
        "is_default": False,
        "measured": size,
        "bytes_per_token": size,
    }


def test_without_a_limit_codes_are_a_tenth_of_the_cache(spectra):
    chosen = _choose(spectra, Meter())
    assert chosen.codes.num_bytes == DENSE_BYTES // 10
    assert chosen.limit.is_default


def test_bytes_go_where_the_joint_allocation_puts_them(spectra):
    transforms = spectra.at_bytes(60)
    every = [found.variance_C for pair in zip(spectra.keys, spectra.values, strict=True) for found in pair]
    expected = allocate_groups(every, budget_bits=480, table=TABLE)
    layouts = [rows.layout for transform in transforms for rows in (transform.keys, transform.values)]
    assert layouts == [allocation.layout for allocation in expected]
    # the first group's values have a third of its keys' variance
    assert transforms[0].values.layout.bytes_per_token < transforms[0].keys.layout.bytes_per_token


@pytest.mark.parametrize("max_kl", [0.5, 0.2, 0.05, 0.01, 1e-4])
def test_loss_is_kept_with_few_bytes(spectra, max_kl):
    meter = Meter()
    chosen = _choose(spectra, meter, max_kl=max_kl)
    size = chosen.codes.num_bytes
    assert _loss(chosen.codes) <= max_kl
    assert len(meter.sizes) == 1 + NUM_BISECTIONS
    # of all sizes that were measured, the smallest that keeps to the limit
    assert size == min(tried for tried in meter.sizes if 2.0 ** (-tried / 20) <= max_kl)
    # and the search ends within one step of the bisection of the smallest that could
    step = (COARSEST / FINEST) ** (0.5**NUM_BISECTIONS)
    smaller = Coded(spectra.at_ratio(DENSE_BYTES / size * step * 1.03))
    assert _loss(smaller) > max_kl or DENSE_BYTES / smaller.num_bytes > COARSEST / step
    assert chosen.as_json()["measured"] == _loss(chosen.codes)


def test_a_share_of_f1_is_kept_like_any_other_loss(spectra):
    def measure(codes: Coded) -> Loss:
        value = _loss(codes)
        return Loss(value, f"loses {value:.2%} of F1", {"rule": "upper", "mean": value / 2})

    chosen = _choose(spectra, measure, max_relative_f1_loss=0.05)
    told = chosen.as_json()
    assert (told["name"], told["allowed"], told["rule"]) == ("max_relative_f1_loss", 0.05, "upper")
    # what is compared is the value, not the mean that stands beside it
    assert told["measured"] == _loss(chosen.codes) == 2 * told["mean"] <= 0.05
    with pytest.raises(
        RateError, match=r"max_relative_f1_loss 1e-05: the translation itself loses 0\.\d+% of F1"
    ) as caught:
        _choose(spectra, measure, max_relative_f1_loss=1e-5)
    assert "heldout.num_questions" in str(caught.value)
    assert "method.f1_loss_rule" in str(caught.value)


def test_a_loss_that_no_rate_reaches_is_refused_with_the_number(spectra):
    meter = Meter(lambda codes: 0.0625 + _loss(codes))
    message = (
        r"method\.max_kl 0\.05: the translation itself costs 0\.06\d+ nats per token .*"
        rf"the best that was found sends {NUM_GROUPS * 2 * WIDTH} bytes per token; .*\(calibration\.num_tokens"
    )
    with pytest.raises(RateError, match=message):
        _choose(spectra, meter, max_kl=0.05)
    assert meter.sizes == [NUM_GROUPS * 2 * WIDTH]  # the finest alone decides


def test_a_loss_of_exactly_the_limit_is_kept(spectra):
    chosen = _choose(spectra, Meter(lambda _: 0.25), max_kl=0.25)
    assert chosen.codes.num_bytes <= DENSE_BYTES / COARSEST * 1.2


@pytest.mark.parametrize("modulus", [2, 3, 5])
def test_a_measurement_that_is_not_monotone_still_keeps_the_limit(spectra, modulus):
    """Held-out text is a sample: fewer bytes may measure better by chance."""

    def bumpy(codes):
        return 0.01 if codes.num_bytes % modulus or codes.num_bytes == NUM_GROUPS * 2 * WIDTH else 0.3

    assert bumpy(_choose(spectra, Meter(bumpy), max_kl=0.1).codes) <= 0.1


def test_a_rate_that_silences_a_group_is_refused(spectra):
    """The data path carries at least a byte of each group."""
    loud = GroupSpectra((*spectra.keys[:2], _spectrum(1e-9)), (*spectra.values[:2], _spectrum(1e-9)), DENSE_BYTES)
    with pytest.raises(RateError, match=r"method\.bytes_per_token: 20 bytes leave 1 groups without codes"):
        _choose(loud, Meter(), bytes_per_token=20)
    found = _choose(loud, Meter(lambda _: 0.0), max_kl=0.1)
    assert found.codes.num_silent_groups == 0


def test_some_groups_share_the_bytes_as_if_there_were_no_others(spectra):
    first_last = spectra.at_bytes(40, groups=(0, 2))
    alone = GroupSpectra((spectra.keys[0], spectra.keys[2]), (spectra.values[0], spectra.values[2]), DENSE_BYTES)
    assert [one.layout for one in first_last] == [one.layout for one in alone.at_bytes(40)]
    assert spectra.at_bytes(40, groups=()) == ()


def test_more_bytes_never_predict_more_distortion(spectra):
    every = [found.variance_C for found in (*spectra.keys, *spectra.values)]
    sums = [
        sum(one.predicted_distortion for one in allocate_groups(every, budget_bits=8 * size, table=TABLE))
        for size in range(4, 120, 4)
    ]
    assert all(one > two for one, two in pairwise(sums))


def test_matrices_stay_within_their_limit_and_keep_the_largest_variances(spectra):
    """Each component takes an encoder's column and a decoder's row, here two times `WIDTH`."""
    num_components = 40
    limited = replace(spectra, max_matrix_elements=num_components * 2 * WIDTH + 1)
    free, capped = spectra.allocate(DENSE_BYTES // 3), limited.allocate(DENSE_BYTES // 3)
    num_sent = [sum(len(one.sent_S) for one in allocations) for allocations in (free, capped)]
    assert num_sent[0] > num_components >= num_sent[1] > num_components - 8 * len(capped)
    every = [one.variance_C for pair in zip(spectra.keys, spectra.values, strict=True) for one in pair]
    least_kept = torch.cat(every).sort(descending=True).values[num_components - 1]
    for variance_C, allocation in zip(every, capped, strict=True):
        assert bool((variance_C[allocation.sent_S] >= least_kept).all())
        sent_C = allocation.widths_C > 0
        # what may not be sent counts as lost
        assert allocation.predicted_distortion >= float(variance_C[~sent_C].sum())
    assert sum(one.total_bits for one in capped) <= 8 * (DENSE_BYTES // 3)


def test_a_limit_that_does_not_bind_changes_nothing(spectra):
    limited = replace(spectra, max_matrix_elements=2 * NUM_GROUPS * WIDTH * 2 * WIDTH)
    for one, other in zip(spectra.allocate(100), limited.allocate(100), strict=True):
        assert torch.equal(one.widths_C, other.widths_C)
        assert one.predicted_distortion == pytest.approx(other.predicted_distortion, rel=1e-12)


def test_bits_and_steps_follow_the_table_of_the_spectra(spectra):
    wide = replace(spectra, table=gaussian_table(headroom=1.5))
    every = [one.variance_C for pair in zip(spectra.keys, spectra.values, strict=True) for one in pair]
    expected = allocate_groups(every, budget_bits=800, table=wide.table)
    assert all(
        torch.equal(one.widths_C, other.widths_C) for one, other in zip(wide.allocate(100), expected, strict=True)
    )
    # a component of 8 bits has the same place in both; its step is as much wider as the range is
    steps = [given.at_bytes(100)[0].keys.decode_SO[0].float().abs().max() for given in (spectra, wide)]
    assert float(steps[1] / steps[0]) == pytest.approx(1.5, rel=2**-7)  # matrices are bfloat16
