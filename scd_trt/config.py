"""Every setting of `scd_trt`, as frozen pydantic models, and the YAML file that holds them.

Owns: the pair file (`PairConfig`), its sections, `load_pair`, and `ScdError`, the root of all errors that the user can
cure. Units are in the names (`_bytes`, `_s`, `_us`, `_tokens`). Relative paths in a file are relative to that file.
Loading never touches a model; it only says whether the file is well formed. A wrong file raises `ConfigError`, whose
text has one entry per mistake: file and line, key path, value found, what is allowed, and the nearest known key.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

Dtype = Literal["float32", "bfloat16", "float16"]
Port = Annotated[int, Field(ge=1, le=65535)]
Rank = PositiveInt | tuple[PositiveInt, ...]
MIB = 1 << 20


class ScdError(Exception):
    """A mistake that the user can cure; its text names the value, the place and the cure."""


class ConfigError(ScdError):
    """The configuration file is missing, is not YAML, or holds a wrong key or value."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """Where one model of the pair comes from."""

    model: str = Field(description="directory of a Hugging Face model, a .gguf file, or package:<name>")
    adapter: Path | None = Field(None, description="directory of a PEFT LoRA adapter to merge into the model")
    dtype: Dtype = Field("bfloat16", description="dtype of weights and KV pool when serving")


class MethodConfig(Section):
    """How the translator is fitted (METHOD, section 1)."""

    policy: Literal["rd", "paper", "exact"] = Field(
        "rd", description="rd: rate-distortion coded groups of layers; paper: Reuse and Patch; exact: KV sent as it is"
    )
    group_layers: PositiveInt = Field(5, description="rd: layers that are transformed and travel together")
    bytes_per_token: PositiveInt | None = Field(
        None, description="rd: size of codes; default without max_kl: a tenth of the cache's"
    )
    max_kl: PositiveFloat | None = Field(
        None, description="rd: loss allowed on held-out text, nats per token; the fewest bytes that keep to it are sent"
    )
    fisher_tokens: PositiveInt = Field(256, description="rd: calibration tokens scored to weigh errors by their effect")
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

    @model_validator(mode="after")
    def _one_limit(self) -> MethodConfig:
        if self.bytes_per_token is not None and self.max_kl is not None:
            raise ValueError("bytes_per_token and max_kl are two limits; give one of them")
        return self


class CorpusConfig(Section):
    """A sample of text: where from, and how much."""

    source: str = Field(description="package:narrativeqa|disflqa|xsum, a .txt or .jsonl file, or a directory")
    num_tokens: PositiveInt = Field(4096, description="tokens to read")
    sequence_tokens: PositiveInt = Field(512, description="tokens per sequence given to the models")


class HeldoutConfig(Section):
    """Held-out text on which layers are chosen and quality is measured; never the calibration documents."""

    source: str = Field(description="as in calibration; documents of the held-out split are used")
    num_sequences: PositiveInt = Field(6, description="sequences to measure on")
    prefix_tokens: PositiveInt = Field(512, description="tokens whose cache is replaced")
    scored_tokens: PositiveInt = Field(64, description="tokens scored after the prefix")


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
    measurement_ttl_s: PositiveFloat = Field(60.0, description="measured rates are forgotten after this time")
    prefill_retry_s: PositiveFloat = Field(2.0, description="a prefill worker that failed is left alone for this time")


class RouterConfig(Section):
    """The OpenAI endpoint that clients talk to."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8000, description="port to listen on")
    prefill_timeout_s: PositiveFloat = Field(60.0, description="longest wait for the prefill worker")
    landing_timeout_s: NonNegativeFloat = Field(5.0, description="longest wait for codes after prefill has answered")
    request_timeout_s: PositiveFloat = Field(600.0, description="longest wait for the decode worker")
    max_request_bytes: PositiveInt = Field(4 * MIB, description="largest request body")
    decision: DecisionSettings = DecisionSettings()


