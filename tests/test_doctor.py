"""The doctor: each check on machines that are made up, and real bytes between real processes of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from live_servers import free_port
from tiny_models import save_perturbed_copy, save_tiny_model
from tiny_translators import group_translator, random_translator

from scd_trt import translator as translators
from scd_trt.config import ControlConfig, ServedPair, TransportConfig
from scd_trt.deploy.render import render, write
from scd_trt.deploy.scd_section import CONFIG_VARIABLE, ROLE_VARIABLE
from scd_trt.deploy.served_pair import load_served_pair
from scd_trt.doctor import deployment, ends, findings, link, machine, software, ucx_log
from scd_trt.doctor.ends import NUM_PIECES, Dialled, EndOptions
from scd_trt.doctor.examination import options_for, peer_address
from scd_trt.doctor.findings import Finding
from scd_trt.doctor.host import Host
from scd_trt.model_spec import ModelSpec
from scd_trt.transfer.session import Producer, open_transport
from scd_trt.transfer.transport import Buffer
from scd_trt.transfer.wire import CodeLayout
from scd_trt.translator import RawLayer

ROOT = Path(__file__).parents[1]
GIB = 1 << 30


class Machine:
    """Directories of a machine's kernel, filled as a test says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")  # 64 and 32 GiB
        self.file("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
        self.nic("lo", "unknown")
        self.nic("eth0", "up", speed="25000")

    def file(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def nic(self, name: str, state: str, *, speed: str = "-1") -> None:
        self.file(f"sys/net/{name}/operstate", state)
        self.file(f"sys/net/{name}/speed", speed)

    def rdma(self, name: str, state: str = "4: ACTIVE") -> None:
        self.file(f"sys/infiniband/{name}/ports/1/state", state)
        self.file(f"sys/infiniband/{name}/ports/1/rate", "400 Gb/sec (4X NDR)")

    def host(self, **fields: Any) -> Host:
        given: dict[str, Any] = {
            "environment": {},
            "memlock_bytes": lambda: None,
            "free_disk_bytes": lambda path: 100 * GIB,
            "clock_state": lambda: "synchronised",
            "addresses_of": lambda name: ("10.0.0.1",),
            "can_listen": lambda address, port: True,
            "installed_version": {"nixl-cu12": "1.5.1"}.get,
        }
        places = {"sys_class": "sys", "proc": "proc", "cgroup": "cgroup", "shared_memory": "shm"}
        given |= {name: self.root / place for name, place in places.items()}
        return Host(**(given | fields))


@pytest.fixture
def made(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def served(**sections: Any) -> ServedPair:
    data = {"name": "tiny", "producer": {"model": "a"}, "consumer": {"model": "b"}}
    return ServedPair.model_validate(data | sections)


def level_and_text(found: Finding) -> str:
    assert found.level in ("ok", "skip") or found.cure, "a finding that is wrong says what to do"
    return f"{found.level} {found.text}"


# ---- network device, pinned memory, ports


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ({}, "warn transport.device is not set and there are 2: eth0, mlx5_0"),
        ({"device": "eth0"}, "ok eth0 up, 25 Gbit/s"),
        ({"device": "mlx5_0:1"}, "ok mlx5_0:1 4: ACTIVE, 400 Gb/sec (4X NDR)"),
        ({"device": "eth0,mlx5_7:1"}, "fail transport.device mlx5_7:1: not here"),
        ({"device": "eth1"}, "fail transport.device: eth1 is down"),
        ({"lane": "shm"}, "ok lane shm uses no network device"),
    ],
)
def test_device(made: Machine, transport: dict[str, Any], expected: str) -> None:
    made.rdma("mlx5_0")
    made.nic("eth1", "down")
    assert level_and_text(machine.check_device(TransportConfig(**transport), made.host())) == expected


def test_device_needs_no_name_where_there_is_one(made: Machine) -> None:
    assert level_and_text(machine.check_device(TransportConfig(), made.host())) == "ok UCX has no choice: eth0"


@pytest.mark.parametrize(
    ("lane", "has_rdma", "limit", "expected"),
    [
        ("auto", True, 8 << 20, "fail 8 MiB, and RDMA has to pin 256 MiB"),
        ("auto", True, None, "ok unlimited; RDMA pins 256 MiB"),
        ("auto", True, GIB, "ok 1 GiB; RDMA pins 256 MiB"),
        ("auto", False, 8 << 20, "ok 8 MiB; nothing is pinned without RDMA"),
        ("tcp", True, 8 << 20, "ok 8 MiB; nothing is pinned without RDMA"),
    ],
)
def test_memlock(made: Machine, lane: str, has_rdma: bool, limit: int | None, expected: str) -> None:
    if has_rdma:
        made.rdma("mlx5_0")
    host = made.host(memlock_bytes=lambda: limit)
    assert level_and_text(machine.check_memlock(TransportConfig(lane=lane), host)) == expected


@pytest.mark.parametrize(
    ("given", "is_local", "expected"),
    [
        (None, True, "ok UCX_TCP_PORT_RANGE is not set; not needed inside one machine"),
        (None, False, "warn UCX_TCP_PORT_RANGE is not set: UCX's tcp takes any port"),
        ("20000-20099", False, "ok 20000-20099, 100 of 100 free"),
        ("20000-20003", False, "warn 20000-20003 holds 4 ports"),
        ("32700-32799", False, "warn 32700-32799, 100 of 100 free; overlaps the kernel's 32768-60999"),
        ("20099-20000", False, "fail UCX_TCP_PORT_RANGE=20099-20000 is no range"),
        ("20000", False, "fail UCX_TCP_PORT_RANGE=20000 is no range"),
        ("65000-70000", False, "fail UCX_TCP_PORT_RANGE=65000-70000 is no range"),
    ],
)
def test_port_range(made: Machine, given: str | None, is_local: bool, expected: str) -> None:
    host = made.host(environment={"UCX_TCP_PORT_RANGE": given} if given else {})
    assert level_and_text(machine.check_port_range(TransportConfig(), host, is_local=is_local)) == expected


def test_port_range_that_others_use(made: Machine) -> None:
    host = made.host(environment={"UCX_TCP_PORT_RANGE": "20000-20019"}, can_listen=lambda address, port: port >= 20010)
    found = machine.check_port_range(TransportConfig(), host, is_local=False)
    assert level_and_text(found) == "fail 20000-20019, 10 of 20 free"


# ---- names, memory, disk, clock


def test_names_of_all_servers(made: Machine) -> None:
    workers = [{"host": name, "port": 8002, "control_port": 8102} for name in ("d0", "d1")]
    pair = served(
        servers={"router": {"decode_workers": workers}, "prefill": {"host": "p0", "port": 1, "control_port": 2}}
    )
    known = {"p0": ("10.0.0.7",), "d0": ("10.0.0.8",), "127.0.0.1": ("127.0.0.1",)}
    found = list(machine.check_names(pair, made.host(addresses_of=lambda name: known.get(name, ()))))
    assert [level_and_text(item) for item in found] == [
        "ok p0 is 10.0.0.7",
        "ok d0 is 10.0.0.8",
        "fail d1 stands for no address here",
    ]


@pytest.mark.parametrize(
    ("capacity", "limit", "expected"),
    [(16 * GIB, "max", "ok"), (48 * GIB, "max", "warn"), (80 * GIB, "max", "fail"), (16 * GIB, str(8 * GIB), "fail")],
)
def test_memory(made: Machine, capacity: int, limit: str, expected: str) -> None:
    made.file("cgroup/memory.max", limit)
    assert machine.check_memory(served(store={"capacity_bytes": capacity}), made.host()).level == expected


def test_disk_and_shared_memory(made: Machine) -> None:
    host = made.host(free_disk_bytes=lambda path: (64 << 20) if path.name == "shm" else 100 * GIB)
    assert [item.level for item in machine.check_disk(served(), host)] == ["ok"]
    disk, shared = machine.check_disk(served(transport={"lane": "shm"}), host)
    assert (disk.level, shared.level) == ("ok", "fail")
    (full,) = machine.check_disk(None, made.host(free_disk_bytes=lambda path: 1))
    assert full.level == "warn"


@pytest.mark.parametrize(
    ("state", "level"), [("synchronised", "ok"), ("not synchronised", "warn"), ("unknown", "skip")]
)
def test_clock(made: Machine, state: str, level: str) -> None:
    assert machine.check_clock(made.host(clock_state=lambda: state)).level == level


def test_the_real_machine_can_be_read() -> None:
    for finding in machine.examine_machine(served(), Host()):
        assert level_and_text(finding)


# ---- software


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, "fail not installed"),
        ({"nixl-cu12": "1.5.1"}, "ok nixl-cu12 1.5.1"),
        ({"nixl-cu12": "1.3.0"}, "fail nixl-cu12 1.3.0"),
        ({"nixl-cu12": "1.5.1", "nixl": "1.4.1"}, "warn nixl-cu12 1.5.1, nixl 1.4.1; nixl-cu12 is used"),
    ],
)
def test_nixl(made: Machine, versions: dict[str, str], expected: str) -> None:
    assert level_and_text(software.check_nixl(made.host(installed_version=versions.get))) == expected


