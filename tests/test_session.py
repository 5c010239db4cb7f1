"""Sessions: the life of a transfer over loopback and over NIXL, and what happens when a real peer process misbehaves."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from transfer_workers import (
    FAST,
    FINGERPRINT,
    LAYOUT,
    MIB,
    Decode,
    Liar,
    assert_landed,
    codes_of,
    keys_of,
    landed_groups,
    make_producer,
    pair_of,
    push_all,
    until,
)

from scd_trt.transfer import producer as producer_module
from scd_trt.transfer.connection import Address, ControlError, UnreachableError, connect
from scd_trt.transfer.messages import Grant, Granted, SessionArena, SessionWelcome
from scd_trt.transfer.terms import Terms
from scd_trt.transfer.transport import LoopbackHub, LoopbackTransport
from scd_trt.transfer.wire import CodeLayout, Notification, new_transfer_id


@pytest.fixture(params=["loopback", "nixl"])
def pair(request):
    with pair_of(request.param) as pair:
        yield pair


# -- the life of a transfer, over both transports


def test_codes_arrive_and_are_published(pair):
    decode, prefill = pair
    keys = keys_of("a", 6)
    transfer_id, expected = decode.expect(keys, prefill.address)
    assert (expected.num_stored, expected.num_granted, expected.reason) == (0, 6, None)
    push_all(prefill.plan([*keys, *keys_of("tail", 2)]))
    assert decode.wait(transfer_id).state == "landed"
    assert decode.consumer.match(keys) == 6
    assert_landed(decode, keys)
    report = decode.report(transfer_id)
    assert (report.bytes_received, report.num_landed, report.num_writes) == (6 * LAYOUT.block_bytes, 6, 3)
    assert (report.encode_ms, report.reason) == (3.5, None)
    assert report.transfer_ms >= 0
    assert report.expected_s <= report.first_landing_s <= report.last_landing_s
    assert decode.arena_is_whole()


def test_a_repeated_prefix_crosses_the_wire_once(pair):
    decode, prefill = pair
    keys = keys_of("a", 6)
    transfer_id, _ = decode.expect(keys[:4], prefill.address)
    push_all(prefill.plan(keys[:4]))
    decode.wait(transfer_id)
    transfer_id, expected = decode.expect(keys, prefill.address)
    assert (expected.num_stored, expected.num_granted) == (4, 2)
    push = prefill.plan(keys)
    assert push.blocks == range(4, 6)
    push_all(push)
    decode.wait(transfer_id)
    assert_landed(decode, keys)
    assert decode.report(transfer_id).bytes_received == 2 * LAYOUT.block_bytes
    transfer_id, expected = decode.expect(keys, prefill.address)
    assert (expected.num_stored, expected.num_granted) == (6, 0)
    assert decode.wait(transfer_id).state == "landed"
    assert prefill.plan(keys) is None


def test_chunked_prefill_publishes_block_by_block(pair):
    decode, prefill = pair
    keys = keys_of("a", 5)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push = prefill.plan(keys)
    for group in range(3):
        push.send(group, 0, codes_of(group, 0, 3))
    until(lambda: decode.consumer.match(keys) == 3, "the first chunk is published")
    assert decode.wait(transfer_id, timeout_s=0.01).state == "landing"
    for group in range(3):
        push.send(group, 3, torch.from_numpy(codes_of(group, 3, 2)))
    push.finish()
    assert decode.wait(transfer_id).state == "landed"
    assert_landed(decode, keys)


def test_groups_travel_while_later_ones_are_computed(pair):
    """The proof by timestamps: a group has landed before a later one was even encoded."""
    decode, prefill = pair
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push = prefill.plan(keys)
    for group in range(3):
        push.send(group, 0, codes_of(group, 0, 4))
        until(lambda group=group: landed_groups(decode, transfer_id) == group + 1, "this group has landed")
    push.finish()
    decode.wait(transfer_id)
    encoded = {event.group: event.time_s for event in prefill.trace.events(transfer_id) if event.name == "encoded"}
    landed = {event.group: event.time_s for event in decode.trace(transfer_id) if event.name == "landed"}
    assert encoded[0] < landed[0] < encoded[1] < landed[1] < encoded[2] < landed[2]
    names = [event.name for event in prefill.trace.events(transfer_id)]
    until(lambda: "written" in names, "trace")
    assert names[:2] == ["granted", "planned"]


def test_many_transfers_at_once(pair):
    decode, prefill = pair
    prompts = [keys_of(f"prompt {index}", 5) for index in range(20)]
    transfers = [decode.expect(keys, prefill.address)[0] for keys in prompts]
    threads = [threading.Thread(target=lambda keys=keys: push_all(prefill.plan(keys))) for keys in prompts]
    for thread in threads:
        thread.start()
    for thread, transfer_id, keys in zip(threads, transfers, prompts, strict=True):
        thread.join(10)
        assert decode.wait(transfer_id).state == "landed"
        assert_landed(decode, keys)
    until(decode.arena_is_whole, "all extents are back")
    assert decode.counters()["landed"] == 60


def test_plan_takes_the_longest_match_and_only_once(pair):
    decode, prefill = pair
    keys = keys_of("a", 8)
    decode.expect(keys[:3], prefill.address)
    decode.expect(keys[:6], prefill.address)
    assert prefill.plan(keys_of("b", 8)) is None
    assert prefill.plan(keys[:2]) is None
    assert len(prefill.plan(keys).blocks) == 6
    assert len(prefill.plan(keys).blocks) == 3
    assert prefill.plan(keys) is None


def test_abort_says_why_and_gives_the_extent_back(pair):
    decode, prefill = pair
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push = prefill.plan(keys)
    push.send(0, 0, codes_of(0, 0, 4))
    push.abort("aborted")
    push.abort("timeout")
    push.send(1, 0, codes_of(1, 0, 4))
    waited = decode.wait(transfer_id)
    assert (waited.state, waited.reason) == ("failed", "aborted")
    until(decode.arena_is_whole, "the extent is back")
    assert decode.status().num_sessions == 1  # no fence was needed


def test_finish_without_everything_is_not_encoded(pair):
    decode, prefill = pair
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push = prefill.plan(keys)
    push.send(0, 0, codes_of(0, 0, 4))
    push.finish()
    assert decode.wait(transfer_id).reason == "not_encoded"
    until(decode.arena_is_whole, "the extent is back")


def test_blocks_that_were_queued_before_a_short_finish_still_travel():
    """The writes wait behind a full window when `finish` says that no more will come."""
    hub = LoopbackHub(held=True)
    with pair_of("loopback", hub=hub, window=1) as (decode, prefill):
        keys = keys_of("a", 6)
        transfer_id, _ = decode.expect(keys, prefill.address)
        push = prefill.plan(keys)
        for first in range(4):
            for group in range(3):
                push.send(group, first, codes_of(group, first, 1))
        push.finish()
        hub.held = False
        waited = decode.wait(transfer_id)
        assert (waited.state, waited.reason) == ("failed", "not_encoded")
        assert_landed(decode, keys[:4])
        assert decode.consumer.match(keys) == 4
        until(decode.arena_is_whole, "the extent is back")


# -- the end of a worker


def test_a_draining_producer_takes_no_grant_and_finishes_its_leases(pair):
    decode, prefill = pair
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push = prefill.plan(keys)
    assert not prefill.drain(timeout_s=0.05)
    _, expected = decode.expect(keys_of("b", 4), prefill.address)
    assert (expected.num_granted, expected.reason) == (0, "draining")
    push_all(push)
    assert prefill.drain(timeout_s=5)
    assert decode.wait(transfer_id).state == "landed"


def test_a_draining_consumer_asks_for_nothing_and_waits_for_what_is_due(pair):
    decode, prefill = pair
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    assert not decode.consumer.drain(timeout_s=0.05)
    refused_id, expected = decode.expect(keys_of("b", 4), prefill.address)
    assert (expected.num_granted, expected.reason) == (0, "consumer_draining")
    assert decode.consumer.holds(transfer_id)
    assert not decode.consumer.holds(refused_id)
    push_all(prefill.plan(keys))
    assert decode.consumer.drain(timeout_s=5)
    assert decode.wait(transfer_id).state == "landed"
    _, expected = decode.expect(keys, prefill.address)  # what is stored needs no codes
    assert (expected.num_stored, expected.reason) == (4, None)


def test_closing_the_producer_first_writes_what_is_finished(pair):
    decode, prefill = pair
    prompts = [keys_of(f"prompt {index}", 40) for index in range(10)]
    transfers = [decode.expect(keys, prefill.address)[0] for keys in prompts]
    for keys in prompts:
        push_all(prefill.plan(keys))
    prefill.close()
    assert {decode.wait(transfer_id).state for transfer_id in transfers} == {"landed"}
    for keys in prompts:
        assert_landed(decode, keys)
    until(decode.arena_is_whole, "the fence")


def test_a_producer_whose_peer_is_silent_closes_all_the_same():
    hub = LoopbackHub(held=True)
    with pair_of("loopback", hub=hub, write_timeout_s=0.3) as (decode, prefill):
        decode.expect(keys_of("a", 4), prefill.address)
        push_all(prefill.plan(keys_of("a", 4)))
        begin_s = time.monotonic()
        prefill.close()
        assert time.monotonic() - begin_s < 2


@pytest.mark.parametrize(("decode_s", "prefill_s", "reason"), [(1.0, 20.0, "timeout"), (20.0, 1.0, "not_encoded")])
def test_arena_full_is_said_and_ends_with_the_lease(decode_s, prefill_s, reason):
    """Either side's reaper ends a grant that nobody uses."""
    here, there = FAST.model_copy(update={"lease_s": decode_s}), FAST.model_copy(update={"lease_s": prefill_s})
    with pair_of("loopback", control=here, producer={"control": there}) as (decode, prefill):
        first = keys_of("a", MIB // LAYOUT.block_bytes - 1)
        transfer_id, _ = decode.expect(first, prefill.address)
        _, expected = decode.expect(keys_of("b", 10), prefill.address)
        assert (expected.num_granted, expected.reason) == (0, "arena_full")
        assert "raise" in expected.text
        assert decode.wait(transfer_id).reason == reason
        until(decode.arena_is_whole, "the lease ended")
        assert prefill.plan(first) is None
        _, expected = decode.expect(keys_of("b", 10), prefill.address)
        assert expected.num_granted == 10


def test_more_than_the_store_holds_is_refused():
    with pair_of("loopback", store_bytes=3 * LAYOUT.block_bytes) as (decode, prefill):
        _, expected = decode.expect(keys_of("a", 4), prefill.address)
        assert (expected.num_granted, expected.reason) == (0, "store_full")


def test_a_store_full_of_pins_fails_the_transfer():
    with pair_of("loopback", store_bytes=4 * LAYOUT.block_bytes) as (decode, prefill):
        for key in keys_of("other", 4):
            decode.store.put(key, bytes(LAYOUT.block_bytes))
        with decode.consumer.pin(keys_of("other", 4)):
            transfer_id, _ = decode.expect(keys_of("a", 2), prefill.address)
            push_all(prefill.plan(keys_of("a", 2)))
            assert decode.wait(transfer_id).reason == "store_full"
        until(decode.arena_is_whole, "the extent is back")


def test_send_buffer_full_waits_then_fails():
    hub = LoopbackHub(held=True)
    options = {"hub": hub, "write_timeout_s": 30.0, "send_buffer_bytes": 4 * LAYOUT.block_bytes}
    with pair_of("loopback", **options) as (decode, prefill):
        keys = keys_of("a", 8)
        transfer_id, _ = decode.expect(keys, prefill.address)
        push = prefill.plan(keys)
        begin_s = time.monotonic()
        push_all(push)
        waited_s = time.monotonic() - begin_s
        assert producer_module.BACKPRESSURE_S * 0.9 < waited_s < producer_module.BACKPRESSURE_S * 3
        assert push.reason == "send_buffer_full"
        hub.held = False
        assert decode.wait(transfer_id).reason == "send_buffer_full"
        until(lambda: prefill.buffer.num_free_bytes > 3 * LAYOUT.block_bytes, "the send buffer is empty")


def test_back_pressure_alone_loses_nothing():
    with pair_of("loopback", send_buffer_bytes=4 * LAYOUT.block_bytes) as (decode, prefill):
        keys = keys_of("a", 60)
        transfer_id, _ = decode.expect(keys, prefill.address)
        push_all(prefill.plan(keys))
        assert decode.wait(transfer_id).state == "landed"
        assert_landed(decode, keys)


@pytest.mark.parametrize(
    ("group", "first", "codes"),
    [
        (3, 0, np.zeros((4, 64), np.uint8)),
        (0, 0, np.zeros((4, 64), np.int8)),
        (0, 0, np.zeros((4, 63), np.uint8)),
        (0, 0, np.zeros((5, 64), np.uint8)),
        (0, 0, np.zeros((0, 64), np.uint8)),
        (0, 3, np.zeros((8, 64), np.uint8)),
        (0, -1, np.zeros((4, 64), np.uint8)),
    ],
)
def test_send_refuses_what_does_not_fit(group, first, codes):
    with pair_of("loopback") as (decode, prefill):
        decode.expect(keys_of("a", 4), prefill.address)
        with pytest.raises(ValueError, match=r"group|blocks"):
            prefill.plan(keys_of("a", 4)).send(group, first, codes)


def test_sent_twice_is_sent_once():
    with pair_of("loopback") as (decode, prefill):
        transfer_id, _ = decode.expect(keys_of("a", 4), prefill.address)
        push = prefill.plan(keys_of("a", 4))
        push.send(0, 0, codes_of(0, 0, 4))
        push_all(push)
        decode.wait(transfer_id)
        assert decode.report(transfer_id).num_writes == 3


def test_notes_of_the_connector_are_joined_by_the_last_key():
    with pair_of("loopback") as (decode, prefill):
        keys = keys_of("a", 2)
        first, _ = decode.expect(keys, prefill.address)
        second, _ = decode.expect(keys, prefill.address)
        decode.consumer.note(keys, matched_tokens=8, decode_ms=1.5)
        decode.consumer.note(keys, matched_tokens=4)
        decode.consumer.note(keys_of("other", 3), matched_tokens=99)
        decode.consumer.note([], matched_tokens=99)
        assert (decode.report(first).matched_tokens, decode.report(first).decode_ms) == (8, 1.5)
        assert (decode.report(second).matched_tokens, decode.report(second).decode_ms) == (4, None)


def test_cancel_ends_a_transfer_at_once():
    with pair_of("loopback") as (decode, prefill):
        keys = keys_of("a", 4)
        transfer_id, _ = decode.expect(keys, prefill.address)
        push = prefill.plan(keys)
        assert decode.cancel(transfer_id).reason == "aborted"
        until(decode.arena_is_whole, "the extent is back")
        push_all(push)
        assert push.reason == "timeout"
        assert decode.consumer.match(keys) == 0
        assert decode.cancel(new_transfer_id()).reason == "unknown_transfer"


def test_a_burst_of_cancels():
    with pair_of("loopback") as (decode, prefill):
        transfers = [decode.expect(keys_of(f"prompt {index}", 1), prefill.address)[0] for index in range(500)]
        assert {waited.reason for waited in decode.cancel_all(transfers)} == {"aborted"}
        until(decode.arena_is_whole, "all extents are back")
        transfer_id, _ = decode.expect(keys_of("a", 4), prefill.address)
        push_all(prefill.plan(keys_of("a", 4)))
        assert decode.wait(transfer_id).state == "landed"


def test_unknown_transfers():
    with pair_of("loopback") as (decode, _):
        assert decode.wait(new_transfer_id()).reason == "unknown_transfer"
        with pytest.raises(ControlError, match="never expected"):
            decode.report(new_transfer_id())


def test_expecting_nothing_and_expecting_twice():
    with pair_of("loopback") as (decode, prefill):
        transfer_id, expected = decode.expect([], prefill.address)
        assert (expected.num_stored, expected.num_granted, expected.reason) == (0, 0, None)
        assert decode.wait(transfer_id).state == "landed"
        keys = keys_of("a", 2)
        transfer_id, expected = decode.expect(keys, prefill.address)
        again = decode._run(decode.client.expect(transfer_id, keys, producer=prefill.address))
        assert again == expected
        assert prefill.statistics()["granted"] == 1


# -- who does not fit


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": "another"}, "fingerprint_mismatch"),
        ({"layout": CodeLayout(8, LAYOUT.bytes_per_token)}, "layout_mismatch"),
        ({"layout": CodeLayout(4, (64, 256))}, "layout_mismatch"),
    ],
)
def test_another_translator_or_layout_is_refused(changes, reason):
    with pair_of("loopback", producer=changes) as (decode, prefill):
        begin_s = time.monotonic()
        transfer_id, expected = decode.expect(keys_of("a", 2), prefill.address)
        assert expected.reason == reason
        assert "there" in expected.text
        assert decode.wait(transfer_id).reason == reason
        assert time.monotonic() - begin_s < 1


