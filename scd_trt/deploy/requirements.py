"""What SCD needs of TensorRT-LLM's settings, and what breaks where a setting is different: one table, two readers.

Owns `SERVER`, `DISAGG` and `GROUP`. `render` writes the values with their reasons as comments, `check` compares files
with them, so the two cannot disagree. A requirement with `value` is written by `render`; one without is met by leaving the
key out. `required` ones make `scd-trt config check` fail; `advised` ones are only told.

The reasons come from TensorRT-LLM's connector contract and sources (1.2 and the 1.4 line; docs/tensorrt-llm.md names the
files); none of them has been tried on a GPU. Where TensorRT-LLM refuses a setting itself, the reason says so. A value that
has to be right on purpose is required even where today's default is right, if that default differs between versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal

from pydantic import BaseModel

from scd_trt.deploy.scd_section import ScdSection
from scd_trt.deploy.stock_schema import DisaggFile, ServerOptions

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

CONNECTOR_MODULE = "scd_trt.serving.connector"
SCHEDULER_CLASS = "ScdConnectorScheduler"
WORKER_CLASS = "ScdConnectorWorker"


class Unset:
    """The file does not have the key, so TensorRT-LLM's default holds."""

    def __repr__(self) -> str:
        return "not set"


UNSET = Unset()


@dataclass(frozen=True)
class Requirement:
    """One setting of one file.

    Attributes:
        key: dotted, from the top of the file.
        required: the right value, in words.
        why: what happens otherwise, as a clause.
        holds: whether a file's content is right.
        value: what to write; UNSET where leaving the key out is right.
        shows: what to say was found, where that is not the key's value.
    """

    key: str
    required: str
    why: str
    holds: Callable[[Any], bool]
    value: Any = UNSET
    roles: tuple[Role, ...] = ROLES
    level: Literal["required", "advised"] = "required"
    shows: Callable[[Any], str] | None = None


def found(content: BaseModel, key: str) -> Any:
    """The value that a file gives to a dotted key, or UNSET."""
    value: Any = content
    for part in key.split("."):
        if not isinstance(value, BaseModel) or part not in value.model_fields_set:
            return UNSET
        value = getattr(value, part)
    return value


def _written(key: str, value: Any, why: str, **more: Any) -> Requirement:
    """A key that must stand in the file with this value."""
    return Requirement(key, as_yaml(value), why, lambda content: bool(found(content, key) == value), value, **more)


def _left_out(key: str, *harmless: Any, why: str, **more: Any) -> Requirement:
    """A key that must be absent, null, or one of the harmless values."""
    words = ", ".join(("left out", *map(as_yaml, harmless[:-1]))) + (f" or {as_yaml(harmless[-1])}" if harmless else "")
    return Requirement(key, words, why, lambda content: found(content, key) in (UNSET, None, *harmless), **more)