@pytest.mark.parametrize(
    ("version", "level"),
    [
        (None, "skip"),
        ("1.2.1", "ok"),
        ("1.3.0rc11", "warn"),
        ("1.4.0", "warn"),
        ("1.1.0", "fail"),
        ("0.17.0.post1", "fail"),
    ],
)
def test_tensorrt_llm(made: Machine, version: str | None, level: str) -> None:
    assert software.check_tensorrt_llm(made.host(installed_version=lambda name: version)).level == level


def test_variables_that_contradict_the_configuration(made: Machine) -> None:
    host = made.host(environment={"UCX_TLS": "rc"})
    assert software.check_variables(TransportConfig(), host).text == "UCX variables set here: UCX_TLS"
    assert software.check_variables(TransportConfig(lane="tcp"), host).level == "fail"


def test_what_the_shell_selects(made: Machine, tmp_path: Path) -> None:
    file = tmp_path / "disagg.yaml"

    def level(**environment: str) -> str:
        return software.check_selected(file, made.host(environment=environment)).level

    assert level() == "skip"
    assert level(**{CONFIG_VARIABLE: str(tmp_path / "other.yaml")}) == "warn"
    assert level(**{CONFIG_VARIABLE: str(file)}) == "fail"
    assert level(**{CONFIG_VARIABLE: str(file), ROLE_VARIABLE: "decode"}) == "ok"


