"""Which of the producer's layers each group of the consumer's layers is computed from (METHOD, 2.1).

Models of one shape need no choice: a group is computed from its own layers. Where the shapes differ, or the pair file asks
for `source_layers`, the most predictive layers are chosen on calibration text, for keys and values together.

Shapes: T tokens, F elements of a layer's keys or values, L layers; letters A and B for producer and consumer.

Correlations between all layers of both models would need `(L_A F_A + L_B F_B)^2` numbers. What is streamed instead are the
moments of a seeded sample of elements (`SourceProbes`): `NUM_SOURCE_ELEMENTS` of each producer layer, `NUM_TARGET_ELEMENTS`
of each consumer layer, of keys before RoPE and of values. So memory is O((L_A + L_B)^2) whatever the width, and what is
compared is scale-free: the mean share of the variance of a target element that a linear map of the sources explains.

The choice is greedy (`most_predictive`): each step takes the layer that explains most of what those already taken leave over,
so a neighbour that says the same again is passed over. A source must lie near its group in relative depth (`MAX_DISTANCE`):
codes of a group leave when its last source layer is done, and a first group that waited for a late layer would hold back
all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scd_trt.distill.statistics import Moments
from scd_trt.model_spec import ModelSpec
from scd_trt.models import ModelTrace

NUM_SOURCE_ELEMENTS = 64
NUM_TARGET_ELEMENTS = 16

MAX_PROBED_TOKENS = 8192
"""Calibration tokens that the choice looks at, at most: it settles long before the regression does."""

MAX_DISTANCE = 0.25
"""Farthest that a source may lie from its group, as a share of the model's depth."""

RIDGE = 1e-2
"""Ridge weight on correlations: what a sample of a few thousand tokens cannot tell from chance."""


class SourceProbes:
    """Streamed correlations between sampled elements of every layer of both models."""

    def __init__(self, producer: ModelSpec, consumer: ModelSpec, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._elements_a = _sampled(producer, NUM_SOURCE_ELEMENTS, generator)
        self._elements_b = _sampled(consumer, NUM_TARGET_ELEMENTS, generator)
        width_a, width_b = self._elements_a.numel(), self._elements_b.numel()
        self._keys, self._values = Moments(width_a, width_b), Moments(width_a, width_b)

    @property
    def num_layers(self) -> tuple[int, int]:
        """Layers of the producer and of the consumer."""
        return len(self._elements_a), len(self._elements_b)

    @property
    def num_tokens(self) -> int:
        """Tokens folded in."""
        return self._keys.count

    @property
    def num_bytes(self) -> int:
        """Memory of the moments."""
        return sum(8 * moments.cross_nn.numel() for moments in (self._keys, self._values))

    def update(self, traced_a: ModelTrace, traced_b: ModelTrace, *, num_sinks: int) -> None:
        """Fold in one sequence but for its first tokens, whose outlying rows would hide all others."""
        for moments, rows_a, rows_b in (
            (self._keys, traced_a.k_TF, traced_b.k_TF),
            (self._values, traced_a.v_TF, traced_b.v_TF),
        ):
            moments.update(_picked(rows_a, self._elements_a)[num_sinks:], _picked(rows_b, self._elements_b)[num_sinks:])

    def best(self, layers: range, *, num_sources: int) -> tuple[int, ...]:
        """The producer layers that predict a group of consumer layers best, ascending; fewer if it has no more."""
        num_a, num_b = self.num_layers
        candidates = _candidates(layers, num_a, num_b, at_least=num_sources)
        size_a, size_b = self._elements_a.shape[1], self._elements_b.shape[1]
        start = num_a * size_a
        return most_predictive(
            [_correlation(moments) for moments in (self._keys, self._values)],
            {layer: slice(layer * size_a, (layer + 1) * size_a) for layer in candidates},
            slice(start + layers.start * size_b, start + layers.stop * size_b),
            num_chosen=num_sources,
        )


def most_predictive(
    correlations: Sequence[Tensor], blocks: dict[int, slice], targets: slice, *, num_chosen: int
) -> tuple[int, ...]:
    """Greedy choice of blocks of variables that explain the targets together.

    Args:
        correlations: `[n, n]` each; what is explained is summed over them.
        blocks: where each candidate's variables stand.
    Returns:
        names of the chosen blocks, ascending.
    """
    left, remaining = list(correlations), dict(blocks)
    while remaining and len(blocks) - len(remaining) < num_chosen:
        gains = {name: sum(_explained(found, block, targets) for found in left) for name, block in remaining.items()}
        block = remaining.pop(max(gains, key=gains.__getitem__))
        left = [_without(found, block) for found in left]
    return tuple(sorted(set(blocks) - set(remaining)))


def _explained(covariance_nn: Tensor, block: slice, targets: slice) -> float:
    """Variance of the targets that a ridge regression on the block explains."""
    root_BB = _root(covariance_nn, block)
    whitened_BT = torch.linalg.solve_triangular(root_BB, covariance_nn[block, targets], upper=False)
    return float(whitened_BT.square().sum())


def _without(covariance_nn: Tensor, block: slice) -> Tensor:
    """Covariance of what a regression on the block leaves over."""
    whitened_Bn: Tensor = torch.linalg.solve_triangular(_root(covariance_nn, block), covariance_nn[block], upper=False)
    return covariance_nn - whitened_Bn.T @ whitened_Bn


def _root(covariance_nn: Tensor, block: slice) -> Tensor:
    gram_BB = covariance_nn[block, block]
    root_BB: Tensor = torch.linalg.cholesky(gram_BB + RIDGE * torch.eye(len(gram_BB), dtype=gram_BB.dtype))
    return root_BB


def _correlation(moments: Moments) -> Tensor:
    covariance_nn = moments.covariance()
    # a constant element has no correlation with anything
    scale_n = covariance_nn.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    return covariance_nn * scale_n * scale_n[:, None]


def _candidates(layers: range, num_a: int, num_b: int, *, at_least: int) -> list[int]:
    """Producer layers near a group in relative depth; the nearest ones if those are too few."""

    def distance(layer: int) -> float:
        return max(layers.start / num_b - (layer + 1) / num_a, layer / num_a - layers.stop / num_b, 0.0)

    nearest = sorted(range(num_a), key=distance)
    num_near = sum(distance(layer) <= MAX_DISTANCE for layer in nearest)
    return sorted(nearest[: max(num_near, at_least)])


def _sampled(spec: ModelSpec, num_elements: int, generator: torch.Generator) -> Tensor:
    """Indices of some elements of every layer, `[L, E]`."""
    rows = [torch.randperm(spec.kv_dim, generator=generator)[:num_elements] for _ in range(spec.num_layers)]
    return torch.stack(rows)


def _picked(rows: Sequence[Tensor], elements_LE: Tensor) -> Tensor:
    return torch.cat([rows_TF[:, picked_E] for rows_TF, picked_E in zip(rows, elements_LE, strict=True)], dim=1)
