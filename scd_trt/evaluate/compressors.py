"""Same-model quantisers of a KV cache: KIVI, KVQuant and CacheGen, each as a `caches.RowCoder` of the producer's rows.

Shapes: S tokens of a prefix, F = num_kv_heads * head_dim, K levels, G groups. Elements that are not quantised count
`itemsize` bytes. Bytes are those of packed codes with all that a decoder needs beside them and cannot know from calibration.

Kivi (Liu et al. 2024, arXiv 2402.02750)
    Keys after RoPE per channel over groups of 32 tokens, values per token over groups of 32 channels; asymmetric, float16
    offset and step per group. The most recent tokens, at least 32 and less than 64, stay as they are and count in full.
    Bytes, n quantised tokens: keys n F bits/8 + 4 F n/32, values n (F bits/8 + 4 ceil(F/32)), window (S - n) 2 F itemsize.

KvQuant (Hooper et al. 2024, arXiv 2401.18079)
    Keys before RoPE per channel, range and outlier thresholds from calibration (offline, nothing travels); values per token,
    float16 offset and range. Levels are not uniform: one codebook per layer and kind, k-means of the normalised calibration
    rows; unweighted, since the paper's weights are the producer's Fisher information, which is not kept. 1% of the
    elements, the outliers, travel exactly: 4 bytes each (float16 and a 16-bit channel), for keys 2 bytes more per token (how
    many). The first token, the attention sink, stays as it is.

CacheGen (Liu et al. 2024, arXiv 2310.07240)
    Keys after RoPE, chunks of 10 tokens: the first is the anchor, 8 bits per element over the channel's calibrated range; the
    others are differences from the decoded anchor, in steps of 0.5, 1 and 1.5 standard deviations of the channel's
    differences for the first, middle and last third of the layers, times `coarseness` (1: the paper's setting as
    read here). Levels are entropy coded with frequency tables per layer and channel from calibration; bytes are the
    ideal code length, within 1% of an arithmetic coder's. What lies outside a table costs its escape symbol and 16 bits.

Deliberately not here: bit streams. Nothing is sent; sizes are counted, losses are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scd_trt.evaluate.caches import CodedRows, rope_tables
from scd_trt.evaluate.samples import ProducerSample
from scd_trt.models import LoadedModel

Floats = NDArray[np.float64]

KIVI_GROUP = 32
KIVI_WINDOW = 32
"""Fewest recent tokens that KIVI leaves as they are; the rest is whole groups."""

OUTLIER_SHARE = 0.01
_OUTLIER_BYTES = 4
_MAX_KMEANS_VALUES = 1 << 17

CHUNK_TOKENS = 10
_ANCHOR_LEVELS = 256
_MAX_DELTA = 31
"""Largest level of a difference that has a symbol of its own."""
_DELTA_STEPS = (0.5, 1.0, 1.5)
_ESCAPE_BITS = 16
_SMOOTHING = 0.1
"""Added to every count of a frequency table: no symbol is impossible."""


def through_levels(x: Tensor, *, bits: int, dim: int) -> Tensor:
    """To `2**bits` equal steps between the extremes along `dim`, and back; offset and step are float16, as they travel."""
    low = x.amin(dim, keepdim=True).half().float()
    step = ((x.amax(dim, keepdim=True) - low) / ((1 << bits) - 1)).half().float()
    levels = torch.where(step > 0, (x - low) / step, 0.0).round().clamp(0, (1 << bits) - 1)
    return low + levels * step


# ------------------------------------------------------------------------------------------------------------- KIVI


@dataclass(frozen=True)
class Kivi:
    """See the module docstring."""

    bits: int
    itemsize: int
    after_rope: bool = True

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CodedRows:
        num_quantised = _num_quantised(keys[0].shape[0])
        return CodedRows(
            [_with_head(k_TF, self._keys(k_TF[:num_quantised])) for k_TF in keys],
            [_with_head(v_TF, self._values(v_TF[:num_quantised])) for v_TF in values],
            len(keys) * self.layer_bytes(*keys[0].shape),
        )

    def layer_bytes(self, num_tokens: int, width: int) -> float:
        """Bytes of one layer of a prefix."""
        num_quantised = _num_quantised(num_tokens)
        keys = num_quantised * width * self.bits / 8 + 4 * width * num_quantised / KIVI_GROUP
        values = num_quantised * (width * self.bits / 8 + 4 * math.ceil(width / KIVI_GROUP))
        return keys + values + (num_tokens - num_quantised) * 2 * width * self.itemsize

    def _keys(self, k_TF: Tensor) -> Tensor:
        groups_GTF = k_TF.reshape(-1, KIVI_GROUP, k_TF.shape[1])
        return through_levels(groups_GTF, bits=self.bits, dim=1).reshape(k_TF.shape)

    def _values(self, v_TF: Tensor) -> Tensor:
        groups = torch.split(v_TF, KIVI_GROUP, dim=1)
        return torch.cat([through_levels(group, bits=self.bits, dim=1) for group in groups], dim=1)


def _num_quantised(num_tokens: int) -> int:
    return max(0, num_tokens - KIVI_WINDOW) // KIVI_GROUP * KIVI_GROUP


def _with_head(x_TF: Tensor, head_TF: Tensor) -> Tensor:
    return torch.cat([head_TF, x_TF[len(head_TF) :]])


# ---------------------------------------------------------------------------------------------------------- KVQuant


@dataclass(frozen=True)
class KeyRange:
    """Calibrated range of the keys of one layer; what lies outside is an outlier."""

    low_F: Tensor
    high_F: Tensor

    def normalised(self, k_TF: Tensor) -> Tensor:
        """-1 at `low`, 1 at `high`."""
        return (k_TF - self._middle_F) / self._half_F

    def restored(self, x_TF: Tensor) -> Tensor:
        """Inverse of `normalised`."""
        return x_TF * self._half_F + self._middle_F

    @property
    def _middle_F(self) -> Tensor:
        return (self.low_F + self.high_F) / 2

    @property
    def _half_F(self) -> Tensor:
        return ((self.high_F - self.low_F) / 2).clamp_min(1e-12)


@dataclass(frozen=True)
class KvQuant:
    """See the module docstring; the codebooks hold `2**bits` levels in [-1, 1], per layer."""

    bits: int
    itemsize: int
    ranges: tuple[KeyRange, ...]
    key_levels: tuple[Tensor, ...]
    value_levels: tuple[Tensor, ...]
    after_rope: bool = False

    @classmethod
    def fit(cls, sample: ProducerSample, *, bits: int, itemsize: int) -> KvQuant:
        """Ranges and codebooks of every layer, from the sample without first tokens."""
        keys, values = (rows_LRTF[:, :, 1:].flatten(1, 2) for rows_LRTF in (sample.keys, sample.values))
        ranges = tuple(_key_range(k_TF) for k_TF in keys)
        return cls(
            bits=bits,
            itemsize=itemsize,
            ranges=ranges,
            key_levels=tuple(
                _codebook(found.normalised(k_TF).clamp(-1, 1), bits) for found, k_TF in zip(ranges, keys, strict=True)
            ),
            value_levels=tuple(_codebook(_normalised_values(v_TF)[0], bits) for v_TF in values),
        )

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CodedRows:
        num_bytes = 0.0
        coded: tuple[list[Tensor], list[Tensor]] = ([], [])
        for layer, (k_TF, v_TF) in enumerate(zip(keys, values, strict=True)):
            key_rows, key_bytes = self._keys(layer, k_TF[1:])
            value_rows, value_bytes = self._values(layer, v_TF[1:])
            coded[0].append(torch.cat([k_TF[:1], key_rows]))
            coded[1].append(torch.cat([v_TF[:1], value_rows]))
            num_bytes += key_bytes + value_bytes + 2 * k_TF.shape[1] * self.itemsize
        return CodedRows(*coded, num_bytes)

    def nominal_bytes(self, num_tokens: int) -> float:
        """Bytes of a prefix with exactly 1% outliers."""
        width = len(self.ranges[0].low_F)
        outliers = OUTLIER_SHARE * width * _OUTLIER_BYTES + num_value_outliers(width) * _OUTLIER_BYTES
        per_token = 2 * width * self.bits / 8 + 2 + 4 + outliers
        return len(self.ranges) * ((num_tokens - 1) * per_token + 2 * width * self.itemsize)

    def _keys(self, layer: int, k_TF: Tensor) -> tuple[Tensor, float]:
        found = self.ranges[layer]
        outside_TF = (k_TF < found.low_F) | (k_TF > found.high_F)
        levels_TF = _nearest(found.normalised(k_TF), self.key_levels[layer])
        size = k_TF.numel() * self.bits / 8 + 2 * k_TF.shape[0] + _OUTLIER_BYTES * int(outside_TF.sum())
        return torch.where(outside_TF, _as_float16(k_TF), found.restored(levels_TF)), size

    def _values(self, layer: int, v_TF: Tensor) -> tuple[Tensor, float]:
        normalised_TF, middle_T1, half_T1, outside_TF = _normalised_values(v_TF)
        restored_TF = _nearest(normalised_TF, self.value_levels[layer]) * half_T1 + middle_T1
        per_token = v_TF.shape[1] * self.bits / 8 + 4 + _OUTLIER_BYTES * num_value_outliers(v_TF.shape[1])
        return torch.where(outside_TF, _as_float16(v_TF), restored_TF), v_TF.shape[0] * per_token


def num_value_outliers(width: int) -> int:
    """Elements of a token's values that travel exactly."""
    return round(OUTLIER_SHARE * width)


