"""The fit of a group transform against plain numpy, and its predicted distortion against rows that it quantises."""

import numpy as np
import pytest
import torch

from scd_trt import codec
from scd_trt.bit_packing import pack
from scd_trt.distill.quantiser import gaussian_table
from scd_trt.distill.rate_distortion import allocate, allocate_groups
from scd_trt.distill.statistics import Moments
from scd_trt.distill.transform import SinkRows, predicted_kl, row_transform, spectrum
from scd_trt.products import Scratch

NUM_ROWS, IN, OUT = 4000, 12, 10
RIDGE = 1e-3
WEIGHTS = torch.linspace(0.2, 3.0, OUT, dtype=torch.float64)
TABLE = gaussian_table()


def _rows(num_rows=NUM_ROWS, seed=0, noise=0.3):
    """Gaussian features with a mean, and outputs that a linear map explains up to noise."""
    mixing = torch.Generator().manual_seed(99)
    root = torch.randn(IN, IN, generator=mixing, dtype=torch.float64)
    truth = torch.randn(IN, OUT, generator=mixing, dtype=torch.float64)
    mean_I, mean_O = (torch.randn(size, generator=mixing, dtype=torch.float64) * 5 for size in (IN, OUT))
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(num_rows, IN, generator=generator, dtype=torch.float64) @ root
    b = a @ truth + noise * torch.randn(num_rows, OUT, generator=generator, dtype=torch.float64)
    return a + mean_I, b + mean_O


def _moments(a, b):
    moments = Moments(a.shape[1], b.shape[1])
    moments.update(a, b)
    return moments


@pytest.fixture(scope="module")
def rows():
    return _rows()


@pytest.fixture(scope="module")
def found(rows):
    return spectrum(_moments(*rows), WEIGHTS, ridge=RIDGE)


def _plain(rows):
    """Ridge regression of the rows themselves, as an augmented least-squares problem."""
    a, b = (x.numpy() - x.numpy().mean(0) for x in rows)
    shift = RIDGE * (a**2).mean(0).mean() * len(a)
    padded = np.vstack([a, np.sqrt(shift) * np.eye(IN)])
    solved, *_ = np.linalg.lstsq(padded, np.vstack([b, np.zeros((IN, OUT))]), rcond=None)
    return a, b, solved


def _apply(transform, a, dtype=torch.float32):
    """Through the codec's own levels, packing and bias; far from position 0."""
    scratch = Scratch()
    encoder = codec._RowEncoder(transform, dtype=dtype, scratch=scratch)
    decoder = codec._RowDecoder(transform, dtype=dtype, scratch=scratch)
    found = []
    for tile in codec._tiles(torch.arange(1000, 1000 + len(a)), None, (), scratch):
        x_RI = a[tile.rows].float().clone()
        levels_RS = encoder.levels(encoder.operand(x_RI))[: len(x_RI)].to(torch.uint8)
        codes_RC = pack(levels_RS, transform.layout)
        found.append(decoder.decode(decoder.cells(codes_RC), codes_RC, tile).double())
    return torch.cat(found)


def _weighted_error(a, b):
    return float(((a - b).square() @ WEIGHTS).mean())


