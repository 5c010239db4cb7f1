"""Who owns which bytes of a registered buffer: an allocator of contiguous extents with generations and quarantine.

An extent is held, then freed; or held, quarantined and, once the peer that could still write into it is fenced off
(its agent destroyed), freed with `free_fenced`. A quarantined extent is never handed out: there is no abort in NIXL, so
late bytes may land in it at any time. Every allocation gets a fresh generation, so that a notification about an earlier
owner of the same bytes is recognised. First fit, neighbours coalesce, offsets aligned to a cache line. Thread-safe.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass

from scd_trt.config import ScdError

ALIGNMENT_BYTES = 64


class ExtentsFullError(ScdError):
    """No free range of that length; the caller falls back or waits for room."""


@dataclass(frozen=True)
class Extent:
    """A range of a buffer, lent under one generation."""

    offset: int
    num_bytes: int
    generation: int

    @property
    def span(self) -> slice:
        """The range as an index into the buffer."""
        return slice(self.offset, self.offset + self.num_bytes)


class ExtentAllocator:
    """Lends ranges of a buffer of `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, num_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)]
        self._held: dict[int, Extent] = {}
        self._quarantined: dict[int, Extent] = {}
        self._generation = 0

    @property
    def num_free_bytes(self) -> int:
        """Bytes in free ranges."""
        with self._lock:
            return sum(length for _, length in self._free)

    @property
    def num_quarantined_bytes(self) -> int:
        """Bytes that wait for a fence."""
        with self._lock:
            return sum(_padded(extent.num_bytes) for extent in self._quarantined.values())

    def allocate(self, num_bytes: int) -> Extent:
        """Lend a range.

        Raises:
            ExtentsFullError: no free range is long enough.
            ValueError: `num_bytes` is not positive.
        """
        if num_bytes < 1:
            raise ValueError(f"an extent of {num_bytes} bytes")
        padded = _padded(num_bytes)
        with self._lock:
            for index, (offset, length) in enumerate(self._free):
                if length >= padded:
                    self._take(index, padded)
                    return self._hold(offset, num_bytes)
        raise ExtentsFullError(f"no contiguous {num_bytes} bytes free of {self.num_bytes}; raise the buffer's size")

    def free(self, extent: Extent) -> None:
        """Take a held extent back.

        Raises:
            ValueError: it is not held under this generation (freed twice, or quarantined).
        """
        with self._lock:
            self._remove(self._held, extent)
            self._give(extent.offset, _padded(extent.num_bytes))

    def quarantine(self, extent: Extent) -> None:
        """Set a held extent aside until its writer is fenced.

        Raises:
            ValueError: it is not held under this generation.
        """
        with self._lock:
            self._remove(self._held, extent)
            self._quarantined[extent.generation] = extent

    def free_fenced(self, extent: Extent) -> None:
        """Take a quarantined extent back; the caller has fenced its writer.

        Raises:
            ValueError: it is not quarantined.
        """
        with self._lock:
            self._remove(self._quarantined, extent)
            self._give(extent.offset, _padded(extent.num_bytes))

    def _hold(self, offset: int, num_bytes: int) -> Extent:
        self._generation += 1
        extent = Extent(offset, num_bytes, self._generation)
        self._held[extent.generation] = extent
        return extent

    def _take(self, index: int, num_bytes: int) -> None:
        offset, length = self._free[index]
        rest = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
        self._free[index : index + 1] = rest

    def _give(self, offset: int, num_bytes: int) -> None:
        index = bisect.bisect(self._free, (offset, 0))
        start, end = offset, offset + num_bytes
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))

    @staticmethod
    def _remove(table: dict[int, Extent], extent: Extent) -> None:
        if table.get(extent.generation) != extent:
            raise ValueError(f"{extent} is not in that state: freed before, or quarantined")
        del table[extent.generation]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
