"""Workers that register over HTTP as TensorRT-LLM's do: requests are written as its client writes them
(HttpClusterStorageClient, StorageItem.model_dump), the routing is real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from live_servers import WAIT_S
from routed_workers import TERMS, Served, ask, completion, decode_worker, pair_config, prefill_worker, prompt, routed
from tiny_models import save_tiny_tokenizer

from scd_trt.models import load_tokenizer
from scd_trt.serving.discovery import Cluster, _Item
from scd_trt.serving.metrics import ServerMetrics
from scd_trt.serving.openai_schema import ApiError
from scd_trt.serving.rotation import MAX_WORKERS, Rotation
from scd_trt.serving.router import create_router
from scd_trt.serving.routes import Route, RouteError

PREFIX = "/trtllm-disagg/fleet/workers/"
CONTEXT, GENERATION = 0, 1


def registration(name: str, role: int, port: int, *, host: str = "127.0.0.1", **extra: Any) -> str:
    return json.dumps({"worker_id": name, "host": host, "port": port, "role": role, **extra})


def item(name: str, value: str, *, ttl: float = 30, overwrite: bool = False) -> dict[str, Any]:
    return {"key": PREFIX + name, "value": value, "expire_time": -1, "ttl": ttl, "overwrite_if_exists": overwrite}


def result(response: httpx.Response) -> Any:
    assert (response.status_code == 200) == bool(response.json()["result"])
    return response.json()["result"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def workers(tokenizer: Any) -> Iterator[tuple[Served, Served]]:
    with prefill_worker(tokenizer) as prefill, decode_worker(tokenizer) as decode:
        yield prefill, decode


@contextmanager
def router(tokenizer: Any, prefill: Served, decode: Served) -> Iterator[httpx.Client]:
    """A router that knows the control ports and learns the rest."""
    config = pair_config([], [], router={"cluster_name": "fleet"})
    servers = config.servers.model_copy(
        update={
            role: getattr(config.servers, role).model_copy(update={"control_port": served.control_port})
            for role, served in (("prefill", prefill), ("decode", decode))
        }
    )
    with routed(Route(config.model_copy(update={"servers": servers}), TERMS, tokenizer)) as (client, _):
        yield client


def test_workers_that_register_are_used_until_they_leave(tokenizer: Any, workers: tuple[Served, Served]) -> None:
    prefill, decode = workers
    with router(tokenizer, prefill, decode) as client:
        nobody = client.post("/v1/completions", json=completion(prompt()))
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_decode_worker")
        assert client.get("/health").status_code == client.get("/ready").status_code == 503

        assert result(client.post("/set", json=item("gen", registration("gen", GENERATION, decode.port)))) is True
        assert ask(client, completion(prompt()))["usage"]["scd"]["fallback"] == "prefill_down"
        assert result(client.post("/set", json=item("ctx", registration("ctx", CONTEXT, prefill.port)))) is True
        assert ask(client, completion(prompt()))["usage"]["scd"]["fallback"] is None
        assert client.get("/ready").json() == {"ready": True, "workers": {"pair": {"decode": 1, "prefill": 1}}}

        assert client.delete("/delete", params={"key": PREFIX + "gen"}).status_code == 200
        assert client.post("/v1/completions", json=completion(prompt())).status_code == 503


def test_a_worker_without_heartbeat_leaves_and_registers_again(tokenizer: Any, workers: tuple[Served, Served]) -> None:
    prefill, decode = workers
    value = registration("gen", GENERATION, decode.port)
    with router(tokenizer, prefill, decode) as client:
        assert result(client.post("/set", json=item("gen", value, ttl=1)))
        begin_s = time.monotonic()
        while client.get("/ready").json()["workers"]["pair"]["decode"]:
            assert time.monotonic() < begin_s + WAIT_S, "it stayed"
            time.sleep(0.02)
        assert time.monotonic() - begin_s > 0.9
        # TensorRT-LLM's worker registers again when its heartbeat is refused
        assert result(client.get("/expire", params={"key": PREFIX + "gen", "ttl": "1"})) is False
        assert result(client.post("/set", json=item("gen", value, ttl=1)))
        assert result(client.get("/expire", params={"key": PREFIX + "gen", "ttl": "30"})) is True
        assert client.get("/ready").json()["workers"]["pair"]["decode"] == 1


def test_the_storage_answers_as_the_stock_one(tokenizer: Any, workers: tuple[Served, Served]) -> None:
    prefill, decode = workers
    value = registration("gen", GENERATION, decode.port, server_info={"later": "version"})
    with router(tokenizer, prefill, decode) as client:
        assert result(client.post("/set", json=item("gen", value))) is True
        assert result(client.post("/set", json=item("gen", value))) is False  # taken
        assert result(client.post("/set", json=item("gen", value, overwrite=True))) is True
        assert result(client.get("/get", params={"key": PREFIX + "gen"})) == value
        assert result(client.get("/get", params={"key": PREFIX + "nobody"})) is None
        found = client.get("/get_prefix", params={"key_prefix": PREFIX[:-1], "keys_only": 0})
        assert result(found) == {PREFIX + "gen": value}
        found = client.get("/get_prefix", params={"key_prefix": PREFIX[:-1], "keys_only": 1})
        assert result(found) == {PREFIX + "gen": ""}
        assert result(client.get("/get_prefix", params={"key_prefix": "/other"})) == {}
        assert result(client.delete("/delete", params={"key": PREFIX + "gen"})) is True
        assert result(client.delete("/delete", params={"key": PREFIX + "gen"})) is False


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense",
        b"[]",
        b"{}",
        json.dumps(item("a", "not a worker")).encode(),
        json.dumps(item("a", registration("a", 2, 8001))).encode(),  # an encoder of pictures
        json.dumps(item("a", registration("a", 0, 0))).encode(),
        json.dumps(item("a", registration("a", 0, 8001, host="evil/path"))).encode(),
        json.dumps(item("a", registration("a", 0, 8001, host=""))).encode(),
        json.dumps(item("a", registration("a", 0, 8001, host="a:b"))).encode(),
        json.dumps(item("a", registration("a", 0, 8001, host="999.1.1.1"))).encode(),
        json.dumps({**item("a", registration("a", 0, 8001)), "key": "/trtllm-disagg/other/workers/a"}).encode(),
        json.dumps({**item("a", registration("a", 0, 8001)), "key": PREFIX}).encode(),
        json.dumps({**item("a", registration("a", 0, 8001)), "ttl": 1e9}).encode(),
    ],
)
def test_what_is_no_worker_of_this_cluster_is_refused(
    tokenizer: Any, workers: tuple[Served, Served], body: bytes
) -> None:
    with router(tokenizer, *workers) as client:
        assert client.post("/set", content=body).status_code == 400
        assert client.post("/set", content=b"x" * (1 << 15)).status_code == 413
        assert client.get("/ready").json()["workers"]["pair"] == {"decode": 0, "prefill": 0}


def test_a_router_without_cluster_has_no_storage(tokenizer: Any, workers: tuple[Served, Served]) -> None:
    prefill, decode = workers
    with routed(Route(pair_config([prefill], [decode]), TERMS, tokenizer)) as (client, _):
        assert client.post("/set", json=item("a", registration("a", 0, 8001))).status_code == 404


def cluster() -> tuple[Cluster, Rotation, Rotation]:
    prefill, decode = (Rotation((), policy="round_robin", retry_s=1.0) for _ in range(2))
    return Cluster("fleet", prefill=prefill, decode=decode, control_ports=(8101, 8102)), prefill, decode


def test_control_ports_are_those_of_the_role() -> None:
    members, prefill, decode = cluster()
    for name, role, host in (("c", CONTEXT, "prefill-0"), ("g", GENERATION, "::1")):
        assert members.set(_Item(**item(name, registration(name, role, 8000, host=host))), now_s=0.0)
    assert [w.endpoint.control for w in prefill.workers + decode.workers] == ["prefill-0:8101", "[::1]:8102"]
    assert [w.url for w in prefill.workers + decode.workers] == ["http://prefill-0:8000", "http://[::1]:8000"]


def test_a_restarted_worker_that_registers_under_a_new_key_stays() -> None:
    members, prefill, _ = cluster()
    for name in ("old", "new"):
        assert members.set(_Item(**item(name, registration(name, CONTEXT, 8001), ttl=10)), now_s=0.0)
    members.expire(PREFIX + "new", 100, now_s=5.0)
    members.sweep(now_s=50.0)
    assert [worker.url for worker in prefill.workers] == ["http://127.0.0.1:8001"]
    members.sweep(now_s=105.0)
    assert prefill.workers == ()


def test_a_flood_of_registrations_is_bounded() -> None:
    members, prefill, decode = cluster()
    taken = [
        members.set(_Item(**item(str(port), registration("x", port % 2, port))), now_s=0.0)
        for port in range(1, 3 * MAX_WORKERS)
    ]
    assert sum(taken) == len(prefill.workers) + len(decode.workers) == MAX_WORKERS
    with pytest.raises(ApiError):
        members.set(_Item(**item("1", "{}", overwrite=True)), now_s=0.0)
    assert sum(len(rotating.workers) for rotating in (prefill, decode)) == MAX_WORKERS


def test_two_pairs_in_one_cluster_are_refused(tokenizer: Any) -> None:
    routes = [
        Route(pair_config([], [], name=name, router={"cluster_name": "fleet"}), TERMS, tokenizer) for name in "ab"
    ]
    with pytest.raises(RouteError, match="cluster_name 'fleet'"):
        create_router(routes, metrics=ServerMetrics())