def test_another_transport_version_is_refused():
    class Other(LoopbackTransport):
        version = "loopback 2"

    with pair_of("loopback") as (decode, _):
        decode_transport, decode.transport = decode.transport, Other()
        prefill = make_producer(decode)
        decode.transport = decode_transport
        _, expected = decode.expect(keys_of("a", 2), prefill.address)
        assert expected.reason == "version_mismatch"
        prefill.close()


@pytest.mark.parametrize(
    ("here", "there", "fits"),
    [
        ("nixl_cu12 1.5.1", "nixl_cu13 1.4.1", True),
        ("nixl_cu12 1.5.1", "nixl_cu12 1.3.0", False),
        ("nixl_cu12 1.3.0", "nixl_cu12 1.3.0", True),
        ("nixl_cu12 1.5.1", "nixl_cu12 2.0.0", False),
        ("nixl_cu12 1.5.1", "loopback 1", False),
    ],
)
def test_which_libraries_interoperate(here, there, fits):
    mine = Terms("consumer", here, "f", LAYOUT, "a")
    theirs = Terms("producer", there, "f", LAYOUT, "b").welcome()
    if fits:
        mine.check(theirs)
    else:
        with pytest.raises(ControlError, match="transport"):
            mine.check(theirs)


def test_nobody_at_the_producers_address():
    with pair_of("loopback") as (decode, prefill):
        prefill.close()
        _, expected = decode.expect(keys_of("a", 2), prefill.address)
        assert expected.reason == "producer_unreachable"
        _, expected = decode.expect(keys_of("a", 2), "no address")
        assert expected.reason == "producer_unreachable"
        assert "host:port" in expected.text


