"""The caches that a consumer may be given for one prefix: the method and every control it is compared with.

Shapes: S prefix tokens, H kv heads, D head size, F = H * D. Names and meaning (METHOD, section 3):

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

and families that know one model only, applied to the producer's cache, whose keys then get the consumer's rotary:

    kivi_2bit, kivi_4bit                      `compressors.Kivi`
    kvquant_2bit, kvquant_3bit, kvquant_4bit  `compressors.KvQuant`
    cachegen, cachegen_fine, cachegen_equal   `compressors.CacheGen`: the paper's steps, a third of them, and coarser ones
    svd_equal, svd_2x                         `low_rank.LowRank`
    kvtc_equal, kvtc_20x                      `low_rank.Kvtc`
    droidspeak_third, droidspeak_half         `recompute`: that share of the layers is computed again
    snapkv_equal, snapkv_2x, pyramidkv_..., streaming_llm_..., expected_..., h2o_...     `eviction`

`_equal` is the setting nearest to the translator's own bytes that is not below them (policy `paper`: a tenth of the
cache); `_2x`, `_20x` are that many times fewer bytes than the cache. Others have their paper's setting. With A = B all of
these are the plain methods.

Bytes are those of one token as it would be packed. A float8 or 4-bit cache is coded by the producer, before the consumer
sees it; `ridge_int4` codes predicted consumer rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scd_trt import translator as translators
from scd_trt.distill.calibration import Progress, Texts
from scd_trt.distill.plan import DEFAULT_RATIO, Job
from scd_trt.distill.statistics import Moments, PairStatistics
from scd_trt.evaluate import eviction
from scd_trt.evaluate.caches import (
    Control,
    KvLayer,
    Prefix,
    RowCoder,
    coded,
    consumer_layers,
    prefix_of,
    row_control,
    stacked,
)
from scd_trt.evaluate.compressors import CacheGen, Kivi, KvQuant, cachegen_of_size, sample_bytes, through_levels
from scd_trt.evaluate.low_rank import JointPca, Kvtc, LowRank, Pca, layer_pcas, rank_for
from scd_trt.evaluate.recompute import Window, choose_window, recompute_control
from scd_trt.evaluate.samples import NUM_SINK_TOKENS, ProducerSample, joint_moments, producer_sample
from scd_trt.model_spec import same_shape
from scd_trt.models import LoadedModel, load_model
from scd_trt.translator import AffineMap, Manifest, ReuseLayer, Translator

__all__ = [
    "MISMATCHED",
    "NO_CACHE",
    "BaselineFits",
    "Control",
    "Fits",
    "KvLayer",
    "Prefix",
    "RidgeLayer",
    "controls",
    "fit_baselines",
    "prefix_of",
    "ridge_map",
    "stacked",
    "through_fp8",
    "through_int4",
]

logger = logging.getLogger(__name__)

INT4_GROUP = 64
FP8_MAX = 448.0
"""Largest finite value of float8 e4m3fn."""

MISMATCHED, NO_CACHE = "mismatched", "no_cache"

_KVQUANT_BITS = (2, 3, 4)
_KIVI_BITS = (2, 4)
_COARSENESS = {"cachegen": 1.0, "cachegen_fine": 1 / 3}
"""Share of the steps: the paper gives them without their unit, so a finer reading is measured beside the one here."""
_UNFITTED = frozenset(
    {"oracle", "raw", "raw_rerotated", "raw_fp8", "raw_int4", "scd", "rd", "exact", MISMATCHED, NO_CACHE}
)
_REGRESSED = frozenset({"ridge", "ridge_int4", "reuse_only"})

_RECOMPUTED_SHARE = {"droidspeak_third": 1 / 3, "droidspeak_half": 1 / 2}
_PROFILED_SEQUENCES = 2
"""Held-out sequences on which the recomputed layers are chosen."""


@dataclass(frozen=True)
class RidgeLayer:
    """Full-rank maps of one layer into the consumer's pre-RoPE keys and values."""

    keys: AffineMap
    values: AffineMap


@dataclass(frozen=True)
class BaselineFits:
    """What the compressors of one model are made of, before any rate is chosen.

    Attributes:
        producer: in float32, as it made the sample.
        layers: PCA of each layer's keys, and of its values.
        windows: recomputed layers, by the control's name.
        prefix_tokens: length of the prefix for which sizes are stated.
    """

    producer: LoadedModel
    sample: ProducerSample
    layers: tuple[tuple[Pca, ...], tuple[Pca, ...]]
    joint: JointPca
    windows: dict[str, Window]
    prefix_tokens: int


@dataclass(frozen=True)
class Fits:
    """What the calibration text gives beyond the artifact.

    Attributes:
        reuse: a Reuse layer for every layer, at the configured ranks.
        ridge: full-rank maps of every layer.
        baselines: for the families that know one model only; None leaves them out.
    """

    reuse: tuple[ReuseLayer, ...]
    ridge: tuple[RidgeLayer, ...]
    baselines: BaselineFits | None = None


