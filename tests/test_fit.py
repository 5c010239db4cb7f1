"""The closed-form fit against plain float64 formulas written with numpy on the stacked rows, not on moments."""

import numpy as np
import pytest
import torch

from scd_trt.distill.aligner import RowSample, train
from scd_trt.distill.fit import (
    FitError,
    Projections,
    joint_basis,
    joint_code,
    patch_layer,
    ranks,
    reuse_layer,
    reuse_map,
)
from scd_trt.distill.statistics import Moments

RIDGE = 1e-3
NUM_ROWS = 300
# maps are rounded to float32 once; rows are of size 1..10
CLOSE = {"rtol": 0, "atol": 2e-5}


def _related_rows(width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with a decaying spectrum and an offset; the second side is a perturbed linear image of the first."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(2.0, 0.2, width)
    a = torch.randn(NUM_ROWS, width, generator=generator) * spread @ torch.randn(width, width, generator=generator)
    mixing = torch.eye(width) + 0.2 * torch.randn(width, width, generator=generator)
    b = a @ mixing + 0.1 * torch.randn(NUM_ROWS, width, generator=generator)
    return a / 3 + 4.0, b / 3 - 2.0


def _moments(a: torch.Tensor, b: torch.Tensor) -> Moments:
    moments = Moments(a.shape[1], b.shape[1])
    moments.update(a, b)
    return moments


def _plain_codes_and_decoder(a: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Ridge prediction of the joint SVD's code from the producer's rows, by SVD of the stacked centred rows."""
    a64, b64 = a.double().numpy(), b.double().numpy()
    a64, b64 = a64 - a64.mean(0), b64 - b64.mean(0)
    joint = np.concatenate([a64, b64], axis=1)
    right = np.linalg.svd(joint, full_matrices=False)[2][:rank].T
    gram = a64.T @ a64
    penalty = RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    encode = np.linalg.solve(gram + penalty, a64.T @ (joint @ right))
    return a64 @ encode, right[a.shape[1] :].T


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_reuse_equals_the_plain_formula(rank):
    a, b = _related_rows(6)
    encode, decode = reuse_map(joint_basis(_moments(a, b), RIDGE), rank)
    codes, decoder = _plain_codes_and_decoder(a, b, rank)
    expected = codes @ decoder + b.double().numpy().mean(0)
    np.testing.assert_allclose(decode(encode(a)).numpy(), expected, **CLOSE)


def test_codes_have_zero_mean_and_unit_variance():
    a, b = _related_rows(6)
    encode, _ = reuse_map(joint_basis(_moments(a * 1e4, b * 1e4), RIDGE), 4)
    codes = encode(a * 1e4)
    torch.testing.assert_close(codes.mean(0), torch.zeros(4), rtol=0, atol=1e-4)  # float32 rows of size 1e4
    torch.testing.assert_close(codes.std(0, correction=0), torch.ones(4), rtol=0, atol=1e-4)


def test_full_rank_of_equal_models_is_the_identity():
    a, _ = _related_rows(6)
    encode, decode = reuse_map(joint_basis(_moments(a, a), 1e-9), 6)
    torch.testing.assert_close(decode(encode(a)), a, rtol=0, atol=1e-4)  # float32 maps of condition about 20


def test_error_falls_with_rank():
    a, b = _related_rows(8)
    basis = joint_basis(_moments(a, b), RIDGE)
    maps = [reuse_map(basis, rank) for rank in range(1, 9)]
    errors = [float((decode(encode(a)) - b).square().mean()) for encode, decode in maps]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 10


def test_directions_without_spread_stay_finite():
    a, b = _related_rows(6)
    a, b = a.clone(), b.clone()
    a[:, 2:], b[:, 2:] = 1.0, 5.0
    encode, decode = reuse_map(joint_basis(_moments(a, b), RIDGE), 6)
    assert encode(a).abs().max() < 1e3
    torch.testing.assert_close(decode(encode(a))[:, 2:], b[:, 2:], **CLOSE)


def test_rounding_noise_is_not_blown_up_to_a_code():
    few, _ = _related_rows(2)
    a = few @ torch.randn(2, 6, generator=torch.Generator().manual_seed(3))  # rank 2, up to float32 rounding
    encode, _ = reuse_map(joint_basis(_moments(a, a), RIDGE), 6)
    assert encode.weight.abs().max() < 10


def test_constant_rows_are_answered_by_their_mean():
    constant = torch.ones(4, 3)
    encode, decode = reuse_map(joint_basis(_moments(constant, 2 * constant), RIDGE), 2)
    torch.testing.assert_close(decode(encode(constant)), 2 * constant, **CLOSE)


def test_eigenvectors_have_a_defined_sign():
    basis = joint_basis(_moments(*_related_rows(6)), RIDGE)
    largest = basis.vectors_nn.gather(0, basis.vectors_nn.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all())


def _projections(width: int, out: int, *, k_norm: bool = False) -> Projections:
    generator = torch.Generator().manual_seed(5)
    return Projections(
        weight_MO=torch.randn(width, 2 * out, generator=generator),
        bias_O=torch.randn(2 * out, generator=generator),
        k_norm_D=torch.linspace(0.5, 1.5, out) if k_norm else None,
        k_norm_eps=1e-6 if k_norm else 0.0,
    )


@pytest.mark.parametrize("rank", [2, 8])
def test_patch_equals_the_plain_formula(rank):
    a, b = _related_rows(8)
    projections = _projections(8, 3)
    layer = patch_layer(joint_basis(_moments(a, b), RIDGE), projections, r_h=rank)
    codes, _ = _plain_codes_and_decoder(a, b, rank)
    design = np.concatenate([codes, np.ones((NUM_ROWS, 1))], axis=1)
    x_b = design @ np.linalg.lstsq(design, b.double().numpy(), rcond=None)[0]
    expected = x_b @ projections.weight_MO.double().numpy() + projections.bias_O.double().numpy()
    np.testing.assert_allclose(layer.project(layer.encode_h(a)).numpy(), expected, rtol=0, atol=1e-4)  # rows of size 20


def test_patch_carries_the_key_norm():
    a, b = _related_rows(8)
    layer = patch_layer(joint_basis(_moments(a, b), RIDGE), _projections(8, 4, k_norm=True), r_h=4)
    assert layer.k_norm_eps == 1e-6
    assert layer.k_norm_D is not None


def test_reuse_layer_keeps_keys_and_values_apart():
    keys, values = _related_rows(6), _related_rows(6, seed=9)
    key_basis, value_basis = joint_basis(_moments(*keys), RIDGE), joint_basis(_moments(*values), RIDGE)
    layer = reuse_layer(key_basis, value_basis, r_k=2, r_v=5)
    assert (layer.encode_k.weight.shape, layer.encode_v.weight.shape) == ((6, 2), (6, 5))
    torch.testing.assert_close(layer.encode_v(values[0]), reuse_map(value_basis, 5)[0](values[0]))


def test_a_code_does_not_depend_on_further_ranks():
    basis = joint_basis(_moments(*_related_rows(6)), RIDGE)
    small, large = joint_code(basis, 2), joint_code(basis, 5)
    # the solver works in blocks: equal up to float64 rounding
    torch.testing.assert_close(large.encode_AR[:, :2], small.encode_AR, rtol=1e-9, atol=1e-12)


def test_ranks_are_spread_over_layers_or_taken_as_given():
    assert ranks(4, name="r_k", num_layers=3, limit=8) == (4, 4, 4)
    assert ranks((1, 2, 8), name="r_k", num_layers=3, limit=8) == (1, 2, 8)


def test_wrong_ranks_are_refused_with_layer_value_and_limit():
    with pytest.raises(FitError, match=r"method\.r_v: layer 1 has rank 9; at most 8"):
        ranks((1, 9), name="r_v", num_layers=2, limit=8)
    with pytest.raises(FitError, match=r"method\.r_h has 2 values for 3 layers"):
        ranks((1, 2), name="r_h", num_layers=3, limit=8)


def test_sample_of_a_long_stream_is_uniform_and_keeps_pairs_together():
    sample = RowSample(capacity=400, seed=0)
    rows = torch.arange(4000.0)[:, None]
    for part in rows.split(37):
        sample.update(part, -part)
    a, b = sample.rows
    assert torch.equal(a, -b)
    assert len(a.unique()) == 400
    # the mean of 400 draws from 0..3999 has a standard error of 55; five of them
    assert abs(float(a.mean()) - 1999.5) < 275


def test_sample_of_a_short_stream_is_all_of_it():
    sample = RowSample(capacity=10, seed=0)
    sample.update(torch.arange(4.0)[:, None], torch.zeros(4, 2))
    assert sorted(sample.rows[0][:, 0].tolist()) == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="no rows"):
        _ = RowSample(capacity=10, seed=0).rows


def test_trained_aligner_beats_the_affine_one_on_a_nonlinear_relation():
    a, _ = _related_rows(8)
    a = a - a.mean(0)
    b = torch.nn.functional.silu(2 * a) + 0.3 * a
    projections = Projections(weight_MO=torch.eye(8), bias_O=torch.zeros(8))
    affine = patch_layer(joint_basis(_moments(a, b), RIDGE), projections, r_h=8)
    sample = RowSample(capacity=NUM_ROWS, seed=0)
    sample.update(a, b)
    trained = train(affine, sample, projections, width=64, num_steps=400, seed=0)
    again = train(affine, sample, projections, width=64, num_steps=400, seed=0)
    assert trained.hidden is not None
    assert again.hidden is not None
    assert torch.equal(trained.project.weight, again.project.weight)

    def error(prediction: torch.Tensor) -> float:
        return float((prediction - b).square().mean())

    codes = affine.encode_h(a)
    trained_error = error(trained.project(torch.nn.functional.silu(trained.hidden(codes))))
    assert trained_error < error(affine.project(codes)) / 2
