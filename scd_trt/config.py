"""Every setting of `scd_trt`, as frozen pydantic models, and the YAML file that holds them.

Owns: the pair file (`PairConfig`), its sections, `load_pair`, and `ScdError`, the root of all errors that the user can
cure. Units are in the names (`_bytes`, `_s`, `_us`, `_tokens`). Relative paths in a file are relative to that file.
Loading never touches a model; it only says whether the file is well formed. A wrong file raises `ConfigError`, whose
text has one entry per mistake: file and line, key path, value found, what is allowed, and the nearest known key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from scd_trt.yaml_mistakes import duplicate_keys, explain, literal_values

Dtype = Literal["float32", "bfloat16", "float16"]
Port = Annotated[int, Field(ge=1, le=65535)]
Rank = PositiveInt | tuple[PositiveInt, ...]
Source = str | tuple[str, ...]
MIB = 1 << 20
AnyModel = TypeVar("AnyModel", bound=BaseModel)


class ScdError(Exception):
    """A mistake that the user can cure; its text names the value, the place and the cure."""


class ConfigError(ScdError):
    """The configuration file is missing, is not YAML, or holds a wrong key or value."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """Where one model of the pair comes from."""

    model: str = Field(description="directory of a Hugging Face model, a .gguf file, package:<name>, or recipe:<pair>")
    adapter: Path | None = Field(None, description="directory of a PEFT LoRA adapter to merge into the model")
    dtype: Dtype = Field("bfloat16", description="dtype of weights and KV pool when serving")


_RATE_SETTINGS = {
    *("bytes_per_token", "max_kl", "max_relative_f1_loss", "f1_loss_rule"),
    *("headroom", "max_matrix_share", "guard", "guard_rate"),
}
"""Keys of `method` that are used after the calibration text has been folded."""


class MethodConfig(Section):
    """How the translator is fitted (METHOD, section 1)."""

    policy: Literal["rd", "paper", "exact"] = Field(
        "rd", description="rd: rate-distortion coded groups of layers; paper: Reuse and Patch; exact: KV sent as it is"
    )
    group_layers: PositiveInt = Field(10, description="rd: layers that are transformed and travel together")
    source_layers: PositiveInt | None = Field(
        None,
        description="rd: producer layers that a group is computed from, the most predictive ones; default: the group's own, "
        "or where the models' shapes differ as many as are together as wide as the group",
    )
    bytes_per_token: PositiveInt | None = Field(
        None, description="rd: size of codes; default where no limit is given: a tenth of the cache's"
    )
    max_kl: PositiveFloat | None = Field(
        None, description="rd: loss allowed on held-out text, nats per token; the fewest bytes that keep to it are sent"
    )
    max_relative_f1_loss: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="rd: share of the consumer's own F1 on held-out questions that may be lost, 0.01 for 1 %; the fewest "
        "bytes that keep to it are sent",
    )
    f1_loss_rule: Literal["upper", "mean"] = Field(
        "upper",
        description="what must keep to max_relative_f1_loss: the upper end of the loss's 95 % interval, or its mean",
    )
    modes: tuple[Literal["transform", "raw", "patch"], ...] = Field(
        ("transform", "raw"),
        description="rd: how a group of layers may be coded; transform always, raw and patch where their weighted "
        "rate-distortion cost is lower and held-out text agrees",
    )
    weights: Literal["diagonal", "head", "none"] = Field(
        "diagonal",
        description="rd: what an error costs: diagonal: the Fisher information of every element; head: of every kv head as a "
        "whole, with how its elements act together; none: all elements alike, for comparing",
    )
    fisher_tokens: PositiveInt = Field(
        1024, description="rd: calibration tokens scored to weigh errors by their effect"
    )
    headroom: Annotated[float, Field(ge=1, le=2)] = Field(
        1.3, description="rd: range of the quantisers, relative to the best one for a Gaussian"
    )
    max_matrix_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.14, description="rd: most matrix elements of the translator, relative to the consumer's number of weights"
    )
    guard: Literal["off", "cut"] = Field(
        "cut",
        description="rd, when serving: cut: the producer sends no codes from the first block on that lies beyond the "
        "calibration text, and the consumer computes from there; off: it sends whatever comes",
    )
    guard_rate: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.02,
        description="rd: share of prompts that the guard may cut although they are like the calibration text and as long as "
        "its sequences",
    )
    r_k: Rank = Field(96, description="rank of the key codes of a Reuse layer; one value, or one per layer")
    r_v: Rank = Field(96, description="rank of the value codes of a Reuse layer; one value, or one per layer")
    r_h: Rank = Field(192, description="rank of the hidden-state code of a Patch layer; one value, or one per layer")
    patch_layers: Literal["auto"] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        "auto",
        description="layers to patch, or auto: greedy selection of at most max_patch_layers",
    )
    max_patch_layers: Annotated[int, Field(ge=0)] = Field(6, description="greedy selection stops here (paper: 6 of 32)")
    num_candidates: PositiveInt = Field(
        10, description="layers that greedy tries, best of the restore-one profile first"
    )
    aligner: Literal["affine", "mlp"] = Field("affine", description="map from hidden code to the consumer's input")
    mlp_hidden: PositiveInt = Field(512, description="hidden width of the mlp aligner")
    mlp_steps: PositiveInt = Field(400, description="optimiser steps of the mlp aligner, per patch layer")
    ridge: PositiveFloat = Field(1e-3, description="ridge weight, relative to the mean diagonal of the Gram matrix")
    code_dtype: Literal["float16", "bfloat16", "float32"] = Field("float16", description="dtype of codes on the wire")
    seed: int = Field(0, description="seed of everything random in the fit")

    @field_validator("modes")
    @classmethod
    def _transform_is_possible(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "transform" not in value or len(set(value)) != len(value):
            raise ValueError("modes must hold transform, and each mode once")
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> MethodConfig:
        limits = ("bytes_per_token", "max_kl", "max_relative_f1_loss")
        given = [name for name in limits if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are {len(given)} limits; give one of them")
        return self


class CorpusConfig(Section):
    """A sample of text: where from, and how much."""

    source: Source = Field(
        description="package:narrativeqa|disflqa|xsum, a .txt or .jsonl file, a directory, or a list of these to mix"
    )
    num_tokens: PositiveInt = Field(4096, description="tokens to read")
    sequence_tokens: PositiveInt = Field(512, description="tokens per sequence given to the models")
    plain_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25,
        description="share of sequences that begin with text; the others open as a chat does, with its special tokens",
    )


class HeldoutConfig(Section):
    """Held-out text on which layers are chosen and quality is measured; never the calibration documents."""

    source: Source = Field(description="as in calibration; documents of the held-out split are used")
    num_sequences: PositiveInt = Field(6, description="sequences to measure on")
    prefix_tokens: PositiveInt = Field(512, description="tokens whose cache is replaced")
    scored_tokens: PositiveInt = Field(64, description="tokens scored after the prefix")
    questions: str = Field(
        "narrativeqa",
        description="questions for max_relative_f1_loss: narrativeqa, disflqa, or a .jsonl file of passage, question and "
        "answer; those of the held-out split are asked",
    )
    num_questions: PositiveInt = Field(48, description="questions to measure max_relative_f1_loss on")


class EngineConfig(Section):
    """The paged executor of the embedded CPU engine; the names are TensorRT-LLM's where it has them."""

    tokens_per_block: PositiveInt = Field(32, description="tokens of one KV block")
    num_blocks: PositiveInt = Field(256, description="blocks in the pool")
    max_num_tokens: PositiveInt = Field(2048, description="prompt tokens per step; longer prompts are chunked")
    max_waiting: PositiveInt = Field(64, description="requests that may wait; further ones get HTTP 503")
    enable_block_reuse: bool = Field(True, description="keep finished blocks for later prompts with the same prefix")
    num_threads: PositiveInt = Field(1, description="CPU threads of the model's matrix products")


