"""The two ends that the doctor moves bytes between, each a process of its own; control channel, NIXL and UCX as in workers.

    python -m scd_trt.doctor.ends listen JSON    prints {"address": "host:port"}, then serves until it is killed
    python -m scd_trt.doctor.ends dial JSON      prints one `Dialled` as JSON

JSON is `EndOptions`. As between workers, the end that listens writes (it is the prefill side) and the end that dials lends
the memory. Life of a test: status (versions, clock, round trips); hello and welcome (the terms that workers compare); arena;
writes, each with its content's digest in the notification; ready; status (time taken, lanes that UCX chose). Last the
dialling end compares the digests with what lies in its memory.

A process of its own, because UCX reads its settings once per process, and because a fault inside NIXL may kill it.
Listening off loopback needs the control secret; nothing is written to but memory that a peer offers over that channel.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from scd_trt import __version__
from scd_trt.config import MIB, ControlConfig, ScdError, Section, TransportConfig
from scd_trt.doctor import ucx_log
from scd_trt.transfer.connection import Address, Connection, ControlError, connect
from scd_trt.transfer.control import ControlServer
from scd_trt.transfer.messages import (
    Body,
    SessionArena,
    SessionHello,
    SessionReady,
    SessionWelcome,
    Status,
    StatusQuery,
)
from scd_trt.transfer.session import open_transport
from scd_trt.transfer.terms import Role, Terms
from scd_trt.transfer.transport import Buffer, Receiver, RemoteArena, Sender, Transport, TransportError
from scd_trt.transfer.wire import CodeLayout

ROLE = "doctor"
PIECE_BYTES = 4 * MIB
NUM_PIECES = 8
ARENA_BYTES = NUM_PIECES * PIECE_BYTES
MEASURED_S = 1.0
NUM_ROUND_TRIPS = 15
ROUND_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 2 * ROUND_TIMEOUT_S
_POLL_S = 5e-5
_NOTIFICATION = struct.Struct(">4sIQ")  # "SCDD", piece, xxh3-64 of its content
_MAGIC = b"SCDD"


class EndOptions(Section):
    """What both ends are told.

    Attributes:
        address: host:port to listen on or to dial.
        fingerprint: of the translator, compared as between workers.
    """

    address: str
    transport: TransportConfig = TransportConfig()
    control: ControlConfig = ControlConfig()
    fingerprint: str = "none"
    tokens_per_block: int = 32
    bytes_per_token: tuple[int, ...] = (1,)

    def terms(self, role: Role, transport: Transport) -> Terms:
        """This end's side of what workers compare."""
        layout = CodeLayout(self.tokens_per_block, self.bytes_per_token)
        return Terms(role, transport.version, self.fingerprint, layout, secrets.token_hex(8))


@dataclass(frozen=True)
class Dialled:
    """What the dialling end learned; later fields keep their defaults where it did not get that far.

    Attributes:
        role: of the peer: `doctor`, or that of a worker, which is compared but moves no bytes.
        software: package and UCX of the peer, in words.
        clock_offset_ms: the peer's clock less ours, known to half a round trip.
        sent_bytes: that the peer wrote in `seconds`, by its own clock.
        num_wrong_pieces: of the `NUM_PIECES` pieces, those whose digest did not come or was wrong.
        lanes: that UCX chose at the writing end.
        error: what ended the test early.
    """

    role: str = ""
    transport: str = ""
    software: str = ""
    fingerprint: str = ""
    round_trip_ms: float = 0.0
    clock_offset_ms: float | None = None
    sent_bytes: int = 0
    seconds: float = 0.0
    num_wrong_pieces: int = NUM_PIECES
    lanes: tuple[str, ...] = ()
    ucx_version: str = ""
    ucx_library: str = ""
    error: str = ""


