"""TensorRT-LLM's own YAML files, mirrored: the options of one `trtllm-serve` worker and the disaggregated file.

Owns which keys those files have and the types of the ones that matter here. Read from TensorRT-LLM's sources:
`llmapi/llm_args.py` (BaseLlmArgs, TorchLlmArgs, KvCacheConfig, ...) and `llmapi/disagg_utils.py` (extract_disagg_cfg), at
1.2 and at a main branch of the 1.4 line; a key that either of them has is known. `None` means that the file does not set
the key: then TensorRT-LLM's default holds, and defaults differ between versions, so none are repeated here.

What the stock parser does and this mirror repeats: other top-level keys of the disaggregated file are inherited by both
server sections, and a different value in a section is an error; `urls` are `host:port` without scheme, as many as
`num_instances`. Values are not otherwise judged here: `requirements` says what SCD needs of them, `stock_files` reads files
and says what becomes of unknown keys.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from scd_trt.deploy import stock_keys
from scd_trt.deploy.scd_section import HostPort, ScdSection


class Stock(BaseModel):
    """A section of TensorRT-LLM's files: typed where it matters here, other known keys by name only."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    other_keys: ClassVar[frozenset[str]] = frozenset()
    """Known keys whose values are TensorRT-LLM's business alone."""
    mistaken_keys: ClassVar[dict[str, str]] = {}
    """Names that people write for a key, for example the command line's, and the key."""


class KvConnectorConfig(Stock):
    """`kv_connector_config`: the classes that TensorRT-LLM imports in every rank. 1.2 knows the first three keys only."""

    connector_module: str | None = Field(None, description="import path of the connector's module")
    connector_scheduler_class: str | None = Field(None, description="class built on rank 0")
    connector_worker_class: str | None = Field(None, description="class built on every rank")
    connector: str | None = Field(None, description="name of a preset instead of the three above")
    other_keys = stock_keys.KV_CONNECTOR


class KvCacheConfig(Stock):
    """`kv_cache_config`: the paged pool."""

    enable_block_reuse: bool | None = Field(None, description="share blocks of equal prefixes between requests")
    enable_partial_reuse: bool | None = Field(None, description="also reuse a block of which only the start matches")
    tokens_per_block: PositiveInt | None = Field(None, description="tokens of one block; TensorRT-LLM's default is 32")
    dtype: str | None = Field(None, description="auto, float16, bfloat16, fp8 or nvfp4")
    host_cache_size: int | None = Field(None, description="bytes of host memory that blocks are offloaded to")
    disk_cache_size: int | None = Field(None, description="bytes of disk that blocks are offloaded to")
    max_attention_window: tuple[int, ...] | None = Field(None, description="window per layer, repeated over the layers")
    sink_token_length: int | None = Field(None, description="deprecated; ignored by the PyTorch backend")
    use_kv_cache_manager_v2: bool | Literal["auto"] | None = Field(None, description="the experimental cache manager")
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="share of free memory"
    )
    max_tokens: PositiveInt | None = Field(None, description="tokens that the pool may hold")
    other_keys = stock_keys.KV_CACHE


class CacheTransceiverConfig(Stock):
    """`cache_transceiver_config`: TensorRT-LLM's own transfer of KV cache, which SCD takes the place of."""

    backend: str | None = Field(None, description="DEFAULT, UCX, NIXL, MOONCAKE or MPI")
    other_keys = stock_keys.CACHE_TRANSCEIVER


class SchedulerConfig(Stock):
    """`scheduler_config`."""

    capacity_scheduler_policy: str | None = Field(None, description="GUARANTEED_NO_EVICT unless set")
    other_keys = stock_keys.SCHEDULER


class CudaGraphConfig(Stock):
    """`cuda_graph_config`: graphs of batches in which every request decodes."""

    batch_sizes: tuple[PositiveInt, ...] | None = Field(None, description="batch sizes to capture")
    max_batch_size: NonNegativeInt | None = Field(None, description="largest batch size to capture")
    enable_padding: bool | None = Field(None, description="round batches up to a captured size")
    other_keys = stock_keys.CUDA_GRAPH


class TorchCompileConfig(Stock):
    """`torch_compile_config`."""

    enable_piecewise_cuda_graph: bool | None = Field(None, description="graphs of batches with prompts, in pieces")
    other_keys = stock_keys.TORCH_COMPILE