class TransportConfig(Section):
    """The data path that carries codes from the prefill to the decode server."""

    backend: Literal["nixl", "loopback"] = Field("nixl", description="nixl; loopback is for tests inside one process")
    lane: Literal["auto", "tcp", "shm"] = Field("auto", description="UCX lane; auto leaves the choice to UCX")
    device: str | None = Field(None, description="network device for UCX (UCX_NET_DEVICES), for example eth0")
    arena_bytes: PositiveInt = Field(256 * MIB, description="registered memory that receives codes")
    send_buffer_bytes: PositiveInt = Field(128 * MIB, description="registered memory that codes leave from")
    window: PositiveInt = Field(8, description="writes outstanding per peer")
    write_timeout_s: PositiveFloat = Field(5.0, description="deadline of one write, counted from its post")
    transfer_timeout_s: PositiveFloat = Field(30.0, description="deadline of a prompt's codes, from their first byte")
    nixl_progress_delay_us: PositiveInt = Field(1000, description="pause of NIXL's progress thread; 0 would spin")


class ControlConfig(Section):
    """The control channel between router, prefill and decode."""

    secret_file: Path | None = Field(None, description="file with the shared secret; required off loopback")
    heartbeat_s: PositiveFloat = Field(1.0, description="interval of heartbeats")
    peer_timeout_s: PositiveFloat = Field(3.0, description="silence after which a peer counts as gone")
    lease_s: PositiveFloat = Field(30.0, description="time after which an unused grant is taken back")
    max_frame_bytes: PositiveInt = Field(4 * MIB, description="largest control frame that is read")

    @model_validator(mode="after")
    def _silence_needs_two_heartbeats(self) -> ControlConfig:
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"peer_timeout_s {self.peer_timeout_s} must be at least twice heartbeat_s {self.heartbeat_s}"
            )
        return self


