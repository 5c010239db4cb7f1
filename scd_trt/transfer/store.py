"""The content-addressed store of codes: block key -> codes of that block, bounded in bytes, in memory.

Owns entries (layout in `wire.py`), their age and their pins. Least recently used entries leave first
when room is needed; an entry not used for `ttl_s` counts as absent and `reap` removes it. A pinned entry stays until it is
released. Within one prefix the *last* block leaves first, because only a contiguous prefix is of use. Thread-safe; `match`
and `pin` take microseconds (one dictionary look-up per block) and do no I/O, and nothing that runs by a timer holds the lock
for longer than what it finds to remove: an engine may be waiting with a lock of its own.

The key already holds salt and translator fingerprint (`kv_cache.scope`): two tenants never share an entry.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from scd_trt.config import ScdError, StoreConfig


class StoreFullError(ScdError):
    """The entry has no place: larger than the store, or everything else is pinned."""


@dataclass(frozen=True)
class StoreStatistics:
    """Counters since the start, and present sizes."""

    num_bytes: int
    capacity_bytes: int
    num_entries: int
    num_pinned: int
    num_hits: int
    num_misses: int
    num_evicted: int
    num_expired: int
    num_refused: int


@dataclass(slots=True)
class _Entry:
    payload: memoryview
    used_s: float
    num_pins: int = 0


class CodeStore:
    """Bounded map from block key to codes.

    Args:
        config: capacity in bytes and time to live.
        clock: seconds, monotonic.
    """

    def __init__(self, config: StoreConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = self._num_pinned = 0
        self._num_hits = self._num_misses = self._num_evicted = self._num_expired = self._num_refused = 0

    def put(self, key: bytes, payload: bytes | memoryview) -> None:
        """Keep an entry, making room if need be. Same key = same content, so an entry that exists is only refreshed.

        The bytes are not copied: the caller must not change them afterwards.

        Raises:
            StoreFullError: no room can be made.
        """
        now = self._clock()
        with self._lock:
            if key not in self._entries:
                self._make_room(len(payload))
                self._entries[key] = _Entry(memoryview(payload).toreadonly(), now)
                self._num_bytes += len(payload)
            self._entries[key].used_s = now
            self._entries.move_to_end(key)

    def match(self, keys: Sequence[bytes]) -> int:
        """Length of the contiguous prefix of `keys` that is present, in blocks."""
        with self._lock:
            return len(self._prefix(keys))

    def pin(self, keys: Sequence[bytes]) -> list[memoryview]:
        """Match and pin in one step; give the same number of keys to `unpin` later.

        Returns:
            payloads of the contiguous prefix that is present.
        """
        with self._lock:
            found = self._prefix(keys)
            for entry in found:
                self._num_pinned += not entry.num_pins
                entry.num_pins += 1
            return [entry.payload for entry in found]

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Release pins.

        Raises:
            ValueError: an entry of `keys` is not pinned.
        """
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or not entry.num_pins:
                    raise ValueError(f"block {key.hex()} is not pinned")
                entry.num_pins -= 1
                self._num_pinned -= not entry.num_pins

    @contextmanager
    def pinned(self, keys: Sequence[bytes]) -> Iterator[list[memoryview]]:
        """Payloads of the contiguous prefix that is present, kept until the block ends."""
        payloads = self.pin(keys)
        try:
            yield payloads
        finally:
            self.unpin(keys[: len(payloads)])

    def reap(self) -> int:
        """Remove entries older than `ttl_s`; returns how many."""
        with self._lock:
            expired = self._expired(self._clock())
            for key in expired:
                self._drop(key)
            self._num_expired += len(expired)
            return len(expired)

    def statistics(self) -> StoreStatistics:
        """A consistent snapshot."""
        with self._lock:
            return StoreStatistics(
                num_bytes=self._num_bytes,
                capacity_bytes=self.config.capacity_bytes,
                num_entries=len(self._entries),
                num_pinned=self._num_pinned,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_evicted=self._num_evicted,
                num_expired=self._num_expired,
                num_refused=self._num_refused,
            )

    def _prefix(self, keys: Sequence[bytes]) -> list[_Entry]:
        # in one pass and without calls of our own: an engine waits with its radix tree locked
        now, ttl_s, get = self._clock(), self.config.ttl_s, self._entries.get
        found: list[_Entry] = []
        for key in keys:
            entry = get(key)
            if entry is None or (now - entry.used_s > ttl_s and not entry.num_pins):
                break
            entry.used_s = now
            found.append(entry)
        for key in reversed(keys[: len(found)]):
            self._entries.move_to_end(key)
        self._num_hits += len(found)
        self._num_misses += len(keys) - len(found)
        return found

    def _expired(self, now: float) -> list[bytes]:
        """They come first, but for pinned ones in between, since entries are in order of their use."""
        expired = []
        for key, entry in self._entries.items():
            if now - entry.used_s <= self.config.ttl_s:
                break
            if not entry.num_pins:
                expired.append(key)
        return expired

    def _make_room(self, num_bytes: int) -> None:
        need = self._num_bytes + num_bytes - self.config.capacity_bytes
        victims: list[bytes] = []
        for key, entry in self._entries.items():
            if need <= 0:
                break
            if not entry.num_pins:
                victims.append(key)
                need -= len(entry.payload)
        if need > 0:
            self._num_refused += 1
            raise StoreFullError(
                f"no room for {num_bytes} bytes in a code store of {self.config.capacity_bytes} "
                f"({self._num_bytes} used, the rest pinned); raise store.capacity_bytes"
            )
        for key in victims:
            self._drop(key)
        self._num_evicted += len(victims)

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= len(self._entries.pop(key).payload)
