"""What one notification says, and where the codes of an extent lie: the byte contract of the data path.

Every WRITE carries one notification of 80 bytes, little-endian, version 1:

    offset  size  field
         0     4  magic         b"SCDN"
         4     2  version       1
         6     2  group         layer group, 0-based
         8    16  session       nonce of the peer session that granted the extent
        24    16  transfer      transfer id (32 hexadecimal characters in text)
        40     4  first_block   block index in the prompt
        44     4  num_blocks    blocks of this write, >= 1
        48     8  generation    of the granted extent
        56     8  num_bytes     length of the payload
        64    16  digest        xxh3_128 of bytes 0..63 followed by the payload, big-endian (canonical)

The digest covers the header, so a notification never vouches for another write's bytes. It finds corruption and late
bytes, not an attacker: the data path has no authentication (docs/security.md), only the control channel has.

An *extent* holds the codes of `num_blocks` consecutive blocks, group after group; group g starts at
`num_blocks * B * sum(bytes_per_token[:g])` and inside it rows lie by token. A *store entry* holds one block the same way
(an extent of one block). B = tokens_per_block.

Does not know where extents lie in the arena, nor whom to believe: see `consumer.py`.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from scd_trt.config import ScdError

WIRE_VERSION = 1
MAGIC = b"SCDN"
DIGEST_BYTES = 16
ID_BYTES = 16
_HEADER = struct.Struct("<4sHH16s16sIIQQ")
NOTIFICATION_BYTES = _HEADER.size + DIGEST_BYTES
if NOTIFICATION_BYTES != 80:
    raise ImportError(f"notification is {NOTIFICATION_BYTES} bytes; the wire contract says 80")

Bytes = npt.NDArray[np.uint8]


class WireError(ScdError):
    """A notification that is no notification of ours: length, magic, version or a field out of range."""


def new_transfer_id() -> str:
    """A fresh transfer id, 32 hexadecimal characters."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class CodeLayout:
    """How many bytes of codes a token has in each layer group.

    Raises:
        ValueError: no group, or a size that is not positive.
    """

    tokens_per_block: int
    bytes_per_token: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1 or not self.bytes_per_token or min(self.bytes_per_token) < 1:
            raise ValueError(f"layout needs positive sizes and at least one group; got {self}")

    @property
    def num_groups(self) -> int:
        """Layer groups."""
        return len(self.bytes_per_token)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all groups: the size of a store entry."""
        return self.tokens_per_block * sum(self.bytes_per_token)

    def group_bytes(self, group: int) -> int:
        """Bytes of one block in one group."""
        return self.tokens_per_block * self.bytes_per_token[group]

    def span(self, group: int, first_block: int, num_blocks: int, *, extent_blocks: int) -> slice:
        """Byte range, inside an extent of `extent_blocks`, of blocks counted from the extent's first.

        Raises:
            ValueError: group or blocks outside the extent.
        """
        inside = first_block >= 0 and 1 <= num_blocks <= extent_blocks - first_block
        if not 0 <= group < self.num_groups or not inside:
            raise ValueError(
                f"group {group}, blocks {first_block}+{num_blocks} outside {self.num_groups} groups x {extent_blocks}"
            )
        start = extent_blocks * self.tokens_per_block * sum(self.bytes_per_token[:group])
        start += first_block * self.group_bytes(group)
        return slice(start, start + num_blocks * self.group_bytes(group))

    def entry_span(self, group: int) -> slice:
        """Byte range of one group inside a store entry."""
        return self.span(group, 0, 1, extent_blocks=1)


@dataclass(frozen=True)
class Notification:
    """One write, as its notification describes it; `digest` is empty until sealed."""

    session: bytes
    transfer_id: str
    group: int
    first_block: int
    num_blocks: int
    generation: int
    num_bytes: int
    digest: bytes = b""

    def sealed(self, payload: Bytes) -> Notification:
        """The same notification with the digest of its payload."""
        return replace(self, digest=self._digest(payload))

    def vouches_for(self, *pieces: Bytes) -> bool:
        """True where length and digest fit the payload, given in consecutive pieces."""
        return sum(map(len, pieces)) == self.num_bytes and self._digest(*pieces) == self.digest

    def pack(self) -> bytes:
        """80 bytes.

        Raises:
            WireError: a field does not fit, or the notification was not sealed.
        """
        if len(self.digest) != DIGEST_BYTES:
            raise WireError(f"digest has {len(self.digest)} bytes, not {DIGEST_BYTES}; seal the notification first")
        return self._header() + self.digest

    @classmethod
    def unpack(cls, data: bytes) -> Notification:
        """Read a notification; says nothing about its payload.

        Raises:
            WireError: wrong length, magic, version, or no blocks or bytes.
        """
        if len(data) != NOTIFICATION_BYTES:
            raise WireError(f"notification has {len(data)} bytes, not {NOTIFICATION_BYTES}")
        magic, version, group, session, transfer, *rest = _HEADER.unpack_from(data)
        if magic != MAGIC or version != WIRE_VERSION:
            raise WireError(f"notification has magic {magic!r} version {version}, not {MAGIC!r} version {WIRE_VERSION}")
        first_block, num_blocks, generation, num_bytes = rest
        if num_blocks < 1 or num_bytes < 1:
            raise WireError(f"notification of {num_blocks} blocks and {num_bytes} bytes says nothing")
        digest = data[_HEADER.size :]
        return cls(session, transfer.hex(), group, first_block, num_blocks, generation, num_bytes, digest)

    def _header(self) -> bytes:
        try:
            session, transfer = _id_bytes(self.session), _id_bytes(bytes.fromhex(self.transfer_id))
            return _HEADER.pack(
                MAGIC,
                WIRE_VERSION,
                self.group,
                session,
                transfer,
                self.first_block,
                self.num_blocks,
                self.generation,
                self.num_bytes,
            )
        except (struct.error, ValueError) as error:
            raise WireError(f"cannot pack {self}: {error}") from error

    def _digest(self, *pieces: Bytes) -> bytes:
        state = xxhash.xxh3_128(self._header())
        for piece in pieces:
            state.update(piece.data)
        return state.digest()


def _id_bytes(value: bytes) -> bytes:
    if len(value) != ID_BYTES:
        raise ValueError(f"id has {len(value)} bytes, not {ID_BYTES}")
    return value
