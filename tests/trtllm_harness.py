"""TensorRT-LLM's executor around connector classes, as far as a connector can see it: the real order of calls, on CPU.

Follows, for one iteration (1.2 unless said otherwise):
- `PyExecutor._executor_loop`: schedule, terminate what is paused, `prepare_resources`, `_kv_connector_start_batch`, forward
  pass with hooks before and after every decoder layer, `wait_for_save`, sample, cancel, terminate, `get_finished`;
- `KVCacheManager.prepare_resources`: `add_sequence` of first chunks, which asks the connector *under the radix-tree mutex*,
  on every rank; `update_state_after_alloc`; `add_token` of requests that generate; then the scheduler's output is built;
- `KvCacheConnectorManager`: what runs on rank 0 is broadcast; a request is new once, by its id, for ever; promised tokens
  are taken off `computed_position` the first time; metadata are built, broadcast and bound; a request that loads
  asynchronously is parked: taken out of the batch and shown as new only when all ranks have loaded it.

What differs: no CUDA, no overlap, no sampling parameters, one request per forward pass for models of a library.
Knobs make it misbehave as TensorRT-LLM can: `repeat_start`, `skip_forwards`, `replay`, `Blocks.stops_growing`,
`Blocks.holes`.

Shapes: N blocks, L layers, H kv heads, h those of a rank, B tokens per block, D head size, T tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from serving_pairs import loopback_config
from torch import Tensor

from scd_trt.config import PairConfig
from scd_trt.kv_cache import KvLayout, block_keys, gather_tokens, num_sent_blocks, scatter_tokens
from scd_trt.models import LoadedModel, decoder_layers, run_with_cache
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_api import RequestData, SchedulerOutput
from scd_trt.serving.connector_runtime import ConnectorRuntime, Role
from scd_trt.serving.paged_cache import PagedCache
from scd_trt.serving.ranks import RankGroup, SingleRank, heads_of_rank, join_heads
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.messages import TransferReport
from scd_trt.transfer.wire import new_transfer_id
from scd_trt.translator import Translator

POISON = -7.0
VOCAB_SIZE = 251


class Group(RankGroup, Protocol):
    """Ranks that can also send objects around, as MPI does."""

    def broadcast(self, value: Any) -> Any: ...
    def all_gather_objects(self, value: Any) -> list[Any]: ...


class OneRank(SingleRank):
    """No other ranks."""

    def broadcast(self, value: Any) -> Any:
        return value

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]


class GlooRanks:
    """The ranks of `torch.distributed`, which must have been initialised."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, rows: Tensor, /) -> list[Tensor]:
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous())
        return parts

    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather_objects(self, value: Any) -> list[Any]:
        box = [None] * self.size
        dist.all_gather_object(box, value)
        return box


@dataclass(eq=False)
class HostRequest:
    """What a connector may read of an `LlmRequest`, and what the executor keeps of it."""

    request_id: int
    tokens: list[int]
    max_new_tokens: int = 1
    cache_salt_id: int | None = None
    state: str = "context"  # context, generation, loading, finished, cancelled
    position: int = 0
    chunk: int = 0
    matched_tokens: int = 0
    has_blocks: bool = False
    answer: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)

    def get_tokens(self, beam: int, /) -> list[int]:
        assert beam == 0
        return list(self.tokens)


