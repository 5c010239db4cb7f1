"""The fault table: whatever becomes of a peer, a link or a message ends in right codes or a named reason, and no lost memory.

Real processes over NIXL on tcp (`transfer_peer.py`); each test is named after its fault. Cuts of the network need privilege.
"""

import asyncio
import contextlib
import dataclasses
import signal
import socket
import struct
import threading
import time

import numpy as np
import psutil
import pytest
from network_link import Link, require_namespaces
from test_control import closes, frame, preamble, secured_socket
from transfer_workers import (
    FAST,
    LAYOUT,
    MIB,
    Decode,
    DecodeProcess,
    Liar,
    PrefillProcess,
    assert_landed,
    codes_of,
    keys_of,
    landed_groups,
    pair_of,
    push_all,
    transport_config,
    until,
)

from scd_trt.transfer.connection import MAX_CONCURRENT_FRAMES, Address, UnreachableError
from scd_trt.transfer.control import ControlClient
from scd_trt.transfer.messages import Envelope, Expect, Heartbeat, SessionArena, StatusQuery
from scd_trt.transfer.session import Producer, open_transport
from scd_trt.transfer.transport import LoopbackTransport
from scd_trt.transfer.wire import CodeLayout, Notification, new_transfer_id

SECRET = b"0123456789abcdef"
BIG_LAYOUT = CodeLayout(16, (8192,))
BIG = {"layout": BIG_LAYOUT, "arena_bytes": 72 * MIB, "send_buffer_bytes": 72 * MIB}
BIG_KEYS = keys_of("big", 512)  # 64 MiB, written in 16 pieces


@pytest.fixture
def decode():
    decode = Decode("nixl")
    yield decode
    decode.close()


@contextlib.contextmanager
def prefill_here(**changes):
    """A prefill worker in this process, whose decode worker is a process."""
    layout = changes.pop("layout", LAYOUT)
    config = transport_config("nixl", **changes)
    prefill = Producer(
        open_transport(config),
        config=config,
        control=FAST,
        listen="127.0.0.1:0",
        fingerprint="fingerprint of a translator",
        layout=layout,
    )
    try:
        yield prefill
    finally:
        prefill.close()


def lands(decode, prefill, keys):
    """A whole transfer from a prefill process to a decode worker in this one."""
    transfer_id, expected = decode.expect(keys, prefill.address)
    assert expected.num_granted == len(keys), expected
    prefill.push_all(keys)
    assert decode.wait(transfer_id).state == "landed"
    assert_landed(decode, keys)


def lands_there(decode, prefill, keys):
    """A whole transfer from a prefill worker in this process to a decode process."""
    expected = decode.expect(keys, prefill.address)
    assert expected["num_granted"] == len(keys), expected
    push_all(prefill.plan(keys))
    assert decode.wait(expected["transfer_id"])["state"] == "landed"
    decode.assert_landed(keys)


def begin_big(decode, prefill):
    """Start a big push from a prefill process; returns its transfer once the first of its writes is published."""
    transfer_id, _ = decode.expect(BIG_KEYS, prefill.address)
    prefill.plan(BIG_KEYS)
    prefill.tell("send", groups=[0], blocks=[0, len(BIG_KEYS)])
    until(lambda: decode.consumer.match(BIG_KEYS), "the first of 16 writes is published")
    return transfer_id


def assert_fails_within(decode, transfer_id, reason, limit_s):
    begin_s = time.monotonic()
    waited = decode.wait(transfer_id)
    assert (waited.state, waited.reason) == ("failed", reason)
    assert time.monotonic() - begin_s < limit_s


def test_no_fault(decode):
    with PrefillProcess() as prefill:
        lands(decode, prefill, keys_of("a", 8))


# -- kill -9


