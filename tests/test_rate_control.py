"""Choosing the rate: limits are kept, whatever the measurement says; measurements here are formulas."""

from itertools import pairwise

import pytest
import torch

from scd_trt.distill.quantiser import gaussian_table
from scd_trt.distill.rate_control import (
    COARSEST,
    FINEST,
    FRONTIER,
    NUM_BISECTIONS,
    GroupSpectra,
    RateError,
    choose,
    frontier,
)
from scd_trt.distill.rate_distortion import allocate_groups
from scd_trt.distill.transform import Spectrum

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


def _size(transforms) -> int:
    return sum(transform.layout.bytes_per_token for transform in transforms)


def _loss(transforms) -> float:
    """Falls as bytes are added, as a measured loss does on average."""
    return 2.0 ** (-_size(transforms) / 20)


class Meter:
    """A measurement that counts its calls and remembers their sizes."""

    def __init__(self, loss=_loss):
        self.sizes: list[int] = []
        self._loss = loss

    def __call__(self, transforms) -> float:
        self.sizes.append(_size(transforms))
        return self._loss(transforms)


@pytest.mark.parametrize("limit", [*range(5, 80), DENSE_BYTES // 2, 10 * DENSE_BYTES])
def test_bytes_are_never_exceeded_and_nothing_is_measured(spectra, limit):
    meter = Meter()
    transforms = choose(spectra, meter, bytes_per_token=limit, max_kl=None)
    # the largest width of every component is all that can be bought
    assert limit - 1 <= _size(transforms) <= limit or _size(transforms) == NUM_GROUPS * 2 * WIDTH < limit
    assert not meter.sizes


def test_without_a_limit_codes_are_a_tenth_of_the_cache(spectra):
    assert _size(choose(spectra, Meter(), bytes_per_token=None, max_kl=None)) == DENSE_BYTES // 10


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
    transforms = choose(spectra, meter, bytes_per_token=None, max_kl=max_kl)
    assert _loss(transforms) <= max_kl
    assert len(meter.sizes) == 1 + NUM_BISECTIONS
    # of all sizes that were measured, the smallest that keeps to the limit
    assert _size(transforms) == min(size for size in meter.sizes if 2.0 ** (-size / 20) <= max_kl)
    # and the search ends within one step of the bisection of the smallest that could
    step = (COARSEST / FINEST) ** (0.5**NUM_BISECTIONS)
    smaller = spectra.at_ratio(DENSE_BYTES / _size(transforms) * step * 1.03)
    assert _loss(smaller) > max_kl or DENSE_BYTES / _size(smaller) > COARSEST / step


def test_a_loss_that_no_rate_reaches_is_refused_with_the_number(spectra):
    meter = Meter(lambda transforms: 0.0625 + _loss(transforms))
    message = r"method\.max_kl 0\.05: the translation itself costs 0\.06\d+ nats per token .*\(calibration\.num_tokens"
    with pytest.raises(RateError, match=message):
        choose(spectra, meter, bytes_per_token=None, max_kl=0.05)
    assert meter.sizes == [NUM_GROUPS * 2 * WIDTH]  # the finest alone decides


def test_a_loss_of_exactly_the_limit_is_kept(spectra):
    transforms = choose(spectra, Meter(lambda _: 0.25), bytes_per_token=None, max_kl=0.25)
    assert _size(transforms) <= DENSE_BYTES / COARSEST * 1.2


@pytest.mark.parametrize("modulus", [2, 3, 5])
def test_a_measurement_that_is_not_monotone_still_keeps_the_limit(spectra, modulus):
    """Held-out text is a sample: fewer bytes may measure better by chance."""

    def bumpy(transforms):
        size = _size(transforms)
        return 0.01 if size % modulus or size == NUM_GROUPS * 2 * WIDTH else 0.3

    assert bumpy(choose(spectra, bumpy, bytes_per_token=None, max_kl=0.1)) <= 0.1


def test_a_rate_that_silences_a_group_is_refused(spectra):
    """The data path carries at least a byte of each group."""
    loud = GroupSpectra((*spectra.keys[:2], _spectrum(1e-9)), (*spectra.values[:2], _spectrum(1e-9)), DENSE_BYTES)
    with pytest.raises(RateError, match=r"method\.bytes_per_token: 20 bytes leave 1 of 3 groups without codes"):
        choose(loud, Meter(), bytes_per_token=20, max_kl=None)
    found = choose(loud, Meter(lambda _: 0.0), bytes_per_token=None, max_kl=0.1)
    assert all(transform.layout.bytes_per_token for transform in found)


def test_frontier_is_monotone_and_names_its_ratios(spectra):
    rows = frontier(spectra, lambda transforms: {"bytes": _size(transforms), "kl": _loss(transforms)})
    assert [row["ratio"] for row in rows] == list(FRONTIER)
    assert [row["bytes"] for row in rows] == [int(DENSE_BYTES / ratio) for ratio in FRONTIER]
    assert all(one["kl"] < two["kl"] for one, two in pairwise(rows))


def test_more_bytes_never_predict_more_distortion(spectra):
    every = [found.variance_C for found in (*spectra.keys, *spectra.values)]
    sums = [
        sum(one.predicted_distortion for one in allocate_groups(every, budget_bits=8 * size, table=TABLE))
        for size in range(4, 120, 4)
    ]
    assert all(one > two for one, two in pairwise(sums))