def as_yaml(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _same_window_everywhere(content: ServerOptions) -> bool:
    windows = found(content, "kv_cache_config.max_attention_window")
    return not isinstance(windows, tuple) or len(set(windows)) == 1


def _block_size_is_given(content: ServerOptions) -> bool:
    return isinstance(found(content, "kv_cache_config.tokens_per_block"), int)


def _fp8_is_not_asked_for(content: ServerOptions) -> bool:
    return bool(found(content, "kv_cache_config.dtype") != "fp8")


SERVER: tuple[Requirement, ...] = (
    _written(
        "kv_connector_config.connector_module",
        CONNECTOR_MODULE,
        "the server runs and answers, but sends and reads no codes: every prompt is prefilled twice",
    ),
    _written(
        "kv_connector_config.connector_scheduler_class",
        SCHEDULER_CLASS,
        "rank 0 has no scheduler that knows of codes",
    ),
    _written(
        "kv_connector_config.connector_worker_class",
        WORKER_CLASS,
        "the ranks have no worker that knows of codes",
    ),
    _left_out(
        "kv_connector_config.connector",
        why="a preset takes the place of the three classes",
    ),
    _written(
        "kv_cache_config.enable_partial_reuse",
        False,
        "a prompt may start in the middle of a block, where codes cannot be matched: such prompts are not sent, and a "
        "block copied for them holds another prompt's decoded tokens",
    ),
    _written(
        "kv_cache_config.host_cache_size",
        0,
        "blocks move to host memory, out of the pool tensor that the connector reads and writes",
    ),
    _left_out(
        "kv_cache_config.disk_cache_size",
        0,
        why="blocks move to disk, out of the pool tensor that the connector reads and writes",
    ),
    _written(
        "kv_cache_config.use_kv_cache_manager_v2",
        False,
        "the connector gets byte regions and block ids of -1 instead of one pool tensor; some versions choose that by "
        "themselves (auto). 1.1 does not know the key",
    ),
    Requirement(
        "kv_cache_config.tokens_per_block",
        "given, the same on both servers and in scd.tokens_per_block",
        "servers that cut prompts differently never match: codes are packed and named block by block",
        _block_size_is_given,
    ),
    _left_out(
        "kv_cache_config.dtype",
        "auto",
        "bfloat16",
        "float16",
        "fp8",
        why="the pool (nvfp4, packed MLA) has no rows of keys and values that codes could become",
    ),
    Requirement(
        "kv_cache_config.dtype",
        "not fp8",
        "keys and values would be written with the checkpoint's fp8 scales, which the connector refuses: it never ran",
        _fp8_is_not_asked_for,
    ),
    Requirement(
        "kv_cache_config.max_attention_window",
        "left out, or one window for all layers",
        "there are several pools, and blocks outside a window are dropped while codes still name them",
        _same_window_everywhere,
    ),
    _left_out(
        "pipeline_parallel_size",
        1,
        why="a rank receives codes of layers that it does not run",
    ),
    _left_out(
        "context_parallel_size",
        1,
        why="tokens of one block lie on several ranks",
    ),
    _left_out("max_beam_width", 1, why="beams share and copy blocks after codes were written into them"),
    _left_out(
        "enable_attention_dp",
        False,
        why="every rank has requests and cache of its own; 1.2 has no connector for that, later versions only by opt-in",
    ),
    _left_out(
        "speculative_config",
        why="draft tokens take up blocks that no codes describe; some versions refuse connectors with it",
    ),
    _left_out("sparse_attention_config", why="the cache holds more than keys and values, or not all of them"),
    _left_out("kv_cache_compression_config", why="the pool no longer holds what the model computed"),
    _left_out(
        "enable_lora",
        False,
        why="an adapter chosen by a request changes its cache, but codes are named by tokens alone: text is silently "
        "wrong. Merge the pair's adapter into its model",
    ),
    _left_out("lora_config", why="as with enable_lora: codes are named by tokens alone"),
    _left_out(
        "attn_backend",
        "TRTLLM",
        why="blocks no longer fit codes: VANILLA makes a block as long as an iteration, FLASHINFER turns block reuse off",
    ),
    _left_out(
        "scheduler_config.capacity_scheduler_policy",
        "GUARANTEED_NO_EVICT",
        why="TensorRT-LLM refuses to start with a connector: an evicted request would lose its blocks",
    ),
    _left_out(
        "cache_transceiver_config.backend",
        why="TensorRT-LLM's own transfer runs beside SCD, which takes its place, and claims the requests",
    ),
    _left_out(
        "prefill_cuda_graph_backend",
        "disabled",
        why="a replayed graph calls no connector hook: no codes leave, and blocks are attended to before codes fill them",
    ),
    _left_out(
        "torch_compile_config.enable_piecewise_cuda_graph",
        False,
        why="a replayed graph calls no connector hook: no codes leave, and blocks are attended to before codes fill them",
    ),
    _written(
        "return_perf_metrics",
        True,
        "the router has no times of prefill to weigh sending codes against a prefill on the decode server",
    ),
    _written(
        "disable_overlap_scheduler",
        True,
        "the next iteration is planned before this one's codes have left, and may overwrite their blocks; "
        "TensorRT-LLM asks the same of its own prefill servers",
        roles=("prefill",),
    ),
    _written(
        "cuda_graph_config",
        None,
        "graphs cost memory and start-up time although a prefill worker does not decode; 1.1 refuses connectors with "
        "them",
        roles=("prefill",),
        level="advised",
    ),
    _written(
        "kv_cache_config.enable_block_reuse",
        False,
        "decoded cache is kept as if it were exact and served to prompts that fell back to their own prefill; what "
        "repeats is kept as codes, in SCD's own store",
        roles=("decode",),
    ),
)
"""Of the options of one worker."""


def _has_section(content: DisaggFile) -> bool:
    return content.scd is not None


def _workers_are_named(content: DisaggFile) -> bool:
    return content.disagg_cluster is not None or bool(content.context_servers.urls and content.generation_servers.urls)


def _every_worker_has_a_control_channel(content: DisaggFile) -> bool:
    if content.scd is None or content.disagg_cluster is not None:
        return True
    workers = content.scd.workers
    return len(workers.prefill.control_urls) == len(content.context_servers.urls) and len(
        workers.decode.control_urls
    ) == len(content.generation_servers.urls)


def _control_channels_are_on_their_workers_hosts(content: DisaggFile) -> bool:
    if content.scd is None:
        return True
    workers, servers = content.scd.workers, (content.context_servers, content.generation_servers)
    return all(
        url.rpartition(":")[0] == control_url.rpartition(":")[0]
        for role, section in zip((workers.prefill, workers.decode), servers, strict=True)
        for url, control_url in zip(section.urls, role.control_urls, strict=False)
    )


def _moves_bytes_between_processes(content: DisaggFile) -> bool:
    return content.scd is None or content.scd.transport.backend == "nixl"


def _has_secret_off_loopback(content: DisaggFile) -> bool:
    return content.scd is None or content.scd.control.secret_file is not None or _on_loopback(content.scd)


def _names_its_network_device(content: DisaggFile) -> bool:
    return content.scd is None or content.scd.transport.device is not None or _on_loopback(content.scd)


def _on_loopback(section: ScdSection) -> bool:
    urls = (*section.workers.prefill.control_urls, *section.workers.decode.control_urls)
    return bool(urls) and all(_is_loopback(url.rpartition(":")[0].strip("[]")) for url in urls)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


DISAGG: tuple[Requirement, ...] = (
    Requirement("scd", "present", "this is a stock file: nothing says which pair is served", _has_section),
    Requirement(
        "context_servers.urls",
        "urls of both roles, or disagg_cluster",
        "the router has nobody to ask",
        _workers_are_named,
    ),
    _left_out(
        "schedule_style",
        "context_first",
        why="the decode worker starts before codes exist",
    ),
    Requirement(
        "scd.workers",
        "one control url for each url",
        "a worker that cannot be told what to expect grants no memory: its prompts are never sent",
        _every_worker_has_a_control_channel,
    ),
    Requirement(
        "scd.workers",
        "control urls that name each worker's host as its url does",
        "a worker listens on one address for both, and refuses to start",
        _control_channels_are_on_their_workers_hosts,
    ),
    Requirement(
        "scd.transport.backend",
        "nixl",
        "bytes move inside one process only",
        _moves_bytes_between_processes,
    ),
    Requirement(
        "scd.control.secret_file",
        "given, unless every control url is on loopback",
        "a control channel that is reachable from elsewhere refuses to start",
        _has_secret_off_loopback,
    ),
    Requirement(
        "scd.transport.device",
        "the network device next to the GPU (UCX_NET_DEVICES), for example mlx5_0:1 or eth0",
        "UCX chooses by itself, sometimes the management network, and says nothing",
        _names_its_network_device,
        level="advised",
    ),
)
"""Of the disaggregated file."""


@dataclass(frozen=True)
class Group:
    """The files that run one pair together."""

    prefill: ServerOptions
    decode: ServerOptions
    disagg: DisaggFile


def _block_sizes(group: Group) -> tuple[object, ...]:
    section = group.disagg.scd
    sizes = [found(part, "kv_cache_config.tokens_per_block") for part in (group.prefill, group.decode)]
    return (*sizes, section.tokens_per_block if section else sizes[0])


def _tensor_parallel_sizes(group: Group) -> tuple[int, ...]:
    return tuple(part.tensor_parallel_size or 1 for part in (group.prefill, group.decode))


def _dtypes(group: Group) -> tuple[tuple[str, str], ...]:
    """Of each role: the worker's, the pair's."""
    section = group.disagg.scd
    pairs = ((group.prefill, section.producer), (group.decode, section.consumer)) if section else ()
    return tuple((options.dtype or "auto", model.dtype) for options, model in pairs)


GROUP: tuple[Requirement, ...] = (
    Requirement(
        "scd.tokens_per_block",
        "as kv_cache_config.tokens_per_block of both workers",
        "servers that cut prompts differently never match: codes are packed and named block by block",
        lambda group: len(set(_block_sizes(group))) == 1,
        shows=lambda group: "prefill {}, decode {}, scd {}".format(*_block_sizes(group)),
    ),
    Requirement(
        "generation_servers.tensor_parallel_size",
        "one tensor_parallel_size for both workers",
        "rank r on one side does not hold the heads that rank r on the other side sends",
        lambda group: len(set(_tensor_parallel_sizes(group))) == 1,
        shows=lambda group: "prefill {}, decode {}".format(*_tensor_parallel_sizes(group)),
    ),
    Requirement(
        "scd.consumer.dtype",
        "each worker's dtype as the pair's model has it, or auto",
        "the pool is read as another dtype than the one that the translator was fitted on",
        lambda group: all(worker in ("auto", model) for worker, model in _dtypes(group)),
        shows=lambda group: ", ".join(f"{worker} for {model}" for worker, model in _dtypes(group)),
    ),
)
"""Of prefill.yaml, decode.yaml and disagg.yaml together; reported at the disaggregated file."""


def of_role(role: Role) -> tuple[Requirement, ...]:
    """What one role's options must satisfy."""
    return tuple(requirement for requirement in SERVER if role in requirement.roles)
