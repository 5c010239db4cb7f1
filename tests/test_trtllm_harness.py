"""The connector in TensorRT-LLM's order of calls: one rank in process, two in processes of their own, and against the engine.

The first tests show that the harness itself behaves as TensorRT-LLM does; the others use it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from serving_pairs import loopback_config
from tiny_models import VOCAB_SIZE as LIBRARY_VOCAB_SIZE
from tiny_models import save_tiny_model
from tiny_translators import group_translator, random_group, tiny_spec
from trtllm_harness import (
    POISON,
    VOCAB_SIZE,
    Executor,
    GlooRanks,
    Group,
    HostRequest,
    LibraryModel,
    OneRank,
    Served,
    ToyModel,
    cached_rows,
    hand_over,
    serve,
    toy_rows,
)

from scd_trt import translator as translators
from scd_trt.kv_cache import KvLayout
from scd_trt.models import LoadedModel, load_model
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_api import KvCacheConnectorScheduler, KvCacheConnectorWorker, SchedulerOutput
from scd_trt.serving.paged_executor import PagedExecutor, PagedRequest
from scd_trt.translator import RawLayer, Translator

B = 8
NUM_LAYERS = 3
NUM_KV_HEADS = 4

Start = Callable[..., Served]


def exact(**spec: Any) -> Translator:
    """Keys and values as they are, layer by layer: what comes out is what went in, bit for bit."""
    model = tiny_spec(NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, **spec)
    groups = tuple((layer, layer + 1) for layer in range(NUM_LAYERS))
    fields = {"name": "tiny", "policy": "exact", "code_dtype": "float32", "raw_dtype": "float32", "groups": groups}
    return translators.build(fields | {"producer": model, "consumer": model}, (RawLayer(),) * NUM_LAYERS)


def coded() -> Translator:
    """Groups of two layers and one, with random maps over all heads."""
    model = tiny_spec(NUM_LAYERS, num_kv_heads=NUM_KV_HEADS)
    groups = random_group(2, width=model.kv_dim), random_group(1, width=model.kv_dim, seed=40)
    return group_translator(*groups, width=model.kv_dim, raw_dtype="float32", producer=model, consumer=model)


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start_server(role: Any, translator: Translator, **given: Any) -> Served:
            served = serve(role, translator, **given)
            stack.callback(served.runtime.close)
            return served

        yield start_server


def prompt_of(seed: int, num_tokens: int, *, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return random.Random(seed).choices(range(4, vocab_size), k=num_tokens)


def prefilled(prefill: Served, prompt: list[int], request_id: int = 1) -> Callable[[], None]:
    return lambda: prefill.executor.run(HostRequest(request_id, prompt))


def answer_of_nothing_loaded(prompt: list[int], num_tokens: int, *, num_kv_heads: int = NUM_KV_HEADS) -> list[int]:
    """The toy model's answer over its own cache."""
    layout = KvLayout(NUM_LAYERS, num_kv_heads, 8, B, torch.float32)
    model = ToyModel(layout, num_kv_heads, OneRank())
    executor = Executor(IdleScheduler(), IdleWorker(), model, layout, group=OneRank())
    request = HostRequest(1, prompt, max_new_tokens=num_tokens)
    executor.run(request)
    return request.answer


class IdleScheduler(KvCacheConnectorScheduler):
    """Promises nothing."""

    def __init__(self) -> None:
        super().__init__(None)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return scheduler_output

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        pass


