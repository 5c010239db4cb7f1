"""The `scd:` section of the disaggregated file: what router and connectors need to know, once, in one place.

Owns `ScdSection`. Its parts are the pair file's own sections (`config`), so a key means the same in both files; what a pair
file says about fitting and measuring (method, calibration, held-out text) is not needed to serve and is not in here, but
for `guard`, which servers may switch off. `served_pair` turns the section into what the processes read.

The file is named by the environment variable `TLLM_SCD_CONFIG` on every host: TensorRT-LLM hands only variables that begin
with TLLM or TRTLLM to its ranks. `TLLM_SCD_ROLE` is `prefill` or `decode`; `TLLM_SCD_WORKER`, where a role has several
urls, is the index of the worker's own, from 0. An unknown key in the section is a mistake.

Control channel: `workers.prefill.control_urls[i]` belongs to `context_servers.urls[i]`, `workers.decode.control_urls[i]` to
`generation_servers.urls[i]`. With `disagg_cluster` discovery the lists may be empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from scd_trt.config import (
    ControlConfig,
    ModelConfig,
    RouterConfig,
    Section,
    StoreConfig,
    TransportConfig,
    cache_root,
    resolved_model,
    resolved_path,
)

CONFIG_VARIABLE = "TLLM_SCD_CONFIG"
ROLE_VARIABLE = "TLLM_SCD_ROLE"
WORKER_VARIABLE = "TLLM_SCD_WORKER"

HostPort = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}$")]
"""host:port without scheme; IPv6 addresses in brackets."""


_STOCK_PLACES = {
    "host": "hostname",
    "port": "port",
    "prefill_workers": "context_servers.urls",
    "decode_workers": "generation_servers.urls",
    "cluster_name": "disagg_cluster.cluster_name",
}
"""Keys of the router that the disaggregated file has other places for."""


class RoleSection(Section):
    """The workers of one role."""

    control_urls: tuple[HostPort, ...] = Field((), description="host:port of each worker's control channel")


class WorkersSection(Section):
    """The control channels, in the order of the stock sections' urls."""

    prefill: RoleSection = RoleSection()
    decode: RoleSection = RoleSection()


class ScdSection(Section):
    """Everything of a pair that serving needs."""

    pair: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name of the pair")]
    producer: ModelConfig = Field(description="model A, as in the pair file: the prefill workers run it")
    consumer: ModelConfig = Field(description="model B, as in the pair file: the decode workers run it")
    translator: Path | None = Field(None, description="artifact directory; default: translators/<pair> in the cache")
    tokens_per_block: PositiveInt = Field(32, description="tokens of one KV block, the same on both sides")
    guard: Literal["off", "cut"] = Field("cut", description="as method.guard of the pair file")
    transport: TransportConfig = TransportConfig()
    control: ControlConfig = ControlConfig()
    store: StoreConfig = StoreConfig()
    workers: WorkersSection = WorkersSection()
    allow_keys: tuple[str, ...] = Field((), description="dotted stock keys of this file that only look like typos")
    router: RouterConfig = Field(RouterConfig(), description="our router; address and port are hostname and port above")

    @field_validator("router")
    @classmethod
    def _nothing_that_stock_keys_say(cls, value: RouterConfig) -> RouterConfig:
        if given := _STOCK_PLACES.keys() & value.model_fields_set:
            told = "; ".join(f"{key} belongs to {_STOCK_PLACES[key]}" for key in sorted(given))
            raise ValueError(f"{told}, in the stock part of the file")
        return value

    def translator_path(self) -> Path:
        """Directory of the pair's artifact."""
        return self.translator or cache_root() / "translators" / self.pair


def resolve_paths(section: ScdSection, base: Path) -> ScdSection:
    """The section with every relative path made absolute from `base`."""

    secret_file = resolved_path(section.control.secret_file, base)
    return section.model_copy(
        update={
            "producer": resolved_model(section.producer, base),
            "consumer": resolved_model(section.consumer, base),
            "translator": resolved_path(section.translator, base),
            "control": section.control.model_copy(update={"secret_file": secret_file}),
        }
    )