class Listener:
    """Answers the dialling end; see `Handler`.

    Args:
        log: of UCX in this process.
    """

    def __init__(self, transport: Transport, terms: Terms, log: Path) -> None:
        self._transport, self._terms, self._log = transport, terms, log
        self._source = Buffer(ARENA_BYTES)
        self._source.array[:] = np.random.default_rng(secrets.randbits(64)).integers(
            0, 256, ARENA_BYTES, dtype=np.uint8
        )
        self._notifications = [notification(self._source, piece) for piece in range(NUM_PIECES)]
        self._agreed: set[Connection] = set()
        self._writing = asyncio.Lock()
        self._written = (0, 0.0)
        self._num_tests = 0

    async def handle(self, connection: Connection, body: Body) -> Body | None:
        """See `Handler`."""
        match body:
            case StatusQuery():
                return self._status()
            case SessionHello():
                self._terms.check(body)
                self._agreed.add(connection)
                return self._terms.welcome()
            case SessionArena() if connection in self._agreed:
                return await self._write(body)
        raise ControlError(f"the doctor's listener does not answer {type(body).__name__} now")

    def closed(self, connection: Connection, why: str) -> None:
        """See `Handler`."""
        self._agreed.discard(connection)

    def _status(self) -> Status:
        said = ucx_log.read_log(self._log)
        num_bytes, seconds = self._written
        counters = {"unix_us": time.time_ns() // 1000, "sent_bytes": num_bytes, "write_us": round(seconds * 1e6)}
        software = f"scd-trt {__version__}, ucx {said.version or 'unknown'}"
        lanes = " ".join(said.lanes)[:256]
        return Status(ROLE, self._terms.fingerprint, software, self._terms.transport, lanes, self._num_tests, counters)

    async def _write(self, arena: SessionArena) -> SessionReady:
        if arena.num_bytes != ARENA_BYTES:
            raise ControlError(
                f"the arena has {arena.num_bytes} bytes; the doctor's has {ARENA_BYTES}: run equal releases"
            )
        if self._writing.locked():
            raise ControlError("another test is running; try again in a minute")
        async with self._writing:
            self._num_tests += 1
            remote = RemoteArena(arena.metadata, arena.address, arena.num_bytes)
            self._written = await asyncio.to_thread(self._write_rounds, f"scd-doctor-{secrets.token_hex(8)}", remote)
        return SessionReady()

    def _write_rounds(self, name: str, remote: RemoteArena) -> tuple[int, float]:
        """Bytes written and the time they took, in a thread of its own that alone touches the agent."""
        sender = self._transport.open_sender(name, self._source, remote)
        try:
            write_pieces(sender, self._notifications[:1])  # connects, which is not what is measured
            begin_s, num_bytes = time.perf_counter(), 0
            while time.perf_counter() - begin_s < MEASURED_S:
                write_pieces(sender, self._notifications)
                num_bytes += ARENA_BYTES
            return num_bytes, time.perf_counter() - begin_s
        finally:
            sender.destroy()


def write_pieces(sender: Sender, notifications: Sequence[bytes]) -> None:
    """Write the first pieces, one per notification, at once and wait for all of them.

    Raises:
        TransportError: one failed, or they took longer than `ROUND_TIMEOUT_S`.
    """
    outstanding = [
        sender.write(piece * PIECE_BYTES, piece * PIECE_BYTES, PIECE_BYTES, notification=told)
        for piece, told in enumerate(notifications)
    ]
    deadline_s = time.monotonic() + ROUND_TIMEOUT_S
    while outstanding:
        if time.monotonic() > deadline_s:
            raise TransportError(f"{len(outstanding)} writes of {PIECE_BYTES} bytes not done in {ROUND_TIMEOUT_S:g} s")
        waiting = []
        for handle in outstanding:
            if sender.poll(handle):
                sender.release(handle)
            else:
                waiting.append(handle)
        outstanding = waiting
        time.sleep(_POLL_S)


def notification(source: Buffer, piece: int) -> bytes:
    """What is sent with a piece."""
    return _NOTIFICATION.pack(_MAGIC, piece, _digest(source, piece))


def num_wrong_pieces(arena: Buffer, notifications: list[bytes]) -> int:
    """Pieces of the arena that no notification with their digest came for."""
    told = (_NOTIFICATION.unpack(data) for data in notifications if len(data) == _NOTIFICATION.size)
    digests = {piece: digest for magic, piece, digest in told if magic == _MAGIC}
    return sum(digests.get(piece) != _digest(arena, piece) for piece in range(NUM_PIECES))


def _digest(buffer: Buffer, piece: int) -> int:
    return xxhash.xxh3_64_intdigest(buffer.array[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES].data)


def serve(options: EndOptions, announce: Callable[[str], None]) -> None:
    """Listen until interrupted; only in a process that has not loaded NIXL yet.

    Raises:
        ControlError, LibraryError: the address cannot be listened on; NIXL cannot be set up.
    """
    with tempfile.TemporaryDirectory(prefix="scd-doctor-") as scratch:
        log = Path(scratch) / "ucx.log"
        os.environ.update(ucx_log.logging_to(log))
        transport = open_transport(options.transport)
        listener = Listener(transport, options.terms("producer", transport), log)
        server = ControlServer(options.control, listen=options.address, handler=listener)
        try:
            server.start()
            announce(server.address)
            threading.Event().wait()
        finally:
            server.close()


def dial(options: EndOptions) -> Dialled:
    """Test the way to a listener, in a process that has not loaded NIXL yet. Failures are in the result."""
    with tempfile.TemporaryDirectory(prefix="scd-doctor-") as scratch:
        log = Path(scratch) / "ucx.log"
        os.environ.update(ucx_log.logging_to(log))
        found: dict[str, object] = {}
        try:
            asyncio.run(_Dialling(options, found).run())
        except ScdError as error:
            found["error"] = str(error)
        said = ucx_log.read_log(log)
        return Dialled(**(found | {"ucx_version": said.version, "ucx_library": said.library}))  # type: ignore[arg-type]


class _Dialling:
    """One test; fills `found` with fields of `Dialled` as they become known."""

    def __init__(self, options: EndOptions, found: dict[str, object]) -> None:
        self._options, self._found = options, found

    async def run(self) -> None:
        options = self._options
        connection = await connect(Address.parse(options.address), options.control, self)
        try:
            await self._ask(connection)
            if self._found["role"] == ROLE:
                await self._receive(connection)
        finally:
            connection.close("the test is over")

    async def handle(self, connection: Connection, body: Body) -> Body | None:
        raise ControlError(f"the doctor does not answer {type(body).__name__}")

    def closed(self, connection: Connection, why: str) -> None:
        """Requests under way fail by themselves."""

    async def _ask(self, connection: Connection) -> None:
        """Who that is, how far away, and what time it is there."""
        trips = []
        for _ in range(NUM_ROUND_TRIPS):
            begin_s, begin_us = time.perf_counter(), time.time_ns() // 1000
            status = await connection.request(StatusQuery(), Status, timeout_s=self._options.control.peer_timeout_s)
            seconds = time.perf_counter() - begin_s
            trips.append((seconds, status.counters.get("unix_us", 0) - begin_us - seconds * 5e5))
        # the quickest trip bounds the offset best
        offset_us = min(trips)[1] if status.role == ROLE else None
        self._found |= {
            "role": status.role,
            "transport": status.transport,
            "software": status.incarnation if status.role == ROLE else "",
            "fingerprint": status.fingerprint,
            "round_trip_ms": 1000 * statistics.median(seconds for seconds, _ in trips),
            "clock_offset_ms": None if offset_us is None else offset_us / 1000,
        }

    async def _receive(self, connection: Connection) -> None:
        transport = await asyncio.to_thread(open_transport, self._options.transport)
        terms = self._options.terms("consumer", transport)
        terms.check(await connection.request(terms.hello(), SessionWelcome, timeout_s=REPLY_TIMEOUT_S))
        arena = Buffer(ARENA_BYTES)
        receiver = await asyncio.to_thread(transport.open_receiver, f"scd-doctor-{secrets.token_hex(8)}", arena)
        try:
            here = SessionArena(secrets.token_bytes(16), receiver.metadata, arena.address, arena.num_bytes)
            await connection.request(here, SessionReady, timeout_s=REPLY_TIMEOUT_S)
            self._found["num_wrong_pieces"] = await asyncio.to_thread(_settle, receiver, arena)
        finally:
            await asyncio.to_thread(receiver.destroy)
        status = await connection.request(StatusQuery(), Status, timeout_s=self._options.control.peer_timeout_s)
        self._found |= {
            "software": status.incarnation,  # UCX is known now
            "sent_bytes": status.counters.get("sent_bytes", 0),
            "seconds": status.counters.get("write_us", 0) / 1e6,
            "lanes": tuple(status.lane.split()),
        }


def _settle(receiver: Receiver, arena: Buffer) -> int:
    """Wrong pieces, once everything has arrived; a notification may come a moment after the writer has finished."""
    notifications: list[bytes] = []
    deadline_s = time.monotonic() + 2.0
    while True:
        notifications += receiver.drain()
        num_wrong = num_wrong_pieces(arena, notifications)
        if not num_wrong or time.monotonic() > deadline_s:
            return num_wrong
        time.sleep(0.01)


def _main(what: str, text: str) -> None:
    options = EndOptions.model_validate_json(text)
    if what == "listen":
        serve(options, lambda address: print(json.dumps({"address": address}), flush=True))  # noqa: T201 - the answer
    else:
        print(json.dumps(asdict(dial(options))), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except ScdError as error:
        sys.exit(str(error))
