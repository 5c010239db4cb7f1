"""From a pair file and a profile to the three files that run the pair on TensorRT-LLM.

Owns `render` (pure: text of prefill.yaml, decode.yaml and disagg.yaml) and `write`. The same pair file, profile and place
give the same bytes: no dates, no host names of this machine, paths as the pair file spells them (relative ones are made
relative to the new place). Comments come from `requirements`: each says what breaks without the setting below it.

What the pair file sets wins over the profile, except what describes the embedded engine or belongs to a machine: lane,
batch sizes, memory. Sections that a pair file leaves at their defaults are left out, so that new defaults reach old files.

First line of each file: a mark with a digest of the rest. `write` replaces a file whose digest is right (rendered and not
touched since) and refuses all of them if one was edited or comes from elsewhere, unless `force`.

Errors: `RenderError` (an edited file in the way, a pair that cannot be deployed); `ConfigError` from the pair file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from scd_trt.config import ModelConfig, PairConfig, ScdError, Section, WorkerConfig, read_mapping, validated
from scd_trt.deploy import requirements
from scd_trt.deploy.commented_yaml import Entry, Value, comment_lines, dump
from scd_trt.deploy.profiles import Profile, profile_named
from scd_trt.deploy.requirements import UNSET, Role
from scd_trt.deploy.scd_section import CONFIG_VARIABLE, ROLE_VARIABLE

_MARK = re.compile(r"# scd-trt config render: (?P<what>.*); content (?P<digest>[0-9a-f]{16})")


class RenderError(ScdError):
    """The files cannot be made, or would destroy someone's edits."""


@dataclass(frozen=True)
class RenderedFile:
    """One file to be."""

    path: Path
    text: str


@dataclass(frozen=True)
class Written:
    """What happened to one file."""

    path: Path
    state: Literal["written", "replaced", "unchanged"]


@dataclass(frozen=True)
class _Place:
    """Turns paths of the pair file into paths of the rendered files."""

    pair: Path
    out: Path

    def spelled(self, path: Path | str) -> str:
        """A path, as the pair file spells it, as the new file should: relative ones from the new place."""
        text = str(path)
        if text.startswith(("package:", "recipe:", "~", "/")):
            return text
        return os.path.relpath(self.pair.resolve().parent / text, self.out.resolve())


def render(pair: Path, profile_name: str, out: Path | None = None) -> tuple[RenderedFile, ...]:
    """The three files of a pair for one kind of machine.

    Args:
        out: directory they are for; default: named by the profile, beside the pair file.

    Raises:
        ConfigError, ProfileError, RenderError.
    """
    node, data = read_mapping(pair, PairConfig, example="a pair file such as engine_configs/*/pair.yaml")
    # not load_pair: paths stay as they are spelled, so that no directory of this machine gets into the files
    config, profile = validated(pair, node, data, PairConfig), profile_named(profile_name)
    if config.transport.backend != "nixl":
        raise RenderError(f"{pair}: transport.backend is {config.transport.backend}; only nixl works between processes")
    for role, server in (("prefill", config.servers.prefill), ("decode", config.servers.decode)):
        if _is_unspecified(server.host):
            raise RenderError(
                f"{pair}: servers.{role}.host is {server.host}; give the name that other hosts reach it by"
            )
    place = _Place(pair, out or pair.parent / profile.name)
    contents = {
        "prefill.yaml": (_worker_heading(config, profile, "prefill", place), _worker(config, profile, "prefill")),
        "decode.yaml": (_worker_heading(config, profile, "decode", place), _worker(config, profile, "decode")),
        "disagg.yaml": (_disagg_heading(config, profile), _disagg(config, profile, place)),
    }
    what = f"pair {config.name}, profile {profile.name}"
    return tuple(
        RenderedFile(place.out / name, _marked(f"{name} of {what}", _document(heading, body)))
        for name, (heading, body) in contents.items()
    )


