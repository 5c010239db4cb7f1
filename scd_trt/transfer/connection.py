"""One connection of the control channel: framed messages over TCP, with heartbeats and a shared secret.

Connection start, both ways at once: a preamble of 40 bytes, then, where a secret is configured, one proof each way:

    preamble  4s "SCDC" | u16 protocol version | u8 1 if a secret is configured | u8 0 | 32 bytes nonce     (big-endian)
    proof     HMAC-SHA256(secret, label | client nonce | server nonce); the client's first ("client", then "server")

A secret file holds one secret a line, at most two, and is read anew for each connection, so that a key is changed without
a restart: a client proves the first, a server accepts either and answers with the one that the client knows.

Frames follow, in each direction: `u32 length | envelope (messages.py) | MAC`. The length counts the envelope and is checked
against `max_frame_bytes` before anything is read. With a secret the MAC is 32 bytes of HMAC-SHA256 under a key of this
connection and direction over `u64 sequence number | envelope`; so frames can be neither forged, replayed nor reordered.
Nothing is encrypted: keys of blocks and addresses are readable on the network.

`Connection.fault` says whether a connection ended by a forged frame (wrong MAC) or a malformed one; `ControlServer` counts.
Both sides send heartbeats; silence for `peer_timeout_s`, a malformed frame, or a peer that does not read closes the
connection, and closing means that the peer is gone.

    ControlError
     +- UnreachableError    refused, timed out, or closed
     +- VersionError        the other side speaks another protocol version
     +- SecretError         secret missing on one side, or different
     +- ForgedFrameError    wrong MAC
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from scd_trt.config import ControlConfig, ScdError
from scd_trt.transfer import messages
from scd_trt.transfer.messages import (
    Body,
    Envelope,
    Failure,
    Heartbeat,
    Refused,
)
from scd_trt.transfer.states import FallbackReason

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_CONCURRENT_REQUESTS = 1024
MAX_CONCURRENT_FRAMES = 8
"""Requests being answered hold at most this many times `max_frame_bytes`."""
MIN_SECRET_BYTES = 16
MAX_SECRETS = 2
_MAGIC = b"SCDC"
_PREAMBLE = struct.Struct(">4sHBx32s")
_LENGTH = struct.Struct(">I")
_SEQUENCE = struct.Struct(">Q")
_MAC_BYTES = 32
_LAST_REQUEST_ID = (1 << 32) - 1
ReplyT = TypeVar("ReplyT", bound=messages.Message)


class ControlError(ScdError):
    """The control channel failed."""


class UnreachableError(ControlError):
    """Nobody answers there."""


class VersionError(ControlError):
    """The other side speaks another protocol version."""


class SecretError(ControlError):
    """The shared secret is missing on one side, or differs."""


class ForgedFrameError(ControlError):
    """A frame's MAC is wrong: altered, replayed, reordered, or of another connection."""


class RefusedError(ControlError):
    """The peer said no; `reason` is bounded, for counting."""

    def __init__(self, reason: FallbackReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Handler(Protocol):
    """What the owner of a connection does with it; called in the loop's thread."""

    async def handle(self, connection: Connection, body: Body) -> Body | None:
        """Answer a request, or take a one-way message (the result is then ignored)."""

    def closed(self, connection: Connection, why: str) -> None:
        """The peer is gone. Called once per connection."""


@dataclass(frozen=True)
class Address:
    """Host and port of a control listener."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read "host:port" ("[v6]:port").

        Raises:
            ControlError: it is not that.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ControlError(f"{text!r} is no control address; expected host:port, for example 127.0.0.1:8101")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_secrets(path: Path | None) -> tuple[bytes, ...]:
    """The shared secrets of a file, the one to prove first; empty where none is configured.

    Raises:
        SecretError: unreadable, too short, or too many.
    """
    if path is None:
        return ()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SecretError(
            f"control.secret_file {path}: {error.strerror}; create it, e.g. `openssl rand -hex 32`"
        ) from error
    accepted = tuple(line.strip() for line in lines if line.strip())
    shortest = min(map(len, accepted), default=0)
    if shortest < MIN_SECRET_BYTES:
        raise SecretError(
            f"control.secret_file {path} holds a secret of {shortest} bytes; at least {MIN_SECRET_BYTES} are needed"
        )
    if len(accepted) > MAX_SECRETS:
        raise SecretError(
            f"control.secret_file {path} holds {len(accepted)} secrets; at most {MAX_SECRETS}, the new and the old one"
        )
    return accepted


class _Seal:
    """MAC and sequence number of one direction; without a key it adds nothing."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._sequence = 0

    @property
    def num_bytes(self) -> int:
        return _MAC_BYTES if self._key else 0

    def next(self, data: bytes) -> bytes:
        """MAC of the next frame."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        if self._key is None:
            return b""
        return hmac.digest(self._key, _SEQUENCE.pack(sequence) + data, "sha256")


@dataclass
class _Stream:
    """An authenticated pair of streams."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    seal_in: _Seal
    seal_out: _Seal


async def authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, secret_file: Path | None, is_client: bool
) -> _Stream:
    """Exchange preambles and proofs; closes the writer where that fails or is cancelled."""
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(writer.close)
        accepted = read_secrets(secret_file)
        stream = await _handshake(reader, writer, accepted=accepted, is_client=is_client)
        on_failure.pop_all()
        return stream


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, accepted: tuple[bytes, ...], is_client: bool
) -> _Stream:
    own = secrets.token_bytes(32)
    writer.write(_PREAMBLE.pack(_MAGIC, PROTOCOL_VERSION, int(bool(accepted)), own))
    magic, version, secured, other = _PREAMBLE.unpack(await reader.readexactly(_PREAMBLE.size))
    if magic != _MAGIC:
        raise ControlError("the other side is no scd_trt control channel; check host and port")
    if version != PROTOCOL_VERSION:
        raise VersionError(f"control protocol: version {PROTOCOL_VERSION} here, {version} there; run equal releases")
    if bool(secured) != bool(accepted):
        here, there = ("set", "missing") if accepted else ("missing", "set")
        raise SecretError(f"control.secret_file is {here} here and {there} on the other side; set the same on both")
    if not accepted:
        return _Stream(reader, writer, _Seal(None), _Seal(None))
    if is_client:
        secret, nonces = accepted[0], own + other
        await _prove_first(reader, writer, secret=secret, nonces=nonces)
    else:
        nonces = other + own
        secret = await _recognise(reader, writer, accepted=accepted, nonces=nonces)
    keys = [hmac.digest(secret, label + nonces, "sha256") for label in (b"frames client", b"frames server")]
    key_out, key_in = keys if is_client else reversed(keys)
    return _Stream(reader, writer, _Seal(key_in), _Seal(key_out))


