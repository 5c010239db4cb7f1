"""Which transfer's report gets what the connector tells of a request, where equal prompts are under way at once.

An engine's request does not say which transfer brought its codes; only the content joins the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from serving_pairs import loopback_config

from scd_trt.transfer.messages import Cancel, Expect, ReportQuery, TransferReport
from scd_trt.transfer.session import Consumer, Producer, open_transport
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.wire import CodeLayout, new_transfer_id

KEYS = [bytes([index]) * 16 for index in range(3)]
LAYOUT = CodeLayout(4, (5,))


@dataclass
class Ends:
    """Both ends of the transfer, and what a router asks of the consumer."""

    consumer: Consumer
    producer: Producer

    def expect(self) -> str:
        """A transfer of the prompt, granted or taken from the store."""
        transfer_id = new_transfer_id()
        self._ask(Expect(transfer_id, KEYS, self.producer.address))
        return transfer_id

    def land(self) -> None:
        """The producer sends all that it was granted last."""
        push = self.producer.plan(KEYS)
        assert push is not None
        push.send(0, 0, np.zeros((3 * 4, 5), dtype=np.uint8))
        push.finish()

    def wait(self, transfer_id: str) -> None:
        """Until it is over."""
        self.consumer._transfers[transfer_id].terminal.result(20)

    def cancel(self, transfer_id: str) -> None:
        """The router gives up."""
        self._ask(Cancel(transfer_id))

    def report(self, transfer_id: str) -> TransferReport:
        """What the router reads."""
        found = self._ask(ReportQuery(transfer_id))
        assert isinstance(found, TransferReport)
        return found

    def noted(self, transfer_id: str) -> tuple[int | None, float | None]:
        """Matched tokens and decode time of a report."""
        report = self.report(transfer_id)
        return report.matched_tokens, report.decode_ms

    def _ask(self, body: object) -> object:
        return self.consumer.control.run(self.consumer.handle(None, body), timeout_s=20)  # type: ignore[arg-type]


@contextmanager
def both_ends() -> Iterator[Ends]:
    config = loopback_config(4)
    transport = open_transport(config.transport)
    session = {
        "config": config.transport,
        "control": config.control,
        "listen": "127.0.0.1:0",
        "fingerprint": "f",
        "layout": LAYOUT,
    }
    consumer = Consumer(transport, store=CodeStore(config.store), **session)  # type: ignore[arg-type]
    producer = Producer(transport, **session)  # type: ignore[arg-type]
    try:
        yield Ends(consumer, producer)
    finally:
        consumer.close()
        producer.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with both_ends() as opened:
        yield opened


def test_a_note_stays_in_one_piece(ends: Ends) -> None:
    """The second request's time must not end in the first one's report because that had none."""
    first = ends.expect()
    ends.land()
    ends.wait(first)
    second = ends.expect()
    ends.consumer.note(KEYS, matched_tokens=0)
    ends.consumer.note(KEYS, matched_tokens=12, decode_ms=1.5)
    assert sorted((ends.noted(first), ends.noted(second))) == [(0, None), (12, 1.5)]


def test_codes_that_were_used_are_noted_where_codes_are(ends: Ends) -> None:
    """One of two equal prompts was given up before anything landed; the other one's request used its codes."""
    first, second = ends.expect(), ends.expect()
    ends.cancel(first)
    push = ends.producer.plan(KEYS)
    while push is not None and push.transfer_id != second:
        push = ends.producer.plan(KEYS)
    assert push is not None
    push.send(0, 0, np.zeros((3 * 4, 5), dtype=np.uint8))
    push.finish()
    ends.wait(second)
    ends.consumer.note(KEYS, matched_tokens=12, decode_ms=1.5)
    ends.consumer.note(KEYS, matched_tokens=0)
    assert (ends.noted(first), ends.noted(second)) == ((0, None), (12, 1.5))


def test_a_request_that_runs_belongs_to_a_transfer_that_is_over(ends: Ends) -> None:
    """A router sends the request when it stops waiting, so one that still waits has no request yet."""
    waiting, over = ends.expect(), ends.expect()
    ends.cancel(over)
    ends.consumer.note(KEYS, matched_tokens=0)
    assert (ends.noted(waiting), ends.noted(over)) == ((None, None), (0, None))


def test_equal_transfers_are_noted_in_order(ends: Ends) -> None:
    """Each of them once, and a note too many is dropped."""
    transfers = [ends.expect(), ends.expect()]
    for transfer in transfers:
        ends.cancel(transfer)
    for decode_ms in (1.0, 2.0, 3.0):
        ends.consumer.note(KEYS, matched_tokens=0, decode_ms=decode_ms)
    assert [ends.noted(transfer) for transfer in transfers] == [(0, 1.0), (0, 2.0)]