class IdleWorker(KvCacheConnectorWorker):
    """Does nothing."""

    def __init__(self) -> None:
        super().__init__(None)

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        pass

    def start_load_kv(self, stream: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        pass

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        pass

    def wait_for_save(self, stream: Any) -> None:
        pass

    def get_finished(self, finished: list[int], started: list[int]) -> tuple[list[int], list[int]]:
        return [], []


# ---- the harness itself ----------------------------------------------------------------------------------------------


class AsyncScheduler(IdleScheduler):
    """Promises the first block of every prompt, to be loaded some time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[int], list[int]]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return B, True

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        new, cached = scheduler_output.new_requests, scheduler_output.cached_requests
        self.seen.append(([data.request_id for data in new], [data.request_id for data in cached]))
        return None


class AsyncWorker(IdleWorker):
    """Loads take as many polls as `patience` says."""

    def __init__(self, patience: int) -> None:
        super().__init__()
        self._patience, self._pending = patience, list[int]()

    def get_finished(self, finished: list[int], started: list[int]) -> tuple[list[int], list[int]]:
        self._pending += started
        self._patience -= 1
        if self._patience > 0:
            return [], []
        done, self._pending = self._pending, []
        return [], done


def test_the_harness_parks_requests_that_load_asynchronously() -> None:
    layout = KvLayout(NUM_LAYERS, NUM_KV_HEADS, 8, B, torch.float32)
    scheduler = AsyncScheduler()
    executor = Executor(scheduler, AsyncWorker(3), ToyModel(layout, NUM_KV_HEADS, OneRank()), layout, group=OneRank())
    request = executor.submit(HostRequest(1, prompt_of(1, 20)))
    executor.step()
    assert request.state == "loading"
    executor.run()
    # not new when it was matched, and new exactly once, after its load
    assert scheduler.seen == [([], []), ([1], [])]
    assert executor.manager.calls.count("match") == 1


def test_the_harness_calls_in_the_documented_order() -> None:
    layout = KvLayout(2, NUM_KV_HEADS, 8, B, torch.float32)
    executor = Executor(
        IdleScheduler(), IdleWorker(), ToyModel(layout, NUM_KV_HEADS, OneRank()), layout, group=OneRank()
    )
    executor.run(HostRequest(1, prompt_of(1, 20), max_new_tokens=2))
    layers = ["wait 0", "save 0", "wait 1", "save 1"]
    iteration = ["meta", "bind", "start", *layers, "wait"]
    assert executor.manager.calls == ["match", "alloc", *iteration, *iteration, "finished"]


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [5, 8, 20, 1024])
def test_a_handover_fills_the_pool_with_the_producers_rows(start: Start, chunk: int) -> None:
    translator = exact()
    prefill, decode = start("prefill", translator, max_num_tokens=chunk), start("decode", translator)
    prompt = prompt_of(1, 50)
    report = hand_over(prefill, decode, prompt, prefilled(prefill, prompt))
    assert (report.state, report.num_landed) == ("landed", 6)
    request = decode.executor.submit(HostRequest(1, prompt, max_new_tokens=12))
    decode.executor.step()
    assert request.matched_tokens == 48
    blocks = decode.executor.blocks.true_indices(request)
    for layer in range(NUM_LAYERS):
        expected = torch.stack(toy_rows(layer, prompt, 0, num_heads=NUM_KV_HEADS, head_dim=8))
        assert torch.equal(cached_rows(decode.executor, blocks, layer, 50), expected)
    decode.executor.run()
    assert request.answer == answer_of_nothing_loaded(prompt, 12)
    assert decode.num_pinned == 0
    assert not prefill.runtime.unfinished_pushes


def test_several_requests_in_one_batch(start: Start) -> None:
    translator = coded()
    prefill, decode = start("prefill", translator, max_num_tokens=40), start("decode", translator)
    prompts = [prompt_of(seed, 20 + 9 * seed) for seed in range(4)]

    def all_at_once() -> None:
        prefill.executor.run(*(HostRequest(index, prompt) for index, prompt in enumerate(prompts)))

    def nested(left: list[list[int]]) -> None:
        if left:
            assert hand_over(prefill, decode, left[0], lambda: nested(left[1:])).state == "landed"
        else:
            all_at_once()

    nested(prompts)
    requests = [HostRequest(10 + index, prompt, max_new_tokens=3) for index, prompt in enumerate(prompts)]
    decode.executor.run(*requests)
    assert [request.matched_tokens for request in requests] == [(len(prompt) - 1) // B * B for prompt in prompts]
    assert decode.num_pinned == 0


def test_block_reuse_on_the_prefill_server(start: Start) -> None:
    translator = exact()
    prefill, decode = start("prefill", translator, enable_reuse=True), start("decode", translator)
    prompt = prompt_of(1, 50)
    prefill.executor.run(HostRequest(1, prompt[:33]))  # nobody expects it: computed and kept, not encoded
    assert hand_over(prefill, decode, prompt, prefilled(prefill, prompt, 2)).num_landed == 6
    assert prefill.executor.manager.calls.count("match") == 2
    request = HostRequest(1, prompt, max_new_tokens=4)
    decode.executor.run(request)
    assert (request.matched_tokens, request.answer) == (48, answer_of_nothing_loaded(prompt, 4))


@pytest.mark.parametrize("cancel_after", [0, 1, 3])
def test_a_cancelled_prefill_aborts_its_push(start: Start, cancel_after: int) -> None:
    translator = exact()
    prefill, decode = start("prefill", translator, max_num_tokens=8), start("decode", translator)
    prompt = prompt_of(1, 50)

    def cancel() -> None:
        request = prefill.executor.submit(HostRequest(1, prompt))
        for _ in range(cancel_after):
            prefill.executor.step()
        prefill.executor.cancel(request)
        prefill.executor.run()
        if not cancel_after:
            # cancelled in its first iteration, which planned the push
            assert request.answer == []

    report = hand_over(prefill, decode, prompt, cancel)
    assert (report.state, report.reason) == ("failed", "aborted")
    assert prefill.executor.blocks.num_free == 64
    assert not prefill.runtime.unfinished_pushes


def test_a_cancelled_answer_gives_its_promise_back(start: Start) -> None:
    translator = exact()
    prefill, decode = start("prefill", translator), start("decode", translator)
    prompt = prompt_of(1, 50)
    hand_over(prefill, decode, prompt, prefilled(prefill, prompt))
    decode.executor.skip_forwards = 1
    request = decode.executor.submit(HostRequest(1, prompt))
    decode.executor.cancel(request)
    decode.executor.step()
    decode.executor.run(HostRequest(2, prompt_of(2, 20)))
    assert decode.num_pinned == 0
    assert not decode.runtime.promises
    assert decode.executor.blocks.num_free == 64


def test_a_preempted_answer_starts_over_and_stays_right(start: Start) -> None:
    translator = exact()
    prefill, decode = start("prefill", translator), start("decode", translator)
    prompt = prompt_of(1, 50)
    hand_over(prefill, decode, prompt, prefilled(prefill, prompt))
    request = decode.executor.submit(HostRequest(1, prompt, max_new_tokens=20))
    for _ in range(10):
        decode.executor.step()
    decode.executor.pause(request)
    decode.executor.step()
    decode.executor.run()
    assert request.matched_tokens == 48  # of a prompt that has grown by its answer
    assert request.answer == answer_of_nothing_loaded(prompt, 20)
    assert decode.num_pinned == 0
    assert decode.runtime.disabled is None


def test_a_preempted_prefill_aborts_its_push(start: Start) -> None:
    translator = exact()
    prefill, decode = start("prefill", translator, max_num_tokens=8), start("decode", translator)
    prompt = prompt_of(1, 50)

    def preempt() -> None:
        request = prefill.executor.submit(HostRequest(1, prompt))
        prefill.executor.step()
        prefill.executor.pause(request)
        prefill.executor.run()
        assert request.answer == answer_of_nothing_loaded(prompt, 1)

    assert hand_over(prefill, decode, prompt, preempt).reason == "aborted"


# ---- against the embedded engine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("a") / "model"))


def library_translator(loaded: LoadedModel) -> Translator:
    width = loaded.spec.kv_dim
    groups = random_group(2, width=width), random_group(1, width=width, seed=40)
    return group_translator(*groups, width=width, raw_dtype="float32", producer=loaded.spec, consumer=loaded.spec)


class Engine:
    """The embedded engine's executor, greedy."""

    def __init__(self, stack: ExitStack, role: Any, translator: Translator, loaded: LoadedModel, chunk: int) -> None:
        config = loopback_config(B, engine={"max_num_tokens": chunk, "enable_block_reuse": False})
        self.served = serve(role, translator, config=config)
        stack.callback(self.served.runtime.close)
        connector = ScdConnectorScheduler(self.served.runtime), ScdConnectorWorker(self.served.runtime)
        self._executor = PagedExecutor(loaded, config.engine, connector)
        stack.callback(self._executor.close)

    def run(self, request_id: int, prompt: list[int], num_tokens: int) -> tuple[int, list[int], list[torch.Tensor]]:
        """Promised tokens, answer, and the prompt's pages."""
        request = PagedRequest(request_id, [*prompt], len(prompt), len(prompt) + num_tokens)
        assert self._executor.reserve(request)
        with torch.inference_mode():
            while len(request.tokens) < len(prompt) + num_tokens:
                logits_V = self._executor.step(request)
                if logits_V is not None:
                    request.tokens.append(int(logits_V.argmax()))
        num_blocks = len(prompt) // B
        pages = self._executor.pool[request.blocks[:num_blocks]].clone()
        self._executor.end(request)
        return request.num_promised, request.tokens[len(prompt) :], pages


@pytest.mark.parametrize("chunk", [12, 1024])
def test_engine_and_harness_agree_on_pages_matches_and_answers(
    start: Start, library_model: LoadedModel, chunk: int
) -> None:
    translator = library_translator(library_model)
    model = LibraryModel(library_model)
    prefill = start("prefill", translator, model=model, max_num_tokens=chunk)
    decode = start("decode", translator, model=model, max_num_tokens=chunk)
    with ExitStack() as stack:
        engines = [Engine(stack, role, translator, library_model, chunk) for role in ("prefill", "decode")]
        for seed in range(4):
            prompt = prompt_of(seed, 9 + 23 * seed, vocab_size=LIBRARY_VOCAB_SIZE)
            hand_over(prefill, decode, prompt, prefilled(prefill, prompt, seed))
            hand_over(engines[0].served, engines[1].served, prompt, partial(engines[0].run, seed, prompt, 1))
            request = decode.executor.submit(HostRequest(seed, prompt, max_new_tokens=6))
            while len(request.answer) < 5:
                decode.executor.step()
            blocks = decode.executor.blocks.true_indices(request)[: len(prompt) // B]
            pages = decode.executor.blocks.pool[blocks].clone()
            decode.executor.run()
            promised, answer, expected = engines[1].run(seed, prompt, 6)
            assert request.matched_tokens == promised == (len(prompt) - 1) // B * B
            assert torch.equal(pages, expected)
            assert request.answer == answer


# ---- two ranks -------------------------------------------------------------------------------------------------------


def on_every_rank(scenario: Callable[[Group, Path], None], directory: Path, num_ranks: int = 2) -> None:
    """Run a scenario in processes with real collectives; a failure of one fails the test."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_run_rank, args=(scenario, rank, num_ranks, directory)) for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(90)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0] * num_ranks, codes


def _run_rank(scenario: Callable[[Group, Path], None], rank: int, num_ranks: int, directory: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    scenario(GlooRanks(), directory)
    dist.destroy_process_group()


def both(translator: Translator, group: Group, **given: Any) -> tuple[Served, Served]:
    """This rank's halves of a prefill and of a decode server."""
    return serve("prefill", translator, group=group, **given), serve("decode", translator, group=group, **given)


def hand_over_together(
    group: Group, prefill: Served, decode: Served, prompt: list[int], run: Callable[[], object]
) -> tuple[str, str | None]:
    """`hand_over` with every rank's engine running; state and reason, on every rank."""
    if group.rank:
        run()
        return tuple(group.broadcast(None))
    report = hand_over(prefill, decode, prompt, run)
    return tuple(group.broadcast((report.state, report.reason)))


def scenario_handovers(group: Group, directory: Path) -> None:
    """Chunks, cancellation, preemption and a push that fails half-way, then everything again: no rank may be left waiting."""
    answers: dict[str, Any] = {}
    for name, translator in (("exact", exact()), ("coded", coded())):
        prefill, decode = both(translator, group, max_num_tokens=20)
        prompt, other = prompt_of(1, 50), prompt_of(2, 70)

        def cancel(other: list[int] = other, prefill: Served = prefill) -> None:
            request = prefill.executor.submit(HostRequest(1, other))
            prefill.executor.step()
            prefill.executor.cancel(request)
            prefill.executor.run()

        def fail(other: list[int] = other, prefill: Served = prefill) -> None:
            prefill.executor.submit(HostRequest(2, other))
            prefill.executor.step()
            for push in prefill.runtime.unfinished_pushes.values():  # rank 0 alone has any
                push.abort("aborted")
            prefill.executor.run()

        assert hand_over_together(group, prefill, decode, other, cancel) == ("failed", "aborted")
        assert hand_over_together(group, prefill, decode, other, fail) == ("failed", "aborted")
        landed = hand_over_together(group, prefill, decode, prompt, prefilled(prefill, prompt, 3))
        assert landed == ("landed", None)
        decode.executor.repeat_start = True
        request = decode.executor.submit(HostRequest(1, prompt, max_new_tokens=12))
        decode.executor.step()
        decode.executor.stale_iteration()
        blocks = decode.executor.blocks.true_indices(request)
        rows = [cached_rows(decode.executor, blocks, layer, 48).numpy() for layer in range(NUM_LAYERS)]
        decode.executor.pause(request)
        decode.executor.run()
        answers |= {f"{name} rows": np.stack(rows), f"{name} answer": np.array(request.answer)}
        answers[f"{name} matched"] = np.array([request.matched_tokens])
        assert not decode.runtime.promises
        for served in (prefill, decode):
            served.runtime.close()
    np.savez(directory / f"rank{group.rank}.npz", **answers)


def single_rank(translator: Translator, prompt: list[int]) -> tuple[np.ndarray[Any, Any], list[int]]:
    prefill, decode = both(translator, OneRank(), max_num_tokens=20)
    hand_over(prefill, decode, prompt, prefilled(prefill, prompt))
    request = decode.executor.submit(HostRequest(1, prompt, max_new_tokens=12))
    decode.executor.step()
    blocks = decode.executor.blocks.true_indices(request)
    rows = [cached_rows(decode.executor, blocks, layer, 48).numpy() for layer in range(NUM_LAYERS)]
    decode.executor.run()
    for served in (prefill, decode):
        served.runtime.close()
    return np.stack(rows), request.answer


def test_two_ranks_fill_their_pools_as_one_rank_does(tmp_path: Path) -> None:
    on_every_rank(scenario_handovers, tmp_path)
    ranks = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    for name, translator in (("exact", exact()), ("coded", coded())):
        rows, answer = single_rank(translator, prompt_of(1, 50))
        joined = np.concatenate([found[f"{name} rows"] for found in ranks], axis=-2)
        assert joined.shape == rows.shape == (NUM_LAYERS, 2, 48, NUM_KV_HEADS, 8)
        assert (joined == rows).all()
        assert not (rows == POISON).any()
        for found in ranks:
            assert found[f"{name} matched"].tolist() == [48]
            if name == "exact":
                # over decoded approximations the toy's answer hangs on the order of a sum
                assert found[f"{name} answer"].tolist() == answer
