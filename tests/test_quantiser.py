"""Distortion tables against published values, plain integration and plain quantisation."""

import numpy as np
import pytest
import torch

from scd_trt.distill.quantiser import WIDTHS, DistortionTable, gaussian_table, measured_table

# J. Max, "Quantizing for Minimum Distortion" (1960), table II, equally spaced levels: (step, mean squared error) for a
# Gaussian of unit variance and 4, 8 and 16 levels; the table ends before 64.
MAX_1960 = {2: (0.9957, 0.1188), 3: (0.5860, 0.03744), 4: (0.3352, 0.01154)}


def _quantise(x, width, loading):
    """The quantiser of the module docstring for a source of unit variance, as code."""
    step = 2 * loading / 2**width
    level = np.clip(np.floor(x / step) + 2 ** (width - 1), 0, 2**width - 1)
    return (level + 0.5 - 2 ** (width - 1)) * step


def _integrated(width, loading):
    x = np.linspace(-9, 9, 1_800_001)
    density = np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)
    return np.sum((x - _quantise(x, width, loading)) ** 2 * density) * (x[1] - x[0])


@pytest.mark.parametrize("width", MAX_1960)
def test_gaussian_table_is_that_of_max(width):
    step, error = MAX_1960[width]
    table = gaussian_table()
    index = table.widths.index(width)
    # half a unit of the last digit that the paper prints, and a little for its own rounding
    assert table.distortion[index] == pytest.approx(error, abs=6e-5 if width == 2 else 6e-6)
    assert 2 * table.loading[index] / 2**width == pytest.approx(step, abs=6e-5)


@pytest.mark.parametrize("index", range(1, len(WIDTHS)))
def test_gaussian_table_is_the_minimum_of_the_integral(index):
    table = gaussian_table()
    width, error, loading = table.widths[index], table.distortion[index], table.loading[index]
    # the plain sum has steps of 1e-5 across discontinuities of the error's slope: relative error below 1e-5
    assert _integrated(width, loading) == pytest.approx(error, rel=1e-5)
    assert _integrated(width, loading * 1.01) > error
    assert _integrated(width, loading / 1.01) > error


def test_gaussian_distortion_of_wide_quantisers():
    # beyond the printed table: computed here, confirmed by the integral above
    assert gaussian_table().distortion[-2:] == pytest.approx((1.0400e-3, 8.769e-5), rel=1e-3)


@pytest.mark.parametrize("headroom", [1.3, 2.0])
def test_headroom_widens_the_range_at_its_stated_price(headroom):
    table, best = gaussian_table(headroom=headroom), gaussian_table()
    assert table.loading == pytest.approx([headroom * loading for loading in best.loading])
    for width, error, loading in zip(table.widths[1:], table.distortion[1:], table.loading[1:], strict=True):
        # as above: the plain sum has steps across discontinuities of the error's slope
        assert error == pytest.approx(_integrated(width, loading), rel=1e-5)
    assert all(error > least for error, least in zip(table.distortion[1:], best.distortion[1:], strict=True))


@pytest.mark.parametrize("headroom", [0.9, 2.1, float("nan")])
def test_headroom_out_of_range_is_refused(headroom):
    with pytest.raises(ValueError, match="headroom"):
        gaussian_table(headroom=headroom)


def test_measured_table_of_gaussian_samples():
    samples_NC = torch.randn(20_000, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 10) + 5
    table, expected = measured_table(samples_NC), gaussian_table()
    # 200k samples: the standard error of a mean square is 0.3% of a Gaussian's, more where the tails decide
    assert table.distortion == pytest.approx(expected.distortion, rel=0.03)
    assert table.loading == pytest.approx(expected.loading, rel=0.05)


def test_measured_table_is_what_quantising_the_samples_gives():
    # heavy tails and skew: nothing of the Gaussian formula helps here
    uniform_NC = torch.rand(4000, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    samples_NC = (1 / uniform_NC).clamp(max=50)
    normalised = ((samples_NC - samples_NC.mean(0)) / samples_NC.std(0, correction=0)).numpy()
    table = measured_table(samples_NC)
    for width, error, loading in zip(table.widths[1:], table.distortion[1:], table.loading[1:], strict=True):
        measured = np.mean((normalised - _quantise(normalised, width, loading)) ** 2)
        # prefix sums against a plain mean, both float64
        assert measured == pytest.approx(error, rel=1e-9)
        for other in (0.5, 0.9, 1.1, 2.0):
            assert np.mean((normalised - _quantise(normalised, width, loading * other)) ** 2) >= error


def test_tables_of_fewer_widths():
    assert gaussian_table((0, 2, 8)).distortion == tuple(gaussian_table().distortion[i] for i in (0, 1, 5))


def test_components_without_spread_are_left_out():
    samples_NC = torch.randn(2000, 2, generator=torch.Generator().manual_seed(1))
    constant_N1 = torch.full((2000, 1), 0.1, dtype=torch.float64)
    assert float((constant_N1 - constant_N1.mean()).abs().max()) > 0  # rounding alone looks like spread
    with_constants = torch.cat([samples_NC.double(), constant_N1, torch.zeros(2000, 1)], dim=1)
    assert measured_table(with_constants) == measured_table(samples_NC)
    with pytest.raises(ValueError, match="none of the 2 components has any spread over 2000 samples"):
        measured_table(with_constants[:, 2:])


@pytest.mark.parametrize("widths", [(2, 4), (0,), (0, 4, 2), (0, 2, 2), (0, 5)])
def test_wrong_widths_are_refused(widths):
    with pytest.raises(ValueError, match="expected 0 and at least one more of"):
        gaussian_table(widths)
    with pytest.raises(ValueError, match="expected 0 and at least one more of"):
        measured_table(torch.randn(100, 1), widths)


def test_wrong_samples_and_tables_are_refused():
    with pytest.raises(ValueError, match=r"samples \(3,\) must be \[N, C\] and finite"):
        measured_table(torch.zeros(3))
    with pytest.raises(ValueError, match="finite"):
        measured_table(torch.tensor([[1.0], [float("nan")]]))
    with pytest.raises(ValueError, match=r"expected 1\.0, then falling"):
        measured_table(torch.tensor([[1.0], [-1.0]]))
    with pytest.raises(ValueError, match=r"expected 1\.0, then falling"):
        DistortionTable((0, 2, 4), (1.0, 0.1, 0.1), (0.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="2 widths, 2 distortions, 1 loadings"):
        DistortionTable((0, 2), (1.0, 0.1), (0.0,))
