"""Modes of groups: prices are those of the plain formulas, and a table is never predicted to be worse than no table."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_translators import HEAD_DIM, HIDDEN, WIDTH, random_affine, tiny_spec

from scd_trt import translator as translators
from scd_trt.distill.fit import LayerFits, Projections
from scd_trt.distill.modes import Coder, FixedCode, difference, patch_error, predictions, weighted
from scd_trt.distill.rate_control import GroupSpectra
from scd_trt.distill.statistics import Moments, PairStatistics
from scd_trt.distill.transform import Spectrum
from scd_trt.translator import PatchLayer, RawLayer, TransformLayer

NUM_GROUPS = 3
RAW_BYTES = 2 * WIDTH * 2
DENSE_BYTES = NUM_GROUPS * RAW_BYTES


def _spectrum(scale: float, *, translation: float) -> Spectrum:
    variance_C = scale * 0.8 ** torch.arange(WIDTH, dtype=torch.float64)
    eye, zeros = torch.eye(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
    return Spectrum(eye, eye, variance_C, zeros, zeros, translation=translation)


def _coder(raw: tuple[float, ...], *, translation: float = 1.0, patch: tuple[float, ...] = ()) -> Coder:
    """Three groups of one layer each, with these distortions of their fixed modes."""
    spectra = GroupSpectra(
        tuple(_spectrum(scale, translation=translation) for scale in (1.0, 2.0, 0.5)),
        tuple(_spectrum(scale, translation=0.0) for scale in (0.3, 1.0, 1.0)),
        DENSE_BYTES,
    )
    fixed = [[FixedCode("raw", (RawLayer(),), RAW_BYTES, distortion)] for distortion in raw]
    for codes, distortion in zip(fixed, patch, strict=False):
        codes.append(FixedCode("patch", (RawLayer(),), 12, distortion))
    return Coder(spectra, tuple((group, group + 1) for group in range(NUM_GROUPS)), tuple(map(tuple, fixed)))


def test_dear_modes_are_left_alone():
    coder = _coder((5.0, 5.0, 5.0))
    for size in (20, 60, DENSE_BYTES):
        assert coder.decide(size).modes == ("transform",) * 3


def test_an_exact_cache_is_sent_raw_where_the_bytes_hold_it():
    coder = _coder((0.0, 0.0, 0.0))
    assert coder.decide(DENSE_BYTES).modes == ("raw",) * 3
    assert coder.decide(DENSE_BYTES).distortion == 0.0
    # only one fits beside a byte for each of the others, and the loudest gains most by it
    assert coder.decide(RAW_BYTES + 20).modes == ("transform", "raw", "transform")
    assert coder.decide(RAW_BYTES - 1).modes == ("transform",) * 3


def test_a_cheap_patch_leaves_its_bytes_to_the_others():
    coder = _coder((9.0, 9.0, 9.0), patch=(0.1,))
    plain, table = coder.plain(40).table, coder.decide(40)
    assert table.modes == ("patch", "transform", "transform")
    assert table.distortion < plain.distortion
    coding = coder.coding(table)
    assert coding.group_bytes[0] == 12
    assert 39 <= coding.num_bytes <= 40


shares = st.floats(0.0, 4.0)


@settings(deadline=None)
@given(
    raw=st.tuples(shares, shares, shares), patch=st.tuples(shares, shares, shares), size=st.integers(8, 2 * DENSE_BYTES)
)
def test_a_table_is_never_predicted_to_be_worse_than_transforms_everywhere(raw, patch, size):
    coder = _coder(raw, patch=patch)
    table = coder.decide(size)
    assert table.distortion <= coder._table(("transform",) * 3, size).distortion
    fixed = {"raw": RAW_BYTES, "patch": 12}
    assert sum(fixed.get(mode, 1) for mode in table.modes) <= size
    # weak duality: at the slope that it ends with, no table whatever has less than the sum of the least costs
    bound = sum(min(one.cost for one in group) for group in coder.candidates(table.slope)) - 8 * size * table.slope
    assert bound <= table.distortion * (1 + 1e-9)


def test_a_table_is_the_best_of_all_where_modes_are_cheap():
    """Against every table, each with its own allocation of the rest."""
    for raw, patch in itertools.product([(3.0, 0.1, 2.0), (0.5, 3.0, 0.2)], [(0.3, 4.0, 1.0), (2.0, 0.4, 0.1)]):
        coder = _coder(raw, patch=patch)
        for size in (40, 70, 110):
            feasible = [
                coder._table(modes, size)
                for modes in itertools.product(("transform", "raw", "patch"), repeat=3)
                if sum({"raw": RAW_BYTES, "patch": 12, "transform": 1}[mode] for mode in modes) <= size
            ]
            best = min(table.distortion for table in feasible)
            assert coder.decide(size).distortion <= 1.05 * best


def test_codings_are_what_a_translator_is_built_of():
    coding = _coder((0.0, 9.0, 9.0)).coding(_coder((0.0, 9.0, 9.0)).decide(RAW_BYTES + 30))
    assert coding.modes == ("raw", "transform", "transform")
    assert [type(layer) for layer in coding.layers] == [RawLayer, TransformLayer, TransformLayer]
    spec = tiny_spec(NUM_GROUPS)
    built = translators.build(
        {
            "name": "t",
            "policy": "rd",
            "code_dtype": "float16",
            "raw_dtype": "bfloat16",
            "producer": spec,
            "consumer": spec,
            "groups": ((0, 1), (1, 2), (2, 3)),
        },
        coding.layers,
        coding.transforms,
    )
    assert built.manifest.bytes_per_token == coding.group_bytes


def test_predictions_name_every_candidate_and_add_up():
    coder = _coder((5.0, 0.0, 5.0), patch=(2.0,))
    table = coder.decide(RAW_BYTES + 20)
    rows = predictions(coder, table, prefix_tokens=10)
    assert [row["mode"] for row in rows] == list(table.modes) == ["transform", "raw", "transform"]
    assert [len(row["predicted"]) for row in rows] == [3, 2, 2]
    assert list(rows[0]["predicted"]) == ["transform", "raw", "patch"]
    per_byte = 0.5 * 10 * 8 * table.slope
    for row in rows:
        for priced in row["predicted"].values():
            # bits are rounded up to bytes where they are shown
            told = priced["loss"] + per_byte * priced["bytes_per_token"]
            assert told - per_byte < priced["cost"] <= told * (1 + 1e-12)
    free = predictions(coder, coder.decide(10 * DENSE_BYTES), prefix_tokens=10)
    assert [row["mode"] for row in free] == ["transform", "raw", "transform"]
    for row in free:
        assert row["predicted"][row["mode"]]["cost"] == min(one["cost"] for one in row["predicted"].values())


def _moments(a_TI: torch.Tensor, b_TJ: torch.Tensor) -> Moments:
    moments = Moments(a_TI.shape[1], b_TJ.shape[1])
    moments.update(a_TI, b_TJ)
    return moments


def test_raw_is_priced_by_the_mean_squared_difference():
    generator = torch.Generator().manual_seed(0)
    a_TF = torch.randn(500, WIDTH, generator=generator, dtype=torch.float64) * 3 + 5
    b_TF = 0.9 * a_TF + torch.randn(500, WIDTH, generator=generator, dtype=torch.float64) + torch.arange(WIDTH)
    # float64 moments of the same rows
    found_OO, error_TF = difference(_moments(a_TF, b_TF)), a_TF - b_TF
    torch.testing.assert_close(found_OO, error_TF.T @ error_TF / 500, rtol=1e-9, atol=1e-9)
    assert float(difference(_moments(a_TF, a_TF)).abs().max()) < 1e-12
    weights_F, mixed_FF = (
        torch.rand(WIDTH, generator=generator, dtype=torch.float64),
        torch.eye(WIDTH, dtype=torch.float64),
    )
    mixed_FF[0, 1] = mixed_FF[1, 0] = 0.5
    assert weighted(found_OO, weights_F) == pytest.approx(
        float((error_TF.square() * weights_F).sum(1).mean()), rel=1e-9
    )
    price_T = torch.einsum("tf,fg,tg->t", error_TF, mixed_FF, error_TF)
    assert weighted(found_OO, mixed_FF) == pytest.approx(float(price_T.mean()), rel=1e-9)


@pytest.mark.parametrize("k_norm", [False, True])
def test_patch_is_priced_by_the_error_of_its_keys_and_values(k_norm):
    generator = torch.Generator().manual_seed(1)
    x_A = torch.randn(4000, HIDDEN, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, HIDDEN) + 1
    x_B = 0.9 * x_A.roll(1, 1) + 0.3 * torch.randn(4000, HIDDEN, generator=generator, dtype=torch.float64)
    projection = random_affine(HIDDEN, 2 * WIDTH, seed=2)
    given_ = Projections(
        projection.weight, projection.bias, torch.linspace(0.5, 1.5, HEAD_DIM) if k_norm else None, k_norm_eps=1e-6
    )
    statistics = PairStatistics({(0, "x"): (HIDDEN, HIDDEN)})
    statistics[0, "x"].update(x_A, x_B)
    maps = LayerFits(statistics, ridge=1e-3).patch(0, given_, r_h=20)
    predicted_2FF = patch_error(statistics[0, "x"], maps, given_)
    errors_T2F = (_patched(maps, x_A) - _own(given_, x_B)).unflatten(1, (2, WIDTH))
    measured_2FF = torch.einsum("tkf,tkg->kfg", errors_T2F, errors_T2F) / len(x_A)
    # float32 maps; a norm is not linear, and what is priced is its slope at the mean power
    for kind, tolerance in enumerate((0.5 if k_norm else 1e-3, 1e-3)):
        predicted_F, measured_F = predicted_2FF[kind].diagonal(), measured_2FF[kind].diagonal()
        torch.testing.assert_close(predicted_F, measured_F, rtol=tolerance, atol=0)
        assert float(predicted_F.sum() / measured_F.sum()) == pytest.approx(1, rel=tolerance / 3)
    if not k_norm:
        torch.testing.assert_close(predicted_2FF, measured_2FF, rtol=1e-3, atol=1e-3 * float(measured_2FF.max()))


def _own(given_: Projections, x_TM: torch.Tensor) -> torch.Tensor:
    return _normed(x_TM @ given_.weight_MO.double() + given_.bias_O.double(), given_.k_norm_D)


def _patched(maps: PatchLayer, x_TM: torch.Tensor) -> torch.Tensor:
    codes_TR = x_TM @ maps.encode_h.weight.double() + maps.encode_h.bias.double()
    return _normed(codes_TR @ maps.project.weight.double() + maps.project.bias.double(), maps.k_norm_D)


def _normed(kv_TO: torch.Tensor, scale_D: torch.Tensor | None) -> torch.Tensor:
    if scale_D is None:
        return kv_TO
    k_THD = kv_TO[:, :WIDTH].unflatten(1, (-1, HEAD_DIM))
    k_THD = k_THD / (k_THD.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale_D.double()
    return torch.cat([k_THD.flatten(1), kv_TO[:, WIDTH:]], dim=1)
