"""W3C trace context (https://www.w3.org/TR/trace-context/): a request keeps its trace, every hop gets a span of its own.

    traceparent: 00-<trace id, 32 hex>-<span id, 16 hex>-<flags, 2 hex>        tracestate: passed on as it came

A request without a valid `traceparent` begins a trace of its own, not sampled, and its `tracestate` is dropped, as the
standard says. Nothing is recorded here: a collector sees the hops in the workers' own spans.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

MAX_STATE_CHARS = 512
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True)
class TraceContext:
    """The trace that a request belongs to."""

    trace_id: str
    flags: int
    state: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> TraceContext:
        """Read the headers of a request (names in lower case), or begin a trace."""
        found = _PARENT.fullmatch(headers.get("traceparent", ""))
        if found is None or not _is_valid(found):
            return cls(secrets.token_hex(16), 0)
        state = headers.get("tracestate", "")
        # only what version 00 defines is passed on as version 00
        return cls(found[2], int(found[4], 16) & _SAMPLED, state if 0 < len(state) <= MAX_STATE_CHARS else None)

    def next_hop(self) -> dict[str, str]:
        """Headers of one outgoing request, with a new span id."""
        parent = f"00-{self.trace_id}-{_span_id()}-{self.flags:02x}"
        return {"traceparent": parent} | ({} if self.state is None else {"tracestate": self.state})


def _is_valid(found: re.Match[str]) -> bool:
    version, trace_id, span_id, _, rest = found.groups()
    return not (version == "00" and rest) and int(trace_id, 16) != 0 and int(span_id, 16) != 0


def _span_id() -> str:
    # all zeros would mean "no span"
    return f"{secrets.randbelow((1 << 64) - 1) + 1:016x}"