def write(files: Iterable[RenderedFile], *, force: bool = False) -> tuple[Written, ...]:
    """Put the files where they belong, all or none.

    Raises:
        RenderError: a file there was edited, or was not rendered; `force` replaces it.
    """
    planned = [(file, _state(file)) for file in files]
    edited = [str(file.path) for file, state in planned if state == "edited"]
    if edited and not force:
        raise RenderError(
            f"{', '.join(edited)}: edited since it was rendered, or not rendered at all; nothing was written. Render "
            "elsewhere with --out and compare, or replace it with --force"
        )
    return tuple(_put(file, state) for file, state in planned)


def is_untouched(text: str) -> bool:
    """Whether a text is what `render` made, to the byte."""
    first, _, rest = text.partition("\n")
    mark = _MARK.fullmatch(first)
    return mark is not None and mark["digest"] == _digest(rest)


def _state(file: RenderedFile) -> Literal["written", "replaced", "unchanged", "edited"]:
    if not file.path.exists():
        return "written"
    try:
        present = file.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RenderError(f"{file.path}: is in the way and cannot be read ({error}); remove it") from error
    if present == file.text:
        return "unchanged"
    return "replaced" if is_untouched(present) else "edited"


def _put(file: RenderedFile, state: Literal["written", "replaced", "unchanged", "edited"]) -> Written:
    if state == "unchanged":
        return Written(file.path, "unchanged")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text, encoding="utf-8")
    except OSError as error:
        raise RenderError(f"{file.path}: cannot be written ({error}); choose another --out") from error
    return Written(file.path, "written" if state == "written" else "replaced")