def test_spectrum_is_ridge_regression_then_weighted_pca_of_predicted_rows(rows, found):
    a, b, solved = _plain(rows)
    root = WEIGHTS.sqrt().numpy()
    # a thin singular value decomposition of the rows, where the module decomposes their covariance
    _, singular, _ = np.linalg.svd(a @ solved * root, full_matrices=False)
    # float64 twice over: covariances square the condition, here 1e3
    np.testing.assert_allclose(found.variance_C.numpy(), singular**2 / len(a), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose((found.analyse_IC @ found.synthesise_CO).numpy(), solved, rtol=0, atol=1e-9)
    scores = a @ found.analyse_IC.numpy()
    np.testing.assert_allclose(scores.T @ scores / len(a), np.diag(found.variance_C.numpy()), rtol=0, atol=1e-8)
    assert found.translation == pytest.approx(float((((b - a @ solved) ** 2).mean(0) * root**2).sum()), rel=1e-9)
    np.testing.assert_allclose(found.mean_I.numpy(), rows[0].mean(0).numpy(), rtol=1e-12)
    np.testing.assert_allclose(found.mean_O.numpy(), rows[1].mean(0).numpy(), rtol=1e-12)


def test_directions_are_orthonormal_under_the_weights_and_variances_fall(found):
    scaled = found.synthesise_CO * WEIGHTS.sqrt()
    torch.testing.assert_close(scaled @ scaled.T, torch.eye(OUT, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((found.variance_C.diff() <= 0).all())


def test_matrix_weights_are_element_weights_in_another_basis(rows):
    """Weights Q diag(w) Q' of rows turned by Q cost what w costs of the rows themselves."""
    a, b = rows
    generator = torch.Generator().manual_seed(3)
    turn_OO, _ = torch.linalg.qr(torch.randn(OUT, OUT, dtype=torch.float64, generator=generator))
    plain = spectrum(_moments(a, b), WEIGHTS, ridge=RIDGE)
    turned = spectrum(_moments(a, b @ turn_OO.T), turn_OO @ WEIGHTS.diag() @ turn_OO.T, ridge=RIDGE)
    torch.testing.assert_close(turned.variance_C, plain.variance_C, rtol=1e-9, atol=1e-12)  # float64, squared condition
    assert turned.translation == pytest.approx(plain.translation, rel=1e-9)
    both = [found.analyse_IC @ found.synthesise_CO for found in (turned, plain)]
    torch.testing.assert_close(both[0], both[1] @ turn_OO.T, rtol=0, atol=1e-9)
    sent = [found.analyse_IC[:, :3] @ found.synthesise_CO[:3] for found in (turned, plain)]
    torch.testing.assert_close(sent[0], sent[1] @ turn_OO.T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_components_at_eight_bits_reproduce_the_regression(rows, found, dtype):
    allocation = allocate(found.variance_C, budget_bits=8 * OUT, table=TABLE)
    assert set(allocation.widths_C.tolist()) == {8}
    a, _, solved = _plain(rows)
    predicted = torch.from_numpy(a @ solved) + rows[1].mean(0)
    decoded = _apply(row_transform(found, allocation, TABLE), rows[0], dtype=dtype)
    # the quantiser's own figure for 8 bits; a quarter more for tails in 40 000 values and for matrices in bfloat16
    assert _weighted_error(decoded, predicted) < 1.25 * TABLE.distortion[-1] * float(found.variance_C.sum())
    # what the regression leaves is not correlated with what it predicts, but for the ridge: errors add up
    total = found.translation + allocation.predicted_distortion
    assert _weighted_error(decoded, rows[1]) == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 8])
def test_measured_distortion_is_the_predicted_one(found, num_bytes, dtype):
    allocation = allocate(found.variance_C, budget_bits=8 * num_bytes, table=TABLE)
    assert allocation.total_bits <= 8 * num_bytes
    fresh = _rows(20_000, seed=7)
    predicted_rows = (fresh[0] - found.mean_I) @ found.analyse_IC @ found.synthesise_CO + found.mean_O
    decoded = _apply(row_transform(found, allocation, TABLE), fresh[0], dtype=dtype)
    # moments come from 4000 rows and are used on others: each variance is off by sqrt(2/4000) = 2.2 %, and the share of
    # clipped values follows it; three deviations
    assert _weighted_error(decoded, predicted_rows) == pytest.approx(allocation.predicted_distortion, rel=0.07)
    # the error of the translation is independent of that of the quantiser: they add up
    total = 2 * predicted_kl([found], [allocation], prefix_tokens=1)
    assert total == pytest.approx(allocation.predicted_distortion + found.translation, rel=1e-12)
    assert _weighted_error(decoded, fresh[1]) == pytest.approx(total, rel=0.07)


def test_predicted_kl_sums_over_groups_and_grows_with_the_prefix(found):
    allocations = allocate_groups([found.variance_C, found.variance_C], budget_bits=48, table=TABLE)
    both = predicted_kl([found, found], allocations, prefix_tokens=100)
    single = [predicted_kl([found], [each], prefix_tokens=50) for each in allocations]
    assert both == pytest.approx(2 * sum(single), rel=1e-12)


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 10])
def test_rows_at_the_middle_of_a_cell_come_back_without_bias(found, num_bytes):
    """`cell @ decode + bias` is the midpoint formula for the stored matrix, up to float32 rounding of the bias itself."""
    allocation = allocate(found.variance_C, budget_bits=8 * num_bytes, table=TABLE)
    transform = row_transform(found, allocation, TABLE)
    widths_S = allocation.widths_C[allocation.sent_S].double()
    levels_TS = (torch.rand(50, len(widths_S), dtype=torch.float64) * torch.exp2(widths_S)).floor()
    cells_TS = levels_TS - torch.exp2(widths_S - 1)
    stored = cells_TS @ transform.decode_SO.double() + transform.bias_O.double()
    midpoints = (cells_TS + 0.5) @ transform.decode_SO.double() + found.mean_O
    largest = float(transform.bias_O.abs().max())
    # one rounding to float32
    torch.testing.assert_close(stored, midpoints, rtol=0, atol=largest * 2**-24)
    if not num_bytes:
        assert torch.equal(transform.bias_O, found.mean_O.float())