def test_a_decode_worker_is_no_producer():
    with pair_of("loopback") as (decode, _):
        _, expected = decode.expect(keys_of("a", 2), decode.consumer.address)
        assert expected.reason == "producer_unreachable"
        assert "decode worker" in expected.text


# -- notifications and grants that lie


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"generation": 99}, "ignored_stale_generation"),
        ({"session": b"s" * 16}, "ignored_other_session"),
        ({"transfer_id": "ab" * 16}, "ignored_unexpected"),
        ({"group": 3}, "ignored_out_of_bounds"),
        ({"first_block": 1}, "ignored_out_of_bounds"),
        ({"num_blocks": 3}, "ignored_out_of_bounds"),
        ({"digest": b"d" * 16}, "ignored_digest_mismatch"),
        ({"num_bytes": 17}, "ignored_digest_mismatch"),
        ({}, "ignored_repeated"),
        (b"no notification", "ignored_malformed"),
    ],
)
def test_notifications_that_lie_are_ignored_and_counted(changes, counter):
    hub = LoopbackHub()
    with contextlib.ExitStack() as stack:
        decode = Decode("loopback", hub=hub)
        stack.callback(decode.close)
        liar = Liar(make_producer(decode), LoopbackTransport(hub))
        stack.callback(liar.prefill.close)
        keys = keys_of("a", 2)
        transfer_id, _ = decode.expect(keys, liar.prefill.address)
        (grant,) = liar.grants
        payload = codes_of(0, 0, 2).ravel()
        note = Notification(liar.arena.session, transfer_id, 0, 0, 2, grant.generation, len(payload)).sealed(payload)
        lie = changes if isinstance(changes, bytes) else Notification(**(note.__dict__ | changes))
        if counter == "ignored_repeated":
            liar.write(note, payload, grant.offset)
            until(lambda: decode.counters().get("landed"), "the first has landed")
            payload = payload + 1
        liar.write(lie, payload, grant.offset)
        until(lambda: decode.counters().get(counter), f"{counter} is counted")
        assert decode.consumer.match(keys) == 0
        push_all(liar.prefill.plan(keys))  # the truth still lands
        assert decode.wait(transfer_id).state == "landed"
        assert_landed(decode, keys)


