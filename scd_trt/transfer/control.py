"""The control channel's listener in each worker, and the router's client.

`ControlServer` owns the event loop, in one daemon thread, that all control connections of a worker run in, its own to other
workers included. `ControlClient` lives in the router's event loop. Framing, authentication and heartbeats: `connection.py`;
messages: `messages.py`. A server listens on loopback only, unless a secret is set. It counts what it refuses:

    control_refused_full       over `MAX_CONNECTIONS`, or over `MAX_OPENING` that have not proved themselves yet
    control_refused_secret     secret missing on one side, or different
    control_refused_version    another protocol version
    control_refused_handshake  silence, garbage or an end before the handshake was over
    control_forged_frames      wrong MAC: altered, replayed or reordered; the connection was closed
    control_malformed_frames   length, type or limit of a message; the connection was closed
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from scd_trt.config import ControlConfig, ScdError
from scd_trt.transfer.connection import (
    Address,
    Connection,
    ControlError,
    Handler,
    ReplyT,
    SecretError,
    VersionError,
    authenticate,
    connect,
    read_secrets,
)
from scd_trt.transfer.messages import (
    Body,
    Cancel,
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
from scd_trt.transfer.trace import TraceEvent

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_OPENING = 64
_QUIET_S = 1.0
T = TypeVar("T")


class ControlServer:
    """A control listener and the event loop that its process's control connections run in, in one daemon thread.

    The port is taken at construction; connections wait until `start`, so that their handler may be built in between.

    Args:
        config: limits, heartbeat and secret.
        listen: "host:port"; port 0 takes any free one.
        handler: gets every message and every end of a connection.

    Raises:
        ControlError: the port is in use, the host is unknown, or a host off loopback has no secret.
    """

    def __init__(self, config: ControlConfig, *, listen: str, handler: Handler) -> None:
        self.config = config
        self._handler = handler
        self._counters: Counter[str] = Counter()
        self._refusal_logged_s = -_QUIET_S
        self._connections: set[Connection] = set()
        self._openings: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._timers: list[asyncio.Task[None]] = []
        wanted = Address.parse(listen)
        if not read_secrets(config.secret_file) and not _is_loopback(wanted.host):
            raise ControlError(
                f"control channel on {wanted} is reachable from other hosts and control.secret_file is not set; "
                "set the same secret file on all workers and the router, or listen on 127.0.0.1"
            )
        self.loop = asyncio.new_event_loop()
        self._started = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="scd-control", daemon=True)
        self._thread.start()
        try:
            self._server = self.run(self._listen(wanted), timeout_s=10)
        except ControlError:
            self._stop()
            raise
        port: int = self._server.sockets[0].getsockname()[1]
        self.address = str(Address(wanted.host, port))

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for it, from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    @property
    def is_running(self) -> bool:
        """False once closed."""
        return self._thread.is_alive()

    def statistics(self) -> dict[str, int]:
        """Refusals since the start, by cause (see the module); from any thread."""
        return dict(self._counters)

    def start(self) -> None:
        """Serve."""
        self.call(self._started.set)

    def start_timer(self, function: Callable[[], None], *, interval_s: float) -> None:
        """Call a function in the loop again and again, from `start` on."""

        async def tick() -> None:
            await self._started.wait()
            while True:
                await asyncio.sleep(interval_s)
                try:
                    function()
                except ScdError as error:
                    logger.warning("%s: %s", function.__qualname__, error)

        self.call(lambda: self._timers.append(self.loop.create_task(tick())))

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function in the loop soon, from any thread; dropped once the server is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no peer left to tell
            self.loop.call_soon_threadsafe(function, *arguments)

    async def connect(self, address: Address) -> Connection:
        """Open a connection to another worker in this loop, with the same handler."""
        connection = await connect(address, self.config, _Tracked(self))
        self._connections.add(connection)
        return connection

    def close(self) -> None:
        """Close listener, connections and loop. May be repeated."""
        if self._thread.is_alive():
            self.run(self._shut(), timeout_s=10)
            self._stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    async def _listen(self, address: Address) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._arrived, address.host, address.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ControlError(
                    f"control port {address.port} on {address.host} is in use; "
                    "stop the other process, or set another control_port"
                ) from error
            raise ControlError(f"cannot listen on {address}: {error}") from error

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = writer.get_extra_info("peername")  # None where the peer has left again already
        peer = "{}:{}".format(*name[:2]) if name else "a peer that left"
        num_open, num_opening = len(self._connections), len(self._openings)
        if num_opening >= MAX_OPENING or num_open + num_opening >= MAX_CONNECTIONS:
            self._refuse("full", f"{peer}: {num_open} control connections, {num_opening} more opening")
            writer.close()
            return
        task = self.loop.create_task(self._accept(reader, writer, peer))
        self._openings[task] = writer
        task.add_done_callback(self._openings.pop)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        try:
            await asyncio.wait_for(self._started.wait(), self.config.peer_timeout_s)
            opening = authenticate(reader, writer, secret_file=self.config.secret_file, is_client=False)
            stream = await asyncio.wait_for(opening, self.config.peer_timeout_s)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, ControlError) as error:
            text = str(error) or type(error).__name__
            self._refuse(_cause(error), f"{peer}: control handshake failed: {text}")
            writer.close()
            return
        self._connections.add(Connection(stream, self.config, _Tracked(self), peer=peer))

    def _refuse(self, cause: str, text: str) -> None:
        """Count; and say so, but a flood must not fill the log: at most one line per `_QUIET_S`."""
        self._counters[f"control_refused_{cause}"] += 1
        now_s = time.monotonic()
        is_quiet = now_s - self._refusal_logged_s < _QUIET_S
        self._refusal_logged_s = self._refusal_logged_s if is_quiet else now_s
        logger.log(logging.DEBUG if is_quiet else logging.WARNING, "refused: %s", text)

    def _ended(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection.fault is not None:
            self._counters[f"control_{connection.fault}_frames"] += 1

    async def _shut(self) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.close("this side shuts down")
        for writer in self._openings.values():
            writer.close()
        await asyncio.sleep(0)  # let the transports flush their FIN and cancelled tasks end
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class _Tracked:
    """The server's handler, and the server's list of connections kept up to date."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server

    async def handle(self, connection: Connection, body: Body) -> Body | None:
        return await self._server._handler.handle(connection, body)

    def closed(self, connection: Connection, why: str) -> None:
        self._server._ended(connection)
        self._server._handler.closed(connection, why)


