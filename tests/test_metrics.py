"""`scd_trt.evaluate.metrics` against plain formulas in float64 and cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scd_trt.evaluate import metrics
from scd_trt.evaluate.metrics import (
    MetricError,
    Reference,
    bootstrap_interval,
    compare_logits,
    gap_recovered,
    kl,
    nll,
    ratio_interval,
    relative_loss,
    top1_agreement,
    worst_decile,
)

# Sums of at most 101 float64 terms of order one: a few hundred roundings of 1.1e-16.
FLOAT64_ROUNDING = 1e-13


def random_logits(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(num_tokens, 101, generator=generator)).to(dtype)


def plain_softmax(row: list[float]) -> list[float]:
    exponentials = [math.exp(value - max(row)) for value in row]
    return [value / sum(exponentials) for value in exponentials]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_equals_the_plain_formula_across_row_chunks(dtype: torch.dtype) -> None:
    num_tokens = metrics._ROWS_AT_A_TIME * 2 + 3
    p_logits, q_logits = random_logits(num_tokens, 0, dtype), random_logits(num_tokens, 1, dtype)
    expected = []
    for p_row, q_row in zip(p_logits.double().tolist(), q_logits.double().tolist(), strict=True):
        p, q = plain_softmax(p_row), plain_softmax(q_row)
        expected.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    result = kl(p_logits, q_logits)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(expected, abs=FLOAT64_ROUNDING)


def test_kl_is_directed_and_zero_only_for_equals() -> None:
    p_logits, q_logits = torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([[0.0, 0.0]])
    assert kl(p_logits, q_logits).item() == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7
    )  # fp32 input
    assert kl(p_logits, q_logits).item() != pytest.approx(kl(q_logits, p_logits).item(), abs=1e-3)
    assert kl(q_logits, q_logits + 7).item() == 0.0


def test_kl_of_excluded_tokens() -> None:
    excludes_last = torch.tensor([[0.0, 0.0, -math.inf]])
    uniform = torch.zeros(1, 3)
    assert kl(excludes_last, uniform).item() == pytest.approx(math.log(1.5), abs=FLOAT64_ROUNDING)
    assert kl(excludes_last, excludes_last).item() == 0.0
    assert kl(uniform, excludes_last).item() == math.inf


def test_kl_resolves_differences_that_float32_cannot() -> None:
    p_logits = random_logits(1, 2).double()
    q_logits = p_logits + 1e-6 * torch.randn(p_logits.shape, generator=torch.Generator().manual_seed(3)).double()
    # Second order: KL = half the variance of the logit difference under p; the third-order term is smaller by 1e-6.
    p = p_logits.softmax(-1)
    difference = q_logits - p_logits
    variance = (p * difference**2).sum() - (p * difference).sum() ** 2
    assert kl(p_logits, q_logits).item() == pytest.approx(0.5 * variance.item(), rel=1e-3)


def test_nll_equals_the_plain_formula() -> None:
    logits = random_logits(40, 4)
    targets = torch.arange(40)
    expected = [-math.log(plain_softmax(row)[index]) for index, row in enumerate(logits.double().tolist())]
    assert nll(logits, targets).tolist() == pytest.approx(expected, abs=FLOAT64_ROUNDING)


def test_top1_agreement_per_token() -> None:
    p_logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 1.0]])
    q_logits = torch.tensor([[0.0, 9.0], [0.0, 3.0], [2.0, 2.0]])
    assert top1_agreement(p_logits, q_logits).tolist() == [1.0, 0.0, 1.0]


def test_compare_logits_averages_each_metric() -> None:
    oracle, method, targets = random_logits(5, 5), random_logits(5, 6), torch.tensor([0, 1, 2, 3, 4])
    result = compare_logits(oracle, method, targets_T=targets)
    assert result.kl == kl(oracle, method).mean().item()
    assert result.top1_agreement == top1_agreement(oracle, method).mean().item()
    assert result.nll_increase == (nll(method, targets).mean() - nll(oracle, targets).mean()).item()
    assert result.num_tokens == 5


def test_shapes_that_do_not_match() -> None:
    with pytest.raises(MetricError, match=r"\(2, 3\) and \(2, 4\)"):
        kl(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(MetricError, match=r"\(3,\) and \(3,\)"):
        top1_agreement(torch.zeros(3), torch.zeros(3))
    with pytest.raises(MetricError, match=r"logits \(2, 3\) and targets \(3,\)"):
        nll(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(MetricError, match="no scored tokens"):
        compare_logits(torch.zeros(0, 3), torch.zeros(0, 3), targets_T=torch.zeros(0))


def test_gap_recovered_for_scores_and_losses() -> None:
    assert gap_recovered(0.7, 0.1, 0.9) == pytest.approx(0.75)
    assert gap_recovered(2.5, 4.0, 2.0) == pytest.approx(0.75)
    assert gap_recovered(0.0, 0.1, 0.9) < 0
    with pytest.raises(MetricError, match=r"both score 0\.5"):
        gap_recovered(0.4, 0.5, 0.5)


def test_worst_decile_by_hand() -> None:
    values = [float(value) for value in range(20)]
    assert worst_decile(values, higher_is_worse=True) == 18.5
    assert worst_decile(values, higher_is_worse=False) == 0.5
    assert worst_decile([5.0, 1.0], higher_is_worse=True) == 5.0
    assert worst_decile([0.0] * 10 + [3.0], higher_is_worse=True) == 1.5


def test_bootstrap_interval_matches_the_normal_approximation() -> None:
    values = np.random.default_rng(0).normal(10.0, 2.0, size=400)
    interval = bootstrap_interval(values.tolist(), seed=1, num_resamples=4000)
    standard_error = values.std() / 20
    assert interval.mean == pytest.approx(values.mean(), abs=1e-12)  # summation order
    # A 97.5 % quantile of 4,000 draws has a standard deviation of about 0.05 standard errors; allow four.
    assert interval.low == pytest.approx(values.mean() - 1.96 * standard_error, abs=0.2 * standard_error)
    assert interval.high == pytest.approx(values.mean() + 1.96 * standard_error, abs=0.2 * standard_error)
    assert interval.num_values == 400


def test_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for trial in range(200):
        interval = bootstrap_interval(
            generator.exponential(1.0, 60).tolist(), seed=trial, confidence=0.8, num_resamples=200
        )
        covered += interval.low <= 1.0 <= interval.high
    # Binomial(200, 0.8) is within 143..177 at three standard deviations; skew and 200 resamples cost a few per cent below.
    assert 135 <= covered <= 177


def test_bootstrap_is_seeded() -> None:
    values = np.random.default_rng(0).normal(size=100).tolist()
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_clusters_are_drawn_whole() -> None:
    values, labels = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 5, ["a", "a", "a", "b", "b", "b"] * 5
    clustered = bootstrap_interval(values, seed=0, clusters=labels)
    # Two clusters give means 0, 1/2 or 1 only, so the interval must reach both ends; independent draws stay far inside.
    assert (clustered.low, clustered.mean, clustered.high) == (0.0, 0.5, 1.0)
    independent = bootstrap_interval(values, seed=0)
    assert 0.2 < independent.low < independent.high < 0.8
    assert bootstrap_interval(values, seed=0, clusters=list(range(30))) == independent


def test_clusters_of_unequal_size_weigh_by_their_size() -> None:
    labels = ["big", "big", "big", "small"]
    assert bootstrap_interval([1.0, 1.0, 1.0, 0.0], seed=0, clusters=labels).mean == 0.75
    # Whatever is drawn, the mean of equal values is that value, though the number of values drawn varies.
    equal = bootstrap_interval([2.0] * 4, seed=0, clusters=labels)
    assert (equal.low, equal.high) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [([], "at least one number"), ([1.0, math.nan], "value 1 is nan"), ([math.inf], "value 0 is inf")],
)
def test_values_that_cannot_be_averaged(values: list[float], message: str) -> None:
    with pytest.raises(MetricError, match=message):
        bootstrap_interval(values, seed=0)
    with pytest.raises(MetricError, match=message):
        worst_decile(values, higher_is_worse=True)


def test_bootstrap_arguments() -> None:
    with pytest.raises(MetricError, match="1 cluster labels for 2 values"):
        bootstrap_interval([1.0, 2.0], seed=0, clusters=["a"])
    with pytest.raises(MetricError, match="confidence=95"):
        bootstrap_interval([1.0], seed=0, confidence=95)


def test_a_reference_compares_each_method_as_if_alone() -> None:
    num_tokens = metrics._ROWS_AT_A_TIME + 3
    oracle, targets = random_logits(num_tokens, 5), torch.arange(num_tokens)
    reference = Reference(oracle, targets_T=targets)
    for method in (oracle, random_logits(num_tokens, 6), random_logits(num_tokens, 7, torch.bfloat16)):
        found = reference.compare(method)
        assert found.kl == kl(oracle, method).mean().item()
        assert found.top1_agreement == top1_agreement(oracle, method).mean().item()
        assert found.nll == nll(method, targets).mean().item()
        assert found.nll_oracle == nll(oracle, targets).mean().item()
    assert reference.compare(oracle).kl == 0.0
    with pytest.raises(MetricError, match=r"\(35, 101\) and \(34, 101\)"):
        reference.compare(oracle[:-1])


def test_a_ratio_draws_both_sides_together() -> None:
    # whatever is drawn, the value is half of its reference, though the references differ a hundredfold
    references = [1.0, 100.0, 3.0, 50.0]
    half = ratio_interval([reference / 2 for reference in references], references, seed=0)
    assert (half.low, half.mean, half.high, half.num_values) == (0.5, 0.5, 0.5, 4)
    # two clusters: ratios 0, 1/4 and 1
    found = ratio_interval([0.0, 0.0, 1.0], [2.0, 1.0, 1.0], seed=0, clusters=["a", "a", "b"])
    assert (found.low, found.mean, found.high) == (0.0, 0.25, 1.0)
    with pytest.raises(MetricError, match="2 values and 1 references"):
        ratio_interval([1.0, 2.0], [1.0], seed=0)
    with pytest.raises(MetricError, match="references add up to zero"):
        ratio_interval([1.0, 2.0], [0.0, 0.0], seed=0)


def test_relative_loss_is_paired() -> None:
    generator = np.random.default_rng(3)
    # hard and easy questions: scores differ widely, a method loses a tenth on each
    reference = generator.uniform(0, 1, 60)
    loss = relative_loss((0.9 * reference).tolist(), reference.tolist(), seed=0)
    # sums of 60 terms
    assert (loss.low, loss.mean, loss.high) == pytest.approx((0.1, 0.1, 0.1), abs=FLOAT64_ROUNDING)
    apart = bootstrap_interval((0.9 * reference).tolist(), seed=0)
    assert apart.high - apart.low > 0.1
    assert relative_loss([0.9], [0.6], seed=0).mean == pytest.approx(-0.5)
    with pytest.raises(MetricError, match="1 scores and 2 references"):
        relative_loss([1.0], [1.0, 1.0], seed=0)
    with pytest.raises(MetricError, match="references add up to zero"):
        relative_loss([1.0], [0.0], seed=0)


def test_draws_of_nothing_but_zeros_are_left_out_of_a_ratio() -> None:
    found = relative_loss([0.0, 0.5], [0.0, 1.0], seed=0)
    assert (found.low, found.mean, found.high) == (0.5, 0.5, 0.5)
