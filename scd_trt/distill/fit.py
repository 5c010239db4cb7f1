"""Closed-form fit of Reuse and Patch layers from streamed moments (METHOD, section 1).

Shapes: d = num_kv_heads * head_dim, M hidden size, R rank; letters `A`, `B` are the producer and the consumer.
All of it reads a covariance `C = [[C_AA C_AB] [C_BA C_BB]]` and a mean of joint rows `[a b]`, in float64:

    joint SVD        U_R = leading eigenvectors of C; the shared code of a centred row is Z = [a b] U_R;
                     its decoders are the halves of U_R: a ~ Z U_A', b ~ Z U_B'
    ridge encoder    W = argmin ||a W - Z||^2 + lambda ||W||^2 = (C_AA + lambda I)^-1 [C_AA C_AB] U_R,
                     lambda = ridge * mean diagonal of C_AA
    scale            codes a W have unit variance; the scale is folded into the decoder, so float16 neither overflows nor
                     falls into subnormals
    aligner (Patch)  G = argmin ||z G - x_B||^2 over the codes z that are sent; B's projections are folded in:
                     [k v] = z (G [W_K W_V]) + bias

Biases absorb all centring. Eigenvectors get the sign that makes their largest entry positive: equal input, equal output.

Deliberately not here: the trained aligner (`aligner`), whether Patch pays (`layer_selection`).
Errors: `FitError` for a rank that the layer cannot have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.config import Rank, ScdError
from scd_trt.distill.statistics import Kind, Moments, PairStatistics
from scd_trt.translator import AffineMap, PatchLayer, ReuseLayer

_DEAD_VARIANCE = 1e-12
"""Codes whose variance is below this share of the largest one are rounding noise: not blown up to unit variance."""

_RCOND = 1e-10
"""Directions of the codes below this share of the strongest one do not enter the least-squares aligner."""


class FitError(ScdError):
    """The configured rank does not suit the model."""


@dataclass(frozen=True)
class Projections:
    """The consumer's key and value projections of one layer.

    Attributes:
        weight_MO: `[M, 2d]`, keys first, acting on rows: `[k v] = x @ weight + bias`.
        bias_O: `[2d]`, zeros where the model has none.
        k_norm_D: scale of the per-head key norm as it multiplies (Gemma's `1 + w` already added), or None.
        k_norm_eps: its epsilon.
    """

    weight_MO: Tensor
    bias_O: Tensor
    k_norm_D: Tensor | None = None
    k_norm_eps: float = 0.0


@dataclass(frozen=True)
class Basis:
    """Eigenvectors `[n, n]` of a joint covariance, strongest first, with the covariance, mean and ridge they came from."""

    vectors_nn: Tensor
    covariance_nn: Tensor
    mean_n: Tensor
    width_a: int
    ridge: float


@dataclass(frozen=True)
class Code:
    """An encoder of the producer's rows and both halves that a decoder may be made of, float64.

    Attributes:
        encode_AR, bias_R: `z = a @ encode + bias`, zero mean and unit variance per element.
        decode_RB: the joint SVD's decoder into the consumer's rows, scale folded in.
    """

    encode_AR: Tensor
    bias_R: Tensor
    decode_RB: Tensor


class LayerFits:
    """Reuse and Patch layers of any rank from one set of moments; each covariance is decomposed once."""

    def __init__(self, statistics: PairStatistics, ridge: float) -> None:
        self._statistics = statistics
        self._ridge = ridge
        self._bases: dict[tuple[int, Kind], Basis] = {}

    def basis(self, layer: int, kind: Kind) -> Basis:
        """Eigenvectors of one layer's joint covariance."""
        if (layer, kind) not in self._bases:
            self._bases[layer, kind] = joint_basis(self._statistics[layer, kind], self._ridge)
        return self._bases[layer, kind]

    def reuse(self, layer: int, *, r_k: int, r_v: int) -> ReuseLayer:
        """A Reuse layer of these ranks."""
        return reuse_layer(self.basis(layer, "k"), self.basis(layer, "v"), r_k=r_k, r_v=r_v)

    def patch(self, layer: int, projections: Projections, *, r_h: int) -> PatchLayer:
        """A Patch layer of this rank, with the affine aligner."""
        return patch_layer(self.basis(layer, "x"), projections, r_h=r_h)


def ranks(value: Rank, *, name: str, num_layers: int, limit: int) -> tuple[int, ...]:
    """One rank per layer.

    Raises:
        FitError: wrong number of ranks, or a rank above `limit`, the width of what is coded.
    """
    given = (value,) * num_layers if isinstance(value, int) else value
    if len(given) != num_layers:
        raise FitError(f"method.{name} has {len(given)} values for {num_layers} layers; give one, or one per layer")
    for layer, rank in enumerate(given):
        if rank > limit:
            raise FitError(f"method.{name}: layer {layer} has rank {rank}; at most {limit}, the width of its rows")
    return given


def joint_basis(moments: Moments, ridge: float) -> Basis:
    """Decompose the joint covariance of one layer."""
    covariance_nn = moments.covariance()
    _, vectors_nn = torch.linalg.eigh(covariance_nn)
    vectors_nn = vectors_nn.flip(1)
    largest_n = vectors_nn.gather(0, vectors_nn.abs().argmax(0, keepdim=True))
    return Basis(vectors_nn * largest_n.sign(), covariance_nn, moments.mean_n, moments.width_a, ridge)


def joint_code(basis: Basis, rank: int) -> Code:
    """Shared code of rank R: joint SVD, ridge encoder, unit variance."""
    width = basis.width_a
    vectors_nR = basis.vectors_nn[:, :rank]
    covariance_AA = basis.covariance_nn[:width, :width]
    ridge = basis.ridge * covariance_AA.diagonal().mean()
    # a layer without any spread (all rows equal) still has an answer: the mean
    gram_AA = covariance_AA + torch.eye(width, dtype=torch.float64) * ridge.clamp_min(torch.finfo(torch.float64).tiny)
    weight_AR = torch.cholesky_solve(basis.covariance_nn[:width] @ vectors_nR, torch.linalg.cholesky(gram_AA))
    scale_R = _unit_scale(torch.einsum("ar,ab,br->r", weight_AR, covariance_AA, weight_AR))
    encode_AR = weight_AR * scale_R
    return Code(encode_AR, -basis.mean_n[:width] @ encode_AR, (vectors_nR[width:] / scale_R).T)


def reuse_map(basis: Basis, rank: int) -> tuple[AffineMap, AffineMap]:
    """Encoder of the producer's rows and decoder into the consumer's."""
    code = joint_code(basis, rank)
    return _affine(code.encode_AR, code.bias_R), _affine(code.decode_RB, basis.mean_n[basis.width_a :])


def reuse_layer(keys: Basis, values: Basis, *, r_k: int, r_v: int) -> ReuseLayer:
    """Fit a Reuse layer."""
    encode_k, decode_k = reuse_map(keys, r_k)
    encode_v, decode_v = reuse_map(values, r_v)
    return ReuseLayer(encode_k=encode_k, decode_k=decode_k, encode_v=encode_v, decode_v=decode_v)


def aligner(basis: Basis, code: Code) -> tuple[Tensor, Tensor]:
    """Least-squares map `[R, M]` from the codes that are sent to the consumer's normalised input, and its bias."""
    width = basis.width_a
    covariance_AA, covariance_AB = basis.covariance_nn[:width, :width], basis.covariance_nn[:width, width:]
    covariance_RR = code.encode_AR.T @ covariance_AA @ code.encode_AR
    weight_RM = torch.linalg.pinv(covariance_RR, rtol=_RCOND, hermitian=True) @ (code.encode_AR.T @ covariance_AB)
    return weight_RM, basis.mean_n[width:]


def patch_layer(basis: Basis, projections: Projections, *, r_h: int) -> PatchLayer:
    """Fit a Patch layer with the affine aligner."""
    code = joint_code(basis, r_h)
    weight_RM, bias_M = aligner(basis, code)
    return PatchLayer(
        encode_h=_affine(code.encode_AR, code.bias_R),
        project=fold(weight_RM, bias_M, projections),
        k_norm_D=projections.k_norm_D,
        k_norm_eps=projections.k_norm_eps,
    )


def fold(weight_IM: Tensor, bias_M: Tensor, projections: Projections) -> AffineMap:
    """An affine map into the consumer's normalised input, followed by the consumer's key and value projections."""
    weight_MO, bias_O = projections.weight_MO.double(), projections.bias_O.double()
    return _affine(weight_IM.double() @ weight_MO, bias_M.double() @ weight_MO + bias_O)


def _unit_scale(variance_R: Tensor) -> Tensor:
    dead_R = variance_R <= variance_R.max() * _DEAD_VARIANCE
    return torch.where(dead_R, 1.0, variance_R.clamp_min(torch.finfo(torch.float64).tiny).rsqrt())


def _affine(weight_IO: Tensor, bias_O: Tensor) -> AffineMap:
    return AffineMap(weight_IO.float().contiguous(), bias_O.float().contiguous())
