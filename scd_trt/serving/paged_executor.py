"""Runs requests over one paged KV pool, and a connector around every forward pass, in TensorRT-LLM's order of calls.

Shapes: T tokens of a step, M hidden size; the pool is `[N, L, 2, H*B*D]` (`kv_cache`). A *step* is one iteration of an
engine: here the forward pass of one request, over a chunk of its prompt or over its newest token.

Owns the pool, its block bookkeeping and the hooks on the model. Blocks for prompt and answer are reserved before the first
step (TensorRT-LLM's GUARANTEED_NO_EVICT), so a request that runs can always end. Finished blocks stay for later prompts with
the same prefix and salt. Blocks that a connector filled, and all after them, are never shared: they are approximations
and must not pass for exact ones. With a connector that codes from attention inputs, no block is shared: those are gone.

Not thread-safe, and a model may have one executor with a connector: hooks fire for the thread that steps, others may run
the same model meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from scd_trt import kv_cache
from scd_trt.config import EngineConfig
from scd_trt.kv_cache import KvLayout
from scd_trt.models import Capture, LoadedModel, attention_module, decoder_layers, run_with_cache
from scd_trt.serving.block_pool import BlockPool
from scd_trt.serving.connector import ScdConnectorScheduler, ScdConnectorWorker
from scd_trt.serving.connector_api import RequestData, SchedulerOutput
from scd_trt.serving.connector_runtime import ConnectorOrderError
from scd_trt.serving.paged_cache import PagedCache

Connector = tuple[ScdConnectorScheduler, ScdConnectorWorker]


@dataclass
class PagedRequest:
    """A request as the executor knows it; fits `connector_api.ConnectorRequest`.

    Attributes:
        tokens: prompt, then answer; the caller appends what it samples.
        num_reserved: tokens whose KV the request may ever have; decides how many blocks it gets.
        blocks: of the pool, in order of the sequence.
        num_computed: leading tokens whose KV is in the pool.
        num_cached: prompt tokens that need no computing: they were in the pool, or the connector promised them.
        num_promised: those that the connector promised.
        num_named_blocks: leading blocks that others may share.
        num_told_tokens, num_told_blocks: what the connector was told of.
    """

    request_id: int
    tokens: list[int]
    num_prompt: int
    num_reserved: int
    cache_salt: str = ""
    cache_salt_id: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_promised: int = 0
    num_named_blocks: int = 0
    num_told_tokens: int = 0
    num_told_blocks: int = 0

    def get_tokens(self, beam: int, /) -> list[int]:
        """See `connector_api.ConnectorRequest`."""
        return self.tokens


class PagedExecutor:
    """See the module's docstring."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, connector: Connector | None = None) -> None:
        spec = loaded.spec
        layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.tokens_per_block, loaded.dtype)
        shares_blocks = config.enable_block_reuse and not (connector and connector[1].needs_attention_input)
        self.blocks = BlockPool(config.num_blocks, enable_reuse=shares_blocks)
        self.pool = layout.allocate(config.num_blocks)
        self._view = layout.view(self.pool)
        self._loaded = loaded
        self._tokens_per_block = config.tokens_per_block
        self._max_step_tokens = config.max_num_tokens
        self._connector = connector
        self._hooks = None
        if connector is not None:
            connector[1].register_kv_caches(self.pool)
            self._hooks = _Hooks(loaded, connector[1])

    def reserve(self, request: PagedRequest) -> bool:
        """Take blocks for a new request, joining those with the same prefix; False while too few are free."""
        num_reusable = kv_cache.num_sent_blocks(request.num_prompt, self._tokens_per_block)
        shared = self.blocks.acquire_prefix(self._keys(request, request.tokens)[:num_reusable])
        num_fresh = self._num_blocks(request.num_reserved) - len(shared)
        if num_fresh > self.blocks.num_available:
            self.blocks.release(shared)
            return False
        request.blocks = shared + self.blocks.allocate(num_fresh)
        request.num_named_blocks = len(shared)
        request.num_computed = request.num_cached = len(shared) * self._tokens_per_block
        return True

    def step(self, request: PagedRequest) -> Tensor | None:
        """Compute the next tokens of a request that has its blocks; asks the connector before the first of them.

        Returns:
            logits `[V]` after its last token, or None while more of the prompt is to come.
        """
        if self._connector is None:
            logits_V = self._forward(request, self._stop(request))
        else:
            logits_V = self._forward_connected(*self._connector, request)
        request.num_computed = self._stop(request)
        self._name_full_blocks(request)
        return logits_V

    def end(self, request: PagedRequest) -> None:
        """Give up the blocks of a request, whether it is complete or not."""
        if self._connector is not None:
            scheduler, worker = self._connector
            scheduler.request_finished(request, list(request.blocks))
            worker.get_finished([], [])
        blocks, request.blocks = request.blocks, []
        self.blocks.release(blocks)

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._hooks is not None:
            self._hooks.remove()

    def _stop(self, request: PagedRequest) -> int:
        """End of the tokens that the next step computes."""
        return min(len(request.tokens), request.num_computed + self._max_step_tokens)

    def _forward_connected(
        self, scheduler: ScdConnectorScheduler, worker: ScdConnectorWorker, request: PagedRequest
    ) -> Tensor | None:
        if request.num_told_tokens == 0:
            self._ask_connector(scheduler, request)
        stop = self._stop(request)
        worker.bind_connector_meta(scheduler.build_connector_meta(self._tell(request, stop)))
        worker.start_load_kv(None)
        logits_V = self._forward(request, stop)
        worker.wait_for_save(None)
        return logits_V

    def _ask_connector(self, scheduler: ScdConnectorScheduler, request: PagedRequest) -> None:
        num_promised, is_async = scheduler.get_num_new_matched_tokens(request, request.num_computed)
        total = request.num_computed + num_promised
        if is_async or num_promised < 0 or total % self._tokens_per_block or total >= request.num_prompt:
            raise ConnectorOrderError(
                f"connector promised {num_promised} tokens (async: {is_async}) after {request.num_computed} of a prompt of "
                f"{request.num_prompt}; whole blocks before its last token are allowed, and no waiting"
            )
        scheduler.update_state_after_alloc(request, request.blocks[: self._num_blocks(request.num_prompt)])
        request.num_promised = num_promised
        request.num_computed = request.num_cached = total

    def _tell(self, request: PagedRequest, stop: int) -> SchedulerOutput:
        start = request.num_computed
        is_new = not request.num_told_tokens
        num_visible = self._num_blocks(max(stop, request.num_prompt))
        data = RequestData(
            request_id=request.request_id,
            new_tokens=request.tokens[request.num_told_tokens :],
            new_block_ids=request.blocks[request.num_told_blocks : num_visible],
            computed_position=start - request.num_promised if is_new else start,
            num_scheduled_tokens=stop - start,
        )
        request.num_told_tokens, request.num_told_blocks = len(request.tokens), num_visible
        return SchedulerOutput(new_requests=[data]) if is_new else SchedulerOutput(cached_requests=[data])

    def _forward(self, request: PagedRequest, stop: int) -> Tensor | None:
        start = request.num_computed
        cache = PagedCache(self._view, request.blocks, num_past=start, num_new=stop - start)
        # an unfinished prompt needs no logits
        capture: Set[Capture] = {"logits"} if stop == len(request.tokens) else frozenset()
        tokens = request.tokens[start:stop]
        with self._hooks or nullcontext():
            result = run_with_cache(self._loaded, tokens, cache, start_position=start, capture=capture, num_logits=1)
        return None if result.logits_TV is None else result.logits_TV[-1]

    def _name_full_blocks(self, request: PagedRequest) -> None:
        num_full = request.num_computed // self._tokens_per_block
        if request.num_promised or num_full <= request.num_named_blocks:
            return
        keys = self._keys(request, request.tokens[: request.num_computed])
        for index in range(request.num_named_blocks, num_full):
            self.blocks.name(request.blocks[index], keys[index])
        request.num_named_blocks = num_full

    def _keys(self, request: PagedRequest, tokens: list[int]) -> list[bytes]:
        scope = kv_cache.scope(fingerprint="", salt=request.cache_salt)
        return kv_cache.block_keys(tokens, tokens_per_block=self._tokens_per_block, scope=scope)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tokens_per_block)


class _Hooks:
    """Calls a connector worker around every layer while a step is open (as a context manager) in the same thread."""

    def __init__(self, loaded: LoadedModel, worker: ScdConnectorWorker) -> None:
        self._worker = worker
        self._stepping_thread: int | None = None
        self._handles: list[Any] = []
        for index, layer in enumerate(decoder_layers(loaded.model)):
            # the normalised attention input is what the key projection sees, in every supported family
            projection = attention_module(layer).get_submodule("k_proj")
            self._handles += [
                layer.register_forward_pre_hook(self._before(index)),
                projection.register_forward_pre_hook(self._attention_input(index)),
                layer.register_forward_hook(self._after(index)),
            ]

    def __enter__(self) -> None:
        self._stepping_thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._stepping_thread = None

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _is_stepping(self) -> bool:
        return self._stepping_thread == threading.get_ident()

    def _before(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            if self._is_stepping():
                self._worker.wait_for_layer_load(layer, None)

        return hook

    def _attention_input(self, layer: int) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if self._is_stepping():
                self._worker.save_attention_input(layer, inputs[0].flatten(0, -2))

        return hook

    def _after(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if self._is_stepping():
                self._worker.save_kv_layer(layer, None)

        return hook