def test_corrupt_bytes_are_the_reason_in_the_end():
    hub = LoopbackHub(held=True)
    with pair_of("loopback", hub=hub) as (decode, prefill):
        keys = keys_of("a", 2)
        transfer_id, _ = decode.expect(keys, prefill.address)
        push = prefill.plan(keys)
        push_all(push)
        until(lambda: sum(e.name == "posted" for e in prefill.trace.events(transfer_id)) == 3, "all writes are posted")
        prefill.buffer.buffer.array[5] ^= 1  # after the seal, before the bytes move
        hub.held = False
        assert decode.wait(transfer_id).reason == "digest_mismatch"
        assert decode.consumer.match(keys) == 0
        until(decode.arena_is_whole, "the extent is back")


@pytest.mark.parametrize(
    "changes", [{"num_bytes": 1}, {"offset": MIB}, {"block_keys": [b"k" * 16] * 3}], ids=["bytes", "offset", "keys"]
)
def test_grants_that_do_not_fit_are_refused(changes):
    """A decode worker of our making offers impossible extents."""

    class Mute:
        async def handle(self, connection, body):
            return None

        def closed(self, connection, why):
            pass

    async def offer(prefill, transport):
        connection = await connect(Address.parse(prefill.address), FAST, Mute())
        hello = Terms("consumer", transport.version, FINGERPRINT, LAYOUT, "x").hello()
        await connection.request(hello, SessionWelcome, timeout_s=5)
        fields = {"transfer_id": new_transfer_id(), "block_keys": [b"k" * 16], "first_block": 0, "offset": 0}
        fields |= {"num_bytes": LAYOUT.block_bytes, "generation": 1}
        with pytest.raises(ControlError, match="needs a session with an arena"):
            await connection.request(Grant(**fields), Granted, timeout_s=5)
        receiver = transport.open_receiver("mute", producer_module.SendBuffer(MIB).buffer)
        from scd_trt.transfer.messages import SessionReady

        await connection.request(SessionArena(b"s" * 16, receiver.metadata, 0, MIB), SessionReady, timeout_s=5)
        with pytest.raises(ControlError, match="inside the arena expected"):
            await connection.request(Grant(**(fields | changes)), Granted, timeout_s=5)
        await connection.request(Grant(**fields), Granted, timeout_s=5)
        connection.close("done")

    with pair_of("loopback") as (decode, prefill):
        asyncio.run(offer(prefill, decode.transport))
        until(lambda: prefill.plan([b"k" * 16]) is None, "the grants of a lost connection are gone")


