"""Rates learned from finished requests: of each link, each prefill worker and each decode worker. Pure: times are given.

A rate is a quotient of two exponential averages, of amounts and of seconds, so a prompt of a thousand tokens weighs more
than one of ten, whose time is mostly overhead. A rate that was not measured for `ttl_s` is forgotten. Memory is bounded by
`MAX_SUBJECTS` per kind, those measured longest ago leave first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from scd_trt.serving.decision import Rates

SMOOTHING = 0.3
MAX_SUBJECTS = 4096


@dataclass
class _Quotient:
    amount: float
    seconds: float
    updated_s: float


class _Averages:
    """One kind of rate, by subject."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._quotients: OrderedDict[Hashable, _Quotient] = OrderedDict()

    def add(self, subject: Hashable, amount: float, seconds: float, now_s: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        known = self._quotients.pop(subject, None)
        if known is not None and now_s - known.updated_s <= self._ttl_s:
            amount = known.amount + SMOOTHING * (amount - known.amount)
            seconds = known.seconds + SMOOTHING * (seconds - known.seconds)
        self._quotients[subject] = _Quotient(amount, seconds, now_s)
        if len(self._quotients) > MAX_SUBJECTS:
            self._quotients.popitem(last=False)

    def at(self, subject: Hashable, now_s: float) -> float | None:
        known = self._quotients.get(subject)
        return None if known is None or now_s - known.updated_s > self._ttl_s else known.amount / known.seconds


class Measurements:
    """What was measured; a sample of nothing is ignored. Workers are named by their URLs."""

    def __init__(self, *, ttl_s: float) -> None:
        self._link, self._prefill, self._local, self._reconstruct = (_Averages(ttl_s) for _ in range(4))

    def note_transfer(self, prefill: str, decode: str, num_bytes: int, seconds: float, *, now_s: float) -> None:
        """Codes have crossed the link between two workers."""
        self._link.add((prefill, decode), num_bytes, seconds, now_s)

    def note_prefill(self, prefill: str, num_tokens: int, seconds: float, *, now_s: float) -> None:
        """A prefill worker has computed tokens."""
        self._prefill.add(prefill, num_tokens, seconds, now_s)

    def note_local(self, decode: str, num_tokens: int, seconds: float, *, now_s: float) -> None:
        """A decode worker has computed tokens of a prompt."""
        self._local.add(decode, num_tokens, seconds, now_s)

    def note_reconstruction(self, decode: str, num_tokens: int, seconds: float, *, now_s: float) -> None:
        """A decode worker has decoded codes."""
        self._reconstruct.add(decode, num_tokens, seconds, now_s)

    def rates(self, prefill: str | None, decode: str, *, now_s: float) -> Rates:
        """What is known now of a prompt's way over these two workers."""
        reconstruct = self._reconstruct.at(decode, now_s)
        return Rates(
            link_bytes_per_s=self._link.at((prefill, decode), now_s),
            prefill_tokens_per_s=self._prefill.at(prefill, now_s),
            local_tokens_per_s=self._local.at(decode, now_s),
            reconstruct_s_per_token=None if reconstruct is None else 1 / reconstruct,
        )