class MinimalInstances(Stock):
    """`disagg_cluster.minimal_instances`."""

    context_servers: PositiveInt | None = Field(None, description="prefill workers before the service is ready")
    generation_servers: PositiveInt | None = Field(None, description="decode workers before the service is ready")


class DisaggCluster(Stock):
    """`disagg_cluster`: discovery of workers instead of fixed urls; the same section stands in the workers' files."""

    cluster_uri: str = Field(description="etcd://host:port or http://host:port of the cluster storage")
    cluster_name: str | None = Field(None, description="namespace in the storage")
    minimal_instances: MinimalInstances | None = Field(None, description="workers before the service is ready")
    heartbeat_interval_sec: PositiveInt | None = Field(None, description="interval of the workers' heartbeats")
    inactive_timeout_sec: PositiveInt | None = Field(None, description="silence after which a worker is gone")


class ServerOptions(Stock):
    """The file that `trtllm-serve MODEL --extra_llm_api_options FILE` reads (`--config FILE` in newer versions)."""

    tensor_parallel_size: PositiveInt | None = Field(None, description="GPUs that share every layer")
    pipeline_parallel_size: PositiveInt | None = Field(None, description="GPUs that share the layers among them")
    context_parallel_size: PositiveInt | None = Field(None, description="GPUs that share a prompt among them")
    dtype: str | None = Field(None, description="dtype of weights and activations; auto takes the checkpoint's")
    max_batch_size: PositiveInt | None = Field(None, description="requests that run at once")
    max_num_tokens: PositiveInt | None = Field(None, description="tokens per iteration")
    max_seq_len: PositiveInt | None = Field(None, description="longest prompt and answer together")
    max_beam_width: PositiveInt | None = Field(None, description="beams per request")
    enable_chunked_prefill: bool | None = Field(None, description="run a long prompt over several iterations")
    enable_attention_dp: bool | None = Field(None, description="attention is data parallel over the ranks")
    enable_lora: bool | None = Field(None, description="LoRA adapters per request")
    lora_config: dict[str, Any] | None = Field(None, description="LoRA adapters per request")
    disable_overlap_scheduler: bool | None = Field(None, description="do not plan the next iteration during this one")
    attn_backend: str | None = Field(None, description="TRTLLM unless set; VANILLA, FLASHINFER")
    return_perf_metrics: bool | None = Field(None, description="times of a request in its answer")
    prefill_cuda_graph_backend: str | None = Field(None, description="disabled unless set; piecewise, breakable")
    speculative_config: dict[str, Any] | None = Field(None, description="speculative decoding")
    sparse_attention_config: dict[str, Any] | None = Field(None, description="attention that skips keys")
    kv_cache_compression_config: dict[str, Any] | None = Field(None, description="TensorRT-LLM's cache compression")
    kv_cache_config: KvCacheConfig | None = Field(None, description="the paged pool")
    kv_connector_config: KvConnectorConfig | None = Field(None, description="the connector, which SCD is")
    cache_transceiver_config: CacheTransceiverConfig | None = Field(None, description="TensorRT-LLM's own transfer")
    scheduler_config: SchedulerConfig | None = Field(None, description="which request runs when")
    cuda_graph_config: CudaGraphConfig | None = Field(None, description="CUDA graphs of batches that only decode")
    torch_compile_config: TorchCompileConfig | None = Field(None, description="torch.compile")
    disagg_cluster: DisaggCluster | None = Field(None, description="discovery of workers")
    mistaken_keys: ClassVar[dict[str, str]] = {
        "tp_size": "tensor_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "cp_size": "context_parallel_size",
        "ep_size": "moe_expert_parallel_size",
        "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
        "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
        "tokens_per_block": "kv_cache_config.tokens_per_block",
        "enable_block_reuse": "kv_cache_config.enable_block_reuse",
        "attention_backend": "attn_backend",
        "use_cuda_graph": "cuda_graph_config",
        "kv_cache_dtype": "kv_cache_config.dtype",
    }
    other_keys = stock_keys.SERVER