class WorkerConfig(Section):
    """One prefill or decode worker: its OpenAI endpoint and its control channel."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(description="port of the OpenAI endpoint")
    control_port: Port = Field(description="port of the control channel")


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


class PairConfig(Section):
    """One model pair: what `distill` fits, `evaluate` measures and `serve` runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="names artifact and model id")]
    producer: ModelConfig = Field(description="model A: runs on the prefill server and makes the KV cache")
    consumer: ModelConfig = Field(description="model B: runs on the decode server and answers")
    translator: Path | None = Field(None, description="artifact directory; default: translators/<name> in the cache")
    method: MethodConfig = MethodConfig()
    calibration: CorpusConfig = Field(description="text the maps are fitted on")
    heldout: HeldoutConfig = Field(description="text that layers are chosen and quality is measured on")
    engine: EngineConfig = EngineConfig()
    transport: TransportConfig = TransportConfig()
    control: ControlConfig = ControlConfig()
    store: StoreConfig = StoreConfig()
    servers: ServersConfig = ServersConfig()

    @field_validator("producer", "consumer")
    @classmethod
    def _model_is_named(cls, value: ModelConfig) -> ModelConfig:
        if not value.model:
            raise ValueError("model is empty; give a directory, a .gguf file or package:<name>")
        return value

    def translator_path(self) -> Path:
        """Directory of this pair's artifact."""
        return self.translator or cache_root() / "translators" / self.name

    def method_digest(self) -> str:
        """Digest of every setting that the artifact depends on (models, method, calibration, held-out text)."""
        text = self.model_dump_json(include={"producer", "consumer", "method", "calibration", "heldout"})
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cache_root() -> Path:
    """Directory for converted models and artifacts: SCD_TRT_CACHE, or ~/.cache/scd_trt."""
    return Path(os.environ.get("SCD_TRT_CACHE") or Path.home() / ".cache" / "scd_trt").expanduser()


def load_pair(path: Path) -> PairConfig:
    """Read a pair file.

    Raises:
        ConfigError: no such file, not YAML, or any key or value wrong; one entry per mistake.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); give the path of a pair file such as engine_configs/*/pair.yaml"
        ) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping with the keys {', '.join(PairConfig.model_fields)}")
    try:
        return _resolve_paths(PairConfig.model_validate(data), path.parent)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, node, item) for item in error.errors())) from error


def _resolve_paths(config: PairConfig, base: Path) -> PairConfig:
    def resolve(path: Path | None) -> Path | None:
        return None if path is None else (base / path.expanduser()).resolve()

    def model(section: ModelConfig) -> ModelConfig:
        reference = section.model
        if not reference.startswith("package:"):
            reference = str((base / Path(reference).expanduser()).resolve())
        return section.model_copy(update={"model": reference, "adapter": resolve(section.adapter)})

    def corpus_source(source: str) -> str:
        return source if source.startswith("package:") else str((base / Path(source).expanduser()).resolve())

    return config.model_copy(
        update={
            "producer": model(config.producer),
            "consumer": model(config.consumer),
            "translator": resolve(config.translator),
            "calibration": config.calibration.model_copy(update={"source": corpus_source(config.calibration.source)}),
            "heldout": config.heldout.model_copy(update={"source": corpus_source(config.heldout.source)}),
            "control": config.control.model_copy(update={"secret_file": resolve(config.control.secret_file)}),
        }
    )


def _explain(path: Path, node: yaml.Node | None, item: ErrorDetails) -> str:
    location = [part for part in item["loc"] if isinstance(part, int) or not _is_union_branch(str(part))]
    keys = ".".join(str(part) for part in location) or "(top level)"
    line = _line_of(node, location)
    section = _section_at(location[:-1])
    if item["type"] == "extra_forbidden":
        known = list(section.model_fields) if section else []
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{path}:{line}: {keys}: unknown key; {hint}known keys: {', '.join(known)}"
    if item["type"] == "missing":
        return f"{path}:{line}: {keys}: missing; {_description(section, location)}"
    message = item["msg"].removeprefix("Value error, ")
    near = difflib.get_close_matches(str(item["input"]), _literals(section, location), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{path}:{line}: {keys}: {message}; found {_short(item['input'])}{hint} ({_description(section, location)})"


def _is_union_branch(part: str) -> bool:
    """Pydantic adds the branch of a union to the location; it is no key of the file."""
    return "[" in part or part in {"int", "constrained-int"} or part.startswith(("literal", "function-"))


def _section_at(location: list[int | str]) -> type[BaseModel] | None:
    section: Any = PairConfig
    for part in location:
        field = getattr(section, "model_fields", {}).get(part)
        section = field.annotation if field else None
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _description(section: type[BaseModel] | None, location: list[int | str]) -> str:
    names = [part for part in location if isinstance(part, str)]
    field = section.model_fields.get(names[-1]) if section and names else None
    return (field.description or "see docs/configuration.md") if field else "see docs/configuration.md"


def _literals(section: type[BaseModel] | None, location: list[int | str]) -> list[str]:
    field = section.model_fields.get(str(location[-1])) if section and location else None
    return [str(value) for value in _literal_values(field.annotation)] if field else []


def _literal_values(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is Union or get_args(annotation):
        for branch in get_args(annotation):
            yield from _literal_values(branch)


def _line_of(node: yaml.Node | None, location: list[int | str]) -> int:
    line = 1
    for part in location:
        child = _child(node, part)
        if child is None:
            break
        line, node = child
    return line


def _child(node: yaml.Node | None, part: int | str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


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
        choices = [f"`{value}`" for value in _literal_values(annotation)] + [_type_name(annotation)]
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
