"""Streamed moments: equal to one-shot formulas, mergeable, and exactly restorable."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scd_trt.distill.statistics import Moments, PairStatistics, StatisticsError

# float64 sums of a few hundred rows of size 1 in another order; the offset of 100 costs two more digits
CLOSE = {"rtol": 0, "atol": 1e-10}


def _rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # a mean far above the spread: summing raw products would lose these digits in float32
    return torch.randn(num_rows, width, generator=generator) + 100.0


def _one_shot(a: torch.Tensor, b: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    rows = np.concatenate([a.double().numpy(), b.double().numpy()], axis=1)
    return rows.mean(0), np.cov(rows, rowvar=False, bias=True)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(sum))
@settings(max_examples=30, deadline=None)
def test_streamed_equals_one_shot(batch_sizes):
    a, b = _rows(sum(batch_sizes), 5), _rows(sum(batch_sizes), 3, seed=1)
    moments = Moments(5, 3)
    for a_batch, b_batch in zip(a.split(batch_sizes), b.split(batch_sizes), strict=True):
        moments.update(a_batch, b_batch)
    mean, covariance = _one_shot(a, b)
    assert moments.count == sum(batch_sizes)
    np.testing.assert_allclose(moments.mean_n.numpy(), mean, **CLOSE)
    np.testing.assert_allclose(moments.covariance().numpy(), covariance, **CLOSE)


def test_merged_shards_equal_one_stream():
    a, b = _rows(90, 4), _rows(90, 4, seed=1)
    first, second, whole = Moments(4, 4), Moments(4, 4), Moments(4, 4)
    first.update(a[:20], b[:20])
    second.update(a[20:], b[20:])
    whole.update(a, b)
    first.merge(second)
    first.merge(Moments(4, 4))
    assert first.count == whole.count
    torch.testing.assert_close(first.mean_n, whole.mean_n, **CLOSE)
    torch.testing.assert_close(first.cross_nn, whole.cross_nn, rtol=0, atol=1e-8)  # 90 rows of products near 1


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((3, 4), (2, 2)), ((3, 5), (3, 2)), ((3, 4), (3, 3))], ids=["rows", "producer", "consumer"]
)
def test_rows_that_do_not_pair_up_are_refused(a_shape, b_shape):
    with pytest.raises(ValueError, match=r"expected \[T, 4\] and \[T, 2\]"):
        Moments(4, 2).update(torch.zeros(a_shape), torch.zeros(b_shape))


def test_values_that_are_not_finite_are_refused_and_leave_the_moments_alone():
    moments = Moments(1, 1)
    moments.update(torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(ValueError, match="not finite"):
        moments.update(torch.tensor([[1.0], [float("inf")]]), torch.ones(2, 1))
    assert moments.count == 2
    assert moments.mean_n.tolist() == [1.0, 1.0]


def test_no_rows_have_no_covariance():
    with pytest.raises(ValueError, match="no rows"):
        Moments(1, 1).covariance()


def _pair(seed: int | None = None, layers: tuple[int, ...] = (1,)) -> PairStatistics:
    statistics = PairStatistics(
        {(layer, "k"): (2, 2) for layer in range(2)} | {(layer, "x"): (3, 3) for layer in layers}
    )
    if seed is not None:
        for moments in statistics.moments.values():
            width = moments.width_a
            moments.update(_rows(7, width, seed), _rows(7, width, seed + 1))
        statistics.num_sequences += 1
    return statistics


def test_restored_state_is_bit_equal(tmp_path):
    path = tmp_path / "partial.safetensors"
    original = _pair(seed=3)
    original.save(path, key="this")
    restored = _pair()
    restored.restore(path, key="this")
    assert (restored.num_sequences, restored.num_tokens) == (1, 7)
    for key, moments in original.moments.items():
        assert restored[key].count == moments.count
        assert torch.equal(restored[key].mean_n, moments.mean_n)
        assert torch.equal(restored[key].cross_nn, moments.cross_nn)
    assert list(tmp_path.iterdir()) == [path]


def test_state_of_another_calibration_is_refused(tmp_path):
    path = tmp_path / "partial.safetensors"
    _pair(seed=3).save(path, key="that")
    with pytest.raises(StatisticsError, match="belongs to calibration that, this one is this"):
        _pair().restore(path, key="this")
    with pytest.raises(StatisticsError, match="other tensors"):
        _pair(layers=(0, 1)).restore(path, key="that")


def test_damaged_state_is_refused(tmp_path):
    path = tmp_path / "partial.safetensors"
    _pair(seed=3).save(path, key="this")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(StatisticsError, match="delete it"):
        _pair().restore(path, key="this")


def test_memory_does_not_grow_with_tokens():
    statistics = _pair(seed=3)
    before = statistics.num_bytes
    for seed in range(50):
        for moments in statistics.moments.values():
            moments.update(_rows(64, moments.width_a, seed), _rows(64, moments.width_a, seed))
    assert statistics.num_bytes == before