class StoreConfig(Section):
    """The content-addressed store of codes that each worker keeps in memory."""

    capacity_bytes: PositiveInt = Field(512 * MIB, description="codes kept; least recently used leave first")
    ttl_s: PositiveFloat = Field(600.0, description="time to live of an entry since its last use")


class DecisionSettings(Section):
    """How the router weighs codes against the consumer's own prefill."""

    objective: Literal["offload", "latency"] = Field("offload", description="what counts as the cost of sending")
    max_ratio: PositiveFloat = Field(1.0, description="send while its cost is at most this many local prefills")
    min_sent_tokens: PositiveInt = Field(1, description="fewer tokens than this are never sent")
    max_local_prefill_tokens: NonNegativeInt = Field(
        0,
        description="the decode worker prefills by itself where it has to compute at most this many tokens of a prompt",
    )
    measurement_ttl_s: PositiveFloat = Field(60.0, description="measured rates are forgotten after this time")
    prefill_retry_s: PositiveFloat = Field(2.0, description="a prefill worker that failed is left alone for this time")


class WorkerConfig(Section):
    """One prefill or decode worker: its OpenAI endpoint and its control channel."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(description="port of the OpenAI endpoint")
    control_port: Port = Field(description="port of the control channel")


class RouterConfig(Section):
    """The OpenAI endpoint that clients talk to."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8000, description="port to listen on")
    prefill_timeout_s: PositiveFloat = Field(60.0, description="longest wait for the prefill worker")
    landing_timeout_s: NonNegativeFloat = Field(5.0, description="longest wait for codes after prefill has answered")
    request_timeout_s: PositiveFloat = Field(
        600.0, description="deadline of an answer's first byte, retries included; after it the longest silence"
    )
    max_retries: NonNegativeInt = Field(
        1, description="further workers that a request is tried on before its first byte"
    )
    max_request_bytes: PositiveInt = Field(4 * MIB, description="largest request body")
    policy: Literal["round_robin", "least_loaded", "prefix_affinity"] = Field(
        "prefix_affinity", description="which worker of a role gets a request, where there are several"
    )
    health_interval_s: PositiveFloat = Field(1.0, description="interval of the health checks of each worker")
    prefill_workers: tuple[WorkerConfig, ...] = Field((), description="prefill workers; empty: servers.prefill alone")
    decode_workers: tuple[WorkerConfig, ...] = Field((), description="decode workers; empty: servers.decode alone")
    cluster_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = Field(
        None,
        description="take workers that register themselves under this name (disagg_cluster over http) beside those listed "
        "above; servers.prefill and servers.decode then say the control ports only",
    )
    decision: DecisionSettings = DecisionSettings()


