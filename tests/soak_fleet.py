"""Two prefill workers, two decode workers and a router as real processes, which a test may kill, stop and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from live_servers import free_port
from serving_pairs import TinyPair

from scd_trt.config import load_pair
from scd_trt.transfer.control import ControlClient

PREFILL, DECODE = ("prefill1", "prefill2"), ("decode1", "decode2")
ROUTER = "router"
READY_WITHIN_S = 120.0


@dataclass
class Server:
    """One process and where it is."""

    name: str
    url: str
    control: str
    file: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    is_stopped: bool = False

    @property
    def role(self) -> str:
        return self.name.rstrip("12")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scd_trt.cli", "serve", self.role, str(self.file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def halt(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.is_stopped = False

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended: {self.log.read_text()[-2000:]}"
        if self.is_stopped:
            return False
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def memory_mib(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / (1 << 20)

    def num_fds(self) -> int:
        return psutil.Process(self.pid).num_fds()

    def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10.0, trust_env=False).text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


@dataclass
class Fleet:
    """All servers by name."""

    pair: TinyPair
    servers: dict[str, Server]

    @property
    def router(self) -> Server:
        return self.servers[ROUTER]

    @property
    def workers(self) -> list[Server]:
        return [self.servers[name] for name in (*PREFILL, *DECODE)]

    def await_ready(self) -> None:
        deadline_s = time.monotonic() + READY_WITHIN_S
        for server in self.servers.values():
            while not server.is_ready():
                assert time.monotonic() < deadline_s, f"{server.name} is not ready: {server.log.read_text()[-2000:]}"
                time.sleep(0.1)

    async def counters(self, server: Server) -> dict[str, int]:
        """Of a worker's transfers."""
        client = ControlClient(server.control, self.pair.config.control)
        try:
            return (await client.status()).counters
        finally:
            await client.close()

    def end(self) -> dict[str, int]:
        """SIGTERM to all; exit status of each."""
        for server in self.servers.values():
            if server.process is not None and server.process.poll() is None:
                server.resume()
                server.process.terminate()
        return {name: server.process.wait(60) for name, server in self.servers.items() if server.process is not None}

    def num_left(self) -> int:
        """Processes that still name a file of this fleet."""
        root = str(self.pair.file.parent)
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return sum(any(word.startswith(root) for word in command) for command in commands)


@contextmanager
def fleet_of(pair: TinyPair) -> Iterator[Fleet]:
    """Start the processes of a distilled pair; yields when all are ready. Leaves none behind."""
    fleet = Fleet(pair, _servers(pair))
    try:
        for server in fleet.servers.values():
            server.start()
        fleet.await_ready()
        yield fleet
    finally:
        for server in fleet.servers.values():
            if server.process is not None and server.process.poll() is None:
                server.kill()


def _servers(pair: TinyPair) -> dict[str, Server]:
    data: dict[str, Any] = yaml.safe_load(pair.file.read_text())
    ports = {name: {"port": free_port(), "control_port": free_port()} for name in (*PREFILL, *DECODE)}
    data["servers"]["router"] |= {
        "prefill_workers": [ports[name] for name in PREFILL],
        "decode_workers": [ports[name] for name in DECODE],
    }
    servers: dict[str, Server] = {}
    for name in (*PREFILL, *DECODE, ROUTER):
        own = data["servers"] | ({name.rstrip("12"): ports[name]} if name in ports else {})
        file = pair.file.parent / f"{name}.yaml"
        file.write_text(yaml.safe_dump(data | {"servers": own}))
        load_pair(file)
        port = ports[name]["port"] if name in ports else data["servers"]["router"]["port"]
        control = f"127.0.0.1:{ports[name]['control_port']}" if name in ports else ""
        servers[name] = Server(name, f"http://127.0.0.1:{port}", control, file, file.with_suffix(".log"))
    return servers
