"""W3C trace context: what is taken over, what begins anew, and a span per hop. Cases from the standard's own tables."""

from __future__ import annotations

import re

import pytest

from scd_trt.serving.trace_context import MAX_STATE_CHARS, TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FORM = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]")


def test_the_trace_goes_on_with_a_new_span_at_every_hop() -> None:
    trace = TraceContext.of({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "congo=t61rcWkgMzE,rojo=1"})
    hops = [trace.next_hop() for _ in range(3)]
    assert {hop["traceparent"][:36] for hop in hops} == {f"00-{TRACE}-"}
    assert all(hop["traceparent"].endswith("-01") and FORM.fullmatch(hop["traceparent"]) for hop in hops)
    assert len({SPAN, *(hop["traceparent"][36:52] for hop in hops)}) == 4
    assert {hop["tracestate"] for hop in hops} == {"congo=t61rcWkgMzE,rojo=1"}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_what_is_no_trace_begins_one(parent: str) -> None:
    trace = TraceContext.of({"traceparent": parent, "tracestate": "a=1"})
    assert trace.trace_id != TRACE
    assert FORM.fullmatch(trace.next_hop()["traceparent"])
    assert trace.next_hop()["traceparent"].endswith("-00")
    assert "tracestate" not in trace.next_hop()
    assert TraceContext.of({}).trace_id != trace.trace_id


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    trace = TraceContext.of({"traceparent": f"cc-{TRACE}-{SPAN}-fd-what-comes-later"})
    assert trace.next_hop()["traceparent"].startswith(f"00-{TRACE}-")
    assert trace.next_hop()["traceparent"].endswith("-01")


def test_a_state_too_long_is_dropped_whole() -> None:
    for length, kept in ((MAX_STATE_CHARS, True), (MAX_STATE_CHARS + 1, False)):
        trace = TraceContext.of({"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "a" * length})
        assert ("tracestate" in trace.next_hop()) == kept