# -- peers that fall silent or die


def test_a_silent_data_path_ends_the_session_and_the_next_transfer_works():
    hub = LoopbackHub(held=True)
    with pair_of("loopback", hub=hub, write_timeout_s=0.3) as (decode, prefill):
        keys = keys_of("a", 4)
        transfer_id, _ = decode.expect(keys, prefill.address)
        begin_s = time.monotonic()
        push_all(prefill.plan(keys))
        assert decode.wait(transfer_id).reason in {"producer_gone", "timeout"}  # its last word may still arrive
        assert time.monotonic() - begin_s < 2
        until(lambda: decode.counters().get("fences") == 1, "the fence")
        assert decode.arena_is_whole()
        hub.held = False
        hub.land_orphans()
        transfer_id, _ = decode.expect(keys, prefill.address)
        push_all(prefill.plan(keys))
        assert decode.wait(transfer_id).state == "landed"
        assert_landed(decode, keys)


def test_extents_of_a_lost_session_stay_quarantined_until_the_fence():
    fence_may_end = threading.Event()

    class SlowFence(LoopbackTransport):
        def open_receiver(self, name, arena):
            receiver = super().open_receiver(name, arena)
            destroy = receiver.destroy
            receiver.destroy = lambda: (fence_may_end.wait(10), destroy())
            return receiver

    hub = LoopbackHub(held=True)
    decode = Decode("loopback", transport=SlowFence(hub))
    prefill = make_producer(decode)
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push_all(prefill.plan(keys))
    prefill.control.close()  # as a killed process would: its writes may still be on their way
    assert decode.wait(transfer_id).reason == "producer_gone"
    assert decode.counters()["arena_quarantined_bytes"] == 4 * LAYOUT.block_bytes
    assert not decode.arena_is_whole()
    fence_may_end.set()
    until(decode.arena_is_whole, "the fence")
    hub.held = False
    prefill.close()
    decode.close()


def test_closing_the_producer_fails_what_is_open(pair):
    decode, prefill = pair
    keys = keys_of("a", 4)
    transfer_id, _ = decode.expect(keys, prefill.address)
    push = prefill.plan(keys)
    push.send(0, 0, codes_of(0, 0, 4))
    prefill.close()
    prefill.close()
    assert decode.wait(transfer_id).reason in {"producer_gone", "consumer_gone"}
    until(decode.arena_is_whole, "the fence")
    push.send(1, 0, codes_of(1, 0, 4))
    push.finish()


def test_closing_the_consumer_ends_the_session(pair):
    decode, prefill = pair
    decode.expect(keys_of("a", 4), prefill.address)
    push = prefill.plan(keys_of("a", 4))
    decode.consumer.close()
    until(lambda: push.reason == "consumer_gone", "the push fails")
    push_all(push)
    until(lambda: prefill.buffer.num_free_bytes == MIB, "the send buffer is empty")


def test_router_sees_a_dead_decode_worker():
    decode = Decode("loopback")
    decode.consumer.close()
    with pytest.raises(UnreachableError):
        decode.status()
    decode.close()
