"""One YAML: what a server reads of its pair is the same from the pair file and from the disaggregated file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from scd_trt.config import ConfigError, PairConfig, ServedPair, load_pair
from scd_trt.deploy.profiles import PROFILES
from scd_trt.deploy.render import render, write
from scd_trt.deploy.scd_section import WORKER_VARIABLE
from scd_trt.deploy.served_pair import chosen_worker, load_served_pair

ROOT = Path(__file__).parents[1]
COMMITTED = sorted(ROOT.glob("engine_configs/*/*/disagg.yaml"))
TWO_DECODES = """\
hostname: 10.0.0.9
port: 8000
context_servers: {num_instances: 1, urls: ['p0:8001']}
generation_servers:
  num_instances: 2
  urls: ['d0:8002', '[fe80::1]:8002']
scd:
  pair: demo
  producer: {model: a}
  consumer: {model: b}
  guard: 'off'
  tokens_per_block: 64
  router: {request_timeout_s: 7}
  workers:
    prefill: {control_urls: ['p0:8101']}
    decode: {control_urls: ['d0:8102', '[fe80::1]:8102']}
"""


def served_fields(pair: ServedPair) -> dict[str, object]:
    """What serving reads of a pair."""
    data = pair.model_dump()
    machine = ("lane", "arena_bytes", "send_buffer_bytes", "window", "device")  # the profile decides these
    return {
        "name": pair.name,
        "producer": data["producer"],
        "consumer": data["consumer"],
        "translator": pair.translator_path(),
        "guard": pair.method.guard,
        "tokens_per_block": pair.engine.tokens_per_block,
        "transport": {key: value for key, value in data["transport"].items() if key not in machine},
        "control": data["control"],
        "servers": data["servers"],
    }


@pytest.mark.parametrize("disagg", COMMITTED, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_committed_files_say_what_their_pair_file_says(disagg: Path) -> None:
    read = load_served_pair(disagg)
    assert not isinstance(read, PairConfig)
    assert served_fields(read) == served_fields(load_pair(disagg.parents[1] / "pair.yaml"))


def test_there_is_a_committed_file_of_every_profile() -> None:
    assert {path.parent.name for path in COMMITTED} == set(PROFILES)


def test_a_pair_file_is_read_as_ever() -> None:
    path = ROOT / "engine_configs" / "smollm2-qa" / "pair.yaml"
    assert load_served_pair(path, role="decode") == load_pair(path)


def test_what_a_pair_file_changes_arrives(tmp_path: Path) -> None:
    data = yaml.safe_load((ROOT / "engine_configs" / "smollm2-qa" / "pair.yaml").read_text())
    data["producer"]["model"] = data["consumer"]["model"] = "model"
    del data["consumer"]["adapter"]
    data |= {"translator": "artifact", "control": {"secret_file": "secret", "lease_s": 12}, "store": {"ttl_s": 5}}
    data["method"]["guard"] = "off"
    workers = [{"host": f"d{index}", "port": 8002, "control_port": 8102} for index in (0, 1)]
    data["servers"]["decode"] = workers[0]
    data["servers"]["router"] |= {
        "host": "0.0.0.0",
        "landing_timeout_s": 1,
        "decision": {"min_sent_tokens": 99},
        "decode_workers": workers,
    }
    pair = tmp_path / "pair.yaml"
    pair.write_text(yaml.safe_dump(data))
    write(render(pair, "tcp"))
    read = load_served_pair(tmp_path / "tcp" / "disagg.yaml")
    assert served_fields(read) == served_fields(load_pair(pair))
    assert read.method.guard == "off"
    assert read.translator == tmp_path / "artifact"
    assert read.servers.router.decision.min_sent_tokens == 99
    assert read.store.ttl_s == 5


@pytest.fixture
def two_decodes(tmp_path: Path) -> Path:
    path = tmp_path / "disagg.yaml"
    path.write_text(TWO_DECODES)
    return path


def test_a_worker_is_told_which_of_several_it_is(two_decodes: Path) -> None:
    read = load_served_pair(two_decodes, role="decode", worker=1)
    assert (read.servers.decode.host, read.servers.decode.port, read.servers.decode.control_port) == (
        "fe80::1",
        8002,
        8102,
    )
    assert (read.servers.router.host, read.servers.router.request_timeout_s) == ("10.0.0.9", 7)
    assert (read.method.guard, read.engine.tokens_per_block) == ("off", 64)
    assert load_served_pair(two_decodes, role="prefill").servers.prefill.control_port == 8101
    assert chosen_worker({}) is None
    assert chosen_worker({WORKER_VARIABLE: "1"}) == 1


@pytest.mark.parametrize("worker", [None, 2])
def test_which_worker_is_never_guessed(two_decodes: Path, worker: int | None) -> None:
    shown = "not set" if worker is None else worker
    told = rf"disagg.yaml:6: generation_servers has 2 urls and TLLM_SCD_WORKER is {shown}; .*own, 0\.\.1"
    with pytest.raises(ConfigError, match=told):
        load_served_pair(two_decodes, role="decode", worker=worker)


def test_a_router_gets_every_worker_and_what_stock_keys_say(two_decodes: Path) -> None:
    router = load_served_pair(two_decodes).servers.router
    assert router.prefill_workers == ()
    assert [(worker.host, worker.control_port) for worker in router.decode_workers] == [("d0", 8102), ("fe80::1", 8102)]
    assert (router.max_retries, router.cluster_name, router.decision.max_local_prefill_tokens) == (1, None, 0)
    more = {
        "max_retries": 3,
        "conditional_disagg_config": {"max_local_prefill_length": 40},
        "disagg_cluster": {"cluster_uri": "http://r:8000", "cluster_name": "one"},
    }
    two_decodes.write_text(TWO_DECODES + yaml.safe_dump(more))
    router = load_served_pair(two_decodes).servers.router
    assert (router.max_retries, router.cluster_name, router.decision.max_local_prefill_tokens) == (3, "one", 40)
    more["disagg_cluster"] = {"cluster_uri": "etcd://r:2379", "cluster_name": "one"}
    two_decodes.write_text(TWO_DECODES + yaml.safe_dump(more))
    assert load_served_pair(two_decodes).servers.router.cluster_name is None


@pytest.mark.parametrize("given", ["-1", "one", "1.0", "²"])
def test_a_worker_index_is_a_whole_number(given: str) -> None:
    with pytest.raises(ConfigError, match="the index of this worker's url, from 0"):
        chosen_worker({WORKER_VARIABLE: given})


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("['p0:8101']", "[]", "disagg.yaml:15: 1 context_servers.urls and 0 scd.workers.prefill.control_urls"),
        ("['p0:8101']", "['p1:8101']", "control url p1:8101 and url p0:8001 of one worker"),
        ("'p0:8001'", "'p0:8101'", "prefill.port and prefill.control_port both use p0:8101"),
        ("'p0:8001'", "'p0:80010'", "less than or equal to 65535"),
        ("pair: demo", "pear: demo", "did you mean 'pair'"),
        ("request_timeout_s: 7", "host: x", "host belongs to hostname, in the stock part"),
        ("request_timeout_s: 7", "cluster_name: x", "cluster_name belongs to disagg_cluster.cluster_name"),
    ],
)
def test_what_cannot_be_served_is_refused(two_decodes: Path, old: str, new: str, told: str) -> None:
    text = TWO_DECODES.replace(old, new)
    assert text != TWO_DECODES
    two_decodes.write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_served_pair(two_decodes, role="decode", worker=0)


def test_a_stock_file_without_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prefill.yaml"
    path.write_text("max_batch_size: 4\n")
    with pytest.raises(ConfigError, match="no scd section; TLLM_SCD_CONFIG and `scd-trt serve` take"):
        load_served_pair(path)
    path.write_text(
        json.dumps({"disagg_cluster": {"cluster_uri": "etcd://a:1"}, "scd": yaml.safe_load(TWO_DECODES)["scd"]})
    )
    with pytest.raises(ConfigError, match="disagg_cluster can only add workers"):
        load_served_pair(path, role="prefill")
