"""The seam to the data path, the memory that it registers, and a loopback as strict as NIXL.

A `Transport` makes one `Receiver` per peer session on the decode side and one `Sender` on the prefill side. What both
implementations promise, and `tests/test_transport.py` checks on both:

- `write` only starts a write; its data and then its notification are with the receiver once `poll` has said True. Without
  `poll` the notification may never leave. Until then the local bytes must not change.
- There is no abort: a released or forgotten write may land at any later time. Only `destroy`, of either end, fences it.
- Ranges are checked against the registered buffer and the arena that the peer named; a violation is a `BoundsError`.
- A receiver that is gone makes `write` or `poll` raise `PeerLostError`; a peer that is merely silent leaves `poll` at
  False for ever: deadlines are the caller's.
- `destroy` may be repeated. Each object is used by one thread at a time, `Receiver.destroy` excepted.

    TransportError
     +- LibraryError      the library is missing, or cannot be set up as configured
     +- PeerLostError     the other end is gone
     +- BoundsError       range outside of a registered buffer

Memory: a `Buffer` is never unmapped while the process lives, because a peer that holds its address may still write.
"""

from __future__ import annotations

import mmap
import threading
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scd_trt.config import ScdError


class TransportError(ScdError):
    """The data path failed."""


class LibraryError(TransportError):
    """The transport library is missing, or cannot be set up as configured."""


class PeerLostError(TransportError):
    """The other end is gone, or was never there."""


class BoundsError(TransportError):
    """A range outside of a registered buffer."""


class Buffer:
    """Zeroed page-aligned host memory, kept until the process ends."""

    _kept: list[mmap.mmap] = []  # noqa: RUF012 - for the whole process on purpose: unmapping under a peer's write kills

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes)
        self._kept.append(memory)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)
        self.num_bytes = num_bytes


@dataclass(frozen=True)
class RemoteArena:
    """Where a peer lets us write: valid only together with the metadata of its receiver."""

    metadata: bytes
    address: int
    num_bytes: int


def check_range(offset: int, num_bytes: int, limit: int, what: str) -> None:
    """Raise `BoundsError` unless `[offset, offset + num_bytes)` is a non-empty range inside `[0, limit)`."""
    if offset < 0 or num_bytes < 1 or offset + num_bytes > limit:
        raise BoundsError(f"bytes {offset}..{offset + num_bytes} lie outside the {limit} bytes of the {what}")


class Receiver(Protocol):
    """The passive end of one session: an arena that the peer writes into."""

    @property
    def metadata(self) -> bytes:
        """What the peer's sender needs to connect."""

    def drain(self) -> list[bytes]:
        """Notifications that have arrived since the last call; each follows its data."""

    def destroy(self) -> None:
        """Fence: after this no byte lands through this receiver."""


class Sender(Protocol):
    """The active end of one session: a buffer that writes leave from."""

    def write(self, local_offset: int, remote_offset: int, num_bytes: int, *, notification: bytes) -> int:
        """Start a write; returns its handle."""

    def poll(self, handle: int) -> bool:
        """True when data and notification are with the receiver."""

    def release(self, handle: int) -> None:
        """Forget a write, done or not."""

    def destroy(self) -> None:
        """Fence: after this nothing leaves."""


class Transport(Protocol):
    """Makes the ends of sessions."""

    @property
    def version(self) -> str:
        """Library and version, compared at the handshake."""

    @property
    def lane(self) -> str:
        """The lane in use, in words, for status and logs."""

    def open_receiver(self, name: str, arena: Buffer) -> Receiver:
        """Register the arena under a name that was never used before."""

    def open_sender(self, name: str, source: Buffer, remote: RemoteArena) -> Sender:
        """Register the source and connect to a receiver."""


@dataclass
class _LoopbackWrite:
    source: Buffer
    local_offset: int
    receiver: LoopbackReceiver
    remote_offset: int
    num_bytes: int
    notification: bytes
    is_done: bool = False

    def complete(self) -> None:
        """Move the bytes, as late as may be: a sender that reuses its buffer too early is found out."""
        if not self.is_done and not self.receiver.is_destroyed:
            remote = self.receiver.arena.array[self.remote_offset : self.remote_offset + self.num_bytes]
            remote[:] = self.source.array[self.local_offset : self.local_offset + self.num_bytes]
        self.is_done = True


