"""DroidSpeak-style reuse: what is recomputed equals the consumer's own, what is reused is raw, bytes are counted."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_perturbed_copy, save_tiny_model
from torch import Tensor

from scd_trt.evaluate.caches import consumer_layers, prefix_of
from scd_trt.evaluate.recompute import bytes_per_token, choose_window, recompute_control, recomputed, windows
from scd_trt.models import LoadedModel, cache_layers, load_model, trace_from

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    root = tmp_path_factory.mktemp("recompute")
    producer = save_tiny_model(root / "producer", num_hidden_layers=NUM_LAYERS)
    return load_model(producer), load_model(save_perturbed_copy(producer, root / "consumer", scale=0.2))


def ids(num_tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(4, 260, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def test_recomputing_all_layers_is_the_consumers_own_prefill(pair: tuple[LoadedModel, LoadedModel]) -> None:
    producer, consumer = pair
    prefix = prefix_of(producer, consumer, ids(30))
    control = recompute_control("all", consumer, (0, NUM_LAYERS), itemsize=2)
    for (k, v), (k_own, v_own) in zip(control.cache(prefix, prefix), prefix.oracle, strict=True):
        assert torch.equal(k, k_own)
        assert torch.equal(v, v_own)
    assert control.bytes_per_token == 0.0


def test_a_window_is_computed_from_what_the_producer_sent(pair: tuple[LoadedModel, LoadedModel]) -> None:
    producer, consumer = pair
    prefix = prefix_of(producer, consumer, ids(30))
    found = recomputed(prefix, consumer, (1, 3))
    raw = consumer_layers(consumer, prefix.k_TF, prefix.v_TF)
    sent = prefix.hidden_TM[1].bfloat16().float()
    own = cache_layers(consumer, trace_from(consumer, prefix.token_ids, sent, layer=1))
    for layer, expected in enumerate([raw[0], own[1], own[2], raw[3]]):
        torch.testing.assert_close(found[layer][0], expected[0])
        torch.testing.assert_close(found[layer][1], expected[1])
    assert not torch.equal(raw[1][1], own[1][1])


def test_one_model_recomputes_what_it_had(pair: tuple[LoadedModel, LoadedModel]) -> None:
    producer, _ = pair
    prefix = prefix_of(producer, producer, ids(30))
    # the hidden state travels as bfloat16, three digits, through a layer of random weights of size ten
    for (k, v), (k_own, v_own) in zip(recomputed(prefix, producer, (2, 4)), prefix.oracle, strict=True):
        torch.testing.assert_close(k, k_own, atol=0.2, rtol=0)
        torch.testing.assert_close(v, v_own, atol=0.2, rtol=0)


def test_bytes_are_of_reused_layers_and_of_the_hidden_state(pair: tuple[LoadedModel, LoadedModel]) -> None:
    consumer = pair[1]
    # a layer: 2 * 32 elements of two bytes; the hidden state: 64 elements of two bytes
    assert bytes_per_token(consumer, (1, 3), itemsize=2) == 2 * 128 + 128
    assert bytes_per_token(consumer, (0, 3), itemsize=2) == 128


def test_windows_are_spread_over_all_layers() -> None:
    assert windows(4, 2) == [(0, 2), (1, 3), (2, 4)]
    assert windows(4, 4) == [(0, 4)]
    many = windows(80, 20)
    assert (many[0], many[-1], len(many)) == ((0, 20), (60, 80), 12)


def test_the_window_that_matters_is_chosen(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("choose")
    producer = load_model(save_tiny_model(root / "producer", num_hidden_layers=NUM_LAYERS))
    consumer = load_model(save_tiny_model(root / "producer", num_hidden_layers=NUM_LAYERS))
    # models that differ in the value projection of one layer only
    with torch.no_grad():
        consumer.model.model.layers[2].self_attn.v_proj.weight.neg_()
    sequences = [ids(41, seed).tolist() for seed in (1, 2)]
    assert choose_window(producer, consumer, sequences, size=1, prefix_tokens=24) == (2, 3)
