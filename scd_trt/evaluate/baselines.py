"""The caches that a consumer may be given for one prefix: the method and every control it is compared with.

Shapes: S prefix tokens, H kv heads, D head size, F = H * D, M hidden size. A cache is, per layer, keys after the
consumer's RoPE and values `[S, H, D]`. Names and meaning (METHOD, section 3):

    oracle          the consumer's own prefill
    raw             the producer's cache as it is, with the producer's rotary
    raw_rerotated   the producer's keys with the consumer's rotary re-applied
    raw_fp8         raw_rerotated in float8 e4m3, one scale per layer for keys and one for values
    raw_int4        raw_rerotated in 4 bits, groups of 64 elements of a token with float16 scale and offset
    ridge           full-rank ridge regression of the consumer's keys and values on the producer's, layer by layer
    ridge_int4      the same, then 4 bits as above
    reuse_only      every layer Reuse (joint SVD, ridge encoder), at the configured ranks r_k and r_v
    scd, rd, exact  the translator of the pair, named by its policy (scd: `paper`)
    mismatched      the translator's codes of another prompt: must collapse
    no_cache        nothing: the consumer sees only what follows the prefix, at its true positions

Bytes are those of one token as it would be packed. A float8 or 4-bit cache is coded by the producer, before the consumer
sees it; `ridge_int4` codes predicted consumer rows. Selective recompute (DroidSpeak) is not here yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scd_trt import translator as translators
from scd_trt.codec import Decoder, Encoder, LayerInput
from scd_trt.distill.statistics import Moments
from scd_trt.models import CacheLayers, LoadedModel, cache_layers, trace
from scd_trt.translator import AffineMap, Manifest, ReuseLayer, Translator

INT4_GROUP = 64
FP8_MAX = 448.0
"""Largest finite value of float8 e4m3fn."""

MISMATCHED, NO_CACHE = "mismatched", "no_cache"
KvLayer = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Prefix:
    """One prefix as both models computed it.

    Attributes:
        oracle: the consumer's own cache.
        inputs: the producer's keys after its RoPE, values and attention input, per layer.
        k_TF: the producer's keys before RoPE, per layer.
    """

    oracle: tuple[KvLayer, ...]
    inputs: tuple[LayerInput, ...]
    k_TF: tuple[Tensor, ...]

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.inputs[0].k_THD.shape[0]


@dataclass(frozen=True)
class RidgeLayer:
    """Full-rank maps of one layer into the consumer's pre-RoPE keys and values."""

    keys: AffineMap
    values: AffineMap


@dataclass(frozen=True)
class Fits:
    """What the calibration text gives beyond the artifact.

    Attributes:
        reuse: a Reuse layer for every layer, at the configured ranks.
        ridge: full-rank maps of every layer.
    """

    reuse: tuple[ReuseLayer, ...]
    ridge: tuple[RidgeLayer, ...]


@dataclass(frozen=True)
class Control:
    """One way to give the consumer a cache.

    Attributes:
        bytes_per_token: as packed; 0 where nothing crosses the wire.
        cache: the cache of a prefix; the second prefix is another prompt's, which only `mismatched` reads.
    """

    name: str
    bytes_per_token: float
    cache: Callable[[Prefix, Prefix], list[KvLayer]]


@torch.no_grad()
def prefix_of(producer: LoadedModel, consumer: LoadedModel, token_ids: Tensor) -> Prefix:
    """Run both models over a prefix."""
    traced = trace(producer, token_ids)
    raw = cache_layers(producer, traced)
    return Prefix(
        oracle=tuple(cache_layers(consumer, trace(consumer, token_ids, capture={"kv"}))),
        inputs=tuple(LayerInput(k, v, x) for (k, v), x in zip(raw, traced.x_TM, strict=True)),
        k_TF=traced.k_TF,
    )


def controls(consumer: LoadedModel, translator: Translator, fits: Fits | None) -> dict[str, Control]:
    """Every control but `no_cache`, by name, in the order of the table; without `fits` those that need none."""
    dense = float(translator.manifest.dense_bytes_per_token)
    int4 = dense / 2 * _int4_bytes_per_element(consumer.spec.kv_dim)
    rerotated = _rerotated(consumer)
    found = [
        Control("oracle", 0.0, lambda prefix, _: list(prefix.oracle)),
        Control("raw", dense, lambda prefix, _: [(given.k_THD, given.v_THD) for given in prefix.inputs]),
        Control("raw_rerotated", dense, rerotated(_same)),
        Control("raw_fp8", dense / 2, rerotated(through_fp8)),
        Control("raw_int4", int4, rerotated(through_int4)),
    ]
    if fits is not None:
        reuse_only = translators.build(_reuse_fields(translator.manifest), fits.reuse)
        found += [
            Control("ridge", dense, rerotated(_same, fits.ridge)),
            Control("ridge_int4", int4, rerotated(through_int4, fits.ridge)),
            Control("reuse_only", float(sum(reuse_only.manifest.bytes_per_token)), _coded(reuse_only)),
        ]
    size = float(sum(translator.manifest.bytes_per_token))
    own = {"paper": "scd"}.get(translator.manifest.policy, translator.manifest.policy)
    found += [Control(own, size, _coded(translator)), Control(MISMATCHED, size, _coded(translator, of_another=True))]
    return {control.name: control for control in found}


