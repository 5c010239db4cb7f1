"""Checks of the machine: network device, pinned memory, ports, names, memory, disk, clock.

Each check is a function of what was configured and of a `Host`, and returns its findings. Nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

from scd_trt.config import MIB, ServedPair, TransportConfig, cache_root
from scd_trt.doctor.findings import Finding
from scd_trt.doctor.host import Host, read_line

PORT_RANGE_VARIABLE = "UCX_TCP_PORT_RANGE"
MIN_UCX_PORTS = 16
"""Two agents per peer session, each with a listener; a restart may find the old ports still closing."""
MIN_FREE_DISK_BYTES = 1 << 30
MIN_SHARED_MEMORY_BYTES = 256 * MIB


def examine_machine(pair: ServedPair | None, host: Host) -> Iterator[Finding]:
    """All of them; without a pair, with default settings and without those that need one."""
    transport = pair.transport if pair else TransportConfig()
    yield check_device(transport, host)
    yield check_memlock(transport, host)
    yield check_port_range(transport, host, is_local=pair is None or _is_local(pair))
    if pair is not None:
        yield from check_names(pair, host)
        yield check_memory(pair, host)
    yield from check_disk(pair, host)
    yield check_clock(host)


def check_device(transport: TransportConfig, host: Host) -> Finding:
    """The device that is configured is there and up; without one, how many there are to choose from."""
    found = (*host.network_devices(), *host.rdma_devices())
    listed = ", ".join(found) or "none"
    if transport.lane == "shm":
        return Finding("device", "ok", "lane shm uses no network device")
    if transport.device is None:
        if len(found) <= 1:
            return Finding("device", "ok", f"UCX has no choice: {listed}")
        return Finding(
            "device",
            "warn",
            f"transport.device is not set and there are {len(found)}: {listed}",
            "name the one next to the GPU, e.g. transport.device: mlx5_0:1 or eth0; UCX may take the management network",
        )
    states = {name: _state(name, host) for name in transport.device.split(",")}
    missing = [name for name, state in states.items() if not state]
    if missing:
        return Finding("device", "fail", f"transport.device {', '.join(missing)}: not here", f"name one of: {listed}")
    down = [f"{name} is {state}" for name, state in states.items() if not _is_up(state)]
    if down:
        return Finding("device", "fail", f"transport.device: {', '.join(down)}", "bring it up, or name another device")
    return Finding("device", "ok", ", ".join(f"{name} {state}{_speed(name, host)}" for name, state in states.items()))


def _state(name: str, host: Host) -> str:
    device, _, port = name.partition(":")
    return host.network_state(name) or host.rdma_state(device, port or "1")


def _is_up(state: str) -> bool:
    return state in ("up", "unknown") or "ACTIVE" in state


def _speed(name: str, host: Host) -> str:
    device, _, port = name.partition(":")
    megabits = read_line(host.sys_class / "net" / name / "speed")
    if megabits.isdigit() and int(megabits) > 0:
        return f", {int(megabits) / 1000:g} Gbit/s"
    rate = read_line(host.sys_class / "infiniband" / device / "ports" / (port or "1") / "rate")
    return f", {rate}" if rate else ""


def check_memlock(transport: TransportConfig, host: Host) -> Finding:
    """RDMA pins arena and send buffer; a limit makes UCX fall back to tcp, and it says nothing."""
    limit, needed = host.memlock_bytes(), max(transport.arena_bytes, transport.send_buffer_bytes)
    shown = "unlimited" if limit is None else _size(limit)
    uses_rdma = transport.lane == "auto" and bool(host.rdma_devices())
    if not uses_rdma:
        return Finding("memlock", "ok", f"{shown}; nothing is pinned without RDMA")
    if limit is not None and limit < needed:
        return Finding(
            "memlock",
            "fail",
            f"{shown}, and RDMA has to pin {_size(needed)}",
            "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; in a pod run as uid 0 with IPC_LOCK, or raise the node's",
        )
    return Finding("memlock", "ok", f"{shown}; RDMA pins {_size(needed)}")


def check_port_range(transport: TransportConfig, host: Host, *, is_local: bool) -> Finding:
    """The ports that UCX's tcp may take: what a firewall has to open."""
    given = host.environment.get(PORT_RANGE_VARIABLE, "")
    name = "port range"
    if not given:
        if is_local or transport.lane == "shm":
            return Finding(name, "ok", f"{PORT_RANGE_VARIABLE} is not set; not needed inside one machine")
        cure = f"export {PORT_RANGE_VARIABLE}=20000-20099 before the workers start, and open just those"
        return Finding(name, "warn", f"{PORT_RANGE_VARIABLE} is not set: UCX's tcp takes any port", cure)
    bounds = re.fullmatch(r"(\d{1,5})-(\d{1,5})", given)
    first, last = (int(bounds[1]), int(bounds[2])) if bounds else (0, 0)
    if not 0 < first <= last <= 65535:
        return Finding(name, "fail", f"{PORT_RANGE_VARIABLE}={given} is no range", "write it as 20000-20099")
    if last - first + 1 < MIN_UCX_PORTS:
        return Finding(
            name,
            "warn",
            f"{given} holds {last - first + 1} ports",
            f"give at least {MIN_UCX_PORTS}: each session takes some",
        )
    return _judge_range(first, last, host)


