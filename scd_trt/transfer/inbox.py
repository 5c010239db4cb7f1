"""The decode side's arena, and the thread that turns notifications into verified, published blocks.

Nothing in the arena is believed: a notification must name a transfer of its own session, the generation of its extent, and
blocks inside it; then its bytes are *copied*, once, to where they stay, and the digest is checked on the copy. What does
not fit is counted and ignored; a rejected copy lies in an unfinished entry until the same blocks land after all. A block
whose groups have all landed is published in the code store at once. What a transfer's extent may be used for next is not
decided here (`consumer.py`); every change that may matter for that is told through `on_change`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from scd_trt.transfer.extents import Extent
from scd_trt.transfer.states import FallbackReason, Landing
from scd_trt.transfer.store import CodeStore, StoreFullError
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.transport import Buffer, Receiver, TransportError
from scd_trt.transfer.wire import Bytes, CodeLayout, Notification, WireError

logger = logging.getLogger(__name__)

_POLL_S = 5e-4
_WAITING_POLL_S = 1e-3
_IDLE_S = 0.1


class Incoming:
    """One transfer on the decode side: the blocks of `block_keys` after the first `num_stored`.

    `extent` and `session` exist only where blocks were granted; `entries` are the store entries being assembled.
    """

    def __init__(self, transfer_id: str, block_keys: Sequence[bytes], *, num_stored: int, landing: Landing) -> None:
        self.transfer_id = transfer_id
        self.block_keys = list(block_keys)
        self.num_stored = num_stored
        self.num_granted = 0
        self.landing = landing
        self.expected_s = time.monotonic()
        self.session = b""
        self.extent: Extent | None = None
        self.entries: dict[int, Bytes] = {}
        self.bytes_received = 0
        self.num_writes = 0
        self.encode_ms: float | None = None
        self.write_ms: float | None = None
        self.matched_tokens: int | None = None
        self.decode_ms: float | None = None
        self.noted_reason: FallbackReason | None = None
        self.terminal: Future[None] = Future()  # landed or failed
        self.closed: Future[None] = Future()  # and its extent is back


@dataclass(frozen=True)
class _Port:
    session: bytes
    receiver: Receiver


class Inbox(threading.Thread):
    """Lands what arrives through any session's receiver.

    Args:
        arena: memory that peers write into.
        layout: sizes of codes.
        store: where complete blocks go.
        on_change: told of a transfer whose landing became terminal or drained; from any thread, must not block.
    """

    def __init__(
        self,
        arena: Buffer,
        *,
        layout: CodeLayout,
        store: CodeStore,
        trace: TraceLog,
        on_change: Callable[[Incoming], None],
    ) -> None:
        super().__init__(name="scd-inbox", daemon=True)
        self.arena = arena
        self.layout, self._store, self._trace, self._on_change = layout, store, trace, on_change
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopped = False
        self._ports: dict[bytes, _Port] = {}
        self._transfers: dict[str, Incoming] = {}
        self._counters: Counter[str] = Counter()

    def open(self, session: bytes, receiver: Receiver) -> None:
        """Listen to a session's receiver."""
        with self._lock:
            self._ports[session] = _Port(session, receiver)

    def shut(self, session: bytes) -> None:
        """Listen no more; the caller destroys the receiver."""
        with self._lock:
            self._ports.pop(session, None)

    def add(self, incoming: Incoming, extent: Extent, *, session: bytes, num_blocks: int) -> None:
        """Accept writes of a transfer into an extent."""
        incoming.extent, incoming.session, incoming.num_granted = extent, session, num_blocks
        with self._lock:
            self._transfers[incoming.transfer_id] = incoming
        self._wake.set()

    def remove(self, incoming: Incoming) -> None:
        """Accept no more writes of a transfer; its extent is the caller's again."""
        with self._lock:
            self._transfers.pop(incoming.transfer_id, None)
            incoming.entries = {}

    def fail(self, incoming: Incoming, reason: FallbackReason) -> None:
        """Give a transfer up."""
        with self._lock:
            incoming.landing.fail(reason)
        self._on_change(incoming)

    def end(self, incoming: Incoming, *, num_writes: int, reason: FallbackReason | None) -> None:
        """The producer says that nothing of it is outstanding: its last notification is here, so look at once."""
        with self._lock:
            incoming.landing.end(num_writes=num_writes, reason=reason)
        self._wake.set()
        self._on_change(incoming)

    def statistics(self) -> dict[str, int]:
        """Counters since the start: landed, and ignored notifications by cause."""
        with self._lock:
            return dict(self._counters)

    def stop(self) -> None:
        """End the thread soon."""
        self._is_stopped = True
        self._wake.set()

    def run(self) -> None:
        """Drain, land, rest: shortly while codes arrive, longer while they are only expected."""
        pause_s = _POLL_S
        while not self._is_stopped:
            with self._lock:
                ports = list(self._ports.values())
                is_busy = bool(self._transfers)
            num_arrived = sum(self._drain(port) for port in ports)
            pause_s = _POLL_S if num_arrived else min(2 * pause_s, _WAITING_POLL_S)
            if self._wake.wait(pause_s if is_busy else _IDLE_S):
                self._wake.clear()
                pause_s = _POLL_S

    def _drain(self, port: _Port) -> int:
        try:
            arrived = port.receiver.drain()
        except TransportError as error:
            # The control channel decides when a peer is gone; a receiver that cannot be read is left to its timeouts.
            logger.warning("cannot read notifications: %s", error)
            self._count("unreadable")
            return 0
        for data in arrived:
            self._take(port, data)
        return len(arrived)

    def _take(self, port: _Port, data: bytes) -> None:
        try:
            note = Notification.unpack(data)
        except WireError as error:
            logger.warning("ignored notification: %s", error)
            self._count("malformed")
            return
        with self._lock:
            incoming = self._transfers.get(note.transfer_id)
        if incoming is None or incoming.extent is None or incoming.landing.is_terminal:
            self._count("unexpected")
        elif note.session != port.session or incoming.session != port.session:
            self._count("other_session")
        elif note.generation != incoming.extent.generation:
            self._count("stale_generation")
        else:
            self._land(incoming, incoming.extent, note)

    def _land(self, incoming: Incoming, extent: Extent, note: Notification) -> None:
        relative = note.first_block - incoming.num_stored
        try:
            span = self.layout.span(note.group, relative, note.num_blocks, extent_blocks=incoming.num_granted)
        except ValueError as error:
            logger.warning("ignored notification of transfer %s: %s", note.transfer_id, error)
            self._count("out_of_bounds")
            return
        if incoming.landing.has_landed(note.group, relative, note.num_blocks):
            self._count("repeated")
            return
        entries = incoming.entries
        payload = self.arena.array[extent.offset + span.start : extent.offset + span.stop]
        is_genuine = note.vouches_for(*self._copy(entries, payload, note.group, relative))
        incoming.num_writes += 1
        incoming.bytes_received += len(payload)
        if is_genuine:
            self._record(note)
            self._publish(incoming, entries, note)
        with self._lock:
            self._counters["landed" if is_genuine else "ignored_digest_mismatch"] += 1
            if is_genuine:
                incoming.landing.land(note.group, relative, note.num_blocks, now_s=time.monotonic())
            else:
                incoming.landing.reject(note.group, relative, note.num_blocks)
        if incoming.landing.is_terminal:
            self._on_change(incoming)

    def _copy(self, entries: dict[int, Bytes], payload: Bytes, group: int, first_block: int) -> list[Bytes]:
        """Copy a group's codes out of the arena into the entries of their blocks; returns the copies."""
        span, copies = self.layout.entry_span(group), []
        for block, codes in enumerate(payload.reshape(-1, self.layout.group_bytes(group)), start=first_block):
            if block not in entries:
                entries[block] = np.empty(self.layout.block_bytes, dtype=np.uint8)
            copy = entries[block][span]
            copy[:] = codes
            copies.append(copy)
        return copies

    def _publish(self, incoming: Incoming, entries: dict[int, Bytes], note: Notification) -> None:
        """Store what this write completes; before the landing says so, since whoever waits for it reads the store at once."""
        relative = note.first_block - incoming.num_stored
        for block in incoming.landing.completed_by(note.group, relative, note.num_blocks):
            index = incoming.num_stored + block
            try:
                self._store.put(incoming.block_keys[index], entries.pop(block).data.toreadonly())
            except StoreFullError as error:
                logger.warning("transfer %s: %s", incoming.transfer_id, error)
                self.fail(incoming, "store_full")
                return
            self._trace.record("published", incoming.transfer_id, first_block=index, num_blocks=1)

    def _record(self, note: Notification) -> None:
        self._trace.record(
            "landed",
            note.transfer_id,
            group=note.group,
            first_block=note.first_block,
            num_blocks=note.num_blocks,
            num_bytes=note.num_bytes,
        )

    def _count(self, what: str) -> None:
        with self._lock:
            self._counters[f"ignored_{what}"] += 1