# ---- files, secret, artifact, models


def test_settings_beside_the_disaggregated_file(tmp_path: Path) -> None:
    write(render(ROOT / "engine_configs" / "smollm2-qa" / "pair.yaml", "tcp", tmp_path))
    (skipped,) = deployment.check_settings(tmp_path / "pair.yaml")
    assert skipped.level == "skip"
    assert [item.level for item in deployment.check_settings(tmp_path / "disagg.yaml")] == ["ok"] * 3
    decode = tmp_path / "decode.yaml"
    decode.write_text(decode.read_text().replace("enable_partial_reuse: false", "enable_partial_reuse: true"))
    prefill, wrong, disagg = deployment.check_settings(tmp_path / "disagg.yaml")
    assert (prefill.level, wrong.level, disagg.level) == ("ok", "fail", "ok")
    assert "kv_cache_config.enable_partial_reuse is true, needs false" in wrong.text
    assert str(decode) in wrong.cure


def test_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    pair = served(control={"secret_file": path})
    assert deployment.check_secret(served()).level == "skip"
    assert deployment.check_secret(pair).level == "fail"
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    assert deployment.check_secret(pair).level == "warn"
    path.chmod(0o600)
    assert deployment.check_secret(pair).level == "ok"


def test_artifact_and_models(tmp_path: Path) -> None:
    producer = save_tiny_model(tmp_path / "a")
    consumer = save_perturbed_copy(producer, tmp_path / "b")
    models = {"producer": {"model": str(producer)}, "consumer": {"model": str(consumer)}}
    artifact = tmp_path / "artifact"
    pair = served(translator=artifact, method={"guard": "off"}, **models)
    file = tmp_path / "pair.yaml"
    assert [item.level for item in deployment.examine_deployment(pair, file)] == ["skip", "skip", "fail"]
    specs = {"producer": ModelSpec.from_directory(producer), "consumer": ModelSpec.from_directory(consumer)}
    fitted = random_translator(RawLayer(), RawLayer(), RawLayer(), **specs)
    translators.save(fitted, artifact)

    def levels(pair: ServedPair, **options: Any) -> list[str]:
        return [item.level for item in deployment.examine_deployment(pair, file, **options)][2:]

    assert levels(pair) == ["ok", "ok", "ok"]
    assert levels(pair, reads_models=False) == ["ok", "skip", "skip"]
    swapped = pair.model_copy(update={"producer": pair.consumer})
    assert levels(swapped) == ["ok", "fail", "ok"]
    absent = pair.model_copy(update={"consumer": served().consumer})
    assert levels(absent) == ["ok", "ok", "skip"]
    assert levels(absent, role="decode") == ["ok", "ok", "fail"]
    tensors = artifact / translators.TENSORS_FILE
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert levels(pair) == ["fail"]


