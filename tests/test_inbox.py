"""Inbox: what was checked is what is published, whatever a peer writes into its extent, and whatever it says about it."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scd_trt.config import StoreConfig
from scd_trt.transfer.extents import ExtentAllocator
from scd_trt.transfer.inbox import Inbox, Incoming
from scd_trt.transfer.states import Landing
from scd_trt.transfer.store import CodeStore
from scd_trt.transfer.trace import TraceLog
from scd_trt.transfer.transport import Buffer, LoopbackHub, LoopbackReceiver
from scd_trt.transfer.wire import CodeLayout, Notification, new_transfer_id

LAYOUT = CodeLayout(4, (16,))
SESSION = b"s" * 16


class ScribblingLog(TraceLog):
    """Overwrites the arena at the moment between the digest check and the publication."""

    def __init__(self, arena):
        super().__init__()
        self.arena = arena

    def record(self, name, transfer_id, **details):
        super().record(name, transfer_id, **details)
        if name == "landed":
            self.arena.array[:] = 0xEE


def test_bytes_that_change_after_the_check_are_not_published():
    arena, store, changed = Buffer(4096), CodeStore(StoreConfig()), []
    inbox = Inbox(arena, layout=LAYOUT, store=store, trace=ScribblingLog(arena), on_change=changed.append)
    receiver = LoopbackReceiver(LoopbackHub(), "receiver", arena)
    key, payload = b"k" * 16, np.arange(LAYOUT.block_bytes, dtype=np.uint8)
    landing = Landing(num_groups=1, num_blocks=1, granted_s=0)
    incoming = Incoming(new_transfer_id(), [key], num_stored=0, landing=landing)
    extent = ExtentAllocator(arena.num_bytes).allocate(len(payload))
    inbox.open(SESSION, receiver)
    inbox.add(incoming, extent, session=SESSION, num_blocks=1)
    arena.array[extent.span] = payload
    note = Notification(SESSION, incoming.transfer_id, 0, 0, 1, extent.generation, len(payload)).sealed(payload)
    receiver.notifications.append(note.pack())
    inbox.start()
    incoming_is_done = inbox_settled(inbox, changed)
    assert incoming_is_done
    assert (arena.array == 0xEE).all()
    with store.pinned([key]) as (published,):
        assert bytes(published) == payload.tobytes()


def inbox_settled(inbox, changed):
    """Stop the inbox; it finishes the notifications that it has drained."""
    for _ in range(1000):
        if changed:
            break
        inbox.join(0.01)
    inbox.stop()
    inbox.join(5)
    return bool(changed)


# -- fuzzing: notifications of one transfer of three blocks and two groups, cut, changed, repeated, out of order

PAIR_LAYOUT = CodeLayout(2, (4, 6))
NUM_BLOCKS = 3
honest = st.tuples(st.just("honest"), st.integers(0, 1), st.integers(0, 2), st.integers(1, 3))
steps = st.one_of(
    honest,
    st.tuples(st.just("edited"), honest, st.integers(0, 79), st.integers(1, 255)),
    st.tuples(st.just("corrupt"), honest, st.integers(0, 2**10), st.integers(1, 255)),
    st.tuples(st.just("garbage"), st.binary(max_size=100)),
)


class Landings:
    """An inbox without its thread, one granted transfer, and a peer that says anything."""

    def __init__(self):
        self.arena, self.store = Buffer(4096), CodeStore(StoreConfig())
        self.inbox = Inbox(
            self.arena, layout=PAIR_LAYOUT, store=self.store, trace=TraceLog(), on_change=lambda incoming: None
        )
        self.keys = [bytes([block]) * 16 for block in range(NUM_BLOCKS)]
        landing = Landing(num_groups=2, num_blocks=NUM_BLOCKS, granted_s=0)
        self.incoming = Incoming("0" * 32, self.keys, num_stored=0, landing=landing)
        self.extent = ExtentAllocator(4096).allocate(PAIR_LAYOUT.block_bytes * NUM_BLOCKS)
        self.inbox.add(self.incoming, self.extent, session=SESSION, num_blocks=NUM_BLOCKS)
        self.receiver = LoopbackReceiver(LoopbackHub(), "receiver", self.arena)
        self.inbox.open(SESSION, self.receiver)
        self.port = self.inbox._ports[SESSION]

    def say(self, data):
        self.receiver.notifications.append(data)
        self.inbox._drain(self.port)

    def write(self, group, first_block, num_blocks):
        """Put true codes into the arena; returns where, and their notification."""
        num_blocks = min(num_blocks, NUM_BLOCKS - first_block)
        payload = np.concatenate([truth(group, first_block + block) for block in range(num_blocks)])
        span = PAIR_LAYOUT.span(group, first_block, num_blocks, extent_blocks=NUM_BLOCKS)
        self.arena.array[self.extent.offset + span.start : self.extent.offset + span.stop] = payload
        note = Notification(SESSION, "0" * 32, group, first_block, num_blocks, self.extent.generation, len(payload))
        return span, note.sealed(payload).pack()

    def take(self, step):
        match step:
            case ("honest", *where):
                self.say(self.write(*where)[1])
            case ("edited", (_, *where), offset, change):
                data = bytearray(self.write(*where)[1])
                data[offset] ^= change
                self.say(bytes(data))
            case ("corrupt", (_, *where), offset, change):
                span, data = self.write(*where)
                self.arena.array[self.extent.offset + span.start + offset % (span.stop - span.start)] ^= change
                self.say(data)
            case ("garbage", data):
                self.say(data)


def truth(group, block):
    """The codes of one block in one group."""
    seed = hashlib.blake2b(bytes([group, block]), digest_size=PAIR_LAYOUT.group_bytes(group)).digest()
    return np.frombuffer(seed, dtype=np.uint8)


@given(st.lists(steps, max_size=12))
def test_only_the_truth_is_published_whatever_is_said(sequence):
    landings = Landings()
    for step in sequence:
        landings.take(step)
    found = landings.inbox.statistics()
    assert sum(found.values()) == len(sequence)
    for block, key in enumerate(landings.keys):
        with landings.store.pinned([key]) as payloads:
            for payload in payloads:
                assert bytes(payload) == truth(0, block).tobytes() + truth(1, block).tobytes()
    assert len(landings.incoming.entries) <= NUM_BLOCKS
    for group in range(2):  # and whatever was said, the truth still lands
        for block in range(NUM_BLOCKS):
            landings.take(("honest", group, block, 1))
    assert landings.incoming.landing.state == "landed"
    assert landings.store.match(landings.keys) == NUM_BLOCKS