def test_kill_9_of_the_prefill_side_while_idle(decode):
    with PrefillProcess() as prefill:
        decode.expect(keys_of("a", 2), prefill.address)
        prefill.signal(signal.SIGKILL)
        until(lambda: decode.status().num_sessions == 0, "the loss is noticed", timeout_s=1)
        _, expected = decode.expect(keys_of("b", 2), prefill.address)
        assert expected.reason == "producer_unreachable"
        until(decode.arena_is_whole, "the fence")


def test_kill_9_of_the_prefill_side_mid_write():
    decode = Decode("nixl", store_bytes=128 * MIB, **BIG)
    with PrefillProcess(**BIG) as prefill:
        transfer_id = begin_big(decode, prefill)
        prefill.signal(signal.SIGKILL)
        assert_fails_within(decode, transfer_id, "producer_gone", 1)
        num_landed = decode.consumer.match(BIG_KEYS)
        assert 0 < num_landed < len(BIG_KEYS)
        assert_landed(decode, BIG_KEYS[:num_landed], layout=BIG_LAYOUT)  # what was published is whole
    until(decode.arena_is_whole, "the fence")
    decode.close()


def test_kill_9_of_the_decode_side_while_idle():
    with prefill_here() as prefill:
        with DecodeProcess() as decode:
            decode.expect(keys_of("a", 2), prefill.address)
            decode.signal(signal.SIGKILL)
            until(lambda: prefill.statistics().get("ended_consumer_gone"), "its grant is given up", timeout_s=1)
            assert prefill.plan(keys_of("a", 2)) is None
        with DecodeProcess() as decode:
            lands_there(decode, prefill, keys_of("a", 2))


def test_kill_9_of_the_decode_side_mid_write():
    with prefill_here(**BIG) as prefill, DecodeProcess(store_bytes=128 * MIB, **BIG) as decode:
        decode.expect(BIG_KEYS, prefill.address)
        push = prefill.plan(BIG_KEYS)
        push.send(0, 0, codes_of(0, 0, len(BIG_KEYS), layout=BIG_LAYOUT))
        until(lambda: any(event.name == "written" for event in prefill.trace.events()), "the first write is done")
        decode.signal(signal.SIGKILL)
        until(lambda: push.reason == "consumer_gone", "the push fails", timeout_s=1)
        until(lambda: prefill.buffer.num_free_bytes == BIG["send_buffer_bytes"], "the send buffer is empty")
        # counted by the session's thread, after the push has been told
        until(lambda: prefill.statistics().get("ended_consumer_gone") == 1, "the end is counted")


# -- SIGSTOP


def test_sigstop_of_the_prefill_side(decode):
    with PrefillProcess() as prefill:
        keys = keys_of("a", 8)
        transfer_id, _ = decode.expect(keys, prefill.address)
        prefill.plan(keys)
        prefill.ask("send", groups=[0], blocks=[0, 8])
        prefill.signal(signal.SIGSTOP)
        assert_fails_within(decode, transfer_id, "producer_gone", FAST.peer_timeout_s + 1)
        begin_s = time.monotonic()
        _, expected = decode.expect(keys, prefill.address)
        assert expected.reason == "producer_unreachable"  # the kernel accepts, nobody speaks
        assert time.monotonic() - begin_s < FAST.peer_timeout_s + 1
        until(decode.arena_is_whole, "the fence")
        prefill.signal(signal.SIGCONT)
        until(lambda: decode.expect(keys_of("b", 1), prefill.address)[1].num_granted, "it is accepted again")
        lands(decode, prefill, keys)


