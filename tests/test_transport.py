"""One contract for every transport: run over the loopback and over NIXL (UCX on tcp), both ends in this process."""

import itertools
import os
import time

import numpy as np
import pytest

from scd_trt.config import TransportConfig
from scd_trt.transfer.nixl import NixlTransport, ucx_environment
from scd_trt.transfer.transport import (
    BoundsError,
    Buffer,
    LibraryError,
    LoopbackHub,
    LoopbackTransport,
    PeerLostError,
    RemoteArena,
    TransportError,
)

SIZE = 1 << 20
PATIENCE_S = 10.0
names = (f"contract-{os.getpid()}-{index}" for index in itertools.count())


@pytest.fixture(params=["loopback", "nixl"])
def transport(request):
    return make_transport(request.param)


def make_transport(backend):
    if backend == "loopback":
        return LoopbackTransport(LoopbackHub())
    return NixlTransport(TransportConfig(lane="tcp", device="lo"))


class Pair:
    """A connected sender and receiver."""

    def __init__(self, transport):
        self.arena, self.source = Buffer(SIZE), Buffer(SIZE)
        self.receiver = transport.open_receiver(next(names), self.arena)
        self.remote = RemoteArena(self.receiver.metadata, self.arena.address, SIZE)
        self.sender = transport.open_sender(next(names), self.source, self.remote)

    def close(self):
        self.sender.destroy()
        self.receiver.destroy()

    def write(self, local, remote, num_bytes, notification=b"note"):
        return self.sender.write(local, remote, num_bytes, notification=notification)

    def finish(self, handle):
        until(lambda: self.sender.poll(handle), "the write is done")
        self.sender.release(handle)

    def notes(self, count):
        found = []
        until(lambda: found.extend(self.receiver.drain()) or len(found) >= count, "the notifications are here")
        return found


@pytest.fixture
def pair(transport):
    pair = Pair(transport)
    yield pair
    pair.close()


def until(condition, what):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S} s until {what}"
        time.sleep(1e-4)  # polling is what the interface offers


def test_bytes_and_notification_arrive(pair):
    pair.source.array[100:300] = np.arange(200, dtype=np.uint8)
    pair.finish(pair.write(100, 5000, 200, bytes(range(80))))
    assert pair.notes(1) == [bytes(range(80))]
    assert (pair.arena.array[5000:5200] == np.arange(200, dtype=np.uint8)).all()
    assert not pair.arena.array[:5000].any()
    assert not pair.arena.array[5200:].any()


def test_notifications_follow_their_data(pair):
    pair.source.array[:] = 7
    handles = [pair.write(index << 16, index << 16, 1 << 16, bytes([index])) for index in range(8)]
    seen = []

    def is_complete():
        handles[:] = [handle for handle in handles if not pair.sender.poll(handle)]
        for note in pair.receiver.drain():
            seen.append(note)
            assert (pair.arena.array[note[0] << 16 : (note[0] + 1) << 16] == 7).all()
        return len(seen) == 8 and not handles

    until(is_complete, "all writes are done and told")
    assert sorted(seen) == [bytes([index]) for index in range(8)]


def test_drain_gives_each_notification_once(pair):
    pair.finish(pair.write(0, 0, 10))
    assert pair.notes(1) == [b"note"]
    assert pair.receiver.drain() == []


@pytest.mark.parametrize(
    ("local", "remote", "num_bytes"),
    [(SIZE - 9, 0, 10), (0, SIZE - 9, 10), (-1, 0, 10), (0, -1, 10), (0, 0, 0), (0, 0, SIZE + 1)],
)
def test_ranges_outside_of_registered_memory_are_refused(pair, local, remote, num_bytes):
    with pytest.raises(BoundsError, match="outside"):
        pair.write(local, remote, num_bytes)


def test_a_destroyed_receiver_is_reported_and_gets_no_more_bytes(pair):
    pair.finish(pair.write(0, 0, 10))
    pair.receiver.destroy()
    pair.receiver.destroy()
    assert pair.receiver.drain() == []
    before = pair.arena.array.copy()
    pair.source.array[:] = 9

    def is_lost():
        try:
            handle = pair.write(0, 0, SIZE)
            until(lambda: pair.sender.poll(handle), "a write to nobody ends")
        except TransportError:
            return True
        return False

    until(is_lost, "the loss is noticed")
    pair.sender.destroy()
    assert (pair.arena.array == before).all()


def test_a_destroyed_sender_sends_nothing(pair):
    pair.sender.destroy()
    pair.sender.destroy()
    with pytest.raises(TransportError):
        pair.sender.poll(1)