class StockRouter(Stock):
    """`context_servers.router`: how TensorRT-LLM's own orchestrator chooses a worker."""

    type: str | None = Field(None, description="round_robin unless set; load_balancing, kv_cache_aware, conversation")
    other_keys = stock_keys.ROUTER


class ServersSection(ServerOptions):
    """`context_servers` or `generation_servers`: where the workers are, and options that they share."""

    num_instances: PositiveInt = Field(1, description="workers of this role")
    urls: tuple[HostPort, ...] = Field((), description="host:port of each worker, without scheme")
    router: StockRouter | None = Field(None, description="choice of a worker")
    mistaken_keys: ClassVar[dict[str, str]] = ServerOptions.mistaken_keys | {
        "url": "urls",
        "instances": "num_instances",
    }

    @field_validator("urls", mode="before")
    @classmethod
    def _no_scheme(cls, value: Any) -> Any:
        for url in value if isinstance(value, list | tuple) else ():
            if isinstance(url, str) and (scheme := re.match(r"^[a-z]+://", url)):
                raise ValueError(f"{url!r} must be host:port; leave out {scheme.group()!r}")
        return value

    @model_validator(mode="after")
    def _as_many_urls_as_instances(self) -> ServersSection:
        if self.urls and len(self.urls) != self.num_instances:
            raise ValueError(f"num_instances is {self.num_instances} for {len(self.urls)} urls; make them equal")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("the same url twice; each worker has its own")
        return self


class ConditionalDisagg(Stock):
    """`conditional_disagg_config`: short prompts are prefilled by the decode worker."""

    max_local_prefill_length: NonNegativeInt | None = Field(None, description="tokens, without those cached already")


class OtlpConfig(Stock):
    """`otlp_config`."""

    otlp_traces_endpoint: str | None = Field(None, description="url that traces are sent to")


class DisaggFile(ServerOptions):
    """The file that `trtllm-serve disaggregated -c FILE` reads, with our section; our router and connectors read it too."""

    hostname: str = Field("localhost", description="address of the OpenAI endpoint that clients talk to")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8000, description="port of that endpoint")
    max_retries: NonNegativeInt = Field(1, description="further tries of a request that a worker failed")
    perf_metrics_max_requests: NonNegativeInt | None = Field(None, description="requests whose times are kept")
    perf_metrics_output_dir: str | None = Field(None, description="directory of per-request times")
    context_servers: ServersSection = Field(ServersSection(), description="the prefill workers")
    generation_servers: ServersSection = Field(ServersSection(), description="the decode workers")
    conditional_disagg_config: ConditionalDisagg | None = Field(None, description="prompts too short to send")
    otlp_config: OtlpConfig | None = Field(None, description="where traces go")
    node_id: NonNegativeInt | None = Field(None, description="tells orchestrators apart")
    schedule_style: Literal["context_first", "generation_first"] | None = Field(
        None, description="which worker gets a request first; context_first unless set"
    )
    scd: ScdSection | None = Field(None, description="our section")
    mistaken_keys: ClassVar[dict[str, str]] = ServerOptions.mistaken_keys | {
        "host": "hostname",
        "ctx_servers": "context_servers",
        "gen_servers": "generation_servers",
        "prefill_servers": "context_servers",
        "decode_servers": "generation_servers",
        "disagg_cluster_config": "disagg_cluster",
    }
    other_keys = ServerOptions.other_keys | stock_keys.DISAGG

    @model_validator(mode="after")
    def _sections_agree_with_the_top(self) -> DisaggFile:
        own = set(DisaggFile.model_fields) - set(ServerOptions.model_fields)
        for key in self.model_fields_set - own - {"disagg_cluster", "return_perf_metrics"}:
            for name in ("context_servers", "generation_servers"):
                section: ServersSection = getattr(self, name)
                if key in section.model_fields_set and getattr(section, key) != getattr(self, key):
                    raise ValueError(
                        f"{key} is {getattr(self, key)} at the top and {getattr(section, key)} in {name}; TensorRT-LLM "
                        "refuses two values: set it in the sections only"
                    )
        return self

    @model_validator(mode="after")
    def _a_worker_has_one_role(self) -> DisaggFile:
        if both := set(self.context_servers.urls) & set(self.generation_servers.urls):
            raise ValueError(f"{', '.join(sorted(both))} in both server sections; a worker plays one role")
        return self
