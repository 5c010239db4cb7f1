"""Token eviction: presses score what they should, survivors keep their places, dropped tokens are gone, bytes are counted."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from tiny_models import save_perturbed_copy, save_tiny_model
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scd_trt.evaluate import eviction
from scd_trt.evaluate.caches import GivenCache, Prefix, consumer_layers, prefix_of, stacked
from scd_trt.evaluate.eviction import METHODS, EvictionError, eviction_control, survivors
from scd_trt.models import LoadedModel, forward_with_cache, load_model

NUM_TOKENS = 96
NUM_LAYERS = 3

needs_kvpress = pytest.mark.skipif(
    importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed: pip install --no-deps kvpress"
)


def ids(num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(4, 260, (num_tokens,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    root = tmp_path_factory.mktemp("eviction")
    producer = save_tiny_model(root / "producer", request.param)
    return load_model(producer), load_model(save_perturbed_copy(producer, root / "consumer"))


@pytest.fixture(scope="module")
def prefix(pair: tuple[LoadedModel, LoadedModel]) -> Prefix:
    return prefix_of(*pair, ids())


@needs_kvpress
@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_its_share(prefix: Prefix, name: str) -> None:
    for num_kept in (10, 48, 95):
        keep = survivors(METHODS[name], prefix, num_kept=num_kept)
        counts = torch.stack([keep_SH.sum(0) for keep_SH in keep])
        assert counts.shape == (NUM_LAYERS, 2)
        # every layer's share is a whole number of tokens
        assert abs(float(counts.double().mean()) - num_kept) <= 0.5
        if name != "pyramidkv":
            assert (counts == num_kept).all()
    if name == "pyramidkv":
        counts_L = [int(keep_SH[:, 0].sum()) for keep_SH in survivors(METHODS[name], prefix, num_kept=24)]
        assert counts_L == sorted(counts_L, reverse=True)
        assert counts_L[0] > counts_L[-1]


@needs_kvpress
def test_streaming_llm_keeps_both_ends(prefix: Prefix) -> None:
    (keep_SH, *_) = survivors(METHODS["streaming_llm"], prefix, num_kept=14)
    assert keep_SH[:, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, *range(86, 96)]


@needs_kvpress
def test_h2o_keeps_what_was_attended_to(prefix: Prefix) -> None:
    layer, num_kept = 1, 12
    keep_SH = survivors(METHODS["h2o"], prefix, num_kept=num_kept)[layer]
    producer = prefix.producer
    # the library's own attention weights, from its plain implementation
    producer.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = producer.model(ids().unsqueeze(0), output_attentions=True).attentions[layer][0]
    finally:
        producer.model.set_attn_implementation("sdpa")
    if producer.spec.sliding_windows[layer] is not None:
        pytest.skip("this layer's window is narrower than the prefix: scores see all of it")
    mean_QS = weights.sum(1) / torch.arange(NUM_TOKENS, 0, -1)
    expected = mean_QS.reshape(2, -1, NUM_TOKENS).mean(1).topk(num_kept, dim=1).indices
    for head in range(2):
        assert set(keep_SH[:, head].nonzero()[:, 0].tolist()) == set(expected[head].tolist())


@needs_kvpress
def test_snapkv_keeps_its_window_and_what_the_window_attends_to(prefix: Prefix) -> None:
    (keep_SH, *_) = survivors(METHODS["snapkv"], prefix, num_kept=20)
    # the window is a quarter of what is kept
    assert keep_SH[-5:].all()
    assert not torch.equal(keep_SH[:, 0], keep_SH[:, 1])


@needs_kvpress
def test_keeping_all_is_raw_reuse(pair: tuple[LoadedModel, LoadedModel], prefix: Prefix) -> None:
    consumer = pair[1]
    control = eviction_control("all", METHODS["snapkv"], consumer, bytes_per_token=1e6, itemsize=2)
    cache = control.cache(prefix, prefix)
    for found, expected in zip(cache, consumer_layers(consumer, prefix.k_TF, prefix.v_TF), strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@needs_kvpress
def test_dropped_tokens_are_gone_and_bytes_count_survivors(
    pair: tuple[LoadedModel, LoadedModel], prefix: Prefix
) -> None:
    consumer = pair[1]
    dense = 2 * NUM_LAYERS * 2 * 16 * 2
    control = eviction_control("h2o", METHODS["h2o"], consumer, bytes_per_token=dense / 4, itemsize=2)
    cache = control.cache(prefix, prefix)
    assert isinstance(cache, GivenCache)
    assert cache.keep is not None
    num_kept = sum(int(keep_SH.sum()) for keep_SH in cache.keep)
    # a survivor: 16 elements of key and of value, two bytes each, and two bytes that say where it stood
    assert control.measured_bytes(cache) == num_kept * (2 * 16 * 2 + 2) / NUM_TOKENS
    assert dense / 4 <= control.measured_bytes(cache) < dense / 4 * 1.05
    poisoned = GivenCache(
        [
            (torch.where(keep_SH[..., None], k, 1e4), torch.where(keep_SH[..., None], v, -1e4))
            for (k, v), keep_SH in zip(cache, cache.keep, strict=True)
        ],
        keep=cache.keep,
    )
    layers = stacked({"clean": cache, "poisoned": poisoned}, torch.float32)
    clean, spoilt = forward_with_cache(consumer, ids(110)[NUM_TOKENS:], layers, start_position=NUM_TOKENS)
    assert torch.equal(clean, spoilt)


@needs_kvpress
def test_the_package_is_not_run_as_a_whole(prefix: Prefix) -> None:
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    survivors(METHODS["expected"], prefix, num_kept=10)
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before
    assert "kvpress" not in sys.modules


def test_short_prefixes_are_kept_whole(pair: tuple[LoadedModel, LoadedModel]) -> None:
    short = prefix_of(*pair, ids(8))
    assert all(keep_SH.all() for keep_SH in survivors(METHODS["snapkv"], short, num_kept=2))


def test_without_the_package_the_cure_is_named(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_PACKAGE", "kvpress_that_is_not_there")
    assert not eviction.is_installed()
    with pytest.raises(EvictionError, match="pip install --no-deps kvpress"):
        survivors(METHODS["snapkv"], prefix, num_kept=20)