def test_sigstop_of_the_decode_side():
    with prefill_here(**BIG) as prefill, DecodeProcess(store_bytes=128 * MIB, **BIG) as decode:
        decode.expect(BIG_KEYS, prefill.address)
        push = prefill.plan(BIG_KEYS)
        decode.signal(signal.SIGSTOP)
        push.send(0, 0, codes_of(0, 0, len(BIG_KEYS), layout=BIG_LAYOUT))
        push.finish()
        until(lambda: push.reason is not None, "it is given up", timeout_s=FAST.peer_timeout_s + 1)
        assert push.reason in {"consumer_gone", "timeout"}  # silence on the control channel, or of a write
        until(lambda: prefill.buffer.num_free_bytes == BIG["send_buffer_bytes"], "the send buffer is empty")
        decode.signal(signal.SIGCONT)
        expected = until(lambda: granted(decode, prefill), "they meet again")  # it may not have seen the end yet
        push = prefill.plan(BIG_KEYS)
        push.send(0, push.blocks.start, codes_of(0, push.blocks.start, len(push.blocks), layout=BIG_LAYOUT))
        push.finish()
        assert decode.wait(expected["transfer_id"])["state"] == "landed"
        decode.assert_landed(BIG_KEYS)


def test_late_write_after_a_timeout():
    """A producer that was given up wakes: its remaining bytes must not reach memory that now belongs to another."""
    decode = Decode("nixl", store_bytes=256 * MIB, **BIG)
    with PrefillProcess(**BIG) as stopped, PrefillProcess(**BIG) as other:
        decode.expect(keys_of("first", 1), stopped.address)
        assert stopped.ask("write_on_your_own", offset=0, num_bytes=MIB) == {"written": True}
        transfer_id = begin_big(decode, stopped)
        stopped.signal(signal.SIGSTOP)
        assert_fails_within(decode, transfer_id, "producer_gone", FAST.peer_timeout_s + 1)
        until(decode.arena_is_whole, "the fence")
        keys = keys_of("other", 512)
        transfer_id, expected = decode.expect(keys, other.address)
        assert expected.num_granted == 512  # in the same memory: the arena has room for one
        arena = decode.consumer._inbox.arena.array
        arena[:] = 0xEE
        stopped.signal(signal.SIGCONT)
        assert not stopped.ask("write_on_your_own", offset=0, num_bytes=MIB)["written"]  # one that heeds no abort
        until(lambda: stopped.ask("reason")["reason"], "it has noticed")
        assert (arena == 0xEE).all()
        assert other.plan(keys)
        other.ask("send", groups=[0], blocks=[0, 512])
        other.ask("finish")
        assert decode.wait(transfer_id).state == "landed"
        assert_landed(decode, keys, layout=BIG_LAYOUT)
    decode.close()


# -- network cut


