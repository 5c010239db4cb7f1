"""Choice of the producer's layers that a group of the consumer's layers is computed from."""

from __future__ import annotations

import torch
from tiny_translators import tiny_spec

from scd_trt.distill import sources
from scd_trt.distill.sources import SourceProbes, most_predictive
from scd_trt.models import ModelTrace

NUM_TOKENS = 400


def rows(num_layers: int, width: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_TOKENS, width, generator=generator) for _ in range(num_layers)]


def mixing(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(num_rows * num_columns))


def correlation(*columns: torch.Tensor) -> torch.Tensor:
    return torch.corrcoef(torch.cat(columns, dim=1).double().T)


def test_one_source_explains_what_regression_says() -> None:
    source, noise = (found.double() for found in rows(2, 6, 0))
    target = source @ mixing(6, 4).double() + 2 * noise[:, :4]
    fitted = torch.linalg.lstsq(source - source.mean(0), target - target.mean(0)).solution
    left = (target - target.mean(0) - (source - source.mean(0)) @ fitted).square().sum(0)
    expected = (1 - left / (target - target.mean(0)).square().sum(0)).sum()
    found = sources._explained(correlation(source, target), slice(0, 6), slice(6, 10))
    # the ridge of a hundredth holds back about as much
    assert abs(found - expected) < 0.02 * expected
    assert found < expected


def test_what_is_left_has_nothing_of_the_source() -> None:
    source, noise = rows(2, 6, 1)
    covariance = sources._without(correlation(source, source @ mixing(6, 3), noise), slice(0, 6))
    # a share of ridge / (1 + ridge) stays
    assert covariance[6:9, 6:9].abs().max() < 0.05
    assert torch.allclose(covariance[9:, 9:], correlation(source, noise)[6:, 6:], atol=0.1)


def test_a_repetition_is_passed_over_for_something_new() -> None:
    first, second, noise = rows(3, 6, 2)
    target = torch.cat([first, second], dim=1) @ mixing(12, 8)
    # blocks: nearly all of the first, the first again, half as much of the second, noise
    columns = [first, first + 0.01 * noise, second + noise, noise]
    blocks = {name: slice(6 * index, 6 * index + 6) for index, name in enumerate((3, 1, 2, 0))}
    found = correlation(*columns, target)
    (alone,) = most_predictive([found], blocks, slice(24, 32), num_chosen=1)
    assert alone in (3, 1)
    both = most_predictive([found], blocks, slice(24, 32), num_chosen=2)
    assert both == tuple(sorted({alone, 2}))
    assert most_predictive([found], blocks, slice(24, 32), num_chosen=9) == (0, 1, 2, 3)


def traced(keys: list[torch.Tensor], values: list[torch.Tensor]) -> ModelTrace:
    return ModelTrace(k_TF=tuple(keys), v_TF=tuple(values))


def probes_of(num_producer: int, num_consumer: int, seed: int = 0) -> SourceProbes:
    producer = tiny_spec(num_producer, num_kv_heads=4, head_dim=32)
    consumer = tiny_spec(num_consumer, num_kv_heads=1, head_dim=48)
    return SourceProbes(producer, consumer, seed=seed)


def test_planted_sources_are_found_for_keys_and_values_together() -> None:
    """Keys of the consumer's group come from one producer layer, its values from another."""
    probes = probes_of(6, 3)
    keys, values = rows(6, 128, 3), rows(6, 128, 4)
    # few directions, so that a sample of elements tells them
    keys, values = ([found[:, :8] @ mixing(8, 128) for found in kind] for kind in (keys, values))
    own_keys, own_values = rows(3, 48, 5), rows(3, 48, 6)
    own_keys[1], own_values[1] = keys[2][:, :48] + own_keys[1], values[3][:, 48:96] + own_values[1]
    own_keys[0], own_values[0] = keys[0][:, :48], values[0][:, :48]
    for start in range(0, NUM_TOKENS, 100):
        part = slice(start, start + 100)
        probes.update(
            traced([x[part] for x in keys], [x[part] for x in values]),
            traced([x[part] for x in own_keys], [x[part] for x in own_values]),
            num_sinks=0,
        )
    assert probes.num_tokens == NUM_TOKENS
    assert probes.best(range(1, 2), num_sources=2) == (2, 3)
    assert probes.best(range(1), num_sources=1) == (0,)
    assert len(probes.best(range(3), num_sources=4)) == 4
    assert probes.best(range(3), num_sources=99) == tuple(range(6))


def test_first_tokens_are_left_out() -> None:
    probes = probes_of(2, 3)
    probes.update(traced(rows(2, 128, 0), rows(2, 128, 1)), traced(rows(3, 48, 2), rows(3, 48, 3)), num_sinks=7)
    assert probes.num_tokens == NUM_TOKENS - 7


def test_memory_does_not_grow_with_the_width() -> None:
    narrow, wide = (
        SourceProbes(*[tiny_spec(4, num_kv_heads=heads, head_dim=64)] * 2, seed=0).num_bytes for heads in (1, 16)
    )
    assert narrow == wide == 2 * 8 * (4 * (sources.NUM_SOURCE_ELEMENTS + sources.NUM_TARGET_ELEMENTS)) ** 2


def test_sources_lie_near_their_group_in_depth() -> None:
    near = sources._candidates(range(2), 24, 12, at_least=2)
    # the group ends at a sixth of the depth; a quarter more is 10 of 24 layers
    assert near == list(range(11))
    assert sources._candidates(range(10, 12), 24, 12, at_least=2) == list(range(13, 24))
    # too few near ones: the nearest
    assert sources._candidates(range(2), 24, 12, at_least=14) == list(range(14))


def test_constant_elements_explain_nothing() -> None:
    probes = probes_of(2, 1)
    keys = rows(2, 128, 0)
    keys[0] = torch.ones_like(keys[0])
    own = keys[1] @ mixing(128, 48)
    probes.update(traced(keys, keys), traced([own], [own]), num_sinks=0)
    assert probes.best(range(1), num_sources=1) == (1,)