@dataclass
class Batch:
    """What the scheduler chose for an iteration."""

    context: list[HostRequest] = field(default_factory=list)
    generation: list[HostRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[HostRequest]:
        return [*self.context, *self.generation]


class Manager:
    """`KvCacheConnectorManager`."""

    def __init__(self, worker: Any, scheduler: Any, group: Group) -> None:
        assert (scheduler is not None) == (group.rank == 0), "the scheduler may only exist on rank 0"
        self.worker, self.scheduler, self.group = worker, scheduler, group
        self.calls: list[str] = []
        self.output: SchedulerOutput | None = None
        self._known_blocks: dict[int, list[int]] = {}
        self._known_tokens: dict[int, int] = {}
        self._external: dict[int, int] = {}
        self.loading: dict[int, HostRequest] = {}
        self._started_loading: list[int] = []
        self.loaded: set[int] = set()

    def on_leader(self, name: str, work: Callable[[], Any]) -> Any:
        """Run on rank 0, broadcast the result."""
        self.calls.append(name)
        return self.group.broadcast(work() if self.scheduler is not None else None)

    def get_num_new_matched_tokens(self, request: HostRequest, num_computed: int) -> int:
        num_tokens, is_async = self.on_leader(
            "match", lambda: self.scheduler.get_num_new_matched_tokens(request, num_computed)
        )
        if is_async and not num_tokens:
            raise RuntimeError("load_kv_async must be False when num_tokens is 0!")
        if is_async:
            self.loading[request.request_id] = request
            self._started_loading.append(request.request_id)
        self._external[request.request_id] = num_tokens
        return int(num_tokens)

    def update_state_after_alloc(self, request: HostRequest, block_ids: list[int]) -> None:
        if self.scheduler is not None:
            self.calls.append("alloc")
            self.scheduler.update_state_after_alloc(request, block_ids)

    def build_scheduler_output(self, batch: Batch, blocks: Blocks) -> None:
        output = SchedulerOutput()
        for request in batch.requests:
            if request.request_id in self.loading:
                continue
            is_new = request.request_id not in self._known_blocks
            data = self._data(request, blocks)
            if request.state == "context":
                data.computed_position -= self._external.get(request.request_id, 0)
            (output.new_requests if is_new else output.cached_requests).append(data)
        self._external = {}
        self.output = output

    def _data(self, request: HostRequest, blocks: Blocks) -> RequestData:
        known, num_known = self._known_blocks.setdefault(request.request_id, []), len(request.tokens)
        new_blocks = blocks.indices(request)[len(known) :]
        new_tokens = request.tokens[self._known_tokens.get(request.request_id, 0) :]
        known.extend(new_blocks)
        self._known_tokens[request.request_id] = num_known
        if request.state == "context":
            return RequestData(request.request_id, new_tokens, new_blocks, request.position, request.chunk)
        return RequestData(request.request_id, new_tokens, new_blocks, len(request.tokens) - 1, 1)

    def park_loading(self, batch: Batch) -> None:
        for request in [request for request in batch.context if request.request_id in self.loading]:
            batch.context.remove(request)
            request.state = "loading"

    def handle_metadata(self) -> None:
        if self.output is None:
            return
        metadata = self.on_leader("meta", lambda: self.scheduler.build_connector_meta(self.output))
        self.output = None
        self.calls.append("bind")
        self.worker.bind_connector_meta(metadata)

    def request_finished(self, request: HostRequest, block_ids: list[int]) -> bool:
        return bool(self.on_leader("finished", lambda: self.scheduler.request_finished(request, block_ids)))

    def get_finished(self) -> None:
        started, self._started_loading = self._started_loading, []
        _, mine = self.worker.get_finished([], started)
        everywhere = set.intersection(*map(set, self.group.all_gather_objects(list(mine))))
        for request_id in everywhere:
            request = self.loading.pop(request_id)
            request.state = "context"
            self.loaded.add(request_id)

    def before(self, layer: int) -> None:
        self.calls.append(f"wait {layer}")
        self.worker.wait_for_layer_load(layer, None)

    def after(self, layer: int) -> None:
        self.calls.append(f"save {layer}")
        self.worker.save_kv_layer(layer, None)


class Blocks:
    """`KVCacheManager` V1: blocks of a whole prompt at once, one more whenever an answer needs it, reuse by content."""

    def __init__(self, manager: Manager, layout: KvLayout, num_blocks: int, *, enable_reuse: bool) -> None:
        self.pool = layout.allocate(num_blocks).fill_(POISON)
        self.view = layout.view(self.pool)
        self.stops_growing = False
        self.holes: set[int] = set()
        self._manager, self._tokens_per_block, self._enable_reuse = manager, layout.tokens_per_block, enable_reuse
        self._free = deque(range(num_blocks))
        self._of: dict[int, list[int]] = {}
        self._cached: dict[bytes, int] = {}
        self._mutex = threading.Lock()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def indices(self, request: HostRequest) -> list[int]:
        """Blocks as told to the connector: dropped ones (`holes`) as -1."""
        return [-1 if index in self.holes else block for index, block in enumerate(self._of[request.request_id])]

    def true_indices(self, request: HostRequest) -> list[int]:
        return self._of[request.request_id]

    def add_sequence(self, request: HostRequest) -> None:
        with self._mutex:
            shared = self._shared(request)
            num_local = len(shared) * self._tokens_per_block
            request.matched_tokens = self._manager.get_num_new_matched_tokens(request, num_local)
            request.position = num_local + request.matched_tokens
            num_blocks = -(-len(request.tokens) // self._tokens_per_block)
            assert request.position < len(request.tokens), "the last prompt token must be computed"
            assert not request.position % self._tokens_per_block
            self._of[request.request_id] = shared + [self._free.popleft() for _ in range(num_blocks - len(shared))]
        request.chunk = min(request.chunk, len(request.tokens) - request.position)
        request.has_blocks = True
        self._manager.update_state_after_alloc(request, self.indices(request))

    def add_token(self, request: HostRequest) -> None:
        blocks = self._of[request.request_id]
        if len(request.tokens) > len(blocks) * self._tokens_per_block and not self.stops_growing:
            blocks.append(self._free.popleft())

    def free(self, request: HostRequest) -> None:
        blocks = self._of.pop(request.request_id, [])
        for block, key in zip(blocks, self._keys(request, request.tokens[:-1]), strict=False):
            if self._enable_reuse:
                self._cached.setdefault(key, block)
        self._free.extend(block for block in blocks if block not in self._cached.values())

    def _shared(self, request: HostRequest) -> list[int]:
        num_usable = num_sent_blocks(len(request.tokens), self._tokens_per_block)
        shared = []
        for key in self._keys(request, request.tokens)[:num_usable]:
            if key not in self._cached:
                break
            shared.append(self._cached[key])
        return shared

    def _keys(self, request: HostRequest, tokens: list[int]) -> list[bytes]:
        scope = str(request.cache_salt_id).encode()
        return block_keys(tokens, tokens_per_block=self._tokens_per_block, scope=scope)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. stop` of one sequence, in an iteration."""

    tokens: list[int]
    start: int
    stop: int
    block_ids: list[int]


Hook = Callable[[int], None]


class Model(Protocol):
    """Computes an iteration into the pool; the next token of each sequence."""

    max_batch: int

    def forward(self, chunks: Sequence[Chunk], view: Tensor, before: Hook, after: Hook) -> list[int]: ...


def toy_rows(layer: int, tokens: Sequence[int], start: int, *, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[T, H, D]` of the toy model: functions of token, position, layer, head and element."""
    base_T = torch.tensor(tokens) * 0.37 + torch.arange(start, start + len(tokens)) * 1.3 + layer * 2.1
    grid_HD = torch.arange(1, num_heads + 1)[:, None] * 0.5 + torch.arange(head_dim) * 0.11
    angle_THD = base_T[:, None, None] * grid_HD
    # the last bit of a sine depends on where in a vector it was computed, so on the chunk
    return angle_THD.sin().mul(1024).round().div(1024), angle_THD.cos().mul(1024).round().div(1024)


class ToyModel:
    """No attention, but its next token depends on every element of the sequence's cache, on all ranks."""

    max_batch = 4

    def __init__(self, layout: KvLayout, num_kv_heads: int, group: Group) -> None:
        self._layout, self._num_heads, self._group = layout, num_kv_heads, group
        self._heads = heads_of_rank(num_kv_heads, rank=group.rank, size=group.size)

    def forward(self, chunks: Sequence[Chunk], view: Tensor, before: Hook, after: Hook) -> list[int]:
        for layer in range(self._layout.num_layers):
            before(layer)
            for chunk in chunks:
                k_THD, v_THD = toy_rows(
                    layer,
                    chunk.tokens[chunk.start : chunk.stop],
                    chunk.start,
                    num_heads=self._num_heads,
                    head_dim=self._layout.head_dim,
                )
                heads = slice(self._heads.start, self._heads.stop)
                scatter_tokens(view, layer, chunk.block_ids, chunk.start, k_THD=k_THD[:, heads], v_THD=v_THD[:, heads])
            after(layer)
        return [self._next(chunk, view) for chunk in chunks]

    def _next(self, chunk: Chunk, view: Tensor) -> int:
        layers = range(self._layout.num_layers)
        rows = [torch.stack(gather_tokens(view, layer, chunk.block_ids, 0, chunk.stop)) for layer in layers]
        whole = join_heads(self._group.all_gather(torch.stack(rows)), self._num_heads)
        return int(whole.double().sum().mul(1e4).round().item()) % VOCAB_SIZE


class LibraryModel:
    """A model of the library, over the pool; greedy."""

    max_batch = 1

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def forward(self, chunks: Sequence[Chunk], view: Tensor, before: Hook, after: Hook) -> list[int]:
        (chunk,) = chunks
        cache = PagedCache(view, chunk.block_ids, num_past=chunk.start, num_new=chunk.stop - chunk.start)
        tokens = chunk.tokens[chunk.start : chunk.stop]
        with self._hooked(before, after), torch.inference_mode():
            found = run_with_cache(self._loaded, tokens, cache, start_position=chunk.start, num_logits=1)
        assert found.logits_TV is not None
        return [int(found.logits_TV[-1].argmax())]

    @contextmanager
    def _hooked(self, before: Hook, after: Hook) -> Iterator[None]:
        handles: list[Any] = []
        for index, layer in enumerate(decoder_layers(self._loaded.model)):
            handles.append(layer.register_forward_pre_hook(lambda *_, i=index: before(i)))
            handles.append(layer.register_forward_hook(lambda *_, i=index: after(i)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Executor:
    """`PyExecutor`, one iteration per `step`."""

    def __init__(
        self,
        scheduler: Any,
        worker: Any,
        model: Model,
        layout: KvLayout,
        *,
        group: Group,
        num_blocks: int = 64,
        max_num_tokens: int = 1024,
        enable_reuse: bool = False,
    ) -> None:
        self.manager = Manager(worker, scheduler, group)
        self.blocks = Blocks(self.manager, layout, num_blocks, enable_reuse=enable_reuse)
        self.repeat_start = False
        self.skip_forwards = 0
        self.replay = False
        self._model, self._max_num_tokens, self._tokens_per_block = model, max_num_tokens, layout.tokens_per_block
        self._active: list[HostRequest] = []
        self._paused: list[HostRequest] = []
        self._cancelled: set[int] = set()
        worker.register_kv_caches(self.blocks.pool)

    def submit(self, request: HostRequest) -> HostRequest:
        self._active.append(request)
        return request

    def cancel(self, request: HostRequest) -> None:
        self._cancelled.add(request.request_id)

    def pause(self, request: HostRequest) -> None:
        """Preempt: its blocks go, and it starts over with what it has generated as part of its prompt."""
        self._paused.append(request)

    def run(self, *requests: HostRequest, at_most: int = 1000) -> None:
        """Submit requests and step until nothing is left."""
        for request in requests:
            self.submit(request)
        for _ in range(at_most):
            if not self._active:
                return
            self.step()
        raise AssertionError(f"still active after {at_most} iterations: {self._active}")

    def step(self) -> None:
        batch = self._schedule()
        for request in self._paused:
            self._terminate(request)
            request.state, request.position, request.has_blocks = "context", 0, False
        self._paused = []
        if batch.requests:
            self._prepare_resources(batch)
            self._start_batch(batch)
        if batch.requests and self.skip_forwards:
            self.skip_forwards -= 1
        elif batch.requests:
            self._forward(batch)
        self._handle_cancelled()
        for request in [request for request in self._active if request.state == "finished"]:
            self._active.remove(request)
            self._terminate(request)
        self.manager.get_finished()

    def stale_iteration(self) -> None:
        """Start and run a forward pass of nothing new: the metadata of the last iteration are still bound."""
        self.manager.worker.start_load_kv(None)
        for layer in range(self.blocks.pool.shape[1]):
            self.manager.before(layer)
            self.manager.after(layer)
        self.manager.worker.wait_for_save(None)

    def _schedule(self) -> Batch:
        batch, budget = Batch(), self._max_num_tokens
        for request in self._active:
            if request in self._paused or request.state == "loading" or len(batch.requests) == self._model.max_batch:
                continue
            if request.state == "generation":
                batch.generation.append(request)
            elif budget:
                request.chunk = min(budget, len(request.tokens) - request.position)
                budget -= request.chunk
                batch.context.append(request)
        return batch

    def _prepare_resources(self, batch: Batch) -> None:
        for request in batch.context:
            if not request.has_blocks and request.request_id not in self.manager.loaded:
                self.blocks.add_sequence(request)
        for request in batch.generation:
            self.blocks.add_token(request)
        self.manager.build_scheduler_output(batch, self.blocks)

    def _start_batch(self, batch: Batch) -> None:
        self.manager.park_loading(batch)
        self.manager.handle_metadata()
        for _ in range(1 + self.repeat_start):
            self.manager.calls.append("start")
            self.manager.worker.start_load_kv(None)

    def _forward(self, batch: Batch) -> None:
        chunks = [self._chunk(request) for request in batch.requests]
        before, after = (_nothing, _nothing) if self.replay else (self.manager.before, self.manager.after)
        tokens = self._model.forward(chunks, self.blocks.view, before, after)
        self.manager.calls.append("wait")
        self.manager.worker.wait_for_save(None)
        for request, chunk, token in zip(batch.requests, chunks, tokens, strict=True):
            request.position = chunk.stop
            if chunk.stop == len(request.tokens):
                request.state = "generation"
                request.tokens.append(token)
                request.answer.append(token)
                if len(request.answer) == request.max_new_tokens:
                    request.state = "finished"

    def _chunk(self, request: HostRequest) -> Chunk:
        if request.state == "context":
            start, stop = request.position, request.position + request.chunk
        else:
            start, stop = len(request.tokens) - 1, len(request.tokens)
        block_ids = self.blocks.true_indices(request)
        # where growth stopped, the kernel writes somewhere: over the last block, say
        missing = -(-stop // self._tokens_per_block) - len(block_ids)
        return Chunk(request.tokens, start, stop, block_ids + block_ids[-1:] * missing)

    def _handle_cancelled(self) -> None:
        for request in [request for request in self._active if request.request_id in self._cancelled]:
            self._cancelled.discard(request.request_id)
            self._active.remove(request)
            request.state = "cancelled"
            self._terminate(request)

    def _terminate(self, request: HostRequest) -> None:
        if request.has_blocks:
            assert not self.manager.request_finished(request, self.blocks.indices(request))
        self.blocks.free(request)


def _nothing(layer: int) -> None:
    """In place of a hook: a replayed CUDA graph calls none."""


# ---- a pair of servers -----------------------------------------------------------------------------------------------


@dataclass
class Served:
    """One role: its runtime, and an executor around its connector."""

    runtime: ConnectorRuntime
    executor: Executor
    scheduler: ScdConnectorScheduler | None
    worker: ScdConnectorWorker

    @property
    def num_pinned(self) -> int:
        return self.runtime.store.statistics().num_pinned


def serve(
    role: Role,
    translator: Translator,
    *,
    tokens_per_block: int = 8,
    model: Model | None = None,
    group: Group | None = None,
    config: PairConfig | None = None,
    **executor: Any,
) -> Served:
    """A server of this role, over the toy model unless another is given; loopback transport. Close its runtime."""
    group = group or OneRank()
    config = config or loopback_config(tokens_per_block)
    runtime = ConnectorRuntime.open_with(translator, config, role, listen="127.0.0.1:0", ranks=group)
    scheduler = None if group.rank else ScdConnectorScheduler(runtime)
    worker, spec = ScdConnectorWorker(runtime), runtime.spec
    layout = KvLayout(spec.num_layers, len(runtime.local_heads), spec.head_dim, tokens_per_block, torch.float32)
    used = model or ToyModel(layout, spec.num_kv_heads, group)
    return Served(runtime, Executor(scheduler, worker, used, layout, group=group, **executor), scheduler, worker)


def hand_over(
    prefill: Served, decode: Served, prompt: Sequence[int], run: Callable[[], object], *, salt: str = ""
) -> TransferReport:
    """What the router does for one prompt, on rank 0, up to the landing; `run` runs it on the prefill server."""

    async def talk() -> TransferReport:
        consumer, producer = decode.runtime.require_consumer(), prefill.runtime.require_producer()
        client = ControlClient(consumer.address, loopback_config(decode.runtime.tokens_per_block).control)
        transfer_id = new_transfer_id()
        keys = decode.runtime.sent_block_keys(list(prompt), salt)
        try:
            await client.expect(transfer_id, keys, producer=producer.address)
            await asyncio.to_thread(run)
            await client.wait(transfer_id, timeout_s=20.0)
            return await client.report(transfer_id)
        finally:
            await client.close()

    return asyncio.run(talk())


def cached_rows(executor: Executor, block_ids: Sequence[int], layer: int, num_tokens: int) -> Tensor:
    """Keys and values `[2, T, h, D]` of a sequence's first tokens."""
    return torch.stack(gather_tokens(executor.blocks.view, layer, block_ids, 0, num_tokens))
