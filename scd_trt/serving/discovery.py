"""Discovery of workers as TensorRT-LLM's `disagg_cluster` does it over HTTP: the orchestrator itself is the storage.

Workers started with `cluster_uri: http://ROUTER:PORT` register with the process at that address and keep themselves alive
there; read in TensorRT-LLM's `serve/cluster_storage.py` (HttpClusterStorageServer and -Client) and
`serve/disagg_auto_scaling.py` (DisaggClusterWorker), never run against it:

    POST   /set         {"key", "value", "ttl", "overwrite_if_exists", ...}    register; no if the key exists
    GET    /expire      ?key=&ttl=                                            heartbeat; no if the key is unknown
    DELETE /delete      ?key=                                                 deregister
    GET    /get  ?key=      GET /get_prefix  ?key_prefix=&keys_only=0|1

    key     /trtllm-disagg/<cluster name>/workers/<worker id>
    value   JSON {"worker_id", "host", "port", "role": 0 context (prefill) | 1 generation (decode)}
    answer  {"result": ...}, with status 200 where the result is true and not empty, else 400

A worker that did not refresh its key for `ttl` seconds is gone. The registration names no control channel: every worker of
a role listens on the control port that the pair's file gives that role.

The stock storage keeps whatever is sent; this one keeps workers of its clusters only, at most `MAX_WORKERS` each. It knows
no password, as that of TensorRT-LLM 1.2: who reaches the port can add a worker, so the network must keep others away
(docs/security.md). `etcd://` is not spoken.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scd_trt.serving.openai_http import json_response, read_body
from scd_trt.serving.openai_schema import ApiError
from scd_trt.serving.rotation import MAX_WORKERS, Endpoint, Rotation
from scd_trt.serving.routes import endpoint

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 14
MAX_TTL_S = 86_400
_HOST = r"^\[?[A-Za-z0-9._:-]{1,253}\]?$"


class _Registration(BaseModel):
    """What a worker says of itself; newer versions add fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: Annotated[str, Field(pattern=_HOST)]
    port: Annotated[int, Field(ge=1, le=65535)]
    role: Literal[0, 1]


class _Item(BaseModel):
    """Body of /set."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: Annotated[str, Field(max_length=1024)]
    value: Annotated[str, Field(max_length=8192)] = ""
    ttl: Annotated[float, Field(le=MAX_TTL_S)] | None = -1
    overwrite_if_exists: bool | None = False


@dataclass
class _Member:
    """One registered worker; `expires_s` is None where it registered without `ttl`."""

    value: str
    role: int
    endpoint: Endpoint
    expires_s: float | None


class Cluster:
    """The workers of one cluster name, and the rotations that they enter. Times are given by the caller.

    Args:
        control_ports: of prefill and of decode workers.
    """

    def __init__(self, name: str, *, prefill: Rotation, decode: Rotation, control_ports: tuple[int, int]) -> None:
        self.prefix = f"/trtllm-disagg/{name}/workers/"
        self._rotations = (prefill, decode)
        self._control_ports = control_ports
        self._members: dict[str, _Member] = {}

    def set(self, item: _Item, *, now_s: float) -> bool:
        """Register a worker; False where its key is taken, or there are too many.

        Raises:
            ApiError: status 400: the value is no registration, or names no host.
        """
        self.sweep(now_s=now_s)
        if item.key in self._members and not item.overwrite_if_exists:
            return False
        if item.key not in self._members and len(self._members) >= MAX_WORKERS:
            logger.warning("%s: more than %d workers; %s is not taken in", self.prefix, MAX_WORKERS, item.key)
            return False
        try:
            told = _Registration.model_validate_json(item.value)
        except ValidationError as error:
            raise ApiError(400, f"{item.key}: not a worker's registration: {error.errors()[0]['msg']}") from error
        where = endpoint(told.host.strip("[]"), told.port, self._control_ports[told.role])
        try:
            httpx.URL(where.url)
        except httpx.InvalidURL as error:
            raise ApiError(400, f"{item.key}: {told.host!r} is no host: {error}") from error
        self.delete(item.key)
        if not self._rotations[told.role].add(where):
            return False
        ttl_s = item.ttl or -1
        self._members[item.key] = _Member(item.value, told.role, where, now_s + ttl_s if ttl_s > 0 else None)
        logger.info("%s joined as %s worker", where.url, ("prefill", "decode")[told.role])
        return True

    def expire(self, key: str, ttl_s: float, *, now_s: float) -> bool:
        """Refresh a key; False where it is unknown, so that its worker registers again."""
        self.sweep(now_s=now_s)
        member = self._members.get(key)
        if member is None:
            return False
        member.expires_s = now_s + ttl_s
        return True

    def delete(self, key: str) -> bool:
        """Forget a key; its worker leaves, unless it has registered under another key too."""
        member = self._members.pop(key, None)
        if member is None:
            return False
        if not any(member.endpoint == other.endpoint for other in self._members.values()):
            self._rotations[member.role].remove(member.endpoint.url)
            logger.info("%s left", member.endpoint.url)
        return True

    def values(self, *, now_s: float) -> dict[str, str]:
        """All registrations by their keys."""
        self.sweep(now_s=now_s)
        return {key: member.value for key, member in self._members.items()}

    def sweep(self, *, now_s: float) -> None:
        """Forget the workers that did not refresh their keys in time."""
        for key in [k for k, m in self._members.items() if m.expires_s is not None and m.expires_s <= now_s]:
            self.delete(key)


def install_storage(app: FastAPI, clusters: list[Cluster]) -> None:
    """Serve the routes of the storage."""

    def cluster_of(key: str) -> Cluster:
        for cluster in clusters:
            if key.startswith(cluster.prefix) and len(key) > len(cluster.prefix):
                return cluster
        known = ", ".join(cluster.prefix for cluster in clusters)
        raise ApiError(400, f"key {key[:200]!r} is of no cluster here; known: {known}", code="unknown_cluster")

    def values() -> dict[str, str]:
        now_s = time.monotonic()
        return {key: value for cluster in clusters for key, value in cluster.values(now_s=now_s).items()}

    @app.post("/set")
    async def set_key(request: Request) -> Response:
        item = _parsed(await read_body(request, max_bytes=MAX_BODY_BYTES))
        return _answer(cluster_of(item.key).set(item, now_s=time.monotonic()))

    @app.get("/expire")
    async def expire(key: str, ttl: Annotated[float, Field(gt=0, le=MAX_TTL_S)]) -> Response:
        return _answer(cluster_of(key).expire(key, ttl, now_s=time.monotonic()))

    @app.delete("/delete")
    async def delete(key: str) -> Response:
        return _answer(cluster_of(key).delete(key))

    @app.get("/get")
    async def get(key: str) -> Response:
        return _answer(values().get(key))

    @app.get("/get_prefix")
    async def get_prefix(key_prefix: str, keys_only: bool = False) -> Response:
        found = {key: "" if keys_only else value for key, value in values().items() if key.startswith(key_prefix)}
        return _answer(found)


def _parsed(body: bytes) -> _Item:
    try:
        return _Item.model_validate_json(body)
    except ValidationError as error:
        raise ApiError(400, f"not an item of the storage: {error.errors()[0]['msg']}", code="invalid_value") from error


def _answer(result: Any) -> Response:
    return json_response({"result": result}, status=200 if result else 400)
