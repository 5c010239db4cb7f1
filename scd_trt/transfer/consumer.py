"""The decode worker's end: told by the router which prompts to expect, it has their codes sent and serves what has landed.

Threads: the control loop's thread answers the router; the `Inbox` thread lands codes; `match`, `pin` and `note` are called by
the engine and touch only the code store and a short lock. Sessions with prefill workers and arena extents: `lender.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scd_trt.config import ControlConfig
from scd_trt.transfer.connection import Connection, ControlError, RefusedError, VersionError
from scd_trt.transfer.control import ControlServer
from scd_trt.transfer.extents import ExtentsFullError
from scd_trt.transfer.inbox import Inbox, Incoming
from scd_trt.transfer.lender import Lender
from scd_trt.transfer.messages import (
    Body,
    Cancel,
    Ended,
    Expect,
    Expected,
    ReportQuery,
    Status,
    StatusQuery,
    TraceQuery,
    TraceReply,
    TransferReport,
    Wait,
    Waited,
)
from scd_trt.transfer.states import FallbackReason, Landing
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.terms import Terms
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.transport import Buffer, Transport, TransportError
from scd_trt.transfer.wire import CodeLayout

if TYPE_CHECKING:
    from scd_trt.config import TransportConfig

logger = logging.getLogger(__name__)

MAX_KEPT_TRANSFERS = 8192
MAX_KEPT_KEYS = 1 << 20
MAX_TRACE_EVENTS = 4096
REPORT_PATIENCE_S = 0.5  # the producer's last word travels beside the data and may come a moment after it


class PinnedBlocks:
    """The landed prefix of a prompt, kept until released; readable from any thread. Also a context manager."""

    def __init__(self, store: CodeStore, layout: CodeLayout, block_keys: Sequence[bytes]) -> None:
        self._store, self._layout = store, layout
        self._payloads = store.pin(block_keys)
        self._keys = list(block_keys[: len(self._payloads)])
        self._is_released = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the prefix; may be zero."""
        return len(self._payloads)

    def codes(self, group: int, *, first_block: int = 0) -> npt.NDArray[np.uint8]:
        """Codes of one group, of the blocks from `first_block` on.

        Returns:
            fresh array uint8 [(num_blocks - first_block) * tokens_per_block, bytes_per_token[group]].
        """
        span, width = self._layout.entry_span(group), self._layout.bytes_per_token[group]
        payloads = self._payloads[first_block:]
        rows = np.empty((len(payloads), span.stop - span.start), dtype=np.uint8)
        for row, payload in zip(rows, payloads, strict=True):
            row[:] = np.frombuffer(payload, dtype=np.uint8, offset=span.start, count=len(row))
        return rows.reshape(-1, width)

    def release(self) -> None:
        """Let the store evict them again. May be repeated."""
        if not self._is_released:
            self._is_released = True
            self._store.unpin(self._keys)

    def __enter__(self) -> PinnedBlocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Consumer:
    """Decode side of the transfer.

    Args:
        transport: how bytes travel (`session.open_transport`).
        config: arena size and deadlines.
        control: heartbeat, leases and secret.
        listen: "host:port" of the control listener; port 0 takes any free one (`address` says which).
        fingerprint: of the translator.
        layout: sizes of codes.
        store: where landed blocks go.
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
        store: CodeStore,
        trace: TraceLog | None = None,
    ) -> None:
        self.config, self.layout, self.store = config, layout, store
        self.trace = trace or TraceLog()
        self._transport = transport
        self._control_config = control
        self._terms = Terms("consumer", transport.version, fingerprint, layout, secrets.token_hex(8))
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._transfers: OrderedDict[str, Incoming] = OrderedDict()
        self._by_last_key: dict[bytes, deque[Incoming]] = {}
        self._open: dict[str, tuple[Incoming, PinnedBlocks]] = {}  # not terminal yet
        self._is_draining = False
        self._num_kept_keys = 0
        self.control = ControlServer(control, listen=listen, handler=self)
        self.address = self.control.address
        arena = Buffer(config.arena_bytes)
        self._inbox = Inbox(arena, layout=layout, store=store, trace=self.trace, on_change=self._changed)
        self._lender = Lender(
            self._inbox,
            connect=self.control.connect,
            transport=transport,
            terms=self._terms,
            config=config,
            control=control,
            trace=self.trace,
        )
        self._inbox.start()
        self.control.start_timer(self._reap, interval_s=_reap_interval_s(config, control))
        self.control.start()
        atexit.register(self.close)

    def match(self, block_keys: Sequence[bytes]) -> int:
        """Blocks of the contiguous prefix that have landed and were verified. Microseconds, no I/O."""
        return self.store.match(block_keys)

    def pin(self, block_keys: Sequence[bytes]) -> PinnedBlocks:
        """Match and pin in one step: what is promised to the engine cannot be evicted before it is loaded."""
        return PinnedBlocks(self.store, self.layout, block_keys)

    def note(
        self,
        block_keys: Sequence[bytes],
        *,
        matched_tokens: int,
        decode_ms: float | None = None,
        reason: FallbackReason | None = None,
    ) -> None:
        """Add what the connector knows of one request to the report of one transfer of its prompt; ignored without any.

        An engine does not say which transfer a request belongs to: it is found by the prompt's last key. Where equal prompts
        are under way at once, the note goes, as a whole, to one that has none yet: first to one that is over (a router waits
        for that before it sends the request), then to one whose codes are there if some were used, and not if none were, then
        to the oldest.
        """
        with self._lock:
            candidates = self._by_last_key.get(block_keys[-1], ()) if block_keys else ()
            noteless = [incoming for incoming in candidates if incoming.matched_tokens is None]
            if not noteless:
                return
            used = matched_tokens > 0
            # the first of the best: they are in order of age
            incoming = max(noteless, key=lambda each: (each.landing.is_terminal, _has_codes(each) == used))
            incoming.matched_tokens, incoming.decode_ms, incoming.noted_reason = matched_tokens, decode_ms, reason

    def statistics(self) -> dict[str, int]:
        """Counters since the start: expected, landed_transfers, failed_<reason>, ignored_<cause>, arena_*, ..."""
        with self._lock:
            counters = dict(self._counters)
        return counters | self._inbox.statistics() | self._lender.statistics() | self.control.statistics()

    def drain(self, *, timeout_s: float) -> bool:
        """Ask for no more codes (`consumer_draining`) and wait for those that are due.

        Returns:
            False where some were still due after `timeout_s`.
        """
        self._is_draining = True
        return self.control.run(self._all_over(timeout_s), timeout_s=timeout_s + 10)

    def holds(self, transfer_id: str) -> bool:
        """True for a transfer that was let in: its request is to be answered here, also while draining."""
        incoming = self._transfers.get(transfer_id)
        return incoming is not None and incoming.landing.reason != "consumer_draining"

    def close(self) -> None:
        """Fail what is open, end all sessions, destroy all receivers. May be repeated."""
        atexit.unregister(self.close)
        self._lender.begin_shutdown()
        self.control.close()
        self._inbox.stop()
        self._inbox.join(10)
        self._lender.finish_shutdown()

    async def handle(self, connection: Connection, body: Body) -> Body | None:
        """See `connection.Handler`."""
        match body:
            case Expect():
                return await self._on_expect(body)
            case Wait():
                return await self._on_wait(body.transfer_id, body.timeout_s)
            case Cancel():
                return await self._on_cancel(body)
            case ReportQuery():
                return await self._on_report(body)
            case TraceQuery():
                return TraceReply(self.trace.events(body.transfer_id)[-MAX_TRACE_EVENTS:])
            case StatusQuery():
                return self._status()
            case Ended():
                self._lender.on_ended(connection, body)
                return None
        raise ControlError(
            f"a decode worker does not answer {type(body).__name__}; is this the prefill worker's address?"
        )

    def closed(self, connection: Connection, why: str) -> None:
        """See `connection.Handler`."""
        self._lender.closed(connection, why)

    async def _all_over(self, timeout_s: float) -> bool:
        due = [asyncio.wrap_future(incoming.terminal) for incoming, _ in self._open.values()]
        if due:
            await asyncio.wait(due, timeout=timeout_s)
        return not self._open

    async def _on_expect(self, expect: Expect) -> Expected:
        known = self._transfers.get(expect.transfer_id)
        if known is not None:
            return _expected(known, "")
        pins = self.pin(expect.block_keys)
        missing = len(expect.block_keys) - pins.num_blocks
        landing = Landing(num_groups=self.layout.num_groups, num_blocks=missing, granted_s=time.monotonic())
        incoming = Incoming(expect.transfer_id, expect.block_keys, num_stored=pins.num_blocks, landing=landing)
        self._remember(incoming, pins)
        text = await self._request_codes(incoming, expect.producer, missing) if missing else ""
        self._settle(incoming)
        return _expected(incoming, text)

    async def _request_codes(self, incoming: Incoming, producer: str, num_blocks: int) -> str:
        """Get a grant out, or fail the transfer; returns the failure for a person."""
        try:
            self._check_draining()
            self._check_store(len(incoming.block_keys))
            await self._lender.grant(incoming, producer, num_blocks=num_blocks)
        except (ControlError, TransportError, ExtentsFullError) as error:
            self._inbox.fail(incoming, _reason(error))
            return str(error)[:2048]
        return ""

    def _check_draining(self) -> None:
        if self._is_draining:
            raise RefusedError("consumer_draining", "this decode worker shuts down")

    def _check_store(self, num_blocks: int) -> None:
        num_bytes, capacity_bytes = num_blocks * self.layout.block_bytes, self.store.config.capacity_bytes
        if num_bytes > capacity_bytes:
            raise RefusedError(
                "store_full", f"{num_bytes} bytes of codes do not fit store.capacity_bytes {capacity_bytes}"
            )

    async def _on_wait(self, transfer_id: str, timeout_s: float) -> Waited:
        incoming = self._transfers.get(transfer_id)
        if incoming is None:
            return Waited("failed", "unknown_transfer")
        if not incoming.terminal.done():
            await asyncio.wait([asyncio.wrap_future(incoming.terminal)], timeout=timeout_s)
        if incoming.terminal.done():
            return Waited(incoming.landing.state, incoming.landing.reason)
        return Waited("landing" if incoming.landing.first_landing_s is not None else "waiting")

    async def _on_cancel(self, cancel: Cancel) -> Waited:
        if cancel.transfer_id in self._open:
            self._inbox.fail(self._open[cancel.transfer_id][0], "aborted")
        return await self._on_wait(cancel.transfer_id, self._control_config.peer_timeout_s)

    async def _on_report(self, query: ReportQuery) -> TransferReport:
        incoming = self._transfers.get(query.transfer_id)
        if incoming is None:
            raise ControlError(f"transfer {query.transfer_id} is unknown here: never expected, or long over")
        if incoming.landing.state == "landed" and incoming.num_granted and not incoming.closed.done():
            await asyncio.wait([asyncio.wrap_future(incoming.closed)], timeout=REPORT_PATIENCE_S)
        return _report(incoming)

    def _status(self) -> Status:
        return Status(
            role="consumer",
            fingerprint=self._terms.fingerprint,
            incarnation=self._terms.incarnation,
            transport=self._transport.version,
            lane=self._transport.lane,
            num_sessions=self._lender.num_sessions,
            counters=self.statistics(),
        )

    def _changed(self, incoming: Incoming) -> None:
        self.control.call(self._settle, incoming)

    def _settle(self, incoming: Incoming) -> None:
        """Tell who waits, once, and let the lender look at the extent."""
        landing = incoming.landing
        if landing.is_terminal and not incoming.terminal.done():
            incoming.terminal.set_result(None)
            self._open.pop(incoming.transfer_id)[1].release()
            with self._lock:
                self._counters[f"failed_{landing.reason}" if landing.reason else "landed_transfers"] += 1
        self._lender.settle(incoming)

    def _remember(self, incoming: Incoming, pins: PinnedBlocks) -> None:
        self._open[incoming.transfer_id] = incoming, pins
        with self._lock:
            self._counters["expected"] += 1
            self._transfers[incoming.transfer_id] = incoming
            if incoming.block_keys:
                self._by_last_key.setdefault(incoming.block_keys[-1], deque()).append(incoming)
            self._num_kept_keys += len(incoming.block_keys)
            while len(self._transfers) > MAX_KEPT_TRANSFERS or self._num_kept_keys > MAX_KEPT_KEYS:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, oldest = self._transfers.popitem(last=False)
        self._num_kept_keys -= len(oldest.block_keys)
        if oldest.block_keys:
            same = self._by_last_key[oldest.block_keys[-1]]
            same.remove(oldest)
            if not same:
                del self._by_last_key[oldest.block_keys[-1]]

    def _reap(self) -> None:
        """Timer-driven: leases end even when no new work arrives."""
        now_s = time.monotonic()
        lease_s, timeout_s = self._control_config.lease_s, self.config.transfer_timeout_s
        for incoming, _ in list(self._open.values()):
            if incoming.landing.is_overdue(now_s, lease_s=lease_s, transfer_timeout_s=timeout_s):
                self._inbox.fail(incoming, "timeout")
        self._lender.reap(now_s)
        self.store.reap()


def _reap_interval_s(config: TransportConfig, control: ControlConfig) -> float:
    return min(control.heartbeat_s, control.lease_s / 4, config.transfer_timeout_s / 4)


def _reason(error: Exception) -> FallbackReason:
    match error:
        case RefusedError():
            return error.reason
        case VersionError():
            return "version_mismatch"
        case ExtentsFullError():
            return "arena_full"
    return "producer_unreachable"


def _has_codes(incoming: Incoming) -> bool:
    return incoming.num_stored + incoming.landing.num_landed_blocks > 0


def _expected(incoming: Incoming, text: str) -> Expected:
    reason = incoming.landing.reason
    return Expected(incoming.num_stored, 0 if reason else incoming.num_granted, reason, text)


def _report(incoming: Incoming) -> TransferReport:
    landing = incoming.landing
    transfer_ms = incoming.write_ms
    if transfer_ms is None and landing.first_landing_s is not None and landing.last_landing_s is not None:
        transfer_ms = (landing.last_landing_s - landing.first_landing_s) * 1e3
    return TransferReport(
        transfer_id=incoming.transfer_id,
        state=landing.state,
        reason=landing.reason or incoming.noted_reason,
        num_blocks=len(incoming.block_keys),
        num_stored=incoming.num_stored,
        num_granted=incoming.num_granted,
        num_landed=landing.num_landed_blocks,
        bytes_received=incoming.bytes_received,
        num_writes=incoming.num_writes,
        expected_s=incoming.expected_s,
        first_landing_s=landing.first_landing_s,
        last_landing_s=landing.last_landing_s,
        transfer_ms=transfer_ms,
        encode_ms=incoming.encode_ms,
        decode_ms=incoming.decode_ms,
        matched_tokens=incoming.matched_tokens,
    )
