"""The connector as an engine sees it: two classes with TensorRT-LLM's method and argument names, for both server roles.

Which role they play is the runtime's: `prefill_role` or `decode_role` holds the logic. `llm_args` is whatever the engine
passes; the embedded engine passes its `ConnectorRuntime`, TensorRT-LLM its own arguments, and then the runtime comes from
the environment (`connector_runtime`), after its settings were judged (`engine_settings`). Inside TensorRT-LLM the classes
derive from its own base classes (`trtllm`), so that what newer versions call has their defaults.

One method is not TensorRT-LLM's: `ScdConnectorWorker.save_attention_input`. Patch layers are coded from the normalised
attention input, which is not in the pool; the engine, or a hook on its attention modules, hands it in before the same
layer's `save_kv_layer`.

Not supported, and refused at start: attention data parallelism (`supports_attention_dp`), since only rank 0 has a session;
and Patch layers inside TensorRT-LLM, which hands no attention inputs to a connector.

Nothing here is asynchronous in the engine's sense: no promise needs a wait, no block is kept after its request ends.
Errors of peers end in a push that fails or a prefix that is not matched; exceptions are bugs and propagate.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from scd_trt.model_spec import ModelSpec
from scd_trt.serving.connector_api import ConnectorRequest, SchedulerOutput
from scd_trt.serving.connector_runtime import (
    ConnectorError,
    ConnectorOrderError,
    ConnectorRuntime,
    role_from_environment,
    runtime_from_environment,
)
from scd_trt.serving.decode_role import DecodeScheduler, DecodeWorker
from scd_trt.serving.engine_settings import check_engine, check_same
from scd_trt.serving.pool_layout import pool_of_layout
from scd_trt.serving.prefill_role import PrefillScheduler, PrefillWorker
from scd_trt.serving.trtllm import connector_bases, host_ranks, host_version

if TYPE_CHECKING:
    from scd_trt.serving.connector_api import KvCacheConnectorScheduler as SchedulerBase
    from scd_trt.serving.connector_api import KvCacheConnectorWorker as WorkerBase
else:
    SchedulerBase, WorkerBase = connector_bases()

logger = logging.getLogger(__name__)


class SchedulerRole(Protocol):
    """The deciding half of one role; methods as in `KvCacheConnectorScheduler`."""

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]: ...
    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None: ...
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any: ...
    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool: ...
    def request_reset(self, request: ConnectorRequest) -> None: ...
    def cancel_load(self, request: ConnectorRequest, start: int, end: int) -> None: ...


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


class ScdConnectorScheduler(SchedulerBase):
    """Decides what is sent (prefill) and what is loaded (decode)."""

    supports_attention_dp = False

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

    def update_state_after_alloc_by_layer_group(
        self, request: ConnectorRequest, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """The same from an engine that names blocks by layer group (1.4); there is one group (`pool_layout`)."""
        self.update_state_after_alloc(request, _only_group(block_ids_by_layer_group))

    def request_finished_by_layer_group(
        self, request: ConnectorRequest, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """The same from an engine that names blocks by layer group (1.4)."""
        return self.request_finished(request, _only_group(cache_block_ids_by_layer_group))

    def request_reset(self, request: ConnectorRequest) -> None:
        """The request gave up its blocks and runs again from the start (1.4)."""
        self._role.request_reset(request)

    def cancel_load(self, request: ConnectorRequest, start: int, end: int) -> None:
        """Promised tokens `start .. end`, counted from the prompt's start, will not be used (1.4)."""
        self._role.cancel_load(request, start, end)


class ScdConnectorWorker(WorkerBase):
    """Encodes (prefill) or decodes (decode), layer by layer, between the engine's hooks."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        runtime = self._runtime = _runtime(llm_args)
        if runtime is not llm_args:
            _check_model(llm_args, runtime)
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
            PoolError: it holds something else than plain keys and values, or has another shape than model and
                `tokens_per_block` ask for.
        """
        self._role.register_kv_caches(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """The pool as byte regions, from an engine with the second cache manager (1.4), in place of `register_kv_caches`.

        Raises:
            PoolError: the regions are not one pool of keys and values.
        """
        num_layers, dtype = self._runtime.spec.num_layers, self._runtime.pool_dtype(self._llm_args)
        tokens_per_block = self._runtime.tokens_per_block
        pool = pool_of_layout(layout, num_layers=num_layers, tokens_per_block=tokens_per_block, dtype=dtype)
        self.register_kv_caches(pool)

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
    """The runtime of this process.

    Raises:
        ScdError: TensorRT-LLM's settings, model or ranks do not fit, or the runtime cannot be opened. TensorRT-LLM stops and
            shows the message.
    """
    if isinstance(llm_args, ConnectorRuntime):
        return llm_args
    role, ranks = role_from_environment(), host_ranks()
    check_engine(llm_args, role)
    check_same(llm_args, "tensor_parallel_size", ranks.size, source="the MPI world (the Ray orchestrator has none)")
    runtime = runtime_from_environment(ranks)
    check_same(llm_args, "kv_cache_config.tokens_per_block", runtime.tokens_per_block, source="the pair")
    if runtime.role == "prefill" and runtime.translator.manifest.patch_layers:
        raise ConnectorError(
            f"translator {runtime.translator.manifest.name} has Patch layers, which are coded from attention inputs; "
            "TensorRT-LLM does not hand these to a connector. Fit the pair with method.policy rd"
        )
    _check_windows(runtime.spec)
    logger.info("SCD %s connector on TensorRT-LLM %s, rank %d of %d", role, host_version(), ranks.rank, ranks.size)
    return runtime


def _check_windows(spec: ModelSpec) -> None:
    if len(set(spec.sliding_windows)) > 1:
        raise ConnectorError(
            f"layers of {spec.name} attend to different windows {set(spec.sliding_windows)}: TensorRT-LLM keeps several "
            "pools then, which the connector does not support"
        )


def _check_model(llm_args: Any, runtime: ConnectorRuntime) -> None:
    """Compare the model's files with those that the translator was fitted for, once per server: about a second per GB."""
    path = Path(str(getattr(llm_args, "model", "")))
    if runtime.follows is not None or not (path / "config.json").is_file():
        return
    check = runtime.translator.check_producer if runtime.role == "prefill" else runtime.translator.check_consumer
    check(ModelSpec.from_directory(path))


def _only_group(ids_by_layer_group: list[list[int]]) -> list[int]:
    if len(ids_by_layer_group) != 1:
        raise ConnectorOrderError(f"blocks of {len(ids_by_layer_group)} layer groups; one was registered")
    return ids_by_layer_group[0]
