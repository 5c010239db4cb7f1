"""The messages of the control channel: msgpack, tagged by type, every list and string limited before it is believed.

    who -> whom              request        -> reply
    router -> decode         Expect         -> Expected         a prompt will come from that producer: make room
    router -> decode         Wait           -> Waited           until its codes have landed
    router -> decode         Cancel         -> Waited           nobody waits any more: take the grant back
    router -> decode         ReportQuery    -> TransferReport   what it cost
    router -> either         TraceQuery     -> TraceReply       timestamps
    router -> either         StatusQuery    -> Status
    decode -> prefill        SessionHello   -> SessionWelcome   or Refused: versions, fingerprint, layout
    decode -> prefill        SessionArena   -> SessionReady     only then NIXL metadata; or Refused
    decode -> prefill        Grant          -> Granted          an extent for these blocks
    decode -> prefill        Revoke         -> Ended            nothing of it is outstanding any more
    prefill -> decode        Ended          (one way)           the push is over
    both                     Heartbeat      (one way)
    any                                     -> Failure          the request cannot be answered; text for a person

An `Envelope` numbers requests (`request_id` > 0) and names what a reply answers (`reply_to` > 0).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from scd_trt.transfer.states import FallbackReason, LandingState
from scd_trt.transfer.trace import TraceEvent

MAX_KEYS = 1 << 16
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
TransferId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]  # `$` alone lets a line feed pass
SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Word = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=2048)]
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Positive = Annotated[int, Meta(ge=1, le=1 << 48)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Milliseconds = Annotated[float, Meta(ge=0, le=86_400_000)]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Root of all messages."""


class Heartbeat(Message, frozen=True):
    """I am alive."""


class Failure(Message, frozen=True):
    """The request cannot be answered."""

    text: Text


class Refused(Message, frozen=True):
    """No, and why: a bounded reason for counting, a text for a person."""

    reason: FallbackReason
    text: Text


class Expect(Message, frozen=True):
    """A prompt with these full blocks will be computed by the producer at that control address."""

    transfer_id: TransferId
    block_keys: Keys
    producer: Word


class Expected(Message, frozen=True):
    """`num_stored` blocks are here already, `num_granted` more may be sent; a reason where the rest will not come."""

    num_stored: Count
    num_granted: Count
    reason: FallbackReason | None = None
    text: Text = ""


class Wait(Message, frozen=True):
    """Answer when the transfer is over, or after `timeout_s`."""

    transfer_id: TransferId
    timeout_s: Seconds


class Waited(Message, frozen=True):
    """`landed`, `failed` with a reason, or still `waiting`/`landing` when the time was up."""

    state: LandingState
    reason: FallbackReason | None = None


class Cancel(Message, frozen=True):
    """Nobody waits for this transfer any more."""

    transfer_id: TransferId


class ReportQuery(Message, frozen=True):
    """What did this transfer cost?"""

    transfer_id: TransferId


class TransferReport(Message, frozen=True):
    """One transfer in numbers. Times `*_s` are `time.monotonic()` of the decode host."""

    transfer_id: TransferId
    state: LandingState
    reason: FallbackReason | None
    num_blocks: Count
    num_stored: Count
    num_granted: Count
    num_landed: Count
    bytes_received: Count
    num_writes: Count
    expected_s: float
    first_landing_s: float | None = None
    last_landing_s: float | None = None
    transfer_ms: float | None = None  # first post to last write done (producer's clock), else first to last landing
    encode_ms: float | None = None
    decode_ms: float | None = None
    matched_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready."""
        return msgspec.structs.asdict(self)


class TraceQuery(Message, frozen=True):
    """Which events are known of this transfer?"""

    transfer_id: TransferId


class TraceReply(Message, frozen=True):
    """Events, oldest first; the latest 4,096 of a transfer."""

    events: Annotated[list[TraceEvent], Meta(max_length=4096)]


class StatusQuery(Message, frozen=True):
    """Who are you?"""


class Status(Message, frozen=True):
    """One worker."""

    role: Word
    fingerprint: Word
    incarnation: Word
    transport: Word
    lane: Word
    num_sessions: Count
    counters: dict[Word, int]


class SessionHello(Message, frozen=True):
    """Terms of a decode worker; sent before any metadata."""

    role: Word
    transport: Word
    fingerprint: Word
    tokens_per_block: Positive
    bytes_per_token: Annotated[list[Positive], Meta(min_length=1, max_length=4096)]
    incarnation: Word


class SessionWelcome(SessionHello, frozen=True):
    """Terms of the prefill worker, which fit."""


class SessionArena(Message, frozen=True):
    """Where the prefill worker may write."""

    session: SessionId
    metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 16)]
    address: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    num_bytes: Positive


class SessionReady(Message, frozen=True):
    """The prefill worker has connected."""


class Grant(Message, frozen=True):
    """These blocks, of which the first is block `first_block` of the prompt, may be written to this extent."""

    transfer_id: TransferId
    block_keys: Annotated[Keys, Meta(min_length=1)]
    first_block: Count
    offset: Count
    num_bytes: Positive
    generation: Positive


class Granted(Message, frozen=True):
    """The prefill worker holds the grant."""


class Revoke(Message, frozen=True):
    """Do not write any more; answered when nothing is outstanding."""

    transfer_id: TransferId


class Ended(Message, frozen=True):
    """A push is over: `num_writes` writes are done, none is outstanding, none will follow."""

    transfer_id: TransferId
    num_writes: Count
    reason: FallbackReason | None = None
    encode_ms: Milliseconds | None = None
    write_ms: Milliseconds | None = None


Body = (
    Heartbeat
    | Failure
    | Refused
    | Expect
    | Expected
    | Wait
    | Waited
    | Cancel
    | ReportQuery
    | TransferReport
    | TraceQuery
    | TraceReply
    | StatusQuery
    | Status
    | SessionHello
    | SessionWelcome
    | SessionArena
    | SessionReady
    | Grant
    | Granted
    | Revoke
    | Ended
)


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One frame's content."""

    request_id: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
    reply_to: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def pack(envelope: Envelope) -> bytes:
    """Bytes of an envelope."""
    return _encoder.encode(envelope)


def unpack(data: bytes) -> Envelope:
    """An envelope whose types and limits hold.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: it is none.
    """
    try:
        return _decoder.decode(data)
    except RecursionError as error:  # a value that would be skipped may be nested as deeply as a frame is long
        raise msgspec.DecodeError("nested too deeply") from error