def _judge_range(first: int, last: int, host: Host) -> Finding:
    own = re.fullmatch(r"(\d+)\s+(\d+)", read_line(host.proc / "sys" / "net" / "ipv4" / "ip_local_port_range"))
    free = sum(host.can_listen("0.0.0.0", port) for port in range(first, last + 1))  # noqa: S104 - bound, never listened on
    text = f"{first}-{last}, {free} of {last - first + 1} free"
    if free < MIN_UCX_PORTS:
        return Finding(
            "port range", "fail", text, f"choose another {PORT_RANGE_VARIABLE}, or end what uses it (ss -ltnp)"
        )
    if own and int(own[1]) <= last and first <= int(own[2]):
        cure = "choose ports below net.ipv4.ip_local_port_range: outgoing connections may take these"
        return Finding("port range", "warn", f"{text}; overlaps the kernel's {own[1]}-{own[2]}", cure)
    return Finding("port range", "ok", text)


def check_names(pair: ServedPair, host: Host) -> Iterator[Finding]:
    """Every server's name stands for an address here."""
    servers = pair.servers
    workers = (
        *(servers.router.prefill_workers or (servers.prefill,)),
        *(servers.router.decode_workers or (servers.decode,)),
    )
    for name in dict.fromkeys([*(worker.host for worker in workers), servers.router.host]):
        addresses = host.addresses_of(name)
        if not addresses:
            yield Finding("name", "fail", f"{name} stands for no address here", f"add {name} to DNS or /etc/hosts")
        elif name not in addresses:
            yield Finding("name", "ok", f"{name} is {', '.join(addresses)}")


def check_memory(pair: ServedPair, host: Host) -> Finding:
    """Arena, send buffer and code store fit; each worker has one of the first two."""
    needed = max(pair.transport.arena_bytes, pair.transport.send_buffer_bytes) + pair.store.capacity_bytes
    total, available = (_kilobytes(host.proc / "meminfo", key) for key in ("MemTotal", "MemAvailable"))
    limit = read_line(host.cgroup / "memory.max")
    if limit.isdigit():
        total = available = min(int(limit), total or int(limit))
    text = f"a worker may take {_size(needed)} for codes, of {_size(total)}, {_size(available)} available"
    cure = "lower store.capacity_bytes, transport.arena_bytes or transport.send_buffer_bytes"
    if total and needed > total:
        return Finding("memory", "fail", text, cure)
    return Finding("memory", "warn", text, cure) if total and needed > available else Finding("memory", "ok", text)


def _kilobytes(path: Path, key: str) -> int:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def check_disk(pair: ServedPair | None, host: Host) -> Iterator[Finding]:
    """Room for logs, converted models and artifacts; shared memory, which containers keep small."""
    root = cache_root()
    free = host.free_disk_bytes(root)
    cure = "free some, or set SCD_TRT_CACHE to another disk"
    level = "ok" if free >= MIN_FREE_DISK_BYTES else "warn"
    yield Finding(
        "disk", "ok" if level == "ok" else "warn", f"{_size(free)} free at {root}", cure if level != "ok" else ""
    )
    if pair is not None and pair.transport.lane == "shm":
        shared = host.free_disk_bytes(host.shared_memory)
        small = shared < MIN_SHARED_MEMORY_BYTES
        cure = "docker run --shm-size=1g; in a pod an emptyDir of medium Memory at /dev/shm"
        yield Finding(
            "shared memory",
            "fail" if small else "ok",
            f"{_size(shared)} free at {host.shared_memory}",
            cure if small else "",
        )


def check_clock(host: Host) -> Finding:
    """Only times in logs and traces of two hosts depend on it: deadlines are kept with clocks of their own."""
    state = host.clock_state()
    if state == "not synchronised":
        cure = "start chronyd or systemd-timesyncd; nothing fails, but logs and traces of two hosts cannot be compared"
        return Finding("clock", "warn", "the kernel says that its clock is not synchronised", cure)
    return Finding("clock", "ok" if state == "synchronised" else "skip", state)


def _is_local(pair: ServedPair) -> bool:
    return all(_is_loopback(worker.host) for worker in (pair.servers.prefill, pair.servers.decode))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3g} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MIB:.3g} MiB"
