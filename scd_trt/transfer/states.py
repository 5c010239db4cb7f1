"""What state one transfer is in, on either side: pure, no clock, no I/O, no thread.

Consumer, `Landing`:   waiting -> landing -> landed | failed        (waiting -> landed where nothing had to be sent)
Producer, `Sending`:   open -> finishing -> ended | failed

Terminal states are sticky and keep their first reason; every transition may be repeated. A transfer being terminal does not
make its extent reusable: that needs the producer's word that no write of it is outstanding (`ended`), or a fence.

A push that stops short without a fault (`CUT_REASONS`: the guard refused the rest, or the engine had no more) fails too, but
what it has queued is still written and still counts: both sides wait for it, so that the blocks before the cut can be used.

Block indices are relative to the granted blocks. Times are seconds of one monotonic clock, given by the caller.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

FallbackReason = Literal[
    "no_producer",
    "producer_unreachable",
    "producer_gone",
    "consumer_gone",
    "version_mismatch",
    "fingerprint_mismatch",
    "layout_mismatch",
    "arena_full",
    "store_full",
    "send_buffer_full",
    "timeout",
    "digest_mismatch",
    "not_encoded",
    "guarded",
    "aborted",
    "draining",
    "consumer_draining",
    "unknown_transfer",
]
FALLBACK_REASONS: tuple[FallbackReason, ...] = get_args(FallbackReason)
CUT_REASONS: frozenset[FallbackReason] = frozenset({"guarded", "not_encoded"})
"""Reasons that spare the blocks before the cut."""

LandingState = Literal["waiting", "landing", "landed", "failed"]


class Landing:
    """One transfer as the consumer sees it.

    Args:
        num_groups: layer groups of the translator.
        num_blocks: blocks granted; zero means that there is nothing to wait for.
        granted_s: when the lease began.
    """

    def __init__(self, *, num_groups: int, num_blocks: int, granted_s: float) -> None:
        self.state: LandingState = "waiting" if num_blocks else "landed"
        self.reason: FallbackReason | None = None
        self.granted_s = granted_s
        self.first_landing_s: float | None = None
        self.last_landing_s: float | None = None
        self.num_writes: int | None = None
        self._shortfall: FallbackReason = "not_encoded"
        self._num_landed_writes = 0
        self._rejected: set[tuple[int, int, int]] = set()
        self._landed_GN = np.zeros((num_groups, num_blocks), dtype=bool)
        self._num_missing_N = np.full(num_blocks, num_groups)

    @property
    def is_terminal(self) -> bool:
        """Landed or failed."""
        return self.state in ("landed", "failed")

    @property
    def num_landed_blocks(self) -> int:
        """Blocks of which all groups have landed."""
        return int(np.count_nonzero(self._num_missing_N == 0))

    @property
    def num_processed(self) -> int:
        """Writes that have arrived; a rejected one counts until the same blocks land after all."""
        return self._num_landed_writes + len(self._rejected)

    @property
    def is_drained(self) -> bool:
        """True when no byte of this transfer can arrive any more and none is needed: its extent may be reused."""
        if self.num_writes is None:
            return False
        return self.state == "failed" or self.num_processed >= self.num_writes

    def has_landed(self, group: int, first_block: int, num_blocks: int) -> bool:
        """True where any of these blocks has landed before in this group: a repeated write adds nothing."""
        return bool(self._landed_GN[group, first_block : first_block + num_blocks].any())

    def completed_by(self, group: int, first_block: int, num_blocks: int) -> list[int]:
        """Blocks that a write of a group would complete, were it landed now."""
        blocks = slice(first_block, first_block + num_blocks)
        new_N = (self._num_missing_N[blocks] == 1) & ~self._landed_GN[group, blocks]
        return (np.flatnonzero(new_N) + first_block).tolist()

    def land(self, group: int, first_block: int, num_blocks: int, *, now_s: float) -> None:
        """A verified write has landed."""
        self._num_landed_writes += 1
        self._rejected.discard((group, first_block, num_blocks))
        if self.is_terminal:
            return
        self.state = "landing"
        self.first_landing_s = now_s if self.first_landing_s is None else self.first_landing_s
        self.last_landing_s = now_s
        blocks = slice(first_block, first_block + num_blocks)
        self._num_missing_N[blocks] -= ~self._landed_GN[group, blocks]
        self._landed_GN[group, blocks] = True
        if not self._num_missing_N.any():
            self.state = "landed"
        else:
            self._check_end()

    def reject(self, group: int, first_block: int, num_blocks: int) -> None:
        """A notification has arrived whose digest does not fit: the write is corrupt, or the notification a lie."""
        self._rejected.add((group, first_block, num_blocks))
        self._check_end()

    def end(self, *, num_writes: int, reason: FallbackReason | None) -> None:
        """The producer says that it has written `num_writes` times and has nothing outstanding."""
        if self.num_writes is None:
            self.num_writes = num_writes
        if reason in CUT_REASONS:
            self._shortfall = reason
        elif reason is not None:
            self.fail(reason)
        self._check_end()

    def fail(self, reason: FallbackReason) -> None:
        """Give up, unless terminal already."""
        if not self.is_terminal:
            self.state, self.reason = "failed", "digest_mismatch" if self._rejected else reason

    def is_overdue(self, now_s: float, *, lease_s: float, transfer_timeout_s: float) -> bool:
        """True when nothing came for `lease_s`, or not all within `transfer_timeout_s` of the first landing."""
        if self.first_landing_s is None:
            return now_s - self.granted_s > lease_s
        return now_s - self.first_landing_s > transfer_timeout_s

    def _check_end(self) -> None:
        if self.num_writes is not None and self.num_processed >= self.num_writes:
            self.fail(self._shortfall)


class Sending:
    """One push as the producer sees it.

    Args:
        num_groups: layer groups of the translator.
        num_blocks: blocks granted.
    """

    def __init__(self, *, num_groups: int, num_blocks: int) -> None:
        self.reason: FallbackReason | None = None
        self.is_finishing = False
        self._cut: FallbackReason | None = None
        self.num_in_flight = 0
        self.num_written = 0
        self._sent_GN = np.zeros((num_groups, num_blocks), dtype=bool)

    @property
    def is_failed(self) -> bool:
        """No further write will be posted."""
        return self.reason is not None

    @property
    def end_reason(self) -> FallbackReason | None:
        """What the consumer is told: why the push failed, else why it was cut."""
        return self.reason or self._cut

    @property
    def is_drained(self) -> bool:
        """Finished or failed, and nothing in flight: the moment to tell the consumer that it ended."""
        return (self.is_finishing or self.is_failed) and not self.num_in_flight

    def queue(self, group: int, first_block: int, num_blocks: int) -> bool:
        """Blocks of a group are about to be queued.

        Returns:
            False where there is nothing to do: failed, finishing, or the same blocks were queued before.

        Raises:
            ValueError: some of the blocks were queued before and some were not.
        """
        if self.is_failed or self.is_finishing:
            return False
        sent_N = self._sent_GN[group, first_block : first_block + num_blocks]
        if sent_N.any():
            if sent_N.all():
                return False
            raise ValueError(f"group {group}, blocks {first_block}+{num_blocks}: partly sent before")
        sent_N[:] = True
        self.num_in_flight += 1
        return True

    def written(self) -> None:
        """A queued write is done."""
        self.num_in_flight -= 1
        self.num_written += 1

    def dropped(self) -> None:
        """A queued write will never be done."""
        self.num_in_flight -= 1

    def finish(self) -> None:
        """No more writes will be queued; a push that has not queued everything is cut short by that."""
        if self._sent_GN.all():
            self.is_finishing = True
        else:
            self.cut("not_encoded")

    def cut(self, reason: FallbackReason) -> None:
        """No more writes will be queued, on purpose; those that are queued are still done."""
        if not self.is_finishing:
            self.is_finishing, self._cut = True, reason

    def fail(self, reason: FallbackReason) -> None:
        """Give up, unless given up already."""
        if self.reason is None:
            self.reason = reason
