"""Low-rank and transform coders of one model's KV cache, each as a `caches.RowCoder` of the producer's rows.

Shapes: S tokens, F = num_kv_heads * head_dim, I width of the rows of all layers of a joint group, R rank, C components.

LowRank (after SVD-LLM, arXiv 2403.07378, and SliceGPT, arXiv 2401.15024, applied to the cache instead of the weights)
    PCA of every layer's keys before RoPE and of its values on calibration rows; the R strongest coefficients of a token
    travel as float16, the same R everywhere. Bytes of a token: 2 R for keys and for values of each layer.

Kvtc (after NVIDIA's KVTC, arXiv 2511.01815)
    PCA of the keys before RoPE of all layers at once, and of the values, on calibration rows; bits of each component by
    dynamic programming (`distill.rate_distortion`) with equal weights; uniform quantiser with the loading of a Gaussian. The
    first four tokens, attention sinks, stay as they are and count in full. The rate is fixed: KVTC's last stage, a
    lossless coder over the codes (DEFLATE), is left out; so is what it would gain on the codes of `rd`.

With A = B, Kvtc is what policy `rd` has to be measured against: the same kind of transform, without translation,
Fisher weights or groups that can be streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.config import MethodConfig
from scd_trt.distill.quantiser import gaussian_table
from scd_trt.distill.rate_distortion import allocate_groups
from scd_trt.distill.statistics import PairStatistics
from scd_trt.evaluate.caches import CodedRows
from scd_trt.evaluate.samples import NUM_SINK_TOKENS, joint_groups

_COEFFICIENT_BYTES = 2


HEADROOM: float = MethodConfig.model_fields["headroom"].default


@dataclass(frozen=True)
class Pca:
    """Mean, principal directions (columns, strongest first) and their variances, of rows of width I; float32, float64."""

    mean_I: Tensor
    vectors_IC: Tensor
    variance_C: Tensor

    @classmethod
    def of(cls, mean_I: Tensor, covariance_II: Tensor) -> Pca:
        """Decompose a covariance."""
        variance_C, vectors_IC = torch.linalg.eigh(covariance_II)
        return cls(mean_I.float(), vectors_IC.flip(1).float().contiguous(), variance_C.flip(0).clamp_min(0.0))


@dataclass(frozen=True)
class LowRank:
    """See the module docstring; one PCA per layer for keys and for values."""

    keys: tuple[Pca, ...]
    values: tuple[Pca, ...]
    rank: int
    after_rope: bool = False

    @property
    def bytes_per_token(self) -> int:
        return _COEFFICIENT_BYTES * self.rank * (len(self.keys) + len(self.values))

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CodedRows:
        return CodedRows(
            [self._through(pca, k_TF) for pca, k_TF in zip(self.keys, keys, strict=True)],
            [self._through(pca, v_TF) for pca, v_TF in zip(self.values, values, strict=True)],
            self.bytes_per_token * keys[0].shape[0],
        )

    def _through(self, pca: Pca, x_TF: Tensor) -> Tensor:
        basis_FR = pca.vectors_IC[:, : self.rank]
        return ((x_TF - pca.mean_I) @ basis_FR).half().float() @ basis_FR.T + pca.mean_I


def layer_pcas(statistics: PairStatistics, num_layers: int) -> tuple[tuple[Pca, ...], tuple[Pca, ...]]:
    """PCA of the producer's half of every layer's moments: of keys, and of values."""

    def of(layer: int, kind: str) -> Pca:
        moments = statistics[layer, "k" if kind == "k" else "v"]
        width = moments.width_a
        return Pca.of(moments.mean_n[:width], moments.covariance()[:width, :width])

    keys, values = (tuple(of(layer, kind) for layer in range(num_layers)) for kind in ("k", "v"))
    return keys, values


def rank_for(bytes_per_token: float, *, num_layers: int, width: int) -> int:
    """Smallest rank that takes at least so many bytes, at most the whole width."""
    per_rank = 2 * num_layers * _COEFFICIENT_BYTES
    return min(width, max(1, -int(-bytes_per_token // per_rank)))


@dataclass(frozen=True)
class JointPca:
    """PCA of every joint group of layers, of keys and of values."""

    groups: tuple[tuple[int, int], ...]
    keys: tuple[Pca, ...]
    values: tuple[Pca, ...]

    @classmethod
    def of(cls, statistics: PairStatistics, *, num_layers: int, width: int) -> JointPca:
        """Decompose what `samples.joint_moments` gathered."""
        groups = joint_groups(num_layers, width)

        def pcas(kind: str) -> tuple[Pca, ...]:
            found = (statistics[group, "group_k" if kind == "k" else "group_v"] for group in range(len(groups)))
            return tuple(Pca.of(moments.mean_n, moments.covariance()) for moments in found)

        return cls(groups, pcas("k"), pcas("v"))


@dataclass(frozen=True)
class Quantised:
    """The sent components z of a PCA: `level = clamp(floor(z / step), -half, half - 1)`, `z ~ (level + 1/2) step`."""

    mean_I: Tensor
    vectors_IC: Tensor
    step_C: Tensor
    half_C: Tensor

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Rows after coding."""
        levels_TC = ((x_TI - self.mean_I) @ self.vectors_IC / self.step_C).floor()
        levels_TC = torch.maximum(torch.minimum(levels_TC, self.half_C - 1), -self.half_C)
        return ((levels_TC + 0.5) * self.step_C) @ self.vectors_IC.T + self.mean_I


