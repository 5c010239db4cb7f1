"""The prefill side's registered send buffer, and the thread that owns one session's sender.

`send` of a push copies codes into the `SendBuffer` and returns; the `Outbox` thread seals, posts, polls and releases. It
keeps at most `window` writes outstanding, because waiting for each costs a round trip and more than eight gain nothing.
Every write has its own deadline from its post. The first failure ends the session: sender destroyed (the fence), buffer
ranges freed, all pushes failed. Only this thread touches the sender.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from scd_trt.config import TransportConfig
from scd_trt.transfer.extents import Extent, ExtentAllocator, ExtentsFullError
from scd_trt.transfer.states import FallbackReason
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.transport import Buffer, Sender, TransportError
from scd_trt.transfer.wire import Bytes, Notification

logger = logging.getLogger(__name__)

_POLL_S = 1e-4
_IDLE_S = 0.5


class WriteOwner(Protocol):
    """What a write belongs to; called from the outbox's thread."""

    @property
    def is_failed(self) -> bool:
        """No point in posting."""

    def posted(self) -> None:
        """The write has been started."""

    def written(self) -> None:
        """The write is done and its notification has left."""

    def dropped(self, reason: FallbackReason | None) -> None:
        """The write will never be done: the push failed before (None), or fails now for that reason."""


class SendBuffer:
    """Registered memory that codes leave from, shared by all sessions of the process."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = Buffer(num_bytes)
        self._extents = ExtentAllocator(num_bytes)
        self._room = threading.Condition()

    def reserve(self, num_bytes: int, *, timeout_s: float) -> Extent:
        """A range of the buffer; waits for room.

        Raises:
            ExtentsFullError: none within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._room:
            while True:
                try:
                    return self._extents.allocate(num_bytes)
                except ExtentsFullError:
                    remaining_s = deadline_s - time.monotonic()
                    if remaining_s <= 0 or num_bytes > self.buffer.num_bytes:
                        raise
                    self._room.wait(remaining_s)

    def free(self, extent: Extent) -> None:
        """Take a range back and wake who waits for room."""
        with self._room:
            self._extents.free(extent)
            self._room.notify_all()

    @property
    def num_free_bytes(self) -> int:
        """Room, not necessarily contiguous."""
        return self._extents.num_free_bytes

    def view(self, extent: Extent) -> Bytes:
        """The bytes of a range."""
        return self.buffer.array[extent.span]


@dataclass
class QueuedWrite:
    """Codes in the send buffer on their way to an offset of the peer's arena."""

    owner: WriteOwner
    extent: Extent
    remote_offset: int
    notification: Notification
    posted_s: float = 0.0


class Outbox(threading.Thread):
    """Owner of one sender.

    Args:
        open_sender: makes the sender, in this thread; `ready` then resolves.
        buffer: where queued codes lie.
        config: window and write deadline.
        on_closed: called once, last, with the reason; the sender is destroyed by then.
    """

    def __init__(
        self,
        open_sender: Callable[[], Sender],
        *,
        buffer: SendBuffer,
        config: TransportConfig,
        trace: TraceLog,
        on_closed: Callable[[str], None],
    ) -> None:
        super().__init__(name="scd-outbox", daemon=True)
        self.ready: Future[None] = Future()
        self._open_sender, self._buffer, self._config = open_sender, buffer, config
        self._trace, self._on_closed = trace, on_closed
        self._changed = threading.Condition()
        self._queue: deque[QueuedWrite] = deque()
        self._outstanding: dict[int, QueuedWrite] = {}
        self._stopped: str | None = None
        self._reason: FallbackReason = "consumer_gone"

    def put(self, write: QueuedWrite) -> None:
        """Queue a write; dropped where the session is over."""
        with self._changed:
            if self._stopped is None:
                self._queue.append(write)
                self._changed.notify()
                return
        self._drop(write, self._reason)

    def stop(self, why: str) -> None:
        """End the session soon. May be repeated, from any thread."""
        with self._changed:
            self._stopped = self._stopped or why
            self._changed.notify()

    def run(self) -> None:
        """Open, serve until stopped or failed, then clean up whatever happened."""
        sender: Sender | None = None
        try:
            sender = self._open_sender()
            self.ready.set_result(None)
            self._serve(sender)
        except TransportError as error:
            logger.warning("data path to a decode worker failed: %s", error)
            self.stop(str(error))
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            self.stop("internal error in the outbox")
            if sender is not None:
                sender.destroy()
            self._drop_all()
            self._on_closed(self._stopped or "")

    def _serve(self, sender: Sender) -> None:
        while self._stopped is None:
            self._fill(sender)
            self._collect(sender)
            with self._changed:
                if self._stopped is None and (self._outstanding or not self._queue):
                    self._changed.wait(_POLL_S if self._outstanding else _IDLE_S)

    def _fill(self, sender: Sender) -> None:
        while len(self._outstanding) < self._config.window:
            with self._changed:
                if not self._queue:
                    return
                write = self._queue.popleft()
            if write.owner.is_failed:
                self._drop(write, None)
            else:
                self._post(sender, write)

    def _post(self, sender: Sender, write: QueuedWrite) -> None:
        note = write.notification.sealed(self._buffer.view(write.extent))
        write.posted_s = time.monotonic()
        write.owner.posted()
        self._record("posted", note)
        try:
            handle = sender.write(
                write.extent.offset, write.remote_offset, write.extent.num_bytes, notification=note.pack()
            )
        except TransportError:
            self._drop(write, self._reason)
            raise
        self._outstanding[handle] = write

    def _collect(self, sender: Sender) -> None:
        now_s = time.monotonic()
        for handle, write in list(self._outstanding.items()):
            if sender.poll(handle):
                del self._outstanding[handle]
                sender.release(handle)
                self._buffer.free(write.extent)
                self._record("written", write.notification)
                write.owner.written()
            elif now_s - write.posted_s > self._config.write_timeout_s:
                self._reason = "timeout"
                raise TransportError(
                    f"a write of {write.extent.num_bytes} bytes is not done after {self._config.write_timeout_s:g} s"
                )

    def _drop_all(self) -> None:
        with self._changed:
            writes = [*self._outstanding.values(), *self._queue]
            self._outstanding.clear()
            self._queue.clear()
        for write in writes:
            self._drop(write, self._reason)

    def _drop(self, write: QueuedWrite, reason: FallbackReason | None) -> None:
        self._buffer.free(write.extent)
        write.owner.dropped(reason)

    def _record(self, name: str, note: Notification) -> None:
        self._trace.record(
            "posted" if name == "posted" else "written",
            note.transfer_id,
            group=note.group,
            first_block=note.first_block,
            num_blocks=note.num_blocks,
            num_bytes=note.num_bytes,
        )
