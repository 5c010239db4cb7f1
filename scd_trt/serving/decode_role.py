"""The connector on the decode server: codes that have landed become KV pages, layer group by layer group.

Shapes: T tokens, H kv heads, D head size, B tokens per block, C code bytes per token of a group.

Scheduler: promises the engine the blocks whose codes have landed and were verified, whole blocks only, never the prompt's
last token, and nothing that would need a wait. The promised codes are pinned from that moment. Prompts of which nothing
landed are simply computed by the engine.

Matching runs under the engine's radix-tree mutex: it hashes one block of the prompt, and the rest only where that one is
there. It takes no lock but the store's, and does no I/O.

Worker: just before the first layer of a group runs, the group's codes are decoded and scattered into the blocks that the
engine allocated; after the last group the pins are released. Metadata that are presented twice are used once. With tensor
parallelism codes land on rank 0 and travel inside the metadata; every rank decodes them and keeps its own heads. So what is
promised is at hand on every rank, and a promise needs nobody's word.

After a promise only local work remains, and there is no way to take it back: what goes wrong then (a block that the engine
does not have, a forward pass without hooks) is raised and ends the engine, before a wrong token is sent.

What happened is told to the session (`Consumer.note`): tokens taken from codes, and the milliseconds that took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scd_trt import kv_cache
from scd_trt.codec import Decoder
from scd_trt.kv_cache import scatter_tokens
from scd_trt.serving.block_growth import BlockGrowth
from scd_trt.serving.connector_api import ConnectorRequest, SchedulerOutput
from scd_trt.serving.connector_runtime import ConnectorOrderError, ConnectorRuntime, request_salt
from scd_trt.transfer.session import PinnedBlocks


@dataclass(frozen=True)
class Load:
    """Blocks `first_block .. stop_block` of a prompt, to be decoded into the pool blocks of the same indices.

    Attributes:
        load_id: names the promise whose pins the load takes over.
        keys: of all blocks of the prompt that could travel as codes, from its start.
        block_ids: pool blocks of the prompt, from its start.
        codes: of each group, `[T, C]` as bytes, for ranks that have no store; empty where there is one rank.
    """

    load_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    first_block: int
    stop_block: int
    codes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class DecodeMetadata:
    """One iteration, from scheduler to workers.

    Attributes:
        iteration: ascending; metadata that are presented again are known by it.
        fingerprint: of rank 0's translator.
        withdrawn: loads whose request gave up its blocks since the last iteration.
    """

    iteration: int
    fingerprint: str
    loads: tuple[Load, ...] = ()
    withdrawn: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Promise:
    """Blocks of a prompt that the engine was told to count as computed."""

    load_id: int
    blocks: range


class _Request:
    """A request that the engine asked about."""

    def __init__(self, runtime: ConnectorRuntime, tokens: list[int], salt: str) -> None:
        self._runtime, self._tokens, self._salt = runtime, tokens, salt
        self.num_blocks = kv_cache.num_sent_blocks(len(tokens), runtime.tokens_per_block)
        self.promise: _Promise | None = None

    @cached_property
    def first_key(self) -> list[bytes]:
        """Of the first block alone, to which all others are chained."""
        # one token more than a block, so that the block comes before the last token
        return self._runtime.sent_block_keys(self._tokens[: self._runtime.tokens_per_block + 1], self._salt)

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """Of all blocks that travel."""
        return tuple(self._runtime.sent_block_keys(self._tokens, self._salt))


class DecodeScheduler:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        self._runtime = runtime
        self._consumer = runtime.require_consumer()
        self._requests: dict[int, _Request] = {}
        self._loads: list[Load] = []
        self._withdrawn: list[int] = []
        self._next_load_id = 0
        self._num_iterations = 0
        self._growth = BlockGrowth(runtime.tokens_per_block)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of landed blocks beyond the engine's own; dictionary look-ups only."""
        found = self._requests.get(request.request_id)
        if found is None:
            found = _Request(self._runtime, request.get_tokens(0), request_salt(request))
            self._requests[request.request_id] = found
        self._withdraw(found)
        first_block, rest = divmod(num_computed_tokens, self._runtime.tokens_per_block)
        if not rest and first_block < found.num_blocks and self._runtime.disabled is None:
            self._promise(found, first_block)
        num_blocks = len(found.promise.blocks) if found.promise else 0
        return num_blocks * self._runtime.tokens_per_block, False

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None:
        """Queue the promised load.

        Raises:
            ConnectorOrderError: the engine did not ask about the request, or lacks a block of what was promised.
        """
        found = self._requests.get(request.request_id)
        if found is None:
            raise ConnectorOrderError(f"request {request.request_id} got blocks, but nobody asked what it matches")
        if found.promise is None:
            if found.num_blocks:
                self._consumer.note(found.keys, matched_tokens=0)
            return
        blocks = found.promise.blocks
        held = block_ids[blocks.start : blocks.stop]
        # -1 stands for a block that the engine dropped; as an index it would fill the pool's last one
        if len(held) < len(blocks) or min(held) < 0:
            raise ConnectorOrderError(
                f"request {request.request_id}: {len(block_ids)} blocks, {held} for {blocks}, whose tokens were promised"
            )
        self._drop_load(found.promise)
        self._repeat_if_used(found, found.promise)
        self._loads.append(Load(found.promise.load_id, found.keys, tuple(block_ids), blocks.start, blocks.stop))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> DecodeMetadata:
        """The loads since the last iteration."""
        missing = self._growth.check(scheduler_output)
        if missing is not None:
            self._runtime.disable(missing)
        loads, self._loads = tuple(map(self._with_codes, self._loads)), []
        withdrawn, self._withdrawn = tuple(self._withdrawn), []
        self._num_iterations += 1
        return DecodeMetadata(self._num_iterations, self._runtime.fingerprint, loads, withdrawn)

    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool:
        """Never keeps blocks; a promise that was not loaded (request cancelled) is withdrawn."""
        self._growth.forget(request.request_id)
        found = self._requests.pop(request.request_id, None)
        if found is not None:
            self._withdraw(found)
        return False

    def request_reset(self, request: ConnectorRequest) -> None:
        """The request lost its blocks and starts over. Its promise stands, since the engine may not ask again."""
        self._growth.forget(request.request_id)
        found = self._requests.get(request.request_id)
        if found is not None and found.promise is not None:
            self._drop_load(found.promise)

    def cancel_load(self, request: ConnectorRequest, start: int, end: int) -> None:
        """The engine will not use tokens `start .. end` of what was promised: its head, its tail, or all of it."""
        found = self._requests.get(request.request_id)
        if found is None or found.promise is None:
            return
        blocks, tokens_per_block = found.promise.blocks, self._runtime.tokens_per_block
        if start <= blocks.start * tokens_per_block:
            left = range(max(blocks.start, -(-end // tokens_per_block)), blocks.stop)
        else:
            left = range(blocks.start, min(blocks.stop, start // tokens_per_block))
        if left:
            found.promise = _Promise(found.promise.load_id, left)
        else:
            self._withdraw(found)

    def _promise(self, request: _Request, first_block: int) -> None:
        if not self._consumer.match(request.first_key):
            return
        pinned = self._consumer.pin(request.keys)
        if pinned.num_blocks <= first_block:
            pinned.release()
            return
        request.promise = self._keep(pinned, range(first_block, pinned.num_blocks))

    def _keep(self, pinned: PinnedBlocks, blocks: range) -> _Promise:
        promise = _Promise(self._next_load_id, blocks)
        self._runtime.promises[promise.load_id] = pinned
        self._next_load_id += 1
        return promise

    def _repeat_if_used(self, request: _Request, promise: _Promise) -> None:
        """A request that starts over after its codes were decoded needs them once more."""
        if promise.load_id in self._runtime.promises:
            return
        pinned = self._consumer.pin(request.keys)
        request.promise = self._keep(pinned, promise.blocks)
        if pinned.num_blocks < promise.blocks.stop:
            raise ConnectorOrderError(
                f"a request starts over, and {pinned.num_blocks} of {promise.blocks.stop} blocks that were promised to it "
                "are left; raise store.capacity_bytes"
            )

    def _with_codes(self, load: Load) -> Load:
        """With the codes themselves, if there are ranks without a store."""
        runtime = self._runtime
        if runtime.ranks.size == 1:
            return load
        num_tokens = (load.stop_block - load.first_block) * runtime.tokens_per_block
        read = runtime.promises[load.load_id].codes
        groups = range(runtime.layout.num_groups)
        codes = tuple(read(group, first_block=load.first_block)[:num_tokens].tobytes() for group in groups)
        return Load(load.load_id, load.keys, load.block_ids, load.first_block, load.stop_block, codes)

    def _drop_load(self, promise: _Promise) -> None:
        self._loads = [load for load in self._loads if load.load_id != promise.load_id]

    def _withdraw(self, request: _Request) -> None:
        promise, request.promise = request.promise, None
        if promise is None:
            return
        self._drop_load(promise)
        pinned = self._runtime.promises.pop(promise.load_id, None)
        if pinned is not None:
            pinned.release()
        else:
            # the worker has it
            self._withdrawn.append(promise.load_id)


@dataclass
class _OpenLoad:
    """A load that is to be decoded in the present iteration.

    Attributes:
        read: codes `[T, C]` of a group.
        release: gives its pins back; may be repeated.
    """

    load: Load
    read: Callable[[int], Tensor]
    release: Callable[[], None]
    done: set[int] = field(default_factory=set)
    decode_s: float = 0.0


class DecodeWorker:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        self._runtime = runtime
        self._consumer = None if runtime.follows else runtime.require_consumer()
        self._decoder = Decoder(runtime.translator)
        self._group_starting_at = {start: group for group, (start, _) in enumerate(self._decoder.groups)}
        self._open: list[_OpenLoad] = []
        self._iteration = 0
        self._view: Tensor | None = None

    @property
    def needs_attention_input(self) -> bool:
        """Never: a decode server encodes nothing."""
        return False

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Take the pool."""
        self._view = self._runtime.view_pool(kv_cache_tensor)

    def start_load_kv(self, metadata: DecodeMetadata) -> None:
        """Take over the pins of new loads; decoding happens layer by layer.

        Loads of a forward pass that did not take place stay, unless their request has ended.
        """
        for opened in self._open:
            opened.done.clear()
        if metadata.iteration <= self._iteration:
            return
        self._runtime.check_metadata(metadata.fingerprint)
        self._iteration = metadata.iteration
        self._forget(metadata.withdrawn)
        self._open += map(self._opened, metadata.loads)

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Decode the group that begins with this layer."""
        group = self._group_starting_at.get(layer_idx)
        if group is not None:
            for opened in self._open:
                began_s = time.perf_counter()
                self._decode(opened, group)
                opened.decode_s += time.perf_counter() - began_s
                opened.done.add(group)

    def save_attention_input(self, layer_idx: int, x_TM: Tensor) -> None:
        """Nothing to do: a decode server sends nothing."""

    def save_kv_layer(self, layer_idx: int) -> None:
        """Nothing to do: a decode server sends nothing."""

    def wait_for_save(self) -> None:
        """The forward pass is over: report and release.

        Raises:
            ConnectorOrderError: layers ran without `wait_for_layer_load`, so promised KV is missing in the pool.
        """
        done, self._open = self._open, []
        for opened in done:
            opened.release()
        for opened in done:
            if len(opened.done) != len(self._decoder.groups):
                raise ConnectorOrderError(
                    f"{len(opened.done)} of {len(self._decoder.groups)} groups were loaded in a forward pass over promised "
                    "tokens; does a CUDA graph replay prefills?"
                )
            if self._consumer is not None:
                num_tokens = (opened.load.stop_block - opened.load.first_block) * self._runtime.tokens_per_block
                self._consumer.note(opened.load.keys, matched_tokens=num_tokens, decode_ms=opened.decode_s * 1e3)

    def _opened(self, load: Load) -> _OpenLoad:
        if self._consumer is None:
            return _OpenLoad(load, lambda group: self._unpacked(load, group), lambda: None)
        pinned = self._runtime.promises.pop(load.load_id)
        num_tokens = (load.stop_block - load.first_block) * self._runtime.tokens_per_block

        def read(group: int) -> Tensor:
            return torch.from_numpy(pinned.codes(group, first_block=load.first_block)[:num_tokens])

        return _OpenLoad(load, read, pinned.release)

    def _unpacked(self, load: Load, group: int) -> Tensor:
        codes = np.frombuffer(load.codes[group], dtype=np.uint8).copy()
        return torch.from_numpy(codes.reshape(-1, self._runtime.layout.bytes_per_token[group]))

    def _decode(self, opened: _OpenLoad, group: int) -> None:
        if self._view is None:
            raise ConnectorOrderError("wait_for_layer_load was called before register_kv_caches")
        load, tokens_per_block = opened.load, self._runtime.tokens_per_block
        start, stop = load.first_block * tokens_per_block, load.stop_block * tokens_per_block
        first_layer, heads = self._decoder.groups[group][0], self._runtime.local_heads
        decoded = self._decoder.decode(group, opened.read(group), torch.arange(start, stop), seq_len=stop)
        for layer, kv in enumerate(decoded, first_layer):
            # the decoder works in host memory
            k_THD, v_THD = (rows_THD[:, heads.start : heads.stop].to(self._view.device) for rows_THD in kv)
            scatter_tokens(self._view, layer, load.block_ids, start, k_THD=k_THD, v_THD=v_THD)

    def _forget(self, load_ids: tuple[int, ...]) -> None:
        for opened in self._open:
            if opened.load.load_id in load_ids:
                opened.release()
        self._open = [opened for opened in self._open if opened.load.load_id not in load_ids]