@dataclass(frozen=True)
class Kvtc:
    """See the module docstring."""

    groups: tuple[tuple[int, int], ...]
    keys: tuple[Quantised, ...]
    values: tuple[Quantised, ...]
    code_bytes: int
    itemsize: int
    after_rope: bool = False

    @classmethod
    def of_size(cls, pca: JointPca, *, code_bytes: int, itemsize: int) -> Kvtc:
        """Bits for every component so that a token's codes take at most `code_bytes`."""
        # the same room for outliers that our own codes have
        table = gaussian_table(headroom=HEADROOM)
        pcas = [*pca.keys, *pca.values]
        allocations = allocate_groups([found.variance_C for found in pcas], budget_bits=8 * code_bytes, table=table)
        coders = []
        for found, allocation in zip(pcas, allocations, strict=True):
            sent_S = allocation.sent_S
            bits_S = allocation.widths_C[sent_S]
            step_S = table.steps(bits_S, found.variance_C[sent_S].sqrt()).float()
            half_S = torch.exp2(bits_S.float() - 1)
            coders.append(
                Quantised(found.mean_I, found.vectors_IC[:, sent_S].contiguous(), step_S.clamp_min(1e-12), half_S)
            )
        half = len(pca.groups)
        size = sum(allocation.total_bits for allocation in allocations) // 8
        return cls(pca.groups, tuple(coders[:half]), tuple(coders[half:]), size, itemsize)

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CodedRows:
        num_tokens, width = keys[0].shape
        return CodedRows(
            self._through(self.keys, keys), self._through(self.values, values), self.nominal_bytes(num_tokens, width)
        )

    def nominal_bytes(self, num_tokens: int, width: int) -> float:
        """Bytes of a prefix of layers of this width."""
        num_sinks = min(NUM_SINK_TOKENS, num_tokens)
        dense = 2 * self.groups[-1][1] * width * self.itemsize
        return (num_tokens - num_sinks) * self.code_bytes + num_sinks * dense

    def _through(self, coders: Sequence[Quantised], rows: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for (start, stop), coder in zip(self.groups, coders, strict=True):
            coded_TI = coder(torch.cat([*rows[start:stop]], dim=1))
            coded_TI[:NUM_SINK_TOKENS] = torch.cat([x_TF[:NUM_SINK_TOKENS] for x_TF in rows[start:stop]], dim=1)
            found += coded_TI.chunk(stop - start, dim=1)
        return found
