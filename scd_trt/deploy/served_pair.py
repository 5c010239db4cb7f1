"""One YAML for every process: what a server needs to know of its pair, from a pair file or from the disaggregated file.

Owns `load_served_pair`, which connectors (through `TLLM_SCD_CONFIG`), router and command line call. Both kinds of file say
the same things, the disaggregated one in stock places: the router's address is `hostname` and `port`, the workers' are
`context_servers.urls` (prefill) and `generation_servers.urls` (decode), everything else stands in `scd`.

To a worker, `servers` names itself and the first worker of the other role; where the file lists several of its own role, it
is told which one it is by `TLLM_SCD_WORKER`, the index of its url from 0. To the router, `servers.router` lists all of them.
Every worker must be listed: discovery (`disagg_cluster` over http) only adds workers to those.

Errors: `ConfigError`, with file, key and cure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from scd_trt.config import ConfigError, ServedPair, load_pair, read_mapping
from scd_trt.deploy.scd_section import CONFIG_VARIABLE, WORKER_VARIABLE, ScdSection
from scd_trt.deploy.stock_files import DisaggStockFile, is_pair_file, load_disagg
from scd_trt.deploy.stock_schema import DisaggFile

Role = Literal["prefill", "decode"]
_SERVERS_SECTION: dict[Role, str] = {"prefill": "context_servers", "decode": "generation_servers"}


def load_served_pair(path: Path, *, role: Role | None = None, worker: int | None = None) -> ServedPair:
    """Read a pair file, or the disaggregated file with its `scd` section.

    Args:
        role: of the worker that asks; None for the router.
        worker: which of the role's workers it is, from 0; needed where the file lists several.

    Raises:
        ConfigError: the file is neither, is wrong, or does not say which worker is meant.
    """
    _, data = read_mapping(path, DisaggFile, example="a pair file or the disaggregated file with an scd section")
    if is_pair_file(data):
        return load_pair(path)
    return served_pair(load_disagg(path), role=role, worker=worker)


def served_pair(file: DisaggStockFile, *, role: Role | None = None, worker: int | None = None) -> ServedPair:
    """The same of a disaggregated file that was read already."""
    section = file.options.scd
    if section is None:
        raise ConfigError(
            f"{file.path}: no scd section; {CONFIG_VARIABLE} and `scd-trt serve` take a pair file or the disaggregated file "
            "that `scd-trt config render` writes (disagg.yaml)"
        )
    workers = {each: _workers(file, section, each) for each in _SERVERS_SECTION}
    own = {} if role is None else {role: _own_index(file, role, worker, len(workers[role]))}
    data = _content(file.options, section, workers, own)
    try:
        return ServedPair.model_validate(data)
    except ValidationError as error:
        mistakes = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise ConfigError(f"{file.path}: the addresses of router and workers: {mistakes}") from error


def chosen_worker(environment: Mapping[str, str]) -> int | None:
    """The index that `TLLM_SCD_WORKER` gives, None where it is not set.

    Raises:
        ConfigError: it is no whole number.
    """
    given = environment.get(WORKER_VARIABLE)
    if not given:
        return None
    if not given.isascii() or not given.isdigit():
        raise ConfigError(f"{WORKER_VARIABLE} is {given!r}; it must be the index of this worker's url, from 0")
    return int(given)


def _workers(file: DisaggStockFile, section: ScdSection, role: Role) -> list[dict[str, Any]]:
    """The workers of a role as `WorkerConfig` has them: each one's url and control url, on one host."""
    key = _SERVERS_SECTION[role]
    urls, control_urls = getattr(file.options, key).urls, getattr(section.workers, role).control_urls
    at = f"{file.path}:{file.line_of(f'scd.workers.{role}')}"
    if not urls or len(control_urls) != len(urls):
        raise ConfigError(
            f"{at}: {len(urls)} {key}.urls and {len(control_urls)} scd.workers.{role}.control_urls; give each worker one of "
            "both (disagg_cluster can only add workers)"
        )
    workers = []
    for url, control_url in zip(urls, control_urls, strict=True):
        (host, port), (control_host, control_port) = _host_and_port(url), _host_and_port(control_url)
        if host != control_host:
            raise ConfigError(
                f"{at}: control url {control_url} and url {url} of one worker; name its host alike in both"
            )
        workers.append({"host": host, "port": port, "control_port": control_port})
    return workers


def _own_index(file: DisaggStockFile, role: Role, worker: int | None, num_workers: int) -> int:
    """Which worker of its role asks; it may keep silent where there is one only."""
    if (worker is None and num_workers > 1) or (worker or 0) >= num_workers:
        key = _SERVERS_SECTION[role]
        given = "not set" if worker is None else worker
        raise ConfigError(
            f"{file.path}:{file.line_of(f'{key}.urls')}: {key} has {num_workers} urls and {WORKER_VARIABLE} is {given}; give "
            f"the index of this worker's own, 0..{num_workers - 1}"
        )
    return worker or 0


def _content(
    options: DisaggFile, section: ScdSection, workers: Mapping[Role, list[dict[str, Any]]], own: Mapping[Role, int]
) -> dict[str, Any]:
    """A `ServedPair` as a mapping. Sections that both files have are handed on as they are."""
    shared = ("producer", "consumer", "translator", "transport", "control", "store")
    servers: dict[str, Any] = {role: found[own.get(role, 0)] for role, found in workers.items()}
    return {name: getattr(section, name) for name in shared} | {
        "name": section.pair,
        "method": {"guard": section.guard},
        "engine": {"tokens_per_block": section.tokens_per_block},
        "servers": servers | {"router": _router(options, section, workers)},
    }


def _router(options: DisaggFile, section: ScdSection, workers: Mapping[Role, list[dict[str, Any]]]) -> dict[str, Any]:
    """`servers.router`: the section's own, and what stock keys say."""
    router = section.router.model_dump(exclude_unset=True) | {"host": options.hostname, "port": options.port}
    for role, found in workers.items():
        # where workers register themselves, those that the file names must be listed, or they only tell the control ports
        if len(found) > 1 or options.disagg_cluster is not None:
            router[f"{role}_workers"] = found
    if "max_retries" in options.model_fields_set:
        router["max_retries"] = options.max_retries
    cluster = options.disagg_cluster
    if cluster is not None and cluster.cluster_name is not None and cluster.cluster_uri.startswith("http"):
        router["cluster_name"] = cluster.cluster_name
    conditional = options.conditional_disagg_config
    if conditional is not None and conditional.max_local_prefill_length is not None:
        decision = router.get("decision", {})
        router["decision"] = decision | {"max_local_prefill_tokens": conditional.max_local_prefill_length}
    return router


def _host_and_port(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition(":")
    return host.strip("[]"), int(port)
