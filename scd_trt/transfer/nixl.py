"""NIXL behind the transport seam: the only file that imports it, knows its strings and maps its exceptions.

Facts that the code rests on (measured on nixl-cu12 1.5.1 with UCX 1.23):
- The default progress thread spins; `pthrDelay` must be set on the native agent configuration, which the package's Python
  wrapper pins to 0. So the native bindings are used directly.
- UCX reads its environment when the first agent is made: the lane is chosen once per process.
- Errors are `nixl*Error` exceptions without a common base of their own.
- There is no abort; destroying an agent is the fence. A name must never be used twice.
- Nothing is checked or authenticated on tcp: metadata must come from an authenticated peer, ranges are checked here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from scd_trt.config import TransportConfig
from scd_trt.transfer.transport import (
    Buffer,
    LibraryError,
    PeerLostError,
    Receiver,
    RemoteArena,
    Sender,
    TransportError,
    check_range,
)

logger = logging.getLogger(__name__)

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_TCP_DEFAULTS = {
    "UCX_TCP_USER_TIMEOUT": "3s",
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
}
_LANE_TLS = {"tcp": "tcp", "shm": "shm"}
_library_lock = threading.Lock()
_library: tuple[ModuleType, str, tuple[str, str | None]] | None = None


class NixlTransport:
    """Agents of this process; the first one fixes lane and device for all.

    Raises:
        LibraryError: NIXL is not installed, or was loaded before with another lane or device.
    """

    def __init__(self, config: TransportConfig) -> None:
        self._native, self.version = load_library(config)
        self._progress_delay_us = config.nixl_progress_delay_us
        self.lane = f"ucx {os.environ.get('UCX_TLS', 'auto')} on {os.environ.get('UCX_NET_DEVICES', 'all devices')}"

    def open_receiver(self, name: str, arena: Buffer) -> Receiver:
        """See `Transport`."""
        return NixlReceiver(self._native, self._agent(name, arena))

    def open_sender(self, name: str, source: Buffer, remote: RemoteArena) -> Sender:
        """See `Transport`."""
        return NixlSender(self._native, self._agent(name, source), source=source, remote=remote)

    def _agent(self, name: str, buffer: Buffer) -> Any:
        native = self._native
        config = native.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = native.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = self._progress_delay_us
        with _mapped_errors(native, f"cannot set up NIXL agent {name!r} on lane {self.lane}"):
            agent = native.nixlAgent(name, config)
            agent.createBackend("UCX", {})
            agent.registerMem(native.nixlRegDList(native.DRAM_SEG, [(buffer.address, buffer.num_bytes, 0, "")]), [])
        return agent


class NixlReceiver:
    """One agent that a peer writes to."""

    def __init__(self, native: ModuleType, agent: Any) -> None:
        self._native, self._agent = native, agent
        self._lock = threading.Lock()
        with _mapped_errors(native, "cannot read the agent's metadata"):
            self.metadata: bytes = agent.getLocalMD()

    def drain(self) -> list[bytes]:
        """See `Receiver`. Sender names are self-declared in NIXL, so they are dropped."""
        with self._lock, _mapped_errors(self._native, "cannot read notifications"):
            if self._agent is None:
                return []
            arrived: Mapping[str, list[bytes]] = self._agent.getNotifs({}, [])
            return [message for messages in arrived.values() for message in messages]

    def destroy(self) -> None:
        """See `Receiver`; waits for a `drain` in another thread."""
        with self._lock:
            self._agent = None  # the bindings destroy the agent with its last reference


class NixlSender:
    """One agent that writes to one peer."""

    def __init__(self, native: ModuleType, agent: Any, *, source: Buffer, remote: RemoteArena) -> None:
        self._native, self._agent, self._source, self._remote = native, agent, source, remote
        self._handles: set[int] = set()
        with _mapped_errors(native, "cannot load the peer's metadata"):
            self._peer: str = _text(agent.loadRemoteMD(remote.metadata))

    def write(self, local_offset: int, remote_offset: int, num_bytes: int, *, notification: bytes) -> int:
        """See `Sender`."""
        check_range(local_offset, num_bytes, self._source.num_bytes, "send buffer")
        check_range(remote_offset, num_bytes, self._remote.num_bytes, "peer's arena")
        native = self._native
        local = native.nixlXferDList(native.DRAM_SEG, [(self._source.address + local_offset, num_bytes, 0)])
        remote = native.nixlXferDList(native.DRAM_SEG, [(self._remote.address + remote_offset, num_bytes, 0)])
        with _mapped_errors(native, f"cannot write to {self._peer!r}"):
            agent = self._live()
            handle: int = agent.createXferReq(native.NIXL_WRITE, local, remote, self._peer, notification, [])
            self._handles.add(handle)
            agent.postXferReq(handle)
        return handle

    def poll(self, handle: int) -> bool:
        """See `Sender`."""
        with _mapped_errors(self._native, f"write to {self._peer!r} failed"):
            status = self._live().getXferStatus(handle)
        if status == self._native.NIXL_SUCCESS:
            return True
        if status == self._native.NIXL_IN_PROG:
            return False
        raise TransportError(f"write to {self._peer!r} has status {status}")

    def release(self, handle: int) -> None:
        """See `Sender`. NIXL refuses to free an active write; destroying the agent frees it then."""
        self._handles.discard(handle)
        if self._agent is not None:
            try:
                with _mapped_errors(self._native, f"cannot release a write to {self._peer!r}"):
                    self._agent.releaseXferReq(handle)
            except TransportError as error:
                logger.debug("%s; it goes with its agent", error)

    def destroy(self) -> None:
        """See `Sender`."""
        for handle in list(self._handles):
            self.release(handle)
        self._agent = None  # the bindings destroy the agent with its last reference

    def _live(self) -> Any:
        if self._agent is None:
            raise PeerLostError(f"the sender to {self._peer!r} was destroyed")
        return self._agent


def load_library(config: TransportConfig) -> tuple[ModuleType, str]:
    """The native bindings and "package version"; sets UCX's environment before the first load.

    Raises:
        LibraryError: not installed, or loaded before for another lane or device.
    """
    global _library
    wanted = (config.lane, config.device)
    with _library_lock:
        if _library is None:
            for name, value in ucx_environment(config, os.environ).items():
                os.environ[name] = value
            native, version = _import_first()
            _library = native, version, wanted
            logger.info("%s from %s, UCX_TLS=%s", version, native.__file__, os.environ.get("UCX_TLS", "auto"))
        native, version, loaded = _library
    if loaded != wanted:
        raise LibraryError(
            f"NIXL runs with transport.lane, transport.device = {loaded} in this process; cannot switch to {wanted}: "
            "UCX reads its settings once per process, so use one lane, or two processes"
        )
    return native, version


def ucx_environment(config: TransportConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """UCX variables to add for a lane; the user's own settings stay.

    Raises:
        LibraryError: UCX_TLS or UCX_NET_DEVICES is set and contradicts the configuration.
    """
    wanted = {"UCX_MAX_RMA_RAILS": "1"}  # striping over devices of unequal speed halves the faster one
    if config.lane != "shm":
        wanted |= _TCP_DEFAULTS
    if config.lane == "shm":
        wanted["UCX_MM_ERROR_HANDLING"] = "y"
    forced = {} if config.lane == "auto" else {"UCX_TLS": _LANE_TLS[config.lane]}
    if config.device is not None:
        forced["UCX_NET_DEVICES"] = config.device
    for name, value in forced.items():
        if inherited.get(name, value) != value:
            raise LibraryError(
                f"{name}={inherited[name]} in the environment contradicts {value!r} of the transport configuration; "
                f"unset {name}, or set transport.lane to auto and transport.device to null"
            )
    return {name: value for name, value in (wanted | forced).items() if name not in inherited}


def _import_first() -> tuple[ModuleType, str]:
    for package in _PACKAGES:
        try:
            native = importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            logger.debug("no %s: %s", package, error)
            continue
        return native, f"{package} {_package_version(package)}"
    raise LibraryError(
        f"none of {', '.join(_PACKAGES)} can be imported; install scd-trt[cu12] or scd-trt[cu13], "
        "or set transport.backend to loopback for a single process"
    )


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise LibraryError(f"{package} is importable but has no version metadata; install it with pip") from error


@contextmanager
def _mapped_errors(native: ModuleType, what: str) -> Iterator[None]:
    try:
        yield
    except native.nixlRemoteDisconnectError as error:
        raise PeerLostError(f"{what}: the peer disconnected ({error})") from error
    except _native_errors(native) as error:
        raise TransportError(f"{what}: {type(error).__name__} {error}") from error


def _native_errors(native: ModuleType) -> tuple[type[Exception], ...]:
    names = [name for name in vars(native) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(getattr(native, name) for name in names)


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
