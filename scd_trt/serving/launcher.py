"""Prefill, decode and router as child processes of one command: start, wait until ready, stop.

Owns: the processes of `scd-trt serve all` and of the demo, their log files, and the ports they need. A child that dies
while the group starts is reported with the end of its log. Leaving the context always ends every child: SIGTERM, then
SIGKILL after `grace_s`. It supervises nothing after the start; restarting workers is a cluster manager's task.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scd_trt.config import ScdError, ServedPair

LOG_TAIL_LINES = 15
STOP_GRACE_S = 35.0
"""Longer than a worker takes to drain and to end its session (`worker.DRAIN_S`, `transport.write_timeout_s`)."""


class LaunchError(ScdError):
    """A port is taken, or a child process ended or stayed silent while the group started."""


@dataclass(frozen=True)
class Child:
    """One server process."""

    role: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def describe_end(self) -> str:
        """Exit status and the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"{self.role} ended with status {self.process.returncode}; last lines of {self.log}:\n" + "\n".join(
            lines
        )


def check_ports_free(config: ServedPair) -> None:
    """Raise `LaunchError` naming the first port of the group that another program uses."""
    servers = config.servers
    for key, host, port in (
        ("servers.router.port", servers.router.host, servers.router.port),
        ("servers.prefill.port", servers.prefill.host, servers.prefill.port),
        ("servers.prefill.control_port", servers.prefill.host, servers.prefill.control_port),
        ("servers.decode.port", servers.decode.host, servers.decode.port),
        ("servers.decode.control_port", servers.decode.host, servers.decode.control_port),
    ):
        check_port_free(key, host, port)


def check_port_free(key: str, host: str, port: int) -> None:
    """Raise `LaunchError` unless `host:port` can be bound now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"{key}: cannot listen on {host}:{port} ({error.strerror}); choose another port"
            ) from error


@contextmanager
def serving_group(
    pair_file: Path,
    config: ServedPair,
    *,
    log_directory: Path,
    timeout_s: float = 180.0,
    waiting: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Child]]:
    """Run the three servers of a pair; yields them by role once all are ready.

    Args:
        waiting: told the role that is being waited for, for progress.
    Raises:
        LaunchError: a port is taken, a child ended, or one was not ready within `timeout_s`.
    """
    check_ports_free(config)
    log_directory.mkdir(parents=True, exist_ok=True)
    children: dict[str, Child] = {}
    try:
        for role, host, port in _roles(config):
            children[role] = _spawn(role, f"http://{host}:{port}", pair_file, log_directory)
        deadline = time.monotonic() + timeout_s
        for child in children.values():
            waiting(child.role)
            _await_ready(child, children, deadline)
        yield children
    finally:
        stop(list(children.values()))


def stop(children: list[Child], *, grace_s: float = STOP_GRACE_S) -> None:
    """End the processes: SIGTERM to all, SIGKILL to those that still run after `grace_s`."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _roles(config: ServedPair) -> Iterator[tuple[str, str, int]]:
    servers = config.servers
    yield "prefill", servers.prefill.host, servers.prefill.port
    yield "decode", servers.decode.host, servers.decode.port
    yield "router", servers.router.host, servers.router.port


def _spawn(role: str, url: str, pair_file: Path, log_directory: Path) -> Child:
    log = log_directory / f"{role}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "scd_trt.cli", "serve", role, str(pair_file)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            # its own session: Ctrl-C in a terminal reaches the parent alone, which then stops the children in order
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    return Child(role, url, log, process)


def _await_ready(child: Child, children: dict[str, Child], deadline: float) -> None:
    while time.monotonic() < deadline:
        for other in children.values():
            if other.process.poll() is not None:
                raise LaunchError(other.describe_end())
        try:
            if httpx.get(f"{child.url}/health", timeout=2.0).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise LaunchError(f"{child.role} did not answer {child.url}/health in time; see {child.log}")