def test_an_artifact_without_limits_cannot_be_guarded() -> None:
    assert deployment.check_artifact(served(method={"guard": "off"}), group_translator()).level == "ok"
    assert "guard" in level_and_text(deployment.check_artifact(served(), group_translator()))


# ---- what UCX says

UCX_LOG = """\
[1796076069.698445] [vm:19623:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /nowhere/x/../libucp.so.0, git)
[1796076069.703375] [vm:19623:0]      ucp_worker.c:1997 UCX  INFO    near self cfg#0 rma_am(tcp/lo)  am(tcp/lo tcp/eth0)
[1796076069.707301] [vm:19623:0]   +--------+-------------+-----------------------------------+
[1796076069.707301] [vm:19623:0]   | near self cfg#0                                          |
[1796076069.707301] [vm:19623:0]   | remote memory write by ucp_put* from host memory to host |
[1796076069.707301] [vm:19623:0]   +--------+-------------+-----------------------------------+
[1796076069.707301] [vm:19623:0]   | Range  | Description |              Config               |
[1796076069.707301] [vm:19623:0]   +--------+-------------+-----------------------------------+
[1796076069.707301] [vm:19623:0]   | 0..inf | zero-copy   | self/memory                       |
[1796076069.707301] [vm:19623:0]   +--------+-------------+-----------------------------------+
[1796076071.743848] [vm:19635:0]   +--------+-------------+-----------------------------------+
[1796076071.743848] [vm:19635:0]   | near inter-node cfg#1                                    |
[1796076071.743848] [vm:19635:0]   | remote memory write by ucp_put* from host memory to host |
[1796076071.743848] [vm:19635:0]   +--------+-------------+-----------------------------------+
[1796076071.743848] [vm:19635:0]   | Range  | Description |              Config               |
[1796076071.743848] [vm:19635:0]   +--------+-------------+-----------------------------------+
[1796076071.743848] [vm:19635:0]   | 0..99  | short       | rc_mlx5/mlx5_0:1                  |
[1796076071.743848] [vm:19635:0]   | 99..inf| zero-copy   | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
[1796076071.743848] [vm:19635:0]   +--------+-------------+-----------------------------------+
[1796076071.745595] [vm:19635:0]   | near inter-node cfg#1                           |
[1796076071.745595] [vm:19635:0]   | active message by ucp_am_send* from host memory |
[1796076071.745595] [vm:19635:0]   |   Range    |    Description     |    Config     |
[1796076071.745595] [vm:19635:0]   | 16516..inf | multi-frag copy-in | tcp/eth9      |
"""


def test_only_writes_between_processes_count() -> None:
    said = ucx_log.parse(UCX_LOG)
    assert said.lanes == ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")
    assert (said.version, said.library) == ("1.23.0", "/nowhere/libucp.so.0")


@pytest.mark.parametrize(
    "text", ["", "UCX INFO nothing of the kind\n", UCX_LOG.replace("|", "!").replace("Version", "v")]
)
def test_a_log_of_another_form_says_nothing(text: str) -> None:
    assert ucx_log.parse(text) == ucx_log.UcxLog()


def test_a_log_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert ucx_log.read_log(tmp_path / "none") == ucx_log.UcxLog()


# ---- what a measurement means

GOOD = Dialled(
    role="doctor",
    transport="nixl_cu12 1.5.1",
    software=f"scd-trt {software.__version__}, ucx 1.23.0",
    fingerprint="f",
    round_trip_ms=0.5,
    clock_offset_ms=-2.0,
    sent_bytes=1 << 30,
    seconds=1.0,
    num_wrong_pieces=0,
    lanes=("rc_mlx5/mlx5_0:1",),
)