async def _prove_first(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, secret: bytes, nonces: bytes
) -> None:
    """The client's half: prove, then demand the server's proof."""
    writer.write(_proof(secret, b"client", nonces))
    try:
        proof = await reader.readexactly(_MAC_BYTES)
    except (asyncio.IncompleteReadError, ConnectionResetError) as error:
        raise _another_secret() from error
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces)):
        raise _another_secret()


async def _recognise(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, accepted: tuple[bytes, ...], nonces: bytes
) -> bytes:
    """The server's half: which of the accepted secrets the client has proved; answered with the same."""
    proof = await reader.readexactly(_MAC_BYTES)
    known = [secret for secret in accepted if hmac.compare_digest(proof, _proof(secret, b"client", nonces))]
    if not known:
        raise _another_secret()
    writer.write(_proof(known[0], b"server", nonces))
    return known[0]


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, label + nonces, "sha256")


def _another_secret() -> SecretError:
    return SecretError("the other side has another control secret; give both the same control.secret_file")


class Connection:
    """One authenticated connection. Used in its event loop only."""

    def __init__(self, stream: _Stream, config: ControlConfig, handler: Handler, *, peer: str) -> None:
        self.peer = peer
        self.is_closed = False
        self.fault: Literal["forged", "malformed"] | None = None
        self._stream, self._config, self._handler = stream, config, handler
        self._pending: dict[int, asyncio.Future[Body]] = {}
        self._last_request_id = 0
        self._heard_s = time.monotonic()
        self._why = "closed by the peer"
        self._answers: set[asyncio.Task[None]] = set()
        self._num_bytes_in_answers = 0
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    async def request(self, body: Body, expected: type[ReplyT], *, timeout_s: float) -> ReplyT:
        """Send a request and wait for its reply.

        Raises:
            UnreachableError: the connection closed or the time was up.
            RefusedError: the peer refused, with a reason.
            ControlError: the peer failed, or answered with something else.
        """
        self._last_request_id = self._last_request_id % _LAST_REQUEST_ID + 1
        request_id = self._last_request_id
        reply: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = reply
        try:
            self._send(Envelope(request_id, 0, body))
            answer = await asyncio.wait_for(reply, timeout_s)
        except asyncio.TimeoutError as error:
            raise UnreachableError(
                f"{self.peer} did not answer {type(body).__name__} within {timeout_s:g} s"
            ) from error
        finally:
            self._pending.pop(request_id, None)
        if isinstance(answer, Refused):
            raise RefusedError(answer.reason, answer.text)
        if isinstance(answer, Failure):
            raise ControlError(f"{self.peer}: {answer.text}")
        if not isinstance(answer, expected):
            raise ControlError(f"{self.peer} answered {type(body).__name__} with {type(answer).__name__}")
        return answer

    def post(self, body: Body) -> None:
        """Send a one-way message; dropped where the connection is closed."""
        with contextlib.suppress(UnreachableError):
            self._send(Envelope(0, 0, body))

    def close(self, why: str) -> None:
        """Close; the peer takes it as our death. May be repeated."""
        if not self.is_closed:
            self._why = why
            self._finish()

    def _send(self, envelope: Envelope) -> None:
        if self.is_closed:
            raise UnreachableError(f"the connection to {self.peer} is closed: {self._why}")
        data = messages.pack(envelope)
        if len(data) > self._config.max_frame_bytes:
            raise ControlError(
                f"{type(envelope.body).__name__} of {len(data)} bytes exceeds control.max_frame_bytes "
                f"{self._config.max_frame_bytes}; raise it on both sides"
            )
        writer = self._stream.writer
        if writer.transport.get_write_buffer_size() > 2 * self._config.max_frame_bytes:
            self.close("the peer does not read")
            raise UnreachableError(f"{self.peer} does not read what it is sent")
        writer.write(_LENGTH.pack(len(data)) + data + self._stream.seal_out.next(data))

    async def _read(self) -> None:
        try:
            while True:
                self._take(*await self._read_envelope())
        except (asyncio.IncompleteReadError, OSError) as error:
            logger.debug("%s: connection ended: %s", self.peer, error)
            await asyncio.sleep(0)  # what came in one piece with the end, a last word perhaps, is still handled
        except (ControlError, msgspec.MsgspecError) as error:
            self.fault = "forged" if isinstance(error, ForgedFrameError) else "malformed"
            self._why = f"{self.fault} frame: {error}"
            logger.warning("%s: %s; connection closed", self.peer, self._why)
        self._finish()

    async def _read_envelope(self) -> tuple[Envelope, int]:
        reader, seal = self._stream.reader, self._stream.seal_in
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not 0 < length <= self._config.max_frame_bytes:
            raise ControlError(f"frame of {length} bytes; the limit is {self._config.max_frame_bytes}")
        data = await reader.readexactly(length)
        mac = await reader.readexactly(seal.num_bytes)
        if not hmac.compare_digest(mac, seal.next(data)):
            raise ForgedFrameError("wrong MAC: the frame was altered, replayed or reordered")
        self._heard_s = time.monotonic()
        return messages.unpack(data), length

    def _take(self, envelope: Envelope, num_bytes: int) -> None:
        if envelope.reply_to:
            reply = self._pending.get(envelope.reply_to)
            if reply is not None and not reply.done():
                reply.set_result(envelope.body)
        elif not isinstance(envelope.body, Heartbeat):
            if len(self._answers) >= MAX_CONCURRENT_REQUESTS:
                raise ControlError(f"more than {MAX_CONCURRENT_REQUESTS} requests at once")
            if self._num_bytes_in_answers + num_bytes > MAX_CONCURRENT_FRAMES * self._config.max_frame_bytes:
                raise ControlError(f"more than {self._num_bytes_in_answers} bytes of requests at once")
            self._num_bytes_in_answers += num_bytes
            task = asyncio.create_task(self._answer(envelope))
            self._answers.add(task)
            task.add_done_callback(lambda task: self._answered(task, num_bytes))

    async def _answer(self, envelope: Envelope) -> None:
        answer: Body | None
        try:
            answer = await self._handler.handle(self, envelope.body)
        except RefusedError as error:
            answer = Refused(error.reason, str(error)[:2048])
        except ScdError as error:
            answer = Failure(str(error)[:2048])
        if envelope.request_id and answer is not None:
            with contextlib.suppress(UnreachableError):
                self._send(Envelope(0, envelope.request_id, answer))

    def _answered(self, task: asyncio.Task[None], num_bytes: int) -> None:
        """A handler that raised anything but ScdError has a bug: it is shown, and the peer sees the connection close."""
        self._answers.discard(task)
        self._num_bytes_in_answers -= num_bytes
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s: a request failed", self.peer, exc_info=task.exception())
            self.close("internal error while answering a request")

    async def _beat(self) -> None:
        interval_s = self._config.heartbeat_s
        while not self.is_closed:
            self.post(Heartbeat())
            slept_s = -time.monotonic()
            await asyncio.sleep(interval_s)
            slept_s += time.monotonic()
            silence_s = time.monotonic() - self._heard_s
            # a loop that was itself held up (starved host, stopped process) has not looked at what the peer sent meanwhile
            if silence_s > self._config.peer_timeout_s and slept_s < 2 * interval_s:
                self.close(f"no sign of life for {silence_s:.1f} s")

    def _finish(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._stream.writer.close()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(UnreachableError(f"{self.peer} is gone: {self._why}"))
        current = asyncio.current_task()
        for task in (*self._tasks, *self._answers):
            if task is not current:
                task.cancel()
        self._handler.closed(self, self._why)


async def connect(address: Address, config: ControlConfig, handler: Handler) -> Connection:
    """Open and authenticate a connection, within `peer_timeout_s`.

    Raises:
        UnreachableError, VersionError, SecretError: see the module.
    """
    timeout_s = config.peer_timeout_s
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), timeout_s)
        opening = authenticate(reader, writer, secret_file=config.secret_file, is_client=True)
        stream = await asyncio.wait_for(opening, timeout_s)
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
        what = str(error) or f"no answer within {timeout_s:g} s"
        raise UnreachableError(
            f"control channel {address} cannot be reached: {what}; is the server running?"
        ) from error
    return Connection(stream, config, handler, peer=str(address))
