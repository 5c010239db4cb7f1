"""Numbers that say how far one set of logits, or of scores, is from another.

Owns: per-token divergences between two models' logits, and summaries over requests with their uncertainty.
Letters: T tokens, V vocabulary. Divergences are in nats, computed in float64 whatever the dtype of the logits, a few rows
at a time, so memory beyond the inputs does not grow with T.

The reference distribution `p` is always the consumer with its own cache (the oracle), `q` the one under test:
    kl        sum_v p(v) (log p(v) - log q(v))
    nll       -log q(target)
    gap       (method - no cache) / (oracle - no cache): 1 is as good as the oracle, 0 as bad as nothing

Intervals are percentile bootstrap (Efron 1979). Questions about one text are not independent draws: give `clusters`, and
whole texts are resampled. For a difference of two methods pass the per-question differences.

Errors: `MetricError` for shapes that do not match, no values, values that are not finite, or a gap of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
    if logits_TV.ndim != 2 or targets_T.shape != logits_TV.shape[:1]:
        raise MetricError(
            f"logits {tuple(logits_TV.shape)} and targets {tuple(targets_T.shape)} must be [T, V] and [T]"
        )
    return _by_rows(_nll_rows, logits_TV, targets_T)


def compare_logits(
    oracle_logits_TV: torch.Tensor, method_logits_TV: torch.Tensor, *, targets_T: torch.Tensor
) -> LogitComparison:
    """All divergences of one request, averaged over its tokens."""
    if not len(targets_T):
        raise MetricError("a request with no scored tokens cannot be compared")
    return LogitComparison(
        kl=float(kl(oracle_logits_TV, method_logits_TV).mean()),
        top1_agreement=float(top1_agreement(oracle_logits_TV, method_logits_TV).mean()),
        nll=float(nll(method_logits_TV, targets_T).mean()),
        nll_oracle=float(nll(oracle_logits_TV, targets_T).mean()),
        num_tokens=len(targets_T),
    )


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
    if num_resamples < 1 or not 0 < confidence < 1:
        raise MetricError(f"num_resamples={num_resamples} must be positive and confidence={confidence} between 0 and 1")
    checked = _finite(values)
    sums, sizes = _cluster_totals(checked, clusters)
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    for index in range(num_resamples):
        drawn = generator.integers(len(sums), size=len(sums))
        means[index] = sums[drawn].sum() / sizes[drawn].sum()
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(checked.mean()), float(low), float(high), confidence, len(checked))


def _cluster_totals(values: np.ndarray, clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    if clusters is None:
        return values, np.ones_like(values)
    if len(clusters) != len(values):
        raise MetricError(f"{len(clusters)} cluster labels for {len(values)} values; give one label per value")
    index_of = {label: index for index, label in enumerate(dict.fromkeys(clusters))}
    indices = np.array([index_of[label] for label in clusters])
    return np.bincount(indices, weights=values), np.bincount(indices).astype(np.float64)


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


def _by_rows(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], first_TV: torch.Tensor, second_T: torch.Tensor
) -> torch.Tensor:
    pairs = zip(torch.split(first_TV, _ROWS_AT_A_TIME), torch.split(second_T, _ROWS_AT_A_TIME), strict=True)
    return torch.cat([function(first, second) for first, second in pairs])


def _kl_rows(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    log_p = p_logits.double().log_softmax(-1)
    log_q = q_logits.double().log_softmax(-1)
    p = log_p.exp()
    # A token that p excludes contributes nothing, though its 0 * (-inf - ...) would be nan; rounding may leave -1e-17 in sum.
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp_min(0.0)


def _nll_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -logits.double().log_softmax(-1).gather(-1, targets.long()[:, None])[:, 0]