@dataclass
class LoopbackHub:
    """The wire between loopback ends of one process. `held` makes it silent, as a stopped peer or a cut network would."""

    held: bool = False
    receivers: dict[bytes, LoopbackReceiver] = field(default_factory=dict)
    orphans: list[_LoopbackWrite] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def land_orphans(self) -> None:
        """Let released writes land late, as NIXL lets them."""
        with self.lock:
            for write in self.orphans:
                write.complete()
            self.orphans.clear()


class LoopbackReceiver:
    """Receiver inside this process."""

    def __init__(self, hub: LoopbackHub, name: str, arena: Buffer) -> None:
        self.arena = arena
        self.metadata = f"{name}/{uuid.uuid4().hex}".encode()
        self.notifications: deque[bytes] = deque()
        self.is_destroyed = False
        self._hub = hub
        with hub.lock:
            hub.receivers[self.metadata] = self

    def drain(self) -> list[bytes]:
        """See `Receiver`."""
        with self._hub.lock:
            arrived = list(self.notifications)
            self.notifications.clear()
            return arrived

    def destroy(self) -> None:
        """See `Receiver`."""
        with self._hub.lock:
            self.is_destroyed = True
            self.notifications.clear()
            self._hub.receivers.pop(self.metadata, None)


class LoopbackSender:
    """Sender inside this process."""

    def __init__(self, hub: LoopbackHub, source: Buffer, remote: RemoteArena) -> None:
        with hub.lock:
            receiver = hub.receivers.get(remote.metadata)
        if receiver is None:
            raise PeerLostError(f"no loopback receiver {remote.metadata!r} in this process")
        self._hub, self._source, self._receiver = hub, source, receiver
        self._remote_bytes = remote.num_bytes
        self._writes: dict[int, _LoopbackWrite] = {}
        self._next_handle = 1

    def write(self, local_offset: int, remote_offset: int, num_bytes: int, *, notification: bytes) -> int:
        """See `Sender`."""
        check_range(local_offset, num_bytes, self._source.num_bytes, "send buffer")
        check_range(remote_offset, num_bytes, self._remote_bytes, "peer's arena")
        with self._hub.lock:
            self._check_peer()
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._writes[handle] = _LoopbackWrite(
                self._source, local_offset, self._receiver, remote_offset, num_bytes, notification
            )
            return handle

    def poll(self, handle: int) -> bool:
        """See `Sender`."""
        with self._hub.lock:
            write = self._find(handle)
            if write.is_done:
                return True
            self._check_peer()
            if self._hub.held:
                return False
            write.complete()
            self._receiver.notifications.append(write.notification)
            return True

    def release(self, handle: int) -> None:
        """See `Sender`."""
        with self._hub.lock:
            write = self._find(handle)
            del self._writes[handle]
            if not write.is_done:
                self._hub.orphans.append(write)

    def destroy(self) -> None:
        """See `Sender`."""
        with self._hub.lock:
            self._hub.orphans[:] = [write for write in self._hub.orphans if write.source is not self._source]
            self._writes.clear()

    def _check_peer(self) -> None:
        if self._receiver.is_destroyed:
            raise PeerLostError("the loopback receiver was destroyed")

    def _find(self, handle: int) -> _LoopbackWrite:
        if handle not in self._writes:
            raise BoundsError(f"write {handle} is unknown or was released")
        return self._writes[handle]


_PROCESS_HUB = LoopbackHub()


class LoopbackTransport:
    """Both ends in one process. Ends meet through a hub: the process's, or a test's own."""

    version = "loopback 1"
    lane = "loopback"

    def __init__(self, hub: LoopbackHub = _PROCESS_HUB) -> None:
        self.hub = hub

    def open_receiver(self, name: str, arena: Buffer) -> Receiver:
        """See `Transport`."""
        return LoopbackReceiver(self.hub, name, arena)

    def open_sender(self, name: str, source: Buffer, remote: RemoteArena) -> Sender:
        """See `Transport`."""
        return LoopbackSender(self.hub, source, remote)
