"""The connector as an engine sees it: two classes with TensorRT-LLM's method and argument names, for both server roles.

Which role they play is the runtime's: `prefill_role` or `decode_role` holds the logic. `llm_args` is whatever the engine
passes; the embedded engine passes its `ConnectorRuntime`, TensorRT-LLM its own arguments, and then the runtime comes from
the environment (`connector_runtime`).

One method is not TensorRT-LLM's: `ScdConnectorWorker.save_attention_input`. Patch layers are coded from the normalised
attention input, which is not in the pool; the engine, or a hook on its attention modules, hands it in before the same
layer's `save_kv_layer`.

Nothing here is asynchronous in the engine's sense: no promise needs a wait, no block is kept after its request ends.
Errors of peers end in a push that fails or a prefix that is not matched; exceptions are bugs and propagate.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from scd_trt.serving.connector_api import (
    ConnectorRequest,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    SchedulerOutput,
)
from scd_trt.serving.connector_runtime import ConnectorOrderError, ConnectorRuntime, runtime_from_environment
from scd_trt.serving.decode_role import DecodeScheduler, DecodeWorker
from scd_trt.serving.prefill_role import PrefillScheduler, PrefillWorker


class SchedulerRole(Protocol):
    """The deciding half of one role; methods as in `KvCacheConnectorScheduler`."""

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]: ...
    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None: ...
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any: ...
    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool: ...


class WorkerRole(Protocol):
    """The working half of one role; `metadata` is what the same role's scheduler has built."""

    @property
    def needs_attention_input(self) -> bool: ...
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None: ...
    def start_load_kv(self, metadata: Any) -> None: ...
    def wait_for_layer_load(self, layer_idx: int) -> None: ...
    def save_attention_input(self, layer_idx: int, x_TM: Tensor) -> None: ...
    def save_kv_layer(self, layer_idx: int) -> None: ...
    def wait_for_save(self) -> None: ...


class ScdConnectorScheduler(KvCacheConnectorScheduler):
    """Decides what is sent (prefill) and what is loaded (decode)."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        runtime = _runtime(llm_args)
        self._role: SchedulerRole
        self._role = PrefillScheduler(runtime) if runtime.role == "prefill" else DecodeScheduler(runtime)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of landed codes beyond `num_computed_tokens`; never asynchronous, always whole blocks."""
        return self._role.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None:
        """Blocks for the tokens that were promised."""
        self._role.update_state_after_alloc(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """What the worker has to do in this iteration: plain frozen records."""
        return self._role.build_connector_meta(scheduler_output)

    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool:
        """Always False: its blocks may be reused at once."""
        return self._role.request_finished(request, cache_block_ids)


class ScdConnectorWorker(KvCacheConnectorWorker):
    """Encodes (prefill) or decodes (decode), layer by layer, between the engine's hooks."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        runtime = _runtime(llm_args)
        self._role: WorkerRole
        self._role = PrefillWorker(runtime) if runtime.role == "prefill" else DecodeWorker(runtime)

    @property
    def needs_attention_input(self) -> bool:
        """True where codes are made from more than the pool holds: blocks that an earlier prompt filled are then of no use.

        The embedded engine shares no blocks in that case; with TensorRT-LLM set `enable_block_reuse: false` on the prefill
        server, or such prompts end as `not_encoded` whenever the code store has forgotten them.
        """
        return self._role.needs_attention_input

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """The pool `[N, L, 2, H*B*D]`.

        Raises:
            ValueError: the pool has another shape than model and `tokens_per_block` ask for.
        """
        self._role.register_kv_caches(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        """Begin the iteration whose metadata is bound.

        Raises:
            ConnectorOrderError: no metadata is bound.
        """
        metadata = self.get_connector_meta()
        if metadata is None:
            raise ConnectorOrderError("start_load_kv was called before bind_connector_meta")
        self._role.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Decode the layer's group into the pool, if the layer begins one."""
        self._role.wait_for_layer_load(layer_idx)

    def save_attention_input(self, layer_idx: int, x_TM: Tensor) -> None:
        """Normalised attention input of all rows of the iteration, before `save_kv_layer` of the same layer."""
        self._role.save_attention_input(layer_idx, x_TM)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Encode and send the layer's group, if the layer ends one."""
        self._role.save_kv_layer(layer_idx)

    def wait_for_save(self, stream: Any) -> None:
        """Close the iteration; from here on nothing reads or writes the pool."""
        self._role.wait_for_save()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing is ever pending."""
        return [], []


def _runtime(llm_args: Any) -> ConnectorRuntime:
    return llm_args if isinstance(llm_args, ConnectorRuntime) else runtime_from_environment()