def fit_baselines(job: Job, texts: Texts, statistics: PairStatistics, work: Path, progress: Progress) -> BaselineFits:
    """Fit what needs calibration text, and choose recomputed layers on held-out text.

    Args:
        statistics: moments of every layer, over the calibration text.
        work: where the moments over all layers are kept, so that an interrupted run goes on.
    """
    producer = load_model(job.producer_path)
    consumer = producer if job.same_model else load_model(job.consumer_path)
    spec = producer.spec
    moments = joint_moments(producer, texts, work, progress)
    progress.stage("fit the baselines", 2 + len(_RECOMPUTED_SHARE))
    joint = JointPca.of(moments, num_layers=spec.num_layers, width=spec.kv_dim)
    progress.advance()
    sample = producer_sample(producer, texts.calibration)
    progress.advance()
    windows = {}
    for name, share in _RECOMPUTED_SHARE.items():
        windows[name] = choose_window(
            producer,
            consumer,
            texts.heldout[:_PROFILED_SEQUENCES],
            size=max(1, round(share * spec.num_layers)),
            prefix_tokens=job.config.heldout.prefix_tokens,
        )
        progress.advance()
    layers = layer_pcas(statistics, spec.num_layers)
    return BaselineFits(producer, sample, layers, joint, windows, job.config.heldout.prefix_tokens)


def controls(consumer: LoadedModel, translator: Translator, fits: Fits | None) -> dict[str, Control]:
    """Every control but `no_cache`, by name, in the order of the table; without `fits` those that need none.

    Between models of different size there is no cache to reuse and no layer to compare with: only the method's own are left.
    """
    dense = float(translator.manifest.dense_bytes_per_token)
    int4 = dense / 2 * _int4_bytes_per_element(consumer.spec.kv_dim)
    rerotated = _rerotated(consumer)
    found = [Control("oracle", 0.0, lambda prefix, _: list(prefix.oracle))]
    reused = [
        Control("raw", dense, lambda prefix, _: [(given.k_THD, given.v_THD) for given in prefix.inputs]),
        Control("raw_rerotated", dense, rerotated(_same)),
        Control("raw_fp8", dense / 2, rerotated(through_fp8)),
        Control("raw_int4", int4, rerotated(through_int4)),
    ]
    if same_shape(translator.manifest.producer, translator.manifest.consumer):
        found += reused
    if fits is not None:
        reuse_only = translators.build(_reuse_fields(translator.manifest), fits.reuse)
        found += [
            Control("ridge", dense, rerotated(_same, fits.ridge)),
            Control("ridge_int4", int4, rerotated(through_int4, fits.ridge)),
            Control("reuse_only", float(sum(reuse_only.manifest.bytes_per_token)), coded(reuse_only)),
        ]
        if fits.baselines is not None:
            found += _Families.of(consumer, translator.manifest, fits.baselines).controls()
    size = float(sum(translator.manifest.bytes_per_token))
    own = {"paper": "scd"}.get(translator.manifest.policy, translator.manifest.policy)
    found += [Control(own, size, coded(translator)), Control(MISMATCHED, size, coded(translator, of_another=True))]
    return {control.name: control for control in found}


def ridge_map(moments: Moments, ridge: float) -> AffineMap:
    """`argmin ||a W - b||^2 + lambda ||W||^2` on centred rows, lambda = ridge * mean diagonal of the covariance of a."""
    width, covariance_nn = moments.width_a, moments.covariance()
    gram_AA = covariance_nn[:width, :width]
    gram_AA = gram_AA + torch.eye(width, dtype=gram_AA.dtype) * ridge * gram_AA.diagonal().mean()
    weight_AB = torch.linalg.solve(gram_AA, covariance_nn[:width, width:])
    bias_B = moments.mean_n[width:] - moments.mean_n[:width] @ weight_AB
    return AffineMap(weight_AB.float(), bias_B.float())


def fits_needed(names: Sequence[str]) -> tuple[bool, bool]:
    """Whether controls of these names (none: all) need fits at all, and whether those of whole families."""
    fitted = set(names) - _UNFITTED
    return not names or bool(fitted), not names or bool(fitted - _REGRESSED)


