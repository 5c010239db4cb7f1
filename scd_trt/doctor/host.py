"""What is read of the machine, each as a plain function or path, so that tests can give a machine of their own."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ClockState = Literal["synchronised", "not synchronised", "unknown"]
_TIME_ERROR = 5
_TIMEX_BYTES = 512  # more than struct timex has on any Linux


def memlock_bytes() -> int | None:
    """Memory that this process may pin; None without limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk_bytes(path: Path) -> int:
    """Free bytes of the file system that a path is on, or will be on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def clock_state() -> ClockState:
    """What the kernel says of its clock (adjtimex); containers may forbid the question."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except AttributeError:
        return "unknown"
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return "unknown" if state < 0 else "not synchronised" if state == _TIME_ERROR else "synchronised"


def addresses_of(host: str) -> tuple[str, ...]:
    """Addresses that a name stands for here; empty where it stands for none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(entry[4][0]) for entry in found}))


def can_listen(host: str, port: int) -> bool:
    """Whether a port is free. False also where the address is another machine's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None where there is none. Nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Host:
    """The machine that is examined.

    Attributes:
        sys_class: network and InfiniBand devices.
        proc: memory, port range of the kernel.
        cgroup: memory limit of the container.
        shared_memory: mount of POSIX shared memory.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    sys_class: Path = Path("/sys/class")
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shared_memory: Path = Path("/dev/shm")
    memlock_bytes: Callable[[], int | None] = memlock_bytes
    free_disk_bytes: Callable[[Path], int] = free_disk_bytes
    clock_state: Callable[[], ClockState] = clock_state
    addresses_of: Callable[[str], tuple[str, ...]] = addresses_of
    can_listen: Callable[[str, int], bool] = can_listen
    installed_version: Callable[[str], str | None] = installed_version

    def rdma_devices(self) -> tuple[str, ...]:
        """Names of RDMA devices, e.g. mlx5_0."""
        return _entries(self.sys_class / "infiniband")

    def network_devices(self) -> tuple[str, ...]:
        """Names of network devices but the loopback that are up or do not say."""
        up = (name for name in _entries(self.sys_class / "net") if self.network_state(name) in ("up", "unknown"))
        return tuple(name for name in up if name != "lo")

    def network_state(self, name: str) -> str:
        """up, down, unknown; empty where there is no such device."""
        return read_line(self.sys_class / "net" / name / "operstate")

    def rdma_state(self, name: str, port: str) -> str:
        """State of a port, e.g. `4: ACTIVE`; empty where there is none."""
        return read_line(self.sys_class / "infiniband" / name / "ports" / port / "state")


def read_line(path: Path) -> str:
    """First line of a small file of the kernel; empty where it cannot be read."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def _entries(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in directory.iterdir()))
    except OSError:
        return ()
