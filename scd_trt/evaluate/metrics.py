"""Numbers that say how far one set of logits, or of scores, is from another.

Owns: per-token divergences between two models' logits, and summaries over requests with their uncertainty.
Letters: T tokens, V vocabulary. Divergences are in nats, computed in float64 whatever the dtype of the logits, a few rows
at a time, so memory beyond the inputs does not grow with T.

The reference distribution `p` is always the consumer with its own cache (the oracle), `q` the one under test:
    kl        sum_v p(v) (log p(v) - log q(v))
    nll       -log q(target)
    gap       (method - no cache) / (oracle - no cache): 1 is as good as the oracle, 0 as bad as nothing

Intervals are percentile bootstrap (Efron 1979). Questions about one text are not independent draws: give `clusters`, and
whole texts are resampled. Two methods on the same items share what makes an item hard, so they are compared pair by pair:
for a difference pass the per-item differences, for a ratio use `ratio_interval` and `relative_loss`.

Errors: `MetricError` for shapes that do not match, no values, values that are not finite, or a gap of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scd_trt.config import ScdError

_ROWS_AT_A_TIME = 32


class MetricError(ScdError):
    """A metric is not defined for what it was given."""


@dataclass(frozen=True)
class Interval:
    """A mean and its bootstrap interval.

    Attributes:
        mean: of the values themselves.
        low, high: bounds of the central `confidence` share of the resampled means.
        confidence: between 0 and 1.
        num_values: how many values were given.
    """

    mean: float
    low: float
    high: float
    confidence: float
    num_values: int


@dataclass(frozen=True)
class LogitComparison:
    """How one request's logits differ from the oracle's, averaged over its T scored tokens.

    Attributes:
        kl: nats per token, oracle against method.
        top1_agreement: share of tokens whose most likely successor is the same.
        nll: nats per token of the true continuation under the method.
        nll_oracle: the same under the oracle.
        num_tokens: T.
    """

    kl: float
    top1_agreement: float
    nll: float
    nll_oracle: float
    num_tokens: int

    @property
    def nll_increase(self) -> float:
        """Nats per token lost against the oracle; negative when the method predicts the text better."""
        return self.nll - self.nll_oracle


class Reference:
    """The oracle's logits over one request's T scored tokens, prepared once for comparison with many methods.

    Holds `[T, V]` float64: half a megabyte per token of a vocabulary of 65,536.
    """

    def __init__(self, oracle_logits_TV: torch.Tensor, *, targets_T: torch.Tensor) -> None:
        _check_targets(oracle_logits_TV, targets_T)
        if not len(targets_T):
            raise MetricError("a request with no scored tokens cannot be compared")
        self._log_p_TV = _by_rows(_log_softmax, oracle_logits_TV)
        self._first_T = oracle_logits_TV.argmax(-1)
        self._targets_T1 = targets_T.long()[:, None]
        self._nll = float(-self._log_p_TV.gather(-1, self._targets_T1).mean())

    def compare(self, method_logits_TV: torch.Tensor) -> LogitComparison:
        """All divergences of a method from the oracle, averaged over the tokens."""
        _check_same_shape(self._log_p_TV, method_logits_TV)
        kl_T, nll_T = (torch.cat(found) for found in zip(*self._rows(method_logits_TV), strict=True))
        return LogitComparison(
            kl=float(kl_T.mean()),
            top1_agreement=float((self._first_T == method_logits_TV.argmax(-1)).double().mean()),
            nll=float(nll_T.mean()),
            nll_oracle=self._nll,
            num_tokens=len(kl_T),
        )

    def _rows(self, logits_TV: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        parts = (torch.split(tensor, _ROWS_AT_A_TIME) for tensor in (self._log_p_TV, logits_TV, self._targets_T1))
        for log_p, logits, targets in zip(*parts, strict=True):
            log_q = _log_softmax(logits)
            yield _kl_of(log_p, log_q), -log_q.gather(-1, targets)[:, 0]


def kl(p_logits_TV: torch.Tensor, q_logits_TV: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of every token, [T] float64; infinite where q excludes what p allows."""
    _check_same_shape(p_logits_TV, q_logits_TV)
    return _by_rows(_kl_rows, p_logits_TV, q_logits_TV)


def top1_agreement(p_logits_TV: torch.Tensor, q_logits_TV: torch.Tensor) -> torch.Tensor:
    """1.0 where both rank the same token first, else 0.0, [T] float64; of equal logits the lowest id is first."""
    _check_same_shape(p_logits_TV, q_logits_TV)
    return (p_logits_TV.argmax(-1) == q_logits_TV.argmax(-1)).double()