def test_metadata_of_nobody_is_refused(transport):
    with pytest.raises(TransportError):
        transport.open_sender(next(names), Buffer(64), RemoteArena(b"nobody", 0, 64))


def test_many_sessions_share_one_arena(transport):
    arena, source = Buffer(SIZE), Buffer(SIZE)
    receivers = [transport.open_receiver(next(names), arena) for _ in range(3)]
    remotes = [RemoteArena(receiver.metadata, arena.address, SIZE) for receiver in receivers]
    senders = [transport.open_sender(next(names), source, remote) for remote in remotes]
    receivers[1].destroy()  # the fence of one session leaves the others alone
    source.array[:] = 5
    for index in (0, 2):
        handle = senders[index].write(0, index * 100, 100, notification=b"x")
        until(lambda sender=senders[index], handle=handle: sender.poll(handle), "the write is done")
        senders[index].release(handle)
        until(receivers[index].drain, "the notification is here")
    assert arena.array[:300].tolist() == [5] * 100 + [0] * 100 + [5] * 100
    for end in senders + receivers:
        end.destroy()


def test_loopback_notifies_only_when_polled():
    pair = Pair(LoopbackTransport(LoopbackHub()))
    handle = pair.write(0, 0, 10)
    assert pair.receiver.drain() == []
    assert pair.sender.poll(handle)
    assert pair.receiver.drain() == [b"note"]


def test_loopback_is_silent_while_held_and_lands_orphans_late():
    hub = LoopbackHub(held=True)
    pair = Pair(LoopbackTransport(hub))
    pair.source.array[:] = 3
    handle = pair.write(0, 0, 10)
    assert not pair.sender.poll(handle)
    pair.sender.release(handle)  # there is no abort
    with pytest.raises(BoundsError, match="released"):
        pair.sender.poll(handle)
    hub.land_orphans()
    assert pair.arena.array[:10].tolist() == [3] * 10
    assert pair.receiver.drain() == []


def test_loopback_copies_late_so_early_reuse_is_found_out():
    pair = Pair(LoopbackTransport(LoopbackHub()))
    handle = pair.write(0, 0, 10)
    pair.source.array[:10] = 8
    assert pair.sender.poll(handle)
    assert pair.arena.array[0] == 8


def test_loopback_receiver_of_another_hub_is_unknown():
    first, second = LoopbackTransport(LoopbackHub()), LoopbackTransport(LoopbackHub())
    receiver = first.open_receiver(next(names), Buffer(64))
    with pytest.raises(PeerLostError):
        second.open_sender(next(names), Buffer(64), RemoteArena(receiver.metadata, 0, 64))


def test_nixl_lane_is_chosen_once_per_process():
    make_transport("nixl")
    with pytest.raises(LibraryError, match="once per process"):
        NixlTransport(TransportConfig(lane="shm"))


def test_nixl_reports_version_and_lane():
    transport = make_transport("nixl")
    assert transport.version.startswith("nixl")
    assert transport.lane == "ucx tcp on lo"


def test_environment_of_each_lane():
    tcp = ucx_environment(TransportConfig(lane="tcp", device="eth0"), {})
    assert tcp["UCX_TLS"] == "tcp"
    assert tcp["UCX_NET_DEVICES"] == "eth0"
    assert tcp["UCX_TCP_USER_TIMEOUT"] == "3s"
    shm = ucx_environment(TransportConfig(lane="shm"), {})
    assert (shm["UCX_TLS"], shm["UCX_MM_ERROR_HANDLING"]) == ("shm", "y")
    assert "UCX_TCP_KEEPIDLE" not in shm
    assert "UCX_TLS" not in ucx_environment(TransportConfig(lane="auto"), {})


def test_environment_of_the_user_stays():
    assert "UCX_TCP_KEEPCNT" not in ucx_environment(TransportConfig(), {"UCX_TCP_KEEPCNT": "9"})
    assert "UCX_TLS" not in ucx_environment(TransportConfig(lane="tcp"), {"UCX_TLS": "tcp"})
    with pytest.raises(LibraryError, match="UCX_TLS=rc in the environment contradicts 'tcp'"):
        ucx_environment(TransportConfig(lane="tcp"), {"UCX_TLS": "rc"})


def test_writes_are_cheap_to_poll_and_the_progress_thread_rests():
    transport = make_transport("nixl")
    pair = Pair(transport)
    pair.finish(pair.write(0, 0, 64))
    begin_cpu_s, begin_s = time.process_time(), time.monotonic()
    time.sleep(1.0)  # the measure is what an idle second costs
    share = (time.process_time() - begin_cpu_s) / (time.monotonic() - begin_s)
    pair.close()
    assert share < 0.25  # two spinning progress threads would take 0.5 to 1; resting ones take 0.04