@dataclass(frozen=True)
class _Families:
    """The families that know one model only, at the rates that a pair is measured at.

    Attributes:
        dense: bytes of one token of the cache itself.
        equal: bytes that `_equal` controls may take.
        itemsize: bytes of an element of the pool.
    """

    consumer: LoadedModel
    fits: BaselineFits
    dense: float
    equal: float
    itemsize: int

    @classmethod
    def of(cls, consumer: LoadedModel, manifest: Manifest, fits: BaselineFits) -> _Families:
        dense = manifest.dense_bytes_per_token
        equal = dense / DEFAULT_RATIO if manifest.policy == "paper" else float(sum(manifest.bytes_per_token))
        return cls(consumer, fits, dense, equal, dense // (2 * consumer.spec.num_layers * consumer.spec.kv_dim))

    def controls(self) -> Iterator[Control]:
        """All of them, in the order of the module docstring."""
        yield from self._quantisers()
        yield from self._cachegen()
        yield from self._low_rank()
        for name, window in self.fits.windows.items():
            yield recompute_control(name, self.consumer, window, itemsize=self.itemsize)
        yield from self._eviction()

    def _quantisers(self) -> Iterator[Control]:
        spec, prefix_tokens = self.consumer.spec, self.fits.prefix_tokens
        for bits in _KIVI_BITS:
            kivi = Kivi(bits, self.itemsize)
            size = spec.num_layers * kivi.layer_bytes(prefix_tokens, spec.kv_dim) / prefix_tokens
            yield self._rows(f"kivi_{bits}bit", kivi, size)
        for bits in _KVQUANT_BITS:
            kvquant = KvQuant.fit(self.fits.sample, bits=bits, itemsize=self.itemsize)
            yield self._rows(f"kvquant_{bits}bit", kvquant, kvquant.nominal_bytes(prefix_tokens) / prefix_tokens)

    def _cachegen(self) -> Iterator[Control]:
        sample, producer = self.fits.sample, self.fits.producer
        for name, coarseness in _COARSENESS.items():
            coder = CacheGen.fit(sample, producer, coarseness=coarseness)
            yield self._rows(name, coder, sample_bytes(coder, sample, producer))
        equal, size = cachegen_of_size(sample, producer, bytes_per_token=self.equal)
        yield self._rows("cachegen_equal", equal, size)

    def _low_rank(self) -> Iterator[Control]:
        spec, prefix_tokens = self.consumer.spec, self.fits.prefix_tokens
        for name, target in (("svd_equal", self.equal), ("svd_2x", self.dense / 2)):
            rank = rank_for(target, num_layers=spec.num_layers, width=spec.kv_dim)
            low_rank = LowRank(*self.fits.layers, rank)
            yield self._rows(name, low_rank, float(low_rank.bytes_per_token))
        for name, target in (("kvtc_equal", self.equal), ("kvtc_20x", self.dense / 20)):
            # what the uncoded sinks of a prefix of the stated length take is not there for codes
            sinks = NUM_SINK_TOKENS / prefix_tokens
            code_bytes = max(1, math.ceil((target - sinks * self.dense) / (1 - sinks)))
            kvtc = Kvtc.of_size(self.fits.joint, code_bytes=code_bytes, itemsize=self.itemsize)
            yield self._rows(name, kvtc, kvtc.nominal_bytes(prefix_tokens, spec.kv_dim) / prefix_tokens)

    def _eviction(self) -> Iterator[Control]:
        if not eviction.is_installed():
            logger.warning("token eviction is left out; %s", eviction.HOW_TO_INSTALL)
            return
        for name, method in eviction.METHODS.items():
            for rate, target in (("equal", self.equal), ("2x", self.dense / 2)):
                yield eviction.eviction_control(
                    f"{name}_{rate}", method, self.consumer, bytes_per_token=target, itemsize=self.itemsize
                )

    def _rows(self, name: str, coder: RowCoder, bytes_per_token: float) -> Control:
        return row_control(name, coder, self.consumer, bytes_per_token=bytes_per_token)


def _reuse_fields(manifest: Manifest) -> dict[str, Any]:
    """The manifest of another policy on the same pair: every layer by itself."""
    kept = set(Manifest.model_fields) - {
        "layers",
        "transforms",
        "sources",
        "tensors_digest",
        "format_version",
        "quality",
    }
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
    groups = torch.split(x_TF.float(), INT4_GROUP, dim=1)
    return torch.cat([through_levels(group, bits=4, dim=1) for group in groups], dim=1)


def _rerotated(
    consumer: LoadedModel,
) -> Callable[..., Callable[[Prefix, Prefix], list[KvLayer]]]:
    """Makes caches of the producer's rows, perhaps regressed, rounded through a coarse format, under the consumer's RoPE."""

    def through(
        rounded: Callable[[Tensor], Tensor], ridge: Sequence[RidgeLayer] | None = None
    ) -> Callable[[Prefix, Prefix], list[KvLayer]]:
        def cache(prefix: Prefix, _: Prefix) -> list[KvLayer]:
            keys: Sequence[Tensor] = prefix.k_TF
            values: Sequence[Tensor] = prefix.v_TF
            if ridge is not None:
                keys = [maps.keys(k_TF) for maps, k_TF in zip(ridge, keys, strict=True)]
                values = [maps.values(v_TF) for maps, v_TF in zip(ridge, values, strict=True)]
            return consumer_layers(consumer, [rounded(k_TF) for k_TF in keys], [rounded(v_TF) for v_TF in values])

        return cache

    return through