class ServersConfig(Section):
    """Addresses of the three processes."""

    router: RouterConfig = RouterConfig()
    prefill: WorkerConfig = WorkerConfig(port=8001, control_port=8101)
    decode: WorkerConfig = WorkerConfig(port=8002, control_port=8102)

    @model_validator(mode="after")
    def _ports_differ(self) -> ServersConfig:
        seen: dict[tuple[str, int], str] = {}
        for name, host, port in self._addresses():
            if (host, port) in seen:
                raise ValueError(f"{seen[host, port]} and {name} both use {host}:{port}; give each its own port")
            seen[host, port] = name
        return self

    def _addresses(self) -> Iterator[tuple[str, str, int]]:
        yield "router.port", self.router.host, self.router.port
        for role, worker in (("prefill", self.prefill), ("decode", self.decode)):
            yield f"{role}.port", worker.host, worker.port
            yield f"{role}.control_port", worker.host, worker.control_port


class ServedPair(Section):
    """What the servers of one model pair need to know; said by a pair file or by the disaggregated file's `scd` section."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="names artifact and model id")]
    producer: ModelConfig = Field(description="model A: runs on the prefill server and makes the KV cache")
    consumer: ModelConfig = Field(description="model B: runs on the decode server and answers")
    translator: Path | None = Field(None, description="artifact directory; default: translators/<name> in the cache")
    method: MethodConfig = MethodConfig()
    engine: EngineConfig = EngineConfig()
    transport: TransportConfig = TransportConfig()
    control: ControlConfig = ControlConfig()
    store: StoreConfig = StoreConfig()
    servers: ServersConfig = ServersConfig()

    @field_validator("producer", "consumer")
    @classmethod
    def _model_is_named(cls, value: ModelConfig) -> ModelConfig:
        if not value.model:
            raise ValueError("model is empty; give a directory, a .gguf file, package:<name> or recipe:<pair>")
        return value

    def translator_path(self) -> Path:
        """Directory of this pair's artifact."""
        return self.translator or cache_root() / "translators" / self.name


class PairConfig(ServedPair):
    """One model pair: what `distill` fits, `evaluate` measures and `serve` runs."""

    calibration: CorpusConfig = Field(description="text the maps are fitted on")
    heldout: HeldoutConfig = Field(description="text that layers are chosen and quality is measured on")

    def method_digest(self) -> str:
        """Digest of every setting that the artifact depends on (models, method, calibration, held-out text)."""
        # every artifact of policy rd can be guarded: whether a server does so is no matter of the fit
        return self._digest({"producer", "consumer", "method", "calibration", "heldout"}, without={"guard"})

    def moments_digest(self) -> str:
        """Digest of the settings that the moments of calibration depend on: not the rate, nor what is made of the moments."""
        return self._digest({"producer", "consumer", "method", "calibration"}, without=_RATE_SETTINGS)

    def _digest(self, sections: set[str], *, without: set[str]) -> str:
        text = self.model_dump_json(include=sections, exclude={"method": without})
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cache_root() -> Path:
    """Directory for converted models and artifacts: SCD_TRT_CACHE, or ~/.cache/scd_trt."""
    return Path(os.environ.get("SCD_TRT_CACHE") or Path.home() / ".cache" / "scd_trt").expanduser()


def load_pair(path: Path) -> PairConfig:
    """Read a pair file.

    Raises:
        ConfigError: no such file, not YAML, or any key or value wrong; one entry per mistake.
    """
    node, data = read_mapping(path, PairConfig, example="a pair file such as engine_configs/*/pair.yaml")
    return _resolve_paths(validated(path, node, data, PairConfig), path.parent)


