"""Fit of a group transform: the consumer's rows predicted, decorrelated and quantised under one rate (METHOD, section 2).

Shapes: I features of a group's producer rows, O consumer rows, C components, S sent components. For one group of layers and
one kind of rows (keys before RoPE, or values), with centred `x_I`, `y_O` and weights `w` (what an error costs, `fisher`: of
each element, or a matrix), all in float64:

    regression    W_IO = (C_xx + lambda I)^-1 C_xy            consumer-space ridge; lambda = ridge * mean diagonal of C_xx
    components    U of  w^1/2 W' C_xx W w^1/2 = U diag(s) U'  weighted PCA of the *predicted* rows, largest s first
    bits          `rate_distortion.allocate_groups` on s, all groups and kinds under one Lagrangian
    step          2 * loading(b) * sqrt(s) / 2^b              `quantiser`, loading of a Gaussian

so that `cell = clamp(floor((x - mean) @ encode), -2^(b-1), 2^(b-1) - 1)` with `encode = W w^1/2 U_S / step`, and
`y ~ (cell + 1/2) * step @ U_S' w^-1/2 + mean_y = cell @ decode + bias`. Both matrices are stored in bfloat16; bias and
shifts of sinks are computed from the matrices as they are stored, so that rounding moves neither means nor sinks. Nothing
is refitted to the rounded matrices: on the demo pair the rounded encoder adds 0.1 % to the error of components of up to six
bits, 0.7 % to those of eight.

Predicted loss in nats per scored token is `1/2 * S_prefix * (sum_c s_c D(b_c) + translation)`, `translation` being the
weighted variance that no linear map of the features explains; it is the floor that no rate gets below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.distill.quantiser import DistortionTable
from scd_trt.distill.rate_distortion import Allocation
from scd_trt.distill.statistics import Moments
from scd_trt.translator import MATRIX_DTYPE, RowTransform


@dataclass(frozen=True)
class Spectrum:
    """Predicted consumer rows in the basis that decorrelates them under the weights.

    Attributes:
        analyse_IC: centred features to components.
        synthesise_CO: components to centred consumer rows.
        variance_C: weighted variance of each component, falling.
        translation: weighted variance of the consumer's rows that the regression leaves unexplained.
    """

    analyse_IC: Tensor
    synthesise_CO: Tensor
    variance_C: Tensor
    mean_I: Tensor
    mean_O: Tensor
    translation: float


@dataclass(frozen=True)
class SinkRows:
    """Rows that position 0 may have, of the producer `[K, I]` and of the consumer `[K, O]`, float64.

    A sequence's first token is an attention sink: its row lies so far from all others that no quantiser for those holds it,
    and all later tokens see an error there. Nothing precedes it: prompts that begin with the same token have the same row.
    """

    mean_KI: Tensor
    mean_KO: Tensor


def spectrum(moments: Moments, weights: Tensor, *, ridge: float) -> Spectrum:
    """Regress, weight and decorrelate the rows of one group and kind.

    Args:
        weights: `[O]`, positive, or `[O, O]`, positive definite.
    """
    return decorrelated(moments, regression(moments, ridge=ridge), weights)


def regression(moments: Moments, *, ridge: float) -> Tensor:
    """The map `[I, O]` of centred features to centred consumer rows."""
    width, covariance_nn = moments.width_a, moments.covariance()
    covariance_II, covariance_IO = covariance_nn[:width, :width], covariance_nn[:width, width:]
    shift = ridge * covariance_II.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    gram_II = covariance_II + torch.eye(width, dtype=torch.float64) * shift
    return torch.cholesky_solve(covariance_IO, torch.linalg.cholesky(gram_II))


def decorrelated(moments: Moments, map_IO: Tensor, weights: Tensor) -> Spectrum:
    """Weighted principal components of what a map predicts; weights as in `spectrum`."""
    width, covariance_nn = moments.width_a, moments.covariance()
    covariance_II = covariance_nn[:width, :width]
    root, inverse_root = _roots(weights)
    weighted_IO = _times(map_IO, root)
    variance_C, vectors_OC = torch.linalg.eigh(weighted_IO.T @ covariance_II @ weighted_IO)
    vectors_OC = _fixed_signs(vectors_OC.flip(1))
    return Spectrum(
        analyse_IC=weighted_IO @ vectors_OC,
        synthesise_CO=_times(vectors_OC.T, inverse_root),
        variance_C=variance_C.flip(0).clamp_min(0.0),
        mean_I=moments.mean_n[:width],
        mean_O=moments.mean_n[width:],
        translation=_unexplained(covariance_nn, map_IO, root),
    )


def _unexplained(covariance_nn: Tensor, map_IO: Tensor, root: Tensor) -> float:
    """Weighted variance of what the map leaves of the consumer's rows."""
    error_nO = torch.cat([-map_IO, torch.eye(map_IO.shape[1], dtype=torch.float64)])
    weighted_nO = _times(error_nO, root)
    return float((weighted_nO * (covariance_nn @ weighted_nO)).sum(0).clamp_min(0.0).sum())


def _roots(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of weights and its inverse, of elements or of the matrix."""
    if weights.dim() == 1:
        return weights.sqrt(), weights.rsqrt()
    value_O, vectors_OO = torch.linalg.eigh(weights)
    return (vectors_OO * value_O.sqrt()) @ vectors_OO.T, (vectors_OO * value_O.rsqrt()) @ vectors_OO.T


def _times(rows_XO: Tensor, root: Tensor) -> Tensor:
    return rows_XO * root if root.dim() == 1 else rows_XO @ root


def row_transform(
    found: Spectrum, allocation: Allocation, table: DistortionTable, *, sinks: SinkRows | None = None
) -> RowTransform:
    """The maps of the components that are sent, in packing order."""
    sent_S = allocation.sent_S
    widths_S = allocation.widths_C[sent_S]
    # a packing unit may carry a component without spread, a millionth of the largest: the rounding of a float64 variance;
    # any step will do for it, whatever the unit of the weights
    least = max(float(found.variance_C.max().sqrt()) * 1e-6, torch.finfo(torch.float32).tiny)
    deviation_S = found.variance_C[sent_S].sqrt().clamp_min(least)
    step_S = table.steps(widths_S, deviation_S)
    decode_SO = (found.synthesise_CO[sent_S] * step_S[:, None]).to(MATRIX_DTYPE).contiguous()
    encode_IS = (found.analyse_IC[:, sent_S] / step_S).to(MATRIX_DTYPE).contiguous()
    bias_O = found.mean_O + decode_SO.double().sum(0) / 2
    return RowTransform(
        layout=allocation.layout,
        mean_I=found.mean_I.float(),
        encode_IS=encode_IS,
        decode_SO=decode_SO,
        bias_O=bias_O.float(),
        sink_in_KI=None if sinks is None else (sinks.mean_KI - found.mean_I).float(),
        sink_out_KO=None if sinks is None else sinks.mean_KO.float(),
    )


def predicted_kl(spectra: Sequence[Spectrum], allocations: Sequence[Allocation], *, prefix_tokens: int) -> float:
    """Loss in nats per scored token that the model of this file predicts for a prefix of that length."""
    coding = sum(allocation.predicted_distortion for allocation in allocations)
    return 0.5 * prefix_tokens * (coding + sum(found.translation for found in spectra))


def _fixed_signs(vectors_OC: Tensor) -> Tensor:
    """Eigenvectors with their largest entry positive: equal input, equal output."""
    largest_1C = vectors_OC.gather(0, vectors_OC.abs().argmax(0, keepdim=True))
    return vectors_OC * torch.where(largest_1C < 0, -1.0, 1.0)