class Relay:
    """A TCP relay that can fall silent and keep its connections open, as a cut network does."""

    def __init__(self, target):
        self.target, self.is_silent = Address.parse(target), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(5)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _listen(self):
        return await asyncio.start_server(self._pass, "127.0.0.1", 0)

    async def _pass(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection(self.target.host, self.target.port)
        ways = [self._copy(reader, there_writer), self._copy(there_reader, writer)]
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(*ways)
        writer.close()
        there_writer.close()

    async def _copy(self, reader, writer):
        while data := await reader.read(1 << 16):
            if not self.is_silent.is_set():
                writer.write(data)
        if self.is_silent.is_set():
            await asyncio.Event().wait()
        writer.write_eof()

    async def _close(self):
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def close(self):
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


def test_half_open_control_connection(decode):
    """Only the control channel is cut, silently: both sides notice, and what the data path brings later is fenced off."""
    with PrefillProcess() as prefill, contextlib.closing(Relay(prefill.address)) as relay:
        keys = keys_of("a", 8)
        transfer_id, _ = decode.expect(keys, relay.address)
        prefill.plan(keys)
        relay.is_silent.set()
        assert_fails_within(decode, transfer_id, "producer_gone", FAST.peer_timeout_s + 1)
        until(lambda: prefill.ask("reason")["reason"] == "consumer_gone", "the other side notices too")
        until(decode.arena_is_whole, "the fence")
        lands(decode, prefill, keys)


@pytest.mark.privileged
def test_network_cut(tmp_path):
    require_namespaces()
    (tmp_path / "secret").write_bytes(SECRET)
    options = {"control": FAST.model_copy(update={"secret_file": tmp_path / "secret"}), "device": Link.device}
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link())
        link.shape(1.0)  # slow enough to be cut in the middle
        here, there = (
            stack.enter_context(
                kind(namespace=name, listen=f"{address}:0", write_timeout_s=3.0, **BIG, **extra, **options)
            )
            for kind, name, address, extra in zip(
                (PrefillProcess, DecodeProcess),
                link.names,
                link.addresses,
                ({}, {"store_bytes": 256 * MIB}),
                strict=True,
            )
        )
        expected = there.expect(BIG_KEYS, here.address)
        here.plan(BIG_KEYS)
        here.tell("send", groups=[0], blocks=[0, 512])
        until(lambda: there.ask("counters").get("landed"), "the first write has landed")
        link.cut()
        begin_s = time.monotonic()
        assert there.wait(expected["transfer_id"])["reason"] == "producer_gone"
        assert time.monotonic() - begin_s < FAST.peer_timeout_s + 1
        until(lambda: there.ask("counters").get("fences"), "the fence")
        until(lambda: here.ask("reason")["reason"], "the other side notices too")
        link.mend()
        expected = until(lambda: granted(there, here), "they meet again", timeout_s=20)
        first, stop = here.plan(BIG_KEYS)
        here.ask("send", groups=[0], blocks=[first, stop - first])
        here.ask("finish")
        assert there.wait(expected["transfer_id"])["state"] == "landed"
        there.assert_landed(BIG_KEYS)


def granted(decode, prefill):
    expected = decode.expect(BIG_KEYS, prefill.address)
    return expected if expected["num_granted"] else None


# -- restart under the same address


def test_restart_of_the_prefill_side_under_the_same_address(decode):
    keys = keys_of("a", 8)
    with PrefillProcess() as prefill:
        transfer_id, _ = decode.expect(keys, prefill.address)
        prefill.plan(keys)
        prefill.ask("send", groups=[0, 1], blocks=[0, 8])
        until(lambda: landed_groups(decode, transfer_id) == 2, "two groups have landed")
        prefill.signal(signal.SIGKILL)
        assert_fails_within(decode, transfer_id, "producer_gone", 1)
    assert decode.consumer.match(keys) == 0
    with PrefillProcess(listen=prefill.address) as again:
        lands(decode, again, keys)
    until(decode.arena_is_whole, "everything was fenced")


def test_restart_of_the_decode_side_under_the_same_address():
    keys = keys_of("a", 8)
    with prefill_here() as prefill:
        with DecodeProcess() as decode:
            for _ in range(2):  # one is under way, the other must not be taken for a grant of the successor
                decode.expect(keys, prefill.address)
            push = prefill.plan(keys)
            push.send(0, 0, codes_of(0, 0, 8))
            decode.signal(signal.SIGKILL)
            decode.process.wait(5)
        with DecodeProcess(listen=decode.address) as again:
            push_all(push)  # for one that is gone: nothing of it may reach its successor
            lands_there(again, prefill, keys)
            found = again.ask("counters")
            assert found["landed"] == LAYOUT.num_groups
            assert not [name for name in found if name.startswith("ignored_")]


def test_names_are_never_used_twice():
    """A peer may still hold the metadata of a dead worker: its successor must not answer to the same name."""
    names = []

    class Spy(LoopbackTransport):
        def open_receiver(self, name, arena):
            names.append(name)
            return super().open_receiver(name, arena)

        def open_sender(self, name, source, remote):
            names.append(name)
            return super().open_sender(name, source, remote)

    for _ in range(2):
        with pair_of("loopback", transport=Spy()) as (decode, prefill):
            decode.expect(keys_of("a", 2), prefill.address)
    assert len(set(names)) == len(names) == 4