def read_mapping(path: Path, model: type[BaseModel], *, example: str) -> tuple[yaml.Node | None, dict[str, Any]]:
    """The node tree (for line numbers) and the content of a YAML file that holds one mapping.

    Raises:
        ConfigError: no such file, not YAML, a key twice, or no mapping; the text names `example` or the model's keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of {example}") from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        # before content is made of it: that writes the keys of `<<` into the node
        twice = [f"{path}:{line}: {key}: key given twice; keep one" for line, key in duplicate_keys(node)]
        data = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping with the keys {', '.join(model.model_fields)}")
    if twice:
        raise ConfigError("\n".join(twice))
    return node, data


def validated(path: Path, node: yaml.Node | None, data: dict[str, Any], model: type[AnyModel]) -> AnyModel:
    """`data` as a model; `node` and `path` say where a mistake stands.

    Raises:
        ConfigError: one line per mistake.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(path, node, item, model) for item in error.errors())) from error


def resolved_path(path: Path | None, base: Path) -> Path | None:
    """A path of a file in `base`, made absolute."""
    return None if path is None else (base / path.expanduser()).resolve()


def resolved_model(section: ModelConfig, base: Path) -> ModelConfig:
    """A model section of a file in `base`, with absolute paths; references to packages and recipes stay."""
    reference = section.model
    if not reference.startswith(("package:", "recipe:")):
        reference = str((base / Path(reference).expanduser()).resolve())
    return section.model_copy(update={"model": reference, "adapter": resolved_path(section.adapter, base)})


def _resolve_paths(config: PairConfig, base: Path) -> PairConfig:
    def corpus_source(source: Source) -> Source:
        if not isinstance(source, str):
            return tuple(corpus_path(name) for name in source)
        return corpus_path(source)

    def corpus_path(source: str) -> str:
        return source if source.startswith("package:") else str((base / Path(source).expanduser()).resolve())

    def question_source(source: str) -> str:
        return corpus_path(source) if source.endswith(".jsonl") else source

    return config.model_copy(
        update={
            "producer": resolved_model(config.producer, base),
            "consumer": resolved_model(config.consumer, base),
            "translator": resolved_path(config.translator, base),
            "calibration": config.calibration.model_copy(update={"source": corpus_source(config.calibration.source)}),
            "heldout": config.heldout.model_copy(
                update={
                    "source": corpus_source(config.heldout.source),
                    "questions": question_source(config.heldout.questions),
                }
            ),
            "control": config.control.model_copy(
                update={"secret_file": resolved_path(config.control.secret_file, base)}
            ),
        }
    )


def reference() -> str:
    """The text of docs/configuration.md: every key of a pair file with its type, default and meaning."""
    lines = [
        "# Keys of a pair file",
        "",
        "Written by `python -m scd_trt.config`; relative paths are relative to the file.",
        "",
    ]
    lines += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | {default} | {kind} | {text} |" for key, default, kind, text in _reference_rows(PairConfig, "")
    ]
    return "\n".join(lines) + "\n"


def _reference_rows(
    section: type[BaseModel], prefix: str, shown: BaseModel | None = None
) -> Iterator[tuple[str, str, str, str]]:
    for name, field in section.model_fields.items():
        annotation: Any = field.annotation
        default = getattr(shown, name) if shown else field.default
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _reference_rows(annotation, f"{prefix}{name}.", None if field.is_required() else default)
            continue
        choices = [f"`{value}`" for value in literal_values(annotation)] + [_type_name(annotation)]
        required = field.is_required() and shown is None
        text = (field.description or "").replace("|", r"\|")
        yield f"{prefix}{name}", "required" if required else f"`{default}`", ", ".join(filter(None, choices)), text


def _type_name(annotation: Any) -> str:
    """Plain words for a field's type; empty where only literals are allowed."""
    words = {str: "text", int: "whole number", float: "number", Path: "path", bool: "yes or no"}
    branches = get_args(annotation) or (annotation,)
    names = [words.get(branch) or ("list" if get_origin(branch) is tuple else "") for branch in branches]
    bounded = [get_args(branch)[0] for branch in branches if get_args(branch) and get_origin(branch) is not tuple]
    names += [words[kind] for kind in bounded if kind in (int, float)]
    return " or ".join(sorted(filter(None, names)))


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "configuration.md").write_text(reference(), encoding="utf-8")
