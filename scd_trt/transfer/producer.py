"""The prefill worker's end: takes grants from decode workers, plans pushes by content, sends codes as they are made.

Threads: `plan`, `send`, `finish` and `abort` are called by the engine's forward thread and do no I/O; one `Outbox` thread per
session writes; the control loop's thread takes grants and revocations, and reaps. Grants live for `lease_s` unless planned; a
planned push must move within `lease_s` and be written within `transfer_timeout_s` of its first post.

End: `drain` refuses new grants and waits for the leases that it holds; `close` waits, at most `write_timeout_s`, until what
has been sent completely is written, and gives up the rest.

Not decided here: what to encode, and whether blocks come from the pool or a code store (the connector does).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scd_trt.config import ControlConfig
from scd_trt.transfer.connection import Connection, ControlError, RefusedError
from scd_trt.transfer.control import ControlServer
from scd_trt.transfer.extents import ExtentsFullError
from scd_trt.transfer.messages import (
    Body,
    Ended,
    Grant,
    Granted,
    Revoke,
    SessionArena,
    SessionHello,
    SessionReady,
    Status,
    StatusQuery,
    TraceQuery,
    TraceReply,
)
from scd_trt.transfer.outbox import Outbox, QueuedWrite, SendBuffer
from scd_trt.transfer.states import FallbackReason, Sending
from scd_trt.transfer.terms import Terms
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.transport import RemoteArena, Transport, TransportError
from scd_trt.transfer.wire import Bytes, CodeLayout, Notification

if TYPE_CHECKING:
    import torch

    from scd_trt.config import TransportConfig

logger = logging.getLogger(__name__)

BACKPRESSURE_S = 1.0
MAX_WRITE_BYTES = 4 << 20
MAX_PUSHES = 4096
MAX_TRACE_EVENTS = 4096
_SETUP_TIMEOUT_S = 10.0


class _Session:
    """One decode worker, from its hello to the end of its connection."""

    def __init__(self, hello: SessionHello) -> None:
        self.hello = hello
        self.id = b""
        self.arena_bytes = 0
        self.outbox: Outbox | None = None


class Push:
    """The blocks `blocks` (indices in the prompt) of one prompt, for every layer group, to one decode worker.

    The forward thread calls `send` in any order of groups and blocks, then `finish` or `cut`, or `abort` at any time. A
    failed push (`reason`) stays failed and ignores further calls: the forward pass goes on, the consumer prefills for itself.
    """

    def __init__(self, producer: Producer, connection: Connection, session: _Session, grant: Grant) -> None:
        self.transfer_id = grant.transfer_id
        self.blocks = range(grant.first_block, grant.first_block + len(grant.block_keys))
        self.last_key = grant.block_keys[-1]
        self.ended: asyncio.Future[Ended] = producer.control.loop.create_future()
        self._producer, self._connection, self._session, self._grant = producer, connection, session, grant
        self._lock = threading.Lock()
        self._state = Sending(num_groups=producer.layout.num_groups, num_blocks=len(self.blocks))
        self._active_s = time.monotonic()
        self._first_posted_s: float | None = None
        self._last_written_s: float | None = None
        self._encode_ms: float | None = None
        self._backpressure_s = 0.0
        self._has_ended = False

    @property
    def reason(self) -> FallbackReason | None:
        """Why the push failed; None so far."""
        return self._state.reason

    @property
    def is_failed(self) -> bool:
        """See `WriteOwner`."""
        return self._state.is_failed

    @property
    def is_leaving(self) -> bool:
        """All is said, not all is written."""
        return self._state.is_finishing and not self._state.is_failed

    def send(self, group: int, first_block: int, codes: npt.NDArray[np.uint8] | torch.Tensor) -> None:
        """Queue the codes of consecutive blocks in one layer group.

        Copies and returns; while the send buffer is full it waits, in sum at most `BACKPRESSURE_S` per push, after which the
        push fails. Blocks that were sent before are ignored.

        Args:
            group: layer group.
            first_block: index in the prompt; the blocks must lie in `blocks`.
            codes: uint8 [num_blocks * tokens_per_block, bytes_per_token[group]], host memory.

        Raises:
            ValueError: wrong dtype, shape or range, or some of the blocks were sent before and some were not.
        """
        rows = self._checked(group, first_block, np.asarray(codes))
        tokens_per_block = self._producer.layout.tokens_per_block
        step = max(1, self._producer.max_write_bytes // self._producer.layout.group_bytes(group))
        for start in range(0, len(rows) // tokens_per_block, step):
            piece = rows[start * tokens_per_block : (start + step) * tokens_per_block]
            self._send_piece(group, first_block + start, piece)

    def finish(self, *, encode_ms: float | None = None) -> None:
        """Nothing more will be sent; the consumer is told when all writes are done."""
        with self._lock:
            self._encode_ms = encode_ms
            self._state.finish()
        self._producer.trace.record("finished", self.transfer_id)
        self._settle()

    def cut(self, first_block: int, *, encode_ms: float | None = None) -> None:
        """The guard refuses the blocks from `first_block` (index in the prompt) on: nothing more will be sent.

        What was sent of earlier blocks is still written and used; the consumer computes the rest, and is told `guarded`.
        """
        if first_block not in self.blocks:
            raise ValueError(f"the cut at block {first_block} is not in the planned {self.blocks}")
        with self._lock:
            self._encode_ms = encode_ms
            self._state.cut("guarded")
        self._producer.count("guarded_blocks", self.blocks.stop - first_block)
        self._producer.trace.record("finished", self.transfer_id)
        self._settle()

    def abort(self, reason: FallbackReason = "aborted") -> None:
        """Give up: nothing more is posted, and the consumer is told why when nothing is outstanding."""
        with self._lock:
            self._state.fail(reason)
        self._settle()

    def posted(self) -> None:
        """See `WriteOwner`."""
        with self._lock:
            self._active_s = time.monotonic()
            if self._first_posted_s is None:
                self._first_posted_s = self._active_s

    def written(self) -> None:
        """See `WriteOwner`."""
        with self._lock:
            self._active_s = self._last_written_s = time.monotonic()
            self._state.written()
        self._settle()

    def dropped(self, reason: FallbackReason | None) -> None:
        """See `WriteOwner`."""
        with self._lock:
            self._state.dropped()
            if reason is not None:
                self._state.fail(reason)
        self._settle()

    def belongs_to(self, connection: Connection) -> bool:
        """True for the connection that granted it."""
        return self._connection is connection

    def is_overdue(self, now_s: float, *, lease_s: float, transfer_timeout_s: float) -> bool:
        """True when it did not move for `lease_s`, or is not written `transfer_timeout_s` after its first post."""
        with self._lock:
            if self._first_posted_s is not None and now_s - self._first_posted_s > transfer_timeout_s:
                return True
            return now_s - self._active_s > lease_s

    def _checked(self, group: int, first_block: int, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        layout = self._producer.layout
        if not 0 <= group < layout.num_groups:
            raise ValueError(f"group {group} of {layout.num_groups}")
        width = layout.bytes_per_token[group]
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != width or len(rows) % layout.tokens_per_block:
            raise ValueError(
                f"group {group}: codes are {rows.dtype} {rows.shape}; expected uint8 [n * {layout.tokens_per_block}, {width}]"
            )
        num_blocks = len(rows) // layout.tokens_per_block
        if num_blocks < 1 or first_block < self.blocks.start or first_block + num_blocks > self.blocks.stop:
            raise ValueError(f"blocks {first_block}+{num_blocks} are not in the planned {self.blocks}")
        return rows

    def _send_piece(self, group: int, first_block: int, rows: npt.NDArray[np.uint8]) -> None:
        layout = self._producer.layout
        num_blocks = len(rows) // layout.tokens_per_block
        relative = first_block - self.blocks.start
        with self._lock:
            if not self._state.queue(group, relative, num_blocks):
                return
            self._active_s = time.monotonic()
        note = Notification(
            session=self._session.id,
            transfer_id=self.transfer_id,
            group=group,
            first_block=first_block,
            num_blocks=num_blocks,
            generation=self._grant.generation,
            num_bytes=rows.size,
        )
        self._producer.trace.record(
            "encoded",
            self.transfer_id,
            group=group,
            first_block=first_block,
            num_blocks=num_blocks,
            num_bytes=rows.size,
        )
        span = layout.span(group, relative, num_blocks, extent_blocks=len(self.blocks))
        self._queue(rows, note, self._grant.offset + span.start)

    def _queue(self, rows: npt.NDArray[np.uint8], note: Notification, remote_offset: int) -> None:
        buffer, outbox = self._producer.buffer, self._session.outbox
        started_s = time.monotonic()
        try:
            extent = buffer.reserve(rows.size, timeout_s=BACKPRESSURE_S - self._backpressure_s)
        except ExtentsFullError as error:
            logger.warning("transfer %s: send buffer: %s (transport.send_buffer_bytes)", self.transfer_id, error)
            self.dropped("send_buffer_full")
            return
        self._backpressure_s += time.monotonic() - started_s
        view: Bytes = buffer.view(extent)
        np.copyto(view.reshape(rows.shape), rows)
        write = QueuedWrite(owner=self, extent=extent, remote_offset=remote_offset, notification=note)
        if outbox is None:
            raise RuntimeError("a push exists before its session has an outbox")
        outbox.put(write)

    def _settle(self) -> None:
        with self._lock:
            if self._has_ended or not self._state.is_drained:
                return
            self._has_ended = True
            write_ms = None
            if self._first_posted_s is not None and self._last_written_s is not None:
                write_ms = max(0.0, (self._last_written_s - self._first_posted_s) * 1e3)
            ended = Ended(self.transfer_id, self._state.num_written, self._state.end_reason, self._encode_ms, write_ms)
        self._producer.control.call(self._producer.push_ended, self, ended)

    def tell(self, ended: Ended) -> None:
        """Tell the consumer, and whoever waits for the revocation. In the control loop."""
        self._connection.post(ended)
        if not self.ended.done():
            self.ended.set_result(ended)


class Producer:
    """Prefill side of the transfer.

    Args:
        transport: how bytes travel (`session.open_transport`).
        config: buffer size, window and deadlines.
        control: heartbeat, leases and secret.
        listen: "host:port" of the control listener; port 0 takes any free one (`address` says which).
        fingerprint: of the translator.
        layout: sizes of codes.
        trace: where timestamps go.

    Raises:
        ControlError: see `ControlServer`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        config: TransportConfig,
        control: ControlConfig,
        listen: str,
        fingerprint: str,
        layout: CodeLayout,
        trace: TraceLog | None = None,
    ) -> None:
        self.layout = layout
        self.config = config
        self.trace = trace or TraceLog()
        self.buffer = SendBuffer(config.send_buffer_bytes)
        self.max_write_bytes = max(1, min(MAX_WRITE_BYTES, config.send_buffer_bytes // 4))
        self._transport = transport
        self._control_config = control
        self._incarnation = secrets.token_hex(8)
        self._terms = Terms("producer", transport.version, fingerprint, layout, self._incarnation)
        self._lock = threading.Lock()
        self._push_has_ended = threading.Condition(self._lock)
        self._is_draining = False
        self._counters: Counter[str] = Counter()
        self._sessions: dict[Connection, _Session] = {}
        self._num_senders = 0
        self._pushes: dict[str, Push] = {}
        self._pending: dict[bytes, deque[Push]] = {}  # by last key: keys are chained, so it stands for the whole prefix
        self._num_pending_by_length: Counter[int] = Counter()
        self.control = ControlServer(control, listen=listen, handler=self)
        self.address = self.control.address
        interval_s = min(control.heartbeat_s, control.lease_s / 4, config.transfer_timeout_s / 4)
        self.control.start_timer(self._reap, interval_s=interval_s)
        self.control.start()
        atexit.register(self.close)

    def plan(self, block_keys: Sequence[bytes]) -> Push | None:
        """The pending push whose blocks are a prefix of these, the longest first; it is then yours to finish or abort.

        Takes microseconds and does no I/O. None where no decode worker waits for this prompt.
        """
        with self._lock:
            for num_blocks in sorted(self._num_pending_by_length, reverse=True):
                if num_blocks <= len(block_keys) and block_keys[num_blocks - 1] in self._pending:
                    push = self._pending[block_keys[num_blocks - 1]][0]
                    self._forget_pending(push)
                    self._counters["planned"] += 1
                    self.trace.record("planned", push.transfer_id)
                    return push
        return None

    def count(self, what: str, number: int) -> None:
        """Add to a counter; from any thread."""
        with self._lock:
            self._counters[what] += number

    def statistics(self) -> dict[str, int]:
        """Counters since the start: granted, planned, ended, ended_<reason> for each failure, guarded_blocks, control_*.

        And the room that is left in the send buffer.
        """
        with self._lock:
            counters = dict(self._counters)
        return counters | {"send_buffer_free_bytes": self.buffer.num_free_bytes} | self.control.statistics()

    def drain(self, *, timeout_s: float) -> bool:
        """Refuse new grants (`draining`) and wait until no push is open; False where some were after `timeout_s`."""
        with self._push_has_ended:
            self._is_draining = True
            return self._push_has_ended.wait_for(lambda: not self._pushes, timeout_s)

    def holds(self, transfer_id: str) -> bool:
        """True for a push that is open: its prompt is to be run here, also while draining."""
        return transfer_id in self._pushes

    def close(self) -> None:
        """Let finished pushes be written, fail the others, destroy all senders, close the listener. May be repeated."""
        atexit.unregister(self.close)
        if self.control.is_running:
            with self._push_has_ended:
                self._is_draining = True
                self._push_has_ended.wait_for(self._nothing_leaves, self.config.write_timeout_s)
        self.control.close()
        with self._lock:
            outboxes = [session.outbox for session in self._sessions.values() if session.outbox]
        for outbox in outboxes:
            outbox.stop("this side shuts down")
            outbox.join(10)

    async def handle(self, connection: Connection, body: Body) -> Body | None:
        """See `control.Handler`."""
        match body:
            case SessionHello():
                return self._welcome(connection, body)
            case SessionArena():
                return await self._connect_arena(connection, body)
            case Grant():
                return self._grant(connection, body)
            case Revoke():
                return await self._revoke(connection, body)
            case TraceQuery():
                return TraceReply(self.trace.events(body.transfer_id)[-MAX_TRACE_EVENTS:])
            case StatusQuery():
                return self._status()
        raise ControlError(
            f"a prefill worker does not answer {type(body).__name__}; is this the decode worker's address?"
        )

    def closed(self, connection: Connection, why: str) -> None:
        """See `control.Handler`: the decode worker is gone, so nothing may leave for it any more."""
        session = self._sessions.get(connection)
        if session is None:
            return
        logger.info("session with decode worker %s ended: %s", connection.peer, why)
        for push in [push for push in self._pushes.values() if push.belongs_to(connection)]:
            push.abort("consumer_gone")
        if session.outbox is not None:
            session.outbox.stop(why)
        else:
            self._forget_session(connection)

    def _nothing_leaves(self) -> bool:
        return not any(push.is_leaving for push in self._pushes.values())

    def push_ended(self, push: Push, ended: Ended) -> None:
        """A push is drained. In the control loop."""
        with self._lock:
            self._forget_pending(push)
            self._pushes.pop(push.transfer_id, None)
            self._counters["ended"] += 1
            if ended.reason is not None:
                self._counters[f"ended_{ended.reason}"] += 1
            self._push_has_ended.notify_all()
        push.tell(ended)

    def _welcome(self, connection: Connection, hello: SessionHello) -> Body:
        self._terms.check(hello)
        with self._lock:
            self._sessions[connection] = _Session(hello)
        return self._terms.welcome()

    async def _connect_arena(self, connection: Connection, arena: SessionArena) -> Body:
        session = self._sessions.get(connection)
        if session is None or session.outbox is not None:
            raise ControlError("an arena is named once, after the terms were agreed on")
        remote = RemoteArena(arena.metadata, arena.address, arena.num_bytes)
        self._num_senders += 1
        name = f"scd-{self._incarnation}-{self._num_senders}"
        outbox = Outbox(
            lambda: self._transport.open_sender(name, self.buffer.buffer, remote),
            buffer=self.buffer,
            config=self.config,
            trace=self.trace,
            on_closed=lambda why: self.control.call(self._outbox_closed, connection, why),
        )
        session.id, session.arena_bytes, session.outbox = arena.session, arena.num_bytes, outbox
        outbox.start()
        try:
            await asyncio.wait_for(asyncio.wrap_future(outbox.ready), _SETUP_TIMEOUT_S)
        except TransportError as error:
            raise RefusedError("producer_unreachable", f"cannot connect the data path: {error}") from error
        return SessionReady()

    def _outbox_closed(self, connection: Connection, why: str) -> None:
        connection.close(f"the data path ended: {why}")
        self._forget_session(connection)

    def _forget_session(self, connection: Connection) -> None:
        with self._lock:
            self._sessions.pop(connection, None)

    def _grant(self, connection: Connection, grant: Grant) -> Body:
        session = self._sessions.get(connection)
        if session is None or session.outbox is None or not session.outbox.is_alive():
            raise ControlError("a grant needs a session with an arena")
        expected_bytes = self.layout.tokens_per_block * sum(self.layout.bytes_per_token) * len(grant.block_keys)
        if grant.num_bytes != expected_bytes or grant.offset + grant.num_bytes > session.arena_bytes:
            self.count("refused_grants", 1)
            raise ControlError(
                f"grant of {grant.num_bytes} bytes at {grant.offset}; {expected_bytes} inside the arena expected"
            )
        with self._lock:
            if self._is_draining:
                raise RefusedError("draining", "this prefill worker shuts down")
            if grant.transfer_id in self._pushes:
                raise ControlError(f"transfer {grant.transfer_id} was granted before")
            if len(self._pushes) >= MAX_PUSHES:
                raise RefusedError("aborted", f"more than {MAX_PUSHES} transfers at once")
            push = Push(self, connection, session, grant)
            self._pushes[push.transfer_id] = push
            self._pending.setdefault(push.last_key, deque()).append(push)
            self._num_pending_by_length[push.blocks.stop] += 1
            self._counters["granted"] += 1
        self.trace.record("granted", push.transfer_id, first_block=push.blocks.start, num_blocks=len(push.blocks))
        return Granted()

    async def _revoke(self, connection: Connection, revoke: Revoke) -> Body:
        push = self._pushes.get(revoke.transfer_id)
        if push is None or not push.belongs_to(connection):
            return Ended(revoke.transfer_id, 0, "unknown_transfer")
        push.abort("timeout")
        return await asyncio.shield(push.ended)

    def _status(self) -> Status:
        return Status(
            role="producer",
            fingerprint=self._terms.fingerprint,
            incarnation=self._incarnation,
            transport=self._transport.version,
            lane=self._transport.lane,
            num_sessions=len(self._sessions),
            counters=self.statistics(),
        )

    def _forget_pending(self, push: Push) -> None:
        queue = self._pending.get(push.last_key)
        if queue is None or push not in queue:
            return
        queue.remove(push)
        if not queue:
            del self._pending[push.last_key]
        self._num_pending_by_length[push.blocks.stop] -= 1
        if not self._num_pending_by_length[push.blocks.stop]:
            del self._num_pending_by_length[push.blocks.stop]

    def _reap(self) -> None:
        """Timer-driven: leases end even when no new work arrives."""
        lease_s, timeout_s = self._control_config.lease_s, self.config.transfer_timeout_s
        now_s = time.monotonic()
        with self._lock:
            pending = {push.transfer_id for queue in self._pending.values() for push in queue}
            pushes = list(self._pushes.values())
        for push in pushes:
            if push.is_overdue(now_s, lease_s=lease_s, transfer_timeout_s=timeout_s):
                push.abort("not_encoded" if push.transfer_id in pending else "timeout")