def ridge_map(moments: Moments, ridge: float) -> AffineMap:
    """`argmin ||a W - b||^2 + lambda ||W||^2` on centred rows, lambda = ridge * mean diagonal of the covariance of a."""
    width, covariance_nn = moments.width_a, moments.covariance()
    gram_AA = covariance_nn[:width, :width]
    gram_AA = gram_AA + torch.eye(width, dtype=gram_AA.dtype) * ridge * gram_AA.diagonal().mean()
    weight_AB = torch.linalg.solve(gram_AA, covariance_nn[:width, width:])
    bias_B = moments.mean_n[width:] - moments.mean_n[:width] @ weight_AB
    return AffineMap(weight_AB.float(), bias_B.float())


def _reuse_fields(manifest: Manifest) -> dict[str, Any]:
    """The manifest of another policy on the same pair: every layer by itself."""
    kept = set(Manifest.model_fields) - {"layers", "transforms", "tensors_digest", "format_version", "quality"}
    groups = tuple((layer, layer + 1) for layer in range(manifest.consumer.num_layers))
    return {name: getattr(manifest, name) for name in kept} | {"policy": "paper", "groups": groups}


def _int4_bytes_per_element(width: int) -> float:
    """Half a byte, and a float16 scale and offset for each group of a row."""
    return 0.5 + 4 * math.ceil(width / INT4_GROUP) / width


def _same(x_TF: Tensor) -> Tensor:
    return x_TF


def through_fp8(x_TF: Tensor) -> Tensor:
    """To float8 e4m3 with one scale for the tensor, and back."""
    scale = x_TF.abs().max().float().clamp_min(1e-12) / FP8_MAX
    return (x_TF.float() / scale).to(torch.float8_e4m3fn).float() * scale


def through_int4(x_TF: Tensor) -> Tensor:
    """To 16 levels per group of 64 consecutive elements of a row (a shorter group at the end), and back.

    The offset and step of a group are float16, as they would travel.
    """
    return torch.cat([_int4_group(group) for group in torch.split(x_TF.float(), INT4_GROUP, dim=1)], dim=1)


def _int4_group(x_TG: Tensor) -> Tensor:
    low = x_TG.amin(1, keepdim=True).half().float()
    step = ((x_TG.amax(1, keepdim=True) - low) / 15).half().float()
    levels = torch.where(step > 0, (x_TG - low) / step, 0.0).round().clamp(0, 15)
    return low + levels * step


def _coded(translator: Translator, *, of_another: bool = False) -> Callable[[Prefix, Prefix], list[KvLayer]]:
    encoder, decoder = Encoder(translator), Decoder(translator)

    def cache(prefix: Prefix, other: Prefix) -> list[KvLayer]:
        source = other if of_another else prefix
        positions = torch.arange(source.num_tokens)
        own_positions = torch.arange(prefix.num_tokens)
        layers: list[KvLayer] = []
        for group, (start, stop) in enumerate(translator.manifest.groups):
            codes = encoder.encode(group, source.inputs[start:stop], positions, seq_len=source.num_tokens)
            # another prompt may be shorter: its rows repeat
            codes = codes[own_positions % source.num_tokens]
            layers += decoder.decode(group, codes, own_positions, seq_len=prefix.num_tokens)
        return layers

    return cache


def _rerotated(
    consumer: LoadedModel,
) -> Callable[..., Callable[[Prefix, Prefix], list[KvLayer]]]:
    """Makes caches of the producer's rows, perhaps regressed, rounded through a coarse format, under the consumer's RoPE."""

    def heads(x_TF: Tensor) -> Tensor:
        return x_TF.reshape(x_TF.shape[0], -1, consumer.spec.head_dim)

    def through(
        rounded: Callable[[Tensor], Tensor], ridge: Sequence[RidgeLayer] | None = None
    ) -> Callable[[Prefix, Prefix], list[KvLayer]]:
        def cache(prefix: Prefix, _: Prefix) -> list[KvLayer]:
            positions = torch.arange(prefix.num_tokens)
            tables = {rope: rope.tables(positions, seq_len=prefix.num_tokens) for rope in set(consumer.ropes)}
            layers = []
            for layer, (k_TF, given) in enumerate(zip(prefix.k_TF, prefix.inputs, strict=True)):
                v_TF = given.v_THD.flatten(1)
                if ridge is not None:
                    k_TF, v_TF = ridge[layer].keys(k_TF), ridge[layer].values(v_TF)
                k_THD = tables[consumer.ropes[layer]].apply(heads(rounded(k_TF).float()))
                layers.append((k_THD, heads(rounded(v_TF))))
            return layers

        return cache

    return through


def stacked(caches: Mapping[str, list[KvLayer]], dtype: torch.dtype) -> CacheLayers:
    """Several caches of one prefix as one with a leading dimension, rounded to the pool's dtype."""
    return [
        (torch.stack([k.to(dtype) for k, _ in several]), torch.stack([v.to(dtype) for _, v in several]))
        for several in zip(*caches.values(), strict=True)
    ]
