"""The KV-cache connector interface of TensorRT-LLM 1.2.x, without TensorRT-LLM.

Same class, method and argument names as `tensorrt_llm._torch.pyexecutor.kv_cache_connector` (tests compare them with the
recorded manifest), so that connector classes written against this file run under both the embedded CPU engine and
TensorRT-LLM. A `stream` is opaque: whatever the engine passes, None on CPU.

Order of calls in one iteration of an engine:

    scheduler   get_num_new_matched_tokens -> update_state_after_alloc -> build_connector_meta
    worker      bind_connector_meta -> start_load_kv
                -> wait_for_layer_load(i), layer i, save_kv_layer(i), for each layer -> wait_for_save
    scheduler   request_finished
    worker      get_finished
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


class ConnectorRequest(Protocol):
    """What a connector reads of an engine's request. TensorRT-LLM's `LlmRequest` fits; beam 0 is the only beam."""

    @property
    def request_id(self) -> int:
        """Unique among the requests of this engine."""

    @property
    def cache_salt_id(self) -> int | None:
        """Number of the cache salt, None without salt."""

    def get_tokens(self, beam: int, /) -> list[int]:
        """Prompt tokens, then the generated ones."""


@dataclass
class RequestData:
    """One request of an iteration.

    Attributes:
        request_id: as in `ConnectorRequest`.
        new_tokens: tokens since the previous iteration; the whole prompt the first time.
        new_block_ids: pool blocks since the previous iteration; all of the prompt's the first time.
        computed_position: tokens whose KV is in the pool, *without* those that the connector promised in this iteration.
        num_scheduled_tokens: tokens that this iteration computes.
    """

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    """The requests of an iteration; a request is new exactly once."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(ABC):
    """The half that touches the pool, in every rank."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        """Metadata of the iteration that is about to run."""
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        """Metadata of the present iteration."""
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """A function that the engine calls at the end of each forward pass, or None."""
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """The pool `[N, L, 2, H*B*D]`, once, before the first iteration."""

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None:
        """Begin the loads that the bound metadata names."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Return once the loads of a layer are in the pool; called just before the layer runs."""

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A layer has run: its KV of this iteration is in the pool."""

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None:
        """Return once nothing reads the pool any more; called after the last layer."""

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Requests whose asynchronous saves and loads are done."""


class KvCacheConnectorScheduler(ABC):
    """The half that decides, in rank 0."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Metadata for the workers of this iteration."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond the `num_computed_tokens` that the pool has, and whether asynchronously."""

    @abstractmethod
    def request_finished(self, request: ConnectorRequest, cache_block_ids: list[int]) -> bool:
        """A request ended; True would keep its blocks until a save is done."""

    @abstractmethod
    def update_state_after_alloc(self, request: ConnectorRequest, block_ids: list[int]) -> None:
        """The blocks of the prompt, after `get_num_new_matched_tokens`."""