def _is_unspecified(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _document(heading: str, body: Sequence[Entry]) -> str:
    return "\n".join(comment_lines(heading)) + "\n\n" + dump(body)


def _marked(what: str, text: str) -> str:
    return f"# scd-trt config render: {what}; content {_digest(text)}\n{text}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _worker_heading(config: PairConfig, profile: Profile, role: Role, place: _Place) -> str:
    server = config.servers.prefill if role == "prefill" else config.servers.decode
    section, model = (config.producer, "A") if role == "prefill" else (config.consumer, "B")
    exports = [f"export {CONFIG_VARIABLE}=$PWD/disagg.yaml {ROLE_VARIABLE}={role}"]
    exports += [f"{command}  # {why}" for command, why in profile.environment]
    serve = f"trtllm-serve {_servable(section, place)} --host {server.host} --port {server.port}"
    return "\n".join(
        (
            f"Options of a {role} worker, which runs model {model}, on {profile.machine}.",
            "Sizes are starting points. Nothing in here has run on a GPU yet (docs/tensorrt-llm.md).",
            "",
            "Start:",
            *(f"  {line}" for line in exports),
            f"  {serve} --extra_llm_api_options {role}.yaml",
            *_how_to_get_the_model(section, place),
        )
    )


def _servable(section: ModelConfig, place: _Place) -> str:
    """What to give `trtllm-serve`."""
    return "MODEL" if _needs_conversion(section) else place.spelled(section.model)


def _how_to_get_the_model(section: ModelConfig, place: _Place) -> tuple[str, ...]:
    if not _needs_conversion(section):
        return ()
    return (
        "MODEL is the directory that this makes and prints:",
        f"  scd-trt config models {place.spelled(place.pair.name)}",
    )


def _needs_conversion(section: ModelConfig) -> bool:
    packed = section.model.startswith(("package:", "recipe:")) or section.model.endswith(".gguf")
    return packed or section.adapter is not None


def _worker(config: PairConfig, profile: Profile, role: Role) -> tuple[Entry, ...]:
    needed = requirements.of_role(role)
    settings = _sizes(config, profile, role)
    settings |= {item.key: item.value for item in needed if item.value is not UNSET}
    comments = {item.key: _reason(item) for item in needed if item.key in settings and item.key not in _REPEATED}
    return _nested(settings, _COMMENTS | comments)


_COMMENTS = {
    "tensor_parallel_size": "more than 1 needs a translator that was fitted per shard",
    "enable_chunked_prefill": "a long prompt runs in pieces of max_num_tokens: codes of one leave while the next computes",
    "cuda_graph_config": "graphs of batches that only decode; those with prompts run outside, where the hooks fire",
    "kv_cache_config.enable_block_reuse": "the prefill side's cache is exact: reused blocks are sent from the store or the "
    "pool. Patch layers are coded from what the pool does not hold: then false",
}
_REPEATED = frozenset({"kv_connector_config.connector_scheduler_class", "kv_connector_config.connector_worker_class"})
"""Said once, at the first of the three."""


def _reason(item: requirements.Requirement) -> str:
    verb = "SCD needs this" if item.level == "required" else "advised"
    return f"{verb}; otherwise {item.why}"


def _sizes(config: PairConfig, profile: Profile, role: Role) -> dict[str, Any]:
    """Settings in the order in which they are written; those that SCD needs are filled in later."""
    model = config.producer if role == "prefill" else config.consumer
    batch_size = profile.prefill_batch_size if role == "prefill" else profile.decode_batch_size
    settings = {
        "tensor_parallel_size": 1,
        "dtype": model.dtype,
        "max_batch_size": batch_size,
        "max_num_tokens": profile.max_num_tokens,
        "enable_chunked_prefill": True,
        "kv_cache_config.tokens_per_block": config.engine.tokens_per_block,
        "kv_cache_config.free_gpu_memory_fraction": profile.free_gpu_memory_fraction,
    }
    if role == "prefill":
        return settings | {"kv_cache_config.enable_block_reuse": not _needs_attention_input(config)}
    return settings | {"cuda_graph_config.enable_padding": True, "cuda_graph_config.max_batch_size": batch_size}


def _needs_attention_input(config: PairConfig) -> bool:
    """Patch layers are coded from what the pool does not hold, so a reused block could not be sent."""
    return config.method.policy == "paper" or "patch" in config.method.modes


def _disagg_heading(config: PairConfig, profile: Profile) -> str:
    return "\n".join(
        (
            f"The pair {config.name} on {profile.machine}: TensorRT-LLM's disaggregated file with an scd section.",
            f"{CONFIG_VARIABLE} names this file on every host; the router reads all of it, the workers' connectors the scd "
            "section. TensorRT-LLM's own orchestrator ignores the section but cannot run the pair: it sends requests that "
            "connectors refuse. Do not use it with disaggregated_mpi_worker, which hands unknown keys to the engine.",
            "Sizes are starting points. Nothing in here has run on a GPU yet (docs/tensorrt-llm.md).",
        )
    )


def _disagg(config: PairConfig, profile: Profile, place: _Place) -> tuple[Entry, ...]:
    servers, router = config.servers, config.servers.router
    prefills, decodes = router.prefill_workers or (servers.prefill,), router.decode_workers or (servers.decode,)
    settings: dict[str, Any] = {
        "hostname": servers.router.host,
        "port": servers.router.port,
        **_server_settings("context_servers", prefills),
        **_server_settings("generation_servers", decodes),
        "scd.pair": config.name,
    }
    settings |= _model_settings("scd.producer", config.producer, place)
    settings |= _model_settings("scd.consumer", config.consumer, place)
    if config.translator is not None:
        settings["scd.translator"] = place.spelled(config.translator)
    settings["scd.tokens_per_block"] = config.engine.tokens_per_block
    if "guard" in config.method.model_fields_set:
        settings["scd.guard"] = config.method.guard
    settings |= _transport_settings(config, profile)
    settings |= _given("scd.control", config.control, {"secret_file"})
    if config.control.secret_file is not None:
        settings["scd.control.secret_file"] = place.spelled(config.control.secret_file)
    settings |= {"scd.store.capacity_bytes": profile.store_bytes} | _given("scd.store", config.store)
    settings["scd.workers.prefill.control_urls"] = _control_urls(prefills)
    settings["scd.workers.decode.control_urls"] = _control_urls(decodes)
    if router.cluster_name is not None:
        raise RenderError(
            "servers.router.cluster_name: discovery is not rendered; add disagg_cluster to the files by hand"
        )
    settings |= _given("scd.router", router, {"host", "port", "prefill_workers", "decode_workers", "cluster_name"})
    return _nested(settings, _disagg_comments(profile))


def _server_settings(key: str, workers: Sequence[WorkerConfig]) -> dict[str, Any]:
    urls = tuple(_address(worker.host, worker.port) for worker in workers)
    return {f"{key}.num_instances": len(urls), f"{key}.urls": urls}


def _control_urls(workers: Sequence[WorkerConfig]) -> tuple[str, ...]:
    return tuple(_address(worker.host, worker.control_port) for worker in workers)


def _disagg_comments(profile: Profile) -> dict[str, str]:
    reasons = {item.key: item.why for item in requirements.DISAGG}
    return {
        "context_servers": "the prefill workers: one url each, host:port without scheme",
        "generation_servers": "the decode workers",
        "scd": "SCD's own section; keys are the pair file's (docs/configuration.md)",
        "scd.tokens_per_block": "as kv_cache_config.tokens_per_block of both workers",
        "scd.transport.lane": profile.lane_note,
        "scd.transport.device": f"name it; otherwise {reasons['scd.transport.device']}",
        "scd.transport.arena_bytes": "host memory of a decode worker that codes land in",
        "scd.transport.send_buffer_bytes": "host memory of a prefill worker that codes leave from",
        "scd.control.secret_file": f"SCD needs this; otherwise {reasons['scd.control.secret_file']}",
        "scd.store.capacity_bytes": "host memory for codes of prompts that may come again",
        "scd.workers": "control channels, in the order of the urls above",
    }


def _model_settings(prefix: str, section: ModelConfig, place: _Place) -> dict[str, Any]:
    settings: dict[str, Any] = {f"{prefix}.model": place.spelled(section.model)}
    if section.adapter is not None:
        settings[f"{prefix}.adapter"] = place.spelled(section.adapter)
    return settings | {f"{prefix}.dtype": section.dtype}


def _transport_settings(config: PairConfig, profile: Profile) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "scd.transport.backend": "nixl",
        "scd.transport.lane": profile.lane,
        "scd.transport.device": None,
        "scd.transport.arena_bytes": profile.arena_bytes,
        "scd.transport.send_buffer_bytes": profile.send_buffer_bytes,
        "scd.transport.window": profile.window,
    }
    return settings | _given("scd.transport", config.transport, {"lane", "backend"})


def _given(prefix: str, section: Section, without: Iterable[str] = ()) -> dict[str, Any]:
    """What the pair file itself sets in a section, flat."""
    settings: dict[str, Any] = {}
    for name in section.model_fields_set - set(without):
        value = getattr(section, name)
        settings |= _given(f"{prefix}.{name}", value) if isinstance(value, Section) else {f"{prefix}.{name}": value}
    order = list(type(section).model_fields)
    return dict(
        sorted(settings.items(), key=lambda item: order.index(item[0].removeprefix(f"{prefix}.").split(".")[0]))
    )


def _nested(settings: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "") -> tuple[Entry, ...]:
    """Dotted settings as nested entries, in order of first appearance."""
    keys = dict.fromkeys(key.removeprefix(prefix).split(".")[0] for key in settings if key.startswith(prefix))
    return tuple(
        Entry(key, _nested_value(settings, comments, prefix + key), comments.get(prefix + key, "")) for key in keys
    )


def _nested_value(settings: Mapping[str, Any], comments: Mapping[str, str], key: str) -> Value:
    value: Value = settings[key] if key in settings else _nested(settings, comments, f"{key}.")
    return value
