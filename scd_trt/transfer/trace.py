"""When what happened to which codes: a bounded log of timestamps, the evidence that layers travel while others compute.

Times are `time.monotonic()` in seconds: on Linux one clock for all processes of a host, so the logs of the prefill and
the decode server can be laid side by side there, not across hosts. Thread-safe; the oldest events leave first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal

import msgspec

TraceName = Literal["granted", "planned", "encoded", "posted", "written", "finished", "landed", "published", "ended"]


class TraceEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One event. `group` is -1 for events of a whole transfer; counts are zero where they mean nothing."""

    time_s: float
    name: TraceName
    transfer_id: str
    group: int = -1
    first_block: int = 0
    num_blocks: int = 0
    num_bytes: int = 0


class TraceLog:
    """The latest `capacity` events of one process."""

    def __init__(self, capacity: int = 65536) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def record(
        self,
        name: TraceName,
        transfer_id: str,
        *,
        group: int = -1,
        first_block: int = 0,
        num_blocks: int = 0,
        num_bytes: int = 0,
    ) -> None:
        """Add an event that happens now."""
        event = TraceEvent(time.monotonic(), name, transfer_id, group, first_block, num_blocks, num_bytes)
        with self._lock:
            self._events.append(event)

    def events(self, transfer_id: str | None = None) -> list[TraceEvent]:
        """Events in the order they were recorded, of one transfer or of all."""
        with self._lock:
            return [event for event in self._events if transfer_id is None or event.transfer_id == transfer_id]