def test_steps_are_those_of_the_quantiser(found):
    """Distortion is flat about the best step: a measurement would not notice one that is a little off."""
    allocation = allocate(found.variance_C, budget_bits=40, table=TABLE)
    transform = row_transform(found, allocation, TABLE)
    assert len({width for width, _ in transform.layout.runs}) > 1
    widths_S = [width for width, count in transform.layout.runs for _ in range(count)]
    for sent, (component, width) in enumerate(zip(allocation.sent_S.tolist(), widths_S, strict=True)):
        loading = TABLE.loading[TABLE.widths.index(width)]
        step = 2 * loading * float(found.variance_C[component]) ** 0.5 / 2**width
        # directions have length 1 under the weights
        length = float((transform.decode_SO[sent].double() * WEIGHTS.sqrt()).norm())
        assert length == pytest.approx(step, rel=2**-8)  # bfloat16


def test_decoded_rows_have_the_mean_of_the_consumers(found, rows):
    decoded = _apply(row_transform(found, allocate(found.variance_C, budget_bits=40, table=TABLE), TABLE), rows[0])
    spread_O = rows[1].std(0)
    # cells and tails are symmetric for a Gaussian: four standard errors of the mean of 4000 rows
    assert bool(((decoded.mean(0) - rows[1].mean(0)).abs() < 4 * spread_O / NUM_ROWS**0.5).all())


def test_a_heavy_weight_buys_a_smaller_error(rows):
    heavy = WEIGHTS.clone()
    heavy[3] *= 1e3
    errors = []
    for weights in (WEIGHTS, heavy):
        found = spectrum(_moments(*rows), weights, ridge=RIDGE)
        decoded = _apply(row_transform(found, allocate(found.variance_C, budget_bits=24, table=TABLE), TABLE), rows[0])
        errors.append((decoded - rows[1]).square().mean(0))
    assert errors[1][3] < 0.7 * errors[0][3]
    assert errors[1].sum() > errors[0].sum()