def _cause(error: Exception) -> str:
    match error:
        case SecretError():
            return "secret"
        case VersionError():
            return "version"
    return "handshake"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ControlClient:
    """The router's end: connects on first use, and again after a loss. For one event loop.

    Every method raises `UnreachableError` quickly when the worker is gone, `VersionError` or `SecretError` when it will not
    talk, and `ControlError` when it cannot answer.
    """

    def __init__(self, address: str, config: ControlConfig) -> None:
        self.address = Address.parse(address)
        self._config = config
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def expect(
        self, transfer_id: str, block_keys: Sequence[bytes], *, producer: str, timeout_s: float = 15.0
    ) -> Expected:
        """Tell a decode worker that these blocks will come from the producer at that control address."""
        return await self._request(Expect(transfer_id, list(block_keys), producer), Expected, timeout_s=timeout_s)

    async def wait(self, transfer_id: str, *, timeout_s: float) -> Waited:
        """Wait until the transfer has landed or failed, at most `timeout_s`."""
        limit_s = timeout_s + self._config.peer_timeout_s
        return await self._request(Wait(transfer_id, timeout_s), Waited, timeout_s=limit_s)

    async def cancel(self, transfer_id: str) -> Waited:
        """Nobody waits any more: end the transfer now instead of at the end of its lease. A landed one stays landed."""
        return await self._request(Cancel(transfer_id), Waited, timeout_s=2 * self._config.peer_timeout_s)

    async def report(self, transfer_id: str) -> TransferReport:
        """What a transfer cost, as its decode worker knows it."""
        return await self._request(ReportQuery(transfer_id), TransferReport)

    async def trace(self, transfer_id: str) -> list[TraceEvent]:
        """Timestamps of a transfer on that worker."""
        return (await self._request(TraceQuery(transfer_id), TraceReply)).events

    async def status(self) -> Status:
        """Who that worker is and what it has counted."""
        return await self._request(StatusQuery(), Status)

    async def close(self) -> None:
        """Close the connection. May be repeated."""
        if self._connection is not None:
            self._connection.close("this side shuts down")
            self._connection = None

    async def handle(self, connection: Connection, body: Body) -> Body | None:
        """A worker asks the router nothing."""
        raise ControlError(f"a router does not answer {type(body).__name__}")

    def closed(self, connection: Connection, why: str) -> None:
        """Reconnect on next use."""
        if self._connection is connection:
            self._connection = None

    async def _request(self, body: Body, expected: type[ReplyT], *, timeout_s: float | None = None) -> ReplyT:
        async with self._lock:
            if self._connection is None:
                self._connection = await connect(self.address, self._config, self)
            connection = self._connection
        limit_s = self._config.peer_timeout_s if timeout_s is None else timeout_s
        return await connection.request(body, expected, timeout_s=limit_s)