@pytest.mark.parametrize(
    ("changes", "transport", "expected"),
    [
        ({}, {}, "ok 1024 MiB at 8.59 Gbit/s over rc_mlx5/mlx5_0:1"),
        ({}, {"device": "mlx5_0:1"}, "ok "),
        ({}, {"device": "mlx5_3:1"}, "transport.device is mlx5_3:1"),
        ({}, {"lane": "tcp"}, "transport.lane is tcp"),
        ({}, {"lane": "shm"}, "transport.lane is shm"),
        ({"lanes": ("cma/memory",)}, {"lane": "shm"}, "ok "),
        ({"lanes": ("tcp/eth0",)}, {}, "fail 1024 MiB at 8.59 Gbit/s over tcp/eth0: there is RDMA here (mlx5_0)"),
        ({"lanes": ("tcp/eth0",)}, {"lane": "tcp", "device": "eth0"}, "ok "),
        ({"lanes": ()}, {}, "warn 1024 MiB at 8.59 Gbit/s; which transport was chosen could not be read"),
        ({"num_wrong_pieces": 3}, {}, f"fail 3 of {NUM_PIECES} pieces did not arrive"),
        ({"error": "8 writes of 4 bytes not done in 60 s"}, {}, "fail 8 writes"),
    ],
)
def test_lane(made: Machine, changes: dict[str, Any], transport: dict[str, Any], expected: str) -> None:
    made.rdma("mlx5_0")
    found = link.judge_lane(replace(GOOD, **changes), TransportConfig(**transport), made.host(), name="lane")
    assert expected in level_and_text(found)
    assert (found.level == "ok") == expected.startswith("ok")


def levels_of_peer(made: Machine, dialled: Dialled, **options: Any) -> dict[str, str]:
    found = link.judge_peer(dialled, EndOptions(**({"address": "p:1", "fingerprint": "f"} | options)), made.host())
    return {item.check: level_and_text(item).split()[0] for item in found}


def test_a_good_peer(made: Machine) -> None:
    assert levels_of_peer(made, GOOD) == {
        "peer": "ok",
        "peer secret": "skip",
        "peer artifact": "ok",
        "peer clock": "ok",
        "peer lane": "ok",
    }


def test_what_is_wrong_with_a_peer(made: Machine) -> None:
    assert levels_of_peer(made, Dialled(error="refused")) == {"peer": "fail"}
    assert levels_of_peer(made, replace(GOOD, fingerprint="g"))["peer artifact"] == "fail"
    assert levels_of_peer(made, replace(GOOD, fingerprint="none"))["peer artifact"] == "skip"
    assert levels_of_peer(made, replace(GOOD, clock_offset_ms=5000.0))["peer clock"] == "warn"
    assert levels_of_peer(made, replace(GOOD, software="scd-trt 0.0.9, ucx 1"))["peer version"] == "warn"
    assert levels_of_peer(made, replace(GOOD, error="broken"))["peer lane"] == "fail"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "p0:8101"),
        ("10.0.0.5", "10.0.0.5:8101"),
        ("10.0.0.5:9", "10.0.0.5:9"),
        ("fe80::1", "[fe80::1]:8101"),
        ("[fe80::1]", "[fe80::1]:8101"),
        ("[fe80::1]:9", "[fe80::1]:9"),
    ],
)
def test_address_of_a_peer(given: str | None, expected: str) -> None:
    pair = served(servers={"prefill": {"host": "p0", "port": 8001, "control_port": 8101}})
    assert peer_address(pair, given) == expected


def test_findings_for_people_and_machines() -> None:
    wrong = Finding("a", "fail", "b", "c\nd", (("e", 1),))
    assert wrong.lines() == ["FAIL  a: b", "      -> c", "      -> d"]
    assert wrong.as_json()["details"] == {"e": 1}
    assert not findings.is_fit([wrong])
    assert findings.is_fit([replace(wrong, level="warn")])


def test_every_piece_is_compared() -> None:
    arena = Buffer(ends.ARENA_BYTES)
    arena.array[:] = np.arange(ends.ARENA_BYTES, dtype=np.uint32).view(np.uint8)[: ends.ARENA_BYTES]
    told = [ends.notification(arena, piece) for piece in range(NUM_PIECES)]
    assert ends.num_wrong_pieces(arena, told) == 0
    assert ends.num_wrong_pieces(arena, [*told[1:], b"short", b"SCDX" + told[0][4:]]) == 1
    arena.array[ends.PIECE_BYTES * 3] ^= 1
    assert ends.num_wrong_pieces(arena, told) == 1


# ---- real processes