def kmeans_levels(values: Tensor, num_levels: int, *, num_rounds: int = 50) -> Tensor:
    """Lloyd's algorithm in one dimension from equal quantiles: levels, ascending, float32.

    Rounds read prefix sums of the sorted values, so that none touches every value.
    """
    ordered = np.sort(values.flatten().double().numpy())
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    levels: Floats = np.quantile(ordered, (np.arange(num_levels) + 0.5) / num_levels)
    for _ in range(num_rounds):
        inner = np.searchsorted(ordered, (levels[:-1] + levels[1:]) / 2)
        edges = np.concatenate([[0], inner, [len(ordered)]])
        counts = np.diff(edges)
        # a cell that holds nothing keeps its level
        moved = np.where(counts > 0, np.diff(sums[edges]) / np.maximum(counts, 1), levels)
        if np.array_equal(moved, levels):
            break
        levels = moved
    return torch.from_numpy(levels).float()


def _key_range(k_TF: Tensor) -> KeyRange:
    ordered_TF = k_TF.sort(dim=0).values
    cut = int(len(k_TF) * OUTLIER_SHARE / 2)
    return KeyRange(ordered_TF[cut].clone(), ordered_TF[len(k_TF) - 1 - cut].clone())


def _codebook(normalised_TF: Tensor, bits: int) -> Tensor:
    flat = normalised_TF.flatten()
    return kmeans_levels(flat[:: max(1, len(flat) // _MAX_KMEANS_VALUES)], 2**bits)


def _nearest(x_TF: Tensor, levels_K: Tensor) -> Tensor:
    return levels_K[torch.bucketize(x_TF, (levels_K[:-1] + levels_K[1:]) / 2)]


def _as_float16(x_TF: Tensor) -> Tensor:
    return x_TF.half().float()


def _normalised_values(v_TF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in [-1, 1] over what remains without outliers, middle and half range of each row as they travel, outliers."""
    outside_TF = torch.zeros_like(v_TF, dtype=torch.bool)
    distance_TF = (v_TF - v_TF.median(dim=1, keepdim=True).values).abs()
    outside_TF.scatter_(1, distance_TF.topk(num_value_outliers(v_TF.shape[1]), dim=1).indices, True)
    low_T1 = v_TF.masked_fill(outside_TF, math.inf).amin(1, keepdim=True)
    high_T1 = v_TF.masked_fill(outside_TF, -math.inf).amax(1, keepdim=True)
    middle_T1, half_T1 = _as_float16((low_T1 + high_T1) / 2), _as_float16((high_T1 - low_T1) / 2)
    return ((v_TF - middle_T1) / half_T1.clamp_min(1e-12)).clamp(-1, 1), middle_T1, half_T1, outside_TF


# --------------------------------------------------------------------------------------------------------- CacheGen


@dataclass(frozen=True)
class DeltaCoder:
    """Steps and code lengths of one kind of rows of one layer.

    Attributes:
        low_F, step_F: of anchors: 256 levels over the calibrated range.
        delta_step_F: of differences.
        anchor_bits: `[F, 257]`, code length of each level and, last, of the escape.
        delta_bits: `[F, 64]`, of levels -31..31 and of the escape.
    """

    low_F: Tensor
    step_F: Tensor
    delta_step_F: Tensor
    anchor_bits: Tensor
    delta_bits: Tensor

    @classmethod
    def fit(cls, sequences: Sequence[Tensor], *, step: float) -> DeltaCoder:
        """From rows `[T, F]` of whole sequences; the first chunk, with the attention sink, is left out.

        Args:
            step: of differences, in standard deviations of the channel's.
        """
        rows_TF = torch.cat([rows[CHUNK_TOKENS:] for rows in sequences])
        low_F = rows_TF.amin(0)
        step_F = ((rows_TF.amax(0) - low_F) / (_ANCHOR_LEVELS - 1)).clamp_min(1e-12)
        anchor_bits = _code_lengths(_anchor_symbols(rows_TF, low_F, step_F), _ANCHOR_LEVELS + 1)
        deltas = [_deltas(rows[CHUNK_TOKENS:], partial(_anchor_rows, low_F=low_F, step_F=step_F)) for rows in sequences]
        delta_TF = torch.cat(deltas)
        delta_step_F = (step * delta_TF.std(0, correction=0)).clamp_min(1e-12)
        delta_bits = _code_lengths(_delta_symbols(delta_TF, delta_step_F), 2 * _MAX_DELTA + 2)
        return cls(low_F, step_F, delta_step_F, anchor_bits, delta_bits)

    def __call__(self, x_TF: Tensor) -> tuple[Tensor, float]:
        """Rows after coding, and the bits of the codes."""
        decode = partial(_anchor_rows, low_F=self.low_F, step_F=self.step_F)
        anchors = x_TF[::CHUNK_TOKENS]
        delta_TF = _deltas(x_TF, decode)
        coded_TF = decode(anchors).repeat_interleave(CHUNK_TOKENS, dim=0)[: len(x_TF)]
        coded_TF[_is_delta(len(x_TF))] += (delta_TF / self.delta_step_F).round() * self.delta_step_F
        bits = _total_bits(_anchor_symbols(anchors, self.low_F, self.step_F), self.anchor_bits)
        bits += _total_bits(_delta_symbols(delta_TF, self.delta_step_F), self.delta_bits)
        return coded_TF, bits


@dataclass(frozen=True)
class CacheGen:
    """See the module docstring; one coder per layer for keys and for values."""

    keys: tuple[DeltaCoder, ...]
    values: tuple[DeltaCoder, ...]
    after_rope: bool = True

    @classmethod
    def fit(cls, sample: ProducerSample, producer: LoadedModel, *, coarseness: float = 1.0) -> CacheGen:
        """Steps and frequency tables of every layer."""
        spec = producer.spec
        tables = rope_tables(producer.ropes, sample.keys.shape[2])
        steps = [
            coarseness * _DELTA_STEPS[layer * len(_DELTA_STEPS) // spec.num_layers] for layer in range(spec.num_layers)
        ]
        keys = [
            DeltaCoder.fit(
                [table.apply(k_TF.unflatten(1, (-1, spec.head_dim))).flatten(1) for k_TF in k_RTF], step=step
            )
            for table, k_RTF, step in zip(tables, sample.keys, steps, strict=True)
        ]
        values = [DeltaCoder.fit([*v_RTF], step=step) for v_RTF, step in zip(sample.values, steps, strict=True)]
        return cls(tuple(keys), tuple(values))

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CodedRows:
        coded_keys = [coder(k_TF) for coder, k_TF in zip(self.keys, keys, strict=True)]
        coded_values = [coder(v_TF) for coder, v_TF in zip(self.values, values, strict=True)]
        bits = sum(size for _, size in (*coded_keys, *coded_values))
        return CodedRows([rows for rows, _ in coded_keys], [rows for rows, _ in coded_values], bits / 8)


def cachegen_of_size(
    sample: ProducerSample, producer: LoadedModel, *, bytes_per_token: float
) -> tuple[CacheGen, float]:
    """The coarsest CacheGen that still takes this many bytes per token of the sample, and what it takes.

    Its anchors alone may take more; then the coarsest that was tried.
    """
    finest, coarsest = 2.0**-6, 2.0**6
    for _ in range(10):
        middle = math.sqrt(finest * coarsest)
        if sample_bytes(CacheGen.fit(sample, producer, coarseness=middle), sample, producer) >= bytes_per_token:
            finest = middle
        else:
            coarsest = middle
    found = CacheGen.fit(sample, producer, coarseness=finest)
    return found, sample_bytes(found, sample, producer)


def sample_bytes(coder: CacheGen, sample: ProducerSample, producer: LoadedModel) -> float:
    """Bytes per token that the sample's last sequence takes."""
    tables = rope_tables(producer.ropes, sample.keys.shape[2])
    head_dim = producer.spec.head_dim
    keys = [
        table.apply(k_RTF[-1].unflatten(1, (-1, head_dim))).flatten(1)
        for table, k_RTF in zip(tables, sample.keys, strict=True)
    ]
    return coder(keys, [v_RTF[-1] for v_RTF in sample.values]).num_bytes / sample.keys.shape[2]


def _is_delta(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) % CHUNK_TOKENS != 0


def _deltas(x_TF: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """Differences of all tokens but anchors from the decoded anchor of their chunk."""
    anchors_TF = decode(x_TF[::CHUNK_TOKENS]).repeat_interleave(CHUNK_TOKENS, dim=0)[: len(x_TF)]
    is_delta_T = _is_delta(len(x_TF))
    return x_TF[is_delta_T] - anchors_TF[is_delta_T]


def _anchor_symbols(x_TF: Tensor, low_F: Tensor, step_F: Tensor) -> Tensor:
    levels_TF = ((x_TF - low_F) / step_F).round()
    outside_TF = (levels_TF < 0) | (levels_TF >= _ANCHOR_LEVELS)
    return torch.where(outside_TF, _ANCHOR_LEVELS, levels_TF).long()


def _anchor_rows(x_TF: Tensor, low_F: Tensor, step_F: Tensor) -> Tensor:
    symbols_TF = _anchor_symbols(x_TF, low_F, step_F)
    return torch.where(symbols_TF == _ANCHOR_LEVELS, _as_float16(x_TF), low_F + symbols_TF * step_F)


def _delta_symbols(delta_TF: Tensor, step_F: Tensor) -> Tensor:
    levels_TF = (delta_TF / step_F).round()
    return torch.where(levels_TF.abs() > _MAX_DELTA, _MAX_DELTA + 1, levels_TF).long() + _MAX_DELTA


def _code_lengths(symbols_TF: Tensor, num_symbols: int) -> Tensor:
    """Bits of each symbol in each channel, the last one with what follows an escape."""
    width = symbols_TF.shape[1]
    cells = (symbols_TF + torch.arange(width) * num_symbols).flatten()
    counts = torch.bincount(cells, minlength=width * num_symbols).reshape(width, num_symbols) + _SMOOTHING
    bits = -torch.log2(counts / counts.sum(1, keepdim=True))
    bits[:, -1] += _ESCAPE_BITS
    return bits


def _total_bits(symbols_TF: Tensor, bits: Tensor) -> float:
    return float(bits.gather(1, symbols_TF.T).sum(dtype=torch.float64))
