"""The families that know one model only, as `scd-trt evaluate` has them: named, sized, and plain methods where A = B."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from serving_pairs import TinyPair, write_pair

from scd_trt.distill.calibration import SilentProgress, calibrate, layer_statistics, read_texts
from scd_trt.distill.fit import LayerFits
from scd_trt.distill.plan import prepare
from scd_trt.distill.statistics import PairStatistics
from scd_trt.evaluate import eviction
from scd_trt.evaluate.baselines import (
    BaselineFits,
    Control,
    Fits,
    Prefix,
    RidgeLayer,
    controls,
    fit_baselines,
    prefix_of,
    ridge_map,
    stacked,
)
from scd_trt.evaluate.caches import RowCoder, row_control
from scd_trt.evaluate.compressors import CacheGen, Kivi, KvQuant
from scd_trt.evaluate.low_rank import Kvtc, LowRank
from scd_trt.evaluate.metrics import kl
from scd_trt.models import LoadedModel, forward_with_cache, load_model
from scd_trt.translator import RawLayer, build

PREFIX_TOKENS = 64
FAMILIES = [
    "kivi_2bit", "kivi_4bit", "kvquant_2bit", "kvquant_3bit", "kvquant_4bit", "cachegen", "cachegen_fine", "cachegen_equal",
    "svd_equal", "svd_2x", "kvtc_equal", "kvtc_20x", "droidspeak_third", "droidspeak_half",
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("baselines"), policy="paper")


@pytest.fixture(scope="module")
def fits(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Fits:
    job, work = prepare(pair.config), tmp_path_factory.mktemp("work")
    texts = read_texts(job)
    statistics = calibrate(job, texts, work, SilentProgress(), into=layer_statistics(job))
    return Fits(
        reuse=tuple(LayerFits(statistics, 1e-3).reuse(layer, r_k=8, r_v=8) for layer in range(job.num_layers)),
        ridge=tuple(ridge_layer(statistics, layer) for layer in range(job.num_layers)),
        baselines=fit_baselines(job, texts, statistics, work, SilentProgress()),
    )


def ridge_layer(statistics: PairStatistics, layer: int) -> RidgeLayer:
    return RidgeLayer(ridge_map(statistics[layer, "k"], 1e-3), ridge_map(statistics[layer, "v"], 1e-3))


@pytest.fixture(scope="module")
def models(fits: Fits) -> BaselineFits:
    assert fits.baselines is not None
    return fits.baselines


@pytest.fixture(scope="module")
def compared(pair: TinyPair, fits: Fits) -> dict[str, Control]:
    job = prepare(pair.config)
    fields = {
        "name": "tiny",
        "policy": "paper",
        "code_dtype": "float16",
        "raw_dtype": "bfloat16",
        "producer": job.producer,
        "consumer": job.consumer,
        "groups": tuple((layer, layer + 1) for layer in range(job.num_layers)),
    }
    translator = build(fields, tuple(RawLayer() for _ in range(job.num_layers)))
    return controls(load_model(pair.consumer), translator, fits)


@pytest.fixture(scope="module")
def prefix(pair: TinyPair) -> Prefix:
    ids = torch.randint(4, 260, (PREFIX_TOKENS,), generator=torch.Generator().manual_seed(3))
    return prefix_of(load_model(pair.producer), load_model(pair.consumer), ids)


def test_every_family_is_there(compared: dict[str, Control]) -> None:
    evicting = [f"{name}_{rate}" for name in eviction.METHODS for rate in ("equal", "2x")]
    expected = FAMILIES + (evicting if eviction.is_installed() else [])
    names = list(compared)
    assert names[names.index("reuse_only") + 1 : names.index("scd")] == expected


def test_every_cache_has_the_pools_shape_and_is_finite(compared: dict[str, Control], prefix: Prefix) -> None:
    for name in compared:
        layers = compared[name].cache(prefix, prefix)
        for (k, v), (k_own, v_own) in zip(layers, prefix.oracle, strict=True):
            assert (k.shape, v.shape) == (k_own.shape, v_own.shape), name
            assert k.isfinite().all(), name
            assert v.isfinite().all(), name


def test_stated_bytes_are_those_of_a_prefix_of_the_held_out_length(
    compared: dict[str, Control], prefix: Prefix
) -> None:
    dense = compared["raw"].bytes_per_token
    for name, control in compared.items():
        measured = control.measured_bytes(control.cache(prefix, prefix))
        if not name.startswith(("cachegen", "kvquant")):
            # what is kept is a whole number of tokens, up to one more than asked for, in every layer and head
            slack = dense / PREFIX_TOKENS if name.rpartition("_")[0] in eviction.METHODS else 1e-9
            assert measured == pytest.approx(control.bytes_per_token, abs=slack), name
        if name.endswith("_equal"):
            assert control.bytes_per_token >= dense / 10 * 0.999, name


def test_enough_bits_reproduce_the_oracle_where_both_models_are_one(pair: TinyPair, models: BaselineFits) -> None:
    model = models.producer
    ids = torch.tensor(read_texts(prepare(pair.config)).heldout[0])
    prefix = prefix_of(model, model, ids[:PREFIX_TOKENS])
    coarse_and_fine: dict[str, Callable[[bool], RowCoder]] = {
        "kivi": lambda fine: Kivi(8 if fine else 2, 4),
        "kvquant": lambda fine: KvQuant.fit(models.sample, bits=8 if fine else 2, itemsize=4),
        "cachegen": lambda fine: CacheGen.fit(models.sample, model, coarseness=1e-2 if fine else 2.0),
        "low rank": lambda fine: LowRank(*models.layers, 32 if fine else 4),
        "kvtc": lambda fine: Kvtc.of_size(models.joint, code_bytes=192 if fine else 12, itemsize=4),
    }
    for name, coder in coarse_and_fine.items():
        coarse, fine = (loss(model, prefix, ids, coder(is_fine)) for is_fine in (False, True))
        # the finest setting of each is 8 bits or float16: a few thousandths of rows that make logits of size ten
        assert fine < 0.05, (name, fine)
        assert fine < coarse / 5, (name, fine, coarse)


def loss(model: LoadedModel, prefix: Prefix, ids: torch.Tensor, coder: RowCoder) -> float:
    control = row_control("tested", coder, model, bytes_per_token=0.0)
    layers = stacked({"oracle": list(prefix.oracle), "tested": control.cache(prefix, prefix)}, torch.float32)
    oracle, tested = forward_with_cache(model, ids[PREFIX_TOKENS:], layers, start_position=PREFIX_TOKENS)
    return float(kl(oracle, tested).mean())