def test_bytes_really_move_on_this_machine(made: Machine) -> None:
    host = made.host(environment=dict(os.environ))
    ucx, lane = link.examine_lane(served(transport={"lane": "tcp"}), host)
    assert ucx.check == "ucx"
    assert lane.level == "ok", lane
    assert "over tcp/" in lane.text


def test_an_end_that_cannot_run_is_reported(made: Machine) -> None:
    host = made.host(environment=os.environ | {"UCX_TLS": "rc"})
    (lane,) = link.examine_lane(served(transport={"lane": "tcp"}), host)
    assert lane.level == "fail"
    assert "UCX_TLS=rc in the environment contradicts 'tcp'" in lane.text


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """`scd-trt doctor FILE --listen` with a secret and an artifact; yields the file and the address."""
    root = tmp_path_factory.mktemp("doctor")
    (root / "secret").write_text("0123456789abcdef")
    (root / "secret").chmod(0o600)
    translators.save(group_translator(), root / "artifact")
    file = write_pair_file(root / "pair.yaml")
    with subprocess.Popen(
        [sys.executable, "-m", "scd_trt.cli", "doctor", str(file), "--listen", "--address", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split("--peer ")[1].split()[0]
        yield file, address
        process.kill()


def write_pair_file(file: Path, **changes: Any) -> Path:
    data: dict[str, Any] = {
        "name": "tiny",
        "producer": {"model": "a"},
        "consumer": {"model": "b"},
        "translator": "artifact",
        "method": {"guard": "off"},
        "calibration": {"source": "none.txt"},
        "heldout": {"source": "none.txt"},
        "transport": {"lane": "tcp"},
        "control": {"secret_file": "secret"},
    }
    file.write_text(yaml.safe_dump(data | changes))
    return file


def doctor(file: Path, address: str, *, status: int) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "scd_trt.cli", "doctor", str(file), "--quick", "--peer", address, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_two_hosts_that_fit(listening: tuple[Path, str]) -> None:
    found = doctor(*listening, status=0)
    for name in ("peer", "peer secret", "peer artifact", "peer clock", "peer lane"):
        assert found[name]["level"] == "ok", found[name]
    assert "over tcp/" in found["peer lane"]["text"]
    details = found["peer lane"]["details"]
    assert details["sent_bytes"] >= ends.ARENA_BYTES
    assert details["num_wrong_pieces"] == 0
    # both clocks are this machine's
    assert abs(details["clock_offset_ms"]) < 1000
    assert "ucx 1." in details["software"]


def test_two_hosts_that_do_not_fit(listening: tuple[Path, str], tmp_path: Path) -> None:
    file, address = listening
    other = tmp_path / "pair.yaml"
    translators.save(random_translator(), tmp_path / "artifact")
    write_pair_file(other, control={"secret_file": str(file.parent / "secret")})
    options = options_for(load_served_pair(other), address)
    found = {item.check: item for item in link.examine_peer(options, Host())}
    assert found["peer artifact"].level == "fail"
    assert found["peer lane"].level == "fail"
    assert "translator" in found["peer lane"].text
    (tmp_path / "wrong").write_text("fedcba9876543210")
    write_pair_file(other, control={"secret_file": "wrong"})
    (refused,) = link.examine_peer(options_for(load_served_pair(other), address), Host())
    assert refused.level == "fail"
    assert "another control secret" in refused.text
    write_pair_file(other, control={})
    (refused,) = link.examine_peer(options_for(load_served_pair(other), address), Host())
    assert "control.secret_file is missing here and set on the other side" in refused.text


def test_nobody_there(tmp_path: Path) -> None:
    (found,) = link.examine_peer(EndOptions(address=f"127.0.0.1:{free_port()}"), Host())
    assert found.level == "fail"
    assert "--listen" in found.cure


def test_a_running_worker_is_compared_and_left_alone() -> None:
    transport = TransportConfig(backend="loopback", arena_bytes=1 << 20, send_buffer_bytes=1 << 20)
    layout = CodeLayout(32, (1,))
    worker = Producer(
        open_transport(transport),
        config=transport,
        control=ControlConfig(),
        listen="127.0.0.1:0",
        fingerprint="f",
        layout=layout,
    )
    try:
        found = link.examine_peer(EndOptions(address=worker.address, fingerprint="f"), Host())
        assert {item.check: item.level for item in found} == {
            "peer": "ok",
            "peer secret": "skip",
            "peer artifact": "ok",
            "peer lane": "skip",
        }
    finally:
        worker.close()
