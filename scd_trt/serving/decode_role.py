"""The connector on the decode server: codes that have landed become KV pages, layer group by layer group.

Shapes: T tokens, B tokens per block, C code bytes per token of a group.

Scheduler: promises the engine the blocks whose codes have landed and were verified, whole blocks only, never the prompt's
last token, and nothing that would need a wait. The promised codes are pinned from that moment. Prompts of which nothing
landed are simply computed by the engine.

Worker: just before the first layer of a group runs, the group's codes are decoded and scattered into the blocks that the
engine allocated; after the last group the pins are released. A load that is presented twice is done once.

What happened is told to the session (`Consumer.note`): tokens taken from codes, and the milliseconds that took.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from scd_trt.codec import Decoder
from scd_trt.kv_cache import scatter_tokens
from scd_trt.serving.connector_api import ConnectorRequest, SchedulerOutput
from scd_trt.serving.connector_runtime import ConnectorOrderError, ConnectorRuntime, request_salt
from scd_trt.transfer.session import PinnedBlocks


@dataclass(frozen=True)
class Load:
    """Blocks `first_block .. stop_block` of a prompt, to be decoded into the pool blocks of the same indices.

    Attributes:
        load_id: names the promise whose pins the load takes over; done once, the promise is gone.
        keys: of all blocks of the prompt that could travel as codes, from its start.
        block_ids: pool blocks of the prompt, from its start.
    """

    load_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    first_block: int
    stop_block: int


@dataclass(frozen=True)
class DecodeMetadata:
    """One iteration, from scheduler to worker."""

    loads: tuple[Load, ...] = ()


@dataclass
class _Request:
    """A request that the engine asked about: its keys, and what was promised."""

    keys: tuple[bytes, ...]
    load_id: int | None = None
    first_block: int = 0
    stop_block: int = 0


class DecodeScheduler:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        self._runtime = runtime
        self._consumer = runtime.require_consumer()
        self._requests: dict[int, _Request] = {}
        self._loads: list[Load] = []
        self._next_load_id = 0

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of landed blocks beyond the engine's own; dictionary look-ups only."""
        found = self._requests.get(request.request_id)
        if found is None:
            keys = self._runtime.sent_block_keys(request.get_tokens(0), request_salt(request))
            found = self._requests[request.request_id] = _Request(tuple(keys))
        self._withdraw(found)
        first_block, rest = divmod(num_computed_tokens, self._runtime.tokens_per_block)
        if not rest and first_block < len(found.keys):
            self._promise(found, first_block)
        return (found.stop_block - found.first_block) * self._runtime.tokens_per_block, False

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None:
        """Queue the promised load.

        Raises:
            ConnectorOrderError: the engine did not ask about the request, or allocated fewer blocks than promised.
        """
        found = self._requests.get(request.request_id)
        if found is None or len(block_ids) < found.stop_block:
            raise ConnectorOrderError(f"request {request.request_id}: {len(block_ids)} blocks for {found}")
        if found.load_id is not None:
            block_range = found.first_block, found.stop_block
            self._loads.append(Load(found.load_id, found.keys, tuple(block_ids), *block_range))
        elif found.keys:
            self._consumer.note(found.keys, matched_tokens=0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> DecodeMetadata:
        """The loads since the last iteration."""
        loads, self._loads = tuple(self._loads), []
        return DecodeMetadata(loads)

    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool:
        """Never keeps blocks; a promise that was not loaded (request cancelled) is withdrawn."""
        found = self._requests.pop(request.request_id, None)
        if found is not None:
            self._withdraw(found)
        return False

    def _promise(self, request: _Request, first_block: int) -> None:
        pinned = self._consumer.pin(request.keys)
        if pinned.num_blocks <= first_block:
            pinned.release()
            return
        self._runtime.promises[self._next_load_id] = pinned
        request.load_id = self._next_load_id
        request.first_block, request.stop_block = first_block, pinned.num_blocks
        self._next_load_id += 1

    def _withdraw(self, request: _Request) -> None:
        if request.load_id is None:
            return
        self._loads = [load for load in self._loads if load.load_id != request.load_id]
        pinned = self._runtime.promises.pop(request.load_id, None)
        if pinned is not None:
            pinned.release()
        request.load_id, request.first_block, request.stop_block = None, 0, 0


@dataclass
class _OpenLoad:
    """A load that is being decoded in the present iteration."""

    load: Load
    pinned: PinnedBlocks
    num_groups_done: int = 0
    decode_s: float = 0.0


class DecodeWorker:
    """See the module's docstring."""

    def __init__(self, runtime: ConnectorRuntime) -> None:
        self._runtime = runtime
        self._consumer = runtime.require_consumer()
        self._decoder = Decoder(runtime.translator)
        self._group_starting_at = {start: group for group, (start, _) in enumerate(self._decoder.groups)}
        self._open: list[_OpenLoad] = []
        self._view: Tensor | None = None

    @property
    def needs_attention_input(self) -> bool:
        """Never: a decode server encodes nothing."""
        return False

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Take the pool."""
        spec = self._runtime.translator.manifest.consumer
        self._view = self._runtime.kv_layout(spec, kv_cache_tensor).view(kv_cache_tensor)

    def start_load_kv(self, metadata: DecodeMetadata) -> None:
        """Take over the pins of new loads; decoding happens layer by layer."""
        self._release()
        for load in metadata.loads:
            pinned = self._runtime.promises.pop(load.load_id, None)
            if pinned is not None:
                self._open.append(_OpenLoad(load, pinned))

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Decode the group that begins with this layer."""
        group = self._group_starting_at.get(layer_idx)
        if group is not None:
            for opened in self._open:
                began_s = time.perf_counter()
                self._decode(opened, group)
                opened.decode_s += time.perf_counter() - began_s
                opened.num_groups_done += 1

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
            opened.pinned.release()
        for opened in done:
            if opened.num_groups_done != len(self._decoder.groups):
                raise ConnectorOrderError(f"{opened.num_groups_done} of {len(self._decoder.groups)} groups were loaded")
            num_blocks = opened.load.stop_block - opened.load.first_block
            self._consumer.note(
                opened.load.keys,
                matched_tokens=num_blocks * self._runtime.tokens_per_block,
                decode_ms=opened.decode_s * 1e3,
            )

    def _decode(self, opened: _OpenLoad, group: int) -> None:
        if self._view is None:
            raise ConnectorOrderError("wait_for_layer_load was called before register_kv_caches")
        load, tokens_per_block = opened.load, self._runtime.tokens_per_block
        start, stop = load.first_block * tokens_per_block, load.stop_block * tokens_per_block
        codes_TC = torch.from_numpy(opened.pinned.codes(group, first_block=load.first_block))
        positions_T = torch.arange(start, stop)
        first_layer = self._decoder.groups[group][0]
        decoded = self._decoder.decode(group, codes_TC, positions_T, seq_len=stop)
        for layer, (k_THD, v_THD) in enumerate(decoded, first_layer):
            scatter_tokens(self._view, layer, load.block_ids, start, k_THD=k_THD, v_THD=v_THD)

    def _release(self) -> None:
        """Give back pins of a forward pass that did not reach its end."""
        for opened in self._open:
            opened.pinned.release()
        self._open = []