# -- truncated, garbled, forged


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A prefill process with a secret."""
    file = tmp_path_factory.mktemp("secrets") / "secret"
    file.write_bytes(SECRET)
    with PrefillProcess(control=FAST.model_copy(update={"secret_file": file})) as prefill:
        yield prefill


@contextlib.contextmanager
def counted(worker, name, number=1):
    """What happens inside makes a worker process count that."""
    before = worker.ask("counters").get(name, 0)
    yield
    until(lambda: worker.ask("counters").get(name, 0) == before + number, f"{name} grows by {number}")


def connected(worker):
    address = Address.parse(worker.address)
    return socket.create_connection((address.host, address.port), timeout=5)


@pytest.mark.parametrize("data", [b"", preamble(secured=1)[:20], preamble(secured=1), preamble(secured=1) + b"half"])
def test_truncated_frame_before_the_proof(secured, data):
    with counted(secured, "control_refused_handshake"), connected(secured) as peer:
        peer.sendall(data)


def test_truncated_frame(secured):
    """Half a frame, then silence: the connection ends with the peer timeout, and holds nobody up meanwhile."""
    peer, key = secured_socket(secured, SECRET)
    with peer:
        peer.sendall(frame(key, 0, Envelope(0, 0, Heartbeat()))[:-5])
        begin_s = time.monotonic()
        closes(peer)
        assert time.monotonic() - begin_s < FAST.peer_timeout_s + 1
    assert secured.ask("counters").get("granted", 0) == 0


def body(**changes):
    return Envelope(1, 0, Expect(**({"transfer_id": "0" * 32, "block_keys": [b"k" * 16], "producer": "a:1"} | changes)))


def edited_length(data):
    return struct.pack(">I", struct.unpack(">I", data[:4])[0] - 1) + data[4:]


def edited_address(data):
    return data.replace(b"a:1", b"b:1")


def edited_arena(data):
    return data.replace(struct.pack(">I", 4096 << 8), struct.pack(">I", 8192 << 8))


ARENA = Envelope(1, 0, SessionArena(b"s" * 16, b"metadata", 4096 << 8, 1 << 20))


@pytest.mark.parametrize(
    ("envelope", "edit"),
    [
        (body(), lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        (body(), edited_length),
        (body(), edited_address),
        (ARENA, edited_arena),
    ],
    ids=["mac", "length", "address", "memory address"],
)
def test_garbled_frame(secured, envelope, edit):
    peer, key = secured_socket(secured, SECRET)
    good = frame(key, 0, envelope)
    assert edit(good) != good
    with peer, counted(secured, "control_forged_frames"):
        peer.sendall(edit(good) + bytes(8))


def test_replayed_frame(secured):
    peer, key = secured_socket(secured, SECRET)
    good, answer = frame(key, 0, Envelope(1, 0, StatusQuery())), b""
    with peer:
        peer.sendall(good)
        while b"fingerprint" not in answer:
            answer += (chunk := peer.recv(4096))
            assert chunk, "the frame itself was refused"
        with counted(secured, "control_forged_frames"):
            peer.sendall(good)


def test_frame_replayed_into_another_connection(secured):
    first, key = secured_socket(secured, SECRET)
    second, _ = secured_socket(secured, SECRET)
    with first, second, counted(secured, "control_forged_frames"):
        second.sendall(frame(key, 0, Envelope(0, 0, Heartbeat())))


def test_wrong_secret(secured):
    with counted(secured, "control_refused_secret"), connected(secured) as peer:
        peer.sendall(preamble(secured=1) + b"a proof of quite another secret!")
        assert len(closes(peer)) == 40  # the server proves nothing
    with counted(secured, "control_refused_secret"), connected(secured) as peer:
        peer.sendall(preamble(secured=0))
        closes(peer)


def test_malformed_frame_of_a_peer_that_knows_the_secret(secured):
    peer, key = secured_socket(secured, SECRET)
    with peer, counted(secured, "control_malformed_frames"):
        peer.sendall(frame(key, 0, body(transfer_id="no transfer")))


@pytest.fixture(scope="module")
def misled():
    """A decode process that is lied to by one after the other."""
    with DecodeProcess() as decode:
        yield decode


@contextlib.contextmanager
def lying(decode):
    """A liar in this process, and a grant that it has from a decode process; at the end the truth still lands."""
    keys = keys_of(new_transfer_id(), 2)
    with prefill_here() as prefill:
        liar = Liar(prefill, prefill._transport)
        expected = decode.expect(keys, prefill.address)
        (grant,) = liar.grants
        payload = codes_of(0, 0, 2).ravel()
        note = Notification(liar.arena.session, expected["transfer_id"], 0, 0, 2, grant.generation, len(payload))
        yield liar, grant, note.sealed(payload), payload
        push_all(prefill.plan(keys))
        assert decode.wait(expected["transfer_id"])["state"] == "landed"
        decode.assert_landed(keys)


@pytest.mark.parametrize("num_bytes", [1, 40, 79])
def test_truncated_notification(num_bytes, misled):
    with counted(misled, "ignored_malformed"), lying(misled) as (liar, grant, note, payload):
        liar.write(note.pack()[:num_bytes], payload, grant.offset)


@pytest.mark.parametrize(
    ("offset", "counter"),
    [
        (0, "malformed"),
        (4, "malformed"),
        (7, "out_of_bounds"),
        (8, "other_session"),
        (24, "unexpected"),
        (42, "out_of_bounds"),
        (46, "out_of_bounds"),
        (48, "stale_generation"),
        (56, "digest_mismatch"),
        (70, "digest_mismatch"),
    ],
    ids=[
        "magic",
        "version",
        "group",
        "session",
        "transfer",
        "first_block",
        "num_blocks",
        "generation",
        "num_bytes",
        "digest",
    ],
)
def test_garbled_notification(offset, counter, misled):
    with counted(misled, f"ignored_{counter}"), lying(misled) as (liar, grant, note, payload):
        data = bytearray(note.pack())
        data[offset] ^= 0x80
        liar.write(bytes(data), payload, grant.offset)


def test_garbled_payload(misled):
    with counted(misled, "ignored_digest_mismatch"), lying(misled) as (liar, grant, note, payload):
        liar.write(note, payload ^ np.uint8(1), grant.offset)


@pytest.mark.parametrize("name", ["its own", "the other's"])
def test_notification_for_a_transfer_of_another_session(name, misled):
    with counted(misled, "ignored_other_session"), lying(misled) as (_, grant, note, payload), lying(misled) as others:
        liar = others[0]
        session = liar.arena.session if name == "its own" else note.session
        liar.write(dataclasses.replace(note, session=session).sealed(payload), payload, grant.offset)


# -- wrong version, wrong fingerprint


def test_wrong_version_of_the_control_protocol(decode):
    with PrefillProcess(versions={"control": 2}) as prefill, counted(prefill, "control_refused_version"):
        begin_s = time.monotonic()
        _, expected = decode.expect(keys_of("a", 2), prefill.address)
        assert expected.reason == "version_mismatch"
        assert "version 1 here, 2 there" in expected.text
        assert time.monotonic() - begin_s < 1


def test_wrong_version_of_the_notification():
    decode = Decode("nixl", control=FAST.model_copy(update={"lease_s": 1.0}))
    with PrefillProcess(versions={"wire": 2}) as prefill:
        transfer_id, _ = decode.expect(keys_of("a", 2), prefill.address)
        prefill.push_all(keys_of("a", 2))
        assert_fails_within(decode, transfer_id, "timeout", 3)
        assert decode.counters()["ignored_malformed"] == 3
        until(decode.arena_is_whole, "the extent is back")
    decode.close()


def test_wrong_fingerprint(decode):
    with PrefillProcess(fingerprint="another") as prefill:
        _, expected = decode.expect(keys_of("a", 2), prefill.address)
        assert expected.reason == "fingerprint_mismatch"
        assert "another" in expected.text
        assert decode.status().num_sessions == 0


# -- no credit, no room


def test_a_peer_that_stops_granting():
    """The decode side takes no more part: prefill is not held up, the router learns it, earlier grants run out."""
    with prefill_here() as prefill, DecodeProcess() as decode:
        lands_there(decode, prefill, keys_of("a", 2))
        decode.expect(keys_of("b", 2), prefill.address)
        decode.signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        decode.tell("expect", keys=[key.hex() for key in keys_of("c", 2)], producer=prefill.address)
        assert prefill.plan(keys_of("c", 2)) is None
        push_all(prefill.plan(keys_of("b", 2)))  # neither `send` nor `finish` waits for the peer
        assert time.monotonic() - begin_s < 0.5
        with pytest.raises(UnreachableError, match=r"cannot be reached|no sign of life"):
            asyncio.run(ControlClient(decode.address, FAST).status())
        until(lambda: prefill.buffer.num_free_bytes == MIB, "what was granted is over")


def test_a_producer_that_does_not_take_the_grant(decode):
    with PrefillProcess() as prefill:
        decode.expect(keys_of("a", 2), prefill.address)
        prefill.signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        _, expected = decode.expect(keys_of("b", 2), prefill.address)
        assert expected.reason in {"producer_gone", "producer_unreachable"}
        assert time.monotonic() - begin_s < FAST.peer_timeout_s + 1
        until(decode.arena_is_whole, "the fence")


def test_arena_full(decode):
    with PrefillProcess() as prefill:
        full = keys_of("a", MIB // LAYOUT.block_bytes - 1)
        decode.expect(full, prefill.address)
        begin_s = time.monotonic()
        _, expected = decode.expect(keys_of("b", 8), prefill.address)
        assert (expected.num_granted, expected.reason) == (0, "arena_full")
        assert time.monotonic() - begin_s < 1
        assert prefill.plan(keys_of("b", 8)) is None
        prefill.push_all(full)
        until(decode.arena_is_whole, "there is room again")
        lands(decode, prefill, keys_of("b", 8))


def test_store_full():
    decode = Decode("nixl", store_bytes=4 * LAYOUT.block_bytes)
    with PrefillProcess() as prefill:
        _, expected = decode.expect(keys_of("too long", 5), prefill.address)
        assert (expected.num_granted, expected.reason) == (0, "store_full")
        lands(decode, prefill, keys_of("a", 4))
        with decode.consumer.pin(keys_of("a", 4)):
            transfer_id, _ = decode.expect(keys_of("b", 2), prefill.address)
            prefill.push_all(keys_of("b", 2))
            assert_fails_within(decode, transfer_id, "store_full", 1)
        until(decode.arena_is_whole, "the extent is back")
        lands(decode, prefill, keys_of("b", 2))
    decode.close()


def test_1000_cancels_in_a_burst():
    patient = FAST.model_copy(update={"peer_timeout_s": 15.0})  # a busy machine takes seconds for a thousand
    decode = Decode("nixl", arena_bytes=4 * MIB, control=patient)
    with PrefillProcess(control=patient) as prefill:
        prompts = [keys_of(f"prompt {index}", 1) for index in range(1000)]
        transfers = [decode.expect(keys, prefill.address)[0] for keys in prompts]
        for keys in prompts[::50]:  # some are under way
            prefill.plan(keys)
            prefill.ask("send", groups=[0], blocks=[0, 1])
        with counted(prefill, "ended", 1000):
            assert {waited.reason for waited in decode.cancel_all(transfers)} == {"aborted"}
        until(decode.arena_is_whole, "all extents are back")
        assert decode.counters().get("fences", 0) == 0  # no session had to end for it
        lands(decode, prefill, keys_of("a", 4))
    decode.close()


# -- drain


def test_sigterm_of_the_prefill_side_finishes_what_is_sent():
    decode = Decode("nixl", store_bytes=128 * MIB, **BIG)
    with PrefillProcess(**BIG) as prefill:
        transfer_id, _ = decode.expect(BIG_KEYS, prefill.address)
        prefill.plan(BIG_KEYS)
        prefill.ask("send", groups=[0], blocks=[0, 512])
        prefill.ask("finish")
        prefill.signal(signal.SIGTERM)
        assert decode.wait(transfer_id).state == "landed"
        assert prefill.process.wait(5) == 0
        assert_landed(decode, BIG_KEYS, layout=BIG_LAYOUT)
    until(decode.arena_is_whole, "the fence")
    decode.close()


def test_sigterm_of_the_decode_side():
    with prefill_here() as prefill, DecodeProcess() as decode:
        decode.expect(keys_of("a", 2), prefill.address)
        push = prefill.plan(keys_of("a", 2))
        decode.signal(signal.SIGTERM)
        assert decode.process.wait(5) == 0
        until(lambda: push.reason == "consumer_gone", "the push ends")


# -- floods


def flood(worker, data, num_connections):
    peers = []
    for _ in range(num_connections):
        peers.append(connected(worker))
        with contextlib.suppress(ConnectionError):
            peers[-1].sendall(data)
    return peers


def test_flood_of_connections(secured):
    """Strangers fill neither memory nor the places of those who were here before, and leave after the peer timeout."""
    friend, key = secured_socket(secured, SECRET)
    process = psutil.Process(secured.process.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        stack.enter_context(friend)
        for peer in flood(secured, preamble(secured=1) + bytes(20), 600):
            stack.enter_context(peer)
        friend.sendall(frame(key, 0, Envelope(0, 0, Heartbeat())))
        assert friend.recv(1)
        assert secured.ask("counters")["control_refused_full"] > 100
        assert process.memory_info().rss - before < 32 * MIB
        until(lambda: process.num_fds() < 64, "strangers time out")
    until(lambda: secured_socket(secured, SECRET)[0].close() is None, "a friend gets in again")


@contextlib.contextmanager
def flooded(producer, *, store_bytes):
    """A decode process, after 100 of the largest frames that are allowed, as fast as they go; yields its growth in bytes."""
    control = FAST.model_copy(update={"max_frame_bytes": 1 << 20})
    with DecodeProcess(control=control, store_bytes=store_bytes) as decode, connected(decode) as peer:
        process = psutil.Process(decode.process.pid)
        before = process.memory_info().rss
        keys, peak = [b"k" * 16] * 50_000, 0
        peer.sendall(preamble())
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                peer.sendall(unsealed(Envelope(1, 0, Expect(new_transfer_id(), keys, producer))))
                peak = max(peak, process.memory_info().rss - before)
        yield decode, peak
        assert decode.expect(keys_of("a", 1), "127.0.0.1:1")["reason"] == "producer_unreachable"


def test_flood_of_frames():
    """Requests that cannot be answered yet: few are held, then the connection ends."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        flooded(f"127.0.0.1:{mute.getsockname()[1]}", store_bytes=128 * MIB) as (decode, peak),
    ):
        until(lambda: decode.ask("counters").get("control_malformed_frames"), "the connection is ended")
        assert decode.ask("counters")["expected"] <= MAX_CONCURRENT_FRAMES + 1
        assert peak < 160 * MIB


def test_flood_of_prompts():
    """Requests that are answered at once: all are, and few are remembered."""
    with flooded("127.0.0.1:1", store_bytes=16 * MIB) as (decode, peak):
        until(lambda: decode.ask("counters").get("failed_store_full") == 100, "all are answered")
        assert peak < 160 * MIB


def unsealed(envelope):
    return frame(b"", 0, envelope)[:-32]
