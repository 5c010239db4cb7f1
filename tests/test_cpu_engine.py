"""The embedded engine: equal to the model library's own generation, and no block, thread or consumer is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS_ID, FAMILIES, VOCAB_SIZE, Family, save_tiny_model

from scd_trt.config import EngineConfig
from scd_trt.models import LoadedModel, attention_module, decoder_layers, load_model
from scd_trt.serving.block_pool import BlockPool
from scd_trt.serving.cpu_engine import (
    CpuEngine,
    EngineBusyError,
    EngineClosedError,
    GenerationError,
    InvalidPromptError,
    PromptTooLongError,
)
from scd_trt.serving.sampling import GREEDY_BELOW, Sampler, SamplingError, SamplingParams, probabilities

MakeEngine = Callable[..., CpuEngine]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def make_engine(llama: LoadedModel) -> Iterator[MakeEngine]:
    engines: list[CpuEngine] = []

    def make(loaded: LoadedModel = llama, **config: Any) -> CpuEngine:
        fields = {"tokens_per_block": 8, "num_blocks": 32, "max_num_tokens": 64} | config
        engines.append(CpuEngine(loaded, EngineConfig(**fields)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(4, VOCAB_SIZE), k=num_tokens)


def generate(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation by the model library itself."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def tokens_of(engine: CpuEngine, prompt: list[int], sampling: SamplingParams, **fields: Any) -> list[int]:
    return [event.token_id for event in engine.submit(prompt, sampling, **fields)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_the_library(family: Family, tmp_path: Path, make_engine: MakeEngine) -> None:
    loaded = load_model(save_tiny_model(tmp_path, family))
    engine = make_engine(loaded, max_num_tokens=16)  # long prompts cross chunks, blocks and the sliding window
    for seed, length in enumerate([1, 8, 9, 40, 61]):
        prompt = random_prompt(seed, length)
        assert tokens_of(engine, prompt, greedy(10)) == generate(loaded, prompt, 10)


def test_a_repeated_prefix_is_not_computed_again_and_changes_nothing(
    llama: LoadedModel, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    prompt = random_prompt(1, 40)
    first = engine.submit(prompt, greedy(10))
    answer = [event.token_id for event in first]
    again = engine.submit(prompt, greedy(10))
    assert [event.token_id for event in again] == answer == generate(llama, prompt, 10)
    assert (first.cached_tokens, again.cached_tokens) == (0, 32)  # 4 of 5 blocks: the last token is always computed
    longer = engine.submit([*prompt, *answer, 17], greedy(10))
    assert [event.token_id for event in longer] == generate(llama, [*prompt, *answer, 17], 10)
    assert longer.cached_tokens == 48  # blocks that the answer filled are shared too
    salted = engine.submit(prompt, greedy(10), cache_salt="tenant")
    assert [event.token_id for event in salted] == answer
    assert salted.cached_tokens == 0


def test_without_block_reuse_nothing_is_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_block_reuse=False)
    prompt = random_prompt(1, 40)
    tokens_of(engine, prompt, greedy(4))
    again = engine.submit(prompt, greedy(4))
    assert len(list(again)) == 4
    assert again.cached_tokens == 0
    assert engine.stats().blocks_cached == 0
    assert engine.stats().blocks_free == 32


def test_bfloat16_stays_close_to_the_library(tmp_path: Path, make_engine: MakeEngine) -> None:
    loaded = load_model(save_tiny_model(tmp_path), dtype="bfloat16")
    engine = make_engine(loaded)
    prompt = random_prompt(3, 30)
    events = list(engine.submit(prompt, greedy(1, num_logprobs=5)))
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([prompt])).logits[0, -1].float()
    expected = torch.log_softmax(logits, -1)
    for token, logprob in events[0].top_logprobs:
        # bfloat16 keeps 8 bits: logits of size 10 carry rounding of 0.04, and the two paths round in other places
        assert logprob == pytest.approx(float(expected[token]), abs=0.1)


def test_many_requests_at_once_each_get_their_own_answer(llama: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_tokens=16)
    prompts = [random_prompt(seed, 10 + 5 * seed) for seed in range(6)]
    generations = [engine.submit(prompt, greedy(12)) for prompt in prompts]
    answers = [[event.token_id for event in generation] for generation in generations]
    assert answers == [generate(llama, prompt, 12) for prompt in prompts]


def test_end_of_sequence_stops_unless_ignored(llama: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_prompt(5, 20)
    free = list(engine.submit(prompt, greedy(8, ignore_eos=True)))
    assert [event.finish_reason for event in free] == [None] * 7 + ["length"]
    third = free[2].token_id
    stopped = list(engine.submit(prompt, greedy(8, ignore_eos=True, stop_token_ids=(third,))))
    first_hit = [event.token_id for event in free].index(third)
    assert [event.token_id for event in stopped] == [event.token_id for event in free[: first_hit + 1]]
    assert stopped[-1].finish_reason == "stop"
    # a prompt whose greedy answer holds the model's own end token, found by trying
    for seed in range(200):
        answer = generate(llama, random_prompt(seed, 6), 30)
        if answer[-1] == EOS_ID and len(answer) < 30:
            events = list(engine.submit(random_prompt(seed, 6), greedy(30)))
            assert [event.token_id for event in events] == answer
            assert events[-1].finish_reason == "stop"
            return
    pytest.fail("no prompt of this model ends by itself; choose other seeds")


def test_logprobs_are_the_models_own_whatever_the_temperature(llama: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_prompt(6, 25)
    sampling = SamplingParams(max_tokens=1, temperature=2.0, top_p=0.5, seed=3, num_logprobs=4)
    (event,) = engine.submit(prompt, sampling)
    with torch.inference_mode():
        expected = torch.log_softmax(llama.model(torch.tensor([prompt])).logits[0, -1], -1)
    top = expected.topk(4)
    assert [token for token, _ in event.top_logprobs] == top.indices.tolist()
    # float32 through another order of additions
    assert [p for _, p in event.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert event.logprob == pytest.approx(float(expected[event.token_id]), abs=1e-4)


def test_equal_seeds_give_equal_answers(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_prompt(7, 20)
    one, two, other = (
        tokens_of(engine, prompt, SamplingParams(max_tokens=16, seed=seed, ignore_eos=True)) for seed in (5, 5, 6)
    )
    assert one == two
    assert one != other


def test_an_answer_ends_with_the_context(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=4)
    assert engine.max_prompt_tokens == 31
    events = list(engine.submit(random_prompt(1, 20), greedy(1000, ignore_eos=True)))
    assert len(events) == 12
    assert events[-1].finish_reason == "length"


def test_bad_prompts_are_refused_with_the_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=4)
    with pytest.raises(PromptTooLongError, match="has 32 tokens; at most 31 fit"):
        engine.submit(random_prompt(1, 32), greedy(1))
    with pytest.raises(InvalidPromptError, match="no tokens"):
        engine.submit([], greedy(1))
    with pytest.raises(InvalidPromptError, match=f"vocabulary of {VOCAB_SIZE}"):
        engine.submit([5, VOCAB_SIZE], greedy(1))
    with pytest.raises(InvalidPromptError, match="vocabulary"):
        engine.submit([-1], greedy(1))


def test_the_models_context_limits_prompts_too(tmp_path: Path, make_engine: MakeEngine) -> None:
    loaded = load_model(save_tiny_model(tmp_path, max_position_embeddings=16))
    engine = make_engine(loaded)
    assert engine.max_prompt_tokens == 15
    assert len(tokens_of(engine, random_prompt(1, 15), greedy(5))) == 1


def test_a_full_queue_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=2, num_blocks=4)
    # takes every block, so that later requests wait
    running = engine.submit(random_prompt(1, 20), greedy(12, ignore_eos=True))
    stream = iter(running)
    next(stream)
    waiting = [engine.submit(random_prompt(2, 20), greedy(12)) for _ in range(2)]
    with pytest.raises(EngineBusyError, match="2 requests wait"):
        engine.submit(random_prompt(3, 20), greedy(1))
    for generation in waiting:
        generation.cancel()
        assert list(generation) == []
    assert len(list(stream)) == 11


def test_waiting_requests_run_once_blocks_are_free(llama: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=6)
    prompts = [random_prompt(seed, 30) for seed in range(5)]
    generations = [engine.submit(prompt, greedy(10)) for prompt in prompts]
    for prompt, generation in zip(prompts, generations, strict=True):
        assert [event.token_id for event in generation] == generate(llama, prompt, 10)
    assert engine.stats().blocks_free == 6


def test_cancelling_frees_blocks_and_ends_the_stream(make_engine: MakeEngine) -> None:
    engine = make_engine()
    generation = engine.submit(random_prompt(1, 20), greedy(200, ignore_eos=True))
    stream = iter(generation)
    next(stream)
    generation.cancel()
    assert len(list(stream)) < 200
    tokens_of(engine, random_prompt(2, 20), greedy(1))  # a whole request later the cancelled one is gone
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, 32)


def test_async_events_equal_blocking_ones(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_prompt(8, 20)

    async def collect() -> list[int]:
        return [event.token_id async for event in engine.submit(prompt, greedy(9)).events_async()]

    assert asyncio.run(collect()) == tokens_of(engine, prompt, greedy(9))


def test_a_client_that_leaves_cancels_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def leave() -> bool:
        generation = engine.submit(random_prompt(1, 20), greedy(200, ignore_eos=True))
        stream = generation.events_async()
        async for _ in stream:
            break
        await stream.aclose()
        return generation.is_cancelled

    assert asyncio.run(leave())


def test_an_exception_fails_its_request_and_no_other(llama: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine()
    projection = attention_module(decoder_layers(llama.model)[1]).get_submodule("v_proj")

    def explode(_module: Any, _inputs: Any) -> None:
        raise ZeroDivisionError("in layer 1")

    handle = projection.register_forward_pre_hook(explode)
    try:
        broken = engine.submit(random_prompt(1, 20), greedy(4))
        with pytest.raises(GenerationError, match="in layer 1"):
            list(broken)
    finally:
        handle.remove()
    assert tokens_of(engine, random_prompt(1, 20), greedy(4)) == generate(llama, random_prompt(1, 20), 4)
    assert engine.stats().blocks_free == 32


def test_closing_tells_everyone(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=4)
    running = engine.submit(random_prompt(1, 10), greedy(20, ignore_eos=True))
    waiting = engine.submit(random_prompt(2, 20), greedy(12, ignore_eos=True))
    stream = iter(running)
    next(stream)
    engine.close()
    with pytest.raises(GenerationError, match="closed"):
        list(stream)
    with pytest.raises(GenerationError, match="closed"):
        list(waiting)
    with pytest.raises(EngineClosedError):
        engine.submit([5], greedy(1))


def test_a_dead_engine_tells_everyone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def explode(_blocks: Any) -> None:
        raise ZeroDivisionError("blocks cannot be freed")

    monkeypatch.setattr(engine._executor.blocks, "release", explode)
    with pytest.raises(GenerationError, match="blocks cannot be freed"):
        list(engine.submit(random_prompt(1, 10), greedy(1)))
    engine._thread.join()
    with pytest.raises(EngineClosedError):
        engine.submit([5], greedy(1))


def test_the_heartbeat_goes_on_at_rest(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens_of(engine, [5], greedy(1))
    beats = set()
    while len(beats) < 3:  # ends only if the thread keeps going round
        beats.add(engine._beat_s)
    assert engine.stats().last_step_age_s < 60


def test_blocks_are_never_lost_under_stress(llama: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12, max_num_tokens=16, max_waiting=1000)
    rng = random.Random(0)
    stems = [random_prompt(seed, 40) for seed in range(3)]
    generations = []
    for index in range(60):
        prompt = stems[index % 3][: rng.randrange(1, 41)] + random_prompt(index, rng.randrange(0, 10))
        generations.append(engine.submit(prompt, SamplingParams(max_tokens=rng.randrange(1, 30), seed=index)))
        if rng.random() < 0.4:
            rng.choice(generations).cancel()
    for generation in generations:
        list(generation)
    tokens_of(engine, [5], greedy(1))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free, stats.blocks_total) == (0, 0, 12, 12)
    for stem in stems:
        assert tokens_of(engine, stem, greedy(5)) == generate(llama, stem, 5)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_block_pool_keeps_every_block_in_exactly_one_state(data: st.DataObject) -> None:
    pool = BlockPool(8, enable_reuse=data.draw(st.booleans()))
    held: list[list[int]] = []
    names = [bytes([index]) * 16 for index in range(6)]
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["start", "end"]))
        if action == "start":
            shared = pool.acquire_prefix(names[: data.draw(st.integers(0, 6))])
            wanted = data.draw(st.integers(0, 4))
            if wanted > pool.num_available:
                with pytest.raises(ValueError, match="available"):
                    pool.allocate(wanted)
                wanted = 0
            blocks = shared + pool.allocate(wanted)
            for block, name in list(zip(blocks, names, strict=False)):
                pool.name(block, name)
            held.append(blocks)
        elif held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        in_use = {block for blocks in held for block in blocks}
        assert pool.num_available == 8 - len(in_use)
        for blocks in held:
            assert len(set(blocks)) == len(blocks)
    for blocks in held:
        pool.release(blocks)
    assert pool.num_available == 8
    assert sorted(pool.allocate(8)) == list(range(8))


def test_releasing_a_free_block_is_a_bug() -> None:
    pool = BlockPool(2, enable_reuse=True)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.release(blocks)


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    pool = BlockPool(3, enable_reuse=True)
    keys = [b"a" * 16, b"b" * 16, b"c" * 16]
    blocks = pool.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.name(block, key)
    pool.release(blocks)
    assert pool.allocate(1) == blocks[2:]
    assert pool.acquire_prefix(keys) == blocks[:2]


def test_top_p_keeps_exactly_the_nucleus() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))

    def kept(top_p: float) -> set[int]:
        probs = probabilities(logits, SamplingParams(max_tokens=1, top_p=top_p))
        return set(probs.nonzero().flatten().tolist())

    assert kept(0.01) == {1}
    assert kept(0.39) == {1}
    assert kept(0.41) == {1, 3}
    assert kept(0.72) == {1, 3, 4}
    assert kept(1.0) == {0, 1, 2, 3, 4}
    probs = probabilities(logits, SamplingParams(max_tokens=1, top_p=0.6))
    # float32 rounding of a quotient
    assert probs.tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-6)


def test_temperature_and_top_k_shape_the_distribution() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    halved = probabilities(logits, SamplingParams(max_tokens=1, temperature=0.5))
    assert torch.allclose(halved, torch.softmax(logits * 2, -1))
    two = probabilities(logits, SamplingParams(max_tokens=1, top_k=2))
    assert two.nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-39, 1e-7, GREEDY_BELOW])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(max_tokens=1, temperature=temperature, seed=0))
    assert all(sampler.choose(torch.tensor([100.0, 300.0, 299.0, -1000.0])).token_id == 1 for _ in range(20))


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.7, top_k=3, seed=1)
    logits = torch.tensor([1.0, 2.0, 0.5, -1.0])
    sampler = Sampler(params)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sampler.choose(logits).token_id] += 1
    # standard error of a share is at most 0.008; five of them
    assert torch.allclose(counts / 4000, probabilities(logits, params), atol=0.04)
    assert counts[3] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"num_logprobs": 21},
        {"seed": 1 << 64},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(fields))):
        SamplingParams(**({"max_tokens": 1} | fields))
