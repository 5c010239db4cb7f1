"""Who may write where: sessions with prefill workers, and the arena extents lent to each of their transfers.

Life of an extent: allocated for a grant -> freed when the producer says that nothing of the transfer is outstanding
(`Ended`). Where a transfer fails before that, its extent is quarantined and the producer is asked (`Revoke`). No answer, or
a lost connection, ends the session: its receiver is destroyed, which is the only fence there is, and only then its extents
are free. The next transfer from that address gets a new session under a new name.

Everything runs in the control loop's thread, except what makes and destroys receivers, which takes up to half a second and
has a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from scd_trt.config import ControlConfig
from scd_trt.transfer.connection import Address, Connection, ControlError, UnreachableError
from scd_trt.transfer.extents import Extent, ExtentAllocator, ExtentsFullError
from scd_trt.transfer.inbox import Inbox, Incoming
from scd_trt.transfer.messages import Ended, Grant, Granted, Revoke, SessionArena, SessionReady, SessionWelcome
from scd_trt.transfer.terms import Terms
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.transport import Receiver, Transport, TransportError

if TYPE_CHECKING:
    from scd_trt.config import TransportConfig

logger = logging.getLogger(__name__)

MAX_SESSIONS = 64
MAX_OPEN_TRANSFERS = 4096
_SETUP_TIMEOUT_S = 10.0
LAST_LOOK_S = 2.0  # what a producer wrote before its last word is in the arena; the inbox looks every few milliseconds
T = TypeVar("T")


@dataclass
class _Session:
    """One prefill worker, from its terms being agreed on to the fence."""

    producer: str
    connection: Connection
    id: bytes
    receiver: Receiver
    held: dict[str, Incoming] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)


class Lender:
    """Sessions and extents of a decode worker.

    Args:
        inbox: lands what arrives; its arena is what is lent.
        connect: opens a control connection whose messages and end are passed on to `on_ended` and `closed`.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        connect: Callable[[Address], Coroutine[Any, Any, Connection]],
        transport: Transport,
        terms: Terms,
        config: TransportConfig,
        control: ControlConfig,
        trace: TraceLog,
    ) -> None:
        self._inbox, self._connect, self._transport, self._terms = inbox, connect, transport, terms
        self._config, self._control_config, self._trace = config, control, trace
        self._extents = ExtentAllocator(inbox.arena.num_bytes)
        self._sessions: dict[str, _Session] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_receivers = 0
        self._counters: Counter[str] = Counter()
        self._unfenced: list[Receiver] | None = None  # a list once the worker shuts down

    @property
    def num_sessions(self) -> int:
        """Prefill workers connected."""
        return len(self._sessions)

    def statistics(self) -> dict[str, int]:
        """Room in the arena, and what happened to sessions."""
        sizes = {
            "arena_free_bytes": self._extents.num_free_bytes,
            "arena_quarantined_bytes": self._extents.num_quarantined_bytes,
        }
        return sizes | self._counters

    async def grant(self, incoming: Incoming, producer: str, *, num_blocks: int) -> None:
        """Lend an extent for the last `num_blocks` blocks of a transfer to a prefill worker.

        Raises:
            ExtentsFullError: no room.
            ControlError: no session, or the grant was not taken; the extent is then on its way back by itself.
            TransportError: the data path cannot be opened.
        """
        if sum(len(session.held) for session in self._sessions.values()) >= MAX_OPEN_TRANSFERS:
            raise ExtentsFullError(f"{MAX_OPEN_TRANSFERS} transfers are open")
        session = await self._session(producer)
        num_bytes = self._inbox.layout.block_bytes * num_blocks
        extent = self._extents.allocate(num_bytes)
        incoming.landing.granted_s = time.monotonic()
        self._inbox.add(incoming, extent, session=session.id, num_blocks=num_blocks)
        session.held[incoming.transfer_id] = incoming
        first, keys = incoming.num_stored, incoming.block_keys[incoming.num_stored :]
        self._trace.record("granted", incoming.transfer_id, first_block=first, num_blocks=num_blocks)
        grant = Grant(incoming.transfer_id, keys, first, extent.offset, num_bytes, extent.generation)
        await session.connection.request(grant, Granted, timeout_s=self._control_config.peer_timeout_s)

    def on_ended(self, connection: Connection, ended: Ended) -> None:
        """A producer says that a push is over."""
        for session in self._sessions.values():
            incoming = session.held.get(ended.transfer_id)
            if session.connection is connection and incoming is not None:
                incoming.encode_ms, incoming.write_ms = ended.encode_ms, ended.write_ms
                self._trace.record("ended", ended.transfer_id)
                self._inbox.end(incoming, num_writes=ended.num_writes, reason=ended.reason)

    def closed(self, connection: Connection, why: str) -> None:
        """A prefill worker is gone: fail at once what waits for it, fence, then free.

        Transfers of which it had said that all is written get a last look first: it may have left in peace.
        """
        for session in [session for session in self._sessions.values() if session.connection is connection]:
            logger.warning("session with prefill worker %s ended: %s", session.producer, why)
            del self._sessions[session.producer]
            self._counters["sessions_lost"] += 1
            written = [incoming for incoming in session.held.values() if _is_written(incoming)]
            for incoming in [incoming for incoming in session.held.values() if incoming not in written]:
                self._inbox.fail(incoming, "producer_gone")
                self._quarantine(session, incoming)
            if written and self._unfenced is None:
                self._spawn(self._end_after_last_look(session, written))
            else:
                self._end(session)

    def settle(self, incoming: Incoming) -> None:
        """Decide what becomes of a transfer's extent; called after each change."""
        session = self._holder(incoming)
        if session is None or incoming.transfer_id in session.quarantined:
            return
        if incoming.landing.is_terminal and incoming.landing.is_drained:
            self._inbox.remove(incoming)
            self._give_back(session, incoming, self._extents.free)
        elif incoming.landing.state == "failed":
            self._revoke_soon(session, incoming)

    def reap(self, now_s: float) -> None:
        """Ask about transfers that have landed but whose producer never said that they ended."""
        lease_s, timeout_s = self._control_config.lease_s, self._config.transfer_timeout_s
        for session in list(self._sessions.values()):
            for incoming in list(session.held.values()):
                is_over = incoming.landing.is_terminal and incoming.transfer_id not in session.quarantined
                if is_over and incoming.landing.is_overdue(now_s, lease_s=lease_s, transfer_timeout_s=timeout_s):
                    self._revoke_soon(session, incoming)

    def begin_shutdown(self) -> None:
        """From now on receivers are only collected; `finish_shutdown` destroys them, since no thread may start then."""
        self._unfenced = []

    def finish_shutdown(self) -> None:
        """Destroy the receivers of all sessions; the control loop has ended."""
        for receiver in self._unfenced or []:
            receiver.destroy()
        self._unfenced = []

    async def _session(self, producer: str) -> _Session:
        address = Address.parse(producer)
        name = str(address)
        if name not in self._sessions:
            await asyncio.shield(self._opening.get(name) or self._start_opening(address))
        if name not in self._sessions:
            raise UnreachableError(f"prefill worker {name} left right after the handshake")
        return self._sessions[name]

    def _start_opening(self, address: Address) -> asyncio.Task[None]:
        name = str(address)
        if len(self._sessions) + len(self._opening) >= MAX_SESSIONS:
            raise ControlError(f"{MAX_SESSIONS} prefill workers are connected; no session with {name}")
        task = asyncio.create_task(self._open_session(address))
        self._opening[name] = task

        def opened(task: asyncio.Task[None]) -> None:
            del self._opening[name]
            if not task.cancelled():
                task.exception()  # every waiter gets it; with none left it is nobody's

        task.add_done_callback(opened)
        return task

    async def _open_session(self, address: Address) -> None:
        connection = await self._connect(address)
        try:
            welcome = await connection.request(self._terms.hello(), SessionWelcome, timeout_s=_SETUP_TIMEOUT_S)
            self._terms.check(welcome)
            session = await self._open_receiver(str(address), connection)
            self._sessions[session.producer] = session  # from here on `closed` fences it
            arena = self._inbox.arena
            here = SessionArena(session.id, session.receiver.metadata, arena.address, arena.num_bytes)
            await connection.request(here, SessionReady, timeout_s=_SETUP_TIMEOUT_S)
        except (ControlError, TransportError) as error:
            connection.close(f"the handshake failed: {error}")
            raise
        logger.info("session with prefill worker %s (%s) over %s", address, welcome.incarnation, self._transport.lane)

    async def _open_receiver(self, producer: str, connection: Connection) -> _Session:
        self._num_receivers += 1
        name = f"scd-{self._terms.incarnation}-{self._num_receivers}"
        making = _in_thread(lambda: self._transport.open_receiver(name, self._inbox.arena))
        receiver = await asyncio.wrap_future(making)
        if connection.is_closed:
            _in_thread(receiver.destroy)
            raise UnreachableError(f"prefill worker {producer} left during the handshake")
        session = _Session(producer, connection, secrets.token_bytes(16), receiver)
        self._inbox.open(session.id, receiver)
        return session

    def _holder(self, incoming: Incoming) -> _Session | None:
        for session in self._sessions.values():
            if incoming.transfer_id in session.held:
                return session
        return None

    def _quarantine(self, session: _Session, incoming: Incoming) -> None:
        if incoming.transfer_id not in session.quarantined:
            session.quarantined.add(incoming.transfer_id)
            self._inbox.remove(incoming)
            self._extents.quarantine(_extent(incoming))

    def _revoke_soon(self, session: _Session, incoming: Incoming) -> None:
        self._quarantine(session, incoming)
        self._spawn(self._revoke(session, incoming))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _revoke(self, session: _Session, incoming: Incoming) -> None:
        """Ask the producer to stop; its word frees the extent, its silence ends the session."""
        timeout_s = self._config.write_timeout_s + self._control_config.peer_timeout_s
        try:
            await session.connection.request(Revoke(incoming.transfer_id), Ended, timeout_s=timeout_s)
        except ControlError as error:
            session.connection.close(f"revocation failed: {error}")
            return
        if self._sessions.get(session.producer) is session:
            self._give_back(session, incoming, self._extents.free_fenced)

    async def _end_after_last_look(self, session: _Session, written: list[Incoming]) -> None:
        try:
            await asyncio.wait([asyncio.wrap_future(incoming.terminal) for incoming in written], timeout=LAST_LOOK_S)
        finally:
            self._end(session)

    def _end(self, session: _Session) -> None:
        for incoming in list(session.held.values()):
            self._inbox.fail(incoming, "producer_gone")
            self._quarantine(session, incoming)
        self._inbox.shut(session.id)
        if self._unfenced is None:
            self._spawn(self._fence(session))
        else:
            self._unfenced.append(session.receiver)

    async def _fence(self, session: _Session) -> None:
        """Destroy the receiver; then no byte can land any more, and its extents are free."""
        await asyncio.wrap_future(_in_thread(session.receiver.destroy))
        for incoming in list(session.held.values()):
            self._give_back(session, incoming, self._extents.free_fenced)
        self._counters["fences"] += 1

    def _give_back(self, session: _Session, incoming: Incoming, free: Callable[[Extent], None]) -> None:
        del session.held[incoming.transfer_id]
        session.quarantined.discard(incoming.transfer_id)
        free(_extent(incoming))
        incoming.closed.set_result(None)


def _is_written(incoming: Incoming) -> bool:
    return incoming.landing.num_writes is not None and not incoming.landing.is_terminal


def _extent(incoming: Incoming) -> Extent:
    if incoming.extent is None:
        raise RuntimeError(f"transfer {incoming.transfer_id} holds no extent")
    return incoming.extent


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread: NIXL may take its time, and must not hold up the loop or the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled: the agent exists, wanted or not

    def run() -> None:
        try:
            result = function()
        except TransportError as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="scd-agent", daemon=True).start()
    return future
