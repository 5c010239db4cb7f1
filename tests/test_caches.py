"""What all controls share: holes reach the attention, coded rows get the consumer's rotary, sizes are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, save_perturbed_copy, save_tiny_model
from torch import Tensor

from scd_trt.evaluate.caches import CodedRows, Control, GivenCache, KvLayer, Prefix, prefix_of, row_control, stacked
from scd_trt.evaluate.generation import GrowingCache, answer_each, forced
from scd_trt.models import LoadedModel, forward_with_cache, holes, load_model, trace, trace_from

NUM_PREFIX = 40

# float32 against float32 with sums in another order, through three layers and onto logits of size ten
SUMS_REORDERED = {"atol": 2e-4, "rtol": 1e-4}


def ids(num_tokens: int) -> Tensor:
    return torch.randint(4, 260, (num_tokens,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("holes") / "model", request.param))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    """Two models that differ in weights and in rope."""
    root: Path = tmp_path_factory.mktemp("caches")
    producer = save_tiny_model(root / "producer")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    return load_model(producer), load_model(save_perturbed_copy(producer, root / "consumer", **rope))


def random_keep(loaded: LoadedModel, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_PREFIX, loaded.spec.num_kv_heads)
    return [torch.rand(shape, generator=generator) < 0.6 for _ in range(loaded.spec.num_layers)]


def with_holes(layers: Sequence[KvLayer], keep: Sequence[Tensor], filling: float = 0.0) -> GivenCache:
    return GivenCache(
        [
            tuple(torch.where(keep_SH[..., None], x, filling) for x in pair)  # type: ignore[misc]
            for pair, keep_SH in zip(layers, keep, strict=True)
        ],
        keep=keep,
    )


def test_a_poisoned_hole_changes_nothing_and_a_whole_cache_is_a_cache_without(model: LoadedModel) -> None:
    whole, tail = list(prefix_of(model, model, ids(NUM_PREFIX)).oracle), ids(60)[NUM_PREFIX:]
    keep, every = random_keep(model, 0), [torch.ones_like(found) for found in random_keep(model, 0)]
    caches = {
        "plain": whole,
        "whole": GivenCache(whole, keep=every),
        "holes": with_holes(whole, keep),
        "poisoned": with_holes(whole, keep, 1e4),
    }
    logits = forward_with_cache(model, tail, stacked(caches, torch.float32), start_position=NUM_PREFIX)
    plain, all_kept, holes, poisoned = logits
    torch.testing.assert_close(plain, all_kept)
    torch.testing.assert_close(poisoned, holes, atol=0, rtol=0)
    assert (plain - holes).abs().max() > 0.1
    # alone, without the leading dimension, and for one token, where the library leaves out its mask
    alone = forward_with_cache(model, tail, caches["poisoned"], start_position=NUM_PREFIX)
    torch.testing.assert_close(alone, holes, **SUMS_REORDERED)
    one = forward_with_cache(model, tail[:1], caches["poisoned"], start_position=NUM_PREFIX)
    torch.testing.assert_close(one[0], holes[0], **SUMS_REORDERED)


def test_equal_holes_in_all_heads_are_a_shorter_cache(pair: tuple[LoadedModel, LoadedModel]) -> None:
    model, tail = pair[0], ids(60)[NUM_PREFIX:]
    layers = prefix_of(model, model, ids(NUM_PREFIX)).oracle
    keep_S = torch.arange(NUM_PREFIX) % 3 != 1
    keep = [keep_S[:, None].expand(-1, model.spec.num_kv_heads)] * len(layers)
    masked = forward_with_cache(model, tail, GivenCache(layers, keep=keep), start_position=NUM_PREFIX)
    shorter = [(k[keep_S], v[keep_S]) for k, v in layers]
    positions = torch.arange(NUM_PREFIX, NUM_PREFIX + len(tail))
    expected = trace(model, tail, capture={"logits"}, past=shorter, positions=positions).logits_TV
    torch.testing.assert_close(masked, expected, **SUMS_REORDERED)


def test_answers_do_not_see_holes(model: LoadedModel) -> None:
    whole, tail = list(prefix_of(model, model, ids(NUM_PREFIX)).oracle), ids(44)[NUM_PREFIX:].tolist()
    keep = random_keep(model, 1)

    def cache_of(*rows: list[KvLayer]) -> GrowingCache:
        cache = GrowingCache.reserve(
            model, num_rows=len(rows), num_tokens=NUM_PREFIX, room=len(tail) + 8, with_holes=True
        )
        for row, layers in enumerate(rows):
            cache.put(row, layers, keep=holes(layers))
        return cache

    rows = (whole, with_holes(whole, keep), with_holes(whole, keep, 1e4))
    logits = forced(model, cache_of(*rows), tail, first_position=NUM_PREFIX, num_logits=1)
    assert torch.equal(logits[1], logits[2])
    assert not torch.equal(logits[0], logits[1])
    several = answer_each(model, cache_of(*rows), tail, first_position=NUM_PREFIX, max_tokens=8)
    assert several[1] == several[2]
    assert several[:2] == [
        answer_each(model, cache_of(row), tail, first_position=NUM_PREFIX, max_tokens=8)[0] for row in rows[:2]
    ]
    selected = cache_of(*rows).select([2])
    again = forced(model, selected, tail, first_position=NUM_PREFIX, num_logits=1)
    torch.testing.assert_close(again[0], logits[2], **SUMS_REORDERED)


def test_a_mask_of_another_shape_is_refused(pair: tuple[LoadedModel, LoadedModel]) -> None:
    layers = prefix_of(pair[0], pair[0], ids(NUM_PREFIX)).oracle
    with pytest.raises(ValueError, match=r"layer 0: keep is torch\.bool \(40, 3\); expected torch\.bool \(40, 2\)"):
        GivenCache(layers, keep=[torch.ones(NUM_PREFIX, 3, dtype=torch.bool)] * len(layers))
    with pytest.raises(ValueError, match=r"torch\.float32"):
        GivenCache(layers, keep=[torch.ones(NUM_PREFIX, 2)] * len(layers))


def test_entering_a_layer_with_its_own_hidden_state_changes_nothing(model: LoadedModel) -> None:
    given = trace(model, ids(NUM_PREFIX), capture={"kv", "hidden"})
    again = trace_from(model, ids(NUM_PREFIX).flip(0), given.hidden_TM[1], layer=1)
    for layer in (1, 2):
        torch.testing.assert_close(again.k_TF[layer], given.k_TF[layer])
        torch.testing.assert_close(again.v_TF[layer], given.v_TF[layer])
    assert not torch.equal(again.k_TF[0], given.k_TF[0])
    assert torch.equal(trace(model, ids(NUM_PREFIX)).k_TF[1], given.k_TF[1])


@dataclass(frozen=True)
class Lossless:
    """A coder that changes nothing and takes three bytes."""

    after_rope: bool

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CodedRows:
        return CodedRows(keys, values, 3.0)


@pytest.mark.parametrize("after_rope", [False, True])
def test_coded_keys_get_the_consumers_rotary(pair: tuple[LoadedModel, LoadedModel], after_rope: bool) -> None:
    producer, consumer = pair
    prefix: Prefix = prefix_of(producer, consumer, ids(NUM_PREFIX))
    control: Control = row_control("lossless", Lossless(after_rope), consumer, bytes_per_token=9.0)
    cache = control.cache(prefix, prefix)
    positions = torch.arange(NUM_PREFIX)
    for layer, (k_SHD, v_SHD) in enumerate(cache):
        own = prefix.k_TF[layer].unflatten(1, (-1, consumer.spec.head_dim))
        torch.testing.assert_close(k_SHD, consumer.ropes[layer].apply(own, positions))
        assert torch.equal(v_SHD, prefix.inputs[layer].v_THD)
    assert control.measured_bytes(cache) == 3.0 / NUM_PREFIX
    assert control.measured_bytes(list(prefix.oracle)) == 9.0