def nll(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of every target id under its row of logits, [T] float64."""
    _check_targets(logits_TV, targets_T)
    return _by_rows(_nll_rows, logits_TV, targets_T)


def compare_logits(
    oracle_logits_TV: torch.Tensor, method_logits_TV: torch.Tensor, *, targets_T: torch.Tensor
) -> LogitComparison:
    """All divergences of one request, averaged over its tokens."""
    return Reference(oracle_logits_TV, targets_T=targets_T).compare(method_logits_TV)


def gap_recovered(method: float, no_cache: float, oracle: float) -> float:
    """Share of the way from `no_cache` to `oracle` that `method` goes; works for scores and for losses alike."""
    if oracle == no_cache:
        raise MetricError(
            f"oracle and no cache both score {oracle}, so there is no gap to recover: the task needs no context"
        )
    return (method - no_cache) / (oracle - no_cache)


def worst_decile(values: Sequence[float], higher_is_worse: bool) -> float:
    """Mean of the worst tenth of the values, at least one of them."""
    ordered = sorted(_finite(values), reverse=higher_is_worse)
    num_worst = -(-len(ordered) // 10)
    return float(np.mean(ordered[:num_worst]))


def bootstrap_interval(
    values: Sequence[float],
    *,
    seed: int,
    num_resamples: int = 1000,
    confidence: float = 0.95,
    clusters: Sequence[Hashable] | None = None,
) -> Interval:
    """Mean of the values with its percentile bootstrap interval; the same arguments give the same interval.

    Args:
        clusters: one label per value; values with the same label are drawn together (None: every value by itself).
    """
    checked = _finite(values)
    return _resampled_ratio(
        checked, np.ones_like(checked), seed=seed, clusters=clusters, num_resamples=num_resamples, confidence=confidence
    )


def ratio_interval(
    values: Sequence[float],
    references: Sequence[float],
    *,
    seed: int,
    num_resamples: int = 1000,
    confidence: float = 0.95,
    clusters: Sequence[Hashable] | None = None,
) -> Interval:
    """Mean of the values over mean of the references, both of the same items, which are drawn together.

    Raises:
        MetricError: another number of references, or references that add up to zero.
    """
    checked, below = _finite(values), _finite(references)
    if checked.shape != below.shape:
        raise MetricError(f"{len(checked)} values and {len(below)} references; both must be of the same items")
    if not below.sum():
        raise MetricError("the references add up to zero: there is nothing to relate the values to")
    return _resampled_ratio(
        checked, below, seed=seed, clusters=clusters, num_resamples=num_resamples, confidence=confidence
    )


def relative_loss(
    scores: Sequence[float], reference_scores: Sequence[float], *, seed: int, clusters: Sequence[Hashable] | None = None
) -> Interval:
    """Share of the reference's mean score that is lost, `(reference - score) / reference`; negative is a gain."""
    checked, reference = _finite(scores), _finite(reference_scores)
    if checked.shape != reference.shape:
        raise MetricError(f"{len(checked)} scores and {len(reference)} references; both must be of the same items")
    return ratio_interval((reference - checked).tolist(), reference.tolist(), seed=seed, clusters=clusters)


def _resampled_ratio(
    above: np.ndarray,
    below: np.ndarray,
    *,
    seed: int,
    clusters: Sequence[Hashable] | None,
    num_resamples: int,
    confidence: float,
) -> Interval:
    if num_resamples < 1 or not 0 < confidence < 1:
        raise MetricError(f"num_resamples={num_resamples} must be positive and confidence={confidence} between 0 and 1")
    sums, sizes = _cluster_totals(above, clusters), _cluster_totals(below, clusters)
    generator = np.random.default_rng(seed)
    ratios = []
    for _ in range(num_resamples):
        drawn = generator.integers(len(sums), size=len(sums))
        # a draw of items on which the reference scores nothing says nothing about a ratio
        if total := sizes[drawn].sum():
            ratios.append(sums[drawn].sum() / total)
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(above.sum() / below.sum()), float(low), float(high), confidence, len(above))


def _cluster_totals(values: np.ndarray, clusters: Sequence[Hashable] | None) -> np.ndarray:
    if clusters is None:
        return values
    if len(clusters) != len(values):
        raise MetricError(f"{len(clusters)} cluster labels for {len(values)} values; give one label per value")
    index_of = {label: index for index, label in enumerate(dict.fromkeys(clusters))}
    totals: np.ndarray = np.bincount([index_of[label] for label in clusters], weights=values)
    return totals


def _finite(values: Sequence[float]) -> np.ndarray:
    checked = np.asarray(values, dtype=np.float64)
    if checked.ndim != 1 or not len(checked):
        raise MetricError(f"expected a list of at least one number, got shape {checked.shape}")
    wrong = np.flatnonzero(~np.isfinite(checked))
    if len(wrong):
        raise MetricError(f"value {wrong[0]} is {checked[wrong[0]]}; only finite values can be averaged")
    return checked


def _check_same_shape(p_logits_TV: torch.Tensor, q_logits_TV: torch.Tensor) -> None:
    if p_logits_TV.ndim != 2 or p_logits_TV.shape != q_logits_TV.shape:
        shapes = f"{tuple(p_logits_TV.shape)} and {tuple(q_logits_TV.shape)}"
        raise MetricError(f"logits of shapes {shapes} cannot be compared; both must be the same [T, V]")


def _check_targets(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> None:
    if logits_TV.ndim != 2 or targets_T.shape != logits_TV.shape[:1]:
        raise MetricError(
            f"logits {tuple(logits_TV.shape)} and targets {tuple(targets_T.shape)} must be [T, V] and [T]"
        )


def _by_rows(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    parts = zip(*(torch.split(tensor, _ROWS_AT_A_TIME) for tensor in tensors), strict=True)
    return torch.cat([function(*rows) for rows in parts])


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def _kl_rows(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    return _kl_of(_log_softmax(p_logits), _log_softmax(q_logits))


def _kl_of(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    p = log_p.exp()
    # A token that p excludes contributes nothing, though its 0 * (-inf - ...) would be nan; rounding may leave -1e-17 in sum.
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp_min(0.0)


def _nll_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -_log_softmax(logits).gather(-1, targets.long()[:, None])[:, 0]