def test_equal_input_gives_equal_bits(rows):
    def fitted():
        found = spectrum(_moments(*rows), WEIGHTS, ridge=RIDGE)
        return row_transform(found, allocate(found.variance_C, budget_bits=40, table=TABLE), TABLE)

    one, two = fitted(), fitted()
    assert one.layout == two.layout
    for name in ("mean_I", "encode_IS", "decode_SO", "bias_O"):
        assert torch.equal(getattr(one, name), getattr(two, name))


def test_signs_of_directions_are_fixed(found):
    scaled = found.synthesise_CO * WEIGHTS.sqrt()
    largest = scaled.gather(1, scaled.abs().argmax(1, keepdim=True))
    assert bool((largest > 0).all())


@pytest.mark.parametrize("unit", [1e-30, 1e-12, 1e12])
def test_the_unit_of_the_weights_does_not_matter(rows, unit):
    """Fisher weights of a confident model are tiny."""
    decoded = []
    for weights in (WEIGHTS, WEIGHTS * unit):
        found = spectrum(_moments(*rows), weights, ridge=RIDGE)
        decoded.append(
            _apply(row_transform(found, allocate(found.variance_C, budget_bits=40, table=TABLE), TABLE), rows[0])
        )
    # float32 maps rounded from other numbers: few rows lie so close to an edge that they change their cell
    assert float(((decoded[0] - decoded[1]).abs().amax(1) < 1e-4).double().mean()) > 0.999


def test_components_without_spread_are_harmless(rows):
    """Outputs that are linear in two features only: units of packing carry components that are always zero."""
    a, b = rows
    flat = torch.cat([b[:, :2], b[:, :1] * 2 + 1, torch.full((NUM_ROWS, OUT - 3), 4.0, dtype=torch.float64)], dim=1)
    found = spectrum(_moments(a, flat), torch.ones(OUT, dtype=torch.float64), ridge=1e-9)
    allocation = allocate(found.variance_C, budget_bits=8 * 40, table=TABLE)
    transform = row_transform(found, allocation, TABLE)
    for name in ("mean_I", "encode_IS", "decode_SO", "bias_O"):
        assert bool(getattr(transform, name).isfinite().all())
    decoded = _apply(transform, a)
    assert float((decoded[:, 3:] - 4.0).abs().max()) < 1e-4  # float32 of values of size 50, ten terms
    assert _weighted_of(decoded, flat) < 2 * (found.translation + TABLE.distortion[-1] * float(found.variance_C.sum()))


def test_rows_without_any_spread_decode_to_their_mean():
    a, b = torch.full((50, IN), 2.0), torch.full((50, OUT), 3.0)
    found = spectrum(_moments(a, b), WEIGHTS, ridge=RIDGE)
    transform = row_transform(found, allocate(found.variance_C, budget_bits=80, table=TABLE), TABLE)
    assert found.translation == 0.0
    torch.testing.assert_close(_apply(transform, a), b.double(), rtol=0, atol=1e-6)  # float32


def _weighted_of(a, b):
    return float((a - b).square().sum(1).mean())


def test_rows_of_sinks_are_kept_as_they_are(found):
    """Absolute on the consumer's side; on the producer's less the mean, as the codec compares them."""
    allocation = allocate(found.variance_C, budget_bits=40, table=TABLE)
    sinks = SinkRows(found.mean_I + torch.tensor([[50.0], [-7.0]]), found.mean_O - torch.tensor([[500.0], [3.0]]))
    transform = row_transform(found, allocation, TABLE, sinks=sinks)
    expected = torch.tensor([[50.0], [-7.0]]).expand(2, IN)
    torch.testing.assert_close(transform.sink_in_KI, expected, rtol=0, atol=1e-5)  # float32
    assert torch.equal(transform.sink_out_KO, sinks.mean_KO.float())
    plain = row_transform(found, allocation, TABLE)
    assert (transform.num_sink_rows, plain.num_sink_rows) == (2, 0)
    for name in ("mean_I", "encode_IS", "decode_SO", "bias_O"):
        assert torch.equal(getattr(transform, name), getattr(plain, name))
